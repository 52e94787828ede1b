"""Results share memory with inputs and with each other exactly where they do in eager."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from kvtailor.backend import recording
from kvtailor.cli.models import shrunk
from kvtailor.passes.capture.capture import capture, flat_name
from kvtailor.passes.effects import storage
from kvtailor.tests.test_capture_repeats import CHANGES, RESULTS, VIEWS

# Views of which the program gets every part.
PARTS: list[Callable[[Tensor], Any]] = [
    lambda x: x.unbind(0),
    lambda x: x.split(1, 1),
    lambda x: x.chunk(2),
    lambda x: x.tensor_split(2, -1),
    lambda x: x.hsplit((1,)),
    lambda x: x.split([1, x.shape[0] - 1]),
]
OTHER_VIEWS: list[Callable[[Tensor], Any]] = [
    lambda x: x,
    lambda x: x.reshape(-1)[None],
    lambda x: x.t().reshape(-1)[None],
    lambda x: x.expand(2, *x.shape)[1],
    lambda x: x.detach(),
    lambda x: x.t().contiguous(),
    lambda x: x.view_as(x),
    lambda x: x.flatten()[:, None],
]


def program(seed: int) -> Callable[..., list[Tensor]]:
    """Views, results and writes over one pool of matrices; some of the pool is returned."""
    random = Random(seed)
    kinds = random.choices(
        [VIEWS + OTHER_VIEWS, PARTS, RESULTS, CHANGES], [4, 3, 1, 3], k=random.randint(2, 9)
    )
    steps = [(random.choice(kind), random.random()) for kind in kinds]
    kept = random.random()

    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        pool = [x, y]
        for what, at in steps:
            found = what(pool[int(at * len(pool))])
            each = found if isinstance(found, (list, tuple)) else [found]
            pool += [t if t.dim() == 2 else t[None] for t in each if isinstance(t, Tensor)]
        return pool[int(kept * len(pool)) :]

    return fn


def inputs() -> list[Tensor]:
    return [torch.arange(16.0).view(4, 4), torch.arange(12.0).view(3, 4).t()]


def layout(tensors: list[Tensor]) -> list[Any]:
    """Which of the tensors share memory, and where in it they lie.

    How a result lies in memory of its own, torch.compile promises to nobody: Inductor chooses
    strides, and narrowing leaves a row alone where a slice of all rows was.
    """
    memory = [storage(x) for x in tensors]
    first = {m: min(x.storage_offset() for x in tensors if storage(x) == m) for m in memory}
    starts = [x.storage_offset() - first[m] for x, m in zip(tensors, memory)]
    alone = [memory.count(m) == 1 for m in memory]
    return [
        (memory.index(m), *([] if one else [start, x.stride()]))
        for m, one, start, x in zip(memory, alone, starts, tensors)
    ]


def equal(
    fn: Callable[..., Any], run: Callable[..., Any], make: Callable[[], list[Tensor]]
) -> None:
    """Results and inputs afterwards: dtype, shape, values and sharing; strides of the inputs."""
    ours, theirs = make(), make()
    lie = [(x.storage_offset(), x.stride()) for x in ours]
    with torch.no_grad():
        want, got = [*fn(*theirs), *theirs], [*run(*ours), *ours]
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype and torch.equal(g, w)
    assert layout(got) == layout(want)
    assert lie == [(x.storage_offset(), x.stride()) for x in ours]


def check(fn: Callable[..., Any], make: Callable[[], list[Tensor]] = inputs, **options: Any) -> Any:
    """The report, None where there was no graph; fails where compiled and eager differ."""
    torch._dynamo.reset()
    with recording() as recorder:
        equal(fn, compiled(fn, **options), make)
    return recorder.graphs[0] if recorder.graphs else None


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="kvtailor", options={"inner": "eager", **options})


@pytest.mark.parametrize("regions", ["layer", "none"])
def test_random_programs(regions: str):
    left = [check(program(seed), regions=regions) for seed in range(14)]
    assert sum(g is not None and g.captured for g in left) >= 7


@pytest.mark.slow
@pytest.mark.parametrize(
    "inner, first", [("eager", n) for n in range(100, 500, 100)] + [("inductor", 500)]
)
def test_many_random_programs(inner: str, first: int):
    for seed in range(first, first + (100 if inner == "eager" else 20)):
        check(program(seed), inner=inner)


def test_parts_of_a_cache_that_is_written():
    def fn(cache: Tensor, new: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        k, v = cache.unbind(0)
        cache.index_copy_(1, at, new)
        return k, v, v.split(2)[1], k.t().contiguous()

    graph = check(fn, lambda: [torch.zeros(2, 4, 3), torch.ones(2, 1, 3), torch.tensor([1])])
    assert graph.captured


def _parts(first: slice, second: slice) -> Callable[[], list[Tensor]]:
    def make() -> list[Tensor]:
        base = torch.arange(12.0).view(4, 3)
        return [base[first], base[second]]

    return make


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize(
    "first, second, overlap", [(slice(3), slice(1, 4), True), (slice(2), slice(2, 4), False)]
)
def test_inputs_of_one_memory(first: slice, second: slice, overlap: bool, writes: bool):
    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        if writes:
            x.add_(1)
        return [y * 2, x.sum(), y.sum(), x.t(), y[1:]]

    graph = check(fn, _parts(first, second))
    assert graph.captured != (overlap and writes)
    if overlap and writes:
        assert "alias" in graph.reason or "overlap" in graph.reason


WRITES: list[Callable[[Tensor], Any]] = [
    lambda x: x.copy_(x.flip(0) + 1),
    lambda x: x.t().copy_(x.t().flip(0) + 1),
    lambda x: x.reshape(-1).copy_(x.reshape(-1).flip(0) * 2),
    lambda x: x.t().copy_(x.t().roll(1, 0) * 2),
    lambda x: x.t().mul_(x.t().flip(1)),
]


@pytest.mark.parametrize("n", range(len(WRITES)))
def test_inductor_reads_nothing_that_it_has_overwritten(n: int):
    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        WRITES[n](x)
        return [y * 2]

    assert check(fn, inner="inductor").captured


def _pool(seed: int) -> Callable[..., list[Tensor]]:
    """A program with writes and views of what is written, and something to compute."""
    fn = program(seed)

    def more(x: Tensor, y: Tensor) -> list[Tensor]:
        first, second = x.t(), y.reshape(3, 4)
        x.mul_(2)
        return [first, torch.relu(second) + 1, *fn(x, y)]

    return more


@pytest.mark.parametrize("seed", range(8))
def test_a_graph_from_the_disk(seed: int, tmp_path, monkeypatch):
    monkeypatch.setenv("KVTAILOR_CACHE_DIR", str(tmp_path / "cache"))
    for said in ("cache_misses", "cache_hits"):
        torch._dynamo.reset()
        before = counters["kvtailor"][said]
        equal(_pool(seed), compiled(_pool(seed)), inputs)
        assert counters["kvtailor"][said] == before + 1


def test_pieces_under_cuda_graphs(pieces):
    model, given = shrunk("llama", tokens=5)

    def fn(ids: Tensor, cache: Tensor) -> list[Tensor]:
        k, v = cache.unbind(0)
        cache.index_copy_(1, torch.tensor([1]), torch.ones(2, 1, 3))
        logits = model(input_ids=ids, use_cache=False).logits
        return [logits.round(), logits.relu().mT.round(), k, v.split(2)[1], ids.t()]

    run = compiled(fn, cuda_graphs=True)
    for _ in range(4):
        equal(fn, run, lambda: [given["input_ids"].clone(), torch.zeros(2, 4, 3)])
    assert sum(piece.counts.replays for piece in pieces) > 0


class Projections(nn.Module):
    """Three linears over one input; two of the results are parts of a weight and of a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor, cache: Tensor) -> list[Tensor]:
        q, k, v = (each(x) for each in self.each)
        first, second = cache.unbind(0)
        cache.add_(1)
        return [q, k + v, first, second, self.each[1].weight.t(), self.each[0].weight]


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("pack", ["off", "copy", "view"])
def test_packed_weights_that_are_results(pack: str, cuda_graphs: bool, always_pack, pieces):
    model = Projections()
    run = compiled(model, pack=pack, cuda_graphs=cuda_graphs)
    x, weights = torch.randn(3, 4), [each.weight for each in model.each]  # type: ignore[union-attr]
    for _ in range(3):
        with torch.no_grad():
            cache = torch.zeros(2, 3, 4)
            q, kv, first, second, turned, whole = run(x, cache)
            torch.testing.assert_close([q, kv], model(x, cache.clone())[:2])
        assert storage(first) == storage(second) == storage(cache)
        assert torch.equal(torch.stack([first, second]), torch.ones(2, 3, 4))
        for got, weight in ((turned.t(), weights[1]), (whole, weights[0])):
            assert got.data_ptr() == weight.data_ptr() and got.stride() == weight.stride()


class Held(nn.Module):
    """Tensors whose dotted names differ in nothing but where the dots are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.a_b, self.c = nn.Module(), nn.Module(), nn.Module()
        for at, (owner, name) in enumerate(
            [(self, "a_b_c"), (self.a, "b_c"), (self.a_b, "c"), (self.c, "b"), (self, "c_b")]
        ):
            owner.register_buffer(name, torch.full((2,), 10.0**at))


def test_attributes_of_like_names_stay_apart(tmp_path, monkeypatch):
    held = Held()
    graph = fx.Graph()
    total = graph.placeholder("x")
    total.meta["example_value"] = x = FakeTensorMode().from_tensor(torch.zeros(2))
    for name, _ in held.named_buffers():
        total = graph.call_function(torch.add, (total, graph.get_attr(name)))
    graph.output((total,))
    names = [flat_name(name) for name, _ in held.named_buffers()]
    assert len(set(names)) == 5 and all(name.isidentifier() for name in names)
    captured = capture(fx.GraphModule(held, graph), [x])
    assert torch.equal(captured(torch.zeros(2))[0], torch.full((2,), 11111.0))
