"""Pieces: how many there are, which share, and that they compute and write what the graph does."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest
import torch
from harness import through
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from kvtailor.backend import recording
from kvtailor.cli.models import shrunk
from kvtailor.compiler import inner, pieces
from kvtailor.compiler.split import NotSplittable, split
from kvtailor.passes.capture.capture import capture
from kvtailor.passes.effects import computes
from kvtailor.passes.text import show
from kvtailor.runtime.driver import Call, straight_line

EAGER = {"inner": "eager", "regions": "layer"}
SLOW = pytest.mark.slow

LIB = torch.library.Library("kvtailor_test_split", "DEF")
LIB.define("unsafe(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
LIB.impl("unsafe", lambda x: x * 2, "CompositeExplicitAutograd")
torch.library.register_fake("kvtailor_test_split::unsafe", torch.empty_like, lib=LIB)
unsafe = torch.ops.kvtailor_test_split.unsafe.default


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def run(model, *args, dynamic=None, options=None, **kwargs):
    """The reports of one compiled call, whose results were compared with eager."""
    call = torch.compile(
        model, backend="kvtailor", dynamic=dynamic, options={**EAGER, **(options or {})}
    )
    with recording(check=True) as recorder, torch.no_grad():
        call(*args, **kwargs)
    assert all(g.captured for g in recorder.graphs), [g.reason for g in recorder.graphs]
    assert max(g.max_error for g in recorder.graphs) <= 1e-5
    return recorder.graphs


def cut(fn, *args, dynamic=None, layers=True, rows=False):
    """The captured graph's computing ops, its pieces, and a run of them against eager."""
    found = []

    def compiler(gm, example_inputs):
        captured = capture(gm, example_inputs)
        ops = sum(computes(n) for n in captured.graph.nodes)
        pieces = split(captured, layers=layers, rows=rows)
        found.append((ops, pieces))
        calls = [Call(p.module().forward, p.inputs, p.outputs) for p in pieces.pieces]
        return straight_line(pieces.inputs, pieces.constants, pieces.symbols, calls, pieces.results)

    mine = [a.clone() if isinstance(a, Tensor) else a for a in args]
    with torch.no_grad():
        expected = fn(*args)
    actual = through(compiler, fn, *mine, dynamic=dynamic)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(mine, list(args))
    ((ops, pieces),) = found
    # Nothing is copied, or computed twice, to cross a cut.
    assert sum(computes(n) for p in pieces.pieces for n in p.graph.nodes) <= ops
    assert all(not p.idle for p in pieces.pieces)
    return pieces


def artefacts(pieces):
    return Counter(p.shared_with or p.name for p in pieces)


# --- how many -------------------------------------------------------------------------------------

LAYERS = "model.layers."


@pytest.mark.parametrize(("layers", "dynamic", "cache"), [(12, False, False), (4, True, True)])
def test_equal_layers_are_one_artefact(layers, dynamic, cache):
    model, inputs = shrunk("llama", num_hidden_layers=layers)
    (graph,) = run(model, dynamic=dynamic, use_cache=cache, logits_to_keep=1, **inputs)
    middle = [f"{LAYERS}{i}" for i in range(layers)]
    assert [p.name for p in graph.pieces] == ["prologue", *middle, "epilogue"]
    # The last layer runs on one row.
    assert artefacts(graph.pieces) == {
        "prologue": 1,
        f"{LAYERS}0": layers - 1,
        f"{LAYERS}{layers - 1}": 1,
        "epilogue": 1,
    }
    assert graph.pieces[-2].rows == ["all", 1] and graph.pieces[-1].rows == [1]


def test_two_kinds_of_layers():
    model, inputs = shrunk("gemma3_text", num_hidden_layers=12)
    (graph,) = run(model, use_cache=False, **inputs)
    assert artefacts(graph.pieces) == {
        "prologue": 1,
        f"{LAYERS}0": 6,
        f"{LAYERS}1": 6,
        "epilogue": 1,
    }


