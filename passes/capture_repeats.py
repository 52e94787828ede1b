"""Capture of a graph whose ops repeat, layer after layer: each distinct op is traced once.

    3,000 calls in Dynamo's graph
    -> 200 distinct ones, by function, constants and the shapes, strides and dtypes of tensors
    -> one small graph of these, side by side, traced by torch
    -> the captured graph: the ATen nodes of the distinct call in place of each call

A functional op computes the same wherever it stands. An op that writes does not: it is traced
together with every op between it and the views that see the write (``_regions``), and what it
wrote to is from there on the new value, for the ops that follow and for the write at the end.
Graphs in doubt (symbolic sizes, subgraphs, unknown effects) are not for this way of capturing.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_export_module
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import is_fake

# Worth it only where a traced call stands for several.
_REPEATS = 2

_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        *("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow"),
        *("iand", "ior", "ixor", "ilshift", "irshift", "imatmul"),
    )
)
_IN_PLACE_METHODS = frozenset(f"__{f.__name__}__" for f in _IN_PLACE_OPERATORS)

_CONSTANTS = (
    *(bool, int, float, complex, str, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class Unsuited(Exception):
    """This graph has to be traced as a whole; the text says why."""


class Captured(NamedTuple):
    """A functional graph, not yet returning anything, and what its output is to be."""

    gm: fx.GraphModule
    attributes: dict[str, fx.Node]  # tensors held by Dynamo's graph, by target
    written: list[tuple[fx.Node, fx.Node]]  # new value, input or attribute it replaces
    returned: list[Any]


@dataclass
class _Step:
    """Calls that are traced together: one, or a region around writes."""

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    key: Hashable


@dataclass
class _Expansion:
    """What torch made of a step."""

    inputs: list[fx.Node]
    nodes: list[fx.Node]
    results: list[Any] = field(default_factory=list)  # one per output, a list for a tuple
    written: dict[int, Any] = field(default_factory=dict)  # new values, by index of the input


def capture_repeats(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Captured:
    """The captured form of ``gm``, Dynamo's graph without vmap regions. Raises Unsuited."""
    graph = _Graph(gm, example_inputs)
    steps = graph.steps()
    distinct = {step.key: step for step in reversed(steps)}
    if _REPEATS * sum(len(s.nodes) for s in distinct.values()) > sum(len(s.nodes) for s in steps):
        raise Unsuited("few calls repeat")
    expansions = dict(zip(distinct, _trace(graph, list(distinct.values()))))
    return _assemble(graph, steps, expansions)


