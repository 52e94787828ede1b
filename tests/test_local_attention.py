"""local_attend: equal to the oracle, linear in memory, blind to what no query may see."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvtailor.kernels import local_attention as module
from kvtailor.kernels import ops
from kvtailor.kernels.cut import cut, plan
from kvtailor.kernels.flags import Flags
from kvtailor.kernels.local_attention import local_attend
from kvtailor.kernels.reference import attend, visible

NAN = float("nan")
INF = float("inf")

# Root mean square of the error against that of the oracle's result, inputs being the same.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}


@pytest.fixture(autouse=True, scope="module")
def uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(
    B: int = 1,
    Hq: int = 2,
    Hkv: int = 2,
    Tq: int = 8,
    Tk: int | None = None,
    D: int = 8,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors as projections leave them, ``[B, T, H, D]`` in memory."""
    Tk = Tq if Tk is None else Tk
    shapes = ((B, Tq, Hq, D), (B, Tk, Hkv, D), (B, Tk, Hkv, D))
    q, k, v = (normal(seed + i, *s, dtype=dtype).transpose(1, 2) for i, s in enumerate(shapes))
    return q, k, v


def assert_same(actual: Tensor, expected: Tensor, what: str = "") -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert actual.transpose(1, 2).is_contiguous(), f"{what}: layout {actual.stride()}"
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    if not actual.numel():
        return
    error = (actual.double() - expected.double()).square().mean().sqrt().item()
    size = max(expected.double().square().mean().sqrt().item(), 1e-3)
    limit = TOLERANCE[actual.dtype]
    assert error <= limit * size, f"{what}: relative error must be at most {limit}, got {error}"


def check(q: Tensor, k: Tensor, v: Tensor, *args: Any, **flags: Any) -> Tensor:
    flags = {"scale": q.shape[-1] ** -0.5, **flags}
    actual = local_attend(q, k, v, *args, **flags)
    assert_same(actual, attend(q, k, v, *args, **flags), str(flags))
    return actual


# --- the table -----------------------------------------------------------------------------------

SPANS = (1, 2, 4, 16, 100, INF)
TABLE: dict[str, Sequence[Any]] = {
    "kind": ("sliding", "chunked"),
    "tokens": (1, 7, 16, 63, 512, 1000),
    "span": SPANS,
    "group": (1, 2, 4, 8),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "padding": (False, True),
    "rows": ("all", "last", "last 3", "an index set", "one per batch row"),
}


