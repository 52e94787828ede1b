"""Elementwise ops of a mask subgraph: by torch on constants, by rule on integers and bools.

A rule gets (interpreter, node, *numbers) and returns a value, or None when it is out of reach.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy import Expr
from torch import fx

from kvtailor.passes.graph import aten, is_tensor, val
from kvtailor.passes.masks.integers import TooComplex
from kvtailor.passes.masks.interpret import Interpreter
from kvtailor.passes.masks.logic import Bool, Logic
from kvtailor.passes.masks.values import (
    INTEGERS,
    Index,
    Pick,
    Real,
    Unreadable,
    Value,
    broadcast_index,
    constant,
    sizes,
)
from kvtailor.passes.opsets import is_pointwise, packet


@dataclass(frozen=True)
class _Plain:
    """An argument that is not a number."""

    arg: Any


def pointwise(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    """An elementwise op: by torch on constants, by rule on integers, else an atom.

    The atom names only the indices its operands depend on.
    """
    op = packet(node)
    if not is_pointwise(node) or any(is_tensor(a) for a in node.kwargs.values()):
        return None
    read: list[Any] = []
    for arg in node.args:
        kind = val(arg)
        if isinstance(kind, (torch.Tensor, torch.SymInt, int, float)):
            read.append(it.operand(arg, node, index))
        elif isinstance(arg, (fx.Node, list, tuple)):
            return None
        else:
            # None, a dtype, a rounding mode: goes through to the op as it is.
            read.append(_Plain(arg))
    if op in _CONNECTIVES and _all_bool(node):
        return _CONNECTIVES[op](it.logic, *read)
    numbers = [v if isinstance(v, _Plain) else it.number(v) for v in read]
    try:
        return _lift_plain(it, lambda *values: _leaf(it, node, values), numbers)
    except (TooComplex, Unreadable):
        known = (it.deps(v) for v in numbers if not isinstance(v, _Plain))
        return it.opaque(node, index, frozenset().union(*known))


def _lift_plain(it: Interpreter, fn: Callable[..., Any], values: Sequence[Any]) -> Any:
    """lift over the numbers among values; the rest go through unchanged."""
    at = [i for i, v in enumerate(values) if not isinstance(v, _Plain)]

    def with_plain(*numbers: Any) -> Any:
        given = dict(zip(at, numbers))
        return fn(*(given.get(i, v) for i, v in enumerate(values)))

    return it.lift(with_plain, *(values[i] for i in at))


def _leaf(it: Interpreter, node: fx.Node, values: Sequence[Any]) -> Any:
    """The op on numbers that are no Picks. Raises Unreadable."""
    op = packet(node)
    exact = _by_torch(node, values)
    if exact is not None:
        return exact
    numbers = [v for v in values if not isinstance(v, _Plain)]
    if all(isinstance(v, Expr) for v in numbers):
        rule = _INTEGER.get(op)
        found = None if rule is None else rule(it, node, *numbers)
        if found is not None and _fits(it, node, found):
            return found
    elif op in (aten.add, aten.sub) and not node.kwargs:
        found = _float_sum(node, values, sign=1 if op is aten.add else -1)
        if found is not None:
            return found
    raise Unreadable(str(node.target))


def _fits(it: Interpreter, node: fx.Node, v: Any) -> bool:
    """Whether the node's dtype holds v exactly; 32 and 64 bits are taken to be enough."""
    dtype = val(node).dtype
    if isinstance(v, Bool):
        return dtype == torch.bool
    if dtype in INTEGERS:
        return True
    if isinstance(v, Pick):
        return _fits(it, node, v.then) and _fits(it, node, v.other)
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return False
    low, high = it.logic.lower(v), it.logic.upper(v)
    info = torch.iinfo(dtype)
    return low is not None and high is not None and info.min <= low and high <= info.max


def conjunct_nodes(it: Interpreter, node: fx.Node, index: Index) -> Iterator[tuple[fx.Node, Index]]:
    """The bool nodes a mask is the conjunction of, each with its index, views looked through."""
    moved = it.source(node, index) if node.op == "call_function" else None
    if moved is not None:
        yield from conjunct_nodes(it, *moved)
    elif _CONNECTIVES.get(packet(node)) is Logic.all_of and _all_bool(node):
        for arg in node.all_input_nodes:
            yield from conjunct_nodes(it, arg, broadcast_index(sizes(arg), sizes(node), index))
    else:
        yield node, index


def _all_bool(node: fx.Node) -> bool:
    return all(is_tensor(a) and val(a).dtype == torch.bool for a in node.args)


def _by_torch(node: fx.Node, values: Sequence[Any]) -> Any | None:
    """The op itself, on one element, when every operand is a constant."""
    args: list[Any] = []
    for arg, v in zip(node.args, values):
        if isinstance(v, _Plain):
            args.append(v.arg)
        elif isinstance(v, Expr) and v.is_Integer:
            args.append(_one_element(arg, int(v)))
        elif isinstance(v, Real) and not v.parts:
            args.append(_one_element(arg, v.const))
        else:
            return None
    kwargs = {k: v for k, v in node.kwargs.items() if k in ("dtype", "rounding_mode", "alpha")}
    if any(isinstance(v, fx.Node) for v in kwargs.values()):
        return None
    assert callable(node.target)
    return constant(node.target(*args, **kwargs).item())


