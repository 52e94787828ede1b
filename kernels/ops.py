"""The ops: schema, meta function, dispatch. What they compute is in ``reference.py``.

Letters: B batch, T tokens, H heads, D head dim of q and k, Dv head dim of v.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula, sdpa_flop_count

from kvtailor.kernels import few_rows, launch, local_attention, paged_torch, reference
from kvtailor.kernels.checks import check_attend, check_one_row_each, check_store_kv
from kvtailor.kernels.packed_linear import packed_linear as _packed_linear_plain

LIB = torch.library.Library("kvtailor", "DEF")

# One attention op. Passes recognise attention into it once and never match raw attention again.
#   q [B, Hq, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv] -> [B, Hq, Tq, Dv], Hq = n * Hkv
#   mask: bool or additive float, [B or 1, Hq or 1, Tq or 1, Tk or 1]
#   q_positions: int64 [Tq] or [B, Tq]; None means arange(Tq)
#   q_offset: added to q_positions; the sum is the physical key index a query sits at
#   chunk_origin: int64 [], [B] or [B, Tq]; None means 0
#   sinks [Hq]: one more logit per head that takes weight and gives nothing
#   empty_row: what a query that sees no key gets, "zero" or "uniform" (the mean of v)
#   order: scale, softcap, mask, sinks, softmax
LIB.define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor? mask=None, Tensor? q_positions=None, "
    "Tensor? chunk_origin=None, Tensor? sinks=None, *, float scale, bool causal=False, "
    "SymInt q_offset=0, int? window=None, int? chunk=None, float? softcap=None, "
    'str empty_row="zero") -> Tensor'
)
LIB.impl("attend", reference.attend, "CompositeExplicitAutograd")

attend = torch.ops.kvtailor.attend.default


@torch.library.register_fake("kvtailor::attend", lib=LIB)
def _attend_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None, **flags: Any) -> Tensor:
    checked = {n: flags[n] for n in ("window", "chunk", "empty_row") if n in flags}
    check_attend(q, k, v, *rest, **checked)
    B, Hq, Tq, _ = q.shape
    return q.new_empty((B, Hq, Tq, v.shape[-1]), dtype=v.dtype)


@register_flop_formula(torch.ops.kvtailor.attend)
def _attend_flops(
    q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size, *args: object, **kwargs: object
) -> int:
    # torch's own formula for SDPA wants equal head counts.
    B, Hq, _, D = q_shape
    Tk, Dv = k_shape[2], v_shape[3]
    return int(sdpa_flop_count(q_shape, (B, Hq, Tk, D), (B, Hq, Tk, Dv)))


# attend in time and memory linear in the tokens, where window or chunk is set. The result lies
# in memory as [B, Tq, Hq, Dv], as SDPA's does.
LIB.define(
    "local_attend(Tensor q, Tensor k, Tensor v, Tensor? mask=None, Tensor? q_positions=None, "
    "Tensor? chunk_origin=None, Tensor? sinks=None, *, float scale, bool causal=False, "
    "SymInt q_offset=0, int? window=None, int? chunk=None, float? softcap=None, "
    'str empty_row="zero") -> Tensor'
)
LIB.impl("local_attend", local_attention.local_attend, "CompositeExplicitAutograd")

local_attend = torch.ops.kvtailor.local_attend.default


@torch.library.register_fake("kvtailor::local_attend", lib=LIB)
def _local_attend_fake(*args: Any, **flags: Any) -> Tensor:
    # The result lies in memory as [B, Tq, Hq, Dv].
    like = _attend_fake(*args, **flags)
    B, Hq, Tq, Dv = like.shape
    return like.new_empty((B, Tq, Hq, Dv)).transpose(1, 2)


@register_flop_formula(torch.ops.kvtailor.local_attend)
def _local_attend_flops(
    q_shape: torch.Size,
    k_shape: torch.Size,
    v_shape: torch.Size,
    *args: object,
    window: int | None = None,
    chunk: int | None = None,
    **kwargs: object,
) -> int:
    # An upper bound: queries near the start of the keys or of a chunk see fewer.
    B, Hq, Tq, D = q_shape
    keys = min(x for x in (k_shape[2], window, chunk) if x is not None)
    return int(2 * B * Hq * Tq * keys * (D + v_shape[3]))


# Attention of packed sequences over paged keys, without one entry read on the host.
#   q [N, Hq, D], k_pages [blocks, block_size, Hkv, D], v_pages [blocks, block_size, Hkv, Dv]
#   block_table int32 [S, max_blocks]: the blocks of each sequence, in order
#   query_start int32 [S + 1]: sequence s's rows of q; no rows, no result; None: each has one row
#   seq_lens int32 [S]: keys of each sequence, those of its new rows included
#   mask: bool or additive float, [N, 1 or Hq, K], by key of the row's sequence; what lies past K
#     is hidden
#   q_positions [N]: key index each row sits at; None: the rows are their sequence's last
#   chunk_origin [S]; None means 0
#   sinks [Hq]; alibi_slopes [Hq] add slope * (key - position) after the softcap
#   -> [N, Hq, Dv]; rows that see no key, and rows past the last sequence, give 0
# The overload lse also returns the log of the softmax's denominator, sink included, [N, Hq].
_PAGED_ARGS = (
    "(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor? query_start, "
    "Tensor seq_lens, Tensor? mask=None, Tensor? q_positions=None, Tensor? chunk_origin=None, "
    "Tensor? sinks=None, Tensor? alibi_slopes=None, *, float scale, bool causal=True, "
    "int? window=None, int? chunk=None, float? softcap=None)"
)
_PAGED_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
LIB.define(f"paged_attend{_PAGED_ARGS} -> Tensor", tags=_PAGED_TAGS)
LIB.define(f"paged_attend.lse{_PAGED_ARGS} -> (Tensor, Tensor)", tags=_PAGED_TAGS)

# Row n of k [N, H, D] and v [N, H, Dv] goes to slot slot_mapping[n] of the pages, block
# slot // block_size, row slot % block_size; a negative slot is skipped. Slots do not repeat.
LIB.define(
    "store_kv(Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor slot_mapping) "
    "-> ()",
    tags=_PAGED_TAGS,
)

# The rows start .. stop-1 of every sequence, dense: what a model that knows no pages attends to.
#   pages [blocks, block_size, H, D], block_table int [S, max_blocks] -> [S, stop - start, H, D]
LIB.define(
    "gather_kv(Tensor pages, Tensor block_table, SymInt start, SymInt stop) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIB.impl("gather_kv", paged_torch.gather_kv, "CompositeExplicitAutograd")

gather_kv = torch.ops.kvtailor.gather_kv.default


@torch.library.register_fake("kvtailor::gather_kv", lib=LIB)
def _gather_kv_fake(pages: Tensor, block_table: Tensor, start: int, stop: int) -> Tensor:
    return pages.new_empty((block_table.shape[0], stop - start, *pages.shape[2:]))


paged_attend = torch.ops.kvtailor.paged_attend.default
paged_attend_lse = torch.ops.kvtailor.paged_attend.lse
store_kv = torch.ops.kvtailor.store_kv.default


def _paged_attend_plain(*args: Any, **kwargs: Any) -> Tensor:
    return paged_torch.paged_attend(*args, **kwargs)[0]


def _paged_attend_gpu(*args: Any, **kwargs: Any) -> Tensor:
    if not launch.usable("paged_attend"):
        return _paged_attend_plain(*args, **kwargs)
    from kvtailor.kernels import paged_attention

    return paged_attention.paged_attend(*args, **kwargs)[0]


def _paged_attend_lse_gpu(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    if not launch.usable("paged_attend"):
        return paged_torch.paged_attend(*args, **kwargs)
    from kvtailor.kernels import paged_attention

    out, lse = paged_attention.paged_attend(*args, **kwargs, return_lse=True)
    assert lse is not None
    return out, lse


LIB.impl("paged_attend", _paged_attend_plain, "CompositeExplicitAutograd")
LIB.impl("paged_attend.lse", paged_torch.paged_attend, "CompositeExplicitAutograd")
LIB.impl("paged_attend", _paged_attend_gpu, "CUDA")
LIB.impl("paged_attend.lse", _paged_attend_lse_gpu, "CUDA")


@torch.library.register_fake("kvtailor::paged_attend", lib=LIB)
def _paged_attend_fake(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    query_start: Tensor | None,
    seq_lens: Tensor,
    *rest: Any,
    **attributes: Any,
) -> Tensor:
    N, Hq, _ = q.shape
    if query_start is None:
        # Also tells the compiler that these sizes are one.
        check_one_row_each(q, block_table, seq_lens)
    return q.new_empty((N, Hq, v_pages.shape[3]))


@torch.library.register_fake("kvtailor::paged_attend.lse", lib=LIB)
def _paged_attend_lse_fake(q: Tensor, *rest: Any, **attributes: Any) -> tuple[Tensor, Tensor]:
    out = _paged_attend_fake(q, *rest, **attributes)
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, q.new_empty(out.shape[:2], dtype=acc)


def _store_kv_gpu(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot_mapping: Tensor
) -> None:
    if not launch.usable("store_kv"):
        return paged_torch.store_kv(k, v, k_pages, v_pages, slot_mapping)
    from kvtailor.kernels import store_kv as kernel

    return kernel.store_kv(k, v, k_pages, v_pages, slot_mapping)


LIB.impl("store_kv", paged_torch.store_kv, "CompositeExplicitAutograd")
LIB.impl("store_kv", _store_kv_gpu, "CUDA")


@torch.library.register_fake("kvtailor::store_kv", lib=LIB)
def _store_kv_fake(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot_mapping: Tensor
) -> None:
    # Also tells the compiler that there are as many slots as rows.
    check_store_kv(k, v, k_pages, v_pages, slot_mapping)


def _local_attend_gpu(*args: Any, **kwargs: Any) -> Tensor:
    # Head dims and dtypes the kernel does not take keep the banded form.
    if not launch.takes(*args[:3]) or not launch.usable("local_attend"):
        return local_attention.local_attend(*args, **kwargs)
    from kvtailor.kernels import paged_attention

    return paged_attention.dense_attend(*args, **kwargs)[0]


LIB.impl("local_attend", _local_attend_gpu, "CUDA")


# torch's linear, x [..., K], weight [N, K], bias [N] -> [..., N], by a kernel of our own where
# there is one for so few rows.
LIB.define("few_rows_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
LIB.impl("few_rows_linear", few_rows.few_rows_linear, "CompositeExplicitAutograd")

few_rows_linear = torch.ops.kvtailor.few_rows_linear.default


@torch.library.register_fake("kvtailor::few_rows_linear", lib=LIB)
def _few_rows_linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@register_flop_formula(torch.ops.kvtailor.few_rows_linear)
def _few_rows_linear_flops(
    x_shape: torch.Size, weight_shape: torch.Size, *args: object, **kwargs: object
) -> int:
    return 2 * math.prod(x_shape) * weight_shape[0]


# Several linears over one input x [..., K]: weights packed along their rows, [N, K], N the sum of
# the widths; -> [..., width] each. The form follows the rows of the call: borders and forms as in
# packed_linear.form_at.
LIB.define(
    "packed_linear(Tensor x, Tensor weight, Tensor? bias, int[] widths, int[] borders, "
    "int[] forms) -> Tensor[]"
)
LIB.impl("packed_linear", _packed_linear_plain, "CompositeExplicitAutograd")

packed_linear = torch.ops.kvtailor.packed_linear.default


@torch.library.register_fake("kvtailor::packed_linear", lib=LIB)
def _packed_linear_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    widths: list[int],
    borders: list[int],
    forms: list[int],
) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], n)) for n in widths]


@register_flop_formula(torch.ops.kvtailor.packed_linear)
def _packed_linear_flops(
    x_shape: torch.Size, weight_shape: torch.Size, *args: object, **kwargs: object
) -> int:
    return 2 * math.prod(x_shape) * weight_shape[0]
