"""A rewritten graph to a callable: cut it, compile each distinct piece once, chain the pieces."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import counters

from kvtailor.compiler import inner
from kvtailor.compiler.capturable import NotCapturable, graph_signature
from kvtailor.compiler.piece import Piece, Pieces, is_contiguous
from kvtailor.compiler.reports import StrictError, go_on, looked_at
from kvtailor.compiler.spaces import describe
from kvtailor.compiler.split import NotSplittable, split
from kvtailor.config import Options
from kvtailor.passes.failures import CONTROL_FLOW, Snapshot, one_line
from kvtailor.passes.graph import PACKED
from kvtailor.passes.report import GraphReport, PieceReport
from kvtailor.runtime.cuda_graphs import Capturer, GraphedPiece, make_capturer
from kvtailor.runtime.driver import Call, Compiled, straight_line
from kvtailor.runtime.packed_weights import PackedInput, PackedWeights

log = logging.getLogger(__name__)

_PLAIN = Options(inner="eager")


class CannotPack(Exception):
    """The weights cannot be packed after all; they are as they were."""


def compile_packed(
    gm: fx.GraphModule, example_inputs: Sequence[Any], opts: Options, report: GraphReport
) -> Compiled:
    """gm compiled in pieces; packed weights, if it has any, are added to its arguments.

    Raises CannotPack.
    """
    inputs: tuple[PackedInput, ...] = gm.meta.get(PACKED, ())
    if not inputs:
        return compile_pieces(gm, example_inputs, opts, report)
    assert opts.pack != "off"
    packed = PackedWeights(inputs, opts.pack)
    try:
        packed(example_inputs)
    except Exception as error:
        raise CannotPack(one_line(error)) from error
    fakes = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    examples = [*example_inputs, *fakes[len(example_inputs) :]]
    for at in {at for each in inputs for at in each.parts}:
        # Dynamo has seen the real one elsewhere in memory.
        examples[at] = fakes[at]
    compiled = compile_pieces(gm, examples, opts, report)

    def run(*args: Any) -> Any:
        return compiled(*args, *packed(args))

    return run


def compile_pieces(
    gm: fx.GraphModule, example_inputs: Sequence[Any], opts: Options, report: GraphReport
) -> Compiled:
    """gm compiled piece by piece, equal ones once; as a whole where it cannot be cut.

    What does not compile runs as it is, with a reason in the report; StrictError under ``strict``.
    """
    capturer = make_capturer() if opts.graphs else None
    if opts.graphs and capturer is None:
        log.info("%s gets no CUDA graphs: there is no CUDA device", report.name)
    if opts.regions == "none" and capturer is None:
        return _as_a_whole(gm, example_inputs, opts, report)
    before = Snapshot(gm)
    try:
        return _in_pieces(gm, example_inputs, opts, report, capturer)
    except (StrictError, *CONTROL_FLOW):
        raise
    except NotSplittable as error:
        report.whole = str(error)
        log.warning("%s is compiled as a whole: %s", report.name, error)
    except Exception as error:
        go_on(report, opts, f"it is not cut into pieces: {one_line(error)}")
    before.restore()
    report.pieces = []
    return _as_a_whole(gm, example_inputs, opts, report)


def _as_a_whole(
    gm: fx.GraphModule, example_inputs: Sequence[Any], opts: Options, report: GraphReport
) -> Compiled:
    """gm in one go; as it is where the inner compiler fails."""
    before = Snapshot(gm)
    try:
        return inner.inner_compile(gm, example_inputs, opts)
    except CONTROL_FLOW:
        raise
    except Exception as error:
        go_on(report, opts, f"it runs uncompiled: {one_line(error)}")
    before.restore()
    return gm.forward


def _in_pieces(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    opts: Options,
    report: GraphReport,
    capturer: Capturer | None,
) -> Compiled:
    """gm, which is used up, compiled piece by piece. Raises NotSplittable, StrictError."""
    resident = _resident(gm, example_inputs)
    start = time.perf_counter()
    cut = split(gm, layers=opts.regions == "layer", rows=capturer is not None)
    report.split_ms = 1e3 * (time.perf_counter() - start)
    report.pieces = describe(cut.pieces, count_flops=looked_at())
    calls = _compile_once(cut.pieces, opts, report)
    if capturer is not None:
        calls = _graphed(calls, cut, resident | set(cut.constants), opts, capturer, report)
    taken = {name for piece in cut.pieces for name in piece.inputs}
    chain = [
        Call(call, piece.inputs, piece.outputs, _layouts(piece, taken))
        for call, piece in zip(calls, cut.pieces)
    ]
    return straight_line(cut.inputs, cut.constants, cut.symbols, chain, cut.results)


def _compile_once(pieces: Sequence[Piece], opts: Options, report: GraphReport) -> list[Compiled]:
    """The callable of every piece; equal pieces have the same one."""
    artefacts: dict[str, _Artefact] = {}
    for piece, about in zip(pieces, report.pieces):
        artefacts.setdefault(piece.key, _Artefact(piece, opts, report)).reports.append(about)
    kernels: inner.Kernels = {}
    with _progress(len(artefacts), opts.inner != "eager") as tell:
        for artefact in artefacts.values():
            tell(artefact.piece.name)
            artefact.begin(kernels)
    for artefact in artefacts.values():
        artefact.finish()
    counters["kvtailor"]["pieces"] += len(pieces)
    counters["kvtailor"]["compiled_pieces"] += len(artefacts)
    return [artefacts[piece.key].call for piece in pieces]


class _Artefact:
    """What one distinct piece is compiled to, once for all its equals.

    reports: of the piece and its equals. call: the compiled form; the piece as it is where
    compiling failed, and then the reports have the reason.
    """

    def __init__(self, piece: Piece, opts: Options, graph: GraphReport):
        self.piece, self.opts, self.graph = piece, opts, graph
        self.reports: list[PieceReport] = []
        self.call: Compiled
        self._wait: Callable[[], None] = lambda: None

    def begin(self, kernels: inner.Kernels) -> None:
        """Compile, all but kernels that a C++ compiler is still at work on."""
        opts = _PLAIN if self.piece.idle else self.opts
        with self._or_uncompiled():
            self.call, self._wait = inner.begin(
                self.piece.module(), self.piece.example(), opts, kernels
            )
        took = self.reports[0].compile_ms
        log.info("%s: %s: %.0f ms", self.graph.name, self.piece.name, took)

    def finish(self) -> None:
        with self._or_uncompiled():
            self._wait()

    @contextmanager
    def _or_uncompiled(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        except CONTROL_FLOW:
            raise
        except Exception as error:
            self._give_up(error)
        finally:
            self.reports[0].compile_ms += 1e3 * (time.perf_counter() - start)

    def _give_up(self, error: Exception) -> None:
        why = one_line(error)
        go_on(self.graph, self.opts, f"piece {self.piece.name} runs uncompiled: {why}")
        counters["kvtailor"]["failed_pieces"] += 1
        for report in self.reports:
            report.reason = why
        self.call = self.piece.module().forward


def _layouts(piece: Piece, taken: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Strides of the results that other pieces take; not of those that only sizes would tell."""
    found: dict[str, tuple[int, ...]] = {}
    for name, x in zip(piece.outputs, piece.results()):
        if name is None or name not in taken or not isinstance(x, torch.Tensor):
            continue
        if is_contiguous(x):
            found[name] = ()
        elif all(isinstance(n, int) for n in x.stride()):
            found[name] = x.stride()
    return found


