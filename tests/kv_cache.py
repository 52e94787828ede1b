"""What the tests of the block manager share: hits without taking them, collisions, the index."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable

from kvtailor.runtime.kv.blocks import BlockPool
from kvtailor.runtime.kv.hybrid import HybridManager
from kvtailor.runtime.kv.layout import Pages
from kvtailor.runtime.kv.prefix import PrefixIndex, PrefixNode, token_array


def longest_hit(kv: HybridManager, tokens: object, salt: Hashable = None) -> int:
    """Tokens of the prompt that `allocate` would find; takes nothing."""
    return kv._find_hit(token_array(tokens), salt)[0]


def node_of(pool: BlockPool, block: int) -> PrefixNode | None:
    """Where in the index the block can be found; None if it can't."""
    return pool._nodes[block]


def cached_blocks(pool: BlockPool) -> list[int]:
    """Free blocks that can still be found, the next to be evicted first."""
    return list(pool._cached)


def num_nodes(index: PrefixIndex) -> int:
    """Nodes that aren't roots."""
    count, nodes = -len(index._roots), list(index._roots.values())
    while nodes:
        children = nodes.pop().children
        count += 1
        nodes += children.values() if isinstance(children, dict) else filter(None, [children])
    return count


def hash_by(pool: BlockPool, hash_tokens: Callable[[bytes], int] | None) -> None:
    """Let the index of an unused pool tell blocks apart by this hash of their tokens."""
    if hash_tokens is None:
        return

    class Chunk(bytes):
        def __hash__(self) -> int:
            return hash_tokens(bytes(self))

    class CollidingIndex(PrefixIndex):
        def _chunks(self, tokens, block_size):
            return map(Chunk, super()._chunks(tokens, block_size))

    pool.index = CollidingIndex(len(pool.live))


def num_bytes(pages: Pages) -> int:
    """Bytes of all page tensors."""
    return sum(p.numel() * p.element_size() for pair in pages._made.values() for p in pair)


def token_bytes(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()
