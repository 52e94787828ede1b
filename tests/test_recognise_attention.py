"""recognise_attention: every spelling is one attend, near misses say why, nothing changes value."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from harness import through, tidied
from torch import Tensor, fx, nn

from kvtailor.compiler.check import relative_error
from kvtailor.kernels.ops import attend
from kvtailor.passes.capture.capture import capture
from kvtailor.passes.graph import SITE, aten, is_call, sites
from kvtailor.passes.normalise import normalise
from kvtailor.passes.recognise_attention import recognise_attention
from kvtailor.passes.report import AttentionSite, PassReport
from kvtailor.passes.text import show

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "seeded")


@dataclass
class Seen:
    """What the pass made of one graph."""

    out: Any = None
    gm: fx.GraphModule = field(default_factory=lambda: fx.GraphModule({}, fx.Graph()))
    report: PassReport = field(default_factory=PassReport)

    @property
    def sites(self) -> list[AttentionSite]:
        return sites(self.gm)

    @property
    def attends(self) -> list[fx.Node]:
        return self.gm.graph.find_nodes(op="call_function", target=attend)

    @property
    def only(self) -> fx.Node:
        (node,) = self.attends
        assert node.meta[SITE] in self.sites
        return node

    def flags(self) -> dict[str, Any]:
        return dict(self.only.kwargs)

    @property
    def codes(self) -> list[str]:
        return [skip.code for skip in self.report.skipped]


def see(fn: Callable[..., Any], *args: Any, dynamic: bool = False, **kwargs: Any) -> Seen:
    """Run fn through capture, normalise and recognise_attention."""
    seen = Seen()

    def step(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        seen.gm = capture(gm, example_inputs)
        normalise(seen.gm)
        seen.gm.graph.eliminate_dead_code()
        seen.report = recognise_attention(seen.gm)
        tidied(seen.gm)
        assert all("val" in n.meta for n in seen.gm.graph.nodes if n.op != "output")
        again = recognise_attention(seen.gm)
        assert again.rewrites == 0
        del sites(seen.gm)[len(seen.report.skipped) + seen.report.rewrites :]
        return seen.gm.forward

    seen.out = through(step, fn, *args, dynamic=dynamic, fullgraph=True, **kwargs)
    return seen


def close(fn: Callable[..., Any], seen: Seen, *args: Tensor, tolerance: float = 1e-5) -> None:
    """fp32: within tolerance of eager. Half: no further from float64 than 1.5 times eager."""
    eager = fn(*args)
    assert eager.shape == seen.out.shape and eager.dtype == seen.out.dtype
    if eager.dtype in (torch.float32, torch.float64):
        assert relative_error([seen.out], [eager]) <= tolerance
        return
    exact = fn(*(a.double() if a.is_floating_point() else a for a in args))
    ours, theirs = ((x.double() - exact).abs().max().item() for x in (seen.out, eager))
    unit = torch.finfo(eager.dtype).eps * exact.abs().max().item()
    assert ours <= 1.5 * theirs + unit


# --- spellings of one attention without a mask ---------------------------------------------------

S = 0.3


def qkv(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q [2, 4, 6, 8], k and v [2, 4, 10, 8], spread wide enough that a wrong scale shows."""
    return [torch.randn(2, 4, t, 8, dtype=torch.float64).mul(2).to(dtype) for t in (6, 10, 10)]


def _softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1)


def _merged(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2], x.shape[3])


def _bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.bmm(_merged(q) * S, _merged(k).transpose(1, 2)).softmax(-1)
    return torch.bmm(weights, _merged(v)).view(q.shape)


def _baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q3, k3 = _merged(q), _merged(k)
    nothing = torch.empty(q3.shape[0], q3.shape[1], k3.shape[1], dtype=q.dtype)
    scores = torch.baddbmm(nothing, q3, k3.mT, beta=0, alpha=S)
    weights = scores.view(*q.shape[:3], -1).softmax(-1)
    return torch.bmm(weights.view(-1, *weights.shape[2:]), _merged(v)).view(q.shape)


def _tokens_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) * S).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).transpose(1, 2)


def _by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * S
    powers = torch.exp(scores - scores.amax(-1, keepdim=True))
    return powers / powers.sum(-1, keepdim=True) @ v


def _keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (k @ q.mT * S).softmax(-2)
    return (v.mT @ weights).mT


def _flattened_projection(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def split(x: Tensor) -> Tensor:
        flat = x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)
        return flat.view(x.shape[0], -1, 4, 8).permute(0, 2, 1, 3)

    return ((split(q) @ split(k).transpose(2, 3)) * S).softmax(-1) @ split(v)


