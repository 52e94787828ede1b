"""Attention with a proved window or chunk reads only the keys its queries can see.

Before:  attend(q, k, v, padding, causal=True, window=512)     work and masks of T x T
After:   local_attend(q, k, v, padding, causal=True, window=512)        of T x window
"""

from __future__ import annotations

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvtailor.kernels.ops import attend, local_attend
from kvtailor.passes.graph import SITE, emit, replace_node, same, shape
from kvtailor.passes.report import AttentionSite, PassReport


def lower_local_attention(gm: fx.GraphModule) -> PassReport:
    """attend with a window or chunk becomes local_attend, which chooses band or square by size.

    Left alone: one query row, which narrow_rows has given just the keys it reaches, and windows
    or chunks no smaller than the keys.
    """
    report = PassReport()
    for node in gm.graph.find_nodes(op="call_function", target=attend):
        reach = node.kwargs.get("window") or node.kwargs.get("chunk")
        if reach is None:
            continue
        site: AttentionSite | None = node.meta.get(SITE)
        where = site.site if site is not None else str(node)
        Tq, Tk = shape(node.args[0])[2], shape(node.args[1])[2]
        if same(Tq, 1):
            report.skip(where, "one-row", "one query row is no band")
            continue
        if statically_known_true(Tk <= reach):
            report.skip(where, "short", f"{Tk} keys are within reach of every query")
            continue
        with gm.graph.inserting_before(node):
            new = emit(gm.graph, local_attend, *node.args, like=node, **node.kwargs)
        replace_node(node, new)
        report.rewrites += 1
        if site is not None:
            site.lowering = "local"
            if site.key_rows == "all":
                site.key_rows = f"{reach} of {Tk}"
    return report
