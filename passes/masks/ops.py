"""Ops of a mask subgraph that make, choose or join elements.

Rules as ``interpret.Rules`` describes them, and the interpreter that has them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
from sympy import Expr, Integer
from torch import fx

from kvtailor.passes.graph import argument, as_node, aten, axes, is_call, is_tensor, val
from kvtailor.passes.masks.integers import Atom
from kvtailor.passes.masks.interpret import Interpreter, OpRule, Rules
from kvtailor.passes.masks.logic import FALSE, TRUE, Bool, Logic
from kvtailor.passes.masks.pointwise import pointwise
from kvtailor.passes.masks.values import (
    INTEGERS,
    Index,
    Value,
    broadcast_index,
    dimension,
    replaced,
    sizes,
    stored,
)
from kvtailor.passes.masks.views import VIEWS, slice_start, wrapped

# --- tensors made from nothing


def _arange(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    if val(node).dtype not in INTEGERS:
        return None
    args = [it.integer_arg(a) for a in node.args]
    start = args[0] if len(args) > 1 else Integer(0)
    step = args[2] if len(args) > 2 else it.integer_arg(node.kwargs.get("step", 1))
    return sympy.expand(start + step * index[0])


def _constant(value: int) -> OpRule:
    return lambda it, node, index: stored(Integer(value), val(node).dtype)


def _filled(at: int) -> OpRule:
    """The argument at this position, everywhere."""

    def rule(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
        source = node.args[at]
        if not is_tensor(source):
            return stored(it.scalar(source), val(node).dtype)
        return _converted(it, node, index, source)

    return rule


def _eye(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    diagonal = it.logic.eq(sympy.expand(index[0] - index[1]))
    return it.pick(diagonal, *(stored(Integer(n), val(node).dtype) for n in (1, 0)))


# --- choices


def _where(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    if len(node.args) != 3:
        return None
    return it.pick(
        it.condition(node.args[0], node, index),
        _converted(it, node, index, node.args[1]),
        _converted(it, node, index, node.args[2]),
    )


def _masked_fill(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    return it.pick(
        it.condition(node.args[1], node, index),
        _converted(it, node, index, node.args[2]),
        it.operand(node.args[0], node, index),
    )


def _converted(it: Interpreter, node: fx.Node, index: Index, arg: Any) -> Value:
    """An operand that the op converts to its own dtype."""
    v = it.operand(arg, node, index)
    if is_tensor(arg) and val(arg).dtype == val(node).dtype:
        return v
    return it.lift(lambda e: stored(e, val(node).dtype), it.number(v))


def _copied(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    return _converted(it, node, index, node.args[1])


def _triangle(lower: bool) -> OpRule:
    def rule(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
        diagonal = it.integer_arg(argument(node, "diagonal", 0))
        above = sympy.expand(index[-1] - index[-2] - diagonal)
        kept = it.logic.ge(-above if lower else above)
        zero = stored(Integer(0), val(node).dtype)
        return it.pick(kept, it.read(as_node(node.args[0]), index), zero)

    return rule


def _slice_scatter(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    """x with source written over a slice of step 1."""
    x, source = as_node(node.args[0]), as_node(node.args[1])
    if argument(node, "step", 1) != 1 or val(x).dtype != val(source).dtype:
        return None
    dim = dimension(node, len(index))
    start = slice_start(it, argument(node, "start"), sizes(x)[dim], None)
    i = sympy.expand(index[dim] - start)
    within = _in_range(it, i, sizes(source)[dim])
    return _choose(
        it, within, lambda: it.read(source, replaced(index, dim, i)), lambda: it.read(x, index)
    )


def _select_scatter(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    x, source = as_node(node.args[0]), as_node(node.args[1])
    if val(x).dtype != val(source).dtype:
        return None
    dim = dimension(node, len(index))
    at = wrapped(it, it.integer_arg(argument(node, "index")), sizes(x)[dim])
    here = it.logic.eq(sympy.expand(index[dim] - at))
    return _choose(
        it, here, lambda: it.read(source, replaced(index, dim)), lambda: it.read(x, index)
    )


def _in_range(it: Interpreter, i: Expr, n: Expr) -> Bool:
    return it.logic.all_of(it.logic.ge(i), it.logic.ge(sympy.expand(n - 1 - i)))


def _choose(it: Interpreter, c: Bool, a: Callable[[], Value], b: Callable[[], Value]) -> Value:
    """a where c holds, else b; a side that is never taken is not read, it may be out of range."""
    if c == TRUE:
        return a()
    return b() if c == FALSE else it.pick(c, a(), b())


# --- joins


def _cat(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    tensors: Any = node.args[0]
    if any(val(t).dtype != val(node).dtype or val(t).dim() != len(index) for t in tensors):
        return None
    return _joined(it, tensors, dimension(node, len(index)), index)


def _joined(it: Interpreter, tensors: Sequence[fx.Node], dim: int, index: Index) -> Value:
    """An element of the tensors laid end to end along dim."""
    head, *rest = tensors
    if not rest:
        return it.read(head, index)
    n, i = sizes(head)[dim], index[dim]
    return _choose(
        it,
        it.logic.ge(sympy.expand(n - 1 - i)),
        lambda: it.read(head, index),
        lambda: _joined(it, rest, dim, replaced(index, dim, sympy.expand(i - n))),
    )


def _stack(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    tensors: Any = node.args[0]
    if any(val(t).dtype != val(node).dtype for t in tensors):
        return None
    dim = dimension(node, len(index))
    rest = replaced(index, dim)
    value = it.read(tensors[-1], rest)
    for n in reversed(range(len(tensors) - 1)):
        value = it.pick(it.logic.eq(sympy.expand(index[dim] - n)), it.read(tensors[n], rest), value)
    return value


def _pad(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    """Constant padding, the last dimension first."""
    x, pads = as_node(node.args[0]), argument(node, "pad")
    fill = argument(node, "value")
    if argument(node, "mode", "constant") != "constant":
        return None
    outside = stored(it.scalar(0 if fill is None else fill), val(node).dtype)
    where = list(index)
    inside: list[Bool] = []
    for n, before in enumerate(pads[::2]):
        dim = len(index) - 1 - n
        where[dim] = sympy.expand(index[dim] - it.integer_arg(before))
        inside.append(_in_range(it, where[dim], sizes(x)[dim]))
    return _choose(it, it.logic.all_of(*inside), lambda: it.read(x, tuple(where)), lambda: outside)


def _diff(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    """First differences: y[i + 1] - y[i], y being prepend, x and append in a row."""
    extra = argument(node, "prepend"), argument(node, "append")
    tensors: list[Any] = [t for t in (extra[0], node.args[0], extra[1]) if t is not None]
    if argument(node, "n", 1) != 1 or val(node).dtype not in INTEGERS:
        return None
    if any(val(t).dtype != val(node).dtype for t in tensors):
        return None
    dim = dimension(node, len(index), default=-1)
    after = replaced(index, dim, sympy.expand(index[dim] + 1))
    ends = (it.number(_joined(it, tensors, dim, i)) for i in (after, index))
    return it.lift(lambda a, b: sympy.expand(a - b), *ends)


# --- lookups


def _index(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    """x[i0, :, i2]: the index tensors' common shape stands where they stood, or in front."""
    x, indices = as_node(node.args[0]), argument(node, "indices")
    at = [i for i, t in enumerate(indices) if t is not None]
    if any(val(indices[i]).dtype not in INTEGERS for i in at):
        return None
    rank = max(val(indices[i]).dim() for i in at)
    together = at == list(range(at[0], at[-1] + 1))
    first = at[0] if together else 0
    common = index[first : first + rank]
    common_sizes = sizes(node)[first : first + rank]
    kept = iter(index[:first] + index[first + rank :])
    values: list[Any] = []
    for dim in range(val(x).dim()):
        if dim in at:
            t = indices[dim]
            values.append(it.read(t, broadcast_index(sizes(t), common_sizes, common)))
        else:
            values.append(next(kept))

    def leaf(*where: Expr) -> Value:
        # Past the end eager raises, so that is not a case.
        places = zip(where, sizes(x))
        return it.read(
            x, tuple(wrapped(it, i, n) if d in at else i for d, (i, n) in enumerate(places))
        )

    return it.lift(leaf, *values)


