"""Specs, groups and the plan: the formulas of a KV cache, by hand-computed figures."""

from __future__ import annotations

import importlib.util
import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest

from kvtailor.runtime.kv.spec import (
    ChunkedSpec,
    CrossSpec,
    FullSpec,
    SharedSpec,
    SlidingSpec,
    group_layers,
    plan_kv,
)


def test_importing_needs_no_torch():
    code = "import sys, kvtailor.runtime.kv.hybrid; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# Specs


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: FullSpec(block_size=0), "block_size must be a positive integer, got 0"),
        (lambda: FullSpec(num_kv_heads=-1), "num_kv_heads must be a positive integer, got -1"),
        (lambda: FullSpec(head_dim=1.5), "head_dim must be a positive integer, got 1.5"),
        (lambda: FullSpec(v_head_dim=0), "v_head_dim must be a positive integer, got 0"),
        (lambda: FullSpec(itemsize=True), "itemsize must be a positive integer, got True"),
        (lambda: SlidingSpec(0), "window must be a positive integer, got 0"),
        (lambda: SlidingSpec(None), "window must be a positive integer, got None"),
        (lambda: ChunkedSpec(0), "chunk must be a positive integer, got 0"),
        (lambda: CrossSpec(-3), "encoder_tokens must be a positive integer, got -3"),
    ],
)
def test_a_spec_states_the_rule_and_the_value(make, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        make()


@pytest.mark.parametrize(
    "spec, expected",
    [
        (FullSpec(num_kv_heads=8, head_dim=128), 16 * 8 * (128 + 128) * 2),
        (FullSpec(block_size=4, num_kv_heads=1, head_dim=192, v_head_dim=128), 4 * 320 * 2),
        (SlidingSpec(512, num_kv_heads=2, head_dim=256, itemsize=4), 16 * 2 * 512 * 4),
    ],
)
def test_page_bytes(spec, expected):
    assert spec.page_bytes == expected


@pytest.mark.parametrize(
    "spec, expected",
    [
        (FullSpec(), {0: 0, 100: 0}),
        (SlidingSpec(4), {0: 0, 3: 0, 4: 1, 11: 8}),
        (SlidingSpec(1), {0: 0, 1: 1, 9: 9}),
        (ChunkedSpec(4), {0: 0, 3: 0, 4: 4, 7: 4, 8: 8}),
        # The next token starts a new chunk: all of the last one goes.
        (ChunkedSpec(1024), {1023: 0, 1024: 1024, 1025: 1024}),
    ],
    ids=str,
)
def test_skipped_tokens(spec, expected):
    assert {n: spec.skipped(n) for n in expected} == expected


@pytest.mark.parametrize(
    "spec, counts",
    [
        (SlidingSpec(4), [1, 2, 3, 4, 4, 4, 4, 4]),
        (SlidingSpec(1), [1] * 8),
        (ChunkedSpec(4), [1, 2, 3, 4, 1, 2, 3, 4]),
        (FullSpec(), [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
    ids=str,
)
def test_visible_keys(spec, counts):
    assert [len(spec.visible(p)) for p in range(8)] == counts
    assert all(spec.visible(p)[-1] == p for p in range(8))


@pytest.mark.parametrize(
    "length, blocks, last", [(0, 0, 0), (1, 1, 1), (4, 1, 4), (8, 2, 4), (9, 3, 1)]
)
def test_p05_blocks_and_tokens_in_the_last(length, blocks, last):
    """P05: block 4; a length divisible by the block fills its last block."""
    spec = FullSpec(block_size=4)
    assert (spec.num_blocks(length), spec.last_page_len(length)) == (blocks, last)


@pytest.mark.parametrize("spec", [SlidingSpec(1), SlidingSpec(5), ChunkedSpec(1), ChunkedSpec(6)])
def test_computed_to_skip_is_the_least(spec):
    for tokens in range(1, 20):
        n = spec.computed_to_skip(tokens)
        assert spec.skipped(n) >= tokens > spec.skipped(n - 1)
    assert FullSpec().computed_to_skip(1) == sys.maxsize


# Admission


@pytest.mark.parametrize(
    "spec, max_tokens, in_flight, blocks",
    [
        (ChunkedSpec(1024), 16_384, 1024, 128),
        (ChunkedSpec(1024), 16_384, 2048, 192),
        (SlidingSpec(1024), 16_384, 8192, 577),
        (FullSpec(), 16_384, 1024, 1024),
        (CrossSpec(1500), 16_384, 1024, 94),
        # No more than the tokens fill.
        (SlidingSpec(1024), 100, 8192, 7),
        (ChunkedSpec(1024), 100, 8192, 7),
        (SlidingSpec(1024), 0, 1, 0),
        # A chunk that starts inside a block reaches into one more.
        (ChunkedSpec(6, block_size=4), 100, 2, 3),
    ],
    ids=str,
)
def test_admission(spec, max_tokens, in_flight, blocks):
    assert spec.admission_blocks(max_tokens, in_flight) == blocks
    assert spec.max_bytes(max_tokens, in_flight) == blocks * spec.page_bytes


@pytest.mark.parametrize("local", [1, 3, 4, 6, 8])
@pytest.mark.parametrize("make", [SlidingSpec, ChunkedSpec])
@pytest.mark.parametrize("block_size", [1, 3, 4])
def test_admission_bounds_what_is_held(make, local, block_size):
    """Against every position: never too small, and hardly too large."""
    spec = make(local, block_size=block_size)
    for num_tokens, in_flight in itertools.product(range(1, 30), range(1, 9)):
        held = max(
            spec.num_blocks(min(n + in_flight, num_tokens)) - spec.skipped(n) // block_size
            for n in range(num_tokens)
        )
        assert held <= spec.admission_blocks(num_tokens, in_flight) <= held + 2


# Groups

SLIDING = SlidingSpec(512, num_kv_heads=2, head_dim=256)
FULL = FullSpec(num_kv_heads=2, head_dim=256)


def test_equal_specs_form_a_group_and_sharers_join_their_owner():
    layers = {
        "l0": SLIDING,
        "l1": FULL,
        "l2": SlidingSpec(512, num_kv_heads=2, head_dim=256),
        "l3": SharedSpec("l2", SLIDING),
        "l4": SharedSpec("l1"),
        # Through another sharer.
        "l5": SharedSpec("l3"),
    }
    sliding, full = group_layers(layers)
    assert (sliding.spec, sliding.layers, sliding.sharers) == (SLIDING, ("l0", "l2"), ("l3", "l5"))
    assert (full.spec, full.layers, full.sharers) == (FULL, ("l1",), ("l4",))
    # Sharing costs nothing.
    assert sliding.block_bytes == 2 * SLIDING.page_bytes


@pytest.mark.parametrize(
    "layers, message",
    [
        ({"l0": FULL, "l1": SharedSpec("l9")}, "exists, got 'l1' sharing with 'l9'"),
        ({"l0": SharedSpec("l1"), "l1": FULL}, "earlier layer, got 'l0' sharing with 'l1'"),
        ({"l0": FULL, "l1": SharedSpec("l1")}, "earlier layer, got 'l1' sharing with 'l1'"),
        ({"l0": SharedSpec("l0")}, "earlier layer, got 'l0' sharing with 'l0'"),
        ({"l0": FULL, "l1": SharedSpec("l0", SLIDING)}, "owner's kind, got 'l1' .*'l0'"),
        (
            {"l0": SLIDING, "l1": SharedSpec("l0", SlidingSpec(256, num_kv_heads=2, head_dim=256))},
            "owner's kind, got 'l1' .*window=256.*'l0'.*window=512",
        ),
    ],
    ids=["nobody", "later", "itself", "all shared", "another kind", "another window"],
)
def test_sharing_errors_name_the_layer(layers, message):
    with pytest.raises(ValueError, match=message):
        group_layers(layers)


@pytest.mark.parametrize("make", [SlidingSpec, ChunkedSpec])
@pytest.mark.parametrize("max_tokens, groups", [(None, 2), (4097, 2), (4096, 1), (100, 1)])
def test_a_window_of_the_longest_request_joins_full(make, max_tokens, groups):
    assert len(group_layers({"l0": FullSpec(), "l1": make(4096)}, max_tokens)) == groups


# The plan


def small_plan(**options):
    layers = {f"l{i}": SlidingSpec(8, block_size=4, head_dim=8) for i in range(4)}
    layers |= {"l4": FullSpec(block_size=4, head_dim=8), "l5": SharedSpec("l4")}
    return plan_kv(layers, **{"memory": 16_384, "max_tokens": 64, "in_flight": 4} | options)


def test_a_plan_prints_what_a_budget_buys():
    # A block is 4 layers of 4 tokens, or 1 layer of 16: 4 * 4 * 2 * 8 * 2 = 512 bytes.
    # 64 tokens: ceil((8 - 1 + 1) / 4) + 1 = 3 sliding blocks, 64 / 16 = 4 full ones; with 4 in
    # flight ceil((7 + 4) / 4) + 1 = 4 and 4. Every token in 6 layers: 64 * 6 * 32 = 12,288.
    assert str(small_plan()) == (
        "16.00 KiB buys 31 blocks of 512 B, and the null block\n"
        "group  kind       layers  sharing  block      page   padding  per request\n"
        "0      sliding 8  4       0        4 tokens   128 B  0.0%     3 blocks\n"
        "1      full       1       1        16 tokens  512 B  0.0%     4 blocks\n"
        "one request of 64 tokens: 3.50 KiB while it decodes (4.00 KiB with 4 tokens in flight)\n"
        "every layer keeping every token: 12.00 KiB, 3.43 times that\n"
        "requests of that length at once: 3"
    )


def test_the_plan_without_balance_pads_small_blocks():
    plan = small_plan(balance=False)
    assert [spec.block_size for spec in plan.specs] == [4, 4]
    # 3 + 16 blocks instead of 3 + 4: three quarters of a full block are lost.
    assert plan.request_blocks(64) == 19
    assert "75.0%" in str(plan)


def test_balance_rounds_to_what_makes_a_request_smallest():
    # 5 to 2 layers: a ratio of 2.5. Twice: 40 blocks of 5 pages' worth; three times: 27 of 6.
    layers = {f"s{i}": SlidingSpec(4, block_size=4) for i in range(5)}
    layers |= {f"f{i}": FullSpec(block_size=4) for i in range(2)}
    plan = plan_kv(layers, memory=1 << 24, max_tokens=320, in_flight=4)
    assert [spec.block_size for spec in plan.specs] == [4, 12]
    token = FullSpec().token_bytes
    assert plan.request_bytes(320) == (27 + 2) * 6 * 4 * token < (40 + 2) * 5 * 4 * token


def test_balance_stays_cheap_and_its_hits_fine():
    """Thirty groups of odd sizes: block sizes whose common multiple is no use aren't taken."""
    layers = {
        f"g{i}.{j}": SlidingSpec(8 + i, block_size=4)
        for i in range(30)
        for j in range(1 + i * 7 % 31)
    }
    plan = plan_kv(layers, memory=1 << 28, max_tokens=4096, in_flight=8)
    assert math.lcm(*(spec.block_size for spec in plan.specs)) <= 1024
    unbalanced = plan_kv(layers, memory=1 << 28, max_tokens=4096, in_flight=8, balance=False)
    assert plan.request_bytes(4096) <= unbalanced.request_bytes(4096)


def test_group_of_finds_owners_and_sharers():
    plan = small_plan()
    assert [plan.group_of(f"l{i}") for i in range(6)] == [0, 0, 0, 0, 1, 1]
    with pytest.raises(ValueError, match="got 'l9'"):
        plan.group_of("l9")


def test_p07_one_group_for_all_keeps_what_the_widest_layer_sees():
    """P07: window 4 and full forced into one group: it is a full one; windows stay per layer."""
    layers = {"l0": SlidingSpec(4), "l1": FullSpec()}
    plan = plan_kv(layers, memory=1 << 20, max_tokens=64, hybrid=False)
    (group,) = plan.groups
    assert group.spec == FullSpec()
    assert group.layers == ("l0", "l1")
    assert [len(layers[name].visible(9)) for name in ("l0", "l1")] == [4, 10]


def test_p07_windows_never_share_a_group():
    """P07: two windows, or a window and full attention, are two groups."""
    assert len(group_layers({"l0": SlidingSpec(4), "l1": SlidingSpec(8), "l2": FullSpec()})) == 3


def test_without_hybrid_sharers_of_local_layers_still_join():
    plan = small_plan(hybrid=False)
    (group,) = plan.groups
    assert (len(group.layers), group.sharers) == (5, ("l5",))


def test_cross_layers_are_a_group_of_their_own():
    layers = {"self": FullSpec(head_dim=8), "cross": CrossSpec(1500, head_dim=8)}
    plan = plan_kv(layers, memory=1 << 22, max_tokens=32, hybrid=False)
    assert [spec.kind for spec in plan.specs] == ["full", "cross"]
    assert plan.request_blocks(32) == 2 + 94
    assert plan.full_pool_bytes(32) == (32 + 1500) * FullSpec(head_dim=8).token_bytes


@pytest.mark.parametrize(
    "options, message",
    [
        ({"memory": 0}, "memory must be positive, got 0"),
        ({"max_tokens": 0}, "max_tokens must be positive, got 0"),
        ({"in_flight": 0}, "in_flight must be positive, got 0"),
        # 4 + 4 blocks and the null block, of 512 bytes.
        ({"memory": 4607}, "one request of 64 tokens with 4 in flight: 4,608 bytes, got 4,607"),
    ],
)
def test_a_plan_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        small_plan(**options)


def test_a_plan_of_exactly_one_request():
    plan = small_plan(memory=4608)
    assert (plan.num_blocks, plan.max_requests) == (8, 1)


def test_a_plan_needs_a_layer():
    with pytest.raises(ValueError, match="at least one layer"):
        plan_kv({}, memory=1, max_tokens=1)


# Memory of real configurations, at 131,072 tokens in bf16. All figures by hand; layers and heads
# as in the models' published configurations.


@pytest.fixture(scope="module")
def benchmark():
    """benchmarks/block_manager.py, which has the configurations and transformers' formula."""
    pytest.importorskip("torch")
    folder = Path(__file__).parents[1] / "benchmarks"
    spec = importlib.util.spec_from_file_location(
        "bench_block_manager", folder / "block_manager.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


MEMORY = [
    # 10 full and 52 sliding layers of 8,192 bytes a token. A full block of 96 tokens is 960 such
    # units, a sliding one of 16 is 832: ceil(131,072 / 96) + (ceil(1,024 / 16) + 1) blocks.
    ("Gemma3-27B", [16, 96], (1366 + 65) * 960 * 8192, 62 * 8192 * 131_072),
    # 4 full and 16 sliding owners of 2,048 bytes a token, and 15 sharers: 2,048 + 33 blocks.
    ("Gemma3n-E4B", [16, 64], (2048 + 33) * 256 * 2048, 35 * 2048 * 131_072),
    # 12 full and 36 chunked layers of 4,096 bytes a token: 2,731 + ceil(8,193 / 16) blocks.
    ("Llama4-Scout", [16, 48], (2731 + 513) * 576 * 4096, 48 * 4096 * 131_072),
]


@pytest.mark.parametrize("model, block_sizes, planned, full_pool", MEMORY)
def test_bytes_per_request_at_128k_tokens(benchmark, model, block_sizes, planned, full_pool):
    plan = benchmark.plan_of(model)
    assert [spec.block_size for spec in plan.specs] == block_sizes
    assert plan.request_bytes(131_072) == planned
    assert plan.full_pool_bytes(131_072) == full_pool
    assert full_pool > 3 * planned


def test_bytes_per_request_in_transformers(benchmark):
    """Pages of 256 tokens. Gemma3-27B: 512 full blocks of 10 pages, 4 sliding ones of 52; sectors
    of lcm(10, 52) = 260 pages hold 26 full blocks or 5 sliding ones: 20 + 1. Gemma3n-E4B gives
    pages to the sharing layers: 7 full and 28 sliding layers.
    """
    page = 256 * 8192
    gemma3 = benchmark.transformers_bytes(benchmark.gemma3_27b(), 131_072)
    assert gemma3 == ((512 * 10 + 4 * 52) * page, 21 * 260 * page)
    page = 256 * 2048
    gemma3n = benchmark.transformers_bytes(benchmark.gemma3n_e4b(), 131_072)
    assert gemma3n == ((512 * 7 + 2 * 28) * page, (512 * 7 + 2 * 28) * page)
    assert benchmark.transformers_bytes(benchmark.llama4_scout(), 131_072) is None


@pytest.mark.slow
def test_the_transformers_formula_is_that_of_transformers(benchmark):
    """The allocators themselves, on configurations of those models."""
    cache = pytest.importorskip("transformers.generation.continuous_batching.cache")
    if not hasattr(cache, "ATTN_TYPE_TO_ALLOCATOR"):
        pytest.skip("this transformers has no cache allocators")
    import torch
    from transformers import Gemma3nTextConfig, Gemma3TextConfig, Llama4TextConfig

    gemma3 = Gemma3TextConfig(
        num_hidden_layers=62, num_key_value_heads=16, head_dim=128, sliding_window=1024
    )
    for config, layers in (
        (gemma3, benchmark.gemma3_27b()),
        (Gemma3nTextConfig(), benchmark.gemma3n_e4b()),
    ):
        blocks = sectors = 0
        allocators = [
            cache.ATTN_TYPE_TO_ALLOCATOR[kind](
                index=i,
                layer_indices=indices,
                config=config,
                num_key_value_heads=config.num_key_value_heads,
                cache_dtype=torch.bfloat16,
                page_size=256,
                allow_block_sharing=True,
            )
            for i, (kind, indices) in enumerate(cache.group_layers_by_attn_type(config).items())
        ]
        sector = math.lcm(*(allocator.bytes_per_block for allocator in allocators), 128)
        for allocator in allocators:
            needed = allocator._compute_blocks_needed(0, 131_072, 0)
            blocks += needed * allocator.bytes_per_block
            sectors += -(-needed // (sector // allocator.bytes_per_block)) * sector
        assert (blocks, sectors) == benchmark.transformers_bytes(layers, 131_072)
    with pytest.raises(ValueError, match="chunked_attention"):
        cache.group_layers_by_attn_type(Llama4TextConfig())
