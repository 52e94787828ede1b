"""Regions under torch.vmap as plain ATen ops, so that the graph around them can be captured.

Before:  vmap_increment(n); x = add_batch_dim(q); y = x <= k; r = remove_batch_dim(y); decrement
After:   r = aten.le(aten.unsqueeze(q, 1), k)

transformers builds masks with vmap wherever and_mask_function or or_mask_function is given, and
functionalisation refuses to run under a vmap level.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._functorch.predispatch import (
    _vmap_decrement_nesting,
    _vmap_increment_nesting,
)

from kvtailor.passes.inline import trace


def inline_vmap(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a Dynamo graph in which outermost vmap regions are traced away; gm if none."""
    if not gm.graph.find_nodes(op="call_function", target=_vmap_increment_nesting):
        return gm
    result = fx.GraphModule(gm, fx.Graph())
    copies: dict[fx.Node, Any] = {}
    region: list[fx.Node] = []
    depth = 0
    for node in gm.graph.nodes:
        depth += node.target is _vmap_increment_nesting
        if depth:
            region.append(node)
        elif node.op == "output":
            result.graph.output(fx.node.map_arg(node.args[0], copies.__getitem__))
        else:
            copies[node] = result.graph.node_copy(node, copies.__getitem__)
        depth -= node.target is _vmap_decrement_nesting
        if region and depth == 0:
            _inline(gm, result.graph, region, copies)
            region = []
    result.graph.lint()
    result.recompile()
    return result


def _inline(
    gm: fx.GraphModule, graph: fx.Graph, region: list[fx.Node], copies: dict[fx.Node, Any]
) -> None:
    """Trace one region on fake values and paste the trace into ``graph``."""
    inside = set(region)
    inputs = list(dict.fromkeys(x for n in region for x in n.all_input_nodes if x not in inside))
    outputs = [n for n in region if any(user not in inside for user in n.users)]

    body = fx.Graph()
    inner: dict[fx.Node, fx.Node] = {x: body.placeholder(x.name) for x in inputs}
    for node in region:
        inner[node] = body.node_copy(node, inner.__getitem__)
    body.output(tuple(inner[n] for n in outputs))
    values = [x.meta["example_value"] for x in inputs]
    traced = trace(fx.GraphModule(gm, body), values, whole=False)

    pasted: dict[fx.Node, Any] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            pasted[node] = copies[inputs[len(pasted)]]
        elif node.op == "output":
            for source, new in zip(outputs, node.args[0]):
                copies[source] = pasted[new] if isinstance(new, fx.Node) else new
        elif node.op == "get_attr":
            name = f"{region[0].name}{node.target}"
            value = getattr(traced, node.target)
            setattr(graph.owning_module, name, value)
            pasted[node] = graph.get_attr(name)
        else:
            pasted[node] = graph.node_copy(node, pasted.__getitem__)
            pasted[node].meta["stack_trace"] = region[0].meta.get("stack_trace")