def _resident(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> set[str]:
    """Inputs that stay where they are from call to call: parameters, buffers, packed weights."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    packed: tuple[PackedInput, ...] = gm.meta.get(PACKED, ())
    parts = {at for each in packed for at in each.parts}
    return {
        node.name
        for at, (node, x) in enumerate(zip(placeholders, example_inputs))
        if isinstance(x, torch.nn.Parameter)
        or getattr(x, "_dynamo_static_input_type", None) is not None
        or at in parts
        or at >= len(placeholders) - len(packed)
    }


def _graphed(
    calls: Sequence[Compiled],
    cut: Pieces,
    resident: set[str],
    opts: Options,
    capturer: Capturer,
    report: GraphReport,
) -> list[Compiled]:
    """The pieces' calls behind CUDA graphs, or themselves where there is a reason against them."""
    returned = {result.name for result in cut.results} - {None}
    graphed: list[Compiled] = []
    for call, piece, about in zip(calls, cut.pieces, report.pieces):
        try:
            if about.reason or piece.idle:
                raise NotCapturable("there is nothing compiled to capture")
            signature = graph_signature(piece, resident)
            rows, most = signature.rows, max(opts.capture_sizes)
            if rows is not None and rows > most:
                raise NotCapturable(f"its {rows} rows are more than {most}")
        except NotCapturable as error:
            about.no_graph = str(error)
            log.info("%s: piece %s gets no CUDA graph: %s", report.name, piece.name, error)
            graphed.append(call)
            continue
        about.capture_sizes = sorted(opts.capture_sizes if rows is None else (rows,))
        at = {i for i, name in enumerate(piece.outputs) if name in returned}
        graphed.append(GraphedPiece(piece.name, call, signature, about.capture_sizes, capturer, at))
    return graphed


@contextmanager
def _progress(total: int, show: bool) -> Iterator[Callable[[str], None]]:
    """A function that says which piece comes next, on a bar where standard error is a terminal."""
    if not show or total < 2 or not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = TextColumn("compiling {task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total, completed=-1)
        yield lambda name: progress.update(task, advance=1, description=name)
