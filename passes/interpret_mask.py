"""Read a mask subgraph as a function of its index symbols.

``Interpreter.read(node, index)`` is the value of one element of a node, its index given as
integer expressions. Values are

    Bool                     a predicate (``mask_logic``)
    sympy expression         an integer
    Real(const, parts)       a float: a constant plus float elements nobody knows
    Pick(condition, a, b)    a where condition holds, else b

Elementwise arithmetic distributes over Pick; on constants it is done by torch itself, so rounding,
overflow and promotion are the program's own. Whatever is not understood becomes an atom: element
``index`` of that node. Nothing here guesses: an atom is always right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from sympy import Expr, Integer
from torch import fx

from kvtailor.passes.graph import aten, is_tensor, val
from kvtailor.passes.mask_logic import (
    FALSE,
    TRUE,
    Atom,
    Bool,
    Eq,
    Lit,
    Logic,
    TooComplex,
)

# Leaves a value may have; masks have a handful.
MAX_LEAVES = 32
# Nested reads; a mask is shallow, a residual stream is not.
MAX_DEPTH = 80
_INT_MAX = 2**63 - 1


@dataclass(frozen=True)
class Real:
    """A float: const plus the unknown elements in parts."""

    const: float
    parts: tuple[Atom, ...] = ()


@dataclass(frozen=True)
class Pick:
    """then where condition holds, other elsewhere; the branches are numbers, never Bool."""

    condition: Bool
    then: Num
    other: Num


Num: TypeAlias = "Expr | Real | Pick"
Value: TypeAlias = "Bool | Expr | Real | Pick"
Index: TypeAlias = "tuple[Expr, ...]"


def size_expr(n: Any) -> Expr:
    """A size, int or SymInt, as an expression."""
    return sympy.expand(n.node.expr) if isinstance(n, torch.SymInt) else Integer(n)


def sizes(node: fx.Node) -> tuple[Expr, ...]:
    return tuple(size_expr(n) for n in val(node).shape)


def leaves(v: Value) -> int:
    return leaves(v.then) + leaves(v.other) if isinstance(v, Pick) else 1


class Interpreter:
    """Reads nodes of one graph; every (node, index) once."""

    def __init__(self, gm: fx.GraphModule, logic: Logic):
        self.gm = gm
        self.logic = logic
        self._memo: dict[tuple[fx.Node, Index], Value] = {}
        self._depth = 0

    # --- entry

    def read(self, node: fx.Node, index: Sequence[Expr]) -> Value:
        """The element of node at index, one expression per dimension."""
        index = tuple(index)
        key = (node, index)
        if key not in self._memo:
            self._memo[key] = self._read(node, index)
        return self._memo[key]

    def _read(self, node: fx.Node, index: Index) -> Value:
        if node.op == "get_attr":
            return self._attribute(node, index)
        if node.op != "call_function" or self._depth > MAX_DEPTH:
            return self.opaque(node, index)
        self._depth += 1
        try:
            moved = self.source(node, index)
            if moved is not None:
                return self.read(*moved)
            packet = getattr(node.target, "overloadpacket", None)
            rule = _RULES.get(packet)
            value = rule(self, node, index) if rule is not None else None
            if value is None and _is_pointwise(node):
                value = self._pointwise(node, index)
            if value is not None and leaves(value) <= MAX_LEAVES:
                return value
        except (TooComplex, _Unreadable):
            pass
        finally:
            self._depth -= 1
        return self.opaque(node, index)

    def opaque(self, node: fx.Node, index: Index, deps: frozenset[Any] | None = None) -> Value:
        """The element as an atom. deps, when known, are the only indices it depends on."""
        if deps is not None:
            for s in frozenset().union(*map(self.logic.deps, index)) - deps:
                index = tuple(self.logic.subs(i, s, Integer(0)) for i in index)
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

    def deps(self, v: Value) -> frozenset[Any]:
        if isinstance(v, Pick):
            return self.logic.deps(v.condition) | self.deps(v.then) | self.deps(v.other)
        if isinstance(v, Real):
            return frozenset().union(*(self.logic.deps(a) for a in v.parts))
        return self.logic.deps(v)

    def _attribute(self, node: fx.Node, index: Index) -> Value:
        """A literal of the traced program; parameters and buffers are unknown."""
        assert isinstance(node.target, str)
        tensor = getattr(self.gm, node.target, None)
        if not node.target.startswith("_tensor_constant") or not isinstance(tensor, torch.Tensor):
            return self.opaque(node, index)
        if not all(i.is_Integer for i in index):
            return self.opaque(node, index)
        value = _constant(tensor[tuple(int(i) for i in index)].item())
        return self.boolean(value) if tensor.dtype == torch.bool else value

    # --- arguments

    def scalar(self, arg: Any) -> Num:
        """A Python or symbolic scalar argument."""
        if isinstance(arg, fx.Node):
            arg = val(arg)
        if isinstance(arg, (bool, int)):
            return Integer(int(arg))
        if isinstance(arg, torch.SymInt):
            return size_expr(arg)
        if isinstance(arg, float):
            value = _constant(arg)
            assert isinstance(value, Real)
            return value
        raise _Unreadable(f"scalar {arg!r}")

    def integer_arg(self, arg: Any) -> Expr:
        value = self.scalar(arg)
        if not isinstance(value, Expr):
            raise _Unreadable(f"not an integer: {arg!r}")
        return value

    def operand(self, arg: Any, node: fx.Node, index: Index) -> Value:
        """An argument of an elementwise op at the op's index, broadcast; bool stays Bool."""
        if not is_tensor(arg):
            return self.scalar(arg)
        return self.read(arg, self.broadcast(arg, node, index))

    def broadcast(self, source: fx.Node, node: fx.Node, index: Index) -> Index:
        have, want = sizes(source), sizes(node)
        return self.broadcast_index(have, want, index)

    @staticmethod
    def broadcast_index(have: Sequence[Expr], want: Sequence[Expr], index: Index) -> Index:
        """Index into a tensor of sizes have that is broadcast to sizes want."""
        tail = index[len(index) - len(have) :]
        out_sizes = want[len(want) - len(have) :]
        # A dimension of one row on both sides keeps its symbol: row 0 of a decode step is still
        # "the query", and reads as one.
        return tuple(
            Integer(0) if n == 1 and m != 1 else i for i, n, m in zip(tail, have, out_sizes)
        )

    # --- views: where an element comes from

    def source(self, node: fx.Node, index: Index) -> tuple[fx.Node, Index] | None:
        """The input element that a view or copy shows at index; None for other ops."""
        rule = _VIEWS.get(getattr(node.target, "overloadpacket", None))
        if rule is None or not node.args or not is_tensor(node.args[0]):
            return None
        try:
            found = rule(self, node, index)
        except (TooComplex, _Unreadable):
            return None
        return None if found is None else (node.args[0], tuple(sympy.expand(i) for i in found))

    # --- numbers

    def number(self, v: Value) -> Num:
        """A Bool as 0 or 1."""
        return self.pick(v, Integer(1), Integer(0)) if isinstance(v, Bool) else v

    def boolean(self, v: Value) -> Bool:
        """A number as a predicate: whether it is not 0."""
        if isinstance(v, Bool):
            return v
        found = self.lift(lambda e: self.logic.ne(e), v)
        assert isinstance(found, Bool)
        return found

    def pick(self, c: Bool, a: Value, b: Value) -> Any:
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
                    return self.logic.subs(v, symbol, -rest)
        return v

    def lift(self, fn: Callable[..., Any], *values: Any) -> Any:
        """fn, defined on leaves, over values that may be Picks."""
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

    def compare(self, op: str, a: Expr, b: Expr) -> Bool:
        logic, d = self.logic, sympy.expand(a - b)
        if op == "eq":
            return logic.eq(d)
        if op == "ne":
            return logic.ne(d)
        if op in ("ge", "gt"):
            return logic.ge(d if op == "ge" else d - 1)
        return logic.ge(-d if op == "le" else -d - 1)

    # --- elementwise ops

    def _pointwise(self, node: fx.Node, index: Index) -> Value | None:
        """Any elementwise op: by torch on constants, by rule on integers, else an atom."""
        tensors = [a for a in node.args if is_tensor(a)]
        if any(is_tensor(a) for a in node.kwargs.values()):
            return None
        if not tensors or any(isinstance(a, (list, tuple)) for a in node.args):
            return None
        read: list[Any] = []
        for arg in node.args:
            # None, strings, dtypes and the like go through to the op as they are.
            plain = arg is None or not isinstance(
                val(arg) if isinstance(arg, fx.Node) else arg,
                (torch.Tensor, int, float, torch.SymInt),
            )
            if plain and isinstance(arg, fx.Node):
                return None
            read.append(_Plain(arg) if plain else self.operand(arg, node, index))
        packet = node.target.overloadpacket  # type: ignore[union-attr]
        if _all_bool(node) and packet in _CONNECTIVES:
            return _CONNECTIVES[packet](self.logic, *read)
        rule = _INTEGER.get(packet)
        numbers = [v if isinstance(v, _Plain) else self.number(v) for v in read]
        deps: frozenset[Any] = frozenset().union(
            *(self.deps(v) for v in numbers if not isinstance(v, _Plain))
        )

        def leaf(*values: Any) -> Any:
            exact = _by_torch(node, values)
            if exact is not None:
                return self.boolean(exact) if val(node).dtype == torch.bool else exact
            if packet is aten._to_copy and all(isinstance(v, Expr) for v in values):
                return self._cast(node, values[0])
            if rule is not None and all(isinstance(v, (Expr, _Plain)) for v in values):
                found = rule(self, node, *values)
                if found is not None and self._fits(node, found):
                    return found
            if packet in (aten.add, aten.sub) and not node.kwargs:
                found = _sum(node, values, sign=1 if packet is aten.add else -1)
                if found is not None:
                    return found
            raise _Unreadable(str(node.target))

        try:
            return self.lift(leaf, *numbers)
        except (TooComplex, _Unreadable):
            return self.opaque(node, index, deps)

    def _cast(self, node: fx.Node, e: Expr) -> Value:
        """_to_copy of an integer expression that is not a constant."""
        dtype = val(node).dtype
        if dtype == torch.bool:
            return self.logic.ne(e)
        if dtype.is_floating_point or not self._fits(node, e):
            raise _Unreadable("an integer as float")
        return e

    def _fits(self, node: fx.Node, v: Any) -> bool:
        """Whether arithmetic in the node's dtype cannot wrap; 32 and 64 bits are taken to hold."""
        dtype = val(node).dtype
        if isinstance(v, Bool) or dtype in (torch.int64, torch.int32):
            return True
        if dtype.is_floating_point or dtype == torch.bool or isinstance(v, (Pick, Real)):
            return False
        low, high = self.logic.lower(v), self.logic.upper(v)
        info = torch.iinfo(dtype)
        return low is not None and high is not None and info.min <= low and high <= info.max


