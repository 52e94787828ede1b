"""Block tables of one group of layers: which block holds which tokens of which request.

Block i of a request's table holds its tokens i*B to i*B+B-1. What no later query can see is
given back and replaced by the null block; how far that goes is the spec's to say, so one class
serves all kinds of layers:

    pool = BlockPool(num_blocks=8)
    manager = GroupManager(SlidingSpec(4, block_size=2), pool)
    manager.allocate("a", [])
    manager.append("a", 0, 7)             # slots for 7 tokens: tables["a"] == [1, 2, 3, 4]
    manager.remove_skipped("a", 7)        # they are computed: tables["a"] == [0, 0, 3, 4]
    manager.free("a")

A manager knows nothing of token ids and keeps no lengths: `HybridManager` does that for all
groups together, and asks for `blocks_needed` before it appends.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from kvtailor.runtime.kv.blocks import BlockPool
from kvtailor.runtime.kv.prefix import NULL_BLOCK, PrefixNode
from kvtailor.runtime.kv.spec import KVSpec

__all__ = ["BlockCopy", "GroupManager", "HitSearch"]


class BlockCopy(NamedTuple):
    """Copy block `source` of a group's pages to `target` before the step writes."""

    group: int
    source: int
    target: int


class GroupManager:
    """The block tables of one group of layers.

    spec: what the layers keep. group: the group's number in the pool. align: hits are
    multiples of this many tokens (default: a block). lookahead: tokens after a hit that must be
    cached too (speculative drafting needs a block, see `HybridManager`).

    tables: request -> its blocks, null where it holds nothing.
    """

    def __init__(
        self,
        spec: KVSpec,
        pool: BlockPool,
        group: int = 0,
        align: int | None = None,
        lookahead: int = 0,
    ) -> None:
        self.spec = spec
        self.pool = pool
        self.group = group
        self.block_size = spec.block_size
        self.align = align or spec.block_size
        self.lookahead = lookahead
        self.tables: dict[Hashable, list[int]] = {}
        # is_worth_caching of the first blocks.
        self._worth_caching: list[bool] = []
        # Leading blocks given back because no query sees them any more.
        self._num_skipped: dict[Hashable, int] = {}

    # Prefix hits

    def hit_blocks(self, path: Sequence[PrefixNode], length: int) -> list[int]:
        """The table of a hit of `length` tokens: null blocks, then the cached ones."""
        skipped = self.spec.skipped(length) // self.block_size
        nodes = path[skipped : length // self.block_size]
        return [NULL_BLOCK] * skipped + [node.block(self.group) for node in nodes]

    def is_worth_caching(self, block: int) -> bool:
        """Whether any hit reads block number `block` of a request.

        With hits at multiples of 32 tokens, a window of 8 and blocks of 8, only every fourth.
        """
        spec, align = self.spec, self.align
        start, end = block * self.block_size, (block + 1) * self.block_size
        # The shortest hit that reaches into the block.
        length = max(align, (start - self.lookahead) // align * align + align)
        while (skipped := spec.skipped(length)) < end:
            if skipped < length:
                return True
            length += align
        return False

    # A request's life

    def allocate(self, request: Hashable, hit: Sequence[int]) -> None:
        """Start the request's table with the blocks of its hit, sharing them."""
        self.pool.share(hit)
        self.tables[request] = list(hit)
        self._num_skipped[request] = next((i for i, b in enumerate(hit) if b), len(hit))

    def blocks_needed(self, request: Hashable, start: int, stop: int) -> int:
        """Blocks that `append` with these arguments takes from the pool."""
        table = self.tables[request]
        needed = max(0, -(-stop // self.block_size) - len(table))
        if start < stop and start % self.block_size:
            block = table[start // self.block_size]
            needed += block == NULL_BLOCK or self.pool.ref_count(block) > 1
        return needed

    def append(self, request: Hashable, start: int, stop: int) -> BlockCopy | None:
        """Make the positions start .. stop-1 writable: they follow what is there.

        A half-full block that others use too is copied first: perform the copy that is
        returned before the step writes. The pool must have the `blocks_needed` free.
        """
        table, block_size, copy = self.tables[request], self.block_size, None
        if start < stop and start % block_size:
            index = start // block_size
            block = table[index]
            if block == NULL_BLOCK:
                # A chunk started inside a block whose first part was given back.
                table[index : index + 1] = self.pool.allocate(1, self.group)
                self._num_skipped[request] = min(self._num_skipped[request], index)
            elif self.pool.ref_count(block) > 1:
                table[index] = self.pool.copy(block, self.group)
                copy = BlockCopy(self.group, block, table[index])
            else:
                self.pool.uncache(block)
        missing = -(-stop // block_size) - len(table)
        if missing > 0:
            table += self.pool.allocate(missing, self.group)
        return copy

    def cache(self, request: Hashable, first: int, nodes: Sequence[PrefixNode]) -> None:
        """Let the request's blocks from number `first` on, now full, be found under `nodes`."""
        table, pool = self.tables[request], self.pool
        worth = self._worth_caching
        while len(worth) < first + len(nodes):
            worth.append(self.is_worth_caching(len(worth)))
        for index, node in enumerate(nodes, first):
            if worth[index] and table[index] != NULL_BLOCK:
                pool.cache(table[index], node)

    def remove_skipped(self, request: Hashable, num_computed: int) -> int:
        """Give back the blocks no query from position `num_computed` on can see, last first.

        num_computed: tokens whose step has settled. A step still in flight reads and writes
        only what queries after those see. Returns how many blocks were given back.
        """
        first = self._num_skipped[request]
        last = self.spec.skipped(num_computed) // self.block_size
        if last <= first:
            return 0
        table = self.tables[request]
        self.pool.free(reversed(table[first:last]))
        table[first:last] = [NULL_BLOCK] * (last - first)
        self._num_skipped[request] = last
        return last - first

    def next_removal(self, request: Hashable) -> int:
        """The number of computed tokens at which `remove_skipped` has work."""
        return self.spec.computed_to_skip((self._num_skipped[request] + 1) * self.block_size)

    def can_rollback(self, request: Hashable, num_tokens: int) -> bool:
        """Whether the next query after `num_tokens` tokens would find all it sees."""
        skipped = self.spec.skipped(num_tokens)
        if skipped == num_tokens:
            return True
        return skipped // self.block_size >= self._num_skipped[request]

    def rollback(self, request: Hashable, num_tokens: int) -> None:
        """Shorten the table to `num_tokens` tokens; later blocks are given back, last first."""
        table = self.tables[request]
        keep = self.spec.num_blocks(num_tokens)
        self.pool.free(reversed(table[keep:]))
        del table[keep:]
        self._num_skipped[request] = min(self._num_skipped[request], keep)

    def fork(self, request: Hashable, child: Hashable) -> None:
        """Give `child` the same table; whoever writes a shared block first copies it."""
        table = self.tables[request]
        self.pool.share(table)
        self.tables[child] = list(table)
        self._num_skipped[child] = self._num_skipped[request]

    def free(self, request: Hashable) -> None:
        """Give back all of the request's blocks, last first: prefixes outlive their tails."""
        self.pool.free(reversed(self.tables.pop(request)))
        del self._num_skipped[request]


class HitSearch:
    """The longest hit of one group, for a limit that only ever shrinks.

    path: the nodes of a prompt's blocks, from `PrefixIndex.find`.

    A hit of L tokens is valid when every block of the positions skipped(L) .. L-1 is cached;
    with lookahead, of skipped(L) .. L+lookahead-1. Where skipped(L) == L nothing is read and
    nothing need be cached. Each node is looked at once, however often `longest` is called.
    """

    def __init__(self, manager: GroupManager, path: Sequence[PrefixNode]) -> None:
        self._manager = manager
        self._path = path
        # Blocks found cached so far: low .. high-1.
        self._low = self._high = 0

    def longest(self, limit: int) -> int:
        """The longest hit of at most `limit` tokens, a multiple of `align`."""
        manager = self._manager
        spec, align, lookahead = manager.spec, manager.align, manager.lookahead
        length = limit - limit % align
        while length > 0:
            skipped = spec.skipped(length)
            if skipped == length:
                return length
            end = length + lookahead
            miss = self._miss(skipped // spec.block_size, end // spec.block_size)
            if miss is None:
                return length
            # A shorter hit must end before the missing block, or read nothing at all.
            before = miss * spec.block_size - lookahead
            length = max(before - before % align, spec.free_hit(length - 1, align))
        return 0

    def _miss(self, low: int, high: int) -> int | None:
        """A block of low .. high-1 that isn't cached, from the right; None if all are."""
        path, group = self._path, self._manager.group
        if high > len(path):
            return max(low, len(path))
        if not self._low < high <= self._high:
            self._low = self._high = high
        while self._low > low:
            if not path[self._low - 1].blocks[group]:
                self._high = self._low
                return self._low - 1
            self._low -= 1
        return None
