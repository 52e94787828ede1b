"""What is still attend becomes SDPA, or matmul and softmax where SDPA has no such form.

Before:  attend(q, k, v, scale=s, causal=True)
After:   scaled_dot_product_attention(q, k, v, is_causal=True, scale=s)

The causal path is taken where Tq == Tk is proved: SDPA's flag is anchored top-left.

One query of half precision on a CPU, as every decode step has it, becomes products and sums in
fp32, which an inner compiler fuses into two passes over keys and values. SDPA calls a matmul per
head and block there, and those of one row run at a small part of what memory gives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvtailor.kernels.ops import attend
from kvtailor.passes.flops import FLOPS, node_flops
from kvtailor.passes.graph import (
    SITE,
    as_node,
    aten,
    emit,
    in_place_of,
    is_top_left_causal,
    replace_node,
    same,
    shape,
    sites,
    size,
    val,
)
from kvtailor.passes.report import AttentionSite, PassReport


def lower_dense_attention(gm: fx.GraphModule) -> PassReport:
    """Replace every attend; its site's lowering is "sdpa", "sdpa causal", "row" or "math"."""
    report = PassReport()
    visible: dict[Any, fx.Node | None] = {}
    for node in gm.graph.find_nodes(op="call_function", target=attend):
        with in_place_of(node):
            new, lowering = _lower(gm.graph, node, visible)
        site: AttentionSite | None = node.meta.get(SITE)
        replace_node(node, new)
        if site is not None:
            site.lowering = lowering
        report.rewrites += 1
    assert not any(s.lowering is None for s in sites(gm) if s.query_rows != 0)
    return report


def _lower(graph: fx.Graph, node: fx.Node, made: dict[Any, fx.Node | None]) -> tuple[fx.Node, str]:
    q, k, v = (as_node(x) for x in node.args[:3])
    mask = node.args[3] if len(node.args) > 3 else None
    sinks = node.args[6] if len(node.args) > 6 else None
    flags = node.kwargs
    plain = sinks is None and flags.get("softcap") is None
    plain = plain and flags.get("empty_row", "zero") == "zero"
    top_left = plain and mask is None and is_top_left_causal(node)
    seen = None if top_left else _visible(graph, node, made)
    if not plain and not (seen is None and sinks is None and flags.get("softcap") is None):
        return _math(graph, node, mask, seen), "math"
    mask = _merge(graph, mask, seen)
    group = _group(q, k)
    if group == 1 and _is_half_row(q):
        return _row(graph, node, mask), "row"
    lead: list[Any] = []
    if group != 1:
        q, k, v, mask, lead = _fold_or_repeat(graph, q, k, v, mask, group, fold=not top_left)
    out = emit(
        graph,
        aten.scaled_dot_product_attention.default,
        q,
        k,
        v,
        mask,
        0.0,
        top_left,
        like=node,
        scale=flags["scale"],
    )
    if lead:
        out = emit(graph, aten.reshape.default, out, lead, like=node)
    return out, "sdpa causal" if top_left else "sdpa"


def _visible(graph: fx.Graph, node: fx.Node, made: dict[Any, fx.Node | None]) -> fx.Node | None:
    """What the flags let through as a bool tensor ``[1 or B, 1, Tq, Tk]``; None for everything.

    Sites with equal flags and sizes share one tensor.
    """
    flags = node.kwargs
    q_positions, chunk_origin = [*node.args[4:], *[None] * (6 - len(node.args))][:2]
    Tq, Tk = shape(node.args[0])[2], shape(node.args[1])[2]
    offset = flags.get("q_offset", 0)
    causal, window, chunk = bool(flags.get("causal")), flags.get("window"), flags.get("chunk")
    if q_positions is None:
        if causal and statically_known_true(val(offset) >= Tk - 1):
            causal = False
        if window is not None and statically_known_true(val(offset) + Tq - 1 < window):
            window = None
    if not causal and window is None and chunk is None:
        return None
    key = (q_positions, chunk_origin, str(Tq), str(Tk), str(val(offset)), causal, window, chunk)
    if key in made:
        return made[key]
    device = val(node.args[0]).device
    q, k_in = as_node(node.args[0]), as_node(node.args[1])
    k = emit(graph, aten.arange.default, size(graph, k_in, 2), device=device)
    if q_positions is None:
        p = emit(graph, aten.arange.default, size(graph, q, 2), device=device)
    else:
        p = as_node(q_positions)
    if isinstance(offset, fx.Node) or offset != 0:
        p = emit(graph, aten.add.Tensor, p, offset)
    rank = val(p).dim()
    p = emit(graph, aten.unsqueeze.default, p, -1)
    if rank == 2:
        p = emit(graph, aten.unsqueeze.default, p, 1)
    tests = []
    if causal:
        tests.append(emit(graph, aten.le.Tensor, k, p))
    if window is not None:
        distance = emit(graph, aten.sub.Tensor, p, k)
        tests.append(emit(graph, aten.lt.Scalar, distance, window))
    if chunk is not None:
        o = chunk_origin
        if isinstance(o, fx.Node):
            dims = val(o).dim()
            for axis in {0: (), 1: (1, 1, 1), 2: (1, 3)}[dims]:
                o = emit(graph, aten.unsqueeze.default, o, axis)
        blocks = []
        for x in (k, p):
            if isinstance(o, fx.Node):
                x = emit(graph, aten.sub.Tensor, x, o)
            blocks.append(emit(graph, aten.div.Tensor_mode, x, chunk, rounding_mode="floor"))
        tests.append(emit(graph, aten.eq.Tensor, *blocks))
    seen = tests[0]
    for test in tests[1:]:
        seen = emit(graph, aten.bitwise_and.Tensor, seen, test)
    while val(seen).dim() < 4:
        seen = emit(graph, aten.unsqueeze.default, seen, 0)
    made[key] = seen
    return seen


