"""Which rows of a value are asked for: the lattice that narrow_rows works on.

A value has one axis of T rows. A demand is nothing, some rows, or all of them:

    None < Demand(Range | Index | PerBatch) < All

Two demands join into one that covers both, which is All unless they are alike.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    statically_known_true,
)

from kvtailor.passes.graph import END, aten, emit, same, shape, sym_arg, val

Size: TypeAlias = "int | torch.SymInt"


@dataclass(frozen=True)
class Range:
    """Rows lo <= t < hi."""

    lo: Size
    hi: Size


@dataclass(frozen=True)
class Index:
    """The rows a 1-D integer tensor names, in its order; negative ones count from the end."""

    rows: fx.Node


@dataclass(frozen=True)
class PerBatch:
    """One row for each batch entry, from an integer tensor ``[B]``."""

    rows: fx.Node


@dataclass(frozen=True)
class Demand:
    """Rows along axis ``dim``, whose size is ``pre * length`` (rows merged with outer axes).

    batch: the axis of the batch, which PerBatch needs where ``pre`` is 1. cause: who needs what
    was made of the rows. rank: axes are counted in a value of so many, to which the tensor at
    hand is broadcast from the right (PerBatch rows of a tensor that lacks the batch axis).
    """

    rows: Range | Index | PerBatch
    dim: int
    length: Size
    pre: Size = 1
    batch: int = 0
    cause: str = ""
    rank: int | None = None

    def at(self, dim: int, batch: int | None = None) -> Demand:
        return replace(self, dim=dim, batch=self.batch if batch is None else batch)

    def without(self, axis: int) -> Demand:
        """The same rows of a value that lacks this axis of no rows."""
        batch = 0 if self.batch == axis else self.batch - (self.batch > axis)
        return self.at(self.dim - (self.dim > axis), batch)

    def beside(self, axis: int) -> Demand:
        """The same rows of a value with one axis more."""
        return self.at(self.dim + (self.dim >= axis), self.batch + (self.batch >= axis))

    @property
    def by_batch(self) -> bool:
        """Whether the batch axis is an axis of its own that the rows depend on."""
        return isinstance(self.rows, PerBatch) and same(self.pre, 1)

    @property
    def fixed(self) -> set[int]:
        """Axes an op may not work along."""
        return {self.dim, self.batch} if self.by_batch else {self.dim}


@dataclass(frozen=True)
class All:
    """Every row, and the reason why."""

    cause: str


Need: TypeAlias = "Demand | All"
WHOLE = All("it has no rows")


def least(a: Size, b: Size) -> Size | None:
    """The smaller one, None when that depends on symbols."""
    if statically_known_true(a <= b):
        return a
    return b if statically_known_true(b <= a) else None


def greatest(a: Size, b: Size) -> Size | None:
    if statically_known_true(a >= b):
        return a
    return b if statically_known_true(b >= a) else None


def guarded_at_least(a: Size, b: Size) -> bool | None:
    """Whether a >= b, guarding on the hint when symbols leave it open; None without a hint."""
    if statically_known_true(a >= b):
        return True
    if statically_known_true(a < b):
        return False
    if any(isinstance(s, torch.SymInt) and not s.node.has_hint() for s in (a, b)):
        return None
    try:
        return bool(a >= b)
    except GuardOnDataDependentSymNode:
        return None


def demand_range(lo: Size, hi: Size, dim: int, length: Size, cause: str) -> Need:
    """Rows lo..hi as a need; All when they are every row."""
    if same(lo, 0) and same(hi, length):
        return All(cause)
    return Demand(Range(lo, hi), dim, length, cause=cause)


def join(a: Need | None, b: Need) -> Need:
    """The least need known to cover both."""
    if a is None or isinstance(b, All):
        return b
    if isinstance(a, All):
        return a
    together = All("its users together need every row")
    if a.cause and a.cause == b.cause:
        together = All(a.cause)
    if not same_axis(a, b):
        return together
    if isinstance(a.rows, Range) and isinstance(b.rows, Range):
        lo, hi = least(a.rows.lo, b.rows.lo), greatest(a.rows.hi, b.rows.hi)
        if lo is None or hi is None:
            return together
        if same(lo, 0) and same(hi, a.length):
            return together
        return replace(a, rows=Range(lo, hi))
    if same_rows(a.rows, b.rows) and a.batch == b.batch:
        return a
    return together


def same_rows(a: Range | Index | PerBatch, b: Range | Index | PerBatch) -> bool:
    if isinstance(a, Range) and isinstance(b, Range):
        return same(a.lo, b.lo) and same(a.hi, b.hi)
    return type(a) is type(b) and a == b


def same_need(a: Need, b: Need) -> bool:
    if isinstance(a, All) or isinstance(b, All):
        return isinstance(a, All) and isinstance(b, All)
    return same_axis(a, b) and same_rows(a.rows, b.rows)


def same_axis(a: Demand, b: Demand) -> bool:
    return a.dim == b.dim and same(a.pre, b.pre) and same(a.length, b.length)


def count(rows: Range | Index | PerBatch) -> Size:
    """How many rows (per batch entry)."""
    if isinstance(rows, Range):
        return rows.hi - rows.lo
    return 1 if isinstance(rows, PerBatch) else shape(rows.rows)[0]


def count_arg(graph: fx.Graph, need: Demand) -> int | fx.Node:
    """Size of the narrowed axis, ``pre * count``, as an argument."""
    rows = need.rows
    if isinstance(rows, Index) and not isinstance(count(rows), int):
        size = emit(graph, aten.sym_size.int, rows.rows, 0)
        pre = sym_arg(graph, need.pre)
        return size if pre == 1 else emit(graph, operator.mul, size, pre)
    return sym_arg(graph, need.pre * count(rows))


def take(graph: fx.Graph, x: fx.Node, have: Need, want: Demand) -> fx.Node:
    """The wanted rows of x, which holds the rows ``have``; at the graph's insertion point."""
    if not same(want.pre, 1) and isinstance(have, All):
        return _take_merged(graph, x, want)
    if isinstance(want.rows, Range):
        base = 0 if isinstance(have, All) else have.rows.lo  # type: ignore[union-attr]
        hi_have = want.length if isinstance(have, All) else have.rows.hi  # type: ignore[union-attr]
        return _slice(graph, x, want.dim, want.rows.lo - base, want.rows.hi - base, hi_have - base)
    assert isinstance(have, All), "an index set is never a part of a narrower value"
    if isinstance(want.rows, Index):
        where: list[Any] = [None] * want.dim + [want.rows.rows]
        return emit(graph, aten.index.Tensor, x, where, like=x)
    return _take_per_batch(graph, x, want, want.rows.rows)


