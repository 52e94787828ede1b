"""Inductor's C++ kernels, several to one compiler call, and without waiting for each piece.

Inductor starts the C++ compiler once per kernel, and nearly all of what that costs is the same each
time: the precompiled header and the linker. Here the kernels of a module are one translation unit,
each in a namespace of its own, with the same flags; their bindings are Inductor's own. While one
is being compiled the next piece is traced.

Kernels of a form not known here, and those of a unit that does not compile, go Inductor's way.
All that is used of Inductor beyond its entry points is in this file.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch._dynamo.utils import counters

log = logging.getLogger(__name__)

# A unit takes kernels up to so many characters of source: larger ones are worth a core each.
LARGEST_UNIT = 1 << 16

_PREFIX = "#include <torch/csrc/inductor/cpp_prefix.h>"
_KERNEL = re.compile(
    rf'\s*{re.escape(_PREFIX)}\s*extern "C"\s+(?P<function>void\s+kernel\(.*)', re.DOTALL
)
# What would reach beyond a kernel's namespace.
_REACHES_OUT = re.compile(
    r"^\s*#\s*(?!pragma\b)\w+|\bextern\b|\btemplate\b|\bnamespace\b", re.MULTILINE
)
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(?:include|define)\b.*$\n?", re.MULTILINE)

_collectors: list[list[Unit]] = []


class Kernel:
    """Stands in a module for a kernel that is being compiled; a call waits for it."""

    def __init__(self, argtypes: Sequence[str], source: str, function: str):
        self.argtypes, self.source, self.function = argtypes, source, function
        self.unit: Unit | None = None

    def __call__(self, *args: Any) -> Any:
        assert self.unit is not None
        return self.unit.finish()[self](*args)


class Unit:
    """Kernels of one module that are compiled together; the compiler is started at once."""

    def __init__(self, scope: dict[str, Any], kernels: Mapping[str, Kernel], submit: Any):
        self.scope, self.kernels = scope, dict(kernels)
        self.found: dict[Kernel, Any] | None = None
        for kernel in self.kernels.values():
            kernel.unit = self
        each = list(self.kernels.values())
        self.loaded = _cache().load_async(unit_source(each), submit_fn=submit)
        counters["kvtailor"]["joined_kernels"] += len(each)

    def finish(self) -> dict[Kernel, Any]:
        """The compiled functions, which from now on stand in the module themselves.

        Raises what Inductor raises for a kernel that does not compile alone either.
        """
        if self.found is None:
            each = list(self.kernels.values())
            try:
                functions = self._load()
            except Exception as error:
                first = (str(error).splitlines() or [""])[0]
                log.warning("%d kernels are compiled one by one: %s", len(each), first)
                functions = [_cache().load_pybinding(k.argtypes, k.source) for k in each]
            self.found = dict(zip(each, functions))
            for name, kernel in self.kernels.items():
                if self.scope.get(name) is kernel:
                    self.scope[name] = self.found[kernel]
        return self.found

    def _load(self) -> list[Any]:
        first = self.loaded()
        modules = [first]
        for i in range(1, len(self.kernels)):
            # One library with a module per kernel, found by its name.
            name = f"{first.key}.{_name(i)}"
            spec = importlib.util.spec_from_file_location(name, first.__spec__.origin)
            assert spec is not None and spec.loader is not None
            modules.append(importlib.util.module_from_spec(spec))
            spec.loader.exec_module(modules[-1])
        return [getattr(module, _name(i)) for i, module in enumerate(modules)]


def _name(i: int) -> str:
    return f"kernel{i}"


@functools.cache
def _cache() -> Any:
    """Inductor's cache of C++ libraries with Python bindings, for units."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache, clear_on_fresh_cache

    class UnitCache(CppPythonBindingsCodeCache):  # type: ignore[misc]
        cache: ClassVar[dict[str, Any]] = {}
        cache_clear = staticmethod(cache.clear)
        entry_function = _name(0)

    return clear_on_fresh_cache(UnitCache)


def joinable(source: str) -> str | None:
    """The function in a kernel's source, None where there is more to it than one function."""
    found = _KERNEL.fullmatch(source)
    if found is None or _REACHES_OUT.search(found["function"]):
        return None
    return found["function"]


def unit_source(kernels: Sequence[Kernel]) -> str:
    """One source for all: the i-th kernel as ``kernel`` of a namespace, bound as module i."""
    template = _cache()
    heads: dict[str, None] = {}
    parts: list[str] = []
    for i, kernel in enumerate(kernels):
        types = [t.replace("const ", "") for t in kernel.argtypes]
        parsed = ", ".join(f"parse_arg<{t}>(args, {n})" for n, t in enumerate(types))
        binding = template.suffix_template.format(
            arg_len=len(types),
            call_entry_func=template.call_entry_function.format(parsed),
            entry_func=_name(i),
            extra_parse_arg="",
        )
        heads.update(dict.fromkeys(line.strip() for line in _DIRECTIVE.findall(binding)))
        body = _DIRECTIVE.sub("", binding)
        parts.append(f"namespace unit{i} {{\nstatic {kernel.function}\n{body}\n}}\n")
    return "\n".join([*heads, _PREFIX, *parts])


@functools.cache
def _joining() -> Any:
    """AsyncCompile, which Inductor's modules load their kernels with, for units."""
    from torch._inductor import async_compile

    class Joining(async_compile.AsyncCompile):  # type: ignore[misc]
        def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
            function = joinable(source_code)
            if function is None:
                return super().cpp_pybinding(argtypes, source_code)
            async_compile.kernel_code_log.info("CPP+Bindings Kernel:\n%s", source_code)
            return Kernel(argtypes, source_code, function)

        def wait(self, scope: dict[str, Any]) -> None:
            submit = self.submit if async_compile.get_compile_threads() > 1 else None
            for kernels in _units(scope):
                _collectors[-1].append(Unit(scope, kernels, submit))
            super().wait(scope)

    return Joining


def _units(scope: Mapping[str, Any]) -> Iterator[dict[str, Kernel]]:
    kernels: dict[str, Kernel] = {}
    size = 0
    for name, kernel in scope.items():
        if not isinstance(kernel, Kernel) or kernel.unit is not None:
            continue
        if kernels and size + len(kernel.source) > LARGEST_UNIT:
            yield kernels
            kernels, size = {}, 0
        kernels[name] = kernel
        size += len(kernel.source)
    if kernels:
        yield kernels


@contextmanager
def collected() -> Iterator[list[Unit]]:
    """Units started by ``joined`` in this context are not waited for, and left in the list."""
    units: list[Unit] = []
    _collectors.append(units)
    try:
        yield units
    finally:
        _collectors.pop()


@contextmanager
def joined() -> Iterator[None]:
    """Modules that Inductor loads in this context join their kernels.

    At its end they are compiled, unless ``collected`` is active.
    """
    from torch._inductor import async_compile

    original = async_compile.AsyncCompile
    waits = not _collectors
    if waits:
        _collectors.append([])
    async_compile.AsyncCompile = _joining()  # type: ignore[misc]
    try:
        yield
        if waits:
            for unit in _collectors[-1]:
                unit.finish()
    finally:
        async_compile.AsyncCompile = original  # type: ignore[misc]
        if waits:
            _collectors.pop()
