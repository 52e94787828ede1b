"""HybridManager against a brute-force model that stores every token.

The model keeps, for every block, which token (after which prefix) lies in each of its slots,
and redoes reference counts, eviction order and hits from their definitions, by exhaustive
search. Sizes are tiny, so that prefixes, windows and evictions collide all the time.
"""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from kv_cache import cached_blocks, hash_by, longest_hit, node_of, num_nodes

from kvtailor.runtime.kv.blocks import OutOfBlocks
from kvtailor.runtime.kv.hybrid import HybridManager
from kvtailor.runtime.kv.spec import ChunkedSpec, CrossSpec, FullSpec, SlidingSpec

BLOCK_SIZES = st.sampled_from([1, 2, 3, 4])
OWN_SPECS = st.one_of(
    st.builds(FullSpec, block_size=BLOCK_SIZES),
    st.builds(SlidingSpec, st.integers(1, 9), block_size=BLOCK_SIZES),
    st.builds(ChunkedSpec, st.integers(1, 9), block_size=BLOCK_SIZES),
)
HASHES = st.sampled_from([None, lambda tokens: 0, lambda tokens: sum(tokens) % 2])
TOKENS = st.lists(st.integers(0, 1), max_size=14)
# One rule that draws its operation, rather than a rule each: Hypothesis leaves out rules at
# random, and a run without steps shows little.
OPERATIONS = st.sampled_from(
    ["step"] * 8
    + ["admit"] * 3
    + ["admit_old_prompt", "settle_more", "rollback", "fork", "reorder", "preempt", "resume"] * 2
    + ["free"]
)
SALTS = st.sampled_from([None, "adapter"])


def sees(spec, query, key):
    """The definition of the three kinds, key by key."""
    if isinstance(spec, SlidingSpec):
        return query - spec.window < key <= query
    if isinstance(spec, ChunkedSpec):
        return key <= query and key // spec.chunk == query // spec.chunk
    return key <= query


def skipped(spec, n):
    """Leading tokens that the query at n doesn't see."""
    return next(key for key in range(n + 1) if sees(spec, n, key))


class ModelRequest:
    def __init__(self, tokens, salt, computed, cacheable):
        self.tokens = tokens
        self.salt = salt
        self.computed = computed
        self.cacheable = cacheable
        # What the prompt still has to feed.
        self.prompt = []
        self.own = 0

    def content(self, position):
        """What the slot of a position must hold: the token and all before it."""
        return (self.salt, tuple(self.tokens[: position + 1]))


