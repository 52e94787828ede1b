"""Read a mask subgraph as a function of its index symbols.

``Interpreter.read(node, index)`` is the value of one element (``mask_values``), its index given
as integer expressions. Elementwise arithmetic distributes over Pick; on constants it is done by
torch itself, so rounding, overflow and promotion are the program's own. Whatever is not
understood becomes an atom: element ``index`` of that node. An atom is always right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy import Expr, Integer, Symbol
from torch import fx

from kvtailor.passes.graph import aten, is_tensor, val
from kvtailor.passes.masks.logic import FALSE, TRUE, Atom, Bool, Eq, Lit, Logic, TooComplex
from kvtailor.passes.masks.ops import RULES
from kvtailor.passes.masks.values import (
    INTEGERS,
    Index,
    Num,
    Pick,
    Real,
    Unreadable,
    Value,
    broadcast_index,
    constant,
    leaves,
    size_expr,
    sizes,
)
from kvtailor.passes.masks.views import VIEWS

# Cases a value may have; masks have a handful.
MAX_LEAVES = 32
# Nested reads; a mask is shallow, a residual stream is not.
MAX_DEPTH = 80


class Interpreter:
    """Reads nodes of one graph; every (node, index) once."""

    def __init__(self, gm: fx.GraphModule, logic: Logic):
        self.gm = gm
        self.logic = logic
        self._memo: dict[tuple[fx.Node, Index], Value] = {}
        self._depth = 0

    # --- elements

    def read(self, node: fx.Node, index: Sequence[Expr]) -> Value:
        """The element of node at index, one expression per dimension; Bool for a bool tensor.

        Raises TooComplex for a complex dtype.
        """
        key = node, tuple(index)
        if key not in self._memo:
            self._memo[key] = self._read(*key)
        return self._memo[key]

    def _read(self, node: fx.Node, index: Index) -> Value:
        if self._depth > MAX_DEPTH:
            return self.opaque(node, index)
        self._depth += 1
        try:
            if node.op == "get_attr":
                return self._literal(node, index)
            if node.op == "call_function":
                moved = self.source(node, index)
                if moved is not None:
                    return self.read(*moved)
                value = self._computed(node, index)
                if value is not None and leaves(value) <= MAX_LEAVES:
                    return self.boolean(value) if val(node).dtype == torch.bool else value
        except (TooComplex, Unreadable):
            pass
        finally:
            self._depth -= 1
        return self.opaque(node, index)

    def _computed(self, node: fx.Node, index: Index) -> Value | None:
        rule = RULES.get(_packet(node))
        value = None if rule is None else rule(self, node, index)
        if value is None and _is_pointwise(node):
            value = self._pointwise(node, index)
        return value

    def _literal(self, node: fx.Node, index: Index) -> Value:
        """A constant written in the program; parameters and buffers are not known."""
        target = str(node.target)
        tensor = getattr(self.gm, target, None)
        if not target.startswith("_tensor_constant") or not isinstance(tensor, torch.Tensor):
            raise Unreadable("not a literal")
        if not all(i.is_Integer for i in index):
            raise Unreadable("an element of a literal that depends on the index")
        value = constant(tensor[tuple(int(i) for i in index)].item())
        return self.boolean(value) if tensor.dtype == torch.bool else value

    def opaque(self, node: fx.Node, index: Index, deps: frozenset[Symbol] | None = None) -> Value:
        """The element as an atom. deps, when given, are the only indices it depends on."""
        if deps is not None:
            unused = frozenset().union(*map(self.logic.deps, index)) - deps
            zero = dict.fromkeys(unused, Integer(0))
            index = tuple(self.logic.replace(i, zero) for i in index)
        index = tuple(Integer(0) if n == 1 else sympy.expand(i) for i, n in zip(index, sizes(node)))
        atom = Atom(node, index)
        dtype = val(node).dtype
        if dtype == torch.bool:
            return Lit(atom)
        if dtype.is_floating_point:
            return Real(0.0, (atom,))
        if dtype.is_complex:
            raise TooComplex("complex masks are not read")
        return self.logic.integer(atom)

    def source(self, node: fx.Node, index: Index) -> tuple[fx.Node, Index] | None:
        """The input element that a view or copy shows at index; None for other ops."""
        rule = VIEWS.get(_packet(node))
        if rule is None or not node.args or not isinstance(node.args[0], fx.Node):
            return None
        try:
            found = rule(self, node, index)
        except (TooComplex, Unreadable):
            return None
        return None if found is None else (node.args[0], tuple(sympy.expand(i) for i in found))

    def deps(self, v: Value) -> frozenset[Symbol]:
        """The indices a value depends on."""
        if isinstance(v, Pick):
            return self.logic.deps(v.condition) | self.deps(v.then) | self.deps(v.other)
        if isinstance(v, Real):
            return frozenset().union(*map(self.logic.deps, v.parts))
        return self.logic.deps(v)

    # --- arguments

    def scalar(self, arg: Any) -> Num:
        """A Python or symbolic scalar argument."""
        value = val(arg)
        if isinstance(value, torch.SymInt):
            return size_expr(value)
        if isinstance(value, (bool, int, float)):
            return constant(value)
        raise Unreadable(f"scalar {arg!r}")

    def integer_arg(self, arg: Any) -> Expr:
        value = self.scalar(arg)
        if not isinstance(value, Expr):
            raise Unreadable(f"not an integer: {arg!r}")
        return value

    def operand(self, arg: Any, node: fx.Node, index: Index) -> Value:
        """An argument of an elementwise op at the op's index, broadcast."""
        if not is_tensor(arg):
            return self.scalar(arg)
        return self.read(arg, broadcast_index(sizes(arg), sizes(node), index))

    def condition(self, arg: Any, node: fx.Node, index: Index) -> Bool:
        """A bool operand."""
        value = self.operand(arg, node, index)
        if not isinstance(value, Bool):
            raise Unreadable("a condition that is no bool")
        return value

    # --- values

    def number(self, v: Value) -> Num:
        """A Bool as 0 or 1."""
        if not isinstance(v, Bool):
            return v
        if v in (TRUE, FALSE):
            return Integer(int(v == TRUE))
        return Pick(v, Integer(1), Integer(0))

    def boolean(self, v: Value) -> Bool:
        """A number as a predicate: whether it is not 0."""
        if isinstance(v, Bool):
            return v
        found = self.lift(self.logic.ne, v)
        assert isinstance(found, Bool)
        return found

    def pick(self, c: Bool, a: Value, b: Value) -> Any:
        """a where c holds, else b."""
        if c == TRUE:
            return a
        if c == FALSE:
            return b
        if isinstance(a, Bool) and isinstance(b, Bool):
            return self.logic.where(c, a, b)
        a = self.assume(self.number(a), c)
        b = self.assume(self.number(b), self.logic.negate(c))
        return a if a == b else Pick(c, a, b)

    def assume(self, v: Any, c: Bool) -> Any:
        """v where c is known to hold."""
        if isinstance(v, Pick):
            if self.logic.implies(c, v.condition):
                return self.assume(v.then, c)
            if self.logic.disjoint(c, v.condition):
                return self.assume(v.other, c)
            return self.pick(v.condition, self.assume(v.then, c), self.assume(v.other, c))
        if isinstance(c, Eq) and isinstance(v, Expr):
            # index == constant: the first row of a diff, the first token of a segment.
            for symbol in self.logic.deps(c.e):
                rest = sympy.expand(c.e - symbol)
                if rest.is_Integer:
                    return self.logic.replace(v, {symbol: -rest})
        return v

    def lift(self, fn: Callable[..., Any], *values: Any) -> Any:
        """fn, defined on numbers, over values that may be Picks or Bools."""
        values = tuple(self.number(v) for v in values)
        if math.prod(leaves(v) for v in values) > MAX_LEAVES:
            raise TooComplex("too many cases")
        for at, v in enumerate(values):
            if isinstance(v, Pick):
                no = self.logic.negate(v.condition)
                then = [self.assume(w, v.condition) for w in values]
                other = [self.assume(w, no) for w in values]
                then[at], other[at] = v.then, v.other
                return self.pick(v.condition, self.lift(fn, *then), self.lift(fn, *other))
        return fn(*values)

    def largest(self, a: Expr, b: Expr) -> Num:
        return self.pick(self.logic.ge(sympy.expand(a - b)), a, b)

    def least(self, a: Expr, b: Expr) -> Num:
        return self.pick(self.logic.ge(sympy.expand(a - b)), b, a)

    # --- elementwise ops

    def _pointwise(self, node: fx.Node, index: Index) -> Value | None:
        """An elementwise op: by torch on constants, by rule on integers, else an atom.

        The atom names only the indices its operands depend on.
        """
        packet = _packet(node)
        if any(is_tensor(a) for a in node.kwargs.values()):
            return None
        read: list[Any] = []
        for arg in node.args:
            kind = val(arg)
            if isinstance(kind, (torch.Tensor, torch.SymInt, int, float)):
                read.append(self.operand(arg, node, index))
            elif isinstance(arg, (fx.Node, list, tuple)):
                return None
            else:
                # None, a dtype, a rounding mode: goes through to the op as it is.
                read.append(_Plain(arg))
        if packet in _CONNECTIVES and _all_bool(node):
            return _CONNECTIVES[packet](self.logic, *read)
        numbers = [v if isinstance(v, _Plain) else self.number(v) for v in read]
        try:
            return self.lift_plain(lambda *values: self._leaf(node, values), numbers)
        except (TooComplex, Unreadable):
            known = (self.deps(v) for v in numbers if not isinstance(v, _Plain))
            return self.opaque(node, index, frozenset().union(*known))

    def lift_plain(self, fn: Callable[..., Any], values: Sequence[Any]) -> Any:
        """lift over the numbers among values; the rest go through unchanged."""
        at = [i for i, v in enumerate(values) if not isinstance(v, _Plain)]

        def with_plain(*numbers: Any) -> Any:
            given = dict(zip(at, numbers))
            return fn(*(given.get(i, v) for i, v in enumerate(values)))

        return self.lift(with_plain, *(values[i] for i in at))

    def _leaf(self, node: fx.Node, values: Sequence[Any]) -> Any:
        """The op on numbers that are no Picks. Raises Unreadable."""
        packet = _packet(node)
        exact = _by_torch(node, values)
        if exact is not None:
            return exact
        numbers = [v for v in values if not isinstance(v, _Plain)]
        if all(isinstance(v, Expr) for v in numbers):
            rule = _INTEGER.get(packet)
            found = None if rule is None else rule(self, node, *numbers)
            if found is not None and self._fits(node, found):
                return found
        elif packet in (aten.add, aten.sub) and not node.kwargs:
            found = _float_sum(node, values, sign=1 if packet is aten.add else -1)
            if found is not None:
                return found
        raise Unreadable(str(node.target))

    def _fits(self, node: fx.Node, v: Any) -> bool:
        """Whether the node's dtype holds v exactly; 32 and 64 bits are taken to be enough."""
        dtype = val(node).dtype
        if isinstance(v, Bool):
            return dtype == torch.bool
        if dtype in INTEGERS:
            return True
        if isinstance(v, Pick):
            return self._fits(node, v.then) and self._fits(node, v.other)
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            return False
        low, high = self.logic.lower(v), self.logic.upper(v)
        info = torch.iinfo(dtype)
        return low is not None and high is not None and info.min <= low and high <= info.max


@dataclass(frozen=True)
class _Plain:
    """An argument that is not a number."""

    arg: Any


def conjunct_nodes(it: Interpreter, node: fx.Node, index: Index) -> Iterator[tuple[fx.Node, Index]]:
    """The bool nodes a mask is the conjunction of, each with its index, views looked through."""
    moved = it.source(node, index) if node.op == "call_function" else None
    if moved is not None:
        yield from conjunct_nodes(it, *moved)
    elif _CONNECTIVES.get(_packet(node)) is Logic.all_of and _all_bool(node):
        for arg in node.all_input_nodes:
            yield from conjunct_nodes(it, arg, broadcast_index(sizes(arg), sizes(node), index))
    else:
        yield node, index


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _is_pointwise(node: fx.Node) -> bool:
    # The tag is missing on some overloads (rsub.Tensor, __and__, floor_divide).
    tags = getattr(node.target, "tags", ())
    known = _packet(node) in _INTEGER or _packet(node) in _CONNECTIVES
    random = torch.Tag.nondeterministic_seeded in tags
    return (known or torch.Tag.pointwise in tags) and not random


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


# --- integer rules: (interpreter, node, *numbers) -> value, None when out of reach


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
