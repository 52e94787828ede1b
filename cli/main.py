"""The command line: ``inspect``, ``bisect``, ``generate``, ``bench``, ``doctor``, ``demo``,
``calibrate``.

Nothing heavy is imported before a command runs, so that --help is instant. Exit codes: 0 done,
1 ran but there is nothing to show (or the result is wrong), 2 wrong input.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from typing import Annotated, NoReturn

import typer

import kvtailor
from kvtailor.cli.options import (
    BenchOptions,
    CommandError,
    GenerateOptions,
    Request,
    check_writable,
    takes,
    writing,
)
from kvtailor.config import suggest

app = typer.Typer(
    add_completion=False,
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="A torch.compile backend that proves what attention masks mean and tailors the graph.",
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and only that.")]
GRAPHS = ("before", "after", "diff")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"kvtailor {kvtailor.__version__}")
    elif context.invoked_subcommand is None:
        raise CommandError("no command given; kvtailor --help lists them")


@app.command()
@takes(Request)
def inspect(
    request: Request,
    graph: Annotated[
        str | None, typer.Option(help="Print the graph too: before, after or diff.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="B",
            help="Show what differs from B: a file that --json printed, or changed options,"
            " narrow_rows=off,cache=static.",
        ),
    ] = None,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a page to look at, too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a model once and show what was proved, what was rewritten, and why the rest was not."""
    from kvtailor.cli.against import compare, other_side
    from kvtailor.cli.inspection import run_inspection
    from kvtailor.cli.tables import changes_view, inspection_view, make_console

    if graph is not None and graph not in GRAPHS:
        raise CommandError(suggest("graph", graph, GRAPHS))
    check_writable("the page needs", html)
    with make_console(stderr=True).status(f"compiling and running {request.model}"):
        result = run_inspection(request)
        other = None if against is None else other_side(request, against)
    if html is not None:
        from kvtailor.cli.html_report import write_html

        with writing(html):
            write_html(result, html)
    found = result.as_dict(graph)
    changes = [] if other is None else compare(found, other)
    if as_json:
        if other is not None:
            found["against"] = {"b": against, "changes": [c.asdict() for c in changes]}
        print(json.dumps(found, indent=2, allow_nan=False))
    elif other is not None:
        make_console().print(changes_view(changes, request.model, str(against)))
    else:
        make_console().print(inspection_view(result, graph))
    failure = result.failure()
    if failure is not None:
        fail(failure, 1)


@app.command()
@takes(Request)
def bisect(
    request: Request,
    bound: Annotated[
        float, typer.Option(help="Largest error, relative to the largest value.")
    ] = 1e-5,
    as_json: AsJson = False,
) -> None:
    """Find the pass that makes a model differ from eager: exit code 1 when there is one."""
    from kvtailor.cli.bisect import bisect_passes
    from kvtailor.cli.tables import bisection_view, make_console

    if not 0 < bound < float("inf"):
        raise CommandError(f"bound must be positive and finite, got {bound:g}")
    with make_console(stderr=True).status("running") as status:
        found = bisect_passes(request, bound, status.update)
    if as_json:
        print(json.dumps(found.asdict(), indent=2))
    else:
        make_console().print(bisection_view(found))
    if found.blamed is not None:
        raise typer.Exit(1)


@app.command()
@takes(GenerateOptions)
def generate(options: GenerateOptions, as_json: AsJson = False) -> None:
    """Generate for one prompt or many at once, from a paged cache that shares prefixes."""
    from kvtailor.cli.generation import run_generate

    last = -1

    def show(index: int, text: str, prompts: int) -> None:
        nonlocal last
        start = f"[{index + 1}] " if index != last and prompts > 1 else ""
        last = index
        print(start + text, end="", flush=True)

    done = run_generate(options, (lambda *_: None) if as_json else show)
    if as_json:
        print(json.dumps(done.as_dict(), indent=2))
    else:
        count = sum(len(result.token_ids) for result in done.results)
        print(
            f"{count} tokens in {done.seconds:.2f} s, {done.tokens_per_second:.1f} per second, "
            f"{done.hit_tokens} prompt tokens found in the cache",
            file=sys.stderr,
        )
    errors = [(i, r.error) for i, r in enumerate(done.results, 1) if r.error is not None]
    if errors:
        fail("; ".join(f"prompt {index}: {error}" for index, error in errors), 1)