def test_owners_and_tail_of_shared_keys():
    # Layer 6 keeps its keys for the tail and is equal to the owners before it all the same.
    model, inputs = shrunk(
        "gemma3n_text",
        num_hidden_layers=12,
        num_kv_shared_layers=4,
        activation_sparsity_pattern=[0.0] * 12,
    )
    (graph,) = run(model, use_cache=False, logits_to_keep=1, **inputs)
    assert artefacts(graph.pieces) == {
        "prologue": 1,
        f"{LAYERS}0": 4,
        f"{LAYERS}1": 3,
        f"{LAYERS}7": 1,
        f"{LAYERS}8": 2,
        f"{LAYERS}9": 2,
        "epilogue": 1,
    }


def test_encoder_and_decoder_are_lists_of_their_own():
    model, inputs = shrunk("bart")
    (graph,) = run(model, use_cache=False, **inputs)
    assert artefacts(graph.pieces) == {
        "prologue": 1,
        "model.encoder.layers.0": 2,
        "model.decoder.layers.0": 2,
        "epilogue": 1,
    }


def test_regions_none_is_the_whole_graph():
    model, inputs = shrunk("llama")
    (graph,) = run(model, options={"regions": "none"}, use_cache=False, **inputs)
    assert graph.pieces == [] and graph.whole is None


@pytest.mark.parametrize("ops", [1, 2, 5])
def test_n_unsafe_ops_make_at_most_2n_plus_1_pieces(ops):
    def fn(x: Tensor) -> Tensor:
        for i in range(ops):
            x = unsafe(x + i)
        return x * 3

    pieces = cut(fn, torch.randn(4), layers=False, rows=True).pieces
    assert len(pieces) == 2 * ops + 1
    assert [p.unsafe is not None for p in pieces] == [i % 2 == 1 for i in range(2 * ops + 1)]


def test_consecutive_and_parallel_unsafe_ops_share_a_piece():
    def fn(x: Tensor) -> Tensor:
        y = unsafe(unsafe(x).view(2, 2)[0])
        return unsafe(x).sum() + y.sum()

    pieces = cut(fn, torch.randn(4), layers=False, rows=True).pieces
    assert [p.unsafe is not None for p in pieces] == [True, False]


def test_head_and_tail_are_cut_where_the_row_count_changes():
    model, inputs = shrunk("llama", num_hidden_layers=2)
    found = []

    def compiler(gm, example_inputs, opts):
        found.append(split(gm, layers=False, rows=True))
        calls = [Call(p.module().forward, p.inputs, p.outputs) for p in found[-1].pieces]
        return straight_line(
            found[-1].inputs, found[-1].constants, found[-1].symbols, calls, found[-1].results
        )

    original = inner.inner_compile
    inner.inner_compile = compiler
    try:
        run(model, options={"regions": "none"}, use_cache=False, logits_to_keep=1, **inputs)
    finally:
        inner.inner_compile = original
    head, tail = found[0].pieces
    # The tail is given one row of what the head made, not all of them.
    rows = [v.shape[1] for v in tail.example() if isinstance(v, Tensor) and v.dim() == 3]
    assert head.name == "graph/0" and tail.name == "graph/1"
    assert max(rows) == 1


def test_layers_are_found_by_repetition_without_modules():
    weights = [torch.randn(8, 8) for _ in range(10)]

    def fn(x: Tensor, *weights: Tensor) -> Tensor:
        x = x.softmax(-1)
        for up, down in zip(weights[::2], weights[1::2]):
            h = nn.functional.linear(x, up).relu()
            x = x + nn.functional.linear(h * 0.5, down).tanh() * 2 - 1
        return x.sum(-1).exp()

    pieces = cut(fn, torch.randn(3, 8), *weights).pieces
    kinds = Counter(p.key for p in pieces)
    assert max(kinds.values()) >= 4 and len(kinds) <= 3
    assert [p.name for p in pieces if p.name.startswith("layer")][:2] == ["layer 0", "layer 1"]
    repeated = next(p for p in pieces if kinds[p.key] > 1)
    assert [o for o in repeated.outputs if o] == repeated.outputs and len(repeated.outputs) == 1


