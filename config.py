"""Options of the backend, from ``torch.compile(options=...)`` and the environment, validated."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

Inner = Literal["inductor", "eager", "tensorrt"]
Regions = Literal["layer", "none"]

# Row counts of CUDA graphs: each small one, then in steps that waste little.
SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


class Options(BaseModel):
    """What ``torch.compile(model, backend="kvtailor", options={...})`` takes.

    inner: compiler of the rewritten graph. regions: "layer" compiles equal layers once, "none"
    the graph as a whole. passes: pass name -> on or off, all on by default. pack: how weights of
    projections over one source become one, see ``runtime/packed_weights.py``. extra_passes: the
    user's own, run before the lowerings. cuda_graphs: run pieces as CUDA graphs, None for what
    the mode says; capture_sizes: row counts they are captured for. strict: raise where a site or
    a graph would be left alone with a reason. dump_dir: folder that gets the graph after every
    pass. mode: torch.compile's own, handed to Inductor.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    inner: Inner = Field(default="inductor", title="inner compiler")
    regions: Regions = "layer"
    passes: dict[str, bool] = Field(default_factory=dict)
    extra_passes: tuple[Callable[..., Any], ...] = Field(default=(), exclude=True)
    pack: Literal["view", "copy", "off"] = "view"
    strict: bool = False
    dump_dir: str | None = None
    mode: Mode | None = None
    cuda_graphs: bool | None = None
    capture_sizes: tuple[PositiveInt, ...] = Field(default=SIZES, min_length=1)

    @property
    def graphs(self) -> bool:
        """Whether CUDA graphs are asked for, by name or by mode."""
        return self.mode == "reduce-overhead" if self.cuda_graphs is None else self.cuda_graphs

    def enabled(self, name: str) -> bool:
        return self.passes.get(name, True)


def suggest(what: str, got: str, known: Iterable[str]) -> str:
    """One line: what is unknown, the nearest known name, and the list."""
    known = sorted(known)
    near = difflib.get_close_matches(got, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown {what} {got!r}{hint} Known: {', '.join(known)}"


def parse_options(
    options: Mapping[str, Any] | None,
    mode: str | None = None,
    *,
    pass_names: Iterable[str],
    environ: Mapping[str, str] = os.environ,
) -> Options:
    """Options and environment as one validated object.

    Raises ValueError, one line each, for an unknown option, pass, inner compiler or mode, and
    for a value of the wrong type. KVTAILOR_DISABLE_PASSES (comma separated), KVTAILOR_STRICT and
    KVTAILOR_DUMP_DIR apply where the options say nothing.
    """
    given = dict(options or {})
    pass_names = tuple(pass_names)
    if mode is not None:
        given.setdefault("mode", mode)
    passes = dict(given.get("passes") or {})
    for name in filter(
        None, environ.get("KVTAILOR_DISABLE_PASSES", "").replace(" ", "").split(",")
    ):
        passes.setdefault(name, False)
    for name in passes:
        if name not in pass_names:
            raise ValueError(suggest("pass", str(name), pass_names))
    given["passes"] = passes
    if environ.get("KVTAILOR_STRICT"):
        given.setdefault("strict", environ["KVTAILOR_STRICT"] not in ("0", "false"))
    if environ.get("KVTAILOR_DUMP_DIR"):
        given.setdefault("dump_dir", environ["KVTAILOR_DUMP_DIR"])
    try:
        return Options.model_validate(given)
    except ValidationError as error:
        raise ValueError(broken_rule(error, Options)) from None


def broken_rule(error: ValidationError, options: type[BaseModel]) -> str:
    """The first thing that is wrong with a model's options, as one line: the rule, then the value.

    A name that is unknown, of an option or of a value, comes with the nearest known one.
    """
    found = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    first = found[0]
    where, got = ".".join(str(part) for part in first["loc"]), first["input"]
    if first["type"] == "extra_forbidden":
        return suggest("option", where, options.model_fields)
    if first["type"] == "literal_error":
        title = options.model_fields[where].title or where
        return suggest(title, str(got), _literals(options.model_fields[where].annotation))
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if "." not in where and (rule := _RULES.get(first["type"])):
        return f"{where} must be {rule}, got {got!r}"
    return f"option {where}: {first['msg'][0].lower()}{first['msg'][1:]}, got {got!r}"


# Bounds are 0.
_RULES = {
    "greater_than": "positive",
    "greater_than_equal": "0 or more",
    "int_parsing": "a whole number",
}


def _literals(kind: Any) -> list[str]:
    """The texts of a Literal, or of one that may be None too."""
    return [x for part in get_args(kind) for x in (get_args(part) or (part,)) if x is not NoneType]
