"""Prove what the mask of every attention means, and say it in flags.

Before:  m = and(le(k, q), index(padding)); m = expand(m, [B, 1, T, T])
         attend(q, k, v, m)
After:   p = index(padding)                      # [B, 1, 1, T]
         attend(q, k, v, p, causal=True)

A mask is replaced only by flags and a remainder that equal it for all b, h, q and k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from sympy import Expr, Integer, Symbol
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kvtailor.kernels.ops import attend
from kvtailor.passes.graph import SITE, NotDerivable, is_tensor, module_path, sites, val
from kvtailor.passes.interpret_mask import (
    Interpreter,
    Pick,
    Real,
    Value,
    conjunct_nodes,
    size_expr,
    sizes,
    summand,
)
from kvtailor.passes.mask_logic import (
    FALSE,
    TRUE,
    Atom,
    Bool,
    Eq,
    Ge,
    Logic,
    Or,
    TooComplex,
    conjuncts,
    fdiv,
    terms,
)
from kvtailor.passes.mask_tensors import CannotBuild, TensorBuilder, can_place
from kvtailor.passes.mask_text import Names, text
from kvtailor.passes.report import AttentionSite, PassReport

ARGUMENTS = ("q", "k", "v", "mask", "q_positions", "chunk_origin", "sinks")


def prove_masks(gm: fx.GraphModule) -> PassReport:
    """Move every proved conjunct of a mask into the flags of its attend; complete the sites.

    Reason codes: "residual" part of the mask has no flag and stays dense, "bias" the mask adds
    more than 0 and the minimum, "empty-row" an additive minimum and rows that may see no key,
    "all-masked" no key is visible to anyone, "unreadable" the mask grew past what is read,
    "no-tensor" the positions or origins have no small form in the graph.
    """
    report = PassReport()
    provers: dict[Any, _Prover] = {}
    for node in gm.graph.find_nodes(op="call_function", target=attend):
        site = node.meta.get(SITE)
        if site is None:
            site = node.meta[SITE] = AttentionSite(site=module_path(node), node=node.name)
            sites(gm).append(site)
        shape = tuple(size_expr(n) for n in (*val(node).shape[:3], val(node.args[1]).shape[2]))
        device = val(node.args[0]).device
        if (shape, device) not in provers:
            provers[shape, device] = _Prover(gm, shape, device)
        provers[shape, device].prove(node, site, report)
    return report


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
    origin: Expr = Integer(0)
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


@dataclass
class Mask:
    """A mask as a predicate, and what else it does.

    bias: unknown floats it adds. scaled: it adds a known number other than 0 and the minimum.
    finite: masked entries are finite, so that a row of nothing else still has a softmax.
    """

    visible: Bool
    bias: tuple[Atom, ...] = ()
    scaled: bool = False
    finite: bool = False


@dataclass
class Proof:
    mask: Mask
    predicate: Bool
    reading: Reading
    never_empty: bool


class _Prover:
    """Proves the masks of all sites with one shape ``(B, Hq, Tq, Tk)``."""

    def __init__(self, gm: fx.GraphModule, shape: tuple[Expr, ...], device: torch.device):
        self.logic = Logic(_shape_env(gm))
        self.axes = tuple(self.logic.index(n, size) for n, size in zip("bhqk", shape))
        self.interpreter = Interpreter(gm, self.logic)
        self.unbounded = Interpreter(gm, self.logic)
        self.build = TensorBuilder(gm.graph, self.logic, device)
        self.graph = gm.graph
        self._proofs: dict[Any, Proof | str] = {}

    def prove(self, node: fx.Node, site: AttentionSite, report: PassReport) -> None:
        given = arguments(node)
        key = tuple(
            given[n] if not isinstance(given[n], torch.SymInt) else str(given[n])
            for n in ("mask", "q_positions", "chunk_origin", "q_offset", "causal", "window")
        ) + (given["chunk"],)
        if key not in self._proofs:
            try:
                self._proofs[key] = self._proof(given)
            except TooComplex as error:
                self._proofs[key] = str(error)
        proof = self._proofs[key]
        if isinstance(proof, str):
            site.kind = "masked"
            self._leave(site, report, "unreadable", proof)
            return
        self._describe(site, proof)
        with self.graph.inserting_before(node):
            new = self._rewritten(given, proof, site, report)
        if new != given:
            node.args = tuple(new.pop(n) for n in ARGUMENTS)
            node.kwargs = {n: v for n, v in new.items() if v != _DEFAULTS.get(n, _ABSENT)}
            report.rewrites += 1

    @staticmethod
    def _leave(site: AttentionSite, report: PassReport, code: str, why: str) -> None:
        site.reason = f"{code}: {why}"
        report.skip(site.site, code, why)

    # --- from graph to predicate

    def _proof(self, given: dict[str, Any]) -> Proof:
        flags = self._flags_predicate(given)
        mask = self._mask(given["mask"], self.interpreter)
        predicate = self.logic.all_of(flags, mask.visible)
        predicate = self._inside_segments(predicate)
        vacuous = self._vacuous(given, predicate)
        reading = read(self.logic, self.axes, conjuncts(predicate), vacuous)
        return Proof(mask, predicate, reading, self._never_empty(predicate, reading))

    def _vacuous(self, given: dict[str, Any], predicate: Bool) -> list[Bool]:
        """Conjuncts that hold everywhere for these sizes: a window wider than the keys.

        They change nothing, but tell what the mask is about.
        """
        if predicate == FALSE:
            return []
        self.logic.bounded = False
        try:
            mask = self._mask(given["mask"], self.unbounded)
            unbounded = self.logic.all_of(self._flags_predicate(given), mask.visible)
            declared = conjuncts(self._inside_segments(unbounded))
        except TooComplex:
            return []
        finally:
            self.logic.bounded = True
        return [p for p in declared if self.logic.rebuild(p, {}) == TRUE]

    def _flags_predicate(self, given: dict[str, Any]) -> Bool:
        """What the flags already there let through."""
        logic, k = self.logic, self.axes[3]
        if not (given["causal"] or given["window"] is not None or given["chunk"] is not None):
            return TRUE
        p = self._integer(given["q_positions"], 2) if given["q_positions"] is not None else None
        offset = self.interpreter.integer_arg(given["q_offset"])
        p = sympy.expand((self.axes[2] if p is None else p) + offset)
        parts = []
        if given["causal"]:
            parts.append(logic.ge(p - k))
        if given["window"] is not None:
            parts.append(logic.ge(k - p + int(given["window"]) - 1))
        if given["chunk"] is not None:
            o, c = self._integer(given["chunk_origin"], 1), int(given["chunk"])
            parts.append(logic.eq(logic.floor(k - o, c) - logic.floor(p - o, c)))
        return logic.all_of(*parts)

    def _integer(self, node: fx.Node | None, rank_1_axis: int) -> Expr:
        """q_positions or chunk_origin at (b, q); rank_1_axis: a lone dimension is b (1) or q (2)."""
        if node is None:
            return Integer(0)
        b, q = self.axes[0], self.axes[2]
        n = val(node).dim()
        index = {0: (), 1: ((b, q)[rank_1_axis - 1],), 2: (b, q)}[n]
        index = tuple(Integer(0) if m == 1 and i is b else i for i, m in zip(index, sizes(node)))
        value = self.interpreter.read(node, index)
        if not isinstance(value, Expr):
            raise TooComplex("positions with cases")
        return value

    def _mask(self, node: fx.Node | None, interpreter: Interpreter) -> Mask:
        if node is None:
            return Mask(TRUE)
        have, want = sizes(node), tuple(self.logic.sizes[a] for a in self.axes)
        value = interpreter.read(node, interpreter.broadcast_index(have, want, self.axes))
        if isinstance(value, Bool):
            return Mask(value)
        mask = Mask(TRUE)
        mask.visible = self._visible(value, val(node).dtype, mask)
        return mask

    def _visible(self, value: Value, dtype: torch.dtype, mask: Mask) -> Bool:
        """Where an additive mask does not hide the key. Visible is what is not provably hidden."""
        if isinstance(value, Pick):
            return self.logic.where(
                value.condition,
                self._visible(value.then, dtype, mask),
                self._visible(value.other, dtype, mask),
            )
        assert isinstance(value, Real), "an additive mask is a float"
        if value.const == float("-inf"):
            return FALSE
        if value.const == torch.finfo(dtype).min or value.const <= -1e9:
            mask.finite = True
            return FALSE
        mask.scaled |= value.const != 0
        mask.bias += tuple(a for a in value.parts if a not in mask.bias)
        return TRUE

    # --- facts about a predicate

    def _inside_segments(self, predicate: Bool) -> Bool:
        """Positions that count up inside a segment, as index differences.

        s = cumsum(diff(x) != 1) and s[q] == s[k] mean that x rises by 1 from the one to the
        other, so x[k] = x[q] + k - q in every other conjunct.
        """
        logic, (b, h, q, k) = self.logic, self.axes
        parts = list(conjuncts(predicate))
        for segment in [p for p in parts if isinstance(p, Eq)]:
            counted = self._counted_in(segment)
            if counted is None:
                continue
            node, dim = counted
            replace: dict[Symbol, Expr] = {}
            for symbol, atom in list(logic.atoms.items()):
                if atom.node is node and atom.index[dim] == k:
                    at_q = Atom(node, (*atom.index[:dim], q, *atom.index[dim + 1 :]))
                    replace[symbol] = logic.integer(at_q) + k - q
            if replace:
                parts = [p if p is segment else logic.rebuild(p, replace) for p in parts]
        return logic.all_of(*parts)

    def _counted_in(self, segment: Eq) -> tuple[fx.Node, int] | None:
        """The tensor, and its token dimension, that a segment equality keeps counting by one."""
        logic, q, k = self.logic, self.axes[2], self.axes[3]
        found = terms(segment.e)
        if sorted(found.values(), key=str) != [-1, 1] or not all(t in logic.atoms for t in found):
            return None
        one, two = (logic.atoms[t] for t in found)
        if k in logic.deps(one):
            one, two = two, one
        if one.node is not two.node or not _swapped(one.index, two.index, q, k):
            return None
        defined = summand(self.interpreter, one)
        if defined is None or not isinstance(defined[1], Bool):
            return None
        j, starts = defined
        node: fx.Node | None = None
        dim = 0
        inside = logic.negate(starts)
        for case in inside.args if isinstance(inside, Or) else (inside,):
            if case == Eq(j):
                # The first token starts a segment and is not counted from anything.
                continue
            step = self._unit_step(case, j)
            if step is None or (node is not None and step != (node, dim)):
                return None
            node, dim = step
        return None if node is None else (node, dim)

    def _unit_step(self, case: Bool, j: Symbol) -> tuple[fx.Node, int] | None:
        """For x[.., j, ..] - x[.., j - 1, ..] == 1: x and the dimension."""
        if not isinstance(case, Eq):
            return None
        found = dict(terms(case.e))
        one = found.pop(Integer(1), None)
        if len(found) != 2 or not all(t in self.logic.atoms for t in found):
            return None
        for after, before in (tuple(found), tuple(found)[::-1]):
            sign = found[after]
            if abs(sign) != 1 or found[before] != -sign or one != -sign:
                continue
            a, b = self.logic.atoms[after], self.logic.atoms[before]
            if a.node is b.node and _swapped(a.index, b.index, j, j - 1):
                return a.node, a.index.index(j)
        return None

    def _never_empty(self, predicate: Bool, reading: Reading) -> bool:
        """Whether every row provably sees a key: a witness that satisfies every conjunct."""
        logic, (b, h, q, k) = self.logic, self.axes
        last = sympy.expand(logic.sizes[k] - 1)
        witnesses: list[Expr] = [Integer(0), q, last, sympy.expand(q + last + 1 - logic.sizes[q])]
        if reading.position is not None:
            witnesses.append(reading.position)
        for w in witnesses:
            if not (logic.nonnegative(w) and logic.nonnegative(sympy.expand(last - w))):
                continue
            try:
                if logic.rebuild(predicate, {k: w}) == TRUE:
                    return True
            except TooComplex:
                continue
        return False

    # --- from reading to arguments

    def _rewritten(
        self, given: dict[str, Any], proof: Proof, site: AttentionSite, report: PassReport
    ) -> dict[str, Any]:
        """The arguments of attend after the proof; the given ones where nothing may change."""
        new = dict(given)
        mask, reading = proof.mask, proof.reading
        if proof.predicate == FALSE:
            self._leave(site, report, "all-masked", "no key is visible to any query")
            return given
        if mask.bias or mask.scaled:
            names = Names(self.logic, self.axes)
            what = ", ".join(names.bias(a) for a in mask.bias) or "a constant"
            self._leave(site, report, "bias", f"the mask also adds {what}")
            return given
        if reading.residual:
            self._leave(site, report, "residual", f"no flag says {site.residual}")
            return given
        if mask.finite and not proof.never_empty:
            self._leave(
                site,
                report,
                "empty-row",
                "the additive minimum gives a row that sees no key the mean of all values, "
                "and such rows are not ruled out",
            )
            return given
        if proof.never_empty and given["empty_row"] != "zero":
            new["empty_row"] = "zero"
        if given["mask"] is None or self._minimal(given["mask"], mask, reading):
            return new
        try:
            new.update(self._flags(reading))
            new["mask"] = self._remainder(given["mask"], reading)
        except (CannotBuild, NotDerivable) as error:
            self._leave(site, report, "no-tensor", str(error))
            return given
        return new

    def _minimal(self, node: fx.Node, mask: Mask, reading: Reading) -> bool:
        """Whether the mask says nothing that a flag or a smaller tensor could say."""
        if val(node).dtype != torch.bool:
            return False
        if mask.visible == TRUE or not all(
            part in reading.left for part in conjuncts(mask.visible)
        ):
            return False
        rows = sizes(node)[-2] if val(node).dim() > 1 else Integer(1)
        q = self.axes[2]
        return rows == 1 or any(q in self.logic.deps(p) for p in conjuncts(mask.visible))

    def _flags(self, reading: Reading) -> dict[str, Any]:
        flags: dict[str, Any] = {
            "causal": reading.causal,
            "window": reading.window,
            "chunk": reading.chunk,
            "q_positions": None,
            "chunk_origin": None,
            "q_offset": 0,
        }
        if not reading.local:
            return flags
        b, q = self.axes[0], self.axes[2]
        build, logic = self.build, self.logic
        assert reading.position is not None
        p = reading.position
        if logic.sizes[q] == 1:
            # One query is query 0, whether its symbol is there or not.
            p = sympy.expand(logic.subs(p, q, Integer(0)) + q)
        varying, fixed = build.split(p)
        flags["q_offset"] = build.size(fixed)
        if varying != q:
            axes = (b, q) if b in logic.deps(varying) else (q,)
            flags["q_positions"] = build.full_size(build.integers(varying, axes), axes)
        if reading.chunk is not None:
            o = sympy.expand(reading.origin)
            if not (o.is_Integer and o % reading.chunk == 0):
                deps = logic.deps(o)
                axes = (b, q) if q in deps else (b,) if b in deps else ()
                flags["chunk_origin"] = build.full_size(build.integers(o, axes), axes)
        return flags

    def _remainder(self, node: fx.Node, reading: Reading) -> fx.Node | None:
        """The conjuncts no flag says, as one bool tensor: out of mask nodes where they exist."""
        need = dict.fromkeys(reading.left)
        if not need:
            return None
        if reading.rows and reading.keys and not reading.local:
            raise CannotBuild("rows and keys are masked together, which takes the whole square")
        logic, axes = self.logic, self.axes
        parts: list[fx.Node] = []
        want = tuple(logic.sizes[a] for a in axes)
        start = self.interpreter.broadcast_index(sizes(node), want, axes)
        for leaf, index in conjunct_nodes(self.interpreter, node, start):
            said = self.interpreter.read(leaf, index)
            if not isinstance(said, Bool):
                continue
            covers = [p for p in conjuncts(said) if p in need]
            # Only a tensor as small as what it says: one over (b, k) for a key mask.
            deps = logic.deps(said)
            if not covers or deps != frozenset().union(*map(logic.deps, covers)):
                continue
            index = tuple(Integer(0) if i in logic.sizes and i not in deps else i for i in index)
            if can_place(logic, leaf, index, axes):
                parts.append(self.build.placed(leaf, index, axes))
                for p in covers:
                    del need[p]
        parts += [self.build.predicate(p, axes) for p in need]
        return self.build.conjunction(parts)

    # --- report

    def _describe(self, site: AttentionSite, proof: Proof) -> None:
        reading, mask = proof.reading, proof.mask
        logic, (b, h, q, k) = self.logic, self.axes
        site.causal, site.window, site.chunk = reading.causal, reading.window, reading.chunk
        site.segments = bool(reading.segments)
        site.padding = any(k in logic.deps(p) and logic.has_atoms(p) for p in reading.keys)
        names = Names(logic, self.axes)
        left = [text(p, names, "x") for p in reading.residual]
        left += [names.bias(a) for a in mask.bias]
        left += ["a constant"] if mask.scaled else []
        site.residual = " & ".join(left) or None
        hidden = mask.scaled or any(h not in logic.deps(a) for a in mask.bias)
        if proof.predicate == FALSE:
            site.kind = "masked"
        elif reading.chunk is not None:
            site.kind = "chunked"
        elif reading.window is not None:
            site.kind = "sliding"
        elif reading.causal:
            site.kind = "causal"
        elif reading.residual or hidden:
            # An unknown float that is the same for all heads may well be somebody's mask.
            site.kind = "masked"
        else:
            site.kind = "cross" if site.cross else "full"
        site.proof = None if site.kind == "masked" else proof_text(logic, reading, names)


def proof_text(logic: Logic, reading: Reading, names: Names) -> str:
    """The proved conjuncts: ``k <= q & q - k < 8 & padding[b, k]``."""
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
    parts += [text(x, names, "segment") for x in reading.segments]
    for x in (*reading.rows, *reading.keys):
        parts.append(text(x, names, "length" if isinstance(x, Ge) else "padding"))
    return " & ".join(parts) or "True"


# --- reading conjuncts as flags


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
    b, h, q, k = axes
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
    # With a single query, every limit is that query's.
    if k in deps or h in deps or (q not in deps and logic.sizes[q] != 1):
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


def _swapped(one: Sequence[Expr], two: Sequence[Expr], a: Expr, b: Expr) -> bool:
    """Whether two indices are equal but for one place, where they are a and b."""
    different = [(x, y) for x, y in zip(one, two) if x != y]
    return different == [(a, b)]


# --- attend's arguments

_ABSENT = object()
_DEFAULTS: dict[str, Any] = {
    "causal": False,
    "q_offset": 0,
    "window": None,
    "chunk": None,
    "softcap": None,
    "empty_row": "zero",
}


def arguments(node: fx.Node) -> dict[str, Any]:
    """Every argument of an attend by name, defaults filled in."""
    given: dict[str, Any] = dict.fromkeys(ARGUMENTS) | _DEFAULTS
    given.update(zip(ARGUMENTS, node.args))
    given.update(node.kwargs)
    return given


def _shape_env(gm: fx.GraphModule) -> ShapeEnv | None:
    for node in gm.graph.nodes:
        if node.op == "placeholder" and is_tensor(node):
            mode = getattr(val(node), "fake_mode", None)
            return mode.shape_env if mode is not None else None
    return None
