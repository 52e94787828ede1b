"""What the commands take: each option once, with its default, its rule and its help.

Nothing here loads torch, so that --help is instant.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typer.models import ParameterInfo

from kvtailor.config import Inner, broken_rule
from kvtailor.files import why_not_written


class CommandError(Exception):
    """Wrong input, or what a command needs is missing; the text is one line, exit code 2."""


class InspectError(CommandError):
    """Something the user gave cannot be inspected; the text is one line."""


class CommandOptions(BaseModel):
    """The options of a command, checked. Raises CommandError for a value that breaks a rule."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise CommandError(broken_rule(error, type(self))) from None


Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]


class Request(CommandOptions):
    """The options of ``kvtailor inspect``; raises InspectError for one out of range.

    tokens, batch: sizes of the (prompt) input; a decoder beside an encoder gets half the tokens.
    padding: how many tokens of row 0 are masked, on the left for decoders, on the right for
    encoders. decode: one-token steps after the prompt. logits_to_keep: rows of logits asked for
    where the model can be asked, 0 for all. disable: passes to leave out.
    """

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face id, folder or .gguf file; hf:MODEL_TYPE for a shrunk model with"
            " random weights; or FILE.py:FUNCTION returning (model, args, kwargs).",
        ),
    ]
    tokens: Annotated[Positive, typer.Option(help="Tokens of the prompt.")] = 64
    batch: Annotated[Positive, typer.Option(help="Rows of the batch.")] = 1
    padding: Annotated[
        Count,
        typer.Option(
            help="Masked tokens of row 0: on the left for decoders, on the right for encoders."
        ),
    ] = 0
    decode: Annotated[Count, typer.Option(help="One-token steps after the prompt.")] = 0
    cache: Annotated[
        Literal["none", "dynamic", "static", "paged"],
        typer.Option(help="none, dynamic, static or paged."),
    ] = "none"
    logits_to_keep: Annotated[
        Count, typer.Option(help="Rows of logits asked for, 0 for all; generate asks for 1.")
    ] = 1
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64", "fp32", "bf16", "fp16", "fp64"],
        typer.Option(help="float32, bfloat16, float16 or float64."),
    ] = "float32"
    attn: Annotated[
        Literal["sdpa", "eager"],
        Field(title="attention implementation"),
        typer.Option(help="sdpa or eager."),
    ] = "sdpa"
    inner: Annotated[
        Inner,
        Field(title="inner compiler"),
        typer.Option(help="Compiler of the rewritten graph: eager or inductor."),
    ] = "eager"
    dynamic: Annotated[
        Literal["auto", "yes", "no"],
        Field(title="dynamic setting"),
        typer.Option(help="Symbolic sizes: auto (after a change), yes or no."),
    ] = "auto"
    disable: Annotated[
        tuple[str, ...], typer.Option(metavar="PASS", help="Leave a pass out; repeatable.")
    ] = ()

    def __init__(self, model: str, **given: Any) -> None:
        try:
            super().__init__(model=model, **given)
        except CommandError as error:
            raise InspectError(str(error)) from None

    @model_validator(mode="after")
    def _fit(self) -> Request:
        if self.padding >= self.tokens:
            raise ValueError(
                f"padding must be less than tokens ({self.tokens}), got {self.padding}"
            )
        if self.decode and self.cache == "none":
            raise ValueError(
                f"decode steps need a cache (dynamic, static, paged), got decode {self.decode}"
                " with cache none"
            )
        return self


class Sampling(CommandOptions):
    """How every prompt is gone on from; the engine states the rules of the values."""

    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 64
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0
    top_k: Annotated[int, typer.Option(help="Draw among so many tokens, 0 for all.")] = 0
    top_p: Annotated[float, typer.Option(help="Draw among this much probability.")] = 1.0
    stop: Annotated[
        tuple[str, ...], typer.Option(metavar="TEXT", help="End before it; repeatable.")
    ] = ()
    seed: Annotated[int | None, typer.Option(help="Prompt i draws with seed + i.")] = None


class GenerateOptions(Sampling):
    """What ``kvtailor generate`` takes. prompt: texts, or token ids without a tokenizer."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face id, folder or .gguf file; hf:MODEL_TYPE for a shrunk model with"
            " random weights, whose prompts are token ids.",
        ),
    ]
    prompt: Annotated[
        tuple[str, ...], typer.Option("--prompt", "-p", help="A prompt; repeatable.")
    ] = ()
    prompts_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A prompt per line, empty lines left out.")
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(help="float32, bfloat16 or float16."),
    ] = "float32"
    inner: Annotated[
        Literal["none", "inductor", "eager"],
        Field(title="compiler"),
        typer.Option(help="Compile the steps with inductor or eager; none: don't."),
    ] = "none"
    max_memory: Annotated[str, typer.Option(help="For keys and values.")] = "1GiB"

    @property
    def sampling(self) -> dict[str, Any]:
        return self.model_dump(include=set(Sampling.model_fields))


class BenchOptions(CommandOptions):
    """What ``kvtailor bench`` takes."""

    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller models and the most telling scenarios.")
    ] = False
    only: Annotated[
        tuple[str, ...], typer.Option(metavar="SCENARIO", help="Run this one; repeatable.")
    ] = ()
    python: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="NAME=PATH", help="The interpreter that has an alternative; repeatable."
        ),
    ] = ()
    runs: Annotated[Positive, typer.Option(help="Timed runs of each alternative.")] = 5
    threads: Annotated[int, typer.Option(help="Of each alternative, 0 for one per core.")] = 0
    allow_busy: Annotated[
        bool, typer.Option("--allow-busy", help="Go on when others work; marked provisional.")
    ] = False
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what was measured as JSON, too.")
    ] = None


def takes(options: type[CommandOptions]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose first argument is ``options``: typer sees a parameter per field."""

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        _, *others = signature(command).parameters.values()
        fields = [_parameter(name, field) for name, field in options.model_fields.items()]
        own = [p.replace(annotation=hints[p.name], kind=Parameter.KEYWORD_ONLY) for p in others]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            # typer gives None for a list that is empty.
            mine = {f.name: given.pop(f.name) for f in fields}
            told = {k: v for k, v in mine.items() if v is not None}
            command(options(**told), **given)

        # An argument, which has no default, may stand behind inherited options.
        run.__signature__ = signature(run).replace(parameters=[*fields, *own])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*fields, *own)}
        return run

    return wrap


def _parameter(name: str, field: Any) -> Parameter:
    kind, default = field.annotation, field.default
    if get_origin(kind) is Literal:
        # The rule is the model's, and so is the sentence.
        kind = str
    elif get_origin(kind) is tuple:
        kind, default = list[str] | None, None
    (shown,) = [each for each in field.metadata if isinstance(each, ParameterInfo)]
    if field.is_required():
        default = Parameter.empty
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, shown]
    )


def check_writable(what: str, path: str | Path | None) -> None:
    """Raise CommandError for a file that cannot be written, before anything long is done."""
    if path is not None and (why := why_not_written(path)) is not None:
        raise CommandError(f"{what} {why}")


@contextmanager
def writing(path: object) -> Iterator[None]:
    """An OSError within is a CommandError that names the file."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None