SPELLINGS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "transpose": lambda q, k, v: (q @ k.transpose(-2, -1) * S).softmax(-1) @ v,
    "transpose-positive": lambda q, k, v: (q @ k.transpose(3, 2) * S).softmax(3) @ v,
    "permute": lambda q, k, v: (q @ k.permute(0, 1, 3, 2) * S).softmax(-1) @ v,
    "mT": lambda q, k, v: (q @ k.mT * S).softmax(-1) @ v,
    "swapaxes": lambda q, k, v: (q @ k.swapaxes(2, 3) * S).softmax(-1) @ v,
    "movedim": lambda q, k, v: (q @ k.movedim(3, 2) * S).softmax(-1) @ v,
    "div": lambda q, k, v: (q @ k.mT / (1 / S)).softmax(-1) @ v,
    "scale-first": lambda q, k, v: (S * (q @ k.mT)).softmax(-1) @ v,
    "scale-twice": lambda q, k, v: (q @ k.mT * (2 * S) / 2).softmax(-1) @ v,
    "scale-on-q": lambda q, k, v: ((q * S) @ k.mT).softmax(-1) @ v,
    "scale-on-k": lambda q, k, v: (q @ (k / (1 / S)).mT).softmax(-1) @ v,
    "scale-on-k-transposed": lambda q, k, v: (q @ (k.mT * S)).softmax(-1) @ v,
    "scale-on-both": lambda q, k, v: ((q * S**0.5) @ (k * S**0.5).mT).softmax(-1) @ v,
    "scale-on-q-and-scores": lambda q, k, v: ((q * 2.0) @ k.mT * (S / 2)).softmax(-1) @ v,
    "bmm": _bmm,
    "baddbmm": _baddbmm,
    "einsum": lambda q, k, v: torch.einsum(
        "bhqk,bhkd->bhqd", (torch.einsum("bhqd,bhkd->bhqk", q, k) * S).softmax(-1), v
    ),
    "einsum-tokens-first": _tokens_first,
    "einsum-ellipsis": lambda q, k, v: torch.einsum(
        "...qk,...kd->...qd", (torch.einsum("...qd, ...kd -> ...qk", q, k) * S).softmax(-1), v
    ),
    "softmax-function": lambda q, k, v: F.softmax(q @ k.mT * S, dim=-1) @ v,
    "softmax-fp32": lambda q, k, v: (
        F.softmax(q @ k.mT * S, -1, dtype=torch.float32).to(q.dtype) @ v
    ),
    "scores-fp32": lambda q, k, v: (q @ k.mT * S).float().softmax(-1).type_as(v) @ v,
    "qk-fp32": lambda q, k, v: (q.float() @ k.float().mT * S).softmax(-1).to(v.dtype) @ v,
    "softmax-by-hand": _by_hand,
    "maximum-taken-off": lambda q, k, v: (
        _softmax((s := q @ k.mT * S) - s.max(-1, keepdim=True).values) @ v
    ),
    "dropout-0": lambda q, k, v: F.dropout((q @ k.mT * S).softmax(-1), 0.0) @ v,
    "dropout-eval": lambda q, k, v: F.dropout((q @ k.mT * S).softmax(-1), 0.5, False) @ v,
    "contiguous": lambda q, k, v: (q.contiguous() @ k.mT.contiguous() * S).softmax(-1) @ v.clone(),
    "keys-first": _keys_first,
    "from-projections": _flattened_projection,
    "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=S),
    "sdpa-keywords": lambda q, k, v: F.scaled_dot_product_attention(
        query=q, key=k, value=v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=S
    ),
    "sdpa-scale-on-q": lambda q, k, v: F.scaled_dot_product_attention(q * S, k, v, scale=1.0),
}

FP = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", FP, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str, dtype: torch.dtype) -> None:
    args = qkv(dtype)
    seen = see(SPELLINGS[name], *args)
    close(SPELLINGS[name], seen, *args)
    _is_the_one(seen)


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling_dynamic(name: str) -> None:
    args = qkv()
    seen = see(SPELLINGS[name], *args, dynamic=True)
    close(SPELLINGS[name], seen, *args)
    _is_the_one(seen, dynamic=True)


def _is_the_one(seen: Seen, dynamic: bool = False) -> None:
    """attend on the three inputs themselves, with the one scale."""
    flags = seen.flags()
    scale = flags.pop("scale")
    assert flags == {} and len(seen.only.args) == 3
    operands: list[Any] = list(seen.only.args)
    scaled = any(is_call(x, aten.mul, aten.div) for x in seen.gm.graph.nodes)
    assert dynamic or not scaled
    if not scaled:
        assert math.isclose(scale, S, rel_tol=1e-6)
    for x in operands:
        # A scale that is an input of the graph multiplies q or k.
        while scaled and x.op != "placeholder":
            assert is_call(x, aten.mul, aten.div, aten.reshape, aten.permute)
            x = x.args[0]
        assert x.op == "placeholder"
    assert len(seen.sites) == 1 and not seen.sites[0].cross


def test_scale_as_tensor_or_input() -> None:
    """D02, D08: a scale that is no constant multiplies q."""
    q, k, v = qkv()
    forms: list[Callable[..., Tensor]] = [
        lambda q, k, v, c: (q @ k.mT * c).softmax(-1) @ v,
        lambda q, k, v, c: (q @ k.mT / c).softmax(-1) @ v,
    ]
    shapes = [(), (1,), (1, 4, 1, 1), (2, 1, 6, 1)]
    for form in forms:
        for shape in shapes:
            c = torch.rand(shape) + 0.5
            seen = see(form, q, k, v, c)
            close(form, seen, q, k, v, c)
            assert seen.flags() == {"scale": 1.0}
    number = see(lambda q, k, v, c: (q @ k.mT * c).softmax(-1) @ v, q, k, v, 0.7, dynamic=True)
    assert relative_error([number.out], [(q @ k.mT * 0.7).softmax(-1) @ v]) < 1e-5
    sdpa = see(
        lambda q, k, v, c: F.scaled_dot_product_attention(q, k, v, scale=c),
        q,
        k,
        v,
        0.7,
        dynamic=True,
    )
    assert relative_error([sdpa.out], [(q @ k.mT * 0.7).softmax(-1) @ v]) < 1e-5
    assert number.flags() == {"scale": 1.0} and len(sdpa.attends) == 1


def test_scale_that_is_not_the_default() -> None:
    """D02: head_dim 16, scores divided by 8 ** -0.5."""
    q, k, v = (torch.randn(1, 2, 4, 16) for _ in range(3))
    forms: list[Callable[..., Tensor]] = [
        lambda q, k, v: (q @ k.mT / 8**-0.5).softmax(-1) @ v,
        lambda q, k, v: ((q / 8**-0.5) @ k.mT).softmax(-1) @ v,
        lambda q, k, v: ((q * 8**0.25) @ (k * 8**0.25).mT).softmax(-1) @ v,
    ]
    for form in forms:
        seen = see(form, q, k, v)
        close(form, seen, q, k, v)
        assert math.isclose(seen.flags()["scale"], 8**0.5, rel_tol=1e-6)


