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
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import kvtailor

app = typer.Typer(
    add_completion=False,
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="A torch.compile backend that proves what attention masks mean and tailors the graph.",
)


# What inspect and bisect both take.
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face id, folder or .gguf file; hf:MODEL_TYPE for a shrunk model with"
        " random weights; or FILE.py:FUNCTION returning (model, args, kwargs).",
    ),
]
Tokens = Annotated[int, typer.Option(help="Tokens of the prompt.")]
Batch = Annotated[int, typer.Option(help="Rows of the batch.")]
Padding = Annotated[
    int,
    typer.Option(
        help="Masked tokens of row 0: on the left for decoders, on the right for encoders."
    ),
]
Decode = Annotated[int, typer.Option(help="One-token steps after the prompt.")]
Cache = Annotated[str, typer.Option(help="none, dynamic, static or paged.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")]
Attention = Annotated[str, typer.Option(help="sdpa or eager.")]
Inner = Annotated[str, typer.Option(help="Compiler of the rewritten graph: eager or inductor.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and only that.")]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"kvtailor {kvtailor.__version__}")
    elif context.invoked_subcommand is None:
        fail("no command given; kvtailor --help lists them", 2)


@app.command()
def inspect(
    model: Model,
    tokens: Tokens = 64,
    batch: Batch = 1,
    padding: Padding = 0,
    decode: Decode = 0,
    cache: Cache = "none",
    logits_to_keep: Annotated[
        int, typer.Option(help="Rows of logits asked for, 0 for all; generate asks for 1.")
    ] = 1,
    dtype: Dtype = "float32",
    attn: Attention = "sdpa",
    inner: Inner = "eager",
    dynamic: Annotated[
        str, typer.Option(help="Symbolic sizes: auto (after a change), yes or no.")
    ] = "auto",
    disable: Annotated[
        list[str] | None, typer.Option(metavar="PASS", help="Leave a pass out; repeatable.")
    ] = None,
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
    from kvtailor.cli.inspection import InspectError, Request, run_inspection
    from kvtailor.cli.tables import GRAPHS, changes_view, inspection_view, make_console
    from kvtailor.config import suggest
    from kvtailor.files import why_not_written

    if graph is not None and graph not in GRAPHS:
        fail(suggest("graph", graph, GRAPHS), 2)
    if html is not None and (why := why_not_written(html)) is not None:
        fail(f"the page needs {why}", 2)
    request = Request(
        model=model,
        tokens=tokens,
        batch=batch,
        padding=padding,
        decode=decode,
        cache=cache,
        logits_to_keep=logits_to_keep,
        dtype=dtype,
        attn=attn,
        inner=inner,
        dynamic=dynamic,
        disable=tuple(disable or ()),
    )
    try:
        with make_console(stderr=True).status(f"compiling and running {model}"):
            result = run_inspection(request)
            other = None if against is None else other_side(request, against)
    except InspectError as error:
        fail(str(error), 2)
    if html is not None:
        from kvtailor.cli.html_report import write_html

        try:
            write_html(result, html)
        except OSError as error:
            fail(f"cannot write {html}: {error.strerror}", 2)
    found = result.as_dict(graph)
    changes = [] if other is None else compare(found, other)
    if as_json:
        if other is not None:
            found["against"] = {"b": against, "changes": [c.asdict() for c in changes]}
        print(json.dumps(found, indent=2, allow_nan=False))
    elif other is not None:
        make_console().print(changes_view(changes, model, str(against)))
    else:
        make_console().print(inspection_view(result, graph))
    failure = result.failure()
    if failure is not None:
        fail(failure, 1)


@app.command()
def bisect(
    model: Model,
    tokens: Tokens = 64,
    batch: Batch = 1,
    padding: Padding = 0,
    decode: Decode = 0,
    cache: Cache = "none",
    dtype: Dtype = "float32",
    attn: Attention = "sdpa",
    inner: Inner = "eager",
    bound: Annotated[
        float, typer.Option(help="Largest error, relative to the largest value.")
    ] = 1e-5,
    as_json: AsJson = False,
) -> None:
    """Find the pass that makes a model differ from eager: exit code 1 when there is one."""
    from kvtailor.cli.bisect import bisect_passes
    from kvtailor.cli.inspection import InspectError, Request
    from kvtailor.cli.tables import bisection_view, make_console

    if not 0 < bound < float("inf"):
        fail(f"bound must be positive and finite, got {bound:g}", 2)
    request = Request(
        model=model,
        tokens=tokens,
        batch=batch,
        padding=padding,
        decode=decode,
        cache=cache,
        dtype=dtype,
        attn=attn,
        inner=inner,
    )
    try:
        with make_console(stderr=True).status("running") as status:
            found = bisect_passes(request, bound, status.update)
    except InspectError as error:
        fail(str(error), 2)
    if as_json:
        print(json.dumps(found.asdict(), indent=2))
    else:
        make_console().print(bisection_view(found))
    if found.blamed is not None:
        raise typer.Exit(1)


@app.command()
def generate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face id, folder or .gguf file; hf:MODEL_TYPE for a shrunk model with"
            " random weights, whose prompts are token ids.",
        ),
    ],
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A prompt; repeatable.")
    ] = None,
    prompts_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A prompt per line, empty lines left out.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw among so many tokens, 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw among this much probability.")] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before it; repeatable.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Prompt i draws with seed + i.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    inner: Annotated[
        str, typer.Option(help="Compile the steps with inductor or eager; none: don't.")
    ] = "none",
    max_memory: Annotated[str, typer.Option(help="For keys and values.")] = "1GiB",
    as_json: AsJson = False,
) -> None:
    """Generate for one prompt or many at once, from a paged cache that shares prefixes."""
    from kvtailor.cli.generation import GenerateError, GenerateRequest, read_prompts, run_generate

    ask = dict(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=stop or (),
        seed=seed,
    )
    started: set[int] = set()

    def show(index: int, text: str) -> None:
        if as_json:
            return
        if index not in started and len(prompts) > 1:
            print(f"[{index + 1}] ", end="")
        started.add(index)
        print(text, end="", flush=True)

    try:
        prompts = read_prompts(prompt or (), prompts_file)
        done = run_generate(
            GenerateRequest(model, prompts, dtype=dtype, inner=inner, max_memory=max_memory),
            ask,
            show,
        )
    except GenerateError as error:
        fail(str(error), 2)
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
    from kvtailor.cli.demo import DemoError, run_demo

    try:
        run_demo(quick=quick)
    except DemoError as error:
        fail(str(error), 2)


