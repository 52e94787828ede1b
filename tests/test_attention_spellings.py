"""Attention by hand, however its mask is spelled, equals eager from end to end.

A seeded generator draws spelling, fill, dimensions of the mask, dtype, sizes and heads. Batches
and rows that see nothing are in every mask.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtailor.backend import recording

INF = math.inf
Spelling = Callable[[Tensor, Tensor, float], Tensor]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def additive(hidden: Tensor, like: Tensor, fill: float) -> Tensor:
    return torch.zeros(hidden.shape, dtype=like.dtype).masked_fill(hidden, fill)


# Scores, where they are hidden, and by what -> masked scores.
SPELLINGS: dict[str, Spelling] = {
    "masked_fill": lambda s, hidden, fill: s.masked_fill(hidden, fill),
    "masked_fill by a tensor": lambda s, hidden, fill: s.masked_fill(
        hidden, torch.tensor(fill, dtype=s.dtype)
    ),
    "where": lambda s, hidden, fill: torch.where(hidden, fill, s),
    "where not": lambda s, hidden, fill: torch.where(
        ~hidden, s, torch.full((), fill, dtype=s.dtype)
    ),
    "where by a wide number": lambda s, hidden, fill: torch.where(
        hidden, torch.tensor(fill, dtype=torch.float32), s
    ),
    "add": lambda s, hidden, fill: s + additive(hidden, s, fill),
    "add a wider mask": lambda s, hidden, fill: s + additive(hidden, s.float(), fill).to(s.dtype),
    "subtract": lambda s, hidden, fill: s - additive(hidden, s, -fill),
    "times": lambda s, hidden, fill: s + hidden.to(s.dtype) * max(fill, torch.finfo(s.dtype).min),
    "twice": lambda s, hidden, fill: s.masked_fill(hidden, fill).masked_fill(
        ~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), fill
    ),
}
ADDED = ("add", "add a wider mask", "subtract", "times")
FILLS: dict[str, Callable[[torch.dtype], float]] = {
    "-inf": lambda dtype: -INF,
    "min": lambda dtype: torch.finfo(dtype).min,
    "-1e9": lambda dtype: -1e9,
    "-1e4": lambda dtype: -1e4,
    # -inf in half precision, where eager takes it.
    "float32 min": lambda dtype: torch.finfo(torch.float32).min,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Tq, Tk
SIZES = ((6, 6), (1, 7), (5, 1), (3, 5), (4, 0), (0, 4), (1, 1))
AXES = (tuple(SPELLINGS), tuple(FILLS), range(5), DTYPES, SIZES, (False, True))


def attention(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, spelling: str, fill: float
) -> Tensor:
    scores = SPELLINGS[spelling](q @ k.mT, hidden, fill)
    return torch.softmax(scores, -1) @ v


def hidden_keys(dims: int, Tq: int, Tk: int, draw: random.Random) -> Tensor:
    """Bool with this many dimensions; a batch, a head or all hidden whole, and the first row."""
    shape = (2, draw.choice((1, 2)), draw.choice((1, Tq)), draw.choice((Tk, Tk, 1)))[4 - dims :]
    make = torch.Generator().manual_seed(draw.randrange(1 << 30))
    hidden = torch.rand(shape if dims else (), generator=make) > 0.6
    if not hidden.numel():
        return hidden
    if dims > 1 or draw.random() < 0.5:
        hidden[0 if dims else ...] = True
    if dims > 1:
        hidden[..., 0, :] = True
    return hidden


def check(spelling: str, name: str, dims: int, dtype: torch.dtype, size: tuple[int, int],
          dynamic: bool, seed: int) -> str:  # fmt: skip
    """What became of the attention: its lowering. Fails unless the results equal eager's."""
    fill = FILLS[name](dtype)
    draw, (Tq, Tk) = random.Random(seed), size
    make = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(2, 2, T, 8, dtype=torch.float64, generator=make).to(dtype) for T in (Tq, Tk, Tk)
    )
    args = (q, k, v, hidden_keys(dims, Tq, Tk, draw))
    try:
        want = attention(*args, spelling, fill)
    except RuntimeError:
        # Eager refuses a fill that the dtype cannot hold.
        return "eager raises"
    torch._dynamo.reset()
    compiled = torch.compile(
        attention, backend="kvtailor", options={"inner": "eager"}, dynamic=dynamic
    )
    with recording() as recorder, torch.no_grad():
        got = compiled(*args, spelling, fill)
    assert got.shape == want.shape and got.dtype == want.dtype
    assert torch.equal(got.isnan(), want.isnan()), "NaN elsewhere than in eager"
    if got.numel():
        # In exact numbers a mask of -1e4 leaves the scores of a row that is hidden whole to be
        # told apart, in half precision it swallows them: then no further off than eager is.
        exact = attention(*(x.double() if x.is_floating_point() else x for x in args),
                          spelling, fill)  # fmt: skip
        near = (got.double() - want.double()).abs().nan_to_num()
        off, eager = ((x.double() - exact).abs().nan_to_num() for x in (got, want))
        largest = v.abs().max().item() if v.numel() else 0.0
        unit = 16 * torch.finfo(dtype).eps * largest
        if spelling in ADDED and name == "-1e4" and dtype == torch.float32:
            # The sum of a score and -1e4 is rounded to 1e-3.
            unit = 2e-3 * largest
        assert bool(((near <= unit) | (off <= 1.5 * eager + unit)).all()), (near.max(), off.max())
    (graph,) = [g for g in recorder.graphs if g.attention] or [None]
    return "none" if graph is None else str(graph.attention[0].lowering)


