"""The ops: schema, meta function, dispatch. What they compute is in ``reference.py``.

Letters: B batch, T tokens, H heads, D head dim of q and k, Dv head dim of v.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula, sdpa_flop_count

from kvtailor.kernels import reference

LIB = torch.library.Library("kvtailor", "DEF")

# One attention op. Passes recognise attention into it once and never match raw attention again.
#   q [B, Hq, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv] -> [B, Hq, Tq, Dv], Hq = n * Hkv
#   mask: bool or additive float, broadcastable to [B, Hq, Tq, Tk]
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
def _attend_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    q_positions: Tensor | None = None,
    chunk_origin: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    q_offset: int = 0,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    empty_row: str = "zero",
) -> Tensor:
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
