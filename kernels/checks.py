"""Argument checks that every implementation of an op shares. Host side, no data is read."""

from __future__ import annotations

import torch
from torch import Tensor

EMPTY_ROWS = ("zero", "uniform")


def check_extents(window: int | None, chunk: int | None) -> None:
    """Raise ValueError for a window or chunk that holds nothing."""
    for name, extent in (("window", window), ("chunk", chunk)):
        if extent is not None and extent <= 0:
            raise ValueError(f"{name} must be positive, got {extent}")


def check_empty_row(empty_row: str) -> None:
    """Raise ValueError unless ``attend`` knows what such a row gets."""
    if empty_row not in EMPTY_ROWS:
        raise ValueError(f"empty_row must be one of {', '.join(EMPTY_ROWS)}, got {empty_row!r}")


def _differ(a: object, b: object) -> bool:
    """Whether two sizes are known to differ: a check adds no guard on symbols."""
    return isinstance(a, int) and isinstance(b, int) and a != b


def check_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    q_positions: Tensor | None = None,
    chunk_origin: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    window: int | None = None,
    chunk: int | None = None,
    empty_row: str = "zero",
) -> None:
    """Raise ValueError for arguments that some lowering of ``kvtailor::attend`` could not take."""
    sizes = f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4 or any(map(_differ, k.shape[:3], v.shape[:3])):
        raise ValueError(f"q must be [B, Hq, Tq, D], k and v [B, Hkv, Tk, D or Dv], got {sizes}")
    if _differ(q.shape[0], k.shape[0]) or _differ(q.shape[3], k.shape[3]):
        raise ValueError(f"q and k must have one batch and head dim, got {sizes}")
    B, Hq, Tq = q.shape[:3]
    if isinstance(Hq, int) and isinstance(k.shape[1], int) and Hq % max(k.shape[1], 1):
        raise ValueError(f"query heads must be a multiple of key heads, got {Hq}, {k.shape[1]}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if mask is not None:
        whole = (B, Hq, Tq, k.shape[2])
        if mask.dim() != 4 or any(_differ(m, n) and m != 1 for m, n in zip(mask.shape, whole)):
            raise ValueError(
                f"mask must have four dimensions, each 1 or that of {list(whole)}, "
                f"got {list(mask.shape)}"
            )
        narrow = mask.dtype == torch.float64 != q.dtype
        if narrow or not (mask.dtype == torch.bool or mask.is_floating_point()):
            raise ValueError(
                f"mask must be bool or a float no wider than float32 and q, got {mask.dtype}"
            )
    for name, x, ranks in (
        ("q_positions", q_positions, (1, 2)),
        ("chunk_origin", chunk_origin, (0, 1, 2)),
        ("sinks", sinks, (1,)),
    ):
        if x is not None and x.dim() not in ranks:
            expected = " or ".join(map(str, ranks))
            raise ValueError(f"{name} must have {expected} dimensions, got {list(x.shape)}")
    check_empty_row(empty_row)
    check_extents(window, chunk)


def check_pages(x: Tensor, k_pages: Tensor, v_pages: Tensor, name: str) -> None:
    """Raise ValueError unless x is ``[N, H, D]`` and the pages are a fitting pair."""
    if x.dim() != 3:
        raise ValueError(f"{name} must be [N, H, D], got {list(x.shape)}")
    if k_pages.dim() != 4 or v_pages.dim() != 4 or k_pages.shape[:3] != v_pages.shape[:3]:
        raise ValueError(
            "k_pages and v_pages must be [blocks, block_size, Hkv, D] with equal blocks, block "
            f"size and heads, got {list(k_pages.shape)}, {list(v_pages.shape)}"
        )
    if k_pages.stride(3) != 1 or v_pages.stride(3) != 1:
        raise ValueError(
            "the last dim of pages must be contiguous, got strides "
            f"{k_pages.stride()}, {v_pages.stride()}"
        )


def check_store_kv(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot_mapping: Tensor
) -> None:
    """Raise ValueError for shapes ``kvtailor::store_kv`` does not take."""
    check_pages(k, k_pages, v_pages, "k")
    if k.shape[1:] != k_pages.shape[2:] or v.shape != (*k.shape[:2], v_pages.shape[3]):
        raise ValueError(
            f"k and v must be [N, {k_pages.shape[2]}, {k_pages.shape[3]}] and "
            f"[N, {k_pages.shape[2]}, {v_pages.shape[3]}] like the pages, got {list(k.shape)}, "
            f"{list(v.shape)}"
        )
    if slot_mapping.shape != k.shape[:1]:
        raise ValueError(
            f"slot_mapping must have shape [{k.shape[0]}], got {list(slot_mapping.shape)}"
        )
    if slot_mapping.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slot_mapping must be int32 or int64, got {slot_mapping.dtype}")


def check_gather_kv(pages: Tensor, block_table: Tensor, start: int, stop: int) -> None:
    """Raise ValueError for shapes and ranges ``kvtailor::gather_kv`` does not take."""
    if pages.dim() != 4:
        raise ValueError(f"pages must be [blocks, block_size, H, D], got {list(pages.shape)}")
    if block_table.dim() != 2 or block_table.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "block_table must be int32 or int64 [S, max_blocks], got "
            f"{list(block_table.shape)}, {block_table.dtype}"
        )
    if not 0 <= start <= stop:
        raise ValueError(f"start must be 0 to stop, got {start} and {stop}")


