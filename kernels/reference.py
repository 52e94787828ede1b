"""Oracles: plain torch, one function per op, no kernel imported.

Letters: B batch, T tokens, H heads, D head dim of q and k, Dv head dim of v.
"""

from __future__ import annotations

import torch
from torch import Tensor

EMPTY_ROWS = ("zero", "uniform")


def positions(
    q_positions: Tensor | None, q_offset: int, q_len: int, device: torch.device
) -> Tensor:
    """Physical key index of each query, ``[Tq]`` or ``[B, Tq]``, int64."""
    base = torch.arange(q_len, device=device) if q_positions is None else q_positions
    return base + q_offset


def visible(
    q_len: int,
    k_len: int,
    device: torch.device,
    *,
    q_positions: Tensor | None = None,
    chunk_origin: Tensor | None = None,
    causal: bool = False,
    q_offset: int = 0,
    window: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Which keys the flags of ``attend`` let each query see: bool ``[1 or B, 1, Tq, Tk]``.

    Key k is visible to the query at position p when (not causal or k <= p) and (no window or
    p - k < window) and (no chunk or (k - o) // chunk == (p - o) // chunk).
    """
    p = positions(q_positions, q_offset, q_len, device)
    p = p.reshape(1 if p.dim() == 1 else p.shape[0], 1, q_len, 1)
    k = torch.arange(k_len, device=device)
    seen = torch.ones(p.shape[0], 1, q_len, k_len, dtype=torch.bool, device=device)
    if causal:
        seen = seen & (k <= p)
    if window is not None:
        seen = seen & (p - k < window)
    if chunk is not None:
        if chunk_origin is None:
            o = torch.zeros((), dtype=torch.int64, device=device)
        elif chunk_origin.dim() == 2:
            o = chunk_origin[:, None, :, None]
        else:
            o = chunk_origin.reshape(-1, 1, 1, 1)
        same = torch.div(k - o, chunk, rounding_mode="floor") == torch.div(
            p - o, chunk, rounding_mode="floor"
        )
        seen = seen & same
    return seen


def attend(
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
    """Attention with every flag of ``kvtailor::attend``; see ``kernels/ops.py`` for the schema.

    Scores and softmax are float32 (float64 for float64 inputs); the result has v's dtype.
    """
    B, Hq, Tq, _ = q.shape
    Hkv, Tk = k.shape[1], k.shape[2]
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = Hq // Hkv
    k_BHTD = k.to(acc).repeat_interleave(group, dim=1)
    v_BHTD = v.to(acc).repeat_interleave(group, dim=1)
    scores = torch.matmul(q.to(acc), k_BHTD.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(
        Tq,
        Tk,
        q.device,
        q_positions=q_positions,
        chunk_origin=chunk_origin,
        causal=causal,
        q_offset=q_offset,
        window=window,
        chunk=chunk,
    )
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + mask.to(acc)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.to(acc).reshape(1, Hq, 1, 1).expand(B, Hq, Tq, 1)
        scores = torch.cat([scores, column], dim=-1)
    # A row of -inf alone has no softmax: such rows get what empty_row says.
    top = scores.amax(dim=-1, keepdim=True)
    empty = top == float("-inf")
    weights = torch.exp(scores - top.masked_fill(empty, 0.0))
    total = weights.sum(dim=-1, keepdim=True)
    weights = weights / total.masked_fill(empty, 1.0)
    if sinks is not None:
        weights = weights[..., :-1]
    if empty_row == "uniform":
        weights = torch.where(empty, torch.full_like(weights, 1.0 / max(Tk, 1)), weights)
    return torch.matmul(weights, v_BHTD).to(v.dtype)
