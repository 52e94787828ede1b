"""Dynamo's graph as steps: calls that can be traced apart from the others, and when two are equal.

    x = a * 2;  part = x[1:];  part.add_(y);  z = x.sum()
    -> [x = a * 2]   [part = x[1:]; part.add_(y)], which gives x anew   [z = x.sum()]

A functional call is a step of its own. A call that writes is one with every op between it and the
views that see the write. Two steps with equal keys compute the same from their inputs.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import is_fake

from kvtailor.passes.effects import storage
from kvtailor.passes.graph import flat, frozen

_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        *("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow"),
        *("iand", "ior", "ixor", "ilshift", "irshift", "imatmul"),
    )
)
_IN_PLACE_METHODS = frozenset(f"__{f.__name__}__" for f in _IN_PLACE_OPERATORS)


class Unsuited(Exception):
    """This graph has to be traced as a whole; the text says why."""


@dataclass
class Step:
    """Calls that are traced together: one, or a region around writes."""

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    key: Hashable


class StepGraph:
    """Dynamo's graph with what is known of its values."""

    def __init__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]):
        self.gm = gm
        mode = detect_fake_mode(example_inputs)
        if mode is None:
            raise Unsuited("no input is a tensor")
        self.mode = mode
        self.sources: list[fx.Node] = []  # inputs and attributes
        self.calls: list[fx.Node] = []
        self.output: tuple[Any, ...] = ()
        self.value: dict[fx.Node, Any] = {}  # Dynamo's fake ones
        self.roots: set[fx.Node] = set()  # of storages that are written
        self.at = {node: i for i, node in enumerate(gm.graph.nodes)}
        self._real: dict[fx.Node, Any] = {}
        given = iter(example_inputs)
        held = {**dict(gm.named_parameters()), **dict(gm.named_buffers())}
        for node in gm.graph.nodes:
            if node.op == "output":
                self.output = node.args[0]
            elif node.op == "placeholder":
                self._add_source(node, next(given))
            elif node.op == "get_attr":
                self._add_source(node, held.get(node.target))
            elif not _does_nothing(node):
                self._add_call(node)

    def _add_source(self, node: fx.Node, real: Any) -> None:
        if not isinstance(real, Tensor):
            raise Unsuited(f"{node} is a {type(real).__name__}, or no parameter or buffer")
        self.sources.append(node)
        self._real[node] = real
        self._set_value(node, node.meta.get("example_value"))

    def _add_call(self, node: fx.Node) -> None:
        if node.op == "call_module" or isinstance(node.target, torch._ops.HigherOrderOperator):
            raise Unsuited(f"{node.target} has a graph of its own")
        if _name(node) in ("as_strided", "as_strided_"):
            raise Unsuited("as_strided reads the storage, not the tensor")
        self.calls.append(node)
        # What inline_vmap pasted has the value of its own tracing.
        self._set_value(node, node.meta.get("example_value", node.meta.get("val")))

    def _set_value(self, node: fx.Node, value: Any) -> None:
        self.value[node] = value
        for x in flat(value):
            if isinstance(x, Tensor):
                _check_plain(x)
            elif node.users:
                raise Unsuited(f"{node} is a {type(x).__name__}")

    def fake(self, source: fx.Node) -> Tensor:
        """The value of an input or attribute in the mode that tracing is in, unlike Dynamo's.

        No captured value requires gradients: an inner compiler would take a graph that comes from
        the disk, where this is not kept, for another one.
        """
        real = self._real[source]
        fake = real if is_fake(real) else self.mode.from_tensor(real, static_shapes=True)
        return fake.detach()

    def steps(self) -> list[Step]:
        """All calls in order; picking an element of a tuple is none."""
        regions = iter(self._regions())
        start, end = next(regions, (None, None))
        steps: list[Step] = []
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
            for key in {storage(x) for x in flat(self.value[node]) if isinstance(x, Tensor)}:
                aliases.setdefault(key, []).append(node)
        spans: list[tuple[int, int]] = []
        for node in self.calls:
            for target in _written(node):
                if not isinstance(self.value.get(target), Tensor):
                    raise Unsuited(f"{node} writes to what is no tensor")
                root, *others = aliases[storage(self.value[target])]
                if not isinstance(self.value[root], Tensor):
                    raise Unsuited(f"{node} writes to a part of a tuple")
                if any(x in self.sources for x in others):
                    raise Unsuited(f"{node} writes to an input that has two names")
                self.roots.add(root)
                spans.append((self._start(node, others), self.at[node]))
        merged: list[tuple[int, int]] = []
        for start, end in sorted(spans):
            if merged and start <= merged[-1][1]:
                start, end = merged[-1][0], max(end, merged[-1][1])
                merged.pop()
            merged.append((start, end))
        return merged

    def _start(self, write: fx.Node, others: list[fx.Node]) -> int:
        """Where the first of the views stands that the write has to be traced together with."""
        end = self.at[write]
        first = end
        stack = [
            x for x in others if self.at[x] < end and any(self.at[user] >= end for user in x.users)
        ]
        while stack:
            view = stack.pop()
            first = min(first, self.at[view])
            stack += [x for x in view.all_input_nodes if x in others]
        return first

    def _step(self, nodes: list[fx.Node]) -> Step:
        inside = set(nodes)
        inputs = list(dict.fromkeys(x for n in nodes for x in n.all_input_nodes if x not in inside))
        outputs = [n for n in nodes if any(user not in inside for user in n.users)]
        if not all(isinstance(self.value.get(x), Tensor) for x in inputs):
            raise Unsuited(f"{nodes[0]} takes what is no tensor")
        names: dict[fx.Node, Hashable] = {x: i for i, x in enumerate(inputs)}
        names |= {n: -1 - i for i, n in enumerate(nodes)}
        metas = tuple(_meta(self.value[x]) for x in inputs)
        calls = tuple((_function(n), _key(n.args, names), _key(n.kwargs, names)) for n in nodes)
        return Step(nodes, inputs, outputs, (metas, calls, tuple(names[n] for n in outputs)))


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


def _written(node: fx.Node) -> list[fx.Node]:
    """The arguments that a call writes to, as far as its name and schema tell.

    Others, such as relu(x, inplace=True), come to light when the call is traced.
    """
    target: Any = node.target
    if "out" in node.kwargs:
        raise Unsuited(f"{node} has an argument out")
    if isinstance(target, torch._ops.OpOverload):
        arguments = target._schema.arguments
        given = [*zip(arguments, node.args)]
        given += [(a, node.kwargs[a.name]) for a in arguments if a.name in node.kwargs]
        written: list[Any] = []
        for argument, x in given:
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += flat(x)
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
    try:
        return frozen(arg, names.__getitem__)
    except TypeError as error:
        raise Unsuited("a size is symbolic") from error


def _meta(x: Tensor) -> Hashable:
    return shape_key(x), x.requires_grad


def shape_key(x: Tensor) -> Hashable:
    """What tracing may depend on; as_strided alone asks for the offset, and is not taken."""
    return tuple(x.shape), x.stride(), x.dtype, x.device
