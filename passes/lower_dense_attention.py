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
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.functional import scaled_dot_product_attention

from kvtailor.kernels import reference
from kvtailor.kernels.ops import attend
from kvtailor.passes.attend import Attend
from kvtailor.passes.flops import node_flops
from kvtailor.passes.graph import FLOPS, SITE, in_place_of, replace_node, same, shape, sites, val
from kvtailor.passes.inline import inline
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
    call = Attend.of(node)
    q, k, v, mask, scale = call.q, call.k, call.v, call.mask, call.scale
    plain = call.sinks is None and call.softcap is None
    # Every row of a causal square sees key 0.
    top_left = plain and mask is None and call.is_top_left_causal
    if same(shape(k)[2], 0):
        mask = None
    elif not top_left:
        seen = _visible(graph, call, made)
        mask = inline(graph, _both, mask, seen) if mask and seen else mask or seen
    if mask is not None and call.empty_row == "uniform":
        # Sites of one mask share what is made of it.
        key = ("open", mask, call.sinks)
        if key not in made:
            made[key] = inline(graph, _open_empty_rows, mask, call.sinks)
        empty, mask = made[key]
        q = inline(graph, Tensor.masked_fill, q, empty, 0.0)
    Hq, Hkv = shape(q)[1], shape(k)[1]
    group = 1 if same(Hq, Hkv) else int(Hq) // int(Hkv)
    if not plain:
        operands = q, k, v, mask, call.sinks
        cap = call.softcap
        out = inline(graph, _math, *operands, like=node, scale=scale, softcap=cap, group=group)
        return out, "math"
    if group == 1 and _is_half_row(val(q)) and statically_known_true(shape(k)[2] > 0):
        scores = inline(graph, _row_scores, q, k, like=node)
        # Both passes over the keys count as the attention they are.
        scores.meta[FLOPS] = node_flops(node)
        return inline(graph, _row, scores, v, mask, like=node, scale=scale), "row"
    # SDPA's causal flag counts rows: none may be added.
    one_mask = mask is None or same(shape(mask)[1], 1)
    fold = group != 1 and not top_left and one_mask and same(shape(q)[2], 1)
    flags = dict(scale=scale, causal=top_left, group=group, fold=fold)
    out = inline(graph, _sdpa, q, k, v, mask, like=node, **flags)
    return out, "sdpa causal" if top_left else "sdpa"


def _visible(graph: fx.Graph, call: Attend, made: dict[Any, Any]) -> fx.Node | None:
    """What the flags let through as a bool tensor ``[1 or B, 1, Tq, Tk]``; None for everything.

    Sites with equal flags and sizes share one tensor.
    """
    Tq, Tk = shape(call.q)[2], shape(call.k)[2]
    causal, window, offset = call.causal, call.window, val(call.q_offset)
    if call.q_positions is None:
        if causal and statically_known_true(offset >= Tk - 1):
            causal = False
        if window is not None and statically_known_true(offset + Tq - 1 < window):
            window = None
    flags: dict[str, Any] = {"causal": causal, "window": window, "chunk": call.chunk}
    if not any(flags.values()):
        return None
    where = call.q_positions, call.chunk_origin
    key = (*where, str(Tq), str(Tk), str(offset), *flags.values())
    if key not in made:
        made[key] = inline(graph, _seen, call.q, call.k, *where, call.q_offset, **flags)
    return made[key]


def _seen(
    q: Tensor, k: Tensor, q_positions: Any, chunk_origin: Any, q_offset: Any, **flags: Any
) -> Tensor:
    where = dict(q_positions=q_positions, chunk_origin=chunk_origin, q_offset=q_offset)
    return reference.visible(q.shape[2], k.shape[2], q.device, **where, **flags)


def _both(mask: Tensor, seen: Tensor) -> Tensor:
    """One SDPA mask out of the residual mask and what the flags let through."""
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))


def _open_empty_rows(mask: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rows without a key, and the mask in which those see every key.

    With a query of zeros all their scores are 0, so the softmax gives them the mean of v:
    empty_row="uniform" in every lowering.
    """
    is_bool = mask.dtype == torch.bool
    empty = ~mask.any(-1, True) if is_bool else mask.amax(-1, True) == float("-inf")
    if sinks is not None:
        # A sink takes all the weight of a row that has nothing else.
        empty = empty & (sinks == float("-inf")).reshape(1, -1, 1, 1)
    return empty, mask | empty if is_bool else mask.masked_fill(empty, 0.0)


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    causal: bool,
    group: int,
    fold: bool,
) -> Tensor:
    """Grouped heads: one query row folds its group into rows, more repeat the keys."""
    B, Hq = q.shape[:2]
    if fold:
        q = q.reshape(B, k.shape[1], group, q.shape[3])
    elif group != 1:
        same_values = v is k
        k = _repeat(k, group, Hq)
        v = k if same_values else _repeat(v, group, Hq)
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, q.dtype):
        mask = mask.float()
    out = scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)
    return out.reshape(B, Hq, 1, v.shape[3]) if fold else out


def _repeat(x: Tensor, group: int, Hq: int) -> Tensor:
    B, H, T, D = x.shape
    return x.unsqueeze(2).expand(B, H, group, T, D).reshape(B, Hq, T, D)


def _is_half_row(q: Tensor) -> bool:
    """Whether q is one row per head, of half precision, on a CPU.

    Folded groups are several rows to SDPA, and fp32 rows are as fast there.
    """
    half = q.dtype in (torch.bfloat16, torch.float16)
    return half and q.device.type == "cpu" and same(q.shape[2], 1)


# One query [B, H, 1, D] as products and sums in fp32. The products are fp32 by promotion: keys and
# values cast by a node of its own could come to stand in another piece than their use, and be
# written out.
def _row_scores(q: Tensor, k: Tensor) -> Tensor:
    return (q.float() * k).sum(-1)


def _row(scores: Tensor, v: Tensor, mask: Tensor | None, *, scale: float) -> Tensor:
    weights = _weights(scores.unsqueeze(2) * scale, mask)
    return (weights.transpose(-2, -1) * v).sum(-2, True).to(v.dtype)


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return scores + mask
    return scores.masked_fill(~mask, float("-inf"))


def _weights(scores: Tensor, mask: Tensor | None, sinks: Tensor | None = None) -> Tensor:
    """Softmax; rows that are -inf alone, which it makes NaN, become zero as they do in SDPA."""
    scores = scores if mask is None else _masked(scores, mask)
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, -1, 1, 1)
        scores = torch.cat([scores, column.expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)
    if mask is not None:
        weights = weights.masked_fill(scores.amax(-1, True) == float("-inf"), 0.0)
    return weights if sinks is None else weights[..., :-1]


def _math(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    group: int,
) -> Tensor:
    """Scores, softcap, mask, sinks and softmax as plain ops, heads grouped."""
    (B, Hq, Tq, D), (Hkv, Tk) = q.shape, k.shape[1:3]
    merged, grouped = (B, Hq, Tq), (B, Hkv, group, Tq)
    if group != 1:
        q, k, v = q.reshape(*grouped, D), k.unsqueeze(2), v.unsqueeze(2)
    scores = torch.matmul(q, k.transpose(-2, -1)) * scale
    if group != 1:
        scores = scores.reshape(*merged, Tk)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    weights = _weights(scores, mask, sinks).to(v.dtype)
    if group != 1:
        weights = weights.reshape(*grouped, Tk)
    return torch.matmul(weights, v).reshape(*merged, v.shape[-1])
