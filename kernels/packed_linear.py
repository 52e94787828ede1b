"""Several linears over one input, as one matmul or as several: whichever is faster for the rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F


def in_one_matmul(rows: int, flips: Sequence[int]) -> bool:
    """Whether so many rows go through one matmul.

    flips: ascending row counts from which on the other form is taken; one matmul comes first.
    () is always one matmul, (1,) never, (64,) below 64 rows.
    """
    return bisect_right(flips, rows) % 2 == 0


def packed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, widths: Sequence[int], flips: Sequence[int]
) -> list[Tensor]:
    """x [..., K] times packed weight [N, K] -> [..., widths[i]] each, widths summing to N.

    The results have memory of their own, in either form: one buffer for all would be so large
    where there are many rows that its pages cost more than the matmuls save.
    """
    sizes = list(widths)
    if in_one_matmul(x.shape[:-1].numel(), flips):
        return [part.contiguous() for part in F.linear(x, weight, bias).split(sizes, -1)]
    biases = bias.split(sizes) if bias is not None else [None] * len(sizes)
    return [F.linear(x, w, b) for w, b in zip(weight.split(sizes), biases)]
