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
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvtailor.kernels.reference import EMPTY_ROWS

X = TypeVar("X")

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
    def hides_later(self) -> bool:
        return self.upper < self.keys - 1

    @property
    def hides_earlier(self) -> bool:
        return self.lower > 1 - self.rows

    @property
    def triangle(self) -> bool:
        """Exactly what SDPA's causal flag means: query i sees its block's keys up to i."""
        return self.upper == 0 and self.hides_later and not self.hides_earlier

    def extent(self, size: int) -> int:
        """Tokens from the start of the first block to the end of the last, ``size`` each."""
        return (self.times - 1) * self.step + size

    def folds(self, x: Tensor) -> bool:
        """Whether x's batch rows follow each other as blocks do."""
        return x.stride(0) == self.times * self.step * x.stride(2)

    def blocks(self, x: Tensor, start: int, size: int) -> Tensor:
        """``[B, H, T, D]`` as ``[B * times, H, size, D]``: a view, in which blocks may overlap."""
        if self.times == 1:
            return x if size == x.shape[2] else x.narrow(2, start, size)
        B, H, _, D = x.shape
        stride = (self.step * x.stride(2), *x.stride()[1:])
        offset = x.storage_offset() + start * x.stride(2)
        return x.as_strided((B * self.times, H, size, D), stride, offset)

    def band(self, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """0 where a block's queries see its keys, else -inf: ``[R, S]``; None when all do."""
        bias = None
        if self.hides_later:
            bias = torch.full((self.rows, self.keys), NEVER, dtype=dtype, device=device)
            bias.triu_(self.upper + 1)
        if self.hides_earlier:
            below = torch.full((self.rows, self.keys), NEVER, dtype=dtype, device=device)
            below.tril_(self.lower - 1)
            bias = below if bias is None else bias.add_(below)
        return bias


class Flags(NamedTuple):
    """Which keys a query sees, in ints: position of query 0, causal, window, chunk, its origin."""

    offset: int
    causal: bool
    window: int | None
    chunk: int | None
    origin: int


def cut(q_len: int, k_len: int, flags: Flags, rows: int) -> Iterator[Run]:
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
    while start < min(last, k_len):
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
    plans = [tuple(cut(q_len, k_len, flags, rows)) for rows in (*sizes, max(q_len, 1))]
    return min(plans, key=lambda runs: sum(_cost(run, heads, threads, packs) for run in runs))


def _cost(run: Run, heads: int, threads: int, packs: bool) -> float:
    """Time of one call in units of one query-key pair (3.4 ns on a Zen 4 core, D 64).

    torch's CPU flash kernel works on 32, 64 or 256 queries and 512 keys at a time, by the call's
    query length; each query costs about 30 pairs more, each key of each block 3, and a call
    100,000 in Python, mask, copy and its parallel region. Where every block's keys are repacked
    first (half precision with AMX, plain operations), each of them costs about 200.
    """
    tile = 32 if run.rows < 192 else 64 if run.rows < 768 else 256
    keys = min(run.keys, run.keys / 2 + 256) if run.triangle else run.keys
    tasks = run.times * heads * math.ceil(run.rows / tile)
    pairs = min(tile, run.rows) * (keys * (1.1 if tile == 32 else 1.0) + 30)
    reading = (200 if packs else 3) * run.keys * run.times * heads / threads
    return 1e5 + math.ceil(tasks / threads) * pairs + reading


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
    Hkv, k_len = v.shape[1:3]
    if Hq % Hkv:
        raise ValueError(f"query heads must be a multiple of key heads, got {Hq} and {Hkv}")
    call = _Call(q, k, v, sinks, scale, softcap, empty_row)
    if not q.numel() or not v.shape[-1]:
        return call.rows_of_out(None)
    ranges, mask = _key_ranges(mask, k_len)
    offsets, positions = _offsets(q_positions, q_offset)
    origins, row_origins = _origins(chunk_origin if chunk is not None else None)
    if positions is None and row_origins is None:
        rows = [
            (keys, Flags(offset, causal, window, chunk, origin))
            for keys, offset, origin in zip(_each(ranges, B), _each(offsets, B), _each(origins, B))
        ]
        if rows.count(rows[0]) == B:
            call.aligned(None, *rows[0], mask)
        else:
            for b, (keys, flags) in enumerate(rows):
                call.aligned(slice(b, b + 1), keys, flags, mask)
        return call.rows_of_out(None)
    if positions is None:
        start = torch.tensor(offsets, device=q.device)[:, None]
        positions = start + torch.arange(q_len, device=q.device)
    if row_origins is None:
        row_origins = torch.tensor(origins, device=q.device)[:, None]
    bounds = torch.tensor(ranges, device=q.device)
    low, high = _intervals(positions, row_origins, bounds, causal, window, chunk)
    if low.shape[0] == 1:
        call.scattered(None, low[0], high[0], mask)
    else:
        for b in range(B):
            call.scattered(slice(b, b + 1), low[b], high[b], mask)
    return call.rows_of_out(None)


def _each(values: list[X], B: int) -> list[X]:
    """One value per batch row, of a list that may hold one for all."""
    return values * B if len(values) == 1 else values


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
    if keys.all():
        return [(0, k_len)], None
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
        self.flash = q.device.type == "cpu" and softcap is None
        self.dtype, self.Dv, self.D = v.dtype, v.shape[-1], max(q.shape[-1], v.shape[-1])
        common = q.dtype
        if not q.dtype == k.dtype == v.dtype:
            common = torch.promote_types(q.dtype, torch.promote_types(k.dtype, v.dtype))
        self.acc = torch.float64 if common == torch.float64 else torch.float32
        self.half = common in (torch.float16, torch.bfloat16)
        self.compute = self.acc if not self.flash or _emulated(common) else common
        self.q, self.k, self.v = self.ready(q), k, v
        self.sinks = None if sinks is None else sinks.to(self.acc)[:, None]
        self.scale, self.softcap = scale, softcap
        self.uniform = empty_row == "uniform"
        self.out: Tensor | None = None

    def ready(self, x: Tensor) -> Tensor:
        """x as the kernel wants it: one dtype, one head dim, and that contiguous."""
        if x.dtype != self.compute:
            x = x.to(self.compute)
        if self.flash and x.shape[-1] < self.D:
            # Zeros change neither scores nor values.
            x = pad(x, (0, self.D - x.shape[-1]))
        return x if x.stride(-1) == 1 else x.contiguous()

    def rows_of_out(self, rows: slice | None) -> Tensor:
        """The result of these batch rows, to be written: ``[B, Hq, Tq, Dv]``."""
        if self.out is None:
            B, Hq, q_len, _ = self.q.shape
            out = self.q.new_empty((B, q_len, Hq, self.Dv), dtype=self.dtype)
            self.out = out.transpose(1, 2)
        return self.out if rows is None else self.out[rows]

    def fill(self, rows: slice | None) -> Tensor:
        """What a query that sees no key gets: ``[B, Hq, 1, Dv]``."""
        Hq, Hkv, k_len = self.q.shape[1], *self.k.shape[1:3]
        v = self.v if rows is None else self.v[rows]
        if not self.uniform or not k_len:
            return v.new_zeros((v.shape[0], Hq, 1, self.Dv), dtype=self.acc)
        mean = v.mean(dim=2, keepdim=True, dtype=self.acc).repeat_interleave(Hq // Hkv, dim=1)
        if self.sinks is not None:
            # A sink takes all the weight of a row that has nothing else.
            mean = mean.masked_fill(self.sinks[..., None] > NEVER, 0.0)
        return mean

    def aligned(
        self, rows: slice | None, keys: tuple[int, int], flags: Flags, mask: Tensor | None
    ) -> None:
        """Queries at consecutive positions, in batch rows (None: all) that share keys and flags."""
        q, k, v = self.q, self.k, self.v
        if rows is not None:
            q, k, v = q[rows], k[rows], v[rows]
        B, Hq, q_len, _ = q.shape
        start, stop = keys
        if start:
            flags = flags._replace(offset=flags.offset - start, origin=flags.origin - start)
        packs = not self.flash or (self.half and _amx())
        runs = plan(q_len, stop - start, flags, B * Hq, torch.get_num_threads(), packs)
        if sum(run.rows * run.times for run in runs) < q_len:
            self.rows_of_out(rows).copy_(self.fill(rows))
        if not runs:
            return
        first = min(run.key for run in runs)
        last = max(run.key + run.extent(run.keys) for run in runs)
        if first or stop - start != k.shape[2] or last != stop - start:
            k, v = (x[:, :, start + first : start + last] for x in (k, v))
        reads = sum(run.keys * run.times for run in runs)
        # In half precision the kernel is slow on keys that lie apart: worth a copy if read often.
        apart = self.compute.itemsize == 2 and reads >= 4 * (last - first)
        k, v = (self.ready(x.contiguous() if apart else x) for x in (k, v))
        fill = None
        if mask is not None:
            if rows is not None and mask.shape[0] > 1:
                mask = mask[rows]
            mask = mask.expand(-1, -1, q_len, -1)[..., start + first : start + last]
            fill = self.fill(rows) if self.uniform else None
        for run in runs:
            for slab in self._slabs(run._replace(key=run.key - first), B, mask):
                self._run(slab, rows, q, k, v, mask, fill)

    def scattered(self, rows: slice | None, low: Tensor, high: Tensor, mask: Tensor | None) -> None:
        """Queries anywhere: each sees keys [low, high), the same in every batch row of rows."""
        q, k, v = (x if rows is None else x[rows] for x in (self.q, self.k, self.v))
        out, fill = self.rows_of_out(rows), self.fill(rows)
        out.copy_(fill)
        if mask is not None and rows is not None and mask.shape[0] > 1:
            mask = mask[rows]
        seeing = (low < high).nonzero()[:, 0]
        order = seeing[low[seeing].argsort(stable=True)]
        low, high = low[order, None], high[order, None]
        for start, stop, key, end in _neighbours(low[:, 0].tolist(), high[:, 0].tolist()):
            index = order[start:stop]
            keys = torch.arange(key, end, device=q.device)
            hidden = (keys < low[start:stop]) | (keys >= high[start:stop])
            bias = torch.zeros_like(hidden, dtype=self.acc).masked_fill_(hidden, NEVER)
            if mask is not None:
                m = mask.index_select(2, index) if mask.shape[2] > 1 else mask
                bias = _combine(bias, m[..., key:end], self.acc)
            part = self._attend(
                q.index_select(2, index),
                self.ready(k[:, :, key:end]),
                self.ready(v[:, :, key:end]),
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
            per_block = B * mask.shape[1] * run.rows * run.keys
        most = max(1, SLAB // per_block) if per_block else run.times
        if most >= run.times:
            yield run
            return
        for start in range(0, run.times, most):
            yield run._replace(
                query=run.query + start * run.step,
                key=run.key + start * run.step,
                times=min(most, run.times - start),
            )

    def _run(
        self,
        run: Run,
        rows: slice | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        fill: Tensor | None,
    ) -> None:
        """One run over batch rows; mask ``[B|1, H|1, Tq, Tk]`` with the keys of k."""
        B, q_len, times = q.shape[0], q.shape[2], run.times
        if B > 1 and times > 1 and not all(run.folds(x) for x in (q, k, v)):
            for b in range(B):
                one = slice(b, b + 1)
                part = slice(rows.start + b, rows.start + b + 1) if rows is not None else one
                row = mask[one] if mask is not None and mask.shape[0] > 1 else mask
                self._run(
                    run, part, q[one], k[one], v[one], row, None if fill is None else fill[one]
                )
            return
        causal = run.triangle and mask is None and self.flash
        bias = None if causal else run.band(self.acc, q.device)
        if mask is not None:
            m = mask[:, :, run.query :, run.key :]
            m = m[:, :, : run.extent(run.rows), : run.extent(run.keys)]
            # Equal blocks lie on a diagonal of the mask.
            m = m.unfold(2, run.rows, run.step).unfold(3, run.keys, run.step)
            m = m.diagonal(dim1=2, dim2=3).permute(0, 4, 1, 2, 3)
            bias = _combine(bias, m, self.acc).expand(B, -1, -1, -1, -1).flatten(0, 1)
            if fill is not None and times > 1:
                fill = fill.repeat_interleave(times, dim=0)
        result = self._attend(
            run.blocks(q, run.query, run.rows),
            run.blocks(k, run.key, run.keys),
            run.blocks(v, run.key, run.keys),
            bias,
            fill,
            causal,
        )
        if run.rows == q_len and rows is None and _as_out(result, self.dtype):
            self.out = result
            return
        out = self.rows_of_out(rows)
        if times > 1 and B > 1:
            result = result.unflatten(0, (B, times)).transpose(1, 2)
            out = out[:, :, run.query : run.query + run.extent(run.rows)]
            out.unfold(2, run.rows, run.step).transpose(-1, -2).copy_(result)
        else:
            run.blocks(out, run.query, run.rows).copy_(result)

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
        result = self._flash(q, k, v, bias, causal) if self.flash else self._math(q, k, v, bias)
        if fill is not None and bias is not None:
            dead = (bias == NEVER).all(dim=-1, keepdim=True)
            result = torch.where(dead, fill, result)
        return result

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
        N, Hq, R, _ = q.shape
        Hkv = k.shape[1]
        rows = R
        if R == 1 and Hq > Hkv and N * Hkv >= torch.get_num_threads():
            # One row per head: the heads of a group become rows, so that keys are read once.
            rows = Hq // Hkv
            q = q.reshape(N, Hkv, rows, -1)
            if bias is not None and bias.dim() == 4 and bias.shape[1] > 1:
                bias = bias.reshape(-1, Hkv, rows, bias.shape[-1])
        elif R == 1 and self.half:
            # The kernel is several times slower on one row in half precision than on two.
            q = q.expand(-1, -1, 2, -1)
        result, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
            q, k, v, 0.0, causal, attn_mask=bias, scale=self.scale
        )
        if q.shape[2] > R:
            result = result[:, :, :rows].reshape(N, Hq, R, -1)
            lse = lse[:, :, :rows].reshape(N, Hq, R)
        if self.Dv < self.D:
            result = result[..., : self.Dv]
        if self.sinks is not None:
            result = result * torch.sigmoid(lse - self.sinks)[..., None]
        return result

    def _math(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """The same in plain operations: softcap, and devices without the CPU kernel."""
        N, Hq, R, _ = q.shape
        Hkv, S = k.shape[1:3]
        q = q.reshape(N, Hkv, Hq // Hkv * R, -1)
        scores = torch.matmul(q, k.transpose(-1, -2)).mul_(self.scale)
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
        values = torch.matmul(weights.view(N, Hkv, -1, S), v).view(N, Hq, R, -1)
        return values / total.masked_fill(total == 0, 1.0)


def _as_out(result: Tensor, dtype: torch.dtype) -> bool:
    """Whether a block's result can be returned as it is."""
    return result.dtype == dtype and result.transpose(1, 2).is_contiguous()


@lru_cache(maxsize=8)
def _emulated(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies dtype so slowly that float32 copies are the faster way."""
    if dtype == torch.float16:
        return not torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _amx() -> bool:
    return bool(torch.cpu._is_amx_tile_supported())


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


def _combine(bias: Tensor | None, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A residual mask, bool or additive, on top of a band, as one additive mask."""
    if mask.dtype != torch.bool:
        mask = mask.to(dtype)
        return mask if bias is None else mask + bias
    if bias is None:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, NEVER)
    return torch.where(mask, bias, NEVER)
