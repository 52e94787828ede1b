"""Pieces of a graph: what one holds, and how they fit together; values go by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_symbols, statically_known_true

from kvtailor.passes.effects import flat


@dataclass
class Piece:
    """Consecutive work: ``graph`` takes ``inputs`` and returns ``outputs``, names of values.

    outputs: None for one that only equals of this piece are asked for. key: equal where one
    compiled artefact serves. idle: nothing but views, not worth compiling. unsafe: an op that
    keeps it out of CUDA graphs, None without one.
    """

    name: str
    graph: fx.Graph
    constants: dict[str, Tensor]
    inputs: list[str]
    outputs: list[str | None]
    key: str
    idle: bool = False
    unsafe: str | None = None

    def module(self) -> fx.GraphModule:
        """A module of its own each time: inner compilers change what they are given."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.output(graph.graph_copy(self.graph, copies))
        for old, new in copies.items():
            new.meta = dict(old.meta)
        return fx.GraphModule(self.constants, graph)

    def example(self) -> list[Any]:
        """Fake inputs."""
        return [n.meta["val"] for n in self.graph.find_nodes(op="placeholder")]

    def results(self) -> list[Any]:
        """Fake results."""
        (output,) = self.graph.find_nodes(op="output")
        return [n.meta["val"] for n in output.args[0]]


class Returned(NamedTuple):
    """One value the graph returns: a name, or where that is None a constant."""

    name: str | None
    constant: Any = None


@dataclass
class Pieces:
    """A graph as pieces in running order, and where every value comes from.

    inputs: names of the graph's inputs in order. constants: attributes by name. symbols: name ->
    (tensor input, axis) for sizes that are no input themselves. results: what the graph returns,
    names or constants.
    """

    pieces: list[Piece]
    inputs: list[str]
    constants: dict[str, Tensor]
    symbols: dict[str, tuple[str, int]]
    results: list[Returned]


def is_contiguous(value: Tensor) -> bool:
    """Whether that is known for all sizes."""
    step = 1
    for n, stride in zip(reversed(value.shape), reversed(value.stride())):
        if not (statically_known_true(n == 1) or statically_known_true(stride == step)):
            return False
        step = step * n
    return True


def symbols_of(nodes: Iterable[fx.Node]) -> set[sympy.Symbol]:
    """The symbols in the sizes and numbers of the nodes' values."""
    values = (v for n in nodes for v in flat(n.meta.get("val")))
    sized = (v for v in values if isinstance(v, (Tensor, torch.SymInt)))
    return set().union(*map(free_symbols, sized))