def drawn(count: int, seed: int = 0) -> list[tuple[Any, ...]]:
    """Combinations in which every value of every axis comes up about equally often."""
    draw = random.Random(seed)
    columns = []
    for axis in AXES:
        column = [axis[i % len(axis)] for i in range(count)]
        draw.shuffle(column)
        columns.append(column)
    return list(zip(*columns))


def _check_all(combinations: list[tuple[Any, ...]]) -> Counter[str]:
    made: Counter[str] = Counter()
    wrong = []
    for seed, combination in enumerate(combinations):
        try:
            made[check(*combination, seed)] += 1
        except Exception as error:
            wrong.append(f"{combination} {seed}: {type(error).__name__} {str(error)[:300]}")
    print(f"{len(combinations)} combinations: {dict(made)}, {len(wrong)} differ")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(combinations)}", *wrong[:8]])
    return made


def test_drawn_spellings_equal_eager() -> None:
    made = _check_all(drawn(50))
    assert made["sdpa"] and made["untouched"] and sum(made.values()) == 50


@pytest.mark.slow
def test_all_spellings_equal_eager() -> None:
    made = _check_all(list(itertools.product(*AXES)))
    assert made["sdpa"] > 1000


@pytest.mark.parametrize("fill", [-1e9, torch.finfo(torch.float32).min])
def test_s1_a_batch_that_sees_no_key_gets_the_mean(fill: float) -> None:
    q, k, v = (torch.randn(2, 2, 6, 8) for _ in range(3))
    seen = torch.tensor([[0] * 6, [1] * 6])

    def f(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
        return torch.softmax((q @ k.mT).masked_fill(a[:, None, None] == 0, fill), -1) @ v

    got = torch.compile(f, backend="kvtailor", options={"inner": "eager"})(q, k, v, seen)
    torch.testing.assert_close(got, f(q, k, v, seen))
    torch.testing.assert_close(got[0], v[0].mean(-2, keepdim=True).expand(2, 6, 8))


def test_s1_a_predicate_with_an_empty_row_of_its_own() -> None:
    q, k, v = (torch.randn(2, 2, 6, 8) for _ in range(3))

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(q.shape[2])
        later = i > i[:, None]
        return torch.softmax((q @ k.mT).masked_fill(~later, torch.finfo(q.dtype).min), -1) @ v

    got = torch.compile(f, backend="kvtailor", options={"inner": "eager"})(q, k, v)
    torch.testing.assert_close(got, f(q, k, v))
    torch.testing.assert_close(got[:, :, -1], v.mean(-2))


@pytest.mark.parametrize("mask", ["bf16", "fp16"])
def test_a_mask_of_another_dtype_than_the_scores(mask: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[mask]
    q, k, v = (torch.randn(2, 2, 6, 8) for _ in range(3))

    def f(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT + m, -1) @ v

    bias = torch.randn(6, 6).to(dtype)
    got = torch.compile(f, backend="kvtailor", options={"inner": "eager"})(q, k, v, bias)
    torch.testing.assert_close(got, f(q, k, v, bias))


def test_padded_rows_of_deberta_v2() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DebertaV2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=32, relative_attention=True,
        pos_att_type=["p2c", "c2p"], position_buckets=8,
    )  # fmt: skip
    model = transformers.DebertaV2Model(config).eval()
    ids = torch.randint(1, 64, (2, 7))
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, 3:] = 0
    with torch.no_grad():
        want = model(ids, attention_mask=mask).last_hidden_state
        model.compile(backend="kvtailor", options={"inner": "eager"})
        got = model(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fill, hides", [(-1e9, True), (-1e4, False)])
@pytest.mark.parametrize("spelling", [name for name in SPELLINGS if name != "twice"])
def test_m1_a_bf16_fill_that_hides_is_proved(spelling: str, fill: float, hides: bool) -> None:
    """bfloat16 rounds -1e9 towards zero, and it hides still; beside -1e4 scores do compete."""

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(q.shape[2])
        return attention(q, k, v, i > i[:, None], spelling, fill)

    qkv = [torch.randn(2, 2, 6, 8).bfloat16() for _ in range(3)]
    torch._dynamo.reset()
    with recording() as recorder, torch.no_grad():
        got = torch.compile(f, backend="kvtailor", options={"inner": "eager"})(*qkv)
    torch.testing.assert_close(got, f(*qkv), atol=0.05, rtol=0.05)
    (site,) = recorder.graphs[0].attention
    if hides:
        assert (site.proof, site.lowering, site.reason) == ("k <= q", "sdpa causal", None)
    else:
        assert not site.causal and site.proof is None
        assert site.reason and ("bias" if spelling in ADDED else "not hidden") in site.reason
