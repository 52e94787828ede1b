"""Which ops are pointwise, random, copies or reshapes, and what may stand in a graph when.

Torch's tags say the former where it has them.

Packets, every overload of an op alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from kvtailor.kernels.ops import attend, packed_linear, store_kv

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


# Same arguments, same meaning, another name.
RENAMED: dict[Any, Any] = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten.broadcast_to.default: aten.expand.default,
    aten.mm.default: aten.matmul.default,
    aten.bmm.default: aten.matmul.default,
    aten.multiply.Tensor: aten.mul.Tensor,
    aten.multiply.Scalar: aten.mul.Scalar,
    aten.divide.Tensor: aten.div.Tensor,
    aten.divide.Scalar: aten.div.Scalar,
    aten.true_divide.Tensor: aten.div.Tensor,
    aten.true_divide.Scalar: aten.div.Scalar,
    aten.subtract.Tensor: aten.sub.Tensor,
    aten.negative.default: aten.neg.default,
    aten.less.Tensor: aten.lt.Tensor,
    aten.less.Scalar: aten.lt.Scalar,
    aten.less_equal.Tensor: aten.le.Tensor,
    aten.less_equal.Scalar: aten.le.Scalar,
    aten.greater.Tensor: aten.gt.Tensor,
    aten.greater.Scalar: aten.gt.Scalar,
    aten.greater_equal.Tensor: aten.ge.Tensor,
    aten.greater_equal.Scalar: aten.ge.Scalar,
    aten.not_equal.Tensor: aten.ne.Tensor,
    aten.not_equal.Scalar: aten.ne.Scalar,
    aten.__and__.Tensor: aten.bitwise_and.Tensor,
    aten.__or__.Tensor: aten.bitwise_or.Tensor,
    aten.__xor__.Tensor: aten.bitwise_xor.Tensor,
    aten.special_softmax.default: aten.softmax.int,
}
# The same on bools only.
BOOL_RENAMED: dict[Any, Any] = {
    aten.logical_and.default: aten.bitwise_and.Tensor,
    aten.logical_or.default: aten.bitwise_or.Tensor,
    aten.logical_xor.default: aten.bitwise_xor.Tensor,
    aten.logical_not.default: aten.bitwise_not.default,
}
# Permutations of dimensions under another name than permute.
PERMUTATIONS = (
    aten.adjoint,
    aten.mH,
    aten.mT,
    aten.matrix_H,
    aten.moveaxis,
    aten.movedim,
    aten.numpy_T,
    aten.swapaxes,
    aten.swapdims,
    aten.t,
    aten.transpose,
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


def normal_form(node: fx.Node) -> Any:
    """The op that normalise writes in place of this call's, of the same arguments; or None."""
    if node.target in BOOL_RENAMED:
        values = [n.meta["val"] for n in node.all_input_nodes]
        if all(x.dtype == torch.bool for x in values if isinstance(x, torch.Tensor)):
            return BOOL_RENAMED[node.target]
    return RENAMED.get(node.target)


def is_permutation(node: fx.Node) -> bool:
    """Whether normalise writes permute in place of this call; a complex one may conjugate too."""
    return packet(node) in PERMUTATIONS and not node.meta["val"].is_complex()


# What may stand in the graph after each stage, which the pass of this name reaches. Of all stages:
# inputs, attributes, calls and the output; calls are functional, but for the writers, and those
# write to whole inputs.
STAGES = {
    "normalise": "normalised",
    "recognise_attention": "recognised",
    "lower_dense_attention": "lowered",
}
WRITERS = (aten.copy_.default, store_kv)


def unlawful(node: fx.Node, stage: str = "captured") -> str | None:
    """Why this node must not stand in a graph of this stage, None where it may.

    captured: as above. normalised: one spelling of an op, where that is sure to lie in memory the
    same way, so for static shapes. recognised: as captured again, for passes may spell
    what they make as they like. lowered: no attend is left.
    """
    if node.op not in ("placeholder", "get_attr", "call_function", "output"):
        return f"a {node.op} stands in the graph"
    if node.op != "call_function":
        return None
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        if node.target not in WRITERS:
            return f"{node.target} writes to its arguments"
        written = [x for a, x in zip(schema.arguments, node.args) if a.is_write]
        if any(getattr(x, "op", None) not in ("placeholder", "get_attr") for x in written):
            return f"{node.target} writes to what is no input"
    value = node.meta.get("val")
    if stage == "normalised" and isinstance(value, torch.Tensor):
        static = all(isinstance(n, int) for n in value.shape)
        if static and (normal_form(node) is not None or is_permutation(node)):
            return f"{node.target} has another normal form"
    if stage == "lowered" and node.target is attend:
        return "an attend is left"
    return None
