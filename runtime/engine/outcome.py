"""What a step comes to, decided for all its requests before anything is changed."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtailor.runtime.engine.requests import FinishReason, Request, TextStream, Update
from kvtailor.runtime.engine.sampling import draw, log_probability
from kvtailor.runtime.engine.scheduler import Scheduled

__all__ = ["Outcome", "decide", "end", "rows_to_score", "said"]


@dataclass(frozen=True)
class Outcome:
    """What a step came to for a request, decided before anything is changed.

    token: the new one, at position `stop`, if any. reason: why the request ends with it, if it
    does; error: with reason "error". text: what the token adds. The others are the request's
    values after it; prompt_logprobs are those of the prompt's positions from `scored` on.
    """

    request: Request
    stop: int
    token: int | None = None
    reason: FinishReason | None = None
    error: str | None = None
    text: str = ""
    stream: TextStream | None = None
    random_state: Tensor | None = None
    logprobs: Sequence[float] = ()
    prompt_logprobs: Sequence[float] = ()
    scored: int = 0

    def take(self) -> None:
        """Make it so; again comes to the same, so an interrupted call can be repeated."""
        request, result = self.request, self.request.result
        if result.prompt_logprobs is not None and self.prompt_logprobs:
            result.prompt_logprobs[self.scored :] = self.prompt_logprobs
        if self.token is not None:
            if result.logprobs is not None:
                result.logprobs[self.stop - request.num_prompt :] = self.logprobs
            request.tokens[self.stop :] = [self.token]
            request.stream, request.random_state = self.stream, self.random_state
        # Its keys are in the cross-attention's blocks now.
        request.encoder_states = None
        if self.reason is not None:
            result.token_ids = request.tokens[request.num_prompt :]
            result.text = None if self.stream is None else self.stream.text
            result.finish_reason, result.error = self.reason, self.error

    @property
    def updates(self) -> list[Update]:
        if self.token is None and self.reason in (None, "abort"):
            return []
        result = None if self.reason is None else self.request.result
        return [Update(self.request.id, self.token, self.text, result)]


def rows_to_score(step: list[Scheduled]) -> tuple[list[int], list[tuple[int, int]]]:
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


def decide(
    step: list[Scheduled], spans: list[tuple[int, int]], logits: Tensor, max_tokens: int
) -> list[Outcome]:
    """What a step with these logits [rows, vocab] comes to; span i are the rows of request i."""
    # For all at once: on a GPU, each of these waits for the step. A NaN is the largest.
    top, likeliest = logits.max(-1)
    bad, best = top.isnan().tolist(), likeliest.tolist()
    decided = []
    for part, (i, j) in zip(step, spans):
        try:
            outcome = _advance(part, logits[i:j], bad[i:j], best[i:j], max_tokens)
        except Exception as error:
            outcome = end(part.request, "error", said(error))
        decided.append(outcome)
    return decided


def _advance(
    part: Scheduled, logits: Tensor, bad: list[bool], best: list[int], max_tokens: int
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
    return _emit(request, token, found, max_tokens)


def _emit(request: Request, token: int, found: dict[str, Any], max_tokens: int) -> Outcome:
    text, stopped, stream = "", False, copy.copy(request.stream)
    if stream is not None:
        text, stopped = stream.add(token)
    reason: FinishReason | None = None
    stop = len(request.tokens)
    if stopped or token in request.stop_tokens:
        reason = "stop"
    elif request.num_new + 1 >= request.ask.max_new_tokens or stop + 1 >= max_tokens:
        reason = "length"
    if reason is not None and stream is not None:
        text += stream.finish(stopped)
    return Outcome(request, stop, token, reason, text=text, stream=stream, **found)


def end(request: Request, reason: FinishReason, error: str | None = None) -> Outcome:
    """A request ends without another token; its text is what there is."""
    stream = copy.copy(request.stream)
    if stream is not None:
        try:
            stream.finish(False)
        except Exception:
            stream = request.stream
    return Outcome(request, len(request.tokens), None, reason, error, stream=stream)


def said(error: Exception) -> str:
    """One line; a ValueError is in words already."""
    lines = traceback.format_exception_only(error)[-1].strip().splitlines()
    return lines[0].removeprefix("ValueError: ")
