"""The pool of KV blocks, and the index of what cached blocks hold.

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

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

__all__ = ["NULL_BLOCK", "BlockPool", "Event", "OutOfBlocks", "PrefixIndex", "PrefixNode"]

NULL_BLOCK = 0


class OutOfBlocks(RuntimeError):
    """The pool can't serve a call; nothing was taken.

    needed: blocks the call wants. free: blocks that could be handed out now. total: blocks of
    the whole pool; more than that can never be served.
    """

    def __init__(self, needed: int, free: int, total: int) -> None:
        self.needed, self.free, self.total = needed, free, total
        hint = "never fits" if needed > total else "free or preempt a request first"
        super().__init__(f"needed {needed} blocks, {free} of {total} are free: {hint}")


class Event(NamedTuple):
    """Something that happened. kind and what `subject` and `value` are:

    "hit": request, tokens found. "evict": group, block. "copy": source block, new block.
    "preempt": request, tokens lost. "refuse": request, blocks needed.
    """

    kind: str
    subject: Hashable
    value: int


class PrefixNode:
    """One full block of tokens after one particular prefix.

    blocks[g]: the cached blocks of group g with this content: 0 for none, the block, or a dict
    of several (two requests may compute the same prefix at the same time). refs: children,
    cached blocks and pins that keep this node; a new one has a pin.
    """

    __slots__ = ("blocks", "children", "key", "parent", "refs")

    def __init__(self, parent: PrefixNode | None, key: Hashable, num_groups: int) -> None:
        self.parent = parent
        self.key = key
        # A node mostly has one child; a dict for each would be half of what a prefix weighs.
        self.children: PrefixNode | dict[Hashable, PrefixNode] | None = None
        self.blocks: list[int | dict[int, None]] = [NULL_BLOCK] * num_groups
        self.refs = 1

    def block(self, group: int) -> int:
        """A cached block of `group` with this content, or the null block."""
        held = self.blocks[group]
        return held if isinstance(held, int) else next(iter(held))


def _hashed_by(hash_tokens: Callable[[bytes], int]) -> Callable[[bytes], Hashable]:
    """Bytes that compare as bytes do, and hash as told."""

    class HashedTokens(bytes):
        def __hash__(self) -> int:
            return hash_tokens(bytes(self))

    return HashedTokens


class PrefixIndex:
    """Finds blocks by the tokens they hold *and* all tokens before them.

    A tree: a node's path from the root spells the prefix, block by block, so two prompts meet
    in a node only if salt and every token are equal. Children are found by hash and then
    compared by value, as in any dict: a poor `hash_tokens` costs time, never a wrong block.
    Groups of equal block size share a tree.
    """

    def __init__(self, num_groups: int, hash_tokens: Callable[[bytes], int] | None = None) -> None:
        self._num_groups = num_groups
        self._roots: dict[tuple[int, Hashable], PrefixNode] = {}
        self._key = None if hash_tokens is None else _hashed_by(hash_tokens)

    def __len__(self) -> int:
        """Nodes, roots not counted."""
        count, nodes = -len(self._roots), list(self._roots.values())
        while nodes:
            node = nodes.pop()
            count += 1
            children = node.children
            nodes.extend(
                children.values() if isinstance(children, dict) else filter(None, [children])
            )
        return count

    def find(self, block_bytes: int, salt: Hashable, tokens: bytes, limit: int) -> list[PrefixNode]:
        """The nodes of the first `limit` blocks of `tokens`, as far as they are known.

        block_bytes: bytes of one block's tokens.
        """
        path: list[PrefixNode] = []
        node = self._roots.get((block_bytes, salt))
        if node is None:
            return path
        key = self._key
        for start in range(0, limit * block_bytes, block_bytes):
            chunk: Hashable = tokens[start : start + block_bytes]
            if key is not None:
                chunk = key(chunk)  # type: ignore[arg-type]
            children = node.children
            if isinstance(children, PrefixNode):
                node = children if children.key == chunk else None
            else:
                node = children.get(chunk) if children else None
            if node is None:
                break
            path.append(node)
        return path

    def root(self, block_bytes: int, salt: Hashable) -> PrefixNode:
        """The pinned node of the empty prefix. Pair with `unpin`."""
        node = self._roots.get((block_bytes, salt))
        if node is None:
            node = self._roots[block_bytes, salt] = PrefixNode(None, (block_bytes, salt), 0)
        else:
            node.refs += 1
        return node

    def extend(self, node: PrefixNode, block_bytes: int, tokens: bytes) -> list[PrefixNode]:
        """The nodes of the full blocks `tokens` after `node`, made where they aren't known.

        A pin of `node` moves to the last of them.
        """
        nodes = []
        key = self._key
        for start in range(0, len(tokens), block_bytes):
            chunk: Hashable = tokens[start : start + block_bytes]
            if key is not None:
                chunk = key(chunk)  # type: ignore[arg-type]
            children = node.children
            if isinstance(children, PrefixNode):
                child = children if children.key == chunk else None
            else:
                child = children.get(chunk) if children else None
            if child is None:
                # Pinned from the start; and what was a pin of its parent is now a child.
                child = PrefixNode(node, chunk, self._num_groups)
                if children is None:
                    node.children = child
                elif isinstance(children, dict):
                    children[chunk] = child
                else:
                    node.children = {children.key: children, chunk: child}
            else:
                child.refs += 1
                node.refs -= 1
            nodes.append(child)
            node = child
        return nodes

    def pin(self, node: PrefixNode) -> PrefixNode:
        """Keep the node, and so the path to it, until `unpin`."""
        node.refs += 1
        return node

    def unpin(self, node: PrefixNode) -> None:
        node.refs -= 1
        self.prune(node)

    def prune(self, node: PrefixNode) -> None:
        """Drop the node if nothing needs it, then its parent likewise."""
        while node.refs == 0:
            parent = node.parent
            if parent is None:
                del self._roots[node.key]  # type: ignore[arg-type]
                return
            if isinstance(parent.children, dict):
                del parent.children[node.key]
            else:
                parent.children = None
            parent.refs -= 1
            node = parent


class BlockPool:
    """Hands out blocks, counts their users, and evicts what was not used for longest.

    num_blocks: blocks to hand out, numbered 1 to num_blocks: pages need one row more.
    num_groups: who asks (`group`) is kept per block, for the counters and the index.
    """

    def __init__(
        self, num_blocks: int, num_groups: int = 1, index: PrefixIndex | None = None
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be positive, got {num_blocks}")
        self.num_blocks = num_blocks
        # Blocks that `allocate` could hand out now, cached ones included.
        self.num_free = num_blocks
        self.index = PrefixIndex(num_groups) if index is None else index
        self.live = [0] * num_groups
        self.peak = 0
        self.evictions = 0
        self.events: deque[Event] = deque(maxlen=1024)
        self._ref_counts = [0] * (num_blocks + 1)
        self._groups = [0] * (num_blocks + 1)
        self._nodes: list[PrefixNode | None] = [None] * (num_blocks + 1)
        # Free blocks: those without content as a stack, the others least recently used first.
        self._blank = list(range(num_blocks, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    def __repr__(self) -> str:
        used = self.num_blocks - self.num_free
        return f"<BlockPool {used} of {self.num_blocks} blocks used, {len(self._cached)} cached>"

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be found."""
        return len(self._cached)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def node(self, block: int) -> PrefixNode | None:
        """The prefix under which the block can be found; None if it can't."""
        return self._nodes[block]

    def allocate(self, count: int, group: int = 0) -> list[int]:
        """Take `count` blocks, in ascending order. Raises OutOfBlocks, then taking none.

        Blank blocks go first, then the least recently used cached ones, which are forgotten.
        """
        blank = self._blank
        if count > self.num_free:
            raise OutOfBlocks(count, self.num_free, self.num_blocks)
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
        group = self._groups[block]
        held = node.blocks[group]
        if held == NULL_BLOCK:
            node.blocks[group] = block
        elif isinstance(held, dict):
            held[block] = None
        else:
            node.blocks[group] = {held: None, block: None}

    def uncache(self, block: int) -> None:
        """Forget what the block holds; it is about to be written."""
        node = self._nodes[block]
        if node is None:
            return
        self._nodes[block] = None
        node.refs -= 1
        group = self._groups[block]
        held = node.blocks[group]
        if isinstance(held, dict):
            del held[block]
            if len(held) == 1:
                (node.blocks[group],) = held
        else:
            node.blocks[group] = NULL_BLOCK
        self.index.prune(node)

    def copy(self, block: int, group: int) -> int:
        """A block of one's own in place of a shared one; the caller copies the content."""
        (new,) = self.allocate(1, group)
        self.free((block,))
        self.events.append(Event("copy", block, new))
        return new

    def cached_blocks(self) -> Sequence[int]:
        """Free blocks that can still be found, the next to be evicted first."""
        return list(self._cached)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self.uncache(block)
        self.evictions += 1
        self.events.append(Event("evict", self._groups[block], block))
        return block

    def _use(self, count: int) -> None:
        self.num_free -= count
        used = self.num_blocks - self.num_free
        if used > self.peak:
            self.peak = used
