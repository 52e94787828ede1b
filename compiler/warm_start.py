"""Rewritten graphs on disk, so that a second process need not capture and rewrite again.

What the inner compiler makes of a graph is kept by its own cache. A file's name is the hash of all
the rewritten graph depends on: Dynamo's graph, its inputs, options, passes, versions, switches.
A file is JSON under the hash of its text, moved into place whole; anything else in its place is
a miss. The folder is used only where no other user can write to it. The hash finds damage; there
is no secret in it, which would lie where the files do: whoever can write here can make a graph
compute something else, or take long. ``compiler/plain.py`` sees to it that he can do no more.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._guards import detect_fake_mode

from kvtailor.compiler.plain import NotPlain, from_plain, to_plain
from kvtailor.config import Options
from kvtailor.files import (
    belongs_to_others,
    cache_base,
    clear_parts,
    no_cache,
    read_kept,
    written_whole,
)
from kvtailor.passes.capture.capture import flat_name
from kvtailor.passes.effects import KNOWN
from kvtailor.passes.graph import PACKED, clean_module_path, output_node
from kvtailor.passes.pipeline import PASS_NAMES, PASSES
from kvtailor.runtime.packed_weights import PackedInput, can_move, why_not
from kvtailor.runtime.packing_table import current_table

log = logging.getLogger(__name__)

# Functions of these modules stay what they are while torch's version does.
_MODULES = ("torch", "_operator", "math", "builtins")
# Switches that change no graph, or are in the options.
_NO_SWITCHES = (
    "KVTAILOR_CACHE_DIR",
    "KVTAILOR_DUMP_DIR",
    "KVTAILOR_STRICT",
    "KVTAILOR_DISABLE_PASSES",
)
# Bytes of a file; that of a model of a hundred layers has a tenth.
_LARGEST = 64 << 20


class NoKey(Exception):
    """The graph cannot be told from every other one by its text; the text says why."""


def load(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options
) -> tuple[Path | None, fx.GraphModule | None]:
    """Where the rewritten form of this Dynamo graph is kept, and that form; None for neither."""
    folder = cache_folder()
    if folder is None:
        return None, None
    try:
        path = folder / f"{graph_key(gm, example_inputs, options)}.json"
    except NoKey as error:
        log.info("the rewritten graph is not kept: %s", error)
        return None, None
    found = _read(path, gm, example_inputs, options)
    counters["kvtailor"]["cache_hits" if found is not None else "cache_misses"] += 1
    return path, found


def save(path: Path, rewritten: fx.GraphModule) -> None:
    """Keep a rewritten graph; where it has no plain form, or the disk is full, say so and go on."""
    try:
        text = json.dumps(to_plain(rewritten), separators=(",", ":"))
    except NotPlain as error:
        log.info("the rewritten graph is not kept: it has %s", error)
        return
    try:
        clear_parts(path.parent)
        with written_whole(path, mode=0o600) as part:
            part.write_text(f"{_hash(text)}\n{text}", encoding="utf-8")
    except OSError as error:
        log.warning("the rewritten graph is not kept: %s", error)


def _read(
    path: Path, gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options
) -> fx.GraphModule | None:
    try:
        digest, _, text = read_kept(path, _LARGEST).partition("\n")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        log.warning("%s cannot be read: %s", path, error)
        return None
    if digest != _hash(text):
        log.warning("%s is damaged and will be made anew", path)
        return None
    mode = detect_fake_mode(example_inputs)
    if mode is None:
        return None
    inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    try:
        found = from_plain(json.loads(text), inputs, _attributes(gm), mode)
        _check_packed(found.meta.get(PACKED, ()), example_inputs, options)
        _check_results(found, gm)
        return found
    except Exception as error:  # whatever a foreign text makes json, torch or sympy raise
        first = (str(error).splitlines() or [""])[0]
        log.warning("%s cannot be used: %s: %s", path, type(error).__name__, first)
        return None


def _check_packed(
    packed: Sequence[PackedInput], example_inputs: Sequence[Any], options: Options
) -> None:
    """Raises ValueError where packing would not have taken these inputs together."""
    parts = [at for each in packed for at in each.parts]
    if parts and (options.pack == "off" or len(set(parts)) < len(parts)):
        raise ValueError(f"weights must be packed once, got {parts} for {options.pack}")
    for at in parts:
        reason = why_not(example_inputs[at], "view" if options.pack == "off" else options.pack)
        if reason is not None:
            raise ValueError(f"input {at} cannot be packed: {reason[1]}")


def _check_results(found: fx.GraphModule, gm: fx.GraphModule) -> None:
    """Raises ValueError where the graph returns other kinds of values than Dynamo's."""
    ours, theirs = (list(output_node(each).args[0]) for each in (found, gm))  # type: ignore[arg-type]
    if len(ours) != len(theirs):
        raise ValueError(f"there must be {len(theirs)} results, got {len(ours)}")
    for one, other in zip(ours, theirs):
        got, wanted = _kind(one, "val"), _kind(other, "example_value")
        if got != wanted:
            raise ValueError(f"a result must be {wanted}, got {got}")


