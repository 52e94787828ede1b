"""One tile of keys of the attention kernel: a step of its online softmax.

Letters: D head dim of q and k, Dv head dim of v, M packed query rows of a tile, K keys of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def tanh(x):
    # From exp(-2|x|), which cannot overflow (T04); near 0, where that cancels, its series.
    t = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    big = (1.0 - t) / (1.0 + t)
    x2 = x * x
    small = x * (1.0 + x2 * (-0.33333333 + x2 * (0.13333333 - x2 * 0.05396825)))
    return tl.where(tl.abs(x) < 0.125, small, tl.where(x < 0, -big, big))


@triton.jit
def attend_tile(
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
