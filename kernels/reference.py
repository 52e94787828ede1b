"""Oracles: plain torch, one function per op, no kernel imported.

Letters: B batch, T tokens, H heads, D head dim of q and k, Dv head dim of v.
"""

from __future__ import annotations

import torch
from torch import Tensor

EMPTY_ROWS = ("zero", "uniform")


def positions(
    q_positions: Tensor | None, q_offset: int, q_len: int, device: torch.device
) -> Tensor:
    """Physical key index of each query, ``[Tq]`` or ``[B, Tq]``, int64."""
    base = torch.arange(q_len, device=device) if q_positions is None else q_positions
    return base + q_offset


def visible(
    q_len: int,
    k_len: int,
    device: torch.device,
    *,
    q_positions: Tensor | None = None,
    chunk_origin: Tensor | None = None,
    causal: bool = False,
    q_offset: int = 0,
    window: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Which keys the flags of ``attend`` let each query see: bool ``[1 or B, 1, Tq, Tk]``.

    Key k is visible to the query at position p when (not causal or k <= p) and (no window or
    p - k < window) and (no chunk or (k - o) // chunk == (p - o) // chunk).
    """
    p = positions(q_positions, q_offset, q_len, device)
    p = p.reshape(1 if p.dim() == 1 else p.shape[0], 1, q_len, 1)
    k = torch.arange(k_len, device=device)
    seen = torch.ones(p.shape[0], 1, q_len, k_len, dtype=torch.bool, device=device)
    if causal:
        seen = seen & (k <= p)
    if window is not None:
        seen = seen & (p - k < window)
    if chunk is not None:
        if chunk_origin is None:
            o = torch.zeros((), dtype=torch.int64, device=device)
        elif chunk_origin.dim() == 2:
            o = chunk_origin[:, None, :, None]
        else:
            o = chunk_origin.reshape(-1, 1, 1, 1)
        same = torch.div(k - o, chunk, rounding_mode="floor") == torch.div(
            p - o, chunk, rounding_mode="floor"
        )
        seen = seen & same
    return seen


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    q_positions: Tensor | None = None,
    chunk_origin: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    q_offset: int = 0,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    empty_row: str = "zero",
) -> Tensor:
    """Attention with every flag of ``kvtailor::attend``; see ``kernels/ops.py`` for the schema.

    Scores and softmax are float32 (float64 for float64 inputs); the result has v's dtype.
    """
    B, Hq, Tq, _ = q.shape
    Hkv, Tk = k.shape[1], k.shape[2]
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = Hq // Hkv
    k_BHTD = k.to(acc).repeat_interleave(group, dim=1)
    v_BHTD = v.to(acc).repeat_interleave(group, dim=1)
    scores = torch.matmul(q.to(acc), k_BHTD.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(
        Tq,
        Tk,
        q.device,
        q_positions=q_positions,
        chunk_origin=chunk_origin,
        causal=causal,
        q_offset=q_offset,
        window=window,
        chunk=chunk,
    )
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + mask.to(acc)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.to(acc).reshape(1, Hq, 1, 1).expand(B, Hq, Tq, 1)
        scores = torch.cat([scores, column], dim=-1)
    if not scores.shape[-1]:
        # No keys and no sinks: sums of nothing.
        return v.new_zeros((B, Hq, Tq, v.shape[-1]))
    # A row of -inf alone has no softmax: such rows get what empty_row says.
    top = scores.amax(dim=-1, keepdim=True)
    empty = top == float("-inf")
    weights = torch.exp(scores - top.masked_fill(empty, 0.0))
    total = weights.sum(dim=-1, keepdim=True)
    weights = weights / total.masked_fill(empty, 1.0)
    if sinks is not None:
        weights = weights[..., :-1]
    if empty_row == "uniform":
        weights = torch.where(empty, torch.full_like(weights, 1.0 / max(Tk, 1)), weights)
    return torch.matmul(weights, v_BHTD).to(v.dtype)


def attend_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    key_start: Tensor,
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
    """Attention of S sequences packed along the token axis, keys apart from queries.

    q ``[N, Hq, D]``, k ``[M, Hkv, D]``, v ``[M, Hkv, Dv]``; rows query_start[s] to
    query_start[s + 1] of q and key_start[s] to key_start[s + 1] of k and v are sequence s's.
    A row's position among its sequence's keys is q_positions ``[N]``, else the rows are the last
    ones of their sequence. mask: bool or additive, ``[N, 1 or Hq, K]``, by key of the sequence;
    keys past its end are hidden. chunk_origin ``[S]``. alibi_slopes ``[Hq]`` add
    slope * (key - position) after the softcap. Scores and softmax are float32 (float64 for
    float64 inputs).

    Returns out ``[N, Hq, Dv]``, 0 where a row sees no key, in q's dtype, and the log of the
    softmax's denominator, sink included, ``[N, Hq]``: -inf where there is neither key nor sink.
    Rows past the last sequence see no key.
    """
    N, Hq, _ = q.shape
    group = Hq // k.shape[1]
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros(N, Hq, v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.full((N, Hq), float("-inf"), dtype=acc, device=q.device)
    if sinks is not None:
        lse = sinks.to(acc).expand(N, Hq).clone()
    starts, key_starts = query_start.tolist(), key_start.tolist()
    for s in range(len(starts) - 1):
        a, b = starts[s], starts[s + 1]
        key_a, key_b = key_starts[s], key_starts[s + 1]
        n, length = b - a, key_b - key_a
        if n == 0 or length == 0:
            continue
        if q_positions is None:
            p = torch.arange(length - n, length, device=q.device)
        else:
            p = q_positions[a:b].to(torch.int64)
        seen = visible(
            n,
            length,
            q.device,
            q_positions=p,
            chunk_origin=None if chunk_origin is None else chunk_origin[s].to(torch.int64),
            causal=causal,
            window=window,
            chunk=chunk,
        )[0]
        q_HND = q[a:b].to(acc).transpose(0, 1)
        k_HKD = k[key_a:key_b].to(acc).transpose(0, 1).repeat_interleave(group, dim=0)
        v_HKD = v[key_a:key_b].to(acc).transpose(0, 1).repeat_interleave(group, dim=0)
        scores = torch.matmul(q_HND, k_HKD.transpose(-1, -2)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if alibi_slopes is not None:
            distance = torch.arange(length, device=q.device) - p[:, None]
            scores = scores + alibi_slopes.to(acc)[:, None, None] * distance
        if mask is not None:
            rows = mask[a:b, :, :length].transpose(0, 1)
            missing = length - rows.shape[-1]
            if mask.dtype == torch.bool:
                seen = seen & torch.nn.functional.pad(rows, (0, missing), value=False)
            else:
                scores = scores + torch.nn.functional.pad(
                    rows.to(acc), (0, missing), value=float("-inf")
                )
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            column = sinks.to(acc)[:, None, None].expand(Hq, n, 1)
            scores = torch.cat([scores, column], dim=-1)
        top = scores.amax(dim=-1, keepdim=True)
        weights = torch.exp(scores - top.masked_fill(top == float("-inf"), 0.0))
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights[..., :length] / total.masked_fill(total == 0, 1.0)
        out[a:b] = torch.matmul(weights, v_HKD).transpose(0, 1).to(q.dtype)
        lse[a:b] = (top + total.log())[..., 0].transpose(0, 1)
    return out, lse


def gather_pages(pages: Tensor, block_table: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
    """The sequences' rows of ``pages`` one after the other, and where each begins.

    pages ``[blocks, block_size, H, D]``, block_table ``[S, max_blocks]``, seq_lens ``[S]``.
    Returns ``[M, H, D]`` with M the sum of the lengths, and int64 ``[S + 1]``.
    """
    block_size = pages.shape[1]
    rows = []
    for table, length in zip(block_table, seq_lens.tolist()):
        blocks = table[: -(-length // block_size)].to(torch.int64)
        rows.append(pages[blocks].flatten(0, 1)[:length])
    starts = torch.zeros(len(rows) + 1, dtype=torch.int64, device=pages.device)
    starts[1:] = seq_lens.cumsum(0)
    packed = torch.cat(rows) if rows else pages.new_empty((0, *pages.shape[2:]))
    return packed, starts


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
    """``attend_varlen`` over the gathered pages; see ``kernels/ops.py`` for the schema.

    Slots no row can see may hold anything, NaN included; they are gathered as 0.
    """
    if query_start is None:
        query_start = torch.arange(q.shape[0] + 1)
    k, key_start = gather_pages(k_pages, block_table, seq_lens)
    v, _ = gather_pages(v_pages, block_table, seq_lens)
    return attend_varlen(
        q,
        k.masked_fill(k.isnan(), 0.0),
        v.masked_fill(v.isnan(), 0.0),
        query_start,
        key_start,
        mask,
        q_positions,
        chunk_origin,
        sinks,
        alibi_slopes,
        scale=scale,
        causal=causal,
        window=window,
        chunk=chunk,
        softcap=softcap,
    )


def store_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot_mapping: Tensor) -> None:
    """Row n of k and v goes to slot ``slot_mapping[n]`` of the pages, in place; -1 skips it.

    k ``[N, H, D]``, v ``[N, H, Dv]``, pages ``[blocks, block_size, H, D or Dv]``; slot s is row
    ``s % block_size`` of block ``s // block_size``.
    """
    block_size = k_pages.shape[1]
    for n, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            k_pages[slot // block_size, slot % block_size] = k[n].to(k_pages.dtype)
            v_pages[slot // block_size, slot % block_size] = v[n].to(v_pages.dtype)


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K], weight [N, K], bias [N] -> [..., N]; how it is split changes nothing."""
    out = x @ weight.t()
    return out if bias is None else out + bias


def gather_kv(pages: Tensor, block_table: Tensor, start: int, stop: int) -> Tensor:
    """The rows start .. stop-1 of every sequence ``[S, stop - start, H, D]``, page by page.

    pages ``[blocks, block_size, H, D]``, block_table ``[S, max_blocks]``.
    """
    size = pages.shape[1]
    rows = [
        pages[block, position % size]
        for table in block_table.tolist()
        for position in range(start, stop)
        for block in [table[position // size]]
    ]
    if not rows:
        return pages.new_empty((block_table.shape[0], stop - start, *pages.shape[2:]))
    return torch.stack(rows).view(block_table.shape[0], stop - start, *pages.shape[2:])
