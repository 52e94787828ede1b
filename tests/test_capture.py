"""Capture: what Dynamo's graph computes and writes is what the captured graph does."""

from __future__ import annotations

import math

import pytest
import torch
from harness import captured, through
from torch import Tensor, nn

from kvtailor.backend import recording
from kvtailor.passes.capture import capture as capture_module
from kvtailor.passes.capture import capture_repeats as repeats_module
from kvtailor.passes.capture.capture import CaptureError, capture
from kvtailor.passes.graph import aten


@pytest.fixture(autouse=True, params=["by-call", "whole"])
def way(request, monkeypatch):
    """Both ways of capturing; small graphs would all be traced as a whole."""
    monkeypatch.setattr(repeats_module, "_REPEATS", 0 if request.param == "by-call" else math.inf)


def compiled(fn, dynamic=None):
    torch._dynamo.reset()
    return torch.compile(fn, backend="kvtailor", dynamic=dynamic, options={"inner": "eager"})


def test_linear_and_attention_stay_whole():
    linear = nn.Linear(8, 8)

    def fn(x: Tensor) -> Tensor:
        q = linear(x).unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(q, q, q)

    gm = captured(fn, torch.randn(2, 4, 8))
    targets = {n.target for n in gm.graph.nodes if n.op == "call_function"}
    assert {aten.linear.default, aten.scaled_dot_product_attention.default} <= targets
    assert all("val" in n.meta for n in gm.graph.nodes if n.op != "output")


def test_d05_in_place_ops_are_not_dead_code():
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.full((4, 4), -1e9)
        mask.masked_fill_(torch.ones(4, 4).tril().bool(), 0)
        y = torch.zeros(4, 4)
        y[:, 2:] = 5.0
        y[0].copy_(x[0])
        return torch.softmax(x * 0 + mask, -1), y

    x = torch.randn(4, 4)
    weights, y = compiled(fn)(x)
    expected = fn(x)
    assert torch.equal(weights[0], torch.tensor([1.0, 0, 0, 0]))
    assert torch.equal(weights, expected[0]) and torch.equal(y, expected[1])


@pytest.mark.parametrize("dynamic", [False, True])
def test_mutated_inputs_are_written_back_and_returned_as_themselves(dynamic):
    def fn(cache: Tensor, other: Tensor, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cache.index_copy_(1, at, x)
        other.add_(1)
        return cache, other.sum(), cache[:, :2] * 2

    def inputs():
        return torch.zeros(2, 6, 3), torch.arange(4.0), torch.ones(2, 2, 3), torch.tensor([1, 4])

    a, b = inputs(), inputs()
    expected = fn(*a)
    actual = compiled(fn, dynamic)(*b)
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    assert actual[0] is b[0]
    for got, want in zip(actual, expected):
        assert torch.equal(got, want)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_returned_views_of_mutated_inputs_stay_views(inner):
    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        old = a.clone()
        part = a[:2]
        part.add_(5)
        b.copy_(old)
        return a.sum(), part, b.transpose(0, 1)[1:], old

    def inputs() -> list[Tensor]:
        return [torch.arange(16.0).view(4, 4), torch.ones(4, 4)]

    torch._dynamo.reset()
    ours, theirs = inputs(), inputs()
    got = torch.compile(fn, backend="kvtailor", options={"inner": inner})(*ours)
    want = fn(*theirs)
    for step in range(3):
        for x, y in zip([*got, *ours], [*want, *theirs]):
            assert torch.equal(x, y), step
        for x in ([*ours, *theirs], [got[1], want[1], got[2], want[2]])[step % 2]:
            x.add_(7)


def test_buffers_of_a_module_are_written_back():
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(3))
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            self.seen.index_copy_(0, torch.tensor([1]), torch.tensor([7.0]))
            return self.linear(x) + self.seen

    torch.manual_seed(0)
    model = Counter().eval()
    x = torch.randn(2, 3)
    with torch.no_grad():
        expected = [model(x), model(x)]
        seen = model.seen.clone()
        model.seen.zero_()
        model.compile(backend="kvtailor", options={"inner": "eager"})
        actual = [model(x), model(x)]
    assert torch.equal(model.seen, seen)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected))


def test_d08_symints_go_in_and_come_out():
    def fn(x: Tensor, n: int) -> tuple[Tensor, int, int]:
        return x.reshape(n, -1).sum(-1), n + 1, x.shape[0]

    with recording() as recorder:
        run = compiled(fn, dynamic=True)
        for n, length in ((3, 12), (4, 20), (6, 18)):
            x = torch.randn(length)
            got, want = run(x, n), fn(x, n)
            assert torch.equal(got[0], want[0]) and got[1:] == want[1:]
    assert [g.captured for g in recorder.graphs] == [True]
    # Batch 1 and length 1 may compile again, but must be right.
    assert torch.equal(run(torch.ones(1), 1)[0], torch.ones(1))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_floats_that_are_inputs_stay_readable_in_pieces(mode):
    """With dynamic=True, Dynamo makes an input of a float: one graph serves all its values."""

    def fn(x: Tensor, scale: float) -> Tensor:
        return torch.tanh(x * scale) + 1

    torch._dynamo.reset()
    run = torch.compile(fn, backend="kvtailor", dynamic=True, options={"strict": True})
    x = torch.randn(4, 6)
    uncached = torch.compiler.config.patch(force_disable_caches=True)
    with uncached, recording() as recorder, mode():
        for scale in (0.5, 0.25, 3.0):
            torch.testing.assert_close(run(x, scale), fn(x, scale))
    (graph,) = recorder.graphs
    assert graph.pieces and not any(p.reason for p in graph.pieces)


def test_vmap_regions_are_traced_away():
    def fn(x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0])
        mask = torch.vmap(
            torch.vmap(lambda q, k: (k <= q) | (q // 2 == k // 2), (None, 0)), (0, None)
        )
        return torch.where(mask(rows, rows), x, 0.0)

    x = torch.randn(5, 5)
    with recording() as recorder, torch.no_grad():
        assert torch.equal(compiled(fn)(x), fn(x))
    assert [g.captured for g in recorder.graphs] == [True]


def test_a_failed_capture_leaves_the_graph_alone_with_a_reason(monkeypatch):
    monkeypatch.setattr(capture_module, "inline_vmap", lambda gm: gm)

    def fn(x: Tensor) -> Tensor:
        return torch.vmap(lambda row: row.cumsum(0))(x)

    x = torch.randn(3, 4)
    with recording() as recorder, torch.no_grad():
        assert torch.equal(compiled(fn)(x), fn(x))
    (graph,) = recorder.graphs
    assert not graph.captured and graph.reason is not None and graph.reason.startswith("export: ")


def test_gradients_turned_on_inside_are_refused():
    def fn(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x * 2

    def step(gm, example_inputs):
        with pytest.raises(CaptureError) as error:
            capture(gm, example_inputs)
        assert error.value.code == "grad-region"

    through(step, fn, torch.ones(2))
