"""Block tables of one group: what is kept, given back, found, copied."""

from __future__ import annotations

import pytest

from kvtailor.runtime.kv.blocks import BlockPool
from kvtailor.runtime.kv.managers import BlockCopy, GroupManager, HitSearch
from kvtailor.runtime.kv.prefix import NULL_BLOCK, PrefixNode
from kvtailor.runtime.kv.spec import ChunkedSpec, FullSpec, SlidingSpec


def manager_of(spec, num_blocks=64, **options):
    return GroupManager(spec, BlockPool(num_blocks), **options)


def longest_hit(manager, path, limit):
    """Tokens that needn't be computed, at most `limit`; lookahead counts towards it."""
    return HitSearch(manager, path).longest(limit - manager.lookahead)


def path_of(cached: str) -> list[PrefixNode]:
    """Nodes of a prompt's blocks: "TF" is one that is cached and one that isn't."""
    path = []
    for index, flag in enumerate(cached):
        node = PrefixNode(None, b"", 1)
        node.blocks[0] = index + 1 if flag == "T" else NULL_BLOCK
        path.append(node)
    return path


def all_but(count: int, *missing: int) -> str:
    return "".join("F" if i in missing else "T" for i in range(count))


# Hits

PATTERN = "TTFTFFTTF"

HITS = [
    # spec, cached blocks, limit in tokens -> tokens
    ("full: none", FullSpec(block_size=4), "", 16, 0),
    ("full: until a miss", FullSpec(block_size=4), "TTFT", 16, 8),
    ("full: up to the limit", FullSpec(block_size=4), "TTTT", 15, 12),
    ("chunked: block 2 cached", ChunkedSpec(8, block_size=4), "FFT", 15, 12),
    ("chunked: block 2 not cached", ChunkedSpec(8, block_size=4), "TTF", 15, 8),
    ("chunked: limit on a boundary", ChunkedSpec(8, block_size=4), "", 16, 16),
    ("chunked: T", ChunkedSpec(4, block_size=2), "T", 2, 2),
    ("chunked: TF", ChunkedSpec(4, block_size=2), "TF", 4, 4),
    ("chunked: TTT", ChunkedSpec(4, block_size=2), "TTT", 6, 6),
    ("chunked: TTTF", ChunkedSpec(4, block_size=2), "TTTF", 8, 8),
    ("chunked: all miss, even", ChunkedSpec(2, block_size=1), "", 6, 6),
    ("chunked: all miss, odd", ChunkedSpec(2, block_size=1), "", 5, 4),
    ("chunked: half a chunk cached", ChunkedSpec(2, block_size=1), "FFFFT", 5, 5),
    ("chunked: prompt 8,192, none", ChunkedSpec(8192), "", 8191, 0),
    ("chunked: prompt 8,192, all", ChunkedSpec(8192), "T" * 512, 8191, 8176),
    ("chunked: prompt 8,193, none", ChunkedSpec(8192), "", 8192, 8192),
    ("chunked: prompt 12,000, none", ChunkedSpec(8192), "", 11_999, 8192),
    ("chunked: prompt 12,000, all", ChunkedSpec(8192), "T" * 749, 11_999, 11_984),
    ("chunked: no multiple of the block", ChunkedSpec(6, block_size=4), "FTT", 12, 12),
    ("chunked: starts inside block 1", ChunkedSpec(6, block_size=4), "FTFT", 11, 8),
    ("chunked: the block it starts in", ChunkedSpec(6, block_size=4), "TFTT", 11, 4),
    ("sliding: ...TTFTTT", SlidingSpec(4, block_size=2), PATTERN + "TTT", 24, 24),
    ("sliding: ...TTFFF", SlidingSpec(4, block_size=2), PATTERN + "FF", 22, 16),
    ("sliding: ...TTFFFT", SlidingSpec(4, block_size=2), PATTERN + "FFT", 24, 16),
    ("sliding: run at block 0", SlidingSpec(9, block_size=2), "TTFTT", 10, 4),
    ("sliding: none", SlidingSpec(4, block_size=2), "FTFTFT", 12, 0),
    ("sliding: window of one", SlidingSpec(1, block_size=2), "", 7, 6),
]


