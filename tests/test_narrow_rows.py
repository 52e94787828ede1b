"""narrow_rows: what runs on which rows, and equality with eager."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from harness import through, tidied
from torch import Tensor, nn

from kvtailor.backend import recording
from kvtailor.cli.models import shrunk
from kvtailor.kernels.ops import attend
from kvtailor.passes.capture.capture import capture
from kvtailor.passes.graph import SITE, sites
from kvtailor.passes.lower_dense_attention import lower_dense_attention
from kvtailor.passes.narrow_rows import narrow_rows
from kvtailor.passes.report import AttentionSite
from kvtailor.passes.text import show

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


# --- a hand-written decoder: layers that own keys, layers that share them ------------------------


class Layer(nn.Module):
    """Pre-norm decoder layer over B x T x 32, four heads over two; window None is full causal."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.norm = nn.LayerNorm(32)
        self.q, self.k, self.v, self.o = (nn.Linear(32, n) for n in (32, 16, 16, 32))
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(
        self, x: Tensor, shared: tuple[Tensor, Tensor] | None, angle: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        B, T, D = x.shape
        h = self.norm(x)
        q = self.q(h).view(B, T, 4, 8).transpose(1, 2) + angle[None, None, :, None]
        if shared is None:
            k = self.k(h).view(B, T, 2, 8).transpose(1, 2)
            shared = k, self.v(h).view(B, T, 2, 8).transpose(1, 2)
        a = attend(q, *shared, scale=0.35, causal=True, window=self.window)
        x = x + self.o(a.transpose(1, 2).reshape(B, T, D))
        # GPT-2 flattens batch and tokens for its linears.
        y = self.down(nn.functional.gelu(self.up(x.reshape(-1, D)))).view(B, T, D)
        return x + y, shared


class Decoder(nn.Module):
    """layers: (window, owner): owner is the layer whose keys are read, None for its own."""

    def __init__(self, layers: list[tuple[int | None, int | None]]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.ModuleList(Layer(window) for window, _ in layers)
        self.owners = [owner for _, owner in layers]

    def forward(self, ids: Tensor, keep: int | Tensor) -> Tensor:
        x, owned = self.embed(ids), []
        angle = torch.arange(ids.shape[1]).float().sin()
        for layer, owner in zip(self.layers, self.owners):
            x, keys = layer(x, None if owner is None else owned[owner], angle)
            owned.append(keys)
        if isinstance(keep, int):
            x = x[:, -keep:] if keep else x
        elif keep.dim() == 2:
            x = x[torch.arange(x.shape[0]), keep[:, 0]]
        else:
            x = x[:, keep]
        return self.head(x)


class Narrowed:
    """A backend of narrow_rows and dense lowering alone; keeps what it saw."""

    def __init__(self) -> None:
        self.sites: list[AttentionSite] = []
        self.text = ""
        self.skipped: list[str] = []
        self.again = -1

    def __call__(self, gm, example_inputs):
        graph = capture(gm, example_inputs)
        for i, node in enumerate(graph.graph.find_nodes(op="call_function", target=attend)):
            node.meta[SITE] = AttentionSite(f"layer{i}", node.name)
            sites(graph).append(node.meta[SITE])
        report = narrow_rows(graph)
        tidied(graph)
        self.sites, self.skipped = sites(graph), [s.code for s in report.skipped]
        self.text = show(graph)
        self.again = narrow_rows(graph).rewrites
        lower_dense_attention(graph)
        return tidied(graph).forward

    @property
    def rows(self) -> list[int | str]:
        return [s.query_rows for s in self.sites]

    @property
    def keys(self) -> list[int | str]:
        return [s.key_rows for s in self.sites]


YOCO = [(None, None), (4, None), (None, 0), (4, 1), (None, 0)]
INTERLEAVED = [(None, None), (None, 0), (None, None), (None, 2)]
OWNS_AFTER = [(None, None), (None, 0), (None, None), (None, 0)]
LOCAL = [(None, None), (None, None), (4, None), (4, None)]
KEEP = {
    "last": 1,
    "last4": 4,
    "all": 0,
    "index": torch.tensor([3, -1, 7]),
    "per_row": torch.tensor([[3], [19], [7]]),
}


# Every demand on one model of each kind; the sharing patterns differ in rows, not in demands.
SHARED = [(None, None), (4, None), (None, 0)]
CASES = [
    *[(SHARED, keep, dynamic) for keep in KEEP for dynamic in (False, True)],
    *[(LOCAL, keep, False) for keep in ("last4", "per_row")],
    (LOCAL, "last", True),
    *[(layers, "index", False) for layers in (INTERLEAVED, OWNS_AFTER)],
]


@pytest.mark.parametrize(("layers", "keep", "dynamic"), CASES)
def test_equal_to_eager_and_done_once(layers, keep, dynamic):
    torch.manual_seed(0)
    model, seen = Decoder(layers).eval(), Narrowed()
    run = torch.compile(model, backend=seen, dynamic=dynamic)
    with torch.no_grad():
        for batch, length in ((3, 20), (3, 31)) if dynamic else ((3, 20),):
            ids = torch.randint(0, 64, (batch, length))
            torch.testing.assert_close(run(ids, KEEP[keep]), model(ids, KEEP[keep]))
    assert seen.again == 0
    if keep == "all":
        assert set(seen.rows) == {"all"}
        assert seen.sites[-1].rows_reason == "output 0 of head needs every row"
        assert set(seen.skipped) == {"all-rows"}


@pytest.mark.parametrize(
    ("layers", "rows", "keys"),
    [
        # Layer 1 owns windowed keys that the tail reads: 1 + 3 of them.
        (YOCO, [4, 1, 1, 1, 1], ["all", 4, "all", 4, "all"]),
        # Only the suffix narrows: layer 2 owns full keys, so everything below runs on all rows.
        (INTERLEAVED, ["all", "all", 1, 1], ["all"] * 4),
        (OWNS_AFTER, ["all", "all", 1, 1], ["all"] * 4),
        # Each local layer adds its halo of W - 1.
        (LOCAL, ["all", 7, 4, 1], ["all", "all", 7, 4]),
    ],
    ids=["yoco", "interleaved", "owns-after", "local"],
)
def test_rows_of_the_last_token(layers, rows, keys):
    seen = Narrowed()
    through(seen, Decoder(layers).eval(), torch.arange(20)[None], 1)
    assert (seen.rows, seen.keys) == (rows, keys)


@pytest.mark.parametrize(("window", "layers"), [(128, 19), (128, 1)])
def test_halo_grows_by_w_minus_1_per_local_layer(window, layers):
    """1 + n (W - 1) rows below n local layers, numbers.md section 1."""
    tokens = 1 + layers * (window - 1) + 5
    seen = Narrowed()

    class Stack(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(layers):
                x = x + attend(x, x, x, scale=1.0, causal=True, window=window)
            return x[:, :, -1:]

    x = torch.zeros(1, 1, tokens, 2)
    through(seen, Stack(), x)
    assert seen.sites[0].key_rows == 1 + layers * (window - 1)
    assert seen.sites[0].query_rows == 1 + (layers - 1) * (window - 1)


def test_chunks_are_read_from_their_start_and_padding_masks_are_cut_with_the_keys():
    seen = Narrowed()
    allowed = torch.ones(2, 1, 1, 22, dtype=torch.bool)
    allowed[0, ..., :18] = False

    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = attend(x, x, x, allowed, scale=1.0, causal=True, chunk=8)
        return (y @ w)[:, :, -2:]

    x, w = torch.randn(2, 3, 22, 4), torch.randn(4, 4)
    torch.testing.assert_close(through(seen, fn, x, w), fn(x, w))
    assert (seen.rows, seen.keys) == ([2], [6])


def test_rows_that_may_see_no_key_keep_every_key():
    """The mean of v over all keys is what such a row gets: no key may be dropped."""
    seen = Narrowed()
    hidden = torch.zeros(1, 1, 1, 12)
    hidden[..., 6:] = torch.finfo(torch.float32).min

    def fn(x: Tensor) -> Tensor:
        kwargs = dict(scale=1.0, causal=True, window=3, empty_row="uniform")
        return attend(x, x, x, hidden, **kwargs)[:, :, -1:].exp()

    x = torch.randn(1, 2, 12, 4)
    torch.testing.assert_close(through(seen, fn, x), fn(x))
    assert (seen.rows, seen.keys) == ([1], ["all"])


def test_unknown_ops_and_writes_need_every_row():
    seen = Narrowed()

    def fn(x: Tensor, cache: Tensor) -> Tensor:
        y = attend(x, x, x, scale=1.0, causal=True)
        z = attend(y, y, y, scale=1.0, causal=True)
        cache.copy_(y)
        return torch.fft.fft(z, dim=2).real[:, :, -1:]

    x = torch.randn(1, 2, 6, 4)
    caches = torch.zeros_like(x), torch.zeros_like(x)
    torch.testing.assert_close(through(seen, fn, x, caches[0]), fn(x, caches[1]))
    torch.testing.assert_close(*caches)
    assert seen.rows == ["all", "all"]
    assert seen.sites[1].rows_reason == "aten::fft_fft is not known to work row by row"


def test_random_ops_are_not_moved_to_fewer_rows():
    seen = Narrowed()

    def fn(x: Tensor) -> Tensor:
        y = attend(x, x, x, scale=1.0, causal=True)
        return (y + torch.rand_like(y))[:, :, -1:]

    x = torch.randn(1, 2, 6, 4)
    torch.manual_seed(3)
    expected = fn(x)
    torch.manual_seed(3)
    torch.testing.assert_close(through(seen, fn, x), expected)


ONE_ROW = {
    "linear": lambda x, w: torch.nn.functional.linear(x, w[0]),
    "matmul by one matrix": lambda x, w: torch.matmul(x, w[0]),
    "matmul": lambda x, w: torch.matmul(x, w),
    "matmul, batch of one": lambda x, w: torch.matmul(x[:1], w).transpose(0, 1),
    "sum of broadcasts": lambda x, w: x + w[:, :1],
    "expand": lambda x, w: (x * 2).expand(3, 2, 1, 4)[0],
    "attention": lambda x, w: attend(x[:, None], w[:, None], w[:, None], scale=1.0)[:, 0],
    "causal, positions": lambda x, w: attend(
        *(x[:, None], w[:, None], w[:, None], None, torch.tensor([2])), scale=1.0, causal=True
    )[:, 0],
}


@pytest.mark.parametrize("name", ONE_ROW)
def test_one_row_taken_several_times(name):
    """An index may ask for more rows than there are: one row is then no row that is broadcast."""

    def fn(x: Tensor, w: Tensor, rows: Tensor) -> Tensor:
        return ONE_ROW[name](x, w)[:, rows].exp()

    x, w, rows = torch.randn(2, 1, 4), torch.randn(2, 4, 4), torch.tensor([0, 0, -1])
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(fn, backend=Narrowed())(x, w, rows), fn(x, w, rows)
        )


@pytest.mark.parametrize("flags", [{}, {"causal": True}, {"window": 3}, {"chunk": 2}], ids=str)
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("last", ["slice", "index", "per batch"])
def test_attention_over_the_rows_of_several_sequences(flags, positions, last):
    """Packed as [1, H, B * T, D], the last rows of all sequences are no range of rows."""
    B, T = 3, 5

    def fn(x: Tensor, at: Tensor, lengths: Tensor) -> Tensor:
        q = x.reshape(1, B * T, 2, 4).transpose(1, 2)
        y = attend(q, q, q, None, at if positions else None, scale=1.0, **flags)
        y = y.transpose(1, 2).reshape(B, T, 8) + 1
        if last == "slice":
            return y[:, -1:]
        return y[:, lengths] if last == "index" else y[torch.arange(B), lengths]

    given = torch.randn(B, T, 8), torch.arange(B * T), torch.tensor([4, 1, -2])
    torch.testing.assert_close(through(Narrowed(), fn, *given), fn(*given))


def test_golden():
    seen = Narrowed()
    w = torch.randn(4, 4)

    def fn(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.linear(attend(q, k, k, scale=1.0, causal=True), w)[:, :, -1:]

    through(seen, fn, torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4), w)
    assert_expected_inline(
        seen.text,
        """\
%0: float32[1, 2, 6, 4] = input
%1: float32[1, 2, 6, 4] = input
%2: float32[4, 4] = input
%3: float32[1, 2, 1, 4] = aten::slice.Tensor(%0, 2, 5, end)
%4: float32[1, 2, 1, 4] = kvtailor::attend(%3, %1, %1, scale=1.0, causal=True, q_offset=5)
%5: float32[1, 2, 1, 4] = aten::linear(%4, %2)
return %5""",
    )


# --- whole models ---------------------------------------------------------------------------------


def inspected(model: nn.Module, *args, **kwargs):
    """(output, reports) of a compiled model, every graph checked against eager."""
    model.compile(backend="kvtailor", options={"inner": "eager"})
    with recording(check=True) as recorder, torch.no_grad():
        out = model(*args, **kwargs)
    for graph in recorder.graphs:
        assert graph.captured, graph.reason
        assert graph.max_error is not None and graph.max_error <= 1e-5
    return out, recorder.graphs


def rows(graph) -> list[int | str]:
    return [site.query_rows for site in graph.attention]


def gemma(name: str, layers: list[str] | None = None, **overrides):
    """Six layers, the last two of which share keys; s is sliding, f is full."""
    kinds = {"s": "sliding_attention", "f": "full_attention"}
    types = [kinds[c] for c in layers or "ssfssf"]
    return shrunk(name, tokens=20, num_hidden_layers=6, layer_types=types, **overrides)


GEMMA3N_ROWS = {
    # The tail and the last owner run on the last row; layer 2 on the halo of layer 3's window.
    "last": (dict(logits_to_keep=1), ["all", "all", 8, 1, 1, 1]),
    "last4": (dict(logits_to_keep=4), ["all", "all", 11, 4, 4, 4]),
    "index": (dict(logits_to_keep=torch.tensor([3, 7])), ["all", "all", "all", 2, 2, 2]),
    "all": (dict(), ["all"] * 6),
    # A cache keeps every key, so the owners' inputs are needed whole.
    "cached": (dict(logits_to_keep=1, use_cache=True), ["all", "all", "all", 1, 1, 1]),
    "hidden": (dict(logits_to_keep=1, output_hidden_states=True), ["all"] * 6),
}


@pytest.mark.parametrize("case", GEMMA3N_ROWS)
def test_gemma3n(case):
    kwargs, expected = GEMMA3N_ROWS[case]
    model, inputs = gemma("gemma3n_text")
    _, graphs = inspected(model, **inputs, **{"use_cache": False, **kwargs})
    graph = next(g for g in graphs if g.attention)
    assert rows(graph) == expected
    if case == "last":
        owners = [s.kv_owner for s in graph.attention]
        assert owners[4:] == ["model.layers.3.self_attn", "model.layers.2.self_attn"]
        assert [p.name for p in graph.row_spaces] == ["head", "rows 8", "tail"]
        assert graph.flops_after < graph.flops_before
    if case in ("all", "hidden"):
        assert all("needs every row" in str(s.rows_reason) for s in graph.attention)
        assert all(str(s.rows_reason).startswith("output ") for s in graph.attention)


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
@pytest.mark.parametrize("keep", [1, torch.tensor([2, -1])], ids=["last", "index"])
def test_static_cache_narrows_the_tail(name, keep):
    from transformers import StaticCache

    model, inputs = gemma(name)
    cache = StaticCache(config=model.config, max_cache_len=32)
    out, (graph, *_) = inspected(model, **inputs, past_key_values=cache, logits_to_keep=keep)
    kept = 1 if isinstance(keep, int) else 2
    # The owner in layer 3 writes the last 8 keys alone: its cache holds no more.
    assert rows(graph)[:2] == ["all", "all"] and rows(graph)[2] in (8, "all")
    assert rows(graph)[3] == kept
    assert all(r in (kept, "all") for r in rows(graph)[4:])
    assert out.logits.shape[1] == kept


def test_k01_sharing_does_not_depend_on_the_cache():
    for name in ("gemma3n_text", "gemma4_text"):
        model, inputs = gemma(name, sliding_window=4)
        cached, _ = inspected(model, **inputs, use_cache=True, logits_to_keep=1)
        plain, _ = inspected(model, **inputs, use_cache=False, logits_to_keep=1)
        torch.testing.assert_close(cached.logits, plain.logits, rtol=0, atol=1e-5)


def test_k02_tail_queries_keep_their_positions():
    model, inputs = gemma("gemma3n_text", sliding_window=4)
    ids = inputs["input_ids"][:, :10]
    whole, _ = inspected(model, input_ids=ids, use_cache=False, logits_to_keep=1)
    first, _ = inspected(model, input_ids=ids[:, :9], use_cache=True, logits_to_keep=1)
    step, _ = inspected(
        model, input_ids=ids[:, 9:], past_key_values=first.past_key_values, use_cache=True
    )
    torch.testing.assert_close(step.logits, whole.logits, rtol=0, atol=1e-5)


def test_k03_every_asked_row_is_the_full_run_s():
    model, inputs = gemma("gemma3n_text", sliding_window=4)
    ids = inputs["input_ids"][:, :10]
    with torch.no_grad():
        full = model(input_ids=ids, use_cache=False).logits
    for keep, expected in (
        (1, full[:, 9:]),
        (0, full),
        (torch.tensor([9]), full[:, 9:]),
        (torch.tensor([0, 4, 9]), full[:, [0, 4, 9]]),
        (torch.tensor([5, 9]), full[:, [5, 9]]),
    ):
        out, _ = inspected(model, input_ids=ids, use_cache=False, logits_to_keep=keep)
        torch.testing.assert_close(out.logits, expected, rtol=0, atol=1e-5)


def test_k03_padded_rows():
    model, inputs = gemma("gemma3n_text", sliding_window=4)
    ids = inputs["input_ids"][:, :10]
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 6:] = 0
    right, _ = inspected(
        model,
        input_ids=ids,
        attention_mask=mask,
        use_cache=False,
        logits_to_keep=torch.tensor([5, 9]),
    )
    left, _ = inspected(
        model,
        input_ids=torch.cat([ids[:1], torch.cat([ids[1:, 6:], ids[1:, :6]], 1)]),
        attention_mask=mask.flip(1),
        use_cache=False,
        logits_to_keep=1,
    )
    with torch.no_grad():
        long = model(input_ids=ids[:1], use_cache=False, logits_to_keep=1).logits
        short = model(input_ids=ids[1:, :6], use_cache=False, logits_to_keep=1).logits
    torch.testing.assert_close(right.logits[0, 1], long[0, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(right.logits[1, 0], short[0, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(left.logits[0, 0], long[0, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(left.logits[1, 0], short[0, 0], rtol=0, atol=1e-4)


def test_k04_nobody_to_share_with_is_an_error_of_the_model():
    with pytest.raises(ValueError):
        model, inputs = gemma("gemma3n_text", "ffffsf")
        model(**inputs, use_cache=False)


def test_k06_left_padded_rows_equal_themselves_alone():
    model, inputs = gemma("gemma4_text", sliding_window=4)
    ids = inputs["input_ids"][:, :10]
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0

    def generate(ids: Tensor, mask: Tensor) -> Tensor:
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=4,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            eos_token_id=-1,
        )
        return torch.stack(out.logits, 1)

    model.compile(backend="kvtailor", options={"inner": "eager"})
    with recording(check=True) as recorder:
        both = generate(ids, mask)
        first = generate(ids[:1, 3:], mask[:1, 3:])
        second = generate(ids[1:], mask[1:])
    torch.testing.assert_close(both[:1], first, rtol=0, atol=1e-4)
    torch.testing.assert_close(both[1:], second, rtol=0, atol=1e-4)
    assert max(g.max_error or 0.0 for g in recorder.graphs) <= 1e-5


def test_decoder_classifier_runs_its_last_layer_on_the_pooled_rows():
    from transformers import AutoModelForSequenceClassification

    causal, inputs = shrunk("llama")
    causal.config.pad_token_id = 0
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(causal.config).eval()
    ids = inputs["input_ids"].clamp(min=1)
    ids[0, 15:] = 0
    mask = (ids != 0).long()
    _, (graph, *_) = inspected(model, input_ids=ids, attention_mask=mask, use_cache=False)
    assert rows(graph) == ["all", "all", "all", 1]


def test_bert_classifier_runs_its_last_layer_on_the_cls_row():
    from transformers import AutoModelForSequenceClassification

    base, inputs = shrunk("bert", padding=5)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(base.config).eval()
    _, (graph, *_) = inspected(model, **inputs)
    assert rows(graph) == ["all", "all", "all", 1]


def test_last_token_embedder_runs_its_last_layer_on_one_row_each():
    causal, inputs = shrunk("qwen3", padding=0)

    class Embedder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = causal.model

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            hidden = self.base(input_ids=ids, attention_mask=mask, use_cache=False)[0]
            last = mask.sum(1) - 1
            pooled = hidden[torch.arange(hidden.shape[0]), last]
            return nn.functional.normalize(pooled, dim=-1)

    mask = torch.ones_like(inputs["input_ids"])
    mask[1, 13:] = 0
    _, (graph, *_) = inspected(Embedder().eval(), inputs["input_ids"], mask)
    assert rows(graph)[-1] == 1
    assert rows(graph)[0] == "all"
