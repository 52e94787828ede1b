"""``kvtailor bench``: each scenario under each alternative, every one in a process of its own.

For a scenario, one worker after the other is started with empty caches and makes its first result,
which is compared with eager's. Those that are right then take turns. What is absent, fails or is
wrong is a row that says why, and has no figure.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

import kvtailor
from kvtailor.benchmarks.harness import (
    HELPERS,
    Bench,
    WrongResult,
    against_best,
    duration,
    error_of,
)
from kvtailor.benchmarks.scenarios import KEEP_MEMORY, OURS, REFERENCE, SCENARIOS
from kvtailor.files import cache_base, write_named

WORKER = "kvtailor.benchmarks.worker"
# Seconds that a worker may take for one answer, its first result among them.
PATIENCE = {True: 240, False: 900}
# Seconds from which on three runs are enough.
SLOW = 5.0
# What stands between an alternative that is not installed and its figure.
_MISSING = re.compile(r"ModuleNotFoundError: No module named '(\w+)")
# The line of a traceback that names the exception.
_ERROR = re.compile(r"[\w.]*(Error|Exception|NotImplemented|Unsupported|Killed)\b.*")


class BenchError(Exception):
    """A worker that gave no result; the text is one line, and says nothing of which worker."""


@dataclass
class Row:
    """One alternative in one scenario. Seconds and bytes are None where there is no figure.

    first, warm: from the first call to its result, in a process with empty caches, and in the next
    one. median: of the runs in turns. peak: bytes the call needs at its peak. error: against
    eager, relative. why: what went wrong.
    """

    alternative: str
    median: float | None = None
    first: float | None = None
    warm: float | None = None
    peak: int | None = None
    error: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    why: str | None = None


@dataclass
class Comparison:
    """One scenario: its rows, in the order of its alternatives."""

    scenario: str
    title: str
    rows: list[Row]

    def row(self, alternative: str) -> Row | None:
        return next((row for row in self.rows if row.alternative == alternative), None)

    @property
    def verdict(self) -> str:
        """Who is fastest, in a few words."""
        times = {row.alternative: row.median for row in self.rows if row.median is not None}
        if OURS not in times:
            return f"{OURS} gave no figure"
        if len(times) == 1:
            return "nothing to compare with"
        best, ratio = against_best(times, OURS)
        if ratio == 1:
            return f"{best} and {OURS} are level"
        if ratio < 1:
            return f"{best} wins: {1 / ratio:.2f}× as fast as {OURS}"
        return f"{OURS} wins: {ratio:.2f}× as fast as {best}"


class Worker:
    """A process that holds one case. Raises BenchError where it gives no answer."""

    def __init__(
        self,
        scenario: str,
        alternative: str,
        folder: Path,
        *,
        python: str,
        threads: int,
        quick: bool,
    ) -> None:
        self.alternative = alternative
        self.result = folder / f"{alternative}.pt"
        self.patience = PATIENCE[quick]
        self.stderr = folder / f"{alternative}.err"
        caches = folder / "caches" / alternative
        cache = caches / "kvtailor"
        cache.mkdir(parents=True, exist_ok=True)
        for weights in (cache_base() or cache).glob("*.gguf"):
            if not (cache / weights.name).exists():
                (cache / weights.name).symlink_to(weights)
        # Another interpreter finds this kvtailor, and nothing else of ours.
        importable = folder / "import"
        if not importable.exists():
            importable.mkdir()
            (importable / "kvtailor").symlink_to(Path(kvtailor.__file__).parent)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(importable), os.environ.get("PYTHONPATH")])
            ),
            "OMP_NUM_THREADS": str(threads),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "KVTAILOR_CACHE_DIR": str(cache),
            "TQDM_DISABLE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        command = [python, "-m", WORKER, scenario, alternative]
        command += [str(self.result), str(threads), *(["--quick"] if quick else [])]
        with open(self.stderr, "w") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
                start_new_session=True,
            )
        HELPERS.add(self.process.pid)

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            self.kill()

        timer = threading.Timer(self.patience, stop)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if late.is_set():
            raise BenchError(f"no result within {self.patience} s")
        if not line:
            raise BenchError(self.last_words())
        return json.loads(line)

    def ask(self, what: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(what + "\n")
            self.process.stdin.flush()
        except OSError:
            raise BenchError(self.last_words()) from None
        return self.read()

    def last_words(self) -> str:
        """Why the process ended: the line of its traceback that says what happened."""
        code = self.process.wait()
        if code < 0:
            return f"ended by signal {signal.Signals(-code).name}"
        lines = [x.strip() for x in self.stderr.read_text(errors="replace").splitlines()]
        missing = [found[1] for line in lines if (found := _MISSING.match(line))]
        if missing:
            return f"{missing[-1]} is not installed; --python {self.alternative}=PATH if elsewhere"
        said = [line for line in lines if _ERROR.match(line)]
        return (said or [*filter(None, lines)] or [f"it ended with exit code {code}"])[-1][:200]

    def kill(self) -> None:
        """Inductor's compile workers with it: they are of the same session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self.process.communicate()
        HELPERS.discard(self.process.pid)


