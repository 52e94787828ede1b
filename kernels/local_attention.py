"""Attention whose queries see a contiguous range of keys, in time linear in the tokens.

Every flag of ``kvtailor::attend`` (causal, window, chunk) leaves each query one range of keys
``[lo, hi)``. Queries are cut into blocks, each block reads only the keys its queries can reach,
and equal blocks at equal distances become one batched call on strided views: nothing is copied,
and no tensor, masks included, has more than tokens x (range + block) elements.

Letters: B batch, T tokens, H heads, D head dim of q and k, Dv head dim of v, W window, C chunk,
N blocks in one call, R queries of a block, S keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvtailor.kernels.blocks import Partial, attend_block, with_sinks
from kvtailor.kernels.checks import check_empty_row, check_extents
from kvtailor.kernels.cut import Run, plan
from kvtailor.kernels.flags import Flags
from kvtailor.kernels.reference import NEVER, accumulator

X = TypeVar("X")

# Elements of the largest mask or score tensor made at once; at least one block is always made.
SLAB = 1 << 22


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
    window or chunk below 1, an unknown empty_row, and head counts that do not divide.
    """
    check_extents(window, chunk)
    check_empty_row(empty_row)
    B, Hq, q_len, _ = q.shape
    Hkv, k_len = v.shape[1:3]
    if Hq % Hkv:
        raise ValueError(f"query heads must be a multiple of key heads, got {Hq} and {Hkv}")
    call = Call(q, k, v, sinks, scale, softcap, empty_row)
    if not q.numel() or not v.shape[-1]:
        return call.rows_of_out(None)
    ranges, mask = _key_ranges(mask, k_len)
    offsets, positions = _offsets(q_positions, q_offset)
    origins, row_origins = _origins(chunk_origin if chunk is not None else None)
    if positions is None and row_origins is None:
        rows = [
            (keys, offset, Flags(causal, window, chunk, origin))
            for keys, offset, origin in zip(_each(ranges, B), _each(offsets, B), _each(origins, B))
        ]
        if rows.count(rows[0]) == B:
            rows = rows[:1]
        for b, row in enumerate(rows):
            call.aligned(None if len(rows) == 1 else slice(b, b + 1), *row, mask)
        return call.rows_of_out(None)
    if positions is None:
        start = torch.tensor(offsets, device=q.device)[:, None]
        positions = start + torch.arange(q_len, device=q.device)
    if row_origins is None:
        row_origins = torch.tensor(origins, device=q.device)[:, None]
    bounds = torch.tensor(ranges, device=q.device)
    seen = Flags(causal, window, chunk, row_origins).interval(
        positions, bounds[:, 1:], bounds[:, :1]
    )
    low, high, _ = torch.broadcast_tensors(*seen, positions)
    for b in range(len(low)):
        call.scattered(None if len(low) == 1 else slice(b, b + 1), low[b], high[b], mask)
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


class Call:
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
        lse: bool = False,
    ):
        self.flash = q.device.type == "cpu" and softcap is None
        self.dtype, self.Dv, self.D = v.dtype, v.shape[-1], max(q.shape[-1], v.shape[-1])
        common = q.dtype
        if not q.dtype == k.dtype == v.dtype:
            common = torch.promote_types(q.dtype, torch.promote_types(k.dtype, v.dtype))
        self.acc = accumulator(common)
        self.half = common in (torch.float16, torch.bfloat16)
        self.compute = self.acc if not self.flash or _emulated(common) else common
        self.q, self.k, self.v = self.ready(q), k, v
        self.sinks = None if sinks is None else sinks.to(self.acc)[:, None]
        self.scale, self.softcap = scale, softcap
        self.uniform = empty_row == "uniform"
        self.out: Tensor | None = None
        # The log-sum-exp ``[B, Hq, Tq]`` of aligned rows, if asked for.
        self.lse: Tensor | None = None
        if lse:
            self.lse = torch.full(q.shape[:3], NEVER, dtype=self.acc, device=q.device)

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
        self,
        rows: slice | None,
        keys: tuple[int, int],
        offset: int,
        flags: Flags,
        mask: Tensor | None,
    ) -> None:
        """Queries at positions from offset on, in batch rows (None: all) that share all these."""
        q, k, v = self.q, self.k, self.v
        if rows is not None:
            q, k, v = q[rows], k[rows], v[rows]
        B, Hq, q_len, _ = q.shape
        start, stop = keys
        offset, flags = offset - start, flags._replace(origin=flags.origin - start)
        packs = not self.flash or (self.half and _amx())
        runs = plan(q_len, stop - start, offset, flags, B * Hq, torch.get_num_threads(), packs)
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
            out.index_copy_(2, index, part.out.to(out.dtype))

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
        done = self._attend(
            run.blocks(q, run.query, run.rows),
            run.blocks(k, run.key, run.keys),
            run.blocks(v, run.key, run.keys),
            bias,
            fill,
            causal,
        )
        if run.rows == q_len and rows is None and _as_out(done.out, self.dtype):
            self.out, self.lse = done.out, done.lse
            return
        self._write(run, self.rows_of_out(rows), done.out)
        if self.lse is not None:
            lse = self.lse if rows is None else self.lse[rows]
            self._write(run, lse[..., None], done.lse[..., None])

    def _write(self, run: Run, to: Tensor, result: Tensor) -> None:
        """Blocks ``[B * times, H, R, D]`` into to ``[B, H, Tq, D]``."""
        B = to.shape[0]
        if run.times > 1 and B > 1:
            result = result.unflatten(0, (B, run.times)).transpose(1, 2)
            to = to[:, :, run.query : run.query + run.extent(run.rows)]
            to.unfold(2, run.rows, run.step).transpose(-1, -2).copy_(result)
        else:
            run.blocks(to, run.query, run.rows).copy_(result)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        fill: Tensor | None,
        causal: bool = False,
    ) -> Partial:
        """``attend_block``; rows without a key by bias get fill ``[N, Hq, 1, Dv]``, or 0."""
        part = attend_block(
            q, k, v, bias, scale=self.scale, softcap=self.softcap, causal=causal,
            empty=fill is not None,
        )  # fmt: skip
        dead = part.lse == NEVER
        if self.Dv < v.shape[-1]:
            part = part._replace(out=part.out[..., : self.Dv])
        if self.sinks is not None:
            part = with_sinks(part, self.sinks)
        if fill is not None and bias is not None:
            part = part._replace(out=torch.where(dead[..., None], fill, part.out))
        return part


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
