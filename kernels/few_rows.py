"""Linears of up to 8 rows on a CPU, bfloat16 and float32: the weights are read once, as they lie.

A library's matmul first copies weights into blocks of its own, which for so few rows takes longer
than the products. Here every pair of weight rows is multiplied with all rows of x while it passes
through the cache, where x stays: more rows than eight, or longer ones, are faster with the blocks.
Needs AVX512, with BF16 for bfloat16, and the C++ compiler that Inductor needs; elsewhere, and for
what the kernel does not take, the op is torch's linear.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvtailor.kernels.cpp import load_cpp, source

MOST_ROWS = 8
# Bytes of x: of bfloat16, half of a usual first-level cache; torch's linears of so few rows of
# float32 are so slow that it may be more.
LARGEST_INPUT = {torch.bfloat16: 16 << 10, torch.float32: 128 << 10}


@lru_cache
def library() -> Any:
    """The compiled kernel; None where it cannot be had."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return None
    found = load_cpp(source("bfloat16.cpp", "few_rows.cpp"), "linears of few rows stay torch's")
    if found is None or not found.usable():
        return None
    found.few_rows_linear.argtypes = 4 * [ctypes.c_void_p] + 4 * [ctypes.c_int64]
    return found


@lru_cache
def has_kernel(dtype: torch.dtype) -> bool:
    """Whether this machine has one for the dtype."""
    if dtype not in LARGEST_INPUT or library() is None:
        return False
    return bool(library().usable() & dtype.itemsize)


def takes(x: Any, weight: Any) -> bool:
    """Whether the kernel is for such tensors; sizes must be known."""
    return (
        x.dtype == weight.dtype
        and x.dtype in LARGEST_INPUT
        and x.device.type == weight.device.type == "cpu"
        and 0 < x.shape[:-1].numel() <= MOST_ROWS
        and x.numel() * x.element_size() <= LARGEST_INPUT[x.dtype]
        and weight.dim() == 2
        and weight.shape[1] == x.shape[-1] > 0
        and weight.is_contiguous()
        and has_kernel(x.dtype)
    )


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K], weight [N, K], bias [N] -> [..., N]; sums in fp32, rounded once."""
    if not takes(x, weight) or (bias is not None and bias.dtype != x.dtype):
        return F.linear(x, weight, bias)
    x = x.contiguous()
    bias = None if bias is None else bias.contiguous()
    N, K = weight.shape
    out = x.new_empty((*x.shape[:-1], N))
    addresses = [None if t is None else t.data_ptr() for t in (x, weight, bias, out)]
    library().few_rows_linear(*addresses, x.shape[:-1].numel(), N, K, x.element_size())
    return out
