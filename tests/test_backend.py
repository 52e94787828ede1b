"""The entry point: options, gradients, grad modes, several graphs, strictness."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

from kvtailor.backend import recording
from kvtailor.cli.models import shrunk
from kvtailor.compiler import reports
from kvtailor.compiler.check import relative_error
from kvtailor.config import parse_options
from kvtailor.passes.pipeline import PASS_NAMES, PASSES

EAGER = {"inner": "eager"}


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def block() -> nn.Module:
    torch.manual_seed(0)
    return Block().eval()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iner": "eager"}, "unknown option 'iner'; did you mean 'inner'?"),
        ({"inner": "indcutor"}, "unknown inner compiler 'indcutor'; did you mean 'inductor'?"),
        (
            {"passes": {"narow_rows": False}},
            "unknown pass 'narow_rows'; did you mean 'narrow_rows'?",
        ),
        ({"strict": "perhaps"}, "option strict: "),
        ({"passes": {"narrow_rows": "perhaps"}}, "option passes.narrow_rows: "),
        ({"mode": "fast"}, "unknown mode 'fast'"),
    ],
)
def test_l05_wrong_options_are_one_line_with_a_suggestion(options, message):
    with pytest.raises(ValueError) as error:
        parse_options(options, pass_names=PASS_NAMES, environ={})
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_wrong_option_reaches_the_user_through_torch_compile():
    run = torch.compile(block(), backend="kvtailor", options={"iner": "eager"})
    with pytest.raises(BackendCompilerFailed, match="unknown option 'iner'; did you mean 'inner'"):
        run(torch.ones(1, 8))


def test_environment_switches_and_their_order():
    environ = {"KVTAILOR_DISABLE_PASSES": "narrow_rows, prove_masks", "KVTAILOR_STRICT": "1"}
    options = parse_options({}, pass_names=PASS_NAMES, environ=environ)
    assert not options.enabled("narrow_rows") and not options.enabled("prove_masks")
    assert options.strict
    told = {"passes": {"narrow_rows": True}, "strict": False}
    options = parse_options(told, pass_names=PASS_NAMES, environ=environ)
    assert options.enabled("narrow_rows") and not options.strict
    with pytest.raises(ValueError, match="unknown pass 'nope'"):
        parse_options({}, pass_names=PASS_NAMES, environ={"KVTAILOR_DISABLE_PASSES": "nope"})


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_decorator_on_a_function(inner):
    @torch.compile(backend="kvtailor", options={"inner": inner})
    def fn(x: Tensor, n: int) -> Tensor:
        return torch.softmax(x * n, -1)

    x = torch.randn(3, 5)
    torch.testing.assert_close(fn(x, 2), torch.softmax(x * 2, -1))


def test_mode_is_accepted():
    model = block()
    run = torch.compile(model, backend="kvtailor", mode="reduce-overhead")
    with torch.no_grad():
        torch.testing.assert_close(run(torch.ones(1, 8)), model(torch.ones(1, 8)))


def test_graphs_that_need_gradients_are_left_alone_with_one_warning(monkeypatch):
    monkeypatch.setattr(reports, "_warned", set())
    model = block()
    model.compile(backend="kvtailor", options=EAGER)
    x = torch.randn(2, 8)
    with recording() as recorder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(x).sum().backward()
        model(x.repeat(2, 1)).sum().backward()
    assert len([w for w in caught if "kvtailor" in str(w.message)]) == 1
    assert all(g.reason and g.reason.startswith("gradients: ") for g in recorder.graphs)
    reference = block()
    reference(x).sum().backward()
    reference(x.repeat(2, 1)).sum().backward()
    for got, want in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(got.grad, want.grad)


def test_d07_inference_mode_then_no_grad_then_training():
    model, reference = block(), block()
    model.compile(backend="kvtailor", options=EAGER)
    x = torch.randn(2, 8)
    expected = reference(x)
    with recording() as recorder:
        with torch.inference_mode():
            a = model(x)
        with torch.no_grad():
            b = model(x)
        assert len(recorder.graphs) == 2
        c = model(x)
        c.square().sum().backward()
        expected.square().sum().backward()
        with torch.no_grad():
            d = model(x)
    for got in (a, b, c, d):
        torch.testing.assert_close(got, expected)
    for got, want in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(got.grad, want.grad)
    assert a.is_inference() and not b.is_inference()


def test_several_graphs_after_a_break():
    def fn(x: Tensor) -> Tensor:
        x = x.cumsum(0)
        torch._dynamo.graph_break()
        return x * 2

    x = torch.randn(4)
    with recording(check=True) as recorder:
        run = torch.compile(fn, backend="kvtailor", options=EAGER)
        assert torch.equal(run(x), fn(x))
    assert len(recorder.graphs) == 2
    assert [g.max_error for g in recorder.graphs] == [0.0, 0.0]


def test_strict_raises_where_a_graph_is_left_alone():
    def fn(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x * 2

    run = torch.compile(fn, backend="kvtailor", options={**EAGER, "strict": True})
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match="left untouched: grad-region"):
        run(torch.ones(2))


def test_dumps_logs_and_counters(tmp_path, caplog):
    model, inputs = shrunk("llama")
    model.compile(backend="kvtailor", options={**EAGER, "dump_dir": str(tmp_path)})
    before = counters["kvtailor"]["graphs"]
    with caplog.at_level(logging.INFO, logger="kvtailor"), torch.no_grad():
        model(**inputs, use_cache=False)
    files = sorted(p.name for p in next(iter(tmp_path.iterdir())).iterdir())
    assert files[0] == "00_capture.txt" and len(files) == len(PASSES) + 1
    assert counters["kvtailor"]["graphs"] == before + 1
    assert "recognise_attention: 4 rewrites" in caplog.text


def test_a_pass_can_be_switched_off():
    model, inputs = shrunk("llama")
    passes = {"narrow_rows": False, "prove_masks": False}
    model.compile(backend="kvtailor", options={**EAGER, "passes": passes})
    with recording(check=True) as recorder, torch.no_grad():
        model(**inputs, use_cache=False, logits_to_keep=1)
    (graph,) = recorder.graphs
    assert not {"narrow_rows", "prove_masks"} & {p.name for p in graph.passes}
    assert graph.max_error is not None and graph.max_error <= 1e-5


def test_relative_error_sees_every_kind_of_difference():
    one = torch.tensor([1.0, 4.0])
    assert relative_error([one], [one.clone()]) == 0.0
    assert relative_error([one + 1], [one]) == 0.25
    inf = float("inf")
    assert relative_error([one[:1]], [one]) == inf
    assert relative_error([one.half()], [one]) == inf
    assert relative_error([torch.tensor([1.0, float("nan")])], [one]) == inf
    assert relative_error([one], [torch.tensor([1.0, float("nan")])]) == inf
    assert relative_error([torch.tensor([inf])], [torch.tensor([-inf])]) == inf
    assert relative_error([torch.tensor([0.0])], [torch.tensor([float("nan")])]) == inf
    assert relative_error([torch.tensor([inf, 1.0])], [torch.tensor([inf, 1.0])]) == 0.0
    assert relative_error([torch.tensor([1])], [torch.tensor([2])]) == inf
    assert relative_error([3], [3]) == 0.0


def test_passes_of_the_users_own():
    from kvtailor.passes.report import PassReport

    def nothing(gm):
        return None

    def looks(gm):
        targets = {str(n.target) for n in gm.graph.nodes}
        assert "kvtailor.attend.default" in targets
        return PassReport(rewrites=7)

    def attention(x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    x = torch.randn(1, 2, 6, 8)
    for own, wrong in ((looks, None), (nothing, "TypeError: a pass must return a PassReport")):
        torch._dynamo.reset()
        run = torch.compile(
            attention, backend="kvtailor", options={"inner": "eager", "extra_passes": [own]}
        )
        with torch.no_grad(), recording() as recorder:
            torch.testing.assert_close(run(x), attention(x))
        found = {p.name: p for p in recorder.graphs[0].passes}[own.__name__]
        assert found.rewrites == (7 if wrong is None else 0)
        assert found.error is None if wrong is None else found.error.startswith(wrong)
    with pytest.raises(ValueError, match=r"option extra_passes.0: input should be callable, got 3"):
        parse_options({"extra_passes": [3]}, pass_names=())