# --- what is equal --------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self, factor: float = 2.0, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.factor = factor
        self.inner = nn.Linear(8, 8, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.to(self.inner.weight.dtype)).float().tanh() * self.factor


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (lambda: (Scaled(), Scaled()), 1),
        (lambda: (Scaled(), Scaled(3.0)), 2),
        (lambda: (Scaled(0.0), Scaled(-0.0)), 2),
        (lambda: (Scaled(), Scaled(dtype=torch.float64)), 2),
    ],
)
def test_equality_is_exact(make, kinds):
    torch.manual_seed(0)
    pieces = cut(Stack(*make()), torch.randn(3, 8)).pieces
    assert len({p.key for p in pieces}) == kinds


def test_strides_count_but_not_those_of_one():
    def key(x: Tensor) -> str:
        torch._dynamo.reset()
        (piece,) = cut(lambda x: x.exp(), x).pieces
        return piece.key

    assert key(torch.randn(4, 4)) != key(torch.randn(4, 4).t())
    assert key(torch.randn(1, 4)) == key(torch.randn(9, 4)[:1].as_strided((1, 4), (77, 1)))
    assert key(torch.randn(1, 4)) != key(torch.randn(1, 4, dtype=torch.float64))


def test_a_view_by_layer_index_does_not_tell_layers_apart():
    class Layer(nn.Module):
        def __init__(self, index: int):
            super().__init__()
            self.index, self.inner = index, nn.Linear(8, 8)

        def forward(self, x: Tensor, extra: Tensor) -> Tensor:
            return self.inner(x) + extra.select(1, self.index)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer(i) for i in range(4))

        def forward(self, x: Tensor, extra: Tensor, computed: bool) -> Tensor:
            if computed:
                extra = extra.exp()
            for layer in self.layers:
                x = layer(x, extra)
            return x

    for computed in (True, False):
        torch._dynamo.reset()
        (graph,) = run(Model(), torch.randn(3, 8), torch.randn(3, 4, 8), computed)
        assert artefacts(graph.pieces)["layers.0"] == 4


# --- writes and views -----------------------------------------------------------------------------


class Writer(nn.Module):
    """Reads what other layers write to, in every order."""

    def __init__(self, at: int):
        super().__init__()
        self.at, self.inner = at, nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: Tensor, other: Tensor) -> Tensor:
        before = cache.view(-1)[: x.numel()].view_as(x)
        x = self.inner(x) + before.sin()
        cache[self.at].copy_(x[0])
        other.add_(cache.sum())
        return x * other.mean()


class WriterStack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Writer(i) for i in range(3))

    def forward(self, x: Tensor, cache: Tensor, other: Tensor):
        early = cache[:2].t()
        for layer in self.layers:
            x = layer(x, cache, other)
        return x, early, cache[1], other


@pytest.mark.parametrize("dynamic", [False, True])
def test_writes_stay_in_order_across_cuts(dynamic):
    pieces = cut(
        WriterStack(), torch.randn(2, 4), torch.randn(3, 4), torch.randn(4), dynamic=dynamic
    )
    assert len(pieces.pieces) > 1


def test_one_cache_per_layer_is_written_in_its_layer():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor, cache: Tensor, at: Tensor) -> Tensor:
            cache.index_copy_(0, at, self.inner(x))
            return x + cache.sum(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x: Tensor, at: Tensor, *caches: Tensor) -> Tensor:
            for layer, cache in zip(self.layers, caches):
                x = layer(x, cache, at)
            return x

    torch.manual_seed(0)
    caches = [torch.zeros(5, 4) for _ in range(3)]
    pieces = cut(Model(), torch.randn(2, 4), torch.tensor([1, 3]), *caches).pieces
    assert len({p.key for p in pieces}) == 1 and len(pieces) == 3
    assert all("aten::copy_" in show(piece.module()) for piece in pieces)
    assert [p.outputs for p in pieces if "index_copy" in str(p.outputs)] == []


def test_a_static_cache_is_written_by_equal_pieces():
    from transformers import StaticCache

    model, inputs = shrunk("llama", num_hidden_layers=4)
    cache = StaticCache(config=model.config, max_cache_len=32)
    (graph,) = run(model, past_key_values=cache, logits_to_keep=1, **inputs)[-1:]
    assert artefacts(graph.pieces)[f"{LAYERS}0"] == 3


