"""Predicates over integer index symbols, in a normal form small enough to read a mask off.

An integer is a sympy expression, linear in its generators: index symbols (each from 0 to its
size less one), sizes of the shape environment, integer atoms (a tensor element nobody knows) and
``fdiv``. A predicate is a Bool in negation normal form over

    Ge(e): e >= 0     Eq(e): e == 0     Ne(e): e != 0     Lit(atom): a bool tensor element

Only ``expand`` and coefficients are used, never ``simplify``: whatever is decided is decided by
the interval an expression takes over all indices. Integer tensors are taken not to overflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
from sympy import Expr, Integer, Symbol
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

# More literals than this in one predicate and it is not a mask anybody wrote.
MAX_LITERALS = 64


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


class Bool:
    """A predicate. Immutable, compared by structure."""


@dataclass(frozen=True)
class Ge(Bool):
    e: Expr


@dataclass(frozen=True)
class Eq(Bool):
    e: Expr


@dataclass(frozen=True)
class Ne(Bool):
    e: Expr


@dataclass(frozen=True)
class Lit(Bool):
    atom: Atom
    positive: bool = True


@dataclass(frozen=True, eq=False)
class _Nary(Bool):
    """Arguments keep their order, for stable text; equality ignores it."""

    args: tuple[Bool, ...]

    @cached_property
    def _set(self) -> frozenset[Bool]:
        return frozenset(self.args)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._set == other._set

    def __hash__(self) -> int:
        return hash((type(self).__name__, self._set))


class And(_Nary):
    pass


class Or(_Nary):
    pass


TRUE = And(())
FALSE = Or(())


def conjuncts(p: Bool) -> tuple[Bool, ...]:
    return p.args if isinstance(p, And) else (p,)


def literals(p: Bool) -> Iterator[Bool]:
    if isinstance(p, _Nary):
        for arg in p.args:
            yield from literals(arg)
    else:
        yield p


def terms(e: Expr) -> dict[Expr, Expr]:
    """Generator -> coefficient of an expanded expression; 1 stands for the constant."""
    return e.as_coefficients_dict()


class Logic:
    """Builds predicates and decides what intervals decide.

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
        """The index symbols that an expression, atom or predicate depends on."""
        found: set[Symbol] = set()
        if isinstance(x, Expr):
            for s in x.free_symbols:
                if s in self.sizes:
                    found.add(s)
                elif s in self.atoms:
                    found |= self.deps(self.atoms[s])
        elif isinstance(x, Atom):
            for e in x.index:
                found |= self.deps(e)
        elif isinstance(x, _Nary):
            for arg in x.args:
                found |= self.deps(arg)
        elif isinstance(x, Lit):
            found |= self.deps(x.atom)
        elif isinstance(x, (Ge, Eq, Ne)):
            found |= self.deps(x.e)
        return frozenset(found)

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
            return self.integer(self._replace_atom(self.atoms[term], values))
        if isinstance(term, fdiv):
            return self.floor(self.replace(term.args[0], values), int(term.args[1]))
        if isinstance(term, sympy.Mul):
            return sympy.Mul(*(self._replace_term(a, values) for a in term.args))
        raise TooComplex(f"cannot replace inside {term}")

    def _replace_atom(self, atom: Atom, values: Mapping[Symbol, Expr]) -> Atom:
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

    # --- literals

    def ge(self, e: Expr) -> Bool:
        """e >= 0."""
        e = self._primitive(e)
        if self.nonnegative(e):
            return TRUE
        if self.nonnegative(-e - 1):
            return FALSE
        if self.nonnegative(-e):
            return self._eq_literal(e)
        return Ge(e)

    def eq(self, e: Expr) -> Bool:
        """e == 0."""
        e = sympy.expand(e)
        if e.is_Integer:
            return TRUE if e == 0 else FALSE
        if self.nonnegative(e - 1) or self.nonnegative(-e - 1):
            return FALSE
        if self.nonnegative(e) and self.nonnegative(-e):
            return TRUE
        content = self._content(e)
        if content > 1:
            constant = int(terms(e).get(Integer(1), 0))
            if constant % content:
                return FALSE
            e = sympy.expand(e / content)
        return self._eq_literal(e)

    def ne(self, e: Expr) -> Bool:
        return self.negate(self.eq(e))

    def _primitive(self, e: Expr) -> Expr:
        """The tightest integer expression with the same sign test e >= 0."""
        e = sympy.expand(e)
        content = self._content(e)
        if content <= 1:
            return e
        constant = int(terms(e).get(Integer(1), 0))
        return sympy.expand((e - constant) / content) + constant // content

    @staticmethod
    def _content(e: Expr) -> int:
        content = 0
        for term, c in terms(e).items():
            if not c.is_Integer:
                raise TooComplex(f"{e} is not an integer expression")
            if term != 1:
                content = math.gcd(content, abs(int(c)))
        return content

    @staticmethod
    def _eq_literal(e: Expr) -> Bool:
        """Eq with a sign of its own: e == 0 and -e == 0 are one literal."""
        leading = min((t for t in terms(e) if t != 1), key=str)
        return Eq(e if terms(e)[leading] > 0 else sympy.expand(-e))

    def rebuild(self, p: Bool, values: Mapping[Symbol, Expr]) -> Bool:
        """p with index symbols or integer atoms replaced, decided anew."""
        if isinstance(p, Ge):
            return self.ge(self.replace(p.e, values))
        if isinstance(p, Eq):
            return self.eq(self.replace(p.e, values))
        if isinstance(p, Ne):
            return self.ne(self.replace(p.e, values))
        if isinstance(p, Lit):
            return Lit(self._replace_atom(p.atom, values), p.positive)
        assert isinstance(p, _Nary)
        args = [self.rebuild(a, values) for a in p.args]
        return self.all_of(*args) if isinstance(p, And) else self.any_of(*args)

    def has_atoms(self, p: Bool) -> bool:
        """Whether p depends on the contents of a tensor."""
        return any(
            isinstance(each, Lit) or any(s in self.atoms for s in each.e.free_symbols)  # type: ignore[attr-defined]
            for each in literals(p)
        )

    # --- connectives

    def negate(self, p: Bool) -> Bool:
        if isinstance(p, Ge):
            return self.ge(-p.e - 1)
        if isinstance(p, Eq):
            # Where e has a side, != is that side: one form for one fact.
            if self.nonnegative(p.e):
                return self.ge(p.e - 1)
            if self.nonnegative(-p.e):
                return self.ge(-p.e - 1)
            return Ne(p.e)
        if isinstance(p, Ne):
            return Eq(p.e)
        if isinstance(p, Lit):
            return Lit(p.atom, not p.positive)
        assert isinstance(p, _Nary)
        args = tuple(self.negate(a) for a in p.args)
        return Or(args) if isinstance(p, And) else And(args)

    def implies(self, p: Bool, q: Bool) -> bool:
        """Whether q holds wherever p does. Sound, not complete."""
        if p in (q, FALSE) or q == TRUE:
            return True
        if isinstance(q, And):
            return all(self.implies(p, each) for each in q.args)
        if isinstance(p, Or):
            return all(self.implies(each, q) for each in p.args)
        if isinstance(q, Or) and any(self.implies(p, each) for each in q.args):
            return True
        if isinstance(p, And):
            return any(self.implies(each, q) for each in p.args)
        if isinstance(p, Ge) and isinstance(q, Ge):
            return self._below(p.e, q.e)
        if isinstance(p, Ge) and isinstance(q, Ne):
            return self._below(p.e, q.e - 1) or self._below(p.e, -q.e - 1)
        if isinstance(p, Eq) and isinstance(q, Ge):
            return self._below(p.e, q.e) or self._below(-p.e, q.e)
        if isinstance(p, Eq) and isinstance(q, Ne):
            return any(self._below(s * p.e, t * q.e - 1) for s in (1, -1) for t in (1, -1))
        return False

    def _below(self, a: Expr, b: Expr) -> bool:
        """Whether a <= b for all indices."""
        return self.nonnegative(sympy.expand(b - a))

    def disjoint(self, p: Bool, q: Bool) -> bool:
        return self.implies(p, self.negate(q))

    def all_of(self, *args: Bool) -> Bool:
        """The conjunction, without what other conjuncts imply."""
        units, clauses = self._flatten(args)
        if len(units) + len(clauses) > MAX_LITERALS:
            raise TooComplex("the predicate has too many literals")
        changed = True
        while changed:
            changed = False
            units = self._strongest(units)
            if any(self.disjoint(p, q) for i, p in enumerate(units) for q in units[:i]):
                return FALSE
            kept = []
            for clause in clauses:
                if any(self.implies(u, d) for u in units for d in clause.args):
                    continue
                left = tuple(d for d in clause.args if not any(self.disjoint(u, d) for u in units))
                if not left:
                    return FALSE
                if len(left) == 1:
                    more, inner = self._flatten(left)
                    units += [u for u in more if u not in units]
                    kept += inner
                    changed = True
                else:
                    kept.append(clause if len(left) == len(clause.args) else Or(left))
            clauses = [
                c
                for i, c in enumerate(kept)
                if not any(
                    d._set < c._set or (d == c and j < i) for j, d in enumerate(kept) if j != i
                )
            ]
        out = (*units, *clauses)
        if sum(1 for each in out for _ in literals(each)) > MAX_LITERALS:
            raise TooComplex("the predicate has too many literals")
        return out[0] if len(out) == 1 else And(out)

    @staticmethod
    def _flatten(args: Iterable[Bool]) -> tuple[list[Bool], list[Or]]:
        """Conjuncts that are not disjunctions, and those that are. FALSE is an empty clause."""
        units: dict[Bool, None] = {}
        clauses: dict[Or, None] = {}
        for arg in args:
            for each in conjuncts(arg):
                if isinstance(each, Or):
                    clauses[each] = None
                elif isinstance(each, And):
                    more, inner = Logic._flatten([each])
                    units.update(dict.fromkeys(more))
                    clauses.update(dict.fromkeys(inner))
                else:
                    units[each] = None
        return list(units), list(clauses)

    def _strongest(self, units: list[Bool]) -> list[Bool]:
        kept: list[Bool] = []
        for i, p in enumerate(units):
            later = units[i + 1 :]
            if any(self.implies(q, p) for q in kept):
                continue
            if any(self.implies(q, p) and not self.implies(p, q) for q in later):
                continue
            kept.append(p)
        return kept

    def any_of(self, *args: Bool) -> Bool:
        return self.negate(self.all_of(*(self.negate(a) for a in args)))

    def where(self, c: Bool, x: Bool, y: Bool) -> Bool:
        """x where c holds, y elsewhere."""
        if c == TRUE or x == y:
            return x
        if c == FALSE:
            return y
        no = self.negate(c)
        # Absolute values and clamps end here: both halves of |e| <= n hold at once.
        if self.implies(c, y) and self.implies(no, x):
            return self.all_of(x, y)
        if self.implies(x, c) and self.implies(y, no):
            return self.any_of(x, y)
        return self.any_of(self.all_of(c, x), self.all_of(no, y))
