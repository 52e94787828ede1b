"""Capture by distinct calls: it makes the graph that tracing the whole makes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from harness import through
from torch import Tensor, fx, nn

from kvtailor.passes.capture import capture as capture_module
from kvtailor.passes.capture.capture_repeats import Captured, Unsuited, capture_repeats
from kvtailor.passes.capture.inline_vmap import inline_vmap
from kvtailor.passes.graph import aten
from kvtailor.tests.models import MODELS, build, implementations


def numbered(captured: Captured, table: dict[Any, int]) -> list[Any]:
    """What is written and returned: equal calls on equal arguments have one number in table."""
    known: dict[fx.Node, int] = {}
    for i, node in enumerate(captured.gm.graph.nodes):
        value = node.meta.get("val")
        kinds = [
            (tuple(v.shape), v.stride(), v.storage_offset(), v.dtype, v.requires_grad)
            for v in (value if isinstance(value, (list, tuple)) else [value])
            if isinstance(v, Tensor)
        ]
        what: Any = (node.op, str(node.target))
        if node.op == "placeholder":
            what = (node.op, i - len(captured.attributes))
        elif node.op == "get_attr" and node not in captured.attributes.values():
            what = (node.op, repr(getattr(captured.gm, node.target)))
        args = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
        known[node] = table.setdefault((what, repr(args), repr(kinds)), len(table))
    assert captured.returned
    return fx.node.map_arg([captured.written, captured.returned], known.__getitem__)


def unsuited(why: str) -> Callable[..., None]:
    """A step at which repeats cannot be captured, for this reason."""

    def step(gm: fx.GraphModule, example_inputs: list[Any]) -> None:
        with pytest.raises(Unsuited, match=why):
            capture_repeats(gm, example_inputs)

    return step


def both_ways(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """How many graphs of fn were captured both ways; asserts that they are the same."""
    found = []

    def step(gm: fx.GraphModule, example_inputs: list[Any]) -> None:
        plain = inline_vmap(gm)
        table: dict[Any, int] = {}
        ours = numbered(capture_repeats(plain, example_inputs), table)
        assert ours == numbered(capture_module._whole(plain, example_inputs), table)
        found.append(gm)

    through(step, fn, *args, dynamic=False, **kwargs)
    return len(found)


@pytest.mark.parametrize("name", ["llama", "gemma3n_text", "llama4_text", "gpt2", "modernbert"])
def test_an_architecture_both_ways(name):
    model, inputs = build(name)
    assert both_ways(model, **inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in MODELS if n != "gpt_oss"])
def test_every_architecture_both_ways(name):
    for attn_implementation in implementations(name):
        model, inputs = build(name, attn_implementation)
        assert both_ways(model, **inputs)


@pytest.mark.parametrize("name", ["llama", "gemma3n_text"])
@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_caches_both_ways(name, static):
    from transformers import DynamicCache, StaticCache

    model, inputs = build(name)
    cache: Any = DynamicCache(config=model.config)
    if static:
        cache = StaticCache(config=model.config, max_cache_len=40)
    assert both_ways(model, **{**inputs, "past_key_values": cache, "use_cache": True})


def test_a_call_that_repeats_is_traced_once(monkeypatch):
    traced = []
    whole = capture_module.aot_export_module

    def counted(gm, *args, **kwargs):
        traced.append(sum(n.op.startswith("call") for n in gm.graph.nodes))
        return whole(gm, *args, **kwargs)

    monkeypatch.setattr("kvtailor.passes.capture.capture_repeats.aot_export_module", counted)
    layers = [nn.Linear(8, 8) for _ in range(12)]

    def fn(x: Tensor) -> Tensor:
        for layer in layers:
            x = torch.relu(layer(x)) + x
        return x

    assert both_ways(fn, torch.randn(2, 8)) == 1
    assert traced == [3]


def _parts(x: Tensor, y: Tensor, part: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    out = []
    for _ in range(4):
        x = x * 2
        part(x).add_(y)
        out.append(x.sum())
    return (x, *out)


def rows(x: Tensor, y: Tensor) -> Any:
    return _parts(x, y, lambda x: x[1:3])


def view_of_a_view(x: Tensor, y: Tensor) -> Any:
    return _parts(x, y, lambda x: x.transpose(0, 1)[:, 1:3].mT)


def two_views_one_written(x: Tensor, y: Tensor) -> Any:
    out = []
    for _ in range(4):
        x = x * 2
        middle = x[:3]
        read, written = middle[1:], middle[:2]
        early = read.sum()
        written.add_(y)
        out += [read * 2, early]
    return (x, *out)


def setitem_of_itself(x: Tensor, y: Tensor) -> Any:
    for _ in range(4):
        x = x * 2
        x[1:3] += y
    return x


def views_made_before_a_write_and_read_after(x: Tensor, y: Tensor) -> Any:
    out = []
    for _ in range(4):
        x = x * 2
        before, copied = x[:2], x[:2].clone()
        x.mul_(3)
        out += [before.sum(), copied.sum()]
    return tuple(out)


def result_of_a_write_and_a_later_write(x: Tensor, y: Tensor) -> Any:
    out = []
    for _ in range(4):
        x = x * 2
        added = x[1:3].add_(y)
        x.mul_(3)
        out.append(added + 1)
    return (x, *out)


def inputs_in_turn(x: Tensor, y: Tensor) -> Any:
    for _ in range(4):
        x.add_(1)
        y.add_(x[1:3])
        x[0] = 5
    return x, y[0], x[1:]


def halves_of_a_split(x: Tensor, y: Tensor) -> Any:
    out = []
    for _ in range(4):
        first, second = torch.split(x, 2)
        out.append(first * second + y)
    return tuple(out)


def halves_written(x: Tensor, y: Tensor) -> Any:
    for _ in range(4):
        first, second = torch.split(x * 2, 2)
        first.add_(y)
        x = torch.cat([second, first])
    return x


def the_same_twice(x: Tensor, y: Tensor) -> Any:
    for _ in range(4):
        x = x * x + (x.contiguous() * x.view_as(x))
    return x


def numbers_of_each_type(x: Tensor, y: Tensor) -> Any:
    zeros = torch.zeros(4, 3, dtype=torch.int64)
    return tuple(
        v for _ in range(4) for v in (zeros + 1, zeros + 1.0, zeros + True, x * -0.0, x * 0.0)
    )


def new_tensors(x: Tensor, y: Tensor) -> Any:
    return tuple(torch.tensor(float(i)) + torch.arange(3) + x for _ in range(4) for i in (1, 2))


WRITES = [
    rows,
    view_of_a_view,
    two_views_one_written,
    setitem_of_itself,
    views_made_before_a_write_and_read_after,
    result_of_a_write_and_a_later_write,
    inputs_in_turn,
    halves_of_a_split,
    halves_written,
    the_same_twice,
    numbers_of_each_type,
    new_tensors,
]


@pytest.mark.parametrize("fn", WRITES, ids=lambda fn: fn.__name__)
def test_writes_views_and_numbers_both_ways(fn):
    def inputs() -> tuple[Tensor, Tensor]:
        return torch.arange(12.0).view(4, 3), torch.ones(2, 3)

    assert both_ways(fn, *inputs()) == 1
    torch._dynamo.reset()
    ours, theirs = inputs(), inputs()
    with torch.no_grad():
        got = torch.compile(fn, backend="kvtailor", options={"inner": "eager"})(*ours)
    want = fn(*theirs)
    for g, w in zip([*got, *ours], [*want, *theirs]):
        assert torch.equal(g, w)


def _first_row_is_seven(x: Tensor) -> None:
    x[:1] = 7.0


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x[1:],
    lambda x: x[:, :2],
    lambda x: x.t(),
    lambda x: x.unsqueeze(0).squeeze(0),
    lambda x: x.contiguous(),
    lambda x: torch.split(x, 1)[0],
]
RESULTS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x * 2,
    lambda x: x.sum(0, keepdim=True) + x,
    lambda x: torch.cat([x, x]),
    lambda x: x.clone().add_(3),
]
CHANGES: list[Callable[[Tensor], Any]] = [
    lambda x: x.add_(1),
    lambda x: x.mul_(x),
    lambda x: x[:1].sub_(4),
    _first_row_is_seven,
    lambda x: x.copy_(x.flip(0) + 1),
]


@pytest.mark.parametrize("seed", range(24))
def test_random_views_and_writes(seed, monkeypatch):
    """Programs of views, results and writes over one pool of tensors, all returned at the end."""
    random = Random(seed)
    length = random.randint(4, 14)
    kinds = random.choices([VIEWS, RESULTS, CHANGES], [3, 1, 2], k=length)
    program = [(random.choice(kind), random.random()) for kind in kinds]

    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        pool = [x, y]
        for what, at in program:
            result = what(pool[int(at * len(pool))])
            if result is not None:
                pool.append(result)
        return pool

    def inputs() -> tuple[Tensor, Tensor]:
        return torch.arange(12.0).view(4, 3), torch.arange(9.0).view(3, 3).t()

    ways = []

    def noted(gm, example_inputs):
        ways.append("tried")
        captured = capture_repeats(gm, example_inputs)
        ways.append("taken")
        return captured

    monkeypatch.setattr("kvtailor.passes.capture.capture_repeats._REPEATS", 0)
    monkeypatch.setattr(capture_module, "capture_repeats", noted)
    torch._dynamo.reset()
    ours, theirs = inputs(), inputs()
    with torch.no_grad():
        run = torch.compile(fn, backend="kvtailor", fullgraph=True, options={"inner": "eager"})
        got = run(*ours)
        want = fn(*theirs)
    for g, w in zip([*got, *ours], [*want, *theirs], strict=True):
        assert torch.equal(g, w)
    assert ways == ["tried", "taken"]


def test_calls_with_a_state_of_their_own_are_not_merged():
    calls = []

    @torch.compiler.allow_in_graph
    def scaled(x: Tensor) -> Tensor:
        calls.append(x)
        return x * len(calls)

    def fn(x: Tensor) -> Tensor:
        for _ in range(4):
            x = scaled(x.relu() + 1).relu() + 1
        return x

    graphs = []

    def step(gm: fx.GraphModule, example_inputs: list[Any]) -> None:
        graphs.append(capture_repeats(gm, example_inputs).gm.graph)

    through(step, fn, torch.ones(3))
    factors = [n.args[1] for n in graphs[0].find_nodes(op="call_function", target=aten.mul.Tensor)]
    assert len(set(factors)) == 4


def _relu_in_place(x: Tensor) -> Tensor:
    for _ in range(4):
        x = nn.functional.relu(x + 1, True)
    return x


def _resized(x: Tensor) -> Tensor:
    for _ in range(4):
        x = (x + 1).t_()
    return x


def _into_out(x: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.add(x, 1, out=torch.empty_like(x))
    return x


def _part_of_a_tuple(x: Tensor) -> Tensor:
    for _ in range(4):
        values, at = torch.topk(x + 1, 4)
        x = values.add_(at)
    return x


def _strided(x: Tensor) -> Tensor:
    for _ in range(4):
        x = x + x[1:].as_strided((4, 4), (4, 1), 0)
    return x


def _nothing_twice(x: Tensor) -> Tensor:
    return x.sin().cos().tan()


@pytest.mark.parametrize(
    "fn, why",
    [
        (_relu_in_place, "unexpectedly"),
        (_resized, "changes a shape in place"),
        (_into_out, "argument out"),
        (_part_of_a_tuple, "a part of a tuple"),
        (_strided, "as_strided"),
        (_nothing_twice, "few calls repeat"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_captured_as_a_whole(fn, why):
    x = torch.arange(1.0, 17.0).view(4, 4)
    through(unsuited(why), fn, x.clone())
    torch._dynamo.reset()
    with torch.no_grad():
        run = torch.compile(fn, backend="kvtailor", options={"inner": "eager"})
        assert torch.equal(run(x.clone()), fn(x.clone()))


def test_values_that_dynamo_got_wrong_are_noticed():
    """Dropout that is off returns its input; Dynamo expects a compact copy of it."""
    model, inputs = build("gpt_oss", "eager")
    through(unsuited("Dynamo expected"), model, **inputs)


def test_symbolic_sizes_are_captured_as_a_whole():
    through(unsuited("symbolic|SymInt"), operator.add, torch.ones(3, 5), 1, dynamic=True)
