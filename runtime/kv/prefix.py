"""The index of what cached blocks hold: finds them by their tokens and all tokens before them.

Tokens are the bytes of their ids as C ints; a block size is a number of tokens.

    tokens = token_array(range(12)).tobytes()
    index = PrefixIndex(num_groups=1)
    own = PinnedPrefix(index, sizes=(4,), salt=None, tokens=b"")    # a request's place in it
    nodes = own.extend(0, tokens)       # of its full blocks, made where they aren't known
    path = index.find(4, None, tokens)  # the nodes of as many of them as are known
    path[0].block(group=0)              # a cached block with this content, or the null block
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence

import numpy as np

__all__ = [
    "NULL_BLOCK",
    "TOKEN_BYTES",
    "PinnedPrefix",
    "PrefixIndex",
    "PrefixNode",
    "token_array",
]

NULL_BLOCK = 0
TOKEN_BYTES = array("i").itemsize


def token_array(tokens: Iterable[int]) -> array[int]:
    """Token ids as C ints. Raises ValueError or TypeError for anything but integers."""
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(
                f"tokens must be a row of integers, got shape {tokens.shape}, {tokens.dtype}"
            )
        return array("i", tokens.tolist())
    return array("i", tokens)


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

    def add_block(self, group: int, block: int) -> None:
        held = self.blocks[group]
        if held == NULL_BLOCK:
            self.blocks[group] = block
        elif isinstance(held, dict):
            held[block] = None
        else:
            self.blocks[group] = {held: None, block: None}

    def remove_block(self, group: int, block: int) -> None:
        held = self.blocks[group]
        if isinstance(held, dict):
            del held[block]
            if len(held) == 1:
                (self.blocks[group],) = held
        else:
            self.blocks[group] = NULL_BLOCK

    def child(self, key: Hashable) -> PrefixNode | None:
        children = self.children
        if isinstance(children, PrefixNode):
            return children if children.key == key else None
        return children.get(key) if children else None

    def add_child(self, child: PrefixNode) -> None:
        children = self.children
        if children is None:
            self.children = child
        elif isinstance(children, dict):
            children[child.key] = child
        else:
            self.children = {children.key: children, child.key: child}

    def remove_child(self, child: PrefixNode) -> None:
        if isinstance(self.children, dict):
            del self.children[child.key]
        else:
            self.children = None


class PrefixIndex:
    """Finds blocks by the tokens they hold *and* all tokens before them.

    A tree: a node's path from the root spells the prefix, block by block, so two prompts meet
    in a node only if salt and every token are equal. Children are found by hash and then
    compared by value, as in any dict: a poor hash costs time, never a wrong block. Groups of
    equal block size share a tree.
    """

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._roots: dict[tuple[int, Hashable], PrefixNode] = {}

    def find(self, block_size: int, salt: Hashable, tokens: bytes) -> list[PrefixNode]:
        """The nodes of the full blocks of `tokens`, as far as they are known."""
        path: list[PrefixNode] = []
        node = self._roots.get((block_size, salt))
        if node is None:
            return path
        for chunk in self._chunks(tokens, block_size):
            node = node.child(chunk)
            if node is None:
                break
            path.append(node)
        return path

    def _chunks(self, tokens: bytes, block_size: int) -> Iterator[bytes]:
        """The full blocks of `tokens`."""
        step = block_size * TOKEN_BYTES
        return (tokens[start : start + step] for start in range(0, len(tokens) - step + 1, step))

    def root(self, block_size: int, salt: Hashable) -> PrefixNode:
        """The node of the empty prefix, pinned. Pair with `unpin`."""
        node = self._roots.get((block_size, salt))
        if node is None:
            node = self._roots[block_size, salt] = PrefixNode(None, (block_size, salt), 0)
        else:
            node.refs += 1
        return node

    def extend(self, node: PrefixNode, block_size: int, tokens: bytes) -> list[PrefixNode]:
        """The nodes of the full blocks of `tokens` after `node`, made where they aren't known.

        A pin of `node` moves to the last of them.
        """
        nodes = []
        for chunk in self._chunks(tokens, block_size):
            child = node.child(chunk)
            if child is None:
                # Pinned from the start; and what was a pin of its parent is now a child.
                child = PrefixNode(node, chunk, self._num_groups)
                node.add_child(child)
            else:
                child.refs += 1
                node.refs -= 1
            nodes.append(child)
            node = child
        return nodes

    def unpin(self, node: PrefixNode) -> None:
        """Drop a pin or a block of the node; nodes nothing needs any more go."""
        node.refs -= 1
        while node.refs == 0:
            parent = node.parent
            if parent is None:
                del self._roots[node.key]  # type: ignore[arg-type]
                return
            parent.remove_child(node)
            parent.refs -= 1
            node = parent


class PinnedPrefix:
    """A request's place in the index: in each tree, the pinned node of its last full block.

    sizes: the block size of each tree. tokens: what it begins with. What is pinned stays in the
    index, whichever of its blocks are evicted.
    """

    def __init__(
        self, index: PrefixIndex, sizes: Sequence[int], salt: Hashable, tokens: bytes
    ) -> None:
        self._index = index
        self._sizes = sizes
        self._nodes = [index.root(size, salt) for size in sizes]
        for tree in range(len(sizes)):
            self.extend(tree, tokens)

    def extend(self, tree: int, tokens: bytes) -> list[PrefixNode]:
        """The nodes of its next full blocks."""
        nodes = self._index.extend(self._nodes[tree], self._sizes[tree], tokens)
        if nodes:
            self._nodes[tree] = nodes[-1]
        return nodes

    def rewind(self, tree: int, num_blocks: int) -> None:
        """Go back by `num_blocks` blocks."""
        tail = node = self._nodes[tree]
        for _ in range(num_blocks):
            assert node.parent is not None
            node = node.parent
        node.refs += 1
        self._nodes[tree] = node
        self._index.unpin(tail)

    def copy(self) -> PinnedPrefix:
        """The same place, for another request."""
        other = copy.copy(self)
        other._nodes = list(self._nodes)
        for node in other._nodes:
            node.refs += 1
        return other

    def unpin(self) -> None:
        """The request is over."""
        for node in self._nodes:
            self._index.unpin(node)