def _gather(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    """gather and index_select, which refuse negative indices."""
    x, picked = as_node(node.args[0]), as_node(node.args[2])
    if not index:
        return None
    dim = dimension(node, len(index))
    if node.target is aten.index_select.default:
        where = it.read(picked, (index[dim],) if val(picked).dim() else ())
    else:
        where = it.read(picked, index)
    return it.lift(lambda i: it.read(x, replaced(index, dim, i)), where)


# --- sums


def _cumsum(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    """A running sum of a constant; any other is an atom, see ``summand``."""
    if not index or val(node).dtype not in INTEGERS:
        return None
    each = it.number(_summand(it, node, index)[1])
    if not isinstance(each, Expr) or not each.is_Integer:
        return None
    return sympy.expand(each * (index[dimension(node, len(index))] + 1))


def _summand(it: Interpreter, node: fx.Node, index: Index) -> tuple[Expr, Value]:
    x, dim = as_node(node.args[0]), dimension(node, len(index))
    j = it.logic.fresh_index(sizes(x)[dim])
    return j, it.read(x, replaced(index, dim, j))


def summand(it: Interpreter, atom: Atom) -> tuple[int, Expr, Value] | None:
    """For an element of a running sum: its dimension, an index j, and what is added at j."""
    if not is_call(atom.node, aten.cumsum) or not atom.index:
        return None
    return dimension(atom.node, len(atom.index)), *_summand(it, atom.node, atom.index)


def _sum(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    """A sum of a constant over dimensions; any other is an atom."""
    x, dims = as_node(node.args[0]), argument(node, "dim")
    if val(node).dtype not in INTEGERS:
        return None
    rank = val(x).dim()
    # No dimensions, or an empty list of them, means all.
    reduced = axes(dims, rank) if dims else list(range(rank))
    keep = argument(node, "keepdim", False)
    outer = iter(index)
    where: list[Expr] = []
    count: Expr = Integer(1)
    for d, n in enumerate(sizes(x)):
        if d not in reduced:
            where.append(next(outer))
            continue
        where.append(it.logic.fresh_index(n))
        count *= n
        if keep:
            next(outer)
    each = it.number(it.read(x, tuple(where)))
    if not isinstance(each, Expr) or not each.is_Integer:
        return None
    return sympy.expand(each * count)


def _clamp(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    if val(node).dtype not in INTEGERS:
        return None
    v: Any = it.operand(node.args[0], node, index)
    low, high = argument(node, "min"), argument(node, "max")
    if low is not None:
        v = it.lift(it.largest, v, it.operand(low, node, index))
    if high is not None:
        v = it.lift(it.least, v, it.operand(high, node, index))
    return v


OPS: dict[Any, OpRule] = {
    aten.arange: _arange,
    aten.ones: _constant(1),
    aten.ones_like: _constant(1),
    aten.new_ones: _constant(1),
    aten.zeros: _constant(0),
    aten.zeros_like: _constant(0),
    aten.new_zeros: _constant(0),
    aten.scalar_tensor: _filled(0),
    aten.full: _filled(1),
    aten.full_like: _filled(1),
    aten.fill: _filled(1),
    aten.new_full: _filled(2),
    aten.eye: _eye,
    aten.where: _where,
    aten.masked_fill: _masked_fill,
    aten.copy: _copied,
    aten.tril: _triangle(lower=True),
    aten.triu: _triangle(lower=False),
    aten.slice_scatter: _slice_scatter,
    aten.select_scatter: _select_scatter,
    aten.cat: _cat,
    aten.stack: _stack,
    aten.pad: _pad,
    aten.constant_pad_nd: _pad,
    aten.diff: _diff,
    aten.index: _index,
    aten.gather: _gather,
    aten.index_select: _gather,
    aten.cumsum: _cumsum,
    aten.sum: _sum,
    aten.clamp: _clamp,
}


def interpreter(gm: fx.GraphModule, logic: Logic) -> Interpreter:
    """An interpreter that knows every op there is a rule for."""
    return Interpreter(gm, logic, Rules(VIEWS, OPS, pointwise))
