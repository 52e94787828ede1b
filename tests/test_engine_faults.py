"""Exceptions at random moments: they belong to one request, or leave the step undone."""

from __future__ import annotations

import functools
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_engine import Letters, drain, is_as_new, model_of, own_tokens, prompts_of, shrink

from kvtailor.runtime.engine import outcome as outcome_module
from kvtailor.runtime.engine.engine import Engine
from kvtailor.runtime.engine.sampling import draw, sampling

COUNT = 7
# Single assignments that release something: no signal is served between them and what they end,
# while a trace function is called there too.
SAFE = ("_alone", "_stream", "forget_attention", "with_attention")
ASK = {"temperature": 1.1, "top_k": 30}


class Injected(Exception):
    """Stands for whatever user code raises; its text can't be had."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@functools.cache
def world(name: str) -> tuple[Any, list[Any], dict[tuple[int, int | None], list[int]]]:
    """A model, prompts, and what (prompt, seed) comes to alone."""
    model = model_of(name, num_hidden_layers=2) if name != "bart" else model_of(name)
    prompts = prompts_of(model, random.Random(0), 8)
    alone: dict[tuple[int, int | None], list[int]] = {}
    engine = make_engine(model)
    for i, prompt in enumerate(prompts):
        alone[i, None] = own_tokens(model, prompt, COUNT)
        for seed in range(2):
            result = engine.generate(
                [prompt], max_new_tokens=COUNT, ignore_eos=True, seed=seed, **ASK
            )
            alone[i, seed] = result[0].token_ids
    return model, prompts, alone


def make_engine(model: Any, rng: random.Random | None = None) -> Engine:
    budget = rng.choice([5, 16, 40]) if rng else 40
    encodes = model.config.is_encoder_decoder
    engine = Engine(
        model,
        Letters(),
        block_size=4,
        token_budget=budget,
        max_tokens=48,
        encoder_tokens=32 if encodes else None,
        verify=False,
    )
    if rng:
        shrink(engine, rng.choice([1.0, 1.6, 3.0]))
    return engine


class Faults:
    """Raises at random in the model, the encoder, sampling and decoding."""

    def __init__(self, rng: random.Random, rate: float) -> None:
        self.rng, self.rate, self.seen = rng, rate, Counter()

    def at(self, place: str) -> None:
        if self.rng.random() < self.rate:
            error = self.rng.choice([Injected, KeyboardInterrupt])
            self.seen[place, error.__name__] += 1
            raise error

    def wrapped(self, place: str, call: Any) -> Any:
        @functools.wraps(call)
        def faulty(*args: Any, **kwargs: Any) -> Any:
            self.at(place)
            out = call(*args, **kwargs)
            self.at(place)
            return out

        return faulty

    @contextmanager
    def everywhere(self, engine: Engine) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            served = engine._served
            patch.setattr(served.raw, "forward", self.wrapped("model", served.raw.forward))
            patch.setattr(served, "encode", self.wrapped("encoder", served.encode))
            patch.setattr(outcome_module, "draw", self.wrapped("sampling", draw))
            decode = self.wrapped("decoding", engine.tokenizer.decode)
            patch.setattr(engine.tokenizer, "decode", decode, raising=False)
            yield

    @contextmanager
    def at_a_line(self) -> Iterator[None]:
        """Or a KeyboardInterrupt at some line of the runtime."""
        left = int(1.004 ** self.rng.randrange(1500))

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal left
            if "/runtime/" not in frame.f_code.co_filename or frame.f_code.co_name in SAFE:
                return None
            if event == "line":
                left -= 1
                if left == 0:
                    self.seen["line", frame.f_code.co_name] += 1
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(before)


def one_run(name: str, seed: int, seen: Counter[Any]) -> None:
    rng = random.Random(f"{name} {seed}")
    model, prompts, alone = world(name)
    engine = make_engine(model, rng)
    # Interrupted between giving updates up and returning them, a step loses them.
    lines = rng.random() < 0.4
    faults = Faults(rng, 0 if lines else rng.choice([0.01, 0.05, 0.2]))
    asked: dict[Any, tuple[int, int | None]] = {}
    results: dict[Any, Any] = {}
    shown: dict[Any, list[int]] = {}

    def add() -> None:
        key = rng.randrange(len(prompts)), rng.choice([None, 0, 1])
        ask = {} if key[1] is None else {"seed": key[1], **ASK}
        name = engine.add_request(prompts[key[0]], max_new_tokens=COUNT, ignore_eos=True, **ask)
        asked[name], shown[name] = key, []
        results[name] = engine._scheduler.requests[name].result

    def act() -> None:
        if rng.random() < 0.15 and asked:
            engine.abort(rng.choice(list(asked)))
        elif rng.random() < 0.15:
            consume()
        else:
            for update in engine.step():
                shown[update.request_id] += [] if update.token_id is None else [update.token_id]

    def consume() -> None:
        chosen = rng.sample(range(len(prompts)), 2)
        few = [prompts[i] for i in chosen]
        stream = engine.stream(few, max_new_tokens=COUNT, ignore_eos=True)
        got: list[list[int]] = [[], []]
        for update in stream:
            got[update.index] += [] if update.token_id is None else [update.token_id]
            assert got[update.index] == alone[chosen[update.index], None][: len(got[update.index])]
            ending = rng.random()
            if ending < 0.05:
                faults.seen["consumer", "throw"] += 1
                stream.throw(rng.choice([Injected, KeyboardInterrupt]))
            elif ending < 0.1:
                faults.seen["consumer", "close"] += 1
                stream.close()

    for _ in range(5):
        add()
    for _ in range(rng.randrange(10, 40)):
        try:
            with faults.at_a_line() if lines else faults.everywhere(engine):
                act()
        except (Injected, KeyboardInterrupt):
            if rng.random() < 0.3:
                add()
    for update in drain(engine):
        shown[update.request_id] += [] if update.token_id is None else [update.token_id]
    for name, key in asked.items():
        result = results[name]
        assert result.finish_reason in ("length", "abort", "error")
        expected = alone[key]
        if result.finish_reason == "length":
            assert result.token_ids == expected
        elif result.finish_reason == "error":
            assert "Injected" in result.error and "\n" not in result.error
        assert result.token_ids == expected[: len(result.token_ids)]
        assert lines or shown[name] == result.token_ids
        seen["ended", result.finish_reason] += 1
    assert is_as_new(engine) and not engine._kv._requests and not engine._kv._preempted
    assert not engine._ready and not engine._streamed and not engine._left
    after = engine.generate(prompts[:3], max_new_tokens=COUNT, ignore_eos=True)
    assert [r.token_ids for r in after] == [alone[i, None] for i in range(3)]
    seen += faults.seen
    seen["runs", ""] += 1


@pytest.mark.parametrize("runs", [24, pytest.param(500, marks=pytest.mark.slow)])
def test_the_others_get_their_tokens(runs: int) -> None:
    seen: Counter[Any] = Counter()
    for number in range(runs):
        one_run(("llama", "gemma3_text", "bart")[number % 3], number + 1000 * (runs > 100), seen)
    totals: Counter[str] = Counter()
    for (place, _), count in seen.items():
        totals[place] += count
    print(dict(totals), {k: v for k, v in seen.items() if k[0] in ("ended", "consumer")})
    assert all(
        totals[place] > 3
        for place in ("model", "encoder", "sampling", "decoding", "consumer", "line", "ended")
    )
    assert all(seen["ended", reason] for reason in ("length", "abort", "error"))


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-3, 1.0, 1e38, 1e40, 1.7e308])
def test_draws_at_any_temperature(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    inf = float("inf")
    for scores in ([3.0, 1.0, -2.0, -inf], [3e38, -3e38, 0.0, -inf], [0.0] * 4):
        for cut in ({}, {"top_k": 2}, {"top_p": 0.5}):
            ask = sampling(temperature=temperature, **cut)
            drawn = {draw(torch.tensor(scores), ask, generator) for _ in range(40)}
            assert drawn <= {i for i, score in enumerate(scores) if score > -inf}
            if temperature < 1e-3 and scores[0]:
                assert drawn == {0}
    for scores in ([1.0, inf], [-inf, -inf], [1.0, float("nan")]):
        with pytest.raises(ValueError, match="the largest score must be finite to draw by, got"):
            draw(torch.tensor(scores), sampling(temperature=temperature), generator)


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
@pytest.mark.parametrize("ask", [{}, {"temperature": 1.0, "seed": 0}, {"logprobs": True}])
def test_scores_that_are_not_finite(value: str, ask: dict[str, Any]) -> None:
    """Greedy is the likeliest, as generate has it; what can't be drawn is its request's error."""
    model, prompts, _ = world("llama")
    engine = make_engine(model)
    marked = [4, 63, 9]

    def spoil(module: Any, args: Any, out: Any) -> Any:
        # Scores that depend on the row's token alone, so that generate has them too.
        bad = args[0].abs().amax(-1) > 1e3
        return torch.where(bad[..., None] & (torch.arange(64) > 5), float(value), out)

    weights = model.model.embed_tokens.weight
    before = weights.detach().clone()
    try:
        with torch.no_grad():
            # The final norm hides sizes: mark the token by what the head sees.
            handle = model.model.norm.register_forward_hook(
                lambda module, args, out: torch.where(args[0].abs().amax(-1, True) > 1e5, 1e4, out)
            )
            weights[9] = 1e6
        head = model.lm_head.register_forward_hook(spoil)
        names = [
            engine.add_request(p, max_new_tokens=COUNT, ignore_eos=True, **a)
            for p, a in ((prompts[0], {}), (marked, ask), (prompts[1], {}))
        ]
        results = {u.request_id: u.result for u in drain(engine) if u.result}
        if value == "nan" or (value == "inf" and "temperature" in ask):
            assert results[names[1]].finish_reason == "error"
            assert "got" in results[names[1]].error and results[names[1]].token_ids == []
        else:
            assert results[names[1]].finish_reason == "length"
            if "temperature" not in ask:
                assert results[names[1]].token_ids == own_tokens(model, marked, COUNT)
        for name, prompt in ((names[0], prompts[0]), (names[2], prompts[1])):
            assert results[name].token_ids == own_tokens(model, prompt, COUNT)
    finally:
        handle.remove()
        head.remove()
        with torch.no_grad():
            weights.copy_(before)
    assert is_as_new(engine)


def test_wrong_inputs_queue_nothing() -> None:
    model, prompts, _ = world("llama")
    engine = make_engine(model)
    two = prompts[:2]
    for ask, message in (
        ({"seed": [1, "x"]}, "seed must be an integer of 64 bits, got 'x'"),
        ({"seed": [1]}, "seed must be one, or one per prompt, got 1"),
        ({"seed": 1 << 64}, "seed must be an integer of 64 bits"),
        ({"seed": "x"}, "seed must be an integer of 64 bits, got 'x'"),
        ({"temperature": "x"}, "temperature must be a number from 0 on, got 'x'"),
        ({"temperature": float("nan")}, "temperature must be a number from 0 on, got nan"),
        ({"temperature": float("inf")}, "temperature must be a number from 0 on, got inf"),
        ({"top_p": None}, "top_p must be above 0 and at most 1, got None"),
        ({"top_k": 1.5}, "top_k must be an integer of at least 0, got 1.5"),
        ({"stop": 5}, "stop must be a list, got 5"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be integers, got"),
        ({"max_new_tokens": True}, "max_new_tokens must be an integer of at least 1, got True"),
    ):
        with pytest.raises(ValueError, match=message.replace("(", ".")):
            engine.generate(two, **ask)
        with pytest.raises(ValueError):
            engine.add_request(two[0], **ask)
    for prompt in (5, None, [], [[1]], [64], [True]):
        with pytest.raises(ValueError):
            engine.add_request(prompt)
    with pytest.raises(ValueError, match="prompts must be a text or a list of prompts, got 5"):
        engine.generate(5)
    with pytest.raises(ValueError, match="request_id must be hashable"):
        engine.add_request(two[0], [1])
    for wrong in (
        {"max_tokens": 0},
        {"block_size": -1},
        {"token_budget": 1.5},
        {"max_memory": "1.2.3GiB"},
        {"max_memory": 1e9},
        {"max_memory": True},
    ):
        with pytest.raises(ValueError, match="must be"):
            Engine(model, **wrong)
    assert not engine.has_requests and is_as_new(engine) and not engine._streamed
