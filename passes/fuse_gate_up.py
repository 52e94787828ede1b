"""Linears over one source that feed no attention, gate and up of an MLP above all, in one matmul.

Before:  g = linear(x, w_gate); u = linear(x, w_up); y = silu(g) * u
After:   gu = linear(x, packed); y = silu(gu[:n]) * gu[n:]
"""

from __future__ import annotations

from torch import fx

from kvtailor.passes.fuse_qcrosskv import projections
from kvtailor.passes.graph import aten, is_call, module_path
from kvtailor.passes.packing import Weights, pack_linears
from kvtailor.passes.report import PassReport


def fuse_gate_up(gm: fx.GraphModule, weights: Weights | None = None) -> PassReport:
    """Pack the linears that make no query, key or value."""
    report = PassReport()
    attention = projections(gm)
    linears = [n for n in gm.graph.nodes if is_call(n, aten.linear) and n not in attention]
    pack_linears(gm, report, linears, lambda n: module_path(n).rpartition(".")[0], weights)
    return report
