"""What ``kvtailor inspect`` does: build a model, run it once compiled, collect the reports.

A MODEL is one of
    hf:<model_type>       a shrunk transformers model with random weights (kvtailor.cli.models)
    <id, folder, .gguf>   whatever transformers loads
    <file.py>:<function>  a function that returns (model, args, kwargs)
"""

from __future__ import annotations

import functools
import importlib.util
import inspect as signatures
import logging
import math
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvtailor.backend import Recorder, recording
from kvtailor.cli.breaks import BreakLog, counted, reached_limit
from kvtailor.cli.drive import cache_argument, generate_like
from kvtailor.cli.options import InspectError, Request
from kvtailor.config import parse_options, suggest
from kvtailor.passes.pipeline import PASS_NAMES
from kvtailor.passes.text import graph_text

DYNAMIC = {"auto": None, "yes": True, "no": False}
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
# What the README promises in float32 with the inner compiler "eager".
FP32_BOUND = 1e-5


@dataclass
class Subject:
    """A callable and how to drive it: ``run(call)`` makes every call once."""

    target: Callable[..., Any]
    run: Callable[[Callable[..., Any]], Any]
    about: dict[str, Any] = field(default_factory=dict)


@dataclass
class Inspection:
    """What came of it. ``about`` describes the request, ``breaks`` is [{reason, at, count}]."""

    about: dict[str, Any]
    recorder: Recorder
    breaks: list[dict[str, Any]]
    recompile_limit: dict[str, Any] | None

    @property
    def sites(self) -> int:
        return sum(len(graph.attention) for graph in self.recorder.graphs)

    @property
    def max_error(self) -> float:
        return max((g.max_error or 0.0 for g in self.recorder.graphs), default=0.0)

    def failure(self) -> str | None:
        """Why this is no success, or None."""
        graphs = len(self.recorder.graphs)
        if not graphs:
            why = f": {self.breaks[0]['reason']}" if self.breaks else ": it ran no tensor operation"
            return f"0 graphs were compiled for {self.about['model']}{why}"
        if math.isinf(self.max_error):
            return "the result differs from eager in shape, dtype or non-finite values"
        exact = self.about["dtype"] == "float32" and self.about["inner"] == "eager"
        if exact and self.max_error > FP32_BOUND:
            return f"the error against eager must be at most {FP32_BOUND:g}, got {self.max_error:g}"
        if not self.sites:
            return f"no attention was found in {graphs} graph{'s' * (graphs > 1)}"
        return None

    def as_dict(self, graph: str | None = None) -> dict[str, Any]:
        """The JSON shape; ``graph`` (before, after, diff) adds that text to every graph."""
        graphs = []
        for report in self.recorder.graphs:
            out = report.asdict()
            del out["graph_before"], out["graph_after"]
            if graph is not None:
                out["graph"] = graph_text(report, graph)
            if out["max_error"] is not None and math.isinf(out["max_error"]):
                out["max_error"] = "inf"
            graphs.append(out)
        return {
            **self.about,
            "breaks": self.breaks,
            "recompile_limit": self.recompile_limit,
            "graphs": graphs,
        }


def run_inspection(request: Request) -> Inspection:
    """Build, compile, run and compare with eager.

    Raises InspectError, one line, for anything wrong with the request or with the model itself.
    """
    options: dict[str, Any] = {
        "inner": request.inner,
        "passes": dict.fromkeys(request.disable, False),
    }
    try:
        parse_options(options, pass_names=PASS_NAMES)
    except ValueError as error:
        raise InspectError(str(error)) from None
    subject = _subject(request)
    torch._dynamo.reset()
    before = counted()
    with recording(check=True) as recorder, torch.no_grad(), BreakLog() as breaks:
        call = torch.compile(
            subject.target, backend="kvtailor", dynamic=DYNAMIC[request.dynamic], options=options
        )
        try:
            subject.run(call)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a model may raise what it likes
            _blame(subject, request, error)
    return Inspection(
        about=subject.about,
        recorder=recorder,
        breaks=breaks.as_list(),
        recompile_limit=reached_limit(counted() - before),
    )


def _subject(request: Request) -> Subject:
    name = request.model
    if ".py:" in name:
        return _script(request)
    if name.endswith(".py"):
        raise InspectError(f"a script needs the name of a function, {name}:function, got {name}")
    try:
        import transformers
    except ImportError:
        raise InspectError(
            "transformers is not installed: pip install 'kvtailor[hf]', or inspect file.py:function"
        ) from None
    # Retries and hints of the hub would bury the one line that matters.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    dtype = getattr(torch, _SHORT.get(request.dtype, request.dtype))
    try:
        if name.startswith("hf:"):
            model, inputs = _shrunk(request, dtype)
        else:
            model, inputs = _pretrained(request, dtype)
    except InspectError:
        raise
    except ValueError as error:
        # A rule that was broken, with the value: it needs no type in front.
        raise InspectError(first_line(error)) from error
    except Exception as error:
        raise InspectError(f"cannot build {name}: {one_line(error)}") from error
    about = {
        **request.model_dump(exclude={"logits_to_keep", "dynamic", "disable"}),
        "dtype": str(dtype).removeprefix("torch."),
    }
    if request.cache != "none" and cache_argument(model) is None:
        raise InspectError(f"a cache needs a decoder, got cache {request.cache} for {name}")
    run = functools.partial(
        generate_like,
        model=model,
        inputs=inputs,
        cache=request.cache,
        decode=request.decode,
        logits_to_keep=request.logits_to_keep,
    )
    return Subject(model, run, about)