_TRANSPOSES: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda k: k.transpose(-2, -1),
    "permute": lambda k: k.permute(0, 1, 3, 2),
    "mT": lambda k: k.mT,
}


@pytest.mark.parametrize("turn", _TRANSPOSES)
@pytest.mark.parametrize("scale", ["div", "mul"])
@pytest.mark.parametrize("first", ["scores", "mask"])
def test_twelve_orders(first: str, scale: str, turn: str) -> None:
    """D03."""

    def form(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        scores = q @ _TRANSPOSES[turn](k)
        scores = scores / 4 if scale == "div" else scores * 0.25
        scores = scores + m if first == "scores" else m + scores
        return scores.softmax(-1) @ v

    args = [*qkv(), torch.randn(1, 1, 6, 10)]
    seen = see(form, *args)
    close(form, seen, *args)
    assert seen.flags() == {"scale": 0.25}
    assert seen.only.args[3] in seen.gm.graph.find_nodes(op="placeholder")


# --- masks ---------------------------------------------------------------------------------------

MIN = torch.finfo(torch.float32).min
INF = float("inf")


def adversarial(*shape: int) -> Tensor:
    """A bool mask with an empty first row, a last row of one key, and anything between."""
    mask = torch.rand(shape) < 0.5
    mask[..., 0, :] = False
    mask[..., -1, :] = False
    mask[..., -1, 3] = True
    return mask


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * S


def _added(m: Tensor, q: Tensor, value: float) -> Tensor:
    return torch.zeros(m.shape, dtype=q.dtype).masked_fill(~m, value)


def _min(x: Tensor) -> float:
    return torch.finfo(x.dtype).min


# name -> function of q, k, v, bool mask m, bias b; and what attend must carry: the dtype of its
# mask ("bool" or "float"), what an empty row gets, whether rows must become NaN.
MASKED: dict[str, tuple[Callable[..., Tensor], str, str, bool]] = {
    "fill-min": (
        lambda q, k, v, m, b: _scores(q, k).masked_fill(~m, _min(q)).softmax(-1) @ v,
        "bool",
        "uniform",
        False,
    ),
    "fill-minus-1e9": (
        lambda q, k, v, m, b: _scores(q, k).masked_fill(~m, max(_min(q), -1e9)).softmax(-1) @ v,
        "bool",
        "uniform",
        False,
    ),
    "fill-minus-inf": (
        lambda q, k, v, m, b: _scores(q, k).masked_fill(~m, -INF).softmax(-1) @ v,
        "bool",
        "zero",
        True,
    ),
    "where-min": (
        lambda q, k, v, m, b: torch.where(m, _scores(q, k), _min(q)).softmax(-1) @ v,
        "bool",
        "uniform",
        False,
    ),
    "where-not-min": (
        lambda q, k, v, m, b: torch.where(~m, _min(q), _scores(q, k)).softmax(-1) @ v,
        "bool",
        "uniform",
        False,
    ),
    "where-tensor": (
        lambda q, k, v, m, b: (
            torch.where(m, _scores(q, k), torch.full([], _min(q), dtype=q.dtype)).softmax(-1) @ v
        ),
        "bool",
        "uniform",
        False,
    ),
    "where-minus-inf": (
        lambda q, k, v, m, b: torch.where(m, _scores(q, k), -INF).softmax(-1) @ v,
        "bool",
        "zero",
        True,
    ),
    "two-fills": (
        lambda q, k, v, m, b: (
            _scores(q, k)
            .masked_fill(~m, _min(q))
            .masked_fill(torch.ones(6, 10, dtype=torch.bool).triu(5), _min(q))
            .softmax(-1)
            @ v
        ),
        "bool",
        "uniform",
        False,
    ),
    "add-min": (
        lambda q, k, v, m, b: (_scores(q, k) + _added(m, q, _min(q))).softmax(-1) @ v,
        "float",
        "zero",
        False,
    ),
    "add-minus-inf": (
        lambda q, k, v, m, b: (_added(m, q, -INF) + _scores(q, k)).softmax(-1) @ v,
        "float",
        "zero",
        True,
    ),
    "subtract": (
        lambda q, k, v, m, b: (_scores(q, k) - _added(m, q, 1.0) * 1e4).softmax(-1) @ v,
        "float",
        "zero",
        False,
    ),
    "add-bias": (
        lambda q, k, v, m, b: (_scores(q, k) + b).softmax(-1) @ v,
        "float",
        "zero",
        True,
    ),
    "bias-then-min": (
        lambda q, k, v, m, b: (_scores(q, k) + b.tanh() + _added(m, q, _min(q))).softmax(-1) @ v,
        "float",
        "zero",
        True,
    ),
    "bias-then-fill": (
        lambda q, k, v, m, b: (_scores(q, k) + b).masked_fill(~m, _min(q)).softmax(-1) @ v,
        "float",
        "zero",
        True,
    ),
    "fill-then-bias": (
        lambda q, k, v, m, b: (_scores(q, k).masked_fill(~m, -INF) + b).softmax(-1) @ v,
        "float",
        "zero",
        True,
    ),
    "baddbmm-bias": (
        lambda q, k, v, m, b: torch.bmm(
            torch.baddbmm(
                b.expand(2, 4, 6, 10).reshape(8, 6, 10), _merged(q), _merged(k).mT, alpha=S
            ).softmax(-1),
            _merged(v),
        ).view(q.shape),
        "float",
        "zero",
        True,
    ),
    "sdpa-bool": (
        lambda q, k, v, m, b: F.scaled_dot_product_attention(q, k, v, m, scale=S),
        "bool",
        "zero",
        False,
    ),
    "sdpa-min": (
        lambda q, k, v, m, b: F.scaled_dot_product_attention(
            q, k, v, _added(m, q, _min(q)), scale=S
        ),
        "float",
        "zero",
        False,
    ),
    "sdpa-minus-inf": (
        lambda q, k, v, m, b: F.scaled_dot_product_attention(q, k, v, _added(m, q, -INF), scale=S),
        "float",
        "zero",
        False,
    ),
}


def _check_mask(name: str, seen: Seen, *args: Tensor) -> None:
    form, kind, empty_row, nan = MASKED[name]
    eager = form(*args)
    assert torch.equal(seen.out.isnan(), eager.isnan())
    exact = form(*(a.double() if a.is_floating_point() else a for a in args))
    ours, theirs = ((x.double() - exact).nan_to_num().abs().max().item() for x in (seen.out, eager))
    unit = 8 * torch.finfo(eager.dtype).eps * exact.nan_to_num().abs().max().item()
    assert ours <= 1.5 * theirs + unit, (ours, theirs)
    mask = seen.only.args[3]
    assert isinstance(mask, fx.Node)
    is_bool = mask.meta["val"].dtype == torch.bool
    assert is_bool == (kind == "bool")
    assert seen.flags().get("empty_row", "zero") == empty_row
    assert ("nan" in show(seen.gm)) == nan


@pytest.mark.parametrize("dtype", FP, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", MASKED)
def test_masked(name: str, dtype: torch.dtype) -> None:
    """Empty rows and partial masks come out as in eager mode, NaN included."""
    args = [*qkv(dtype), adversarial(2, 1, 6, 10), torch.randn(4, 6, 10).to(dtype)]
    _check_mask(name, see(MASKED[name][0], *args), *args)


@pytest.mark.parametrize("name", [n for n in MASKED if n not in ("two-fills", "baddbmm-bias")])
def test_masked_dynamic(name: str) -> None:
    args = [*qkv(), adversarial(2, 1, 6, 10), torch.randn(4, 6, 10)]
    _check_mask(name, see(MASKED[name][0], *args, dynamic=True), *args)


@pytest.mark.parametrize(
    "shape", [(6, 10), (10,), (2, 1, 1, 10), (1, 4, 6, 10), (2, 4, 6, 1), (4, 1, 10)]
)
def test_mask_shapes(shape: tuple[int, ...]) -> None:
    """Whatever broadcasts stays as thin as it was, and has four dimensions."""
    mask = torch.rand(shape) < 0.7
    for form in (MASKED["fill-min"][0], MASKED["sdpa-bool"][0])[: len(shape)]:
        args = [*qkv(), mask, torch.zeros(1)]
        seen = see(form, *args)
        close(form, seen, *args)
        thin = (1,) * (4 - len(shape)) + shape
        assert tuple(seen.only.args[3].meta["val"].shape) == thin  # type: ignore[union-attr]


def test_sites_share_a_mask_of_fewer_dimensions() -> None:
    def form(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        for _ in range(3):
            q = F.scaled_dot_product_attention(q, k, v, m)
        return q

    seen = see(form, *qkv(), torch.rand(6, 10) < 0.7)
    assert len(seen.attends) == 3 and len({node.args[3] for node in seen.attends}) == 1


def test_rows_never_empty_need_no_nan() -> None:
    """-inf above the diagonal: a constant mask is looked at, an input is not."""

    def constant(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.ones(6, 10, dtype=torch.bool).triu(5)
        return _scores(q, k).masked_fill(hidden, -INF).softmax(-1) @ v

    def additive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (_scores(q, k) + torch.full((6, 10), -INF).triu(5)).softmax(-1) @ v

    def one_empty(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.ones(6, 10, dtype=torch.bool).triu(0)
        return _scores(q, k).masked_fill(hidden, -INF).softmax(-1) @ v

    for form, nan in ((constant, False), (additive, False), (one_empty, True)):
        seen = see(form, *qkv())
        expected = form(*qkv())
        assert ("nan" in show(seen.gm)) == nan
        assert seen.flags() == {"scale": S}
        assert expected.isnan().any() == nan
        torch._dynamo.reset()


def test_wholly_masked_rows() -> None:
    """M01: bool and -inf SDPA give 0, finfo.min the mean of v, in the rewritten graph too."""
    x = torch.randn(1, 1, 4, 8)
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    causal[0] = False
    zero, mean = torch.zeros(8), x[0, 0].mean(0)
    for mask, expected in (
        (causal, zero),
        (torch.zeros(4, 4).masked_fill(~causal, -INF), zero),
        (torch.zeros(4, 4).masked_fill(~causal, MIN), mean),
    ):
        seen = see(lambda x, m: F.scaled_dot_product_attention(x, x, x, m), x, mask)
        torch.testing.assert_close(seen.out[0, 0, 0], expected)
        torch.testing.assert_close(seen.out, F.scaled_dot_product_attention(x, x, x, mask))
        assert len(seen.attends) == 1


def test_float32_minimum_over_float16() -> None:
    """D04: a float32 mask is never cast to the scores' float16."""
    q, k, v = (torch.randn(1, 2, 4, 16).half() for _ in range(3))
    mask = torch.zeros(1, 1, 4, 4)
    mask[:, :, 0] = MIN
    forms: list[Callable[..., Tensor]] = [
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        lambda q, k, v, m: (q @ k.mT / 4 + m).softmax(-1).half() @ v,
    ]
    for form in forms:
        seen = see(form, q, k, v, mask)
        assert not seen.out.isnan().any()
        mean = v.float().mean(2)
        torch.testing.assert_close(seen.out[:, :, 0].float(), mean, atol=1e-3, rtol=0)
        assert seen.only.args[3].meta["val"].dtype == torch.float32  # type: ignore[union-attr]


# --- softcap and sinks ---------------------------------------------------------------------------


def test_softcap() -> None:
    """M10: scores [5, 0] capped at 1 give a first weight of 0.7310, 0.9933 uncapped."""
    q = torch.tensor([[[[5.0]]]])
    k = torch.tensor([[[[1.0], [0.0]]]])
    v = torch.tensor([[[[1.0], [0.0]]]])
    cap = 1.0

    def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (torch.tanh(q @ k.mT / cap) * cap).softmax(-1) @ v

    seen = see(capped, q, k, v)
    assert abs(seen.out.item() - 0.7310) < 1e-4
    assert seen.flags() == {"scale": 1.0, "softcap": 1.0}
    assert seen.sites[0].softcap == 1.0


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_softcap_between_scale_and_mask(dynamic: bool) -> None:
    m = adversarial(2, 1, 6, 10)
    forms: list[Callable[..., Tensor]] = [
        lambda q, k, v, m: (
            (20.0 * torch.tanh(_scores(q, k) / 20.0)).masked_fill(~m, MIN).softmax(-1) @ v
        ),
        lambda q, k, v, m: (
            torch.where(m, torch.tanh(q @ k.mT * (S / 20.0)) * 20.0, MIN).softmax(-1) @ v
        ),
    ]
    for form in forms:
        args = [*qkv(), m]
        seen = see(form, *args, dynamic=dynamic)
        close(form, seen, *args)
        assert math.isclose(seen.flags()["softcap"], 20.0)
        assert seen.flags()["empty_row"] == "uniform"


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, take_off: bool) -> Tensor:
    scores = q @ k.mT * S
    T, K = scores.shape[-2:]
    scores = scores.masked_fill(torch.ones(T, K, dtype=torch.bool).triu(1), MIN)
    column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, T, 1)
    joined = torch.cat([scores, column], dim=-1)
    if take_off:
        joined = joined - joined.max(dim=-1, keepdim=True).values
    return joined.softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("take_off", [False, True], ids=["plain", "maximum-taken-off"])
def test_sinks(take_off: bool) -> None:
    """M08: one sink per head counts once, in the denominator."""
    v = torch.randn(1, 4, 4, 8)
    q = torch.zeros(1, 4, 4, 8)
    k = torch.randn(1, 4, 4, 8)
    zero = see(_with_sinks, q, k, v, torch.zeros(4), take_off)
    for i in range(4):
        expected = v[:, :, : i + 1].mean(2) * (i + 1) / (i + 2)
        torch.testing.assert_close(zero.out[:, :, i], expected)
    assert zero.sites[0].sinks and zero.only.args[6].op == "placeholder"  # type: ignore[union-attr]

    q = torch.randn(1, 4, 4, 8)
    plain = see(_with_sinks, q, k, v, torch.full((4,), -INF), take_off)
    causal = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=S)
    torch.testing.assert_close(plain.out, causal)


def test_sinks_follow_grouped_heads() -> None:
    """M08: 4 query heads on 2 key heads, four different sinks."""

    def grouped(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return _with_sinks(q, _repeat_kv(k, 2), _repeat_kv(v, 2), sinks, True)

    q = torch.randn(2, 4, 6, 8)
    k, v = torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    sinks = torch.tensor([-2.0, 0.0, 1.0, 4.0])
    seen = see(grouped, q, k, v, sinks)
    close(grouped, seen, q, k, v, sinks)
    assert seen.only.args[1].op == "placeholder"  # type: ignore[union-attr]


# --- heads ---------------------------------------------------------------------------------------


def _repeat_kv(x: Tensor, n: int) -> Tensor:
    B, H, T, D = x.shape
    return x[:, :, None].expand(B, H, n, T, D).reshape(B, H * n, T, D)


def _five_dims(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    B, H, T, D = q.shape
    grouped = q.view(B, k.shape[1], H // k.shape[1], T, D)
    weights = (grouped @ k.unsqueeze(2).mT * S).softmax(-1)
    return (weights @ v.unsqueeze(2)).view(B, H, T, v.shape[-1])


def _group_as_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    B, H, T, D = q.shape
    rows = q.reshape(B, k.shape[1], -1, D)
    return ((rows @ k.mT * S).softmax(-1) @ v).view(B, H, T, D)


GROUPED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "repeat_kv": lambda q, k, v: (q @ _repeat_kv(k, 2).mT * S).softmax(-1) @ _repeat_kv(v, 2),
    "repeat_interleave": lambda q, k, v: (
        (q @ k.repeat_interleave(2, 1).mT * S).softmax(-1) @ v.repeat_interleave(2, dim=1)
    ),
    "five-dims": _five_dims,
    "sdpa-repeat_kv": lambda q, k, v: F.scaled_dot_product_attention(
        q, _repeat_kv(k, 2), _repeat_kv(v, 2), scale=S
    ),
    "sdpa-enable_gqa": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, scale=S, enable_gqa=True
    ),
    "sdpa-tokens-first": lambda q, k, v: F.scaled_dot_product_attention(
        q,
        k.transpose(1, 2).repeat_interleave(2, 2).transpose(1, 2),
        v.transpose(1, 2).repeat_interleave(2, 2).transpose(1, 2),
        scale=S,
    ),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", GROUPED)
def test_grouped_heads(name: str, dynamic: bool) -> None:
    """Keys and values reach attend as they are, two query heads on each."""
    form = GROUPED[name]
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 10, 8), torch.randn(2, 2, 10, 8)
    if dynamic:
        for x in (q, k, v):
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 2)
    seen = see(form, q, k, v)
    close(form, seen, q, k, v)
    assert [x.op for x in seen.only.args[1:3]] == ["placeholder"] * 2  # type: ignore[union-attr]


def test_head_map() -> None:
    """M13: query heads 0, 1 read key head 0. Tiled heads are another map, and stay one."""
    q = torch.randn(1, 4, 4, 8)
    k = torch.randn(1, 2, 4, 8)
    v = torch.stack([torch.zeros(4, 8), torch.ones(4, 8)])[None]
    for name, form in GROUPED.items():
        seen = see(form, q, k, v)
        assert seen.out.mean((0, 2, 3)).round(decimals=5).tolist() == [0, 0, 1, 1], name
        torch._dynamo.reset()

    def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.repeat(1, 2, 1, 1).mT * S).softmax(-1) @ v.repeat(1, 2, 1, 1)

    seen = see(tiled, q, k, v)
    assert seen.out.mean((0, 2, 3)).round(decimals=5).tolist() == [0, 1, 0, 1]
    close(tiled, seen, q, k, v)
    assert seen.only.args[1].op == "placeholder"  # type: ignore[union-attr]


def test_one_key_head_for_all() -> None:
    forms: list[Callable[..., Tensor]] = [
        lambda q, k, v: (q @ k.mT * S).softmax(-1) @ v,
        lambda q, k, v: torch.einsum(
            "bqhk,bkd->bqhd",
            (torch.einsum("bqhd,bkd->bqhk", q.transpose(1, 2), k[:, 0]) * S)
            .masked_fill(torch.ones(6, 1, 10, dtype=torch.bool).triu(5), MIN)
            .softmax(-1),
            v[:, 0],
        ),
    ]
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 1, 10, 8), torch.randn(2, 1, 10, 8)
    for form in forms:
        seen = see(form, q, k, v)
        close(form, seen, q, k, v)
        shapes = [tuple(x.meta["val"].shape) for x in seen.only.args[:3]]  # type: ignore[union-attr]
        assert shapes == [(2, 4, 6, 8), (2, 1, 10, 8), (2, 1, 10, 8)]


