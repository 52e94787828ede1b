"""A step's tokens as arrays: which tokens, at which positions, in which blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvtailor.runtime.kv.hybrid import HybridManager
from kvtailor.runtime.kv.spec import CrossSpec

__all__ = ["Batch", "make_batch"]


@dataclass
class Batch:
    """A step's tokens: sequence s has the rows query_start[s] .. query_start[s+1]-1.

    tokens, positions int64 [N]; query_start int32 [S+1]; seq_lens int32 [S]: tokens of each
    sequence, new ones included. slots int64 [N] and tables int32 [S, blocks] per group.
    encoder_lens int32 [S]; encoder_states [1, M, width] of the sequences whose cross-attention
    has not been stored yet, one after the other, and encoder_slots int64 [M] for them.
    """

    tokens: np.ndarray
    positions: np.ndarray
    query_start: np.ndarray
    seq_lens: np.ndarray
    slots: dict[int, np.ndarray]
    tables: dict[int, np.ndarray]
    encoder_lens: np.ndarray | None = None
    encoder_states: Tensor | None = None
    encoder_slots: dict[int, np.ndarray] | None = None


def make_batch(
    kv: HybridManager,
    parts: list[tuple[Any, list[int], int, int]],
    states: list[Tensor | None],
    encoder_lens: list[int],
) -> Batch:
    """The batch of some (request, tokens, start, stop), whose slots have been appended.

    states: of each request, its encoder's [1, M, width] if they are to be stored now.
    """
    names = [name for name, _, _, _ in parts]
    counts = [stop - start for _, _, start, stop in parts]
    own = [g for g, spec in enumerate(kv.specs) if not isinstance(spec, CrossSpec)]
    cross = [g for g, spec in enumerate(kv.specs) if isinstance(spec, CrossSpec)]
    new = [(n, s) for n, s in zip(names, states) if s is not None]
    return Batch(
        tokens=np.concatenate([np.asarray(t[i:j], dtype=np.int64) for _, t, i, j in parts]),
        positions=np.concatenate([np.arange(i, j, dtype=np.int64) for _, _, i, j in parts]),
        query_start=np.cumsum([0, *counts], dtype=np.int32),
        seq_lens=np.asarray([stop for _, _, _, stop in parts], dtype=np.int32),
        slots={g: np.concatenate([kv.slots(n, g, i, j) for n, _, i, j in parts]) for g in own},
        tables={g: kv.block_tables(names, g) for g in own + cross},
        encoder_lens=np.asarray(encoder_lens, dtype=np.int32) if cross else None,
        encoder_states=torch.cat([s for _, s in new], dim=1) if new else None,
        encoder_slots={
            g: np.concatenate([kv.slots(n, g, 0, s.shape[1]) for n, s in new]) for g in cross
        }
        if new
        else None,
    )
