"""Inductor's C++ kernels, several to one compiler call, and without waiting for each piece.

Inductor starts the C++ compiler once per kernel, and nearly all of what that costs is the same each
time: the precompiled header and the linker. Here the kernels of a module are one translation unit,
each in a namespace of its own, with the same flags; their bindings are Inductor's own. A kernel
that several pieces of a graph have is compiled once. While one unit is being compiled the next
piece is traced.

Kernels of a form not known here, and those of a unit that does not compile, go Inductor's way.
All that is used of Inductor beyond its entry points is in this file.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
import os
import platform
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
    r"^\s*#\s*(?!pragma\b)\w+|\bextern\b|\btemplate\s*<|\bnamespace\b", re.MULTILINE
)
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(?:include|define)\b.*$\n?", re.MULTILINE)


class Kernel:
    """Stands in a module for a kernel that is being compiled; a call waits for it."""

    def __init__(self, argtypes: Sequence[str], source: str, function: str):
        self.argtypes, self.source, self.function = tuple(argtypes), source, function
        self.unit: Unit | None = None

    def compiled(self) -> Any:
        assert self.unit is not None
        return self.unit.finish()[self]

    def __call__(self, *args: Any) -> Any:
        return self.compiled()(*args)


class Unit:
    """Kernels that are compiled together; the compiler is started at once."""

    def __init__(self, kernels: Sequence[Kernel], submit: Any):
        self.kernels = list(kernels)
        self.found: dict[Kernel, Any] | None = None
        for kernel in kernels:
            kernel.unit = self
        self.loaded: Any = None
        self.error: Exception | None = None
        try:
            self.loaded = _cache().load_async(unit_source(kernels), submit_fn=submit)
        except Exception as error:
            self.error = error

    def finish(self) -> dict[Kernel, Any]:
        """The compiled functions; raises for a kernel that does not compile alone either."""
        if self.found is None:
            try:
                functions = self._load()
            except Exception as error:
                first = (str(error).splitlines() or [""])[0]
                log.warning("%d kernels are compiled one by one: %s", len(self.kernels), first)
                from torch._inductor.codecache import CppPythonBindingsCodeCache as alone

                functions = [alone.load_pybinding(k.argtypes, k.source) for k in self.kernels]
            self.found = dict(zip(self.kernels, functions))
        return self.found

    def _load(self) -> list[Any]:
        if self.error is not None:
            raise self.error
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


@dataclass
class Module:
    """One of Inductor's modules whose kernels are being compiled: their names in its scope."""

    scope: dict[str, Any]
    kernels: dict[str, Kernel]

    def finish(self) -> None:
        """Wait, and put the compiled functions into the module. Raises what the compiler does."""
        try:
            for name, kernel in self.kernels.items():
                self.scope[name] = kernel.compiled()
        except Exception:
            _forget(self.scope)
            raise


@dataclass
class Collector:
    """Modules loaded in one context, and the kernels they share, by types and source."""

    known: dict[Any, Kernel] = field(default_factory=dict)
    modules: list[Module] = field(default_factory=list)

    def add(self, scope: dict[str, Any], submit: Any) -> None:
        """Start compiling the kernels in a module's scope that no module before has."""
        module = Module(scope, {})
        fresh: list[Kernel] = []
        for name, kernel in scope.items():
            if isinstance(kernel, Kernel):
                first = self.known.setdefault((kernel.argtypes, kernel.source), kernel)
                if first.unit is None and first not in fresh:
                    fresh.append(first)
                module.kernels[name] = first
        scope.update(module.kernels)
        for kernels in _by_size(fresh):
            Unit(kernels, submit)
        counters["kvtailor"]["joined_kernels"] += len(fresh)
        self.modules.append(module)

    def finish(self) -> None:
        for module in self.modules:
            module.finish()


_collectors: list[Collector] = []


def _forget(scope: dict[str, Any]) -> None:
    """Inductor must not find a module again whose kernels did not compile."""
    from torch._inductor.codecache import PyCodeCache

    found = PyCodeCache.modules_no_attr
    for path in [path for path, module in found.items() if vars(module) is scope]:
        del found[path]


