"""Linears of few rows, written out for Inductor, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kvtailor.backend import recording
from kvtailor.passes.lower_few_rows import MOST_ROWS
from kvtailor.zoo import shrunk

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(fn, *args, dynamic=False, **options):
    """The result, and how many linears were written out and are left."""
    call = torch.compile(fn, backend="kvtailor", options=options, dynamic=dynamic)
    with recording() as seen, torch.no_grad():
        out = call(*args)
    (graph,) = seen.graphs
    rewrites = {p.name: p.rewrites for p in graph.passes}
    return out, rewrites.get("lower_few_rows", 0), graph.graph_after.count("aten::linear")


def close(actual, expected):
    bound = TOLERANCE[expected.dtype] * expected.abs().max()
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert (actual - expected).abs().max() <= bound


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("lead", "bias"), [((), True), ((1, 1), False), ((2, 1), True), ((1, 3), False), ((4,), True)]
)
def test_few_rows(dtype, lead, bias):
    K, N = 72, 130
    x, w = torch.randn(*lead, K).to(dtype), torch.randn(N, K).to(dtype)
    b = torch.randn(N).to(dtype) if bias else None

    def fn(x, w, b):
        return F.linear(F.silu(x), w, b).relu()

    out, written, left = compiled(fn, x, w, b)
    assert (written, left) == (1, 0)
    # One rounding, at the end.
    exact = F.linear(F.silu(x).double(), w.double(), None if b is None else b.double()).relu()
    close(out, exact.to(dtype))


def test_inputs_that_lie_otherwise():
    x, w = torch.randn(72, 3), torch.randn(130, 72)

    def fn(x, w):
        return F.linear(x.t(), w) + F.linear(x[:, :1].t().expand(3, -1), w)

    out, written, _ = compiled(fn, x, w)
    assert written == 2
    close(out, fn(x, w))


def left_alone(x, w, dynamic=False, **options):
    out, written, left = compiled(F.linear, x, w, dynamic=dynamic, **options)
    close(out, F.linear(x, w))
    return written == 0 and left == 1


def test_left_alone():
    few, w = torch.randn(1, 64), torch.randn(96, 64)
    assert not left_alone(few, w)
    assert left_alone(torch.randn(max(MOST_ROWS.values()) + 1, 64), w)
    assert left_alone(few, w, inner="eager")
    assert left_alone(few, w, passes={"lower_few_rows": False})
    assert left_alone(few, w[:16])
    assert left_alone(few, torch.randn(64, 96).t())
    torch._dynamo.reset()
    assert left_alone(torch.randn(3, 64), w, dynamic=True)


def test_the_input_is_made_once():
    """Not for each output: what it is made of stands in a loop of its own."""
    from torch._inductor.utils import run_and_get_code

    def fn(x, w):
        return F.linear(x.exp(), w)

    call = torch.compile(fn, backend="kvtailor", options={"regions": "none"})
    with torch.no_grad():
        _, codes = run_and_get_code(call, torch.randn(1, 512), torch.randn(256, 512))
    loops = [loop for code in codes for loop in code.split("#pragma omp") if "tmp_acc" in loop]
    assert loops and not any("exp()" in loop for loop in loops)
    assert any("exp()" in code for code in codes)


def test_packed_projections_of_one_row_are_one_loop():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(64, n, bias=n > 64) for n in (128, 64, 64))

        def forward(self, x):
            return self.q(x), self.k(x), self.v(x)

    model = Attention().eval()
    x = torch.randn(1, 1, 64)
    call = torch.compile(model, backend="kvtailor", dynamic=False)
    with recording() as seen, torch.no_grad():
        for got, want in zip(call(x), model(x)):
            close(got, want)
    (graph,) = seen.graphs
    (group,) = graph.packed
    assert group.form == "one matmul, written out"
    assert graph.graph_after.count("aten::sum") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3n_text", "llama4_text", "gpt_oss", "gpt2"])
def test_decode_of_whole_models(name):
    model, inputs = shrunk(name, "eager" if name == "gpt_oss" else "sdpa", tokens=5)
    call = torch.compile(model, backend="kvtailor", dynamic=False)
    logits = []
    with torch.no_grad(), recording() as seen:
        for each in (model, call):
            cache = each(**inputs).past_key_values
            last = inputs["input_ids"][:, -1:]
            logits.append(each(input_ids=last, past_key_values=cache).logits)
    assert (logits[0] - logits[1]).abs().max() <= 1e-5 * logits[0].abs().max()
    assert sum(p.rewrites for g in seen.graphs for p in g.passes if p.name == "lower_few_rows")
