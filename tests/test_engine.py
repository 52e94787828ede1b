"""The engine against transformers' own generate, prompt by prompt."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from kv_cache import num_bytes
from models import ENCODER_DECODERS, build
from test_paged_cache import DECODERS, MODELS, make
from transformers import AttentionInterface
from transformers.generation import GenerationMixin

from kvtailor.backend import recording
from kvtailor.runtime.engine import model as model_module
from kvtailor.runtime.engine import outcome as outcome_module
from kvtailor.runtime.engine.engine import Engine
from kvtailor.runtime.engine.sampling import draw, sampling
from kvtailor.runtime.kv.paged_cache import PagedCache
from kvtailor.runtime.kv.spec import SlidingSpec


def model_of(name: str, **kwargs: Any) -> Any:
    model, _ = make(name, **kwargs)
    model.generation_config.forced_eos_token_id = None
    if model.config.is_encoder_decoder:
        model.generation_config.decoder_start_token_id = 0
    return model


def own_tokens(model: Any, prompt: Any, count: int, **kwargs: Any) -> list[int]:
    """The new tokens of eager generate for one prompt alone."""
    kwargs = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False, **kwargs}
    inputs = prompt[None] if isinstance(prompt, torch.Tensor) else torch.tensor([prompt])
    # Whisper's own generate adds to what the decoder starts with.
    out = GenerationMixin.generate(model, inputs, max_new_tokens=count, **kwargs)[0].tolist()
    return out[1:] if model.config.is_encoder_decoder else out[inputs.shape[1] :]


def prompts_of(model: Any, rng: random.Random, count: int, longest: int = 30) -> list[Any]:
    """Random prompts, some of which begin like others."""
    if model.main_input_name != "input_ids":
        shape = (model.config.num_mel_bins, 2 * model.config.max_source_positions)
        few = [torch.randn(shape) for _ in range(2)]
        return [rng.choice(few) for _ in range(count)]
    prompts: list[list[int]] = []
    for _ in range(count):
        start = rng.choice(prompts)[: rng.randint(0, longest // 2)] if prompts else []
        prompts.append(start + [rng.randrange(2, 64) for _ in range(rng.randint(1, longest // 2))])
    return prompts


def is_as_new(engine: Engine) -> bool:
    """Whether the pool is as at the start, but for what can still be found."""
    stats = engine.stats
    return stats.free_blocks == engine._kv.pool.num_blocks and not any(stats.live_blocks)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rounds", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_tokens_equal_eager(name: str, rounds: int) -> None:
    rng = random.Random(f"{name} {rounds}")
    model = model_of(name)
    preemptions = hits = 0
    for number in range(rounds):
        prompts = prompts_of(model, rng, 5)
        count = rng.randint(6, 10)
        expected = {id(p): own_tokens(model, p, count) for p in prompts}
        block_size = rng.choice([1, 3, 4])
        engine = Engine(
            model,
            block_size=block_size,
            token_budget=rng.choice([5, 16, 40]),
            max_tokens=48,
            encoder_tokens=32 if model.config.is_encoder_decoder else None,
        )
        # Enough for the longest request, and little more.
        shrink(engine, rng.choice([1.0, 1.6]) if number else 1.0)
        for _ in range(2):
            # The second time, prefixes of the first are still there.
            results = engine.generate(prompts, max_new_tokens=count, ignore_eos=True)
            assert [r.token_ids for r in results] == [expected[id(p)] for p in prompts]
            assert {r.finish_reason for r in results} == {"length"}
            assert is_as_new(engine)
        preemptions += engine.stats.preemptions
        hits += engine.stats.hit_tokens
    if name not in ENCODER_DECODERS:
        assert preemptions
        assert hits or rounds == 1


def shrink(engine: Engine, factor: float) -> None:
    """Leave the pool `factor` times what the longest request takes."""
    pool, layout = engine._kv.pool, engine._step.layout
    keep = int(factor * layout.request_blocks(engine.max_tokens, engine._scheduler.token_budget))
    pool.allocate(pool.num_blocks - keep)
    pool.num_blocks, pool.live[0] = keep, 0


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS)]
)
def test_tokens_equal_eager_compiled(name: str, request: pytest.FixtureRequest) -> None:
    slow = request.node.get_closest_marker("slow") is not None
    model = model_of(name) if slow else model_of(name, num_hidden_layers=2)
    rng = random.Random(1)
    prompts = prompts_of(model, rng, 5)
    expected = [own_tokens(model, p, 8) for p in prompts]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.compile(backend="kvtailor", options={"inner": "eager"})
    engine = Engine(model, block_size=4, token_budget=16, max_memory="4MiB", encoder_tokens=32)
    results = engine.generate(prompts, max_new_tokens=8, ignore_eos=True)
    assert [r.token_ids for r in results] == expected
    assert is_as_new(engine)
    # C01, D09: a graph for steps of one token and one for all others; with an encoder, more for
    # steps with and without new inputs.
    for count in (1, 2, 7):
        more = engine.generate(prompts_of(model, rng, count), max_new_tokens=8, ignore_eos=True)
        assert all(r.error is None for r in more)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] <= (4 if name in ENCODER_DECODERS else 2)
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gemma3n_text", "gpt_oss"])
def test_tokens_equal_eager_inductor(name: str) -> None:
    model = model_of(name)
    prompts = prompts_of(model, random.Random(1), 4)
    expected = [own_tokens(model, p, 6) for p in prompts]
    torch._dynamo.reset()
    model.compile(backend="kvtailor")
    engine = Engine(model, block_size=4, token_budget=16, max_memory="4MiB")
    results = engine.generate(prompts, max_new_tokens=6, ignore_eos=True)
    assert [r.token_ids for r in results] == expected


def test_the_model_stays_as_it_was() -> None:
    model = model_of("llama")
    before = model.config._attn_implementation
    gc.collect()
    names = set(AttentionInterface._global_mapping)
    engine = Engine(model, max_memory="1MiB")
    engine.generate([[1, 2, 3]], max_new_tokens=2)
    assert model.config._attn_implementation == before
    del engine
    gc.collect()
    assert set(AttentionInterface._global_mapping) == names


def test_one_row_per_sequence_reaches_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    engine = Engine(model, max_memory="1MiB", token_budget=16)
    kept: list[list[int]] = []
    forward = model.forward

    def spy(**kwargs: Any) -> Any:
        kept.append(kwargs["logits_to_keep"].tolist())
        return forward(**kwargs)

    monkeypatch.setattr(model, "forward", spy)
    engine.generate([[5, 6, 7, 8], [9, 10, 11, 12]], max_new_tokens=2, ignore_eos=True)
    assert kept == [[3, 7], [0, 1]]
    kept.clear()
    # A prompt in pieces of 16: only the last piece has a row to score (one row counts twice, so
    # that compiled steps see two sizes only: one and many).
    engine.generate([list(range(2, 42))], max_new_tokens=1, ignore_eos=True)
    assert kept == [[0, 0], [0, 0], [7, 7]]


def test_hits_are_whole_blocks_and_leave_a_token() -> None:
    # P01
    model = model_of("llama")
    for length, hit in ((8, 4), (4, 0), (5, 4), (7, 4), (9, 8)):
        engine = Engine(model, block_size=4, max_memory="1MiB")
        prompt = list(range(2, 2 + length))
        first, second = (engine.generate([prompt], max_new_tokens=3)[0] for _ in range(2))
        assert (first.cached_tokens, second.cached_tokens) == (0, hit)
        assert first.token_ids == second.token_ids


def test_without_prefix_caching_nothing_is_found() -> None:
    engine = Engine(model_of("llama"), block_size=4, max_memory="1MiB", prefix_caching=False)
    prompts = [list(range(2, 11))] * 2
    first, second = (engine.generate(prompts, max_new_tokens=3) for _ in range(2))
    assert [r.cached_tokens for r in first + second] == [0] * 4
    assert [r.token_ids for r in first] == [r.token_ids for r in second]
    assert engine.stats.hit_tokens == 0


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "llama4_text", "gpt_oss"])
def test_log_probabilities(name: str) -> None:
    # K03: every asked row equals the full run, also in pieces, and beside prompts that ask none.
    model = model_of(name)
    rng = random.Random(3)
    prompts = prompts_of(model, rng, 4)
    engine = Engine(model, block_size=4, token_budget=7, max_memory="1MiB", max_tokens=40)
    shrink(engine, 1.5)
    for _ in range(2):
        plain = [engine.add_request(p, max_new_tokens=9, ignore_eos=True) for p in prompts]
        asked = [
            engine.add_request(
                p, max_new_tokens=9, ignore_eos=True, logprobs=True, prompt_logprobs=True
            )
            for p in prompts
        ]
        results = {u.request_id: u.result for u in drain(engine) if u.result}
        for prompt, one, two in zip(prompts, plain, asked):
            result = results[two]
            assert results[one].token_ids == result.token_ids
            assert results[one].logprobs is None and results[one].prompt_logprobs is None
            tokens = prompt + result.token_ids
            with torch.no_grad():
                rows = model(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
            expected = [float(rows[i, token]) for i, token in enumerate(tokens[1:])]
            known = [*result.prompt_logprobs[1:], *result.logprobs]
            assert result.prompt_logprobs[0] is None
            assert known == pytest.approx(expected, abs=1e-4)
    assert engine.stats.preemptions > 0


def drain(engine: Engine) -> list[Any]:
    updates = []
    while engine.has_requests:
        updates += engine.step()
    return updates


def test_a_fact_is_found_through_full_layers_only() -> None:
    """Of two prompts that differ early, local layers alone cannot tell."""
    rng = random.Random(5)
    long = [rng.randrange(2, 64) for _ in range(90)]
    other = [*long[:3], 63 if long[3] != 63 else 62, *long[4:]]
    ask = {"max_new_tokens": 4, "ignore_eos": True, "logprobs": True}
    for name, found in (("mistral", False), ("gemma3_text", True), ("llama4_text", True)):
        model = model_of(name)
        engine = Engine(model, block_size=4, token_budget=32, max_memory="1MiB")
        a, b = (engine.generate([p], **ask)[0] for p in (long, other))
        assert (max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs)) > 1e-4) is found
        for prompt, result in ((long, a), (other, b)):
            assert result.token_ids == own_tokens(model, prompt, 4)


def test_recycled_blocks_do_not_leak() -> None:
    # P09
    for name in MODELS:
        model = model_of(name)
        engine = Engine(model, block_size=4, max_memory="1MiB", encoder_tokens=32)
        for pages in engine._step.pages._made.values():
            for page in pages:
                page.fill_(float("nan"))
        prompts = prompts_of(model, random.Random(2), 3)
        results = engine.generate(prompts, max_new_tokens=6, ignore_eos=True)
        assert [r.token_ids for r in results] == [own_tokens(model, p, 6) for p in prompts], name


@pytest.mark.parametrize("name", ["mistral", "llama4_text", "gemma4_text"])
def test_local_groups_hold_their_formula_at_most(name: str) -> None:
    model = model_of(name)
    engine = Engine(model, block_size=4, token_budget=8, max_memory="4MiB")
    engine.add_request(list(range(2, 60)), max_new_tokens=50, ignore_eos=True)
    layout = engine._step.layout
    peak = [0] * len(layout.specs)
    while engine.has_requests:
        engine.step()
        peak = [max(p, n) for p, n in zip(peak, engine.stats.live_blocks)]
    for spec, blocks in zip(layout.specs, peak):
        assert blocks <= spec.admission_blocks(108, 8)
        if spec.kind != "full":
            # 8 positions look back, 8 are new: not the 27 blocks of 108 tokens.
            assert blocks <= 5
    # Layers that share keys have none of their own.
    owners = {layer for group in layout.groups for layer in group.layers}
    assert owners == ({"0", "1"} if name == "gemma4_text" else {"0", "1", "2", "3"})


def test_random_requests_leak_nothing() -> None:
    """500 requests, ended by length, stop, abort or error at random steps."""
    rng = random.Random(0)
    model = model_of("gemma3_text", num_hidden_layers=2)
    engine = Engine(model, block_size=4, token_budget=24, max_requests=12, max_memory="1MiB")
    shrink(engine, 1.2)
    started, ended, alive = 0, {}, []
    prompts = prompts_of(model, rng, 60, longest=40)
    while started < 500 or engine.has_requests:
        while started < 500 and len(alive) < 20:
            bad = rng.random() < 0.05
            prompt = [64] if bad else rng.choice(prompts)
            started += 1
            try:
                name = engine.add_request(
                    prompt,
                    max_new_tokens=rng.randint(1, 12),
                    temperature=rng.choice([0.0, 1.0]),
                    prompt_logprobs=rng.random() < 0.1,
                )
                assert not bad
                alive.append(name)
            except ValueError as error:
                assert bad and "tokens must be 0 to 63, got 64" in str(error)
                ended[f"bad {started}"] = "error"
        for update in engine.step():
            if update.result is not None:
                ended[update.request_id] = update.result.finish_reason
                alive.remove(update.request_id)
        if alive and rng.random() < 0.3:
            name = alive.pop(rng.randrange(len(alive)))
            result = engine.abort(name)
            assert result is not None and result.finish_reason == "abort"
            ended[name] = "abort"
    assert len(ended) == 500
    assert set(ended.values()) == {"stop", "length", "abort", "error"}
    assert engine.stats.preemptions > 0
    assert is_as_new(engine) and not engine._kv._requests and not engine._kv._preempted
    assert sorted(engine._kv.pool._blank + list(engine._kv.pool._cached)) == sorted(
        set(engine._kv.pool._blank) | set(engine._kv.pool._cached)
    )


class Letters:
    """A tokenizer of one character per token, but for 60, half of a character."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) - 60 for c in text]}

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        text, at = "", 0
        while at < len(tokens):
            if tokens[at] != 60:
                text += chr(tokens[at] + 60)
            elif tokens[at + 1 : at + 2] == [60]:
                text, at = text + "é", at + 1
            else:
                text += "\ufffd"
            at += 1
        return text


