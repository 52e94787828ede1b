"""The pool and its index: reference counts, eviction, prefixes that are told apart."""

from __future__ import annotations

import random
from array import array

import pytest
from kv_cache import cached_blocks, hash_by, num_nodes, token_bytes

from kvtailor.runtime.kv.blocks import BlockPool, OutOfBlocks
from kvtailor.runtime.kv.prefix import NULL_BLOCK, TOKEN_BYTES, PinnedPrefix, PrefixIndex

COLLIDING = [
    pytest.param(None, id="hash of bytes"),
    pytest.param(lambda tokens: 0, id="all collide"),
    pytest.param(lambda tokens: sum(array("i", tokens)) % 2, id="tokens mod 2"),
]


def cached_chain(pool, chunks, salt=None, group=0):
    """Blocks of one request with these chunks of tokens, cached, in use."""
    size = len(chunks[0]) // TOKEN_BYTES
    nodes = pool.index.extend(pool.index.root(size, salt), size, b"".join(chunks))
    blocks = pool.allocate(len(chunks), group)
    for block, node in zip(blocks, nodes):
        pool.cache(block, node)
    pool.index.unpin(nodes[-1])
    return blocks


# Reference counts


def test_blocks_are_handed_out_in_ascending_order_and_never_the_null_block():
    pool = BlockPool(6)
    assert pool.allocate(2) == [1, 2]
    assert pool.allocate(3) == [3, 4, 5]
    pool.free([4, 2, 1, 3])
    # Neighbours in order, however they were freed.
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert (pool.num_free, pool.num_cached) == (1, 0)


def test_a_shared_block_is_free_after_its_last_user():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.share([block, NULL_BLOCK])
    pool.free([block, NULL_BLOCK])
    assert (pool.ref_count(block), pool.num_free) == (1, 1)
    pool.free([block])
    assert (pool.ref_count(block), pool.num_free) == (0, 2)


def test_p05_double_free_is_an_error():
    """P05: freed twice is an error, and the count never -1."""
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.free([block])
    with pytest.raises(ValueError, match=f"must be in use, got block {block}, free already"):
        pool.free([block])
    assert (pool.ref_count(block), pool.num_free, pool.live) == (0, 2, [0])


def test_sharing_a_blank_block_is_an_error():
    with pytest.raises(ValueError, match="in use or cached, got block 1"):
        BlockPool(2).share([1])


def test_a_pool_that_is_too_small_says_by_how_much_and_takes_nothing():
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(OutOfBlocks, match="needed 3 blocks, 2 of 3 are free: free or preempt"):
        pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="needed 4 blocks, 2 of 3 are free: never fits") as error:
        pool.allocate(4)
    assert (error.value.needed, error.value.free, error.value.total) == (4, 2, 3)
    assert pool.num_free == 2


def test_a_pool_needs_a_block():
    with pytest.raises(ValueError, match="num_blocks must be positive, got 0"):
        BlockPool(0)


def test_live_blocks_are_counted_per_group_and_the_peak_is_kept():
    pool = BlockPool(5, num_groups=2)
    a = pool.allocate(3, group=0)
    b = pool.allocate(1, group=1)
    pool.share(a)
    assert (pool.live, pool.peak) == ([3, 1], 4)
    pool.free(a)
    pool.free(a)
    pool.free(b)
    assert (pool.live, pool.peak) == ([0, 0], 4)


# Eviction


def test_blank_blocks_go_first_then_the_least_recently_used():
    pool = BlockPool(5)
    a, b, c = cached_chain(pool, [token_bytes(1), token_bytes(2), token_bytes(3)])
    (blank,) = pool.allocate(1)
    pool.free([blank, b, a, c])
    assert cached_blocks(pool) == [b, a, c]
    assert (pool.num_free, pool.num_cached) == (5, 3)
    assert pool.allocate(3) == sorted([blank, 5, b])
    assert pool.evictions == 1
    # Found again, a is used last of all.
    pool.share([a])
    pool.free([a])
    assert cached_blocks(pool) == [c, a]


def test_an_evicted_block_is_forgotten_and_so_is_its_prefix():
    pool = BlockPool(2)
    chunks = [token_bytes(1), token_bytes(2)]
    pool.free(reversed(cached_chain(pool, chunks)))
    find = lambda: pool.index.find(1, None, b"".join(chunks))  # noqa: E731
    assert [node.block(0) for node in find()] == [1, 2]
    pool.allocate(1)
    # The tail went first; its prefix is still there.
    assert [node.block(0) for node in find()] == [1]
    pool.allocate(1)
    assert find() == []
    assert num_nodes(pool.index) == 0


