"""What each kind of attention layer keeps in the KV cache, and what that costs.

A spec describes one layer: how many keys a query may look back on, and how large a page of
`block_size` tokens is. Layers with equal specs form a group and share one block table per
request: see `layout.py`.

    spec = SlidingSpec(512, num_kv_heads=1, head_dim=256)
    spec.skipped(600)                     # 89: what the query at position 600 doesn't see
    spec.admission_blocks(8192, 512)      # blocks of a request of 8,192 tokens, 512 in flight

Letters: n computed tokens (so n is also the position of the next query), B block size in
tokens, W window, C chunk. Pure Python; importing this needs neither torch nor numpy.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import ClassVar

__all__ = ["ChunkedSpec", "CrossSpec", "FullSpec", "KVSpec", "SlidingSpec"]


def _require_positive(spec: object, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """What every spec has: the geometry of one layer's page.

    block_size: tokens per block. num_kv_heads, head_dim: of one layer. v_head_dim: of the
    values where it differs from the keys'. itemsize: bytes per number (2 for bf16).
    """

    block_size: int = 16
    num_kv_heads: int = 1
    head_dim: int = 64
    v_head_dim: int | None = None
    itemsize: int = 2

    kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        _require_positive(self, "block_size", "num_kv_heads", "head_dim", "itemsize")
        if self.v_head_dim is not None:
            _require_positive(self, "v_head_dim")

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, D, Dv): heads, head dim of the keys, and of the values."""
        v_head_dim = self.head_dim if self.v_head_dim is None else self.v_head_dim
        return self.num_kv_heads, self.head_dim, v_head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value in one layer."""
        heads, dim, v_dim = self.shape
        return heads * (dim + v_dim) * self.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer: B tokens of keys and values."""
        return self.block_size * self.token_bytes

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill: ceil(num_tokens / B)."""
        return -(-num_tokens // self.block_size)

    def skipped(self, n: int) -> int:
        """How many leading tokens no query at position >= n can see."""
        return 0

    def computed_to_skip(self, num_tokens: int) -> int:
        """The least n with skipped(n) >= num_tokens > 0; sys.maxsize when there is none."""
        return sys.maxsize

    def visible(self, position: int) -> range:
        """The key positions that the query at `position` sees, itself included."""
        return range(self.skipped(position), position + 1)

    def free_hit(self, limit: int, align: int) -> int:
        """The longest multiple of `align` up to `limit` after which no earlier key is read."""
        return 0

    def admission_blocks(self, num_tokens: int, in_flight: int) -> int:
        """The most blocks one request of `num_tokens` tokens ever holds.

        in_flight: tokens scheduled but not settled, at most. Both the sizing of the pool and
        the gate at run time use this, so that what was sized for can also be admitted.
        """
        return self.num_blocks(num_tokens)

    def __str__(self) -> str:
        return self.kind


@dataclass(frozen=True)
class FullSpec(KVSpec):
    """A causal layer that sees every earlier token.

    >>> FullSpec(num_kv_heads=8, head_dim=128).page_bytes
    65536
    """

    kind: ClassVar[str] = "full"


@dataclass(frozen=True)
class SlidingSpec(KVSpec):
    """A layer whose query at p sees the keys p-W+1 .. p (W in all, itself included).

    >>> list(SlidingSpec(4).visible(9))
    [6, 7, 8, 9]
    """

    window: int

    kind: ClassVar[str] = "sliding"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(self, "window")

    def skipped(self, n: int) -> int:
        return max(0, n - self.window + 1)

    def computed_to_skip(self, num_tokens: int) -> int:
        return num_tokens + self.window - 1

    def free_hit(self, limit: int, align: int) -> int:
        return limit - limit % align if self.window == 1 else 0

    def admission_blocks(self, num_tokens: int, in_flight: int) -> int:
        # One more than the tokens fill: a window starts anywhere in its first block. Short
        # requests start at block 0, so they never need it.
        spanned = self.num_blocks(min(self.window - 1 + in_flight, num_tokens)) + 1
        return min(spanned, self.num_blocks(num_tokens))

    def __str__(self) -> str:
        return f"sliding {self.window}"


@dataclass(frozen=True)
class ChunkedSpec(KVSpec):
    """A layer whose query at p sees the keys of its own chunk up to p. C may be any multiple.

    >>> [len(ChunkedSpec(4).visible(p)) for p in range(6)]
    [1, 2, 3, 4, 1, 2]
    """

    chunk: int

    kind: ClassVar[str] = "chunked"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(self, "chunk")

    def skipped(self, n: int) -> int:
        return n - n % self.chunk

    def computed_to_skip(self, num_tokens: int) -> int:
        return -(-num_tokens // self.chunk) * self.chunk

    def free_hit(self, limit: int, align: int) -> int:
        # At the start of a chunk nothing earlier is visible.
        return limit - limit % math.lcm(self.chunk, align)

    def admission_blocks(self, num_tokens: int, in_flight: int) -> int:
        spanned = self.num_blocks(min(self.chunk + in_flight, num_tokens))
        # A chunk that is no multiple of the block may start inside a block.
        if self.chunk % self.block_size:
            spanned += 1
        return min(spanned, self.num_blocks(num_tokens))

    def __str__(self) -> str:
        return f"chunked {self.chunk}"


@dataclass(frozen=True)
class CrossSpec(KVSpec):
    """A cross-attention layer: keys of at most `encoder_tokens` encoder states, stored once."""

    encoder_tokens: int

    kind: ClassVar[str] = "cross"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(self, "encoder_tokens")

    def admission_blocks(self, num_tokens: int, in_flight: int) -> int:
        return self.num_blocks(self.encoder_tokens)

    def visible(self, position: int) -> range:
        return range(self.encoder_tokens)

    def __str__(self) -> str:
        return f"cross {self.encoder_tokens}"