def scripted(monkeypatch: pytest.MonkeyPatch, engine: Engine, tokens: list[int]) -> None:
    """Let every request draw these tokens."""

    def draw(scores: Any, ask: Any, generator: Any) -> int:
        return script.pop(0)

    script = list(tokens)
    monkeypatch.setattr(outcome_module, "draw", draw)


def test_text_stops_and_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    engine = Engine(model, Letters(), max_memory="1MiB")
    text = [ord(c) - 60 for c in "hello world"]
    for stop, expected, reason in (
        ((), "hello world", "length"),
        ("o w", "hell", "stop"),
        (["xyz", "wo", "lo"], "hel", "stop"),
    ):
        scripted(monkeypatch, engine, [t if t > 0 else 1 for t in text])
        shown = "hello world".replace(" ", "=")
        stop = [s.replace(" ", "=") for s in ([stop] if isinstance(stop, str) else stop)]
        updates = list(
            engine.stream(["abc"], max_new_tokens=11, stop=stop, ignore_eos=True, temperature=1.0)
        )
        result = updates[-1].result
        assert result is not None and result.finish_reason == reason
        assert result.text == expected.replace(" ", "=")
        assert "".join(u.text for u in updates) == result.text
        assert all(shown.startswith("".join(u.text for u in updates[:i])) for i in range(12))
    # Half a character waits for the rest, and stays half if none comes.
    scripted(monkeypatch, engine, [5, 60, 60, 5, 60])
    pieces = [
        u.text for u in engine.stream(["abc"], max_new_tokens=5, ignore_eos=True, temperature=1.0)
    ]
    assert pieces == ["A", "", "é", "A", "\ufffd"]
    # A stop token is part of the tokens.
    scripted(monkeypatch, engine, [5, 7, 1, 9])
    result = engine.generate(["abc"], max_new_tokens=9, temperature=1.0)[0]
    assert (result.token_ids, result.finish_reason) == ([5, 7, 1], "stop")
    scripted(monkeypatch, engine, [5, 7, 1, 9])
    result = engine.generate(
        ["abc"], max_new_tokens=4, ignore_eos=True, stop_token_ids=[7], temperature=1.0
    )[0]
    assert (result.token_ids, result.finish_reason) == ([5, 7], "stop")


