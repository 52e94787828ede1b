"""fuse_qcrosskv and fuse_gate_up: one packed projection per source, where it pays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from harness import through
from torch import Tensor, nn
from torch.nn import functional as F

from kvtailor.backend import recording
from kvtailor.cli.models import shrunk
from kvtailor.kernels import packed_linear, reference
from kvtailor.kernels.ops import packed_linear as packed_linear_op
from kvtailor.kernels.packed_linear import Form
from kvtailor.passes import packing
from kvtailor.passes.capture.capture import capture
from kvtailor.passes.fuse_gate_up import fuse_gate_up
from kvtailor.passes.fuse_qcrosskv import fuse_qcrosskv
from kvtailor.passes.normalise import normalise
from kvtailor.passes.recognise_attention import recognise_attention
from kvtailor.passes.report import PackedGroup, PassReport
from kvtailor.passes.text import show
from kvtailor.runtime.packing_table import Device, Entry

pytestmark = pytest.mark.usefixtures("always_pack")


def table(
    monkeypatch, *gains: tuple[int, list[float]], batched: tuple[float, ...] = (0.1, 0.1, 0.1)
) -> None:
    """A table for CPU float32: gains of one matmul at 1, 8, 64 rows by number of parts."""
    shape: dict[str, Any] = {"dtype": "float32", "inputs": 32, "width": 32}
    entries = [Entry(parts=n, one=g, batched=list(batched), **shape) for n, g in gains]
    device = Device(machine="", torch="", threads=1, rows=[1, 8, 64], entries=entries)
    monkeypatch.setattr(packing, "current_table", lambda: {"cpu": device})


class Attention(nn.Module):
    """q, k and v over one or two sources; ``bias`` names the parts that have one."""

    def __init__(self, bias: str = "", hidden: int = 32, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(hidden, hidden, bias="q" in bias)
        self.k = nn.Linear(hidden, hidden, bias="k" in bias)
        self.v = nn.Linear(hidden, hidden, bias="v" in bias)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        source = x if memory is None else memory
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q(x), self.k(source), self.v(source))
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Layers(nn.Module):
    def __init__(self, n: int, **kwargs: Any):
        super().__init__()
        self.layers = nn.ModuleList(Attention(**kwargs) for _ in range(n))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, memory)
        return x


class Packed:
    """A backend of the packing passes alone, which keeps graph, reports and groups."""

    def __init__(self, mode: Any = "view") -> None:
        self.mode = mode
        self.text = ""
        self.reports: list[PassReport] = []
        self.groups: list[PackedGroup] = []

    def __call__(self, gm, example_inputs):
        graph = capture(gm, example_inputs)
        normalise(graph)
        recognise_attention(graph)
        graph.graph.eliminate_dead_code()
        weights = packing.weights_of(graph, example_inputs, self.mode)
        self.reports = [fuse_qcrosskv(graph, weights), fuse_gate_up(graph, weights)]
        self.groups = [group for report in self.reports for group in report.packed]
        graph.graph.eliminate_dead_code()
        graph.graph.lint()
        assert [p(graph, weights).rewrites for p in (fuse_qcrosskv, fuse_gate_up)] == [0, 0]
        self.text = show(graph)
        return gm.forward

    @property
    def codes(self) -> list[str]:
        return [skip.code for report in self.reports for skip in report.skipped]


def packed(model: nn.Module, *args: Any, mode: Any = "view", **kwargs: Any) -> Packed:
    seen = Packed(mode)
    through(seen, model.eval(), *args, **kwargs)
    return seen


def run_packed(model: Any, *args: Any, dynamic: bool | None = None, **options: Any) -> Any:
    """The compiled model, its first result checked against eager, and the recorder."""
    run = torch.compile(
        model.eval(), backend="kvtailor", options={"inner": "eager", **options}, dynamic=dynamic
    )
    with torch.no_grad(), recording() as recorder:
        torch.testing.assert_close(run(*args), model(*args))
    return run, recorder.graphs[-1]


def test_queries_keys_and_values_in_one_matmul():
    seen = packed(Attention(bias="qv"), torch.randn(2, 5, 32))
    assert seen.reports[0].rewrites == 1 and not seen.codes
    assert_expected_inline(
        seen.text[: seen.text.index("\n%13")],
        """\
