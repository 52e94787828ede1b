"""FLOPs of a captured graph against the formulas written out."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from kvtailor.backend import recording
from kvtailor.kernels import ops  # noqa: F401
from kvtailor.passes.flops import node_flops

B, H, T, D = 2, 4, 6, 8


def before(function, *args, dynamic=None) -> int:
    torch._dynamo.reset()
    with recording() as recorder, torch.no_grad():
        torch.compile(function, backend="kvtailor", dynamic=dynamic, options={"inner": "eager"})(
            *args
        )
    (graph,) = recorder.graphs
    return graph.flops_before


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (F.linear, (rand(B, T, D), rand(16, D)), 2 * B * T * D * 16),
        (F.linear, (rand(B, T, D), rand(16, D), rand(16)), 2 * B * T * D * 16),
        (torch.matmul, (rand(B, H, T, D), rand(B, H, D, T)), 2 * B * H * T * T * D),
        (torch.bmm, (rand(B, T, D), rand(B, D, T)), 2 * B * T * T * D),
        (
            lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k),
            (rand(B, H, T, D), rand(B, H, T, D)),
            2 * B * H * T * T * D,
        ),
        (
            F.scaled_dot_product_attention,
            (rand(B, H, T, D), rand(B, H, T, D), rand(B, H, T, D)),
            4 * B * H * T * T * D,
        ),
        (
            lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True),
            (rand(B, H, T, D), rand(B, 2, T, D)),
            4 * B * H * T * T * D,
        ),
        (F.conv2d, (rand(1, 3, 8, 8), rand(5, 3, 3, 3)), 2 * 5 * 6 * 6 * 3 * 9),
        (lambda x: F.layer_norm(x.exp() + 1, (D,)), (rand(B, T, D),), 0),
    ],
    ids=["linear", "bias", "matmul", "bmm", "einsum", "sdpa", "grouped", "conv", "norm"],
)
def test_formulas(function, args, expected, dynamic):
    assert before(function, *args, dynamic=dynamic) == expected


def test_equals_torchs_own_counter_where_that_counts():
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.ones(5, 8))
    assert before(model, torch.ones(5, 8)) == counter.get_total_flops() > 0


def test_attend_counts_grouped_heads_as_query_heads():
    graph = torch.fx.Graph()
    q, k = graph.placeholder("q"), graph.placeholder("k")
    q.meta["val"], k.meta["val"] = rand(B, H, T, D), rand(B, 2, T, D)
    node = graph.call_function(torch.ops.kvtailor.attend.default, (q, k, k), {"scale": 1.0})
    node.meta["val"] = rand(B, H, T, D)
    assert node_flops(node) == 4 * B * H * T * T * D
