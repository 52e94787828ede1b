"""All groups of a model together: what a scheduler talks to.

    kv = HybridManager([FullSpec(block_size=4), SlidingSpec(8, block_size=4)], num_blocks=64)
    hit = kv.allocate("a", prompt)                # prefix found: tokens that needn't be computed
    copies = kv.append("a", len(prompt) - hit)    # slots for the rest
    ...                                           # copy blocks, run the model, writing to
    kv.slots("a", group=0, start=hit)             # these slots
    kv.settle("a", prompt[hit:])                  # computed: can be found; windows move on
    kv.append("a", 1)                             # the next token, and so on
    kv.free("a")

A request has `num_tokens` positions with slots, of which the first `num_computed` are settled.
Several steps may be in flight: append, append, settle, settle. The step that computed a token
must have settled before its block can be found by others or be given back.

Blocks freed while a step is in flight may be handed to the next step: run steps in order.
"""

from __future__ import annotations

import itertools
import math
import sys
from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from kvtailor.runtime.kv.blocks import BlockPool, Stats
from kvtailor.runtime.kv.managers import BlockCopy, GroupManager, HitSearch
from kvtailor.runtime.kv.prefix import PinnedPrefix, token_array
from kvtailor.runtime.kv.spec import CrossSpec, FullSpec, KVSpec

__all__ = ["HybridManager"]


@dataclass(slots=True)
class _Request:
    """What the manager knows of one request besides its block tables."""

    # Ids of the computed tokens.
    tokens: array[int]
    # Where its first num_cached tokens lead; None: nothing of this request is to be found.
    prefix: PinnedPrefix | None
    num_cached: int
    # Tokens it had computed before it was preempted.
    num_own: int = 0
    num_tokens: int = field(init=False)
    num_computed: int = field(init=False)
    # Below these lengths no group has anything to do.
    append_until: int = 0
    settle_until: int = 0

    def __post_init__(self) -> None:
        self.num_tokens = self.num_computed = len(self.tokens)


class _Requests(dict[Hashable, _Request]):
    def __missing__(self, request: Hashable) -> NoReturn:
        raise ValueError(f"a request must be allocated, got {request!r}")


