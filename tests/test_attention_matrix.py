"""One meaning of attention: every lowering, over all that attend can say, against the one oracle.

A combination either runs and equals ``reference.attend``, or the choice of the lowering refuses it
with a reason. Both are counted, and both must happen. Rows and whole batches that see no key are
in every mask. In the slow test the product of AXES runs for each lowering, in CI every n-th of it;
what is in CYCLES takes turns along the way.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from kvtailor.kernels import few_rows, local_attention, ops, paged_rows, paged_torch, reference
from kvtailor.kernels.ops import attend, gather_kv, paged_attend
from kvtailor.passes import lower_dense_attention as dense
from kvtailor.passes import lower_local_attention as local
from kvtailor.passes.graph import SITE, emit, sites
from kvtailor.passes.lower_paged_attention import lower_paged_attention
from kvtailor.passes.report import AttentionSite, PassReport

# finfo.min times log2(e) is meant to become -inf.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

NEVER = float("-inf")
FLAGS = ("causal", "window", "chunk")
AXES: dict[str, tuple[Any, ...]] = {
    "mask": ("none", "bool", "-inf", "finite"),
    "empty_row": ("zero", "uniform"),
    # None, each, every pair, all.
    "flags": tuple(c for n in range(4) for c in itertools.combinations(FLAGS, n)),
    "extra": ((), ("softcap",), ("sinks",), ("softcap", "sinks")),
    "heads": ((2, 2), (4, 2), (3, 1)),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    # Tq, Tk
    "size": ((0, 5), (5, 0), (1, 1), (1, 7), (7, 7), (5, 9), (9, 3), (3, 1), (33, 39)),
}
# Of different lengths without a common factor, so that they meet in every way.
CYCLES: dict[str, tuple[Any, ...]] = {
    "layout": ("keys of batch", "square", "keys", "heads", "one", "rows", "square of batch"),
    "place": ("0", "end", "-3", "positions", "positions of batch"),
    "origin": ("none", "one", "of batch", "of row"),
    "reach": (2, 1, 100),
    "values": (16, 32, 16, 48, 16, 16, 32, 16, 16, 16, 16),
    "start": (0, 0, 3, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0),
}
# Largest error, relative to the largest value: rows are means of the values.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
B, D, BLOCK = 2, 16, 4


class Case(NamedTuple):
    mask: str
    empty_row: str
    flags: tuple[str, ...]
    extra: tuple[str, ...]
    heads: tuple[int, int]
    dtype: torch.dtype
    size: tuple[int, int]
    layout: str
    place: str
    origin: str
    reach: int
    values: int
    start: int
    seed: int


def cases(step: int = 1, **only: Any) -> Iterator[Case]:
    """Every ``step``-th of the product, without those whose axis is not in ``only``."""
    product = enumerate(itertools.product(*AXES.values()))
    for n, at in itertools.islice(product, step // 2, None, step):
        turn = n // step if step > 1 else n
        cycled = (values[turn % len(values)] for values in CYCLES.values())
        case = Case(*at, *cycled, n)
        if all(getattr(case, name) in values for name, values in only.items()):
            yield case


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    q_positions: Tensor | None
    chunk_origin: Tensor | None
    sinks: Tensor | None


def inputs(case: Case) -> tuple[Inputs, dict[str, Any]]:
    """The arguments of attend."""
    make = torch.Generator().manual_seed(case.seed)
    (Hq, Hkv), (Tq, Tk) = case.heads, case.size
    q, k, v = (
        torch.randn(B, T, H, n, generator=make).to(case.dtype).transpose(1, 2)
        for H, T, n in ((Hq, Tq, D), (Hkv, Tk, D), (Hkv, Tk, case.values))
    )
    flags: dict[str, Any] = {"scale": 0.3, "empty_row": case.empty_row}
    flags |= {"causal": "causal" in case.flags}
    flags |= {name: case.reach + (name == "chunk") for name in case.flags if name != "causal"}
    positions = origin = sinks = None
    if case.flags:
        flags["q_offset"] = {"end": Tk - Tq, "-3": -3}.get(case.place, 0)
        if case.place.startswith("positions"):
            shape = (B, Tq) if "batch" in case.place else (Tq,)
            positions = torch.randint(-2, Tk + 3, shape, generator=make)
    if "chunk" in case.flags and case.origin != "none":
        shape = {"one": (), "of batch": (B,), "of row": (B, Tq)}[case.origin]
        origin = torch.randint(-3, 4, shape, generator=make)
    if "softcap" in case.extra:
        flags["softcap"] = 1.5
    if "sinks" in case.extra:
        sinks = torch.randn(Hq, generator=make)
        # No sink for the first head.
        sinks[0] = NEVER
    return Inputs(q, k, v, _mask(case, make), positions, origin, sinks), flags


def _mask(case: Case, make: torch.Generator) -> Tensor | None:
    if case.mask == "none":
        return None
    Hq, (Tq, Tk) = case.heads[0], case.size
    shape = {
        "keys of batch": (B, 1, 1, Tk),
        "square": (1, 1, Tq, Tk),
        "keys": (1, 1, 1, Tk),
        "heads": (B, Hq, Tq, Tk),
        "one": (1, 1, 1, 1),
        "rows": (B, 1, Tq, 1),
        "square of batch": (B, 1, Tq, Tk),
    }[case.layout]
    keep = torch.rand(shape, generator=make) > 0.4
    # A whole batch, or all there is, and the first row see nothing.
    if shape[0] > 1 or case.seed % 5 == 0:
        keep[0] = False
    if shape[2] > 1:
        keep[:, :, 0] = False
    if case.mask == "bool":
        return keep
    # In float16 every number is near enough to 0 for a score to count beside it.
    least = -1e3 if case.dtype == torch.float16 else torch.finfo(case.dtype).min
    bias = torch.randn(shape, generator=make).to(case.dtype)
    return bias.masked_fill(~keep, NEVER if case.mask == "-inf" else least)


# --- the lowerings -------------------------------------------------------------------------------


class Refused(Exception):
    """The choice of the lowering says that it cannot or need not do this; the text is its code."""


def graph_of(given: Inputs) -> tuple[fx.GraphModule, list[Any]]:
    """A graph of placeholders for the tensors there are, to be completed by the caller."""
    gm = fx.GraphModule(torch.nn.Module(), fx.Graph())
    with FakeTensorMode() as mode:
        nodes: list[Any] = []
        for name, x in given._asdict().items():
            if x is not None:
                node = gm.graph.placeholder(name)
                node.meta["val"] = mode.from_tensor(x)
                nodes.append(node)
            else:
                nodes.append(None)
    return gm, nodes


def lowered(
    gm: fx.GraphModule, args: list[Any], flags: dict[str, Any], lower: Callable[..., PassReport]
) -> str:
    """attend(*args) as the graph's result, lowered; the lowering's name. Raises Refused."""
    node = emit(gm.graph, attend, *args, **flags)
    node.meta[SITE] = site = AttentionSite("site", node.name)
    sites(gm).append(site)
    gm.graph.output(node)
    report = lower(gm)
    left = gm.graph.find_nodes(op="call_function", target=attend)
    if left:
        assert not report.rewrites
        if not report.skipped:
            # Without a flag this is no near miss.
            assert lower is local.lower_local_attention and not flags["causal"]
            raise Refused("no-flag")
        (skip,) = report.skipped
        assert skip.code and skip.why
        raise Refused(skip.code)
    assert report.rewrites == 1 and not report.skipped and site.lowering is not None
    gm.graph.lint()
    gm.recompile()
    return site.lowering


def run_dense(case: Case, given: Inputs, flags: dict[str, Any]) -> tuple[str, Tensor]:
    gm, nodes = graph_of(given)
    name = lowered(gm, nodes, flags, dense.lower_dense_attention)
    return name, gm(*(x for x in given if x is not None))


def run_local(case: Case, given: Inputs, flags: dict[str, Any]) -> tuple[str, Tensor]:
    gm, nodes = graph_of(given)
    lowered(gm, nodes, flags, local.lower_local_attention)
    name = "local chunked" if "chunk" in case.flags else "local banded"
    return name, gm(*(x for x in given if x is not None))


def run_local_op(case: Case, given: Inputs, flags: dict[str, Any]) -> tuple[str, Tensor]:
    # What the op does with what no pass would give it: it takes all that attend takes.
    return "local op", local_attention.local_attend(*given, **flags)


def run_dispatch(case: Case, given: Inputs, flags: dict[str, Any]) -> tuple[str, Tensor]:
    return "triton", ops._local_attend_gpu(*given, **flags)


def run_paged(
    case: Case, given: Inputs, flags: dict[str, Any], gpu: bool = False
) -> tuple[str, Tensor]:
    stop = case.start + case.size[1]
    make = torch.Generator().manual_seed(case.seed)
    blocks = -(-stop // BLOCK) or 1
    table = torch.randperm(B * blocks + 2, generator=make)[: B * blocks].view(B, blocks).int()
    pools = []
    for x in given[1:3]:
        pool = torch.full((B * blocks + 2, BLOCK, *x.shape[1::2]), float("nan")).to(case.dtype)
        for s, key in itertools.product(range(B), range(case.size[1])):
            at = case.start + key
            pool[table[s, at // BLOCK], at % BLOCK] = x[s, :, key]
        pools.append(pool)
    paged = given._replace(k=pools[0], v=pools[1])
    gm, nodes = graph_of(paged)
    at_table = gm.graph.placeholder("table")
    at_table.meta["val"] = nodes[0].meta["val"].fake_mode.from_tensor(table)
    for i in (1, 2):
        dense_kv = emit(gm.graph, gather_kv, nodes[i], at_table, case.start, stop)
        nodes[i] = emit(gm.graph, torch.ops.aten.permute.default, dense_kv, [0, 2, 1, 3])
    lowered(gm, nodes, flags, lower_paged_attention)
    (node,) = gm.graph.find_nodes(op="call_function", target=paged_attend)
    if gpu:
        node.target = ops._paged_attend_gpu
        gm.recompile()
    before = C_CALLS["rows"]
    out = gm(*(x for x in paged if x is not None), table)
    cpp = "paged rows" if C_CALLS["rows"] > before else "paged gathers"
    return "triton paged" if gpu else cpp, out


LOWERINGS: dict[str, Callable[..., tuple[str, Tensor]]] = {
    "dense": run_dense,
    "local": run_local,
    "local op": run_local_op,
    "paged": run_paged,
    "paged in plain torch": run_paged,
    "triton": run_dispatch,
    "triton paged": lambda *args: run_paged(*args, gpu=True),
}
C_CALLS: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few scores are enough for a local lowering; calls of the C++ kernel are counted."""
    monkeypatch.setattr(local, "SMALL", 0)
    rows = paged_rows.attend_rows

    def counted(*args: Any, **kwargs: Any) -> None:
        C_CALLS["rows"] += 1
        rows(*args, **kwargs)

    monkeypatch.setattr(paged_rows, "attend_rows", counted)


