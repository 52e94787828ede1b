"""Dynamo's torch-level graph as a functional pre-dispatch ATen graph.

Before:  x = torch.nn.functional.linear(h, w); cache.index_copy_(2, pos, x)
After:   x = aten.linear(h, w); new = aten.index_copy(cache, 2, pos, x); aten.copy_(cache, new)

Pre-dispatch, so that linear, scaled_dot_product_attention and layer_norm are still whole.
Mutation of an input is one copy_ at the end, in the order of the inputs.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvtailor.passes.capture.capture_repeats import Captured, Unsuited, capture_repeats
from kvtailor.passes.capture.inline_vmap import inline_vmap
from kvtailor.passes.effects import base_of, flat, root_of, storage
from kvtailor.passes.failures import CONTROL_FLOW, one_line
from kvtailor.passes.graph import as_node, aten, emit, is_call, output_node

log = logging.getLogger(__name__)

# Prefix of attributes of the user's own; those without it are numbers that tracing lifted.
BOUND = "kvtailor_"


class CaptureError(Exception):
    """The graph cannot be captured; ``code`` is stable, the text says why."""

    def __init__(self, code: str, why: str):
        super().__init__(why)
        self.code = code


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """A functional ATen graph that takes and returns what ``gm`` does.

    example_inputs are the fake tensors and SymInts Dynamo passes to a backend. Raises
    CaptureError; ``gm`` is never changed.
    """
    for x in example_inputs:
        if is_traceable_wrapper_subclass(x):
            kind = type(x).__name__
            raise CaptureError("tensor-subclass", f"an input is a {kind}, not a plain tensor")
    for node in gm.graph.nodes:
        turns_on = node.target is torch._C._set_grad_enabled and node.args[0] is True
        if turns_on and not torch.is_grad_enabled():
            raise CaptureError("grad-region", "the graph turns gradients on by itself")
    try:
        with _dispatch_state_restored():
            plain = _without_idle_dropout(inline_vmap(gm))
            captured = _repeats(plain, example_inputs) or _whole(plain, example_inputs)
        _keep_numbers(captured.gm, gm)
        _hold_attributes(captured, gm)
        _write_back(captured)
        _check_aliases(captured.gm, plain)
    except (CaptureError, *CONTROL_FLOW):
        raise
    except DataDependentOutputException as error:
        why = f"it reads a number out of a tensor, by {error.func}"
        raise CaptureError("export", why) from error
    except Exception as error:  # anything at all: the graph is then left as it was
        raise CaptureError("export", one_line(error)) from error
    captured.gm.meta.clear()
    return captured.gm


def _without_idle_dropout(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy in which dropout that is off is its input, as it is in eager; gm if there is none.

    Tracing refuses writes to what such a dropout returns.
    """
    if not any(_is_idle_dropout(n) for n in gm.graph.nodes):
        return gm
    result = fx.GraphModule(gm, fx.Graph())
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if _is_idle_dropout(node):
            copies[node] = copies[node.args[0]]
        else:
            copies[node] = result.graph.node_copy(node, copies.__getitem__)
    result.recompile()
    return result


def _is_idle_dropout(node: fx.Node) -> bool:
    if node.target is not torch.nn.functional.dropout or not isinstance(node.args[0], fx.Node):
        return False
    return node.kwargs.get("training", node.args[2] if len(node.args) > 2 else True) is False