@pytest.mark.parametrize(
    "name",
    [
        "mistral",
        "bart",
        *(pytest.param(n, marks=SLOW) for n in ("gemma3n_text", "llama4_text", "modernbert")),
    ],
)
def test_dynamic_shapes(name):
    model, inputs = shrunk(name)
    cache = {} if name == "modernbert" else {"use_cache": False}
    (graph,) = run(model, dynamic=True, **cache, **inputs)
    # The four layers of the small gemma3n are of four kinds.
    assert (len(artefacts(graph.pieces)) < len(graph.pieces)) == (name != "gemma3n_text")


def test_number_read_from_a_tensor_stays_beside_its_use():
    model = Stack(Scaled(2.5), Scaled(3.5))

    def fn(x: Tensor, by: Tensor) -> Tensor:
        return model(x * by.item()) * by.item()

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        cut(fn, torch.randn(3, 8), torch.tensor(3.0))


def test_random_numbers_come_in_order():
    class Noisy(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.rand_like(x)

    model, x = Stack(Noisy(), Noisy()), torch.randn(3, 8)
    call = torch.compile(model, backend="kvtailor", options=EAGER)
    with torch.no_grad():
        torch.manual_seed(1)
        expected = model(x)
        call(x)
        torch.manual_seed(1)
        assert torch.equal(call(x), expected)


def test_what_cannot_be_cut_is_said():
    gm = torch.fx.symbolic_trace(Stack(Scaled()))
    with pytest.raises(NotSplittable, match="as a method"):
        split(gm)


def test_equal_results_stay_two_tensors():
    model = Stack(Scaled(), Scaled())

    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return model(x), x.exp(), x.exp(), x.exp().t()

    call = torch.compile(fn, backend="kvtailor", options=EAGER)
    with torch.no_grad():
        _, a, b, c = call(torch.randn(3, 8))
    assert len({t.data_ptr() for t in (a, b, c)}) == 3


# --- inner compilers ------------------------------------------------------------------------------


def test_pieces_through_inductor():
    torch.manual_seed(0)
    model = WriterStack()
    args = torch.randn(2, 4), torch.randn(3, 4), torch.randn(4)
    (graph,) = run(model, *args, options={"inner": "inductor"})
    assert len(graph.pieces) > 1 and not any(p.reason for p in graph.pieces)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_models_through_inductor(dynamic):
    from transformers import StaticCache

    for name in ("gemma3n_text", "llama"):
        torch._dynamo.reset()
        model, inputs = shrunk(name)
        kwargs = {**inputs, "logits_to_keep": 1}
        expected = model(**kwargs, use_cache=False).logits
        call = torch.compile(model, backend="kvtailor", dynamic=dynamic)
        with torch.no_grad():
            torch.testing.assert_close(call(**kwargs, use_cache=False).logits, expected)
            caches = [StaticCache(config=model.config, max_cache_len=32) for _ in range(2)]
            model(**kwargs, past_key_values=caches[0])
            call(**kwargs, past_key_values=caches[1])
            for mine, theirs in zip(caches[1].layers, caches[0].layers):
                if hasattr(mine, "keys"):
                    torch.testing.assert_close(mine.keys, theirs.keys)


def failing(monkeypatch, where):
    original = inner.inner_compile

    def compiler(gm, example_inputs, opts):
        if where in show(gm):
            raise RuntimeError("no compiler for this\nand a long story")
        return original(gm, example_inputs, opts)

    monkeypatch.setattr(inner, "inner_compile", compiler)


def test_a_piece_that_does_not_compile_runs_as_it_is(monkeypatch, caplog):
    failing(monkeypatch, "silu")
    model, inputs = shrunk("llama")
    (graph,) = run(model, use_cache=False, **inputs)
    reasons = {p.name: p.reason for p in graph.pieces}
    assert reasons["prologue"] is None and reasons["epilogue"] is None
    assert reasons[f"{LAYERS}0"] == reasons[f"{LAYERS}3"] == "RuntimeError: no compiler for this"
    assert "piece model.layers.0 runs uncompiled" in caplog.text


def test_strict_raises_for_a_piece_that_does_not_compile(monkeypatch):
    failing(monkeypatch, "silu")
    model, inputs = shrunk("llama")
    call = torch.compile(model, backend="kvtailor", options={**EAGER, "strict": True})
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match=r"piece model\.layers\.0"):
        call(use_cache=False, **inputs)


