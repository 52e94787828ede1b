"""Ops by what they do: the calls of a captured graph, told apart."""

from __future__ import annotations

import torch
from harness import captured

from kvtailor.passes import opsets
from kvtailor.passes.opsets import draws, is_pointwise, packet


def test_ops_told_apart():
    def fn(x, y):
        drawn = torch.rand_like(x) + torch.nn.functional.dropout(x, 0.5)
        return torch.where(y, x.exp(), -x).view(-1).clone(), x @ x, drawn, x.sum(0)

    graph = captured(fn, torch.ones(3, 3), torch.eye(3) > 0)
    calls = [n for n in graph.graph.nodes if n.op == "call_function"]
    names = {packet(n).__name__: n for n in calls if is_pointwise(n)}
    assert {"exp", "neg", "where", "clone", "add"} <= set(names)
    assert not {"view", "matmul", "mm", "sum", "rand_like", "dropout"} & set(names)
    assert {packet(n).__name__ for n in calls if draws(n)} == {"rand_like", "dropout"}


def test_no_op_has_two_natures():
    groups = (opsets.COPIES, opsets.RESHAPES, opsets.SEVERAL, opsets.FRESH)
    ops = [op for group in groups for op in group]
    assert len(set(ops)) == len(ops)
