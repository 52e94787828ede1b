"""lower_dense_attention: SDPA where it means the same, and what is written out instead."""

from __future__ import annotations

import pytest
import torch
from harness import through
from test_lower_local_attention import MASKS, Lowered, lowered, padding
from torch import Tensor

from kvtailor.kernels.ops import attend
from kvtailor.passes.capture.capture import capture
from kvtailor.passes.flops import flops
from kvtailor.passes.graph import aten
from kvtailor.passes.lower_dense_attention import lower_dense_attention

SDPA = aten.scaled_dot_product_attention.default
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_m02_the_causal_flag_is_used_only_where_it_means_the_same():
    x = torch.randn(1, 2, 5, 8)

    def top_left(q: Tensor, k: Tensor) -> Tensor:
        return attend(q, k, k, scale=1.0, causal=True)

    def bottom_right(q: Tensor, k: Tensor) -> Tensor:
        offset = k.shape[2] - q.shape[2]
        return attend(q, k, k, scale=1.0, causal=True, q_offset=offset)

    for dynamic in (False, True):
        seen = lowered(top_left, x, x, dynamic=dynamic)
        assert "None, 0.0, True" in seen.text and aten.le.Tensor not in seen.targets
        # Two queries over five keys see four and five of them.
        assert "None, 0.0, True" not in lowered(bottom_right, x[:, :, :2], x, dynamic=dynamic).text
    # One query at the end sees everything: no mask at all.
    seen = lowered(bottom_right, x[:, :, :1], x)
    assert aten.le.Tensor not in seen.targets


def test_dead_masks_are_not_built_and_equal_masks_are_shared():
    x = torch.randn(1, 2, 12, 8)

    def fn(x: Tensor) -> Tensor:
        y = attend(x, x, x, scale=1.0, causal=True, window=4)
        return attend(y, y, y, scale=1.0, causal=True, window=4)

    assert lowered(fn, x).text.count("aten::arange") == 0
    assert lowered(fn, x, local=False).text.count("aten::arange") == 2


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["sdpa", "math"])
@pytest.mark.parametrize("Tq", [1, 6])
def test_symbolic_heads_and_head_dims(softcap: float | None, Tq: int):
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, scale=0.3, softcap=softcap)

    for heads, D in ((4, 8), (6, 12)):
        q = torch.randn(2, 2 * heads, Tq, D)
        k, v = torch.randn(2, heads, 6, D), torch.randn(2, heads, 6, D + 4)
        lowered(fn, q, k, v, dynamic=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("kind", [*MASKS, "nothing", "infinite"])
def test_one_row_of_half_precision_is_written_out(kind: str, dtype: torch.dtype):
    torch.manual_seed(0)
    q = torch.randn(2, 4, 1, 8, dtype=dtype)
    k, v = torch.randn(2, 4, 9, 8, dtype=dtype), torch.randn(2, 4, 9, 6, dtype=dtype)
    if kind in MASKS:
        mask = MASKS[kind](2, 1, 9)
    else:
        mask = padding(2, 9, hidden=9)
    if kind == "infinite":
        mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.clamp(min=torch.finfo(dtype).min).to(dtype) if kind == "min" else mask.to(dtype)

    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return attend(q, k, v, mask, scale=0.4)

    seen = Lowered(local=False)
    actual = through(seen, fn, q, k, v, mask)
    wide = [x if x is None or x.dtype == torch.bool else x.float() for x in (q, k, v, mask)]
    expected = fn(*wide).to(dtype)
    assert SDPA not in seen.targets and attend not in seen.targets
    assert actual.dtype == dtype
    # One rounding to half precision, which may fall to either side.
    torch.testing.assert_close(actual, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    if kind in ("nothing", "infinite"):
        assert not actual[0].any()
    # Cast alone, keys or values could be written out in another piece than the one that reads them.
    casts = [line for line in seen.text.splitlines() if "_to_copy" in line]
    assert len(casts) == 2, seen.text


@pytest.mark.parametrize(
    "dtype, rows, heads",
    [(torch.float32, 1, 4), (torch.bfloat16, 2, 4), (torch.bfloat16, 1, 2)],
    ids=["fp32", "rows", "groups"],
)
def test_what_sdpa_does_well_stays_sdpa(dtype: torch.dtype, rows: int, heads: int):
    q = torch.randn(2, 4, rows, 8, dtype=dtype)
    k, v = torch.randn(2, heads, 9, 8, dtype=dtype), torch.randn(2, heads, 9, 8, dtype=dtype)
    seen = Lowered(local=False)
    through(seen, lambda q, k, v: attend(q, k, v, scale=0.4), q, k, v)
    assert SDPA in seen.targets


def test_a_row_that_is_written_out_counts_as_attention():
    counts: list[int] = []

    def count(gm, example_inputs):
        graph = capture(gm, example_inputs)
        counts.append(flops(graph))
        lower_dense_attention(graph)
        counts.append(flops(graph))
        return graph.forward

    q, k = (torch.randn(2, 4, n, 8, dtype=torch.bfloat16) for n in (1, 9))
    through(count, lambda q, k: attend(q, k, k, scale=0.4), q, k)
    assert counts == [2 * 2 * 4 * 9 * (8 + 8)] * 2
