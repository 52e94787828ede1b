"""``paged_attend`` and ``store_kv`` in plain torch: what the CPU runs, and a GPU without Triton.

Lengths and tables are read on the host. Of each sequence only the blocks some row can see are
gathered, and nothing is squared: causal rows run in tiles, each over the keys up to its own; a
window is banded tiles; a chunk is causal by itself. Single rows (decode) have a kernel of their
own, ``paged_rows``; where it is not to be had, runs of neighbouring blocks are read where they
lie, and only what is scattered is gathered. Heads of a group are rows of one key head.

Letters: N packed rows, S sequences, n rows of one sequence, K gathered keys, H heads, D head dim
of q and k, Dv head dim of v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvtailor.kernels import paged_rows
from kvtailor.kernels.checks import check_gather_kv, check_paged_attend, check_store_kv

NEG_INF = float("-inf")

# Rows of a causal tile: half of its own keys are computed for nothing.
CAUSAL_TILE = 64
# Rows per masked tile, at most. A band of b rows and window W reads b + W - 1 keys per row.
MAX_TILE = 256
MIN_TILE = 64
# Keys in neighbouring slots that are worth a call of their own: to gather fewer costs less.
MIN_RUN = 256
# Rows per key head below which CPU flash attention is several times slower than at it.
MIN_ROWS = 4


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


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, f: Flags, empty: bool = False
) -> Partial:
    """q ``[b, Hq, n, D]`` over k ``[b, Hkv, K, D]``, v ``[b, Hkv, K, Dv]``.

    bias: additive, broadcastable to ``[b, Hq, n, K]``. empty: it may leave a row without a key.
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
            q, k, v, 0.0, False, attn_mask=bias, scale=f.scale
        )
        if bias is not None and empty:
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


def _intervals(
    p: Tensor, length: int | Tensor, origin: int | Tensor, f: Flags
) -> tuple[Tensor, Tensor]:
    """``_interval`` of every position in p ``[n]``."""
    low, high = torch.zeros_like(p), torch.zeros_like(p) + length
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
        self.q = q_nHD
        self.k = k_pages.index_select(0, blocks).flatten(0, 1)[cut].transpose(0, 1)[None]
        self.v = v_pages.index_select(0, blocks).flatten(0, 1)[cut].transpose(0, 1)[None]
        self.low, self.f = low, f

    def run(
        self, rows: slice, low: int, high: int, bias: Tensor, unseen: Tensor | None = None
    ) -> Partial:
        """The rows over keys low..high; keys in ``unseen`` ``[high - low]`` count as 0."""
        keys = slice(low - self.low, high - self.low)
        k, v = self.k[:, :, keys], self.v[:, :, keys]
        if unseen is not None:
            k = k.masked_fill(unseen[:, None], 0.0)
            v = v.masked_fill(unseen[:, None], 0.0)
        q = self.q[rows].transpose(0, 1)[None]
        return _attend(q, k, v, bias, self.f, empty=True)

    def tile(self, rows: slice, low: int, high: int, bias: Tensor) -> Partial:
        """The rows over keys low..high; bias ``[n * G, high - low]`` leaves a key to every row."""
        keys = slice(low - self.low, high - self.low)
        k, v = self.k[:, :, keys], self.v[:, :, keys]
        # Row and head of the group, rows of the key head.
        q_nhGD = self.q[rows].unflatten(1, (k.shape[1], -1))
        n, Hkv, G, D = q_nhGD.shape
        q = q_nhGD.transpose(0, 1).reshape(1, Hkv, n * G, D)
        out, lse = _attend(q, k, v, bias[None, None], self.f)
        return Partial(
            out.unflatten(2, (n, G)).transpose(2, 3).flatten(1, 2),
            lse.unflatten(2, (n, G)).transpose(2, 3).flatten(1, 2),
        )


def _triangles(
    n: int, p: int, origin: int, f: Flags
) -> tuple[list[tuple[slice, int, int]], list[tuple[slice, int]]]:
    """n causal rows from position p as tiles: ``(rows, p, low)``, and bands ``(rows, p)``.

    Rows of the former see the keys from low on, those of a band the window.
    """
    triangles: list[tuple[slice, int, int]] = []
    bands: list[tuple[slice, int]] = []

    def add(start: int, stop: int, low: int) -> None:
        for at in range(start, stop, CAUSAL_TILE):
            triangles.append((slice(at - p, min(at + CAUSAL_TILE, stop) - p), at, low))

    if f.chunk is not None:
        at = p
        while at < p + n:
            start = at - (at - origin) % f.chunk
            stop = min(p + n, start + f.chunk)
            add(at, stop, max(start, 0))
            at = stop
        return triangles, bands
    # Rows whose window reaches back to key 0 are plain causal.
    plain = n if f.window is None else max(0, min(n, f.window - p))
    add(p, p + plain, 0)
    if plain < n:
        assert f.window is not None
        tile = _band_tile(f.window)
        for at in range(plain, n, tile):
            bands.append((slice(at, min(at + tile, n)), p + at))
    return triangles, bands


