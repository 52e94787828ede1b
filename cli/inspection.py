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
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from kvtailor.backend import Recorder, recording
from kvtailor.config import parse_options, suggest
from kvtailor.passes.pipeline import PASS_NAMES

CACHES = ("none", "dynamic", "static", "paged")
ATTENTIONS = ("sdpa", "eager")
DYNAMIC = {"auto": None, "yes": True, "no": False}
DTYPES = {
    **dict.fromkeys(("float32", "fp32"), torch.float32),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float16", "fp16"), torch.float16),
    **dict.fromkeys(("float64", "fp64"), torch.float64),
}
# What the README promises in float32 with the inner compiler "eager".
FP32_BOUND = 1e-5


class InspectError(Exception):
    """Something the user gave cannot be inspected; the text is one line."""


@dataclass(frozen=True)
class Request:
    """The options of ``kvtailor inspect``, unchecked.

    tokens, batch: sizes of the (prompt) input; a decoder beside an encoder gets half the tokens.
    padding: how many tokens of row 0 are masked, on the left for decoders, on the right for
    encoders. decode: one-token steps after the prompt. logits_to_keep: rows of logits asked for
    where the model can be asked, 0 for all. dtype None is float32.
    """

    model: str
    tokens: int = 64
    batch: int = 1
    padding: int = 0
    decode: int = 0
    cache: str = "none"
    logits_to_keep: int = 1
    dtype: str = "float32"
    attn: str = "sdpa"
    inner: str = "eager"
    dynamic: str = "auto"
    disable: tuple[str, ...] = ()


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
        from kvtailor.cli.tables import graph_text

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
    options = _check(request)
    subject = _subject(request)
    torch._dynamo.reset()
    counted = _counted()
    with recording(check=True) as recorder, torch.no_grad(), _BreakLog() as breaks:
        call = torch.compile(
            subject.target, backend="kvtailor", dynamic=DYNAMIC[request.dynamic], options=options
        )
        try:
            subject.run(call)
        except Exception as error:
            _blame(subject, request, error)
    return Inspection(
        about=subject.about,
        recorder=recorder,
        breaks=breaks.as_list(),
        recompile_limit=_recompile_limit(_counted() - counted),
    )


def _check(request: Request) -> dict[str, Any]:
    """The options of the backend; raises InspectError for any value out of range."""
    for name, value, least in (
        ("tokens", request.tokens, 1),
        ("batch", request.batch, 1),
        ("decode", request.decode, 0),
        ("padding", request.padding, 0),
        ("logits-to-keep", request.logits_to_keep, 0),
    ):
        if value < least:
            rule = "positive" if least else "0 or more"
            raise InspectError(f"{name} must be {rule}, got {value}")
    if request.padding >= request.tokens:
        raise InspectError(
            f"padding must be less than tokens ({request.tokens}), got {request.padding}"
        )
    for what, got, known in (
        ("cache", request.cache, CACHES),
        ("attention implementation", request.attn, ATTENTIONS),
        ("dtype", request.dtype, DTYPES),
        ("dynamic setting", request.dynamic, DYNAMIC),
    ):
        if got not in known:
            raise InspectError(suggest(what, got, known))
    if request.decode and request.cache == "none":
        raise InspectError(
            f"decode steps need a cache ({', '.join(CACHES[1:])}), got decode {request.decode}"
            " with cache none"
        )
    options = {"inner": request.inner, "passes": dict.fromkeys(request.disable, False)}
    try:
        parse_options(options, pass_names=PASS_NAMES)
    except ValueError as error:
        raise InspectError(str(error)) from None
    return options


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
    dtype = DTYPES[request.dtype]
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
        "model": name,
        "tokens": request.tokens,
        "batch": request.batch,
        "padding": request.padding,
        "decode": request.decode,
        "cache": request.cache,
        "dtype": str(dtype).removeprefix("torch."),
        "attn": request.attn,
        "inner": request.inner,
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
        model = load_gguf(Path(name), dtype, request.attn)
    else:
        config = transformers.AutoConfig.from_pretrained(name)
        architecture = (config.architectures or [""])[0]
        auto = getattr(transformers, architecture, None) or auto_class(config)
        model = auto.from_pretrained(name, attn_implementation=request.attn, dtype=dtype)
    model.eval()
    return model, example_inputs(model, request.tokens, request.batch, request.padding)


def load_gguf(path: Path, dtype: torch.dtype, attn: str = "sdpa") -> Any:
    """A causal language model from a GGUF file, its weights unpacked to dtype."""
    import transformers

    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        # From 5.24 on, weights stay packed unless asked otherwise.
        options["quantization_config"] = transformers.GgufConfig(
            gguf_file=path.name, dequantize=True
        )
    return transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=dtype, attn_implementation=attn, **options
    ).eval()


