"""Attention of blocks of rows, with its log-sum-exp; on a CPU by torch's flash kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvtailor.kernels.reference import NEVER, accumulator, softmax_attention


class Partial(NamedTuple):
    """Attention over some of the keys: out ``[N, Hq, R, Dv]`` and lse ``[N, Hq, R]``."""

    out: Tensor
    lse: Tensor


def attend_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float,
    softcap: float | None = None,
    causal: bool = False,
    empty: bool = False,
) -> Partial:
    """q ``[N, Hq, R, D]`` over k ``[N, Hkv, S, D]`` and v ``[N, Hkv, S, Dv]``.

    bias: additive, ``[R, S]`` or ``[N|1, Hq|1, R, S]``. causal: row i sees keys up to i; only on
    a CPU, without softcap and bias. empty: bias may leave a row without a key; it gives 0 and a
    log-sum-exp of -inf.
    """
    fused = q.device.type == "cpu" and softcap is None and q.shape[-1] == v.shape[-1]
    if fused and q.dtype == k.dtype == v.dtype:
        out, lse = _flash(q, k, v, bias, scale, causal)
        if bias is not None and empty:
            # The kernel reports 0 for rows without keys.
            lse = lse.masked_fill(bias.amax(-1) == NEVER, NEVER)
        return Partial(out, lse)
    assert not causal
    q, k, v = (x.to(accumulator(q.dtype)) for x in (q, k, v))
    return Partial(*softmax_attention(q, k, v, bias, scale=scale, softcap=softcap))


def _flash(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    N, Hq, R, _ = q.shape
    Hkv, rows = k.shape[1], R
    if R == 1 and Hq > Hkv and N * Hkv >= torch.get_num_threads():
        # One row per head: the heads of a group become rows, so that keys are read once.
        rows = Hq // Hkv
        q = q.reshape(N, Hkv, rows, -1)
        if bias is not None and bias.dim() == 4 and bias.shape[1] > 1:
            bias = bias.reshape(-1, Hkv, rows, bias.shape[-1])
    elif R == 1 and q.dtype.itemsize == 2:
        # The kernel is several times slower on one row in half precision than on two.
        q = q.expand(-1, -1, 2, -1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )
    if q.shape[2] > R:
        out = out[:, :, :rows].reshape(N, Hq, R, -1)
        lse = lse[:, :, :rows].reshape(N, Hq, R)
    return out, lse


def with_sinks(part: Partial, sinks: Tensor) -> Partial:
    """The same with one more logit per head in the denominator; sinks broadcast to lse."""
    total = torch.logaddexp(part.lse, sinks)
    share = torch.exp(part.lse - total.masked_fill(total == NEVER, 0.0))
    return Partial(part.out * share[..., None], total)