class _Unreadable(Exception):
    """This element becomes an atom."""


@dataclass(frozen=True)
class _Plain:
    """An argument that is not a number: None, a dtype, a rounding mode."""

    arg: Any


def _constant(value: Any) -> Expr | Real:
    if isinstance(value, (bool, int)):
        return Integer(int(value))
    if math.isnan(value):
        raise _Unreadable("nan")
    return Real(float(value))


def _is_pointwise(node: fx.Node) -> bool:
    # The tag is missing on some overloads (rsub.Tensor, __and__, floor_divide).
    tags = getattr(node.target, "tags", ())
    packet = getattr(node.target, "overloadpacket", None)
    known = packet in _INTEGER or packet in _CONNECTIVES or packet is aten._to_copy
    return (known or torch.Tag.pointwise in tags) and (
        torch.Tag.nondeterministic_seeded not in tags
    )


def _all_bool(node: fx.Node) -> bool:
    return all(val(a).dtype == torch.bool for a in node.args if is_tensor(a)) and all(
        is_tensor(a) for a in node.args
    )


def _by_torch(node: fx.Node, values: Sequence[Any]) -> Any | None:
    """The op itself, on one element, when every operand is a constant."""
    args: list[Any] = []
    for arg, v in zip(node.args, values):
        if isinstance(v, _Plain):
            args.append(v.arg)
        elif isinstance(v, Expr) and v.is_Integer:
            args.append(_scalar_or_tensor(arg, int(v)))
        elif isinstance(v, Real) and not v.parts:
            args.append(_scalar_or_tensor(arg, v.const))
        else:
            return None
    kwargs = {k: v for k, v in node.kwargs.items() if k in ("dtype", "rounding_mode", "alpha")}
    if any(isinstance(v, fx.Node) for v in kwargs.values()):
        return None
    assert callable(node.target)
    return _constant(node.target(*args, **kwargs).reshape(()).item())


