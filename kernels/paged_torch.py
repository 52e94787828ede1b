"""``paged_attend`` and ``store_kv`` in plain torch: what the CPU runs, and a GPU without Triton.

Lengths and tables are read on the host. Of each sequence only the blocks some row can see are
gathered, and ``local_attention`` cuts the rows into blocks. Single rows (decode) have a kernel of
their own, ``paged_rows``; where it is not to be had, runs of neighbouring blocks are read where
they lie, and only what is scattered is gathered. Heads of a group are rows of one key head.

Letters: N packed rows, S sequences, n rows of one sequence, K gathered keys, H heads, D head dim
of q and k, Dv head dim of v.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from kvtailor.kernels import local_attention, paged_rows
from kvtailor.kernels.blocks import Partial, attend_block, with_sinks
from kvtailor.kernels.checks import check_gather_kv, check_paged_attend, check_store_kv
from kvtailor.kernels.flags import Flags
from kvtailor.kernels.reference import NEVER, accumulator, row_bias

# Rows of a masked tile, at most.
MAX_TILE = 256
# Keys in neighbouring slots that are worth a call of their own: to gather fewer costs less.
MIN_RUN = 256
# Rows per key head below which CPU flash attention is several times slower than at it.
MIN_ROWS = 4


def _gathered(
    k_pages: Tensor, v_pages: Tensor, table: Tensor, low: int, high: int
) -> tuple[Tensor, Tensor]:
    """Keys low .. high - 1 of a sequence and their values: ``[1, Hkv, K, D]`` and Dv."""
    block_size = k_pages.shape[1]
    first = low // block_size
    blocks = table[first : -(-high // block_size)]
    cut = slice(low - first * block_size, high - first * block_size)
    k, v = (
        pages.index_select(0, blocks).flatten(0, 1)[cut].transpose(0, 1)[None]
        for pages in (k_pages, v_pages)
    )
    return k, v


def paged_attend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    query_start: Tensor | None,
    seq_lens: Tensor,
    mask: Tensor | None = None,
    q_positions: Tensor | None = None,
    chunk_origin: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """As ``kvtailor::paged_attend``; also returns the log-sum-exp ``[N, Hq]``."""
    check_paged_attend(
        q, k_pages, v_pages, block_table, query_start, seq_lens,
        mask, q_positions, chunk_origin, sinks, alibi_slopes, window, chunk,
    )  # fmt: skip
    N, Hq, _ = q.shape
    acc = accumulator(q.dtype)
    out = q.new_zeros((N, Hq, v_pages.shape[3]))
    lse = torch.full((N, Hq), NEVER, dtype=acc, device=q.device)
    start_s = torch.arange(N + 1) if query_start is None else query_start.cpu().long()
    len_s = seq_lens.cpu().long()
    origin_s = torch.zeros_like(len_s) if chunk_origin is None else chunk_origin.cpu().long()
    busy = (start_s.diff() > 0) & (len_s > 0)
    alone = busy & (start_s.diff() == 1)
    if mask is None and alibi_slopes is None and alone.any():
        flags = Flags(causal, window, chunk, origin_s)
        members = _members(start_s, len_s, flags, q_positions, alone)
        if len(members):
            _single_rows(q, k_pages, v_pages, block_table, members, scale, softcap, out, lse)
        busy &= ~alone
    starts, lens, origins = start_s.tolist(), len_s.tolist(), origin_s.tolist()
    for s in busy.nonzero()[:, 0].tolist():
        rows, length = slice(starts[s], starts[s + 1]), lens[s]
        flags = Flags(causal, window, chunk, origins[s])
        one = (q[rows], k_pages, v_pages, block_table[s], length, flags, scale, softcap)
        if mask is None and q_positions is None and alibi_slopes is None:
            parts = iter([(slice(None), _aligned(*one))])
        else:
            p_n = torch.arange(length - (rows.stop - rows.start), length, device=q.device)
            if q_positions is not None:
                p_n = q_positions[rows].to(torch.int64)
            parts = _masked(*one, p_n, None if mask is None else mask[rows], alibi_slopes)
        for at, part in parts:
            out[rows][at] = part.out[0].transpose(0, 1)
            lse[rows][at] = part.lse[0].transpose(0, 1)
    if sinks is None:
        return out, lse
    with_sink = with_sinks(Partial(out, lse), sinks.to(acc))
    return with_sink.out.to(out.dtype), with_sink.lse


def _members(
    start_s: Tensor, len_s: Tensor, flags: Flags, q_positions: Tensor | None, alone: Tensor
) -> Tensor:
    """Of the sequences with one row alone that sees a key: ``(sequence, row, low, high)``."""
    at_s, row_s = len_s - 1, start_s[:-1]
    if q_positions is not None:
        at_s[alone] = q_positions.cpu().long()[row_s[alone]]
    low_s, high_s = flags.interval(at_s, len_s, torch.zeros_like(at_s))
    members = torch.stack([torch.arange(len(at_s)), row_s, low_s, high_s], dim=1)
    return members[alone & (low_s < high_s)]


def _aligned(
    q_nHD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    length: int,
    flags: Flags,
    scale: float,
    softcap: float | None,
) -> Partial:
    """The last n rows of a sequence, over the keys they can see: local attention cuts them."""
    p = length - len(q_nHD)
    low, high = flags.interval(p, length)[0], flags.interval(length - 1, length)[1]
    k, v = _gathered(k_pages, v_pages, table, low, high)
    q = q_nHD.transpose(0, 1)[None]
    call = local_attention.Call(q, k, v, None, scale, softcap, "zero", lse=True)
    call.aligned(
        None, (0, high - low), p - low, flags._replace(origin=flags.origin - low), mask=None
    )
    assert call.lse is not None
    return Partial(call.rows_of_out(None), call.lse)


def _masked(
    q_nHD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    length: int,
    flags: Flags,
    scale: float,
    softcap: float | None,
    p_n: Tensor,
    mask: Tensor | None,
    slopes: Tensor | None,
) -> Iterator[tuple[slice, Partial]]:
    """The general case: tiles of rows under an additive mask, each over the keys it can reach."""
    low_n, high_n = flags.interval(p_n, torch.full_like(p_n, length), torch.zeros_like(p_n))
    acc = accumulator(q_nHD.dtype)
    for start in range(0, len(p_n), MAX_TILE):
        rows = slice(start, min(start + MAX_TILE, len(p_n)))
        sees = low_n[rows] < high_n[rows]
        if not sees.any():
            continue
        low, high = int(low_n[rows][sees].min()), int(high_n[rows][sees].max())
        k, v = _gathered(k_pages, v_pages, table, low, high)
        part = None if mask is None else mask[rows]
        bias, seen = row_bias(p_n[rows], slice(low, high), flags, part, slopes, acc)
        # What no row sees may hold anything.
        unseen = ~seen.any(0).any(0)[:, None]
        k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
        zeros = torch.zeros_like(seen, dtype=acc) if bias is None else bias
        yield rows, attend_block(
            q_nHD[rows].transpose(0, 1)[None], k, v, zeros.masked_fill(~seen, NEVER)[None],
            scale=scale, softcap=softcap, empty=True,
        )  # fmt: skip


def _single_rows(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    members: Tensor,
    scale: float,
    softcap: float | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """One row each of several sequences.

    members: int64 ``[M, 4]``, ``(sequence, row, low, high)``. All keys low..high are seen, so
    their order does not matter: they are taken in parts, and the parts merged, those of all
    sequences at once.
    """
    if paged_rows.takes(q, k_pages, v_pages):
        paged_rows.attend_rows(
            q, k_pages, v_pages, block_table, members, out, lse, scale=scale, softcap=softcap
        )
        return
    Hkv = k_pages.shape[2]
    k_slots, v_slots = k_pages.flatten(0, 1), v_pages.flatten(0, 1)
    block_size = k_pages.shape[1]
    tables = block_table.cpu().numpy()
    # The heads of a group are rows of one head: they read its keys once.
    rows = members[:, 1].to(q.device)
    q_SHGD = q[rows].unflatten(1, (Hkv, -1))
    G = q_SHGD.shape[2]
    if G < MIN_ROWS:
        q_SHGD = q_SHGD.repeat(1, 1, -(-MIN_ROWS // G), 1)
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    # Member and number of every part.
    parts: list[tuple[int, int]] = []
    for i, (s, _, low, high) in enumerate(members.tolist()):
        start = len(outs)
        for k, v in _parts(k_slots, v_slots, tables[s], low, high, block_size):
            many = q_SHGD[i].expand(k.shape[0], -1, -1, -1)
            part = attend_block(
                many, k.transpose(1, 2), v.transpose(1, 2), scale=scale, softcap=softcap
            )
            outs += part.out[:, :, :G].unbind(0)
            lses += part.lse[:, :, :G].unbind(0)
        parts += [(i, j) for j in range(len(outs) - start)]
    out_PHD, lse_PH = torch.stack(outs).flatten(1, 2), torch.stack(lses).flatten(1, 2)
    if len(outs) > len(members):
        at = tuple(torch.tensor(parts, device=q.device).unbind(1))
        most = max(j for _, j in parts) + 1
        lse_SPH = lse_PH.new_full((len(members), most, lse_PH.shape[1]), NEVER)
        lse_SPH[at] = lse_PH
        weights = lse_SPH.softmax(1)
        weighted = out_PHD * weights[at][..., None]
        out_PHD = weighted.new_zeros(len(members), *out_PHD.shape[1:])
        out_PHD.index_add_(0, at[0], weighted)
        lse_PH = lse_SPH.logsumexp(1)
    out[rows] = out_PHD.to(out.dtype)
    lse[rows] = lse_PH.to(lse.dtype)


def _parts(
    k_slots: Tensor, v_slots: Tensor, table: np.ndarray, low: int, high: int, block_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The keys and values low..high ``[b, K, Hkv, D or Dv]``, in parts of some K each.

    Long runs of neighbouring slots are views, cut into equal parts where there are more threads
    than key heads; the rest is gathered.
    """
    first = low // block_size
    blocks = table[first : -(-high // block_size)].astype(np.int64)
    edges = np.flatnonzero(np.diff(blocks) != 1) + 1
    threads = max(1, torch.get_num_threads() // k_slots.shape[1])
    rest: list[np.ndarray] = []
    for begin, end in zip([0, *edges.tolist()], [*edges.tolist(), len(blocks)]):
        # Key number minus slot number is the same all along a run.
        shift = int(blocks[begin]) * block_size - (first + begin) * block_size
        start = max(low, (first + begin) * block_size) + shift
        stop = min(high, (first + end) * block_size) + shift
        count = stop - start
        if count >= MIN_RUN and k_slots.device.type == "cpu":
            pieces = max(1, min(threads, count // MIN_RUN))
            cut = start + count // pieces * pieces
            sizes = (pieces, count // pieces)
            yield k_slots[start:cut].unflatten(0, sizes), v_slots[start:cut].unflatten(0, sizes)
            start = cut
        if start < stop:
            rest.append(np.arange(start, stop))
    if rest:
        slots = torch.from_numpy(np.concatenate(rest)).to(k_slots.device)
        yield k_slots.index_select(0, slots)[None], v_slots.index_select(0, slots)[None]


def store_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot_mapping: Tensor) -> None:
    """As ``kvtailor::store_kv``. A slot past the pool raises IndexError."""
    check_store_kv(k, v, k_pages, v_pages, slot_mapping)
    block_size = k_pages.shape[1]
    keep = slot_mapping >= 0
    slots = slot_mapping
    if not bool(keep.all()):
        k, v, slots = k[keep], v[keep], slot_mapping[keep]
    at = (slots // block_size, slots % block_size)
    k_pages.index_put_(at, k.to(k_pages.dtype))
    v_pages.index_put_(at, v.to(v_pages.dtype))


def gather_kv(pages: Tensor, block_table: Tensor, start: int, stop: int) -> Tensor:
    """As ``kvtailor::gather_kv``. Rows past the table raise IndexError."""
    check_gather_kv(pages, block_table, start, stop)
    position = torch.arange(start, stop, device=pages.device)
    size = pages.shape[1]
    block = block_table.index_select(1, position // size)
    rows = (block.to(torch.int64) * size + position % size).flatten()
    gathered = pages.flatten(0, 1).index_select(0, rows)
    return gathered.view(block_table.shape[0], stop - start, *pages.shape[2:])
