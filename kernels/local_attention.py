"""Attention whose queries see a contiguous range of keys, in time linear in the tokens.

Every flag of ``kvtailor::attend`` (causal, window, chunk) leaves each query one range of keys
``[lo, hi)``. Queries are cut into blocks, each block reads only the keys its queries can reach,
and equal blocks at equal distances become one batched call on strided views: nothing is copied,
and no tensor, masks included, has more than tokens x (range + block) elements.

Letters: B batch, T tokens, H heads, D head dim of q and k, Dv head dim of v, W window, C chunk,
N blocks in one call, R queries of a block, S keys of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvtailor.kernels.reference import EMPTY_ROWS

NEVER = float("-inf")

# Elements of the largest mask or score tensor made at once; at least one block is always made.
SLAB = 1 << 22


class Run(NamedTuple):
    """``times`` equal blocks, ``step`` tokens apart in the queries and in the keys alike.

    Query i of a block sees its keys j with ``i + lower <= j <= i + upper``.
    """

    query: int
    rows: int
    key: int
    keys: int
    lower: int
    upper: int
    times: int = 1
    step: int = 1

    @property
    def cut_above(self) -> bool:
        return self.upper < self.keys - 1

    @property
    def cut_below(self) -> bool:
        return self.lower > 1 - self.rows

    @property
    def triangle(self) -> bool:
        """Exactly what SDPA's causal flag means: query i sees its block's keys up to i."""
        return self.upper == 0 and self.cut_above and not self.cut_below

    def extent(self, size: int) -> int:
        """Tokens from the start of the first block to the end of the last, ``size`` each."""
        return (self.times - 1) * self.step + size


class Flags(NamedTuple):
    """Which keys a query sees, in ints: position of query 0, causal, window, chunk, its origin."""

    offset: int
    causal: bool
    window: int | None
    chunk: int | None
    origin: int


def blocks(q_len: int, k_len: int, flags: Flags, rows: int) -> Iterator[Run]:
    """Runs of at most ``rows`` queries per block that cover each query that sees a key, once."""
    offset, chunk = flags.offset, flags.chunk
    first, last = offset, offset + q_len
    if flags.causal:
        first = max(first, 0)
    if flags.window is not None:
        last = min(last, k_len + flags.window - 1)
    if chunk is None:
        yield from _merged(_segment(first, last, 0, k_len, flags, rows))
        return
    start = first - (first - flags.origin) % chunk
    while start < last:
        low, high = max(start, 0), min(start + chunk, k_len)
        whole = start >= first and start + chunk <= min(last, k_len) and start >= 0
        count = (min(last, k_len) - start) // chunk if whole else 1
        for run in _segment(max(start, first), min(start + chunk, last), low, high, flags, rows):
            yield run._replace(times=count, step=chunk if count > 1 else 1)
        start += count * chunk


def _segment(first: int, last: int, low: int, high: int, flags: Flags, rows: int) -> Iterator[Run]:
    """Blocks of the queries at positions [first, last), which see no key outside [low, high)."""
    if flags.causal:
        first = max(first, low)
    if flags.window is not None:
        last = min(last, high + flags.window - 1)
    for p in range(first, last, rows):
        end = min(p + rows, last)
        key, stop, lower, upper = low, high, 1 - rows, high - low - 1
        if flags.window is not None:
            key = max(low, p - flags.window + 1)
            lower = p - flags.window + 1 - key
        if flags.causal:
            stop = min(high, end)
            upper = p - key
        if key < stop:
            yield Run(p - flags.offset, end - p, key, stop - key, lower, upper)


def _merged(runs: Iterator[Run]) -> Iterator[Run]:
    """Neighbours that are the same block one step further on, as one run."""
    held: Run | None = None
    for run in runs:
        if held is not None and run[1:2] + run[3:6] == held[1:2] + held[3:6]:
            step = run.query - held.query if held.times == 1 else held.step
            if run.query - held.query == run.key - held.key == held.times * step:
                held = held._replace(times=held.times + 1, step=step)
                continue
        if held is not None:
            yield held
        held = run
    if held is not None:
        yield held


@lru_cache(maxsize=512)
def plan(
    q_len: int, k_len: int, flags: Flags, heads: int, threads: int, packs: bool
) -> tuple[Run, ...]:
    """The cheapest cut into blocks. Short inputs come out as one block, the plain square."""
    sizes = [rows for rows in (32, 64, 128, 256, 512) if rows < q_len]
    plans = [tuple(blocks(q_len, k_len, flags, rows)) for rows in (*sizes, max(q_len, 1))]
    return min(plans, key=lambda runs: sum(_cost(run, heads, threads, packs) for run in runs))


def _cost(run: Run, heads: int, threads: int, packs: bool) -> float:
    """Time of one call in units of one query-key pair (3.4 ns on a Zen 4 core, D 64).

    torch's CPU flash kernel works on 32, 64 or 256 queries and 512 keys at a time, by the call's
    query length; each query costs about 30 pairs more, and a call costs 10,000 in Python, mask
    and copy. Where every block's keys are repacked first (half precision with AMX, plain
    operations), each of them costs about 200 more.
    """
    tile = 32 if run.rows < 192 else 64 if run.rows < 768 else 256
    keys = min(run.keys, run.keys / 2 + 256) if run.triangle else run.keys
    tasks = run.times * heads * math.ceil(run.rows / tile)
    pairs = min(tile, run.rows) * (keys * (1.1 if tile == 32 else 1.0) + 30)
    packing = 200 * run.keys * run.times * heads / threads if packs else 0.0
    return 1e4 + math.ceil(tasks / threads) * pairs + packing


def local_attend(
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
    """``kvtailor::attend`` for local sites; see ``kernels/ops.py`` for the schema.

    q ``[B, Hq, Tq, D]``, k ``[B, Hkv, Tk, D]``, v ``[B, Hkv, Tk, Dv]``, any strides; the result
    ``[B, Hq, Tq, Dv]`` lies in memory as ``[B, Tq, Hq, Dv]``. Keys that the flags and a key
    padding mask leave to no query are never read, so they may hold NaN. Raises ValueError for a
    chunk below 1, an unknown empty_row, and head counts that do not divide.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be positive, got {chunk}")
    if empty_row not in EMPTY_ROWS:
        raise ValueError(f"empty_row must be one of {', '.join(EMPTY_ROWS)}, got {empty_row!r}")
    B, Hq, q_len, _ = q.shape
    Hkv, k_len, Dv = v.shape[1:]
    if Hq % Hkv:
        raise ValueError(f"query heads must be a multiple of key heads, got {Hq} and {Hkv}")
    if not B * Hq * q_len * Dv:
        return q.new_empty((B, q_len, Hq, Dv), dtype=v.dtype).transpose(1, 2)
    call = _Call(q, k, v, sinks, scale, softcap, empty_row)
    ranges, mask = _key_ranges(mask, k_len)
    offsets, positions = _offsets(q_positions, q_offset)
    origins, row_origins = _origins(chunk_origin if chunk is not None else None)
    if positions is None and row_origins is None:
        rows = [
            (_of(ranges, b), Flags(_of(offsets, b), causal, window, chunk, _of(origins, b)))
            for b in range(B)
        ]
        if rows.count(rows[0]) == B:
            call.aligned(slice(0, B), *rows[0], mask)
        else:
            for b, (keys, flags) in enumerate(rows):
                call.aligned(slice(b, b + 1), keys, flags, mask)
        return call.out
    if positions is None:
        start = torch.tensor(offsets, device=q.device)[:, None]
        positions = start + torch.arange(q_len, device=q.device)
    if row_origins is None:
        row_origins = torch.tensor(origins, device=q.device)[:, None]
    bounds = torch.tensor(ranges, device=q.device)
    low, high = _intervals(positions, row_origins, bounds, causal, window, chunk)
    if low.shape[0] == 1:
        call.scattered(slice(0, B), low[0], high[0], mask)
    else:
        for b in range(B):
            call.scattered(slice(b, b + 1), low[b], high[b], mask)
    return call.out