def check_one_row_each(q: Tensor, block_table: Tensor, seq_lens: Tensor) -> None:
    """Raise ValueError unless every sequence has one row: what query_start=None says."""
    if not q.shape[0] == block_table.shape[0] == seq_lens.shape[0]:
        raise ValueError(
            "without query_start every sequence has one row, got "
            f"{q.shape[0]} rows, {block_table.shape[0]} tables and {seq_lens.shape[0]} lengths"
        )


def check_paged_attend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    query_start: Tensor | None,
    seq_lens: Tensor,
    mask: Tensor | None,
    q_positions: Tensor | None,
    chunk_origin: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    window: int | None,
    chunk: int | None,
) -> None:
    """Raise ValueError for shapes, dtypes and attributes ``kvtailor::paged_attend`` refuses."""
    check_pages(q, k_pages, v_pages, "q")
    N, Hq, D = q.shape
    S, Hkv = seq_lens.shape[0], k_pages.shape[2]
    if not q.dtype == k_pages.dtype == v_pages.dtype:
        raise ValueError(
            "q, k_pages and v_pages must have one dtype, got "
            f"{q.dtype}, {k_pages.dtype}, {v_pages.dtype}"
        )
    if k_pages.shape[3] != D:
        raise ValueError(f"q and k_pages must have one head dim, got {D}, {k_pages.shape[3]}")
    if Hq % Hkv:
        raise ValueError(f"query heads must be a multiple of key heads, got {Hq}, {Hkv}")
    if block_table.dim() != 2 or block_table.shape[0] != S:
        raise ValueError(
            f"block_table must have shape [{S}, max_blocks], got {list(block_table.shape)}"
        )
    if query_start is None:
        check_one_row_each(q, block_table, seq_lens)
    elif query_start.shape != (S + 1,):
        raise ValueError(f"query_start must have shape [{S + 1}], got {list(query_start.shape)}")
    for name, table in (
        ("block_table", block_table),
        ("query_start", query_start),
        ("seq_lens", seq_lens),
    ):
        if table is None:
            continue
        if table.dtype != torch.int32:
            raise ValueError(f"{name} must be int32, got {table.dtype}")
        if table.stride(-1) != 1 and table.shape[-1] > 1:
            raise ValueError(f"{name} must be contiguous, got strides {table.stride()}")
    for name, x, size in (
        ("q_positions", q_positions, N),
        ("chunk_origin", chunk_origin, S),
        ("sinks", sinks, Hq),
        ("alibi_slopes", alibi_slopes, Hq),
    ):
        if x is not None and x.shape != (size,):
            raise ValueError(f"{name} must have shape [{size}], got {list(x.shape)}")
    if mask is not None and (mask.dim() != 3 or mask.shape[0] != N or mask.shape[1] not in (1, Hq)):
        raise ValueError(f"mask must have shape [{N}, 1 or {Hq}, K], got {list(mask.shape)}")
    check_extents(window, chunk)
