"""lower_local_attention and lower_dense_attention: every attend becomes something equal."""

from __future__ import annotations

import itertools

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from kvtailor.backend import recording
from kvtailor.cli.models import shrunk
from kvtailor.kernels.ops import attend, local_attend
from kvtailor.passes import lower_local_attention as local_pass
from kvtailor.passes.capture.capture import capture
from kvtailor.passes.flops import flops
from kvtailor.passes.graph import aten, show
from kvtailor.passes.lower_dense_attention import lower_dense_attention
from kvtailor.passes.lower_local_attention import lower_local_attention

SDPA = aten.scaled_dot_product_attention.default


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Lowered:
    """A backend of the two lowerings; keeps the graph between and after them."""

    def __init__(self, local: bool = True) -> None:
        self.local = local
        self.codes: list[str] = []
        self.targets: set[object] = set()
        self.text = ""

    def __call__(self, gm, example_inputs):
        graph = capture(gm, example_inputs)
        if self.local:
            self.codes = [s.code for s in lower_local_attention(graph).skipped]
            assert lower_local_attention(graph).rewrites == 0
        lower_dense_attention(graph)
        assert lower_dense_attention(graph).rewrites == 0
        graph.graph.eliminate_dead_code()
        graph.graph.lint()
        self.targets = {n.target for n in graph.graph.nodes if n.op == "call_function"}
        self.text = show(graph)
        graph.recompile()
        return graph.forward


def lowered(fn, *args: Tensor, local: bool = True, dynamic: bool | None = None) -> Lowered:
    """fn compiled and compared with itself run through the oracle."""
    seen = Lowered(local)
    torch._dynamo.reset()
    with torch.no_grad():
        actual = torch.compile(fn, backend=seen, dynamic=dynamic)(*args)
        torch.testing.assert_close(actual, fn(*args), rtol=1e-5, atol=1e-5)
    assert attend not in seen.targets
    return seen


def padding(B: int, Tk: int, hidden: int = 3) -> Tensor:
    mask = torch.ones(B, 1, 1, Tk, dtype=torch.bool)
    mask[0, ..., :hidden] = False
    return mask


MASKS = {
    "none": lambda B, Tq, Tk: None,
    "padding": lambda B, Tq, Tk: padding(B, Tk),
    "bool": lambda B, Tq, Tk: torch.rand(B, 1, Tq, Tk) > 0.3,
    "bias": lambda B, Tq, Tk: torch.randn(1, 4, Tq, Tk),
    "min": lambda B, Tq, Tk: (~padding(B, Tk)) * torch.finfo(torch.float32).min,
}
FLAGS = {
    "full": {},
    "causal": dict(causal=True),
    "offset": dict(causal=True, q_offset=4),
    "window": dict(causal=True, window=5),
    "two_sided": dict(causal=True, window=7, q_offset=3),
    "chunk": dict(causal=True, chunk=4),
    "softcap": dict(causal=True, softcap=2.0),
    "uniform": dict(causal=True, window=2, q_offset=-3, empty_row="uniform"),
}


@pytest.mark.parametrize("local", [True, False], ids=["local", "dense"])
@pytest.mark.parametrize("flags", FLAGS)
def test_every_flag_with_every_mask(flags, local):
    torch.manual_seed(0)
    for (kind, mask), heads, (Tq, Tk) in itertools.product(
        MASKS.items(), (4, 2), ((1, 9), (9, 9), (6, 9))
    ):
        q, k = torch.randn(2, 4, Tq, 8), torch.randn(2, heads, Tk, 8)
        v, m = torch.randn(2, heads, Tk, 6), mask(2, Tq, Tk)
        if kind == "min" and flags != "uniform":
            continue  # a row of minima is uniform: no such site carries flags

        def fn(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None) -> Tensor:
            return attend(q, k, v, m, scale=0.4, **FLAGS[flags])

        lowered(fn, q, k, v, m, local=local)


