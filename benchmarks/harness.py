"""Shared by all benchmarks: timing, checking, recording. No benchmark prints a figure itself.

    bench = Bench.from_args("local_attention", __doc__)
    rows = bench.compare("sliding", {"sdpa": lambda: ..., "ours": lambda: ...}, reference="sdpa")
    bench.check("sliding: ours against sdpa", rows.speedup("ours", "sdpa"), at_least=8)
    raise SystemExit(bench.finish())

A case is a named callable that returns a tensor (or a tuple or list of them). All cases of a
group compute the same thing: results are compared with the reference case first, and a wrong one
raises WrongResult before anything is timed. Then the cases take turns, in an order that rotates,
and medians are kept. A machine that does other work raises BusyMachine; ``--allow-busy`` goes on
and marks the record provisional. Records go to ``benchmarks/results/NAME.json``.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvtailor.runtime.packing_table import cpu_name

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "triton", "transformers", "numpy")

# Largest error against the reference case, relative to the reference's largest value.
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 4e-2,
}

Case = Callable[[], Any]

# Processes that work for a case: what they use is not what others use.
HELPERS: set[int] = set()


class WrongResult(RuntimeError):
    """A case does not compute what the reference case computes: no figure is worth having."""


class BusyMachine(RuntimeError):
    """Other processes take so much of the machine that figures would mean little."""


@dataclass
class Timing:
    """Seconds of every timed run of one case, in order; error against the reference."""

    seconds: list[float] = field(default_factory=list)
    error: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)


@dataclass
class Group:
    """Cases that compute the same, timed in turns. foreign_cores: cores others used meanwhile."""

    name: str
    reference: str
    cases: dict[str, Timing]
    foreign_cores: float | None = None

    def speedup(self, case: str, against: str) -> float:
        """How many times faster case is than against, by medians."""
        return self.cases[against].median / self.cases[case].median


@dataclass
class Check:
    """A figure and what it has to be; ``ok`` is None where nothing is asked of it."""

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None
    ok: bool | None = None


class Bench:
    """One benchmark: groups of cases, checks on their figures, one record.

    runs and warmup: per case. threads: torch's, for all cases. busy_limit: cores that other
    processes may use. quick: for the benchmark to shrink its sizes; never saved.
    """

    args: argparse.Namespace

    def __init__(
        self,
        name: str,
        *,
        runs: int = 7,
        warmup: int = 2,
        threads: int | None = None,
        allow_busy: bool = False,
        busy_limit: float = 0.15,
        quick: bool = False,
        save: bool = True,
    ):
        if runs < 1:
            raise ValueError(f"runs must be positive, got {runs}")
        self.name = name
        self.runs, self.warmup = runs, warmup
        self.allow_busy, self.busy_limit = allow_busy, busy_limit
        self.quick, self.save = quick, save and not quick
        self.groups: list[Group] = []
        self.checks: list[Check] = []
        self.notes: list[str] = []
        self.provisional = False
        self.console = Console()
        if threads is not None:
            torch.set_num_threads(threads)
        self._refuse_busy(foreign_cores(1.0))

    @classmethod
    def from_args(
        cls,
        name: str,
        description: str | None = None,
        argv: Sequence[str] | None = None,
        parser: argparse.ArgumentParser | None = None,
        **defaults: Any,
    ) -> Bench:
        """A Bench from the command line. Arguments of parser's own land in ``bench.args``."""
        parser = parser or argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--runs", type=int, default=defaults.get("runs", 7))
        parser.add_argument("--warmup", type=int, default=defaults.get("warmup", 2))
        parser.add_argument("--threads", type=int, default=defaults.get("threads", os.cpu_count()))
        parser.add_argument("--allow-busy", action="store_true", help="go on, provisionally")
        parser.add_argument("--quick", action="store_true", help="small sizes, nothing saved")
        parser.add_argument("--no-save", action="store_true")
        args = parser.parse_args(argv)
        bench = cls(
            name,
            runs=args.runs,
            warmup=args.warmup,
            threads=args.threads,
            allow_busy=args.allow_busy,
            quick=args.quick,
            save=not args.no_save,
        )
        bench.args = args
        return bench

    def compare(
        self,
        name: str,
        cases: Mapping[str, Case],
        *,
        reference: str | None = None,
        tolerance: float | None = None,
        runs: int | None = None,
        warmup: int | None = None,
        show: bool = True,
    ) -> Group:
        """Check the cases against the reference (default: the first), then time them in turns.

        ``show=False`` records the group without printing its table. Raises WrongResult, which
        names the case, or BusyMachine.
        """
        reference = reference if reference is not None else next(iter(cases))
        group = Group(name, reference, {case: Timing() for case in cases})
        expected = tensors_of(cases[reference]())
        for case, run in cases.items():
            if case != reference:
                group.cases[case].error = error_of(
                    f"{name}: {case}", tensors_of(run()), expected, tolerance
                )
        del expected
        for run in cases.values():
            for _ in range((self.warmup if warmup is None else warmup) - 1):
                run()
        gc.collect()
        names = list(cases)
        with _Foreign() as foreign:
            for turn in range(runs or self.runs):
                for i in range(len(names)):
                    case = names[(turn + i) % len(names)]
                    group.cases[case].seconds.append(_seconds(cases[case]))
        group.foreign_cores = foreign.cores
        self.groups.append(group)
        if show:
            self._show(group)
        self._refuse_busy(foreign.cores)
        return group

    def check(
        self,
        name: str,
        value: float,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> bool | None:
        """Record a figure, and whether it is what it has to be."""
        ok: bool | None = None
        if at_least is not None or at_most is not None:
            ok = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
        self.checks.append(Check(name, value, at_least, at_most, ok))
        return ok

    def note(self, text: str) -> None:
        """A line that goes into the record and under the table."""
        self.notes.append(text)

    def finish(self) -> int:
        """Print the checks, save the record; the exit code: 1 when a check failed."""
        table = Table(title=f"{self.name}: checks", title_justify="left")
        for column in ("figure", "value", "wanted", ""):
            table.add_column(column, justify="left" if column == "figure" else "right")
        for check in self.checks:
            wanted = [f"≥ {check.at_least:g}" if check.at_least is not None else ""]
            wanted += [f"≤ {check.at_most:g}" if check.at_most is not None else ""]
            mark = {None: "", True: "[green]ok[/]", False: "[red]missed[/]"}[check.ok]
            table.add_row(check.name, f"{check.value:.3g}", " ".join(filter(None, wanted)), mark)
        if self.checks:
            self.console.print(table)
        for note in self.notes:
            self.console.print(note, style="dim")
        if self.provisional:
            self.console.print("provisional: other processes were busy", style="yellow")
        if self.save:
            RESULTS.mkdir(exist_ok=True)
            path = RESULTS / f"{self.name}.json"
            path.write_text(json.dumps(self.record(), indent=1) + "\n")
            self.console.print(f"saved results/{path.name}", style="dim")
        return int(any(check.ok is False for check in self.checks))

    def record(self) -> dict[str, Any]:
        """What goes into the results file."""
        return {
            "benchmark": self.name,
            "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "provisional": self.provisional,
            "machine": machine(),
            "runs": self.runs,
            "groups": [
                {
                    "name": group.name,
                    "reference": group.reference,
                    "foreign_cores": group.foreign_cores,
                    "cases": {
                        name: {
                            "median_ms": round(1e3 * timing.median, 4),
                            "min_ms": round(1e3 * timing.best, 4),
                            "runs_ms": [round(1e3 * s, 4) for s in timing.seconds],
                            "error": timing.error,
                        }
                        for name, timing in group.cases.items()
                    },
                }
                for group in self.groups
            ],
            "checks": [asdict(check) for check in self.checks],
            "notes": self.notes,
        }

    def _refuse_busy(self, cores: float | None) -> None:
        if cores is None or cores <= self.busy_limit:
            return
        if not self.allow_busy:
            raise BusyMachine(
                f"other processes may use at most {self.busy_limit:g} cores, got {cores:.2f}; "
                "--allow-busy goes on and marks the record provisional"
            )
        self.provisional = True

    def _show(self, group: Group) -> None:
        table = Table(title=group.name, title_justify="left")
        for column in ("case", "median ms", "min ms", f"× {group.reference}", "error"):
            table.add_column(column, justify="left" if column == "case" else "right")
        for name, timing in group.cases.items():
            table.add_row(
                name,
                f"{1e3 * timing.median:.3f}",
                f"{1e3 * timing.best:.3f}",
                f"{group.speedup(name, group.reference):.2f}",
                f"{timing.error:.1e}" if name != group.reference else "",
            )
        self.console.print(table)


def error_of(
    what: str, actual: list[Tensor], expected: list[Tensor], tolerance: float | None = None
) -> float:
    """Largest error of actual, relative to the largest value of expected, over all tensors.

    Raises WrongResult where it is above the tolerance (default: TOLERANCE of the dtype), where
    shapes differ, and where integers do.
    """
    if len(actual) != len(expected):
        raise WrongResult(f"{what}: {len(actual)} tensors, the reference has {len(expected)}")
    worst = 0.0
    for a, e in zip(actual, expected):
        if a.shape != e.shape:
            raise WrongResult(f"{what}: shape {list(a.shape)}, not {list(e.shape)}")
        if not e.is_floating_point():
            if not torch.equal(a, e):
                raise WrongResult(f"{what}: differs from the reference")
            continue
        limit = tolerance if tolerance is not None else TOLERANCE[e.dtype]
        error = (a.double() - e.double()).abs().max().item() if e.numel() else 0.0
        error /= max(e.abs().max().item(), 1e-30) if e.numel() else 1.0
        if not error <= limit:
            raise WrongResult(f"{what}: error must be at most {limit:g}, got {error:g}")
        worst = max(worst, error)
    return worst


# Two medians this close are level: runs of one thing differ by as much.
LEVEL = 1.03


def against_best(times: Mapping[str, float], ours: str) -> tuple[str, float]:
    """The fastest of the others, and how many times as fast as it ours is: 1 where they are level.

    times: name -> seconds, or any other unit.
    """
    rivals = {name: value for name, value in times.items() if name != ours}
    best = min(rivals, key=lambda name: rivals[name])
    ratio = rivals[best] / times[ours]
    return best, ratio if ratio < 1 / LEVEL or ratio >= LEVEL else 1.0


def duration(seconds: float | None) -> str:
    """Three digits, in ms below a second; empty for None."""
    if seconds is None:
        return ""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The p of value ~ size**p, by least squares on the logarithms."""
    x, y = [math.log(s) for s in sizes], [math.log(v) for v in values]
    mx, my = statistics.fmean(x), statistics.fmean(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x)


def peak_memory(run: Case) -> int | None:
    """Bytes a call needs at its peak, its result included, above what is there before.

    On CUDA by the allocator's counters, on Linux by the kernel's high-water mark of resident
    memory; None elsewhere.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    try:
        # Memory the allocator keeps for reuse would hide what the call needs.
        ctypes.CDLL(None).malloc_trim(0)
        # 5: set the high-water mark back to what is resident now.
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        run()
        return max(0, _status("VmHWM") - before)
    except (OSError, AttributeError):
        return None


def machine() -> dict[str, Any]:
    """The machine and the versions a figure belongs to."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = _git("rev-parse", "--short", "HEAD")
    if commit and _git("status", "--porcelain", "--untracked-files=no"):
        commit += "+changes"
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "amx": bool(torch.cpu._is_amx_tile_supported()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit,
    }


def foreign_cores(seconds: float) -> float | None:
    """Cores that other processes use, over so many seconds; None where that cannot be read."""
    with _Foreign() as foreign:
        time.sleep(seconds)
    return foreign.cores


class _Foreign:
    """Measures, between enter and exit, how many cores other processes kept busy.

    None for a time so short that the kernel's clock ticks say nothing about it.
    """

    cores: float | None = None
    SHORTEST = 0.5

    def __enter__(self) -> _Foreign:
        self._start = self._now()
        return self

    def __exit__(self, *error: object) -> None:
        start, stop = self._start, self._now()
        if start is not None and stop is not None and stop[0] - start[0] >= self.SHORTEST:
            others = (stop[1] - start[1]) - (stop[2] - start[2])
            self.cores = round(max(0.0, others / (stop[0] - start[0])), 3)

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Wall clock, busy seconds of all cores, busy seconds of this process and of HELPERS."""
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return None
        user, nice, system, _, _, irq, softirq, steal = (int(x) for x in fields[:8])
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        own = time.process_time() + sum(map(_cpu_seconds, HELPERS))
        return time.perf_counter(), busy, own


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors of a case's result, a tensor or lists and tuples of them, in order."""
    if isinstance(result, Tensor):
        return [result]
    return [t for part in result for t in tensors_of(part)]


def _seconds(run: Case) -> float:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {key}")


def _cpu_seconds(pid: int) -> float:
    """Of a process and its children that ended, by Linux; 0 for one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    # User and system time, then those of the children: fields 14 to 17 of proc(5).
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _git(*args: str) -> str:
    try:
        done = subprocess.run(
            ["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