class HybridManager:
    """Block tables, prefix sharing and eviction for all groups of a model, from one pool.

    specs: one per group, as in `KVLayout.specs`; the position is the group number. num_blocks:
    blocks to hand out; pages need num_blocks + 1 rows, row 0 being the null block. in_flight:
    the most unsettled tokens a request may have; None for no limit. eagle: a drafting model
    needs the hidden state before the first token it computes, so a hit of L tokens also needs
    the block after L found, which is then computed again.

    With a cross-attention group, a request's keys depend on its encoder input: only requests
    that give a `salt`, naming that input, share prefixes.
    """

    def __init__(
        self,
        specs: Sequence[KVSpec],
        num_blocks: int,
        *,
        in_flight: int | None = None,
        eagle: bool = False,
    ) -> None:
        if in_flight is not None and in_flight < 1:
            raise ValueError(f"in_flight must be positive, got {in_flight}")
        self.specs = tuple(specs)
        self.pool = BlockPool(num_blocks, len(specs))
        self._in_flight = sys.maxsize if in_flight is None else in_flight
        own = [spec for spec in specs if not isinstance(spec, CrossSpec)]
        if not own:
            raise ValueError("specs must name a self-attention group, got only cross attention")
        # A hit must end at a block boundary of every group.
        self.align = math.lcm(*(spec.block_size for spec in own))
        self._lookahead = max(spec.block_size for spec in own) if eagle else 0
        self.managers: list[GroupManager] = []
        self._own: list[GroupManager] = []
        self._cross: list[tuple[GroupManager, CrossSpec]] = []
        for group, spec in enumerate(specs):
            ahead = spec.block_size if eagle else 0
            manager = GroupManager(spec, self.pool, group, self.align, ahead)
            self.managers.append(manager)
            if isinstance(spec, CrossSpec):
                self._cross.append((manager, spec))
            else:
                self._own.append(manager)
        self._local = [m for m in self._own if not isinstance(m.spec, FullSpec)]
        # Groups of equal block size share a tree of prefixes.
        self._sizes = tuple(dict.fromkeys(m.block_size for m in self._own))
        self._requests = _Requests()
        # Tokens a preempted request had computed.
        self._preempted: dict[Hashable, int] = {}
        self._counts = dict.fromkeys(("requests", "preemptions", "queried_tokens", "hit_tokens"), 0)

    def __repr__(self) -> str:
        groups = ", ".join(f"{spec} x{spec.block_size}" for spec in self.specs)
        used = self.pool.num_blocks - self.pool.num_free
        return (
            f"<HybridManager [{groups}]: {len(self._requests)} requests, "
            f"{used} of {self.pool.num_blocks} blocks used, {self.pool.num_cached} cached>"
        )

    # Reading

    def num_tokens(self, request: Hashable) -> int:
        """Positions with slots, settled or not."""
        return self._requests[request].num_tokens

    def num_computed(self, request: Hashable) -> int:
        """Positions whose keys are settled."""
        return self._requests[request].num_computed

    def block_table(self, request: Hashable, group: int = 0) -> list[int]:
        """The request's blocks in one group; 0, the null block, where it holds nothing."""
        return list(self._table(request, group))

    def block_tables(self, requests: Sequence[Hashable], group: int = 0) -> np.ndarray:
        """int32 [S, longest]: the block tables of S requests, filled up with null blocks."""
        tables = [self._table(request, group) for request in requests]
        out = np.zeros((len(tables), max(map(len, tables), default=0)), dtype=np.int32)
        for row, table in zip(out, tables):
            row[: len(table)] = table
        return out

    def slots(
        self, request: Hashable, group: int = 0, start: int = 0, stop: int | None = None
    ) -> np.ndarray:
        """int64 [stop - start]: slot block*B + offset of the positions start .. stop-1.

        stop defaults to all that have a slot; of a cross group, positions are the encoder's.
        Positions in the null block have slots below B: don't write there.
        """
        spec, table = self.specs[group], self._table(request, group)
        if stop is None:
            cross = isinstance(spec, CrossSpec)
            stop = len(table) * spec.block_size if cross else self._requests[request].num_tokens
        positions = np.arange(start, stop, dtype=np.int64)
        first = start // spec.block_size
        blocks = np.asarray(table[first : spec.num_blocks(stop)], dtype=np.int64)
        index = positions // spec.block_size - first
        return blocks[index] * spec.block_size + positions % spec.block_size

    def common_prefix_blocks(self) -> list[int]:
        """Per group, the leading full blocks all requests share, for cascade attention.

        0 for local groups: their leading blocks go away at different times.
        """
        computed = min((r.num_computed for r in self._requests.values()), default=0)
        counts = [0] * len(self.managers)
        for manager in self.managers:
            if isinstance(manager.spec, FullSpec):
                same = (len(set(blocks)) == 1 for blocks in zip(*manager.tables.values()))
                shared = sum(1 for _ in itertools.takewhile(bool, same))
                counts[manager.group] = min(shared, computed // manager.block_size)
        return counts

    @property
    def stats(self) -> Stats:
        """The counters, as of now."""
        return Stats(
            **self._counts,
            evictions=self.pool.evictions,
            copies=self.pool.copies,
            refusals=self.pool.refusals,
            live_blocks=tuple(self.pool.live),
            free_blocks=self.pool.num_free,
            cached_blocks=self.pool.num_cached,
            peak_blocks=self.pool.peak,
        )

    # Admission

    def allocate(
        self,
        request: Hashable,
        tokens: Iterable[int],
        *,
        salt: Hashable = None,
        encoder_tokens: int | None = None,
        reuse: bool = True,
        private: bool = False,
    ) -> int:
        """Admit a request; returns how many leading tokens of its prompt needn't be computed.

        tokens: ids of the prompt (for a resumed request, with all it generated). At least one
        is left to compute. salt: what else the keys depend on (adapter, images, encoder input);
        only requests of equal salt share. encoder_tokens: length of the encoder's output, for
        cross groups (default: the spec's). reuse=False: compute everything, as when the logits
        of all positions are wanted. private: nor is what it computes found by others.

        Raises OutOfBlocks, then nothing is taken, if the whole prompt doesn't fit in what is
        free now; it never will if `needed` is above `total`. Only hits are taken: blocks for
        the rest come with `append`, so append before the next request is admitted.
        """
        if request in self._requests:
            raise ValueError(f"a request is allocated once, got {request!r} again")
        ids = token_array(tokens)
        encoder_lengths = self._encoder_lengths(encoder_tokens)
        length, hits = self._find_hit(ids, salt, reuse and not private)
        needed = self._admission_blocks(len(ids), hits, encoder_lengths)
        self.pool.require(needed)

        known = ids[:length]
        num_own = self._preempted.pop(request, 0)
        prefix = None
        if not (private or self._is_private(salt)):
            prefix = PinnedPrefix(self.pool.index, self._sizes, salt, known.tobytes())
        self._requests[request] = _Request(known, prefix, length, num_own)
        # Hits of all groups first: what is allocated afterwards may evict anything else.
        for manager, hit in zip(self._own, hits):
            manager.allocate(request, hit)
        for (cross, _), encoder_length in zip(self._cross, encoder_lengths):
            cross.allocate(request, ())
            cross.append(request, 0, encoder_length)
        self._counts["requests"] += 1
        self._counts["queried_tokens"] += max(0, len(ids) - num_own)
        self._counts["hit_tokens"] += max(0, length - num_own)
        return length

    def _is_private(self, salt: Hashable) -> bool:
        """Whether what a request with this `salt` computes must not be found by others."""
        return bool(self._cross) and salt is None

    def _find_hit(
        self, ids: array[int], salt: Hashable, reuse: bool = True
    ) -> tuple[int, list[list[int]]]:
        """The longest hit common to all groups, and the table it gives in each."""
        limit = len(ids) - 1 - self._lookahead
        if not reuse or limit < self.align or self._is_private(salt):
            return 0, [[] for _ in self._own]
        data, index = ids.tobytes(), self.pool.index
        path_of = {size: index.find(size, salt, data) for size in self._sizes}
        paths = [path_of[m.block_size] for m in self._own]
        searches = [HitSearch(m, path) for m, path in zip(self._own, paths)]
        # A group may cut the hit to a length that another group doesn't have: to a fixed point.
        length, before = limit, -1
        while length != before:
            before = length
            for search in searches:
                length = search.longest(length)
        return length, [m.hit_blocks(path, length) for m, path in zip(self._own, paths)]

    def _admission_blocks(
        self, num_tokens: int, hits: Sequence[Sequence[int]], encoder_lengths: Sequence[int]
    ) -> int:
        """Free blocks the gate asks for: all the prompt takes, by the formula of the plan.

        More than the pool has, if it will never fit.
        """
        in_flight = min(num_tokens, self._in_flight)
        needed = sum(m.spec.admission_blocks(num_tokens, in_flight) for m in self._own)
        needed += sum(spec.num_blocks(n) for (_, spec), n in zip(self._cross, encoder_lengths))
        if needed > self.pool.num_blocks:
            return needed
        # What others use anyway costs nothing.
        return needed - sum(1 for hit in hits for block in hit if self.pool.ref_count(block))

    def _encoder_lengths(self, encoder_tokens: int | None) -> list[int]:
        lengths = []
        for _, spec in self._cross:
            length = spec.encoder_tokens if encoder_tokens is None else encoder_tokens
            if not 0 <= length <= spec.encoder_tokens:
                raise ValueError(
                    f"encoder_tokens must be 0 to {spec.encoder_tokens}, as in the spec, "
                    f"got {length}"
                )
            lengths.append(length)
        return lengths

    # Steps

    def append(self, request: Hashable, num_tokens: int) -> Sequence[BlockCopy]:
        """Give the next `num_tokens` positions slots in every group.

        Returns the blocks to copy, in this order, before the step writes: usually none.
        Raises OutOfBlocks, then nothing has changed: preempt somebody, or wait.
        """
        state = self._requests[request]
        start = state.num_tokens
        stop = start + num_tokens
        if start < stop <= state.append_until:
            state.num_tokens = stop
            return ()
        return self._append_blocks(request, state, start, stop)

    def _append_blocks(
        self, request: Hashable, state: _Request, start: int, stop: int
    ) -> Sequence[BlockCopy]:
        if stop < start:
            raise ValueError(f"num_tokens must not be negative, got {stop - start}")
        if stop - state.num_computed > self._in_flight:
            raise ValueError(
                f"at most in_flight={self._in_flight} tokens of a request may be unsettled, "
                f"got {stop - state.num_computed}"
            )
        if stop == start:
            # Nothing is written: a shared block need not be one's own yet.
            return ()
        # No need to count while there are plenty: a group takes at most a block per token.
        if self.pool.num_free < len(self._own) * (stop - start):
            self.pool.require(sum(m.blocks_needed(request, start, stop) for m in self._own))
        copies = [copy for m in self._own if (copy := m.append(request, start, stop))]
        room = min(len(m.tables[request]) * m.block_size for m in self._own)
        state.num_tokens = stop
        state.append_until = min(room, state.num_computed + self._in_flight)
        return copies

    def settle(self, request: Hashable, tokens: Sequence[int]) -> None:
        """The next tokens are computed: `tokens` are their ids, in order.

        Full blocks can be found from now on, and what no later query sees is given back. Tokens
        still in flight, or rejected ones until `rollback`, keep their slots.
        """
        state = self._requests[request]
        count = len(tokens)
        computed = state.num_computed + count
        if computed > state.num_tokens:
            raise ValueError(
                f"settled tokens must have been appended: {state.num_tokens} are, "
                f"got {computed} settled"
            )
        if count == 1:
            state.tokens.append(tokens[0])
        else:
            state.tokens.extend(token_array(tokens))
        state.num_computed = computed
        if computed >= state.settle_until:
            self._settle_blocks(request, state)

    def _settle_blocks(self, request: Hashable, state: _Request) -> None:
        """Let what the latest tokens filled be found, and give back what is out of sight."""
        start, stop = state.num_cached, state.num_computed
        state.num_cached = stop
        until = sys.maxsize
        for tree, size in enumerate(self._sizes):
            first, last = start // size, stop // size
            until = min(until, (last + 1) * size)
            if first < last and state.prefix is not None:
                tokens = state.tokens[first * size : last * size].tobytes()
                nodes = state.prefix.extend(tree, tokens)
                for manager in self._own:
                    if manager.block_size == size:
                        manager.cache(request, first, nodes)
        for manager in self._local:
            removal = manager.next_removal(request)
            if removal <= stop:
                manager.remove_skipped(request, stop)
                removal = manager.next_removal(request)
            until = min(until, removal)
        state.settle_until = until

    # Going back, branching, ending

    def rollback(self, request: Hashable, num_tokens: int) -> None:
        """Drop the last `num_tokens` tokens, settled or not; more than there are drops all.

        Raises ValueError, changing nothing, when a local group has given back what the next
        token would have to see. Rejected speculative tokens can always be dropped.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens must not be negative, got {num_tokens}")
        state = self._requests[request]
        length = max(0, state.num_tokens - num_tokens)
        for manager in self._own:
            if not manager.can_rollback(request, length):
                raise ValueError(
                    f"a rollback must stay in what every group still holds: group "
                    f"{manager.group} ({manager.spec}) has given back positions from "
                    f"{manager.spec.skipped(length)} on, got a rollback to {length} tokens"
                )
        for manager in self._own:
            manager.rollback(request, length)
        state.num_tokens = length
        state.append_until = state.settle_until = 0
        if length < state.num_computed:
            state.num_computed = length
            del state.tokens[length:]
            cached, state.num_cached = state.num_cached, min(state.num_cached, length)
            if state.prefix is not None:
                for tree, size in enumerate(self._sizes):
                    state.prefix.rewind(tree, cached // size - state.num_cached // size)

    def fork(self, request: Hashable, child: Hashable) -> None:
        """Let `child` go on from where `request` is, sharing all its blocks.

        Whoever first writes a shared half-full block gets a copy of it from `append`.
        """
        state = self._requests[request]
        if state.num_computed != state.num_tokens:
            raise ValueError(
                f"a request must have no token in flight to branch, got {request!r} with "
                f"{state.num_tokens - state.num_computed}"
            )
        if child in self._requests:
            raise ValueError(f"a request is allocated once, got {child!r} again")
        prefix = None if state.prefix is None else state.prefix.copy()
        self._requests[child] = _Request(state.tokens[:], prefix, state.num_cached)
        for manager in self.managers:
            manager.fork(request, child)
        # A half-full block is no longer its own.
        state.append_until = 0

    def preempt(self, request: Hashable) -> None:
        """Give everything back for now; `allocate` it again, with all its tokens, to resume.

        What it then finds of its own is not counted as a hit. To drop it instead, `free` it.
        """
        state = self._requests[request]
        self.free(request)
        self._preempted[request] = max(state.num_own, state.num_computed)
        self._counts["preemptions"] += 1

    def free(self, request: Hashable) -> None:
        """The request is done: give back its blocks. What is full stays cached till evicted."""
        if request not in self._requests and self._preempted.pop(request, None) is not None:
            return
        state = self._requests[request]
        del self._requests[request]
        for manager in self.managers:
            manager.free(request)
        if state.prefix is not None:
            state.prefix.unpin()

    def _table(self, request: Hashable, group: int) -> list[int]:
        # Its own message for a request that isn't known.
        self._requests[request]
        return self.managers[group].tables[request]