@torch._dynamo.config.patch(recompile_limit=2)
def test_past_the_recompile_limit_pieces_go_on_and_the_rest_runs_right(caplog):
    model, inputs = shrunk("llama", tokens=6)
    call = torch.compile(model, backend="kvtailor", dynamic=False, options=EAGER)
    with recording() as recorder, torch.no_grad():
        for length in (3, 4, 5, 6, 3):
            ids = inputs["input_ids"][:, :length]
            expected = model(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(call(input_ids=ids, use_cache=False).logits, expected)
    assert len(recorder.graphs) == 2 and all(len(g.pieces) > 2 for g in recorder.graphs)
    assert "recompile_limit" in caplog.text


# --- the driver -----------------------------------------------------------------------------------


def test_values_are_dropped_after_their_last_use():
    alive = []

    def first(x: Tensor) -> tuple[Tensor, Tensor]:
        made = x + 1
        alive.append(weakref.ref(made))
        return made, x * 2

    def second(made: Tensor) -> tuple[Tensor]:
        return (made.sum(),)

    def third(a: Tensor, b: Tensor) -> tuple[Tensor]:
        gc.collect()
        assert alive[0]() is None
        return (a + b.sum(),)

    calls = [
        Call(first, ["x"], ["made", "twice"]),
        Call(second, ["made"], ["sum"]),
        Call(third, ["sum", "twice"], ["out"]),
    ]
    call = straight_line(["x", "unused"], {}, {}, calls, [("out", None), (None, 7), ("x", None)])
    x = torch.ones(2)
    out, seven, same = call(x, None)
    assert out == 8 and seven == 7 and same is x


def test_distinct_pieces_are_compiled_once(monkeypatch):
    made = []

    def compiler(gm, example_inputs, opts):
        made.append(lambda *args: gm.forward(*args))
        return made[-1]

    monkeypatch.setattr(inner, "inner_compile", compiler)
    chained = []
    monkeypatch.setattr(
        pieces, "straight_line", lambda *args: chained.extend(args[3]) or straight_line(*args)
    )
    model, inputs = shrunk("gemma3_text", num_hidden_layers=4)
    # Inductor's bar is shown, but not where standard error is no terminal.
    (graph,) = run(model, options={"inner": "inductor"}, use_cache=False, **inputs)
    assert len(made) == len(artefacts(graph.pieces)) == 4
    assert [made.index(c.function) for c in chained] == [0, 1, 2, 1, 2, 3]


def test_results_that_lie_otherwise_than_the_graph_says_are_laid_out():
    """Inductor's cat of one tensor keeps its strides, where the graph's makes a dense one."""
    x = torch.randn(2, 3, 4)
    swapped = x.transpose(0, 1).contiguous().transpose(0, 1)
    seen = []
    calls = [
        Call(lambda x: (swapped, x), ["x"], ["dense", "other"], {"dense": (), "other": (1, 2, 6)}),
        Call(lambda a, b: (seen.append((a, b)),), ["dense", "other"], [None]),
    ]
    straight_line(["x"], {}, {}, calls, [])(x)
    ((dense, other),) = seen
    assert dense.is_contiguous() and torch.equal(dense, x)
    assert other.stride() == (1, 2, 6) and torch.equal(other, x)


def test_keys_cached_from_nothing_cross_pieces_under_inductor():
    model, inputs = shrunk("gemma3n_text", tokens=5, num_hidden_layers=4)
    call = torch.compile(model, backend="kvtailor", dynamic=False)
    with torch.no_grad():
        expected = model(**inputs).logits
        torch.testing.assert_close(call(**inputs).logits, expected, atol=1e-5, rtol=1e-5)
