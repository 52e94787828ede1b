"""Oracles: plain torch, one function per op, no kernel imported.

Letters: B batch, T tokens, H heads, D head dim of q and k, Dv head dim of v.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvtailor.kernels.flags import Flags

NEVER = float("-inf")


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
    """Which keys the flags of ``attend`` let each query see: bool ``[1 or B, 1, Tq, Tk]``."""
    p = positions(q_positions, q_offset, q_len, device)
    p = p.reshape(1 if p.dim() == 1 else p.shape[0], 1, q_len, 1)
    origin: int | Tensor = 0
    if chunk_origin is not None:
        column = chunk_origin if chunk_origin.dim() == 2 else chunk_origin.reshape(-1, 1)
        origin = column[:, None, :, None]
    flags = Flags(causal, window, chunk, origin)
    seen = flags.visible(p, torch.arange(k_len, device=device), k_len)
    return torch.ones_like(p, dtype=torch.bool) & seen


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What scores and softmax of inputs of this dtype are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    seen: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """What attention computes, in the one dtype of its arguments: out and log-sum-exp.

    q ``[B, Hq, Tq, D]``, k ``[B, Hkv, Tk, D]``, v ``[B, Hkv, Tk, Dv]``, sinks ``[Hq]``; bias and
    seen (bool) broadcast to ``[B, Hq, Tq, Tk]``. In order: scale, softcap, bias, seen, sinks,
    softmax. Returns ``[B, Hq, Tq, Dv]``, 0 where a row sees no key, and the log of the softmax's
    denominator, sink included, ``[B, Hq, Tq]``: -inf where there is neither key nor sink.
    """
    B, Hq, Tq, D = q.shape
    Hkv, Tk = k.shape[1:3]
    # The heads of a group are rows of one key head. Scores may be large: they are made once.
    rows = q.reshape(B, Hkv, Hq // Hkv * Tq, D)
    scores = torch.matmul(rows, k.transpose(-1, -2)).mul_(scale)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.view(B, Hq, Tq, Tk)
    if bias is not None:
        scores.add_(bias)
    if seen is not None:
        scores.masked_fill_(~seen, NEVER)
    top = scores.amax(dim=-1, keepdim=True) if Tk else scores.new_full((B, Hq, Tq, 1), NEVER)
    column = None if sinks is None else sinks.view(Hq, 1, 1)
    if column is not None:
        top = torch.maximum(top, column)
    # A row of -inf alone has no softmax.
    top = top.masked_fill(top == NEVER, 0.0)
    weights = scores.sub_(top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    if column is not None:
        total = total + torch.exp(column - top)
    out = torch.matmul(weights.view(*rows.shape[:3], Tk), v).view(B, Hq, Tq, v.shape[-1])
    return out / total.masked_fill(total == 0, 1.0), (top + total.log())[..., 0]


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
    acc = accumulator(q.dtype)
    Tk = k.shape[2]
    seen = visible(
        q.shape[2], Tk, q.device, q_positions=q_positions, chunk_origin=chunk_origin,
        causal=causal, q_offset=q_offset, window=window, chunk=chunk,
    )  # fmt: skip
    bias = None
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        bias = mask.to(acc)
    q, k, values = (x.to(acc) for x in (q, k, v))
    out, lse = softmax_attention(
        q, k, values, bias, seen, None if sinks is None else sinks.to(acc),
        scale=scale, softcap=softcap,
    )  # fmt: skip
    if empty_row == "uniform" and Tk:
        mean = values.mean(dim=2, keepdim=True).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        out = torch.where((lse == NEVER)[..., None], mean, out)
    return out.to(v.dtype)


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

    Returns out ``[N, Hq, Dv]`` in q's dtype, and the log-sum-exp ``[N, Hq]``, as of
    ``softmax_attention``. Rows past the last sequence see no key.
    """
    N, Hq, _ = q.shape
    acc = accumulator(q.dtype)
    out = torch.zeros(N, Hq, v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.full((N, Hq), NEVER, dtype=acc, device=q.device)
    if sinks is not None:
        sinks = sinks.to(acc)
        lse = sinks.expand(N, Hq).clone()
    starts, key_starts = query_start.tolist(), key_start.tolist()
    for s in range(len(starts) - 1):
        rows, keys = slice(*starts[s : s + 2]), slice(*key_starts[s : s + 2])
        n, length = rows.stop - rows.start, keys.stop - keys.start
        if n == 0 or length == 0:
            continue
        p = torch.arange(length - n, length, device=q.device)
        if q_positions is not None:
            p = q_positions[rows].to(torch.int64)
        flags = Flags(causal, window, chunk, 0 if chunk_origin is None else int(chunk_origin[s]))
        bias, seen = row_bias(
            p, slice(0, length), flags, None if mask is None else mask[rows], alibi_slopes, acc
        )
        one = [x.to(acc).transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
        part, part_lse = softmax_attention(
            one[0], one[1], one[2], bias, seen, sinks, scale=scale, softcap=softcap
        )
        out[rows] = part[0].transpose(0, 1).to(q.dtype)
        lse[rows] = part_lse[0].transpose(0, 1)
    return out, lse


def row_bias(
    p: Tensor,
    keys: slice,
    flags: Flags,
    mask: Tensor | None,
    slopes: Tensor | None,
    acc: torch.dtype,
) -> tuple[Tensor | None, Tensor]:
    """Of rows at positions p ``[n]`` and some of a sequence's keys: what is added to the scores,
    and what is seen (bool), ``[1 or Hq, n, keys]``.

    mask: bool or additive, ``[n, 1 or Hq, K]``; keys past K are hidden. slopes ``[Hq]``.
    """
    key = torch.arange(keys.start, keys.stop, device=p.device)
    every = torch.ones(1, len(p), len(key), dtype=torch.bool, device=p.device)
    seen = every & flags.visible(p[:, None], key, keys.stop)
    bias = None
    if slopes is not None:
        bias = slopes.to(acc)[:, None, None] * (key - p[:, None])
    if mask is not None:
        part = mask[:, :, keys].transpose(0, 1)
        missing = len(key) - part.shape[-1]
        if mask.dtype == torch.bool:
            seen = seen & pad(part, (0, missing), value=False)
        else:
            part = pad(part.to(acc), (0, missing), value=NEVER)
            bias = part if bias is None else bias + part
    return bias, seen


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
