"""The cut of a graph into pieces: by layer, by row count, and around ops no CUDA graph takes.

Before:                            After:
    h0, cos = embed(ids)               prologue:  h0, cos = f(ids, w_embed)
    h1 = layer(h0, cos, w0)            layers.0:  h1 = g(h0, cos, w0)
    h2 = layer(h1, cos, w1)            layers.1:  h2 = g(h1, cos, w1)    one g, compiled once
    y = head(h2)                       epilogue:  y = e(h2, w_head)

Values cross cuts as they are, without copies. A write to an input stays in the piece that makes
what is written, after every reader of the old value. Views of inputs are made where they are
read, sizes from the symbols they are made of. Pieces that are equal but for the tensors they are
given have equal keys.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvtailor.compiler.draft import Draft, NotSplittable, Whole, agree_on_outputs, size_name
from kvtailor.compiler.layers import Layer, find_layers
from kvtailor.compiler.piece import Pieces, Returned, is_contiguous
from kvtailor.compiler.places import Place, find_places
from kvtailor.passes.effects import (
    Memory,
    computes,
    is_number,
    is_random,
    is_view,
    may_alias,
    seen_outside,
)
from kvtailor.passes.graph import as_node, aten, call_key, emit, flat, is_tensor, output_node, val

# After all calls.
_END = Place(2**31, 0, 0)


def split(gm: fx.GraphModule, *, layers: bool = True, rows: bool = False) -> Pieces:
    """The pieces of gm, which is used up.

    layers: cut at layer boundaries. rows: cut where the row count changes and around ops tagged
    ``torch.Tag.cudagraph_unsafe``. Raises NotSplittable.
    """
    for node in gm.graph.nodes:
        if node.op in ("call_module", "call_method"):
            raise NotSplittable(f"it calls {node.target} as a {node.op.removeprefix('call_')}")
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise NotSplittable(f"it has the higher-order op {node.target}")
    memory = Memory(gm.graph.nodes)
    of_layer = find_layers(gm) if layers else {}
    places = find_places(gm, memory, of_layer, rows)
    _merge_equal(gm, places, memory)
    memory = Memory(gm.graph.nodes)
    return _Cutter(gm, memory, places, of_layer, sinking=not rows).cut()


def _merge_equal(gm: fx.GraphModule, places: dict[fx.Node, Place], memory: Memory) -> None:
    """Equal calls before all layers become one: layers then share what is made from it.

    Results of the graph stay apart: whoever gets two of them may write to one.
    """
    outside = seen_outside(gm)
    seen: dict[Any, fx.Node] = {}
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or places[node].layer or node in outside:
            continue
        if node.is_impure() or is_random(node) or memory.touches(node):
            continue
        key = call_key(node)
        first = node if key is None else seen.setdefault(key, node)
        if first is not node and places[first] <= places[node]:
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)


class _Cutter:
    def __init__(
        self,
        gm: fx.GraphModule,
        memory: Memory,
        places: dict[fx.Node, Place],
        of_layer: dict[fx.Node, Layer],
        sinking: bool,
    ):
        self.gm, self.memory, self.places, self.sinking = gm, memory, places, sinking
        self.layer_names = {2 * v.number + 1: v.name for v in of_layer.values()}
        self.results = list(flat(output_node(gm).args[0]))
        self.wanted = {x for x in self.results if isinstance(x, fx.Node)}
        self.whole = Whole(gm)
        self.rematerialised = self.whole.rematerialised

    def cut(self) -> Pieces:
        groups = self._groups()
        order = sorted(groups)
        home = {node: place for place in order for node in groups[place]}
        drafts = [Draft(self.whole, groups[place]) for place in order]
        needed = set(self.wanted)
        for place, draft in zip(order, drafts):
            for x in draft.read:
                if x in home:
                    assert home[x] < place, f"{x} is read before it is made"
                    if self.memory.roots[x] & self.memory.written:
                        raise NotSplittable(f"{x} may be part of an input that is written to")
                    needed.add(x)
        agree_on_outputs(drafts, needed)
        pieces = [draft.finish(self._name(place, order)) for place, draft in zip(order, drafts)]
        used = {name for piece in pieces for name in piece.inputs} | {n.name for n in self.wanted}
        attributes = self.gm.graph.find_nodes(op="get_attr")
        sizes = {size_name(s): v for s, v in self.whole.sources.items() if isinstance(v, tuple)}
        return Pieces(
            pieces,
            [n.name for n in self.whole.placeholders],
            {n.name: self.whole.constant(n) for n in attributes if n.name in used},
            {name: source for name, source in sizes.items() if name in used},
            [
                Returned(x.name) if isinstance(x, fx.Node) else Returned(None, x)
                for x in self.results
            ],
        )

    def _groups(self) -> dict[Place, list[fx.Node]]:
        """The calls of each piece in graph order."""
        for node in self.gm.graph.nodes:
            part = is_view(node) or node.target is operator.getitem
            touched = bool(self.memory.roots[node] & self.memory.written)
            if (part or touched) and may_alias(node) and not self._hoisted(node):
                bases = [x for x in node.all_input_nodes if not is_number(x)]
                if all(
                    x in self.rematerialised or x.op in ("placeholder", "get_attr") for x in bases
                ):
                    self.rematerialised.add(node)
        if self.sinking:
            self._sink()
        else:
            self._materialise()
        busy = {place for n, place in self.places.items() if computes(n)}
        for node, place in self.places.items():
            if place not in busy and is_view(node) and not self._hoisted(node):
                self.rematerialised.add(node)
                # Returned views go with the work next to them.
                later = min((p for p in busy if p > place), default=None)
                earlier = max((p for p in busy if p < place), default=place)
                self.places[node] = later or earlier
        groups: dict[Place, list[fx.Node]] = {}
        for node in self.gm.graph.nodes:
            if node.op != "call_function" or (is_number(node) and node not in self.wanted):
                continue
            if node not in self.rematerialised or node in self.wanted:
                groups.setdefault(self.places[node], []).append(node)
        return groups

    def _materialise(self) -> None:
        """A few rows of a value go across as memory of their own.

        As a view they would have the strides of all rows, and hold on to them.
        """
        for node in list(self.gm.graph.nodes):
            if not is_view(node) or not is_tensor(node) or node in self.rematerialised:
                continue
            if is_contiguous(val(node)):
                continue
            base = node
            while is_view(base):
                base = as_node(base.args[0])
            away = [u for u in node.users if u in self.places]
            away = [u for u in away if self.places[u] != self.places[node]]
            fewer = statically_known_true(val(node).numel() < val(base).numel())
            if not away or not fewer or base.op != "call_function":
                continue
            with self.gm.graph.inserting_after(node):
                form = {"memory_format": torch.contiguous_format}
                dense = emit(self.gm.graph, aten.clone.default, node, like=node, **form)
            for user in away:
                user.replace_input_with(node, dense)
            self.places[dense] = self.places[node]
            self.whole.rows[dense] = self.whole.rows[node]
            self.memory.roots[dense] = frozenset()

    def _sink(self) -> None:
        """Rows that a layer takes of its values for later ones alone are taken where they are used.

        Else the layer that feeds narrower ones would be no equal of those before it.
        """
        readers: dict[fx.Node, set[Place]] = {}
        for node in reversed(self.gm.graph.nodes):
            found: set[Place] = set()
            for user in node.users:
                found |= (
                    readers[user] if user in self.rematerialised else {self.places.get(user, _END)}
                )
            readers[node] = found
            if node not in self.places or node in self.wanted or self.places[node].layer % 2 == 0:
                continue
            if not found or min(found) <= self.places[node] or node in self.rematerialised:
                continue
            if is_view(node):
                self.rematerialised.add(node)
            elif node.target is aten.index.Tensor and len(found) == 1:
                (self.places[node],) = found

    def _hoisted(self, node: fx.Node) -> bool:
        """Whether layers are given this part of an input, which they take by their index."""
        if node.target not in (aten.select.int, aten.slice.Tensor) or self.places[node].layer:
            return False
        if self.memory.roots[node] & self.memory.written:
            return False
        return any(self.places[u].layer for u in node.users if u in self.places)

    def _name(self, place: Place, order: Sequence[Place]) -> str:
        if place.layer in self.layer_names:
            name = self.layer_names[place.layer]
        elif not self.layer_names:
            name = "graph"
        elif place.layer == 0:
            name = "prologue"
        elif place.layer > max(self.layer_names):
            name = "epilogue"
        else:
            name = f"after {self.layer_names[place.layer - 1]}"
        alike = [p for p in order if p.layer == place.layer]
        return name if len(alike) == 1 else f"{name}/{alike.index(place)}"
