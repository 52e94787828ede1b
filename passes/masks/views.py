"""Views and copies in a mask subgraph: which element of the input an element shows.

Every rule takes (interpreter, node, index) and returns the index into the node's first argument,
or None when that has no such form. A rule may raise Unreadable or TooComplex.
"""

from __future__ import annotations

from typing import Any

import sympy
from sympy import Expr, Integer
from torch import fx

from kvtailor.passes.graph import END, argument, as_node, aten, axes, val
from kvtailor.passes.masks.interpret import Interpreter, ViewRule
from kvtailor.passes.masks.values import (
    Index,
    Unreadable,
    broadcast_index,
    dimension,
    replaced,
    size_expr,
    sizes,
)
from kvtailor.passes.opsets import COPIES, RESHAPES


def _input_sizes(node: fx.Node) -> tuple[Expr, ...]:
    return sizes(as_node(node.args[0]))


def _copy(it: Interpreter, node: fx.Node, index: Index) -> Index:
    return index


def _cast_of_nothing(it: Interpreter, node: fx.Node, index: Index) -> Index | None:
    return index if val(node).dtype == val(node.args[0]).dtype else None


def _expand(it: Interpreter, node: fx.Node, index: Index) -> Index:
    return broadcast_index(_input_sizes(node), sizes(node), index)


def _unsqueeze(it: Interpreter, node: fx.Node, index: Index) -> Index:
    return replaced(index, dimension(node, len(index)))


def _squeeze(it: Interpreter, node: fx.Node, index: Index) -> Index:
    have = _input_sizes(node)
    rank = len(have)
    dims = axes(node.args[1], rank) if len(node.args) > 1 else range(rank)
    gone = {d for d in dims if have[d] == 1}
    kept = iter(index)
    return tuple(Integer(0) if d in gone else next(kept) for d in range(rank))


def _permute(it: Interpreter, node: fx.Node, index: Index) -> Index:
    order = axes(node.args[1], len(index))
    return tuple(index[order.index(d)] for d in range(len(index)))


def _transpose(it: Interpreter, node: fx.Node, index: Index) -> Index:
    a, b = axes(node.args[1:3], len(index))
    out = list(index)
    out[a], out[b] = out[b], out[a]
    return tuple(out)


def _turned(it: Interpreter, node: fx.Node, index: Index) -> Index:
    """t, mT: the last two dimensions, if there are two."""
    return index if len(index) < 2 else (*index[:-2], index[-1], index[-2])


def _slice(it: Interpreter, node: fx.Node, index: Index) -> Index:
    dim = dimension(node, len(index))
    n, out = _input_sizes(node)[dim], sizes(node)[dim]
    end, step = val(argument(node, "end", END)), argument(node, "step", 1)
    whole = step == 1 and (end >= END if isinstance(end, int) else size_expr(end) == n)
    start = slice_start(it, argument(node, "start", 0), n, out if whole else None)
    return replaced(index, dim, start + it.integer_arg(step) * index[dim])


def slice_start(it: Interpreter, start: Any, n: Expr, out: Expr | None) -> Expr:
    """First element of a slice of n elements; out: its length when it runs to the end by ones."""
    s = it.integer_arg(0 if start is None else start)
    # Past the end the slice is empty, and nothing reads it.
    if it.logic.nonnegative(s):
        return s
    if it.logic.nonnegative(sympy.expand(n + s)) and it.logic.nonnegative(-s - 1):
        return sympy.expand(n + s)
    if out is not None:
        return sympy.expand(n - out)
    raise Unreadable("a slice start of unknown sign")


def _select(it: Interpreter, node: fx.Node, index: Index) -> Index:
    have = _input_sizes(node)
    dim = dimension(node, len(have))
    at = wrapped(it, it.integer_arg(argument(node, "index")), have[dim])
    return (*index[:dim], at, *index[dim:])


def wrapped(it: Interpreter, i: Expr, n: Expr) -> Expr:
    """An index into n elements, a negative one counted from the end."""
    if it.logic.nonnegative(i):
        return i
    if it.logic.nonnegative(-i - 1):
        return sympy.expand(i + n)
    raise Unreadable("an index of unknown sign")