def _repeats(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Captured | None:
    try:
        with _dispatch_state_restored():
            return capture_repeats(gm, example_inputs)
    except CONTROL_FLOW:
        raise
    except Exception as error:  # not for this way, or at odds with it: the other way takes all
        level = logging.DEBUG if isinstance(error, Unsuited) else logging.INFO
        log.log(level, "captured as a whole: %s: %s", type(error).__name__, error)
        return None


def _whole(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Captured:
    """The graph as torch's AOT tracing makes it, op by op."""
    captured, signature = aot_export_module(
        gm, list(example_inputs), trace_joint=False, pre_dispatch=True
    )
    assert isinstance(captured, fx.GraphModule)
    placeholders = [n for n in captured.graph.nodes if n.op == "placeholder"]
    names = [*signature.parameters, *signature.buffers]
    attributes: dict[str, fx.Node] = {}
    for name, placeholder in zip(names, placeholders):
        with captured.graph.inserting_before(placeholder):
            attribute = captured.graph.create_node("get_attr", flat_name(name))
            attributes[name] = attribute
        attribute.meta.update(placeholder.meta)
        placeholder.replace_all_uses_with(attribute)
        captured.graph.erase_node(placeholder)
    inputs = {n.name: n for n in placeholders[len(names) :]}
    output = output_node(captured)
    results = list(output.args[0])  # type: ignore[arg-type]
    captured.graph.erase_node(output)
    targets = [attributes[name] for name in signature.buffers_to_mutate.values()]
    targets += [inputs[name] for name in signature.user_inputs_to_mutate.values()]
    return Captured(captured, attributes, list(zip(results, targets)), results[len(targets) :])


@contextmanager
def _dispatch_state_restored() -> Iterator[None]:
    """A failed export must leave no vmap level and no grad mode behind: Dynamo guards on them."""
    depth = torch._C._functorch.get_dynamic_layer_stack_depth()
    grad = torch.is_grad_enabled()
    try:
        yield
    finally:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        torch._C._set_grad_enabled(grad)


def flat_name(name: str) -> str:
    """What a captured graph calls an attribute of the Dynamo graph: no two the same.

    No attribute without a dot is called as one with dots is: that begins with a digit.
    """
    parts = name.split(".")
    return BOUND + ("_".join(f"{len(p)}_{p}" for p in parts) if len(parts) > 1 else name)


def _keep_numbers(captured: fx.GraphModule, gm: fx.GraphModule) -> None:
    """Floats that Dynamo made inputs, as tensors of no axes, still know which symbol they are.

    Whoever traces the graph again could not read a number from them otherwise.
    """
    pairs = zip(gm.graph.find_nodes(op="placeholder"), captured.graph.find_nodes(op="placeholder"))
    for theirs, ours in pairs:
        known = getattr(theirs.meta.get("example_value"), "item_memo", None)
        if isinstance(known, torch.SymFloat):
            ours.meta["val"].item_memo = known


def _hold_attributes(captured: Captured, gm: fx.GraphModule) -> None:
    """Parameters and buffers the Dynamo graph held as attributes are the captured one's too."""
    for name, node in captured.attributes.items():
        tensor: Any = gm
        for part in name.split("."):
            tensor = getattr(tensor, part)
        node.target = flat_name(name)
        captured.gm.register_buffer(flat_name(name), tensor, persistent=False)


def _write_back(captured: Captured) -> None:
    """New values of what was written become copy_ into it; the user's outputs stay."""
    gm, _, written, returned = captured
    for new, target in written:
        copy = gm.graph.call_function(aten.copy_.default, (target, new))
        copy.meta["val"] = target.meta["val"]
        # What is returned of a mutated input, whole or as a view, must stay part of the input.
        returned = [_rebased(r, new, target) for r in returned]
    gm.graph.output(tuple(returned))
    _drop_noise(gm)


def _rebased(node: Any, new: fx.Node, target: fx.Node) -> Any:
    """A chain of views of ``new``, made of ``target`` instead; any other node as it is."""
    views: list[fx.Node] = []
    base = node
    while base is not new and isinstance(base, fx.Node):
        views.append(base)
        base = base_of(base)
    if base is not new:
        return node
    result = target
    for view in reversed(views):
        if view.target is operator.getitem:
            result = _again(as_node(view.args[0]), result)
        result = _again(view, result)
    return result


def _again(call: fx.Node, x: fx.Node) -> fx.Node:
    assert callable(call.target)
    return emit(call.graph, call.target, x, *call.args[1:], like=call, **call.kwargs)


def _check_aliases(captured: fx.GraphModule, gm: fx.GraphModule) -> None:
    """Inputs and results share memory as Dynamo's values do, or CaptureError says which do not."""
    theirs = [n for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")]
    memory = {n: _value(n) for n in theirs}
    known = {flat_name(str(n.target)): memory[n] for n in theirs if n.op == "get_attr"}
    inputs = gm.graph.find_nodes(op="placeholder")
    ours = captured.graph.find_nodes(op="placeholder")
    known |= {mine.name: memory[n] for n, mine in zip(inputs, ours)}
    _check_inputs(captured, [memory[n] for n in theirs])
    wanted, found = [], []
    for n, mine in zip(flat(output_node(gm).args[0]), flat(output_node(captured).args[0])):
        x = _value(n)
        if x is None or not isinstance(mine, fx.Node):
            continue
        root = root_of(mine)
        name = str(root.target) if root.op == "get_attr" else root.name
        wanted.append(storage(x))
        held = known.get(name)
        found.append(root if held is None else storage(held))
    held_outside = {storage(x) for x in memory.values() if x is not None}
    for i, (want, have) in enumerate(zip(wanted, found)):
        outside = want in held_outside or have in held_outside
        if (want != have) if outside else wanted.index(want) != found.index(have):
            why = f"result {i} would not share memory with the inputs and results it does in eager"
            raise CaptureError("alias", why)


def _check_inputs(captured: fx.GraphModule, inputs: list[Tensor | None]) -> None:
    """Two inputs over the same memory are two values here: none of them may be written to."""
    if not any(is_call(n, aten.copy_) for n in captured.graph.nodes):
        return
    seen: dict[int, list[tuple[Any, Any]]] = {}
    for x in inputs:
        if x is None or not all(isinstance(n, int) for n in (*x.shape, *x.stride())):
            continue
        start = x.storage_offset() * x.element_size()
        reach = 1 + sum((n - 1) * st for n, st in zip(x.shape, x.stride()))
        end = start + (reach * x.element_size() if x.numel() else 0)
        spans = seen.setdefault(storage(x), [])
        if any(start < other_end and other < end for other, other_end in spans):
            raise CaptureError("alias", "inputs that overlap in memory, and a write to an input")
        spans.append((start, end))


def _value(node: Any) -> Tensor | None:
    if not isinstance(node, fx.Node):
        return None
    value = node.meta.get("example_value", node.meta.get("val"))
    return value if isinstance(value, Tensor) and value.layout is torch.strided else None


def _drop_noise(captured: fx.GraphModule) -> None:
    """Metadata asserts, and switches of a grad mode that is off for the whole graph."""
    for node in list(captured.graph.nodes):
        if is_call(node, aten._assert_tensor_metadata) or (
            node.op == "call_function" and node.target is torch._C._set_grad_enabled
        ):
            captured.graph.erase_node(node)
    captured.graph.eliminate_dead_code()
    captured.graph.lint()
    captured.recompile()
