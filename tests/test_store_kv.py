"""Rows written to pages by slot: the Triton kernel and the plain path against the oracle."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from kvtailor.kernels import ops, paged_attention, paged_torch, reference  # noqa: E402
from kvtailor.kernels import store_kv as kernel  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
if not CUDA and not paged_attention.INTERPRETED:
    pytest.skip("triton was imported before TRITON_INTERPRET was set", allow_module_level=True)

IMPLEMENTATIONS = pytest.mark.parametrize(
    "store", [kernel.store_kv, paged_torch.store_kv, ops.store_kv], ids=["triton", "plain", "op"]
)


def pools(
    blocks: int, block_size: int, heads: int, dims: tuple[int, int], dtype: torch.dtype
) -> list[Tensor]:
    shape = (blocks, block_size, heads)
    return [torch.empty(*shape, d, device=DEVICE, dtype=dtype).fill_(float("nan")) for d in dims]


def rows(n: int, heads: int, dims: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    make = torch.Generator().manual_seed(n)
    return [torch.randn(n, heads, d, generator=make).to(DEVICE, dtype) for d in dims]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(12345.0), b.nan_to_num(12345.0))


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "heads, dims, block_size",
    [(2, (16, 16), 4), (3, (80, 40), 16), (1, (8, 256), 1), (40, (128, 128), 5)],
    ids=["plain", "D is not Dv", "block of 1", "many heads"],
)
def test_rows_land_in_their_slots(store, dtype, heads, dims, block_size):
    k, v = rows(9, heads, dims, dtype)
    blocks = 7 + 9 // block_size
    slots = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(0))[:9]
    slots[[2, 5]] = -1
    got, want = (pools(blocks, block_size, heads, dims, dtype) for _ in range(2))
    store(k, v, *got, slots.to(DEVICE))
    reference.store_kv(k, v, *want, slots)
    assert all(map(same, got, want))
    # Seven rows were written, all else is as it was.
    assert got[0].isfinite().sum() == 7 * heads * dims[0]
    assert got[1].isfinite().sum() == 7 * heads * dims[1]


@IMPLEMENTATIONS
def test_rows_of_a_packed_projection(store):
    # k and v are columns of one tensor, the pages columns of a wider pool.
    packed = torch.randn(5, 4, 32, device=DEVICE)
    k, v = packed[:, :2, :16], packed[:, 2:, 16:]
    wide = torch.empty(3, 4, 2, 64, device=DEVICE).fill_(float("nan"))
    slots = torch.tensor([11, -1, 0, 7, 4], dtype=torch.int32, device=DEVICE)
    store(k, v, wide[..., :16], wide[..., 16:32], slots)
    assert torch.equal(wide[2, 3, :, :16], k[0])
    assert torch.equal(wide[1, 0, :, 16:32], v[4])
    assert wide[..., 32:].isnan().all()
    assert wide[..., :32].isfinite().sum() == 4 * 2 * 32


@IMPLEMENTATIONS
def test_no_rows_and_nothing_kept(store):
    k_pages, v_pages = pools(2, 4, 1, (8, 8), torch.float32)
    skip = torch.full((3,), -1, device=DEVICE)
    store(*rows(0, 1, (8, 8), torch.float32), k_pages, v_pages, skip[:0])
    store(*rows(3, 1, (8, 8), torch.float32), k_pages, v_pages, skip)
    assert k_pages.isnan().all() and v_pages.isnan().all()


@IMPLEMENTATIONS
def test_rows_are_cast_to_the_pages(store):
    k, v = rows(2, 1, (8, 8), torch.float32)
    # To float16: the interpreter truncates to bfloat16, devices round.
    pages = pools(1, 2, 1, (8, 8), torch.float16)
    store(k, v, *pages, torch.tensor([1, 0], device=DEVICE))
    assert torch.equal(pages[0][0, 1], k[0].half())


def test_slots_past_two_billion_elements(monkeypatch):
    # T01
    if paged_attention.INTERPRETED:
        from triton.runtime.interpreter import GridExecutor

        monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *args: None)
    pool = torch.empty(2_097_200, 16, 1, 64, dtype=torch.float16, device=DEVICE)
    k, v = rows(2, 1, (64, 64), torch.float16)
    slots = torch.tensor([2_097_190 * 16 + 3, -1], device=DEVICE)
    halves = pool[..., :32], pool[..., 32:]
    kernel.store_kv(k[..., :32], v[..., 32:], *halves, slots)
    assert torch.equal(pool[2_097_190, 3], torch.cat([k[0, :, :32], v[0, :, 32:]], -1))


def test_slot_past_the_pool():
    k, v = rows(1, 1, (8, 8), torch.float32)
    pages = pools(1, 2, 1, (8, 8), torch.float32)
    slot = torch.tensor([2], device=DEVICE)
    kernel.store_kv(k, v, *pages, slot)
    assert pages[0].isnan().all()
    if not CUDA:
        with pytest.raises(IndexError):
            paged_torch.store_kv(k, v, *pages, slot)


def test_op_is_functionalised():
    k, v = rows(3, 2, (8, 8), torch.float32)
    pages = pools(2, 4, 2, (8, 8), torch.float32)
    slots = torch.tensor([5, -1, 0], device=DEVICE)
    for pool in pages:
        pool.zero_()
    torch.library.opcheck(ops.store_kv, (k, v, *pages, slots))

    def fn(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> Tensor:
        ops.store_kv(k * 2, v, k_pages, v_pages, slots)
        return k_pages.sum()

    torch._dynamo.reset()
    got = torch.compile(fn, backend="aot_eager", fullgraph=True)(k, v, *pages, slots)
    torch.testing.assert_close(got, 2 * k[[0, 2]].sum())
    assert torch.equal(pages[0][1, 1], 2 * k[0])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"k": torch.zeros(3, 1, 8)}, "k and v must be"),
        ({"v": torch.zeros(2, 2, 8)}, "k and v must be"),
        ({"k": torch.zeros(3, 16)}, r"k must be \[N, H, D\]"),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int64)}, r"slot_mapping must have shape \[3"),
        ({"slot_mapping": torch.zeros(3)}, "slot_mapping must be int32 or int64"),
        ({"v_pages": torch.zeros(2, 5, 2, 8)}, "equal blocks, block size and heads"),
    ],
)
def test_refusals(change, message):
    given = {
        "k": torch.zeros(3, 2, 8),
        "v": torch.zeros(3, 2, 8),
        "k_pages": torch.zeros(2, 4, 2, 8),
        "v_pages": torch.zeros(2, 4, 2, 8),
        "slot_mapping": torch.tensor([0, 1, -1]),
    }
    for store in (kernel.store_kv, paged_torch.store_kv):
        with pytest.raises(ValueError, match=message):
            store(**{**given, **change})
