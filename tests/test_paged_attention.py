"""The Triton attention kernel and the plain-torch path against the oracle.

Without a GPU the kernel runs in Triton's interpreter; with one, the same tests run on it.
Pools are filled with NaN first, and only the slots some row may see get numbers.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")
triton = pytest.importorskip("triton")

from kvtailor.kernels import (  # noqa: E402
    attend_tile,
    launch,
    ops,
    paged_attention,
    paged_torch,
    reference,
)

DEVICE = "cuda" if CUDA else "cpu"
if not CUDA and not paged_attention.INTERPRETED:
    pytest.skip("triton was imported before TRITON_INTERPRET was set", allow_module_level=True)

# finfo.min times log2(e) is meant to become -inf.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

# Largest error relative to the largest value of the oracle.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
DTYPES = pytest.mark.parametrize("dtype", list(NAMES), ids=list(NAMES.values()))


class Paged(NamedTuple):
    """The positional arguments of paged_attend."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    block_table: Tensor
    query_start: Tensor
    seq_lens: Tensor


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def starts(lengths: list[int]) -> Tensor:
    return int32([0, *itertools.accumulate(lengths)])


def paged(
    query_lens: list[int],
    key_lens: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    arange: bool = False,
    used: list[range] | None = None,
) -> Paged:
    """Sequences in a shuffled pool (block s * max_blocks + i with ``arange``), NaN elsewhere.

    ``used``: the keys of each sequence that get numbers; all of them by default.
    """
    make = torch.Generator().manual_seed(seed)
    Hq, Hkv = heads
    S = len(query_lens)
    blocks = max([-(-n // block_size) for n in key_lens] + [1])
    total = S * blocks + 3
    order = torch.arange(total) if arange else torch.randperm(total, generator=make)
    table = order[: S * blocks].reshape(S, blocks)
    pages = []
    for dim in dims:
        pool = torch.empty(total, block_size, Hkv, dim).fill_(float("nan"))
        for s in range(S):
            for key in range(key_lens[s]) if used is None else used[s]:
                row = torch.randn(Hkv, dim, generator=make)
                pool[table[s, key // block_size], key % block_size] = row
        pages.append(pool.to(DEVICE, dtype))
    q = torch.randn(sum(query_lens), Hq, dims[0], generator=make).to(DEVICE, dtype)
    return Paged(q, *pages, int32(table.tolist()), starts(query_lens), int32(key_lens))


def assert_close(name: str, got: Tensor, want: Tensor, dtype: torch.dtype | None = None) -> None:
    assert got.shape == want.shape, name
    assert got.isfinite().all(), f"{name} is not finite"
    scale = want.abs().max().item() if want.numel() else 0.0
    error = (got.double() - want.double()).abs().max().item() if want.numel() else 0.0
    limit = TOLERANCE[dtype or got.dtype] * max(scale, 1e-2)
    assert error <= limit, f"{name}: error {error:.3g} of {scale:.3g}, allowed {limit:.3g}"


def assert_lse(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    hidden = want == float("-inf")
    assert torch.equal(got == float("-inf"), hidden)
    assert not got.isnan().any()
    error = (got - want.to(got.dtype)).masked_fill(hidden, 0.0).abs()
    assert (error <= 4 * TOLERANCE[dtype]).all(), f"lse: error {error.max():.3g}"


def check(case: Paged, *, splits: tuple[int | None, ...] = (None,), **kwargs) -> Tensor:
    """Kernel and plain path against the oracle; returns the kernel's result."""
    kwargs.setdefault("scale", case.q.shape[2] ** -0.5)
    want, want_lse = reference.paged_attend(*case, **kwargs)
    plain, plain_lse = paged_torch.paged_attend(*case, **kwargs)
    assert_close("plain", plain, want)
    assert_lse(plain_lse, want_lse, case.q.dtype)
    for n in splits:
        got, lse = paged_attention.paged_attend(*case, return_lse=True, splits=n, **kwargs)
        assert_close(f"kernel, splits {n}", got, want)
        assert_lse(lse, want_lse, case.q.dtype)
    return got


def seen_keys(case: Paged, **kwargs) -> list[list[int]]:
    """Which keys each row gives weight to, by the kernel: v is one-hot by key, q is 0."""
    case.v_pages.fill_(float("nan"))
    block_size, dim = case.v_pages.shape[1], case.v_pages.shape[3]
    for s, length in enumerate(case.seq_lens.tolist()):
        assert length <= dim
        for key in range(length):
            row = torch.nn.functional.one_hot(torch.tensor(key), dim).to(case.v_pages)
            case.v_pages[case.block_table[s, key // block_size], key % block_size] = row
    case.q.zero_()
    out, _ = paged_attention.paged_attend(*case, scale=1.0, **kwargs)
    plain, _ = paged_torch.paged_attend(*case, scale=1.0, **kwargs)
    assert torch.equal(plain > 0, out > 0)
    return [row.nonzero().flatten().tolist() for row in out[:, 0]]


# --- what is visible --------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 4, 100])
def test_window_counts(window):
    case = paged([8], [8])
    want = [list(range(max(0, p - window + 1), p + 1)) for p in range(8)]
    assert seen_keys(case, window=window) == want


@pytest.mark.parametrize("first", [3, 4, 8])
def test_chunk_boundary_prefill_then_decode(first):
    # M05: the query at p sees p % 4 + 1 keys, in prefill and in every step after it.
    want = [list(range(p - p % 4, p + 1)) for p in range(10)]
    assert seen_keys(paged([first], [first]), chunk=4) == want[:first]
    for length in range(first + 1, 11):
        assert seen_keys(paged([1], [length]), chunk=4) == want[length - 1 : length]


def test_chunk_origin_per_sequence():
    # M04: three pads move the grid of one sequence.
    case = paged([10, 10], [10, 10])
    rows = seen_keys(case, chunk=4, chunk_origin=int32([3, 0]))
    counts = [len(row) for row in rows]
    assert counts == [1, 2, 3, 1, 2, 3, 4, 1, 2, 3] + [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]


def test_positions_of_narrowed_rows():
    # K03: rows 0, 4 and 9 of ten; and rows in no order.
    case = paged([3], [10])
    positions = torch.tensor([0, 4, 9], device=DEVICE)
    assert seen_keys(case, q_positions=positions) == [[0], [0, 1, 2, 3, 4], list(range(10))]
    assert seen_keys(case, q_positions=positions.flip(0), window=2) == [[8, 9], [3, 4], [0]]


def test_two_sided_window():
    # |p - k| <= 2 is q_positions p + 2, causal, window 5.
    case = paged([6], [6])
    positions = torch.arange(6, device=DEVICE) + 2
    want = [[k for k in range(6) if abs(p - k) <= 2] for p in range(6)]
    assert seen_keys(case, q_positions=positions, window=5) == want


# numbers.md, section 2: query lengths, key lengths, chunk, block size -> query lengths, key lengths
# and tables of the sequences that plain causal attention would have to be given instead.
VIRTUAL = {
    "three sequences": (
        [4, 10, 5],
        [6, 17, 9],
        (4, 2),
        [2, 2, 1, 4, 4, 1, 4, 1],
        [4, 2, 4, 4, 4, 1, 4, 1],
        [[0, 1], [2, 3], [11, 12], [13, 14], [15, 16], [17, 17], [20, 21], [22, 23]],
    ),
    "two whole chunks": ([8], [12], (4, 2), [4, 4], [4, 4], [[2, 3], [4, 5]]),
    "ragged": ([7], [10], (4, 2), [1, 4, 2], [4, 4, 2], [[0, 1], [2, 3], [4, 4]]),
    "chunk over all": ([4], [6], (10, 2), [4], [6], [[0, 1, 2, 2, 2]]),
    "block is chunk": (
        [6, 6],
        [8, 8],
        (4, 4),
        [2, 4, 2, 4],
        [4, 4, 4, 4],
        [[0], [1], [2], [3]],
    ),
    "decode": ([1], [5], (4, 2), [1], [1], [[2, 2]]),
    "padded request": ([1, 0], [5, 0], (4, 2), [1], [1], [[2, 2]]),
}


@pytest.mark.parametrize("name", VIRTUAL)
def test_virtual_batches(name):
    query_lens, key_lens, (chunk, block_size), virtual_q, virtual_k, tables = VIRTUAL[name]
    case = paged(query_lens, key_lens, block_size=block_size, arange=True)
    if name == "three sequences":
        assert case.block_table.shape[1] == 9
    got = check(case, chunk=chunk, scale=0.3)
    want, _ = reference.paged_attend(
        case.q,
        case.k_pages,
        case.v_pages,
        int32(tables),
        starts(virtual_q),
        int32(virtual_k),
        scale=0.3,
    )
    assert_close("virtual batches", got, want)


# --- values -----------------------------------------------------------------------------------


def test_sinks_enter_the_denominator_once():
    # M08: row i = mean(v[0..i]) * (i + 1) / (i + 2) for a sink of 0; -inf is no sink.
    case = paged([4], [4])
    case.q.zero_()
    plain = check(case)
    got = check(case, sinks=torch.zeros(4, device=DEVICE), splits=(1, 2))
    share = torch.tensor([1 / 2, 2 / 3, 3 / 4, 4 / 5], device=DEVICE)
    assert_close("sink 0", got, plain * share[:, None, None])
    none = check(case, sinks=torch.full((4,), float("-inf"), device=DEVICE))
    assert_close("sink -inf", none, plain)


def test_sinks_belong_to_query_heads():
    case = paged([4, 1], [4, 9])
    check(case, sinks=torch.tensor([-1.0, 0.5, 2.0, 30.0], device=DEVICE), splits=(1, 4))


def test_softcap_reaches_the_paged_kernel():
    # M10: scores [5, 0] under a cap of 1 -> first weight 0.7310, not 0.9933.
    case = paged([1], [2], heads=(1, 1))
    case.q.zero_()
    case.q[0, 0, 0] = 1.0
    page, other = case.block_table[0, 0], case.v_pages
    case.k_pages[page, :2] = 0.0
    case.k_pages[page, 0, 0, 0] = 5.0
    other[page, 0], other[page, 1] = 1.0, 0.0
    for cap, weight in ((1.0, 0.7310), (None, 0.9933)):
        out, _ = paged_attention.paged_attend(*case, scale=1.0, softcap=cap)
        plain, _ = paged_torch.paged_attend(*case, scale=1.0, softcap=cap)
        assert out[0, 0, 0].item() == pytest.approx(weight, abs=1e-4)
        assert plain[0, 0, 0].item() == pytest.approx(weight, abs=1e-4)


def test_softcap_of_huge_scores():
    # T04: q.k of 1, 100, 4400, 5000, -10000 under a cap of 50.
    case = paged([1], [5], heads=(1, 1))
    case.q.zero_()
    case.q[0, 0, 0] = 1.0
    for key, score in enumerate((1.0, 100.0, 4400.0, 5000.0, -10000.0)):
        case.k_pages[case.block_table[0, key // 4], key % 4] = 0.0
        case.k_pages[case.block_table[0, key // 4], key % 4, 0, 0] = score
    check(case, scale=1.0, softcap=50.0, splits=(1, 2))


if not CUDA or not paged_attention.INTERPRETED:
    import triton.language as tl

    @triton.jit
    def tanh_kernel(x_ptr, out_ptr, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(out_ptr + i, attend_tile.tanh(tl.load(x_ptr + i)))

    @triton.jit
    def offset_kernel(page_ptr, out_ptr, stride):
        page = tl.load(page_ptr)
        tl.store(out_ptr, (page * stride).to(tl.int64))
        tl.store(out_ptr + 1, page.to(tl.int64) * stride)


def test_tanh():
    values = [0.0, 1e-6, 1e-3, 0.02, 0.1249, 0.125, 0.1251, 0.5, 1.0, 3.0, 20.0, 88.0, 100.0, 2e4]
    x = torch.tensor([*values, *(-v for v in values), 1e30, -1e30, 0.3, -0.3], device=DEVICE)
    out = torch.full_like(x, float("nan"))
    tanh_kernel[(1,)](x, out, N=32)
    torch.testing.assert_close(out, torch.tanh(x.double()).float(), rtol=1e-6, atol=1e-9)


def test_grouped_heads_map_in_groups():
    # M13: v head 0 is all 0 and v head 1 all 1: query heads give 0, 0, 1, 1.
    case = paged([4], [4])
    case.v_pages[:, :, 0], case.v_pages[:, :, 1] = 0.0, 1.0
    out, _ = paged_attention.paged_attend(*case, scale=0.3)
    plain, _ = paged_torch.paged_attend(*case, scale=0.3)
    for got in (out, plain):
        assert_close("heads", got[:, :, 0], torch.tensor([0.0, 0, 1, 1]).to(got).expand(4, 4))


def test_alibi_slopes_by_head():
    # M11: six heads, no power of two.
    slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125], device=DEVICE)
    check(paged([7, 1], [11, 9], heads=(6, 3)), alibi_slopes=slopes, splits=(1, 2))


@pytest.mark.parametrize("kind", ["bool", "bool per head", "bias", "bias per head", "short"])
def test_residual_mask(kind):
    case = paged([7, 0, 1], [11, 3, 9])
    make = torch.Generator().manual_seed(1)
    heads, width = (4 if "head" in kind else 1), (6 if kind == "short" else 11)
    mask = torch.randn(8, heads, width, generator=make).to(DEVICE)
    # A row that sees nothing, one that sees everything.
    if "bias" in kind:
        mask[2] = float("-inf")
        mask[3] = 0.0
    else:
        mask = mask > 0
        mask[2], mask[3] = False, True
    got = check(case, mask=mask, splits=(1, 4))
    assert (got[2] == 0).all()
    check(case, mask=mask, window=3)


def test_bias_of_finfo_min_stays_finite():
    # D04: a row whose every key carries finfo.min is uniform, not empty.
    case = paged([3], [5])
    mask = torch.zeros(3, 1, 5, device=DEVICE)
    mask[1] = torch.finfo(torch.float32).min
    got = check(case, mask=mask, causal=False)
    v, _ = reference.gather_pages(case.v_pages, case.block_table, case.seq_lens)
    assert_close("uniform", got[1], v.mean(0).repeat_interleave(2, 0))


# --- slots nobody sees ------------------------------------------------------------------------


def test_recycled_pages_full_of_nan():
    # P09: block 4, length 5, three stale slots; then blocks before the window, dropped to a null
    # block full of NaN.
    check(paged([5], [5]))
    check(paged([1], [5]), splits=(1, 2))
    case = paged([1, 2], [21, 22], used=[range(17, 21), range(16, 22)])
    null = next(b for b in range(case.k_pages.shape[0]) if b not in case.block_table)
    assert case.k_pages[null].isnan().all()
    case.block_table[:, :4] = null
    check(case, window=4, splits=(1, 4))


def test_values_outside_the_window_are_not_loaded():
    # T02: W 4, ten tokens, blocks of 2, positions 0..5 NaN.
    case = paged([1], [10], block_size=2, used=[range(6, 10)])
    check(case, window=4, splits=(1, 2))
    # Rows apart, and what lies between them: no tile may mix those keys in.
    case = paged([2], [40], block_size=2, used=[[*range(4), *range(36, 40)]])
    check(case, q_positions=torch.tensor([3, 39], device=DEVICE), window=4)


def test_first_tile_hidden_from_a_row():
    # T03: tiles of 16 and a window of 2 in 40 tokens; rows before their sequence's first key.
    small = launch.Launch(16, 16, 4, 1)
    case = paged([40], [40])
    for splits in (1, 4):
        got, lse = paged_attention.paged_attend(
            *case, scale=0.3, window=2, launch=small, splits=splits, return_lse=True
        )
        want, want_lse = reference.paged_attend(*case, scale=0.3, window=2)
        assert_close("window 2", got, want)
        assert_lse(lse, want_lse, torch.float32)
    positions = torch.tensor([-1, 5, -7], device=DEVICE)
    got = check(paged([3], [9]), q_positions=positions, splits=(1, 2))
    assert (got[[0, 2]] == 0).all()


def test_rows_past_the_last_sequence_give_zero():
    # A batch padded to a captured size: nothing belongs to the last rows, nor to two sequences.
    case = paged([3, 1, 0, 0], [7, 4, 0, 0])
    rows = torch.cat([case.q, torch.full_like(case.q[:3], 1.0)])
    got = check(case._replace(q=rows), splits=(1, 2))
    assert (got[4:] == 0).all()


def test_more_sequences_than_searched_at_once():
    lengths = [(i * 7) % 5 for i in range(300)]
    case = paged([min(n, 1 + i % 2) for i, n in enumerate(lengths)], lengths, heads=(1, 1))
    check(case._replace(q=torch.cat([case.q, case.q[:3]])))


def test_no_rows():
    case = paged([0, 0], [5, 0])
    assert check(case).shape == (0, 4, 16)


# --- addresses --------------------------------------------------------------------------------


def test_page_offsets_in_int64():
    # T01: page 7768, stride 276480 wraps in int32.
    out = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    offset_kernel[(1,)](int32([7768]), out, 276480)
    assert out.tolist() == [-2147270656, 2147696640]


@pytest.fixture
def untouched_pool(monkeypatch):
    """A float16 pool of more than 2^31 elements. Pages nobody touches take no memory."""
    if paged_attention.INTERPRETED:
        # It would copy every argument back over itself, and so touch all of it.
        from triton.runtime.interpreter import GridExecutor

        monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *args: None)
    return torch.empty(2_097_200, 16, 1, 64, dtype=torch.float16, device=DEVICE)


def test_sequence_far_into_a_large_pool(untouched_pool):
    case = paged([2], [20], heads=(2, 1), dims=(64, 64), block_size=16, dtype=torch.float16)
    far = [2_097_190, 2_097_195]
    for near, block in zip(case.block_table[0].tolist(), far):
        untouched_pool[block] = case.k_pages[near]
    values = case._replace(v_pages=case.k_pages)
    want, _ = reference.paged_attend(*values, scale=0.1)
    large = case._replace(k_pages=untouched_pool, v_pages=untouched_pool, block_table=int32([far]))
    got, _ = paged_attention.paged_attend(*large, scale=0.1)
    assert_close("far pages", got, want)
    plain, _ = paged_torch.paged_attend(*large, scale=0.1)
    assert_close("far pages, plain", plain, want)


@pytest.mark.parametrize("dims", [(8, 8), (80, 80), (96, 96), (100, 100), (24, 40), (192, 128)])
def test_head_dims(dims):
    # T05: padded to powers of two, every column used, none past the last.
    case = paged([5, 1], [9, 17], dims=dims)
    wide = []
    for pages in (case.k_pages, case.v_pages):
        buffer = torch.empty(*pages.shape[:3], 256, device=DEVICE).fill_(float("nan"))
        buffer[..., : pages.shape[3]] = pages
        wide.append(buffer[..., : pages.shape[3]])
    check(case._replace(k_pages=wide[0], v_pages=wide[1]), splits=(1, 2))


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 32, 64, 256])
def test_block_sizes(block_size):
    check(paged([9, 1], [70, 41], block_size=block_size), window=37, splits=(1, 2))


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 1), (40, 1), (71, 1)], ids=str)
def test_group_sizes(heads):
    # Groups that are no power of two, and groups wider than a tile.
    check(paged([5, 1], [9, 17], heads=heads), splits=(1, 2))


def test_strided_queries():
    case = paged([5, 1], [9, 17], heads=(4, 2))
    packed = torch.empty(6, 8, 32, device=DEVICE).fill_(float("nan"))
    packed[:, :4, :16] = case.q
    check(case._replace(q=packed[:, :4, :16]))


# --- breadth ----------------------------------------------------------------------------------

KINDS = {
    "causal": {},
    "window": {"window": 5},
    "chunk": {"chunk": 6},
    "both": {"window": 4, "chunk": 6},
    "all": {"causal": False},
    "window ahead": {"causal": False, "window": 5},
    "chunk ahead": {"causal": False, "chunk": 6},
}


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_and_dtypes(kind, dtype):
    # T07 for bfloat16: the interpreter's own bf16 dot is off by 1e10.
    case = paged([4, 1, 0, 20], [6, 19, 5, 33], dtype=dtype)
    check(case, splits=(1, 2) if dtype == torch.float16 else (1,), **KINDS[kind])


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("extent", [1, 2, 16, 100])
def test_windows_and_chunks_by_group(extent, group):
    case = paged([1, 37], [63, 64], heads=(8, 8 // group), block_size=16)
    check(case, window=extent)
    check(case, chunk=extent)


@pytest.mark.parametrize("length", [1, 7, 16, 63])
def test_decode_after_prefill_equals_one_shot(length):
    # M02: 4 + 4 + 2 of ten tokens, and every split of a prompt, equal one shot.
    case = paged([length], [length], block_size=16)
    whole = check(case, window=9)
    for first in {1, length // 2, length - 1} - {0, length}:
        part = case._replace(q=case.q[first:], query_start=int32([0, length - first]))
        got, _ = paged_attention.paged_attend(*part, scale=case.q.shape[2] ** -0.5, window=9)
        assert_close("continued", got, whole[first:])


@st.composite
def shapes(draw):
    S = draw(st.integers(1, 4))
    key_lens = [draw(st.integers(0, 40)) for _ in range(S)]
    query_lens = [draw(st.integers(0, n)) if draw(st.booleans()) else min(1, n) for n in key_lens]
    extent = st.none() | st.integers(1, 50)
    group, Hkv = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.integers(1, 2))
    return {
        "case": {
            "query_lens": query_lens,
            "key_lens": key_lens,
            "heads": (group * Hkv, Hkv),
            "dims": (draw(st.sampled_from([8, 16, 20])), draw(st.sampled_from([8, 16, 24]))),
            "block_size": draw(st.sampled_from([1, 2, 4, 5, 16])),
            "dtype": draw(st.sampled_from(list(NAMES))),
            "seed": draw(st.integers(0, 99)),
        },
        "flags": {
            "causal": draw(st.booleans()),
            "window": draw(extent),
            "chunk": draw(extent),
            "softcap": draw(st.sampled_from([None, 2.0])),
        },
        "sinks": draw(st.booleans()),
        "slopes": draw(st.booleans()),
        "origin": draw(st.booleans()),
        "positions": draw(st.booleans()),
        "splits": draw(st.sampled_from([1, 2, 8])),
    }


def run_shape(shape: dict) -> None:
    case = paged(**shape["case"])
    make = random.Random(shape["case"]["seed"])
    Hq, flags = shape["case"]["heads"][0], dict(shape["flags"])
    if shape["sinks"]:
        flags["sinks"] = torch.tensor([make.uniform(-3, 3) for _ in range(Hq)], device=DEVICE)
    if shape["slopes"]:
        flags["alibi_slopes"] = torch.tensor([make.random() for _ in range(Hq)], device=DEVICE)
    if shape["origin"]:
        S = len(shape["case"]["key_lens"])
        flags["chunk_origin"] = int32([make.randint(-9, 9) for _ in range(S)])
    if shape["positions"]:
        rows = [make.randint(-3, 45) for _ in range(case.q.shape[0])]
        flags["q_positions"] = torch.tensor(rows, dtype=torch.int64, device=DEVICE)
    check(case, splits=(shape["splits"],), **flags)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shapes())
def test_any_shape(shape):
    run_shape(shape)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shapes())
def test_any_shape_widely(shape):
    run_shape(shape)


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_long_sequences(kind, block_size, dtype):
    flags = {k: 100 if k in ("window", "chunk") else v for k, v in KINDS[kind].items()}
    for heads in ((2, 2), (4, 2), (4, 1), (8, 1)):
        case = paged(
            [512, 1, 63, 0, 1],
            [1000, 777, 63, 16, 1],
            heads=heads,
            dims=(64, 64),
            block_size=block_size,
            dtype=dtype,
        )
        check(case, splits=(1, 4), **flags)


# --- dense keys -------------------------------------------------------------------------------


def dense(
    B: int,
    Tq: int,
    Tk: int,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    q = torch.randn(B, Tq, heads[0], dims[0], generator=make).transpose(1, 2)
    k = torch.randn(B, heads[1], Tk, dims[0], generator=make)
    v = torch.randn(B, Tk, heads[1], dims[1], generator=make).transpose(1, 2)
    return q.to(DEVICE, dtype), k.to(DEVICE, dtype), v.to(DEVICE, dtype)


def check_dense(q: Tensor, k: Tensor, v: Tensor, *, splits=(None,), **kwargs) -> Tensor:
    kwargs.setdefault("scale", q.shape[3] ** -0.5)
    want = reference.attend(q, k, v, **kwargs)
    for n in splits:
        got, _ = paged_attention.dense_attend(q, k, v, splits=n, **kwargs)
        assert got.transpose(1, 2).is_contiguous()
        assert_close(f"dense, splits {n}", got, want)
    return got


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
def test_dense_kinds(kind, dtype):
    q, k, v = dense(2, 33, 70, dtype=dtype)
    splits = (1, 4) if dtype == torch.float16 else (1,)
    check_dense(q, k, v, q_offset=10, splits=splits, **KINDS[kind])


@pytest.mark.parametrize("tokens", [1, 7, 16, 63])
def test_dense_lengths(tokens):
    q, k, v = dense(2, tokens, tokens, heads=(6, 2), dims=(20, 12))
    for extent in (1, 4, 100):
        check_dense(q, k, v, causal=True, window=extent)
        check_dense(q, k, v, causal=True, chunk=extent)


def test_dense_left_padding():
    # T03: 20 pads of 40; chunk grids that start at the first real token of each row.
    q, k, v = dense(2, 40, 40)
    pads = torch.tensor([20, 0], device=DEVICE)
    mask = (torch.arange(40, device=DEVICE) >= pads[:, None])[:, None, None]
    for flags in ({}, {"window": 2}, {"chunk": 8, "chunk_origin": pads}):
        got = check_dense(q, k, v, causal=True, mask=mask, splits=(1, 2), **flags)
        assert (got[0, :, :20] == 0).all()
    # Padding is not even loaded: it may hold anything.
    want = reference.attend(q, k, v, mask=mask, scale=0.25, causal=True)
    k[0, :, :20], v[0, :, :20] = float("nan"), float("nan")
    got, _ = paged_attention.dense_attend(q, k, v, mask=mask, scale=0.25, causal=True)
    assert_close("NaN padding", got, want)


def test_dense_origin_per_row():
    q, k, v = dense(2, 12, 12)
    origin = torch.tensor([[0] * 5 + [5] * 7, [3] * 12], device=DEVICE)
    check_dense(q, k, v, causal=True, chunk=4, chunk_origin=origin)
    check_dense(q, k, v, causal=True, chunk=4, chunk_origin=torch.tensor(-3, device=DEVICE))


@pytest.mark.parametrize("batched", [False, True])
def test_dense_positions(batched):
    q, k, v = dense(2, 3, 20)
    positions = torch.tensor([[4, 9, 19], [1, 0, 7]], device=DEVICE)
    positions = positions if batched else positions[0]
    check_dense(q, k, v, causal=True, q_positions=positions, window=3)
    check_dense(q, k, v, causal=True, q_positions=positions, q_offset=-2)


@pytest.mark.parametrize("shape", [(1, 1, 9, 9), (2, 1, 9, 9), (2, 4, 9, 9), (9, 9), (4, 1, 9)])
@pytest.mark.parametrize("kind", ["bool", "bias", "min"])
def test_dense_masks(shape, kind):
    q, k, v = dense(2, 9, 9)
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    if kind == "bool":
        mask = mask > 0
        mask[..., 2 if shape[-2] > 2 else 0, :] = False
    elif kind == "min":
        mask = mask.masked_fill(mask > 0, torch.finfo(torch.float32).min)
    check_dense(q, k, v, mask=mask)
    check_dense(q, k, v, mask=mask, causal=True, window=3, softcap=5.0)


def test_dense_empty_rows_uniform():
    q, k, v = dense(2, 9, 9)
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool, device=DEVICE)
    mask[1, :, 4] = False
    got = check_dense(q, k, v, mask=mask, empty_row="uniform")
    mean = v[1].mean(1).repeat_interleave(2, 0)
    assert_close("mean of v", got[1, :, 4], mean)


def test_dense_sinks_and_no_keys():
    q, k, v = dense(1, 6, 6)
    check_dense(q, k, v, causal=True, sinks=torch.randn(4, device=DEVICE), splits=(1, 2))
    got, lse = paged_attention.dense_attend(q, k[:, :, :0], v[:, :, :0], scale=1.0, return_lse=True)
    assert (got == 0).all() and (lse == float("-inf")).all()


# --- ops, dispatch, limits --------------------------------------------------------------------


def test_op_passes_opcheck():
    case = paged([4, 1], [6, 19], dtype=torch.float32)
    flags = {"scale": 0.3, "window": 5}
    for op in (ops.paged_attend, ops.paged_attend_lse):
        torch.library.opcheck(op, tuple(case), flags)
    assert torch.Tag.cudagraph_unsafe not in ops.paged_attend.tags


def test_op_equals_oracle_under_compile():
    case = paged([4, 1], [6, 19])

    def fn(*args: Tensor) -> Tensor:
        return ops.paged_attend(*args, scale=0.3, chunk=4) * 2

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=True)
    want, _ = reference.paged_attend(*case, scale=0.3, chunk=4)
    assert_close("compiled", compiled(*case), 2 * want)


@pytest.mark.skipif(CUDA, reason="the ops themselves dispatch to the kernels here")
@pytest.mark.parametrize("disabled", [False, True], ids=["kernel", "no triton"])
def test_gpu_dispatch(disabled, monkeypatch, caplog):
    # What the CUDA key calls, on CPU tensors: the kernel, or the plain form and one warning.
    launches = []
    for name in ("paged_attend", "dense_attend"):
        real = getattr(paged_attention, name)
        monkeypatch.setattr(
            paged_attention, name, lambda *a, _real=real, **k: launches.append(1) or _real(*a, **k)
        )
    if disabled:
        monkeypatch.setattr(launch, "disabled_reason", lambda: "Triton kernels are disabled: test")
    launch.usable.cache_clear()
    case = paged([4, 1], [6, 19])
    flags = {"scale": 0.3, "window": 5}
    want, want_lse = reference.paged_attend(*case, **flags)
    for _ in range(2):
        assert_close("paged_attend", ops._paged_attend_gpu(*case, **flags), want)
    out, lse = ops._paged_attend_lse_gpu(*case, **flags)
    assert_close("paged_attend.lse", out, want)
    assert_lse(lse, want_lse, torch.float32)
    q, k, v = dense(2, 9, 9)
    out = ops._local_attend_gpu(q, k, v, causal=True, **flags)
    assert_close("local_attend", out, reference.attend(q, k, v, causal=True, **flags))
    fake = ops._local_attend_fake(q, k, v, causal=True, **flags)
    assert out.stride() == fake.stride()
    assert len(launches) == (0 if disabled else 4)
    assert len(caplog.records) == (2 if disabled else 0)
    launch.usable.cache_clear()


def test_plain_path_gathers_visible_blocks_only():
    # A table whose other entries point past the pool: touching one raises.
    case = paged([1, 2, 1, 9], [21, 22, 9, 40], used=None)
    for flags, first in (({"window": 4}, [17, 17, 5, 28]), ({"chunk": 4}, [20, 20, 8, 28])):
        table = case.block_table.clone()
        for s, low in enumerate(first):
            table[s, : low // 4] = 1 << 20
            table[s, -(-int(case.seq_lens[s]) // 4) :] = 1 << 20
        want, _ = reference.paged_attend(*case, scale=0.3, **flags)
        got, _ = paged_torch.paged_attend(*case._replace(block_table=table), scale=0.3, **flags)
        assert_close("plain", got, want)
        table[0, -1] = 1 << 20
    broken = case._replace(block_table=case.block_table | (1 << 20))
    with pytest.raises((IndexError, RuntimeError)):
        paged_torch.paged_attend(*broken, scale=0.3)


@pytest.mark.parametrize("window", [300, 700])
def test_plain_path_cuts_long_prompts(window):
    # Several bands and triangles, and a history before them.
    case = paged([900, 600], [900, 1200], heads=(2, 1), dims=(8, 8), block_size=16)
    for flags in ({}, {"window": window}, {"chunk": window}, {"window": window, "softcap": 5.0}):
        want, want_lse = reference.paged_attend(*case, scale=0.3, **flags)
        got, lse = paged_torch.paged_attend(*case, scale=0.3, **flags)
        assert_close(str(flags), got, want)
        assert_lse(lse, want_lse, torch.float32)


class Gathers(TorchDispatchMode):
    """Counts the rows that index_select copies."""

    rows = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.aten.index_select.default:
            self.rows += args[2].numel()
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("heads", [(2, 1), (4, 2), (8, 1)])
@pytest.mark.parametrize("threads", [1, 2])
def test_single_rows_read_runs_in_place(threads, heads, monkeypatch):
    # As where there is no C++ compiler.
    monkeypatch.setattr(paged_torch.paged_rows, "takes", lambda *tensors: False)
    # One sequence lies in one piece, one in two, one in two and scattered blocks, one scattered.
    lens = [601, 700, 677, 90]
    case = paged([1] * 4, lens, heads=heads, block_size=16, arange=True)
    tables = case.block_table.clone()
    perm = list(range(44))
    tables[1] = tables[1, perm[22:] + perm[:22]]
    tables[2] = tables[2, perm[20:40] + [43, 41, 40, 42] + perm[:20]]
    tables[3, :6] = tables[3, [4, 2, 0, 1, 5, 3]]
    for pages in (case.k_pages, case.v_pages):
        for s, length in enumerate(lens):
            for key in range(length):
                pages[tables[s, key // 16], key % 16] = torch.randn(pages.shape[2:])
    case = case._replace(block_table=tables)
    # More threads than key heads: a run is cut in two, and the last of 601 keys is left over.
    gathered = {None: 4 * 16 + 90 + (threads > heads[1]), 300: 7 + 90}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for window in (None, 300):
            want, want_lse = reference.paged_attend(*case, scale=0.3, window=window)
            with Gathers() as gathers:
                got, lse = paged_torch.paged_attend(*case, scale=0.3, window=window)
            assert_close(f"window {window}", got, want)
            assert_lse(lse, want_lse, torch.float32)
            assert gathers.rows == 2 * gathered[window]
    finally:
        torch.set_num_threads(before)


def test_launch_reads_nothing_on_the_host(monkeypatch):
    """On meta tensors a host read raises, and the grid must follow from shapes alone."""
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(paged_attention, "attend_kernel", Kernel())
    monkeypatch.setattr(paged_attention, "merge_kernel", Kernel())
    case = Paged(*(x.to("meta") for x in paged([4, 1], [6, 19])))
    origin = torch.zeros(2, dtype=torch.int32, device="meta")
    for splits in (1, 4):
        paged_attention.paged_attend(
            *case, scale=0.3, chunk=4, chunk_origin=origin, splits=splits, return_lse=True
        )
    assert [grid[2] for grid in grids[:2]] == [1, 4] and len(grids) == 3


@pytest.mark.parametrize(
    "change, message",
    [
        ({"window": 0}, "window must be positive, got 0"),
        ({"chunk": -1}, "chunk must be positive, got -1"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, "seq_lens must be int32"),
        ({"query_start": torch.zeros(2, dtype=torch.int32)}, r"query_start must have shape \[3\]"),
        ({"block_table": torch.zeros(3, 5, dtype=torch.int32)}, "block_table must have shape"),
        ({"q": torch.zeros(5, 3, 16)}, "multiple of key heads, got 3, 2"),
        ({"q": torch.zeros(5, 4, 8)}, "one head dim, got 8, 16"),
        ({"q": torch.zeros(5, 4, 16, dtype=torch.float16)}, "one dtype"),
        ({"mask": torch.zeros(5, 2, 9)}, "mask must have shape"),
        ({"sinks": torch.zeros(2)}, r"sinks must have shape \[4\]"),
        ({"q_positions": torch.zeros(4)}, r"q_positions must have shape \[5\]"),
        ({"k_pages": torch.zeros(9, 4, 2, 16, 2)[..., 0]}, "must be contiguous"),
    ],
)
def test_refusals(change, message):
    case = {k: v.cpu() for k, v in paged([4, 1], [6, 19])._asdict().items()}
    case["k_pages"] = case["k_pages"][:9]
    case["v_pages"] = case["v_pages"][:9]
    for call in (paged_torch.paged_attend, paged_attention.paged_attend):
        with pytest.raises(ValueError, match=message):
            call(**{**case, "scale": 0.3, **change})


def test_kernel_refuses_what_it_cannot_compute():
    case = paged([4, 1], [6, 19], dims=(16, 16))
    double = case._replace(**{n: getattr(case, n).double() for n in ("q", "k_pages", "v_pages")})
    with pytest.raises(ValueError, match="float64"):
        paged_attention.paged_attend(*double, scale=0.3)
    wide = paged([1], [2], dims=(512, 16))
    with pytest.raises(ValueError, match="at most 256, got 512, 16"):
        paged_attention.paged_attend(*wide, scale=0.3)
    # The plain path takes both.
    want, _ = reference.paged_attend(*double, scale=0.3)
    got, _ = paged_torch.paged_attend(*double, scale=0.3)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_dense_refusals():
    q, k, v = dense(2, 5, 9)
    for args, message in (
        ((q, k.half(), v), "one dtype"),
        ((q[:1], k, v), "one batch and head dim"),
        ((q[:, :3], k, v), "multiple of key heads, got 3, 2"),
        ((q, k[:, :, :4], v), r"q must be \[B, Hq, Tq, D\]"),
    ):
        with pytest.raises(ValueError, match=message):
            paged_attention.dense_attend(*args, scale=1.0)
    with pytest.raises(ValueError, match="window must be positive, got 0"):
        paged_attention.dense_attend(q, k, v, scale=1.0, window=0)


def test_what_the_gpu_leaves_to_the_plain_form():
    q, k, v = dense(1, 3, 3)
    assert launch.takes(q, k, v)
    assert not launch.takes(q.double(), k.double(), v.double())
    assert not launch.takes(q, k, v.half())
    assert not launch.takes(*dense(1, 3, 3, dims=(16, 512)))


def test_split_choice():
    # One long decode is split, a full machine is not, short sequences are not.
    assert launch.num_splits(programs=8, max_keys=65536, processors=132) == 32
    assert launch.num_splits(programs=8, max_keys=1024, processors=132) == 4
    assert launch.num_splits(programs=8, max_keys=300, processors=132) == 1
    assert launch.num_splits(programs=400, max_keys=65536, processors=132) == 1
    assert launch.num_splits(programs=0, max_keys=65536, processors=132) == 1


def test_launch_table_covers_every_head_dim():
    for vendor, itemsize, dim in itertools.product(("cuda", "hip"), (2, 4), range(8, 257)):
        for rows, group, masked in itertools.product((0, 1, 512), (1, 4, 71), (False, True)):
            kind, chosen = launch.launch_for(vendor, dim, itemsize, rows, group, masked)
            assert min(chosen.block_m, chosen.block_k, launch.padded(dim)) >= launch.MIN_TILE
            assert kind == ("decode" if rows <= 1 else "masked" if masked else "prefill")


PROBE = """
import sys
if {block}:
    sys.modules["triton"] = None
import torch
from kvtailor.kernels import launch, ops, reference
assert launch.disabled_reason() is not None and "\\n" not in launch.disabled_reason()
print(launch.disabled_reason())
q, pages = torch.ones(1, 2, 8), torch.ones(1, 4, 1, 8)
one = torch.tensor([1], dtype=torch.int32)
start = torch.tensor([0, 1], dtype=torch.int32)
out = ops.paged_attend(q, pages, pages, one[None] - 1, start, one, scale=1.0)
ops.store_kv(q[:, :1], q[:, :1], pages, pages.clone(), torch.tensor([3]))
assert (out == 1).all()
"""


@pytest.mark.skipif(CUDA, reason="this machine has a GPU")
@pytest.mark.parametrize("block", [False, True], ids=["no GPU", "no triton"])
def test_import_without_gpu_or_triton(block):
    # L03
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(block=block)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Triton kernels are disabled" in done.stdout
    assert ("not installed" in done.stdout) == block
