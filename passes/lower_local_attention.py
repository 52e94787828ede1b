"""Attention whose queries see a range of keys reads that range alone, and needs no square mask.

Before:  attend(q, k, v, padding, causal=True, window=512)     work and masks of T x T
After:   local_attend(q, k, v, padding, causal=True, window=512)        of T x window
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvtailor.kernels.ops import attend, local_attend
from kvtailor.passes.attend import Attend
from kvtailor.passes.graph import SITE, replace_node, same, shape, val
from kvtailor.passes.report import AttentionSite, PassReport

# Scores below which SDPA with a mask costs less than finding the ranges at call time.
SMALL = 256 * 256


def lower_local_attention(gm: fx.GraphModule) -> PassReport:
    """attend with a window, a chunk, or causal beside key padding becomes local_attend.

    Left alone: one query row, which narrow_rows has given just the keys it reaches; reaches no
    shorter than the keys; what SDPA's causal flag says by itself; and small causal squares.
    """
    report = PassReport()
    for node in gm.graph.find_nodes(op="call_function", target=attend):
        call = Attend.of(node)
        if not call.causal and _reach(call) is None:
            continue
        site: AttentionSite | None = node.meta.get(SITE)
        why = _why_dense(call)
        if why is not None:
            report.skip(site.site if site is not None else str(node), *why)
            continue
        with gm.graph.inserting_before(node):
            new = call.emit(gm.graph, like=node, op=local_attend)
        if site is not None:
            site.lowering = "local"
            reach = _reach(call)
            if reach is not None and site.key_rows == "all":
                site.key_rows = f"{reach} of {shape(call.k)[2]}"
        replace_node(node, new)
        report.rewrites += 1
    return report


def _reach(call: Attend) -> Any:
    """How many keys a query sees at most, None without window and chunk."""
    return call.window or call.chunk


def _why_dense(call: Attend) -> tuple[str, str] | None:
    """Reason code and sentence of a site that gains nothing, None when it does."""
    Tq, Tk = shape(call.q)[2], shape(call.k)[2]
    reach = _reach(call)
    if same(Tq, 1):
        return "one-row", "one query row is no band"
    if reach is not None and not statically_known_true(Tk <= reach):
        return None
    if call.mask is None and call.is_top_left_causal:
        return "causal", "SDPA's causal flag says it"
    if statically_known_true(Tq * Tk <= SMALL):
        return "short", f"{Tq} x {Tk} scores are few"
    if call.mask is not None and not _is_key_padding(call.mask):
        return "masked", "the mask is not one of keys alone"
    return None


def _is_key_padding(mask: Any) -> bool:
    """Whether a mask says the same for every query and head: bool ``[1 or B, 1, 1, Tk]``."""
    sizes = shape(mask)
    lead = sizes[-3:-1]
    return val(mask).dtype == torch.bool and all(same(s, 1) for s in lead)
