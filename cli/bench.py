"""``kvtailor bench``: what was asked for, checked, before anything is measured."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence

from kvtailor.cli.options import BenchOptions, CommandError, check_writable, writing
from kvtailor.cli.tables import make_console
from kvtailor.config import suggest


class Busy(CommandError):
    """Others work on this machine: exit code 1."""


def run_bench(options: BenchOptions) -> list[str]:
    """Measure and print; what failed. Raises CommandError, and Busy where others work."""
    try:
        from kvtailor.benchmarks import compare
        from kvtailor.benchmarks.harness import BusyMachine
        from kvtailor.benchmarks.scenarios import ALTERNATIVES, SCENARIOS
    except ImportError as error:
        raise CommandError(f"{error}: pip install 'kvtailor[bench]'") from None
    known = [name for name, each in SCENARIOS.items() if each.titles[options.quick] is not None]
    for name in options.only:
        if name not in known:
            raise CommandError(suggest("scenario", name, known))
    pythons = _interpreters(options.python, ALTERNATIVES)
    if options.threads < 0:
        raise CommandError(f"threads must not be negative, got {options.threads}")
    check_writable("the results need", options.out)
    try:
        with writing(options.out):
            return compare.run(
                make_console(),
                options.only or known,
                pythons,
                quick=options.quick,
                runs=options.runs,
                threads=options.threads or os.cpu_count() or 1,
                allow_busy=options.allow_busy,
                out=options.out,
            )
    except BusyMachine as error:
        raise Busy(str(error)) from None


def _interpreters(given: Sequence[str], alternatives: Iterable[str]) -> dict[str, str]:
    """NAME=PATH as name -> the interpreter found."""
    found: dict[str, str] = {}
    for each in given:
        name, equals, path = each.partition("=")
        if not equals:
            raise CommandError(f"--python must be NAME=PATH, got {each}")
        if name not in alternatives:
            raise CommandError(suggest("alternative", name, tuple(alternatives)))
        interpreter = shutil.which(path)
        if interpreter is None:
            raise CommandError(f"--python must name an interpreter, got {path}")
        found[name] = interpreter
    return found