class BlockManagerModel(RuleBasedStateMachine):
    steps = 0

    @initialize(
        specs=st.lists(OWN_SPECS, min_size=1, max_size=3),
        cross=st.sampled_from([False, False, False, True]),
        num_blocks=st.integers(4, 40),
        eagle=st.booleans(),
        in_flight=st.sampled_from([None, None, 5, 9]),
        hash_tokens=HASHES,
    )
    def start(self, specs, cross, num_blocks, eagle, in_flight, hash_tokens):
        if cross:
            specs = [*specs, CrossSpec(5, block_size=2)]
        self.kv = HybridManager(specs, num_blocks, in_flight=in_flight, eagle=eagle)
        hash_by(self.kv.pool, hash_tokens)
        self.specs, self.eagle, self.in_flight = specs, eagle, in_flight
        self.has_cross = cross
        self.own = [g for g, s in enumerate(specs) if not isinstance(s, CrossSpec)]
        self.align = self.kv.align
        self.requests: dict[int, ModelRequest] = {}
        self.preempted: dict[int, ModelRequest] = {}
        self.tables: dict[int, list[list[int]]] = {}
        self.names = iter(range(10**9))
        self.pages: dict[int, dict[int, object]] = {}
        # block -> (group, content of its last slot) while it can be found.
        self.found: dict[int, tuple[int, object]] = {}
        self.group_of: dict[int, int] = {}
        self.blank = set(range(1, num_blocks + 1))
        self.lru: list[int] = []
        self.users = dict.fromkeys(self.blank, 0)
        self.evictions = self.queried = self.hit = self.peak = 0

    # The pool, redone

    def take(self, blocks, group):
        """The manager took these blocks in one go: were they the right ones?"""
        blank = min(len(blocks), len(self.blank))
        evicted = self.lru[: len(blocks) - blank]
        assert len(evicted) == len(blocks) - blank
        assert {b for b in blocks if b in self.blank} == set(blocks) - set(evicted)
        assert len(set(blocks)) == len(blocks)
        self.evictions += len(evicted)
        for block in evicted:
            del self.found[block]
        self.lru = self.lru[len(evicted) :]
        self.blank -= set(blocks)
        for block in blocks:
            assert self.users[block] == 0
            self.users[block] = 1
            self.group_of[block] = group
            self.pages[block] = {}

    def share(self, blocks):
        for block in filter(None, blocks):
            if self.users[block] == 0:
                self.lru.remove(block)
            self.users[block] += 1

    def drop(self, blocks):
        for block in filter(None, blocks):
            self.users[block] -= 1
            assert self.users[block] >= 0
            if self.users[block] == 0:
                self.lru.append(block) if block in self.found else self.blank.add(block)

    # Hits, by trying every length

    def is_valid_hit(self, group, salt, tokens, length, found):
        spec = self.specs[group]
        size = spec.block_size
        first = skipped(spec, length)
        if first == length:
            return True
        end = length + (size if self.eagle else 0)
        return all(
            (group, (salt, tuple(tokens[: (b + 1) * size]))) in found
            for b in range(first // size, end // size)
        )

    def longest_hit(self, tokens, salt):
        if self.has_cross and salt is None:
            return 0
        found = set(self.found.values())
        ahead = max(self.specs[g].block_size for g in self.own) if self.eagle else 0
        return max(
            (
                length
                for length in range(self.align, len(tokens) - ahead, self.align)
                if all(self.is_valid_hit(g, salt, tokens, length, found) for g in self.own)
            ),
            default=0,
        )

    def is_worth_caching(self, group, block):
        spec = self.specs[group]
        size = spec.block_size
        return any(
            skipped(spec, length) < length
            and skipped(spec, length) < (block + 1) * size
            and length + (size if self.eagle else 0) > block * size
            for length in range(self.align, (block + 2) * size + 3 * self.align + 10, self.align)
        )

    # What can happen

    @rule(op=OPERATIONS, data=st.data())
    def act(self, op, data):
        needed = {"resume": self.preempted, "fork": self.settled(), "reorder": self.settled()[1:]}
        if op.startswith("admit") or needed.get(op, self.requests):
            getattr(self, op)(data)
            type(self).steps += 1

    def allocate(self, name, tokens, salt, reuse, own):
        kv = self.kv
        expected = self.longest_hit(tokens, salt)
        assert longest_hit(kv, tokens, salt) == expected
        before = kv.stats
        try:
            hit = kv.allocate(name, tokens, salt=salt, reuse=reuse)
        except OutOfBlocks as error:
            with pytest.raises(ValueError, match="must be allocated"):
                kv.num_tokens(name)
            assert error.needed > error.free == len(self.blank) + len(self.lru)
            assert kv.stats == replace(before, refusals=before.refusals + 1)
            return False
        assert hit == (expected if reuse else 0)
        tables = self.tables[name] = [kv.block_table(name, g) for g in range(len(self.specs))]
        request = ModelRequest(
            tokens[:hit], salt, hit, cacheable=not self.has_cross or salt is not None
        )
        for group in self.own:
            size = self.specs[group].block_size
            gone = skipped(self.specs[group], hit) // size
            assert len(tables[group]) == hit // size
            for index, block in enumerate(tables[group]):
                if index < gone:
                    assert block == 0
                else:
                    last = request.content((index + 1) * size - 1)
                    assert self.found[block] == (group, last)
            self.share(tables[group])
        for group in set(range(len(self.specs))) - set(self.own):
            self.take(tables[group], group)
        request.prompt = tokens[hit:]
        request.own = own
        self.requests[name] = request
        self.queried += max(0, len(tokens) - own)
        self.hit += max(0, hit - own)
        return True

    def admit(self, data):
        prefix, suffix, salt = [], data.draw(TOKENS), data.draw(SALTS)
        reuse = data.draw(st.sampled_from([True, True, True, False]))
        if self.requests and data.draw(st.booleans()):
            other = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
            salt = other.salt
            known = other.tokens + other.prompt
            prefix = known[: data.draw(st.integers(0, len(known)))]
        self.allocate(next(self.names), prefix + suffix, salt, reuse, own=0)

    def admit_old_prompt(self, data):
        """Ask for the exact content of a cached block: hits after the owner is gone."""
        if not self.found:
            return
        two_alike = data.draw(st.booleans())
        _, (salt, tokens) = self.found[data.draw(st.sampled_from(sorted(self.found)))]
        for _ in range(1 + two_alike):
            self.allocate(next(self.names), [*tokens, 1], salt, True, own=0)

    def some_request(self, data, names=None):
        return data.draw(st.sampled_from(sorted(names if names is not None else self.requests)))

    def step(self, data):
        name = self.some_request(data)
        count, token = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 1))
        settle = data.draw(st.sampled_from(["all", "all", "all", "some", "none"]))
        request = self.requests[name]
        if self.in_flight is not None:
            count = min(count, self.in_flight - (len(request.tokens) - request.computed))
        fed = request.prompt[:count]
        fed += [token] * (count - len(fed))
        if not self.append(name, fed):
            return
        unsettled = len(request.tokens) - request.computed
        if settle == "all":
            self.settle(name, unsettled)
        elif settle == "some":
            self.settle(name, data.draw(st.integers(0, unsettled)))

    def append(self, name, fed):
        kv, request, tables = self.kv, self.requests[name], self.tables[name]
        start = len(request.tokens)
        stop = start + len(fed)
        try:
            copies = kv.append(name, len(fed))
        except OutOfBlocks as error:
            assert error.needed > error.free == len(self.blank) + len(self.lru)
            assert kv.num_tokens(name) == start
            return False
        copied = []
        for group in self.own:
            size = self.specs[group].block_size
            new = kv.block_table(name, group)
            assert len(new) == max(len(tables[group]), -(-stop // size))
            old = tables[group]
            if fed and start % size:
                index = start // size
                block = old[index]
                if block == 0:
                    self.take([new[index]], group)
                elif self.users[block] > 1:
                    self.take([new[index]], group)
                    self.drop([block])
                    copied.append((group, block, new[index]))
                else:
                    assert new[index] == block
                    self.found.pop(block, None)
                old[index] = new[index]
            assert new[: len(old)] == old
            if len(new) > len(old):
                self.take(new[len(old) :], group)
            tables[group] = new
        assert [tuple(c) for c in copies] == copied
        for _, source, target in copies:
            self.pages[target] = dict(self.pages[source])
        request.tokens = request.tokens + fed
        request.prompt = request.prompt[len(fed) :]
        for group in self.own:
            slots = kv.slots(name, group, start, stop)
            size = self.specs[group].block_size
            for position, slot in zip(range(start, stop), slots.tolist()):
                block, offset = divmod(slot, size)
                assert block == tables[group][position // size] != 0
                assert self.users[block] == 1
                self.pages[block][offset] = request.content(position)
        return True

    def settle(self, name, count):
        request, tables = self.requests[name], self.tables[name]
        before = request.computed
        after = request.computed = before + count
        self.kv.settle(name, request.tokens[before:after])
        # Trees go by block size, in order of their first group, and blocks in order.
        for group in self.own:
            size = self.specs[group].block_size
            for index in range(before // size, after // size):
                block = tables[group][index]
                if request.cacheable and block and self.is_worth_caching(group, index):
                    assert block not in self.found
                    self.found[block] = (group, request.content((index + 1) * size - 1))
        for group in self.own:
            spec, table = self.specs[group], tables[group]
            gone = skipped(spec, after) // spec.block_size
            self.drop(reversed(table[:gone]))
            table[:gone] = [0] * gone
            assert self.kv.block_table(name, group) == table

    def settle_more(self, data):
        name = self.some_request(data)
        request = self.requests[name]
        unsettled = len(request.tokens) - request.computed
        self.settle(name, data.draw(st.integers(0, unsettled)))

    def rollback(self, data):
        name, count = self.some_request(data), data.draw(st.integers(0, 12))
        request, tables = self.requests[name], self.tables[name]
        chunks = [s.chunk for s in self.specs if isinstance(s, ChunkedSpec)]
        if chunks and data.draw(st.booleans()):
            # To the start of a chunk, where nothing given back is missed.
            count = len(request.tokens) % data.draw(st.sampled_from(chunks))
        length = max(0, len(request.tokens) - count)
        intact = all(
            tables[g][p // self.specs[g].block_size]
            for g in self.own
            for p in range(skipped(self.specs[g], length), length)
        )
        if not intact:
            with pytest.raises(ValueError, match="rollback"):
                self.kv.rollback(name, count)
            return
        self.kv.rollback(name, count)
        for group in self.own:
            keep = -(-length // self.specs[group].block_size)
            self.drop(reversed(tables[group][keep:]))
            tables[group] = tables[group][:keep]
            assert self.kv.block_table(name, group) == tables[group]
        request.prompt = request.tokens[length:] + request.prompt
        request.tokens = request.tokens[:length]
        request.computed = min(request.computed, length)

    def settled(self):
        return [n for n, r in self.requests.items() if r.computed == len(r.tokens)]

    def copy_of(self, name):
        old = self.requests[name]
        new = ModelRequest(list(old.tokens), old.salt, old.computed, old.cacheable)
        new.prompt = list(old.prompt)
        return new, [list(table) for table in self.tables[name]]

    def fork(self, data):
        self.branch(self.some_request(data, self.settled()), next(self.names))

    def branch(self, parent, child):
        self.kv.fork(parent, child)
        self.requests[child], self.tables[child] = self.copy_of(parent)
        for table in self.tables[child]:
            self.share(table)

    def reorder(self, data):
        """Beam search: the next beams go on from some of the last, which end."""
        beams = data.draw(
            st.lists(st.sampled_from(sorted(self.settled())), min_size=2, max_size=4, unique=True)
        )
        for parent in data.draw(st.lists(st.sampled_from(beams), min_size=1, max_size=4)):
            self.branch(parent, next(self.names))
        for beam in beams:
            self.kv.free(beam)
            self.forget(beam)

    def forget(self, name):
        for table in self.tables.pop(name):
            self.drop(reversed(table))
        return self.requests.pop(name)

    def free(self, data):
        name = self.some_request(data)
        self.kv.free(name)
        self.forget(name)
        with pytest.raises(ValueError, match="must be allocated"):
            self.kv.free(name)

    def preempt(self, data):
        name = self.some_request(data)
        self.kv.preempt(name)
        request = self.preempted[name] = self.forget(name)
        request.own = max(request.own, request.computed)

    def resume(self, data):
        name = self.some_request(data, self.preempted)
        drop = data.draw(st.sampled_from([False, False, False, True]))
        request = self.preempted[name]
        if drop:
            self.kv.free(name)
        elif not self.allocate(
            name, request.tokens + request.prompt, request.salt, True, request.own
        ):
            return
        del self.preempted[name]

    # What must hold after every step

    @invariant()
    def every_read_finds_its_token(self):
        for name, request in getattr(self, "requests", {}).items():
            for group in self.own:
                spec, table = self.specs[group], self.tables[name][group]
                for key in range(skipped(spec, request.computed), len(request.tokens)):
                    block, offset = divmod(key, spec.block_size)
                    assert self.pages[table[block]][offset] == request.content(key)

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "kv"):
            return
        kv, pool = self.kv, self.kv.pool
        for name in self.requests:
            for group, table in enumerate(self.tables[name]):
                assert kv.block_table(name, group) == table
                unsettled = kv.num_tokens(name) - kv.num_computed(name)
                held = sum(block != 0 for block in table)
                assert held <= self.specs[group].admission_blocks(kv.num_tokens(name), unsettled)
            assert kv.num_computed(name) == self.requests[name].computed
            assert kv.num_tokens(name) == len(self.requests[name].tokens)
        live = [0] * len(self.specs)
        for block, users in self.users.items():
            assert pool.ref_count(block) == users
            assert (node_of(pool, block) is not None) == (block in self.found)
            live[self.group_of.get(block, 0)] += users > 0
        assert cached_blocks(pool) == self.lru
        assert pool.num_free == len(self.blank) + len(self.lru)
        self.peak = max(self.peak, sum(live))
        stats = kv.stats
        assert list(stats.live_blocks) == live
        assert stats.evictions == self.evictions
        assert (stats.hit_tokens, stats.queried_tokens) == (self.hit, self.queried)
        assert stats.peak_blocks >= self.peak

    def teardown(self):
        """All is given back, and with the last cached block the last prefix is forgotten."""
        if not hasattr(self, "kv"):
            return
        for name in [*self.requests, *self.preempted]:
            self.kv.free(name)
        pool = self.kv.pool
        assert pool.num_free == pool.num_blocks
        assert pool.live == [0] * len(self.specs)
        pool.free(pool.allocate(pool.num_blocks))
        assert pool.num_cached == 0
        assert num_nodes(pool.index) == 0
        assert not pool.index._roots


def run_steps(count: int):
    machine = type("Machine", (BlockManagerModel,), {"steps": 0})
    profile = settings(
        max_examples=250,
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    # An example has as many steps as Hypothesis likes.
    while machine.steps < count:
        run_state_machine_as_test(machine, settings=profile)


def test_20_000_steps_agree_with_the_model():
    run_steps(20_000)


@pytest.mark.slow
def test_200_000_steps_agree_with_the_model():
    run_steps(200_000)