def _flip(it: Interpreter, node: fx.Node, index: Index) -> Index:
    dims = axes(node.args[1], len(index))
    return tuple(n - 1 - i if d in dims else i for d, (i, n) in enumerate(zip(index, sizes(node))))


def _modulo(it: Interpreter, i: Expr, n: Expr) -> Expr:
    if not n.is_Integer:
        raise Unreadable("a remainder by a symbolic size")
    return sympy.expand(i - n * it.logic.floor(i, int(n)))


def _repeat(it: Interpreter, node: fx.Node, index: Index) -> Index:
    have, want = _input_sizes(node), sizes(node)
    skip = len(want) - len(have)
    return tuple(
        i if n == m else Integer(0) if n == 1 else _modulo(it, i, n)
        for i, n, m in zip(index[skip:], have, want[skip:])
    )


def _repeat_interleave(it: Interpreter, node: fx.Node, index: Index) -> Index | None:
    times, dim = node.args[1], argument(node, "dim")
    if node.target is not aten.repeat_interleave.self_int or not isinstance(times, int):
        return None
    if dim is None and len(_input_sizes(node)) != 1:
        return None
    dim = dimension(node, len(index))
    return replaced(index, dim, it.logic.floor(index[dim], times))


def _view(it: Interpreter, node: fx.Node, index: Index) -> Index:
    """Reshape: sizes are matched from the left, in groups with equal products."""
    have, want = _input_sizes(node), sizes(node)
    out: list[Expr] = []
    i = j = 0
    while i < len(have) or j < len(want):
        if i < len(have) and j < len(want) and have[i] == want[j]:
            out.append(index[j])
            i, j = i + 1, j + 1
        elif j < len(want) and want[j] == 1:
            j += 1
        elif i < len(have) and have[i] == 1:
            out.append(Integer(0))
            i += 1
        else:
            i_end, j_end = _group(have, want, i, j)
            out += _regroup(it, have[i:i_end], want[j:j_end], index[j:j_end])
            i, j = i_end, j_end
    return tuple(out)


def _group(have: Index, want: Index, i: int, j: int) -> tuple[int, int]:
    """Ends of the shortest runs of dimensions from i and j with equal products."""
    left = right = Integer(1)
    while left != right or left == 1:
        if i >= len(have) and j >= len(want):
            raise Unreadable("a view that does not match")
        if j >= len(want) or (i < len(have) and left <= right):
            left *= have[i]
            i += 1
        else:
            right *= want[j]
            j += 1
        if not (left.is_Integer and right.is_Integer):
            raise Unreadable("a view of symbolic sizes")
    return i, j


def _regroup(it: Interpreter, have: Index, want: Index, index: Index) -> list[Expr]:
    """One element's index along the dimensions have, given along the dimensions want."""
    flat: Expr = Integer(0)
    for n, i in zip(want, index):
        flat = sympy.expand(flat * n + i)
    out: list[Expr] = []
    for n in reversed(have[1:]):
        out.append(_modulo(it, flat, n))
        flat = it.logic.floor(flat, int(n))
    return [flat, *reversed(out)]


VIEWS: dict[Any, ViewRule] = {
    **dict.fromkeys(COPIES, _copy),
    **dict.fromkeys((*RESHAPES, aten.view_as, aten.flatten, aten.unflatten), _view),
    aten._to_copy: _cast_of_nothing,
    aten.expand: _expand,
    aten.expand_as: _expand,
    aten.broadcast_to: _expand,
    aten.unsqueeze: _unsqueeze,
    aten.squeeze: _squeeze,
    aten.permute: _permute,
    aten.transpose: _transpose,
    aten.t: _turned,
    aten.mT: _turned,
    aten.slice: _slice,
    aten.select: _select,
    aten.flip: _flip,
    aten.repeat: _repeat,
    aten.repeat_interleave: _repeat_interleave,
}
