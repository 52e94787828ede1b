"""Projections of queries, keys and values over one source become one matmul.

Before, once per layer:          After, once per graph:
    k_i = linear(memory, wk_i)       kv = linear(memory, packed)
    v_i = linear(memory, wv_i)       k_0, v_0, k_1, ... = slices of kv

Self-attention's q, k and v read the same states and are packed per layer; cross-attention's q
stays apart, for its source is another. Runs after narrow_rows, which may give q fewer rows.
"""

from __future__ import annotations

from torch import fx

from kvtailor.kernels.ops import attend, packed_linear
from kvtailor.passes.graph import argument, as_node, aten, is_call, module_path
from kvtailor.passes.packing import Weights, pack_linears
from kvtailor.passes.report import PassReport


def fuse_qcrosskv(gm: fx.GraphModule, weights: Weights | None = None) -> PassReport:
    """Pack the linears that make queries, keys or values."""
    report = PassReport()
    roles = projections(gm)
    linears = [node for node in roles if is_call(node, aten.linear)]
    for node in linears:
        if any(len(which) > 1 for which in roles[node].values()):
            report.skip(
                module_path(node) or node.name,
                "already-packed",
                "one linear makes several of q, k, v",
            )
    _explain_column_major(roles, report)
    pack_linears(gm, report, linears, lambda n: next(iter(roles[n])), weights)
    return report


def projections(gm: fx.GraphModule) -> dict[fx.Node, dict[str, str]]:
    """The linears nearest to each attention's q, k and v: site -> which, by linear.

    In graph order.
    """
    found: dict[fx.Node, dict[str, str]] = {}
    for node in gm.graph.nodes:
        if not is_call(node, attend):
            continue
        site = module_path(node) or node.name
        for name in ("q", "k", "v"):
            for linear in _nearest(as_node(argument(node, name))):
                seen = found.setdefault(linear, {})
                seen[site] = seen.get(site, "") + name
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    return dict(sorted(found.items(), key=lambda item: order[item[0]]))


def _nearest(x: fx.Node) -> list[fx.Node]:
    seen, queue, found = {x}, [x], []
    for node in queue:
        if is_call(node, aten.linear, aten.addmm, packed_linear):
            found.append(node)
        elif not is_call(node, attend, aten.embedding):
            fresh = [n for n in node.all_input_nodes if n not in seen]
            seen.update(fresh)
            queue.extend(fresh)
    return found


def _explain_column_major(roles: dict[fx.Node, dict[str, str]], report: PassReport) -> None:
    """Conv1D weights [K, N] cannot be neighbours and stay contiguous."""
    by_source: dict[object, list[fx.Node]] = {}
    for node in roles:
        if is_call(node, aten.addmm):
            by_source.setdefault(node.args[1], []).append(node)
    for group in by_source.values():
        for node in group if len(group) > 1 else ():
            report.skip(
                module_path(node) or node.name,
                "column-major",
                "a weight of shape [inputs, outputs] cannot be a contiguous part of a packed one",
            )
