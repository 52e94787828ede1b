"""``paged_attend`` and ``store_kv`` in plain torch: what the CPU runs, and a GPU without Triton.

Lengths and tables are read on the host. Of each sequence only the blocks some row can see are
gathered, and nothing is squared: causal rows are their own triangle plus an unmasked history,
merged by log-sum-exp; a window is banded tiles; a chunk is one triangle per chunk. Single rows
(decode) that reach equally many blocks run as one batch.

Letters: N packed rows, S sequences, n rows of one sequence, K gathered keys, H heads, D head dim
of q and k, Dv head dim of v.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvtailor.kernels.checks import check_gather_kv, check_paged_attend, check_store_kv

NEG_INF = float("-inf")

# Rows per masked tile, at most. A band of b rows and window W reads b + W - 1 keys per row.
MAX_TILE = 256
MIN_TILE = 64
# Keys gathered at a time when single rows are batched.
MAX_BATCH_KEYS = 1 << 14


class Flags(NamedTuple):
    """The attributes every helper needs."""

    scale: float
    causal: bool
    window: int | None
    chunk: int | None
    softcap: float | None


class Partial(NamedTuple):
    """Attention over some of the keys: out ``[.., Hq, n, Dv]`` and lse ``[.., Hq, n]``."""

    out: Tensor
    lse: Tensor


def _merge(a: Partial, b: Partial) -> Partial:
    """Attention over the keys of both."""
    lse = torch.logaddexp(a.lse, b.lse)
    base = lse.masked_fill(lse == NEG_INF, 0.0)
    out = a.out * torch.exp(a.lse - base)[..., None] + b.out * torch.exp(b.lse - base)[..., None]
    return Partial(out, lse)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, triangle: bool, f: Flags
) -> Partial:
    """q ``[b, Hq, n, D]`` over k ``[b, Hkv, K, D]``, v ``[b, Hkv, K, Dv]``.

    bias: additive, broadcastable to ``[b, Hq, n, K]``. triangle: causal with n = K.
    """
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    fused = (
        q.device.type == "cpu"
        and f.softcap is None
        and q.shape[-1] == v.shape[-1]
        and q.dtype == k.dtype == v.dtype
    )
    if fused:
        # CPU flash attention takes grouped heads as they are and returns the log-sum-exp.
        if bias is not None and bias.dim() != 4:
            bias = bias.reshape((1,) * (4 - bias.dim()) + bias.shape)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, triangle, attn_mask=bias, scale=f.scale
        )
        if bias is not None:
            # It reports 0 for rows without keys.
            lse = lse.masked_fill(bias.amax(-1) == NEG_INF, NEG_INF)
        return Partial(out, lse)
    b, Hq, n, D = q.shape
    Hkv, K = k.shape[1:3]
    q_bHGnD = q.to(acc).reshape(b, Hkv, Hq // Hkv, n, D)
    scores = torch.matmul(q_bHGnD, k.to(acc).unsqueeze(2).transpose(-1, -2)) * f.scale
    scores = scores.reshape(b, Hq, n, K)
    if f.softcap is not None:
        scores = f.softcap * torch.tanh(scores / f.softcap)
    if bias is not None:
        scores = scores + bias
    if triangle:
        hidden = torch.ones(n, K, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, NEG_INF)
    top = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - top.masked_fill(top == NEG_INF, 0.0))
    total = weights.sum(dim=-1, keepdim=True)
    lse = (top + total.log())[..., 0]
    weights = weights / total.masked_fill(total == 0, 1.0)
    weights = weights.reshape(b, Hkv, Hq // Hkv, n, K)
    out = torch.matmul(weights, v.to(acc).unsqueeze(2)).reshape(b, Hq, n, v.shape[-1])
    return Partial(out, lse)


def _interval(p: int, length: int, origin: int, f: Flags) -> tuple[int, int]:
    """Keys the query at position p sees: low <= key < high."""
    low, high = 0, length
    if f.causal:
        high = min(high, p + 1)
    if f.window is not None:
        low = max(low, p - f.window + 1)
    if f.chunk is not None:
        start = p - (p - origin) % f.chunk
        low, high = max(low, start), min(high, start + f.chunk)
    return low, high


def _intervals(p: Tensor, length: int, origin: int, f: Flags) -> tuple[Tensor, Tensor]:
    """``_interval`` of every position in p ``[n]``."""
    low, high = torch.zeros_like(p), torch.full_like(p, length)
    if f.causal:
        high = torch.minimum(high, p + 1)
    if f.window is not None:
        low = torch.maximum(low, p - f.window + 1)
    if f.chunk is not None:
        start = p - torch.remainder(p - origin, f.chunk)
        low, high = torch.maximum(low, start), torch.minimum(high, start + f.chunk)
    return low, high


class _Sequence:
    """One sequence's new rows and the keys they can see, gathered once."""

    def __init__(
        self,
        q_nHD: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        table: Tensor,
        low: int,
        high: int,
        f: Flags,
    ) -> None:
        block_size = k_pages.shape[1]
        first = low // block_size
        blocks = table[first : -(-high // block_size)]
        cut = slice(low - first * block_size, high - first * block_size)
        self.q = q_nHD.transpose(0, 1)[None]
        self.k = k_pages.index_select(0, blocks).flatten(0, 1)[cut].transpose(0, 1)[None]
        self.v = v_pages.index_select(0, blocks).flatten(0, 1)[cut].transpose(0, 1)[None]
        self.low, self.f = low, f

    def run(
        self,
        rows: slice,
        low: int,
        high: int,
        bias: Tensor | None = None,
        triangle: bool = False,
        unseen: Tensor | None = None,
    ) -> Partial:
        """The rows over keys low..high; keys in ``unseen`` ``[high - low]`` count as 0."""
        keys = slice(low - self.low, high - self.low)
        k, v = self.k[:, :, keys], self.v[:, :, keys]
        if unseen is not None:
            k = k.masked_fill(unseen[:, None], 0.0)
            v = v.masked_fill(unseen[:, None], 0.0)
        return _attend(self.q[:, :, rows], k, v, bias, triangle, self.f)

    def causal(self, rows: slice, p: int, low: int) -> Partial:
        """Rows at positions p, p + 1, ... over keys from low up to their own."""
        n = rows.stop - rows.start
        if n == 1:
            return self.run(rows, low, p + 1)
        own = self.run(rows, p, p + n, triangle=True)
        return own if low == p else _merge(self.run(rows, low, p), own)

    def band(self, rows: slice, p: int, bias: Tensor, window: int) -> Partial:
        """Rows at positions p, p + 1, ... over their window, which lies in the sequence."""
        n = rows.stop - rows.start
        return self.run(rows, p - window + 1, p + n, bias[:n, : n + window - 1])


def _triangles(
    n: int, p: int, origin: int, f: Flags
) -> tuple[list[tuple[slice, int, int]], list[tuple[slice, int]]]:
    """n causal rows from position p as triangles ``(rows, p, low)`` and bands ``(rows, p)``."""
    triangles: list[tuple[slice, int, int]] = []
    bands: list[tuple[slice, int]] = []
    if f.chunk is not None:
        at = p
        while at < p + n:
            start = at - (at - origin) % f.chunk
            stop = min(p + n, start + f.chunk)
            triangles.append((slice(at - p, stop - p), at, max(start, 0)))
            at = stop
        return triangles, bands
    # Rows whose window reaches back to key 0 are plain causal.
    plain = n if f.window is None else max(0, min(n, f.window - p))
    if plain > 0:
        triangles.append((slice(0, plain), p, 0))
    if plain < n:
        assert f.window is not None
        tile = min(MAX_TILE, max(MIN_TILE, f.window // 2))
        for at in range(plain, n, tile):
            bands.append((slice(at, min(at + tile, n)), p + at))
    return triangles, bands


def _band_bias(rows: int, window: int, like: Tensor) -> Tensor:
    """Row i sees columns i .. i + window - 1 of ``[rows, rows + window - 1]``."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    ones = torch.ones(rows, rows + window - 1, dtype=torch.bool, device=like.device)
    seen = ones.triu(0).tril(window - 1)
    return torch.zeros(seen.shape, dtype=dtype, device=like.device).masked_fill(~seen, NEG_INF)


def paged_attend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    query_start: Tensor,
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
    f = Flags(scale, causal, window, chunk, softcap)
    N, Hq, _ = q.shape
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros((N, Hq, v_pages.shape[3]))
    lse = torch.full((N, Hq), NEG_INF, dtype=acc, device=q.device)
    starts, lens = query_start.tolist(), seq_lens.tolist()
    origins = [0] * len(lens) if chunk_origin is None else chunk_origin.tolist()
    simple = mask is None and q_positions is None and alibi_slopes is None

    def put(rows: slice, partial: Partial) -> None:
        out[rows] = partial.out[0].transpose(0, 1)
        lse[rows] = partial.lse[0].transpose(0, 1).to(acc)

    single: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    for s, length in enumerate(lens):
        a, b = starts[s], starts[s + 1]
        n, p, origin = b - a, length - (b - a), origins[s]
        if n == 0 or length == 0:
            continue
        if n == 1 and mask is None and alibi_slopes is None:
            at = p if q_positions is None else int(q_positions[a])
            low, high = _interval(at, length, origin, f)
            if low < high:
                block_size = k_pages.shape[1]
                single[(high - 1) // block_size - low // block_size].append((s, a, low, high))
        elif simple and causal and p >= 0 and (window is None or chunk is None):
            low = _interval(p, length, origin, f)[0]
            seq = _Sequence(q[a:b], k_pages, v_pages, block_table[s], low, length, f)
            triangles, bands = _triangles(n, p, origin, f)
            for rows, at, start in triangles:
                put(slice(a + rows.start, a + rows.stop), seq.causal(rows, at, start))
            if bands:
                assert window is not None
                bias = _band_bias(bands[0][0].stop - bands[0][0].start, window, q)
                for rows, at in bands:
                    put(slice(a + rows.start, a + rows.stop), seq.band(rows, at, bias, window))
        else:
            if q_positions is None:
                p_n = torch.arange(p, length, device=q.device)
            else:
                p_n = q_positions[a:b].to(torch.int64)
            low_n, high_n = _intervals(p_n, length, origin, f)
            _masked(
                q[a:b], k_pages, v_pages, block_table[s], p_n, low_n, high_n,
                None if mask is None else mask[a:b], alibi_slopes, f, put, a,
            )  # fmt: skip
    for blocks, members in single.items():
        per_batch = max(1, MAX_BATCH_KEYS // ((blocks + 1) * k_pages.shape[1]))
        for i in range(0, len(members), per_batch):
            _single_rows(q, k_pages, v_pages, block_table, members[i : i + per_batch], f, out, lse)
    if sinks is not None:
        total = torch.logaddexp(lse, sinks.to(acc)[None, :])
        out *= torch.exp(lse - total.masked_fill(total == NEG_INF, 0.0))[..., None]
        lse = total
    return out, lse


def _masked(
    q_nHD: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    p_n: Tensor,
    low_n: Tensor,
    high_n: Tensor,
    mask: Tensor | None,
    slopes: Tensor | None,
    f: Flags,
    put: Callable[[slice, Partial], None],
    a: int,
) -> None:
    """The general case: tiles of rows under an additive mask, each over the keys it can reach."""
    acc = torch.float64 if q_nHD.dtype == torch.float64 else torch.float32
    sees = low_n < high_n
    if not sees.any():
        return
    low, high = int(low_n[sees].min()), int(high_n[sees].max())
    seq = _Sequence(q_nHD, k_pages, v_pages, table, low, high, f)
    for start in range(0, len(p_n), MAX_TILE):
        rows = slice(start, min(start + MAX_TILE, len(p_n)))
        some = sees[rows]
        if not some.any():
            continue
        first = int(low_n[rows][some].min())
        last = int(high_n[rows][some].max())
        key = torch.arange(first, last, device=p_n.device)
        seen = (key >= low_n[rows, None]) & (key < high_n[rows, None])
        bias = torch.zeros(1, *seen.shape, dtype=acc, device=p_n.device)
        if slopes is not None:
            distance = (key - p_n[rows, None]).to(acc)
            bias = bias + slopes.to(acc)[:, None, None] * distance
        if mask is not None:
            part = mask[rows, :, first:last].transpose(0, 1)
            missing = last - first - part.shape[-1]
            if mask.dtype == torch.bool:
                part = torch.nn.functional.pad(part, (0, missing), value=False)
                seen = seen & part
            else:
                bias = bias + torch.nn.functional.pad(part.to(acc), (0, missing), value=NEG_INF)
        bias = bias.masked_fill(~seen, NEG_INF)
        unseen = ~seen.reshape(-1, last - first).any(0)
        put(
            slice(a + rows.start, a + rows.stop),
            seq.run(rows, first, last, bias[None], unseen=unseen if unseen.any() else None),
        )


def _single_rows(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    members: list[tuple[int, int, int, int]],
    f: Flags,
    out: Tensor,
    lse: Tensor,
) -> None:
    """One row each of several sequences that reach equally many blocks, as a batch.

    members: ``(sequence, row, low, high)``.
    """
    block_size = k_pages.shape[1]
    device = q.device
    s, rows, low, high = torch.tensor(members, device=device).unbind(1)
    first = low // block_size
    blocks = int((members[0][3] - 1) // block_size - members[0][2] // block_size) + 1
    ids = block_table[s].gather(1, first[:, None] + torch.arange(blocks, device=device))
    k = k_pages.index_select(0, ids.flatten()).unflatten(0, ids.shape)
    v = v_pages.index_select(0, ids.flatten()).unflatten(0, ids.shape)
    head = low - first * block_size
    tail = high - (first + blocks - 1) * block_size
    bias = None
    if any(lo % block_size or hi % block_size for _, _, lo, hi in members):
        # Slots before the first visible key and after the last may hold anything.
        slot = torch.arange(block_size, device=device)
        before, after = slot < head[:, None], slot >= tail[:, None]
        for x in (k, v):
            x[:, 0].masked_fill_(before[..., None, None], 0.0)
            x[:, -1].masked_fill_(after[..., None, None], 0.0)
        hidden = torch.zeros(len(members), blocks, block_size, dtype=torch.bool, device=device)
        hidden[:, 0] |= before
        hidden[:, -1] |= after
        bias = torch.zeros(hidden.shape, dtype=lse.dtype, device=device)
        bias = bias.masked_fill_(hidden, NEG_INF).flatten(1)[:, None, None]
    result = _attend(
        q[rows][:, :, None],
        k.flatten(1, 2).transpose(1, 2),
        v.flatten(1, 2).transpose(1, 2),
        bias,
        False,
        f,
    )
    out[rows] = result.out[:, :, 0].to(out.dtype)
    lse[rows] = result.lse[:, :, 0].to(lse.dtype)


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
