"""Follow the factors of a tensor's shape through views, permutes and broadcasts.

A dimension is a list of axes, row-major; an axis may turn out to be a product and split later:

    x [8, 24, 8]                 [[bh], [q], [d]]
    = reshape(y [2, 4, 24, 8])   [[b], [h], [q], [d]], and bh is (b, h) from now on
    = permute(z [2, 24, 4, 8])   [[b], [q], [h], [d]]
    = expand(w [2, 24, 1, 8])    [[b], [q], [], [d]]: every h reads the same

A dimension of size 1 that is broadcast has no axis. Sizes may be symbolic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvtailor.passes.graph import as_node, aten, emit, is_call, same, shape, sym_arg, val
from kvtailor.passes.opsets import COPIES, RESHAPES


class AxisError(Exception):
    """The axes cannot be told apart or arranged; the text says why."""


@dataclass(eq=False)
class Axis:
    """One factor of a shape; ``parts`` once it was found to be a product."""

    size: int | torch.SymInt
    parts: list[Axis] = field(default_factory=list)

    def leaves(self) -> list[Axis]:
        return [leaf for part in self.parts for leaf in part.leaves()] if self.parts else [self]


Dims = list[list[Axis]]


@dataclass
class Labelled:
    """A tensor whose every dimension is a list of axes."""

    node: fx.Node
    dims: Dims

    def leaves(self) -> list[Axis]:
        return leaves(axis for dim in self.dims for axis in dim)


def leaves(axes: Iterable[Axis]) -> list[Axis]:
    """The unsplit axes that these are made of, those of size 1 left out."""
    return [leaf for axis in axes for leaf in axis.leaves() if not same(leaf.size, 1)]


def equal(a: Sequence[list[Axis]], b: Sequence[list[Axis]]) -> bool:
    return len(a) == len(b) and all(leaves(x) == leaves(y) for x, y in zip(a, b))


def aligned(node: fx.Node, dims: Dims) -> Labelled:
    """A tensor that is broadcast against these dims: its dims that are not 1 get their axes.

    Raises AxisError where a size is not provably 1 or the whole.
    """
    sizes = shape(node)
    if len(sizes) > len(dims):
        raise AxisError(f"{len(sizes)} dimensions are broadcast against {len(dims)}")
    out: Dims = []
    for n, axes in zip(sizes, dims[len(dims) - len(sizes) :]):
        whole = _size(axes)
        if not same(n, whole) and not same(n, 1):
            raise AxisError(f"a size of {n} is broadcast against {whole}")
        out.append(list(axes) if same(n, whole) else [])
    return Labelled(node, out)


def _size(axes: Iterable[Axis]) -> Any:
    return math.prod((axis.size for axis in axes), start=1)


def _divides(a: Any, b: Any) -> bool:
    """Whether a is a factor of b, for all values of the symbols."""
    return not same(a, 0) and statically_known_true(b % a == 0)


def split(axes: Iterable[Axis], first: Any) -> tuple[list[Axis], list[Axis]]:
    """Cut row-major axes in two, the first part of this size. Raises AxisError."""
    head: list[Axis] = []
    rest = leaves(axes)
    have: Any = 1
    while not same(have, first):
        if not rest:
            raise AxisError(f"nothing is left for a size of {first}")
        axis = rest.pop(0)
        if not _divides(have * axis.size, first):
            missing = first // have if _divides(have, first) else 0
            if not _divides(missing, axis.size):
                raise AxisError(f"a size of {first} cuts through one of {axis.size}")
            axis.parts = [Axis(missing), Axis(axis.size // missing)]
            rest.insert(0, axis.parts[1])
            axis = axis.parts[0]
        have = have * axis.size
        head.append(axis)
    return head, rest


def factor(axes: Iterable[Axis], node: fx.Node) -> Labelled:
    """Row-major axes distributed over the dimensions of ``node``. Raises AxisError."""
    rest = leaves(axes)
    dims: Dims = []
    for n in shape(node):
        head, rest = split(rest, n)
        dims.append(head)
    if rest:
        raise AxisError(f"a size of {_size(rest)} is left over")
    return Labelled(node, dims)


_RESHAPES = (*RESHAPES, aten.flatten, aten.unflatten, aten.squeeze)
_PERMUTES = (aten.permute, aten.transpose, aten.mT, aten.t)


def peel(x: Labelled) -> Labelled | None:
    """The tensor that x is a view, permutation, broadcast or copy of; None for any other op.

    Raises AxisError when its axes are not known.
    """
    node, rank = x.node, len(x.dims)
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    if is_call(node, *COPIES):
        return Labelled(source, x.dims)
    if is_call(node, *_RESHAPES):
        return factor((axis for dim in x.dims for axis in dim), source)
    if is_call(node, *_PERMUTES):
        dims: Dims = [[] for _ in range(rank)]
        for axes, there in zip(x.dims, _order(node, rank)):
            dims[there] = axes
        return Labelled(source, dims)
    if is_call(node, aten.unsqueeze):
        at = int(node.args[1]) % rank  # type: ignore[arg-type]
        return Labelled(source, x.dims[:at] + x.dims[at + 1 :])
    if is_call(node, aten.expand):
        return aligned(source, x.dims)
    if is_call(node, aten.repeat):
        return _peel_repeat(x, source, inner=False)
    if is_call(node, aten.repeat_interleave.self_int) and len(shape(source)) == rank:
        return _peel_repeat(x, source, inner=True)
    return None


def _order(node: fx.Node, rank: int) -> list[int]:
    """For every dimension of a permutation, the input's dimension it comes from."""
    if is_call(node, aten.permute):
        return [int(d) % rank for d in node.args[1]]  # type: ignore[union-attr, arg-type]
    order = list(range(rank))
    a, b = (-2, -1) if is_call(node, aten.mT, aten.t) else node.args[1:3]
    if rank > 1:
        order[int(a)], order[int(b)] = order[int(b)], order[int(a)]  # type: ignore[arg-type]
    return order