def test_p02_the_index_never_grows():
    """P02: a recycled block loses its old entry, over 1,000 random cycles."""
    rng = random.Random(0)
    pool = BlockPool(4)
    for _ in range(1000):
        chunks = [token_bytes(rng.randrange(5), rng.randrange(5)) for _ in range(rng.randint(1, 4))]
        pool.free(reversed(cached_chain(pool, chunks)))
        assert pool.num_cached <= 4
        # A cached block keeps at most the 3 before it.
        assert num_nodes(pool.index) <= 4 * 4
        assert pool.num_free == 4
    pool.allocate(4)
    assert num_nodes(pool.index) == 0


# Duplicates


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first", "second"])
def test_a_duplicate_outlives_its_twin(order):
    pool = BlockPool(4)
    chunk = token_bytes(7)
    twins = [cached_chain(pool, [chunk])[0] for _ in range(2)]
    (node,) = pool.index.find(1, None, chunk)
    assert node.block(0) in twins
    pool.uncache(twins[order[0]])
    assert node.block(0) == twins[order[1]]
    pool.uncache(twins[order[1]])
    assert node.block(0) == NULL_BLOCK
    assert num_nodes(pool.index) == 0


def test_many_duplicates_are_dropped_in_any_order():
    pool = BlockPool(100)
    blocks = [cached_chain(pool, [token_bytes(7)])[0] for _ in range(100)]
    random.Random(0).shuffle(blocks)
    for block in blocks:
        pool.uncache(block)
    assert num_nodes(pool.index) == 0


# Prefixes


@pytest.mark.parametrize("hash_tokens", COLLIDING)
def test_p04_a_collision_never_finds_other_tokens_or_another_prefix(hash_tokens):
    """P04: equal hashes, different tokens, prefixes, or salts."""
    pool = BlockPool(16)
    hash_by(pool, hash_tokens)
    one, two, three, five = (token_bytes(t) for t in (1, 2, 3, 5))
    a = cached_chain(pool, [one, two])
    b = cached_chain(pool, [three, two])
    c = cached_chain(pool, [one, two], salt="adapter")
    blocks = lambda data, salt=None: [  # noqa: E731
        node.block(0) for node in pool.index.find(1, salt, data)
    ]
    assert blocks(one + two) == a
    assert blocks(three + two) == b
    assert blocks(one + two, "adapter") == c
    assert blocks(two) == []
    assert blocks(five + two) == []
    assert blocks(one + five) == a[:1]
    assert blocks(one + two, "another adapter") == []


def test_p08_block_sizes_have_trees_of_their_own():
    """P08: the same tokens in blocks of 2 and of 4 don't meet."""
    pool = BlockPool(16)
    tokens = token_bytes(1, 2, 3, 4)
    small = cached_chain(pool, [token_bytes(1, 2), token_bytes(3, 4)])
    (large,) = cached_chain(pool, [tokens])
    assert [n.block(0) for n in pool.index.find(2, None, tokens)] == small
    assert [n.block(0) for n in pool.index.find(4, None, tokens)] == [large]


def test_groups_of_equal_block_size_share_nodes_and_not_blocks():
    pool = BlockPool(4, num_groups=2)
    chunk = token_bytes(1)
    (a,) = cached_chain(pool, [chunk], group=0)
    (node,) = pool.index.find(1, None, chunk)
    assert (node.block(0), node.block(1)) == (a, NULL_BLOCK)
    (b,) = cached_chain(pool, [chunk], group=1)
    assert (node.block(0), node.block(1)) == (a, b)
    assert num_nodes(pool.index) == 1


def test_a_pinned_prefix_stays_until_it_is_unpinned():
    index = PrefixIndex(1)
    prefix = PinnedPrefix(index, (1,), None, token_bytes(1))
    prefix.extend(0, token_bytes(2, 3))
    assert num_nodes(index) == 3
    prefix.unpin()
    assert num_nodes(index) == 0


def test_a_copied_prefix_is_pinned_by_itself_and_goes_back_as_far_as_told():
    index = PrefixIndex(1)
    prefix = PinnedPrefix(index, (1, 2), None, token_bytes(1, 2))
    other = prefix.copy()
    other.extend(0, token_bytes(3))
    prefix.rewind(0, 1)
    # In blocks of one token 1, 2, 3; in blocks of two 1 2.
    assert num_nodes(index) == 4
    other.unpin()
    assert num_nodes(index) == 2
    prefix.unpin()
    assert num_nodes(index) == 0


def test_copy_leaves_the_shared_block_to_the_others():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.share([block])
    assert pool.copy(block, 0) == 2
    assert (pool.ref_count(block), pool.ref_count(2)) == (1, 1)
    assert pool.copies == 1
