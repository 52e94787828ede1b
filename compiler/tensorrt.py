"""The inner compiler ``tensorrt``: Torch-TensorRT for the pieces it can take.

Built against the documented ``torch_tensorrt.dynamo.compile``; it has never been run, since the
package comes from NVIDIA's own index and needs a GPU. A piece is taken when all its ops are
torch's own, its shapes are fixed, and it writes to none of its inputs; parameters stay inputs of
the engine, so that equal pieces share one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

MISSING = (
    "inner='tensorrt' needs the package torch-tensorrt, which is not installed: "
    "pip install 'kvtailor[tensorrt]', with NVIDIA's package index and a CUDA build of torch"
)


class MissingTensorRT(ImportError):
    """Torch-TensorRT cannot be imported."""


def require() -> Any:
    """The module torch_tensorrt. Raises MissingTensorRT."""
    try:
        return importlib.import_module("torch_tensorrt")
    except ImportError as error:
        raise MissingTensorRT(MISSING) from error


def refusal(gm: fx.GraphModule) -> str | None:
    """Why a piece is not for TensorRT, None where it is."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and not isinstance(value, Tensor):
            return "an input is no tensor"
        if isinstance(value, Tensor) and any(not isinstance(n, int) for n in value.shape):
            return f"{node} has a size that changes"
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            if node.target.namespace != "aten":
                return f"{node.target} is no op of torch's own"
            if node.target._schema.is_mutable:
                return f"{node.target} writes to its input"
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.meta["val"].device.type != "cuda":
            return f"an input is on {node.meta['val'].device.type}"
    return None


def compile_piece(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Torch-TensorRT's module for the piece; example_inputs are fake tensors of fixed shape."""
    torch_tensorrt = require()
    program = torch.export.export(gm, tuple(example_inputs), strict=False)
    inputs = [torch_tensorrt.Input(shape=tuple(x.shape), dtype=x.dtype) for x in example_inputs]
    # A mask is what it was proved to be: nobody may take it for causal.
    compiled = torch_tensorrt.dynamo.compile(
        program, arg_inputs=inputs, attn_bias_is_causal=False, device=example_inputs[0].device
    )
    assert callable(compiled)
    return compiled
