"""Many spellings of one thing become one, so that later passes see few forms.

Before:  t = transpose(x, 1, 2); c = clone(t, contiguous); v = _unsafe_view(c, [B, T, -1])
         a = __and__(m, n); d = dropout(v, 0.1, False); z = mul(d, 1); e = alias(z)
After:   t = permute(x, [0, 2, 1, 3]); v = reshape(t, [B, T, -1]); a = bitwise_and(m, n)

Copies go where nobody can tell, equal calls become one. Values, shapes, dtypes and strides of
what remains stay as they were.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from kvtailor.passes.effects import KNOWN, seen_outside
from kvtailor.passes.graph import (
    as_node,
    aten,
    call_key,
    emit,
    is_call,
    is_tensor,
    same,
    val,
)
from kvtailor.passes.opsets import is_permutation, normal_form
from kvtailor.passes.report import PassReport

_IDENTITIES = (
    aten.alias,
    aten.clone,
    aten.contiguous,
    aten.detach,
    aten.expand,
    aten.lift_fresh_copy,
    aten.permute,
    aten.reshape,
    aten.slice,
    aten._to_copy,
)
_UNMERGED = (aten.item, aten._local_scalar_dense, aten.empty, aten.empty_like, aten.new_empty)


def normalise(gm: fx.GraphModule) -> PassReport:
    """Bring every call to its normal form and merge equal calls, in one forward walk."""
    report = PassReport()
    shown = seen_outside(gm)
    first: dict[Any, fx.Node] = {}

    def replace(node: fx.Node, new: fx.Node) -> None:
        report.rewrites += 1
        node.replace_all_uses_with(new)
        if node in shown:
            shown.add(new)
        gm.graph.erase_node(node)

    for original in list(gm.graph.nodes):
        node = original
        if node.op != "call_function":
            continue
        while (new := _simpler(node, shown)) is not None:
            made = new not in node.all_input_nodes
            replace(node, new)
            node = new
            if not made:
                break
        else:
            key = _key(node)
            earlier = first.setdefault(key, node) if key is not None else node
            # Two results that are both returned must stay two tensors.
            if earlier is not node and not (earlier in shown and node in shown):
                replace(node, earlier)
    return report


def _is_pure(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return (
            target.namespace in KNOWN
            and not target._schema.is_mutable
            and torch.Tag.nondeterministic_seeded not in target.tags
        )
    return getattr(target, "__module__", "") in ("_operator", "math", "torch")


def _simpler(node: fx.Node, shown: set[fx.Node]) -> fx.Node | None:
    """A simpler node of the same value and layout, or None. It is an input, or a new node."""
    if not is_tensor(node) or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if is_call(node, aten.dropout) and (node.args[1] == 0 or node.args[2] is False):
        # In eager mode this is the input itself, copied nowhere.
        return as_node(node.args[0])
    if node not in shown and (source := _identity(node)) is not None:
        return source
    with node.graph.inserting_before(node):
        new = _respelt(node, node in shown)
    if new is None:
        return None
    if not _same_layout(new, node):
        node.graph.erase_node(new)
        return None
    return new


def _same_layout(a: fx.Node, b: fx.Node) -> bool:
    x, y = val(a), val(b)
    return (
        x.dtype == y.dtype
        and x.device == y.device
        and x.dim() == y.dim()
        and all(same(m, n) for m, n in zip(x.shape, y.shape))
        and all(same(m, n) for m, n in zip(x.stride(), y.stride()))
    )


def _identity(node: fx.Node) -> fx.Node | None:
    """The input this call returns unchanged, if it does."""
    source = node.args[0] if node.args else None
    if not is_tensor(source):
        return None
    source = as_node(source)
    neutral: Any = None
    if is_call(node, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        neutral = 1
    elif is_call(node, aten.sub.Tensor, aten.sub.Scalar) or (
        # -0.0 + 0 is +0.0.
        is_call(node, aten.add.Tensor, aten.add.Scalar) and not val(node).is_floating_point()
    ):
        neutral = 0
    if neutral is not None:
        other = node.args[1]
        if isinstance(other, (fx.Node, bool)) or other != neutral:
            return None
    elif is_call(node, aten.permute):
        dims = [d % val(node).dim() for d in node.args[1]]  # type: ignore[union-attr]
        if dims != sorted(dims):
            return None
    elif not is_call(node, *_IDENTITIES):
        return None
    return source if _same_layout(source, node) else None


def _respelt(node: fx.Node, is_shown: bool) -> fx.Node | None:
    """The same value in normal form, as a new node; the caller checks the layout."""
    graph, args, kwargs = node.graph, node.args, node.kwargs
    target: Any = node.target
    if (usual := normal_form(node)) is not None:
        return emit(graph, usual, *args, like=node, **kwargs)
    if is_permutation(node):
        # Distinct sizes tell where each dimension went.
        rank = val(args[0]).dim()
        probe = torch.empty(tuple(range(2, 2 + rank)), device="meta")
        probe = target(probe, *args[1:], **kwargs)
        dims = [n - 2 for n in probe.shape]
        return emit(graph, aten.permute.default, args[0], dims, like=node)
    if is_call(node, aten.permute) and is_call(args[0], aten.permute):
        inner = as_node(args[0])
        rank = val(inner).dim()
        order: Any = inner.args[1]
        dims = [order[d % rank] for d in args[1]]  # type: ignore[union-attr]
        return emit(graph, aten.permute.default, inner.args[0], dims, like=node)
    if is_call(node, aten.type_as):
        return emit(graph, aten._to_copy.default, args[0], dtype=val(node).dtype, like=node)
    if is_call(node, aten._to_copy):
        return _short_cast(node)
    if is_call(node, aten.reshape):
        source = as_node(args[0])
        if is_call(source, aten.reshape) or (
            not is_shown and is_call(source, aten.clone, aten.contiguous)
        ):
            return emit(graph, aten.reshape.default, source.args[0], args[1], like=node)
    if is_call(node, aten.masked_fill.Scalar) and val(args[0]).is_floating_point():
        x, hidden, value = args
        return emit(graph, aten.where.ScalarSelf, hidden, value, x, like=node)
    if is_call(node, aten._softmax) and args[2] is False:
        return emit(graph, aten.softmax.int, args[0], args[1], like=node)
    if is_call(node, aten.div.Tensor):
        return _softmax_by_hand(node)
    return None


def _short_cast(node: fx.Node) -> fx.Node | None:
    """_to_copy with just the dtype and device that change."""
    source = val(node.args[0])
    kwargs: dict[str, Any] = {}
    if val(node).dtype != source.dtype:
        kwargs["dtype"] = val(node).dtype
    if val(node).device != source.device:
        kwargs["device"] = val(node).device
    if node.kwargs.get("memory_format") not in (None, torch.preserve_format):
        kwargs["memory_format"] = node.kwargs["memory_format"]
    if not kwargs or kwargs == node.kwargs:
        return None
    return emit(node.graph, aten._to_copy.default, node.args[0], like=node, **kwargs)


def _softmax_by_hand(node: fx.Node) -> fx.Node | None:
    """exp(x - max(x)) / sum(exp(x - max(x))) as softmax(x), over the last or any one dimension."""
    powers, total = node.args
    if not (is_call(powers, aten.exp) and is_call(total, aten.sum.dim_IntList)):
        return None
    powers, total = as_node(powers), as_node(total)
    shifted = powers.args[0]
    if total.args[0] is not powers or total.args[2:] != (True,) or total.kwargs:
        return None
    if not is_call(shifted, aten.sub.Tensor) or as_node(shifted).kwargs:
        return None
    x, top = as_node(shifted).args
    rank = val(node).dim()
    dims = total.args[1]
    if not (isinstance(dims, (list, tuple)) and len(dims) == 1 and isinstance(dims[0], int)):
        return None
    if maximum_over(x, top) != dims[0] % rank or not val(x).is_floating_point():
        return None
    return emit(node.graph, aten.softmax.int, x, dims[0], like=node)


def maximum_over(x: Any, top: Any) -> int | None:
    """The dimension whose maximum of x, kept as size 1, ``top`` is; None when it is not that."""
    if is_call(top, operator.getitem) and as_node(top).args[1] == 0:
        top = as_node(top).args[0]
        if not is_call(top, aten.max.dim):
            return None
        dims: Any = [as_node(top).args[1]]
    elif is_call(top, aten.amax):
        dims = as_node(top).args[1] if len(as_node(top).args) > 1 else []
    else:
        return None
    top = as_node(top)
    if top.args[0] is not x or top.args[2:] != (True,) or len(dims) != 1:
        return None
    return int(dims[0]) % val(x).dim()


def _key(node: fx.Node) -> Any:
    """Equal for calls of equal value; None for what must not be merged."""
    if not _is_pure(node) or is_call(node, *_UNMERGED):
        return None
    return call_key(node)
