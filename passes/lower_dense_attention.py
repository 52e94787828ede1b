"""What is still attend becomes SDPA, or matmul and softmax where SDPA has no such form.

Before:  attend(q, k, v, scale=s, causal=True)
After:   scaled_dot_product_attention(q, k, v, is_causal=True, scale=s)

The causal path is taken where Tq == Tk is proved: SDPA's flag is anchored top-left.

A row that sees no key gets zeros of all of these; where it must get the mean of v, its query
becomes zeros that see every key.

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
from kvtailor.passes.attend import Attend
from kvtailor.passes.flops import FLOPS, node_flops
from kvtailor.passes.graph import (
    SITE,
    as_node,
    aten,
    emit,
    in_place_of,
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
    made: dict[Any, Any] = {}
    for node in gm.graph.find_nodes(op="call_function", target=attend):
        with in_place_of(node):
            new, lowering = _lower(gm.graph, node, made)
        site: AttentionSite | None = node.meta.get(SITE)
        replace_node(node, new)
        if site is not None:
            site.lowering = lowering
        report.rewrites += 1
    assert not any(s.lowering is None for s in sites(gm) if s.query_rows != 0)
    return report


def _lower(graph: fx.Graph, node: fx.Node, made: dict[Any, Any]) -> tuple[fx.Node, str]:
    q, k, v, mask, _, _, sinks = (*node.args, *[None] * 7)[:7]
    q, k, v, flags = as_node(q), as_node(k), as_node(v), node.kwargs
    plain = sinks is None and flags.get("softcap") is None
    # Every row of a causal square sees key 0.
    top_left = plain and mask is None and Attend.of(node).is_top_left_causal
    if same(shape(k)[2], 0):
        mask = None
    elif not top_left:
        mask = _merge(graph, mask, _visible(graph, node, made))
    if mask is not None and flags.get("empty_row", "zero") == "uniform":
        q, mask = _open_empty_rows(graph, q, as_node(mask), sinks, made)
    if not plain:
        return _math(graph, node, q, mask, sinks), "math"
    group = _group(q, k)
    if group == 1 and _is_half_row(q) and statically_known_true(shape(k)[2] > 0):
        return _row(graph, node, q, mask), "row"
    lead: list[Any] = []
    if group != 1:
        q, k, v, mask, lead = _fold_or_repeat(graph, q, k, v, mask, group, fold=not top_left)
    if mask is not None and val(mask).dtype not in (torch.bool, torch.float32, val(q).dtype):
        mask = emit(graph, aten._to_copy.default, mask, dtype=torch.float32)
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


def _open_empty_rows(
    graph: fx.Graph, q: fx.Node, mask: fx.Node, sinks: Any, made: dict[Any, Any]
) -> tuple[fx.Node, fx.Node]:
    """q and mask whose rows without a key see every key, with a query of zeros instead.

    All their scores are 0, so the softmax gives them the mean of v: empty_row="uniform" in every
    lowering. The mask's part is shared by sites with equal masks.
    """
    key = ("open", mask, sinks)
    if key not in made:
        if val(mask).dtype == torch.bool:
            some = emit(graph, aten.any.dim, mask, -1, True)
            empty = emit(graph, aten.logical_not.default, some)
        else:
            top = emit(graph, aten.amax.default, mask, [-1], True)
            empty = emit(graph, aten.eq.Scalar, top, float("-inf"))
        if sinks is not None:
            # A sink takes all the weight of a row that has nothing else.
            none = emit(graph, aten.eq.Scalar, sinks, float("-inf"))
            none = emit(graph, aten.reshape.default, none, [1, size(graph, q, 1), 1, 1])
            empty = emit(graph, aten.bitwise_and.Tensor, empty, none)
        if val(mask).dtype == torch.bool:
            opened = emit(graph, aten.bitwise_or.Tensor, mask, empty)
        else:
            opened = emit(graph, aten.masked_fill.Scalar, mask, empty, 0.0)
        made[key] = empty, opened
    empty, opened = made[key]
    return emit(graph, aten.masked_fill.Scalar, q, empty, 0.0), opened


def _visible(graph: fx.Graph, node: fx.Node, made: dict[Any, Any]) -> Any:
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
    one_mask = mask is None or same(shape(mask)[1], 1)
    if fold and same(shape(q)[2], 1) and one_mask:
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


def _row(graph: fx.Graph, node: fx.Node, q: fx.Node, mask: Any) -> fx.Node:
    """SDPA of one query ``[B, H, 1, D]`` as products and sums in fp32.

    A row that sees no key is zero, as it is there.
    """
    k, v = as_node(node.args[1]), as_node(node.args[2])
    # The products are fp32 by promotion: keys and values cast by a node of its own could come to
    # stand in another piece than their use, and be written out.
    q = emit(graph, aten._to_copy.default, q, dtype=torch.float32)
    products = emit(graph, aten.mul.Tensor, q, k)
    scores = emit(graph, aten.sum.dim_IntList, products, [-1])
    # Both passes over the keys count as the attention they are.
    scores.meta[FLOPS] = node_flops(node)
    scores = emit(graph, aten.unsqueeze.default, scores, 2)
    scores = emit(graph, aten.mul.Tensor, scores, node.kwargs["scale"])
    weights = _softmax(graph, _masked(graph, scores, mask), mask is not None)
    weights = emit(graph, aten.transpose.int, weights, -2, -1)
    products = emit(graph, aten.mul.Tensor, weights, v)
    out = emit(graph, aten.sum.dim_IntList, products, [-2], True)
    return emit(graph, aten._to_copy.default, out, dtype=val(v).dtype, like=node)


def _masked(graph: fx.Graph, scores: fx.Node, mask: Any) -> fx.Node:
    if mask is None:
        return scores
    if val(mask).dtype != torch.bool:
        return emit(graph, aten.add.Tensor, scores, mask)
    hidden = emit(graph, aten.logical_not.default, mask)
    return emit(graph, aten.masked_fill.Scalar, scores, hidden, float("-inf"))


def _softmax(graph: fx.Graph, scores: fx.Node, hides: bool) -> fx.Node:
    """The weights; hides: rows may be -inf alone, which softmax makes NaN and SDPA zero."""
    weights = emit(graph, aten.softmax.int, scores, -1)
    if not hides:
        return weights
    largest = emit(graph, aten.amax.default, scores, [-1], True)
    none = emit(graph, aten.eq.Scalar, largest, float("-inf"))
    return emit(graph, aten.masked_fill.Scalar, weights, none, 0.0)


def _math(graph: fx.Graph, node: fx.Node, q: fx.Node, mask: Any, sinks: Any) -> fx.Node:
    """Scores, softcap, mask, sinks and softmax as plain ops, heads grouped."""
    k, v = as_node(node.args[1]), as_node(node.args[2])
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
    if val(scores).dtype != accumulate:
        scores = emit(graph, aten._to_copy.default, scores, dtype=accumulate)
    scores = _masked(graph, scores, mask)
    if sinks is not None:
        column = emit(graph, aten._to_copy.default, sinks, dtype=accumulate)
        column = emit(graph, aten.reshape.default, column, [1, Hq, 1, 1])
        column = emit(graph, aten.expand.default, column, [B, Hq, Tq, 1])
        scores = emit(graph, aten.cat.default, [scores, column], -1)
    weights = _softmax(graph, scores, mask is not None)
    if sinks is not None:
        weights = emit(graph, aten.slice.Tensor, weights, 3, 0, -1)
    if val(weights).dtype != dtype:
        weights = emit(graph, aten._to_copy.default, weights, dtype=dtype)
    if group != 1:
        weights = emit(graph, aten.reshape.default, weights, [B, Hkv, group, Tq, Tk])
    out = emit(graph, aten.matmul.default, weights, v)
    merged = [B, Hq, Tq, size(graph, as_node(node.args[2]), 3)]
    return emit(graph, aten.reshape.default, out, merged, like=node)
