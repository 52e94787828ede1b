"""Attention over keys gathered from pages reads the pages instead: the gather never runs.

Before:  k = permute(gather_kv(k_pages, table, 0, n));  v = permute(gather_kv(v_pages, table, 0, n))
         out = attend(q, k, v, padding, causal=True, q_offset=n - Tq)
After:   rows = paged_attend(q as [B*Tq, Hq, D], k_pages, v_pages, table, [0, Tq, ..], [n, n, ..],
                             padding as [B*Tq, 1, n], causal=True);  out = rows as [B, Hq, Tq, Dv]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvtailor.kernels.ops import attend, gather_kv
from kvtailor.passes.attend import Attend, PagedAttend
from kvtailor.passes.graph import (
    SITE,
    add,
    as_node,
    aten,
    functional_form,
    in_place_of,
    is_call,
    replace_node,
    same,
    shape,
    val,
)
from kvtailor.passes.inline import inline
from kvtailor.passes.report import AttentionSite, PassReport

_HEADS_FIRST = [0, 2, 1, 3]


class _Gather(NamedTuple):
    """Keys or values read from pages: positions start + skip .. stop-1."""

    pages: fx.Node
    table: fx.Node
    start: Any
    stop: Any
    skip: int


def lower_paged_attention(gm: fx.GraphModule) -> PassReport:
    """attend over what gather_kv returns becomes paged_attend; sets the lowering to "paged".

    Left alone: keys the pages hold from before a later store; a range whose first key no flag
    says; rows without a key that get the mean of the values; a mask that is one for all keys.
    """
    report = PassReport()
    order = {node: index for index, node in enumerate(gm.graph.nodes)}
    for node in gm.graph.find_nodes(op="call_function", target=attend):
        k, v = _gathered(Attend.of(node).k), _gathered(Attend.of(node).v)
        if k is None or v is None:
            continue
        site: AttentionSite | None = node.meta.get(SITE)
        with in_place_of(node):
            new = _lower(node, k, v, order)
        if isinstance(new, tuple):
            report.skip(site.site if site is not None else str(node), *new)
            continue
        replace_node(node, new)
        if site is not None:
            site.lowering = "paged"
        report.rewrites += 1
    return report


def _gathered(arg: Any) -> _Gather | None:
    """The gather behind keys [B, H, K, D], with slices that drop the first of them."""
    node, skip = as_node(arg), 0
    while is_call(node, aten.slice) and node.args[1] in (2, -2):
        source, _, first, last, step = (*node.args, 2**63 - 1, 1)[:5]
        if not isinstance(first, int) or first < 0 or last != 2**63 - 1 or step != 1:
            return None
        skip, node = skip + first, as_node(source)
    if not is_call(node, aten.permute) or node.args[1] != _HEADS_FIRST:
        return None
    node = as_node(node.args[0])
    if node.target is not gather_kv:
        return None
    pages, table, start, stop = node.args
    return _Gather(as_node(pages), as_node(table), start, stop, skip)


def _lower(
    node: fx.Node, k: _Gather, v: _Gather, order: dict[fx.Node, int]
) -> fx.Node | tuple[str, str]:
    call = Attend.of(node)
    why = _why_not(node, call, k, v, order)
    if why is not None:
        return why
    graph = node.graph
    start = add(graph, k.start, k.skip)
    seen = _flags(call, start)
    if isinstance(seen, tuple):
        return seen
    q, rows = call.q, inline(graph, _rows, call.q, like=node)
    positions = origins = bias = None
    if not seen.last:
        shift = add(graph, call.q_offset, start)
        positions = inline(graph, _positions, q, seen.positions, shift)
    if call.chunk is not None:
        origins = inline(graph, _origins, q, call.chunk_origin, start)
    if call.mask is not None:
        bias = inline(graph, _rows_of_mask, q, call.mask, start)
    out = PagedAttend(
        q=rows,
        k_pages=k.pages,
        v_pages=v.pages,
        block_table=k.table,
        query_start=inline(graph, _query_start, q),
        seq_lens=inline(graph, _seq_lens, q, k.stop),
        mask=bias,
        q_positions=positions,
        chunk_origin=origins,
        sinks=call.sinks,
        scale=call.scale,
        causal=seen.causal,
        window=seen.window,
        chunk=call.chunk,
        softcap=call.softcap,
    ).emit(graph, like=node)
    return inline(graph, _heads_first, out, q, like=node)


def _why_not(
    node: fx.Node, call: Attend, k: _Gather, v: _Gather, order: dict[fx.Node, int]
) -> tuple[str, str] | None:
    """Reason code and sentence of operands that paged_attend cannot take."""
    if k[1:] != v[1:] or val(k.table).dtype != torch.int32:
        return "ranges", "keys and values are not the same rows of the same table"
    for pages in (k.pages, v.pages):
        if any(_is_store(user) and order[user] < order[node] for user in pages.users):
            return "stored-over", "the pages are stored to between the gather and the attention"
    if call.mask is not None and not same(shape(call.mask)[-1], shape(call.k)[2]):
        return "mask", "the mask does not tell keys apart"
    if call.empty_row != "zero":
        return "empty-row", "rows without a key get the mean of the values"
    if (
        call.chunk is not None
        and call.chunk_origin is not None
        and len(shape(call.chunk_origin)) > 1
    ):
        return "origin", "the chunk grid is not one per sequence"
    return None


@dataclass
class _Seen:
    """What rows see of all keys up to the last one; last: they are the last positions."""

    causal: bool
    window: Any
    positions: Any
    last: bool


def _flags(call: Attend, start: Any) -> _Seen | tuple[str, str]:
    """The flags over all keys in place of those from ``start`` on, or why none say the same."""
    Tq, K = shape(call.q)[2], shape(call.k)[2]
    at_zero = not isinstance(start, fx.Node) and start == 0
    if call.causal:
        reach = min((x for x in (call.window, call.chunk) if isinstance(x, int)), default=None)
        # Positions may be anywhere, before the first key too.
        known = call.q_positions is None
        back = known and reach is not None and _reaches_back(start, call.q_offset, reach)
        if not at_zero and not back:
            return "first-key", "no flag says which gathered key is the first that is seen"
        last = known and same(val(call.q_offset) + Tq, K)
        return _Seen(True, call.window, call.q_positions, last)
    if call.window is not None or call.chunk is not None:
        return "two-sided", "the window or chunk looks ahead"
    if at_zero:
        return _Seen(False, None, None, True)
    # One row that sees all K keys there are.
    if not (same(Tq, 1) and isinstance(K, int)):
        return "first-key", "no flag says which gathered key is the first that is seen"
    return _Seen(True, K, None, True)


def _is_store(user: fx.Node) -> bool:
    return user.target is functional_form


def _rows(q: Tensor) -> Tensor:
    B, H, Tq, D = q.shape
    return q.permute(_HEADS_FIRST).reshape(B * Tq, H, D)


def _heads_first(rows: Tensor, q: Tensor) -> Tensor:
    B, H, Tq, _ = q.shape
    return rows.reshape(B, Tq, H, rows.shape[2]).permute(_HEADS_FIRST)


def _query_start(q: Tensor) -> Tensor:
    return (torch.arange(q.shape[0] + 1, device=q.device) * q.shape[2]).to(torch.int32)


def _seq_lens(q: Tensor, stop: Any) -> Tensor:
    return torch.full([q.shape[0]], stop, dtype=torch.int32, device=q.device)


def _positions(q: Tensor, positions: Tensor | None, shift: Any) -> Tensor:
    """int64 [B*Tq]: the position of every row among all keys of its sequence."""
    B, _, Tq, _ = q.shape
    if positions is None:
        positions = torch.arange(Tq, device=q.device)
    return (positions + shift).expand(B, Tq).reshape(B * Tq)


def _origins(q: Tensor, origin: Tensor | None, start: Any) -> Tensor:
    """int64 [B]: where each sequence's chunk grid starts, counted from its first key."""
    if origin is None:
        return torch.full([q.shape[0]], start, dtype=torch.int64, device=q.device)
    return (origin + start).expand(q.shape[0])


def _rows_of_mask(q: Tensor, mask: Tensor, start: Any) -> Tensor:
    """[B*Tq, 1 or Hq, start + K] of a mask broadcastable to [B, Hq, Tq, K], K all there is."""
    mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    (B, _, Tq, _), H, K = q.shape, mask.shape[1], mask.shape[3]
    rows = mask.expand(B, H, Tq, K).permute(_HEADS_FIRST).reshape(B * Tq, H, K)
    if isinstance(start, int) and start == 0:
        return rows
    # Earlier keys are out of reach anyway.
    return torch.cat([rows.new_zeros(B * Tq, H, start), rows], -1)


def _reaches_back(start: Any, offset: Any, reach: int) -> bool:
    """Whether keys from `start` on are all that queries from start + offset on see."""
    first = val(start) + val(offset)
    return statically_known_true(val(start) <= torch.sym_max(0, first - reach + 1))
