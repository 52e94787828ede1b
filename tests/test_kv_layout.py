"""The layout: which layers form a group, and what a request takes, by hand-computed figures."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest
import torch
from kv_cache import num_bytes
from transformers import AutoConfig

from kvtailor.benchmarks import block_manager as benchmark
from kvtailor.runtime.kv.hybrid import HybridManager
from kvtailor.runtime.kv.layout import KVLayout, Pages, decoder_config, layer_specs
from kvtailor.runtime.kv.spec import ChunkedSpec, CrossSpec, FullSpec, SlidingSpec

SLIDING = SlidingSpec(512, num_kv_heads=2, head_dim=256)
FULL = FullSpec(num_kv_heads=2, head_dim=256)


def groups_of(layers, max_tokens=4096):
    return [(str(g.spec), g.layers) for g in KVLayout(layers, max_tokens).groups]


def test_equal_specs_form_a_group():
    layers = {"l0": SLIDING, "l1": FULL, "l2": SlidingSpec(512, num_kv_heads=2, head_dim=256)}
    # A block of two pages, half of it idle in the full group, or split: 256 + 2 * 33 of one.
    assert groups_of(layers) == [
        ("sliding 512", ("l0",)),
        ("sliding 512", ("l2",)),
        ("full", ("l1",)),
    ]
    layout = KVLayout(layers, 4096)
    assert layout.group_of == {"l0": 0, "l2": 1, "l1": 2}
    assert layout.block_bytes == FULL.page_bytes
    assert layout.request_blocks(4096, 1) == 256 + 2 * 33


def test_groups_are_not_split_where_that_gains_nothing():
    """12 tokens: two groups of 3 blocks of 3 pages, or three of 3 blocks of 2: 18 pages each."""
    layers = {f"s{i}": SlidingSpec(8, block_size=4) for i in range(3)}
    layers |= {f"f{i}": FullSpec(block_size=4) for i in range(2)}
    assert [len(layers) for _, layers in groups_of(layers, 12)] == [3, 2]
    # Of longer requests the windows keep 3 blocks yet, the full layers all.
    assert [len(layers) for _, layers in groups_of(layers, 64)] == [2, 1, 2]


def test_large_groups_are_split():
    layers = {str(i): FullSpec() if i % 6 == 5 else SlidingSpec(64) for i in range(18)}
    layout = KVLayout(layers, max_tokens=4096)
    assert [len(group.layers) for group in layout.groups] == [3] * 6
    assert layout.block_bytes == 3 * FullSpec().page_bytes
    assert [layout.place(name) for name in layout.groups[1].layers] == [0, 1, 2]
    # A window that covers every request is full attention.
    assert [len(group.layers) for group in KVLayout(layers, max_tokens=64).groups] == [18]


def test_groups_are_at_most_eight():
    """One full layer and 30 sliding ones: 31 tables per request would be too many."""
    layers = {str(i): FullSpec() if i == 0 else SlidingSpec(64) for i in range(31)}
    assert [len(layers) for _, layers in groups_of(layers)] == [1, 30]


@pytest.mark.parametrize("make", [SlidingSpec, ChunkedSpec])
@pytest.mark.parametrize("max_tokens, groups", [(4097, 2), (4096, 1), (100, 1)])
def test_a_window_of_the_longest_request_joins_full(make, max_tokens, groups):
    assert len(groups_of({"l0": FullSpec(), "l1": make(4096)}, max_tokens)) == groups


def test_p07_windows_never_share_a_group():
    """P07: two windows, or a window and full attention, are two groups."""
    assert len(groups_of({"l0": SlidingSpec(4), "l1": SlidingSpec(8), "l2": FullSpec()})) == 3


def test_cross_layers_are_a_group_of_their_own():
    layout = KVLayout({"self": FullSpec(head_dim=8), "cross": CrossSpec(1500, head_dim=8)}, 32)
    assert [spec.kind for spec in layout.specs] == ["full", "cross"]
    assert layout.request_blocks(32, 32) == 2 + 94


def test_pages_take_what_the_layout_says_and_are_never_shared_in_a_group():
    """Random layers of several kinds and shapes: a block is a page per place and shape."""
    rng = random.Random(0)
    kinds = [FullSpec, partial(SlidingSpec, 8), partial(SlidingSpec, 40), partial(ChunkedSpec, 12)]
    for _ in range(30):
        layers = {
            str(i): rng.choice(kinds)(block_size=4, head_dim=rng.choice([2, 4]))
            for i in range(rng.randint(1, 20))
        }
        layout = KVLayout(layers, 64)
        assert sorted(layout.group_of) == sorted(layers)
        pages = Pages(layout, num_blocks=3)
        for name, spec in layers.items():
            assert layout.spec(name) == spec
            pages.make(name, *spec.shape, torch.bfloat16, torch.device("cpu"))
        assert num_bytes(pages) == 4 * layout.block_bytes
        for group in layout.groups:
            assert len({id(pages[name][0]) for name in group.layers}) == len(group.layers)


def test_what_was_sized_for_one_request_admits_one():
    """The pool is sized and the gate asks by one formula, in every group."""
    layers = {"f": FullSpec(), "s": SlidingSpec(32), "c": ChunkedSpec(48), "x": CrossSpec(20)}
    layout = KVLayout(layers, 160)
    for tokens in (1, 31, 47, 100, 160):
        kv = HybridManager(layout.specs, layout.request_blocks(tokens, tokens))
        kv.allocate("a", range(tokens))
        kv.append("a", tokens)


@pytest.mark.parametrize(
    "layers, max_tokens, message",
    [
        ({}, 1, "layers must name at least one layer, got none"),
        ({"l0": FULL}, 0, "max_tokens must be positive, got 0"),
        ({"l0": FULL, "l1": FullSpec(block_size=4)}, 64, r"one block size, got \[4, 16\]"),
    ],
)
def test_a_layout_that_cannot_be(layers, max_tokens, message):
    with pytest.raises(ValueError, match=message):
        KVLayout(layers, max_tokens)


# Memory of real configurations, at 131,072 tokens in bf16. All figures by hand; layers and heads
# as in the models' published configurations.

MEMORY = [
    # 10 full and 52 sliding layers of 8,192 bytes a token, in groups of at most 10 layers: a full
    # one and six sliding ones of ceil(1,024 / 16) + 1 blocks.
    ("Gemma3-27B", 7, (8192 + 6 * 65) * 10 * 16 * 8192, 62 * 8192 * 131_072),
    # 4 full and 16 sliding owners of 2,048 bytes a token, and 15 sharers.
    ("Gemma3n-E4B", 5, (8192 + 4 * 33) * 4 * 16 * 2048, 35 * 2048 * 131_072),
    # 12 full and 36 chunked layers of 4,096 bytes a token: three groups of ceil(8,193 / 16).
    ("Llama4-Scout", 4, (8192 + 3 * 513) * 12 * 16 * 4096, 48 * 4096 * 131_072),
]


@pytest.mark.parametrize("model, num_groups, taken, full", MEMORY)
def test_bytes_per_request_at_128k_tokens(model, num_groups, taken, full):
    config = benchmark.MODELS[model]
    layout = benchmark.layout_of(config)
    assert len(layout.groups) == num_groups
    assert benchmark.request_bytes(layout) == taken
    assert benchmark.full_bytes(config) == full
    assert full > 3 * taken


def test_bytes_per_request_in_transformers():
    """Pages of 256 tokens. Gemma3-27B: 512 full blocks of 10 pages, 4 sliding ones of 52; sectors
    of lcm(10, 52) = 260 pages hold 26 full blocks or 5 sliding ones: 20 + 1. Gemma3n-E4B gives
    pages to the sharing layers: 7 full and 28 sliding layers.
    """
    page = 256 * 8192
    gemma3 = benchmark.transformers_bytes(benchmark.MODELS["Gemma3-27B"])
    assert gemma3 == ((512 * 10 + 4 * 52) * page, 21 * 260 * page)
    page = 256 * 2048
    gemma3n = benchmark.transformers_bytes(benchmark.MODELS["Gemma3n-E4B"])
    assert gemma3n == ((512 * 7 + 2 * 28) * page, (512 * 7 + 2 * 28) * page)
    assert benchmark.transformers_bytes(benchmark.MODELS["Llama4-Scout"]) is None


@pytest.mark.slow
def test_the_transformers_formula_is_that_of_transformers():
    """The allocators themselves, on configurations of those models."""
    cache = pytest.importorskip("transformers.generation.continuous_batching.cache")
    if not hasattr(cache, "ATTN_TYPE_TO_ALLOCATOR"):
        pytest.skip("this transformers has no cache allocators")
    for model in ("Gemma3-27B", "Gemma3n-E4B"):
        config = benchmark.MODELS[model]
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
        assert (blocks, sectors) == benchmark.transformers_bytes(config)
    with pytest.raises(ValueError, match="chunked_attention"):
        cache.group_layers_by_attn_type(benchmark.MODELS["Llama4-Scout"])


@pytest.mark.parametrize("name", ["bart", "t5", "longt5", "switch_transformers", "prophetnet"])
def test_a_decoder_of_another_depth_than_its_encoder(name: str) -> None:
    config = AutoConfig.for_model(name)
    decoder = "decoder_layers" if name == "bart" else "num_decoder_layers"
    encoder = {"bart": "encoder_layers", "prophetnet": "num_encoder_layers"}.get(name, "num_layers")
    setattr(config, decoder, 3)
    setattr(config, encoder, 5)
    assert decoder_config(config).num_hidden_layers == len(layer_specs(config)) == 3
    assert config.num_hidden_layers == 5