@app.command()
def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller models and the most telling scenarios.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="SCENARIO", help="Run this one; repeatable.")
    ] = None,
    python: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH", help="The interpreter that has an alternative; repeatable."
        ),
    ] = None,
    runs: Annotated[int, typer.Option(help="Timed runs of each alternative.")] = 5,
    threads: Annotated[int, typer.Option(help="Of each alternative, 0 for one per core.")] = 0,
    allow_busy: Annotated[
        bool, typer.Option("--allow-busy", help="Go on when others work; marked provisional.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what was measured as JSON, too.")
    ] = None,
) -> None:
    """kvtailor beside eager, Inductor and others, each in its own process: minutes, idle."""
    import shutil

    from kvtailor.config import suggest
    from kvtailor.files import why_not_written

    try:
        from kvtailor.benchmarks import compare
        from kvtailor.benchmarks.harness import BusyMachine
        from kvtailor.benchmarks.scenarios import ALTERNATIVES, SCENARIOS
    except ImportError as error:
        fail(f"{error}: pip install 'kvtailor[bench]'", 2)
    from kvtailor.cli.tables import make_console

    known = [name for name, each in SCENARIOS.items() if each.titles[quick] is not None]
    for name in only or ():
        if name not in known:
            fail(suggest("scenario", name, known), 2)
    pythons: dict[str, str] = {}
    for each in python or ():
        name, equals, path = each.partition("=")
        if not equals:
            fail(f"--python must be NAME=PATH, got {each}", 2)
        if name not in ALTERNATIVES:
            fail(suggest("alternative", name, tuple(ALTERNATIVES)), 2)
        found = shutil.which(path)
        if found is None:
            fail(f"--python must name an interpreter, got {path}", 2)
        pythons[name] = found
    if runs < 1:
        fail(f"runs must be positive, got {runs}", 2)
    if threads < 0:
        fail(f"threads must not be negative, got {threads}", 2)
    if out is not None and (why := why_not_written(out)) is not None:
        fail(f"the results need {why}", 2)
    try:
        failed = compare.run(
            make_console(),
            only or known,
            pythons,
            quick=quick,
            runs=runs,
            threads=threads or os.cpu_count() or 1,
            allow_busy=allow_busy,
            out=out,
        )
    except BusyMachine as error:
        fail(str(error), 1)
    except OSError as error:
        fail(f"cannot write {out}: {error.strerror}", 2)
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
    from kvtailor.config import suggest
    from kvtailor.runtime.packing_table import measure, read_table, table_path, write_table

    if device not in ("cpu", "cuda"):
        fail(suggest("device", device, ("cpu", "cuda")), 2)
    if device == "cuda" and not torch.cuda.is_available():
        fail("there is no CUDA device to calibrate", 2)
    path = table_path()
    if path is None:
        fail("KVTAILOR_CACHE_DIR is off, or there is no home folder: nowhere to keep it", 2)
    try:
        read_table(path)
    except FileNotFoundError:
        pass
    except ValueError as error:
        fail(f"{error}; delete {path} to start anew", 2)
    try:
        with make_console(stderr=True).status("measuring") as status:
            found = measure(device, status.update)
        write_table(path, device, found)
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}", 2)
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
