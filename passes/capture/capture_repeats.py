"""Capture of a graph whose ops repeat, layer after layer: each distinct op is traced once.

    3,000 calls in Dynamo's graph
    -> 200 distinct ones, by function, constants and the shapes, strides and dtypes of tensors
    -> one small graph of these, side by side, traced by torch
    -> the captured graph: the ATen nodes of the distinct call in place of each call

What a step writes to is from there on a new value, for the steps that follow and for the write at
the end. Graphs in doubt (symbolic sizes, subgraphs, unknown effects) are traced as a whole.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_export_module

from kvtailor.passes.capture.dynamo_steps import Step, StepGraph, Unsuited, shape_key
from kvtailor.passes.effects import is_view
from kvtailor.passes.graph import flat, inherit

# Worth it only where a traced call stands for several.
_REPEATS = 2


class Captured(NamedTuple):
    """A functional graph, not yet returning anything, and what its output is to be."""

    gm: fx.GraphModule
    attributes: dict[str, fx.Node]  # tensors held by Dynamo's graph, by target
    written: list[tuple[fx.Node, fx.Node]]  # new value, input or attribute it replaces
    returned: list[Any]


@dataclass
class _Expansion:
    """What torch made of a step."""

    inputs: list[fx.Node]
    nodes: list[fx.Node]
    results: list[Any] = field(default_factory=list)  # one per output, a list for a tuple
    written: dict[int, Any] = field(default_factory=dict)  # new values, by index of the input


def capture_repeats(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Captured:
    """The captured form of ``gm``, Dynamo's graph without vmap regions. Raises Unsuited."""
    graph = StepGraph(gm, example_inputs)
    steps = graph.steps()
    distinct = {step.key: step for step in reversed(steps)}
    if _REPEATS * sum(len(s.nodes) for s in distinct.values()) > sum(len(s.nodes) for s in steps):
        raise Unsuited("few calls repeat")
    expansions = dict(zip(distinct, _trace(graph, list(distinct.values()))))
    return _assemble(graph, steps, expansions)


def _like(x: Tensor) -> Tensor:
    """A tensor of the same kind over a storage of its own."""
    reach = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()) if n)
    base = torch.empty(reach + 1, dtype=x.dtype, device=x.device)
    return base.as_strided(x.shape, x.stride()).requires_grad_(x.requires_grad)


def _trace(graph: StepGraph, steps: list[Step]) -> list[_Expansion]:
    """All steps side by side in one graph, traced by torch, and cut apart again."""
    body = fx.Graph()
    values: list[Tensor] = []
    copies: list[dict[fx.Node, fx.Node]] = [{} for _ in steps]
    for step, copied in zip(steps, copies):
        for x in step.inputs:
            copied[x] = body.placeholder(f"input_{len(values)}")
            with graph.mode:
                values.append(_like(graph.value[x]))
    results: list[fx.Node] = []
    for step, copied in zip(steps, copies):
        for node in step.nodes:
            copied[node] = body.node_copy(node, copied.__getitem__)
        for node in step.outputs:
            if isinstance(graph.value[node], Tensor):
                results.append(copied[node])
            else:
                each = range(len(graph.value[node]))
                results += [body.call_function(operator.getitem, (copied[node], i)) for i in each]
    body.output(tuple(results))
    traced, signature = aot_export_module(
        fx.GraphModule(graph.gm, body), values, trace_joint=False, pre_dispatch=True
    )
    assert isinstance(traced, fx.GraphModule)
    return _cut(graph, steps, traced, signature)


def _cut(
    graph: StepGraph, steps: list[Step], traced: fx.GraphModule, signature: Any
) -> list[_Expansion]:
    *nodes, output = traced.graph.nodes
    placeholders = [n for n in nodes if n.op == "placeholder"]
    results = list(output.args[0])
    new = {name: results[i] for i, name in enumerate(signature.user_inputs_to_mutate.values())}
    rest = iter(results[len(new) :])
    inputs = iter(placeholders)
    expansions = []
    for step in steps:
        expansion = _Expansion([next(inputs) for _ in step.inputs], [])
        for node in step.outputs:
            value = graph.value[node]
            taken = [next(rest) for _ in flat(value)]
            expansion.results.append(taken[0] if isinstance(value, Tensor) else taken)
        for i, placeholder in enumerate(expansion.inputs):
            if placeholder.name in new:
                expansion.written[i] = new[placeholder.name]
        expansions.append(expansion)
    if len(placeholders) != sum(len(s.inputs) for s in steps) or next(rest, None) is not None:
        raise Unsuited("tracing added an input or an output")
    _share_out(expansions, [n for n in nodes if n.op != "placeholder"])
    return expansions