def test_seeds_do_not_depend_on_the_batch() -> None:
    model = model_of("llama")
    prompts = prompts_of(model, random.Random(1), 5)
    ask = {"max_new_tokens": 8, "temperature": 1.3, "top_k": 20, "top_p": 0.9, "ignore_eos": True}
    engine = Engine(model, block_size=4, token_budget=9, max_memory="1MiB")
    together = [r.token_ids for r in engine.generate(prompts, seed=7, **ask)]
    alone = [engine.generate([p], seed=7 + i, **ask)[0].token_ids for i, p in enumerate(prompts)]
    assert together == alone
    assert together != [r.token_ids for r in engine.generate(prompts, seed=8, **ask)]
    listed = engine.generate(prompts, seed=[11, 10, 9, 8, 7], **ask)
    assert listed[4].token_ids == engine.generate(prompts[4:], seed=7, **ask)[0].token_ids


def test_draws_are_from_what_transformers_would_draw_from(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation import logits_process as lp

    drawn_from: list[torch.Tensor] = []

    def multinomial(probabilities: torch.Tensor, count: int, generator: Any) -> torch.Tensor:
        drawn_from.append(probabilities)
        return torch.tensor([3])

    monkeypatch.setattr(torch, "multinomial", multinomial)
    torch.manual_seed(0)
    for temperature, top_k, top_p in ((0.7, 0, 1.0), (1.5, 5, 1.0), (1.0, 0, 0.6), (2.0, 9, 0.01)):
        scores = torch.randn(40)
        ask = sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        assert draw(scores, ask, None) == 3
        expected = lp.TemperatureLogitsWarper(temperature)(None, scores[None])
        if top_k:
            expected = lp.TopKLogitsWarper(top_k)(None, expected)
        if top_p < 1:
            expected = lp.TopPLogitsWarper(top_p)(None, expected)
        torch.testing.assert_close(drawn_from.pop(), expected[0].softmax(-1))


def test_stop_token_and_generation_config() -> None:
    model = model_of("bart")
    prompt = [5, 9, 33, 17]
    free = own_tokens(model, prompt, 8)
    model.generation_config.eos_token_id = free[3]
    model.generation_config.forced_eos_token_id = 50
    model.generation_config.suppress_tokens = [free[1]]
    model.generation_config.repetition_penalty = 1.2
    engine = Engine(model, max_memory="1MiB", encoder_tokens=16)
    for count in (2, 8):
        expected = own_tokens(
            model, prompt, count, eos_token_id=model.generation_config.eos_token_id
        )
        assert engine.generate([prompt], max_new_tokens=count)[0].token_ids == expected
    model.generation_config.sequence_bias = [[[3], 1.0]]
    with pytest.raises(ValueError, match="must not change scores in ways the engine doesn't know"):
        Engine(model, max_memory="1MiB", encoder_tokens=16)


def test_bad_input_disturbs_nobody() -> None:
    model = model_of("llama")
    engine = Engine(model, max_memory="1MiB", max_tokens=32)
    good = [5, 6, 7]
    results = engine.generate(
        [good, [], [99], list(range(2, 40)), "text", good], max_new_tokens=3, ignore_eos=True
    )
    expected = own_tokens(model, good, 3)
    assert [r.token_ids for r in results] == [expected, [], [], [], [], expected]
    assert [r.error for r in results[1:5]] == [
        "a prompt must have a token, got none",
        "tokens must be 0 to 63, got 99",
        "a prompt must leave room for a token in 32 (of the model and the pool), got 38 tokens",
        "a prompt as text needs a tokenizer, got text without one",
    ]
    with pytest.raises(ValueError, match="unknown sampling field 'temprature'; did you mean"):
        engine.generate([good], temprature=1.0)
    with pytest.raises(ValueError, match="top_p must be above 0 and at most 1, got 0"):
        engine.add_request(good, top_p=0)
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        engine.add_request(good, stop="x")
    name = engine.add_request(good, "mine")
    with pytest.raises(ValueError, match="request_id must be new, got 'mine' again"):
        engine.add_request(good, "mine")
    assert engine.abort(name).finish_reason == "abort" and engine.abort(name) is None
    assert is_as_new(engine) and not engine.has_requests


def test_nan_ends_its_own_request_only() -> None:
    model = model_of("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[63] = float("nan")
    engine = Engine(model, max_memory="1MiB", block_size=4, verify=False)
    good = [5, 6, 7]
    for _ in range(2):
        results = engine.generate([good, [4, 63, 9], good], max_new_tokens=3, ignore_eos=True)
        expected = own_tokens(model, good, 3)
        assert [r.token_ids for r in results] == [expected, [], expected]
        assert results[1].error == "scores must be numbers, got NaN at position 2"
    assert is_as_new(engine)


def test_a_failing_step_can_be_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gemma3_text")
    prompts = prompts_of(model, random.Random(4), 4)
    expected = [own_tokens(model, p, 6) for p in prompts]
    engine = Engine(model, block_size=4, token_budget=9, max_memory="1MiB")
    forward, rng = model.forward, random.Random(0)

    def flaky(**kwargs: Any) -> Any:
        out = forward(**kwargs)
        if rng.random() < 0.5:
            raise RuntimeError("no power")
        return out

    monkeypatch.setattr(model, "forward", flaky)
    names = [engine.add_request(p, max_new_tokens=6, ignore_eos=True) for p in prompts]
    results, failures = {}, 0
    while engine.has_requests:
        try:
            results |= {u.request_id: u.result for u in engine.step() if u.result}
        except RuntimeError:
            failures += 1
    assert failures > 3
    assert [results[name].token_ids for name in names] == expected
    assert is_as_new(engine)


def test_leaving_a_stream_aborts() -> None:
    model = model_of("llama")
    engine = Engine(model, max_memory="1MiB")
    stream = engine.stream([[5, 6], [7, 8]], max_new_tokens=50, ignore_eos=True)
    for _ in range(5):
        next(stream)
    stream.close()
    assert not engine.has_requests and is_as_new(engine)


def test_updates_of_others_are_not_lost() -> None:
    model = model_of("llama")
    engine = Engine(model, max_memory="1MiB")
    mine = engine.add_request([5, 6], max_new_tokens=2, ignore_eos=True)
    engine.generate([[7, 8]], max_new_tokens=6, ignore_eos=True)
    updates = drain(engine)
    assert [u.request_id for u in updates] == [mine, mine]
    assert updates[-1].result.token_ids == own_tokens(model, [5, 6], 2)


def test_encoder_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # X06: alone or together, whatever the other inputs' lengths.
    for name in ("bart", "t5", "whisper"):
        model = model_of(name)
        engine = Engine(model, block_size=4, max_memory="4MiB", encoder_tokens=32)
        calls: list[Any] = []
        model.get_encoder().register_forward_hook(lambda *args, calls=calls: calls.append(args))
        prompts = prompts_of(model, random.Random(6), 4)
        results = engine.generate(prompts, max_new_tokens=7, ignore_eos=True)
        assert len(calls) == 4
        assert [r.token_ids for r in results] == [own_tokens(model, p, 7) for p in prompts]
        assert is_as_new(engine)


def test_models_that_cannot_be_served_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # ALiBi, and no AttentionInterface.
    with pytest.raises(ValueError, match="attention must go through transformers' AttentionInt"):
        Engine(build("bloom", "eager")[0], max_memory="1MiB")
    # Keys that come from images.
    with pytest.raises(ValueError, match="every layer must keep keys of a text alone, got none"):
        Engine(build("mllama", "sdpa")[0], max_memory="1MiB")
    # Scores that depend on the whole row of tokens.
    model = model_of("llama")
    model.model.norm.register_forward_hook(lambda m, i, out: out - out.mean(1, keepdim=True))
    with pytest.raises(ValueError, match="must compute the same over pages as by itself"):
        Engine(model, max_memory="1MiB")
    # A window the config doesn't know of, and one that the mask doesn't have.
    model = model_of("mistral")
    specs = model_module.layer_specs

    def narrow(config: Any, block_size: int) -> Any:
        return {k: SlidingSpec(7, block_size=block_size) for k in specs(config)}

    monkeypatch.setattr(model_module, "layer_specs", narrow)
    with pytest.raises(ValueError, match=r"must have the (window|mask) its config says"):
        Engine(model, max_memory="1MiB")
    with pytest.raises(ValueError, match="must be in eval mode"):
        Engine(model_of("llama").train(), max_memory="1MiB")


def test_rotary_tables_that_depend_on_the_batch() -> None:
    """Beyond the length where they do, a request is refused; up to it, tokens are generate's."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    rope["original_max_position_embeddings"] = 24
    model, _ = make("llama", rope_parameters=rope)
    engine = Engine(model, block_size=4, max_memory="1MiB")
    assert engine.max_tokens == 24
    prompts = [list(range(2, 20)), [5, 6, 7]]
    results = engine.generate([*prompts, list(range(2, 40))], max_new_tokens=5, ignore_eos=True)
    assert [r.token_ids for r in results[:2]] == [own_tokens(model, p, 5) for p in prompts]
    assert results[2].error is not None
    with pytest.raises(ValueError, match="max_tokens must be at most 24, from where the model's"):
        Engine(model, max_tokens=30)


@pytest.mark.slow
def test_the_tail_runs_on_one_row_per_sequence() -> None:
    """Compiled, layers that share keys run on the rows whose scores are asked for."""
    model = model_of("gemma3n_text")
    prompts = prompts_of(model, random.Random(1), 4)
    expected = [own_tokens(model, p, 3) for p in prompts]
    torch._dynamo.reset()
    model.compile(backend="kvtailor", options={"inner": "eager"})
    engine = Engine(model, block_size=4, max_memory="4MiB")
    with recording() as seen:
        results = engine.generate(prompts, max_new_tokens=3, ignore_eos=True)
        scored = engine.generate(prompts, max_new_tokens=1, prompt_logprobs=True)
    assert [r.token_ids for r in results] == expected
    assert all(len(r.prompt_logprobs) == len(p) for r, p in zip(scored, prompts))
    narrowed, whole = seen.graphs
    everything, *kept = attended_rows(narrowed.graph_after)
    # Of four layers, two share; the second is the last that stores keys.
    assert len(kept) == 3 and len(set(kept)) == 1 and everything not in kept
    assert len(set(attended_rows(whole.graph_after))) == 1


def attended_rows(graph: str) -> list[str]:
    """The size of the row axis of every paged_attend."""
    lines = [line for line in graph.splitlines() if "kvtailor::paged_attend" in line]
    return [line.split("[")[1].split(",")[0] for line in lines]


@pytest.mark.parametrize(("name", "found"), [("llama", True), ("mistral", False)])
def test_a_fact_early_in_the_prompt(name: str, found: bool) -> None:
    """Full layers find it; four layers with a window of 8 reach 28 tokens back, and it is lost."""
    model = model_of(name)
    rest = random.Random(5).choices(range(2, 64), k=40)
    prompts = [[7, fact, *rest] for fact in (11, 12)]
    engine = Engine(model, block_size=4, token_budget=16, max_tokens=64, max_memory="1MiB")
    results = engine.generate(prompts, max_new_tokens=1, logprobs=True, ignore_eos=True)
    scores = []
    for prompt, result in zip(prompts, results):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            eager = model(ids, use_cache=False).logits[0, -1].log_softmax(-1)
            cache = PagedCache(model.config, max_tokens=64, batch_size=1, block_size=4)
            paged = model(ids, past_key_values=cache).logits[0, -1].log_softmax(-1)
        torch.testing.assert_close(paged, eager, atol=1e-5, rtol=1e-5)
        assert result.token_ids == [int(eager.argmax())]
        assert result.logprobs == pytest.approx([float(eager.max())], abs=1e-5)
        scores.append((eager, paged))
    for one, other in zip(*scores):
        assert ((one - other).abs().max() > 1e-4) == found
    same = results[0].logprobs == pytest.approx(results[1].logprobs, abs=1e-6)
    assert same != found


def test_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine(model_of("llama"), max_memory="1MiB")
    engine.generate([[5, 6], [7]], max_new_tokens=2, progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "2/2" in err


def test_memory() -> None:
    model = model_of("llama")
    for memory, size in (("64KiB", 65536), ("0.5 MB", 500_000), (1 << 18, 1 << 18)):
        engine = Engine(model, max_memory=memory, block_size=4)
        assert num_bytes(engine._step.pages) <= size
        assert num_bytes(engine._step.pages) > size - 2 * engine._step.layout.block_bytes
    with pytest.raises(ValueError, match="max_memory must be bytes or a text like"):
        Engine(model, max_memory="a lot")
    with pytest.raises(ValueError, match="max_memory must hold 2 blocks of 2048 bytes, got 4000"):
        Engine(model, max_memory=4000, block_size=4)
    with pytest.raises(ValueError, match="max_memory must hold a request of max_tokens=128"):
        Engine(model, max_memory="64KiB", block_size=4, max_tokens=128)
    assert Engine(model, max_memory="64KiB", block_size=4).max_tokens == 124
    assert DECODERS  # the table of models is shared
