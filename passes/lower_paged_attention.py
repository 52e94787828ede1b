"""Attention over keys gathered from pages reads the pages instead: the gather never runs.

Before:  k = permute(gather_kv(k_pages, table, 0, n));  v = permute(gather_kv(v_pages, table, 0, n))
         out = attend(q, k, v, padding, causal=True, q_offset=n - Tq)
After:   rows = paged_attend(q as [B*Tq, Hq, D], k_pages, v_pages, table, [0, Tq, ..], [n, n, ..],
                             padding as [B*Tq, 1, n], causal=True);  out = rows as [B, Hq, Tq, Dv]
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvtailor.kernels.ops import attend, gather_kv, paged_attend
from kvtailor.passes.graph import (
    SITE,
    add,
    arith,
    as_node,
    aten,
    emit,
    functional_form,
    in_place_of,
    is_call,
    replace_node,
    same,
    shape,
    size,
    val,
)
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
        k, v = _gathered(node.args[1]), _gathered(node.args[2])
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
    graph, flags = node.graph, node.kwargs
    q, _, _, mask, positions, origin, sinks = (*node.args, None, None, None, None)[:7]
    q = as_node(q)
    Tq, K = shape(q)[2], shape(node.args[1])[2]
    if k[1:] != v[1:] or val(k.table).dtype != torch.int32:
        return "ranges", "keys and values are not the same rows of the same table"
    for pages in (k.pages, v.pages):
        if any(_is_store(user) and order[user] < order[node] for user in pages.users):
            return "stored-over", "the pages are stored to between the gather and the attention"
    if mask is not None and not same(shape(mask)[-1], K):
        return "mask", "the mask does not tell keys apart"
    if flags.get("empty_row", "zero") != "zero":
        return "empty-row", "rows without a key get the mean of the values"
    start, causal = add(graph, k.start, k.skip), bool(flags.get("causal"))
    window, chunk = flags.get("window"), flags.get("chunk")
    offset = flags.get("q_offset", 0)
    at_zero = not isinstance(start, fx.Node) and start == 0
    reach = min((x for x in (window, chunk) if isinstance(x, int)), default=None)
    if causal:
        # Positions may be anywhere, before the first key too.
        back = positions is None and reach is not None and _reaches_back(start, offset, reach)
        if not at_zero and not back:
            return "first-key", "no flag says which gathered key is the first that is seen"
        last = positions is None and same(val(offset) + Tq, K)
    elif window is not None or chunk is not None:
        return "two-sided", "the window or chunk looks ahead"
    else:
        if not at_zero:
            # One row that sees all K keys there are.
            if not (same(Tq, 1) and isinstance(K, int)):
                return "first-key", "no flag says which gathered key is the first that is seen"
            causal, window = True, K
        last, positions = True, None
    rows_q = emit(graph, aten.permute.default, q, _HEADS_FIRST, like=node)
    N = _times(graph, size(graph, q, 0), size(graph, q, 2))
    heads = size(graph, q, 1)
    rows_q = emit(graph, aten.reshape.default, rows_q, [N, heads, size(graph, q, 3)], like=node)
    starts = emit(graph, aten.arange.default, add(graph, size(graph, q, 0), 1), device=_device(q))
    starts = emit(graph, aten.mul.Tensor, starts, size(graph, q, 2))
    starts = emit(graph, aten._to_copy.default, starts, dtype=torch.int32)
    lens = emit(
        graph, aten.full.default, [size(graph, q, 0)], k.stop, dtype=torch.int32, device=_device(q)
    )
    where = None if last else _positions(graph, q, positions, offset, start, N)
    origins = None if chunk is None else _origins(graph, q, origin, start)
    if chunk is not None and origins is None:
        return "origin", "the chunk grid is not one per sequence"
    bias = None if mask is None else _rows_of_mask(graph, q, as_node(mask), N)
    if bias is not None and not at_zero:
        # Earlier keys are out of reach anyway.
        before = emit(graph, aten.new_zeros.default, bias, [N, size(graph, bias, 1), start])
        bias = emit(graph, aten.cat.default, [before, bias], -1)
    out = emit(
        graph,
        paged_attend,
        rows_q,
        k.pages,
        v.pages,
        k.table,
        starts,
        lens,
        bias,
        where,
        origins,
        sinks,
        None,
        like=node,
        scale=flags["scale"],
        causal=causal,
        window=window,
        chunk=chunk,
        softcap=flags.get("softcap"),
    )
    sizes = [size(graph, q, 0), size(graph, q, 2), heads, size(graph, v.pages, 3)]
    out = emit(graph, aten.reshape.default, out, sizes, like=node)
    return emit(graph, aten.permute.default, out, _HEADS_FIRST, like=node)


def _is_store(user: fx.Node) -> bool:
    return user.target is functional_form


def _device(node: fx.Node) -> torch.device:
    return val(node).device


def _times(graph: fx.Graph, a: Any, b: Any) -> Any:
    return arith(graph, operator.mul, a, b)


def _positions(
    graph: fx.Graph, q: fx.Node, positions: Any, offset: Any, start: Any, rows: Any
) -> fx.Node:
    """int64 [B*Tq]: the position of every row among all keys of its sequence."""
    B, Tq = size(graph, q, 0), size(graph, q, 2)
    if positions is None:
        positions = emit(graph, aten.arange.default, Tq, device=_device(q))
    shift = add(graph, offset, start)
    if isinstance(shift, fx.Node) or shift:
        positions = emit(graph, aten.add.Tensor, positions, shift)
    wide = emit(graph, aten.expand.default, positions, [B, Tq])
    return emit(graph, aten.reshape.default, wide, [rows])


def _origins(graph: fx.Graph, q: fx.Node, origin: Any, start: Any) -> fx.Node | None:
    """int64 [B]: where each sequence's chunk grid starts, counted from its first key."""
    B = size(graph, q, 0)
    if origin is None:
        return emit(graph, aten.full.default, [B], start, dtype=torch.int64, device=_device(q))
    if val(origin).dim() > 1:
        return None
    if isinstance(start, fx.Node) or start:
        origin = emit(graph, aten.add.Tensor, origin, start)
    return emit(graph, aten.expand.default, origin, [B])


def _rows_of_mask(graph: fx.Graph, q: fx.Node, mask: fx.Node, rows: Any) -> fx.Node:
    """[B*Tq, 1 or Hq, K] of a mask broadcastable to [B, Hq, Tq, K], K all there is."""
    while val(mask).dim() < 4:
        mask = emit(graph, aten.unsqueeze.default, mask, 0)
    heads = size(graph, mask, 1)
    sizes = [size(graph, q, 0), heads, size(graph, q, 2), -1]
    wide = emit(graph, aten.expand.default, mask, sizes)
    turned = emit(graph, aten.permute.default, wide, _HEADS_FIRST)
    return emit(graph, aten.reshape.default, turned, [rows, heads, size(graph, turned, 3)])


def _reaches_back(start: Any, offset: Any, reach: int) -> bool:
    """Whether keys from `start` on are all that queries from start + offset on see."""
    first = val(start) + val(offset)
    return statically_known_true(val(start) <= torch.sym_max(0, first - reach + 1))
