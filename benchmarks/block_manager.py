"""What the block manager costs, in time and in memory.

Time, beside a baseline: nano-vllm's algorithm (one full group, a chain of hashes over blocks, a
deque of free blocks), written anew here from its description. Its 64-bit hash of a block's numpy
bytes is Python's own hash here, the cheapest there is.

Memory, in bytes per request of 131,072 tokens that decodes: in the engine's layout, beside a pool
where every layer keeps every token, and beside transformers' PagedAttentionCache (continuous
batching, 5.24), whose formula is `transformers_bytes`.

    python benchmarks/block_manager.py
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Gemma3nTextConfig, Gemma3TextConfig, Llama4TextConfig

from kvtailor.benchmarks.harness import Bench, Case, Group, exponent
from kvtailor.runtime.kv.hybrid import HybridManager
from kvtailor.runtime.kv.layout import KVLayout, layer_specs, with_geometry
from kvtailor.runtime.kv.spec import ChunkedSpec, FullSpec, KVSpec, SlidingSpec

BLOCK_SIZE = 16
CONTEXT = 131_072
# Tokens that every request decodes in one timed run.
STEPS = 64


# The baseline


class NanoBlock:
    def __init__(self, number: int) -> None:
        self.number = number
        self.users = 0
        self.hash: int | None = None
        self.tokens: list[int] = []


class NanoRequest:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = list(tokens)
        self.table: list[int] = []
        self.num_hit = 0


class NanoManager:
    """One full group: a chain hash per block -> block, free blocks in a deque."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [NanoBlock(i) for i in range(num_blocks)]
        self.by_hash: dict[int, int] = {}
        self.free_blocks = deque(range(num_blocks))
        self.used: set[int] = set()

    def chain_hash(self, tokens: list[int], parent: int | None) -> int:
        return hash((parent, np.array(tokens).tobytes()))

    def take(self, number: int) -> NanoBlock:
        block = self.blocks[number]
        block.users, block.hash, block.tokens = 1, None, []
        self.free_blocks.remove(number)
        self.used.add(number)
        return block

    def allocate(self, request: NanoRequest) -> None:
        size, parent, missed = self.block_size, None, False
        for start in range(0, len(request.tokens), size):
            tokens = request.tokens[start : start + size]
            full = len(tokens) == size
            parent = self.chain_hash(tokens, parent) if full else None
            number = self.by_hash.get(parent, -1) if parent is not None else -1
            if number < 0 or self.blocks[number].tokens != tokens:
                missed = True
            if missed:
                block = self.take(self.free_blocks[0])
            else:
                request.num_hit += size
                if number in self.used:
                    block = self.blocks[number]
                    block.users += 1
                else:
                    block = self.take(number)
            if parent is not None:
                block.hash, block.tokens = parent, tokens
                self.by_hash[parent] = block.number
            request.table.append(block.number)

    def free(self, request: NanoRequest) -> None:
        for number in reversed(request.table):
            block = self.blocks[number]
            block.users -= 1
            if block.users == 0:
                self.used.remove(number)
                self.free_blocks.append(number)
        request.num_hit = 0
        request.table.clear()

    def can_append(self, request: NanoRequest) -> bool:
        return len(self.free_blocks) >= (len(request.tokens) % self.block_size == 1)

    def append(self, request: NanoRequest) -> None:
        """Make room for the last token, or hash the block it has filled."""
        size, table = self.block_size, request.table
        if len(request.tokens) % size == 1:
            table.append(self.take(self.free_blocks[0]).number)
        elif len(request.tokens) % size == 0:
            tokens = request.tokens[-size:]
            parent = self.blocks[table[-2]].hash if len(table) > 1 else None
            block = self.blocks[table[-1]]
            block.hash, block.tokens = self.chain_hash(tokens, parent), tokens
            self.by_hash[block.hash] = block.number


# Cases: each keeps its manager, and says how many blocks its tables have, as a check.

FULL: list[KVSpec] = [FullSpec()]
HYBRID: list[KVSpec] = [FullSpec(), SlidingSpec(512), ChunkedSpec(512)]


def prompts_of(count: int, low: int, high: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(50_000) for _ in range(rng.randint(low, high))] for _ in range(count)]


def others(prompt: list[int]) -> Iterator[list[int]]:
    """Prompts of the same length that share no block with each other."""
    return ([-number, *prompt[1:]] for number in itertools.count(1))


def prefill(kv: HybridManager, name: Hashable, prompt: list[int]) -> None:
    hit = kv.allocate(name, prompt)
    kv.append(name, len(prompt) - hit)
    kv.settle(name, prompt[hit:])