def _of(values: list[Any], row: int) -> Any:
    """The value of a batch row in a list with one entry, or one per row."""
    return values[row] if len(values) > 1 else values[0]


def _key_ranges(mask: Tensor | None, k_len: int) -> tuple[list[tuple[int, int]], Tensor | None]:
    """What a mask of keys alone leaves of the keys: ranges ``[start, stop)``, one or one per row.

    The second result is the mask where it says more than the ranges, as ``[B|1, H|1, Tq|1, Tk]``.
    """
    if mask is None:
        return [(0, k_len)], None
    mask = mask[(None,) * (4 - mask.dim())].expand(-1, -1, -1, k_len)
    # A broadcast dimension of an expanded mask holds one value: size 1 says the same.
    for dim in (0, 1, 2):
        if mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    if mask.shape[1] * mask.shape[2] != 1 or not k_len:
        return [(0, k_len)], mask
    keys = mask[:, 0, 0]
    if mask.dtype != torch.bool:
        if not ((keys == 0) | (keys == NEVER)).all():
            return [(0, k_len)], mask
        keys = keys == 0
    counts = keys.sum(dim=1)
    first = keys.byte().argmax(dim=1)
    stop = torch.where(counts > 0, k_len - keys.flip(1).byte().argmax(dim=1), first)
    ranges = [(int(a), int(z)) for a, z in zip(first.tolist(), stop.tolist())]
    holes = bool((counts != stop - first).any())
    return ranges, keys[:, None, None] if holes else None


