"""Rows of a mask that hide every key: may there be any, and the guard that makes them NaN."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from kvtailor.passes.attention.contraction import MOVES
from kvtailor.passes.graph import ancestors, as_node, aten, is_call, is_tensor, shape, val

# Constant masks up to this many elements in all are computed.
EVALUATED = 1 << 26

# A score that is filled with this or less has no weight beside any other, and what it is added to
# leaves none: scores of finite weights and activations are smaller by far. A little above -1e9,
# which bfloat16 rounds towards zero. -1e4 hides nothing for certain: such scores do compete.
HIDING = -9e8

# How far from zero a tensor's values can be: in any float type's range, finite, or anything.
NORMAL, HUGE, ANY = 0, 1, 2


def hides(value: float, dtype: torch.dtype) -> bool:
    """Whether a mask of this dtype hides a key by this value; its least one says that it does."""
    return value <= max(HIDING, torch.finfo(dtype).min)


def may_be_empty(mask: fx.Node) -> bool:
    """Whether some row of the last dimension may be all False, or all -inf."""
    if val(mask).dtype != torch.bool and magnitude(mask) < ANY:
        return False
    value = _evaluate(mask)
    if value is None:
        return True
    hidden = ~value if value.dtype == torch.bool else value == float("-inf")
    return bool(hidden.all(dim=-1).any())


def constant_number(x: Any, dtype: torch.dtype | None = None) -> float | None:
    """The number that x is or is filled with, None where it is not one number.

    As x holds it, and then as dtype does: float32's minimum is -inf in bfloat16.
    """
    if not is_tensor(x):
        return _rounded(x, dtype) if isinstance(x, (int, float)) else None
    number: Any = None
    if is_call(x, aten.full, aten.full_like):
        number = x.args[1]
    elif is_call(x, aten.new_full):
        number = x.args[2]
    elif is_call(x, aten.zeros, aten.zeros_like, aten.new_zeros):
        number = 0
    elif is_call(x, *MOVES, aten.scalar_tensor):
        number = constant_number(x.args[0])
    elif (tensor := _constant(x)) is not None and tensor.numel() == 1:
        number = tensor
    if number is None or isinstance(number, fx.Node):
        return None
    return _rounded(_rounded(number, val(x).dtype), dtype)


def _rounded(number: Any, dtype: torch.dtype | None) -> float:
    if dtype is None:
        return float(number)
    with unset_fake_temporarily():
        return float(torch.as_tensor(number, dtype=torch.float64).to(dtype))


def _constant(node: fx.Node) -> torch.Tensor | None:
    """A tensor that was a literal in the traced code."""
    if node.op != "get_attr" or not str(node.target).startswith("_tensor_constant"):
        return None
    tensor = getattr(node.graph.owning_module, str(node.target), None)
    return tensor if isinstance(tensor, torch.Tensor) else None


def magnitude(x: Any) -> int:
    """NORMAL, HUGE, or ANY where -inf cannot be ruled out, for finite weights and activations."""
    return _magnitude(x, {})


_SELECTS = (
    *MOVES,
    aten.cat,
    aten.gather,
    aten.index,
    aten.index_select,
    aten.masked_fill,
    aten.select,
    aten.where,
)
_ARITHMETIC = (
    aten.abs,
    aten.add,
    aten.cos,
    aten.cumsum,
    aten.mul,
    aten.neg,
    aten.rsub,
    aten.sigmoid,
    aten.sin,
    aten.sub,
    aten.tanh,
)


def _magnitude(x: Any, known: dict[fx.Node, int]) -> int:
    if not isinstance(x, fx.Node):
        size = abs(float(x)) if isinstance(x, (int, float)) else 0.0
        return NORMAL if size < 6e4 else HUGE if math.isfinite(size) else ANY
    if not is_tensor(x) or not val(x).is_floating_point():
        return NORMAL
    if x not in known:
        known[x] = ANY
        known[x] = _magnitude_of_call(x, known)
        if known[x] == ANY and not is_call(x, *_SELECTS, aten.add, aten.sub):
            value = _evaluate(x)
            if value is not None and value.numel():
                known[x] = _magnitude(value.abs().max().item(), known)
    return known[x]


def _magnitude_of_call(x: fx.Node, known: dict[fx.Node, int]) -> int:
    if x.op != "call_function":
        return ANY
    if is_call(x, aten.embedding, aten.linear, aten.zeros, aten.zeros_like, aten.new_zeros):
        return NORMAL
    number = constant_number(x)
    if number is not None:
        return _magnitude(number, known)
    operands: Any = x.args[0] if is_call(x, aten.cat) else x.args
    each = [_magnitude(a, known) for a in operands if isinstance(a, (fx.Node, int, float))]
    worst = max(each, default=ANY)
    if is_call(x, *_SELECTS):
        if is_call(x, aten._to_copy) and worst == HUGE and not _widens(x):
            return ANY
        return worst
    if is_call(x, aten.mul) and any(_is_flag(a) for a in x.args):
        return worst
    if is_call(x, aten.add, aten.sub) and each.count(HUGE) == 1:
        # An ordinary number is lost in a huge one.
        return worst
    return worst if is_call(x, *_ARITHMETIC) and worst == NORMAL else ANY


def _widens(cast: fx.Node) -> bool:
    old, new = val(cast.args[0]).dtype, val(cast).dtype
    return not old.is_floating_point or torch.promote_types(old, new) == new


def _is_flag(x: Any) -> bool:
    """Whether x holds only 0 and 1."""
    while is_tensor(x) and val(x).dtype != torch.bool:
        if (is_call(x, aten.rsub) and x.args[1] == 1) or is_call(x, *MOVES):
            x = x.args[0]
        else:
            return False
    return is_tensor(x)


def _evaluate(node: fx.Node) -> torch.Tensor | None:
    """The value of a node that depends on no input, if it is small enough to compute."""
    needed = ancestors([node])
    total = 0
    for n in needed:
        if not is_tensor(n) or not all(isinstance(size, int) for size in shape(n)):
            return None
        target = n.target
        if isinstance(target, torch._ops.OpOverload):
            if target.namespace != "aten" or torch.Tag.nondeterministic_seeded in target.tags:
                return None
        elif _constant(n) is None:
            return None
        total += val(n).numel()
    if total > EVALUATED:
        return None
    values: dict[fx.Node, Any] = {}
    with unset_fake_temporarily(), torch.no_grad():
        for n in node.graph.nodes:
            if n not in needed:
                continue
            if n.op == "get_attr":
                values[n] = _constant(n)
            else:
                args, kwargs = fx.node.map_arg((n.args, n.kwargs), values.__getitem__)
                values[n] = n.target(*args, **kwargs)
    return values[node]


def drop_guard(node: fx.Node, mask: fx.Node | None) -> bool:
    """Take off ``where(row of the mask is empty, nan, result)``; whether there was one."""
    results = [node, *(u for u in node.users if is_call(u, aten._to_copy))]
    for guard in [u for r in results for u in r.users if is_call(u, aten.where.ScalarSelf)]:
        empty, value, result = guard.args
        if result in results and value != value and _is_empty_row(empty, mask):
            guard.replace_all_uses_with(as_node(result))
            node.graph.erase_node(guard)
            return True
    return False


def _is_empty_row(empty: Any, mask: fx.Node | None) -> bool:
    """Whether this asks which rows of the mask hide every key, as recognise_attention does."""
    if is_call(empty, aten.bitwise_not):
        return is_call(empty.args[0], aten.any.dim) and empty.args[0].args[0] is mask
    return (
        is_call(empty, aten.eq.Scalar)
        and empty.args[1] == float("-inf")
        and is_call(empty.args[0], aten.amax)
        and empty.args[0].args[0] is mask
    )