def _slice(graph: fx.Graph, x: fx.Node, dim: int, lo: Size, hi: Size, length: Size) -> fx.Node:
    if same(hi, length):
        tail = static_size(length - lo)
        # A negative start keeps a static tail of a symbolic axis free of size arithmetic.
        if not isinstance(length, int) and tail is not None:
            return emit(graph, aten.slice.Tensor, x, dim, -tail, END, like=x)
        return emit(graph, aten.slice.Tensor, x, dim, sym_arg(graph, lo), END, like=x)
    return emit(graph, aten.slice.Tensor, x, dim, sym_arg(graph, lo), sym_arg(graph, hi), like=x)


def static_size(n: Size) -> int | None:
    if isinstance(n, int):
        return n
    return int(n.node.expr) if n.node.expr.is_Integer else None


def _take_merged(graph: fx.Graph, x: fx.Node, want: Demand) -> fx.Node:
    """Rows of an axis that merges outer axes with T: split it, take, merge again."""
    sizes = [sym_arg(graph, s) for s in shape(x)]
    d = want.dim
    split = sizes[:d] + [sym_arg(graph, want.pre), sym_arg(graph, want.length)] + sizes[d + 1 :]
    apart = emit(graph, aten.reshape.default, x, split, like=x)
    inner = replace(want, dim=d + 1, pre=1, batch=d)
    taken = take(graph, apart, All(""), inner)
    merged = sizes[:d] + [count_arg(graph, want)] + sizes[d + 1 :]
    return emit(graph, aten.reshape.default, taken, merged, like=x)


def _take_per_batch(graph: fx.Graph, x: fx.Node, want: Demand, rows: fx.Node) -> fx.Node:
    B = shape(rows)[0]
    for _ in range((want.rank or 0) - len(shape(x))):
        x = emit(graph, aten.unsqueeze.default, x, 0, like=x)
    dim, batch = want.dim, want.batch
    if not same(shape(x)[batch], B):
        sizes = [sym_arg(graph, s) for s in shape(x)]
        sizes[batch] = sym_arg(graph, B)
        x = emit(graph, aten.expand.default, x, sizes, like=x)
    batches = emit(graph, aten.arange.default, sym_arg(graph, B), device=val(x).device)
    if batch != 0:
        x = emit(graph, aten.transpose.int, x, 0, batch, like=x)
        dim = batch if dim == 0 else dim
    at: list[Any] = [None] * len(shape(x))
    at[0], at[dim] = batches, rows
    picked = emit(graph, aten.index.Tensor, x, at, like=x)
    # Both indices gone, the batch in front: the row axis comes back where it was.
    picked = emit(graph, aten.unsqueeze.default, picked, dim, like=x)
    if batch != 0:
        picked = emit(graph, aten.transpose.int, picked, 0, batch, like=x)
    return picked