class _Graph:
    """Dynamo's graph with what is known of its values."""

    def __init__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]):
        self.gm = gm
        mode = detect_fake_mode(example_inputs)
        if mode is None:
            raise Unsuited("no input is a tensor")
        self.mode = mode
        self.sources: list[fx.Node] = []
        self.calls: list[fx.Node] = []
        self.output: tuple[Any, ...] = ()
        self.value: dict[fx.Node, Any] = {}
        self.roots: set[fx.Node] = set()  # of storages that are written
        self.at = {node: i for i, node in enumerate(gm.graph.nodes)}
        held = {**dict(gm.named_parameters()), **dict(gm.named_buffers())}
        given = iter(example_inputs)
        self.real: dict[fx.Node, Any] = {}
        for node in gm.graph.nodes:
            if node.op == "output":
                self.output = node.args[0]
            elif node.op in ("placeholder", "get_attr"):
                self.sources.append(node)
                if node.op == "get_attr" and node.target not in held:
                    raise Unsuited(f"{node.target} is no parameter or buffer")
                self.real[node] = next(given) if node.op == "placeholder" else held[node.target]
                self.value[node] = node.meta.get("example_value")
            elif not _does_nothing(node):
                if node.op == "call_module" or isinstance(node.target, _HIGHER_ORDER):
                    raise Unsuited(f"{node.target} has a graph of its own")
                if _name(node) in ("as_strided", "as_strided_"):
                    raise Unsuited("as_strided reads the storage, not the tensor")
                self.calls.append(node)
                self.value[node] = node.meta.get("example_value", node.meta.get("val"))
        for node, value in self.value.items():
            for x in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(x, Tensor):
                    _check_plain(x)
                elif node.users or node.op == "placeholder":
                    raise Unsuited(f"{node} is a {type(x).__name__}")

    def fake(self, source: fx.Node) -> Tensor:
        """The value of an input or attribute in the mode that tracing is in, unlike Dynamo's."""
        real = self.real[source]
        return real if is_fake(real) else self.mode.from_tensor(real, static_shapes=True)

    def tensors(self, node: fx.Node) -> list[Tensor]:
        value = self.value.get(node)
        each = value if isinstance(value, (list, tuple)) else [value]
        return [x for x in each if isinstance(x, Tensor)]

    def steps(self) -> list[_Step]:
        """All calls in order; picking an element of a tuple is none."""
        regions = iter(self._regions())
        start, end = next(regions, (None, None))
        steps: list[_Step] = []
        region: list[fx.Node] = []
        for node in self.calls:
            at = self.at[node]
            if start is not None and start <= at:
                region.append(node)
                if at == end:
                    steps.append(self._step(region))
                    region = []
                    start, end = next(regions, (None, None))
            elif not self.is_element(node):
                steps.append(self._step([node]))
        return steps

    def is_element(self, node: fx.Node) -> bool:
        return node.target is operator.getitem and isinstance(
            self.value.get(node.args[0]),  # type: ignore[arg-type]
            (list, tuple),
        )

    def _regions(self) -> list[tuple[int, int]]:
        """Spans of calls around the writes to a storage, first and last, disjoint and in order.

        The first tensor of a storage stands for it outside. The views that lead from it to what
        is written are in the region, and so is any other alias read at the write or after it.
        """
        aliases: dict[int, list[fx.Node]] = {}
        for node in (*self.sources, *self.calls):
            for storage in {_storage(x) for x in self.tensors(node)}:
                aliases.setdefault(storage, []).append(node)
        spans: list[tuple[int, int]] = []
        for node in self.calls:
            end = self.at[node]
            for target in _written(node):
                if not isinstance(self.value.get(target), Tensor):
                    raise Unsuited(f"{node} writes to what is no tensor")
                root, *others = aliases[_storage(self.value[target])]
                if not isinstance(self.value[root], Tensor):
                    raise Unsuited(f"{node} writes to a part of a tuple")
                if any(x in self.sources for x in others):
                    raise Unsuited(f"{node} writes to an input that has two names")
                self.roots.add(root)
                inside = {node}
                stack = [x for x in others if self.at[x] < end and self._read_from(x, end)]
                while stack:
                    x = stack.pop()
                    if x in others and x not in inside:
                        inside.add(x)
                        stack += x.all_input_nodes
                spans.append((min(self.at[x] for x in inside), end))
        merged: list[tuple[int, int]] = []
        for start, end in sorted(spans):
            if merged and start <= merged[-1][1]:
                start, end = merged[-1][0], max(end, merged[-1][1])
                merged.pop()
            merged.append((start, end))
        return merged

    def _read_from(self, node: fx.Node, at: int) -> bool:
        return any(self.at[user] >= at for user in node.users)

    def _step(self, nodes: list[fx.Node]) -> _Step:
        inside = set(nodes)
        inputs = list(dict.fromkeys(x for n in nodes for x in n.all_input_nodes if x not in inside))
        outputs = [n for n in nodes if any(user not in inside for user in n.users)]
        if not all(isinstance(self.value.get(x), Tensor) for x in inputs):
            raise Unsuited(f"{nodes[0]} takes what is no tensor")
        names: dict[fx.Node, Hashable] = {x: i for i, x in enumerate(inputs)}
        names |= {n: -1 - i for i, n in enumerate(nodes)}
        metas = tuple(_meta(self.value[x]) for x in inputs)
        calls = tuple((_function(n), _key(n.args, names), _key(n.kwargs, names)) for n in nodes)
        return _Step(nodes, inputs, outputs, (metas, calls, tuple(names[n] for n in outputs)))


_HIGHER_ORDER = torch._ops.HigherOrderOperator


def _does_nothing(node: fx.Node) -> bool:
    """Logging of API use, and a switch to the grad mode that is on already."""
    if node.target is torch._C._set_grad_enabled:
        return node.args[0] is torch.is_grad_enabled()
    return node.target is torch._C._log_api_usage_once


def _check_plain(x: Tensor) -> None:
    if x.layout is not torch.strided or x.is_conj() or x.is_neg() or x.is_quantized:
        raise Unsuited("a tensor is not a plain strided one")
    for number in (*x.shape, *x.stride(), x.storage_offset()):
        if not isinstance(number, int):
            raise Unsuited("a size is symbolic")


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _written(node: fx.Node) -> list[fx.Node]:
    """The arguments that a call writes to, as far as its name and schema tell.

    Others, such as relu(x, inplace=True), come to light when the call is traced.
    """
    target: Any = node.target
    if "out" in node.kwargs:
        raise Unsuited(f"{node} has an argument out")
    if isinstance(target, torch._ops.OpOverload):
        given = [*zip(target._schema.arguments, node.args)]
        given += [
            (a, node.kwargs[a.name]) for a in target._schema.arguments if a.name in node.kwargs
        ]
        written: list[Any] = []
        for argument, x in given:
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += x if isinstance(x, (list, tuple)) else [x]
        return [x for x in written if isinstance(x, fx.Node)]
    name = _name(node)
    trailing = name.endswith("_") and not name.endswith("__")
    if not trailing and target not in _IN_PLACE_OPERATORS and name not in _IN_PLACE_METHODS:
        return []
    for overload in _overloads(name):
        if torch.Tag.inplace_view in overload.tags:
            raise Unsuited(f"{name} changes a shape in place")
    return [x for x in node.args[:1] if isinstance(x, fx.Node)]


