"""Keys of calls: equal for what an op cannot tell apart, and for nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from kvtailor.passes.graph import call_key, frozen

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
