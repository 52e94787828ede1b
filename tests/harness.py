"""Driving a step of the compiler by itself: Dynamo's graph of a function, and what a step makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from kvtailor.passes.capture.capture import capture


def through(
    step: Callable[..., Any],
    fn: Callable[..., Any],
    *args: Any,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    **kwargs: Any,
) -> Any:
    """fn(*args, **kwargs) compiled anew, without gradients.

    step(gm, example_inputs): called with each of Dynamo's graphs; gives what is run in its place,
    or nothing where the graph itself is.
    """

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        made = step(gm, example_inputs)
        return made if callable(made) else gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        run = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=fullgraph)
        return run(*args, **kwargs)


def captured(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.GraphModule:
    """The one captured graph of fn; kwargs as ``through`` takes them."""
    found: list[fx.GraphModule] = []
    through(lambda gm, inputs: found.append(capture(gm, inputs)), fn, *args, **kwargs)
    (graph,) = found
    return graph


def tidied(graph: fx.GraphModule) -> fx.GraphModule:
    """Without dead code, and found sound."""
    graph.graph.eliminate_dead_code()
    graph.graph.lint()
    graph.recompile()
    return graph
