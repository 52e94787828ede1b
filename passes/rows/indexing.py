"""Rows through slices and gathers, which is where demand shrinks; and what is written into them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvtailor.passes.graph import (
    END,
    ancestors,
    argument,
    as_int,
    as_node,
    aten,
    emit,
    is_call,
    is_tensor,
    same,
    shape,
    sym_arg,
    val,
)
from kvtailor.passes.opsets import SEVERAL, draws
from kvtailor.passes.rows.demand import Demand, Index, Need, PerBatch, Range, Size, demand_range
from kvtailor.passes.rows.plan import Plan, over, shrink


def slice_(node: fx.Node, need: Need) -> Plan | None:
    x = as_node(node.args[0])
    dim = as_int(argument(node, "dim", 0)) % len(shape(x))
    if isinstance(need, Demand) and need.dim != dim:
        return over(node, {x: need})
    if argument(node, "step", 1) not in (None, 1) or not _may_shrink(x, dim):
        return None
    T = shape(x)[dim]
    bounds = _bounds(argument(node, "start"), argument(node, "end"), T, shape(node)[dim])
    if bounds is None:
        return None
    lo, hi = bounds
    if isinstance(need, Demand):
        if not isinstance(need.rows, Range) or not same(need.pre, 1):
            return None
        lo, hi = lo + need.rows.lo, lo + need.rows.hi
    return shrink(node, x, demand_range(lo, hi, dim, T, need.cause))


def _bounds(start: Any, end: Any, T: Size, n: Size) -> tuple[Size, Size] | None:
    """The n rows lo <= t < hi that a slice of T rows takes, None where symbols leave it open."""
    lo = 0 if start is None else val(start)
    if same(n, 0):
        return None
    if same(lo, 0):
        return 0, n
    if statically_known_true(lo < 0):
        if end is None or same(val(end), END):
            return T - n, T
        lo = T + lo
    if statically_known_true(lo >= 0) and statically_known_true(lo + n <= T):
        return lo, lo + n
    return None


def _may_shrink(x: fx.Node, dim: int) -> bool:
    """The last axis holds features, or keys of a mask: never rows."""
    return len(shape(x)) >= 2 and dim < len(shape(x)) - 1


def select(node: fx.Node, need: Need) -> Plan | None:
    x = as_node(node.args[0])
    dim = as_int(node.args[1]) % len(shape(x))
    if isinstance(need, Demand):
        return over(node, {x: need.beside(dim)})
    i, T = val(node.args[2]), shape(x)[dim]
    if not _may_shrink(x, dim):
        return None
    if statically_known_true(i < 0):
        i = T + i
    if not statically_known_true(i >= 0) or not statically_known_true(i < T):
        return None
    return _picked(node, x, demand_range(i, i + 1, dim, T, need.cause), dim)


def _picked(node: fx.Node, x: fx.Node, need: Need, dim: int) -> Plan:
    """x with one row along dim, which then goes."""
    return shrink(node, x, need, lambda n: emit(node.graph, aten.select.int, n, dim, 0, like=node))


def index(node: fx.Node, need: Need) -> Plan | None:
    """index[:, rows] and index[arange(B), rows]."""
    x, where = as_node(node.args[0]), argument(node, "indices")
    at = [d for d, i in enumerate(where) if i is not None]
    if isinstance(need, Demand):
        one = len(at) == 1 and val(where[at[0]]).dim() == 1 and at[0] not in need.fixed
        return over(node, {x: need}) if one and val(where[at[0]]).dtype == torch.int64 else None
    if len(at) == 1 and _is_index(where[at[0]], 1) and _may_shrink(x, at[0]):
        dim = at[0]
        return shrink(node, x, Demand(Index(where[dim]), dim, shape(x)[dim], cause=need.cause))
    if at == [0, 1] and _is_index(where[1], 1) and _may_shrink(x, 1):
        B = shape(x)[0]
        if _is_arange(where[0], B) and same(shape(where[1])[0], B):
            return _picked(node, x, Demand(PerBatch(where[1]), 1, shape(x)[1], cause=need.cause), 1)
    return None


def index_select(node: fx.Node, need: Need) -> Plan | None:
    x = as_node(node.args[0])
    dim = as_int(node.args[1]) % len(shape(x))
    rows = as_node(node.args[2])
    if isinstance(need, Demand):
        return over(node, {x: need}) if dim not in need.fixed else None
    if not _is_index(rows, 1) or not _may_shrink(x, dim):
        return None
    return shrink(node, x, Demand(Index(rows), dim, shape(x)[dim], cause=need.cause))


def gather(node: fx.Node, need: Need) -> Plan | None:
    """gather(x, 1, rows[:, None, None].expand(B, 1, D)): one row per batch entry."""
    x, where = as_node(node.args[0]), as_node(node.args[2])
    dim = as_int(node.args[1]) % len(shape(x))
    if isinstance(need, Demand) or dim != 1 or len(shape(x)) != 3 or not _may_shrink(x, 1):
        return None
    if not is_call(where, aten.expand) or not same(shape(node)[1], 1):
        return None
    column, B = as_node(where.args[0]), shape(x)[0]
    if len(shape(column)) != 3 or not _is_index(column, 3):
        return None
    if not all(same(n, m) for n, m in zip(shape(column), (B, 1, 1))):
        return None
    if not same(shape(node)[2], shape(x)[2]):
        return None
    with node.graph.inserting_after(column):
        rows = emit(node.graph, aten.reshape.default, column, [-1])
    return shrink(node, x, Demand(PerBatch(rows), 1, shape(x)[1], cause=need.cause))


def _is_arange(x: Any, n: Size) -> bool:
    """Whether x is arange(n)."""
    if not is_call(x, aten.arange):
        return False
    start, step = argument(x, "start", 0), argument(x, "step", 1)
    return val(start) == 0 and step == 1 and same(val(argument(x, "end")), n)


def _is_index(rows: Any, rank: int) -> bool:
    """An integer tensor made of integers alone, so that it can be computed at the top."""
    if not is_tensor(rows) or val(rows).dim() != rank or val(rows).dtype != torch.int64:
        return False
    for node in ancestors([rows]):
        v = node.meta.get("val")
        if isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex()):
            return False
        if node.op == "call_function" and (draws(node) or node.is_impure()):
            return False
    return True


def scatter(node: fx.Node, need: Demand) -> Plan | None:
    """slice_scatter, select_scatter along another axis: the same rows of both."""
    x, part = as_node(node.args[0]), as_node(node.args[1])
    axis = as_int(argument(node, "dim", 0)) % len(shape(node))
    if axis in need.fixed or x is part:
        return None
    before = need.without(axis) if is_call(node, aten.select_scatter) else need
    return over(node, {x: need, part: before})


def getitem(node: fx.Node, need: Demand) -> Plan | None:
    """One result of a split, topk or packed linear along another axis: do that to fewer rows."""
    whole = as_node(node.args[0])
    if not is_call(whole, *SEVERAL):
        return None
    x = as_node(whole.args[0])
    along_last = not is_call(whole, aten.split, aten.split_with_sizes, aten.chunk, aten.unbind)
    axis = as_int(argument(whole, "dim", -1 if along_last else 0)) % len(shape(x))
    before = need.beside(axis) if is_call(whole, aten.unbind) else need
    if axis in before.fixed or x in whole.args[1:]:
        return None
    several = over(whole, {x: before})

    def build(fetch: Any) -> fx.Node:
        return emit(node.graph, operator.getitem, several.build(fetch), node.args[1], like=node)

    return Plan(several.needs, build)


def sym_size(node: fx.Node, need: Need) -> Plan | None:
    """A size does not ask for rows: it is computed from the graph's inputs instead."""
    if as_node(node.args[0]).op == "placeholder":
        return None
    made = as_node(sym_arg(node.graph, val(node)))
    return Plan([], lambda _: made, always=True)