def _by_size(kernels: Sequence[Kernel]) -> Iterator[list[Kernel]]:
    unit: list[Kernel] = []
    size = 0
    for kernel in kernels:
        if unit and size + len(kernel.source) > LARGEST_UNIT:
            yield unit
            unit, size = [], 0
        unit.append(kernel)
        size += len(kernel.source)
    if unit:
        yield unit


def _name(i: int) -> str:
    return f"kernel{i}"


@functools.cache
def _cache() -> Any:
    """Inductor's cache of C++ libraries with Python bindings, for units."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache, clear_on_fresh_cache

    class UnitCache(CppPythonBindingsCodeCache):
        cache: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]
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

    class Joining(async_compile.AsyncCompile):
        def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
            function = joinable(source_code)
            if function is None:
                return super().cpp_pybinding(argtypes, source_code)
            async_compile.kernel_code_log.info("CPP+Bindings Kernel:\n%s", source_code)
            return Kernel(argtypes, source_code, function)

        def wait(self, scope: dict[str, Any]) -> None:
            submit = self.submit if async_compile.get_compile_threads() > 1 else None
            # Another thread's module may come here when ours are done.
            collector = _collectors[-1] if _collectors else Collector()
            collector.add(scope, submit)
            super().wait(scope)
            if not _collectors:
                collector.finish()

    return Joining


@contextmanager
def collected(known: dict[Any, Kernel]) -> Iterator[Collector]:
    """Modules loaded under ``joined`` in this context are not waited for, and left in the result.

    known: kernels that are not to be compiled again; those of this context are added.
    """
    collector = Collector(known)
    _collectors.append(collector)
    try:
        yield collector
    finally:
        _collectors.pop()


@contextmanager
def joined() -> Iterator[None]:
    """Modules that Inductor loads in this context join their kernels.

    At its end they are compiled, unless ``collected`` is active.
    """
    if not _collectors:
        with collected({}) as collector, joined():
            yield
        collector.finish()
        return
    try:
        from torch._inductor import async_compile, cpu_vec_isa

        patches = [
            (async_compile, "AsyncCompile", _joining()),
            (cpu_vec_isa, "valid_vec_isa_list", _first_isa(cpu_vec_isa.valid_vec_isa_list)),
        ]
        originals = [getattr(module, name) for module, name, _ in patches]
    except (ImportError, AttributeError) as error:
        log.warning("this Inductor compiles its kernels one by one: %s", error)
        patches, originals = [], []
    for module, name, replacement in patches:
        setattr(module, name, replacement)
    try:
        yield
    finally:
        for (module, name, _), original in zip(patches, originals):
            setattr(module, name, original)


def ask_early() -> threading.Thread | None:
    """Ask the C++ compiler about vector instruction sets while there is other work to do.

    What it says is kept by Inductor. Join the thread before Inductor is called; None where this
    Inductor is another one.
    """
    try:
        # Imports are not for two threads at a time.
        from torch._inductor import codecache, cpp_builder, cpu_vec_isa  # noqa: F401

        ask = _first_isa(cpu_vec_isa.valid_vec_isa_list)
    except (ImportError, AttributeError) as error:
        log.info("nothing is asked ahead: %s", error)
        return None
    thread = threading.Thread(target=ask, name="kvtailor-isa", daemon=True)
    thread.start()
    return thread


def _first_isa(every: Any) -> Any:
    """Inductor's list of the vector instruction sets that work here, up to the first.

    Inductor finds out about each one with a compiler call or two, and then takes the first.
    """
    from torch._inductor import config, cpu_vec_isa

    checker, known = cpu_vec_isa.x86_isa_checker, cpu_vec_isa.supported_vec_isa_list

    def first() -> Any:
        chosen = config.cpp.simdlen is not None or os.getenv("ATEN_CPU_CAPABILITY")
        x86 = sys.platform == "linux" and platform.machine() == "x86_64"
        if chosen or not x86 or every.cache_info().currsize:
            return every()
        flags = checker()
        able = (isa for isa in known if all(flag in flags for flag in str(isa).split()))
        # bool asks the compiler.
        return list(itertools.islice(filter(bool, able), 1))

    return first