def _name(node: fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).split("::")[-1]
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _overloads(name: str) -> Iterator[torch._ops.OpOverload]:
    packet = getattr(torch.ops.aten, name, None)
    if packet is not None:
        for overload in packet.overloads():
            yield getattr(packet, overload)


def _function(node: fx.Node) -> Hashable:
    """What is called; a function from elsewhere may do something else each time."""
    target: Any = node.target
    known = isinstance(
        target, (str, torch._ops.OpOverload, torch._ops.OpOverloadPacket, types.BuiltinFunctionType)
    ) or (getattr(target, "__module__", None) or "").split(".")[0] in ("torch", "_operator", "math")
    return (node.op, target) if known else node


def _key(arg: Any, names: dict[fx.Node, Hashable]) -> Hashable:
    """Equal exactly for arguments that are the same; types count, as in 1, 1.0 and True."""
    if isinstance(arg, fx.Node):
        return fx.Node, names[arg]
    if isinstance(arg, (list, tuple)):
        return type(arg), tuple(_key(x, names) for x in arg)
    if isinstance(arg, dict):
        return dict, tuple((name, _key(x, names)) for name, x in arg.items())
    if isinstance(arg, slice):
        return slice, tuple(_key(x, names) for x in (arg.start, arg.stop, arg.step))
    if isinstance(arg, (float, complex)):
        return type(arg), repr(arg)  # 0.0 is not -0.0
    if isinstance(arg, _CONSTANTS):
        return type(arg), arg
    if isinstance(arg, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise Unsuited("a size is symbolic")
    return object()  # equal to nothing else


def _meta(x: Tensor) -> Hashable:
    return _shape(x), x.requires_grad


def _like(x: Tensor) -> Tensor:
    """A tensor of the same kind over a storage of its own."""
    reach = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()) if n)
    base = torch.empty(reach + 1, dtype=x.dtype, device=x.device)
    return base.as_strided(x.shape, x.stride()).requires_grad_(x.requires_grad)


def _trace(graph: _Graph, steps: list[_Step]) -> list[_Expansion]:
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
    graph: _Graph, steps: list[_Step], traced: fx.GraphModule, signature: Any
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
            taken = [next(rest) for _ in (value if isinstance(value, (list, tuple)) else [value])]
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
        stack: list[Any] = [*expansion.results, *expansion.written.values()]
        while stack:
            x = stack.pop()
            if isinstance(x, (list, tuple)):
                stack += x
            elif isinstance(x, fx.Node) and x.op != "placeholder" and x not in owner:
                owner[x] = expansion
                stack += x.all_input_nodes
    for node in nodes:
        if node in owner:
            owner[node].nodes.append(node)
        elif node.is_impure() and node.target is not torch.ops.aten._assert_tensor_metadata.default:
            raise Unsuited(f"{node.target} has an effect of its own")


def _assemble(
    graph: _Graph, steps: list[_Step], expansions: dict[Hashable, _Expansion]
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

    def __init__(self, captured: fx.GraphModule, graph: _Graph):
        self.captured = captured
        self.graph = graph
        self.now: dict[fx.Node, Any] = {}
        self.constants: dict[str, fx.Node] = {}

    def of(self, node: fx.Node) -> Any:
        if node not in self.now and self.graph.is_element(node):
            self.now[node] = self.now[node.args[0]][node.args[1]]  # type: ignore[index]
        return self.now[node]

    def add(self, step: _Step, expansion: _Expansion) -> None:
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
            self.now[output] = result(x)
            self.check(self.now[output], self.graph.value[output])

    def _copy(self, node: fx.Node, copies: dict[fx.Node, Any], like: fx.Node) -> fx.Node:
        graph = self.captured.graph
        if node.op == "get_attr":
            return self._constant(node)
        if node.op != "call_function":
            raise Unsuited(f"tracing made a {node.op}")
        new = graph.node_copy(node, copies.__getitem__)
        new.meta = {
            key: like.meta[key] for key in ("nn_module_stack", "stack_trace") if key in like.meta
        }
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
        elif isinstance(value, Tensor) and _shape(new.meta["val"]) != _shape(value):
            found = _shape(new.meta["val"])
            raise Unsuited(f"{new} is {found}, Dynamo expected {_shape(value)}")


def _shape(x: Tensor) -> Hashable:
    """What tracing may depend on; as_strided alone asks for the offset, and is not taken."""
    return tuple(x.shape), x.stride(), x.dtype, x.device
