"""How large the pool of blocks is: what memory buys, and the longest request it holds."""

from __future__ import annotations

import re

from kvtailor.runtime.kv.layout import KVLayout
from kvtailor.runtime.kv.spec import KVSpec

__all__ = ["fit", "num_bytes"]


def num_bytes(memory: int | str) -> int:
    """Bytes of 1 << 30, "1GiB", "512 MB"."""
    if isinstance(memory, str):
        found = re.fullmatch(r"\s*(\d+\.?\d*)\s*([KMGT]?)(i?)B?\s*", memory, re.IGNORECASE)
        if found is None:
            raise ValueError(f'max_memory must be bytes or a text like "1GiB", got {memory!r}')
        number, unit, binary = found.groups()
        power = " KMGT".index(unit.upper() or " ")
        memory = int(float(number) * (1024 if binary else 1000) ** power)
    if isinstance(memory, bool) or not isinstance(memory, int) or memory < 1:
        raise ValueError(f"max_memory must be a positive number of bytes, got {memory!r}")
    return memory


def fit(
    layers: dict[str, KVSpec], memory: int, most: int, token_budget: int, max_requests: int
) -> tuple[KVLayout, int, int]:
    """The layout, how many blocks `memory` buys, and the longest request they hold, up to most."""
    layout = KVLayout(layers, most)
    num_blocks = memory // layout.block_bytes - 1

    def blocks(tokens: int) -> int:
        return layout.request_blocks(tokens, min(tokens, token_budget))

    if num_blocks < blocks(1):
        raise ValueError(
            f"max_memory must hold {blocks(1) + 1} blocks of {layout.block_bytes} bytes, "
            f"got {memory} bytes"
        )
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if blocks(middle) <= num_blocks else (low, middle - 1)
    return layout, min(num_blocks, max_requests * blocks(low)), low
