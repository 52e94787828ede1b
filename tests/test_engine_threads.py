"""What may run at once: engines and plain calls of one model; an engine is one thread's at a time."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from test_engine import Letters, drain, is_as_new, model_of, own_tokens, prompts_of

from kvtailor.runtime.engine.engine import Engine
from kvtailor.runtime.host_state import journal, once


def small(model: Any, **kwargs: Any) -> Engine:
    return Engine(model, block_size=4, token_budget=16, max_tokens=48, **kwargs)


@pytest.mark.parametrize(
    ("name", "backend", "rounds"),
    [
        ("mistral", None, 12),
        ("mistral", "eager", 3),
        pytest.param("mistral", None, 200, marks=pytest.mark.slow),
        pytest.param("gemma3_text", "kvtailor", 200, marks=pytest.mark.slow),
    ],
)
def test_two_engines_and_a_plain_call(name: str, backend: str | None, rounds: int) -> None:
    # Windows and padding: a plain call that takes the step's attention or loses its mask shows.
    model = model_of(name, num_hidden_layers=1 if backend == "eager" else 2)
    prompts = prompts_of(model, random.Random(0), 6)
    expected = [own_tokens(model, prompt, 5) for prompt in prompts]
    ids = torch.randint(2, 64, (2, 21))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    given["attention_mask"][0, :5] = 0
    with torch.no_grad():
        scores = model(**given).logits
    before = model.config._attn_implementation, dict(vars(model.config))
    if backend is not None:
        torch._dynamo.reset()
        options = {"inner": "eager"} if backend == "kvtailor" else None
        model.compile(backend=backend, options=options)
    together = threading.Barrier(3)

    def serve(number: int) -> int:
        together.wait()
        equal = 0
        for _ in range(rounds):
            engine = engines[number]
            results = engine.generate(prompts, max_new_tokens=5, ignore_eos=True)
            equal += [r.token_ids for r in results] == expected
        return equal

    def call() -> int:
        together.wait()
        equal = 0
        with torch.no_grad():
            for _ in range(rounds * 5):
                error = (model(**given).logits - scores).abs().max()
                equal += bool(error <= 1e-5 * scores.abs().max())
        return equal

    engines = [small(model), small(model)]
    with ThreadPoolExecutor(3) as pool:
        work = [pool.submit(serve, 0), pool.submit(serve, 1), pool.submit(call)]
        assert [w.result() for w in work] == [rounds, rounds, 5 * rounds]
    assert (model.config._attn_implementation, dict(vars(model.config))) == before
    assert all(map(is_as_new, engines))
    with torch.no_grad():
        torch.testing.assert_close(model(**given).logits, scores)


def test_streams_of_several_threads_share_an_engine() -> None:
    model = model_of("llama", num_hidden_layers=2)
    prompts = prompts_of(model, random.Random(0), 6)
    expected = [own_tokens(model, prompt, 5) for prompt in prompts]
    engine = small(model)

    def serve(number: int) -> list[list[int]]:
        tokens: list[list[int]] = [[], []]
        mine = prompts[2 * number : 2 * number + 2]
        for update in engine.stream(mine, max_new_tokens=5, ignore_eos=True):
            tokens[update.index].append(update.token_id)
        return tokens

    for _ in range(5):
        names = [engine.add_request(prompts[i], max_new_tokens=5, ignore_eos=True) for i in (0, 5)]
        with ThreadPoolExecutor(3) as pool:
            got = [tokens for few in pool.map(serve, range(3)) for tokens in few]
        assert got == expected
        rest = {u.request_id: u.result.token_ids for u in drain(engine) if u.result}
        assert rest == dict(zip(names, (expected[0], expected[5])))
        assert is_as_new(engine) and not engine._ready


def test_a_plain_stepper_takes_nothing_from_a_stream() -> None:
    model = model_of("llama", num_hidden_layers=2)
    engine = small(model)
    stream = engine.stream([[5, 6, 7]], max_new_tokens=4, ignore_eos=True)
    first = next(stream)
    mine = engine.add_request([8, 9], max_new_tokens=6, ignore_eos=True)
    assert {update.request_id for update in drain(engine)} == {mine}
    tokens = [first.token_id, *(update.token_id for update in stream)]
    assert tokens == own_tokens(model, [5, 6, 7], 4)
    assert not engine.has_requests and is_as_new(engine)


def test_an_engine_is_not_called_from_its_own_step() -> None:
    model = model_of("llama", num_hidden_layers=2)
    tokenizer: Any = Letters()
    engine = small(model, tokenizer=tokenizer)
    tokenizer.decode = lambda *args, **kwargs: engine.step()
    result = engine.generate([[5, 6, 7]], max_new_tokens=4)[0]
    assert result.finish_reason == "error"
    assert result.error == "RuntimeError: an engine must not be called from within its own step"
    assert is_as_new(engine)


def test_a_stream_dropped_within_a_step_leaves_nothing() -> None:
    model = model_of("llama", num_hidden_layers=2)
    tokenizer: Any = Letters()
    engine = small(model, tokenizer=tokenizer)
    streams = [engine.stream([[5, 6]], max_new_tokens=40, ignore_eos=True) for _ in range(2)]
    for stream in streams:
        next(stream)
    decode = Letters().decode
    tokenizer.decode = lambda *args, **kwargs: (streams.clear(), decode(*args, **kwargs))[1]
    mine = engine.add_request([8, 9], max_new_tokens=3, ignore_eos=True)
    del stream
    assert [update.request_id for update in drain(engine)] == [mine] * 3
    assert is_as_new(engine) and not engine._ready and not engine._streamed


def test_a_journal_is_its_own_threads() -> None:
    with journal() as replay, ThreadPoolExecutor(1) as pool:
        assert once(lambda: 1) == 1
        assert pool.submit(once, lambda: 2).result() == 2
        replay()
        assert pool.submit(once, lambda: 3).result() == 3
        assert once(lambda: 4) == 1