@pytest.mark.parametrize(
    "spec, cached, limit, expected", [pytest.param(*row[1:], id=row[0]) for row in HITS]
)
def test_longest_hit(spec, cached, limit, expected):
    manager = manager_of(spec)
    path = path_of(cached)
    assert longest_hit(manager, path, limit) == expected
    # What a hit reads is there.
    table = manager.hit_blocks(path, expected)
    assert len(table) == expected // spec.block_size
    nulls = spec.skipped(expected) // spec.block_size
    assert table == [NULL_BLOCK] * nulls + [i + 1 for i in range(nulls, len(table))]


def test_the_null_blocks_of_a_hit():
    path = path_of("FFT")
    assert manager_of(ChunkedSpec(8, block_size=4)).hit_blocks(path, 12) == [0, 0, 3]
    assert manager_of(ChunkedSpec(8, block_size=4)).hit_blocks([], 16) == [0, 0, 0, 0]


EAGLE_HITS = [
    ("full drops a block", FullSpec(block_size=4), "TTT", 12, 8),
    ("full, one block", FullSpec(block_size=4), "T", 4, 0),
    ("chunked keeps the chunk whole", ChunkedSpec(2, block_size=1), "", 4, 2),
    ("chunked, within a chunk", ChunkedSpec(8, block_size=1), "TTTTT", 5, 4),
    ("sliding: ...TTFTTT", SlidingSpec(4, block_size=2), PATTERN + "TTT", 24, 22),
    ("sliding: ...TTFFF", SlidingSpec(4, block_size=2), PATTERN + "FF", 22, 2),
    ("sliding: ...TTFFFT", SlidingSpec(4, block_size=2), PATTERN + "FFT", 24, 2),
]


@pytest.mark.parametrize(
    "spec, cached, limit, expected", [pytest.param(*row[1:], id=row[0]) for row in EAGLE_HITS]
)
def test_longest_hit_with_eagle(spec, cached, limit, expected):
    manager = manager_of(spec, lookahead=spec.block_size)
    assert longest_hit(manager, path_of(cached), limit) == expected


def test_a_search_looks_at_each_block_once():
    """However many times the limit shrinks: what a lookup costs is linear in the prompt."""
    looked_at = []

    class Node(PrefixNode):
        def __init__(self, index):
            super().__init__(None, b"", 1)
            self.index = index

        def __getattribute__(self, name):
            if name == "blocks":
                looked_at.append(self.index)
                return [self.index + 1]
            return super().__getattribute__(name)

    path = [Node(i) for i in range(50)]
    search = HitSearch(manager_of(FullSpec(block_size=1)), path)
    assert [search.longest(limit) for limit in range(50, 0, -1)] == list(range(50, 0, -1))
    assert sorted(looked_at) == list(range(50))


@pytest.mark.parametrize(
    "spec, align, worth",
    [
        (SlidingSpec(8, block_size=8), 32, "FFFTFFFT"),
        (SlidingSpec(9, block_size=8), 32, "FFFTFFFT"),
        (SlidingSpec(10, block_size=8), 32, "FFTTFFTT"),
        (SlidingSpec(8, block_size=8), 8, "TTTTTTTT"),
        (SlidingSpec(1, block_size=8), 8, "FFFFFFFF"),
        (FullSpec(block_size=8), 32, "TTTTTTTT"),
        # The last block of a chunk: a hit that ends there reads nothing.
        (ChunkedSpec(32, block_size=8), 8, "TTTFTTTF"),
        (ChunkedSpec(32, block_size=8), 32, "FFFFFFFF"),
        (ChunkedSpec(48, block_size=8), 32, "TTTTFFTT"),
    ],
)
def test_only_blocks_that_a_hit_could_read_are_cached(spec, align, worth):
    manager = manager_of(spec, align=align)
    found = "".join("T" if manager.is_worth_caching(i) else "F" for i in range(8))
    assert found == worth


# What is given back


@pytest.mark.parametrize(
    "spec, num_computed, freed",
    [
        (ChunkedSpec(4, block_size=2), n, f)
        for n, f in zip((0, 3, 4, 6, 7, 8, 12), (0, 0, 2, 2, 2, 4, 6))
    ]
    + [(SlidingSpec(4, block_size=2), n, f) for n, f in zip((4, 5, 6, 7, 11), (0, 1, 1, 2, 4))]
    + [(FullSpec(block_size=2), n, 0) for n in (0, 12)],
    ids=lambda value: str(value),
)
def test_remove_skipped(spec, num_computed, freed):
    manager = manager_of(spec)
    manager.allocate("a", [])
    manager.append("a", 0, 12)
    assert manager.remove_skipped("a", num_computed) == freed
    assert manager.tables["a"] == [NULL_BLOCK] * freed + list(range(freed + 1, 7))
    assert manager.pool.live == [6 - freed]
    assert manager.remove_skipped("a", num_computed) == 0


