"""Attention over pages and over dense keys in Triton: one kernel for prefill and for decode.

A program takes a tile of query rows of one sequence (several tokens times the query heads that
share a key head), works out for each row the interval of keys it may see, and walks the key tiles
that meet the union of those intervals. Tiles outside a window or chunk are never loaded. With few
query rows the keys are split over programs, whose results are then merged.

Oracles: ``reference.paged_attend`` and ``reference.attend``.

Letters: N packed rows, S sequences, B batch, T tokens, H heads, D head dim of q and k, Dv head
dim of v, M packed query rows of a tile, K keys of a tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtailor.kernels import launch as launches
from kvtailor.kernels.checks import check_attend, check_paged_attend
from kvtailor.kernels.launch import Launch

# Residual mask: none, bool, additive.
NO_MASK, BOOL_MASK, BIAS = 0, 1, 2

# The kernel counts keys in int32; windows and chunks at or above this have no effect.
FAR = 1 << 30

# Elements of the splits' results one merging program holds.
MERGE_TILE = 8192

# Sequences looked at together to find a tile's own.
SEARCH = tl.constexpr(256)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    # From exp(-2|x|), which cannot overflow (T04); near 0, where that cancels, its series.
    t = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    big = (1.0 - t) / (1.0 + t)
    x2 = x * x
    small = x * (1.0 + x2 * (-0.33333333 + x2 * (0.13333333 - x2 * 0.05396825)))
    return tl.where(tl.abs(x) < 0.125, small, tl.where(x < 0, -big, big))


@triton.jit
def _find_sequence(start_ptr, num_seqs, tile, BLOCK_Q: tl.constexpr):
    # Sequence s owns the tiles from start[s] // BLOCK_Q + s on: enough for its rows wherever they
    # begin, and found without a host copy of the lengths. The last s with that at most `tile`.
    # One more, without keys, owns the rows past the last sequence. Counting whole blocks of starts
    # waits for memory less often than halving does.
    count = 0
    for base in range(0, num_seqs + 1, SEARCH):
        s = base + tl.arange(0, SEARCH)
        first = tl.load(start_ptr + s, mask=s <= num_seqs, other=0) // BLOCK_Q + s
        count += tl.sum(((first <= tile) & (s <= num_seqs)).to(tl.int32), 0)
    return count - 1


@triton.jit
def _attend_tile(
    acc_MV,
    top_M,
    total_M,
    q_MD,
    tile,
    low_M,
    high_M,
    first,
    last,
    p_M,
    slope_M,
    k_ptr,
    v_ptr,
    table_ptr,
    mask_M_ptr,
    key_mask_ptr,
    row_ok_M,
    mask_len,
    scale,
    softcap,
    stride_ks,
    stride_kt,
    stride_vs,
    stride_vt,
    stride_mk,
    stride_km,
    PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SLOPES: tl.constexpr,
    MASK: tl.constexpr,
    KEY_MASK: tl.constexpr,
    GAPS: tl.constexpr,
    EDGE: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # One step of the online softmax. EDGE: some row may not see some key of this tile.
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    key_K = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    ok_K = (key_K >= first) & (key_K < last)
    if KEY_MASK:
        ok_K = ok_K & (tl.load(key_mask_ptr + key_K * stride_km, mask=ok_K, other=0) != 0)

    # Where the keys lie: int64, since pools and caches outgrow int32 (T01).
    if PAGE == 0:
        k_row_K = key_K.to(tl.int64) * stride_kt
        v_row_K = key_K.to(tl.int64) * stride_vt
    elif PAGE % BLOCK_K == 0:
        # The tile lies in one page.
        page = tl.load(table_ptr + tile * BLOCK_K // PAGE).to(tl.int64)
        slot_K = (key_K % PAGE).to(tl.int64)
        k_row_K = page * stride_ks + slot_K * stride_kt
        v_row_K = page * stride_vs + slot_K * stride_vt
    else:
        page_K = tl.load(table_ptr + key_K // PAGE, mask=ok_K, other=0).to(tl.int64)
        slot_K = (key_K % PAGE).to(tl.int64)
        k_row_K = page_K * stride_ks + slot_K * stride_kt
        v_row_K = page_K * stride_vs + slot_K * stride_vt

    k_ptrs = k_ptr + k_row_K[:, None] + d[None, :]
    if EDGE:
        k_KD = tl.load(k_ptrs, mask=ok_K[:, None] & (d[None, :] < D), other=0.0)
    elif D < BLOCK_D:
        k_KD = tl.load(k_ptrs, mask=d[None, :] < D, other=0.0)
    else:
        k_KD = tl.load(k_ptrs)
    if UPCAST:
        k_KD = k_KD.to(tl.float32)

    # Scores: scale, softcap, bias. In powers of two, except with a bias: its finfo.min must not
    # become -inf on the way.
    s_MK = tl.dot(q_MD, tl.trans(k_KD), input_precision=PRECISION)
    if SOFTCAP:
        s_MK = tanh(s_MK * (scale / softcap))
        factor = softcap
    else:
        factor = scale
    if MASK == 2:
        s_MK = s_MK * factor
    else:
        s_MK = s_MK * (factor * LOG2E)
    if SLOPES:
        distance_MK = (key_K[None, :] - p_M[:, None]).to(tl.float32)
        if MASK == 2:
            s_MK += slope_M[:, None] * distance_MK
        else:
            s_MK += (slope_M * LOG2E)[:, None] * distance_MK
    if EDGE:
        seen_MK = (key_K[None, :] >= low_M[:, None]) & (key_K[None, :] < high_M[:, None])
        if KEY_MASK:
            seen_MK = seen_MK & ok_K[None, :]
        if MASK != 0:
            mask_ptrs = mask_M_ptr[:, None] + key_K.to(tl.int64)[None, :] * stride_mk
            there = seen_MK & row_ok_M[:, None] & (key_K < mask_len)[None, :]
            if MASK == 1:
                seen_MK = tl.load(mask_ptrs, mask=there, other=0) != 0
            else:
                s_MK += tl.load(mask_ptrs, mask=there, other=float("-inf")).to(tl.float32)
        s_MK = tl.where(seen_MK, s_MK, float("-inf"))

    new_top_M = tl.maximum(top_M, tl.max(s_MK, 1))
    if EDGE:
        # A row that has seen nothing yet: -inf - -inf would be NaN (T03).
        base_M = tl.where(new_top_M == float("-inf"), 0.0, new_top_M)
    else:
        base_M = new_top_M
    if MASK == 2:
        p_MK = tl.exp2((s_MK - base_M[:, None]) * LOG2E)
        alpha_M = tl.exp2((top_M - base_M) * LOG2E)
    else:
        p_MK = tl.exp2(s_MK - base_M[:, None])
        alpha_M = tl.exp2(top_M - base_M)

    # A weight of zero does not silence a NaN, so values nobody sees are not loaded (T02).
    v_ptrs = v_ptr + v_row_K[:, None] + dv[None, :]
    if EDGE:
        v_ok_K = ok_K
        if GAPS:
            v_ok_K = ok_K & (tl.max((seen_MK & row_ok_M[:, None]).to(tl.int32), 0) > 0)
        v_KV = tl.load(v_ptrs, mask=v_ok_K[:, None] & (dv[None, :] < DV), other=0.0)
    elif DV < BLOCK_DV:
        v_KV = tl.load(v_ptrs, mask=dv[None, :] < DV, other=0.0)
    else:
        v_KV = tl.load(v_ptrs)
    if UPCAST:
        v_KV = v_KV.to(tl.float32)

    total_M = total_M * alpha_M + tl.sum(p_MK, 1)
    acc_MV = acc_MV * alpha_M[:, None]
    acc_MV = tl.dot(p_MK.to(v_KV.dtype), v_KV, acc_MV, input_precision=PRECISION)
    return acc_MV, new_top_M, total_M


@triton.jit(
    do_not_specialize=[
        "q_offset", "window", "chunk", "num_seqs", "num_rows", "q_len", "k_len", "mask_len",
    ]
)  # fmt: skip
def attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    table_ptr,
    start_ptr,
    lens_ptr,
    position_ptr,
    origin_ptr,
    mask_ptr,
    key_mask_ptr,
    sink_ptr,
    slope_ptr,
    scale,
    softcap,
    q_offset,
    window,
    chunk,
    num_seqs,
    num_rows,
    q_len,
    k_len,
    mask_len,
    stride_qs,
    stride_qt,
    stride_qh,
    stride_ks,
    stride_kt,
    stride_kh,
    stride_vs,
    stride_vt,
    stride_vh,
    stride_oz,
    stride_os,
    stride_ot,
    stride_oh,
    stride_total,
    stride_table,
    stride_ps,
    stride_pt,
    stride_cs,
    stride_ct,
    stride_ms,
    stride_mt,
    stride_mh,
    stride_mk,
    stride_kms,
    stride_km,
    PAGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASK: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr,
    INTERIOR: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # PAGE: page size, 0 for dense keys. MASK: NO_MASK, BOOL_MASK or BIAS. SPLITS > 1: out and lse
    # are partial results, float32.
    BLOCK_Q: tl.constexpr = BLOCK_M // PACKED
    KEY_MASK: tl.constexpr = key_mask_ptr is not None
    POSITIONS: tl.constexpr = position_ptr is not None
    SLOPES: tl.constexpr = slope_ptr is not None
    GAPS: tl.constexpr = POSITIONS or MASK == 1

    # The tile's sequence and its first row there. The last tiles of a causal sequence are the
    # longest: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    if PAGE > 0:
        seq = _find_sequence(start_ptr, num_seqs, tile, BLOCK_Q)
        row0 = tl.load(start_ptr + seq)
        real = seq < num_seqs
        q_len = tl.load(start_ptr + seq + 1, mask=real, other=0)
        q_len = tl.where(real, q_len, num_rows) - row0
        t0 = (tile - (row0 // BLOCK_Q + seq)) * BLOCK_Q
        k_len = tl.load(lens_ptr + seq, mask=real, other=0)
        q_offset = k_len - q_len
    else:
        tiles = tl.cdiv(q_len, BLOCK_Q)
        seq = tile // tiles
        row0 = seq * q_len
        t0 = (tile % tiles) * BLOCK_Q
    if t0 >= q_len:
        return
    seq64 = seq.to(tl.int64)

    # M packs PACKED query heads of one key head for each token.
    m = tl.arange(0, BLOCK_M)
    kv_head = tl.program_id(1) // HEAD_TILES
    of_group_M = (tl.program_id(1) % HEAD_TILES) * PACKED + m % PACKED
    head_M = kv_head * GROUP + of_group_M
    t_M = t0 + m // PACKED
    row_ok_M = (t_M < q_len) & (m // PACKED < BLOCK_Q) & (of_group_M < GROUP)
    if PAGE > 0:
        # Packed rows have no batch stride, and count from the first row of all.
        row_M = (row0 + t_M).to(tl.int64)
        seq_of_row = seq64 * 0
    else:
        row_M = t_M.to(tl.int64)
        seq_of_row = seq64
    head64_M = head_M.to(tl.int64)

    # The keys each row may see: low <= key < high.
    if POSITIONS:
        p_M = tl.load(
            position_ptr + seq_of_row * stride_ps + row_M * stride_pt, mask=row_ok_M, other=0
        ).to(tl.int32)
        if PAGE == 0:
            p_M += q_offset
    else:
        p_M = t_M + q_offset
    low_M = tl.zeros([BLOCK_M], tl.int32)
    high_M = low_M + k_len
    if CAUSAL:
        high_M = tl.minimum(high_M, p_M + 1)
    if WINDOW:
        low_M = tl.maximum(low_M, p_M - window + 1)
    if CHUNK:
        since_M = p_M
        if origin_ptr is not None:
            if PAGE > 0:
                since_M = p_M - tl.load(origin_ptr + seq, mask=real, other=0).to(tl.int32)
            else:
                origin_ptrs = origin_ptr + seq64 * stride_cs + row_M * stride_ct
                since_M = p_M - tl.load(origin_ptrs, mask=row_ok_M, other=0).to(tl.int32)
        # Remainder that is never negative, whichever way the division rounds.
        since_M = since_M % chunk
        since_M = tl.where(since_M < 0, since_M + chunk, since_M)
        low_M = tl.maximum(low_M, p_M - since_M)
        high_M = tl.minimum(high_M, p_M - since_M + chunk)
    sees_M = row_ok_M & (low_M < high_M)
    first = tl.min(tl.where(sees_M, low_M, 2147483647), 0)
    last = tl.max(tl.where(sees_M, high_M, 0), 0)

    # Key tiles of this program: [begin, end), of which [inner0, inner1) need no mask.
    begin = tl.minimum(first, last) // BLOCK_K
    end = tl.cdiv(last, BLOCK_K)
    if SPLITS > 1:
        each = tl.cdiv(end - begin, SPLITS)
        begin = begin + tl.program_id(2) * each
        end = tl.minimum(begin + each, end)
    inner0 = begin
    inner1 = begin
    if INTERIOR:
        most_low = tl.max(tl.where(row_ok_M, low_M, 0), 0)
        least_high = tl.min(tl.where(row_ok_M, high_M, 2147483647), 0)
        inner0 = tl.minimum(tl.maximum(tl.cdiv(most_low, BLOCK_K), begin), end)
        inner1 = tl.maximum(tl.minimum(tl.maximum(least_high, 0) // BLOCK_K, end), inner0)

    # Queries, sinks, slopes.
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_ptrs = q_ptr + seq_of_row * stride_qs + row_M * stride_qt + head64_M * stride_qh
    q_MD = tl.load(
        q_ptrs[:, None] + d[None, :], mask=row_ok_M[:, None] & (d[None, :] < D), other=0.0
    )
    if UPCAST:
        q_MD = q_MD.to(tl.float32)
    acc_MV = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    if sink_ptr is not None:
        # One more logit in the denominator, counted by one split.
        top_M = tl.load(sink_ptr + head_M, mask=row_ok_M, other=float("-inf")).to(tl.float32)
        if SPLITS > 1:
            top_M = tl.where(tl.program_id(2) == 0, top_M, float("-inf"))
        if MASK != 2:
            top_M = top_M * LOG2E
        total_M = tl.where(top_M == float("-inf"), 0.0, 1.0)
    if SLOPES:
        slope_M = tl.load(slope_ptr + head_M, mask=row_ok_M, other=0.0).to(tl.float32)
    else:
        slope_M = top_M

    k_ptr += kv_head.to(tl.int64) * stride_kh
    v_ptr += kv_head.to(tl.int64) * stride_vh
    if PAGE > 0:
        table_ptr += seq64 * stride_table
    else:
        k_ptr += seq64 * stride_ks
        v_ptr += seq64 * stride_vs
    mask_M_ptr = q_ptrs
    if MASK != 0:
        mask_M_ptr = mask_ptr + seq_of_row * stride_ms + row_M * stride_mt + head64_M * stride_mh
    if KEY_MASK:
        key_mask_ptr += seq64 * stride_kms

    if INTERIOR:
        for i in range(inner0, inner1):
            acc_MV, top_M, total_M = _attend_tile(
                acc_MV, top_M, total_M, q_MD, i, low_M, high_M, first, last, p_M, slope_M,
                k_ptr, v_ptr, table_ptr, mask_M_ptr, key_mask_ptr, row_ok_M, mask_len,
                scale, softcap, stride_ks, stride_kt, stride_vs, stride_vt, stride_mk, stride_km,
                PAGE, SOFTCAP, SLOPES, MASK, KEY_MASK, GAPS, False,
                D, DV, BLOCK_K, BLOCK_D, BLOCK_DV, PRECISION, UPCAST,
            )  # fmt: skip
    for i in range(begin, end - (inner1 - inner0)):
        edge = i
        if INTERIOR:
            edge = tl.where(i < inner0, i, i + (inner1 - inner0))
        acc_MV, top_M, total_M = _attend_tile(
            acc_MV, top_M, total_M, q_MD, edge, low_M, high_M, first, last, p_M, slope_M,
            k_ptr, v_ptr, table_ptr, mask_M_ptr, key_mask_ptr, row_ok_M, mask_len,
            scale, softcap, stride_ks, stride_kt, stride_vs, stride_vt, stride_mk, stride_km,
            PAGE, SOFTCAP, SLOPES, MASK, KEY_MASK, GAPS, True,
            D, DV, BLOCK_K, BLOCK_D, BLOCK_DV, PRECISION, UPCAST,
        )  # fmt: skip

    # Rows that saw nothing give 0 and a log-sum-exp of -inf.
    empty_M = total_M == 0.0
    acc_MV = acc_MV / tl.where(empty_M, 1.0, total_M)[:, None]
    split = tl.program_id(2).to(tl.int64)
    out_ptrs = out_ptr + split * stride_oz + seq_of_row * stride_os
    out_ptrs = out_ptrs + row_M * stride_ot + head64_M * stride_oh
    tl.store(
        out_ptrs[:, None] + dv[None, :],
        acc_MV.to(out_ptr.dtype.element_ty),
        mask=row_ok_M[:, None] & (dv[None, :] < DV),
    )
    if lse_ptr is not None:
        if MASK != 2:
            top_M = top_M * LN2
        lse_row_M = split * num_rows + (row0 + t_M).to(tl.int64)
        lse_ptrs = lse_ptr + lse_row_M * HEADS + head_M
        if SPLITS > 1:
            # Apart: next to finfo.min the sum would not show the count of keys.
            tl.store(lse_ptrs, top_M, mask=row_ok_M)
            tl.store(lse_ptrs + stride_total, total_M, mask=row_ok_M)
        else:
            log_M = tl.log2(tl.where(empty_M, 1.0, total_M)) * LN2
            tl.store(lse_ptrs, tl.where(empty_M, float("-inf"), top_M + log_M), mask=row_ok_M)


@triton.jit(do_not_specialize=["num_rows", "q_len"])
def merge_kernel(
    partial_ptr,
    top_ptr,
    total_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    q_len,
    stride_os,
    stride_ot,
    stride_oh,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    # BLOCK_R pairs of row and head: the splits' results, weighted by their share of the softmax's
    # denominator. partial [SPLITS, rows, HEADS, DV], top and total [SPLITS, rows, HEADS].
    pair_R = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    ok_R = pair_R < num_rows * HEADS
    split_Z = tl.arange(0, SPLITS).to(tl.int64)
    at_ZR = split_Z[:, None] * num_rows * HEADS + pair_R[None, :]
    top_ZR = tl.load(top_ptr + at_ZR, mask=ok_R[None, :], other=float("-inf"))
    top_R = tl.max(top_ZR, 0)
    base_R = tl.where(top_R == float("-inf"), 0.0, top_R)
    weight_ZR = tl.load(total_ptr + at_ZR, mask=ok_R[None, :], other=0.0)
    weight_ZR = weight_ZR * tl.exp2((top_ZR - base_R[None, :]) * LOG2E)
    total_R = tl.sum(weight_ZR, 0)
    safe_R = tl.where(total_R == 0.0, 1.0, total_R)
    dv = tl.arange(0, BLOCK_DV)
    ok_RV = ok_R[:, None] & (dv[None, :] < DV)
    partial_ZRV = tl.load(
        partial_ptr + at_ZR[:, :, None] * DV + dv[None, None, :], mask=ok_RV[None, :, :], other=0.0
    )
    out_RV = tl.sum(partial_ZRV * weight_ZR[:, :, None], 0) / safe_R[:, None]
    row_R = pair_R // HEADS
    out_R = (row_R // q_len) * stride_os + (row_R % q_len) * stride_ot + pair_R % HEADS * stride_oh
    out_ptrs = out_ptr + out_R[:, None] + dv[None, :]
    tl.store(out_ptrs, out_RV.to(out_ptr.dtype.element_ty), mask=ok_RV)
    if lse_ptr is not None:
        lse_R = tl.where(total_R == 0.0, float("-inf"), base_R + tl.log2(safe_R) * LN2)
        tl.store(lse_ptr + pair_R, lse_R, mask=ok_R)


# Decided when the kernels above were decorated; the environment may have changed since.
INTERPRETED = not isinstance(attend_kernel, triton.runtime.jit.JITFunction)


class Shape(NamedTuple):
    """What the launch depends on besides the data."""

    seqs: int
    rows: int
    q_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    max_keys: int
    paged: bool


def constants(
    shape: Shape,
    launch: Launch,
    *,
    page: int,
    causal: bool,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    mask: int,
    key_mask: bool,
    splits: int,
    vendor: str,
    upcast: bool,
    interior: bool,
) -> dict[str, Any]:
    """The kernel's compile-time arguments for a launch."""
    group = shape.q_heads // shape.kv_heads
    head_tiles = triton.cdiv(group, launch.block_m)
    return {
        "PAGE": page,
        "CAUSAL": causal,
        "WINDOW": window is not None,
        "CHUNK": chunk is not None,
        "SOFTCAP": softcap is not None,
        "MASK": mask,
        "HEADS": shape.q_heads,
        "GROUP": group,
        "PACKED": triton.cdiv(group, head_tiles),
        "HEAD_TILES": head_tiles,
        "D": shape.head_dim,
        "DV": shape.value_dim,
        "BLOCK_M": launch.block_m,
        "BLOCK_K": launch.block_k,
        "BLOCK_D": launches.padded(shape.head_dim),
        "BLOCK_DV": launches.padded(shape.value_dim),
        "SPLITS": splits,
        # With a mask every tile is an edge.
        "INTERIOR": interior and mask == NO_MASK and not key_mask,
        # float32 on tensor cores, at float32's accuracy; AMD's have it outright.
        "PRECISION": "tf32x3" if vendor == "cuda" else "ieee",
        # The interpreter multiplies the raw bits of bfloat16 (T07).
        "UPCAST": upcast,
    }


