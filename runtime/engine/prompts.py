"""Prompts: what users give, checked, and made into requests that a model can run."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtailor.runtime.engine.model import ServedModel
from kvtailor.runtime.engine.requests import Request, TextStream
from kvtailor.runtime.engine.sampling import Sampling, is_integer

__all__ = ["PromptReader", "as_prompts"]


@dataclass(frozen=True)
class PromptReader:
    """Makes requests from what users give. max_tokens: of the longest request."""

    served: ServedModel
    tokenizer: Any
    max_tokens: int

    def request(
        self,
        prompt: Any,
        request_id: Hashable,
        decoder_prompt: Sequence[int] | None,
        ask: Sampling,
    ) -> Request:
        """Raises ValueError for a prompt that is empty, too long, or not of this vocabulary."""
        if ask.stop and self.tokenizer is None:
            raise ValueError(f"stop strings need a tokenizer, got {ask.stop!r} without one")
        encoder_input = salt = None
        if self.served.encodes:
            encoder_input = self._encoder_input(prompt)
            salt = _fingerprint(encoder_input)
            tokens = self.served.start_tokens() if decoder_prompt is None else _ids(decoder_prompt)
        elif decoder_prompt is not None:
            raise ValueError("decoder_prompt is for models with an encoder, got one without")
        else:
            tokens = self._tokens(prompt)
        self._check_tokens(tokens)
        if len(tokens) >= self.max_tokens:
            raise ValueError(
                f"a prompt must leave room for a token in {self.max_tokens} (of the model and the "
                f"pool), got {len(tokens)} tokens"
            )
        stop_tokens = set(ask.stop_token_ids)
        if not ask.ignore_eos:
            stop_tokens |= self.served.eos()
        stream = None if self.tokenizer is None else TextStream(self.tokenizer, ask.stop)
        return Request(
            request_id,
            tokens,
            ask,
            frozenset(stop_tokens),
            encoder_input=encoder_input,
            salt=salt,
            processors=self.served.processors(len(tokens), ask.max_new_tokens),
            stream=stream,
        )

    def _tokens(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("a prompt as text needs a tokenizer, got text without one")
            return list(self.tokenizer(prompt)["input_ids"])
        return _ids(prompt)

    def _encoder_input(self, prompt: Any) -> Tensor:
        served = self.served
        if not served.takes_text:
            if not isinstance(prompt, Tensor) or prompt.shape != served.feature_shape:
                got = tuple(prompt.shape) if isinstance(prompt, Tensor) else type(prompt).__name__
                raise ValueError(f"features must have shape {served.feature_shape}, got {got}")
            return prompt.to(served.raw.dtype)
        tokens = self._tokens(prompt)
        self._check_tokens(tokens)
        assert served.encoder_tokens is not None
        if len(tokens) > served.encoder_tokens:
            raise ValueError(
                f"the encoder must be given at most {served.encoder_tokens} tokens, "
                f"got {len(tokens)}"
            )
        return torch.tensor(tokens)

    def _check_tokens(self, tokens: list[Any]) -> None:
        if not tokens:
            raise ValueError("a prompt must have a token, got none")
        for token in tokens:
            if not is_integer(token) or not 0 <= token < self.served.vocab:
                raise ValueError(f"tokens must be 0 to {self.served.vocab - 1}, got {token!r}")


def as_prompts(prompts: Any) -> list[Any]:
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


def _fingerprint(encoder_input: Tensor) -> bytes:
    """What tells encoder inputs apart."""
    data = encoder_input.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).digest()
