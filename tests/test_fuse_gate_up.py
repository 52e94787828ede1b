"""fuse_gate_up: gate and up of a feed-forward as one packed projection."""

from __future__ import annotations

import pytest
import torch
from test_fuse_qcrosskv import Attention, run_packed
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("always_pack")


def test_gate_and_up_are_packed_under_their_own_switch():
    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(32, 48), nn.Linear(32, 48)
            self.down = nn.Linear(48, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.silu(self.gate(x)) * self.up(x))

    model = nn.Sequential(Attention(), MLP())
    _, report = run_packed(model, torch.randn(2, 5, 32))
    assert [g.parts for g in report.packed] == [["0.q", "0.k", "0.v"], ["1.gate", "1.up"]]
    torch._dynamo.reset()
    _, report = run_packed(model, torch.randn(2, 5, 32), passes={"fuse_gate_up": False})
    assert [g.parts for g in report.packed] == [["0.q", "0.k", "0.v"]]
    torch._dynamo.reset()
    _, report = run_packed(model, torch.randn(2, 5, 32), pack="off")
    assert report.packed == []