def merge_tile(splits: int, value_dim: int) -> tuple[int, int]:
    """Pairs of row and head, and columns, that one program merges."""
    block_dv = launches.padded(value_dim)
    return max(1, MERGE_TILE // (splits * block_dv)), block_dv


def _strides(x: Tensor | None, n: int) -> tuple[int, ...]:
    return (0,) * n if x is None else tuple(x.stride()[:n])


def _unit_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _packed(x: Tensor | None) -> Tensor | None:
    """x for a kernel that counts its elements without a stride; an expanded one has stride 0."""
    return None if x is None else x.contiguous()


def _launch(
    shape: Shape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    *,
    q_strides: tuple[int, ...],
    k_strides: tuple[int, ...],
    v_strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    block_table: Tensor | None = None,
    query_start: Tensor | None = None,
    seq_lens: Tensor | None = None,
    positions: Tensor | None = None,
    position_strides: tuple[int, ...] = (0, 0),
    origin: Tensor | None = None,
    origin_strides: tuple[int, ...] = (0, 0),
    mask: Tensor | None = None,
    mask_strides: tuple[int, ...] = (0, 0, 0, 0),
    key_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    scale: float,
    q_offset: int,
    causal: bool,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    splits: int | None,
    launch: Launch | None,
) -> None:
    """Choose tiles and splits, launch, and merge the splits."""
    vendor = launches.vendor()
    group = shape.q_heads // shape.kv_heads
    kind, chosen = launches.launch_for(
        vendor,
        max(shape.head_dim, shape.value_dim),
        q.element_size(),
        shape.rows // max(shape.seqs, 1),
        group,
        masked=mask is not None,
    )
    launch = launch or chosen
    head_tiles = triton.cdiv(group, launch.block_m)
    block_q = launch.block_m // triton.cdiv(group, head_tiles)
    if shape.paged:
        tiles = shape.rows // block_q + shape.seqs + 1
    else:
        tiles = triton.cdiv(shape.q_len, block_q) * shape.seqs
    programs_y = shape.kv_heads * head_tiles
    if splits is None:
        reach = min(shape.max_keys, window or FAR, chunk or FAR)
        busy = shape.rows * programs_y if kind == "decode" else tiles * programs_y
        splits = 1
        if not INTERPRETED:
            splits = launches.num_splits(busy, reach, launches.processors(q.device.index or 0))

    mask_kind = NO_MASK
    mask_len = 0
    if mask is not None:
        mask_kind = BOOL_MASK if mask.dtype == torch.bool else BIAS
        mask_len = mask.shape[-1]
        if mask_kind == BOOL_MASK:
            mask = mask.view(torch.uint8)
    if key_mask is not None:
        key_mask = key_mask.view(torch.uint8)

    rows = shape.rows
    target, target_lse, target_strides = out, lse, (0, *out_strides)
    if splits > 1:
        heads, dv = shape.q_heads, shape.value_dim
        target = q.new_empty((splits, rows, heads, dv), dtype=torch.float32)
        target_lse = q.new_empty((2, splits, rows, heads), dtype=torch.float32)
        seq_stride = 0 if shape.paged else shape.q_len * heads * dv
        target_strides = (rows * heads * dv, seq_stride, heads * dv, dv)
    attend_kernel[(tiles, programs_y, splits)](
        q, k, v, target, target_lse, block_table, query_start, seq_lens,
        positions, origin, mask, key_mask, _packed(sinks), _packed(slopes),
        scale, 1.0 if softcap is None else softcap, q_offset,
        FAR if window is None else min(window, FAR), FAR if chunk is None else min(chunk, FAR),
        shape.seqs, rows, shape.q_len, shape.max_keys, mask_len,
        *q_strides, *k_strides, *v_strides, *target_strides, splits * rows * shape.q_heads,
        0 if block_table is None else block_table.stride(0),
        *position_strides, *origin_strides, *mask_strides, *_strides(key_mask, 2),
        **constants(
            shape, launch, page=k.shape[1] if shape.paged else 0, causal=causal, window=window,
            chunk=chunk, softcap=softcap, mask=mask_kind, key_mask=key_mask is not None,
            splits=splits, vendor=vendor, upcast=INTERPRETED and q.dtype == torch.bfloat16,
            interior=kind == "prefill",
        ),
        num_warps=launch.warps,
        num_stages=launch.stages,
    )  # fmt: skip
    if splits > 1:
        assert target_lse is not None
        block_r, block_dv = merge_tile(splits, shape.value_dim)
        merge_kernel[(triton.cdiv(rows * shape.q_heads, block_r),)](
            target, target_lse[0], target_lse[1], out, lse,
            rows, rows if shape.paged else shape.q_len, *out_strides,
            HEADS=shape.q_heads, DV=shape.value_dim, SPLITS=splits,
            BLOCK_R=block_r, BLOCK_DV=block_dv, num_warps=4,
        )  # fmt: skip


def _check(q: Tensor, v: Tensor) -> None:
    if q.dtype not in launches.DTYPES:
        raise ValueError(f"kernels take float16, bfloat16 or float32, got {q.dtype}")
    if max(q.shape[-1], v.shape[-1]) > launches.MAX_HEAD_DIM:
        raise ValueError(
            f"head dim must be at most {launches.MAX_HEAD_DIM}, got {q.shape[-1]}, {v.shape[-1]}"
        )


def paged_attend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    query_start: Tensor | None,
    seq_lens: Tensor,
    mask: Tensor | None = None,
    q_positions: Tensor | None = None,
    chunk_origin: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    splits: int | None = None,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Launch the kernel over pages; arguments as ``kvtailor::paged_attend``.

    ``splits`` and ``launch`` override the choice made from shapes. Nothing is read on the host.
    Returns out ``[N, Hq, Dv]`` and, if asked for, the log-sum-exp ``[N, Hq]`` (float32).
    """
    check_paged_attend(
        q, k_pages, v_pages, block_table, query_start, seq_lens,
        mask, q_positions, chunk_origin, sinks, alibi_slopes, window, chunk,
    )  # fmt: skip
    _check(q, v_pages)
    N, Hq, D = q.shape
    page, Hkv, Dv = v_pages.shape[1:]
    S = seq_lens.shape[0]
    out = q.new_empty((N, Hq, Dv))
    lse = q.new_empty((N, Hq), dtype=torch.float32) if return_lse else None
    if N == 0:
        return out, lse
    q = _unit_last(q)
    if query_start is None:
        query_start = torch.arange(N + 1, dtype=torch.int32, device=q.device)
    mask_strides = (0, 0, 0, 0)
    if mask is not None:
        mask = mask.expand(N, Hq, mask.shape[-1])
        mask_strides = (0, mask.stride(0), mask.stride(1), mask.stride(2))
    shape = Shape(
        S, N, N, Hq, Hkv, D, Dv, max_keys=block_table.shape[1] * page, paged=True
    )  # fmt: skip
    _launch(
        shape, q, k_pages, v_pages, out, lse,
        q_strides=(0, q.stride(0), q.stride(1)),
        k_strides=k_pages.stride()[:3], v_strides=v_pages.stride()[:3],
        out_strides=(0, out.stride(0), out.stride(1)),
        block_table=block_table, query_start=query_start, seq_lens=seq_lens,
        positions=_packed(q_positions), position_strides=(0, 1),
        origin=_packed(chunk_origin),
        mask=mask, mask_strides=mask_strides, sinks=sinks, slopes=alibi_slopes,
        scale=scale, q_offset=0, causal=causal, window=window, chunk=chunk, softcap=softcap,
        splits=splits, launch=launch,
    )  # fmt: skip
    return out, lse


def dense_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    q_positions: Tensor | None = None,
    chunk_origin: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    q_offset: int = 0,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    empty_row: str = "zero",
    return_lse: bool = False,
    splits: int | None = None,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Launch the kernel over dense keys; arguments as ``kvtailor::attend``.

    The result lies in memory as ``[B, Tq, Hq, Dv]``. Keys hidden by a bool mask
    ``[B or 1, 1, 1, Tk]`` (key padding) are not loaded.
    Returns out ``[B, Hq, Tq, Dv]`` and, if asked for, the log-sum-exp ``[B, Hq, Tq]`` (float32).
    """
    check_attend(
        q, k, v, mask, q_positions, chunk_origin, sinks,
        window=window, chunk=chunk, empty_row=empty_row,
    )  # fmt: skip
    _check(q, v)
    B, Hq, Tq, D = q.shape
    Hkv, Tk, Dv = k.shape[1], k.shape[2], v.shape[3]
    out = q.new_empty((B, Tq, Hq, Dv), dtype=v.dtype).transpose(1, 2)
    # There is no mean of no values: they give zeros.
    uniform = empty_row == "uniform" and Tk > 0
    lse = None
    if return_lse or uniform:
        lse = q.new_empty((B, Tq, Hq), dtype=torch.float32)
    if out.numel() == 0:
        return out, None if lse is None else lse.transpose(1, 2)
    q, k, v = _unit_last(q), _unit_last(k), _unit_last(v)

    position_strides: tuple[int, ...] = (0, 0)
    origin_strides: tuple[int, ...] = (0, 0)
    if q_positions is not None:
        position_strides = q_positions.expand(B, Tq).stride()
    if chunk_origin is not None:
        # [], [B] or [B, Tq]
        column = chunk_origin if chunk_origin.dim() == 2 else chunk_origin.reshape(-1, 1)
        origin_strides = column.expand(B, Tq).stride()
    key_mask = None
    mask_strides = (0, 0, 0, 0)
    if mask is not None:
        if mask.dtype == torch.bool and mask.shape[1] == mask.shape[2] == 1:
            key_mask, mask = mask[:, 0, 0].expand(B, Tk), None
        else:
            mask = mask.expand(B, Hq, Tq, Tk)
            mask_strides = (mask.stride(0), mask.stride(2), mask.stride(1), mask.stride(3))
    shape = Shape(B, B * Tq, Tq, Hq, Hkv, D, Dv, max_keys=Tk, paged=False)
    _launch(
        shape, q, k, v, out, lse,
        q_strides=(q.stride(0), q.stride(2), q.stride(1)),
        k_strides=(k.stride(0), k.stride(2), k.stride(1)),
        v_strides=(v.stride(0), v.stride(2), v.stride(1)),
        out_strides=(out.stride(0), out.stride(2), out.stride(1)),
        positions=q_positions, position_strides=position_strides,
        origin=chunk_origin, origin_strides=origin_strides,
        mask=mask, mask_strides=mask_strides, key_mask=key_mask,
        sinks=sinks, slopes=alibi_slopes,
        scale=scale, q_offset=q_offset, causal=causal, window=window, chunk=chunk,
        softcap=softcap, splits=splits, launch=launch,
    )  # fmt: skip
    if lse is not None:
        lse = lse.transpose(1, 2)
    if uniform and lse is not None:
        mean = v.float().mean(dim=2, keepdim=True).repeat_interleave(Hq // Hkv, dim=1)
        empty = (lse == float("-inf"))[..., None]
        out = torch.where(
            empty.transpose(1, 2), mean.to(out.dtype).transpose(1, 2), out.transpose(1, 2)
        )
        out = out.transpose(1, 2)
    return out, lse
