"""A request of the engine: its tokens, how far they are computed, and what comes back."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from kvtailor.runtime.engine.sampling import Sampling

__all__ = ["Request", "Result", "TextStream", "Update"]

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass
class Result:
    """What a request produced.

    token_ids: the new tokens, a stop token included. text: without special tokens, and without
    a stop string and what follows; None without a tokenizer. finish_reason: "stop" (a stop
    token or string), "length" (max_new_tokens, or the longest request the pool or the model
    takes), "abort", or "error": then `error` says why. logprobs: of token_ids; prompt_logprobs:
    of the prompt, None for its first token; both only if asked for. cached_tokens: prompt
    tokens found in the cache instead of computed.
    """

    request_id: Hashable
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str | None = None
    finish_reason: FinishReason | None = None
    logprobs: list[float] | None = None
    prompt_logprobs: list[float | None] | None = None
    cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Update:
    """One step of one request: its new token, the text it adds, and the result once finished.

    index: which prompt of a `stream` call. token_id: None when the request ended without one.
    """

    request_id: Hashable
    token_id: int | None
    text: str
    result: Result | None = None
    index: int | None = None


class Request:
    """A prompt and what has been generated.

    tokens: both; the first num_prompt are the prompt's (of a decoder with an encoder: what the
    decoder starts with). num_computed: how many have keys in the cache.
    """

    def __init__(
        self,
        request_id: Hashable,
        prompt: list[int],
        ask: Sampling,
        stop_tokens: frozenset[int],
        *,
        encoder_input: Tensor | None = None,
        salt: Hashable = None,
        processors: Any = None,
        stream: TextStream | None = None,
    ) -> None:
        self.id = request_id
        self.tokens = list(prompt)
        self.num_prompt = len(prompt)
        self.num_computed = 0
        self.ask = ask
        self.stop_tokens = stop_tokens
        self.encoder_input = encoder_input
        self.encoder_states: Tensor | None = None
        self.encoder_tokens: int | None = None
        self.preempted = False
        self.salt = salt
        self.processors = processors
        self.stream = stream
        self.result = Result(request_id, list(prompt))
        if ask.logprobs:
            self.result.logprobs = []
        if ask.prompt_logprobs:
            self.result.prompt_logprobs = [None]
        # Of the generator its next token is drawn with.
        self.random_state: Tensor | None = None
        if ask.temperature:
            generator = torch.Generator()
            if ask.seed is None:
                generator.seed()
            else:
                generator.manual_seed(ask.seed)
            self.random_state = generator.get_state()

    def __repr__(self) -> str:
        return (
            f"<Request {self.id!r}: {self.num_computed} of {len(self.tokens)} tokens computed, "
            f"{self.num_new} new>"
        )

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def wants_prompt_rows(self) -> bool:
        """Whether scores of prompt tokens are still missing."""
        known = self.result.prompt_logprobs
        return known is not None and len(known) < self.num_prompt


class TextStream:
    """Text of a growing list of tokens, piece by piece, and where a stop string ends it.

    Bytes of a character may be spread over tokens: what ends in a replacement character waits.
    A copy goes on by itself: nothing in it is changed in place.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._hold = max((len(text) for text in stop), default=1) - 1
        # The tokens whose text may still change with the next, of which _read have been read.
        self._tokens: list[int] = []
        self._read = 0
        self._sent = 0
        self.text = ""

    def add(self, token: int) -> tuple[str, bool]:
        """The text that can be shown after `token`, and whether a stop string has come."""
        self._tokens = [*self._tokens, token]
        before = self._decode(self._tokens[: self._read])
        after = self._decode(self._tokens)
        if len(after) > len(before) and not after.endswith("\ufffd"):
            self.text += after[len(before) :]
            self._tokens = self._tokens[self._read :]
            self._read = len(self._tokens)
        ends = [at for text in self._stop if (at := self.text.find(text)) >= 0]
        if ends:
            self.text = self.text[: min(ends)]
            return self._take(len(self.text)), True
        return self._take(len(self.text) - self._hold), False

    def finish(self, stopped: bool) -> str:
        """No token follows: what was held back. stopped: a stop string has ended the text."""
        if not stopped:
            before = self._decode(self._tokens[: self._read])
            self.text += self._decode(self._tokens)[len(before) :]
        return self._take(len(self.text))

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _take(self, upto: int) -> str:
        piece = self.text[self._sent : upto] if upto > self._sent else ""
        self._sent = max(self._sent, upto)
        return piece