def decode_nano(prompts: list[list[int]], num_blocks: int) -> Case:
    manager = NanoManager(num_blocks, BLOCK_SIZE)
    requests = [NanoRequest(prompt) for prompt in prompts]
    for request in requests:
        manager.allocate(request)

    def steps() -> Tensor:
        for token in range(STEPS):
            for request in requests:
                request.tokens.append(token)
                assert manager.can_append(request)
                manager.append(request)
        return torch.tensor(sum(len(request.table) for request in requests))

    return steps


def decode(specs: list[KVSpec], prompts: list[list[int]], num_blocks: int) -> Case:
    kv = HybridManager(specs, num_blocks)
    names = [f"request {i}" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts):
        prefill(kv, name, prompt)

    def steps() -> Tensor:
        for token in range(STEPS):
            tokens = (token,)
            for name in names:
                kv.append(name, 1)
                kv.settle(name, tokens)
        return torch.tensor(sum(len(table) for table in kv.managers[0].tables.values()))

    return steps


def lookup_nano(prompt: list[int], num_blocks: int, in_use: bool) -> Case:
    manager, first = NanoManager(num_blocks, BLOCK_SIZE), NanoRequest(prompt)
    manager.allocate(first)
    if not in_use:
        manager.free(first)
    request = NanoRequest(prompt)

    def find() -> Tensor:
        manager.allocate(request)
        found = torch.tensor(len(request.table))
        assert request.num_hit == len(prompt)
        manager.free(request)
        return found

    return find


def lookup(specs: list[KVSpec], prompt: list[int], num_blocks: int, in_use: bool) -> Case:
    kv = HybridManager(specs, num_blocks)
    prefill(kv, "first", prompt)
    if not in_use:
        kv.free("first")

    def find() -> Tensor:
        hit = kv.allocate("second", prompt)
        kv.append("second", len(prompt) - hit)
        found = torch.tensor(len(kv.managers[0].tables["second"]))
        assert hit == len(prompt) - BLOCK_SIZE
        kv.free("second")
        return found

    return find


def miss_nano(prompt: list[int], num_blocks: int) -> Case:
    manager, prompts = NanoManager(num_blocks, BLOCK_SIZE), others(prompt)

    def compute() -> Tensor:
        request = NanoRequest(next(prompts))
        manager.allocate(request)
        found = torch.tensor(len(request.table))
        manager.free(request)
        return found

    return compute


def miss(specs: list[KVSpec], prompt: list[int], num_blocks: int) -> Case:
    kv, prompts = HybridManager(specs, num_blocks), others(prompt)

    def compute() -> Tensor:
        prefill(kv, "first", next(prompts))
        found = torch.tensor(len(kv.managers[0].tables["first"]))
        kv.free("first")
        return found

    return compute


def measure_time(bench: Bench) -> None:
    running = prompts_of(100 if bench.quick else 1000, 256, 768)
    turns = bench.runs + bench.warmup + 1
    pool = 2 * len(HYBRID) * len(running) * (768 + STEPS * turns) // BLOCK_SIZE
    name = f"decode, {len(running):,} requests, {STEPS} tokens each"
    group = bench.compare(
        name,
        {
            "nano, full": decode_nano(running, pool),
            "full": decode(FULL, running, pool),
            "full + sliding + chunked": decode(HYBRID, running, pool),
        },
    )
    for case, timing in group.cases.items():
        micros = 1e6 * timing.median / (STEPS * len(running))
        bench.check(f"decode, {case}: microseconds per token", micros)
    check_ratios(bench, "decode", group)

    (prompt,) = prompts_of(1, 32_768, 32_768)
    blocks = 8192
    kinds: dict[str, tuple[Callable[..., Case], Callable[..., Case], tuple[object, ...]]] = {
        "lookup, prefix in use": (lookup_nano, lookup, (prompt, blocks, True)),
        "lookup, prefix cached": (lookup_nano, lookup, (prompt, blocks, False)),
        "miss: computed, cached, freed": (miss_nano, miss, (prompt, blocks)),
    }
    for name, (nano, ours, arguments) in kinds.items():
        cases = {
            "nano, full": nano(*arguments),
            "full": ours(FULL, *arguments),
            "full + sliding + chunked": ours(HYBRID, *arguments),
        }
        check_ratios(bench, name, bench.compare(f"{name}, 32,768 tokens", cases))

    # Blocks touched: by the length of the prompt. Blocks existing: by the size of the pool.
    count = 4 if bench.quick else 7
    lengths = [2048 << i for i in range(count)]
    pools = [8192 << i for i in range(count)]
    long = {n: prompts_of(1, n, n)[0] for n in lengths}
    few = running[:30]
    check_growth(
        bench, "lookup by tokens", lengths, lambda n: lookup(HYBRID, long[n], 32_768, False)
    )
    check_growth(bench, "miss by tokens", lengths, lambda n: miss(HYBRID, long[n], 32_768))
    check_growth(bench, "lookup by pool", pools, lambda n: lookup(HYBRID, prompt, n, False))
    check_growth(bench, "decode by pool", pools, lambda n: decode(HYBRID, few, n))


