"""The pool of KV blocks: who uses which, and which may be taken back.

A block is a number: row `block` of the key and value pages. The pool counts who uses it.
A block nobody uses any more is *blank* when its content is of no use, else *cached*: a later
request with the same prefix may take it back, until it is evicted to make room.

    pool = BlockPool(num_blocks=4)
    a, b = pool.allocate(2)
    pool.share([a])         # a second user
    pool.free([a, b])       # b is free again, a has one user left

Block 0 is the null block: it stands in block tables where a request holds nothing, and is
never handed out, counted or freed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kvtailor.runtime.kv.prefix import NULL_BLOCK, PrefixIndex, PrefixNode

__all__ = ["BlockPool", "OutOfBlocks", "Stats"]


class OutOfBlocks(RuntimeError):
    """The pool can't serve a call; nothing was taken.

    needed: blocks the call wants. free: blocks that could be handed out now. total: blocks of
    the whole pool; more than that can never be served.
    """

    def __init__(self, needed: int, free: int, total: int) -> None:
        self.needed, self.free, self.total = needed, free, total
        hint = "never fits" if needed > total else "free or preempt a request first"
        super().__init__(f"needed {needed} blocks, {free} of {total} are free: {hint}")


@dataclass(frozen=True)
class Stats:
    """Counters since the start; `live_blocks` per group, and everything else, as of now.

    hit_tokens of queried_tokens prompt tokens were found. A resumed request's own tokens count
    in neither: finding them again is no merit of sharing.
    """

    requests: int
    preemptions: int
    queried_tokens: int
    hit_tokens: int
    evictions: int
    copies: int
    refusals: int
    live_blocks: tuple[int, ...]
    free_blocks: int
    cached_blocks: int
    peak_blocks: int


class BlockPool:
    """Hands out blocks, counts their users, and evicts what was not used for longest.

    num_blocks: blocks to hand out, numbered 1 to num_blocks: pages need one row more.
    num_groups: who asks (`group`) is kept per block, for the counters and the index (`index`).
    """

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be positive, got {num_blocks}")
        self.num_blocks = num_blocks
        # Blocks that `allocate` could hand out now, cached ones included.
        self.num_free = num_blocks
        self.index = PrefixIndex(num_groups)
        self.live = [0] * num_groups
        self.peak = 0
        self.evictions = self.copies = self.refusals = 0
        self._ref_counts = [0] * (num_blocks + 1)
        self._groups = [0] * (num_blocks + 1)
        self._nodes: list[PrefixNode | None] = [None] * (num_blocks + 1)
        # Free blocks: those without content as a stack, the others least recently used first.
        self._blank = list(range(num_blocks, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be found."""
        return len(self._cached)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def require(self, count: int) -> None:
        """Raise OutOfBlocks unless `count` blocks could be handed out now."""
        if count > self.num_free:
            self.refusals += 1
            raise OutOfBlocks(count, self.num_free, self.num_blocks)

    def allocate(self, count: int, group: int = 0) -> list[int]:
        """Take `count` blocks, in ascending order. Raises OutOfBlocks, then taking none.

        Blank blocks go first, then the least recently used cached ones, which are forgotten.
        """
        blank = self._blank
        self.require(count)
        if count == 1:
            # The common case, a step of decode.
            blocks = [blank.pop() if blank else self._evict()]
        else:
            split = max(0, len(blank) - count)
            blocks = blank[split:]
            del blank[split:]
            while len(blocks) < count:
                blocks.append(self._evict())
            # Neighbouring blocks in ascending order can be read as one run.
            blocks.sort()
        ref_counts, groups = self._ref_counts, self._groups
        for block in blocks:
            ref_counts[block] = 1
            groups[block] = group
        self.live[group] += count
        self._use(count)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to each block: of another request, or cached and found again."""
        found = 0
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self._ref_counts[block] == 0:
                if self._nodes[block] is None:
                    raise ValueError(f"a shared block must be in use or cached, got block {block}")
                del self._cached[block]
                self.live[self._groups[block]] += 1
                found += 1
            self._ref_counts[block] += 1
        self._use(found)

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one user of each block, in this order: the first is evicted first."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            count = self._ref_counts[block]
            if count == 0:
                raise ValueError(f"a freed block must be in use, got block {block}, free already")
            self._ref_counts[block] = count - 1
            if count == 1:
                self.live[self._groups[block]] -= 1
                self.num_free += 1
                if self._nodes[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

    def cache(self, block: int, node: PrefixNode) -> None:
        """Let the block be found under `node`: it is full, and its content final."""
        assert self._nodes[block] is None
        self._nodes[block] = node
        node.refs += 1
        node.add_block(self._groups[block], block)

    def uncache(self, block: int) -> None:
        """Forget what the block holds; it is about to be written."""
        node = self._nodes[block]
        if node is None:
            return
        self._nodes[block] = None
        node.remove_block(self._groups[block], block)
        self.index.unpin(node)

    def copy(self, block: int, group: int) -> int:
        """A block of one's own in place of a shared one; the caller copies the content."""
        (new,) = self.allocate(1, group)
        self.free((block,))
        self.copies += 1
        return new

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self.uncache(block)
        self.evictions += 1
        return block

    def _use(self, count: int) -> None:
        self.num_free -= count
        used = self.num_blocks - self.num_free
        if used > self.peak:
            self.peak = used
