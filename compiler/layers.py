"""The layers of a graph: entries of a list of modules, or the same ops over and over."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx

from kvtailor.passes.effects import computes
from kvtailor.passes.graph import clean_module_path

# A layer found by repetition is worth a piece of its own from so many ops on.
SMALLEST = 6


class Layer(NamedTuple):
    """number: from 0 in running order. name: of the module, or ``layer 3`` without one."""

    number: int
    name: str


def find_layers(gm: fx.GraphModule) -> dict[fx.Node, Layer]:
    """The layer of each call that belongs to one: by its module, or by repetition without any.

    A layer is an entry of a list of modules that have modules of their own; of lists in lists
    the outermost counts.
    """
    entries: dict[fx.Node, list[tuple[str, int]]] = {}
    seen: dict[str, set[int]] = {}
    deep: set[str] = set()
    for node in gm.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if node.op != "call_function" or not stack:
            continue
        path = clean_module_path(list(stack.values())[-1][0])
        entries[node] = []
        for match in re.finditer(r"(?:^|\.)(\d+)(?=\.|$)", path):
            container, index = path[: match.start()], int(match.group(1))
            entries[node].append((container, index))
            seen.setdefault(container, set()).add(index)
            if match.end() < len(path):
                deep.add(container)
    containers = {c for c, indices in seen.items() if len(indices) > 1 and c in deep}
    numbers: dict[tuple[str, int], Layer] = {}
    result: dict[fx.Node, Layer] = {}
    for node, found in entries.items():
        for entry in found:
            if entry[0] in containers:
                name = f"{entry[0]}.{entry[1]}".lstrip(".")
                result[node] = numbers.setdefault(entry, Layer(len(numbers), name))
                break
    if result:
        return result
    return {node: Layer(i, f"layer {i}") for node, i in _repeated_layers(gm).items()}


def _repeated_layers(gm: fx.GraphModule) -> dict[fx.Node, int]:
    """Numbers from 0 for the calls of the longest run of equal layers, {} where there is none.

    A run is a stretch of calls that equals itself moved on by one period, in ops and shapes.
    The cut between two periods is where the fewest values cross.
    """
    nodes = [n for n in gm.graph.nodes if computes(n)]
    found = _longest_run([_signature(n) for n in nodes])
    if found is None:
        return {}
    start, stop, period = found
    # A run of r calls that repeat holds r + period calls; whole periods only, at the best phase.
    phases = range(start, min(start + period, stop + period))
    crossing = _crossing(gm, nodes)

    def cost(phase: int) -> tuple[int, int]:
        cuts = range(phase, stop + period + 1, period)
        return -((stop + period - phase) // period), sum(crossing[c] for c in cuts)

    first = min(phases, key=cost)
    count = (stop + period - first) // period
    if count < 2:
        return {}
    return {nodes[first + i]: i // period for i in range(count * period)}


def _signature(node: fx.Node) -> Any:
    value = node.meta.get("val")
    where = tuple(map(str, value.shape)) if isinstance(value, Tensor) else None
    return str(node.target), where


def _longest_run(signatures: list[Any]) -> tuple[int, int, int] | None:
    """(start, stop, period): calls start..stop equal the ones a period later.

    The period that covers most calls; of those nearly as good, the shortest.
    """
    ids: dict[Any, int] = {}
    codes = np.array([ids.setdefault(s, len(ids)) for s in signatures])
    n = len(codes)
    best: tuple[int, int, int] | None = None
    for period in range(SMALLEST, n // 2 + 1):
        same = codes[:-period] == codes[period:]
        edges = np.flatnonzero(np.diff(np.concatenate(([0], same.view(np.int8), [0]))))
        if not len(edges):
            continue
        starts, stops = edges[::2], edges[1::2]
        longest = int(np.argmax(stops - starts))
        start, stop = int(starts[longest]), int(stops[longest])
        if stop - start < period:
            continue
        # A multiple of a period covers no more than the period itself.
        if best is None or stop - start + period > best[1] - best[0] + best[2]:
            best = (start, stop, period)
    return best


def _crossing(gm: fx.GraphModule, nodes: list[fx.Node]) -> list[int]:
    """For a cut before each computing call, how many tensors cross it; one entry more at the end.

    Values made before the run and read throughout cross every cut and so don't decide.
    """
    place = {n: i for i, n in enumerate(nodes)}
    at: dict[fx.Node, int] = {}
    last: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        at[node] = place.get(node, max((at.get(x, -1) for x in node.all_input_nodes), default=-1))
        for x in node.all_input_nodes:
            if x in at:
                last[x] = max(last.get(x, -1), at[node])
    counts = np.zeros(len(nodes) + 2, dtype=np.int64)
    for x, end in last.items():
        if isinstance(x.meta.get("val"), torch.Tensor) and end > at[x]:
            counts[at[x] + 1] += 1
            counts[end + 1] -= 1
    return [int(c) for c in np.cumsum(counts)]
