"""Rows through attention: fewer queries, and the keys that those can reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvtailor.kernels.ops import paged_attend
from kvtailor.passes.attend import Attend, PagedAttend
from kvtailor.passes.graph import END, SITE, add, aten, emit, same, shape, sub, sym_arg, val
from kvtailor.passes.rows.demand import (
    WHOLE,
    All,
    Demand,
    Index,
    Need,
    PerBatch,
    Range,
    Size,
    demand_range,
    guarded_at_least,
    least,
    take,
)
from kvtailor.passes.rows.plan import Fetch, NotRowWise, Plan, asked, broadcast

_Op = TypeVar("_Op", Attend, PagedAttend)


def _over(
    node: fx.Node,
    call: _Op,
    rows: dict[str, Need],
    change: Callable[[Fetch, _Op], _Op] = lambda fetch, new: new,
) -> Plan:
    """The same call over these rows of its arguments, by name, and all of the others.

    change: of the call whose arguments are narrowed already.
    """
    needs = {name: rows.get(name, WHOLE) for name in call.nodes()}

    def build(fetch: Fetch) -> fx.Node:
        narrow = {name: fetch(x, needs[name]) for name, x in call.nodes().items()}
        return change(fetch, call.replace(**narrow)).emit(node.graph, like=node)

    return Plan([(x, asked(needs[name])) for name, x in call.nodes().items()], build)


def dense(node: fx.Node, need: Demand) -> Plan | None:
    """Rows of the queries; of the keys and values, what those queries can reach."""
    if need.dim != 2 or (isinstance(need.rows, PerBatch) and need.batch != 0):
        return None
    call = Attend.of(node)
    if not call.is_local:
        call = call.replace(q_positions=None, chunk_origin=None)
    counted = call.is_local and call.q_positions is None
    if counted and not same(need.pre, 1):
        # Rows of several sequences: no range, and no positions of their own.
        return None
    keys = _keys(node, call, need)
    rows: dict[str, Need] = {"q": need.at(2, 0), "k": keys, "v": keys}
    if call.mask is not None:
        rows["mask"] = broadcast(call.mask, node, need)
    for name, ranks in (("q_positions", (1, 2)), ("chunk_origin", (2,))):
        x = getattr(call, name)
        if x is not None and len(shape(x)) in ranks:
            rows[name] = _positions_of(x, node, need)

    def change(fetch: Fetch, new: Attend) -> Attend:
        graph, first = node.graph, keys.rows.lo if isinstance(keys, Demand) else 0  # type: ignore[union-attr]
        if isinstance(keys, Demand) and new.mask is not None and not same(shape(new.mask)[-1], 1):
            last = len(shape(new.mask)) - 1
            new = new.replace(mask=take(graph, new.mask, All(""), keys.at(last)))
        if not counted:
            return new
        offset = val(call.q_offset) - first
        if isinstance(need.rows, Range):
            return new.replace(q_offset=sym_arg(graph, offset + need.rows.lo))
        at = _row_numbers(graph, fetch(need.rows.rows, WHOLE), shape(node)[2])
        if isinstance(need.rows, PerBatch):
            at = emit(graph, aten.unsqueeze.default, at, 1)
        return new.replace(q_positions=at, q_offset=sym_arg(graph, offset))

    return _over(node, call, rows, change)


def _positions_of(x: fx.Node, node: fx.Node, need: Demand) -> Need:
    """Rows of ``[Tq]`` or ``[B, Tq]``. Raises NotRowWise."""
    B, _, Tq, _ = shape(node)
    if not same(shape(x)[-1], Tq):
        return WHOLE
    alone = len(shape(x)) == 1 or not same(shape(x)[0], B)
    if isinstance(need.rows, PerBatch) and alone:
        raise NotRowWise
    return need.at(len(shape(x)) - 1, 0)


def _keys(node: fx.Node, call: Attend, need: Demand) -> Need:
    """Keys that the queries can see.

    The last m rows below a causal window of W reach m + W - 1 keys.
    """
    site = node.meta.get(SITE)
    every = f"attention {site.site if site else node} can see every key"
    whole = All(every)
    if not isinstance(need.rows, Range) or call.q_positions is not None:
        return whole
    if call.empty_row != "zero":
        return whole
    Tk: Size = shape(call.k)[2]
    offset = val(call.q_offset)
    first, last = need.rows.lo + offset, need.rows.hi - 1 + offset
    lo: Size = 0
    hi: Size = Tk
    if call.window is not None and call.chunk is None:
        lo = first - call.window + 1
    elif call.chunk is not None and call.window is None and call.chunk_origin is None:
        lo = first // call.chunk * call.chunk
    if not isinstance(lo, int) or lo != 0:
        above = guarded_at_least(lo, 0)
        if above is None:
            return whole
        lo = lo if above else 0
    if call.causal:
        capped = least(last + 1, Tk)
        hi = Tk if capped is None else capped
    if not statically_known_true(lo < hi):
        return whole
    return demand_range(lo, hi, 2, Tk, every)


def paged(node: fx.Node, need: Demand) -> Plan | None:
    """An index set of packed rows: each becomes a sequence of its own over its sequence's blocks.

    So the rows may come in any order, and from the middle of their sequence. Where every sequence
    has one row, any rows are some of the sequences.
    """
    if need.dim != 0 or not same(need.pre, 1) or node.target is not paged_attend:
        return None
    call, rows = PagedAttend.of(node), need.rows
    of_row, of_sequence = ("q", "mask", "q_positions"), ("block_table", "seq_lens", "chunk_origin")
    if call.query_start is None:
        by_row = dict.fromkeys((*of_row, *of_sequence), need.at(0))
        return None if isinstance(rows, PerBatch) else _over(node, call, {**by_row})
    if not isinstance(rows, Index):
        return None
    return _over(
        node,
        call,
        {name: need.at(0) for name in of_row},
        lambda fetch, new: _one_row_each(node, fetch(rows.rows, WHOLE), new),
    )


def _one_row_each(node: fx.Node, rows: fx.Node, new: PagedAttend) -> PagedAttend:
    """new, whose q holds these rows of node, with each row a sequence of its own."""
    graph = node.graph
    at = _row_numbers(graph, rows, shape(node)[0])
    at = emit(graph, aten._to_copy.default, at, dtype=torch.int64)
    begins = emit(graph, aten._to_copy.default, new.query_start, dtype=torch.int64)
    # The sequence of each row: the last that begins at or before it.
    after = emit(graph, aten.searchsorted.Tensor, begins, at, right=True)
    last = sub(graph, sym_arg(graph, shape(new.seq_lens)[0]), 1)
    owner = emit(graph, aten.clamp.default, emit(graph, aten.sub.Tensor, after, 1), 0, last)

    def of_owner(x: fx.Node) -> fx.Node:
        return emit(graph, aten.index_select.default, x, 0, owner)

    end = of_owner(emit(graph, aten.slice.Tensor, begins, 0, 1, END))
    length, where = of_owner(new.seq_lens), new.q_positions
    if where is None:
        where = emit(graph, aten.sub.Tensor, emit(graph, aten.add.Tensor, length, at), end)
    # Rows past the last sequence see nothing.
    length = emit(graph, aten.mul.Tensor, length, emit(graph, aten.lt.Tensor, at, end))
    starts = add(graph, sym_arg(graph, shape(rows)[0]), 1)
    return new.replace(
        query_start=emit(
            graph, aten.arange.default, starts, dtype=torch.int32, device=val(node).device
        ),
        block_table=of_owner(new.block_table),
        seq_lens=length,
        q_positions=where,
        chunk_origin=None if new.chunk_origin is None else of_owner(new.chunk_origin),
    )


def _row_numbers(graph: fx.Graph, rows: fx.Node, T: Size) -> fx.Node:
    """Row numbers from 0: negative ones count from the end."""
    negative = emit(graph, aten.lt.Scalar, rows, 0)
    from_end = emit(graph, aten.add.Tensor, rows, sym_arg(graph, T))
    return emit(graph, aten.where.self, negative, from_end, rows)