def _script(request: Request) -> Subject:
    """The model, args and kwargs that a function in a user's file returns."""
    file, _, function = request.model.rpartition(":")
    path = Path(file)
    if not path.is_file():
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
    except InspectError:
        raise
    except (Exception, SystemExit) as error:
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
    if isinstance(target, nn.Module):
        target.eval()
    about = {
        "model": request.model,
        **dict.fromkeys(("tokens", "batch", "padding", "decode", "cache")),
        "dtype": _dtype_of(target, args, kwargs),
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


def accepts(model: nn.Module, name: str) -> bool:
    """Whether the model's forward has an argument of this name."""
    return name in signatures.signature(model.forward).parameters


def cache_argument(model: nn.Module) -> str | None:
    """transformers renamed past_key_values to cache in 5.24; None for a model without a cache."""
    for name in ("cache", "past_key_values"):
        if accepts(model, name):
            return name
    return None


def make_cache(model: Any, kind: str, batch: int, length: int, source_length: int) -> Any:
    """A fresh transformers cache: dynamic, or static or paged for ``length`` tokens.

    source_length: tokens of the encoder, or of the images, that a decoder attends across to.
    """
    if kind == "paged":
        return _paged_cache(model, batch, length, source_length)
    from transformers import DynamicCache, EncoderDecoderCache, StaticCache
    from transformers.cache_utils import StaticLayer

    config = model.config.get_text_config(decoder=True)
    if kind == "dynamic":
        own: Any = DynamicCache(config=config)
        cross: Any = DynamicCache()
    else:
        own = StaticCache(config=config, max_cache_len=length)
        cross = StaticCache(config=config, max_cache_len=source_length)
        for layer in _cross_layers(model):
            own.layers[layer] = StaticLayer(max_cache_len=source_length)
    return EncoderDecoderCache(own, cross) if model.config.is_encoder_decoder else own


def _paged_cache(model: Any, batch: int, length: int, source_length: int) -> Any:
    from kvtailor.runtime.kv.paged_cache import PagedCache, PagedEncoderDecoderCache

    if model.config.is_encoder_decoder:
        return PagedEncoderDecoderCache(
            model.config, max_tokens=length, encoder_tokens=source_length, batch_size=batch
        )
    return PagedCache(model.config, max_tokens=length, batch_size=batch)


def generate_like(
    call: Callable[..., Any],
    *,
    model: Any,
    inputs: dict[str, Any],
    cache: str,
    decode: int,
    logits_to_keep: int,
) -> None:
    """One call on the prompt, then ``decode`` greedy one-token steps, as ``generate`` does them.

    Unlike ``generate``, an encoder runs inside the first call, so that it is inspected too.
    """
    kwargs = dict(inputs)
    is_encoder_decoder = model.config.is_encoder_decoder
    ids = "decoder_input_ids" if is_encoder_decoder else "input_ids"
    if cache != "none":
        batch, tokens = kwargs[ids].shape
        name = cache_argument(model)
        assert name is not None
        # Room beyond the last token: a static cache is never exactly full in practice.
        length = 2 * tokens + decode
        kwargs[name] = make_cache(model, cache, batch, length, _source_length(model, kwargs))
        kwargs["use_cache"] = True
    elif accepts(model, "use_cache"):
        kwargs["use_cache"] = False
    if accepts(model, "logits_to_keep"):
        kwargs["logits_to_keep"] = logits_to_keep
    static = cache == "static" and not is_encoder_decoder
    past, out = 0, None
    for step in range(decode + 1):
        if step:
            past += kwargs[ids].shape[1]
            kwargs = _next_step(kwargs, out, ids, is_encoder_decoder)
        out = call(**kwargs | (_beside_static_cache(model, kwargs, past) if static else {}))


def _beside_static_cache(model: Any, kwargs: dict[str, Any], past: int) -> dict[str, Any]:
    """What ``generate`` adds beside a static cache, which keeps its length in a tensor.

    Positions, so that no model reads that length as a number. And for a model that makes more
    than a mask of the padding, ALiBi say, a padding mask as long as the cache. Other masks
    ``generate`` makes whole; here the model makes them, so that they are seen and proved.
    """
    ids, mask = kwargs["input_ids"], kwargs.get("attention_mask")
    added: dict[str, Any] = {}
    if accepts(model, "position_ids"):
        if mask is None:
            positions = torch.arange(past, past + ids.shape[1])[None]
        else:
            positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)[:, -ids.shape[1] :]
        added["position_ids"] = positions
    cache_name = cache_argument(model)
    if mask is not None and cache_name and hasattr(model, "create_masks_for_generate"):
        made = model.create_masks_for_generate(
            config=model.config,
            inputs_embeds=torch.empty(*ids.shape, 0, dtype=model.dtype),
            attention_mask=mask,
            cache=kwargs[cache_name],
        )
        if isinstance(made, Tensor) and made.dim() == 2:
            added["attention_mask"] = made
    return added


def _cross_layers(model: Any) -> list[int]:
    """The layers of a decoder that attend to images instead of to its own tokens."""
    config = model.config.get_text_config(decoder=True)
    return list(getattr(config, "cross_attention_layers", None) or ())


