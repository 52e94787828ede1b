"""normalise: one spelling of everything, copies gone where nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from harness import through, tidied
from models import build
from torch import Tensor, fx

from kvtailor.compiler.check import relative_error
from kvtailor.passes.capture.capture import capture
from kvtailor.passes.graph import aten, is_call
from kvtailor.passes.normalise import normalise
from kvtailor.passes.report import PassReport
from kvtailor.passes.text import show

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "seeded")


class Run:
    """A function through capture and normalise: result, graph, report."""

    def __init__(self, fn: Callable[..., Any], *args: Any, dynamic: bool = False):
        self.report = PassReport()
        self.gm: fx.GraphModule

        def step(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
            self.gm = capture(gm, example_inputs)
            before = {n.name: n.meta["val"] for n in self.gm.graph.nodes if "val" in n.meta}
            self.report = normalise(self.gm)
            tidied(self.gm)
            assert normalise(self.gm).rewrites == 0
            for n in self.gm.graph.nodes:
                assert n.op == "output" or "val" in n.meta
                assert n.name not in before or before[n.name] is n.meta["val"]
            return self.gm.forward

        self.out = through(step, fn, *args, dynamic=dynamic, fullgraph=True)

    @property
    def ops(self) -> list[str]:
        """Names of the calls, overloads left out."""
        return [
            str(getattr(n.target, "overloadpacket", n.target)).removeprefix("aten.")
            for n in self.gm.graph.nodes
            if n.op == "call_function"
        ]


X = torch.arange(24.0).view(2, 3, 4)
B = torch.tensor([True, False, True, True])

# name -> function of one tensor, the calls that are left of it.
FORMS: dict[str, tuple[Callable[[Tensor], Any], list[str]]] = {
    "transpose": (lambda x: x.transpose(1, 2).sin(), ["permute", "sin"]),
    "mT": (lambda x: x.mT.sin(), ["permute", "sin"]),
    "swapaxes": (lambda x: x.swapaxes(0, 1).sin(), ["permute", "sin"]),
    "t": (lambda x: x[0].t().sin(), ["select", "permute", "sin"]),
    "permute-nothing": (lambda x: x.permute(0, 1, 2).sin(), ["sin"]),
    "view": (lambda x: x.view(6, 4).sin(), ["reshape", "sin"]),
    "view-nothing": (lambda x: x.view(2, 3, 4).sin(), ["sin"]),
    "view-twice": (lambda x: x.view(6, 4).view(2, 12).sin(), ["reshape", "sin"]),
    "expand-nothing": (lambda x: x.expand(2, -1, 4).sin(), ["sin"]),
    "slice-nothing": (lambda x: x[:, 0:].sin(), ["sin"]),
    "clone": (lambda x: x.clone().sin(), ["sin"]),
    "contiguous-view": (
        lambda x: x.transpose(0, 1).contiguous().view(3, 8).sin(),
        ["permute", "reshape", "sin"],
    ),
    "to-same": (lambda x: x.to(torch.float32, copy=True).sin(), ["sin"]),
    "type_as": (lambda x: x.type_as(torch.ones(1, dtype=torch.float64)).sin(), ["_to_copy", "sin"]),
    "type_as-same": (lambda x: x.sin().type_as(x).cos(), ["sin", "cos"]),
    "times-1": (lambda x: ((x * 1).sin() * 1.0).cos(), ["sin", "cos"]),
    "divided-by-1": (lambda x: (x / 1.0).sin(), ["sin"]),
    "minus-0": (lambda x: (x - 0.0).sin(), ["sin"]),
    "int-plus-0": (lambda x: (x.long() + 0).sin(), ["_to_copy", "sin"]),
    "dropout-0": (lambda x: F.dropout(x, 0.0).sin(), ["sin"]),
    "dropout-eval": (lambda x: torch.dropout(x, 0.5, False).sin(), ["sin"]),
    "detach": (lambda x: x.detach().sin(), ["sin"]),
    "multiply": (lambda x: torch.multiply(x, x), ["mul"]),
    "and": (lambda x: (x > 1) & (x < 5), ["gt", "lt", "bitwise_and"]),
    "logical_and": (lambda x: torch.logical_and(x > 1, x < 5), ["gt", "lt", "bitwise_and"]),
    "logical_not": (lambda x: torch.logical_not(x > 1), ["gt", "bitwise_not"]),
    "masked_fill": (lambda x: x.masked_fill(x > 1, 0.0), ["gt", "where"]),
    "bmm": (lambda x: torch.bmm(x, x.mT), ["permute", "matmul"]),
    "softmax-by-hand": (
        lambda x: (e := torch.exp(x - x.amax(-1, True))) / e.sum(-1, keepdim=True),
        ["softmax"],
    ),
    "softmax-by-hand-max": (
        lambda x: (e := torch.exp(x - x.max(1, True).values)) / e.sum(1, keepdim=True),
        ["softmax"],
    ),
    "equal-calls": (lambda x: x.sin().cos() + x.sin().cos(), ["sin", "cos", "add"]),
    "equal-tables": (
        lambda x: (torch.arange(4) + torch.arange(4)) * x,
        ["arange", "add", "mul"],
    ),
}

# What looks like one of these and must stay.
KEPT: dict[str, tuple[Callable[[Tensor], Any], list[str]]] = {
    # -0.0 + 0.0 is 0.0.
    "float-plus-0": (lambda x: (x + 0.0).sin(), ["add", "sin"]),
    "int-times-1.0": (lambda x: x.long() * 1.0, ["_to_copy", "mul"]),
    "logical-on-floats": (lambda x: torch.logical_and(x, x - 1), ["sub", "logical_and"]),
    "dropout": (lambda x: F.dropout(x, 0.5), ["dropout"]),
    "two-random": (lambda x: x + torch.rand(4) - torch.rand(4), ["rand", "add", "rand", "sub"]),
    "copy-returned": (lambda x: x.clone(), ["clone"]),
    "copy-returned-viewed": (lambda x: x.clone().view(6, 4), ["clone", "reshape"]),
    "copy-returned-half": (lambda x: x.clone()[0], ["clone", "select"]),
    "softmax-other-dimension": (
        lambda x: (e := torch.exp(x - x.amax(-1, True))) / e.sum(1, keepdim=True),
        ["amax", "sub", "exp", "sum", "div"],
    ),
    "softmax-of-another": (
        lambda x: (e := torch.exp(x - (x + 1).amax(-1, True))) / e.sum(-1, keepdim=True),
        ["add", "amax", "sub", "exp", "sum", "div"],
    ),
    "slice": (lambda x: x[:, 1:].sin(), ["slice", "sin"]),
    "1-and-1.0": (lambda x: (x.long() + 2, x.long() + 2.0), ["_to_copy", "add", "add"]),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", [*FORMS, *KEPT])
def test_form(name: str, dynamic: bool) -> None:
    form, expected = (FORMS | KEPT)[name]
    torch.manual_seed(1)
    run = Run(form, X, dynamic=dynamic)
    assert [op for op in run.ops if op != "sym_size"] == expected
    assert run.report.rewrites or name in KEPT
    if name not in ("dropout", "two-random"):
        eager = form(X)
        pairs = zip(*((x if isinstance(x, tuple) else (x,)) for x in (run.out, eager)))
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs)
            assert ours.stride() == theirs.stride()


def test_what_is_returned_stays_apart() -> None:
    """Outputs must not share memory that they do not share in eager mode."""

    def form(x: Tensor) -> tuple[Tensor, ...]:
        a, b = torch.zeros(4), torch.zeros(4)
        return a, b, x.clone(), x.clone().view(-1), x.sin(), x.sin().view(-1)

    x = X.clone()
    out = Run(form, x).out
    places = {t.untyped_storage().data_ptr() for t in (*out, x)}
    assert len(places) == 7
    for t in out:
        t.add_(1)
    assert torch.equal(x, X)
    torch.testing.assert_close([t - 1 for t in out], list(form(X)))


def test_copies_of_mutated_inputs_stay() -> None:
    """Two caches that swap places: neither copy may go."""

    def form(a: Tensor, b: Tensor) -> Tensor:
        old = a.clone()
        a.copy_(b)
        b.copy_(old)
        return a.sum()

    a, b = torch.ones(3), torch.full((3,), 2.0)
    Run(form, a, b)
    assert a.tolist() == [2.0] * 3 and b.tolist() == [1.0] * 3


def test_layout_that_an_op_needs_is_kept() -> None:
    """view_as_complex takes only a contiguous last dimension."""

    def form(x: Tensor) -> Tensor:
        pairs = x.transpose(1, 2).contiguous().view(2, 4, 1, 3)[..., :2].contiguous()
        return torch.view_as_complex(pairs).abs()

    torch.testing.assert_close(Run(form, X).out, form(X))


def test_golden() -> None:
    def form(x: Tensor, m: Tensor, n: Tensor) -> Tensor:
        heads = x.view(2, 3, 2, 2).transpose(1, 2)
        merged = heads.transpose(1, 2).contiguous().view(2, 3, -1)
        seen = (m & n) & (m & n)
        out = F.dropout(merged, 0.1, training=False) * 1.0
        return out.masked_fill(torch.logical_not(seen), 0.0).detach().clone().sin()

    run = Run(form, X, B, B.flip(0))
    assert_expected_inline(
        show(run.gm),
        """\