def _merge(graph: fx.Graph, mask: Any, seen: fx.Node | None) -> Any:
    """One SDPA mask out of the residual mask and what the flags let through."""
    if seen is None or mask is None:
        return mask if seen is None else seen
    if val(mask).dtype == torch.bool:
        return emit(graph, aten.bitwise_and.Tensor, mask, seen)
    hidden = emit(graph, aten.logical_not.default, seen)
    return emit(graph, aten.masked_fill.Scalar, mask, hidden, float("-inf"))


def _group(q: fx.Node, k: fx.Node) -> int:
    Hq, Hkv = shape(q)[1], shape(k)[1]
    return 1 if same(Hq, Hkv) else int(Hq) // int(Hkv)


def _fold_or_repeat(
    graph: fx.Graph, q: fx.Node, k: fx.Node, v: fx.Node, mask: Any, group: int, fold: bool
) -> tuple[fx.Node, fx.Node, fx.Node, Any, list[Any]]:
    """Grouped heads for SDPA: one query row folds its group into rows, more repeat the keys.

    fold: whether rows may be added; SDPA's causal flag counts them.
    """
    B, Hq = size(graph, q, 0), size(graph, q, 1)
    Hkv = size(graph, k, 1)
    D, Dv = size(graph, q, 3), size(graph, v, 3)
    mask_rows = mask is None or (len(shape(mask)) < 3 or same(shape(mask)[-3], 1))
    if fold and same(shape(q)[2], 1) and mask_rows:
        folded = emit(graph, aten.reshape.default, q, [B, Hkv, group, D])
        return folded, k, v, mask, [B, Hq, 1, Dv]

    def repeat(x: fx.Node) -> fx.Node:
        heads = emit(graph, aten.unsqueeze.default, x, 2)
        wide = [size(graph, x, d) for d in range(4)]
        wide = [wide[0], wide[1], group, wide[2], wide[3]]
        spread = emit(graph, aten.expand.default, heads, wide)
        merged = [wide[0], Hq, wide[3], wide[4]]
        return emit(graph, aten.reshape.default, spread, merged)

    wide_k = repeat(k)
    return q, wide_k, wide_k if v is k else repeat(v), mask, []


def _is_half_row(q: fx.Node) -> bool:
    """Whether q is one row per head, of half precision, on a CPU.

    Folded groups are several rows to SDPA, and fp32 rows are as fast there.
    """
    x = val(q)
    half = x.dtype in (torch.bfloat16, torch.float16)
    return half and x.device.type == "cpu" and same(x.shape[2], 1)


def _row(graph: fx.Graph, node: fx.Node, mask: Any) -> fx.Node:
    """SDPA of one query ``[B, H, 1, D]`` as products and sums in fp32.

    A row that sees no key is zero, as it is there.
    """
    q, k, v = (as_node(x) for x in node.args[:3])
    # The products are fp32 by promotion: keys and values cast by a node of its own could come to
    # stand in another piece than their use, and be written out.
    q = emit(graph, aten._to_copy.default, q, dtype=torch.float32)
    products = emit(graph, aten.mul.Tensor, q, k)
    scores = emit(graph, aten.sum.dim_IntList, products, [-1])
    # Both passes over the keys count as the attention they are.
    scores.meta[FLOPS] = node_flops(node)
    scores = emit(graph, aten.unsqueeze.default, scores, 2)
    scores = emit(graph, aten.mul.Tensor, scores, node.kwargs["scale"])
    if mask is not None and val(mask).dtype == torch.bool:
        hidden = emit(graph, aten.logical_not.default, mask)
        scores = emit(graph, aten.masked_fill.Scalar, scores, hidden, float("-inf"))
    elif mask is not None:
        scores = emit(graph, aten.add.Tensor, scores, mask)
    weights = emit(graph, aten.softmax.int, scores, -1)
    if mask is not None:
        largest = emit(graph, aten.amax.default, scores, [-1], True)
        none = emit(graph, aten.eq.Scalar, largest, float("-inf"))
        weights = emit(graph, aten.masked_fill.Scalar, weights, none, 0.0)
    weights = emit(graph, aten.transpose.int, weights, -2, -1)
    products = emit(graph, aten.mul.Tensor, weights, v)
    out = emit(graph, aten.sum.dim_IntList, products, [-2], True)
    return emit(graph, aten._to_copy.default, out, dtype=val(v).dtype, like=node)


