"""QCrossKVLinear: projections, checkpoints of other layouts, and two ranks against one."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F

import kvtailor
from kvtailor.runtime.qcrosskv import ColwiseQCrossKV, QCrossKVLinear


def separate(bias: str = "", hidden: int = 24, heads: int = 4, kv_heads: int = 2) -> nn.ModuleDict:
    out = {"q_proj": heads * 8, "k_proj": kv_heads * 8, "v_proj": kv_heads * 8}
    return nn.ModuleDict(
        {name: nn.Linear(hidden, n, bias=name[0] in bias) for name, n in out.items()}
    )


def layer(bias: bool = False, **kwargs: Any) -> QCrossKVLinear:
    return kvtailor.QCrossKVLinear(24, 8, 4, 2, bias=bias, **kwargs)


@pytest.mark.parametrize("bias", ["", "qv", "qkv"])
@pytest.mark.parametrize("skip", [False, True])
def test_projections_of_a_separate_checkpoint(bias: str, skip: bool):
    reference = separate(bias)
    ours = layer(bool(bias), skip_bias_add=skip)
    ours.load_state_dict(reference.state_dict())
    x, memory = torch.randn(2, 3, 24), torch.randn(2, 7, 24)
    q, kv, q_bias, kv_bias = ours(x, memory)
    assert (q_bias is None) == (kv_bias is None) == (not skip or not bias)
    if q_bias is not None:
        q, kv = q + q_bias, kv + kv_bias
    torch.testing.assert_close(q, reference["q_proj"](x))
    torch.testing.assert_close(kv[..., :16], reference["k_proj"](memory))
    torch.testing.assert_close(kv[..., 16:], reference["v_proj"](memory))


def test_decode_makes_no_keys_and_values(monkeypatch):
    ours = layer()
    made: list[int] = []
    linear = F.linear

    def count(x, *args):
        made.append(x.shape[0])
        return linear(x, *args)

    monkeypatch.setattr(F, "linear", count)
    q, kv, *biases = ours(torch.randn(5, 1, 24))
    assert q.shape == (5, 1, 32) and kv is None and biases == [None, None] and made == [5]
    # A batch in which only two requests are new: theirs are made, once.
    q, kv, *_ = ours(torch.randn(5, 1, 24), torch.randn(2, 7, 24))
    assert q.shape == (5, 1, 32) and kv.shape == (2, 7, 32) and made == [5, 5, 2]


def test_packed_checkpoints():
    reference = separate("qkv")
    q, k, v = (reference[f"{n}_proj"] for n in "qkv")
    weight = torch.cat([q.weight, k.weight, v.weight])
    bias = torch.cat([q.bias, k.bias, v.bias])
    kv = {"q_proj.weight": q.weight, "q_proj.bias": q.bias}
    kv |= {"kv_proj.weight": weight[32:], "kv_proj.bias": bias[32:]}
    expected = layer(True)
    expected.load_state_dict(reference.state_dict())
    for checkpoint in (
        {"qkv_proj.weight": weight, "qkv_proj.bias": bias},
        {"in_proj_weight": weight, "in_proj_bias": bias},
        kv,
        expected.state_dict(),
    ):
        ours = layer(True)
        ours.load_state_dict(dict(checkpoint))
        for name, value in expected.state_dict().items():
            assert torch.equal(ours.state_dict()[name], value), name


def test_a_checkpoint_that_does_not_fit_is_refused():
    with pytest.raises(RuntimeError, match=r"Missing key.*kv_weight"):
        layer().load_state_dict({"q_proj.weight": torch.randn(32, 24)})
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer().load_state_dict(separate(kv_heads=4).state_dict())
    with pytest.raises(RuntimeError, match="Unexpected key"):
        layer().load_state_dict(separate("k").state_dict())


@pytest.mark.parametrize(
    "sizes, text",
    [
        ((24, 8, 4, 3), "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
        ((24, 0, 4, 2), "head_dim must be positive, got 0"),
        ((24, 8, 4, -1), "num_kv_heads must be positive, got -1"),
    ],
)
def test_wrong_sizes(sizes: tuple[int, ...], text: str):
    with pytest.raises(ValueError, match=text):
        QCrossKVLinear(*sizes)


def _rank(rank: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        out: dict[str, Any] = {}
        for bias, skip, kv_heads in ((True, False, 2), (True, True, 4), (False, False, 2)):
            torch.manual_seed(0)
            whole = QCrossKVLinear(24, 8, 4, kv_heads, bias=bias, skip_bias_add=skip)
            checkpoint = separate("qkv" if bias else "", kv_heads=kv_heads).state_dict()
            x, memory = torch.randn(2, 3, 24), torch.randn(2, 7, 24, requires_grad=True)
            model = nn.ModuleDict({"cross": QCrossKVLinear(24, 8, 4, kv_heads, bias, skip)})
            parallelize_module(model, mesh, {"cross": ColwiseQCrossKV()})
            whole.load_state_dict(checkpoint)
            model["cross"].load_state_dict(checkpoint)
            expected, actual = whole(x, memory), model["cross"](x, memory)
            mine = [_heads(t, part, kv_heads, rank) for part, t in enumerate(expected)]
            for a, e in zip(actual, mine, strict=True):
                assert (a is None) == (e is None)
                if e is not None:
                    torch.testing.assert_close(a, e)
            if not skip:
                (gradient,) = torch.autograd.grad(expected[1].sum(), memory)
                (sharded,) = torch.autograd.grad(actual[1].sum(), memory)
                torch.testing.assert_close(sharded, gradient)
            assert model["cross"](x)[1] is None
        model = nn.ModuleDict({"cross": QCrossKVLinear(24, 8, 3, 3)})
        try:
            parallelize_module(model, mesh, {"cross": ColwiseQCrossKV()})
        except ValueError as error:
            out["refused"] = str(error)
        results[rank] = out
    finally:
        dist.destroy_process_group()


def _heads(whole: Any, part: int, kv_heads: int, rank: int) -> Any:
    """This rank's heads of q, kv, q_bias or kv_bias."""
    if whole is None:
        return None
    if part % 2 == 0:
        return whole.chunk(2, -1)[rank]
    return torch.cat([half.chunk(2, -1)[rank] for half in whole.chunk(2, -1)], -1)


def test_two_ranks_give_what_one_gives():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = mp.get_context("spawn").Manager().dict()
    mp.spawn(_rank, args=(port, results), nprocs=2)
    wanted = "num_kv_heads must be a multiple of the number of ranks, got 3 heads and 2 ranks"
    assert [results[r]["refused"] for r in (0, 1)] == [wanted, wanted]