%0: float32[32, 32] = input
%1: float32[32] = input
%2: float32[2, 5, 32] = input
%3: float32[32, 32] = input
%4: float32[32, 32] = input
%5: float32[32] = input
%6: float32[96, 32] = input
%7: float32[32] = aten::new_zeros(%1, [32])
%8: float32[96] = aten::cat([%1, %7, %5])
%9: float32[2, 5, 96] = aten::linear(%2, %6, %8)
%10: float32[2, 5, 32] = aten::slice.Tensor(%9, -1, 0, 32)
%11: float32[2, 5, 32] = aten::slice.Tensor(%9, -1, 32, 64)
%12: float32[2, 5, 32] = aten::slice.Tensor(%9, -1, 64, 96)""",
    )


def test_keys_and_values_of_all_layers_in_one_matmul():
    model = Layers(3)
    seen = packed(model, torch.randn(2, 5, 32), torch.randn(2, 7, 32))
    (group,) = seen.groups
    assert group.parts == [f"layers.{i}.{part}" for i in range(3) for part in "kv"]
    assert (group.inputs, group.widths, group.rows) == (32, 6 * [32], 14)
    _, report = run_packed(model, torch.randn(2, 5, 32), torch.randn(2, 7, 32))
    assert report.packed == [group]


@pytest.mark.parametrize("bias", ["", "q", "qv", "kv", "qkv"])
def test_a_missing_bias_is_zero(bias: str, monkeypatch):
    # Whatever is allocated without being written must not show.
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    run_packed(Attention(bias), torch.randn(2, 5, 32))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("batched, form", [(1.0, "one matmul"), (1.5, "batched")])
def test_what_a_caller_gets_is_no_slice(batched: float, form: str, dynamic: bool, monkeypatch):
    table(monkeypatch, (3, [1.2, 1.2, 1.2]), batched=(batched, batched, batched))

    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            v = self.attention.v(x).unflatten(-1, (2, -1)).transpose(1, 2)
            return self.attention(x), v, self.attention.k(x)

    model = Returns()
    run, report = run_packed(model, torch.randn(2, 5, 32), dynamic=dynamic)
    assert [group.form for group in report.packed] == [form]
    with torch.no_grad():
        for ours, theirs in zip(run(x := torch.randn(2, 5, 32)), model(x)):
            assert ours.stride() == theirs.stride()
            assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()


def test_an_op_that_reads_strides_gets_memory_of_its_own():
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 6), nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            # The second part starts at an odd pair of a row, which as_strided would not know.
            b = torch.as_strided(self.b(x), (5, 4), (8, 2))
            return torch.view_as_complex(self.a(x).unflatten(-1, (3, 2))).real.sum() + b

    _, report = run_packed(Complex(), torch.randn(5, 32))
    assert len(report.packed) == 1 and report.packed[0].form == "one matmul"


def test_the_form_follows_the_rows(monkeypatch):
    table(monkeypatch, (3, [2.0, 1.2, 0.5]))
    forms = {}
    for tokens in (1, 8, 16, 64, 500):
        torch._dynamo.reset()
        _, report = run_packed(Attention(), torch.randn(1, tokens, 32), dynamic=False)
        forms[tokens] = report.packed[0].form
    assert forms == {
        1: "one matmul",
        8: "one matmul",
        16: "one matmul",
        64: "separate",
        500: "separate",
    }


def test_the_form_is_chosen_at_call_time_for_symbolic_rows(monkeypatch):
    table(monkeypatch, (3, [0.9, 1.2, 0.5]), batched=(0.9, 1.1, 1.3))
    calls: list[tuple[int, Form]] = []
    choose = packed_linear.form_at

    def spy(rows, borders, forms):
        calls.append((rows, choose(rows, borders, forms)))
        return calls[-1][1]

    monkeypatch.setattr(packed_linear, "form_at", spy)
    # A kernel of our own comes before any form.
    monkeypatch.setattr(packed_linear.few_rows, "takes", lambda x, weight: False)
    model = Attention("qv")
    run, report = run_packed(model, torch.randn(2, 2, 32), dynamic=True)
    assert report.packed[0].form == "one matmul for 3-22; batched for 23+ rows"
    with torch.no_grad():
        for tokens in (11, 12, 40):
            x = torch.randn(2, tokens, 32)
            torch.testing.assert_close(run(x), model(x))
        x = torch.randn(1, 2, 32)
        torch.testing.assert_close(run(x), model(x))
    assert [rows for rows, _ in calls[:4]] == [4, 22, 24, 80]
    assert [form.name for _, form in calls[:4]] == ["ONE", "ONE", "BATCHED", "BATCHED"]


@pytest.mark.parametrize("bias", ["", "qv"])
def test_queries_keys_and_values_in_one_batched_matmul(bias: str, monkeypatch):
    table(monkeypatch, (3, [1.2, 1.2, 1.2]), batched=(1.5, 1.5, 1.5))
    seen = packed(Attention(bias), torch.randn(2, 5, 32))
    assert seen.reports[0].rewrites == 1 and seen.groups[0].form == "batched"
    assert "aten::linear" not in seen.text
    assert seen.text.count("aten::baddbmm" if bias else "aten::bmm") == 1
    for dynamic in (False, True):
        torch._dynamo.reset()
        _, report = run_packed(Attention(bias), torch.randn(2, 5, 32), dynamic=dynamic)
        assert [(len(g.parts), g.form) for g in report.packed] == [(3, "batched")]
    table(monkeypatch, (2, [0.9, 0.9, 0.9]), batched=(1.5, 1.5, 1.5))
    torch._dynamo.reset()
    _, report = run_packed(TwoWidths(), torch.randn(2, 5, 32))
    assert [g.form for g in report.packed] == ["separate"]


class TwoWidths(Attention):
    """Grouped heads: keys and values are narrower than queries."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 16)).transpose(1, 2) for part in self.parts())
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def parts(self) -> list[nn.Module]:
        return [self.q, self.k, self.v]