@app.command()
def doctor(
    as_json: AsJson = False,
) -> None:
    """Versions, compiler and GPU; what is switched on, and why the rest is not."""
    from kvtailor.cli.doctor import diagnose
    from kvtailor.cli.tables import doctor_view, make_console

    facts = diagnose()
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        make_console().print(doctor_view(facts))
    if facts["problems"]:
        fail("; ".join(facts["problems"]), 1)


@app.command()
def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny random models, no weights: a smoke test.")
    ] = False,
) -> None:
    """Gemma-3-270M with real weights, and a model with shared keys: eager against kvtailor."""
    from kvtailor.cli.demo import run_demo

    run_demo(quick=quick)


@app.command()
@takes(BenchOptions)
def bench(options: BenchOptions) -> None:
    """kvtailor beside eager, Inductor and others, each in its own process: minutes, idle."""
    from kvtailor.cli.bench import Busy, run_bench

    try:
        failed = run_bench(options)
    except Busy as error:
        fail(str(error), 1)
    if failed:
        fail("; ".join(failed), 1)


@app.command()
def calibrate(
    device: Annotated[
        str, typer.Option(help="cpu or cuda; what is measured replaces what was there.")
    ] = "cpu",
) -> None:
    """Measure when packed projections pay on this machine: a few minutes, on an idle one."""
    import torch

    from kvtailor.cli.tables import make_console
    from kvtailor.runtime.packing_table import measure, read_table, table_path, write_table

    if device not in ("cpu", "cuda"):
        raise CommandError(suggest("device", device, ("cpu", "cuda")))
    if device == "cuda" and not torch.cuda.is_available():
        raise CommandError("there is no CUDA device to calibrate")
    path = table_path()
    if path is None:
        raise CommandError(
            "KVTAILOR_CACHE_DIR is off, or there is no home folder: nowhere to keep it"
        )
    try:
        read_table(path)
    except FileNotFoundError:
        pass
    except ValueError as error:
        raise CommandError(f"{error}; delete {path} to start anew") from None
    with writing(path):
        with make_console(stderr=True).status("measuring") as status:
            found = measure(device, status.update)
        write_table(path, device, found)
    print(f"{len(found.entries)} shapes on {found.machine}, written to {path}")


def fail(message: str, code: int) -> NoReturn:
    """One line on stderr, then exit."""
    print(f"kvtailor: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(code)


def main() -> None:
    """The console script: errors of usage, and of standard output, are one line too."""
    # click's base of usage errors; typer may bring its own copy of click.
    click_exception = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that knows no arrows, and names of files that are no text.
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(standalone_mode=False) or 0
        if sys.stdout is not None:
            sys.stdout.flush()
    except click_exception as error:  # type: ignore[misc]
        print(f"kvtailor: {' '.join(error.format_message().split())}", file=sys.stderr)
        code = 2
    except CommandError as error:
        print(f"kvtailor: {' '.join(str(error).split())}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("kvtailor: interrupted", file=sys.stderr)
        code = 128 + signal.SIGINT
    except BrokenPipeError:
        # Who reads has seen enough; rich says the same.
        _drop_stdout()
        code = 1
    except OSError as error:
        if not _drop_stdout():
            raise
        print(f"kvtailor: cannot write the output: {error.strerror}", file=sys.stderr)
        code = 2
    sys.exit(code)


def _drop_stdout() -> bool:
    """Whether nothing more can be written to standard output, which then takes it for nothing."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        # What waits in its buffer would be tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


if __name__ == "__main__":
    main()
