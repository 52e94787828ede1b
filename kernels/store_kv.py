"""Write new key and value rows into their pages, by slot. Oracle: ``reference.store_kv``.

Letters: N new rows, H key heads, D head dim of k, Dv head dim of v.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvtailor.kernels.checks import check_store_kv
from kvtailor.kernels.launch import next_power_of_two, unit_last

# Elements one program moves at a time.
TILE = 4096


@triton.jit
def _store_rows(
    src_ptr,
    page_ptr,
    block,
    offset,
    row,
    head,
    stride_n,
    stride_h,
    stride_block,
    stride_slot,
    stride_page_h,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    d = tl.arange(0, BLOCK_D)
    ok = (head[:, None] < HEADS) & (d[None, :] < DIM)
    head64 = head.to(tl.int64)
    src = src_ptr + row * stride_n + head64 * stride_h
    dst = page_ptr + block * stride_block + offset * stride_slot + head64 * stride_page_h
    rows = tl.load(src[:, None] + d[None, :], mask=ok)
    tl.store(dst[:, None] + d[None, :], rows.to(page_ptr.dtype.element_ty), mask=ok)


@triton.jit
def store_kv_kernel(
    k_ptr,
    v_ptr,
    k_page_ptr,
    v_page_ptr,
    slot_ptr,
    num_slots,
    stride_kn,
    stride_kh,
    stride_vn,
    stride_vh,
    stride_kpb,
    stride_kps,
    stride_kph,
    stride_vpb,
    stride_vps,
    stride_vph,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    # A program: one row, BLOCK_H heads. All offsets are int64, pools outgrow int32 (T01).
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    _store_rows(
        k_ptr, k_page_ptr, block, offset, row, head,
        stride_kn, stride_kh, stride_kpb, stride_kps, stride_kph, HEADS, D, BLOCK_D,
    )  # fmt: skip
    _store_rows(
        v_ptr, v_page_ptr, block, offset, row, head,
        stride_vn, stride_vh, stride_vpb, stride_vps, stride_vph, HEADS, DV, BLOCK_DV,
    )  # fmt: skip


def constants(heads: int, head_dim: int, value_dim: int) -> dict[str, int]:
    """The kernel's compile-time arguments, page size aside."""
    block_d, block_dv = next_power_of_two(head_dim), next_power_of_two(value_dim)
    block_h = min(next_power_of_two(heads), max(1, TILE // max(block_d, block_dv)))
    return {
        "HEADS": heads,
        "D": head_dim,
        "DV": value_dim,
        "BLOCK_H": block_h,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
    }


def store_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot_mapping: Tensor) -> None:
    """Launch the kernel; arguments as ``kvtailor::store_kv``.

    k ``[N, H, D]``, v ``[N, H, Dv]``, pages ``[blocks, block_size, H, D or Dv]``,
    slot_mapping ``[N]``. Negative slots, and slots past the pool, write nothing.
    """
    check_store_kv(k, v, k_pages, v_pages, slot_mapping)
    N, H, D = k.shape
    Dv = v.shape[2]
    if N == 0:
        return
    k, v = unit_last(k), unit_last(v)
    blocks, block_size = k_pages.shape[:2]
    consts = constants(H, D, Dv)
    store_kv_kernel[(N, triton.cdiv(H, consts["BLOCK_H"]))](
        k, v, k_pages, v_pages, slot_mapping.contiguous(), blocks * block_size,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *k_pages.stride()[:3], *v_pages.stride()[:3],
        BLOCK_SIZE=block_size, **consts,
        num_warps=4,
    )  # fmt: skip
