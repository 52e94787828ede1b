"""Read a mask subgraph as a function of its index symbols.

``Interpreter.read(node, index)`` is the value of one element (``values.py``), its index given
as integer expressions. Elementwise arithmetic distributes over Pick; on constants it is done by
torch itself, so rounding, overflow and promotion are the program's own. Whatever is not
understood becomes an atom: element ``index`` of that node. An atom is always right. What each op
means is told by tables (views, ops, pointwise); here is how their answers are put together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import sympy
import torch
from sympy import Expr, Integer, Symbol
from torch import fx

from kvtailor.passes.graph import is_tensor, val
from kvtailor.passes.masks.integers import Atom, TooComplex
from kvtailor.passes.masks.logic import FALSE, TRUE, Bool, Eq, Lit, Logic
from kvtailor.passes.masks.values import (
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
from kvtailor.passes.opsets import packet

ViewRule: TypeAlias = "Callable[[Interpreter, fx.Node, Index], Index | None]"
OpRule: TypeAlias = "Callable[[Interpreter, fx.Node, Index], Value | None]"

# Cases a value may have; masks have a handful.
MAX_LEAVES = 32
# Nested reads; a mask is shallow, a residual stream is not.
MAX_DEPTH = 80


class Rules(NamedTuple):
    """What ops mean, by packet; all get (interpreter, node, index) and may raise as elements do.

    views: the index into the first argument, which shows the same element. ops: the element's
    value, None for an atom. otherwise: the same for ops in neither table.
    """

    views: Mapping[Any, ViewRule]
    ops: Mapping[Any, OpRule]
    otherwise: OpRule


class Interpreter:
    """Reads nodes of one graph; every (node, index) once."""

    def __init__(self, gm: fx.GraphModule, logic: Logic, rules: Rules):
        self.rules = rules
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
        rule = self.rules.ops.get(packet(node))
        value = None if rule is None else rule(self, node, index)
        return self.rules.otherwise(self, node, index) if value is None else value

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
        rule = self.rules.views.get(packet(node))
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
