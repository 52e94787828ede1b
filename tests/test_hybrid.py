"""All groups together: common hits, steps, branches, preemption, refusal."""

from __future__ import annotations

import contextlib
import itertools
import random
import subprocess
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest
from kv_cache import hash_by, longest_hit, node_of

from kvtailor.runtime.kv.blocks import OutOfBlocks
from kvtailor.runtime.kv.hybrid import HybridManager
from kvtailor.runtime.kv.managers import BlockCopy
from kvtailor.runtime.kv.spec import ChunkedSpec, CrossSpec, FullSpec, SlidingSpec

COLLIDING = [
    pytest.param(None, id="hash of bytes"),
    pytest.param(lambda tokens: 0, id="all collide"),
    pytest.param(lambda tokens: sum(array("i", tokens)) % 2, id="tokens mod 2"),
]


def full(block_size, num_blocks=64, **options):
    return HybridManager([FullSpec(block_size=block_size)], num_blocks, **options)


def feed(kv, request, tokens, step=10**9):
    """Append and settle tokens, `step` at a time."""
    for start in range(0, len(tokens), step):
        part = tokens[start : start + step]
        kv.append(request, len(part))
        kv.settle(request, part)


def run(kv, request, prompt, **options):
    """Admit a request and compute its prompt; returns the hit."""
    hit = kv.allocate(request, prompt, **options)
    feed(kv, request, prompt[hit:])
    return hit


def run_and_free(kv, request, prompt, **options):
    hit = run(kv, request, prompt, **options)
    kv.free(request)
    return hit


def evict(kv, tokens, group, block):
    """Take block number `block` of a cached prefix out of the index, in one group."""
    size = kv.specs[group].block_size
    path = kv.pool.index.find(size, None, array("i", tokens).tobytes())
    kv.pool.uncache(path[block].block(group))


# Hits


