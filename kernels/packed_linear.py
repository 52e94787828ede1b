"""Several linears over one input, as one matmul or as several: whichever is faster for the rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
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
) -> Tensor:
    """x [..., K] times packed weight [N, K], widths summing to N -> [..., N]."""
    K = x.shape[-1]
    x_MK = x.reshape(-1, K)
    rows = x_MK.shape[0]
    if in_one_matmul(rows, flips):
        return F.linear(x, weight, bias)
    out_MN = x.new_empty(rows, weight.shape[0])
    biases = bias.split(list(widths)) if bias is not None else [None] * len(widths)
    for out, w, b in zip(out_MN.split(list(widths), 1), weight.split(list(widths)), biases):
        # Each matmul writes its columns in place: a leading dimension, no copy.
        if b is None:
            torch.mm(x_MK, w.t(), out=out)
        else:
            torch.addmm(b, x_MK, w.t(), out=out)
    return out_MN.view(*x.shape[:-1], weight.shape[0])