def _one_element(arg: Any, value: float) -> Any:
    if not is_tensor(arg):
        return value
    fake = val(arg)
    # One element, yet a tensor with dimensions: those take part in type promotion.
    shape = (1,) if fake.dim() else ()
    return torch.full(shape, value, dtype=fake.dtype, device="cpu")


def _float_sum(node: fx.Node, values: Sequence[Any], sign: int) -> Real | None:
    """Unknown floats and constants added up, the constants exact in the result's dtype."""
    a, b = values
    if not (isinstance(a, Real) and isinstance(b, Real)) or (sign < 0 and b.parts):
        return None
    dtype = val(node).dtype
    if any(is_tensor(x) and val(x).dtype != dtype for x in node.args):
        return None
    const = torch.tensor(a.const, dtype=dtype, device="cpu") + sign * b.const
    value = constant(const.item())
    assert isinstance(value, Real)
    return Real(value.const, a.parts + tuple(p for p in b.parts if p not in a.parts))


# --- integer rules


def _cast(it: Interpreter, node: fx.Node, a: Expr) -> Value | None:
    return it.logic.ne(a) if val(node).dtype == torch.bool else a


def _add(it: Interpreter, node: fx.Node, a: Expr, b: Expr) -> Expr:
    return sympy.expand(a + it.integer_arg(node.kwargs.get("alpha", 1)) * b)


def _subtract(it: Interpreter, node: fx.Node, a: Expr, b: Expr, *alpha: Expr) -> Expr:
    scale = alpha[0] if alpha else it.integer_arg(node.kwargs.get("alpha", 1))
    return sympy.expand(a - scale * b)


def _subtract_from(it: Interpreter, node: fx.Node, a: Expr, b: Expr, *alpha: Expr) -> Expr:
    return _subtract(it, node, b, a, *alpha)


def _multiply(it: Interpreter, node: fx.Node, a: Expr, b: Expr) -> Expr | None:
    return sympy.expand(a * b) if a.is_Integer or b.is_Integer else None


def _floor_divide(it: Interpreter, node: fx.Node, a: Expr, b: Expr) -> Expr | None:
    return it.logic.floor(a, int(b)) if b.is_Integer and b > 0 else None


def _divide(it: Interpreter, node: fx.Node, a: Expr, b: Expr) -> Expr | None:
    mode = node.kwargs.get("rounding_mode")
    if mode == "floor" or (mode == "trunc" and it.logic.nonnegative(a)):
        return _floor_divide(it, node, a, b)
    return None


def _remainder(it: Interpreter, node: fx.Node, a: Expr, b: Expr) -> Expr | None:
    quotient = _floor_divide(it, node, a, b)
    return None if quotient is None else sympy.expand(a - b * quotient)


def _compare(op: str) -> Callable[..., Bool]:
    def rule(it: Interpreter, node: fx.Node, a: Expr, b: Expr) -> Bool:
        d = sympy.expand(a - b)
        if op in ("eq", "ne"):
            return it.logic.eq(d) if op == "eq" else it.logic.ne(d)
        if op in ("ge", "gt"):
            return it.logic.ge(d if op == "ge" else d - 1)
        return it.logic.ge(-d if op == "le" else -d - 1)

    return rule


_INTEGER: dict[Any, Callable[..., Any]] = {
    aten._to_copy: _cast,
    aten.add: _add,
    aten.sub: _subtract,
    aten.rsub: _subtract_from,
    aten.mul: _multiply,
    aten.neg: lambda it, node, a: sympy.expand(-a),
    aten.abs: lambda it, node, a: it.pick(it.logic.ge(a), a, sympy.expand(-a)),
    aten.maximum: lambda it, node, a, b: it.largest(a, b),
    aten.minimum: lambda it, node, a, b: it.least(a, b),
    aten.clamp_min: lambda it, node, a, b: it.largest(a, b),
    aten.clamp_max: lambda it, node, a, b: it.least(a, b),
    aten.floor_divide: _floor_divide,
    aten.div: _divide,
    aten.remainder: _remainder,
    aten.fmod: lambda it, node, a, b: (
        _remainder(it, node, a, b) if it.logic.nonnegative(a) else None
    ),
    aten.logical_not: lambda it, node, a: it.logic.eq(a),
    **{getattr(aten, op): _compare(op) for op in ("eq", "ne", "lt", "le", "gt", "ge")},
}


def _differ(logic: Logic, a: Bool, b: Bool) -> Bool:
    return logic.where(a, logic.negate(b), b)


# On operands that are all bool; false < true.
_CONNECTIVES: dict[Any, Callable[..., Bool]] = {
    **dict.fromkeys((aten.__and__, aten.bitwise_and, aten.logical_and, aten.mul), Logic.all_of),
    **dict.fromkeys((aten.__or__, aten.bitwise_or, aten.logical_or), Logic.any_of),
    **dict.fromkeys((aten.__xor__, aten.bitwise_xor, aten.logical_xor, aten.ne), _differ),
    aten.add: Logic.any_of,
    aten.minimum: Logic.all_of,
    aten.maximum: Logic.any_of,
    aten.bitwise_not: Logic.negate,
    aten.logical_not: Logic.negate,
    aten.eq: lambda logic, a, b: logic.where(a, b, logic.negate(b)),
    aten.le: lambda logic, a, b: logic.any_of(logic.negate(a), b),
    aten.ge: lambda logic, a, b: logic.any_of(a, logic.negate(b)),
    aten.lt: lambda logic, a, b: logic.all_of(logic.negate(a), b),
    aten.gt: lambda logic, a, b: logic.all_of(a, logic.negate(b)),
}