def test_group_as_rows() -> None:
    """Query heads laid out as rows: still right, as more rows on each key head."""
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 10, 8), torch.randn(2, 2, 10, 8)
    seen = see(_group_as_rows, q, k, v)
    close(_group_as_rows, seen, q, k, v)
    assert len(seen.attends) == 1


# --- forms of the SDPA call ----------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_causal_flag_is_top_left(dynamic: bool) -> None:
    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    for T, K in ((6, 6), (3, 7), (7, 3), (1, 5)):
        q, k, v = torch.randn(2, 4, T, 8), torch.randn(2, 4, K, 8), torch.randn(2, 4, K, 8)
        seen = see(form, q, k, v, dynamic=dynamic and T > 1)
        close(form, seen, q, k, v)
        assert seen.flags()["causal"] is True and "q_offset" not in seen.flags()
        torch._dynamo.reset()


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_ranks(rank: int) -> None:
    lead = (3, 2, 4)[: rank - 2]
    q, k, v = torch.randn(*lead, 6, 8), torch.randn(*lead, 10, 8), torch.randn(*lead, 10, 5)
    mask = torch.rand(6, 10) < 0.8
    forms: list[Callable[..., Tensor]] = [
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        lambda q, k, v, m: (q @ k.mT * S).masked_fill(~m, MIN).softmax(-1) @ v,
    ]
    for form in forms:
        seen = see(form, q, k, v, mask)
        close(form, seen, q, k, v, mask)
        assert len(seen.attends) == 1