def _offsets(q_positions: Tensor | None, q_offset: int) -> tuple[list[int], Tensor | None]:
    """Position of query 0, one or one per row, or all positions where they do not count up."""
    if q_positions is None:
        return [q_offset], None
    positions = q_positions.reshape(-1, q_positions.shape[-1]) + q_offset
    if (positions.diff(dim=1) == 1).all():
        return positions[:, 0].tolist(), None
    return [], positions


def _origins(chunk_origin: Tensor | None) -> tuple[list[int], Tensor | None]:
    """Chunk origin, one or one per row, or all of them where it changes within a row."""
    if chunk_origin is None:
        return [0], None
    origins = chunk_origin.reshape(-1, chunk_origin.shape[-1] if chunk_origin.dim() == 2 else 1)
    if (origins == origins[:, :1]).all():
        return origins[:, 0].tolist(), None
    return [], origins


def _intervals(
    positions: Tensor,
    origins: Tensor,
    ranges: Tensor,
    causal: bool,
    window: int | None,
    chunk: int | None,
) -> tuple[Tensor, Tensor]:
    """First key each query sees and the one after its last, int64 ``[1 or B, Tq]``."""
    low, high = ranges[:, :1], ranges[:, 1:]
    if window is not None:
        low = torch.maximum(low, positions - window + 1)
    if chunk is not None:
        start = positions - torch.remainder(positions - origins, chunk)
        low, high = torch.maximum(low, start), torch.minimum(high, start + chunk)
    if causal:
        high = torch.minimum(high, positions + 1)
    B = max(x.shape[0] for x in (positions, origins, ranges))
    return low.expand(B, positions.shape[1]), high.expand(B, positions.shape[1])


