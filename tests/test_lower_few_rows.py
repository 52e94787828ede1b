"""Linears of few rows, written out for Inductor, against torch's own."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kvtailor.backend import recording
from kvtailor.cli.models import shrunk
from kvtailor.kernels import few_rows
from kvtailor.kernels.ops import few_rows_linear, packed_linear

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


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
    assert left_alone(torch.randn(few_rows.MOST_ROWS + 1, 64), w)
    assert left_alone(few, w, inner="eager")
    assert left_alone(few, w, passes={"lower_few_rows": False})
    assert left_alone(few, w[:16])
    # Rows that do not fit in the cache.
    assert left_alone(torch.randn(4, 4096).bfloat16(), torch.randn(64, 4096).bfloat16())
    assert not left_alone(torch.randn(4, 4096), torch.randn(64, 4096))
    torch._dynamo.reset()
    assert left_alone(few, torch.randn(64, 96).t())
    torch._dynamo.reset()
    assert left_alone(torch.randn(3, 64), w, dynamic=True)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "dtype", "why"),
    [
        (1, 16, 64, torch.float32, "16 outputs are too few"),
        (4, 64, 1 << 16, torch.bfloat16, "^4 rows of"),
        (few_rows.MOST_ROWS + 1, 96, 64, torch.float32, None),
    ],
)
def test_near_misses_have_a_reason(rows, outputs, inputs, dtype, why):
    x, w = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    with recording() as seen, torch.no_grad():
        torch.compile(F.linear, backend="kvtailor", dynamic=False)(x, w)
    skipped = [s for p in seen.graphs[0].passes if p.name == "lower_few_rows" for s in p.skipped]
    assert [s.code for s in skipped] == ["few-rows"] * (why is not None)
    assert why is None or re.search(why, skipped[0].why)


def test_the_input_is_made_once():
    """Not for each output: what it is made of stands in a loop of its own."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    def fn(x, w):
        return F.linear(x.exp(), w)

    call = torch.compile(fn, backend="kvtailor", options={"regions": "none"})
    with torch.no_grad(), config.patch({"cpp.threads": 2}):
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_tail_stays_the_tail(dtype):
    """What is made of a narrowed linear, or of a row of attention, runs on its rows."""
    model, inputs = shrunk("gpt2", tokens=6, batch=1, dtype=dtype, n_embd=64)
    spaces = []
    for on in (True, False):
        torch._dynamo.reset()
        options = {"passes": {"lower_few_rows": on}}
        call = torch.compile(model, backend="kvtailor", dynamic=False, options=options)
        with recording() as seen, torch.no_grad():
            call(**inputs, use_cache=False, logits_to_keep=1)
        (graph,) = seen.graphs
        spaces.append([(s.name, s.rows, s.flops) for s in graph.row_spaces])
    assert spaces[0] == spaces[1] and [s[0] for s in spaces[0]] == ["head", "tail"]


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


# --- the kernel -----------------------------------------------------------------------------------


def flags() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


KERNELS = [
    pytest.param(
        dtype, marks=pytest.mark.skipif(flag not in flags(), reason=f"the CPU has no {flag}")
    )
    for dtype, flag in ((torch.bfloat16, "avx512_bf16"), (torch.float32, "avx512vl"))
]


@pytest.mark.parametrize("dtype", KERNELS)
def test_the_kernel_is_there(dtype):
    assert few_rows.has_kernel(dtype)


@pytest.mark.parametrize("dtype", KERNELS)
@pytest.mark.parametrize("rows", range(1, few_rows.MOST_ROWS + 1))
@pytest.mark.parametrize(("K", "N", "bias"), [(64, 34, True), (1, 1, False), (77, 5, True)])
def test_the_kernel_against_float64(dtype, rows, K, N, bias):
    x = torch.randn(K, rows).to(dtype).t()
    w = torch.randn(N, K).to(dtype)
    b = torch.randn(2 * N).to(dtype)[::2] if bias else None
    got = few_rows_linear(x.reshape(rows, 1, K), w, b)
    exact = F.linear(x.double(), w.double(), None if b is None else b.double())
    close(got.reshape(rows, N), exact.to(dtype))


@pytest.mark.parametrize("dtype", KERNELS)
def test_no_number_becomes_another(dtype):
    """A NaN or an infinity in one row stays there, and what is not read is not touched."""
    x, w = torch.randn(6, 40).to(dtype), torch.randn(9, 40).to(dtype)
    x[1, 3], x[4, 0] = float("nan"), float("inf")
    got, want = few_rows_linear(x, w, None), F.linear(x, w)
    torch.testing.assert_close(got, want, equal_nan=True, atol=0.1, rtol=0.02)
    assert got[1].isnan().all() and got[4].isinf().all()
    assert few_rows_linear(x[:0], w, None).shape == (0, 9)


def test_what_the_kernel_does_not_take_is_torchs():
    for x, w, b in (
        (torch.randn(2, 8).half(), torch.randn(4, 8).half(), torch.randn(4).half()),
        (torch.randn(2, 8), torch.randn(8, 4).t(), torch.randn(4)),
        (torch.randn(9, 8).bfloat16(), torch.randn(4, 8).bfloat16(), None),
        (torch.randn(4, 4096).bfloat16(), torch.randn(4, 4096).bfloat16(), None),
        (torch.randn(2, 8).bfloat16(), torch.randn(8, 4).bfloat16().t(), None),
    ):
        assert torch.equal(few_rows_linear(x, w, b), F.linear(x, w, b))
    torch.library.opcheck(few_rows_linear, (torch.randn(2, 8), torch.randn(4, 8), None))


@pytest.mark.parametrize("dtype", KERNELS)
@pytest.mark.parametrize("rows", [5, 8])
def test_more_rows_are_the_kernels(dtype, rows):
    x, w = torch.randn(rows, 1, 64).to(dtype), torch.randn(96, 64).to(dtype)
    out, rewrites, left = compiled(F.linear, x, w)
    assert (rewrites, left) == (1, 0)
    close(out, F.linear(x.double(), w.double()).to(dtype))


@pytest.mark.parametrize("dtype", KERNELS)
def test_symbolic_rows_choose_at_call_time(dtype):
    model = nn.Linear(64, 96).to(dtype)
    exact = copy.deepcopy(model).double()
    call = torch.compile(model, backend="kvtailor", dynamic=True)
    with recording() as seen, torch.no_grad():
        for rows in (5, 8, 40):
            x = torch.randn(rows, 64).to(dtype)
            close(call(x), exact(x.double()).to(dtype))
    (graph,) = seen.graphs
    assert graph.graph_after.count("kvtailor::few_rows_linear") == 1


@pytest.mark.parametrize("dtype", KERNELS)
def test_packed_at_call_time_too(dtype, monkeypatch):
    calls = []
    kernel = few_rows.few_rows_linear
    monkeypatch.setattr(few_rows, "few_rows_linear", lambda *a: calls.append(a) or kernel(*a))
    w = torch.randn(96, 64).to(dtype)
    for rows in (3, 8, 9):
        x = torch.randn(rows, 64).to(dtype)
        parts = packed_linear(x, w, None, [64, 32], [], [1])
        for got, want in zip(parts, F.linear(x.double(), w.double()).to(dtype).split([64, 32], -1)):
            close(got, want)
    assert len(calls) == 2
