"""Prove what the mask of every attention means, and say it in flags.

Before:  m = and(le(k, q), index(padding)); m = expand(m, [B, 1, T, T])
         attend(q, k, v, m)
After:   p = index(padding)                      # [B, 1, 1, T]
         attend(q, k, v, p, causal=True)

A mask is replaced only by flags and a remainder that equal it for all b, h, q and k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy import Expr, Integer, Symbol
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kvtailor.kernels.ops import attend
from kvtailor.passes.attend import Attend
from kvtailor.passes.attention.empty_rows import drop_guard, hides
from kvtailor.passes.graph import (
    SITE,
    NotDerivable,
    hint,
    is_tensor,
    module_path,
    shape,
    sites,
    val,
)
from kvtailor.passes.masks.flags import Reading, read
from kvtailor.passes.masks.integers import Atom, TooComplex
from kvtailor.passes.masks.interpret import Interpreter
from kvtailor.passes.masks.logic import FALSE, TRUE, Bool, Logic, conjuncts
from kvtailor.passes.masks.ops import interpreter
from kvtailor.passes.masks.pointwise import conjunct_nodes
from kvtailor.passes.masks.segments import inside_segments
from kvtailor.passes.masks.tensors import CannotBuild, TensorBuilder, can_place
from kvtailor.passes.masks.text import Names, bias_text, predicate_text, proof_text
from kvtailor.passes.masks.values import (
    Pick,
    Real,
    Unreadable,
    Value,
    broadcast_index,
    size_expr,
    sizes,
)
from kvtailor.passes.report import AttentionSite, PassReport

# The arguments that say who sees whom.
_MEANING = ("mask", "q_positions", "q_offset", "chunk_origin", "causal", "window", "chunk")


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
        given = Attend.of(node)
        B, H, Tq, _ = shape(node)
        Tk = shape(given.k)[2]
        site.queries, site.keys = hint(Tq), hint(Tk)
        key = tuple(map(size_expr, (B, H, Tq, Tk))), val(given.q).device
        if key not in provers:
            provers[key] = _Prover(gm, *key)
        provers[key].prove(node, given, site, report)
    return report


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
    """What a mask means; never_empty: every row sees a key.

    emitted: the arguments that say it, made for the first site that needs them.
    """

    mask: Mask
    predicate: Bool
    reading: Reading
    never_empty: bool
    emitted: dict[str, Any] | None = None


class _Prover:
    """Proves the masks of all sites with one shape ``(B, Hq, Tq, Tk)``."""

    def __init__(self, gm: fx.GraphModule, sizes: tuple[Expr, ...], device: torch.device):
        self.logic = Logic(_shape_env(gm))
        self.axes = tuple(self.logic.index(n, size) for n, size in zip("bhqk", sizes))
        self.interpreter = interpreter(gm, self.logic)
        self.unbounded = interpreter(gm, self.logic)
        self.build = TensorBuilder(gm.graph, self.logic, device)
        self.graph = gm.graph
        self._proofs: dict[Any, Proof | str] = {}

    def prove(self, node: fx.Node, given: Attend, site: AttentionSite, report: PassReport) -> None:
        key = tuple(getattr(given, name) for name in _MEANING)
        if key not in self._proofs:
            try:
                self._proofs[key] = self._proof(given)
            except (TooComplex, Unreadable) as error:
                self._proofs[key] = str(error)
        proof = self._proofs[key]
        if isinstance(proof, str):
            site.kind = "masked"
            self._leave(site, report, "unreadable", proof)
            return
        self._describe(site, proof)
        with self.graph.inserting_before(node):
            new = self._rewritten(given, proof, site, report)
        if new.q_positions is None:
            site.offset = hint(val(new.q_offset))
        changed = new != given
        if proof.never_empty:
            changed |= drop_guard(node, given.mask)
        if changed:
            new.write(node)
            report.rewrites += 1

    @staticmethod
    def _leave(site: AttentionSite, report: PassReport, code: str, why: str) -> None:
        site.reason = f"{code}: {why}"
        report.skip(site.site, code, why)

    # --- from graph to predicate

    def _proof(self, given: Attend) -> Proof:
        flags = self._flags_predicate(given)
        mask = self._mask(given.mask, self.interpreter)
        predicate = self.logic.all_of(flags, mask.visible)
        predicate = self._by_segment(predicate)
        vacuous = self._vacuous(given, predicate)
        reading = read(self.logic, self.axes, conjuncts(predicate), vacuous)
        return Proof(mask, predicate, reading, self._never_empty(predicate, reading))

    def _vacuous(self, given: Attend, predicate: Bool) -> list[Bool]:
        """Conjuncts that hold everywhere for these sizes: a window wider than the keys.

        They change nothing, but tell what the mask is about.
        """
        if predicate == FALSE:
            return []
        self.logic.bounded = False
        try:
            mask = self._mask(given.mask, self.unbounded)
            unbounded = self.logic.all_of(self._flags_predicate(given), mask.visible)
            declared = conjuncts(self._by_segment(unbounded))
        except (TooComplex, Unreadable):
            return []
        finally:
            self.logic.bounded = True
        return [p for p in declared if self.logic.rebuild(p, {}) == TRUE]

    def _by_segment(self, predicate: Bool) -> Bool:
        return inside_segments(self.interpreter, self.axes[2], self.axes[3], predicate)

    def _flags_predicate(self, given: Attend) -> Bool:
        """What the flags already there let through."""
        logic, k = self.logic, self.axes[3]
        if not given.is_local:
            return TRUE
        b, q = self.axes[0], self.axes[2]
        p: Expr = q
        if given.q_positions is not None:
            p = self._integer(given.q_positions, q)
        p = sympy.expand(p + self.interpreter.integer_arg(given.q_offset))
        parts = []
        if given.causal:
            parts.append(logic.ge(p - k))
        if given.window is not None:
            parts.append(logic.ge(k - p + int(given.window) - 1))
        if given.chunk is not None:
            o: Expr = Integer(0)
            if given.chunk_origin is not None:
                o = self._integer(given.chunk_origin, b)
            c = int(given.chunk)
            parts.append(logic.eq(logic.floor(k - o, c) - logic.floor(p - o, c)))
        return logic.all_of(*parts)

    def _integer(self, node: fx.Node, alone: Symbol) -> Expr:
        """q_positions or chunk_origin at (b, q); alone: what a single dimension counts."""
        have = sizes(node)
        index = ((), (alone,), (self.axes[0], self.axes[2]))[len(have)]
        want = tuple(self.logic.sizes[a] for a in index)
        value = self.interpreter.read(node, broadcast_index(have, want, index))
        if not isinstance(value, Expr):
            raise TooComplex("positions that are no plain integers")
        return value

    def _mask(self, node: fx.Node | None, interpreter: Interpreter) -> Mask:
        if node is None:
            return Mask(TRUE)
        have, want = sizes(node), tuple(self.logic.sizes[a] for a in self.axes)
        value = interpreter.read(node, broadcast_index(have, want, self.axes))
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
        if not isinstance(value, Real):
            raise TooComplex("an additive mask that is no float")
        if value.const == float("-inf"):
            return FALSE
        if hides(value.const, dtype):
            mask.finite = True
            return FALSE
        mask.scaled |= value.const != 0
        mask.bias += tuple(a for a in value.parts if a not in mask.bias)
        return TRUE

    # --- facts about a predicate

    def _never_empty(self, predicate: Bool, reading: Reading) -> bool:
        """Whether every row provably sees a key: a witness that satisfies every conjunct."""
        logic, q, k = self.logic, self.axes[2], self.axes[3]
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
        self, given: Attend, proof: Proof, site: AttentionSite, report: PassReport
    ) -> Attend:
        """The arguments of attend after the proof; the given ones where nothing may change."""
        new, mask, reading = given, proof.mask, proof.reading
        if proof.predicate == FALSE:
            self._leave(site, report, "all-masked", "no key is visible to any query")
            return given
        if mask.bias or mask.scaled:
            self._leave(site, report, "bias", f"the mask also adds {self._added(mask)}")
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
        if proof.never_empty and given.empty_row != "zero":
            new = new.replace(empty_row="zero")
        if given.mask is None or self._minimal(given.mask, mask, reading):
            return new
        try:
            if proof.emitted is None:
                remainder = self._remainder(given.mask, reading)
                proof.emitted = {**self._flags(reading), "mask": remainder}
        except (CannotBuild, NotDerivable) as error:
            self._leave(site, report, "no-tensor", str(error))
            return given
        return new.replace(**proof.emitted)

    def _minimal(self, node: fx.Node, mask: Mask, reading: Reading) -> bool:
        """Whether the mask says nothing that a flag or a smaller tensor could say."""
        if val(node).dtype != torch.bool:
            return False
        said = conjuncts(mask.visible)
        if not said or not all(part in reading.left for part in said):
            return False
        rows = sizes(node)[-2] if val(node).dim() > 1 else Integer(1)
        q = self.axes[2]
        return rows == 1 or any(q in self.logic.deps(p) for p in said)

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
                over = (b, q) if q in deps else (b,) if b in deps else ()
                flags["chunk_origin"] = build.full_size(build.integers(o, over), over)
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
        start = broadcast_index(sizes(node), want, axes)
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

    def _added(self, mask: Mask) -> str:
        """What an additive mask adds besides 0 and the minimum, "" for nothing."""
        found = [bias_text(self.logic, self.axes, a) for a in mask.bias]
        return " & ".join(found + ["a constant"] * mask.scaled)

    def _describe(self, site: AttentionSite, proof: Proof) -> None:
        reading, mask, logic = proof.reading, proof.mask, self.logic
        h, k = self.axes[1], self.axes[3]
        names = Names(logic, self.axes)
        site.causal, site.window, site.chunk = reading.causal, reading.window, reading.chunk
        site.segments = bool(reading.segments)
        site.padding = any(k in logic.deps(p) and logic.has_atoms(p) for p in reading.keys)
        left = [predicate_text(p, names, "x") for p in reading.residual]
        site.residual = " & ".join(filter(None, [*left, self._added(mask)])) or None
        # An unknown float that is the same for all heads may well be somebody's mask.
        unclear = mask.scaled or any(h not in logic.deps(a) for a in mask.bias)
        if proof.predicate == FALSE:
            site.kind = "masked"
        elif reading.chunk is not None:
            site.kind = "chunked"
        elif reading.window is not None:
            site.kind = "sliding"
        elif reading.causal:
            site.kind = "causal"
        elif reading.residual or unclear:
            site.kind = "masked"
        else:
            site.kind = "cross" if site.cross else "full"
        site.proof = None if site.kind == "masked" else proof_text(logic, names, reading)


def _shape_env(gm: fx.GraphModule) -> ShapeEnv | None:
    for node in gm.graph.nodes:
        if node.op == "placeholder" and is_tensor(node):
            mode = getattr(val(node), "fake_mode", None)
            return mode.shape_env if mode is not None else None
    return None
