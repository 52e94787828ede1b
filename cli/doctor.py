"""What ``kvtailor doctor`` finds out: versions, compiler, GPU, and what is switched on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from typing import Any

# What each variable does is in config.py; the doctor only shows those that are set.
VARIABLES = (
    "KVTAILOR_DISABLE_PASSES",
    "KVTAILOR_DUMP_DIR",
    "KVTAILOR_STRICT",
    "KVTAILOR_CACHE_DIR",
    "TORCH_LOGS",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_INTERPRET",
)


def diagnose() -> dict[str, Any]:
    """{"versions": {name: text}, "parts": [{"name", "on", "why"}], "problems": [text]}.

    A problem is what keeps kvtailor from working at all; a part that is off is not one.
    """
    import torch

    versions = {
        "kvtailor": _version("kvtailor"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "triton": _version("triton"),
        "C++ compiler": compiler_version() or "none",
        "CPU": f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
        "GPU": _gpu() or "none",
    }
    parts = [_backend(), *_inner(versions), *_passes(), _kernels(), _transformers(versions)]
    problems = [f"{each['name']}: {each['why']}" for each in parts if each["needed"]]
    for each in parts:
        del each["needed"]
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return {"versions": versions | variables, "parts": parts, "problems": problems}


def _part(name: str, on: bool, why: str = "", needed: bool = False) -> dict[str, Any]:
    return {"name": name, "on": on, "why": why, "needed": needed and not on}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def compiler_version() -> str | None:
    """First line of ``--version`` of the compiler Inductor would use, None without one."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        out = subprocess.run([get_cpp_compiler(), "--version"], capture_output=True, text=True)
    except (OSError, RuntimeError):  # Inductor's InvalidCxxCompiler is a RuntimeError
        return None
    return out.stdout.splitlines()[0] if out.returncode == 0 and out.stdout else None


def _gpu() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    return f"{name}, compute capability {capability[0]}.{capability[1]}"


def _backend() -> dict[str, Any]:
    from torch._dynamo import list_backends

    listed = "kvtailor" in list_backends()
    why = "" if listed else "the entry point is missing; install the package with pip"
    return _part('torch.compile(backend="kvtailor")', listed, why, needed=True)


def _inner(versions: dict[str, str]) -> list[dict[str, Any]]:
    found = versions["C++ compiler"] != "none"
    on_gpu = versions["GPU"] != "none" and versions["triton"] != "not installed"
    if found:
        why = ""
    elif on_gpu:
        why = "no C++ compiler: GPU only"
    else:
        why = "no C++ compiler: install g++ or clang++, or use options={'inner': 'eager'}"
    return [
        _part("inner compiler inductor", found or on_gpu, why),
        _part("inner compiler eager", True),
    ]


def _passes() -> list[dict[str, Any]]:
    from kvtailor.config import parse_options
    from kvtailor.passes.pipeline import PASS_NAMES

    try:
        options = parse_options(None, pass_names=PASS_NAMES)
    except ValueError as error:
        return [_part("options from the environment", False, str(error), needed=True)]
    return [
        _part(f"pass {name}", True)
        if options.enabled(name)
        else _part(f"pass {name}", False, "KVTAILOR_DISABLE_PASSES names it")
        for name in PASS_NAMES
    ]


def _kernels() -> dict[str, Any]:
    from kvtailor.kernels.launch import disabled_reason

    why = (disabled_reason() or "").removeprefix("Triton kernels are disabled: ")
    return _part("Triton kernels", not why, why)


def _transformers(versions: dict[str, str]) -> dict[str, Any]:
    found = versions["transformers"] != "not installed"
    why = "" if found else "pip install 'kvtailor[hf]'; only file.py:function works without it"
    return _part("inspect of Hugging Face models", found, why)