def _peel_repeat(x: Labelled, source: fx.Node, inner: bool) -> Labelled:
    """repeat_interleave (inner) puts the copies of an entry in a row, repeat those of the whole."""
    sizes = shape(source)
    dims: Dims = []
    for n, axes in zip(sizes, x.dims[len(x.dims) - len(sizes) :]):
        whole = _size(axes)
        if not _divides(n, whole):
            raise AxisError(f"a repeat takes {n} to {whole}")
        head, rest = split(axes, n if inner else whole // n)
        dims.append(head if inner else rest)
    return Labelled(source, dims)


def push(x: Labelled, user: fx.Node) -> Labelled | None:
    """Axes of a view, permutation or copy of x; None for any other op. Raises AxisError."""
    rank = len(x.dims)
    if not user.args or user.args[0] is not x.node:
        return None
    if is_call(user, *COPIES):
        return Labelled(user, x.dims)
    if is_call(user, *_RESHAPES, aten.unsqueeze):
        return factor((axis for dim in x.dims for axis in dim), user)
    if is_call(user, *_PERMUTES):
        return Labelled(user, [x.dims[d] for d in _order(user, rank)])
    return None


def is_cast(node: Any) -> bool:
    """A change of floating-point dtype on one device."""
    if not is_call(node, aten._to_copy, aten.type_as):
        return False
    new, old = val(node), val(as_node(node.args[0]))
    return new.is_floating_point() and old.is_floating_point() and new.device == old.device


def arrange(graph: fx.Graph, x: Labelled, target: Dims, *, broadcast: bool = False) -> fx.Node:
    """x in the layout ``target``: itself, or new nodes at the graph's insertion point.

    Axes of the target that x lacks are expanded; with ``broadcast``, a dimension that x lacks as
    a whole stays 1, and leading ones may be missing. Raises AxisError when x varies along an axis
    that the target does not have.
    """
    source = [leaves(dim) for dim in x.dims]
    wanted = [leaves(dim) for dim in target]
    present = [leaf for dim in source for leaf in dim]
    order = [leaf for dim in wanted for leaf in dim if leaf in present]
    if len(order) != len(present):
        raise AxisError("a tensor varies along an axis it must not depend on")
    lead = len(wanted) - len(source)
    if source == wanted or (
        broadcast
        and lead >= 0
        and not any(leaf in present for dim in wanted[:lead] for leaf in dim)
        and all(s in ([], w) for s, w in zip(source, wanted[lead:]))
    ):
        return x.node
    node = x.node
    if present != order:
        node = _reshape(graph, node, [[leaf] for leaf in present])
        places = [present.index(leaf) for leaf in order]
        node = emit(graph, aten.permute.default, node, places, like=x.node)
    # What a dimension lacks is 1 first, then expanded, then merged into it.
    thin: Dims = []
    wide: Dims = []
    final: Dims = []
    for dim in wanted:
        have = [leaf for leaf in dim if leaf in present]
        if len(have) == len(dim) or (broadcast and not have):
            final.append(have)
            thin.append(have)
            wide.append(have)
        else:
            final.append(dim)
            thin.extend([leaf] if leaf in present else [] for leaf in dim)
            wide.extend([leaf] for leaf in dim)
    node = _reshape(graph, node, thin)
    if thin != wide:
        sizes = [sym_arg(graph, _size(dim)) for dim in wide]
        node = emit(graph, aten.expand.default, node, sizes, like=x.node)
        node = _reshape(graph, node, final)
    return node


def _reshape(graph: fx.Graph, node: fx.Node, dims: Dims) -> fx.Node:
    """node, whose axes come in this order already, with these dims."""
    sizes = [_size(dim) for dim in dims]
    have = shape(node)
    if len(have) == len(sizes) and all(same(m, n) for m, n in zip(have, sizes)):
        return node
    inner = [n for n in sizes if not same(n, 1)]
    if len(have) == len(inner) and all(same(m, n) for m, n in zip(have, inner)):
        # Only sizes of 1 come in: unsqueeze says so.
        for d, n in enumerate(sizes):
            if same(n, 1):
                node = emit(graph, aten.unsqueeze.default, node, d, like=node)
        return node
    args = [sym_arg(graph, n) for n in sizes]
    return emit(graph, aten.reshape.default, node, args, like=node)
