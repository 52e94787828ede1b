"""Attention of single rows over pages on a CPU, bfloat16 and float32: what a decode step does.

Keys and values are read once, where they lie, by the block table; all query heads of a key head
are computed beside each other. Longer sequences are cut into parts, which threads take as they
come, and merged by their log-sum-exp. Everything is summed in fp32. Needs the C++ compiler that
Inductor needs; vectors are the compiler's own, so any processor will do.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvtailor.kernels.cpp import load_cpp, source

DTYPES = (torch.float32, torch.bfloat16)
# Numbers in a vector; head dims must be multiples.
LANES = 16


@lru_cache
def library() -> Any:
    """The compiled kernel; None where it cannot be had."""
    # Products and sums in one instruction; vectors passed in registers of any size.
    text, flags = source("bfloat16.cpp", "paged_rows.cpp"), ("ffp-contract=fast", "Wno-psabi")
    found = load_cpp(text, "paged decode stays torch's", *flags)
    if found is not None:
        sizes = 8 * [ctypes.c_void_p] + 2 * [ctypes.c_double] + [ctypes.c_int64]
        found.paged_rows.argtypes = sizes
    return found


def takes(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> bool:
    """Whether the kernel is for such tensors."""
    return (
        q.device.type == "cpu"
        and q.dtype == k_pages.dtype == v_pages.dtype
        and q.dtype in DTYPES
        and q.shape[2] % LANES == v_pages.shape[3] % LANES == 0
        and library() is not None
    )


def attend_rows(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    members: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    softcap: float | None,
) -> None:
    """Writes out ``[N, Hq, Dv]`` and lse ``[N, Hq]`` (float32) of some rows of q ``[N, Hq, D]``.

    members: int64 ``[M, 4]``, of each row its sequence, which it is, and the keys ``low <= key <
    high`` it sees, at least one. Raises IndexError for a block that the pages don't have.
    """
    q, members = q.contiguous(), members.contiguous()
    sizes = (ctypes.c_int64 * 15)(
        *(len(members), q.shape[1], k_pages.shape[2], q.shape[2], v_pages.shape[3]),
        *(k_pages.shape[1], k_pages.shape[0], block_table.shape[1], block_table.stride(0)),
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
    )
    tensors = (q, k_pages, v_pages, block_table, members, out, lse)
    addresses = [x.data_ptr() for x in tensors]
    if not library().paged_rows(*addresses, sizes, scale, softcap or 0.0, q.element_size()):
        raise IndexError(f"blocks must be 0 to {k_pages.shape[0] - 1}, got others")