def test_where_all_layers_in_one_do_not_pay_each_layer_may(monkeypatch):
    table(monkeypatch, (6, [0.8, 0.8, 0.8]), (2, [1.3, 1.3, 1.3]))
    _, report = run_packed(Layers(3), torch.randn(2, 5, 32), torch.randn(2, 7, 32))
    assert [g.parts for g in report.packed] == [
        [f"layers.{i}.k", f"layers.{i}.v"] for i in range(3)
    ]


def test_graphs_that_group_differently_share_memory(monkeypatch):
    """Prefill packs each layer's k and v, decode all layers': neither undoes the other."""
    table(monkeypatch, (6, [1.3, 1.3, 0.5]), (2, [1.2, 1.2, 1.2]))
    model = Layers(3)
    run, first = run_packed(model, torch.randn(1, 5, 32), torch.randn(1, 64, 32), dynamic=False)
    run, second = run_packed(model, torch.randn(1, 5, 32), torch.randn(1, 8, 32), dynamic=False)
    assert [len(g.parts) for g in first.packed] == [2, 2, 2]
    assert [len(g.parts) for g in second.packed] == [6]
    where = [p.data_ptr() for p in model.parameters()]
    with torch.no_grad():
        for rows in (64, 8, 64):
            x, memory = torch.randn(1, 5, 32), torch.randn(1, rows, 32)
            torch.testing.assert_close(run(x, memory), model(x, memory))
    assert where == [p.data_ptr() for p in model.parameters()]


def _tied(model: Attention) -> None:
    model.q.weight = model.k.weight
    model.q.bias, model.k.bias = (nn.Parameter(torch.randn(32)) for _ in range(2))


def _shared(model: Attention) -> None:
    model.k.weight = nn.Parameter(model.v.weight.data)


def _transposed(model: Attention) -> None:
    model.k.weight = nn.Parameter(torch.randn(32, 32).t())