def test_skipped_blocks_are_freed_back_to_front():
    manager = manager_of(SlidingSpec(1, block_size=1), num_blocks=4)
    manager.allocate("a", [])
    manager.append("a", 0, 4)
    manager.remove_skipped("a", 3)
    # The stack of blank blocks: the first block was freed last.
    assert manager.pool.allocate(1) == [1]


@pytest.mark.parametrize("length, blocks", [(0, 0), (1, 1), (4, 1), (8, 2), (9, 3)])
def test_p05_blocks_of_a_request(length, blocks):
    """P05: block 4; after all is freed the free count is the initial one."""
    manager = manager_of(FullSpec(block_size=4))
    manager.allocate("a", [])
    assert manager.blocks_needed("a", 0, length) == blocks
    manager.append("a", 0, length)
    assert len(manager.tables["a"]) == blocks
    assert all(manager.pool.ref_count(block) == 1 for block in manager.tables["a"])
    manager.free("a")
    assert manager.pool.num_free == 64
    with pytest.raises(KeyError):
        manager.free("a")


# Copy on write, rollback


def test_the_first_to_write_a_shared_block_copies_it():
    manager = manager_of(FullSpec(block_size=4))
    manager.allocate("a", [])
    manager.append("a", 0, 6)
    manager.fork("a", "b")
    assert manager.blocks_needed("b", 6, 7) == 1
    assert manager.append("b", 6, 7) == BlockCopy(0, 2, 3)
    assert manager.tables == {"a": [1, 2], "b": [1, 3]}
    # a has its block for itself now.
    assert manager.append("a", 6, 7) is None


def test_a_full_shared_block_is_not_copied():
    manager = manager_of(FullSpec(block_size=4))
    manager.allocate("a", [])
    manager.append("a", 0, 8)
    manager.fork("a", "b")
    assert manager.append("b", 8, 9) is None
    assert manager.tables == {"a": [1, 2], "b": [1, 2, 3]}


@pytest.mark.parametrize(
    "spec, computed, possible",
    [
        (FullSpec(block_size=2), 9, {*range(10)}),
        # 9 computed: 0..5 are skipped, blocks 0..2 gone; 6 and 7 were still there.
        (SlidingSpec(4, block_size=2), 9, {0, 9}),
        (SlidingSpec(4, block_size=2), 10, {0, 9, 10}),
        (ChunkedSpec(4, block_size=2), 9, {0, 4, 8, 9}),
        (ChunkedSpec(6, block_size=4), 9, {0, 6, 7, 8, 9}),
        (SlidingSpec(1, block_size=2), 9, {*range(10)}),
    ],
    ids=str,
)
def test_rollback_is_possible_where_the_next_query_finds_all_it_sees(spec, computed, possible):
    manager = manager_of(spec)
    manager.allocate("a", [])
    manager.append("a", 0, computed)
    manager.remove_skipped("a", computed)
    assert {n for n in range(computed + 1) if manager.can_rollback("a", n)} == possible


def test_rollback_to_a_chunk_that_starts_in_a_block_already_gone():
    """The block is null: the next append gives it anew, and it is given back in its turn."""
    manager = manager_of(ChunkedSpec(6, block_size=4))
    manager.allocate("a", [])
    manager.append("a", 0, 13)
    manager.remove_skipped("a", 13)
    assert manager.tables["a"] == [0, 0, 0, 4]
    manager.rollback("a", 6)
    assert manager.tables["a"] == [0, 0]
    assert manager.blocks_needed("a", 6, 9) == 2
    manager.append("a", 6, 9)
    assert manager.tables["a"][0] == 0
    assert len(set(manager.tables["a"][1:]) - {0}) == 2
    manager.append("a", 9, 12)
    assert manager.remove_skipped("a", 12) == 2
    assert manager.pool.live == [0]
