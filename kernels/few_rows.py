"""bfloat16 linears of up to 8 rows on a CPU: the weights are read once, as they lie.

A library's matmul first copies weights into blocks of its own, which for so few rows takes longer
than the products. Here every pair of weight rows is multiplied with all rows of x while it passes
through the cache, where x stays: more rows than eight, or longer ones, are faster with the blocks.
Needs AVX512-BF16 and the C++ compiler that Inductor needs; elsewhere, and for
what the kernel does not take, the op is torch's linear.
"""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

log = logging.getLogger(__name__)

DTYPE = torch.bfloat16
MOST_ROWS = 8
# Bytes of x, half of a usual first-level cache.
LARGEST_INPUT = 16 << 10

SOURCE = r"""
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"), noinline))

// R rows of x [R, K] with L rows of w [L, K]; y [R, N]: one sum for each pair.
template <int R, int L>
AVX512 void block(
    const uint16_t* x, const uint16_t* w, const uint16_t* bias, uint16_t* y, int64_t N, int64_t K) {
  __m512 sums[R][L];
  for (int r = 0; r < R; ++r)
    for (int l = 0; l < L; ++l) sums[r][l] = _mm512_setzero_ps();
  for (int64_t k = 0; k < K; k += 32) {
    const __mmask32 inside = K - k >= 32 ? 0xffffffffu : (1u << (K - k)) - 1;
    __m512bh weights[L];
    for (int l = 0; l < L; ++l) {
      weights[l] = (__m512bh)_mm512_maskz_loadu_epi16(inside, w + l * K + k);
      // The same place in the rows that come next.
      _mm_prefetch((const char*)(w + (l + L) * K + k), _MM_HINT_T0);
    }
    for (int r = 0; r < R; ++r) {
      const __m512bh row = (__m512bh)_mm512_maskz_loadu_epi16(inside, x + r * K + k);
      for (int l = 0; l < L; ++l) sums[r][l] = _mm512_dpbf16_ps(sums[r][l], weights[l], row);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int l = 0; l < L; ++l) {
      float sum = _mm512_reduce_add_ps(sums[r][l]);
      if (bias) {
        const uint32_t wide = uint32_t(bias[l]) << 16;
        float b;
        std::memcpy(&b, &wide, 4);
        sum += b;
      }
      uint32_t bits;
      std::memcpy(&bits, &sum, 4);
      // To nearest even; a NaN stays one.
      bits = sum == sum ? bits + 0x7fff + ((bits >> 16) & 1) : bits | 0x400000;
      y[r * N + l] = uint16_t(bits >> 16);
    }
}

template <int R>
void rows(
    const uint16_t* x, const uint16_t* w, const uint16_t* bias, uint16_t* y, int64_t N, int64_t K,
    int64_t n) {
  if (n + 1 < N)
    block<R, 2>(x, w + n * K, bias ? bias + n : nullptr, y + n, N, K);
  else
    block<R, 1>(x, w + n * K, bias ? bias + n : nullptr, y + n, N, K);
}

using Rows = void (*)(
    const uint16_t*, const uint16_t*, const uint16_t*, uint16_t*, int64_t, int64_t, int64_t);
static const Rows of[] = {
    nullptr, rows<1>, rows<2>, rows<3>, rows<4>, rows<5>, rows<6>, rows<7>, rows<8>};

extern "C" int usable() {
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512bf16");
}

extern "C" void few_rows_linear(
    const uint16_t* x, const uint16_t* w, const uint16_t* bias, uint16_t* y, int64_t M, int64_t N,
    int64_t K) {
#pragma omp parallel for schedule(static)
  for (int64_t n = 0; n < N; n += 2) of[M](x, w, bias, y, N, K, n);
}
#else
extern "C" int usable() { return 0; }
#endif
"""


@lru_cache
def library() -> Any:
    """The compiled kernel; None where it cannot be had, said once in the log."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return None
    # All that is used of Inductor here: its way to the C++ compiler, and its cache.
    from torch._inductor.codecache import CppCodeCache

    try:
        found = CppCodeCache.load(SOURCE)
        if not found.usable():
            return None
        found.few_rows_linear.argtypes = 4 * [ctypes.c_void_p] + 3 * [ctypes.c_int64]
        return found
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        log.warning("linears of few rows stay torch's: %s: %s", type(error).__name__, first)
        return None


def takes(x: Any, weight: Any) -> bool:
    """Whether the kernel is for such tensors; sizes must be known."""
    return (
        x.dtype == weight.dtype == DTYPE
        and x.device.type == weight.device.type == "cpu"
        and 0 < x.shape[:-1].numel() <= MOST_ROWS
        and x.numel() * x.element_size() <= LARGEST_INPUT
        and weight.dim() == 2
        and weight.shape[1] == x.shape[-1] > 0
        and weight.is_contiguous()
    )


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K], weight [N, K], bias [N] -> [..., N]; sums in fp32, rounded once."""
    own = library() if takes(x, weight) else None
    if own is None or (bias is not None and bias.dtype != x.dtype):
        return F.linear(x, weight, bias)
    x = x.contiguous()
    bias = None if bias is None else bias.contiguous()
    N, K = weight.shape
    out = x.new_empty((*x.shape[:-1], N))
    addresses = [None if t is None else t.data_ptr() for t in (x, weight, bias, out)]
    own.few_rows_linear(*addresses, x.shape[:-1].numel(), N, K)
    return out