def _scalar_or_tensor(arg: Any, value: Any) -> Any:
    if not is_tensor(arg):
        return value
    fake = val(arg)
    # One element, yet a tensor with dimensions: those take part in type promotion.
    return torch.tensor(value, dtype=fake.dtype).reshape((1,) if fake.dim() else ())


def _sum(node: fx.Node, values: Sequence[Any], sign: int) -> Real | None:
    """An unknown float plus a constant, the constant exact in the result's dtype."""
    a, b = values
    if not (isinstance(a, Real) and isinstance(b, Real)) or (sign < 0 and b.parts):
        return None
    if any(is_tensor(x) and val(x).dtype != val(node).dtype for x in node.args):
        return None
    const = torch.tensor(a.const, dtype=val(node).dtype) + sign * b.const
    value = const.item()
    return None if math.isnan(value) else Real(value, a.parts + b.parts)


def conjunct_nodes(it: Interpreter, node: fx.Node, index: Index) -> Iterator[tuple[fx.Node, Index]]:
    """The bool nodes a mask is the conjunction of, each with its index, views looked through."""
    moved = it.source(node, index) if node.op == "call_function" else None
    packet = getattr(node.target, "overloadpacket", None)
    if moved is not None:
        yield from conjunct_nodes(it, *moved)
    elif _CONNECTIVES.get(packet) is Logic.all_of and _all_bool(node):
        for arg in node.all_input_nodes:
            yield from conjunct_nodes(it, arg, it.broadcast(arg, node, index))
    else:
        yield node, index


# --- integer rules: (interpreter, node, *leaves) -> value, None when out of reach


def _compare(op: str) -> Callable[..., Any]:
    return lambda it, node, a, b: it.compare(op, a, b)


def _add(it: Interpreter, node: fx.Node, a: Expr, b: Expr) -> Expr:
    return sympy.expand(a + it.integer_arg(node.kwargs.get("alpha", 1)) * b)


def _subtract(it: Interpreter, node: fx.Node, a: Expr, b: Expr, *alpha: Expr) -> Expr:
    return sympy.expand(
        a - (alpha[0] if alpha else it.integer_arg(node.kwargs.get("alpha", 1))) * b
    )


def _multiply(it: Interpreter, node: fx.Node, a: Expr, b: Expr) -> Expr | None:
    return sympy.expand(a * b) if a.is_Integer or b.is_Integer else None


def _floor_divide(it: Interpreter, node: fx.Node, a: Expr, b: Expr, *_: Any) -> Expr | None:
    if not b.is_Integer or b <= 0:
        return None
    return it.logic.floor(a, int(b))


