"""Predicates over b, h, q and k as text for the report.

Elements of tensors are named by what they do in the mask, with their indices: ``padding[b, k]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
from sympy import Expr, Integer, Symbol

from kvtailor.passes.masks.flags import Reading
from kvtailor.passes.masks.integers import Atom, fdiv, terms
from kvtailor.passes.masks.logic import And, Bool, Eq, Ge, Lit, Logic, Ne, Or


class Names:
    """Names of atoms, given out on first use: the role, then role2, role3, ... per tensor."""

    def __init__(self, logic: Logic, axes: Sequence[Symbol]):
        self.logic = logic
        self.axes = tuple(axes)
        self._names: dict[object, str] = {}

    def atom(self, atom: Atom, role: str) -> str:
        if not atom.index and role == "position":
            role = "offset"
        if atom.node not in self._names:
            taken = sum(n.rstrip("0123456789") == role for n in self._names.values())
            self._names[atom.node] = role if not taken else f"{role}{taken + 1}"
        index = [self.integer(i, role) for i in atom.index]
        # Leading dimensions of one row say nothing.
        while len(index) > 1 and index[0] == "0":
            index.pop(0)
        name = self._names[atom.node]
        return f"{name}[{', '.join(index)}]" if index else name

    def block(self, e: Expr, origin: Expr, size: int) -> str:
        """The chunk that index e lies in; an origin read from tensors gets one name."""
        if any(s in self.logic.atoms for s in origin.free_symbols):
            deps = self.logic.deps(origin)
            index = ", ".join(str(a) for a in self.axes if a in deps)
            name = f"origin[{index}]" if index else "origin"
            return f"({self.integer(e, 'position')} - {name})//{size}"
        found = self.integer(e - origin, "position")
        return f"{found if found.isidentifier() else f'({found})'}//{size}"

    def integer(self, e: Expr, role: str) -> str:
        """q + offset - 3: index symbols first, constants last."""
        found = terms(sympy.expand(e))
        order = {a: i for i, a in enumerate((self.axes[2], self.axes[3], *self.axes[:2]))}

        def rank(t: Expr) -> tuple[int, int, str]:
            if t == 1:
                return 3, 0, ""
            if t in order:
                return (0 if found[t] > 0 else 1), order[t], ""
            return (1 if found[t] > 0 else 2), 9, str(t)

        out = ""
        for t in sorted(found, key=rank):
            c = found[t]
            size = abs(c)
            what = str(size) if t == 1 else self._term(t, role)
            if t != 1 and size != 1:
                what = f"{size}*({what})" if isinstance(t, fdiv) else f"{size}*{what}"
            sign = "-" if c < 0 else "+"
            out += f" {sign} {what}" if out else (f"-{what}" if c < 0 else what)
        return out or "0"

    def _term(self, t: Expr, role: str) -> str:
        if t in self.logic.atoms:
            return self.atom(self.logic.atoms[t], role)
        if isinstance(t, fdiv):
            inner = self.integer(t.args[0], role)
            return f"{inner if inner.isidentifier() else f'({inner})'}//{t.args[1]}"
        return str(t)


def predicate_text(p: Bool, names: Names, role: str) -> str:
    """One predicate, comparisons with the key on the left where there is one."""
    if isinstance(p, Lit):
        return ("" if p.positive else "~") + names.atom(p.atom, role)
    if isinstance(p, (And, Or)):
        parts = [predicate_text(a, names, role) for a in p.args]
        if isinstance(p, And):
            return " & ".join(f"({s})" if " | " in s else s for s in parts)
        return "or[" + ", ".join(parts) + "]"
    assert isinstance(p, (Ge, Eq, Ne))
    if isinstance(p, Ne) and p.e in names.logic.atoms:
        return names.integer(p.e, role)
    left: Expr = Integer(0)
    right: Expr = Integer(0)
    q, k = names.axes[2], names.axes[3]
    pivot = k if k in names.logic.deps(p) else q
    for t, c in terms(p.e).items():
        if pivot in names.logic.deps(t):
            left += c * t
        else:
            right -= c * t
    leading = min((c for t, c in terms(left).items() if t != 1), default=Integer(1))
    flip = leading < 0
    if flip:
        left, right = sympy.expand(-left), sympy.expand(-right)
    sign = {Ge: "<=" if flip else ">=", Eq: "==", Ne: "!="}[type(p)]
    if sign == "<=" and not {q, k} <= names.logic.deps(p):
        sign, right = "<", right + 1
    a, b = names.integer(left, role), names.integer(right, role)
    if isinstance(p, Eq) and pivot == k and q in names.logic.deps(right):
        # Same segment reads from the query to the key.
        a, b = b, a
    return f"{a} {sign} {b}"


def bias_text(logic: Logic, axes: Sequence[Symbol], atom: Atom) -> str:
    """An unknown float added to the scores, by what it depends on: ``bias(h, q, k)``."""
    deps = logic.deps(atom)
    return f"bias({', '.join(str(a) for a in axes if a in deps)})"


def proof_text(logic: Logic, names: Names, reading: Reading) -> str:
    """The proved conjuncts: ``k <= q & q - k < 8 & padding[b, k]``; "True" for none."""
    parts: list[str] = []
    p, k = reading.position, names.axes[3]
    if p is not None:
        here = names.integer(p, "position")
        if reading.causal:
            parts.append(f"k <= {here}")
        if reading.window is not None:
            parts.append(f"{here} - k < {reading.window}")
        if reading.chunk is not None:
            sides = (names.block(x, reading.origin, reading.chunk) for x in (k, p))
            parts.append(" == ".join(sides))
    parts += [predicate_text(x, names, "segment") for x in reading.segments]
    for x in (*reading.rows, *reading.keys):
        parts.append(predicate_text(x, names, "length" if isinstance(x, Ge) else "padding"))
    return " & ".join(parts) or "True"
