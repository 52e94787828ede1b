"""What all layers of a paged cache share: a batch's rows in the block manager, and the pages.

Letters: B batch, T new tokens, H key heads, D head dim, G groups of layers.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvtailor.kernels.ops import LIB, gather_kv
from kvtailor.runtime.host_state import once
from kvtailor.runtime.kv.blocks import OutOfBlocks
from kvtailor.runtime.kv.hybrid import HybridManager
from kvtailor.runtime.kv.layout import KVLayout, Pages
from kvtailor.runtime.kv.spec import CrossSpec

__all__ = ["Store"]

# One step's bookkeeping as an op, so that a compiled model can do it in the middle of its graph:
# it gives every row of the cache `handle` names `tokens` more slots.
#   state int64 [1]: written, so that the call is neither dropped, nor moved, nor merged
#   -> slots int64 [G, B*T] and block tables int32 [G, B, max_blocks], for G groups
LIB.define(
    "begin_step(Tensor(a!) state, int handle, int groups, int max_blocks, SymInt batch, "
    "SymInt tokens) -> (Tensor, Tensor)"
)
_stores: weakref.WeakValueDictionary[int, Store] = weakref.WeakValueDictionary()
_handles = itertools.count()


def _begin_step(
    state: Tensor, handle: int, groups: int, max_blocks: int, batch: int, tokens: int
) -> tuple[Tensor, Tensor]:
    state.add_(1)
    return once(lambda: _stores[handle].step_tables(batch, tokens, state.device))


LIB.impl("begin_step", _begin_step, "CompositeExplicitAutograd")


@torch.library.register_fake("kvtailor::begin_step", lib=LIB)
def _begin_step_fake(
    state: Tensor, handle: int, groups: int, max_blocks: int, batch: int, tokens: int
) -> tuple[Tensor, Tensor]:
    slots = state.new_empty((groups, batch * tokens), dtype=torch.int64)
    return slots, state.new_empty((groups, batch, max_blocks), dtype=torch.int32)


class Store:
    """Rows of a batch in the block manager, and the pages: what the layers of a cache share.

    All rows are equally long: as in any transformers cache, padding is stored like a token.
    """

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.kv = HybridManager(layout.specs, num_blocks)
        self.pages = Pages(layout, num_blocks)
        self.rows: list[int] = []
        # Positions with slots, the same for all rows.
        self.length = 0
        # Tokens stay unsettled, so that they can be taken back, until `crop`.
        self.record_past = False
        self._names = itertools.count()
        self.handle = next(_handles)
        _stores[self.handle] = self
        self.max_blocks = max(
            spec.num_blocks(
                spec.encoder_tokens if isinstance(spec, CrossSpec) else layout.max_tokens
            )
            for spec in layout.specs
        )
        self.state = torch.zeros(1, dtype=torch.int64)
        # As of the current step: slots [G, B*T] and block tables [G, B, max_blocks].
        self.slots: Tensor | None = None
        self.tables: Tensor | None = None

    def begin_step(self, batch: int, tokens: int, device: torch.device) -> None:
        """Give every row `tokens` more slots. Raises ValueError, changing nothing."""
        if self.state.device != device:
            self.state = self.state.to(device)
        self.slots, self.tables = torch.ops.kvtailor.begin_step(
            self.state, self.handle, len(self.layout.specs), self.max_blocks, batch, tokens
        )
        self.length += tokens

    def step_tables(self, batch: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Append to every row, and settle what came before; returns (slots, tables)."""
        if self.rows and len(self.rows) != batch:
            raise ValueError(f"the batch must stay {len(self.rows)} rows, got {batch}")
        start = self.kv.num_tokens(self.rows[0]) if self.rows else 0
        if start + tokens > self.layout.max_tokens:
            raise ValueError(
                f"a row must have at most max_tokens={self.layout.max_tokens} tokens, "
                f"got {start + tokens}"
            )
        if not self.record_past:
            self.settle()
        done: list[int] = []
        try:
            while len(self.rows) < batch:
                self._admit()
            for row in self.rows:
                copies = self.kv.append(row, tokens)
                done.append(row)
                for copy in copies:
                    self.pages.copy_blocks(copy.group, [copy.source], [copy.target])
        except OutOfBlocks as error:
            for row in done:
                self.kv.rollback(row, tokens)
            if not start:
                self.clear()
            raise ValueError(
                f"the pool must hold {batch} rows of {start + tokens} tokens, "
                f"got {error.total} blocks of which {error.free} are free"
            ) from None
        own = [
            np.zeros(batch * tokens, dtype=np.int64)
            if isinstance(spec, CrossSpec)
            else np.concatenate([self.kv.slots(row, group, start) for row in self.rows])
            for group, spec in enumerate(self.layout.specs)
        ]
        return torch.from_numpy(np.stack(own)).to(device), self._all_tables(device)

    def _all_tables(self, device: torch.device) -> Tensor:
        tables = np.zeros((len(self.layout.specs), len(self.rows), self.max_blocks), np.int32)
        for group in range(len(self.layout.specs)):
            table = self.kv.block_tables(self.rows, group)
            tables[group, :, : table.shape[1]] = table
        return torch.from_numpy(tables).to(device)

    def _admit(self) -> None:
        row = next(self._names)
        # The tokens are unknown: nothing can be shared.
        self.kv.allocate(row, (), private=True)
        self.rows.append(row)

    def settle(self) -> None:
        """What has slots is computed: windows move on."""
        for row in self.rows:
            count = self.kv.num_tokens(row) - self.kv.num_computed(row)
            if count:
                self.kv.settle(row, [0] * count)
        self.tables = None

    def crop(self, tokens: int) -> None:
        """Drop the last `tokens` tokens of every row. Raises ValueError if a window is lost."""
        for row in self.rows:
            self.kv.rollback(row, tokens)
        self.length = max(0, self.length - tokens)
        self.tables = None
        if self.record_past:
            self.settle()

    def branch(self, parents: Sequence[int]) -> None:
        """Row i goes on from what row parents[i] holds; whoever writes first copies."""
        if not self.rows:
            return
        if not all(0 <= parent < len(self.rows) for parent in parents):
            raise ValueError(f"rows must be 0 to {len(self.rows) - 1}, got {list(parents)}")
        self.settle()
        old, self.rows = self.rows, [next(self._names) for _ in parents]
        for row, parent in zip(self.rows, parents):
            self.kv.fork(old[parent], row)
        for row in old:
            self.kv.free(row)
        self.tables = None

    def clear(self) -> None:
        """Give every block back."""
        for row in self.rows:
            self.kv.free(row)
        self.rows, self.length = [], 0
        self.tables = None

    def gather(self, layer: str, which: int, start: int, stop: int) -> Tensor:
        """Keys (which=0) or values [B, H, stop - start, D] of the positions start .. stop-1."""
        pages = self.pages[layer][which]
        if self.tables is None:
            self.tables = self._all_tables(pages.device)
        table = self.tables[self.layout.group_of[layer]]
        return gather_kv(pages, table, start, stop).transpose(1, 2)