def _kind(value: Any, key: str) -> Any:
    value = value.meta[key] if isinstance(value, fx.Node) else value
    if isinstance(value, Tensor):
        return value.dtype, value.device, list(value.shape)
    return type(value)


def _attributes(gm: fx.GraphModule) -> dict[str, Tensor]:
    """The graph's own tensors, by the names that captured graphs give them."""
    named = [
        *gm.named_parameters(remove_duplicate=False),
        *gm.named_buffers(remove_duplicate=False),
    ]
    return {flat_name(name): tensor for name, tensor in named}


# --- the folder -----------------------------------------------------------------------------------


def cache_folder() -> Path | None:
    """KVTAILOR_CACHE_DIR, or kvtailor in the user's cache folder; made where it is missing.

    None where it is "off", where Inductor's caches are, and where others could write to it.
    """
    folder = cache_base()
    if folder is None or torch._inductor.config.force_disable_caches:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not belongs_to_others(folder, group=True):
            return folder
        no_cache(f"{folder} can be written to by others")
    except OSError as error:
        no_cache(str(error))
    return None


# --- the key --------------------------------------------------------------------------------------


def graph_key(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> str:
    """A hash of everything the rewritten graph depends on. Raises NoKey."""
    parts = [
        *_graph_lines(gm, example_inputs),
        *(_packable(x, options) for x in example_inputs),
        str(current_table()) if options.pack != "off" else "",
        _resolved(options),
        " ".join(f"{p.__module__}.{p.__qualname__}" for p in PASSES),
        versions(),
        json.dumps(_switches()),
    ]
    return _hash("\n".join(parts))


def _resolved(options: Options) -> str:
    """The options by what they come to, however they were spelled."""
    named = {"dump_dir", "strict", "passes", "mode", "cuda_graphs"}
    enabled = [name for name in PASS_NAMES if options.enabled(name)]
    mode = options.mode or "default"
    return f"{options.model_dump_json(exclude=named)} {enabled} {mode} {options.graphs}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def versions() -> str:
    """Versions of all that takes part in rewriting; our own sources by their content."""
    import sympy

    own = hashlib.sha256()
    root = Path(__file__).parents[1]
    folders = (root / name for name in ("compiler", "kernels", "passes", "runtime"))
    sources = [*root.glob("*.py"), *(p for folder in folders for p in folder.rglob("*.[pc][yp]*"))]
    for source in sorted(sources):
        if source.suffix in (".py", ".cpp"):
            own.update(source.read_bytes())
    torch_version = f"{torch.__version__} {torch.version.git_version}"
    return f"{own.hexdigest()} {torch_version} {sympy.__version__} {platform.python_version()}"


def _switches() -> list[Any]:
    """State of the process that capture or a pass may look at."""
    environment = sorted(
        (name, value)
        for name, value in os.environ.items()
        if (name.startswith("KVTAILOR_") and name not in _NO_SWITCHES) or name == "TRITON_INTERPRET"
    )
    sdp = torch.backends.cuda
    return [
        environment,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        str(torch.get_default_dtype()),
        str(torch.get_default_device()),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        [(torch.is_autocast_enabled(d), str(torch.get_autocast_dtype(d))) for d in ("cpu", "cuda")],
        [sdp.flash_sdp_enabled(), sdp.math_sdp_enabled(), sdp.mem_efficient_sdp_enabled()],
        torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    ]


def _graph_lines(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[str]:
    """Dynamo's graph by position, without names, addresses and source lines."""
    position = {node: i for i, node in enumerate(gm.graph.nodes)}
    inputs = iter(example_inputs)
    storages: dict[Any, int] = {}
    lines = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            # Dynamo hands real tensors on; what is symbolic about them is in the fake ones.
            if "example_value" not in node.meta:
                raise NoKey("an input has no fake value")
            lines.append(_input(node.meta["example_value"], next(inputs), storages))
        elif node.op == "get_attr":
            lines.append(_content(gm, str(node.target)))
        elif node.op in ("call_function", "call_method"):
            target = str(node.target) if node.op == "call_method" else _function(node.target)
            where = [clean_module_path(p) for p, _ in node.meta.get("nn_module_stack", {}).values()]
            shown = _show(list(node.args), position), _show(dict(node.kwargs), position)
            lines.append(f"{node.op} {target} {shown} {where}")
        elif node.op == "output":
            lines.append(_show(list(node.args), position))
        else:
            raise NoKey(f"it has a {node.op}")
    return lines


def _input(value: Any, real: Any, storages: dict[Any, int]) -> str:
    if isinstance(value, Tensor):
        symbolic = any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride()))
        if symbolic or value.layout != torch.strided:
            raise NoKey("an input has symbolic sizes" if symbolic else "an input has no strides")
        storage = torch.multiprocessing.reductions.StorageWeakRef(real.untyped_storage())
        alias = storages.setdefault(storage, len(storages))
        flags = value.requires_grad, value.is_conj(), value.is_neg(), value.is_inference()
        kind = isinstance(value, torch.nn.Parameter)
        return (
            f"{value.dtype} {value.device} {list(value.shape)} {value.stride()} "
            f"{value.storage_offset()} {alias} {flags} {kind}"
        )
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise NoKey("an input is a symbolic number")
    return _show(value, {})


