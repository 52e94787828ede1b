"""A rewritten graph that comes from the cache packs its weights as when it was made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from kvtailor.runtime import packing_table
from kvtailor.runtime.packed_weights import neighbours
from kvtailor.tests.test_fuse_qcrosskv import Attention

pytestmark = pytest.mark.usefixtures("always_pack")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTAILOR_CACHE_DIR", str(tmp_path / "cache"))
    packing_table.current_table.cache_clear()
    yield
    packing_table.current_table.cache_clear()


def call(model: nn.Module, **options: Any) -> bool:
    """Compile, run and compare; whether the graph came from the cache."""
    torch._dynamo.reset()
    hits = counters["kvtailor"]["cache_hits"]
    run = torch.compile(model.eval(), backend="kvtailor", options={"inner": "eager", **options})
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(2, 5, 32)
            torch.testing.assert_close(run(x), model(x))
            model.get_parameter("k.weight").mul_(1.5)
    return counters["kvtailor"]["cache_hits"] > hits


def packed(model: Attention) -> bool:
    weights = [model.q.weight, model.k.weight, model.v.weight]
    return neighbours(weights, [32, 32, 32]) is not None


def test_a_cached_graph_packs_the_weights_of_its_own_model():
    first, second = Attention("qv"), Attention("qv")
    assert not call(first) and packed(first)
    assert call(second) and packed(second)
    assert not call(Attention("qv"), pack="copy")
    third = Attention("qv")
    assert not call(third, pack="off") and not packed(third)


def test_weights_that_cannot_be_packed_are_another_graph():
    assert not call(Attention())
    shared = Attention()
    shared.k.weight = nn.Parameter(shared.v.weight.data)
    assert not call(shared)
    assert shared.k.weight.data_ptr() == shared.v.weight.data_ptr()
    held = Attention()
    view = held.q.weight.data
    assert not call(held) and held.q.weight.data_ptr() == view.data_ptr()


def test_another_table_is_another_graph(monkeypatch):
    from kvtailor.compiler import warm_start

    assert not call(Attention())
    assert call(Attention())
    monkeypatch.setattr(warm_start, "current_table", lambda: {"cpu": "another"})
    assert not call(Attention())
