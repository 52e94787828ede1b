"""inline: a torch function in the graph; opsets: what may stand there when."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from kvtailor.kernels.ops import attend
from kvtailor.passes import inline as inlining
from kvtailor.passes.capture.capture import capture
from kvtailor.passes.graph import aten, emit, output_node
from kvtailor.passes.inline import inline, replace
from kvtailor.passes.normalise import normalise
from kvtailor.passes.pipeline import interface, validate
from kvtailor.passes.text import show

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def captured(fn, *args, dynamic=False, rewrite=lambda gm: None):
    """fn's graph after ``rewrite``, whose result is checked against eager."""
    graphs: list[fx.GraphModule] = []

    def backend(gm, example_inputs):
        graph = capture(gm, example_inputs)
        rewrite(graph)
        graph.graph.eliminate_dead_code()
        validate(graph, interface(graph))
        graph.recompile()
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        got = torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
        torch.testing.assert_close(got, fn(*args))
    return graphs[0]


def each_relu(function, *more, **constants):
    def rewrite(gm):
        for node in gm.graph.find_nodes(op="call_function", target=aten.relu.default):
            replace(node, function, node.args[0], *more, **constants)

    return rewrite


def rows_apart(x: Tensor) -> Tensor:
    """relu by way of sizes, indices, a cast and a comparison."""
    B, T = x.shape[:2]
    at = torch.arange(B * T, device=x.device)
    keep = (at >= 0).reshape(B, T, 1) & (x > 0)
    return x.to(x.dtype).masked_fill(~keep, 0.0).reshape(B, T, x.shape[2])


@pytest.mark.parametrize("dynamic", [False, True])
def test_sizes_that_the_function_reads(dynamic):
    gm = captured(torch.relu, torch.randn(2, 3, 4), dynamic=dynamic, rewrite=each_relu(rows_apart))
    text = show(gm)
    assert "aten::relu" not in text and "aten::arange" in text
    assert ("sym_size" in text) == dynamic
    # A cast to the dtype that x has is x, as in eager.
    assert "aten::to" not in text and "_to_copy" not in text


def test_composites_stay_whole_and_promotion_makes_no_cast():
    def product(x: Tensor) -> Tensor:
        wide = x.float() * x.to(torch.bfloat16)
        return torch.nn.functional.linear(wide, wide, None)

    x = torch.randn(3, 3)
    made: list[str] = []

    def rewrite(gm):
        (node,) = gm.graph.find_nodes(op="placeholder")
        with gm.graph.inserting_before(output_node(gm)):
            inline(gm.graph, product, node)
        made.append(show(gm))

    captured(torch.relu, x, rewrite=rewrite)
    assert "aten::linear(" in made[0] and made[0].count("_to_copy") == 1


def test_equal_calls_are_traced_once(monkeypatch):
    traces: list[object] = []
    trace = inlining.trace
    monkeypatch.setattr(inlining, "trace", lambda *a: traces.append(a) or trace(*a))

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(torch.relu(x) + 1).sum() + torch.relu(y).sum()

    captured(fn, torch.randn(2, 3, 4), torch.randn(5, 3, 4), rewrite=each_relu(rows_apart))
    assert len(traces) == 2


def test_traces_go_with_the_graph():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = FakeTensorMode().from_tensor(torch.randn(2, 3, 4))
    graph.output(inline(graph, rows_apart, x))
    kept = weakref.ref(graph)
    del graph, x
    gc.collect()
    assert kept() is None


def test_one_node_given_twice_is_one_tensor():
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x + 1 if x is y else x + y

    def rewrite(gm):
        a, b = gm.graph.find_nodes(op="placeholder")
        with gm.graph.inserting_before(output_node(gm)):
            assert inline(gm.graph, fn, a, a).args == (a, 1)
            assert inline(gm.graph, fn, a, b).args == (a, b)
            assert inline(gm.graph, fn, b, b).args == (b, 1)

    captured(torch.add, torch.randn(3), torch.randn(3), rewrite=rewrite)


def test_a_constant_must_be_made_by_ops():
    held = torch.ones(3)

    def rewrite(gm):
        (node,) = gm.graph.find_nodes(op="placeholder")
        with (
            gm.graph.inserting_before(output_node(gm)),
            pytest.raises(Exception, match=r"constant|Fake"),
        ):
            inline(gm.graph, lambda x: x + held, node)

    captured(torch.relu, torch.randn(3), rewrite=rewrite)


def spoilt(stage: str, target, *more):
    """A graph in which a call stands that must not be there in this stage."""

    def rewrite(gm):
        promised = interface(gm)
        output = output_node(gm)
        (x,) = output.all_input_nodes
        with gm.graph.inserting_before(output):
            new = emit(gm.graph, target, x, *more)
        output.replace_input_with(x, new)
        validate(gm, promised)
        with pytest.raises(RuntimeError, match="normal form"):
            validate(gm, promised, stage)
        output.replace_input_with(new, x)

    return rewrite


def test_another_spelling_after_normalise():
    x = torch.randn(2, 3)
    captured(torch.relu, x, rewrite=spoilt("normalised", aten.view.default, [2, 3]))
    captured(torch.relu, x, rewrite=spoilt("normalised", aten._unsafe_view.default, [2, 3]))


def test_an_attend_after_the_lowerings():
    def fn(x: Tensor) -> Tensor:
        return attend(x, x, x, scale=1.0)

    def rewrite(gm):
        normalise(gm)
        with pytest.raises(RuntimeError, match="attend is left"):
            validate(gm, interface(gm), "lowered")

    captured(fn, torch.randn(1, 2, 3, 4), rewrite=rewrite)


def test_writes_that_nobody_knows_of():
    def rewrite(gm):
        promised = interface(gm)
        (relu,) = gm.graph.find_nodes(op="call_function", target=aten.relu.default)
        for target, match in (
            (aten.add_.Scalar, "writes to its"),
            (aten.copy_.default, "no input"),
        ):
            with gm.graph.inserting_after(relu):
                other = 1 if target is aten.add_.Scalar else relu.args[0]
                new = emit(gm.graph, target, relu, other)
            with pytest.raises(RuntimeError, match=match):
                validate(gm, promised)
            gm.graph.erase_node(new)

    captured(torch.relu, torch.randn(3), rewrite=rewrite)
