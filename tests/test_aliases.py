"""Results share memory with inputs and with each other exactly where they do in eager."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtailor.backend import recording
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

    Who has memory of its own may lie there as it likes: rows that nobody asks for are not computed.
    """
    memory = [storage(x) for x in tensors]
    first = {m: min(x.storage_offset() for x in tensors if storage(x) == m) for m in memory}
    starts = [x.storage_offset() - first[m] for x, m in zip(tensors, memory)]
    alone = [memory.count(m) == 1 for m in memory]
    return [
        (memory.index(m), *([] if one else [start, x.stride()]))
        for m, one, start, x in zip(memory, alone, starts, tensors)
    ]


def check(fn: Callable[..., Any], make: Callable[[], list[Tensor]] = inputs, **options: Any) -> Any:
    """The report; fails where compiled and eager differ, also after a write to each result."""
    torch._dynamo.reset()
    ours, theirs = make(), make()
    with torch.no_grad(), recording() as recorder:
        want = [*fn(*theirs), *theirs]
        run = torch.compile(fn, backend="kvtailor", options={"inner": "eager", **options})
        got = [*run(*ours), *ours]
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)
    assert layout(got) == layout(want)
    return recorder.graphs[0] if recorder.graphs else None


@pytest.mark.parametrize("regions", ["layer", "none"])
@pytest.mark.parametrize("first", [0, 12])
def test_random_programs(first: int, regions: str):
    left = [check(program(seed), regions=regions) for seed in range(first, first + 12)]
    assert sum(g is not None and g.captured for g in left) >= 6


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


def test_inputs_that_overlap_are_left_alone_where_one_is_written():
    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        x.add_(1)
        return [y * 2, x.sum(), y.sum()]

    def make() -> list[Tensor]:
        base = torch.arange(12.0).view(4, 3)
        return [base[:3], base[1:]]

    graph = check(fn, make)
    assert graph.reason is None or "overlap" in graph.reason
