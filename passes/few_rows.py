"""Which linears have a form of their own for few rows: what packing and lower_few_rows agree on."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvtailor.kernels import few_rows

# Every row is one more product per weight.
MOST_WRITTEN_OUT = 4
WRITTEN_OUT = (torch.float32, torch.bfloat16, torch.float16)
# Bytes of several rows in fp32, which pass through the first-level cache once per output. Matmuls
# of fp32 itself are so slow here that it does not matter.
LARGEST_WIDENED = 12 << 10
# Outputs, below which there is too little for two cores to share.
LEAST_OUTPUTS = 64


class FewRows(NamedTuple):
    """What becomes of a linear; where it nearly was one of few rows, why it stays."""

    form: Literal["written out", "own kernel"] | None
    why: str | None = None


def few_rows_form(x: Tensor, w: Tensor) -> FewRows:
    """What a linear of x ``[..., K]`` and w ``[N, K]`` will be under Inductor."""
    fixed = all(isinstance(n, int) for n in x.shape)
    rows = math.prod(x.shape[:-1]) if fixed else None
    few = rows is None or 0 < rows <= few_rows.MOST_ROWS
    if w.device.type != "cpu" or w.dim() != 2 or not few:
        return FewRows(None)
    why = None
    if x.dtype != w.dtype:
        why = f"x is {x.dtype} and the weight {w.dtype}"
    elif not all(isinstance(n, int) for n in w.shape) or not w.is_contiguous():
        why = "the weight has symbolic sizes or is not contiguous"
    elif w.shape[0] < LEAST_OUTPUTS:
        why = f"{w.shape[0]} outputs are too few for threads to share"
    if rows is None:
        # The op sees at call time how many there are.
        return FewRows("own kernel" if why is None and few_rows.has_kernel(x.dtype) else None)
    if why is not None:
        return FewRows(None, why)
    fits = rows == 1 or x.dtype == torch.float32 or 4 * rows * x.shape[-1] <= LARGEST_WIDENED
    if x.dtype in WRITTEN_OUT and rows <= MOST_WRITTEN_OUT and fits:
        return FewRows("written out")
    if few_rows.takes(x, w):
        return FewRows("own kernel")
    if not few_rows.has_kernel(x.dtype):
        return FewRows(None, f"this machine has no kernel for {rows} rows of {x.dtype}")
    return FewRows(None, f"{rows} rows of {x.shape[-1]} {x.dtype} do not stay in the cache")
