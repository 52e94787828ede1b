"""The inner compilers: eager, Inductor, TensorRT; whatever is special about one stays in here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing

from kvtailor.compiler import tensorrt
from kvtailor.compiler.joined_kernels import Kernel, ask_early, collected, joined
from kvtailor.config import Options
from kvtailor.passes.effects import root_of
from kvtailor.passes.graph import aten
from kvtailor.runtime.driver import Compiled

log = logging.getLogger(__name__)

# Kernels that are compiled already or being compiled, for other pieces of the graph to share.
Kernels = dict[Any, Kernel]


def inner_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], opts: Options) -> Compiled:
    """The inner compiler's callable for gm."""
    if opts.inner == "eager":
        return gm.forward
    if opts.inner == "tensorrt":
        refused = tensorrt.refusal(gm)
        if refused is None:
            return tensorrt.compile_piece(gm, example_inputs)
        log.info("a piece goes to Inductor instead of TensorRT: %s", refused)
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = list_mode_options(opts.mode) if opts.mode else {}
    # The graphs are ours, each sized to its piece.
    patches.pop("triton.cudagraphs", None)
    first = _computed_first(gm)
    with joined():
        compiled = compile_fx(
            _also_returning(gm, first), list(example_inputs), config_patches=patches
        )
    assert callable(compiled)
    return (lambda *args: compiled(*args)[: -len(first)]) if first else compiled


def _computed_first(gm: fx.GraphModule) -> list[fx.Node]:
    """Values that are written, through a view, over what they are computed from.

    Inductor makes one loop of such a value and its write, which reads what it has overwritten;
    what is returned too has a loop of its own.
    """
    found = []
    for copy in gm.graph.find_nodes(op="call_function", target=aten.copy_.default):
        target, base = root_of(copy.args[0]), root_of(copy.args[1])
        stack, seen = [base] if base is not copy.args[1] else [], set()
        while stack:
            node = stack.pop()
            if node not in seen and node.op == "call_function":
                seen.add(node)
                stack += node.all_input_nodes
            elif node is target:
                found.append(base)
                break
    return found


def _also_returning(gm: fx.GraphModule, values: list[fx.Node]) -> fx.GraphModule:
    if not values:
        return gm
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    results = graph.graph_copy(gm.graph, copies)
    graph.output((*results, *(copies[x] for x in values)))  # type: ignore[misc]
    return fx.GraphModule(gm, graph)


def begin(
    gm: fx.GraphModule, example_inputs: Sequence[Any], opts: Options, kernels: Kernels
) -> tuple[Compiled, Callable[[], None]]:
    """The inner compiler's callable for gm, one piece of several, and what waits for the rest.

    A C++ compiler may still be at work on its kernels while the next piece is traced.
    """
    with _context_of_its_own(), collected(kernels) as collector:
        compiled = inner_compile(gm, example_inputs, opts)
    return compiled, collector.finish


@contextmanager
def _context_of_its_own() -> Iterator[None]:
    """Compiling a piece must not overwrite what is known about the whole graph."""
    context = TracingContext.try_get()
    if context is None:
        yield
        return
    with tracing(TracingContext(context.fake_mode)):
        yield


@contextmanager
def asked_early(example_inputs: Sequence[Any], opts: Options) -> Iterator[None]:
    """What Inductor asks the C++ compiler about this machine is asked beside other work."""
    devices = {x.device.type for x in example_inputs if isinstance(x, torch.Tensor)}
    thread = ask_early() if opts.inner == "inductor" and devices == {"cpu"} else None
    try:
        yield
    finally:
        if thread is not None:
            thread.join()