%0: float32[2, 3, 4] = input
%1: bool[4] = input
%2: bool[4] = input
%3: bool[4] = aten::bitwise_and.Tensor(%1, %2)
%4: bool[4] = aten::bitwise_and.Tensor(%3, %3)
%5: bool[4] = aten::bitwise_not(%4)
%6: float32[2, 3, 4] = aten::where.ScalarSelf(%5, 0.0, %0)
%7: float32[2, 3, 4] = aten::sin(%6)
return %7""",
    )


def test_model() -> None:
    """A real architecture: a third fewer ops, the same result to the bit."""
    model, inputs = build("gemma3n_text")
    graphs: list[tuple[int, int, int]] = []

    def step(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graph = capture(gm, example_inputs)
        before = len(graph.graph.nodes)
        report = normalise(graph)
        tidied(graph)
        assert not [n for n in graph.graph.nodes if is_call(n, aten.view, aten.transpose)]
        assert normalise(graph).rewrites == 0
        graphs.append((before, len(graph.graph.nodes), report.rewrites))
        return graph.forward

    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
    actual = through(step, model, **inputs, use_cache=False).logits
    assert relative_error([actual], [expected]) == 0.0
    ((before, after, rewrites),) = graphs
    assert rewrites > 100 and after < 0.9 * before
