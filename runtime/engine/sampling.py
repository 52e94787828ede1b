"""What a request asks for, and how its next token is drawn from the scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process

from kvtailor.config import suggest

__all__ = ["Sampling", "draw", "is_integer", "log_probability", "sampling", "samplings"]


@dataclass(frozen=True)
class Sampling:
    """How a request generates.

    max_new_tokens: at most so many. temperature: 0 takes the likeliest token, else scores are
    divided by it. top_k: draw among the k likeliest; 0 for all. top_p: draw among the likeliest
    that together have this probability. stop: strings that end the text, not part of it.
    stop_token_ids: tokens that end it, part of it; besides the model's own, unless ignore_eos.
    seed: of this request's draws; None for a fresh one. logprobs: log-probabilities of the new
    tokens, after what the generation config does to scores and before temperature;
    prompt_logprobs: of the prompt's, as the model gives them.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: bool = False
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k"):
            value, least = getattr(self, name), int(name == "max_new_tokens")
            if not is_integer(value) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        if not (_is_number(self.temperature) and 0 <= self.temperature < float("inf")):
            raise ValueError(f"temperature must be a number from 0 on, got {self.temperature!r}")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p!r}")
        if not (self.seed is None or (is_integer(self.seed) and -(1 << 63) <= self.seed < 1 << 64)):
            raise ValueError(f"seed must be an integer of 64 bits, got {self.seed!r}")
        if not all(is_integer(token) for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must be integers, got {self.stop_token_ids!r}")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop must be texts that are not empty, got {self.stop!r}")


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or is_integer(value)


def sampling(**given: Any) -> Sampling:
    """`Sampling` from keywords; stop may be one text. Raises ValueError for unknown fields."""
    known = [field.name for field in fields(Sampling)]
    for name in given:
        if name not in known:
            raise ValueError(suggest("sampling field", name, known))
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    for name in ("stop", "stop_token_ids"):
        if name in given:
            if not isinstance(given[name], Iterable | None):
                raise ValueError(f"{name} must be a list, got {given[name]!r}")
            given[name] = tuple(given[name] or ())
    return Sampling(**given)


def samplings(count: int, ask: dict[str, Any]) -> list[Sampling]:
    """What each of `count` prompts asks for; seed may be a list of as many."""
    seed = ask.pop("seed", None)
    if isinstance(seed, Iterable) and not isinstance(seed, str):
        seeds = list(seed)
        if len(seeds) != count:
            raise ValueError(f"seed must be one, or one per prompt, got {len(seeds)}")
        return [sampling(seed=each, **ask) for each in seeds]
    first = sampling(seed=seed, **ask)
    return [first if seed is None else replace(first, seed=seed + i) for i in range(count)]


def draw(scores: Tensor, ask: Sampling, generator: torch.Generator | None) -> int:
    """A token drawn from scores [vocab] in float32; the temperature must be above 0.

    -inf is never drawn. Raises ValueError where the largest score is not finite.
    """
    largest = scores.max()
    if not largest.isfinite():
        raise ValueError(f"the largest score must be finite to draw by, got {largest.item()}")
    # From the largest down, no temperature overflows: the colder, the more of it is the likeliest.
    limits = torch.finfo(scores.dtype)
    scores = (scores - largest) / min(max(ask.temperature, limits.tiny), limits.max)
    ids: Any = None
    if ask.top_k:
        scores = logits_process.TopKLogitsWarper(ask.top_k)(ids, scores[None])[0]
    if ask.top_p < 1:
        scores = logits_process.TopPLogitsWarper(float(ask.top_p))(ids, scores[None])[0]
    return int(torch.multinomial(scores.softmax(0), 1, generator=generator))


def log_probability(scores: Tensor, tokens: Sequence[int]) -> list[float]:
    """Log-probability of tokens[i] under scores [n, vocab] of row i."""
    chosen = torch.tensor(list(tokens), dtype=torch.int64, device=scores.device)
    rows = scores.float().log_softmax(-1)
    return rows.gather(1, chosen[:, None])[:, 0].tolist()