def _source_length(model: Any, inputs: dict[str, Any]) -> int:
    """How many tokens cross attention sees: the encoder's, or the images' patches."""
    if "pixel_values" in inputs and _cross_layers(model):
        vision = model.config.vision_config
        patches = (vision.image_size // vision.patch_size) ** 2 + 1
        return math.prod(inputs["pixel_values"].shape[1:-3]) * patches
    source = model.main_input_name
    return int(inputs[source].shape[-1]) // (2 if source == "input_features" else 1)


def _next_step(kwargs: dict[str, Any], out: Any, ids: str, encoded: bool) -> dict[str, Any]:
    """The arguments of the step after ``out``."""
    kwargs = dict(kwargs)
    kwargs[ids] = out.logits[:, -1:].argmax(-1)
    if encoded:
        from transformers.modeling_outputs import BaseModelOutput

        # The encoder runs once.
        kwargs.pop("input_ids", None)
        kwargs.pop("input_features", None)
        kwargs["encoder_outputs"] = BaseModelOutput(last_hidden_state=out.encoder_last_hidden_state)
    elif "attention_mask" in kwargs:
        mask = kwargs["attention_mask"]
        kwargs["attention_mask"] = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)
    # An image enters the cache with the prompt.
    for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"):
        kwargs.pop(name, None)
    if "cross_attention_mask" in kwargs:
        kwargs["cross_attention_mask"] = kwargs["cross_attention_mask"][:, -1:]
    return kwargs


def _blame(subject: Subject, request: Request, error: Exception) -> None:
    """Raise InspectError with the model's own error, if it fails in eager mode too."""
    path = Path(request.model.rpartition(":")[0]) if ".py:" in request.model else None
    with torch.compiler.set_stance("force_eager"):
        try:
            subject.run(subject.target)
        except Exception as own:
            raise InspectError(f"{request.model} raised {one_line(own, path)}") from own
    raise InspectError(
        f"{request.model} runs in eager mode, but compiled it raised {one_line(error)}"
    ) from error


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


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


LIMIT = "recompile limit exceeded"


class _BreakLog(logging.Handler):
    """Collects graph breaks from Dynamo's own log, where each has its reason and its place."""

    NAMES = tuple(
        f"torch._dynamo.{m}.__graph_breaks" for m in ("symbolic_convert", "convert_frame")
    )

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: Counter[tuple[str, str]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage()
        if LIMIT not in f"{text} {error}":
            self.found[_read_break(text, error)] += 1

    def as_list(self) -> list[dict[str, Any]]:
        return [{"reason": r, "at": at, "count": n} for (r, at), n in self.found.items()]

    def __enter__(self) -> _BreakLog:
        self.before = []
        for name in self.NAMES:
            logger = logging.getLogger(name)
            self.before.append((logger, logger.level, logger.propagate))
            # Unless TORCH_LOGS asks for them, nobody else is to see these records.
            logger.propagate = logger.propagate and logger.isEnabledFor(logging.DEBUG)
            logger.setLevel(logging.DEBUG)
            logger.addHandler(self)
        return self

    def __exit__(self, *unused: object) -> None:
        for logger, level, propagate in self.before:
            logger.removeHandler(self)
            logger.setLevel(level)
            logger.propagate = propagate


def _read_break(text: str, error: BaseException | None) -> tuple[str, str]:
    """(reason, place) of one record; the place is the innermost line outside torch and stdlib."""
    named = re.search(r"Graph Break Reason: (.*?)(?=\n\nStack var|\n\nUser code|\Z)", text, re.S)
    reason = named[1] if named else str(error or text)
    skipped = not named or "falling back to eager" in reason
    _, _, reason = reason.rpartition("Graph break encountered:\n\n")
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("Encountered graph break when attempting"):
        del lines[0]
    title = lines[0].rstrip(".:") if lines else "unknown"
    explained = [x.removeprefix("Explanation: ") for x in lines if x.startswith("Explanation: ")]
    sentence = ": ".join([title, *explained[:1]])
    if skipped:
        sentence += " The rest of this function ran without kvtailor."
    places = re.findall(r'File "([^"]+)", line (\d+)', text.partition("User code traceback:")[2])
    places = [p for p in places if not _is_plumbing(p[0])] or places
    places = places or re.findall(r"in user code at (.*):(\d+)", text)
    return sentence, f"{Path(places[-1][0]).name}:{places[-1][1]}" if places else ""


def _is_plumbing(file: str) -> bool:
    """Whether the file is torch's or the standard library's."""
    path = Path(file)
    if "site-packages" in path.parts or "dist-packages" in path.parts:
        return Path(torch.__file__).parent in path.parents
    return file.startswith("<") or Path(logging.__file__).parent.parent in path.parents


def _counted() -> Counter[str]:
    """Dynamo's counts of what it could not trace, by message."""
    return counters["graph_break"] + counters["unimplemented"]


def _recompile_limit(counted: Counter[str]) -> dict[str, Any] | None:
    """Which of Dynamo's limits was reached, its value, and how often it was in the way."""
    for message, hits in counted.items():
        if LIMIT in message:
            accumulated = "accumulated_recompile_limit" in message
            name = "accumulated_recompile_limit" if accumulated else "recompile_limit"
            return {"name": name, "limit": getattr(torch._dynamo.config, name), "hits": hits}
    return None
