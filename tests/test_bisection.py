"""``kvtailor bisect`` finds the pass that is wrong, whichever it is."""

from __future__ import annotations

import math

import pytest
import torch
from torch import fx

from kvtailor.cli.bisect import NONE, bisect_passes
from kvtailor.cli.inspection import Request
from kvtailor.passes import pipeline
from kvtailor.passes.graph import aten, output_node

SCRIPT = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, x):
        x = self.proj(x)
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

def build():
    return Model().eval(), (torch.randn(1, 2, 6, 8),), {}
"""


@pytest.fixture
def model(tmp_path) -> Request:
    (tmp_path / "model.py").write_text(SCRIPT)
    return Request(f"{tmp_path / 'model.py'}:build")


def spoil(monkeypatch, name: str, by: float) -> None:
    """The pass, and after it everything the graph returns times 1 + by."""
    original = next(p for p in pipeline.PASSES if p.__name__ == name)

    def spoilt(gm: fx.GraphModule, **options):
        report = original(gm, **options)
        output = output_node(gm)
        with gm.graph.inserting_before(output):
            for node in list(output.all_input_nodes):
                new = gm.graph.call_function(aten.mul.Tensor, (node, 1 + by))
                new.meta["val"] = node.meta["val"]
                output.replace_input_with(node, new)
        return report

    spoilt.__name__ = name
    passes = tuple(spoilt if p is original else p for p in pipeline.PASSES)
    monkeypatch.setattr(pipeline, "PASSES", passes)


def test_nobody_is_blamed_where_all_is_well(model):
    found = bisect_passes(model)
    assert found.blamed is None
    assert [s.upto for s in found.steps] == [NONE, *pipeline.PASS_NAMES]
    assert max(s.error for s in found.steps) <= found.bound


@pytest.mark.parametrize("name", ["recognise_attention", "prove_masks", pipeline.PASS_NAMES[-1]])
def test_the_pass_that_is_wrong_is_blamed(monkeypatch, model, name):
    spoil(monkeypatch, name, 0.01)
    found = bisect_passes(model)
    assert found.blamed == name == found.steps[-1].upto
    assert 0.005 < found.steps[-1].error < 0.02
    assert bisect_passes(model, bound=0.1).blamed is None


def test_nan_is_an_error_and_json_has_no_infinity(monkeypatch, model):
    spoil(monkeypatch, "recognise_attention", math.nan)
    found = bisect_passes(model)
    assert found.blamed == "recognise_attention"
    assert found.asdict()["steps"][-1] == {"upto": "recognise_attention", "error": "inf"}


def test_a_pass_that_is_off_anyway_is_not_tried(monkeypatch, model):
    spoil(monkeypatch, "narrow_rows", 0.01)
    found = bisect_passes(model.model_copy(update={"disable": ("narrow_rows",)}))
    assert found.blamed is None and "narrow_rows" not in [s.upto for s in found.steps]


def test_the_inner_compiler_is_no_pass(monkeypatch, model):
    from kvtailor.compiler import inner

    def wrong(gm, example_inputs, opts):
        return lambda *args: tuple(
            x * 2 if isinstance(x, torch.Tensor) else x for x in gm.forward(*args)
        )

    monkeypatch.setattr(inner, "inner_compile", wrong)
    assert bisect_passes(model).blamed == NONE


@pytest.mark.parametrize("name", [pipeline.PASS_NAMES[0], "lower_dense_attention"])
def test_a_pass_that_fails_is_blamed(monkeypatch, model, name):
    """The graph is right without it; one that cannot be switched off fails from the first step."""

    def fails(gm: fx.GraphModule):
        raise RuntimeError("a stitch came loose")

    fails.__name__ = name
    passes = tuple(fails if p.__name__ == name else p for p in pipeline.PASSES)
    monkeypatch.setattr(pipeline, "PASSES", passes)
    found = bisect_passes(model)
    assert found.blamed == name and found.steps[-1].error <= found.bound
    assert found.steps[-1].upto == (name if name in pipeline.PASS_NAMES else NONE)