def _shrunk(request: Request, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    from kvtailor.cli.models import shrunk

    return shrunk(
        request.model.removeprefix("hf:"),
        attn_implementation=request.attn,
        tokens=request.tokens,
        batch=request.batch,
        dtype=dtype,
        padding=request.padding,
    )


def _pretrained(request: Request, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from kvtailor.cli.models import auto_class, example_inputs

    name = request.model
    if name in CONFIG_MAPPING and not Path(name).exists():
        raise InspectError(f"unknown model {name!r}; did you mean 'hf:{name}'?")
    if name.endswith(".gguf"):
        from kvtailor.cli.weights import load_gguf

        model = load_gguf(Path(name), dtype, request.attn)
    else:
        config = transformers.AutoConfig.from_pretrained(name)
        architecture = (config.architectures or [""])[0]
        auto = getattr(transformers, architecture, None) or auto_class(config)
        model = auto.from_pretrained(name, attn_implementation=request.attn, dtype=dtype)
    model.eval()
    return model, example_inputs(model, request.tokens, request.batch, request.padding)


def _script(request: Request) -> Subject:
    """The model, args and kwargs that a function in a user's file returns."""
    file, _, function = request.model.rpartition(":")
    path = Path(file)
    # Unlike Path.is_file, no error for a name that is too long.
    if not os.path.isfile(path):
        raise InspectError(f"the script must be a file, got {file}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As if it were run from its own folder, so that it finds what lies beside it.
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
        make = getattr(module, function, None)
        if not callable(make):
            own = [k for k, v in vars(module).items() if signatures.isfunction(v)]
            raise InspectError(suggest(f"function in {file}", function, own))
        made = make()
    except (InspectError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise InspectError(f"{request.model} raised {one_line(error, path)}") from error
    if (
        not isinstance(made, tuple)
        or len(made) != 3
        or not callable(made[0])
        or not isinstance(made[1], (tuple, list))
        or not isinstance(made[2], dict)
    ):
        raise InspectError(
            f"{request.model} must return (model, args, kwargs), got {_describe(made)}"
        )
    target, args, kwargs = made
    try:
        if isinstance(target, nn.Module):
            target.eval()
        dtype = _dtype_of(target, args, kwargs)
    except Exception as error:  # of methods that the model has of its own
        raise InspectError(f"{request.model} raised {one_line(error, path)}") from error
    about = {
        "model": request.model,
        **dict.fromkeys(("tokens", "batch", "padding", "decode", "cache")),
        "dtype": dtype,
        "attn": None,
        "inner": request.inner,
    }
    return Subject(target, lambda call: call(*args, **kwargs), about)


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(type(v).__name__ for v in value) + ")"
    return type(value).__name__


def _dtype_of(target: Any, args: Any, kwargs: dict[str, Any]) -> str | None:
    tensors: list[Tensor] = [*target.parameters()] if isinstance(target, nn.Module) else []
    tensors += [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    names = [str(t.dtype).removeprefix("torch.") for t in tensors if t.is_floating_point()]
    return names[0] if names else None


def _blame(subject: Subject, request: Request, error: BaseException) -> None:
    """Raise InspectError with the model's own error, if it fails in eager mode too."""
    path = Path(request.model.rpartition(":")[0]) if ".py:" in request.model else None
    with torch.compiler.set_stance("force_eager"):
        try:
            subject.run(subject.target)
        except KeyboardInterrupt:
            raise
        except BaseException as own:
            raise InspectError(f"{request.model} raised {one_line(own, path)}") from own
    raise InspectError(
        f"{request.model} runs in eager mode, but compiled it raised {one_line(error)}"
    ) from error


def first_line(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as own:
        text = f"and its text raised {type(own).__name__}"
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def one_line(error: BaseException, path: Path | None = None) -> str:
    """Type and first line of an error, and where in the file ``path`` it was raised."""
    text = first_line(error)
    where = ""
    if path is not None:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename).resolve() == path.resolve()
        ]
        if isinstance(error, SyntaxError):
            lines.append(error.lineno)
        where = f" ({path.name}, line {lines[-1]})" if lines else ""
    return type(error).__name__ + (f": {text}" if text else "") + where
