"""Predicates over integer index symbols, in a normal form small enough to read a mask off.

A predicate is a Bool in negation normal form over

    Ge(e): e >= 0     Eq(e): e == 0     Ne(e): e != 0     Lit(atom): a bool tensor element
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
from sympy import Expr, Integer, Symbol

from kvtailor.passes.masks.integers import Atom, Integers, TooComplex, terms

# More literals than this in one predicate and it is not a mask anybody wrote.
MAX_LITERALS = 64


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


class Logic(Integers):
    """Builds predicates and decides what intervals decide of them."""

    def deps(self, x: Any) -> frozenset[Symbol]:
        """The index symbols that an expression, atom or predicate depends on."""
        if isinstance(x, _Nary):
            return frozenset().union(*map(self.deps, x.args))
        if isinstance(x, Lit):
            return self.deps(x.atom)
        return super().deps(x.e if isinstance(x, (Ge, Eq, Ne)) else x)

    # --- literals

    def ge(self, e: Expr) -> Bool:
        """e >= 0."""
        e = self.primitive(e)
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
        content = self.content(e)
        if content > 1:
            constant = int(terms(e).get(Integer(1), 0))
            if constant % content:
                return FALSE
            e = sympy.expand(e / content)
        return self._eq_literal(e)

    def ne(self, e: Expr) -> Bool:
        return self.negate(self.eq(e))

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
            return Lit(self.replace_atom(p.atom, values), p.positive)
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