class _Call:
    """The tensors of one call, and the result while blocks are written into it."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        scale: float,
        softcap: float | None,
        empty_row: str,
    ):
        self.dtype, self.Dv = v.dtype, v.shape[-1]
        self.flash = q.device.type == "cpu" and softcap is None
        common = torch.promote_types(q.dtype, torch.promote_types(k.dtype, v.dtype))
        self.acc = torch.float64 if common == torch.float64 else torch.float32
        q, k, v = q.to(common), k.to(common), v.to(common)
        if self.flash:
            # The kernel wants one head dim, contiguous: zeros change neither scores nor values.
            D = max(q.shape[-1], v.shape[-1])
            q, k, v = (pad(x, (0, D - x.shape[-1])) if x.shape[-1] < D else x for x in (q, k, v))
            q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        self.q, self.k, self.v = q, k, v
        self.sinks = None if sinks is None else sinks.to(self.acc)[:, None]
        self.scale, self.softcap = scale, softcap
        self.uniform = empty_row == "uniform"
        B, Hq, q_len, _ = q.shape
        out = q.new_empty((B, q_len, Hq, self.Dv), dtype=self.dtype)
        self.out = out.transpose(1, 2)

    @cached_property
    def fill(self) -> Tensor:
        """What a query that sees no key gets: ``[B, Hq, 1, Dv]``."""
        B, Hq, k_len = self.q.shape[0], self.q.shape[1], self.k.shape[2]
        if not self.uniform or not k_len:
            return self.q.new_zeros((B, Hq, 1, self.Dv), dtype=self.acc)
        mean = self.v[..., : self.Dv].mean(dim=2, keepdim=True, dtype=self.acc)
        mean = mean.repeat_interleave(Hq // self.k.shape[1], dim=1)
        if self.sinks is not None:
            # A sink takes all the weight of a row that has nothing else.
            mean = mean.masked_fill(self.sinks[..., None] > NEVER, 0.0)
        return mean

    def aligned(
        self, rows: slice, keys: tuple[int, int], flags: Flags, mask: Tensor | None
    ) -> None:
        """Queries at consecutive positions, in batch rows that share keys and flags."""
        q, k, v, out = self.q[rows], self.k[rows], self.v[rows], self.out[rows]
        start, stop = keys
        flags = flags._replace(offset=flags.offset - start, origin=flags.origin - start)
        heads = q.shape[0] * q.shape[1]
        packs = not self.flash or (q.dtype in (torch.bfloat16, torch.float16) and _amx())
        runs = plan(q.shape[2], stop - start, flags, heads, torch.get_num_threads(), packs)
        if sum(run.rows * run.times for run in runs) < q.shape[2]:
            out.copy_(self.fill[rows])
        k, v = k[:, :, start:stop], v[:, :, start:stop]
        if mask is not None:
            mask = mask[rows] if mask.shape[0] > 1 else mask
            mask = mask.expand(-1, -1, q.shape[2], -1)[..., start:stop]
        fill = self.fill[rows] if self.uniform and mask is not None else None
        for run in runs:
            for slab in self._slabs(run, q.shape[0], mask):
                self._run(slab, q, k, v, out, mask, fill)

    def scattered(self, rows: slice, low: Tensor, high: Tensor, mask: Tensor | None) -> None:
        """Queries anywhere: each sees keys [low, high), the same in every batch row of rows."""
        q, k, v, out, fill = (x[rows] for x in (self.q, self.k, self.v, self.out, self.fill))
        if mask is not None:
            mask = mask[rows] if mask.shape[0] > 1 else mask
        out.copy_(fill)
        seeing = (low < high).nonzero()[:, 0]
        order = seeing[low[seeing].argsort(stable=True)]
        low, high = low[order], high[order]
        for start, stop, key, end in _neighbours(low.tolist(), high.tolist()):
            index = order[start:stop]
            keys = torch.arange(key, end, device=q.device)
            bias = q.new_zeros((stop - start, end - key), dtype=self.acc)
            bias.masked_fill_(keys < low[start:stop, None], NEVER)
            bias.masked_fill_(keys >= high[start:stop, None], NEVER)
            if mask is not None:
                m = mask.index_select(2, index) if mask.shape[2] > 1 else mask
                bias = _combine(bias, m[..., key:end], self.acc)
            part = self._attend(
                q.index_select(2, index),
                k[:, :, key:end],
                v[:, :, key:end],
                bias,
                fill if self.uniform and mask is not None else None,
            )
            out.index_copy_(2, index, part.to(out.dtype))

    def _slabs(self, run: Run, B: int, mask: Tensor | None) -> Iterator[Run]:
        """The run in pieces whose masks or scores are at most SLAB elements."""
        per_block = 0
        if not self.flash:
            per_block = B * self.q.shape[1] * run.rows * run.keys
        elif mask is not None:
            per_block = mask.shape[0] * mask.shape[1] * run.rows * run.keys
        most = max(1, SLAB // per_block) if per_block else run.times
        for start in range(0, run.times, most):
            yield run._replace(
                query=run.query + start * run.step,
                key=run.key + start * run.step,
                times=min(most, run.times - start),
            )

    def _run(
        self,
        run: Run,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        mask: Tensor | None,
        fill: Tensor | None,
    ) -> None:
        """One run over batch rows; mask ``[B|1, H|1, Tq, Tk]`` with the keys of k."""
        B, N = q.shape[0], run.times
        q_BNHRD = _blocks_of(q, run.query, run.rows, run)
        k_BNHSD = _blocks_of(k, run.key, run.keys, run)
        v_BNHSD = _blocks_of(v, run.key, run.keys, run)
        out_BNHRD = _blocks_of(out, run.query, run.rows, run)
        flag = run.triangle and mask is None and self.flash
        bias = None if flag else _band(run, self.acc, q.device)
        if mask is not None:
            m = mask[:, :, run.query :, run.key :]
            m = m[:, :, : run.extent(run.rows), : run.extent(run.keys)]
            # Equal blocks lie on a diagonal of the mask.
            m = m.unfold(2, run.rows, run.step).unfold(3, run.keys, run.step)
            m = m.diagonal(dim1=2, dim2=3).permute(0, 4, 1, 2, 3)
            bias = _combine(bias, m, self.acc)
            bias = bias.expand(B, -1, -1, -1, -1)
        # One call where batch and blocks are one dimension in memory, else one per batch row.
        whole = N == 1 or all(x.stride(0) == N * x.stride(1) for x in (q_BNHRD, k_BNHSD, v_BNHSD))
        for rows in [slice(0, B)] if whole else [slice(b, b + 1) for b in range(B)]:
            part = self._attend(
                q_BNHRD[rows].flatten(0, 1),
                k_BNHSD[rows].flatten(0, 1),
                v_BNHSD[rows].flatten(0, 1),
                bias if bias is None or bias.dim() == 2 else bias[rows].flatten(0, 1),
                fill[rows].repeat_interleave(N, dim=0) if fill is not None else None,
                causal=flag,
            )
            out_BNHRD[rows] = part.unflatten(0, (-1, N))

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        fill: Tensor | None,
        causal: bool = False,
    ) -> Tensor:
        """Dense attention of blocks: q ``[N, Hq, R, D]``, k ``[N, Hkv, S, D]``.

        bias ``[R, S]`` or ``[N|1, Hq|1, R, S]`` is added to the scores; rows it leaves without a
        key get fill ``[N, Hq, 1, Dv]``, or 0.
        """
        if self.flash:
            result, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, attn_mask=bias, scale=self.scale
            )
            result = result[..., : self.Dv]
            if self.sinks is not None:
                result = result * torch.sigmoid(lse - self.sinks)[..., None]
        else:
            result = self._math(q, k, v, bias)
        if fill is not None and bias is not None:
            dead = (bias == NEVER).all(dim=-1, keepdim=True)
            result = torch.where(dead, fill, result)
        return result

    def _math(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """The same in plain operations: softcap, and devices without the CPU kernel."""
        N, Hq, R, _ = q.shape
        Hkv, S = k.shape[1:3]
        q_NHRD = q.reshape(N, Hkv, Hq // Hkv * R, -1).to(self.acc)
        scores = torch.matmul(q_NHRD, k.to(self.acc).transpose(-1, -2)).mul_(self.scale)
        if self.softcap is not None:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        scores = scores.view(N, Hq, R, S)
        if bias is not None:
            scores = scores.add_(bias)
        top = scores.amax(dim=-1, keepdim=True)
        if self.sinks is not None:
            top = torch.maximum(top, self.sinks[..., None])
        top = top.masked_fill(top == NEVER, 0.0)
        weights = scores.sub_(top).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        if self.sinks is not None:
            total = total + torch.exp(self.sinks[..., None] - top)
        values = torch.matmul(weights.view(N, Hkv, -1, S), v.to(self.acc)).view(N, Hq, R, -1)
        return values / total.masked_fill(total == 0, 1.0)


def _neighbours(low: list[int], high: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """Queries sorted by first key, cut so that a cut reads few keys that one of its queries
    does not see: (first query, one after the last, first key, one after the last).
    """
    rows, start = 64, 0
    while start < len(low):
        stop, end = start + 1, high[start]
        # The span may grow past the widest range by one block.
        most = rows + end - low[start]
        while stop < min(start + rows, len(low)):
            most = max(most, rows + high[stop] - low[stop])
            # Keys in a gap are seen by no query: they may hold anything, so they are not read.
            if low[stop] > end or max(end, high[stop]) - low[start] > most:
                break
            end = max(end, high[stop])
            stop += 1
        yield start, stop, low[start], end
        start = stop


def _blocks_of(x: Tensor, start: int, size: int, run: Run) -> Tensor:
    """``[B, H, T, D]`` as the run's blocks ``[B, N, H, size, D]``: a view, blocks may overlap."""
    x = x[:, :, start : start + run.extent(size)]
    return x.unfold(2, size, run.step).permute(0, 2, 1, 4, 3)


def _band(run: Run, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """0 where the run's queries see its keys and -inf elsewhere, ``[R, S]``; None when all do."""
    bias = None
    if run.cut_above:
        bias = torch.full((run.rows, run.keys), NEVER, dtype=dtype, device=device)
        bias.triu_(run.upper + 1)
    if run.cut_below:
        below = torch.full((run.rows, run.keys), NEVER, dtype=dtype, device=device)
        below.tril_(run.lower - 1)
        bias = below if bias is None else bias.add_(below)
    return bias


def _combine(bias: Tensor | None, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A residual mask, bool or additive, on top of a band, as one additive mask."""
    if mask.dtype != torch.bool:
        mask = mask.to(dtype)
        return mask if bias is None else mask + bias
    if bias is None:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, NEVER)
    return torch.where(mask, bias, NEVER)


def _amx() -> bool:
    return bool(torch.cpu._is_amx_tile_supported())
