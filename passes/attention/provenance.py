"""Where an attention stands, where its keys come from, and whether they are its own tokens'."""

from __future__ import annotations

import torch
from torch import fx

from kvtailor.kernels.ops import attend
from kvtailor.passes.graph import (
    as_node,
    aten,
    clean_module_path,
    is_call,
    is_tensor,
    module_path,
    val,
)


class Names:
    """Module paths of sites and of what makes their keys."""

    def __init__(self, gm: fx.GraphModule):
        self.taken: dict[str, int] = {}
        self.attentions: set[str] = set()
        for node in gm.graph.nodes:
            if is_call(node, aten.scaled_dot_product_attention, aten.softmax, attend):
                near = [node, *node.users] if is_call(node, aten.softmax) else [node]
                self.attentions.update(module_path(n) for n in near if n.op == "call_function")

    def unique(self, node: fx.Node) -> str:
        path = module_path(node) or node.name
        self.taken[path] = count = self.taken.get(path, 0) + 1
        return path if count == 1 else f"{path}#{count}"

    def owner(self, x: fx.Node) -> str | None:
        """Path of the attention module with the nearest linear that x comes from."""
        seen = {x}
        queue = [x]
        for node in queue:
            if is_call(node, aten.linear, aten.addmm):
                return self._around(node)
            if is_call(node, attend, aten.embedding):
                continue
            fresh = [n for n in node.all_input_nodes if n not in seen]
            seen.update(fresh)
            queue.extend(fresh)
        return None

    def _around(self, linear: fx.Node) -> str:
        stack = [clean_module_path(p) for p, _ in linear.meta.get("nn_module_stack", {}).values()]
        for path in reversed(stack):
            if path in self.attentions:
                return path
        return stack[-2] if len(stack) > 1 else ""


class Streams:
    """Which token streams a tensor's rows come from.

    A stream is an embedding, or a floating input of two dimensions or more. Weights of projections
    and norms are none, and attention hands on the stream of its queries.
    """

    def __init__(self) -> None:
        self.known: dict[fx.Node, frozenset[fx.Node]] = {}

    def differ(self, q: fx.Node, k: fx.Node) -> bool:
        ours, theirs = self.of(q), self.of(k)
        return bool(ours or theirs) and not ours & theirs

    def of(self, x: fx.Node) -> frozenset[fx.Node]:
        todo = [x]
        while todo:
            node = todo[-1]
            if node in self.known:
                todo.pop()
                continue
            sources = self._sources(node)
            missing = [s for s in sources if s not in self.known]
            if missing:
                todo.extend(missing)
                continue
            todo.pop()
            own = frozenset({node}) if self._is_stream(node) else frozenset()
            self.known[node] = own.union(*(self.known[s] for s in sources))
        return self.known[x]

    @staticmethod
    def _is_stream(node: fx.Node) -> bool:
        if is_call(node, aten.embedding):
            return True
        if node.op not in ("placeholder", "get_attr") or not is_tensor(node):
            return False
        return val(node).is_floating_point() and val(node).dim() >= 2

    @staticmethod
    def _sources(node: fx.Node) -> list[fx.Node]:
        if node.op != "call_function" or is_call(node, aten.embedding):
            return []
        if is_call(node, *_FIRST_ONLY):
            return [as_node(node.args[0])]
        if is_call(node, aten.addmm):
            return [as_node(node.args[1])]
        symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
        return [n for n in node.all_input_nodes if not isinstance(val(n), symbols)]


_FIRST_ONLY = (
    attend,
    aten.linear,
    aten.layer_norm,
    aten.rms_norm,
    aten.group_norm,
    aten.conv1d,
    aten.conv2d,
    aten.conv3d,
)
