"""narrow_rows: what runs on which rows, and equality with eager."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from kvtailor.backend import recording
from kvtailor.kernels.ops import attend
from kvtailor.passes.capture import capture
from kvtailor.passes.graph import SITE, show, sites
from kvtailor.passes.lower_dense_attention import lower_dense_attention
from kvtailor.passes.narrow_rows import narrow_rows
from kvtailor.passes.report import AttentionSite
from kvtailor.zoo import shrunk


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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
        graph.graph.eliminate_dead_code()
        graph.graph.lint()
        self.sites, self.skipped = sites(graph), [s.code for s in report.skipped]
        self.text = show(graph)
        self.again = narrow_rows(graph).rewrites
        lower_dense_attention(graph)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        return graph.forward

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
    with torch.no_grad():
        torch.compile(Decoder(layers).eval(), backend=seen)(torch.arange(20)[None], 1)
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
    with torch.no_grad():
        torch.compile(Stack(), backend=seen)(x)
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
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(fn, backend=seen)(x, w), fn(x, w))
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
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(fn, backend=seen)(x), fn(x))
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
    with torch.no_grad():
        actual = torch.compile(fn, backend=seen)(x, caches[0])
        torch.testing.assert_close(actual, fn(x, caches[1]))
    torch.testing.assert_close(*caches)
    assert seen.rows == ["all", "all"]
    assert seen.sites[1].rows_reason == "aten::view_as_real is not known to work row by row"


def test_random_ops_are_not_moved_to_fewer_rows():
    seen = Narrowed()

    def fn(x: Tensor) -> Tensor:
        y = attend(x, x, x, scale=1.0, causal=True)
        return (y + torch.rand_like(y))[:, :, -1:]

    x = torch.randn(1, 2, 6, 4)
    torch.manual_seed(3)
    expected = fn(x)
    run = torch.compile(fn, backend=seen)
    torch.manual_seed(3)
    with torch.no_grad():
        torch.testing.assert_close(run(x), expected)


def test_golden():
    seen = Narrowed()
    w = torch.randn(4, 4)

    def fn(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.linear(attend(q, k, k, scale=0.5, causal=True), w)[:, :, -1:]

    with torch.no_grad():
        torch.compile(fn, backend=seen)(torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4), w)
    assert_expected_inline(seen.text, """\
%0: float32[1, 2, 6, 4] = input
%1: float32[1, 2, 6, 4] = input
%2: float32[4, 4] = input
%3: float32[1, 2, 1, 4] = aten::slice.Tensor(%0, 2, 5, end)
%4: float32[1, 2, 1, 4] = kvtailor::attend(%3, %1, %1, None, None, None, None, scale=0.5, causal=True, q_offset=5)
%5: float32[1, 2, 1, 4] = aten::linear(%4, %2)
return %5""")


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
