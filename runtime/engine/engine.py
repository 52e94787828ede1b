"""Continuous batching of any transformers model over the block manager.

    engine = Engine(model, tokenizer, max_memory="1GiB")
    for result in engine.generate(["Once upon a time", "In the beginning"], max_new_tokens=64):
        print(result.text)

A step flattens the tokens of all requests to ``[1, N]``: parts of prompts beside single new
tokens. Requests share the blocks of equal prefixes. If the model was compiled
(``model.compile(backend="kvtailor")``), so are the steps.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import re
import threading
import traceback
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvtailor.runtime.engine.requests import (
    FinishReason,
    Outcome,
    Request,
    Result,
    TextStream,
    Update,
)
from kvtailor.runtime.engine.sampling import Sampling, draw, log_probability, sampling
from kvtailor.runtime.engine.scheduler import Scheduled, Scheduler
from kvtailor.runtime.engine.step import PagedStep, make_batch, refusal, unwrapped
from kvtailor.runtime.engine.verify import OVER_PAGES, first_run, verify_step
from kvtailor.runtime.kv.blocks import Stats
from kvtailor.runtime.kv.hybrid import HybridManager
from kvtailor.runtime.kv.layout import (
    KVLayout,
    cross_specs,
    decoder_config,
    layer_specs,
    with_geometry,
)
from kvtailor.runtime.kv.spec import KVSpec

__all__ = ["Engine"]

# Fields of a generation config that change scores, and what leaves them alone. Those the engine
# applies are in `_processors`.
_UNSUPPORTED: dict[str, Any] = {
    "bad_words_ids": None,
    "constraints": None,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "guidance_scale": None,
    "min_length": 0,
    "min_new_tokens": None,
    "sequence_bias": None,
    "watermarking_config": None,
}


class Engine:
    """Generates for many prompts at once with one transformers model.

    model: in eval mode; its attention must go through transformers' AttentionInterface, which is
    checked, with everything else steps rely on, by running a few tokens (verify=False skips
    that). tokenizer: for prompts and results as text. max_memory: bytes for keys and values, or a
    text like "512MiB". max_tokens: the longest request, prompt and new tokens (default: what the
    model and max_memory allow). block_size: tokens per block. token_budget: the most tokens of a
    step; longer prompts are computed in parts. max_requests: the most requests of a step.
    prefix_caching: whether requests share the blocks of equal prefixes, also of earlier requests.
    encoder_tokens: the longest output of an encoder (default: the model's most, else 512).
    graph_decode: whether steps of one new token per request get a form that CUDA graphs can hold,
    if the model is compiled with those: it costs another compilation (default: on a CUDA device).

    Threads take turns: a call waits for the step of another thread. A call from within the
    engine's own step is a RuntimeError. An exception ends the request it comes from; one that is
    no request's (the model's, an interrupt) is raised, and leaves all as before the step.

    Raises ValueError for a model it can't serve, saying why.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        max_memory: int | str = "1GiB",
        max_tokens: int | None = None,
        block_size: int = 16,
        token_budget: int = 2048,
        max_requests: int = 256,
        prefix_caching: bool = True,
        encoder_tokens: int | None = None,
        graph_decode: bool | None = None,
        verify: bool = True,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        raw = unwrapped(model)
        if raw.training:
            raise ValueError("the model must be in eval mode, got one that trains")
        if not (hasattr(raw, "can_generate") and raw.can_generate()):
            raise ValueError(f"the model must be one that generates, got {type(raw).__name__}")
        self._raw = raw
        self._encodes = bool(getattr(raw.config, "is_encoder_decoder", False))
        self._text_config = decoder_config(raw.config)
        self._check_generation_config()
        sizes = {
            "token_budget": token_budget,
            "max_requests": max_requests,
            "block_size": block_size,
            "max_tokens": 1 if max_tokens is None else max_tokens,
            "encoder_tokens": 1 if encoder_tokens is None else encoder_tokens,
        }
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        limit = _positions(raw.config, self._text_config)
        if max_tokens is not None and limit is not None and max_tokens > limit:
            raise ValueError(f"max_tokens must be at most the model's {limit}, got {max_tokens}")
        limit = _batch_free_positions(self._text_config, limit)
        if max_tokens is not None and limit is not None and max_tokens > limit:
            raise ValueError(
                f"max_tokens must be at most {limit}, from where the model's rotary table depends "
                f"on the longest position of the batch, got {max_tokens}"
            )
        most = max_tokens or limit or 1 << 20
        if self._encodes and encoder_tokens is None:
            encoder_tokens = _encoder_positions(raw.config)
        self._encoder_tokens = encoder_tokens
        self._encoder_output: Any = None
        layers = self._layers(block_size, encoder_tokens)
        layout, num_blocks, most = _fit(
            layers, _bytes(max_memory), most, token_budget, max_requests
        )
        if max_tokens is not None and most < max_tokens:
            raise ValueError(
                f"max_memory must hold a request of max_tokens={max_tokens}, "
                f"got {max_memory}, which holds one of {most}"
            )
        self.max_tokens = most
        if graph_decode is None:
            graph_decode = raw.device.type == "cuda"
        graph_tokens = most if graph_decode else None
        self._step = PagedStep(model, layers, layout, num_blocks, graph_tokens)
        self._step.encoder_output = self._encoder_output
        self._scheduler = Scheduler(
            HybridManager(layout.specs, num_blocks, in_flight=token_budget),
            token_budget,
            max_requests,
            self._prepare_encoder,
            prefix_caching,
        )
        self._names = itertools.count()
        self._vocab = raw.get_input_embeddings().num_embeddings
        # Updates nobody has taken yet, the requests of streams, and streams that were left.
        self._ready: list[Update] = []
        self._streamed: set[Hashable] = set()
        self._left: list[Collection[Hashable]] = []
        # What the last step came to, until all of it is done; whether something is half done.
        self._decided: list[Outcome] = []
        self._torn = False
        self._lock = threading.RLock()
        self._busy = False
        encode = self._sample_encoder if self._encodes else None
        check = partial(verify_step, self._step, layers, encode) if verify else self._learn
        self._step.adapt(check)

    # What the model is like

    def _layers(self, block_size: int, encoder_tokens: int | None) -> dict[str, KVSpec]:
        """A spec with its real shape for every layer that owns keys: from a run on one token."""
        specs = layer_specs(self._raw.config, block_size=block_size)
        arguments: dict[str, Any] = {"use_cache": True}
        ids = torch.zeros(1, 1, dtype=torch.int64, device=self._raw.device)
        if self._encodes:
            states = self._sample_encoder()
            encoded = self._encoder_output(last_hidden_state=states)
            arguments |= {"decoder_input_ids": ids, "encoder_outputs": encoded}
        else:
            arguments["input_ids"] = ids
        cache = first_run(self._raw, arguments)
        if self._encodes:
            assert encoder_tokens is not None
            specs |= cross_specs(self._raw.config, encoder_tokens, block_size)
        own = cache.self_attention_cache if self._encodes else cache
        shaped = {}
        for name, spec in specs.items():
            kind, _, index = name.rpartition(".")
            layer = (cache.cross_attention_cache if kind else own).layers[int(index)]
            k, v = layer.keys, layer.values
            if k is None:
                raise ValueError(
                    f"every layer must keep keys of a text alone, got none for layer {name}"
                )
            shaped[name] = with_geometry(spec, k.shape[1], k.shape[3], v.shape[3], k.element_size())
        return shaped

    def _learn(self) -> None:
        """Without checks, two tokens still show which attention reads which layer."""
        kv = HybridManager(self._step.layout.specs, self._step.pages.num_blocks)
        states = self._sample_encoder() if self._encodes else None
        length = 0 if states is None else states.shape[1]
        kv.allocate(0, (), encoder_tokens=length)
        kv.append(0, 2)
        self._step.set(make_batch(kv, [(0, [0, 0], 0, 2)], [states], [length]))
        try:
            self._step.run([0], compiled=False)
        except Exception as failure:
            raise refusal(self._raw, failure, OVER_PAGES) from failure

    def _sample_encoder(self) -> Tensor:
        """States [1, M, width] of some encoder input, another one at every call."""
        if self._raw.main_input_name != "input_ids":
            return self._encode(torch.randn(self._feature_shape(), dtype=self._raw.dtype))
        vocab = self._raw.get_input_embeddings().num_embeddings
        return self._encode(torch.randint(vocab, (6,)))

    def _feature_shape(self) -> tuple[int, int]:
        config = self._raw.config
        return config.num_mel_bins, 2 * config.max_source_positions

    def _encode(self, encoder_input: Tensor) -> Tensor:
        """States [1, M, width] of token ids [T] or features [bins, frames], by itself."""
        with torch.no_grad():
            encoder = self._raw.get_encoder()
            out = encoder(encoder_input[None].to(self._raw.device))
        # Decoders read what their own encoder returns, field by field.
        self._encoder_output = type(out)
        states: Tensor = out.last_hidden_state
        return states

    def _check_generation_config(self) -> None:
        config = getattr(self._raw, "generation_config", None)
        wrong = []
        for name, neutral in _UNSUPPORTED.items():
            value = getattr(config, name, None)
            if value is not None and value != neutral:
                wrong.append(f"{name}={value!r}")
        if wrong:
            raise ValueError(
                "the model's generation config must not change scores in ways the engine doesn't "
                f"know, got {', '.join(wrong)}"
            )

    # Requests

    def add_request(
        self,
        prompt: str | Sequence[int] | Tensor,
        request_id: Hashable = None,
        *,
        decoder_prompt: Sequence[int] | None = None,
        **ask: Any,
    ) -> Hashable:
        """Queue a prompt; returns its id. `step` until its Update carries a result.

        prompt: text, token ids, or for a model with an encoder what that takes: text, ids, or
        features [bins, frames]; decoder_prompt then are the ids the decoder starts with. ask:
        fields of `Sampling`. Raises ValueError, queueing nothing, for a prompt that is empty, too
        long, or not of this vocabulary, and for unknown fields.
        """
        if request_id is None:
            request_id = next(self._names)
        if not isinstance(request_id, Hashable):
            raise ValueError(f"request_id must be hashable, got {request_id!r}")
        self._add(self._request(prompt, request_id, decoder_prompt, sampling(**ask)))
        return request_id

    def _add(self, request: Request) -> None:
        with self._alone():
            if request.id in self._scheduler.requests:
                raise ValueError(f"request_id must be new, got {request.id!r} again")
            self._torn = True
            self._scheduler.add(request)
            self._torn = False

    def _request(
        self,
        prompt: Any,
        request_id: Hashable,
        decoder_prompt: Sequence[int] | None,
        ask: Sampling,
    ) -> Request:
        if ask.stop and self.tokenizer is None:
            raise ValueError(f"stop strings need a tokenizer, got {ask.stop!r} without one")
        encoder_input = salt = None
        if self._encodes:
            encoder_input = self._encoder_input(prompt)
            salt = _fingerprint(encoder_input)
            tokens = self._start_tokens() if decoder_prompt is None else _ids(decoder_prompt)
        elif decoder_prompt is not None:
            raise ValueError("decoder_prompt is for models with an encoder, got one without")
        else:
            tokens = self._prompt_tokens(prompt)
        self._check_tokens(tokens)
        if len(tokens) >= self.max_tokens:
            raise ValueError(
                f"a prompt must leave room for a token in {self.max_tokens} (of the model and the "
                f"pool), got {len(tokens)} tokens"
            )
        stop_tokens = set(ask.stop_token_ids)
        if not ask.ignore_eos:
            stop_tokens |= self._eos()
        stream = None if self.tokenizer is None else TextStream(self.tokenizer, ask.stop)
        return Request(
            request_id,
            tokens,
            ask,
            frozenset(stop_tokens),
            encoder_input=encoder_input,
            salt=salt,
            processors=self._processors(len(tokens), ask),
            stream=stream,
        )

    def abort(self, request_id: Hashable) -> Result | None:
        """End a request now; None if there is no such request any more."""
        with self._alone():
            return self._abort(request_id)

    def _abort(self, request_id: Hashable) -> Result | None:
        request = self._scheduler.requests.get(request_id)
        if request is None:
            return None
        outcome = _end(request, "abort")
        self._torn = True
        self._take([outcome])
        self._torn = False
        return request.result

    @property
    def has_requests(self) -> bool:
        """Whether `step` has something to do, or to return."""
        return len(self._scheduler) > 0 or any(map(self._is_anybodys, self._ready))

    @property
    def stats(self) -> Stats:
        """Counters of the block manager: hits, preemptions, blocks in use."""
        return self._kv.stats

    @property
    def _kv(self) -> HybridManager:
        return self._scheduler.kv

    def _prompt_tokens(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("a prompt as text needs a tokenizer, got text without one")
            return list(self.tokenizer(prompt)["input_ids"])
        return _ids(prompt)

    def _encoder_input(self, prompt: Any) -> Tensor:
        if self._raw.main_input_name != "input_ids":
            if not isinstance(prompt, Tensor) or prompt.shape != self._feature_shape():
                got = tuple(prompt.shape) if isinstance(prompt, Tensor) else type(prompt).__name__
                raise ValueError(f"features must have shape {self._feature_shape()}, got {got}")
            return prompt.to(self._raw.dtype)
        tokens = self._prompt_tokens(prompt)
        self._check_tokens(tokens)
        assert self._encoder_tokens is not None
        if len(tokens) > self._encoder_tokens:
            raise ValueError(
                f"the encoder must be given at most {self._encoder_tokens} tokens, "
                f"got {len(tokens)}"
            )
        return torch.tensor(tokens)

    def _check_tokens(self, tokens: list[Any]) -> None:
        if not tokens:
            raise ValueError("a prompt must have a token, got none")
        for token in tokens:
            if (
                isinstance(token, bool)
                or not isinstance(token, int)
                or not 0 <= token < self._vocab
            ):
                raise ValueError(f"tokens must be 0 to {self._vocab - 1}, got {token!r}")

    def _start_tokens(self) -> list[int]:
        # As generate does: without a token of its own, a decoder starts as any text does.
        for name in ("decoder_start_token_id", "bos_token_id"):
            for config in (getattr(self._raw, "generation_config", None), self._raw.config):
                start = getattr(config, name, None)
                if start is not None:
                    return [start]
        raise ValueError("the model names no decoder_start_token_id: give a decoder_prompt")

    def _eos(self) -> set[int]:
        # As generate does: where there is a generation config, it alone says what ends a text.
        config = getattr(self._raw, "generation_config", None) or self._text_config
        eos = getattr(config, "eos_token_id", None)
        if eos is None:
            return set()
        return set(eos) if isinstance(eos, (list, tuple)) else {eos}

    def _processors(self, num_prompt: int, ask: Sampling) -> Any:
        """What the generation config does to scores, as transformers' own processors."""
        from transformers.generation import logits_process as lp

        config = getattr(self._raw, "generation_config", None)
        found: Any = lp.LogitsProcessorList()
        device = str(self._raw.device)

        def value(name: str) -> Any:
            return getattr(config, name, None)

        if value("repetition_penalty") not in (None, 1.0):
            found.append(lp.RepetitionPenaltyLogitsProcessor(value("repetition_penalty")))
        if value("no_repeat_ngram_size"):
            found.append(lp.NoRepeatNGramLogitsProcessor(value("no_repeat_ngram_size")))
        if value("forced_bos_token_id") is not None:
            found.append(lp.ForcedBOSTokenLogitsProcessor(value("forced_bos_token_id")))
        if value("forced_eos_token_id") is not None:
            found.append(
                lp.ForcedEOSTokenLogitsProcessor(
                    num_prompt + ask.max_new_tokens, value("forced_eos_token_id"), device
                )
            )
        if value("suppress_tokens"):
            found.append(lp.SuppressTokensLogitsProcessor(value("suppress_tokens"), device))
        if value("begin_suppress_tokens"):
            begin = num_prompt
            if num_prompt == 1 and value("forced_bos_token_id") is not None:
                begin += 1
            found.append(
                lp.SuppressTokensAtBeginLogitsProcessor(
                    value("begin_suppress_tokens"), begin, device
                )
            )
        return found

    # Steps

    def step(self) -> list[Update]:
        """Run one step; an Update for every request that got a token or ended.

        If the model itself raises, the requests are as before it: step again, or abort. What a
        `stream` asked for goes to that stream.
        """
        return self._step_for(self._is_anybodys)

    def _is_anybodys(self, update: Update) -> bool:
        return update.request_id not in self._streamed

    def _step_for(self, wanted: Callable[[Update], bool]) -> list[Update]:
        """Run one step; returns the updates that are `wanted`, and keeps the others."""
        with self._alone():
            self._torn = True
            self._run_step()
            self._torn = False
            mine = [update for update in self._ready if wanted(update)]
            self._ready = [update for update in self._ready if not wanted(update)]
            return mine

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One thread at a time, with the engine in order before and after it."""
        with self._lock:
            if self._busy:
                raise RuntimeError("an engine must not be called from within its own step")
            try:
                self._busy = True
                self._tidy()
                yield
            finally:
                try:
                    self._tidy()
                finally:
                    self._busy = False

    def _tidy(self) -> None:
        """Put right what an exception left half done, and drop what streams left behind.

        The requests and what was decided for them are the truth, and blocks are only a cache: all
        of them are forgotten. To be interrupted here does no harm, it is done again.
        """
        if self._torn:
            old = self._kv
            kv = HybridManager(
                old.specs, old.pool.num_blocks, in_flight=self._scheduler.token_budget
            )
            kv._counts = old._counts
            self._scheduler.restart(kv)
            self._take(self._decided)
            self._torn = False
        while self._left:
            names = self._left[-1]
            for name in names:
                self._abort(name)
            self._ready = [update for update in self._ready if update.request_id not in names]
            self._streamed.difference_update(names)
            self._left.pop()

    def _take(self, decided: list[Outcome]) -> None:
        """Do what was decided: from here on it is certain, also if this is interrupted."""
        self._decided = decided
        for outcome in decided:
            outcome.take()
            if outcome.reason is not None:
                self._scheduler.remove(outcome.request)
        updates = [update for outcome in decided for update in outcome.updates]
        self._ready, self._decided = self._ready + updates, []

    def _run_step(self) -> None:
        step, copies = self._scheduler.schedule()
        for copied in copies:
            self._step.pages.copy_blocks(copied.group, [copied.source], [copied.target])
        if not step:
            self._fail_stuck()
            return
        try:
            decided = self._decide(step)
        except BaseException:
            self._scheduler.undo(step)
            self._torn = False
            raise
        for part in step:
            request = part.request
            self._kv.settle(request.id, request.tokens[part.start : part.stop])
            request.num_computed = part.stop
        self._take(decided)

    def _fail_stuck(self) -> None:
        stuck = self._scheduler.stuck()
        if stuck is None:
            return
        needed = self._step.layout.request_blocks(len(stuck.tokens), self._scheduler.token_budget)
        why = f"a request must fit in the pool's {self._kv.pool.num_blocks} blocks, "
        self._take([_end(stuck, "error", f"{why}got one that takes {needed}")])

    def _decide(self, step: list[Scheduled]) -> list[Outcome]:
        """Run the model on a step, and see what that comes to: nothing is changed by it."""
        rows, spans = self._rows(step)
        logits = self._run(step, rows)
        # For all at once: on a GPU, each of these waits for the step. A NaN is the largest.
        top, likeliest = logits.max(-1)
        bad, best = top.isnan().tolist(), likeliest.tolist()
        decided = []
        for part, (i, j) in zip(step, spans):
            try:
                outcome = self._advance(part, logits[i:j], bad[i:j], best[i:j])
            except Exception as error:
                outcome = _end(part.request, "error", _said(error))
            decided.append(outcome)
        return decided

    def _prepare_encoder(self, request: Request) -> bool:
        """Run the encoder of a request about to be admitted: once, unless it is preempted.

        False if that fails, which ends the request.
        """
        if request.encoder_input is None or request.encoder_states is not None:
            return True
        try:
            states = self._encode(request.encoder_input)
        except Exception as error:
            self._take([_end(request, "error", _said(error))])
            return False
        request.encoder_states, request.encoder_tokens = states, states.shape[1]
        return True

    def _rows(self, step: list[Scheduled]) -> tuple[list[int], list[tuple[int, int]]]:
        """Rows of the batch whose scores are needed, and which of them belong to each request.

        A request's last row if it is due a token, all rows where the prompt's scores are asked
        for: two prompts of four tokens need the rows 3 and 7.
        """
        rows: list[int] = []
        spans: list[tuple[int, int]] = []
        at = 0
        for part in step:
            first, count = len(rows), part.stop - part.start
            if part.request.wants_prompt_rows:
                rows += range(at, at + count)
            elif part.is_last:
                rows.append(at + count - 1)
            spans.append((first, len(rows)))
            at += count
        return rows, spans

    def _run(self, step: list[Scheduled], rows: list[int]) -> Tensor:
        """Logits [len(rows), vocab]."""
        parts = [(p.request.id, p.request.tokens, p.start, p.stop) for p in step]
        states = [p.request.encoder_states for p in step]
        lens = [p.request.encoder_tokens or 0 for p in step]
        batch = make_batch(self._kv, parts, states, lens)
        self._step.set(batch)
        # A step of unfinished prompts needs no scores; the model still wants a row to compute.
        every = any(p.request.wants_prompt_rows for p in step)
        return self._step.run(rows or [0], narrow=not every)[: len(rows)]

    def _advance(
        self, part: Scheduled, logits: Tensor, bad: list[bool], best: list[int]
    ) -> Outcome:
        """What the step computed for a request: scores of its prompt, its next token.

        logits [rows, vocab]: the rows it asked for; bad: which have a NaN; best: their likeliest.
        """
        request = part.request
        if any(bad):
            where = part.stop - len(bad) + bad.index(True)
            raise ValueError(f"scores must be numbers, got NaN at position {where}")
        found: dict[str, Any] = {}
        if request.wants_prompt_rows:
            known = request.result.prompt_logprobs
            assert known is not None
            # Row i scores token i + 1; what was known before a preemption is known still.
            first, last = max(len(known), part.start + 1), min(part.stop + 1, request.num_prompt)
            if first < last:
                scores = logits[first - 1 - part.start : last - 1 - part.start]
                found["prompt_logprobs"] = log_probability(scores, request.tokens[first:last])
                found["scored"] = first
        if not part.is_last:
            return Outcome(request, part.stop, **found)
        scores = logits[-1:].float()
        if request.processors:
            ids = torch.tensor([request.tokens], device=logits.device)
            scores = request.processors(ids, scores)
            best = scores.argmax(-1).tolist()
        token = best[-1]
        if request.random_state is not None:
            generator = torch.Generator()
            generator.set_state(request.random_state)
            token = draw(scores[0].cpu(), request.ask, generator)
            found["random_state"] = generator.get_state()
        if request.result.logprobs is not None:
            found["logprobs"] = log_probability(scores, [token])
        return self._emit(request, token, found)

    def _emit(self, request: Request, token: int, found: dict[str, Any]) -> Outcome:
        text, stopped, stream = "", False, copy.copy(request.stream)
        if stream is not None:
            text, stopped = stream.add(token)
        reason: FinishReason | None = None
        if stopped or token in request.stop_tokens:
            reason = "stop"
        elif (
            request.num_new + 1 >= request.ask.max_new_tokens
            or len(request.tokens) + 1 >= self.max_tokens
        ):
            reason = "length"
        if reason is not None and stream is not None:
            text += stream.finish(stopped)
        stop = len(request.tokens)
        return Outcome(request, stop, token, reason, text=text, stream=stream, **found)

    # Whole prompts

    def generate(
        self,
        prompts: str | Sequence[Any],
        *,
        progress: bool = False,
        **ask: Any,
    ) -> list[Result]:
        """One result per prompt, in order.

        prompts: texts, or lists of token ids (a single text counts as one prompt). ask: fields of
        `Sampling`; seed may be a list with one per prompt, else prompt i has seed + i. A prompt
        that can't be served has a result with finish_reason "error"; the others go on. progress:
        show a bar.
        """
        prompts = _prompts(prompts)
        results: dict[int, Result] = {}
        with (
            _bar(progress, len(prompts)) as advance,
            closing(self.stream(prompts, **ask)) as updates,
        ):
            for update in updates:
                if update.result is not None:
                    assert update.index is not None
                    results[update.index] = update.result
                    advance()
        return [results[index] for index in range(len(results))]

    def stream(self, prompts: str | Sequence[Any], **ask: Any) -> Generator[Update, None, None]:
        """As `generate`, but yields every new token as it comes: see `Update`.

        Leaving the loop early aborts what has not ended.
        """
        prompts = _prompts(prompts)
        return self._stream(prompts, _asks(len(prompts), ask))

    def _stream(self, prompts: list[Any], asks: list[Sampling]) -> Generator[Update, None, None]:
        index_of: dict[Hashable, int] = {}
        refused: list[Update] = []
        try:
            for index, (prompt, ask) in enumerate(zip(prompts, asks)):
                name: Hashable = ("generate", next(self._names))
                try:
                    request = self._request(prompt, name, None, ask)
                except Exception as error:
                    result = Result(name, [], finish_reason="error", error=_said(error))
                    refused.append(Update(name, None, "", result, index))
                    continue
                index_of[name] = index
                self._streamed.add(name)
                self._add(request)
            yield from refused
            ended = 0
            while ended < len(index_of):
                for update in self._step_for(lambda update: update.request_id in index_of):
                    ended += update.result is not None
                    yield replace(update, index=index_of[update.request_id])
        finally:
            # At once, or after the step that this is called from.
            self._left.append(index_of)
            with self._lock:
                if not self._busy:
                    with self._alone():
                        pass


def _asks(count: int, ask: dict[str, Any]) -> list[Sampling]:
    """What each of `count` prompts asks for; seed may be a list of as many."""
    seed = ask.pop("seed", None)
    if isinstance(seed, Iterable) and not isinstance(seed, str):
        seeds = list(seed)
        if len(seeds) != count:
            raise ValueError(f"seed must be one, or one per prompt, got {len(seeds)}")
        return [sampling(seed=each, **ask) for each in seeds]
    first = sampling(seed=seed, **ask)
    return [first if seed is None else replace(first, seed=seed + i) for i in range(count)]


def _prompts(prompts: Any) -> list[Any]:
    """A single text counts as one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a text or a list of prompts, got {prompts!r}")
    return list(prompts)


def _ids(tokens: Any) -> list[Any]:
    if isinstance(tokens, Tensor):
        tokens = tokens.tolist()
    if not isinstance(tokens, Iterable):
        raise ValueError(f"a prompt must be a text or a list of tokens, got {tokens!r}")
    return list(tokens)


def _end(request: Request, reason: FinishReason, error: str | None = None) -> Outcome:
    """A request ends without another token; its text is what there is."""
    stream = copy.copy(request.stream)
    if stream is not None:
        try:
            stream.finish(False)
        except Exception:
            stream = request.stream
    return Outcome(request, len(request.tokens), None, reason, error, stream=stream)


def _said(error: Exception) -> str:
    """One line; a ValueError is in words already."""
    lines = traceback.format_exception_only(error)[-1].strip().splitlines()
    return lines[0].removeprefix("ValueError: ")


def _positions(config: Any, text: Any) -> int | None:
    """The longest sequence the decoder takes, None if the config names none."""
    for name in ("max_target_positions", "max_position_embeddings"):
        for each in (config, text):
            value = getattr(each, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _batch_free_positions(text: Any, limit: int | None) -> int | None:
    """The length up to which a row's rotary table doesn't depend on the other rows'.

    transformers grows "dynamic" tables, and switches "longrope" ones, by the largest position of
    a call.
    """
    given = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    tables = [given, *(value for value in given.values() if isinstance(value, dict))]
    for table in tables:
        if table.get("rope_type", table.get("type")) in ("dynamic", "longrope"):
            original = (
                table.get("original_max_position_embeddings")
                or getattr(text, "original_max_position_embeddings", None)
                or text.max_position_embeddings
            )
            limit = original if limit is None else min(limit, original)
    return limit


def _encoder_positions(config: Any) -> int:
    for name in ("max_source_positions", "max_position_embeddings", "n_positions"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 512


def _bytes(memory: int | str) -> int:
    """Bytes of 1 << 30, "1GiB", "512 MB"."""
    if isinstance(memory, str):
        found = re.fullmatch(r"\s*(\d+\.?\d*)\s*([KMGT]?)(i?)B?\s*", memory, re.IGNORECASE)
        if found is None:
            raise ValueError(f'max_memory must be bytes or a text like "1GiB", got {memory!r}')
        number, unit, binary = found.groups()
        power = " KMGT".index(unit.upper() or " ")
        memory = int(float(number) * (1024 if binary else 1000) ** power)
    if isinstance(memory, bool) or not isinstance(memory, int) or memory < 1:
        raise ValueError(f"max_memory must be a positive number of bytes, got {memory!r}")
    return memory


def _fit(
    layers: dict[str, KVSpec], memory: int, most: int, token_budget: int, max_requests: int
) -> tuple[KVLayout, int, int]:
    """The layout, how many blocks `memory` buys, and the longest request they hold, up to most."""
    layout = KVLayout(layers, most)
    num_blocks = memory // layout.block_bytes - 1

    def blocks(tokens: int) -> int:
        return layout.request_blocks(tokens, min(tokens, token_budget))

    if num_blocks < blocks(1):
        raise ValueError(
            f"max_memory must hold {blocks(1) + 1} blocks of {layout.block_bytes} bytes, "
            f"got {memory} bytes"
        )
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if blocks(middle) <= num_blocks else (low, middle - 1)
    return layout, min(num_blocks, max_requests * blocks(low)), low


def _fingerprint(encoder_input: Tensor) -> bytes:
    """What tells encoder inputs apart."""
    data = encoder_input.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).digest()


@contextmanager
def _bar(show: bool, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar of finished prompts, or nothing."""
    if not show:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = ("prompts", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)
