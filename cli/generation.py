"""``kvtailor generate``: prompts through the engine, text as it comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kvtailor.config import suggest
from kvtailor.runtime.engine.engine import Engine
from kvtailor.runtime.engine.requests import Result

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COMPILERS = ("none", "inductor", "eager")
# Characters of a file of prompts.
_LARGEST = 1 << 26


class GenerateError(Exception):
    """Wrong input; the text is one line."""


@dataclass(frozen=True)
class GenerateRequest:
    """What `kvtailor generate` was asked for. prompts: texts, or token ids without a tokenizer."""

    model: str
    prompts: tuple[str, ...]
    dtype: str = "float32"
    inner: str = "none"
    max_memory: str = "1GiB"


@dataclass
class Generation:
    """What came of it. seconds: of the requests alone, the model loaded and checked."""

    results: list[Result]
    seconds: float
    hit_tokens: int
    has_text: bool

    @property
    def tokens_per_second(self) -> float:
        return sum(len(result.token_ids) for result in self.results) / max(self.seconds, 1e-9)

    def as_dict(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "hit_tokens": self.hit_tokens,
            "results": [
                {k: v for k, v in asdict(r).items() if k not in ("request_id", "prompt_logprobs")}
                for r in self.results
            ],
        }


def read_prompts(prompts: Sequence[str], file: Path | None) -> tuple[str, ...]:
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
            raise GenerateError(f"cannot read {file}: {error}") from None
        found += [line for line in lines if line.strip()]
    if not found:
        raise GenerateError("a prompt must be given: --prompt TEXT or --prompts-file FILE")
    return tuple(found)


def run_generate(
    request: GenerateRequest, ask: dict[str, Any], show: Callable[[int, str], None]
) -> Generation:
    """Generate for all prompts; show(i, text) is called with prompt i's text as it comes.

    Prompts are shown one after the other, in order: what comes early for a later one waits.
    Raises GenerateError, also where no prompt can be served.
    """
    for what, got, known in (
        ("dtype", request.dtype, DTYPES),
        ("compiler", request.inner, COMPILERS),
    ):
        if got not in known:
            raise GenerateError(suggest(what, got, known))
    model, tokenizer = _load(request.model, DTYPES[request.dtype])
    if request.inner != "none":
        model.compile(backend="kvtailor", options={"inner": request.inner})
    prompts: list[Any] = list(request.prompts)
    if tokenizer is None:
        prompts = [_token_ids(prompt) for prompt in prompts]
    try:
        engine = Engine(model, tokenizer, max_memory=request.max_memory)
        updates = engine.stream(prompts, **ask)
    except ValueError as error:
        raise GenerateError(str(error)) from None
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
                show(current, waiting[current])
                waiting[current] = ""
                current += current in results
    seconds = time.perf_counter() - start
    if all(map(_refused, results.values())):
        errors = (f"prompt {i + 1}: {results[i].error}" for i in sorted(results))
        raise GenerateError("; ".join(errors))
    return Generation(
        [results[index] for index in range(len(prompts))],
        seconds,
        engine.stats.hit_tokens,
        tokenizer is not None,
    )


def _refused(result: Result) -> bool:
    """Whether a prompt was never a request of the engine's."""
    return result.error is not None and not result.prompt_token_ids


def _shown(token: int | None) -> str:
    return "" if token is None else f"{token} "


def _token_ids(prompt: str) -> list[int]:
    try:
        return [int(part) for part in prompt.replace(",", " ").split()]
    except ValueError:
        raise GenerateError(
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
        raise GenerateError(first_line(errors[-1]))
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
        raise GenerateError(f"cannot load {name}: {first_line(error)}") from None
    return model.eval(), tokenizer