@pytest.mark.parametrize("length, hit", [(8, 4), (4, 0), (5, 4), (7, 4), (9, 8)])
def test_p01_at_least_one_token_is_left_to_compute(length, hit):
    """P01: block 4, the same prompt twice."""
    kv = full(4)
    prompt = list(range(length))
    assert run(kv, "a", prompt) == 0
    assert longest_hit(kv, prompt) == hit
    assert run(kv, "b", prompt) == hit
    assert kv.block_table("b")[: hit // 4] == kv.block_table("a")[: hit // 4]
    assert kv.num_computed("b") == length


def test_p02_a_recycled_block_is_not_found_under_its_old_prefix():
    """P02: 4 blocks of 2; A = 1..4, B = 5..12."""
    kv = full(2, num_blocks=4)
    run_and_free(kv, "A", [1, 2, 3, 4])
    run_and_free(kv, "B", list(range(5, 13)))
    assert longest_hit(kv, [1, 2, 3, 4]) == 0
    assert longest_hit(kv, list(range(5, 13))) == 6
    assert kv.stats.cached_blocks == 4


@pytest.mark.parametrize("hash_tokens", COLLIDING)
def test_p04_a_collision_never_gives_another_prompts_block(hash_tokens):
    """P04: prompts over two tokens, against their true common prefixes; salts apart."""
    rng = random.Random(0)
    kv = full(2, num_blocks=1000)
    hash_by(kv.pool, hash_tokens)
    known: dict[object, list[list[int]]] = {None: [], "adapter": []}
    for name in range(60):
        salt = rng.choice([None, "adapter"])
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
        expected = max(
            (
                n
                for n in range(2, len(prompt), 2)
                if any(prompt[:n] == other[:n] for other in known[salt])
            ),
            default=0,
        )
        assert run(kv, name, prompt, salt=salt) == expected
        known[salt].append(prompt)


def test_p08_groups_of_unlike_block_sizes():
    """P08: groups of block 4 and 2; the same answer each time."""
    kv = HybridManager([FullSpec(block_size=4), FullSpec(block_size=2)], 64)
    run_and_free(kv, "a", list(range(1, 9)))
    for _ in range(4):
        assert longest_hit(kv, [1, 2, 3, 4, 5, 6, 99, 98]) == 4
        assert longest_hit(kv, [1, 2, 3, 99, 98]) == 0
        assert longest_hit(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
    assert [run_and_free(kv, "b", [*range(1, 9), 9]) for _ in range(4)] == [8] * 4


@pytest.mark.parametrize(
    "length, blocks, last", [(0, 0, 0), (1, 1, 1), (4, 1, 4), (8, 2, 4), (9, 3, 1)]
)
def test_p05_blocks_and_tokens_in_the_last(length, blocks, last):
    """P05: block 4; a length divisible by the block fills its last block."""
    kv = full(4)
    kv.allocate("a", [])
    kv.append("a", length)
    table = kv.block_table("a")
    assert len(table) == blocks
    assert sum(slot // 4 == table[-1] for slot in kv.slots("a")) == last


def test_p07_one_group_for_all_keeps_what_the_widest_layer_sees():
    """P07: window 4 and full forced into one group: a full one; windows stay with the layers."""
    kv = HybridManager([FullSpec(block_size=2)], 16)
    pages = Pages(kv, 0)
    kv.allocate("a", [])
    for position in range(10):
        kv.append("a", 1)
        pages.write("a", position, [position])
        for spec in (FullSpec(), SlidingSpec(4)):
            visible = spec.visible(position)
            assert pages.keys[kv.slots("a", 0, visible[0])].tolist() == list(visible)
        kv.settle("a", [0])
        pages.poison_free_blocks()
    assert [len(spec.visible(9)) for spec in (FullSpec(), SlidingSpec(4))] == [10, 4]


BLOCK = 4


@pytest.mark.parametrize(
    "evicted, blocks",
    [
        ([], 3),
        ([(1, 0)], 3),
        ([(0, 0)], 0),
        ([(0, 2)], 2),
        ([(1, 2)], 2),
        ([(2, 2)], 2),
        ([(0, 2), (1, 0)], 0),
    ],
    ids=[
        "none",
        "sliding b0",
        "full b0",
        "full b2",
        "sliding b2",
        "other b2",
        "full b2, sliding b0",
    ],
)
def test_a_hit_is_common_to_all_groups(evicted, blocks):
    """Full and two sliding groups, W = 2B, 3 blocks cached."""
    sliding = SlidingSpec(2 * BLOCK, block_size=BLOCK)
    kv = HybridManager([FullSpec(block_size=BLOCK), sliding, sliding], 64)
    prompt = list(range(3 * BLOCK))
    run_and_free(kv, "a", prompt)
    for group, block in evicted:
        evict(kv, prompt, group, block)
    assert longest_hit(kv, [*prompt, 99]) == blocks * BLOCK


@pytest.mark.parametrize(
    "evicted, blocks",
    [([], 5), ([(0, 5)], 4), ([(1, 4)], 3), ([(0, 0)], 0)],
    ids=["none", "full b5", "sliding b4", "full b0"],
)
def test_eagle_drops_one_block_once(evicted, blocks):
    """Full and two sliding groups, W = 3B, 6 blocks cached."""
    sliding = SlidingSpec(3 * BLOCK, block_size=BLOCK)
    kv = HybridManager([FullSpec(block_size=BLOCK), sliding, sliding], 64, eagle=True)
    prompt = list(range(6 * BLOCK))
    run_and_free(kv, "a", prompt)
    for group, block in evicted:
        evict(kv, prompt, group, block)
    assert kv.allocate("b", [*prompt, 99]) == blocks * BLOCK
    if not evicted:
        table = kv.block_table("b", 1)
        assert (table.count(0), len(table)) == (2, 5)


def test_eagle_with_chunks_that_are_no_multiple_of_the_block():
    """Both refused by vLLM: chunked with eagle, and C 6 with B 4."""
    kv = HybridManager([ChunkedSpec(6, block_size=4)], 64, eagle=True)
    prompt = list(range(24))
    run_and_free(kv, "a", prompt, reuse=False)
    # 12 tokens end a chunk; 16 read block 3, and 4 more must be found.
    assert [longest_hit(kv, prompt[:n]) for n in (13, 17, 20, 21, 24)] == [8, 12, 12, 16, 16]


def test_a_hit_is_found_by_iterating_to_a_fixed_point():
    """Each group cuts the hit to a length the other doesn't have, until both do."""
    kv = HybridManager([SlidingSpec(3, block_size=2), ChunkedSpec(8, block_size=2)], 64)
    prompt = list(range(16))
    run_and_free(kv, "a", prompt)
    # Sliding holds only what ends at 4 and 12 tokens; chunked misses what 12 and 14 read.
    for block in (0, 2, 3, 4, 6, 7):
        evict(kv, prompt, 0, block)
    evict(kv, prompt, 1, 4)
    assert longest_hit(kv, [*prompt, 99]) == 4


def test_only_blocks_a_common_hit_can_read_stay_cached():
    """Full B 32 and sliding B 8, W 8, 64 tokens: of the sliding blocks only 3 and 7."""
    kv = HybridManager([FullSpec(block_size=32), SlidingSpec(8, block_size=8)], 64)
    prompt = list(range(64))
    kv.allocate("a", prompt)
    kv.append("a", 64)
    tables = [kv.block_table("a", group) for group in (0, 1)]
    kv.settle("a", prompt)
    cached = [[i for i, b in enumerate(t) if node_of(kv.pool, b)] for t in tables]
    assert cached == [[0, 1], [3, 7]]
    assert run(kv, "b", [*prompt, 99]) == 64


def test_a_chunk_only_model_skips_what_no_later_token_sees():
    kv = HybridManager([ChunkedSpec(8, block_size=4)], 64)
    assert kv.allocate("a", list(range(20))) == 16
    feed(kv, "a", [16, 17, 18, 19])
    assert kv.block_table("a") == [0, 0, 0, 0, 1]
    # What is computed after a skipped prefix is found like any other.
    assert longest_hit(kv, [*range(20), 99]) == 20
    assert longest_hit(kv, [99, *range(1, 20), 99]) == 16


def test_duplicates_of_one_step_survive_each_other():
    """Two requests with the same prompt in one step; the index survives freeing either."""
    for first, second in (("a", "b"), ("b", "a")):
        kv = full(4, num_blocks=4)
        prompt = list(range(8))
        assert [kv.allocate(name, prompt) for name in "ab"] == [0, 0]
        for name in "ab":
            feed(kv, name, prompt)
        assert not set(kv.block_table("a")) & set(kv.block_table("b"))
        kv.free(first)
        # The other takes the freed blocks: they are evicted.
        run_and_free(kv, "c", list(range(20, 28)))
        assert longest_hit(kv, [*prompt, 99]) == 8
        kv.free(second)
        assert run_and_free(kv, "d", [*prompt[:7], 99]) == 4


def test_hits_of_all_groups_are_taken_before_anything_is_allocated():
    """A pool so full that allocating for one group would evict the hit of another."""
    kv = HybridManager([FullSpec(block_size=4), SlidingSpec(5, block_size=4)], 7)
    prompt = list(range(8))
    run_and_free(kv, "a", prompt)
    run_and_free(kv, "b", list(range(50, 58)))
    assert kv.stats.evictions == 1
    hit = longest_hit(kv, [*prompt, 99])
    assert kv.allocate("c", [*prompt, 99]) == hit
    kv.append("c", 9 - hit)
    assert len({b for g in (0, 1) for b in kv.block_table("c", g)} - {0}) == 5


def test_a_salt_or_reuse_false_keep_a_request_apart():
    kv = full(4)
    prompt = list(range(9))
    run(kv, "a", prompt, salt="lora")
    assert run(kv, "b", prompt) == 0
    assert run(kv, "c", prompt, salt="lora") == 8
    assert longest_hit(kv, prompt, salt="other") == 0
    assert run(kv, "d", prompt, salt="lora", reuse=False) == 0
    assert kv.stats.hit_tokens == 8


def test_what_was_generated_is_found_too():
    kv = full(4)
    run(kv, "a", [1, 2, 3])
    feed(kv, "a", [4, 5, 6, 7, 8, 9], step=1)
    assert longest_hit(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == 8


@pytest.mark.parametrize(
    "make", [lambda t: t, tuple, lambda t: np.array(t, np.int32), lambda t: array("i", t)]
)
def test_tokens_of_any_kind_of_sequence(make):
    kv = full(4)
    prompt = list(range(9))
    assert kv.allocate("a", make(prompt)) == 0
    kv.append("a", 9)
    kv.settle("a", make(prompt))
    assert longest_hit(kv, make(prompt)) == 8


@pytest.mark.parametrize(
    "tokens, error",
    [
        ([1.5], TypeError),
        (["a"], TypeError),
        (np.zeros(3), ValueError),
        (np.zeros((2, 3), int), ValueError),
    ],
)
def test_tokens_must_be_integers(tokens, error):
    kv = full(4)
    kv.allocate("a", [])
    kv.append("a", len(tokens))
    for call in (
        lambda: kv.allocate("b", tokens),
        lambda: longest_hit(kv, tokens),
        lambda: kv.settle("a", tokens),
    ):
        with pytest.raises(error):
            call()
    assert (kv.num_computed("a"), kv.stats.requests, kv.stats.live_blocks) == (0, 1, (1,))


# Steps


@pytest.mark.parametrize("length", [0, 1, 4, 5])
def test_requests_of_no_token_one_and_exactly_a_block(length):
    kv = HybridManager([FullSpec(block_size=4), SlidingSpec(4, block_size=4)], 16)
    prompt = list(range(length))
    assert run(kv, "a", prompt) == 0
    assert len(kv.block_table("a")) == -(-length // 4)
    feed(kv, "a", [7, 8, 9], step=1)
    assert kv.num_tokens("a") == length + 3
    kv.free("a")
    assert kv.stats.free_blocks == 16


def test_local_groups_hold_their_window_only():
    """112 tokens, B 16, W 32, full and two sliding groups: 7 + 2 + 2 blocks."""
    kv = HybridManager([FullSpec(), SlidingSpec(32), SlidingSpec(32)], 64)
    run(kv, "a", list(range(112)))
    assert kv.stats.live_blocks == (7, 2, 2)


@pytest.mark.parametrize("spec, freed", [(SlidingSpec(16), 5), (ChunkedSpec(32), 6)], ids=str)
@pytest.mark.parametrize("step", [100, 16, 1])
def test_blocks_are_given_back_after_the_step_settles_and_not_before(spec, freed, step):
    """n = 100, B 16, however the prompt was cut into steps."""
    kv = HybridManager([spec], 64)
    kv.allocate("a", list(range(8)))
    kv.append("a", 100)
    assert kv.block_table("a").count(0) == 0
    for start in range(0, 100, step):
        assert kv.block_table("a").count(0) == spec.skipped(start) // 16
        kv.settle("a", list(range(start, min(100, start + step))))
    assert kv.block_table("a").count(0) == freed


def test_several_steps_in_flight():
    """Asynchronous scheduling: the next step is appended before the last has settled."""
    kv = HybridManager([FullSpec(block_size=4), SlidingSpec(4, block_size=4)], 64, in_flight=3)
    kv.allocate("a", [])
    for token in range(20):
        if kv.num_tokens("a") - kv.num_computed("a") == 3:
            kv.settle("a", [token - 3])
        kv.append("a", 1)
    assert (kv.num_tokens("a"), kv.num_computed("a")) == (20, 17)
    # 17 computed: 14..16 are seen by the next query, so blocks 0..2 are gone.
    assert kv.block_table("a", 1)[:4] == [0, 0, 0, kv.block_table("a", 1)[3]]
    with pytest.raises(ValueError, match=r"at most in_flight=3 tokens .* got 4"):
        kv.append("a", 1)
    # What is in flight can't be found.
    assert longest_hit(kv, list(range(20))) == 16


def test_the_limit_of_tokens_in_flight_holds_within_a_block():
    kv = full(16, in_flight=3)
    kv.allocate("a", [])
    kv.append("a", 3)
    with pytest.raises(ValueError, match="in_flight=3 tokens"):
        kv.append("a", 1)
    kv.settle("a", [1])
    kv.append("a", 1)
    assert kv.num_tokens("a") == 4


def test_only_appended_tokens_settle():
    kv = full(4)
    kv.allocate("a", [])
    kv.append("a", 2)
    with pytest.raises(ValueError, match="must have been appended: 2 are, got 3 settled"):
        kv.settle("a", [1, 2, 3])
    assert kv.num_computed("a") == 0
    with pytest.raises(ValueError, match="num_tokens must not be negative, got -1"):
        kv.append("a", -1)


def test_slots_are_block_times_size_plus_offset():
    kv = HybridManager([FullSpec(block_size=4), CrossSpec(6, block_size=4)], 16)
    kv.allocate("a", [1, 2, 3], encoder_tokens=6)
    kv.append("a", 6)
    table, cross = kv.block_table("a", 0), kv.block_table("a", 1)
    assert kv.slots("a").tolist() == [table[p // 4] * 4 + p % 4 for p in range(6)]
    assert kv.slots("a", start=5, stop=6).tolist() == [table[1] * 4 + 1]
    assert kv.slots("a", start=6).tolist() == []
    assert kv.slots("a", group=1, stop=6).tolist() == [cross[p // 4] * 4 + p % 4 for p in range(6)]
    assert kv.slots("a").dtype == np.int64


def test_block_tables_are_padded_with_the_null_block():
    kv = full(4)
    for name, length in (("a", 9), ("b", 1), ("c", 0)):
        run(kv, name, list(range(50, 50 + length)))
    tables = kv.block_tables(["b", "a", "c"])
    assert tables.tolist() == [[4, 0, 0], [1, 2, 3], [0, 0, 0]]
    assert tables.dtype == np.int32
    assert kv.block_tables([]).shape == (0, 0)


# Reading a window: with pages of NaN


class Pages:
    """Keys of one group as numbers, NaN where nothing was written or a block was handed out."""

    def __init__(self, kv, group):
        self.kv, self.group, self.size = kv, group, kv.specs[group].block_size
        self.keys = np.full((kv.pool.num_blocks + 1) * self.size, np.nan)

    def write(self, request, start, values):
        slots = self.kv.slots(request, self.group, start, start + len(values))
        self.keys[slots] = values

    def read(self, request, query):
        visible = self.kv.specs[self.group].visible(query)
        slots = self.kv.slots(request, self.group, visible[0], query + 1)
        return self.keys[slots].tolist()

    def poison_free_blocks(self):
        for block in range(1, self.kv.pool.num_blocks + 1):
            if self.kv.pool.ref_count(block) == 0:
                self.keys[block * self.size : (block + 1) * self.size] = np.nan


@pytest.mark.parametrize("prefill", [2, 7])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
def test_c08_a_window_is_read_in_order(prefill, block_size):
    """C08: W 4, the key is its position; single steps to 10 after the prefill."""
    kv = HybridManager([SlidingSpec(4, block_size=block_size)], 16)
    pages = Pages(kv, 0)
    kv.allocate("a", [])
    steps = [prefill, *itertools.repeat(1, 11 - prefill)]
    for position, count in zip(itertools.accumulate([0, *steps]), steps):
        kv.append("a", count)
        pages.write("a", position, range(position, position + count))
        for query in range(position, position + count):
            assert pages.read("a", query) == list(range(max(0, query - 3), query + 1))
        kv.settle("a", [0] * count)
        pages.poison_free_blocks()


@pytest.mark.parametrize("spec", [FullSpec(block_size=4), SlidingSpec(4, block_size=4)], ids=str)
def test_p09_recycled_blocks_full_of_nan_are_never_read(spec):
    """P09: block 4, length 5 has 3 stale slots; also after the window has dropped blocks."""
    kv = HybridManager([FullSpec(block_size=4), spec], 12)
    pages = [Pages(kv, group) for group in (0, 1)]
    for name in range(6):
        kv.allocate(name, [100 + name] * 5)
        for position in range(9):
            count = 5 if position == 0 else 1
            position += 4 * (position > 0)
            kv.append(name, count)
            for group in (0, 1):
                pages[group].write(name, position, range(position, position + count))
                seen = pages[group].read(name, position + count - 1)
                assert not np.isnan(seen).any()
            kv.settle(name, [100 + name] * count)
            for group in (0, 1):
                pages[group].poison_free_blocks()
        kv.free(name)
        for group in (0, 1):
            pages[group].poison_free_blocks()


# Rollback


@pytest.mark.parametrize("removed, left", [(0, 3), (1, 2), (5, 0)])
def test_c04_rollback_by_nothing_some_and_more_than_there_is(removed, left):
    """C04: a 3-token request."""
    kv = full(2)
    run(kv, "a", [1, 2, 3])
    kv.rollback("a", removed)
    assert (kv.num_tokens("a"), kv.num_computed("a")) == (left, left)
    assert len(kv.block_table("a")) == -(-left // 2)
    kv.append("a", 1)
    assert kv.slots("a", start=left).tolist() == [kv.block_table("a")[left // 2] * 2 + left % 2]


def test_c04_a_half_emptied_block_is_not_found_once_it_is_written():
    """C04: no stale entry; and what is written instead is found."""
    kv = full(4)
    run(kv, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    kv.rollback("a", 2)
    feed(kv, "a", [70, 80])
    assert longest_hit(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4
    assert longest_hit(kv, [1, 2, 3, 4, 5, 6, 70, 80, 9]) == 8
    assert kv.stats.copies == 0


def test_a_block_found_by_others_is_copied_before_it_is_rewritten():
    kv = full(4)
    prompt = list(range(8))
    run(kv, "a", prompt)
    kv.rollback("a", 2)
    assert run(kv, "b", [*prompt, 9]) == 8
    shared = kv.block_table("a")[1]
    (copy,) = kv.append("a", 1)
    assert copy == BlockCopy(0, shared, kv.block_table("a")[1])
    assert kv.block_table("b")[1] == shared
    assert longest_hit(kv, [*prompt, 9]) == 8


def test_rejected_tokens_are_rolled_back_in_every_group():
    """Speculation: 4 drafted, 1 accepted."""
    kv = HybridManager([FullSpec(block_size=2), SlidingSpec(3, block_size=2)], 64)
    run(kv, "a", list(range(10)))
    before = kv.stats.live_blocks
    kv.append("a", 4)
    kv.settle("a", [10])
    kv.rollback("a", 3)
    assert (kv.num_tokens("a"), kv.num_computed("a")) == (11, 11)
    assert kv.stats.live_blocks == (before[0] + 1, before[1] + 1)
    feed(kv, "a", [11])
    assert longest_hit(kv, list(range(13))) == 12


def test_a_rollback_past_the_window_is_refused_and_nothing_lost():
    """C05 at this level: a plain refusal before any token is lost."""
    kv = HybridManager([FullSpec(block_size=2), SlidingSpec(4, block_size=2)], 64)
    run(kv, "a", list(range(10)))
    tables = [kv.block_table("a", group) for group in (0, 1)]
    with pytest.raises(ValueError, match=r"group 1 \(sliding 4\) .* rollback to 6 tokens"):
        kv.rollback("a", 4)
    assert [kv.block_table("a", group) for group in (0, 1)] == tables
    assert kv.num_tokens("a") == 10
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        kv.rollback("a", -1)


# Beams


def test_c06_beams_copy_a_shared_block_before_they_write():
    """C06: reorder [2, 0, 0]; beam 1's later tokens don't show in beam 2."""
    kv = HybridManager([FullSpec(block_size=4)], 64)
    pages = Pages(kv, 0)
    beams = [(0, beam) for beam in range(3)]
    run(kv, "prompt", [1, 2, 3, 4, 5])
    pages.write("prompt", 0, [1, 2, 3, 4, 5])
    for beam in beams:
        kv.fork("prompt", beam)
    kv.free("prompt")

    def step(tokens):
        copies = [copy for beam in beams for copy in kv.append(beam, 1)]
        for _, source, target in copies:
            pages.keys[target * 4 : target * 4 + 4] = pages.keys[source * 4 : source * 4 + 4]
        for beam, token in zip(beams, tokens):
            pages.write(beam, kv.num_tokens(beam) - 1, [token])
            kv.settle(beam, [token])
        return copies

    # Three beams on one half-full block: two of them copy, the last writes in place.
    assert len(step([10, 11, 12])) == 2
    # Reorder to [2, 0, 0].
    old = list(beams)
    beams[:] = [(1, beam) for beam in range(3)]
    for parent, beam in zip([2, 0, 0], beams):
        kv.fork(old[parent], beam)
    for beam in old:
        kv.free(beam)
    shared = kv.block_table(beams[1])[1]
    assert kv.block_table(beams[2])[1] == shared
    assert kv.pool.ref_count(shared) == 2
    assert step([20, 21, 22]) == [BlockCopy(0, shared, kv.block_table(beams[1])[1])]
    assert [pages.read(beam, 6) for beam in beams] == [
        [1, 2, 3, 4, 5, 12, 20],
        [1, 2, 3, 4, 5, 10, 21],
        [1, 2, 3, 4, 5, 10, 22],
    ]
    step([30, 31, 32])
    assert longest_hit(kv, [1, 2, 3, 4, 5, 10, 22, 32, 0]) == 8
    assert longest_hit(kv, [1, 2, 3, 4, 5, 12, 21, 31, 0]) == 4
    for beam in beams:
        kv.free(beam)
    assert kv.stats.free_blocks == 64


def test_a_branch_needs_a_settled_request_and_a_new_name():
    kv = full(4)
    run(kv, "a", [1])
    run(kv, "b", [1])
    with pytest.raises(ValueError, match="allocated once, got 'b' again"):
        kv.fork("a", "b")
    with pytest.raises(ValueError, match="must be allocated, got 'z'"):
        kv.fork("z", "c")
    kv.append("a", 1)
    with pytest.raises(ValueError, match="no token in flight to branch, got 'a' with 1"):
        kv.fork("a", "c")
    assert (kv.num_tokens("a"), kv.num_tokens("b"), kv.stats.live_blocks) == (2, 1, (2,))


def test_appending_nothing_to_a_fork_leaves_the_block_shared():
    """Found by the state machine: the copy was forgotten."""
    kv = full(2)
    run(kv, "a", [1])
    kv.fork("a", "b")
    assert list(kv.append("a", 0)) == []
    assert len(kv.append("a", 1)) == 1


# Preemption, refusal


def test_l05_a_resumed_requests_own_blocks_are_no_hits():
    """L05: preempt a request of 8 tokens and resume it."""
    kv = full(4)
    prompt = list(range(8))
    run(kv, "a", prompt)
    kv.preempt("a")
    with pytest.raises(ValueError, match="must be allocated, got 'a'"):
        kv.num_tokens("a")
    assert kv.allocate("a", [*prompt, 8]) == 8
    assert (kv.stats.hit_tokens, kv.stats.preemptions) == (0, 1)
    assert kv.stats.queried_tokens == 9
    # Another request with the same prompt is a hit.
    assert run(kv, "b", [*prompt, 8]) == 8
    assert kv.stats.hit_tokens == 8


def test_l05_blocks_of_others_found_on_resumption_are_hits():
    """L05: what it finds beyond what it had computed itself counts."""
    kv = full(4)
    prompt = list(range(13))
    kv.allocate("a", prompt)
    feed(kv, "a", prompt[:5])
    kv.preempt("a")
    run(kv, "b", prompt)
    assert kv.stats.hit_tokens == 4
    assert kv.allocate("a", prompt) == 12
    assert kv.stats.hit_tokens == 4 + 7


def test_a_preempted_request_can_be_dropped():
    kv = full(4)
    run(kv, "a", [1, 2])
    kv.preempt("a")
    kv.free("a")
    with pytest.raises(ValueError, match="must be allocated, got 'a'"):
        kv.free("a")
    assert kv.stats.free_blocks == 64


def test_a_request_longer_than_the_pool_is_refused_with_the_figure():
    kv = HybridManager([FullSpec(block_size=4), SlidingSpec(4, block_size=4)], 8)
    run(kv, "a", list(range(9)))
    before = kv.stats
    with pytest.raises(OutOfBlocks, match="needed 16 blocks, 3 of 8 are free: never fits") as error:
        kv.allocate("b", list(range(100, 132)))
    assert (error.value.needed, error.value.total) == (16, 8)
    # One that fits once a is done.
    with pytest.raises(OutOfBlocks, match="needed 6 blocks, 3 of 8 are free: free or preempt"):
        kv.allocate("b", list(range(100, 112)))
    after = kv.stats
    assert after.refusals == 2
    assert after == type(before)(**{**vars(before), "refusals": 2})
    kv.free("a")
    kv.allocate("b", list(range(100, 112)))


def test_an_append_that_finds_no_block_changes_nothing():
    kv = HybridManager([FullSpec(block_size=2), SlidingSpec(9, block_size=2)], 6)
    run(kv, "a", [1, 2])
    run(kv, "b", [3, 4])
    tables = [kv.block_table("a", group) for group in (0, 1)]
    with pytest.raises(OutOfBlocks, match="needed 4 blocks, 2 of 6"):
        kv.append("a", 3)
    assert [kv.block_table("a", group) for group in (0, 1)] == tables
    assert kv.stats.refusals == 1
    kv.append("a", 2)


def test_shared_blocks_cost_nothing_at_admission():
    kv = full(4, num_blocks=5)
    prompt = list(range(16))
    run(kv, "a", prompt)
    # 4 of its 5 blocks are a's anyway.
    assert kv.allocate("b", [*prompt, 99]) == 16
    kv.append("b", 1)
    assert kv.stats.free_blocks == 0


def test_what_was_sized_for_one_request_runs_one_request():
    """The plan's formula and the gate's are one: no deadlock, whatever the steps."""
    specs = [FullSpec(block_size=4), SlidingSpec(6, block_size=3), ChunkedSpec(5, block_size=2)]
    for length, in_flight in itertools.product((1, 7, 24, 40), (1, 3, 8, 50)):
        in_flight = min(in_flight, length)
        size = sum(spec.admission_blocks(length, in_flight) for spec in specs)
        kv = HybridManager(specs, size, in_flight=in_flight)
        prompt = list(range(length))
        kv.allocate("a", prompt)
        feed(kv, "a", prompt, step=in_flight)
        kv.free("a")
        assert kv.stats.free_blocks == size


def test_a_scheduler_that_preempts_finishes_all_requests_in_a_tight_pool():
    """Growth beyond the pool: the last one is preempted and resumes; nobody starves."""
    kv = HybridManager([FullSpec(block_size=2), SlidingSpec(4, block_size=2)], 18, in_flight=4)
    tokens = {name: [name] * 6 for name in range(5)}
    waiting, running, done = list(tokens), [], []
    for _ in range(500):
        if waiting:
            with contextlib.suppress(OutOfBlocks):
                kv.allocate(waiting[0], tokens[waiting[0]])
                running.append(waiting.pop(0))
        for name in list(running):
            if name not in running:
                continue
            computed = kv.num_computed(name)
            count = min(4, len(tokens[name]) - computed)
            while name in running:
                try:
                    kv.append(name, count)
                    break
                except OutOfBlocks:
                    victim = running.pop()
                    kv.preempt(victim)
                    waiting.insert(0, victim)
            else:
                continue
            kv.settle(name, tokens[name][computed : computed + count])
            if kv.num_computed(name) == len(tokens[name]):
                tokens[name].append(name)
            if len(tokens[name]) == 20:
                kv.free(name)
                running.remove(name)
                done.append(name)
    assert sorted(done) == [0, 1, 2, 3, 4]
    stats = kv.stats
    assert stats.preemptions > 0
    assert (stats.free_blocks, stats.hit_tokens, stats.live_blocks) == (18, 0, (0, 0))


def test_an_unhashable_salt_leaks_nothing():
    kv = full(4)
    for prompt in ([1], list(range(9))):
        with pytest.raises(TypeError, match="unhashable"):
            kv.allocate("a", prompt, salt=["adapter"])
    assert (kv.stats.requests, kv.stats.free_blocks) == (0, 64)
    assert kv.allocate("a", [1]) == 0


def test_unknown_requests_are_named():
    kv = full(4)
    for call in (
        lambda: kv.append("x", 1),
        lambda: kv.settle("x", []),
        lambda: kv.free("x"),
        lambda: kv.preempt("x"),
        lambda: kv.rollback("x", 1),
        lambda: kv.num_tokens("x"),
        lambda: kv.block_table("x"),
        lambda: kv.slots("x"),
        lambda: kv.block_tables(["x"]),
        lambda: kv.fork("x", "y"),
    ):
        with pytest.raises(ValueError, match="a request must be allocated, got 'x'"):
            call()
    kv.allocate("x", [])
    with pytest.raises(ValueError, match="allocated once, got 'x' again"):
        kv.allocate("x", [])


# Cross attention


def test_cross_attention_blocks_are_taken_once_and_never_found():
    """Encoder 1,500, B 16: 94 blocks per request."""
    kv = HybridManager([FullSpec(), CrossSpec(1500)], 400)
    prompt = list(range(40))
    run(kv, "a", prompt, salt="audio 1")
    run(kv, "b", prompt, salt="audio 2")
    assert kv.stats.hit_tokens == 0
    assert run(kv, "c", prompt, salt="audio 1") == 32
    assert kv.stats.live_blocks[1] == 3 * 94
    assert not set(kv.block_table("a", 1)) & set(kv.block_table("c", 1))
    assert not any(node_of(kv.pool, block) for block in kv.block_table("a", 1))
    run(kv, "d", prompt, salt="audio 1", encoder_tokens=17)
    assert len(kv.block_table("d", 1)) == 2
    for name in "abcd":
        kv.free(name)
    assert kv.stats.live_blocks == (0, 0)


def test_the_encoders_blocks_neither_grow_nor_go_while_the_request_lives():
    kv = HybridManager([FullSpec(), CrossSpec(1500)], 200)
    kv.allocate("a", [], encoder_tokens=1500)
    feed(kv, "a", list(range(500)), step=250)
    table = kv.block_table("a", 1)
    assert len(table) == 94
    kv.rollback("a", 500)
    assert kv.block_table("a", 1) == table
    kv.fork("a", "b")
    assert kv.block_table("b", 1) == table
    assert kv.stats.live_blocks == (0, 94)
    kv.free("a")
    assert kv.stats.live_blocks == (0, 94)
    kv.free("b")
    assert kv.stats.free_blocks == 200


def test_decoder_tokens_over_unnamed_encoder_input_are_never_shared():
    """Their keys depend on the encoder's input, which the tokens don't show."""
    kv = HybridManager([FullSpec(block_size=4), CrossSpec(8, block_size=4)], 64)
    assert [run(kv, name, list(range(9))) for name in "ab"] == [0, 0]
    assert kv.stats.queried_tokens == 18


@pytest.mark.parametrize("length", [-1, 9])
def test_encoder_length_is_checked(length):
    kv = HybridManager([FullSpec(block_size=4), CrossSpec(8, block_size=4)], 64)
    with pytest.raises(ValueError, match=f"encoder_tokens must be 0 to 8, .* got {length}"):
        kv.allocate("a", [1], encoder_tokens=length)
    assert (kv.stats.requests, kv.stats.free_blocks) == (0, 64)


# Counters


@pytest.mark.parametrize("local", [SlidingSpec(99, block_size=4), ChunkedSpec(99, block_size=4)])
def test_common_prefix_is_of_full_groups_and_full_blocks(local):
    """Local groups report 0: their leading blocks go away at different times."""
    kv = HybridManager([FullSpec(block_size=4), local], 64)
    assert kv.common_prefix_blocks() == [0, 0]
    run(kv, "a", list(range(10)))
    assert kv.common_prefix_blocks() == [2, 0]
    kv.fork("a", "b")
    # The third block is shared, but not full.
    assert kv.common_prefix_blocks() == [2, 0]
    run(kv, "c", [0, 1, 2, 3, 99])
    assert kv.common_prefix_blocks() == [1, 0]


def test_counters_tell_what_happened():
    kv = full(2, num_blocks=4)
    run_and_free(kv, "a", [1, 2, 3, 4])
    run_and_free(kv, "b", [1, 2, 3, 9])
    run(kv, "c", list(range(10, 18)))
    kv.preempt("c")
    stats = kv.stats
    assert (stats.requests, stats.queried_tokens, stats.hit_tokens) == (3, 16, 2)
    assert (stats.evictions, stats.peak_blocks, stats.preemptions) == (3, 4, 1)
    assert repr(kv) == ("<HybridManager [full x2]: 0 requests, 0 of 4 blocks used, 4 cached>")


def test_a_manager_needs_a_self_attention_group():
    for specs in ([], [CrossSpec(8)]):
        with pytest.raises(ValueError, match="specs must name a self-attention group"):
            HybridManager(specs, 8)
    with pytest.raises(ValueError, match="in_flight must be positive, got 0"):
        full(4, in_flight=0)


def test_the_example_schedules_three_requests_and_prints_their_tables():
    path = Path(__file__).parents[1] / "examples" / "block_tables.py"
    run = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
    assert "b is admitted: 12 of its tokens are in the cache" in run.stdout
    assert (
        "  a, 15 computed   full         1   2   5   6\n"
        "                   sliding 8    .   .   7   8\n"
    ) in run.stdout
    assert "c waits: needed 10 blocks" in run.stdout
    assert "free_blocks=14" in run.stdout
