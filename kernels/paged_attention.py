"""Attention over pages and over dense keys in Triton: one kernel for prefill and for decode.

With few query rows the keys are split over programs, whose results are then merged. The kernel is
``attend_kernel``; here are its launchers.

Oracles: ``reference.paged_attend`` and ``reference.attend``.

Letters: N packed rows, S sequences, B batch, T tokens, H heads, D head dim of q and k, Dv head
dim of v, M packed query rows of a tile, K keys of a tile.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kvtailor.kernels import launch as launches
from kvtailor.kernels.attend_kernel import INTERPRETED, attend_kernel, merge_kernel
from kvtailor.kernels.checks import check_attend, check_paged_attend
from kvtailor.kernels.flags import Flags
from kvtailor.kernels.launch import Launch

# Residual mask: none, bool, additive.
NO_MASK, BOOL_MASK, BIAS = 0, 1, 2

# The kernel counts keys in int32; windows and chunks at or above this have no effect.
FAR = 1 << 30

# Elements of the splits' results one merging program holds.
MERGE_TILE = 8192


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


def _packed(x: Tensor | None) -> Tensor | None:
    """x for a kernel that counts its elements without a stride; an expanded one has stride 0."""
    return None if x is None else x.contiguous()


def _as_bytes(mask: Tensor | None) -> Tensor | None:
    """Triton has no bool in memory."""
    return mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask


class Hides(NamedTuple):
    """What a launch may have beside q, k and v, with its strides as the kernel counts them."""

    positions: Tensor | None = None
    position_strides: tuple[int, ...] = (0, 0)
    origin: Tensor | None = None
    origin_strides: tuple[int, ...] = (0, 0)
    mask: Tensor | None = None
    mask_strides: tuple[int, ...] = (0, 0, 0, 0)
    key_mask: Tensor | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None

    @property
    def mask_kind(self) -> int:
        if self.mask is None:
            return NO_MASK
        return BOOL_MASK if self.mask.dtype == torch.bool else BIAS


class Grid(NamedTuple):
    """Tiles of rows, programs for the heads of each, splits of the keys; kind and tile sizes."""

    tiles: int
    heads: int
    splits: int
    kind: str
    launch: Launch


def _grid(
    shape: Shape, q: Tensor, masked: bool, flags: Flags, splits: int | None, launch: Launch | None
) -> Grid:
    group = shape.q_heads // shape.kv_heads
    side, rows = max(shape.head_dim, shape.value_dim), shape.rows // max(shape.seqs, 1)
    kind, chosen = launches.launch_for(
        launches.vendor(), side, q.element_size(), rows, group, masked=masked
    )
    launch = launch or chosen
    head_tiles = triton.cdiv(group, launch.block_m)
    block_q = launch.block_m // triton.cdiv(group, head_tiles)
    if shape.paged:
        tiles = shape.rows // block_q + shape.seqs + 1
    else:
        tiles = triton.cdiv(shape.q_len, block_q) * shape.seqs
    heads = shape.kv_heads * head_tiles
    if splits is None:
        reach = min(shape.max_keys, flags.window or FAR, flags.chunk or FAR)
        busy = (shape.rows if kind == "decode" else tiles) * heads
        splits = 1
        if not INTERPRETED:
            splits = launches.num_splits(busy, reach, launches.processors(q.device.index or 0))
    return Grid(tiles, heads, splits, kind, launch)


def _launch(
    shape: Shape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    strides: tuple[tuple[int, ...], ...],
    tables: tuple[Tensor | None, Tensor | None, Tensor | None],
    hides: Hides,
    flags: Flags,
    *,
    scale: float,
    q_offset: int,
    softcap: float | None,
    splits: int | None,
    launch: Launch | None,
) -> None:
    """Choose tiles and splits, launch, and merge the splits.

    strides: three each of q, k, v and out. tables: block table, starts and lengths of sequences.
    """
    grid = _grid(shape, q, hides.mask is not None, flags, splits, launch)
    mask, key_mask = _as_bytes(hides.mask), _as_bytes(hides.key_mask)
    splits, rows = grid.splits, shape.rows
    *given, out_strides = strides
    target, target_lse, target_strides = out, lse, (0, *out_strides)
    if splits > 1:
        heads, dv = shape.q_heads, shape.value_dim
        target = q.new_empty((splits, rows, heads, dv), dtype=torch.float32)
        target_lse = q.new_empty((2, splits, rows, heads), dtype=torch.float32)
        seq_stride = 0 if shape.paged else shape.q_len * heads * dv
        target_strides = (rows * heads * dv, seq_stride, heads * dv, dv)
    attend_kernel[grid[:3]](
        q, k, v, target, target_lse, *tables,
        hides.positions, hides.origin, mask, key_mask, _packed(hides.sinks), _packed(hides.slopes),
        scale, 1.0 if softcap is None else softcap, q_offset,
        min(flags.window or FAR, FAR), min(flags.chunk or FAR, FAR),
        shape.seqs, rows, shape.q_len, shape.max_keys, 0 if mask is None else mask.shape[-1],
        *itertools.chain(*given), *target_strides, splits * rows * shape.q_heads,
        *_strides(tables[0], 1), *hides.position_strides, *hides.origin_strides,
        *hides.mask_strides, *_strides(key_mask, 2),
        **constants(
            shape, grid.launch, page=k.shape[1] if shape.paged else 0, causal=flags.causal,
            window=flags.window, chunk=flags.chunk, softcap=softcap, mask=hides.mask_kind,
            key_mask=key_mask is not None, splits=splits, vendor=launches.vendor(),
            upcast=INTERPRETED and q.dtype == torch.bfloat16, interior=grid.kind == "prefill",
        ),
        num_warps=grid.launch.warps,
        num_stages=grid.launch.stages,
    )  # fmt: skip
    if target_lse is not None and splits > 1:
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
    q = launches.unit_last(q)
    if query_start is None:
        query_start = torch.arange(N + 1, dtype=torch.int32, device=q.device)
    hides = Hides(
        _packed(q_positions), (0, 1), _packed(chunk_origin), sinks=sinks, slopes=alibi_slopes
    )
    if mask is not None:
        mask = mask.expand(N, Hq, mask.shape[-1])
        hides = hides._replace(mask=mask, mask_strides=(0, *mask.stride()))
    _launch(
        Shape(S, N, N, Hq, Hkv, D, Dv, max_keys=block_table.shape[1] * page, paged=True),
        q, k_pages, v_pages, out, lse,
        ((0, *q.stride()[:2]), k_pages.stride()[:3], v_pages.stride()[:3], (0, *out.stride()[:2])),
        (block_table, query_start, seq_lens), hides, Flags(causal, window, chunk),
        scale=scale, q_offset=0, softcap=softcap, splits=splits, launch=launch,
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
    wanted = return_lse or uniform
    lse = q.new_empty((B, Tq, Hq), dtype=torch.float32) if wanted else None
    if out.numel() == 0:
        return out, None if lse is None else lse.transpose(1, 2)
    q, k, v = launches.unit_last(q), launches.unit_last(k), launches.unit_last(v)

    _launch(
        Shape(B, B * Tq, Tq, Hq, Hkv, D, Dv, max_keys=Tk, paged=False),
        q, k, v, out, lse, tuple(x.transpose(1, 2).stride()[:3] for x in (q, k, v, out)),
        (None, None, None),
        _dense_hides(q, Tk, mask, q_positions, chunk_origin, sinks, alibi_slopes),
        Flags(causal, window, chunk),
        scale=scale, q_offset=q_offset, softcap=softcap, splits=splits, launch=launch,
    )  # fmt: skip
    if lse is not None:
        lse = lse.transpose(1, 2)
    if uniform and lse is not None:
        mean = v.float().mean(dim=2, keepdim=True).repeat_interleave(Hq // Hkv, dim=1)
        empty = (lse == float("-inf"))[..., None]
        # The result keeps its place in memory.
        turned = [x.transpose(1, 2) for x in (empty, mean.to(out.dtype), out)]
        out = torch.where(turned[0], turned[1], turned[2]).transpose(1, 2)
    return out, lse


def _dense_hides(
    q: Tensor,
    Tk: int,
    mask: Tensor | None,
    q_positions: Tensor | None,
    chunk_origin: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
) -> Hides:
    B, Hq, Tq, _ = q.shape
    hides = Hides(q_positions, origin=chunk_origin, sinks=sinks, slopes=slopes)
    if q_positions is not None:
        hides = hides._replace(position_strides=q_positions.expand(B, Tq).stride())
    if chunk_origin is not None:
        # [], [B] or [B, Tq]
        column = chunk_origin if chunk_origin.dim() == 2 else chunk_origin.reshape(-1, 1)
        hides = hides._replace(origin_strides=column.expand(B, Tq).stride())
    if mask is None:
        return hides
    if mask.dtype == torch.bool and mask.shape[1] == mask.shape[2] == 1:
        return hides._replace(key_mask=mask[:, 0, 0].expand(B, Tk))
    mask = mask.expand(B, Hq, Tq, Tk)
    return hides._replace(mask=mask, mask_strides=mask.transpose(1, 2).stride())
