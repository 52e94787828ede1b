"""Single rows over pages on a CPU, in C++, against the oracle and against the plain path."""

from __future__ import annotations

import pytest
import torch

from kvtailor.cli.doctor import compiler_version
from kvtailor.kernels import paged_rows, paged_torch, reference
from kvtailor.kernels.cpp import load_cpp

pytestmark = pytest.mark.skipif(compiler_version() is None, reason="no C++ compiler")

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}
# Query heads, key heads, head dims: every way heads are taken together, and parts of vectors.
SHAPES = [(1, 1, 16, 16), (6, 2, 64, 64), (7, 1, 80, 48), (8, 8, 32, 128), (16, 1, 576, 512)]


def some(lens, heads=(6, 2), dims=(64, 64), dtype=torch.float32, block_size=16):
    """One row of each sequence, its blocks in any order: what paged_attend takes."""
    torch.manual_seed(0)
    width = max(1, -(-max(lens) // block_size))
    blocks = 1 + len(lens) * width
    pages = [torch.randn(blocks, block_size, heads[1], d).to(dtype) for d in dims]
    table = (torch.randperm(blocks - 1) + 1).int().view(len(lens), width)
    q = torch.randn(len(lens), heads[0], dims[0]).to(dtype)
    return q, *pages, table, None, torch.tensor(lens, dtype=torch.int32)


def oracle(case, **flags):
    q, k, v, table, _, lens = case
    start = torch.arange(len(lens) + 1, dtype=torch.int32)
    return reference.paged_attend(q.double(), k.double(), v.double(), table, start, lens, **flags)


def check(case, **flags):
    assert paged_rows.takes(*case[:3])
    out, lse = paged_torch.paged_attend(*case, scale=0.2, **flags)
    want, want_lse = oracle(case, scale=0.2, **flags)
    assert out.dtype == case[0].dtype
    bound = TOLERANCE[out.dtype] * max(1.0, want.abs().max().item())
    assert (out.double() - want).abs().max() <= bound
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype):
    # Nothing, one key, less than a vector of them, and several parts.
    check(some([0, 1, 13, 700], shape[:2], shape[2:], dtype))


@pytest.mark.parametrize(
    "flags",
    [{"window": 5}, {"window": 300}, {"chunk": 64}, {"softcap": 3.0}, {"causal": False}],
    ids=str,
)
@pytest.mark.parametrize("block_size", [1, 4, 24])
def test_flags(flags, block_size):
    check(some([600, 3, 65], block_size=block_size), **flags)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_one_long_sequence(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(some([9000, 2], heads=(2, 1), dims=(16, 16)))
    finally:
        torch.set_num_threads(before)


def test_sinks_and_large_scores():
    case = some([40, 300])
    case[0].mul_(60)
    check(case, sinks=torch.randn(6))


def test_pages_may_be_part_of_something_larger():
    q, k, v, table, _, lens = some([50, 20])
    both = torch.stack([k, v], dim=3)
    check((q, both[..., 0, :], both[..., 1, :], table, None, lens))


def test_what_is_not_a_number_stays_so_and_stays_where_it_is():
    q, k, v, table, _, lens = some([50, 20])
    k[table[0, 1], 3] = float("nan")
    out, lse = paged_torch.paged_attend(q, k, v, table, None, lens, scale=0.2)
    assert out[0].isnan().all() and lse[0].isnan().all()
    assert not out[1].isnan().any()


def test_rows_beside_longer_ones():
    """Of a step with parts of prompts, the sequences with one row take this way."""
    q, k, v, table, _, lens = some([30, 12, 300])
    q = torch.randn(7, 6, 64)
    start = torch.tensor([0, 1, 6, 7], dtype=torch.int32)
    got, lse = paged_torch.paged_attend(q, k, v, table, start, lens, scale=0.2)
    want, want_lse = reference.paged_attend(q, k, v, table, start, lens, scale=0.2)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block", [-1, 1 << 20])
def test_a_block_that_is_not_there(block):
    q, k, v, table, _, lens = some([50, 20])
    table[0, 2] = block
    with pytest.raises(IndexError, match="blocks must be 0 to 8"):
        paged_torch.paged_attend(q, k, v, table, None, lens, scale=0.2)


def test_more_keys_than_the_table_has():
    q, k, v, table, _, lens = some([50, 20])
    with pytest.raises(IndexError, match="blocks must be"):
        paged_torch.paged_attend(q, k, v, table, None, lens + 40, scale=0.2)


def test_other_tensors_take_the_plain_path():
    for dims, dtype in (((8, 8), torch.float32), ((16, 16), torch.float64)):
        case = some([20, 3], dims=dims)
        case = (*(x.to(dtype) for x in case[:3]), *case[3:])
        assert not paged_rows.takes(*case[:3])
        out, _ = paged_torch.paged_attend(*case, scale=0.2)
        torch.testing.assert_close(out.double(), oracle(case, scale=0.2)[0], atol=1e-5, rtol=1e-5)


def test_what_does_not_compile_is_said_once(caplog):
    """Inductor's way to the compiler is no public API."""
    assert load_cpp('extern "C" int seven() { return 7; }', "test").seven() == 7
    assert load_cpp("int seven() { return seven_; }", "nothing of it") is None
    (record,) = (r for r in caplog.records if r.name == "kvtailor.kernels.cpp")
    assert record.getMessage().startswith("nothing of it: CppCompileError: ")


def test_without_a_compiler(monkeypatch):
    """The plain path says the same."""
    case = some([0, 1, 13, 700])
    want = paged_torch.paged_attend(*case, scale=0.2, window=99)
    monkeypatch.setattr(paged_rows, "library", lambda: None)
    got = paged_torch.paged_attend(*case, scale=0.2, window=99)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