def _divide(it: Interpreter, node: fx.Node, a: Expr, b: Expr, *_: Any) -> Expr | None:
    mode = node.kwargs.get("rounding_mode")
    if mode == "floor" or (mode == "trunc" and it.logic.nonnegative(a)):
        return _floor_divide(it, node, a, b)
    return None


def _remainder(it: Interpreter, node: fx.Node, a: Expr, b: Expr) -> Expr | None:
    quotient = _floor_divide(it, node, a, b)
    return None if quotient is None else sympy.expand(a - b * quotient)


def _fmod(it: Interpreter, node: fx.Node, a: Expr, b: Expr) -> Expr | None:
    return _remainder(it, node, a, b) if it.logic.nonnegative(a) else None


def _absolute(it: Interpreter, node: fx.Node, a: Expr) -> Num:
    return it.pick(it.logic.ge(a), a, sympy.expand(-a))


def _largest(it: Interpreter, node: fx.Node, a: Expr, b: Expr) -> Num:
    return it.pick(it.logic.ge(sympy.expand(a - b)), a, b)


def _least(it: Interpreter, node: fx.Node, a: Expr, b: Expr) -> Num:
    return it.pick(it.logic.ge(sympy.expand(a - b)), b, a)


_INTEGER: dict[Any, Callable[..., Any]] = {
    aten.add: _add,
    aten.sub: _subtract,
    aten.rsub: lambda it, node, a, b, *alpha: _subtract(it, node, b, a, *alpha),
    aten.mul: _multiply,
    aten.neg: lambda it, node, a: sympy.expand(-a),
    aten.abs: _absolute,
    aten.maximum: _largest,
    aten.minimum: _least,
    aten.clamp_min: _largest,
    aten.clamp_max: _least,
    aten.floor_divide: _floor_divide,
    aten.div: _divide,
    aten.remainder: _remainder,
    aten.fmod: _fmod,
    aten.logical_not: lambda it, node, a: it.logic.eq(a),
    **{getattr(aten, op): _compare(op) for op in ("eq", "ne", "lt", "le", "gt", "ge")},
}


def _not_equal(logic: Logic, a: Bool, b: Bool) -> Bool:
    return logic.where(a, logic.negate(b), b)


_CONNECTIVES: dict[Any, Callable[..., Bool]] = {
    **dict.fromkeys((aten.__and__, aten.bitwise_and, aten.logical_and, aten.mul), Logic.all_of),
    **dict.fromkeys((aten.__or__, aten.bitwise_or, aten.logical_or, aten.add), Logic.any_of),
    **dict.fromkeys((aten.__xor__, aten.bitwise_xor, aten.logical_xor, aten.ne), _not_equal),
    aten.eq: lambda logic, a, b: logic.where(a, b, logic.negate(b)),
    aten.bitwise_not: Logic.negate,
    aten.logical_not: Logic.negate,
    aten.minimum: Logic.all_of,
    aten.maximum: Logic.any_of,
    # false <= true
    aten.le: lambda logic, a, b: logic.any_of(logic.negate(a), b),
    aten.ge: lambda logic, a, b: logic.any_of(a, logic.negate(b)),
    aten.lt: lambda logic, a, b: logic.all_of(logic.negate(a), b),
    aten.gt: lambda logic, a, b: logic.all_of(a, logic.negate(b)),
}


# --- ops with a rule of their own: (interpreter, node, index) -> value, None for an atom


