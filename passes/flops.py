"""Floating-point operations of a graph, by the formulas of torch.utils.flop_counter.

Only matrix products, convolutions and attention count, as they do for torch's FlopCounterMode.
Attention counts as the whole square of scores, masked or not.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from kvtailor.passes.graph import FLOPS, hint, module_path, val

log = logging.getLogger(__name__)


def flops(gm: fx.GraphModule) -> int:
    """Sum of ``node_flops`` over the graph."""
    return sum(node_flops(node) for node in gm.graph.nodes)


def flops_by_layer(gm: fx.GraphModule) -> dict[str, int]:
    """``node_flops`` by layer, "model.layers.3", in graph order; "" is what stands in none."""
    found: dict[str, int] = {}
    for node in gm.graph.nodes:
        count = node_flops(node)
        if count:
            layer = layer_of(module_path(node))
            found[layer] = found.get(layer, 0) + count
    return found


def layer_of(path: str) -> str:
    """A module path up to its first number: ``model.layers.3.mlp`` is in ``model.layers.3``."""
    match = re.match(r"(.*?\.\d+)(?:\.|$)", path)
    return match[1] if match else ""


def node_flops(node: fx.Node) -> int:
    """Floating-point operations of one call; symbolic sizes count as their hints.

    An op with a formula of its own is counted by it. A composite op (linear, matmul, einsum,
    scaled_dot_product_attention) is taken apart on meta tensors, which hold no data.
    """
    if FLOPS in node.meta:
        return int(node.meta[FLOPS])
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op.is_view or not _computes(node):
        return 0
    formula = flop_registry.get(op.overloadpacket)
    if formula is None and not _is_composite(op):
        return 0
    try:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: _meta(val(n)))
        if formula is not None:
            return int(formula(*args, **kwargs, out_val=_meta(val(node))))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            op(*args, **kwargs)
        return int(counter.get_total_flops())
    except (RuntimeError, NotImplementedError, TypeError, AssertionError) as error:
        log.warning("no FLOPs counted for %s: %s", node, error)
        return 0


def _computes(node: fx.Node) -> bool:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(first, Tensor) and first.is_floating_point()


def _is_composite(op: torch._ops.OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def _meta(value: Any) -> Any:
    """A stand-in with plain sizes: a meta tensor for a tensor, the hint for a SymInt."""
    if isinstance(value, Tensor):
        sizes = [hint(s) for s in value.shape]
        return torch.empty(sizes, dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_meta(v) for v in value)
    return hint(value)