def check_ratios(bench: Bench, name: str, group: Group) -> None:
    for case in ("full", "full + sliding + chunked"):
        # One group against one group; three groups do three times the work.
        limit = 1.5 if case == "full" else None
        ratio = 1 / group.speedup(case, "nano, full")
        bench.check(f"{name}: {case} against nano, times", ratio, at_most=limit)


def check_growth(bench: Bench, name: str, sizes: list[int], case: Callable[[int], Case]) -> None:
    # Each on its own, since they don't compute the same: so by the best run, not the median.
    seconds = [
        bench.compare(f"{name}, {n:,}", {"ours": case(n)}, show=False).cases["ours"].best
        for n in sizes
    ]
    limit = 0.2 if "pool" in name else 1.2
    bench.check(f"{name}: exponent", exponent(sizes, seconds), at_most=limit)


# Memory


# As published; Gemma3n-E4B and Llama4-Scout are the classes' defaults.
MODELS: dict[str, Any] = {
    "Gemma3-27B": Gemma3TextConfig(
        num_hidden_layers=62, num_key_value_heads=16, head_dim=128, sliding_window=1024
    ),
    "Gemma3n-E4B": Gemma3nTextConfig(),
    "Llama4-Scout": Llama4TextConfig(),
}


def token_bytes(config: Any) -> int:
    """Bytes of one token's key and value in one layer, in bf16."""
    return int(config.num_key_value_heads * 2 * config.head_dim * 2)


def layout_of(config: Any) -> KVLayout:
    """What the engine makes of the model."""
    heads, dim = config.num_key_value_heads, config.head_dim
    specs = layer_specs(config, block_size=BLOCK_SIZE)
    shaped = {name: with_geometry(spec, heads, dim, dim, 2) for name, spec in specs.items()}
    return KVLayout(shaped, max_tokens=CONTEXT)


def request_bytes(layout: KVLayout) -> int:
    """Bytes of a request of CONTEXT tokens that decodes."""
    return layout.request_blocks(CONTEXT, 1) * layout.block_bytes


def full_bytes(config: Any) -> int:
    """What it takes where every layer, also one that shares another's keys, keeps every token."""
    return int(config.num_hidden_layers * token_bytes(config) * CONTEXT)


def transformers_bytes(config: Any, page_size: int = 256) -> tuple[int, int] | None:
    """(bytes of blocks, bytes of sectors) of one request in transformers' PagedAttentionCache.

    A group per layer type, sharing layers included; a block is a page of every layer of the
    group. Full groups keep every token, sliding ones a ring of W. Groups take memory in sectors
    of the least common multiple of their block bytes (and of 128). None where it refuses the
    model: chunked layers.
    """
    numbers = Counter(config.layer_types)
    if "chunked_attention" in numbers:
        return None
    block_bytes = {kind: n * token_bytes(config) * page_size for kind, n in numbers.items()}
    sector = math.lcm(*block_bytes.values(), 128)
    in_blocks = in_sectors = 0
    for kind, size in block_bytes.items():
        kept = min(CONTEXT, config.sliding_window) if kind == "sliding_attention" else CONTEXT
        blocks = -(-kept // page_size)
        in_blocks += blocks * size
        in_sectors += -(-blocks // (sector // size)) * sector
    return in_blocks, in_sectors


def report_memory(bench: Bench) -> None:
    for model, config in MODELS.items():
        layout = layout_of(config)
        groups = ", ".join(f"{len(group.layers)} {group.spec}" for group in layout.groups)
        bench.note(f"{model}: blocks of {layout.block_bytes:,} bytes; layers: {groups}")
        ours, full = request_bytes(layout), full_bytes(config)
        bench.check(f"{model}, {CONTEXT:,} tokens: GB", ours / 1e9)
        bench.check(f"{model}, every layer keeping every token: GB", full / 1e9)
        bench.check(f"{model}, full pool against ours, times", full / ours)
        other = transformers_bytes(config)
        if other is None:
            bench.note(f"transformers' PagedAttentionCache refuses {model}: chunked layers")
            continue
        for unit, taken in zip(("blocks", "sectors"), other):
            bench.check(f"{model}, transformers, in {unit}: GB", taken / 1e9)


def main() -> int:
    bench = Bench.from_args("block_manager", __doc__)
    report_memory(bench)
    measure_time(bench)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
