"""A pass may fail, the user's call may not: by injection, into every pass."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed, RestartAnalysis

from kvtailor.backend import recording
from kvtailor.cli.models import shrunk
from kvtailor.passes import pipeline
from kvtailor.passes.failures import Snapshot
from kvtailor.passes.graph import SITES, output_node
from kvtailor.passes.report import PassReport
from kvtailor.passes.text import show

EAGER = {"inner": "eager"}
pytestmark = pytest.mark.usefixtures("always_pack")


class Block(nn.Module):
    """A decoder layer by hand: every pass looks at it, and Dynamo reads it in no time."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = (q @ k.mT * 0.3).masked_fill(hidden, float("-inf")).softmax(-1)
        x = x + self.o((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        i = torch.arange(x.shape[1])
        for block in self.blocks:
            x = block(x, i > i[:, None])
        return x


def llama() -> tuple[Callable[[], Tensor], Callable[..., Any]]:
    """A call of the model, and that by way of what compiles it."""
    model, inputs = shrunk("llama", tokens=5)
    return (lambda: model(**inputs).logits), lambda how: how(model)(**inputs).logits


def tiny() -> tuple[Callable[[], Tensor], Callable[..., Any]]:
    model, x = Tiny().eval(), torch.randn(2, 5, 16)
    return (lambda: model(x)), lambda how: how(model)(x)


class _At:
    """Raises at the n-th change of a graph, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n: int):
        self.left = n
        for owner, name in ((fx.Graph, "create_node"), (fx.Graph, "erase_node")):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))
        replaced = fx.Node.replace_all_uses_with
        monkeypatch.setattr(fx.Node, "replace_all_uses_with", self._counted(replaced))

    def _counted(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("a stitch came loose")
            return change(*args, **kwargs)

        return counted


def failing(each: Callable[..., Any], n: int) -> Callable[..., PassReport]:
    def fails(gm: fx.GraphModule, **options: Any) -> PassReport:
        with pytest.MonkeyPatch.context() as patch:
            _At(patch, n)
            each(gm, **options)
        raise RuntimeError("a stitch came loose")

    fails.__name__ = each.__name__
    return fails


def broken(each: Callable[..., Any], how: str) -> Callable[..., Any]:
    def breaks(gm: fx.GraphModule, **options: Any) -> Any:
        report = each(gm, **options)
        output = output_node(gm)
        first = next(n for n in gm.graph.nodes if n.op == "call_function")
        if how == "order":
            output.prev.append(first)
        elif how == "value":
            del output.prev.meta["val"]
        elif how == "results":
            output.args = (tuple(output.args[0])[1:],)  # type: ignore[arg-type]
        return None if how == "report" else report

    breaks.__name__ = each.__name__
    return breaks


def injected(monkeypatch: pytest.MonkeyPatch, name: str, make: Callable[..., Any]) -> None:
    passes = tuple(make(p) if p.__name__ == name else p for p in pipeline.PASSES)
    monkeypatch.setattr(pipeline, "PASSES", passes)
    monkeypatch.setattr(
        pipeline, "LOWERING", passes[[p.__name__ for p in passes].index("lower_paged_attention")]
    )


def check(name: str, subject: Callable[..., Any] = tiny) -> None:
    plain, by = subject()
    torch._dynamo.reset()
    with torch.no_grad(), recording() as recorder:
        want = plain()
        got = by(lambda model: torch.compile(model, backend="kvtailor", options=EAGER))
    torch.testing.assert_close(got, want)
    (graph,) = recorder.graphs
    assert [p.name for p in graph.passes if p.error] == [name]
    assert graph.captured and not graph.without


NAMES = [p.__name__ for p in pipeline.PASSES]


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_that_raises(monkeypatch, name):
    injected(monkeypatch, name, lambda p: failing(p, 3))
    check(name)


def test_a_pass_that_raises_in_a_real_model(monkeypatch):
    injected(monkeypatch, "lower_dense_attention", lambda p: failing(p, 3))
    check("lower_dense_attention", llama)


@pytest.mark.slow
@pytest.mark.parametrize("n", [0, 1, 2, 7, 20, 10**9])
@pytest.mark.parametrize("name", NAMES)
def test_a_pass_that_raises_anywhere(monkeypatch, name, n):
    injected(monkeypatch, name, lambda p: failing(p, n))
    check(name)
    check(name, llama)


@pytest.mark.parametrize("how", ["order", "value", "results", "report"])
def test_a_pass_that_leaves_no_graph(monkeypatch, how, caplog):
    injected(monkeypatch, "narrow_rows", lambda p: broken(p, how))
    with caplog.at_level(logging.WARNING):
        check("narrow_rows")
    assert "pass narrow_rows failed and is undone" in caplog.text


def test_a_snapshot_brings_everything_back():
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.relu, (x,))
    for node in (x, y):
        node.meta["val"] = torch.ones(2)
    graph.output((y,))
    gm = fx.GraphModule({}, graph)
    gm.meta[SITES] = [PassReport(name="before")]
    site, text = gm.meta[SITES][0], show(gm)
    before = Snapshot(gm)
    gm.graph.erase_node(output_node(gm))
    gm.graph.erase_node(y)
    gm.register_buffer("c", torch.ones(1))
    gm.meta["other"], site.name = 1, "after"
    gm.meta[SITES].append(PassReport())
    before.restore()
    assert show(gm) == text and not hasattr(gm, "c") and list(gm.meta) == [SITES]
    assert gm.meta[SITES] == [site] and site.name == "before"
    assert torch.equal(gm(torch.tensor([-1.0, 2.0]))[0], torch.tensor([0.0, 2.0]))


def test_strict_raises_and_dynamo_is_heard(monkeypatch):
    def fn(x: Tensor) -> Tensor:
        return torch.relu(x + 1)

    def fails(gm: fx.GraphModule, **options: Any) -> PassReport:
        raise errors[0]

    errors: list[BaseException] = []
    for error, kind in (
        (RuntimeError("a stitch came loose"), BackendCompilerFailed),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ):
        errors[:] = [error]
        torch._dynamo.reset()
        options = {**EAGER, "strict": True, "extra_passes": [fails]}
        with torch.no_grad(), pytest.raises(kind, match=r"fails: Runtime|^$"):
            torch.compile(fn, backend="kvtailor", options=options)(torch.ones(2))
    gm = fx.symbolic_trace(nn.ReLU())
    errors = [RestartAnalysis()]
    with pytest.raises(RestartAnalysis):
        pipeline._run_or_undo(fails, gm, "captured")


@pytest.mark.parametrize("where", ["split", "describe", "straight_line", "graph_signature"])
def test_cutting_may_fail(monkeypatch, where, pieces):
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a stitch came loose")

    monkeypatch.setattr("kvtailor.compiler.pieces." + where, fails)
    plain, by = tiny()
    options = {**EAGER, "cuda_graphs": True}
    with torch.no_grad(), recording() as recorder:
        got = by(lambda model: torch.compile(model, backend="kvtailor", options=options))
        torch.testing.assert_close(got, plain())
    assert "a stitch came loose" in " ".join(recorder.graphs[0].without)


@pytest.mark.parametrize("regions", ["layer", "none"])
def test_packing_and_the_inner_compiler_may_fail(monkeypatch, regions):
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a stitch came loose")

    monkeypatch.setattr("kvtailor.runtime.packed_weights.concatenated", fails)
    monkeypatch.setattr("kvtailor.compiler.inner.inner_compile", fails)
    model, x = Tiny().eval(), torch.randn(2, 5, 16)
    places = [p.data_ptr() for p in model.parameters()]
    options = {**EAGER, "regions": regions}
    with torch.no_grad(), recording() as recorder:
        got = torch.compile(model, backend="kvtailor", options=options)(x)
        torch.testing.assert_close(got, model(x))
    told = recorder.graphs[0].without
    assert told[0].startswith("weights are not packed") and "runs uncompiled" in told[-1]
    assert places == [p.data_ptr() for p in model.parameters()]


CONSTANTS: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda h: h[:, [0, -1]],
    "list of one": lambda h: h[:, [2]] + torch.tensor(3.0),
    "tensor": lambda h: h[:, torch.tensor([1, 3])],
    "computed": lambda h: h[:, torch.tensor([1.0, 5.0, 2.0]).argsort() + torch.tensor([0, 1, 0])],
    "index_select": lambda h: h.index_select(1, torch.tensor([4, 0])),
    "mask": lambda h: h[:, torch.tensor([True, False, True, False, True])],
    "filled": lambda h: h.masked_fill(torch.tensor([[True]] + [[False]] * 4), -1.0)[:, [0, -1]],
    "drawn": lambda h: (torch.rand(3), h[:, torch.randint(0, 5, (2,))]),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CONSTANTS)
def test_rows_chosen_by_constants(name, dynamic):
    W, x = torch.randn(8, 8), torch.randn(2, 5, 8)

    def fn(x: Tensor) -> Any:
        return CONSTANTS[name](torch.relu(x @ W))

    torch._dynamo.reset()
    with torch.no_grad(), recording() as recorder:
        torch.manual_seed(0)
        want = fn(x)
        torch.manual_seed(0)
        got = torch.compile(fn, backend="kvtailor", dynamic=dynamic, options=EAGER)(x)
    torch.testing.assert_close(got, want)
    # A Boolean mask breaks the graph: how many rows it chooses depends on data.
    for graph in recorder.graphs:
        assert graph.captured and not any(p.error for p in graph.passes)