def _packable(value: Any, options: Options) -> str:
    """What the packing passes find out about a parameter, beside its fake value."""
    if options.pack == "off" or not isinstance(value, torch.nn.Parameter):
        return ""
    reason = why_not(value, options.pack)
    if reason is not None:
        return reason[0]
    return str(options.pack == "copy" or can_move([value]))


def _content(gm: fx.GraphModule, path: str) -> str:
    value: Any = gm
    for part in path.split("."):
        value = getattr(value, part, None)
    if not isinstance(value, Tensor) or value.device.type != "cpu" or value.numel() > 1 << 16:
        raise NoKey(f"its attribute {path} is no small tensor")
    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{_input(value, value, {})} {hashlib.sha256(data).hexdigest()}"


def _function(target: Any) -> str:
    if isinstance(target, torch._ops.HigherOrderOperator):
        raise NoKey(f"it has the higher-order op {target}")
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        # Other people's ops may compute their shapes as they like.
        if str(target).split(".")[0] not in KNOWN:
            raise NoKey(f"it has the op {target}")
        return str(target)
    owner = getattr(target, "__self__", None)
    module = getattr(target, "__module__", None) or type(owner).__module__
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if name is None or module.split(".")[0] not in _MODULES:
        raise NoKey(f"it calls {module}.{name}")
    if isinstance(owner, type):
        module = f"{module}:{owner.__module__}.{owner.__qualname__}"
    return f"{module}.{name}"


def _show(value: Any, position: Mapping[fx.Node, int]) -> str:
    if isinstance(value, fx.Node):
        return f"%{position[value]}"
    if isinstance(value, slice):
        return f"slice({_show([value.start, value.stop, value.step], position)})"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(_show(v, position) for v in value)})"
    if isinstance(value, dict):
        shown = (f"{_show(k, position)}: {_show(v, position)}" for k, v in value.items())
        return f"dict({', '.join(shown)})"
    plain = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout)
    if value is None or value is ... or isinstance(value, (*plain, torch.memory_format)):
        return f"{type(value).__name__} {value!r}"
    raise NoKey(f"it has an argument of type {type(value).__name__}")
