"""Attention, however it is written, becomes one op.

Before:  s = matmul(q, permute(expand(k, ...), ...)); s = mul(s, 0.25); s = add(s, mask)
         p = softmax(s, -1); o = matmul(p, expand(v, ...))
After:   o = kvtailor.attend(q, k, v, mask, scale=0.25)

What counts as attention is in ``read_attention``. Operands are taken from as far up as they are
mere views, so repeated heads become grouped ones, and constant factors on q and k join the scale.

Rows that see no key keep what they get in eager mode: zero from SDPA, the mean of v where hidden
scores are filled with a finite minimum, NaN where they are -inf.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvtailor.passes.attend import Attend
from kvtailor.passes.attention.axes import (
    Axis,
    AxisError,
    Dims,
    Labelled,
    arrange,
    equal,
    is_cast,
    leaves,
    peel,
    push,
)
from kvtailor.passes.attention.contraction import is_scored
from kvtailor.passes.attention.empty_rows import NORMAL, hides, magnitude, may_be_empty
from kvtailor.passes.attention.found import Add, Attention, Fill, Miss, known
from kvtailor.passes.attention.provenance import Names, Streams
from kvtailor.passes.attention.read import read_sdpa, read_softmax
from kvtailor.passes.graph import (
    SITE,
    as_node,
    aten,
    emit,
    is_call,
    refresh_users,
    same,
    shape,
    sites,
    sym_arg,
    val,
)
from kvtailor.passes.report import AttentionSite, PassReport

# Added to a float32 or bfloat16 score, this or less swallows it: the sum is the fill.
ABSORBING = -1e30
FP16_MIN = torch.finfo(torch.float16).min
FP32_MIN = torch.finfo(torch.float32).min


def recognise_attention(gm: fx.GraphModule) -> PassReport:
    """Replace every attention by ``kvtailor::attend`` and give it an AttentionSite.

    A near miss (an SDPA call, or a softmax over scores from a matmul) gets a skip with its code
    and a site whose lowering is "untouched".
    """
    report = PassReport()
    gm.graph.eliminate_dead_code()
    names = Names(gm)
    streams = Streams()
    for node in list(gm.graph.nodes):
        sdpa = is_call(node, aten.scaled_dot_product_attention)
        if not sdpa and not (is_call(node, aten.softmax) and is_scored(node.args[0])):
            continue
        at = node
        try:
            found = read_sdpa(node) if sdpa else read_softmax(node)
            at = found.result
            new = _rewrite(gm, found)
        except Miss as miss:
            site = AttentionSite(names.unique(at), at.name, lowering="untouched", reason=str(miss))
            report.skip(site.site, miss.code, str(miss))
            sites(gm).append(site)
            continue
        call = Attend.of(new)
        q, k = as_node(call.q), as_node(call.k)
        site = AttentionSite(names.unique(at), new.name, softcap=found.softcap)
        site.sinks = found.sinks is not None
        site.kv_owner = names.owner(k)
        site.cross = names.owner(q) is not None and streams.differ(q, k)
        new.meta[SITE] = site
        sites(gm).append(site)
        report.rewrites += 1
    return report


def _rewrite(gm: fx.GraphModule, found: Attention) -> fx.Node:
    """The attend node that replaces ``found.result``. Raises Miss, the graph then unchanged."""
    graph = gm.graph
    before = set(graph.nodes)
    try:
        with graph.inserting_before(found.result):
            return known(_emit, gm, found)
    except Miss:
        for node in reversed(graph.nodes):
            if node not in before:
                graph.erase_node(node)
        raise


def _emit(gm: fx.GraphModule, found: Attention) -> fx.Node:
    graph, result = gm.graph, found.result
    q_chain = _chain(found.q, casts=True, factors=True)
    k_chain = _chain(found.k, casts=True, factors=True)
    v_chain = _chain(found.v)
    batch, heads, group = _split_heads(found, k_chain[-1][0], v_chain[-1][0])
    all_heads = [*heads, *group]
    q, q_scale = _pick(graph, q_chain, [batch, all_heads, found.rows, found.inner])
    k, k_scale = _pick(graph, k_chain, [batch, heads, found.keys, found.inner])
    v, _ = _pick(graph, v_chain, [batch, heads, found.keys, found.width])
    for factor in found.factors:
        by: Any = factor.value
        if isinstance(by, Labelled):
            by = arrange(graph, by, [batch, all_heads, found.rows, []], broadcast=True)
        elif isinstance(by, torch.SymInt):
            by = emit(graph, torch.sym_sqrt, sym_arg(graph, by), like=result)
        q = emit(graph, factor.op, q, by, like=result)
    dtype = torch.promote_types(torch.promote_types(val(q).dtype, val(k).dtype), val(v).dtype)
    q, k, v = (_cast(graph, x, dtype) for x in (q, k, v))
    sinks = None
    if found.sinks is not None:
        # Usually expanded over batch and queries; one that differs between those is no sink.
        sinks, _ = _pick(graph, _chain(found.sinks, casts=True), [all_heads])
    target = [batch, all_heads, found.rows, found.keys]
    mask: fx.Node | None = None
    empty_row, guard = "zero", None
    # Sums over no keys are zero, whatever a mask says.
    if found.masks and not same(shape(k)[2], 0):
        if not statically_known_true(shape(k)[2] > 0):
            raise Miss("symbolic", "there may be no keys to mask")
        mask, empty_row, guard = _masks(gm, found, target)
        if val(mask).dtype == torch.float64 != dtype:
            raise Miss("mask", "a float64 mask is added to scores of fewer bits")
    call = Attend(
        q,
        k,
        v,
        mask,
        sinks=sinks,
        scale=found.scale * q_scale * k_scale,
        causal=found.causal,
        softcap=found.softcap,
        empty_row=empty_row,
    )
    new = call.emit(graph, like=result)
    out = new
    if guard is not None:
        out = emit(graph, aten.where.ScalarSelf, guard, float("nan"), out, like=result)
    out = _cast(graph, out, val(result).dtype)
    made = Labelled(out, [batch, all_heads, found.rows, found.width])
    replaced = _landing(Labelled(result, found.out), made.dims)
    out = arrange(graph, made, replaced.dims)
    assert val(out).shape == val(replaced.node).shape, "axes multiply to what they came from"
    replaced.node.replace_all_uses_with(out)
    refresh_users(replaced.node, out)
    graph.erase_node(replaced.node)
    return new


def _landing(result: Labelled, dims: Dims) -> Labelled:
    """The result, or the only view of it further down that has these dims already."""
    x: Labelled | None = result
    while x is not None:
        if equal(x.dims, dims):
            return x
        try:
            x = push(x, *x.node.users) if len(x.node.users) == 1 else None
        except AxisError:
            x = None
    return result


def _cast(graph: fx.Graph, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    if val(x).dtype == dtype:
        return x
    return emit(graph, aten._to_copy.default, x, dtype=dtype, like=x)


def _split_heads(
    found: Attention, k: Labelled, v: Labelled
) -> tuple[list[Axis], list[Axis], list[Axis]]:
    """Batch, key heads, and the query heads on each: the axes that neither k nor v has."""
    if len(found.batch) > 1:
        batch = leaves(found.batch[0])
        rest = leaves(axis for dim in found.batch[1:] for axis in dim)
    else:
        # Merged [B * H], or a batch alone.
        merged = leaves(axis for dim in found.batch for axis in dim)
        batch, rest = merged[:1], merged[1:]
    own = [*k.leaves(), *v.leaves()]
    return batch, [x for x in rest if x in own], [x for x in rest if x not in own]


def _chain(
    x: Labelled, *, casts: bool = False, factors: bool = False
) -> list[tuple[Labelled, float]]:
    """x and what it is a view of, going up, each with the number that x is that times.

    casts: also what it is a widening cast of. factors: also what it is a constant times.
    """
    chain = [(x, 1.0)]
    scale = 1.0
    while True:
        node = x.node
        try:
            source = peel(x)
        except AxisError:
            return chain
        if casts and is_cast(node) and _widens(node):
            source = Labelled(as_node(node.args[0]), x.dims)
        if factors and is_call(node, *_SCALINGS) and _is_constant_factor(node):
            by: Any = node.args[1]
            scale = scale * by if is_call(node, aten.mul) else scale / by
            source = Labelled(as_node(node.args[0]), x.dims)
        if source is None:
            return chain
        x = source
        chain.append((x, scale))


_SCALINGS = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)


def _is_constant_factor(node: fx.Node) -> bool:
    by = node.args[1]
    return not isinstance(by, fx.Node) and val(node).dtype == val(node.args[0]).dtype


def _widens(node: fx.Node) -> bool:
    old, new = val(node.args[0]).dtype, val(node).dtype
    return torch.promote_types(old, new) == new


def _pick(
    graph: fx.Graph, chain: list[tuple[Labelled, float]], target: Dims
) -> tuple[fx.Node, float]:
    """The tensor of the chain that has this layout, all factors taken off; or one rearranged."""
    total = chain[-1][1]
    wanted = leaves(axis for dim in target for axis in dim)
    usable = [
        x for x, scale in chain if scale == total and all(axis in wanted for axis in x.leaves())
    ]
    for x in reversed(usable):
        if equal(x.dims, target):
            return x.node, total
    if not usable:
        raise AxisError("an operand varies along an axis it must not depend on")
    return arrange(graph, usable[0], target), total


def _masks(
    gm: fx.GraphModule, found: Attention, target: Dims
) -> tuple[fx.Node, str, fx.Node | None]:
    """One mask for attend, what an empty row gets, and where rows must become NaN, if any do."""
    graph = gm.graph
    if not found.by_hand:
        (given,) = found.masks
        return _placed(graph, given.operand, target, found.result), "zero", None
    fills = {mask.value if isinstance(mask, Fill) else None for mask in found.masks}
    if len(fills) == 1 and None not in fills:
        (value,) = fills
        assert value is not None
        if not all(hides(value, mask.dtype) for mask in found.masks):
            raise Miss("fill", f"scores filled with {value} are not hidden")
        keep = None
        for mask in found.masks:
            operand = mask.operand
            if isinstance(mask, Fill) and mask.inverted:
                operand = Labelled(_negated(graph, operand.node), operand.dims)
            part = _placed(graph, operand, target, found.result)
            keep = part if keep is None else emit(graph, aten.bitwise_and.Tensor, keep, part)
        assert keep is not None
        if value > float("-inf"):
            return keep, "uniform", None
        if found.sinks is not None or not may_be_empty(keep):
            return keep, "zero", None
        seen = emit(graph, aten.any.dim, keep, -1, True, like=found.result)
        return keep, "zero", emit(graph, aten.bitwise_not.default, seen, like=found.result)

    total: fx.Node | None = None
    for mask in found.masks:
        part = _placed(graph, mask.operand, target, found.result)
        if isinstance(mask, Add):
            bias = _bias(graph, mask, part)
            total = bias if total is None else emit(graph, aten.add.Tensor, total, bias)
        else:
            total = _fill(graph, mask, part, total)
    assert total is not None
    if found.sinks is not None or not may_be_empty(total):
        return total, "zero", None
    top = emit(graph, aten.amax.default, total, [-1], True, like=found.result)
    return total, "zero", emit(graph, aten.eq.Scalar, top, float("-inf"), like=found.result)


def _placed(graph: fx.Graph, x: Labelled, target: Dims, at: fx.Node) -> fx.Node:
    """A mask in the layout of the scores, with as many dimensions; what it lacks is 1.

    Sites of one mask share what is made of it before the node ``at``: masks are proved once.
    """
    node = arrange(graph, x, target, broadcast=True)
    while len(shape(node)) < len(target):
        views = (u for u in node.users if is_call(u, aten.unsqueeze) and u.args[1] == 0 and u < at)
        view = next(views, None)
        node = emit(graph, aten.unsqueeze.default, node, 0, like=node) if view is None else view
    return node


def _negated(graph: fx.Graph, x: fx.Node) -> fx.Node:
    if is_call(x, aten.bitwise_not):
        return as_node(x.args[0])
    return emit(graph, aten.bitwise_not.default, x, like=x)


def _bias(graph: fx.Graph, mask: Add, value: fx.Node) -> fx.Node:
    """An added mask as attend, which adds in float32, must be given it."""
    if not val(value).is_floating_point():
        value = _cast(graph, value, mask.dtype)
    if isinstance(mask.times, fx.Node) or mask.times != 1:
        value = emit(graph, aten.mul.Tensor, value, mask.times)
    if mask.dtype == torch.float16 and magnitude(value) > NORMAL:
        # float16's minimum swallows scores in float16 and not in float32.
        low = emit(graph, aten.eq.Scalar, value, FP16_MIN)
        value = _cast(graph, value, torch.float32)
        value = emit(graph, aten.where.ScalarSelf, low, FP32_MIN, value)
    return value


def _fill(graph: fx.Graph, mask: Fill, condition: fx.Node, total: fx.Node | None) -> fx.Node:
    """A fill as something added: what is hidden gets the fill, the rest what it had."""
    value = mask.value
    if mask.dtype == torch.float16 and value == FP16_MIN:
        value = FP32_MIN
    elif value > float("-inf"):
        # What is added is float32.
        value = max(value, FP32_MIN)
    if not value <= ABSORBING:
        raise Miss("fill", f"scores filled with {mask.value} are then added to")
    if total is None:
        pair = (value, 0.0) if mask.inverted else (0.0, value)
        return emit(graph, aten.where.Scalar, condition, *pair)
    total = _cast(graph, total, torch.promote_types(val(total).dtype, torch.float32))
    if mask.inverted:
        return emit(graph, aten.where.ScalarSelf, condition, value, total)
    return emit(graph, aten.where.ScalarOther, condition, total, value)
