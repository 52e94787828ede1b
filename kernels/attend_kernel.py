"""The attention kernel in Triton, for pages and for dense keys, and the merge of its splits.

A program takes a tile of query rows of one sequence (several tokens times the query heads that
share a key head), works out for each row the interval of keys it may see, and walks the key tiles
that meet the union of those intervals. Tiles outside a window or chunk are never loaded.

Letters: D head dim of q and k, Dv head dim of v, M packed query rows of a tile, K keys of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvtailor.kernels.attend_tile import LOG2E, attend_tile

# Sequences looked at together to find a tile's own.
SEARCH = tl.constexpr(256)
LN2 = tl.constexpr(0.6931471805599453)


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
            acc_MV, top_M, total_M = attend_tile(
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
        acc_MV, top_M, total_M = attend_tile(
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
