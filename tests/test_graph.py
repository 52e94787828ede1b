"""Keys of calls: equal for what an op cannot tell apart, and for nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from kvtailor.backend import recording
from kvtailor.cli.models import shrunk
from kvtailor.passes import pipeline
from kvtailor.passes.graph import call_key, frozen, set_value

aten = torch.ops.aten
NODE = fx.Graph().placeholder("x")
DIFFERENT: list[Any] = [
    *(1, 1.0, True, "1", None, 0.0, -0.0, [1], (1,), [[1]], [1, 1], {"a": 1}, {"b": 1}),
    *(slice(0, 1), slice(0, 1, 1), torch.float32, torch.float64, torch.device("cpu"), NODE, [NODE]),
]


@pytest.mark.parametrize("one", range(len(DIFFERENT)))
def test_what_differs_has_keys_of_its_own(one: int) -> None:
    equal = [n for n, other in enumerate(DIFFERENT) if frozen(other) == frozen(DIFFERENT[one])]
    assert equal == [one]


def test_what_nobody_knows_equals_nothing() -> None:
    thing = object()
    assert frozen(thing) != frozen(thing)
    assert frozen(torch.ones(1)) != frozen(torch.ones(1))


def test_calls_on_equal_arguments() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")

    def key(*args: Any, **kwargs: Any) -> Any:
        return call_key(graph.call_function(aten.add.Tensor, args, kwargs))

    assert key(x, y) == key(x, y) != key(y, x)
    assert key(x, 1) != key(x, 1.0)
    assert key(x, y, alpha=2) != key(x, y)
    assert frozen([x, y], lambda n: n.name) == frozen([x, y], lambda n: n.name)


@pytest.mark.parametrize("name", ["bert", pytest.param("t5", marks=pytest.mark.slow)])
def test_values_lie_in_memory_as_their_ops_say_after_every_pass(monkeypatch, name):
    """SDPA's result lies as [B, T, H, D], attend's as [B, H, T, D]: what follows must know."""
    seen = []

    def checked(each: Any, gm: fx.GraphModule, stage: str) -> Any:
        report = run(each, gm, stage)
        for node in gm.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload):
                before = node.meta["val"]
                set_value(node)
                after, node.meta["val"] = node.meta["val"], before
                if isinstance(before, torch.Tensor):
                    assert before.stride() == after.stride(), (each.__name__, node)
                    seen.append(node)
        return report

    run = pipeline._run_or_undo
    monkeypatch.setattr(pipeline, "_run_or_undo", checked)
    torch._dynamo.reset()
    model, inputs = shrunk(name, tokens=5)
    with torch.no_grad(), recording() as recorder:
        torch.compile(model, backend="kvtailor", options={"inner": "eager"})(**inputs)
    assert recorder.graphs[0].captured and len(seen) > 100
