"""Where each call of a graph runs: in which layer, on which rows, beside which unsafe ops."""

from __future__ import annotations

import operator
from typing import NamedTuple

from torch import fx

from kvtailor.compiler.layers import Layer
from kvtailor.passes.effects import Memory, Root, computes, is_number, is_unsafe, is_view
from kvtailor.passes.graph import ROWS, as_node, aten


class Place(NamedTuple):
    """Where a call runs; places run in this order.

    layer: 0 before all layers, odd within one, even between two. rows: rank of the row count.
    segment: odd for ops no CUDA graph takes, even for all others.
    """

    layer: int
    rows: int
    segment: int


START = Place(0, 0, 0)


def find_places(
    gm: fx.GraphModule, memory: Memory, layers: dict[fx.Node, Layer], by_rows: bool
) -> dict[fx.Node, Place]:
    """The place of every call: the latest of its own and of what it reads or writes over.

    by_rows: row counts and ops no CUDA graph takes make places of their own.
    """
    own = {node: 2 * layer.number + 1 for node, layer in layers.items()}
    ranks: dict[int | str, int] = {"all": 0}
    for node in gm.graph.nodes:
        ranks.setdefault(node.meta.get(ROWS, "all"), len(ranks))
    readers, between = _readers(gm, own), _between(gm, own)
    places: dict[fx.Node, Place] = {}
    # Of memory that is written: the latest place that touched it, and the latest that wrote it.
    touched: dict[Root, Place] = {}
    wrote: dict[Root, Place] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        inputs = [places[x] for x in node.all_input_nodes if x in places]
        place = max(inputs, default=START)
        used, writes = memory.touches(node), memory.writes(node)
        for root in used:
            place = max(place, (touched if root in writes else wrote).get(root, START))
        if node.target is not operator.getitem:
            layer = own.get(node, between.get(node, 0))
            if not place.layer and _is_shared(node, readers, memory):
                layer = 0
            elif node not in own and node not in between and place.layer % 2 and not writes:
                layer = place.layer + 1
            place = max(place, Place(layer, 0, 0))
            if by_rows and computes(node):
                rank = ranks[node.meta.get(ROWS, "all")]
                place = max(place, Place(place.layer, rank, 0))
                # Even to odd or odd to even: each change of kind is one cut.
                place = place._replace(
                    segment=place.segment + (place.segment % 2 != is_unsafe(node))
                )
        for root in used:
            touched[root] = max(place, touched.get(root, START))
            if root in writes:
                wrote[root] = max(place, wrote.get(root, START))
        places[node] = place
    return places


def _readers(gm: fx.GraphModule, own: dict[fx.Node, int]) -> dict[fx.Node, set[int]]:
    """The layers that read a value, or views of it."""
    readers: dict[fx.Node, set[int]] = {}
    for node in reversed(gm.graph.nodes):
        found: set[int] = set()
        for user in node.users:
            if is_view(user):
                found |= readers[user]
            elif user in own:
                found.add(own[user])
        readers[node] = found
    return readers


def _is_shared(node: fx.Node, readers: dict[fx.Node, set[int]], memory: Memory) -> bool:
    """Whether a call that reads nothing of any layer is better made before all layers.

    Either several layers read it, or it is one layer's view of what several read: a view by
    layer index would make each layer's graph another one.
    """
    if node.is_impure() or is_number(node) or memory.touches(node):
        return False
    if len(readers[node]) > 1:
        return True
    if not is_view(node):
        return False
    base = as_node(node.args[0])
    part = node.target in (aten.select.int, aten.slice.Tensor)
    return len(readers[base]) > 1 and (base.op == "call_function" or part)


def _between(gm: fx.GraphModule, own: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Calls of no layer that follow one: part of it where it goes on with them, else part of the
    one layer that needs them, where there is only one."""
    needed: dict[fx.Node, set[int]] = {}
    for node in reversed(gm.graph.nodes):
        found: set[int] = set()
        for user in node.users:
            if user in own:
                found.add(own[user])
            else:
                found |= needed[user] if user.op != "output" else {0}
        needed[node] = found
    after: dict[fx.Node, int] = {}
    result: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        after[node] = max((max(own.get(x, 0), after[x]) for x in node.all_input_nodes), default=0)
        if node in own or not after[node]:
            continue
        if after[node] in needed[node]:
            result[node] = after[node]
        elif len(needed[node]) == 1 and max(needed[node]) > after[node]:
            result[node] = max(needed[node])
    return result
