"""Packed sequences: positions that a mask counts up inside each segment of a row."""

from __future__ import annotations

from sympy import Integer, Symbol

from kvtailor.passes.masks.integers import Atom, terms
from kvtailor.passes.masks.interpret import Interpreter
from kvtailor.passes.masks.logic import Bool, Eq, Logic, Or, conjuncts
from kvtailor.passes.masks.ops import summand
from kvtailor.passes.masks.values import Pick, replaced


def inside_segments(it: Interpreter, q: Symbol, k: Symbol, predicate: Bool) -> Bool:
    """Positions that count up inside a segment, as index differences.

    s = cumsum(diff(x) != 1) and s[q] == s[k] mean that x rises by 1 from the one to the
    other, so x[k] = x[q] + k - q in every other conjunct.
    """
    logic = it.logic
    parts = list(conjuncts(predicate))
    for segment in [p for p in parts if isinstance(p, Eq)]:
        counted = _counted_in(it, q, k, segment)
        if counted is None:
            continue
        at_q, dim = counted
        at_k = Atom(at_q.node, replaced(at_q.index, dim, k))
        rise = {logic.integer(at_k): logic.integer(at_q) + k - q}
        parts = [p if p is segment else logic.rebuild(p, rise) for p in parts]
    return logic.all_of(*parts)


def _counted_in(it: Interpreter, q: Symbol, k: Symbol, segment: Eq) -> tuple[Atom, int] | None:
    """The element, and its dimension, that counts up by one where a segment equality holds."""
    logic = it.logic
    found = terms(segment.e)
    if sorted(found.values()) != [-1, 1] or not all(t in logic.atoms for t in found):
        return None
    one, two = (logic.atoms[t] for t in found)
    if k in logic.deps(one):
        one, two = two, one
    defined = summand(it, one)
    if defined is None or one.node is not two.node:
        return None
    dim, j, starts = defined
    if isinstance(starts, Pick) and (starts.then, starts.other) == (1, 0):
        starts = starts.condition
    if not isinstance(starts, Bool):
        return None
    if two.index != replaced(one.index, dim, k) or one.index[dim] != q:
        return None
    counted: set[tuple[Atom, int] | None] = set()
    inside = logic.negate(starts)
    for case in inside.args if isinstance(inside, Or) else (inside,):
        # The first token starts a segment; it is not counted from anything.
        if case != Eq(j):
            counted.add(_unit_step(logic, case, j, q))
    return counted.pop() if len(counted) == 1 else None


def _unit_step(logic: Logic, case: Bool, j: Symbol, q: Symbol) -> tuple[Atom, int] | None:
    """For x[.., j, ..] - x[.., j - 1, ..] == 1: x[.., q, ..] and the dimension of j."""
    found = dict(terms(case.e)) if isinstance(case, Eq) else {}
    one = found.pop(Integer(1), 0)
    if len(found) != 2 or not all(t in logic.atoms for t in found):
        return None
    for after, before in (tuple(found), tuple(found)[::-1]):
        a, b = logic.atoms[after], logic.atoms[before]
        if (found[after], found[before], one) not in ((1, -1, -1), (-1, 1, 1)):
            continue
        if a.node is b.node and j in a.index:
            dim = a.index.index(j)
            if b.index == replaced(a.index, dim, j - 1):
                return Atom(a.node, replaced(a.index, dim, q)), dim
    return None