def _arange(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    if val(node).dtype not in (torch.int64, torch.int32):
        return None
    args = [it.integer_arg(a) for a in node.args]
    start = args[0] if len(args) > 1 else Integer(0)
    step = args[2] if len(args) > 2 else it.integer_arg(node.kwargs.get("step", 1))
    return sympy.expand(start + step * index[0])


def _filled(value: Any, at: int | None = None) -> Callable[..., Value | None]:
    """Ops that make a constant tensor: the constant itself, or which argument holds it."""

    def rule(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
        found = it.scalar(value if at is None else node.args[at])
        return _as_dtype(it, found, val(node).dtype)

    return rule


def _as_dtype(it: Interpreter, v: Num, dtype: torch.dtype) -> Value | None:
    """A scalar stored in a dtype."""
    if (isinstance(v, Real) and not v.parts) or (isinstance(v, Expr) and v.is_Integer):
        plain = v.const if isinstance(v, Real) else int(v)
        stored = torch.tensor(plain, dtype=torch.float64 if isinstance(v, Real) else torch.int64)
        value = _constant(stored.to(dtype).item())
        if dtype == torch.bool:
            return TRUE if value == 1 else FALSE
        return value
    return v if isinstance(v, Expr) and dtype in (torch.int64, torch.int32) else None


def _fill(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    source = node.args[1]
    if not is_tensor(source):
        return _as_dtype(it, it.scalar(source), val(node).dtype)
    if val(source).dtype != val(node).dtype:
        return None
    return it.operand(source, node, index)


def _where(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    if len(node.args) != 3:
        return None
    condition = it.operand(node.args[0], node, index)
    if not isinstance(condition, Bool):
        return None
    return it.pick(condition, *(_converted(it, node, index, arg) for arg in node.args[1:]))


def _converted(it: Interpreter, node: fx.Node, index: Index, arg: Any) -> Value:
    """An operand stored into the node's dtype: where, masked_fill, cat and pads convert."""
    dtype = val(node).dtype
    v = it.operand(arg, node, index)
    if is_tensor(arg) and val(arg).dtype == dtype:
        return v

    def leaf(e: Any) -> Any:
        stored = _as_dtype(it, e, dtype)
        if stored is None:
            raise _Unreadable("a value in another dtype")
        return stored

    return it.lift(leaf, it.number(v))


def _masked_fill(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    condition = it.operand(node.args[1], node, index)
    assert isinstance(condition, Bool)
    return it.pick(
        condition,
        _converted(it, node, index, node.args[2]),
        it.operand(node.args[0], node, index),
    )


def _triangle(lower: bool) -> Callable[..., Value | None]:
    def rule(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
        diagonal = it.integer_arg(node.args[1] if len(node.args) > 1 else 0)
        above = sympy.expand(index[-1] - index[-2] - diagonal)
        kept = it.logic.ge(-above if lower else above)
        zero: Value = FALSE if val(node).dtype == torch.bool else Integer(0)
        if val(node).dtype.is_floating_point:
            zero = Real(0.0)
        assert isinstance(node.args[0], fx.Node)
        return it.pick(kept, it.read(node.args[0], index), zero)

    return rule


def _index(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    """x[i0, :, i2]: the index tensors' common shape stands where they stood, or in front."""
    x, indices = node.args[0], node.args[1]
    assert isinstance(x, fx.Node) and isinstance(indices, (list, tuple))
    at = [i for i, t in enumerate(indices) if t is not None]
    if any(val(indices[i]).dtype not in (torch.int64, torch.int32) for i in at):
        return None
    rank = max(val(indices[i]).dim() for i in at)
    together = at == list(range(at[0], at[-1] + 1))
    first = at[0] if together else 0
    outer = index[first : first + rank]
    outer_sizes = sizes(node)[first : first + rank]
    kept = iter(index[:first] + index[first + rank :])
    values: list[Any] = []
    for dim in range(val(x).dim()):
        if dim in at:
            t = indices[dim]
            where = it.broadcast_index(sizes(t), outer_sizes, outer)
            values.append(it.number(it.read(t, where)))
        else:
            values.append(next(kept))

    def leaf(*where: Any) -> Any:
        resolved = list(where)
        for dim in at:
            # A negative index wraps around; past the end eager raises, so that is not a case.
            if it.logic.nonnegative(where[dim]):
                continue
            if not it.logic.nonnegative(-where[dim] - 1):
                raise _Unreadable("an index of unknown sign")
            resolved[dim] = sympy.expand(where[dim] + sizes(x)[dim])
        return it.number(it.read(x, tuple(resolved)))

    return _as_bool_if(it, node, it.lift(leaf, *values))


def _as_bool_if(it: Interpreter, node: fx.Node, v: Any) -> Value:
    """Numbers 0 and 1 back to a predicate where the node is one."""
    return it.boolean(v) if val(node).dtype == torch.bool else v


def _gather(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    x, dim, picked = node.args[0], node.args[1], node.args[2]
    assert isinstance(x, fx.Node) and isinstance(picked, fx.Node) and isinstance(dim, int)
    if not index:
        return None
    dim %= len(index)
    if node.target is aten.index_select.default:
        where = it.number(it.read(picked, (index[dim],) if val(picked).dim() else ()))
    else:
        where = it.number(it.read(picked, index))

    def leaf(e: Any) -> Any:
        return it.number(it.read(x, (*index[:dim], e, *index[dim + 1 :])))

    return _as_bool_if(it, node, it.lift(leaf, where))


def _cat(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    tensors = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else 0
    assert isinstance(tensors, (list, tuple)) and isinstance(dim, int)
    if any(val(t).dtype != val(node).dtype or val(t).dim() != len(index) for t in tensors):
        return None
    return _joined(it, tensors, dim % len(index), index)


def _joined(it: Interpreter, tensors: Sequence[Any], dim: int, index: Index) -> Value:
    """Element of the tensors laid end to end along dim."""
    head, *rest = tensors
    if not rest:
        return it.read(head, index)
    n = sizes(head)[dim]
    i = index[dim]
    first = it.logic.ge(sympy.expand(n - 1 - i))
    later = (*index[:dim], sympy.expand(i - n), *index[dim + 1 :])
    # A branch that is never taken is not read: its index would be out of range.
    if first == TRUE:
        return it.read(head, index)
    if first == FALSE:
        return _joined(it, rest, dim, later)
    return it.pick(first, it.read(head, index), _joined(it, rest, dim, later))


def _stack(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    tensors = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else 0
    assert isinstance(tensors, (list, tuple)) and isinstance(dim, int)
    dim %= len(index)
    rest = (*index[:dim], *index[dim + 1 :])
    value: Value = it.read(tensors[-1], rest)
    for n in reversed(range(len(tensors) - 1)):
        value = it.pick(it.logic.eq(sympy.expand(index[dim] - n)), it.read(tensors[n], rest), value)
    return value


def _pad(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    """Constant padding, the last dimension first."""
    x, pads = node.args[0], node.args[1]
    assert isinstance(x, fx.Node) and isinstance(pads, (list, tuple))
    if node.target is aten.pad.default:
        mode = node.args[2] if len(node.args) > 2 else node.kwargs.get("mode", "constant")
        if mode != "constant":
            return None
        fill = node.args[3] if len(node.args) > 3 else node.kwargs.get("value")
    else:
        fill = node.args[2] if len(node.args) > 2 else 0
    outside = _as_dtype(it, it.scalar(0 if fill is None else fill), val(node).dtype)
    if outside is None:
        return None
    where = list(index)
    inside: list[Bool] = []
    for n, dim in enumerate(range(len(index) - 1, len(index) - 1 - len(pads) // 2, -1)):
        where[dim] = sympy.expand(index[dim] - it.integer_arg(pads[2 * n]))
        inside.append(it.logic.ge(where[dim]))
        inside.append(it.logic.ge(sympy.expand(sizes(x)[dim] - 1 - where[dim])))
    condition = it.logic.all_of(*inside)
    if condition == FALSE:
        return outside
    return it.pick(condition, it.read(x, tuple(where)), outside)


def _diff(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    """torch.diff of first order: y[i + 1] - y[i], y being prepend, x and append in a row."""
    args = list(node.args) + [None] * 5
    x, order, dim = args[0], args[1], args[2]
    prepend = args[3] if args[3] is not None else node.kwargs.get("prepend")
    append = args[4] if args[4] is not None else node.kwargs.get("append")
    assert isinstance(x, fx.Node)
    if order not in (None, 1) or val(node).dtype not in (torch.int64, torch.int32):
        return None
    tensors = [t for t in (prepend, x, append) if t is not None]
    if any(val(t).dtype != val(node).dtype for t in tensors):
        return None
    dim = (-1 if dim is None else dim) % len(index)
    assert isinstance(dim, int)
    after = (*index[:dim], sympy.expand(index[dim] + 1), *index[dim + 1 :])
    a, b = (it.number(_joined(it, tensors, dim, i)) for i in (after, index))
    return it.lift(lambda p, q: sympy.expand(p - q), a, b)


def _cumsum(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    """A running sum of a constant; any other stays an atom that remembers its summand."""
    x, dim = node.args[0], node.args[1]
    assert isinstance(x, fx.Node) and isinstance(dim, int)
    if not index or val(node).dtype not in (torch.int64, torch.int32):
        return None
    dim %= len(index)
    j = it.logic.fresh_index(sizes(x)[dim])
    summand = it.read(x, (*index[:dim], j, *index[dim + 1 :]))
    constant = it.number(summand)
    if isinstance(constant, Expr) and constant.is_Integer:
        return sympy.expand(constant * (index[dim] + 1))
    return None


def summand(it: Interpreter, atom: Atom) -> tuple[Expr, Value] | None:
    """For an element of a cumulative sum: a fresh index j and what is added at j."""
    node = atom.node
    if getattr(node.target, "overloadpacket", None) is not aten.cumsum:
        return None
    x, dim = node.args[0], node.args[1]
    assert isinstance(x, fx.Node) and isinstance(dim, int)
    dim %= len(atom.index)
    j = it.logic.fresh_index(sizes(x)[dim])
    return j, it.read(x, (*atom.index[:dim], j, *atom.index[dim + 1 :]))


def _sum_over(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    """A sum of a constant over dimensions; any other sum is an atom."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    if val(node).dtype not in (torch.int64, torch.int32):
        return None
    dims = node.args[1] if len(node.args) > 1 else None
    rank = val(x).dim()
    reduced = {d % rank for d in dims} if dims else set(range(rank))  # type: ignore[union-attr]
    keep = (node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)) is True
    outer = iter(index)
    where: list[Expr] = []
    count: Expr = Integer(1)
    for d, n in enumerate(sizes(x)):
        if d in reduced:
            where.append(it.logic.fresh_index(n))
            count *= n
            if keep:
                next(outer)
        else:
            where.append(next(outer))
    constant = it.number(it.read(x, tuple(where)))
    if isinstance(constant, Expr) and constant.is_Integer:
        return sympy.expand(constant * count)
    return None


def _slice_scatter(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    """x with source written over a slice of step 1."""
    x, source = node.args[0], node.args[1]
    assert isinstance(x, fx.Node) and isinstance(source, fx.Node)
    dim = int(node.args[2]) if len(node.args) > 2 else 0  # type: ignore[arg-type]
    step = node.args[5] if len(node.args) > 5 else 1
    if step != 1 or val(x).dtype != val(source).dtype:
        return None
    dim %= len(index)
    start = _slice_start(it, node.args[3] if len(node.args) > 3 else None, sizes(x)[dim], None)
    i = sympy.expand(index[dim] - start)
    within = it.logic.all_of(it.logic.ge(i), it.logic.ge(sympy.expand(sizes(source)[dim] - 1 - i)))
    if within == FALSE:
        return it.read(x, index)
    inner = it.read(source, (*index[:dim], i, *index[dim + 1 :]))
    return inner if within == TRUE else it.pick(within, inner, it.read(x, index))


def _select_scatter(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    x, source, dim = node.args[0], node.args[1], node.args[2]
    assert isinstance(x, fx.Node) and isinstance(source, fx.Node) and isinstance(dim, int)
    if val(x).dtype != val(source).dtype:
        return None
    dim %= len(index)
    at = it.integer_arg(node.args[3])
    if not it.logic.nonnegative(at):
        at = sympy.expand(at + sizes(x)[dim])
        if not it.logic.nonnegative(at):
            return None
    here = it.logic.eq(sympy.expand(index[dim] - at))
    rest = (*index[:dim], *index[dim + 1 :])
    return it.pick(here, it.read(source, rest), it.read(x, index))


def _copy(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    """The functional copy: source, broadcast and converted."""
    return _converted(it, node, index, node.args[1])


def _clamp(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    bounds = [*node.args[1:], node.kwargs.get("min"), node.kwargs.get("max")]
    low = bounds[0] if len(node.args) > 1 else node.kwargs.get("min")
    high = bounds[1] if len(node.args) > 2 else node.kwargs.get("max")
    if val(node).dtype not in (torch.int64, torch.int32):
        return None
    v: Any = it.number(it.operand(node.args[0], node, index))
    if low is not None:
        v = it.lift(lambda a, b: _largest(it, node, a, b), v, it.operand(low, node, index))
    if high is not None:
        v = it.lift(lambda a, b: _least(it, node, a, b), v, it.operand(high, node, index))
    return v


def _eye(it: Interpreter, node: fx.Node, index: Index) -> Value | None:
    diagonal = it.logic.eq(sympy.expand(index[0] - index[1]))
    if val(node).dtype == torch.bool:
        return diagonal
    one, zero = (_as_dtype(it, Integer(n), val(node).dtype) for n in (1, 0))
    return it.pick(diagonal, one, zero)  # type: ignore[arg-type]


_RULES: dict[Any, Callable[[Interpreter, fx.Node, Index], Value | None]] = {
    aten.arange: _arange,
    **{op: _filled(1) for op in (aten.ones, aten.ones_like, aten.new_ones)},
    **{op: _filled(0) for op in (aten.zeros, aten.zeros_like, aten.new_zeros)},
    aten.full: _filled(None, at=1),
    aten.full_like: _filled(None, at=1),
    aten.new_full: _filled(None, at=2),
    aten.scalar_tensor: _filled(None, at=0),
    aten.eye: _eye,
    aten.fill: _fill,
    aten.where: _where,
    aten.masked_fill: _masked_fill,
    aten.tril: _triangle(lower=True),
    aten.triu: _triangle(lower=False),
    aten.index: _index,
    aten.gather: _gather,
    aten.index_select: _gather,
    aten.cat: _cat,
    aten.stack: _stack,
    aten.pad: _pad,
    aten.constant_pad_nd: _pad,
    aten.diff: _diff,
    aten.cumsum: _cumsum,
    aten.sum: _sum_over,
    aten.slice_scatter: _slice_scatter,
    aten.select_scatter: _select_scatter,
    aten.copy: _copy,
    aten.clamp: _clamp,
}


# --- views: (interpreter, node, index) -> index of the first argument


def _same(it: Interpreter, node: fx.Node, index: Index) -> Index:
    return index


def _expand(it: Interpreter, node: fx.Node, index: Index) -> Index:
    assert isinstance(node.args[0], fx.Node)
    return it.broadcast(node.args[0], node, index)


def _unsqueeze(it: Interpreter, node: fx.Node, index: Index) -> Index:
    dim = int(node.args[1]) % len(index)  # type: ignore[arg-type]
    return index[:dim] + index[dim + 1 :]


def _squeeze(it: Interpreter, node: fx.Node, index: Index) -> Index:
    x_sizes = sizes(node.args[0])  # type: ignore[arg-type]
    rank = len(x_sizes)
    if len(node.args) > 1:
        dims = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
        gone = {d % rank for d in dims if x_sizes[d % rank] == 1}  # type: ignore[operator]
    else:
        gone = {d for d in range(rank) if x_sizes[d] == 1}
    kept = iter(index)
    return tuple(Integer(0) if d in gone else next(kept) for d in range(rank))


def _permute(it: Interpreter, node: fx.Node, index: Index) -> Index:
    order = [d % len(index) for d in node.args[1]]  # type: ignore[union-attr,operator]
    out = [Integer(0)] * len(index)
    for i, d in zip(index, order):
        out[d] = i
    return tuple(out)


def _transpose(it: Interpreter, node: fx.Node, index: Index) -> Index:
    a, b = (int(d) % len(index) for d in node.args[1:3])  # type: ignore[arg-type]
    out = list(index)
    out[a], out[b] = out[b], out[a]
    return tuple(out)


def _turned(it: Interpreter, node: fx.Node, index: Index) -> Index:
    """t, mT: the last two dimensions, if there are two."""
    return index if len(index) < 2 else (*index[:-2], index[-1], index[-2])


def _slice_start(it: Interpreter, start: Any, n: Expr, out: Expr | None) -> Expr:
    """First element of a slice of step 1; out is its length when it runs to the end."""
    s = it.integer_arg(0 if start is None else start)
    # Past the end the slice is empty and nothing is read.
    if it.logic.nonnegative(s):
        return s
    if it.logic.nonnegative(sympy.expand(n + s)) and it.logic.nonnegative(-s - 1):
        return sympy.expand(n + s)
    if out is not None:
        return sympy.expand(n - out)
    raise _Unreadable("a slice start of unknown sign")


def _slice(it: Interpreter, node: fx.Node, index: Index) -> Index:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    args = [*node.args, *[None] * 5]
    dim = (args[1] or 0) % len(index)  # type: ignore[operator]
    step = 1 if args[4] is None else args[4]
    n, out = sizes(x)[dim], sizes(node)[dim]
    end = _INT_MAX if args[3] is None else val(args[3])
    whole = step == 1 and (end >= _INT_MAX if isinstance(end, int) else size_expr(end) == n)
    start = _slice_start(it, args[2], n, out if whole else None)
    return (
        *index[:dim],
        sympy.expand(start + it.integer_arg(step) * index[dim]),
        *index[dim + 1 :],
    )


def _select(it: Interpreter, node: fx.Node, index: Index) -> Index:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    dim = int(node.args[1]) % val(x).dim()  # type: ignore[arg-type]
    at = it.integer_arg(node.args[2])
    if not it.logic.nonnegative(at):
        if not it.logic.nonnegative(-at - 1):
            raise _Unreadable("an index of unknown sign")
        at = sympy.expand(at + sizes(x)[dim])
    return (*index[:dim], at, *index[dim:])


def _flip(it: Interpreter, node: fx.Node, index: Index) -> Index:
    n = sizes(node)
    dims = {d % len(index) for d in node.args[1]}  # type: ignore[union-attr,operator]
    return tuple(n[d] - 1 - i if d in dims else i for d, i in enumerate(index))


def _modulo(it: Interpreter, i: Expr, n: Expr) -> Expr:
    if not n.is_Integer:
        raise _Unreadable("a remainder by a symbolic size")
    return sympy.expand(i - n * it.logic.floor(i, int(n)))


def _repeat(it: Interpreter, node: fx.Node, index: Index) -> Index:
    have, want = sizes(node.args[0]), sizes(node)  # type: ignore[arg-type]
    tail = len(want) - len(have)
    return tuple(
        i if n == m else Integer(0) if n == 1 else _modulo(it, i, n)
        for i, n, m in zip(index[tail:], have, want[tail:])
    )


def _repeat_interleave(it: Interpreter, node: fx.Node, index: Index) -> Index | None:
    times, dim = node.args[1], node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    if node.target is not aten.repeat_interleave.self_int or not isinstance(times, int):
        return None
    if dim is None:
        if val(node.args[0]).dim() != 1:
            return None
        dim = 0
    assert isinstance(dim, int)
    dim %= len(index)
    return (*index[:dim], it.logic.floor(index[dim], times), *index[dim + 1 :])


def _view(it: Interpreter, node: fx.Node, index: Index) -> Index:
    """Reshape: sizes are matched from the left, in groups with equal products."""
    have, want = list(sizes(node.args[0])), list(sizes(node))  # type: ignore[arg-type]
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
            i, j = _view_group(it, have, want, i, j, index, out)
    return tuple(out)


def _view_group(
    it: Interpreter,
    have: list[Expr],
    want: list[Expr],
    i: int,
    j: int,
    index: Index,
    out: list[Expr],
) -> tuple[int, int]:
    """One group of merged or split dimensions; appends its input indices to out."""
    if i >= len(have) or j >= len(want):
        raise _Unreadable("a view that does not match")
    i0, j0 = i, j
    left, right = have[i], want[j]
    i, j = i + 1, j + 1
    while left != right:
        if not (left.is_Integer and right.is_Integer):
            raise _Unreadable("a view of symbolic sizes")
        if left < right:
            if i >= len(have):
                raise _Unreadable("a view that does not match")
            left *= have[i]
            i += 1
        else:
            if j >= len(want):
                raise _Unreadable("a view that does not match")
            right *= want[j]
            j += 1
    flat: Expr = Integer(0)
    for d in range(j0, j):
        flat = sympy.expand(flat * want[d] + index[d])
    found = []
    for d in reversed(range(i0, i)):
        if d == i0:
            found.append(flat)
        else:
            found.append(_modulo(it, flat, have[d]))
            flat = it.logic.floor(flat, int(have[d]))
    out.extend(reversed(found))
    return i, j


def _same_dtype(it: Interpreter, node: fx.Node, index: Index) -> Index | None:
    """Casts that cast nothing."""
    return index if val(node).dtype == val(node.args[0]).dtype else None


_VIEWS: dict[Any, Callable[[Interpreter, fx.Node, Index], Index | None]] = {
    **dict.fromkeys((aten.alias, aten.clone, aten.contiguous, aten.detach, aten.lift_fresh, aten.lift_fresh_copy), _same),
    **dict.fromkeys((aten._to_copy, aten.to, aten.type_as), _same_dtype),
    **dict.fromkeys((aten.expand, aten.expand_as, aten.broadcast_to), _expand),
    **dict.fromkeys((aten.view, aten.reshape, aten._unsafe_view, aten.view_as), _view),
    aten.flatten: _view,
    aten.unflatten: _view,
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
