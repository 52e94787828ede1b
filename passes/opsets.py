"""Which ops are pointwise, random, copies or reshapes: by torch's tags where it has them.

Packets, every overload of an op alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from kvtailor.kernels.ops import packed_linear

aten = torch.ops.aten

# The same values in the same shape.
COPIES = (
    aten.alias,
    aten.clone,
    aten.contiguous,
    aten.detach,
    aten.lift_fresh,
    aten.lift_fresh_copy,
)

# The same elements in the same order, in a shape that an argument says.
RESHAPES = (aten.view, aten.reshape, aten._unsafe_view)

# Several tensors from one.
SEVERAL = (
    packed_linear,
    aten.split,
    aten.split_with_sizes,
    aten.chunk,
    aten.unbind,
    aten.topk,
    aten.sort,
)

# Composite ops whose result is always memory of its own.
FRESH = (
    aten.linear,
    aten.matmul,
    aten.scaled_dot_product_attention,
    aten.layer_norm,
    aten.rms_norm,
    aten.softmax,
)

# Pointwise, with overloads that torch has no tag on.
_UNTAGGED = (
    aten._to_copy,
    aten.contiguous,
    aten.copy,
    aten.floor_divide,
    aten.full_like,
    aten.masked_fill,
    aten.ones_like,
    aten.polar,
    aten.rsub,
    aten.where,
    aten.zeros_like,
    aten.__and__,
    aten.__or__,
    aten.__xor__,
)


def packet(node: fx.Node) -> Any:
    """The op called, without its overload; a plain function is itself."""
    return getattr(node.target, "overloadpacket", node.target)


def draws(node: fx.Node) -> bool:
    """Whether the op can draw random numbers; ``effects.is_random`` asks if this call does."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_pointwise(node: fx.Node) -> bool:
    """Whether each element of the result depends on one element of each operand, broadcast."""
    tagged = torch.Tag.pointwise in getattr(node.target, "tags", ())
    # where(condition) alone gives a tuple of indices.
    one = isinstance(node.meta.get("val"), torch.Tensor)
    return one and (tagged or packet(node) in _UNTAGGED) and not draws(node)