def pairwise(table: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Few rows of the product in which every two values of two columns meet."""
    names = list(table)
    pairs = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in range(len(table[a]))
        for y in range(len(table[b]))
    }
    draw = random.Random(0)
    rows = []
    while pairs:
        first = min(pairs)
        candidates = []
        for _ in range(60):
            row = {name: draw.randrange(len(table[name])) for name in names} | dict(first)
            met = {((a, row[a]), (b, row[b])) for a, b in itertools.combinations(names, 2)}
            candidates.append((len(met & pairs), sorted(row.items()), met))
        _, best, met = max(candidates)
        pairs -= met
        rows.append({name: table[name][i] for name, i in best})
    return rows


@lru_cache(maxsize=1)
def table_case(
    kind: str, tokens: int, span: float, group: int, dtype: torch.dtype, padding: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any], Tensor]:
    """Inputs, flags and the oracle's result for all rows: narrowed rows are rows of it."""
    q, k, v = qkv(2, 8, 8 // group, tokens, D=16, dtype=dtype, seed=tokens)
    width = int(min(span, tokens + 3))
    flags: dict[str, Any] = {"causal": True, "scale": 0.25}
    flags |= {"window": width} if kind == "sliding" else {"chunk": width}
    if padding:
        pads = torch.tensor([tokens // 3, 0])
        flags["mask"] = (torch.arange(tokens) >= pads[:, None])[:, None, None]
        if kind == "chunked":
            flags["chunk_origin"] = pads
    return (q, k, v), flags, attend(q, k, v, **flags)


def check_table_row(
    kind: str,
    tokens: int,
    span: float,
    group: int,
    dtype: torch.dtype,
    padding: bool,
    rows: str,
) -> None:
    (q, k, v), flags, expected = table_case(kind, tokens, span, group, dtype, padding)
    flags = dict(flags)
    kept = torch.arange(tokens).expand(2, tokens)
    if rows == "last":
        kept, flags["q_offset"] = kept[:, -1:], tokens - 1
    elif rows == "last 3":
        kept, flags["q_offset"] = kept[:, -3:], max(0, tokens - 3)
    elif rows == "an index set":
        kept = kept.flip(1)[:, :: max(1, tokens // 9)]
        flags["q_positions"] = kept[0]
    elif rows == "one per batch row":
        kept = flags["q_positions"] = torch.tensor([[tokens - 1], [tokens // 2]])
    index = kept[:, None, :, None].expand(-1, 8, -1, 16)
    actual = local_attend(q.gather(2, index), k, v, **flags)
    assert_same(actual, expected.gather(2, index), str(flags))


def table_id(row: Mapping[str, Any]) -> str:
    return "-".join(str(x).removeprefix("torch.").replace(" ", "_") for x in row.values())


@pytest.mark.parametrize("row", pairwise(TABLE), ids=table_id)
def test_table_pairwise(row: dict[str, Any]) -> None:
    check_table_row(**row)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TABLE["kind"])
@pytest.mark.parametrize("tokens", TABLE["tokens"])
@pytest.mark.parametrize("span", SPANS)
def test_table_in_full(kind: str, tokens: int, span: float) -> None:
    rest = [TABLE[name] for name in ("group", "dtype", "padding", "rows")]
    for values in itertools.product(*rest):
        check_table_row(kind, tokens, span, *values)


def test_pairwise_covers_every_pair() -> None:
    rows = pairwise(TABLE)
    for a, b in itertools.combinations(TABLE, 2):
        met = {(row[a], row[b]) for row in rows}
        assert met == set(itertools.product(TABLE[a], TABLE[b]))
    assert len(rows) < 80


# --- any shapes, any flags -----------------------------------------------------------------------


@st.composite
def calls(draw: st.DrawFn) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Tensors and flags of one call: every argument of the schema, also in odd combinations."""
    B, Hkv, G = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    Tq = draw(st.one_of(st.integers(1, 12), st.integers(13, 150)))
    Tk = draw(st.one_of(st.just(Tq), st.integers(1, 150)))
    D, Dv = draw(st.sampled_from([(8, 8), (8, 8), (8, 4), (4, 12)]))
    seed = draw(st.integers(0, 2**20))
    q = normal(seed, B, Hkv * G, Tq, D)
    k = normal(seed + 1, B, Tk, Hkv, D).transpose(1, 2)
    v = normal(seed + 2, B, Hkv, Tk, Dv)
    if draw(st.booleans()):
        # A last dim that is not contiguous, and rows of a wider buffer.
        v = normal(seed + 2, B, Hkv, Dv, Tk).transpose(2, 3)
        q = torch.cat([q, torch.full_like(q, NAN)], dim=-1)[..., :D]
    width = st.one_of(st.none(), st.integers(1, 20), st.integers(21, 200))
    flags: dict[str, Any] = {
        "scale": draw(st.sampled_from([0.3, 1.0])),
        "causal": draw(st.sampled_from([True, True, True, False])),
        "q_offset": draw(st.one_of(st.sampled_from([0, Tk - Tq]), st.integers(-9, 9))),
        "window": draw(width),
        "chunk": draw(width),
        "softcap": draw(st.sampled_from([None, None, None, 2.0])),
        "empty_row": draw(st.sampled_from(["zero", "uniform"])),
    }
    generator = torch.Generator().manual_seed(seed + 3)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    positions = draw(st.sampled_from(["none", "none", "any", "any rows", "shifted rows"]))
    if positions == "any":
        flags["q_positions"] = integers(0, Tk + 3, Tq)
    elif positions == "any rows":
        flags["q_positions"] = integers(0, Tk + 3, B, Tq)
    elif positions == "shifted rows":
        flags["q_positions"] = torch.arange(Tq) + integers(0, 5, B, 1)
    origin = draw(st.sampled_from([(), (B,), (B, Tq), None, None]))
    if origin is not None:
        flags["chunk_origin"] = integers(-5, 9, *origin)
    if draw(st.booleans()):
        flags["sinks"] = normal(seed + 4, Hkv * G)
        flags["sinks"][0] = -INF if draw(st.booleans()) else 3.0
    rate = draw(st.sampled_from([0.1, 0.6, 1.0]))
    Hm = draw(st.sampled_from([1, Hkv * G]))
    mask = draw(st.sampled_from(["none", "none", "pads", "keys", "any", "expanded", "add", "min"]))
    hidden = torch.rand(B, Hm, Tq, Tk, generator=generator) < rate
    if mask == "pads":
        flags["mask"] = (torch.arange(Tk) >= integers(0, Tk + 1, B, 1))[:, None, None]
    elif mask == "keys":
        flags["mask"] = ~hidden[:, :1, :1]
    elif mask == "expanded":
        flags["mask"] = (~hidden[:, :1, :1]).expand(B, 1, Tq, Tk)
    elif mask == "any":
        flags["mask"] = draw(st.sampled_from([~hidden, ~hidden[:1], ~hidden[0, 0]]))
    elif mask == "add":
        flags["mask"] = normal(seed + 5, 1, Hm, Tq, Tk).masked_fill(hidden[:1], -INF)
    elif mask == "min":
        flags["mask"] = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo().min)
    return (q, k, v), flags


@settings(max_examples=250, deadline=None, derandomize=True)
@given(calls())
def test_any_call(call: tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]) -> None:
    tensors, flags = call
    check(*tensors, **flags)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@given(calls())
def test_any_call_at_length(call: tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]) -> None:
    tensors, flags = call
    check(*tensors, **flags)


@pytest.mark.parametrize("rows", [1, 5, 32])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(call=calls())
def test_any_cut_gives_the_same(
    rows: int, call: tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]
) -> None:
    """Short inputs would be one block: cut them whatever it costs, into slabs of one block."""
    tensors, flags = call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "plan", lambda q, k, p, flags, *_: tuple(cut(q, k, p, flags, rows)))
        patch.setattr(module, "SLAB", 1)
        check(*tensors, **flags)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    q_len=st.integers(1, 40),
    k_len=st.integers(0, 40),
    offset=st.integers(-10, 20),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 30),
    chunk=st.none() | st.integers(1, 12),
    origin=st.integers(-5, 5),
    rows=st.integers(1, 9),
)
def test_a_cut_shows_what_the_flags_say(
    q_len: int,
    k_len: int,
    offset: int,
    causal: bool,
    window: int | None,
    chunk: int | None,
    origin: int,
    rows: int,
) -> None:
    """Each query that sees a key is in one block, which shows it those keys and reads no others."""
    seen = visible(
        q_len, k_len, torch.device("cpu"), causal=causal, q_offset=offset, window=window,
        chunk=chunk, chunk_origin=torch.tensor(origin),
    )[0, 0]  # fmt: skip
    shown = torch.zeros_like(seen)
    met = torch.zeros(q_len, dtype=torch.int64)
    for run in cut(q_len, k_len, offset, Flags(causal, window, chunk, origin), rows):
        assert run.rows <= rows and run.times >= 1
        band = run.band(torch.float32, torch.device("cpu"))
        for n in range(run.times):
            q = slice(run.query + n * run.step, run.query + n * run.step + run.rows)
            k = slice(run.key + n * run.step, run.key + n * run.step + run.keys)
            assert q.stop <= q_len and k.stop <= k_len
            met[q] += 1
            shown[q, k] = True if band is None else band == 0
            assert seen[q, k].any(dim=0).all(), "a key is read that no query of the block sees"
    assert torch.equal(shown, seen)
    assert torch.equal(met, seen.any(dim=1).long())


def test_brute_force() -> None:
    """Against loops that share nothing with the oracle."""
    q, k, v = qkv(2, 2, 1, 11, D=4)
    pads = [3, 0]
    mask = (torch.arange(11) >= torch.tensor(pads)[:, None])[:, None, None]
    for flags in ({"window": 3}, {"chunk": 4, "chunk_origin": torch.tensor(pads)}):
        expected = torch.zeros(2, 2, 11, 4)
        for b, h, p in itertools.product(range(2), range(2), range(11)):
            keys = [
                j
                for j in range(pads[b], p + 1)
                if ("window" not in flags or j > p - 3)
                and ("chunk" not in flags or (j - pads[b]) // 4 == (p - pads[b]) // 4)
            ]
            weights = [math.exp(0.5 * float(q[b, h, p] @ k[b, 0, j])) for j in keys]
            for j, w in zip(keys, weights):
                expected[b, h, p] += w / sum(weights) * v[b, 0, j]
        actual = local_attend(q, k, v, mask, scale=0.5, causal=True, **flags)
        assert_same(actual, expected)


# --- real reports --------------------------------------------------------------------------------


def counts(q_len: int, k_len: int | None = None, B: int = 1, **flags: Any) -> list[list[int]]:
    """Keys each query sees: with q = 0, the weights of v = identity are 1 / count."""
    k_len = q_len if k_len is None else k_len
    q, k = torch.zeros(B, 1, q_len, 4), normal(0, B, 1, k_len, 4)
    v = torch.eye(k_len).expand(B, 1, k_len, k_len)
    weights = local_attend(q, k, v, scale=1.0, causal=True, **flags)[:, 0]
    return [[round(1 / w) if w else 0 for w in row.amax(-1).tolist()] for row in weights]


def test_m02_a_continued_prefill_sees_its_history() -> None:
    assert counts(2, 5, window=5) == [[1, 2]]
    assert counts(2, 5, window=5, q_offset=3) == [[4, 5]]
    assert counts(2, 5, window=4, q_offset=3) == [[4, 4]]
    q, k, v = qkv(Tq=10)
    for flags in ({"window": 3}, {"window": 5}, {"chunk": 4}, {"chunk": 3}):
        whole = check(q, k, v, causal=True, **flags)
        parts = [
            check(q[:, :, a:z], k[:, :, :z], v[:, :, :z], causal=True, q_offset=a, **flags)
            for a, z in ((0, 4), (4, 8), (8, 10))
        ]
        assert_same(torch.cat(parts, dim=2).transpose(1, 2).contiguous().transpose(1, 2), whole)


def test_m03_a_window_counts_the_query_itself() -> None:
    assert counts(8, window=4) == [[1, 2, 3, 4, 4, 4, 4, 4]]
    assert counts(8, window=1) == [[1] * 8]
    assert counts(8, window=None) == [[1, 2, 3, 4, 5, 6, 7, 8]]


def test_m04_chunks_start_at_each_rows_first_token() -> None:
    pads = torch.tensor([3, 0])
    mask = (torch.arange(10) >= pads[:, None])[:, None, None]
    expected = [[0, 0, 0, 1, 2, 3, 4, 1, 2, 3], [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]]
    assert counts(10, B=2, chunk=4, chunk_origin=pads, mask=mask) == expected


def test_m05_chunks_in_decode() -> None:
    q, k, v = qkv(Tq=10)
    whole = check(q, k, v, causal=True, chunk=4)
    for p in range(10):
        assert counts(1, p + 1, chunk=4, q_offset=p) == [[p % 4 + 1]]
        step = check(
            q[:, :, p : p + 1], k[:, :, : p + 1], v[:, :, : p + 1],
            causal=True, chunk=4, q_offset=p,
        )  # fmt: skip
        torch.testing.assert_close(step, whole[:, :, p : p + 1])
    for T in (4, 8):
        check(q[:, :, :T], k[:, :, :T], v[:, :, :T], causal=True, chunk=4)


@pytest.mark.parametrize("softcap", [None, 50.0])
def test_m08_a_sink_joins_the_denominator_once(softcap: float | None) -> None:
    _, k, v = qkv(Hq=4, Hkv=2, Tq=4)
    q = torch.zeros(1, 4, 4, 8)
    flags: dict[str, Any] = {"causal": True, "window": 4, "softcap": softcap}
    actual = check(q, k, v, sinks=torch.zeros(4), **flags)
    for i in range(4):
        mean = v[:, :, : i + 1].mean(dim=2).repeat_interleave(2, dim=1)
        torch.testing.assert_close(actual[:, :, i], mean * (i + 1) / (i + 2))
    plain = check(q, k, v, **flags)
    torch.testing.assert_close(check(q, k, v, sinks=torch.full((4,), -INF), **flags), plain)
    check(q, k, v, sinks=torch.tensor([0.0, 1.0, -2.0, 3.0]), **flags)
    # One row takes the path that packs a group's heads.
    check(q[:, :, -1:], k, v, sinks=torch.tensor([0.0, 1.0, -2.0, 3.0]), q_offset=3, **flags)


def test_m10_softcap_follows_the_scale_and_precedes_the_mask() -> None:
    q = torch.tensor([10.0]).reshape(1, 1, 1, 1)
    k = torch.tensor([1.0, 0.0]).reshape(1, 1, 2, 1)
    v = torch.tensor([1.0, 0.0]).reshape(1, 1, 2, 1)
    flags: dict[str, Any] = {"scale": 0.5, "causal": True, "q_offset": 1, "window": 2}
    assert local_attend(q, k, v, **flags).item() == pytest.approx(0.9933, abs=1e-4)
    assert local_attend(q, k, v, softcap=1.0, **flags).item() == pytest.approx(0.7310, abs=1e-4)
    mask = torch.tensor([-1.0, 0.0])
    capped = local_attend(q, k, v, mask, softcap=1.0, **flags).item()
    assert capped == pytest.approx(1 / (1 + math.exp(1 - math.tanh(5.0))), abs=1e-6)


@pytest.mark.parametrize("rows", [1, 4])
def test_m13_query_heads_share_a_key_head_in_groups(rows: int) -> None:
    q, k, v = qkv(Hq=4, Hkv=2, Tq=4)
    v = torch.tensor([0.0, 1.0]).reshape(1, 2, 1, 1).expand(1, 2, 4, 8)
    out = local_attend(q[:, :, :rows], k, v, scale=1.0, causal=True, window=3, q_offset=4 - rows)
    torch.testing.assert_close(
        out[0, :, :, 0], torch.tensor([0.0, 0, 1, 1])[:, None].expand(4, rows)
    )


def test_m14_a_prompt_longer_than_the_window() -> None:
    q, k, v = qkv(Tq=10)
    out = check(torch.zeros_like(q), k, v, causal=True, window=4)
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0])
    torch.testing.assert_close(out[:, :, 9], v[:, :, 6:].mean(dim=2))


@pytest.mark.parametrize("tokens", [10, 300])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_t02_keys_that_no_query_reaches_may_hold_nan(
    kind: str, softcap: float | None, tokens: int
) -> None:
    q, k, v = qkv(Hq=4, Hkv=2, Tq=tokens, Tk=tokens + 6)
    flags: dict[str, Any] = {"causal": True, "softcap": softcap, kind: 4}
    last = {"q_offset": tokens - 1, "chunk_origin": torch.tensor(tokens - 4)}
    clean = check(q[:, :, -1:], k, v, **flags, **last)
    dirty_k, dirty_v = k.clone(), v.clone()
    for x in (dirty_k, dirty_v):
        x[:, :, : tokens - 4] = NAN
        x[:, :, tokens:] = NAN
    assert torch.equal(
        clean, local_attend(q[:, :, -1:], dirty_k, dirty_v, scale=8**-0.5, **flags, **last)
    )
    # Queries apart: what lies between their windows is not read either.
    ends = torch.tensor([5, tokens - 1])
    clean = check(q[:, :, ends], k, v, q_positions=ends, window=2, causal=True, softcap=softcap)
    seen = torch.tensor([4, 5, tokens - 2, tokens - 1])
    for clean_x, x in ((k, dirty_k), (v, dirty_v)):
        x[:] = NAN
        x[:, :, seen] = clean_x[:, :, seen]
    dirty = local_attend(
        q[:, :, ends], dirty_k, dirty_v, scale=8**-0.5, q_positions=ends, window=2, causal=True,
        softcap=softcap,
    )  # fmt: skip
    assert torch.equal(clean, dirty)


@pytest.mark.parametrize("tokens", [40, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_t03_padding_is_never_read(tokens: int, dtype: torch.dtype) -> None:
    """Left and right pads hold NaN; a row of pads alone gives 0."""
    q, k, v = qkv(4, 2, 1, tokens, dtype=dtype)
    index = torch.arange(tokens)
    start = torch.tensor([tokens // 2, 0, 0, tokens])[:, None]
    stop = torch.tensor([tokens, tokens, tokens - 5, tokens])[:, None]
    mask = ((index >= start) & (index < stop))[:, None, None]
    dirty_k, dirty_v = (x.masked_fill(~mask.transpose(2, 3), NAN) for x in (k, v))
    for flags in ({"window": 2}, {"window": 33}, {"chunk": 7, "chunk_origin": start[:, 0]}):
        clean = check(q, k, v, mask, causal=True, **flags)
        additive = torch.zeros(mask.shape).masked_fill(~mask, -INF)
        for same in (mask, mask.expand(4, 2, tokens, tokens), additive):
            dirty = local_attend(q, dirty_k, dirty_v, same, scale=8**-0.5, causal=True, **flags)
            assert torch.equal(clean, dirty)
        assert not clean[0, :, : tokens // 2].any() and not clean[3].any()


def test_d04_a_float32_minimum_on_half_precision_scores() -> None:
    """Cast to float16 it would become -inf, and an empty row 0 instead of a mean."""
    q, k, v = qkv(Tq=40, dtype=torch.float16)
    mask = torch.zeros(1, 1, 40, 40)
    mask[..., 30, :] = torch.finfo(torch.float32).min
    out = check(q, k, v, mask, causal=True, window=16)
    mean = v[:, :, 15:31].float().mean(dim=2)
    torch.testing.assert_close(out[:, :, 30].float(), mean, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("empty_row", ["zero", "uniform"])
def test_additive_minimum_is_no_minus_infinity(empty_row: str) -> None:
    """Rows that see pads alone get the mean of what the flags show them, as in eager."""
    q, k, v = qkv(2, 2, 1, 30)
    pads = torch.arange(30) < torch.tensor([[9], [0]])
    mask = torch.zeros(2, 1, 1, 30).masked_fill(pads[:, None, None], torch.finfo().min)
    out = check(q, k, v, mask, causal=True, window=4, empty_row=empty_row)
    torch.testing.assert_close(out[0, :, 6], v[0, :, 3:7].mean(dim=1).expand(2, 8))


# --- rows that see nothing -----------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [6, 300])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sinks", [None, 0.0, -INF])
@pytest.mark.parametrize("empty_row", ["zero", "uniform"])
def test_empty_rows(
    tokens: int, softcap: float | None, sinks: float | None, empty_row: str
) -> None:
    q, k, v = qkv(2, 2, 1, tokens)
    sink = None if sinks is None else torch.full((2,), sinks)
    flags: dict[str, Any] = {
        "causal": True, "window": 3, "softcap": softcap, "sinks": sink, "empty_row": empty_row,
    }  # fmt: skip
    pads = (torch.arange(tokens) >= 4)[None, None, None]
    holes = pads.clone()
    holes[..., 5] = False
    none = torch.zeros(1, 1, tokens, tokens, dtype=torch.bool)
    for mask in (pads, holes, none, torch.zeros(none.shape).masked_fill(~none, -INF)):
        out = check(q, k, v, mask, **flags)
        mean = v.mean(dim=2).expand(2, 2, 8)
        wanted = mean if empty_row == "uniform" and sinks != 0.0 else torch.zeros_like(mean)
        torch.testing.assert_close(out[:, :, 0], wanted)
    # Queries before the first key, and past the last window.
    check(q, k, v, q_offset=-3, **flags)
    check(q, k, v, q_offset=tokens, **flags)


def test_empty_rows_of_folded_batches() -> None:
    """Batch rows and chunks as one dimension: each row still gets the mean of its own values."""
    q, k, v = qkv(3, 2, 1, 256)
    index = torch.arange(256)
    # Both ends visible: one range of keys for all rows, so that they stay one call.
    mask = (index % 32 >= torch.tensor([[3], [9], [32]])) | (index == 0) | (index == 255)
    out = check(q, k, v, mask[:, None, None], causal=True, chunk=32, empty_row="uniform")
    mean = v[2].mean(dim=1, keepdim=True)
    torch.testing.assert_close(out[2, :, 32:255], mean.expand(2, 223, 8))


@pytest.mark.parametrize("empty_row", ["zero", "uniform"])
def test_no_keys_and_no_queries(empty_row: str) -> None:
    for B, Tq, Tk in ((1, 3, 0), (1, 0, 3), (0, 3, 3), (2, 0, 0)):
        q, k, v = qkv(B, 2, 1, Tq, Tk)
        for flags in ({"causal": True, "window": 2}, {"softcap": 1.0, "chunk": 2}):
            out = local_attend(q, k, v, scale=1.0, empty_row=empty_row, **flags)
            assert_same(out, torch.zeros(B, 2, Tq, 8))


# --- what the op promises ------------------------------------------------------------------------


def test_wrong_arguments() -> None:
    q, k, v = qkv(Hq=3, Hkv=2)
    with pytest.raises(ValueError, match="multiple of key heads, got 3 and 2"):
        local_attend(q, k, v, scale=1.0)
    q, k, v = qkv()
    with pytest.raises(ValueError, match="chunk must be positive, got 0"):
        local_attend(q, k, v, scale=1.0, chunk=0)
    with pytest.raises(ValueError, match="empty_row must be one of zero, uniform, got 'mean'"):
        local_attend(q, k, v, scale=1.0, empty_row="mean")


class Largest(TorchDispatchMode):
    """Bytes of the largest storage any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("flags", [{"window": 64}, {"chunk": 64}], ids=str)
@pytest.mark.parametrize(
    "how", ["plain", "padded", "holes", "alibi", "softcap", "positions", "origins"]
)
def test_no_square(flags: dict[str, Any], how: str) -> None:
    """The largest tensor grows with tokens x (span + block), heads apart, not with their square."""
    T, Hq, D = 4096, 2, 8
    q, k, v = qkv(2, Hq, 1, T, D=D)
    index = torch.arange(T)
    flags = {"causal": True, "scale": 1.0, **flags}
    if how == "padded":
        flags["mask"] = (index >= torch.tensor([[7], [0]]))[:, None, None]
    elif how == "holes":
        flags["mask"] = (index % 5 != 0).expand(2, 1, 1, T)
    elif how == "alibi":
        flags["mask"] = index.float().expand(1, Hq, 1, T) * 1e-3
    elif how == "softcap":
        flags["softcap"] = 4.0
    elif how == "positions":
        flags["q_positions"] = torch.randperm(T, generator=torch.Generator().manual_seed(0))
    elif how == "origins":
        flags["chunk_origin"] = (index // 100 * 100).expand(2, T)
    with Largest() as largest:
        local_attend(q, k, v, **flags)
    span, block = 64, 256
    assert 0 < largest.bytes <= 4 * 2 * Hq * T * (span + block)
    assert 4 * 2 * Hq * T * (span + block) < 4 * T * T / 3, "the bound must exclude a square"


def test_slabs_bound_masks_and_scores() -> None:
    T, Hq = 1024, 8
    q, k, v = qkv(1, Hq, 8, T, D=8)
    bias = normal(9, 1, Hq, T, 1).expand(1, Hq, T, T)
    most = Hq * 64 * 191 * 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "plan", lambda q, k, p, flags, *_: tuple(cut(q, k, p, flags, 64)))
        patch.setattr(module, "SLAB", most)
        with Largest() as largest:
            local_attend(q, k, v, bias, scale=1.0, causal=True, window=128)
            local_attend(q, k, v, scale=1.0, causal=True, window=128, softcap=3.0)
        # 14 equal blocks, 4 at a time.
        check(q, k, v, bias, causal=True, window=128)
        check(q, k, v, causal=True, window=128, softcap=3.0)
    assert largest.bytes <= 4 * most


@pytest.mark.parametrize("packs", [False, True], ids=["", "packs"])
def test_short_inputs_are_one_call(packs: bool) -> None:
    for T, flags in ((64, Flags(True, 512)), (40, Flags(True, 7))):
        assert len(plan(T, T, 0, flags, 8, 2, packs)) == 1
    assert len(plan(1, 5000, 4999, Flags(True, 512), 8, 2, packs)) == 1
    long = plan(8192, 8192, 0, Flags(True, 512), 8, 2, packs)
    assert sum(run.rows * run.keys * run.times for run in long) < 8192 * 1100


def test_the_cost_of_repacked_keys_asks_for_larger_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_amx", lambda: True)
    q, k, v = qkv(1, 2, 1, 1000, dtype=torch.bfloat16)
    check(q, k, v, causal=True, window=100)
    check(q, k, v, causal=True, chunk=300)
    flags = Flags(True, 512)
    widest = [
        max(r.rows for r in plan(8192, 8192, 0, flags, 8, 2, packs)) for packs in (False, True)
    ]
    assert widest[0] < widest[1]


def test_double_precision() -> None:
    q, k, v = (x.double() for x in qkv(1, 4, 2, 130))
    check(q, k, v, causal=True, window=20, sinks=normal(3, 4))
    check(q, k, v, (torch.arange(130) % 3 > 0)[None, None, None], causal=True, chunk=20)


def test_mixed_dtypes_follow_v() -> None:
    q, k, v = qkv(Tq=20)
    for q_, k_, v_ in ((q.bfloat16(), k, v), (q, k, v.bfloat16())):
        assert local_attend(q_, k_, v_, scale=1.0, causal=True, window=4).dtype == v_.dtype


def test_half_precision_is_as_close_to_fp64_as_sdpa() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = qkv(1, 4, 4, 600, D=32, dtype=dtype)
        index = torch.arange(600)
        mask = (index <= index[:, None]) & (index[:, None] - index < 100)
        exact = attend(q.double(), k.double(), v.double(), scale=32**-0.5, causal=True, window=100)
        eager = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        actual = local_attend(q, k, v, scale=32**-0.5, causal=True, window=100)
        errors = [(x.double() - exact).square().mean().sqrt().item() for x in (actual, eager)]
        assert errors[0] <= 1.5 * errors[1]


OPCHECKS: dict[str, dict[str, Any]] = {
    "window": {"window": 5},
    "chunk": {"chunk": 5, "chunk_origin": torch.tensor([3, 0])},
    "offset": {"window": 5, "q_offset": 3},
    "positions": {"window": 5, "q_positions": torch.tensor([4, 1, 0, 9] * 5)},
    "sinks": {"window": 5, "sinks": torch.tensor([0.0, 1, 2, 3])},
    "mask": {"window": 5, "mask": torch.ones(2, 1, 1, 20, dtype=torch.bool)},
    "softcap": {"window": 5, "softcap": 2.0, "empty_row": "uniform"},
}


@pytest.mark.parametrize("flags", OPCHECKS.values(), ids=OPCHECKS)
def test_the_op_as_torch_sees_it(flags: dict[str, Any]) -> None:
    """Schema, fake values and their strides, static and dynamic."""
    q, k, v = qkv(2, 4, 2, 20)
    torch.library.opcheck(ops.local_attend, (q, k, v), {"scale": 0.3, "causal": True, **flags})


def test_compiled_with_dynamic_sizes() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ops.local_attend(
            q, k, v, scale=0.3, causal=True, window=6, q_offset=k.shape[2] - q.shape[2]
        )
        return out.transpose(1, 2).flatten(2) * 2

    compiled = torch.compile(layer, dynamic=True, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for Tq, Tk in ((30, 30), (9, 30), (70, 75)):
            q, k, v = qkv(1, 4, 2, Tq, Tk)
            torch.testing.assert_close(compiled(q, k, v), layer(q, k, v))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_on_cuda(kind: str) -> None:
    """The plain-operations path, as a fallback."""
    q, k, v = (x.cuda() for x in qkv(2, 4, 2, 300))
    mask = (torch.arange(300) >= torch.tensor([[20], [0]]))[:, None, None].cuda()
    flags: dict[str, Any] = {"scale": 0.3, "causal": True, kind: 30}
    torch.testing.assert_close(
        local_attend(q, k, v, mask, **flags), attend(q, k, v, mask, **flags), atol=1e-4, rtol=1e-4
    )
