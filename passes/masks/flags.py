"""Read the conjuncts of a mask as the flags of ``kvtailor::attend``.

A query sits at the physical key index p; key k is visible when (causal) k <= p, (window)
p - k < window, (chunk) (k - origin) // chunk == (p - origin) // chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import sympy
from sympy import Expr, Integer, Symbol

from kvtailor.passes.masks.integers import fdiv, terms
from kvtailor.passes.masks.logic import Bool, Eq, Ge, Logic


@dataclass
class Reading:
    """A predicate read as attention flags and what is left.

    position: p, the physical key index a query sits at; None when no flag needs it.
    keys: conjuncts free of q. rows: conjuncts free of k. segments: equalities of one tensor at q
    and at k. residual: everything else.
    """

    position: Expr | None = None
    causal: bool = False
    window: int | None = None
    chunk: int | None = None
    origin: Expr = sympy.S.Zero
    keys: list[Bool] = field(default_factory=list)
    rows: list[Bool] = field(default_factory=list)
    segments: list[Bool] = field(default_factory=list)
    residual: list[Bool] = field(default_factory=list)

    @property
    def local(self) -> bool:
        return self.causal or self.window is not None or self.chunk is not None

    @property
    def left(self) -> list[Bool]:
        return [*self.segments, *self.rows, *self.keys]


@dataclass(frozen=True)
class _Bound:
    """k <= limit or k >= limit."""

    part: Bool
    limit: Expr


@dataclass(frozen=True)
class _Block:
    """(k - origin) // size == block."""

    part: Bool
    size: int
    origin: Expr
    block: Expr


def read(
    logic: Logic, axes: Sequence[Symbol], parts: Sequence[Bool], vacuous: Sequence[Bool] = ()
) -> Reading:
    """Sort the conjuncts of a mask into flags, key masks, row masks, segments and the rest.

    vacuous: conjuncts that always hold; they may become flags, never anything else.
    """
    h, q, k = axes[1:]
    uppers: list[_Bound] = []
    lowers: list[_Bound] = []
    blocks: list[_Block] = []
    for part in (*parts, *vacuous):
        bound = _bound(logic, part, h, q, k)
        block = _block(logic, part, h, k)
        if bound is not None:
            (lowers if terms(part.e)[k] == 1 else uppers).append(bound)  # type: ignore[attr-defined]
        elif block is not None:
            blocks.append(block)
    best, said = Reading(), set[Bool]()
    for p in _positions(logic, axes, uppers, lowers, blocks):
        reading, now = _flags_at(logic, axes, p, uppers, lowers, blocks)
        if len(now) > len(said):
            best, said = reading, now
    for part in parts:
        if part in said:
            continue
        deps = logic.deps(part)
        if q not in deps:
            best.keys.append(part)
        elif k not in deps:
            best.rows.append(part)
        elif _is_segment(logic, part, q, k):
            best.segments.append(part)
        else:
            best.residual.append(part)
    return best


def _bound(logic: Logic, part: Bool, h: Symbol, q: Symbol, k: Symbol) -> _Bound | None:
    """k against something free of k and h that moves with the query."""
    if not isinstance(part, Ge):
        return None
    c = terms(part.e).get(k, 0)
    if abs(c) != 1:
        return None
    rest = sympy.expand(part.e - c * k)
    deps = logic.deps(rest)
    # With a single query, a limit that is the same for the whole batch is that query's.
    moves = q in deps or (not deps and logic.sizes[q] == 1)
    if k in deps or h in deps or not moves:
        return None
    return _Bound(part, rest if c == -1 else sympy.expand(-rest))


def _block(logic: Logic, part: Bool, h: Symbol, k: Symbol) -> _Block | None:
    if not isinstance(part, Eq):
        return None
    floors = [(t, c) for t, c in terms(part.e).items() if k in logic.deps(t)]
    if len(floors) != 1:
        return None
    floor, c = floors[0]
    if not isinstance(floor, fdiv) or abs(c) != 1 or terms(floor.args[0]).get(k, 0) != 1:
        return None
    origin = sympy.expand(k - floor.args[0])
    block = sympy.expand((c * floor - part.e) / c)
    if {h, k} & (logic.deps(origin) | logic.deps(block)):
        return None
    return _Block(part, int(floor.args[1]), origin, block)


def _positions(
    logic: Logic,
    axes: Sequence[Symbol],
    uppers: Sequence[_Bound],
    lowers: Sequence[_Bound],
    blocks: Sequence[_Block],
) -> Iterator[Expr]:
    """What p may be, likeliest first."""
    q, k = axes[2], axes[3]
    yield from (u.limit for u in sorted(uppers, key=lambda u: terms(u.limit).get(q, 0) != 1))
    if lowers or blocks:
        # The last query sits at the last key: the causal bound may have gone for being implied.
        yield sympy.expand(q + logic.sizes[k] - logic.sizes[q])
        yield q
    for low in lowers:
        n = int(terms(low.limit).get(Integer(1), 0))
        if n < 0:
            yield sympy.expand(low.limit - n)
    for block in blocks:
        found = [t for t in terms(block.block) if isinstance(t, fdiv)]
        if len(found) == 1 and terms(block.block)[found[0]] == 1 and found[0].args[1] == block.size:
            whole = sympy.expand(block.block - found[0])
            yield sympy.expand(found[0].args[0] + block.size * whole + block.origin)
        yield sympy.expand(block.block * block.size + block.origin)


def _flags_at(
    logic: Logic,
    axes: Sequence[Symbol],
    p: Expr,
    uppers: Sequence[_Bound],
    lowers: Sequence[_Bound],
    blocks: Sequence[_Block],
) -> tuple[Reading, set[Bool]]:
    """The flags that hold with queries at p, and the conjuncts they say."""
    k = axes[3]
    reading, said = Reading(position=p), set[Bool]()
    for upper in uppers:
        if sympy.expand(upper.limit - p) == 0:
            reading.causal = True
            said.add(upper.part)
    for low in lowers:
        width = sympy.expand(p + 1 - low.limit)
        if width.is_Integer and width >= 1 and reading.window is None:
            reading.window = int(width)
            said.add(low.part)
    for block in blocks:
        if reading.chunk is None:
            here = logic.floor(sympy.expand(p - block.origin), block.size)
            if sympy.expand(here - block.block) == 0:
                reading.chunk, reading.origin = block.size, block.origin
                said.add(block.part)
    if said and not reading.causal:
        # Implied, and a local kernel may want to know.
        reading.causal = logic.nonnegative(sympy.expand(p - k))
    return (reading, said) if said else (Reading(), said)


def _is_segment(logic: Logic, part: Bool, q: Symbol, k: Symbol) -> bool:
    """f(q) == f(k)."""
    if not isinstance(part, Eq):
        return False
    at_q: Expr = Integer(0)
    at_k: Expr = Integer(0)
    for t, c in terms(part.e).items():
        deps = logic.deps(t)
        if {q, k} <= deps or not {q, k} & deps:
            return False
        if q in deps:
            at_q += c * t
        else:
            at_k += c * t
    return sympy.expand(logic.subs(at_k, k, q) + at_q) == 0
