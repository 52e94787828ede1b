"""Dynamo's torch-level graph as a functional pre-dispatch ATen graph.

Before:  x = torch.nn.functional.linear(h, w); cache.index_copy_(2, pos, x)
After:   x = aten.linear(h, w); new = aten.index_copy(cache, 2, pos, x); aten.copy_(cache, new)

Pre-dispatch, so that linear, scaled_dot_product_attention and layer_norm are still whole.
Mutation of an input is one copy_ at the end, in the order of the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_export_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvtailor.passes.effects import is_view
from kvtailor.passes.graph import aten, emit, is_call, output_node
from kvtailor.passes.inline_vmap import inline_vmap

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
            captured, signature = aot_export_module(
                inline_vmap(gm), list(example_inputs), trace_joint=False, pre_dispatch=True
            )
            assert isinstance(captured, fx.GraphModule)
    except Exception as error:  # anything at all: the graph is then left as it was
        first = (str(error).strip().splitlines() or [""])[0]
        raise CaptureError("export", f"{type(error).__name__}: {first[:200]}") from error
    _bind_attributes(captured, gm, [*signature.parameters, *signature.buffers])
    _write_back(captured, signature)
    captured.meta.clear()
    return captured


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
    """What a captured graph calls an attribute of the Dynamo graph."""
    return BOUND + name.replace(".", "_")


def _bind_attributes(captured: fx.GraphModule, gm: fx.GraphModule, names: list[str]) -> None:
    """Parameters and buffers the Dynamo graph held as attributes: inputs back to attributes."""
    placeholders = [n for n in captured.graph.nodes if n.op == "placeholder"]
    for name, placeholder in zip(names, placeholders):
        tensor: Any = gm
        for part in name.split("."):
            tensor = getattr(tensor, part)
        flat = flat_name(name)
        captured.register_buffer(flat, tensor, persistent=False)
        with captured.graph.inserting_before(placeholder):
            attribute = captured.graph.get_attr(flat)
        attribute.meta.update(placeholder.meta)
        placeholder.replace_all_uses_with(attribute)
        captured.graph.erase_node(placeholder)
    captured.recompile()


def _write_back(captured: fx.GraphModule, signature: Any) -> None:
    """Outputs of mutated inputs become copy_ into the input; the user's outputs stay."""
    output = output_node(captured)
    results = list(output.args[0])  # type: ignore[arg-type]
    mutated = {**signature.buffers_to_mutate, **signature.user_inputs_to_mutate}
    # Only user inputs keep their placeholder; a mutated attribute is found by its name.
    targets = {n.name: n for n in captured.graph.nodes if n.op == "placeholder"}
    targets |= {n.target.removeprefix(BOUND): n for n in captured.graph.nodes if n.op == "get_attr"}
    new_values = results[: len(mutated)]
    returned = results[len(mutated) :]
    with captured.graph.inserting_before(output):
        for new, target_name in zip(new_values, mutated.values()):
            target = targets[target_name.replace(".", "_")]
            copy = captured.graph.call_function(aten.copy_.default, (target, new))
            copy.meta["val"] = target.meta["val"]
            # What is returned of a mutated input, whole or as a view, must stay part of the input.
            returned = [_rebased(r, new, target) for r in returned]
    output.args = (tuple(returned),)
    _drop_noise(captured)


def _rebased(node: Any, new: fx.Node, target: fx.Node) -> Any:
    """A chain of views of ``new``, made of ``target`` instead; any other node as it is."""
    views: list[fx.Node] = []
    base = node
    while base is not new and isinstance(base, fx.Node) and is_view(base):
        views.append(base)
        base = base.args[0]
    if base is not new:
        return node
    result = target
    for view in reversed(views):
        assert callable(view.target)
        result = emit(view.graph, view.target, result, *view.args[1:], like=view, **view.kwargs)
    return result


def _drop_noise(captured: fx.GraphModule) -> None:
    """Metadata asserts, and switches of a grad mode that is off for the whole graph."""
    for node in list(captured.graph.nodes):
        if is_call(node, aten._assert_tensor_metadata) or (
            node.op == "call_function" and node.target is torch._C._set_grad_enabled
        ):
            captured.graph.erase_node(node)
    captured.graph.lint()
    captured.recompile()
