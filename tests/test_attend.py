"""attend and paged_attend by name: the fields are the schema's, and a call survives the way back."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import fx

from kvtailor.kernels.ops import attend, local_attend
from kvtailor.passes.attend import Attend, PagedAttend


@pytest.mark.parametrize("kind", [Attend, PagedAttend])
def test_fields_are_the_schemas(kind: Any) -> None:
    fields = [
        (f.name, None if f.default is dataclasses.MISSING else f.default)
        for f in dataclasses.fields(kind)
    ]
    for op in kind.OPS:
        assert fields == [(a.name, a.default_value) for a in op._schema.arguments]


def call(*args: Any, **kwargs: Any) -> fx.Node:
    return fx.Graph().call_function(attend, args, kwargs)


def test_defaults_are_left_out() -> None:
    node = call("q", "k", "v", None, None, None, None, scale=0.5, causal=False, window=None)
    Attend.of(node).write(node)
    assert (node.args, node.kwargs) == (("q", "k", "v"), {"scale": 0.5})
    Attend.of(node).replace(sinks="s", causal=True).write(node)
    assert node.args == ("q", "k", "v", None, None, None, "s")
    assert node.kwargs == {"scale": 0.5, "causal": True}


def test_arguments_by_keyword_are_read() -> None:
    found = Attend.of(call("q", "k", v="v", mask="m", scale=0.5, chunk=4))
    assert (found.v, found.mask, found.chunk, found.is_local) == ("v", "m", 4, True)


def test_emit_as_another_op_of_the_schema() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(1, 1, 3, 2)
    one = Attend(x, x, x, scale=1.0, window=2)
    assert one.emit(graph).target is attend
    assert one.emit(graph, op=local_attend).target is local_attend


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"causal": True}, True),
        ({}, False),
        ({"causal": True, "window": 3}, True),
        ({"causal": True, "window": 2}, False),
        ({"causal": True, "chunk": 3}, False),
        ({"causal": True, "q_offset": 1}, False),
    ],
)
def test_top_left_causal(flags: dict[str, Any], expected: bool) -> None:
    k = fx.Graph().placeholder("k")
    k.meta["val"] = torch.ones(1, 1, 3, 2)
    assert Attend(k, k, k, scale=1.0, **flags).is_top_left_causal is expected