def compare(
    bench: Bench,
    scenario: str,
    pythons: Mapping[str, str],
    watch: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Run one scenario. pythons: interpreters of alternatives that have one of their own.

    Raises BusyMachine, where bench does.
    """
    what = SCENARIOS[scenario]
    title = what.titles[bench.quick]
    assert title is not None
    rows = {name: Row(name) for name in what.ways}
    found = Comparison(scenario, title, list(rows.values()))
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory(prefix="kvtailor-bench-") as name:
        folder = Path(name)

        def start(alternative: str) -> Worker:
            return Worker(
                scenario,
                alternative,
                folder,
                python=pythons.get(alternative, sys.executable),
                threads=torch.get_num_threads(),
                quick=bench.quick,
            )

        try:
            for alternative, row in rows.items():
                watch(f"{scenario}: {alternative}, first result")
                workers[alternative] = worker = start(alternative)
                try:
                    answer = worker.read()
                    row.versions = answer["versions"]
                    if alternative == REFERENCE:
                        expected = torch.load(worker.result)
                    elif rows[REFERENCE].why is None:
                        row.error = error_of(
                            alternative, torch.load(worker.result), expected, what.tolerance
                        )
                    else:
                        raise BenchError(f"nothing to compare with: {REFERENCE} failed")
                    row.first = answer["first"]
                except (BenchError, WrongResult) as error:
                    row.why = str(error).removeprefix(f"{alternative}: ")
                    workers.pop(alternative).close()
            watch(f"{scenario}: runs in turns")
            # What takes seconds a time scatters less, and has to end some day.
            slow = (rows[REFERENCE].first or 0) > SLOW
            runs = min(3, bench.runs) if slow else bench.runs
            timed = False
            while workers and not timed:
                cases = {name: _case(worker) for name, worker in workers.items()}
                try:
                    group = bench.compare(
                        title, cases, tolerance=what.tolerance, runs=runs, show=False
                    )
                    for alternative, timing in group.cases.items():
                        rows[alternative].median = timing.median
                    timed = True
                except _Broken as error:
                    row = rows[error.alternative]
                    row.why, row.first, row.error = f"failed in a later run: {error}", None, None
                    workers.pop(error.alternative).close()
            for alternative, worker in workers.items():
                if alternative in KEEP_MEMORY:
                    continue
                watch(f"{scenario}: {alternative}, peak memory")
                try:
                    rows[alternative].peak = worker.ask("peak")["bytes"]
                except BenchError as error:
                    rows[alternative].why = f"no peak memory: {error}"
            for alternative in [*workers] if what.warm else []:
                if alternative == REFERENCE:
                    continue
                watch(f"{scenario}: {alternative}, warm start")
                workers.pop(alternative).close()
                workers[alternative] = again = start(alternative)
                try:
                    rows[alternative].warm = again.read()["first"]
                except BenchError as error:
                    rows[alternative].why = f"no warm start: {error}"
        finally:
            for worker in workers.values():
                worker.close()
    return found


class _Broken(Exception):
    """A worker that had worked and gives no further result."""

    def __init__(self, alternative: str, why: str) -> None:
        super().__init__(why)
        self.alternative = alternative


def _case(worker: Worker) -> Callable[[], Any]:
    """A run of the worker; the result is that of its first call, which has been compared."""
    result = torch.load(worker.result)

    def case() -> Any:
        try:
            worker.ask("run")
        except BenchError as error:
            raise _Broken(worker.alternative, str(error)) from None
        return result

    return case


def record(bench: Bench, done: Sequence[Comparison]) -> dict[str, Any]:
    """What ``--out`` writes: the harness's record with the scenarios' rows."""
    scenarios = [
        {
            "scenario": each.scenario,
            "title": each.title,
            "verdict": each.verdict,
            "rows": [asdict(row) for row in each.rows],
        }
        for each in done
    ]
    return bench.record() | {"quick": bench.quick, "scenarios": scenarios}


def failures(done: Sequence[Comparison]) -> list[str]:
    """What makes a run of the benchmark a failure: no figure for eager, or none for kvtailor."""
    return [
        f"{each.scenario}: {row.alternative}: {row.why}"
        for each in done
        for row in each.rows
        if row.why is not None and row.alternative in (REFERENCE, OURS)
    ]


COLUMNS = ("", "median", f"× {REFERENCE}", "first result", "again, warm", "peak", "error")


def cells(each: Comparison, row: Row) -> tuple[str, ...]:
    """A row of the table, as text, by COLUMNS; empty where there is no figure."""
    reference = each.row(REFERENCE)
    ratio = ""
    if row.median is not None and reference is not None and reference.median is not None:
        ratio = f"{reference.median / row.median:.2f}"
    return (
        row.alternative,
        duration(row.median),
        ratio,
        duration(row.first),
        duration(row.warm),
        "" if row.peak is None else f"{row.peak / 2**20:,.0f} MiB",
        "" if row.error is None or row.alternative == REFERENCE else f"{row.error:.0e}",
    )


def view(each: Comparison) -> RenderableType:
    """The table of one scenario, with who wins above it."""
    ours = each.verdict.startswith(OURS)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold cyan")
    for i, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if i else "left")
    for row in each.rows:
        if row.median is not None:
            table.add_row(*cells(each, row), style="bold" if row.alternative == OURS else "")
    verdict = Text(each.verdict, "green" if ours else "yellow")
    why = [Text(f"{row.alternative}: {row.why}", "yellow") for row in each.rows if row.why]
    return Group(Text(each.title, "bold"), verdict, table, *why, Text())


def run(
    console: Console,
    scenarios: Sequence[str],
    pythons: Mapping[str, str],
    *,
    quick: bool,
    runs: int,
    threads: int,
    allow_busy: bool,
    out: Path | None,
) -> list[str]:
    """Run the scenarios and print them; returns what failed. Raises BusyMachine."""
    bench = Bench(
        "alternatives",
        runs=runs,
        warmup=1,
        threads=threads,
        allow_busy=allow_busy,
        quick=quick,
        save=False,
    )
    done: list[Comparison] = []
    begun = time.monotonic()
    for scenario in scenarios:
        with console.status(scenario) as status:
            done.append(compare(bench, scenario, pythons, status.update))
        console.print(view(done[-1]))
        if out is not None:
            write_named(out, json.dumps(record(bench, done), indent=1) + "\n")
    if bench.provisional:
        console.print("provisional: other processes were busy", style="yellow")
    minutes, seconds = divmod(round(time.monotonic() - begun), 60)
    console.print(f"{minutes} min {seconds} s in all", style="dim")
    return failures(done)
