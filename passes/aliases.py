"""Which values of a graph share memory with what can be seen from outside."""

from __future__ import annotations

import operator

import torch
from torch import fx

from kvtailor.passes.graph import aten, is_call, output_node

# Ops that may return their input itself, which their schemas do not say.
_PASSING = (aten.dropout, aten.type_as, aten.reshape, aten.contiguous, operator.getitem)
# Whose schemas tell the truth about aliases and mutation.
KNOWN = ("aten", "prims", "kvtailor")


def seen_outside(gm: fx.GraphModule) -> set[fx.Node]:
    """Values whose memory may be seen from outside: returned, written back, or viewed as such."""
    roots = list(output_node(gm).all_input_nodes)
    for node in gm.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            roots.extend(node.all_input_nodes)
    found: set[fx.Node] = set()
    while roots:
        node = roots.pop()
        if node in found:
            continue
        found.add(node)
        if may_alias(node):
            roots.extend(node.all_input_nodes)
    return found


def may_alias(node: fx.Node) -> bool:
    """Whether the result may share memory with an argument."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return node.op == "call_function"
    declared = any(result.alias_info is not None for result in target._schema.returns)
    return declared or is_call(node, *_PASSING) or target.namespace not in KNOWN
