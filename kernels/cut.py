"""How queries that see a contiguous range of keys each are cut into blocks that run as one call.

Letters: B batch, T tokens, H heads, D head dim, R queries of a block, S keys of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvtailor.kernels.flags import Flags
from kvtailor.kernels.reference import NEVER


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


def cut(q_len: int, k_len: int, offset: int, flags: Flags, rows: int) -> Iterator[Run]:
    """Runs of at most ``rows`` queries per block that cover each query that sees a key, once.

    offset: position of query 0.
    """
    chunk = flags.chunk
    first, last = offset, offset + q_len
    if flags.causal:
        first = max(first, 0)
    if flags.window is not None:
        last = min(last, k_len + flags.window - 1)
    if chunk is None:
        runs = _merged(_segment(first, last, 0, k_len, flags, rows))
        yield from (run._replace(query=run.query - offset) for run in runs)
        return
    start = first - (first - flags.origin) % chunk
    while start < min(last, k_len):
        low, high = max(start, 0), min(start + chunk, k_len)
        whole = start >= first and start + chunk <= min(last, k_len) and start >= 0
        count = (min(last, k_len) - start) // chunk if whole else 1
        for run in _segment(max(start, first), min(start + chunk, last), low, high, flags, rows):
            step = chunk if count > 1 else 1
            yield run._replace(query=run.query - offset, times=count, step=step)
        start += count * chunk


def _segment(first: int, last: int, low: int, high: int, flags: Flags, rows: int) -> Iterator[Run]:
    """Blocks of the queries at positions [first, last), which see no key outside [low, high).

    Their queries are numbered by position.
    """
    if flags.causal:
        first = max(first, low)
    if flags.window is not None:
        last = min(last, high + flags.window - 1)
    for p in range(first, last, rows):
        end = min(p + rows, last)
        key, _ = flags.interval(p, high, low)
        _, stop = flags.interval(end - 1, high, low)
        lower = 1 - rows if flags.window is None else p - flags.window + 1 - key
        upper = p - key if flags.causal else high - low - 1
        if key < stop:
            yield Run(p, end - p, key, stop - key, lower, upper)


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
    q_len: int, k_len: int, offset: int, flags: Flags, heads: int, threads: int, packs: bool
) -> tuple[Run, ...]:
    """The cheapest ``cut`` into blocks. Short inputs come out as one block, the plain square."""
    sizes = [rows for rows in (32, 64, 128, 256, 512) if rows < q_len]
    plans = [tuple(cut(q_len, k_len, offset, flags, rows)) for rows in (*sizes, max(q_len, 1))]
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