def _share_out(expansions: list[_Expansion], nodes: list[fx.Node]) -> None:
    """Give each expansion the nodes its results come from, in order; every effect must be one's."""
    owner: dict[fx.Node, _Expansion] = {}
    for expansion in expansions:
        stack = [*flat(expansion.results), *expansion.written.values()]
        while stack:
            x = stack.pop()
            if isinstance(x, fx.Node) and x.op != "placeholder" and x not in owner:
                owner[x] = expansion
                stack += x.all_input_nodes
    for node in nodes:
        if node in owner:
            owner[node].nodes.append(node)
        elif node.is_impure() and node.target is not torch.ops.aten._assert_tensor_metadata.default:
            raise Unsuited(f"{node.target} has an effect of its own")


def _assemble(
    graph: StepGraph, steps: list[Step], expansions: dict[Hashable, _Expansion]
) -> Captured:
    new = fx.Graph()
    captured = fx.GraphModule({}, new)
    build = _Builder(captured, graph)
    attributes: dict[str, fx.Node] = {}
    for source in graph.sources:
        if source.op == "placeholder":
            build.now[source] = node = new.placeholder(source.name)
        else:
            build.now[source] = node = new.get_attr(str(source.target))
            attributes[str(source.target)] = node
        node.meta["val"] = graph.fake(source)
        build.check(node, graph.value[source])
    first = dict(build.now)
    with graph.mode:
        for step in steps:
            build.add(step, expansions[step.key])
    returned = fx.node.map_arg(graph.output, build.of)
    written = [(build.now[x], first[x]) for x in graph.sources if build.now[x] is not first[x]]
    # Attributes come before inputs, as they do in torch's own signature.
    written.sort(key=lambda pair: pair[1].op != "get_attr")
    return Captured(captured, attributes, written, list(returned))


class _Builder:
    """Writes expansions into the captured graph; ``now`` is what each Dynamo node stands for."""

    def __init__(self, captured: fx.GraphModule, graph: StepGraph):
        self.captured = captured
        self.graph = graph
        self.now: dict[fx.Node, Any] = {}
        self.constants: dict[str, fx.Node] = {}

    def of(self, node: fx.Node) -> Any:
        if node not in self.now and self.graph.is_element(node):
            self.now[node] = self.now[node.args[0]][node.args[1]]  # type: ignore[index]
        return self.now[node]

    def add(self, step: Step, expansion: _Expansion) -> None:
        copies: dict[fx.Node, Any] = dict(zip(expansion.inputs, map(self.of, step.inputs)))
        for node in expansion.nodes:
            copies[node] = self._copy(node, copies, step.nodes[0])

        def result(x: Any) -> Any:
            return fx.node.map_arg(x, copies.__getitem__)

        for i, x in expansion.written.items():
            target = step.inputs[i]
            if target not in self.graph.roots:
                raise Unsuited(f"{step.nodes[0]} writes to an input unexpectedly")
            self.now[target] = result(x)
            self.check(self.now[target], self.graph.value[target])
        for output, x in zip(step.outputs, expansion.results):
            if output in self.graph.roots and _is_view_of(x, expansion.inputs):
                raise Unsuited(f"{output} is a view, and is written to")
            self.now[output] = result(x)
            self.check(self.now[output], self.graph.value[output])

    def _copy(self, node: fx.Node, copies: dict[fx.Node, Any], like: fx.Node) -> fx.Node:
        graph = self.captured.graph
        if node.op == "get_attr":
            return self._constant(node)
        if node.op != "call_function":
            raise Unsuited(f"tracing made a {node.op}")
        new = graph.node_copy(node, copies.__getitem__)
        new.meta = {}
        inherit(like, new)
        args, kwargs = fx.node.map_arg((new.args, new.kwargs), lambda n: n.meta["val"])
        new.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
        return new

    def _constant(self, node: fx.Node) -> fx.Node:
        """A number that tracing lifted, once for all calls that have it."""
        name = str(node.target)
        if name not in self.constants:
            value = getattr(node.graph.owning_module, name)
            if not isinstance(value, Tensor):
                raise Unsuited(f"tracing made a subgraph, {name}")
            self.captured.register_buffer(name, value, persistent=False)
            new = self.captured.graph.get_attr(name)
            new.meta["val"] = node.meta["val"]
            self.constants[name] = new
        return self.constants[name]

    def check(self, new: Any, value: Any) -> None:
        """The expansion was traced for inputs like these: so they have to be, all along."""
        if isinstance(value, (list, tuple)):
            if len(new) != len(value):
                raise Unsuited("a tuple has changed its length")
            for x, v in zip(new, value):
                self.check(x, v)
        elif isinstance(value, Tensor) and shape_key(new.meta["val"]) != shape_key(value):
            found = shape_key(new.meta["val"])
            raise Unsuited(f"{new} is {found}, Dynamo expected {shape_key(value)}")


def _is_view_of(x: Any, inputs: list[fx.Node]) -> bool:
    while isinstance(x, fx.Node) and is_view(x):
        x = x.args[0]
    return x in inputs
