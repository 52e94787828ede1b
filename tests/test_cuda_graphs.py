"""CUDA graph dispatch, on the CPU capturer: each piece by its own rows, and nothing stale."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kvtailor.backend import recording
from kvtailor.cli.models import shrunk
from kvtailor.config import SIZES, parse_options
from kvtailor.runtime import cuda_graphs
from kvtailor.runtime.cuda_graphs import MOST_MOVES, GraphedPiece, Signature
from kvtailor.tests.cpu_capturer import ChangedAddress, CpuCapturer, StaleRows
from kvtailor.tests.models import ENCODERS, MODELS, build, implementations

OPTIONS = {"inner": "eager", "cuda_graphs": True}
UNPADDED = ("vit", "whisper")


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def rowwise(weight: Tensor):
    def call(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        return ((x @ weight).tanh(),)

    shape = Signature({1}, set(), [0, None], [], [0], None)
    return call, shape


# --- one piece ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "size"), [(1, 1), (3, 4), (4, 4), (9, 16), (257, 272), (512, 512), (513, None)]
)
def test_the_next_size_up(rows, size):
    weight = torch.eye(2)
    piece = GraphedPiece("p", *rowwise(weight), SIZES, CpuCapturer())
    assert piece._size((torch.zeros(rows, 2), weight)) == size


def test_padded_and_replayed_then_fewer_rows():
    weight = torch.randn(4, 4)
    call, shape = rowwise(weight)
    seen = []

    class Watching(CpuCapturer):
        def capture(self, call, inputs, buffers):
            recording = super().capture(call, inputs, buffers)
            original = recording.replay
            recording.replay = lambda: (seen.append(buffers[0].clone()), original())
            return recording

    piece = GraphedPiece("p", call, shape, [1, 2, 4], Watching())
    weightless = torch.randn(8, 4)
    piece(weightless[:2], weight)  # the first call says where the weight lies
    assert piece.counts.plain == 1 and piece.counts.captured == []
    for rows in ([3, 7, 5], [0], [6, 1]):
        x = weightless[rows]
        (out,) = piece(x, weight)
        torch.testing.assert_close(out, (x @ weight).tanh())
    # Largest first, each padded with its last row.
    assert piece.counts.captured == [4, 2, 1] and piece.counts.replays == 3
    assert torch.equal(seen[0], weightless[[3, 7, 5, 5]])
    assert torch.equal(seen[1], weightless[[0]])
    assert piece.memory > 0
    (out,) = piece(torch.randn(5, 4), weight)
    assert out.shape == (5, 4) and piece.counts.plain == 2


def test_indices_are_padded_with_the_last_valid_one():
    table = torch.randn(8, 3)

    def call(rows: Tensor, table: Tensor) -> tuple[Tensor]:
        return (table[rows],)

    piece = GraphedPiece(
        "p", call, Signature({1}, set(), [0, None], [], [0], None), [4], CpuCapturer()
    )
    seen = []
    original = cuda_graphs._fill

    def fill(buffer, x, axis):
        original(buffer, x, axis)
        seen.append(buffer.tolist())

    cuda_graphs._fill = fill
    try:
        for rows in ([3, 7], [3, 7], [0]):
            (out,) = piece(torch.tensor(rows), table)
            assert torch.equal(out, table[rows])
    finally:
        cuda_graphs._fill = original
    assert seen[-2:] == [[3, 7, 7, 7], [0, 0, 0, 0]]


def test_stale_rows_are_found(monkeypatch):
    weight = torch.randn(4, 4)
    piece = GraphedPiece("p", *rowwise(weight), [4], CpuCapturer())
    for _ in range(3):
        piece(torch.randn(3, 4), weight)

    def forgetful(buffer, x, axis):
        buffer[: x.shape[0]].copy_(x)

    monkeypatch.setattr(cuda_graphs, "_fill", forgetful)
    with pytest.raises(StaleRows):
        piece(torch.randn(3, 4), weight)


def test_memory_that_moved_under_a_recording_is_found():
    weight = torch.randn(4, 4)
    piece = GraphedPiece("p", *rowwise(weight), [4], CpuCapturer())
    for _ in range(2):
        piece(torch.randn(4, 4), weight)
    _, (buffer, _) = piece._graphs[4]
    buffer.set_(torch.zeros(4, 4))
    with pytest.raises(ChangedAddress):
        piece(torch.randn(4, 4), weight)


def test_what_is_used_in_place_may_move_and_the_result_stays_right():
    weights = [torch.randn(4, 4) for _ in range(3)]
    piece = GraphedPiece("p", *rowwise(weights[0]), [4], CpuCapturer())
    for weight in [weights[0]] * 3 + [weights[1]] * 3:
        x = torch.randn(3, 4)
        torch.testing.assert_close(piece(x, weight)[0], (x @ weight).tanh())
    assert piece.counts.moves == 1 and piece.counts.replays == 4
    for i in range(2 * MOST_MOVES):
        x, weight = torch.randn(3, 4), weights[i % 2]
        torch.testing.assert_close(piece(x, weight)[0], (x @ weight).tanh())
    assert piece.reason == "input 1 is used in place and lies elsewhere again and again"


def test_capturing_undoes_what_it_writes():
    def call(x: Tensor, total: Tensor) -> tuple[Tensor]:
        total.add_(x.sum())
        return (x + 1,)

    piece = GraphedPiece(
        "p", call, Signature({1}, {1}, [None, None], [], None, 2), [2], CpuCapturer()
    )
    total = torch.zeros(1)
    for i in range(1, 5):
        piece(torch.ones(2), total)
        assert total.item() == 2 * i
    assert piece.counts.replays == 3


def test_returned_results_are_the_callers():
    weight = torch.eye(2)
    call, shape = rowwise(weight)
    for returned, same in (((), True), ((0,), False)):
        piece = GraphedPiece("p", call, shape, [2], CpuCapturer(), returned)
        first, second = (piece(torch.full((2, 2), v), weight)[0] for v in (0.0, 1.0))
        third = piece(torch.full((2, 2), 2.0), weight)[0]
        assert torch.equal(second, third) == same and not torch.equal(first, third)


def test_strides_are_those_of_the_input():
    def call(x: Tensor) -> tuple[Tensor]:
        assert x.stride() == (1, x.shape[0])
        return (x * 2,)

    piece = GraphedPiece(
        "p", call, Signature(set(), set(), [0], [], [0], None), [2, 4], CpuCapturer()
    )
    for n in (2, 3):
        x = torch.randn(5, n).t()
        assert torch.equal(piece(x)[0], x * 2)
    broadcast = GraphedPiece("q", lambda x: (x * 2,), piece.signature, [4], CpuCapturer())
    x = torch.ones(1, 3).expand(4, 3)
    assert torch.equal(broadcast(x)[0], x * 2)
    assert broadcast.reason == (
        "input 0 lies in memory in a way that has no room for more rows: [4, 3] with strides [0, 1]"
    )


def test_results_lie_as_they_would_without_padding():
    shape = Signature(set(), set(), [1], [], [1], None)
    piece = GraphedPiece("p", lambda x: (x * 2,), shape, [2, 4], CpuCapturer())
    for n in (3, 1, 2):
        x = torch.randn(5, n, 2)
        (out,) = piece(x)
        assert torch.equal(out, x * 2) and out.is_contiguous()


def test_parts_of_something_larger_keep_their_strides():
    def call(x: Tensor) -> tuple[Tensor]:
        assert x.stride() == (12, 1)
        return (x * 2,)

    shape = Signature(set(), set(), [0], [], [0], None)
    piece = GraphedPiece("p", call, shape, [2, 4], CpuCapturer())
    for n in (3, 2, 4, 1):
        x = torch.randn(n, 3, 4)[:, 1]
        assert torch.equal(piece(x)[0], x * 2)
    assert piece.counts.replays == 4 and piece.reason is None
    # What is further out moves with the rows.
    shape = Signature(set(), set(), [1], [], [1], None)
    inner = GraphedPiece("q", lambda x: (x * 2,), shape, [2, 4], CpuCapturer())
    for n in (3, 2):
        x = torch.randn(3, n, 4)[:, :, :3]
        assert torch.equal(inner(x)[0], x * 2)
    assert inner.counts.replays == 2
    # Some of the rows of something, no one knows of how many.
    part = GraphedPiece("r", lambda x: (x * 2,), shape, [2, 4], CpuCapturer())
    x = torch.randn(3, 4, 4)[:, :3]
    assert torch.equal(part(x)[0], x * 2) and part.reason is not None


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="capture sizes must be positive"):
        GraphedPiece("p", *rowwise(torch.eye(2)), [0, 1], CpuCapturer())
    for wrong in ([], [0]):
        with pytest.raises(ValueError, match="option capture_sizes"):
            parse_options({"capture_sizes": wrong}, pass_names=(), environ={})
    assert parse_options({}, "reduce-overhead", pass_names=(), environ={}).graphs
    assert not parse_options({}, pass_names=(), environ={}).graphs
    off = parse_options({"cuda_graphs": False}, "reduce-overhead", pass_names=(), environ={})
    assert not off.graphs


# --- whole models ---------------------------------------------------------------------------------


def check(call, model, inputs, **kwargs):
    with torch.no_grad():
        expected = model(**inputs, use_cache=False, **kwargs).logits
        for _ in range(3):
            torch.testing.assert_close(
                call(**inputs, use_cache=False, **kwargs).logits, expected, atol=1e-5, rtol=1e-5
            )


def by_name(graph):
    return {p.name: p for p in graph.pieces}


@pytest.mark.parametrize("tokens", [300, pytest.param(4000, marks=pytest.mark.slow)])
def test_a_long_head_runs_plainly_and_the_tail_is_replayed(pieces, tokens):
    model, inputs = shrunk("gemma3n_text", tokens=tokens, batch=2)
    call = torch.compile(model, backend="kvtailor", options=OPTIONS, dynamic=False)
    with recording() as recorder:
        check(call, model, inputs, logits_to_keep=1)
    (graph,) = recorder.graphs
    found = by_name(graph)
    # The tail has two rows, one per sequence.
    assert found["model.layers.0"].no_graph == f"its {2 * tokens} rows are more than 512"
    assert found["model.layers.0"].capture_sizes is None
    for name in ("model.layers.1/1", "model.layers.2", "model.layers.3", "epilogue"):
        assert found[name].capture_sizes == [2], name
    # The first call says where the parameters lie; a piece without any captures at once.
    assert all(p.counts.captured in ([2], [1]) and p.counts.replays >= 2 for p in pieces)
    assert all(p.counts.plain + p.counts.replays == 3 for p in pieces)


def test_tail_by_index_rows_is_padded_by_its_own_count(pieces):
    model, inputs = shrunk("llama", tokens=8, batch=1)
    options = {**OPTIONS, "regions": "none", "capture_sizes": [1, 2, 4]}
    call = torch.compile(model, backend="kvtailor", options=options, dynamic=True)
    with torch.no_grad(), recording():
        for rows in ([3, 7, 5], [3, 7, 4], [1, 7, 5], [3, 7], [0, 6]):
            keep = torch.tensor(rows)
            torch._dynamo.maybe_mark_dynamic(keep, 0)
            expected = model(**inputs, use_cache=False, logits_to_keep=keep).logits
            actual = call(**inputs, use_cache=False, logits_to_keep=keep).logits
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    tails = [p for p in pieces if p.signature.result_axes is not None and p.counts.replays]
    assert tails and all(p.counts.captured == [4, 2, 1] for p in tails)


def test_reduce_overhead_without_a_device_says_so(caplog):
    model, inputs = shrunk("llama")
    call = torch.compile(model, backend="kvtailor", options={"inner": "eager", "cuda_graphs": True})
    with recording() as recorder, torch.no_grad(), caplog.at_level("INFO", logger="kvtailor"):
        call(**inputs, use_cache=False)
    assert all(p.capture_sizes is None for p in recorder.graphs[0].pieces)
    if not torch.cuda.is_available():
        assert "no CUDA device" in caplog.text


def test_static_cache_decode_is_replayed(pieces):
    from transformers import StaticCache

    model, inputs = shrunk("llama", tokens=6)
    caches = [StaticCache(config=model.config, max_cache_len=16) for _ in range(2)]
    call = torch.compile(model, backend="kvtailor", options=OPTIONS, dynamic=False)
    with torch.no_grad():
        for cache in caches:
            model(**inputs, past_key_values=cache)
        token = inputs["input_ids"][:, :1]
        for _ in range(5):
            expected = model(token, past_key_values=caches[0]).logits
            actual = call(token, past_key_values=caches[1]).logits
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(caches[1].layers, caches[0].layers):
        torch.testing.assert_close(mine.keys, theirs.keys)
    assert sum(p.counts.replays for p in pieces) >= len(pieces)


@pytest.mark.parametrize("mix", ["sum", "flip", "cumsum"])
def test_rows_that_mix_are_not_padded(pieces, mix):
    def fn(x: Tensor) -> Tensor:
        mixed = {
            "sum": lambda: x + x.sum(0),
            "flip": lambda: x.flip(0),
            "cumsum": lambda: x.cumsum(0),
        }[mix]()
        return mixed * 2

    call = torch.compile(fn, backend="kvtailor", options=OPTIONS)
    with recording() as recorder:
        for n in (3, 5, 3):
            x = torch.randn(n, 4)
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(call(x), fn(x))
    assert pieces == []
    assert all("padding would change results" in g.pieces[0].no_graph for g in recorder.graphs)


def test_rowwise_functions_are_padded(pieces):
    weight = nn.Parameter(torch.randn(4, 4))

    @torch.compile(backend="kvtailor", options=OPTIONS, dynamic=True)
    def fn(x: Tensor) -> Tensor:
        return nn.functional.linear(x, weight).softmax(-1)

    with torch.no_grad():
        for n in (3, 5, 3, 7):
            x = torch.randn(n, 4)
            torch.testing.assert_close(fn(x), nn.functional.linear(x, weight).softmax(-1))
    (piece,) = pieces
    assert piece.counts.replays == 3 and piece.counts.captured[0] == 512


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_replayed(pieces, name):
    model, inputs = build(name, implementations(name)[0], padding=0 if name in UNPADDED else 3)
    cache = {} if name in ENCODERS else {"use_cache": False}
    call = torch.compile(model, backend="kvtailor", options=OPTIONS, dynamic=False)
    with torch.no_grad():
        expected = model(**inputs, **cache)[0]
        for _ in range(3):
            actual = call(**inputs, **cache)[0]
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    assert sum(p.counts.replays for p in pieces) > 0
