"""lower_local_attention and lower_dense_attention: every attend becomes something equal."""

from __future__ import annotations

import itertools

import pytest
import torch
from expecttest import assert_expected_inline
from harness import through, tidied
from torch import Tensor

from kvtailor.backend import recording
from kvtailor.cli.models import shrunk
from kvtailor.kernels.ops import attend, local_attend
from kvtailor.passes import lower_local_attention as local_pass
from kvtailor.passes.capture.capture import capture
from kvtailor.passes.graph import aten
from kvtailor.passes.lower_dense_attention import lower_dense_attention
from kvtailor.passes.lower_local_attention import lower_local_attention
from kvtailor.passes.text import show

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
        tidied(graph)
        self.targets = {n.target for n in graph.graph.nodes if n.op == "call_function"}
        self.text = show(graph)
        return graph.forward


def lowered(fn, *args: Tensor, local: bool = True, dynamic: bool | None = None) -> Lowered:
    """fn compiled and compared with itself run through the oracle."""
    seen = Lowered(local)
    actual = through(seen, fn, *args, dynamic=dynamic)
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
