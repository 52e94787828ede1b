"""lower_paged_attention and store_in_place: the gather goes, the pages and the results stay."""

from __future__ import annotations

import itertools

import pytest
import torch
from expecttest import assert_expected_inline
from harness import through, tidied
from test_paged_cache import make, paged
from torch import Tensor, fx

from kvtailor.backend import recording
from kvtailor.kernels import paged_torch, reference
from kvtailor.kernels.ops import attend, gather_kv, paged_attend, store_kv
from kvtailor.passes.capture.capture import capture
from kvtailor.passes.lower_dense_attention import lower_dense_attention
from kvtailor.passes.lower_paged_attention import lower_paged_attention
from kvtailor.passes.narrow_rows import narrow_rows
from kvtailor.passes.normalise import normalise
from kvtailor.passes.report import PassReport
from kvtailor.passes.store_in_place import store_in_place
from kvtailor.passes.text import show

B, HQ, HKV, D, SIZE = 2, 4, 2, 8, 4


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Lowered:
    """A backend of the two passes; keeps their reports and the graph."""

    def __call__(self, gm: fx.GraphModule, example_inputs):
        graph = capture(gm, example_inputs)
        normalise(graph)
        self.paged = lower_paged_attention(graph)
        assert lower_paged_attention(graph).rewrites == 0
        lower_dense_attention(graph)
        self.stored = store_in_place(graph)
        assert store_in_place(graph).rewrites == 0
        tidied(graph)
        assert all(n.op == "output" or "val" in n.meta for n in graph.graph.nodes)
        self.targets = [n.target for n in graph.graph.nodes if n.op == "call_function"]
        self.text = show(graph)
        return graph.forward


def lowered(fn, *args, dynamic: bool | None = None) -> Lowered:
    """fn compiled and compared with itself, what it writes to included."""
    seen = Lowered()
    copies = [a.clone() if isinstance(a, Tensor) else a for a in args]
    actual, expected = through(seen, fn, *args, dynamic=dynamic), fn(*copies)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(args, tuple(copies), rtol=0, atol=0, equal_nan=True)
    return seen


def skips(report: PassReport) -> list[str]:
    return [skip.code for skip in report.skipped]