def test_broadcast_batch() -> None:
    q, k, v = torch.randn(1, 4, 6, 8), torch.randn(3, 4, 10, 8), torch.randn(3, 1, 10, 8)
    forms: list[Callable[..., Tensor]] = [
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        lambda q, k, v: (q @ k.mT * S).softmax(-1) @ v,
    ]
    for form in forms:
        seen = see(form, q, k, v)
        close(form, seen, q, k, v)
        assert len(seen.attends) == 1


def test_one_key_or_one_row() -> None:
    for T, K in ((1, 1), (1, 5), (5, 1)):
        q, k, v = torch.randn(2, 4, T, 8), torch.randn(2, 4, K, 8), torch.randn(2, 4, K, 8)
        for name in ("mT", "bmm", "baddbmm", "einsum-tokens-first", "keys-first", "sdpa"):
            seen = see(SPELLINGS[name], q, k, v)
            close(SPELLINGS[name], seen, q, k, v)
            assert len(seen.attends) == 1, (name, T, K)
            torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("first", ["scores", "mask"])
def test_mask_that_is_a_matmul(first: str, dynamic: bool) -> None:
    """Told from the scores by being the same for all heads; with one head nothing tells them."""

    def form(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        scores, mask = q @ k.mT * S, (hidden @ hidden.mT * MIN)[:, None]
        return (scores + mask if first == "scores" else mask + scores).softmax(-1) @ v

    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    hidden = torch.tensor([[0.0, 0, 0, 1, 1, 0], [1.0] * 6])[..., None]
    seen = see(form, q, k, v, hidden, dynamic=dynamic)
    close(form, seen, q, k, v, hidden)
    assert seen.only.args[0].meta["val"].shape[1] == 4
    assert is_call(seen.only.args[3], aten.unsqueeze, aten.view, aten.mul)
    torch._dynamo.reset()
    seen = see(form, q[:, :1], k[:, :1], v[:, :1], hidden)
    assert seen.codes == ["ambiguous"] and seen.attends == []


# --- near misses ---------------------------------------------------------------------------------

M = torch.rand(2, 1, 6, 10, generator=torch.Generator().manual_seed(1)) < 0.7


def _drop_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    joined = torch.cat([_scores(q, k), torch.zeros(2, 4, 6, 1)], -1)
    return joined.softmax(-1)[..., 1:] @ v


def _sink_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    joined = torch.cat([torch.zeros(2, 4, 6, 1), _scores(q, k)], -1)
    return joined.softmax(-1)[..., 1:] @ v


def _sink_kept(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    joined = torch.cat([_scores(q, k), torch.zeros(2, 4, 6, 1)], -1)
    return joined.softmax(-1) @ torch.cat([v, v[:, :, :1]], 2)


def _sink_per_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    joined = torch.cat([_scores(q, k), q.sum(-1, keepdim=True)], -1)
    return joined.softmax(-1)[..., :-1] @ v


NEAR: dict[str, tuple[str, Callable[..., Any]]] = {
    "dropout": ("dropout", lambda q, k, v: F.dropout(_softmax(_scores(q, k)), 0.5) @ v),
    "sdpa-dropout": (
        "dropout",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5),
    ),
    "weights-returned": (
        "weights-used",
        lambda q, k, v: ((w := _softmax(_scores(q, k))) @ v, w),
    ),
    "weights-used": ("weights-used", lambda q, k, v: (w := _softmax(_scores(q, k))) @ v + w.mean()),
    "scores-used": (
        "scores-used",
        lambda q, k, v: ((s := _scores(q, k)).softmax(-1) @ v, s.argmax(-1)),
    ),
    "weights-scaled": ("weights", lambda q, k, v: _softmax(_scores(q, k)) * 2 @ v),
    "weights-masked": ("weights", lambda q, k, v: _softmax(_scores(q, k)).masked_fill(~M, 0) @ v),
    "mask-before-scale": ("order", lambda q, k, v: ((q @ k.mT + M.float()) * S).softmax(-1) @ v),
    "mask-before-cap": (
        "order",
        lambda q, k, v: (torch.tanh((_scores(q, k) + M.float()) / 5) * 5).softmax(-1) @ v,
    ),
    "cap-twice": (
        "softcap",
        lambda q, k, v: torch.tanh(torch.tanh(_scores(q, k))).softmax(-1) @ v,
    ),
    "cap-negative": ("softcap", lambda q, k, v: (-2 * torch.tanh(_scores(q, k))).softmax(-1) @ v),
    "cap-tensor": (
        "softcap",
        lambda q, k, v: (torch.tanh(_scores(q, k)) * q.mean()).softmax(-1) @ v,
    ),
    "two-matmuls": (
        "ambiguous",
        lambda q, k, v: (_scores(q, k) + (q + 1) @ (k + 1).mT).softmax(-1) @ v,
    ),
    "other-dimension": ("values", lambda q, k, v: _scores(q, k).softmax(-2) @ v),
    "over-heads": ("keys", lambda q, k, v: _scores(q, k).softmax(1) @ v),
    "heads-summed": (
        "values",
        lambda q, k, v: torch.einsum("bhqk,bhkd->bqd", _softmax(_scores(q, k)), v),
    ),
    "fill-visible": ("fill", lambda q, k, v: _scores(q, k).masked_fill(~M, -5.0).softmax(-1) @ v),
    "fill-minus-1e4": (
        "fill",
        lambda q, k, v: _scores(q, k).masked_fill(~M, -1e4).softmax(-1) @ v,
    ),
    "fill-nan": ("fill", lambda q, k, v: _scores(q, k).masked_fill(~M, math.nan).softmax(-1) @ v),
    "fill-then-bias": (
        "fill",
        lambda q, k, v: (_scores(q, k).masked_fill(~M, -1e9) + q.mean()).softmax(-1) @ v,
    ),
    "two-fill-values": (
        "fill",
        lambda q, k, v: (
            _scores(q, k).masked_fill(~M, -1e9).masked_fill(M.flip(3), -1e8).softmax(-1) @ v
        ),
    ),
    "fill-unknown": (
        "fill",
        lambda q, k, v: torch.where(M, _scores(q, k), q.mean()).softmax(-1) @ v,
    ),
    "minimum-cast-down": (
        "range",
        lambda q, k, v: _scores(q, k).masked_fill(~M, MIN).bfloat16().softmax(-1).float() @ v,
    ),
    "added-minimum-cast-down": (
        "range",
        lambda q, k, v: (
            (
                _scores(q.double(), k.double())
                + torch.zeros(M.shape, dtype=torch.float64).masked_fill(~M, -1e300)
            )
            .softmax(-1, dtype=torch.float32)
            .float()
            @ v
        ),
    ),
    "clamp": ("scores", lambda q, k, v: _scores(q, k).clamp(-5, 5).softmax(-1) @ v),
    "scores-sliced": ("scores", lambda q, k, v: _scores(q, k)[..., :5].softmax(-1) @ v[:, :, :5]),
    "divided-by-scores": ("scores", lambda q, k, v: (1 / _scores(q, k)).softmax(-1) @ v),
    "per-key-scale": (
        "layout",
        lambda q, k, v: (_scores(q, k) * v.mean(-1)[:, :, None]).softmax(-1) @ v,
    ),
    "sink-dropped-first": ("sinks", _drop_first),
    "sink-first": ("sinks", _sink_first),
    "sink-kept": ("sinks", _sink_kept),
    "sink-per-row": ("layout", _sink_per_row),
    "three-operands": (
        "scores",
        lambda q, k, v: torch.einsum("bhqd,bhkd,hd->bhqk", q, k, torch.ones(4, 8)).softmax(-1) @ v,
    ),
    "no-values": ("weights", lambda q, k, v: _softmax(_scores(q, k)).sum(-1)),
    "result-scaled-inside": (
        "values",
        lambda q, k, v: torch.baddbmm(
            _merged(q), _merged(_softmax(_scores(q, k))), _merged(v), alpha=2
        ),
    ),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_miss(name: str) -> None:
    """Left as it was, with a reason in the report and on the site."""
    code, form = NEAR[name]
    args = qkv()
    torch.manual_seed(3)
    seen = see(form, *args)
    assert seen.codes == [code]
    assert seen.attends == [] and seen.report.rewrites == 0
    (site,) = seen.sites
    assert site.lowering == "untouched" and site.reason == seen.report.skipped[0].why
    if "dropout" not in name:
        assert torch.equal(
            torch.utils._pytree.tree_leaves(seen.out)[0].nan_to_num(),
            torch.utils._pytree.tree_leaves(form(*args))[0].nan_to_num(),
        )


@pytest.mark.parametrize("weight", ["linear", "matmul"])
def test_router_is_no_attention(weight: str) -> None:
    """A softmax over a projection is not even a near miss."""
    router = nn.Linear(8, 10, bias=False)

    def form(x: Tensor, experts: Tensor) -> Tensor:
        logits = router(x) if weight == "linear" else x @ router.weight.T
        return logits.softmax(-1) @ experts

    seen = see(form, torch.randn(2, 6, 8), torch.randn(2, 10, 8))
    assert seen.sites == [] and seen.report.skipped == []


def test_module_of_torch() -> None:
    """nn.MultiheadAttention: SDPA on merged projections, or averaged weights that it returns."""
    module = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.randn(2, 6, 32)
    seen = see(lambda x: module(x, x, x, need_weights=False)[0], x)
    torch.testing.assert_close(seen.out, module(x, x, x, need_weights=False)[0])
    assert [tuple(n.meta["val"].shape) for n in seen.attends] == [(2, 4, 6, 8)]
    torch._dynamo.reset()
    seen = see(lambda x: module(x, x, x)[0], x)
    assert len(seen.attends) == 1
    torch._dynamo.reset()
    assert see(lambda x: module(x, x, x), x).codes == ["weights-used"]


# --- golden --------------------------------------------------------------------------------------


def test_golden_eager_llama_like() -> None:
    def form(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        k, v = _repeat_kv(k, 2), _repeat_kv(v, 2)
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.5 + mask
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        out = torch.matmul(weights, v).transpose(1, 2).contiguous()
        return out.reshape(*out.shape[:2], -1)

    kv = torch.randn(2, 2, 6, 8).bfloat16()
    seen = see(form, torch.randn(2, 4, 6, 8).bfloat16(), kv, kv + 1, torch.zeros(6, 6).bfloat16())
    assert_expected_inline(
        show(seen.gm),
        """\
%0: bfloat16[2, 2, 6, 8] = input
%1: bfloat16[2, 2, 6, 8] = input
%2: bfloat16[2, 4, 6, 8] = input
%3: bfloat16[6, 6] = input
%4: bfloat16[1, 6, 6] = aten::unsqueeze(%3, 0)
%5: bfloat16[1, 1, 6, 6] = aten::unsqueeze(%4, 0)
%6: bfloat16[1, 1, 6, 1] = aten::amax(%5, [-1], True)
%7: bool[1, 1, 6, 1] = aten::eq.Scalar(%6, -inf)
%8: bfloat16[2, 4, 6, 8] = kvtailor::attend(%2, %0, %1, %5, scale=0.5)
%9: bfloat16[2, 4, 6, 8] = aten::where.ScalarSelf(%7, nan, %8)
%10: bfloat16[2, 6, 4, 8] = aten::permute(%9, [0, 2, 1, 3])
%11: bfloat16[2, 6, 4, 8] = aten::clone(%10, memory_format=torch.contiguous_format)
%12: bfloat16[2, 6, 32] = aten::reshape(%11, [2, 6, -1])
return %12""",
    )


def test_golden_fill_of_minus_inf() -> None:
    """Rows of the input mask may be empty: they are NaN in eager mode, and stay so."""

    def form(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(~m, -INF).softmax(-1) @ v

    seen = see(form, *qkv(), torch.ones(6, 10, dtype=torch.bool))
    assert_expected_inline(
        show(seen.gm),
        """\
%0: float32[2, 4, 10, 8] = input
%1: float32[2, 4, 6, 8] = input
%2: bool[6, 10] = input
%3: float32[2, 4, 10, 8] = input
%4: bool[1, 6, 10] = aten::unsqueeze(%2, 0)
%5: bool[1, 1, 6, 10] = aten::unsqueeze(%4, 0)
%6: bool[1, 1, 6, 1] = aten::any.dim(%5, -1, True)
%7: bool[1, 1, 6, 1] = aten::bitwise_not(%6)
%8: float32[2, 4, 6, 8] = kvtailor::attend(%1, %0, %3, %5, scale=1.0)
%9: float32[2, 4, 6, 8] = aten::where.ScalarSelf(%7, nan, %8)
return %9""",
    )


def test_golden_merged_heads() -> None:
    def form(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (x @ w).view(2, 6, 4, 3, 8).unbind(3)
        q, k, v = (_merged(t.transpose(1, 2)) for t in (q, k, v))
        weights = torch.bmm(q * 0.25, k.transpose(1, 2)).softmax(-1)
        return torch.bmm(weights, v).view(2, 4, 6, 8).transpose(1, 2).reshape(2, 6, 32)

    seen = see(form, torch.randn(2, 6, 32), torch.randn(32, 96))
    assert_expected_inline(
        show(seen.gm),
        """\
%0: float32[2, 6, 32] = input
%1: float32[32, 96] = input
%2: float32[2, 6, 96] = aten::matmul(%0, %1)
%3: float32[2, 6, 4, 3, 8] = aten::reshape(%2, [2, 6, 4, 3, 8])
%4 = aten::unbind.int(%3, 3)
%5: float32[2, 6, 4, 8] = getitem(%4, 0)
%6: float32[2, 6, 4, 8] = getitem(%4, 1)
%7: float32[2, 6, 4, 8] = getitem(%4, 2)
%8: float32[2, 4, 6, 8] = aten::permute(%5, [0, 2, 1, 3])
%9: float32[2, 4, 6, 8] = aten::permute(%6, [0, 2, 1, 3])
%10: float32[2, 4, 6, 8] = aten::permute(%7, [0, 2, 1, 3])
%11: float32[2, 4, 6, 8] = kvtailor::attend(%8, %9, %10, scale=0.25)
%12: float32[2, 6, 4, 8] = aten::permute(%11, [0, 2, 1, 3])
%13: float32[2, 6, 4, 8] = aten::clone(%12, memory_format=torch.contiguous_format)
%14: float32[2, 6, 32] = aten::reshape(%13, [2, 6, 32])
return %14""",
    )
