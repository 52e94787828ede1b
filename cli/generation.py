"""``kvtailor generate``: prompts through the engine, text as it comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvtailor.cli.options import CommandError, GenerateOptions
from kvtailor.runtime.engine.engine import Engine
from kvtailor.runtime.engine.requests import Result

# What --json tells of a result.
_SHOWN = (
    *("prompt_token_ids", "token_ids", "text", "finish_reason", "logprobs"),
    *("cached_tokens", "error"),
)
# Characters of a file of prompts.
_LARGEST = 1 << 26


@dataclass
class Generation:
    """What came of it. seconds: of the requests alone, the model loaded and checked."""

    results: list[Result]
    seconds: float
    hit_tokens: int

    @property
    def tokens_per_second(self) -> float:
        return sum(len(result.token_ids) for result in self.results) / max(self.seconds, 1e-9)

    def as_dict(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "hit_tokens": self.hit_tokens,
            "results": [{name: getattr(r, name) for name in _SHOWN} for r in self.results],
        }


def read_prompts(prompts: Sequence[str], file: Path | None) -> list[str]:
    """The prompts given, then the lines of the file that are not empty."""
    found = list(prompts)
    if file is not None:
        try:
            with file.open(encoding="utf-8") as opened:
                text = opened.read(_LARGEST)
            lines = text.splitlines()
            if len(text) == _LARGEST:
                raise ValueError(f"it must have less than {_LARGEST} characters")
        except (OSError, ValueError) as error:
            raise CommandError(f"cannot read {file}: {error}") from None
        found += [line for line in lines if line.strip()]
    if not found:
        raise CommandError("a prompt must be given: --prompt TEXT or --prompts-file FILE")
    return found


def run_generate(options: GenerateOptions, show: Callable[[int, str, int], object]) -> Generation:
    """Generate for all prompts; show(i, text, n) gets prompt i's text, of n, as it comes.

    Prompts are shown one after the other, in order: what comes early for a later one waits.
    Raises CommandError, also where no prompt can be served.
    """
    prompts: list[Any] = read_prompts(options.prompt, options.prompts_file)
    model, tokenizer = _load(options.model, getattr(torch, options.dtype))
    if options.inner != "none":
        model.compile(backend="kvtailor", options={"inner": options.inner})
    if tokenizer is None:
        prompts = [_token_ids(prompt) for prompt in prompts]
    try:
        engine = Engine(model, tokenizer, max_memory=options.max_memory)
        updates = engine.stream(prompts, **options.sampling)
    except ValueError as error:
        raise CommandError(str(error)) from None
    start = time.perf_counter()
    results: dict[int, Result] = {}
    waiting = [""] * len(prompts)
    current = 0
    with closing(updates):
        for update in updates:
            assert update.index is not None
            text = update.text if tokenizer is not None else _shown(update.token_id)
            waiting[update.index] += text
            if update.result is not None:
                results[update.index] = update.result
                waiting[update.index] += "\n"
            if all(map(_refused, results.values())) and update.index in results:
                # Nothing is shown before one is served: if none is, the input was wrong.
                continue
            while current < len(prompts) and waiting[current]:
                show(current, waiting[current], len(prompts))
                waiting[current] = ""
                current += current in results
    seconds = time.perf_counter() - start
    if all(map(_refused, results.values())):
        errors = (f"prompt {i + 1}: {results[i].error}" for i in sorted(results))
        raise CommandError("; ".join(errors))
    ordered = [results[index] for index in range(len(prompts))]
    return Generation(ordered, seconds, engine.stats.hit_tokens)


def _refused(result: Result) -> bool:
    """Whether a prompt was never a request of the engine's."""
    return result.error is not None and not result.prompt_token_ids


def _shown(token: int | None) -> str:
    return "" if token is None else f"{token} "


def _token_ids(prompt: str) -> list[int]:
    try:
        return [int(part) for part in prompt.replace(",", " ").split()]
    except ValueError:
        raise CommandError(
            f"a model without a tokenizer takes token ids like '5 9 12', got {prompt!r}"
        ) from None


def _load(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model in eval mode, and its tokenizer or None."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    from kvtailor.cli.inspection import first_line
    from kvtailor.cli.models import shrunk
    from kvtailor.cli.weights import load_gguf

    if name.startswith("hf:"):
        kind = name.removeprefix("hf:")
        errors = []
        for attn in ("sdpa", "eager"):
            try:
                return shrunk(kind, attn, dtype=dtype)[0], None
            except ValueError as error:
                errors.append(error)
        raise CommandError(first_line(errors[-1]))
    try:
        if name.endswith(".gguf"):
            path = Path(name)
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
            return load_gguf(path, dtype), tokenizer
        tokenizer = AutoTokenizer.from_pretrained(name)
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        except ValueError:
            model = AutoModelForSeq2SeqLM.from_pretrained(name, dtype=dtype)
    except Exception as error:  # what a file that is no model makes its reader raise
        raise CommandError(f"cannot load {name}: {first_line(error)}") from None
    return model.eval(), tokenizer
