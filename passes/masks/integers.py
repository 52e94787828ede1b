"""Integers over index symbols: linear expressions, and the intervals they take.

An integer is a sympy expression, linear in its generators: index symbols (each from 0 to its
size less one), sizes of the shape environment, integer atoms (a tensor element nobody knows) and
``fdiv``. Only ``expand`` and coefficients are used, never ``simplify``: whatever is decided is
decided by the interval an expression takes over all indices. Integer tensors are taken not to
overflow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from sympy import Expr, Integer, Symbol
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy


class TooComplex(Exception):
    """The predicate or expression outgrew what a mask looks like; the caller gives up on it."""


class fdiv(sympy.Function):
    """floor(e / c), c a positive int; made by ``Logic.floor`` only, which keeps it canonical."""

    nargs = 2
    is_integer = True


@dataclass(frozen=True)
class Atom:
    """Element ``index`` of the tensor ``node`` makes: unknown, but the same wherever it occurs."""

    node: fx.Node
    index: tuple[Expr, ...]


def terms(e: Expr) -> dict[Expr, Expr]:
    """Generator -> coefficient of an expanded expression; 1 stands for the constant."""
    return e.as_coefficients_dict()


class Integers:
    """Makes integer expressions and decides what intervals decide of them.

    shape_env: bounds of the size symbols; None when every size is an int.
    """

    def __init__(self, shape_env: ShapeEnv | None = None):
        self.shape_env = shape_env
        self.sizes: dict[Symbol, Expr] = {}
        self.atoms: dict[Symbol, Atom] = {}
        self._symbol_of: dict[Atom, Symbol] = {}
        self._signs: dict[tuple[Expr, bool], bool] = {}
        self._fresh = 0
        # Off: indices have no upper end, and a bound that every index keeps is not dropped.
        self.bounded = True

    # --- symbols

    def index(self, name: str, size: Expr) -> Symbol:
        """An index symbol that runs from 0 to size - 1."""
        symbol = Symbol(name, integer=True, nonnegative=True)
        self.sizes[symbol] = size
        return symbol

    def fresh_index(self, size: Expr) -> Symbol:
        self._fresh += 1
        return self.index(f"j{self._fresh}", size)

    def integer(self, atom: Atom) -> Symbol:
        """The symbol that stands for an integer atom."""
        if atom not in self._symbol_of:
            symbol = Symbol(f"x{len(self.atoms)}", integer=True)
            self._symbol_of[atom] = symbol
            self.atoms[symbol] = atom
        return self._symbol_of[atom]

    def deps(self, x: Any) -> frozenset[Symbol]:
        """The index symbols that an expression or atom depends on."""
        if isinstance(x, Atom):
            return frozenset().union(*map(self.deps, x.index))
        found: frozenset[Symbol] = frozenset()
        for s in x.free_symbols:
            if s in self.sizes:
                found |= {s}
            elif s in self.atoms:
                found |= self.deps(self.atoms[s])
        return found

    # --- integers

    def subs(self, e: Expr, symbol: Symbol, value: Expr) -> Expr:
        """e with an index symbol replaced, also inside atoms and floors."""
        return self.replace(e, {symbol: value})

    def replace(self, e: Expr, values: Mapping[Symbol, Expr]) -> Expr:
        """e with index symbols or integer atoms replaced, floors made canonical again."""
        if not self._mentions(e, values):
            return e
        out: Expr = Integer(0)
        for term, c in terms(e).items():
            out += c * self._replace_term(term, values)
        return sympy.expand(out)

    def _mentions(self, x: Any, values: Mapping[Symbol, Expr]) -> bool:
        if isinstance(x, Expr):
            return any(
                s in values or (s in self.atoms and self._mentions(self.atoms[s], values))
                for s in x.free_symbols
            )
        return any(self._mentions(i, values) for i in x.index)

    def _replace_term(self, term: Expr, values: Mapping[Symbol, Expr]) -> Expr:
        if term in values:
            return values[term]
        if not self._mentions(term, values):
            return term
        if term in self.atoms:
            return self.integer(self.replace_atom(self.atoms[term], values))
        if isinstance(term, fdiv):
            return self.floor(self.replace(term.args[0], values), int(term.args[1]))
        if isinstance(term, sympy.Mul):
            return sympy.Mul(*(self._replace_term(a, values) for a in term.args))
        raise TooComplex(f"cannot replace inside {term}")

    def replace_atom(self, atom: Atom, values: Mapping[Symbol, Expr]) -> Atom:
        return Atom(atom.node, tuple(self.replace(i, values) for i in atom.index))

    def floor(self, e: Expr, c: int) -> Expr:
        """floor(e / c) with multiples of c pulled out, folded where the interval allows it."""
        assert c > 0
        if c == 1:
            return e
        e = sympy.expand(e)
        whole: Expr = Integer(0)
        rest: Expr = Integer(0)
        for term, coefficient in terms(e).items():
            if not coefficient.is_Integer:
                raise TooComplex(f"{e} is not an integer expression")
            n = int(coefficient)
            if term == 1:
                whole += n // c
                rest += n % c
            elif n % c == 0:
                whole += (n // c) * term
            else:
                rest += n * term
        low, high = self.lower(rest), self.upper(rest)
        if low is not None and high is not None and low // c == high // c:
            return whole + low // c
        return whole + fdiv(rest, Integer(c))

    def extreme(self, e: Expr, low: bool) -> Expr | None:
        """The least or greatest value of e over its indices, as an expression over sizes.

        Every index symbol and floor is taken at its own extreme, so this is a bound, exact when
        no symbol occurs twice. None when a part has no bound.
        """
        out: Expr = Integer(0)
        for term, c in terms(e).items():
            if not c.is_Integer:
                return None
            down = low == (c > 0)
            bound = self._extreme_term(term, down)
            if bound is None:
                return None
            out += c * bound
        return sympy.expand(out)

    def _extreme_term(self, term: Expr, low: bool) -> Expr | None:
        if term == 1:
            return term
        if term in self.sizes:
            if low:
                return Integer(0)
            return self.sizes[term] - 1 if self.bounded else None
        if isinstance(term, fdiv):
            inner = self.lower(term.args[0]) if low else self.upper(term.args[0])
            return None if inner is None else Integer(inner // int(term.args[1]))
        if self.is_size(term):
            return term
        if isinstance(term, sympy.Mul):
            # One index times sizes: the sizes are not negative, so the index decides.
            inside = [a for a in term.args if a in self.sizes]
            outside = sympy.Mul(*(a for a in term.args if a not in self.sizes))
            if len(inside) == 1 and self.is_size(outside) and self._bound(outside, True) >= 0:
                bound = self._extreme_term(inside[0], low)
                return None if bound is None else sympy.expand(outside * bound)
        return None

    def is_size(self, e: Expr) -> bool:
        """Whether e is made of sizes alone: no index, no atom."""
        return not any(s in self.sizes or s in self.atoms for s in e.free_symbols)

    def _bound(self, e: Expr, low: bool) -> Any:
        """Numeric bound of an expression over sizes, possibly infinite."""
        if e.is_Integer:
            return int(e)
        known = self.shape_env.var_to_range if self.shape_env is not None else {}
        ranges: dict[Any, ValueRanges[Any]] = {s: known[s] for s in e.free_symbols if s in known}
        found = bound_sympy(e, ranges)
        return found.lower if low else found.upper

    def lower(self, e: Expr) -> int | None:
        """A number e never goes below, None when there is none."""
        return self._number(e, True)

    def upper(self, e: Expr) -> int | None:
        return self._number(e, False)

    def _number(self, e: Expr, low: bool) -> int | None:
        if e.is_Integer:
            return int(e)
        bound = self.extreme(e, low)
        if bound is None:
            return None
        number = self._bound(bound, low)
        if number in (int_oo, -int_oo, sympy.oo, -sympy.oo):
            return None
        return int(number)

    def nonnegative(self, e: Expr) -> bool:
        """Whether e >= 0 for all indices and all sizes the shape environment allows."""
        if e.is_Integer:
            return bool(e >= 0)
        key = (e, self.bounded)
        if key not in self._signs:
            self._signs[key] = self._nonnegative(e)
        return self._signs[key]

    def _nonnegative(self, e: Expr) -> bool:
        bound = self.extreme(e, low=True)
        if bound is None:
            return False
        if self._bound(bound, low=True) >= 0:
            return True
        if self.shape_env is None or not bound.free_symbols:
            return False
        # The range of each size is not enough; guards between sizes may be.
        size = self.shape_env.create_symintnode(bound, hint=None)
        return statically_known_true(size >= 0)

    def primitive(self, e: Expr) -> Expr:
        """The tightest integer expression with the same sign test e >= 0."""
        e = sympy.expand(e)
        content = self.content(e)
        if content <= 1:
            return e
        constant = int(terms(e).get(Integer(1), 0))
        return sympy.expand((e - constant) / content) + constant // content

    @staticmethod
    def content(e: Expr) -> int:
        content = 0
        for term, c in terms(e).items():
            if not c.is_Integer:
                raise TooComplex(f"{e} is not an integer expression")
            if term != 1:
                content = math.gcd(content, abs(int(c)))
        return content