def _buffer(model: Attention) -> None:
    weight = model.v.weight.data
    del model.v.weight
    model.v.register_buffer("weight", weight)


def _computed(model: Attention) -> None:
    nn.utils.parametrizations.weight_norm(model.v)


@pytest.mark.parametrize(
    "change, code, left",
    [
        (_tied, "tied", ["v"]),
        (_shared, "shared", ["q"]),
        (_transposed, "non-contiguous", ["q", "v"]),
        (_buffer, "not-a-parameter", ["q", "k"]),
        (_computed, "not-a-parameter", ["q", "k"]),
    ],
)
def test_near_misses(change: Any, code: str, left: list[str]):
    model = Attention()
    change(model)
    addresses = [p.data_ptr() for p in (model.k.weight, model.v.weight)]
    seen = packed(model, torch.randn(2, 5, 32))
    assert set(seen.codes) == {code}
    assert [g.parts for g in seen.groups] == ([left] if len(left) > 1 else [])
    run_packed(model, torch.randn(2, 5, 32))
    if code == "shared":
        assert addresses == [p.data_ptr() for p in (model.k.weight, model.v.weight)]


def test_what_was_packed_already_is_left_alone():
    model, inputs = shrunk("phi3", tokens=6)
    seen = packed(model, **inputs)
    assert set(seen.codes) == {"already-packed"}
    model, inputs = shrunk("gpt2", tokens=6, add_cross_attention=True)
    inputs["encoder_hidden_states"] = torch.randn(2, 9, 32)
    seen = packed(model, **inputs)
    assert "column-major" in seen.codes


@pytest.mark.parametrize("widths", [[8, 4, 12], [8, 8, 8]])
def test_the_op_is_the_oracle_in_every_form(widths: list[int]):
    x, weight, bias = torch.randn(2, 5, 16), torch.randn(24, 16), torch.randn(24)
    one, separate, batched = Form.ONE, Form.SEPARATE, Form.BATCHED
    plans: list[tuple[list[int], list[Form]]] = [([], [one]), ([], [separate]), ([4], [one, 0])]
    plans += [([4, 8], [one, separate, one]), ([11], [one, separate])]
    if len(set(widths)) == 1:
        plans += [([], [batched]), ([4], [one, batched])]
    for borders, forms in plans:
        for b in (None, bias):
            for source in (x, x.transpose(0, 1), x[:0], x[0, 0]):
                out = packed_linear_op(source, weight, b, widths, borders, forms)
                assert all(part.is_contiguous() for part in out)
                storages = {part.untyped_storage().data_ptr() for part in out}
                assert len(storages) == len(widths) or not source.numel()
                expected = reference.packed_linear(source, weight, b)
                torch.testing.assert_close(torch.cat(out, -1), expected)
        torch.library.opcheck(packed_linear_op, (x, weight, bias, widths, borders, forms))


@pytest.mark.parametrize("dynamic", [False, True])
def test_under_inductor(dynamic: bool, monkeypatch):
    """Weights move after Dynamo has seen them; scaling by a float makes a symbol's scalar."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention("qv")
            self.scale = 0.37

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x) * self.scale

    # Batched, in the graph of fixed sizes and from 23 rows on in the other.
    table(monkeypatch, (3, [1.2, 1.2, 1.2]), batched=(1.0, 1.0, 1.3))
    model = Scaled()
    x = torch.randn(2, 32, 32)
    run = torch.compile(model.eval(), backend="kvtailor", dynamic=dynamic)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(run(x), model(x))
            model.attention.v.weight.mul_(2)


def test_weights_that_are_inputs_of_symbolic_size():
    def fn(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        q, k = F.linear(x, w), F.linear(x, u)
        return F.scaled_dot_product_attention(q, k, k)

    run = torch.compile(fn, backend="kvtailor", options={"inner": "eager"}, dynamic=True)
    for n in (8, 12):
        args = torch.randn(2, 5, n), torch.randn(n + 4, n), torch.randn(n + 4, n)
        with torch.no_grad():
            torch.testing.assert_close(run(*args), fn(*args))