def test_positions_origins_and_sinks():
    torch.manual_seed(0)
    q, k, sinks = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 12, 8), torch.randn(4)
    places = torch.tensor([[1, 4, 7, 9, 11], [0, 2, 3, 10, 11]])
    for positions, origin in itertools.product(
        (places[0], places), (None, torch.tensor([0, 3]), torch.tensor([[0] * 5, [1] * 5]))
    ):
        flags = dict(window=4) if origin is None else dict(chunk=4)

        def fn(q: Tensor, k: Tensor, p: Tensor, o: Tensor | None, s: Tensor, flags=flags) -> Tensor:
            return attend(q, k, k, None, p, o, s, scale=0.4, causal=True, **flags)

        assert local_attend in lowered(fn, q, k, positions, origin, sinks).targets
        lowered(fn, q, k, positions, origin, sinks, local=False)


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


def test_causal_beside_key_padding_needs_no_square_from_some_size_on(monkeypatch):
    x, mask = torch.randn(2, 2, 12, 8), padding(2, 12)

    def fn(x: Tensor, mask: Tensor) -> Tensor:
        return attend(x, x, x, mask, scale=1.0, causal=True)

    assert lowered(fn, x, mask).codes == ["short"]
    monkeypatch.setattr(local_pass, "SMALL", 100)
    assert local_attend in lowered(fn, x, mask).targets
    assert lowered(fn, x, mask.expand(2, 1, 12, 12)).codes == ["masked"]


def test_reason_codes():
    x = torch.randn(1, 2, 6, 8)
    for code, q, flags in (
        ("one-row", x[:, :, :1], dict(causal=True, window=2)),
        ("causal", x, dict(causal=True)),
        ("causal", x, dict(causal=True, window=6)),
        ("short", x, dict(causal=True, q_offset=1)),
    ):

        def fn(q: Tensor, k: Tensor, flags=flags) -> Tensor:
            return attend(q, k, k, scale=1.0, **flags)

        assert lowered(fn, q, x).codes == [code]


def test_golden():
    def fn(q: Tensor, k: Tensor) -> Tensor:
        return attend(q, k, k, scale=0.5, causal=True)

    seen = lowered(fn, torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8))
    assert_expected_inline(
        seen.text,
        """\
%0: float32[1, 4, 6, 8] = input
%1: float32[1, 2, 6, 8] = input
%2: float32[1, 2, 1, 6, 8] = aten::unsqueeze(%1, 2)
%3: float32[1, 2, 2, 6, 8] = aten::expand(%2, [1, 2, 2, 6, 8])
%4: float32[1, 4, 6, 8] = aten::reshape(%3, [1, 4, 6, 8])
%5: float32[1, 4, 6, 8] = aten::scaled_dot_product_attention(%0, %4, %4, None, 0.0, True, scale=0.5)
return %5""",
    )


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "llama4_text", "modernbert"])
@pytest.mark.parametrize("left", [0, 5], ids=["whole", "left-padded"])
def test_local_sites_of_real_models(name, left):
    model, inputs = shrunk(name, padding=left)
    kwargs = {} if name == "modernbert" else {"use_cache": False}
    model.compile(backend="kvtailor", options={"inner": "eager"})
    with recording(check=True) as recorder, torch.no_grad():
        model(**inputs, **kwargs)
    (graph,) = [g for g in recorder.graphs if g.attention]
    assert graph.max_error is not None and graph.max_error <= 1e-5
    for site in graph.attention:
        is_local = site.kind in ("sliding", "chunked") or site.window is not None
        assert (site.lowering == "local") == is_local, site
    assert any(site.lowering == "local" for site in graph.attention)


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
    with torch.no_grad():
        actual = torch.compile(fn, backend=seen)(q, k, v, mask)
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
    with torch.no_grad():
        torch.compile(lambda q, k, v: attend(q, k, v, scale=0.4), backend=seen)(q, k, v)
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
    with torch.no_grad():
        torch.compile(lambda q, k: attend(q, k, k, scale=0.4), backend=count)(q, k)
    assert counts == [2 * 2 * 4 * 9 * (8 + 8)] * 2