@dataclass
class Ran:
    """What came of some cases: how many equal the oracle, by lowering; how many were refused."""

    equal: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{sum(self.equal.values())} equal {dict(self.equal)}, "
            f"{sum(self.refused.values())} refused {dict(self.refused)}, {len(self.wrong)} differ"
        )


def run(name: str, chosen: Iterable[Case]) -> Ran:
    done = Ran()
    for case in chosen:
        given, flags = inputs(case)
        want = reference.attend(*given, **flags)
        try:
            made, got = LOWERINGS[name](case, given, flags)
        except Refused as refusal:
            done.refused[str(refusal)] += 1
            continue
        fault = difference(case, given, got, want)
        if fault:
            done.wrong.append(f"{made}: {fault}: {case}")
        else:
            done.equal[made] += 1
    return done


def difference(case: Case, given: Inputs, got: Tensor, want: Tensor) -> str | None:
    """What is wrong with a result, None for nothing."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.shape} {got.dtype}"
    if not got.numel():
        return None
    if not got.isfinite().all():
        return "not finite"
    if not given.v.numel():
        return None if not got.any() else "values from nowhere"
    error = (got.double() - want.double()).abs().max().item()
    allowed = TOLERANCE[case.dtype] * given.v.abs().max().item()
    return None if error <= allowed else f"error {error:.3g}, allowed {allowed:.3g}"


# Every n-th case of the product in CI, in the slow test; what must be among what ran, and among
# the reasons.
SHARES: dict[str, tuple[int, int, set[str], set[str]]] = {
    "dense": (101, 1, {"sdpa", "sdpa causal", "row", "math"}, set()),
    "local": (61, 1, {"local banded", "local chunked"}, {"no-flag", "one-row", "causal"}),
    "local op": (41, 2, {"local op"}, set()),
    "paged": (61, 1, {"paged gathers"}, {"empty-row", "two-sided", "first-key", "mask", "origin"}),
    "paged in plain torch": (101, 2, {"paged gathers"}, {"empty-row"}),
    "triton": (499, 11, {"triton"}, set()),
    "triton paged": (151, 11, {"triton paged"}, {"empty-row"}),
}


# What is rare in the product: in CI too.
RARE: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "dense": [
        (5, {"mask": ("none",), "extra": ((),), "flags": (("causal",),)}),
        (7, {"size": ((1, 7),), "extra": ((),), "heads": ((2, 2),), "dtype": AXES["dtype"][1:]}),
    ],
    "paged": [(5, {"mask": ("none",), "empty_row": ("zero",), "size": ((1, 7),)})],
}


def _whole(name: str, chosen: list[Case], monkeypatch: pytest.MonkeyPatch) -> Ran:
    if name.startswith("triton"):
        pytest.importorskip("triton")
    if name == "paged in plain torch":
        monkeypatch.setattr(paged_rows, "takes", lambda *pages: False)
    done = run(name, chosen)
    print(f"{name}: {done}")
    assert not done.wrong, f"{done}\n" + "\n".join(done.wrong[:5])
    _, _, ran, reasons = SHARES[name]
    if name == "paged" and paged_rows.library() is not None:
        ran = ran | {"paged rows"}
    assert ran == set(done.equal) and reasons <= set(done.refused), str(done)
    assert sum((done.equal + done.refused).values()) == len(chosen)
    return done


@pytest.mark.parametrize("name", SHARES)
def test_a_sample_equals_the_oracle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rare = (cases(step, **only) for step, only in RARE.get(name, []))
    _whole(name, [*cases(SHARES[name][0]), *itertools.chain(*rare)], monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARES)
def test_the_whole_equals_the_oracle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = _whole(name, list(cases(SHARES[name][1])), monkeypatch)
    assert sum((done.equal + done.refused).values()) > 1000


# --- what attend refuses -------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"mask of {n} dimensions": ({"mask": torch.ones((7,) * n)}, "mask must have four")
        for n in (0, 1, 2, 3, 5)
    },
    "mask of other keys": ({"mask": torch.ones(1, 1, 5, 6)}, "mask must have four"),
    "mask of integers": ({"mask": torch.ones(1, 1, 5, 7).int()}, "mask must be bool or a float"),
    "mask of float64": ({"mask": torch.ones(1, 1, 5, 7).double()}, "mask must be bool or a float"),
    "positions": ({"q_positions": torch.ones(1, 1, 5).long()}, "q_positions must have 1 or 2"),
    "origin": ({"chunk_origin": torch.ones(1, 1, 5).long()}, "chunk_origin must have 0 or 1 or 2"),
    "sinks": ({"sinks": torch.ones(1, 4)}, "sinks must have 1 dim"),
    "empty_row": ({"empty_row": "mean"}, "empty_row must be one of zero, uniform, got 'mean'"),
    "window": ({"window": 0}, "window must be positive, got 0"),
    "chunk": ({"chunk": -1}, "chunk must be positive, got -1"),
    "heads": ({"k": torch.ones(2, 3, 7, 8), "v": torch.ones(2, 3, 7, 8)}, "query heads must be"),
    "dtypes": ({"v": torch.ones(2, 2, 7, 8).half()}, "must have one dtype"),
}


@pytest.mark.parametrize("op", [ops.attend, ops.local_attend])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_while_compiling(name: str, op: Any) -> None:
    changed, why = REFUSED[name]
    args: dict[str, Any] = {
        "q": torch.ones(2, 4, 5, 8), "k": torch.ones(2, 2, 7, 8), "v": torch.ones(2, 2, 7, 8),
        "scale": 1.0,
    }  # fmt: skip
    with FakeTensorMode() as mode:

        def fake(given: dict[str, Any]) -> dict[str, Any]:
            return {
                n: mode.from_tensor(x) if isinstance(x, Tensor) else x for n, x in given.items()
            }

        assert op(**fake(args)).shape == (2, 4, 5, 8)
        with pytest.raises(ValueError, match=why):
            op(**fake(args | changed))


# --- few rows: linears, whose lowering is the op's own choice --------------------------------------


def test_linears_of_few_rows_equal_the_oracle() -> None:
    ran: Counter[str] = Counter()
    product = itertools.product(
        (0, 1, 2, 8, 9), (1, 7, 16, 33, 64), (1, 2, 3, 8), AXES["dtype"], (False, True)
    )
    for n, (rows, K, N, dtype, biased) in enumerate(product):
        make = torch.Generator().manual_seed(n)
        x, weight, bias = (
            torch.randn(s, generator=make).to(dtype) for s in ((rows, K), (N, K), (N,))
        )
        given = bias if biased else None
        want = reference.packed_linear(
            x.double(), weight.double(), None if given is None else given.double()
        )
        got = ops.few_rows_linear(x, weight, given)
        assert got.shape == (rows, N) and got.dtype == dtype
        limit = TOLERANCE[dtype] * (1 + want.abs().max().item() if want.numel() else 1)
        assert (got.double() - want).abs().le(limit).all(), (rows, K, N, dtype, biased)
        ran["kernel" if few_rows.takes(x, weight) else "torch"] += 1
    assert sum(ran.values()) == 600 and ran["torch"]
    if few_rows.has_kernel(torch.float32):
        assert ran["kernel"] >= 100


# --- the matrix fails when a lowering is broken ----------------------------------------------------


def _forget_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(mask: Tensor, sinks: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(mask[..., :1], dtype=torch.bool), mask

    monkeypatch.setattr(dense, "_open_empty_rows", forgets)


def _drop_a_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    init = local_attention.Call.__init__

    def without(self: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Any, *rest: Any) -> None:
        init(self, q, k, v, None, *rest)

    monkeypatch.setattr(local_attention.Call, "__init__", without)


def _shift_the_kernels_window(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtailor.kernels import paged_attention

    whole = paged_attention.dense_attend

    def shifted(*args: Any, window: int | None = None, **flags: Any) -> Any:
        return whole(*args, window=None if window is None else window + 1, **flags)

    monkeypatch.setattr(paged_attention, "dense_attend", shifted)


def _shift_a_window_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    made = paged_torch.Flags

    def shifted(causal: bool, window: int | None, *rest: Any) -> Any:
        return made(causal, window and window + 1, *rest)

    monkeypatch.setattr(paged_torch, "Flags", shifted)


def _see_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "_visible", lambda graph, node, made: None)


def _unhide_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "_masked", lambda scores, mask: scores)


FLOAT = {"dtype": (torch.float32,)}
# lowering, how it is broken, the cases that tell
BROKEN: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], int, dict[str, Any]]] = {
    "sdpa forgets uniform": ("dense", _forget_uniform, 5, {
        **FLOAT, "mask": ("bool",), "empty_row": ("uniform",), "extra": ((),), "flags": ((),),
    }),
    "math forgets uniform": ("dense", _forget_uniform, 5, {
        **FLOAT, "mask": ("bool",), "empty_row": ("uniform",), "extra": (("softcap",),),
        "flags": ((),),
    }),
    "sdpa sees too much": ("dense", _see_one_more, 5, {
        **FLOAT, "mask": ("none",), "extra": ((),), "flags": (("causal", "window"),),
    }),
    "row forgets its mask": ("dense", _unhide_rows, 1, {
        "dtype": (torch.bfloat16,), "mask": ("bool",), "extra": ((),), "size": ((1, 7),),
        "heads": ((2, 2),), "flags": ((),),
    }),
    "local drops a sink": ("local op", _drop_a_sink, 5, {
        **FLOAT, "mask": ("none",), "extra": (("sinks",),), "flags": (("causal", "window"),),
    }),
    "triton shifts a window": ("triton", _shift_the_kernels_window, 5, {
        **FLOAT, "mask": ("none",), "extra": ((),), "flags": (("causal", "window"),),
        "size": ((7, 7), (33, 39)),
    }),
    "pages shift a window": ("paged", _shift_a_window_of_pages, 1, {
        **FLOAT, "mask": ("none",), "empty_row": ("zero",), "extra": ((),),
        "flags": (("causal", "window"),), "size": ((7, 7), (5, 9), (33, 39), (1, 7)),
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_fails_when_a_lowering_is_broken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lowering, break_it, step, only = BROKEN[name]
    if lowering == "triton":
        pytest.importorskip("triton")
    chosen = list(cases(step, **only))
    sound = run(lowering, chosen)
    assert sound.equal and not sound.wrong
    break_it(monkeypatch)
    broken = run(lowering, chosen)
    assert broken.wrong, str(broken)