def _band_tile(window: int) -> int:
    """Rows of a band's tile."""
    return min(MAX_TILE, max(MIN_TILE, window // 2))


def _band_bias(rows: int, window: int, group: int, like: Tensor) -> Tensor:
    """Row i sees columns i .. i + window - 1 of ``[rows * G, rows + window - 1]``."""
    ones = torch.ones(rows, rows + window - 1, dtype=torch.bool, device=like.device)
    return _bias(ones.triu(0).tril(window - 1), group, like)


def _causal_bias(history: int, group: int, like: Tensor) -> Tensor:
    """Row i of a tile sees ``history`` columns and i + 1 more of ``[tile * G, history + tile]``."""
    tile = CAUSAL_TILE
    ones = torch.ones(tile, history + tile, dtype=torch.bool, device=like.device)
    return _bias(ones.tril(history), group, like)


def _bias(seen: Tensor, group: int, like: Tensor) -> Tensor:
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    bias = torch.zeros(seen.shape, dtype=dtype, device=like.device).masked_fill_(~seen, NEG_INF)
    return bias.repeat_interleave(group, 0)


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
    f = Flags(scale, causal, window, chunk, softcap)
    N, Hq, _ = q.shape
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros((N, Hq, v_pages.shape[3]))
    lse = torch.full((N, Hq), NEG_INF, dtype=acc, device=q.device)
    start_s = torch.arange(N + 1) if query_start is None else query_start.cpu().long()
    len_s = seq_lens.cpu().long()
    origin_s = torch.zeros_like(len_s) if chunk_origin is None else chunk_origin.cpu().long()
    count_s = start_s.diff()
    busy = (count_s > 0) & (len_s > 0)
    alone = busy & (count_s == 1)
    if mask is None and alibi_slopes is None and alone.any():
        sequence, row, length_m = alone.nonzero()[:, 0], start_s[:-1][alone], len_s[alone]
        at_m = length_m - 1 if q_positions is None else q_positions.cpu().long()[row]
        low_m, high_m = _intervals(at_m, length_m, origin_s[alone], f)
        members = torch.stack([sequence, row, low_m, high_m], dim=1)[low_m < high_m]
        if len(members):
            _single_rows(q, k_pages, v_pages, block_table, members, f, out, lse)
        busy &= ~alone
    starts, lens, origins = start_s.tolist(), len_s.tolist(), origin_s.tolist()
    simple = mask is None and q_positions is None and alibi_slopes is None

    def put(rows: slice, partial: Partial) -> None:
        out[rows] = partial.out[0].transpose(0, 1)
        lse[rows] = partial.lse[0].transpose(0, 1).to(acc)

    G = Hq // k_pages.shape[2]
    # One of each serves all sequences: a tile takes the part it needs.
    causal_bias: Tensor | None = None
    band_bias: Tensor | None = None
    bias_history = -1
    for s in busy.nonzero()[:, 0].tolist():
        a, b, length, origin = starts[s], starts[s + 1], lens[s], origins[s]
        n, p = b - a, length - (b - a)
        if simple and causal and p >= 0 and (window is None or chunk is None):
            low = _interval(p, length, origin, f)[0]
            seq = _Sequence(q[a:b], k_pages, v_pages, block_table[s], low, length, f)
            triangles, bands = _triangles(n, p, origin, f)
            if triangles:
                longest = max(at - start for _, at, start in triangles)
                if bias_history < longest:
                    bias_history, causal_bias = longest, _causal_bias(longest, G, q)
                assert causal_bias is not None
                for rows, at, start in triangles:
                    count, history = rows.stop - rows.start, at - start
                    skip = bias_history - history
                    bias = causal_bias[: count * G, skip : skip + history + count]
                    part = seq.tile(rows, start, at + count, bias)
                    put(slice(a + rows.start, a + rows.stop), part)
            if bands:
                assert window is not None
                if band_bias is None:
                    tile = _band_tile(window)
                    band_bias = _band_bias(tile, window, G, q)
                for rows, at in bands:
                    count = rows.stop - rows.start
                    bias = band_bias[: count * G, : count + window - 1]
                    part = seq.tile(rows, at - window + 1, at + count, bias)
                    put(slice(a + rows.start, a + rows.stop), part)
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
    members: Tensor,
    f: Flags,
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
            q, k_pages, v_pages, block_table, members, out, lse, scale=f.scale, softcap=f.softcap
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
            part = _attend(many, k.transpose(1, 2), v.transpose(1, 2), None, f)
            outs += part.out[:, :, :G].unbind(0)
            lses += part.lse[:, :, :G].unbind(0)
        parts += [(i, j) for j in range(len(outs) - start)]
    out_PHD, lse_PH = torch.stack(outs).flatten(1, 2), torch.stack(lses).flatten(1, 2)
    if len(outs) > len(members):
        at = tuple(torch.tensor(parts, device=q.device).unbind(1))
        most = max(j for _, j in parts) + 1
        lse_SPH = lse_PH.new_full((len(members), most, lse_PH.shape[1]), NEG_INF)
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