def _math(graph: fx.Graph, node: fx.Node, mask: Any, seen: fx.Node | None) -> fx.Node:
    """Scores, softcap, mask, sinks and softmax as plain ops, heads grouped."""
    q, k, v = (as_node(x) for x in node.args[:3])
    sinks = node.args[6] if len(node.args) > 6 else None
    flags = node.kwargs
    dtype = val(v).dtype
    accumulate = torch.float64 if val(q).dtype == torch.float64 else torch.float32
    group = _group(q, k)
    B, Hq, Tq, _ = (size(graph, q, d) for d in range(4))
    Tk = size(graph, k, 2)
    if group != 1:
        Hkv = size(graph, k, 1)
        q = emit(graph, aten.reshape.default, q, [B, Hkv, group, Tq, size(graph, q, 3)])
        k = emit(graph, aten.unsqueeze.default, k, 2)
        v = emit(graph, aten.unsqueeze.default, v, 2)
    keys = emit(graph, aten.transpose.int, k, -2, -1)
    scores = emit(graph, aten.matmul.default, q, keys)
    scores = emit(graph, aten.mul.Tensor, scores, flags["scale"])
    if group != 1:
        scores = emit(graph, aten.reshape.default, scores, [B, Hq, Tq, Tk])
    if flags.get("softcap") is not None:
        cap = flags["softcap"]
        scores = emit(graph, aten.div.Tensor, scores, cap)
        scores = emit(graph, aten.tanh.default, scores)
        scores = emit(graph, aten.mul.Tensor, scores, cap)
    if mask is not None and val(mask).dtype != torch.bool:
        scores = emit(graph, aten.add.Tensor, scores, mask)
        mask = None
    if mask is not None:
        seen = mask if seen is None else emit(graph, aten.bitwise_and.Tensor, mask, seen)
    if val(scores).dtype != accumulate:
        scores = emit(graph, aten._to_copy.default, scores, dtype=accumulate)
    if seen is not None:
        hidden = emit(graph, aten.logical_not.default, seen)
        scores = emit(graph, aten.masked_fill.Scalar, scores, hidden, float("-inf"))
    if sinks is not None:
        column = emit(graph, aten._to_copy.default, sinks, dtype=accumulate)
        column = emit(graph, aten.reshape.default, column, [1, Hq, 1, 1])
        column = emit(graph, aten.expand.default, column, [B, Hq, Tq, 1])
        scores = emit(graph, aten.cat.default, [scores, column], -1)
    weights = emit(graph, aten.softmax.int, scores, -1)
    if sinks is not None:
        weights = emit(graph, aten.slice.Tensor, weights, 3, 0, -1)
    if seen is not None and sinks is None:
        weights = _fill_empty_rows(graph, weights, seen, flags, Tk)
    if val(weights).dtype != dtype:
        weights = emit(graph, aten._to_copy.default, weights, dtype=dtype)
    if group != 1:
        weights = emit(graph, aten.reshape.default, weights, [B, Hkv, group, Tq, Tk])
    out = emit(graph, aten.matmul.default, weights, v)
    merged = [B, Hq, Tq, size(graph, as_node(node.args[2]), 3)]
    return emit(graph, aten.reshape.default, out, merged, like=node)


def _fill_empty_rows(
    graph: fx.Graph, weights: fx.Node, seen: fx.Node, flags: Any, Tk: Any
) -> fx.Node:
    """A row that sees no key comes out of softmax as NaN: zero it, or spread it evenly."""
    some = emit(graph, aten.any.dim, seen, -1, True)
    none = emit(graph, aten.logical_not.default, some)
    if flags.get("empty_row", "zero") == "zero":
        return emit(graph, aten.masked_fill.Scalar, weights, none, 0.0)
    even = emit(graph, aten.ones_like.default, weights)
    even = emit(graph, aten.div.Tensor, even, Tk)
    return emit(graph, aten.where.self, none, even, weights)
