"""Specs: the formulas of a KV cache, by hand-computed figures."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from kvtailor.runtime.kv.spec import ChunkedSpec, CrossSpec, FullSpec, SlidingSpec


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
