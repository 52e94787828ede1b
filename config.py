"""Options of the backend, from ``torch.compile(options=...)`` and the environment, validated."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

Inner = Literal["inductor", "eager", "tensorrt"]
Regions = Literal["layer", "none"]

# Row counts of CUDA graphs: each small one, then in steps that waste little.
SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


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

    inner: Inner = "inductor"
    regions: Regions = "layer"
    passes: dict[str, bool] = Field(default_factory=dict)
    extra_passes: tuple[Callable[..., Any], ...] = Field(default=(), exclude=True)
    pack: Literal["view", "copy", "off"] = "view"
    strict: bool = False
    dump_dir: str | None = None
    mode: str | None = None
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
    for key in given:
        if key not in Options.model_fields:
            raise ValueError(suggest("option", str(key), Options.model_fields))
    if mode is not None:
        given.setdefault("mode", mode)
    if given.get("mode") not in (None, *MODES):
        raise ValueError(suggest("mode", str(given["mode"]), MODES))
    inner = given.get("inner", "inductor")
    if inner not in Inner.__args__:  # type: ignore[attr-defined]
        raise ValueError(suggest("inner compiler", str(inner), Inner.__args__))  # type: ignore[attr-defined]
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
        return Options(**given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        rule = first["msg"][0].lower() + first["msg"][1:]
        raise ValueError(f"option {where}: {rule}, got {first['input']!r}") from None