def pool(keys: int, first: int = 0, dim: int = D) -> tuple[Tensor, Tensor]:
    """Pages with NaN wherever no row first .. keys-1 of a sequence lies, and a table."""
    columns = -(-keys // SIZE) + 1
    table = torch.randperm(B * columns).view(B, columns).to(torch.int32) + 1
    pages = torch.full((B * columns + 1, SIZE, HKV, dim), float("nan"))
    for row in table.tolist():
        for position in range(first, keys):
            pages[row[position // SIZE], position % SIZE] = torch.randn(HKV, dim)
    return pages, table


MASKS = {
    "none": lambda Tq, K: None,
    "padding": lambda Tq, K: (
        torch.arange(K).expand(B, 1, 1, K) >= torch.tensor([2, 0])[:, None, None, None]
    ),
    "bool": lambda Tq, K: torch.rand(1, 1, Tq, K) > 0.3,
    "bias": lambda Tq, K: torch.randn(B, HQ, Tq, K),
    "row": lambda Tq, K: torch.rand(B, 1, Tq, 1) > 0.5,
}

# start, stop, Tq, flags -> code of the reason, None when it is lowered
CASES = {
    "decode": (0, 9, 1, dict(), None),
    "full": (0, 9, 4, dict(), None),
    "prefill": (0, 9, 9, dict(causal=True), None),
    "continued": (0, 9, 3, dict(causal=True, q_offset=6), None),
    "not last": (0, 9, 3, dict(causal=True, q_offset=2), None),
    "window": (0, 9, 9, dict(causal=True, window=5), None),
    "rolled": (3, 11, 4, dict(causal=True, q_offset=4, window=5), None),
    "rolled one": (6, 11, 1, dict(causal=True, q_offset=4, window=5), None),
    "rolled, all seen": (6, 11, 1, dict(), None),
    "chunk": (0, 9, 9, dict(causal=True, chunk=4), None),
    "rolled chunk": (5, 11, 2, dict(causal=True, q_offset=4, chunk=4), None),
    "softcap": (0, 9, 9, dict(causal=True, softcap=2.0), None),
    "first key unknown": (3, 11, 4, dict(causal=True, q_offset=4), "first-key"),
    "window longer than what was gathered": (
        3,
        11,
        4,
        dict(causal=True, q_offset=4, window=6),
        "first-key",
    ),
    "all of some": (3, 11, 4, dict(), "first-key"),
    "two-sided": (0, 9, 9, dict(window=5), "two-sided"),
    "mean": (0, 9, 9, dict(causal=True, q_offset=-3, empty_row="uniform"), "empty-row"),
}


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_every_range_with_every_mask(case: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    start, stop, Tq, flags, code = CASES[case]
    for kind, mask in MASKS.items():
        k_pages, table = pool(stop, start)
        v_pages = k_pages * 2
        q, m = torch.randn(B, HQ, Tq, D), mask(Tq, stop - start)

        def fn(q, k_pages, v_pages, table, m, stop):
            k = gather_kv(k_pages, table, start, stop).transpose(1, 2)
            v = gather_kv(v_pages, table, start, stop).transpose(1, 2)
            return attend(q, k, v, m, scale=0.3, **flags)

        for tensor, dims in ((q, (1, 3)), (k_pages, (1, 2, 3)), (v_pages, (1, 2, 3))):
            torch._dynamo.mark_static(tensor, dims)
        seen = lowered(fn, q, k_pages, v_pages, table, m, stop, dynamic=dynamic)
        # With a length that isn't known, less can be proved.
        if code is None and not dynamic:
            expected = "mask" if kind == "row" else None
            assert skips(seen.paged) == ([] if expected is None else [expected]), kind
            assert (gather_kv in seen.targets) is (expected is not None)
        elif code is not None:
            assert seen.paged.rewrites == 0 and gather_kv in seen.targets
            assert skips(seen.paged) in ([code], ["mask"])


def test_positions_origins_and_sinks() -> None:
    torch.manual_seed(0)
    k_pages, table = pool(12)
    v_pages, _ = pool(12, dim=6)
    v_pages = torch.randn_like(v_pages)
    q = torch.randn(B, HQ, 3, D)
    at = {
        "shared": torch.tensor([2, 5, 11]),
        "own": torch.tensor([[2, 5, 11], [0, 1, 7]]),
    }
    origins = {"none": None, "one": torch.tensor(1), "own": torch.tensor([0, 3])}
    for (_, positions), (_, origin) in itertools.product(at.items(), origins.items()):

        def fn(q, k_pages, v_pages, table, positions, origin, sinks):
            k = gather_kv(k_pages, table, 0, 12).transpose(1, 2)
            v = gather_kv(v_pages, table, 0, 12).transpose(1, 2)
            return attend(q, k, v, None, positions, origin, sinks, scale=0.3, causal=True, chunk=4)

        args = (q, k_pages, v_pages, table, positions, origin, torch.randn(HQ))
        assert lowered(fn, *args).paged.rewrites == 1


def test_golden() -> None:
    k_pages, table = pool(9)

    def fn(q, k, k_pages, v_pages, table, slots):
        store_kv(k, k, k_pages, v_pages, slots)
        keys = gather_kv(k_pages, table, 0, 9).transpose(1, 2)
        values = gather_kv(v_pages, table, 0, 9).transpose(1, 2)
        return attend(q, keys, values, None, scale=0.5, causal=True, q_offset=7)

    args = (torch.randn(B, HQ, 2, D), torch.randn(2, HKV, D), k_pages, k_pages * 2, table)
    seen = lowered(fn, *args, table[:, 2].long() * SIZE)
    assert_expected_inline(
        seen.text,
        """\
%0: float32[2, 2, 8] = input
%1: float32[9, 4, 2, 8] = input
%2: float32[9, 4, 2, 8] = input
%3: int64[2] = input
%4: int32[2, 4] = input
%5: float32[2, 4, 2, 8] = input
%6 = kvtailor::store_kv(%0, %0, %1, %2, %3)
%7: float32[2, 2, 4, 8] = aten::permute(%5, [0, 2, 1, 3])
%8: float32[4, 4, 8] = aten::reshape(%7, [4, 4, 8])
%9: int64[3] = aten::arange(3, device=cpu)
%10: int64[3] = aten::mul.Tensor(%9, 2)
%11: int32[3] = aten::_to_copy(%10, dtype=torch.int32)
%12: int32[2] = aten::full([2], 9, dtype=torch.int32, device=cpu)
%13: float32[4, 4, 8] = kvtailor::paged_attend(%8, %1, %2, %4, %11, %12, scale=0.5)
%14: float32[2, 2, 4, 8] = aten::reshape(%13, [2, 2, 4, 8])
%15: float32[2, 4, 2, 8] = aten::permute(%14, [0, 2, 1, 3])
return %15""",
    )


@pytest.mark.parametrize(
    "name, padded, early",
    [
        ("gemma3_text", 3, False),
        ("gemma3_text", 3, True),
        pytest.param("llama4_text", 0, True, marks=pytest.mark.slow),
    ],
)
def test_generate_compiled_never_gathers(name: str, padded: int, early: bool) -> None:
    model, inputs = make(name, tokens=12, padding=padded, num_hidden_layers=2)
    config = model.config
    arguments = dict(max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = model.generate(**inputs, **arguments)
    cache = paged(model)
    if early:
        heads, dim = config.num_key_value_heads, config.head_dim
        cache.early_initialization(2, heads, dim, torch.float32, torch.device("cpu"))
    model.compile(backend="kvtailor", options={"inner": "eager"})
    with recording() as seen:
        actual = model.generate(**inputs, cache=cache, **arguments)
    assert torch.equal(actual, expected)
    # Prefill, and one decode step for all lengths.
    assert len(seen.graphs) <= 3
    for graph in seen.graphs:
        assert graph.captured, graph.reason
        assert {site.lowering for site in graph.attention} == {"paged"}, graph.graph_after
        assert "gather_kv" not in graph.graph_after
        # Where the pages are made, they are no input, and stored to by copies.
        functional = "auto_functionalized_v2(kvtailor.store_kv" in graph.graph_after
        assert functional == (not early and graph is seen.graphs[0])
    cache.reset()
    assert cache.manager.stats.free_blocks == cache.manager.pool.num_blocks


@pytest.mark.parametrize(
    "flags",
    [
        dict(),
        dict(causal=False),
        dict(window=3),
        dict(chunk=4, softcap=2.0),
        dict(chunk=4, origin=True, sinks=True),
        dict(mask=True),
        dict(positions=True, slopes=True),
    ],
    ids=str,
)
def test_an_index_set_of_packed_rows(flags: dict) -> None:
    """Any rows, in any order, several times, from the end, and of no sequence at all."""
    torch.manual_seed(0)
    flags = dict(flags)
    k_pages, table = pool(9)
    v_pages = k_pages.nan_to_num(0) * 2
    table = torch.cat([table, table])  # two sequences of the same keys, one of them without rows
    starts = torch.tensor([0, 5, 5, 8, 9], dtype=torch.int32)
    lens = torch.tensor([9, 4, 9, 6], dtype=torch.int32)
    q, proj = torch.randn(11, HQ, D), torch.randn(5, D)
    extra = {
        "mask": torch.rand(11, 1, 9) > 0.4,
        "positions": torch.randint(0, 6, (11,)),
        "origin": torch.tensor([0, 1, 2, 3]),
        "sinks": torch.randn(HQ),
        "slopes": torch.rand(HQ),
    }
    given = [extra[name] if flags.pop(name, False) else None for name in extra]

    def fn(q, k_pages, v_pages, table, starts, lens, given, proj, rows):
        out = paged_attend(q * 2, k_pages, v_pages, table, starts, lens, *given, scale=0.3, **flags)
        return torch.nn.functional.linear(out[None], proj)[:, rows]

    graphs = []

    def backend(gm, example_inputs):
        graph = capture(gm, example_inputs)
        normalise(graph)
        assert narrow_rows(graph).rewrites >= 3
        graphs.append(tidied(graph))
        return graph.forward

    rows = torch.tensor([4, 8, 0, 7, 7, -3, 10, 2])
    args = (q, k_pages.nan_to_num(0), v_pages, table, starts, lens, given, proj)
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend=backend, dynamic=dynamic)
        for at in (rows, rows[:3]):
            with torch.no_grad():
                torch.testing.assert_close(compiled(*args, at), fn(*args, at))
    (node,) = graphs[0].graph.find_nodes(op="call_function", target=paged_attend)
    assert node.meta["val"].shape[0] == 8


def test_gather_kv() -> None:
    torch.manual_seed(0)
    pages, table = pool(11)
    for start, stop in ((0, 11), (3, 11), (4, 8), (5, 5), (0, 1)):
        expected = reference.gather_kv(pages, table, start, stop)
        for gather in (paged_torch.gather_kv, gather_kv):
            assert torch.equal(gather(pages, table, start, stop), expected)
            assert torch.equal(gather(pages, table.long(), start, stop), expected)
    torch.library.opcheck(torch.ops.kvtailor.gather_kv.default, (pages, table, 3, 11))
    with pytest.raises(ValueError, match="start must be 0 to stop, got 4 and 3"):
        gather_kv(pages, table, 4, 3)
    with pytest.raises(ValueError, match="block_table must be int32 or int64"):
        gather_kv(pages, table.float(), 0, 3)
