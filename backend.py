"""The torch.compile backend: capture, run the passes, hand the result to an inner compiler.

    torch.compile(model, backend="kvtailor")      # or model.compile(backend="kvtailor")

Read this first. A graph that cannot be captured, or that needs gradients, goes to the inner
compiler untouched, and the log and the report say so.
"""

from __future__ import annotations

import gc
import itertools
import logging
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing

from kvtailor.compiler import tensorrt, warm_start
from kvtailor.compiler.capturable import NotCapturable, graph_shape
from kvtailor.compiler.joined_kernels import Collector, Kernel, ask_early, collected, joined
from kvtailor.compiler.spaces import describe, row_spaces
from kvtailor.compiler.split import NotSplittable, Piece, is_contiguous, split
from kvtailor.config import Options, parse_options
from kvtailor.passes.capture.capture import CaptureError, capture
from kvtailor.passes.flops import flops_by_layer
from kvtailor.passes.graph import show
from kvtailor.passes.packing import PACKED, packing
from kvtailor.passes.pipeline import PASS_NAMES, run_passes
from kvtailor.passes.report import GraphReport, LayerWork
from kvtailor.runtime import cuda_graphs
from kvtailor.runtime.cuda_graphs import GraphedPiece, make_recorder
from kvtailor.runtime.driver import Compiled, Step, compile_once, straight_line
from kvtailor.runtime.host_state import journal
from kvtailor.runtime.packed_weights import PackedInput, PackedWeights

log = logging.getLogger(__name__)

_PLAIN = Options(inner="eager")

_numbers = itertools.count()
_recorders: list[Recorder] = []
_warned: set[str] = set()


class StrictError(RuntimeError):
    """``strict=True`` and something was left alone."""


class Recorder:
    """Collects a GraphReport for every graph compiled while it is active.

    check: compare every call of a compiled graph with the graph Dynamo made, run eagerly on
    copies of the same inputs; the largest relative error goes into the report. warm: a graph may
    come rewritten from an earlier process, and then has no sites and passes to report.
    """

    def __init__(self, check: bool = False, warm: bool = False):
        self.check, self.warm = check, warm
        self.graphs: list[GraphReport] = []


@contextmanager
def recording(check: bool = False, warm: bool = False) -> Iterator[Recorder]:
    """``with recording() as r: model(x)`` leaves a report per graph in ``r.graphs``."""
    recorder = Recorder(check, warm)
    _recorders.append(recorder)
    try:
        yield recorder
    finally:
        _recorders.remove(recorder)


def _looked_at() -> bool:
    return any(not r.warm for r in _recorders)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Graphs are cycles that live on: looking for garbage among them takes a tenth of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@_no_collection()
def kvtailor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """Compile one Dynamo graph; torch.compile calls this, users do not.

    Raises ValueError for wrong options, MissingTensorRT for that inner compiler without its
    package, StrictError under ``strict``.
    """
    opts = parse_options(options, mode, pass_names=PASS_NAMES)
    if opts.inner == "tensorrt":
        tensorrt.require()
    report = GraphReport(name=f"graph_{next(_numbers)}")
    for recorder in _recorders:
        recorder.graphs.append(report)
    counters["kvtailor"]["graphs"] += 1

    if _needs_gradients(example_inputs):
        _untouched(
            report, opts, "gradients", "the graph needs gradients; kvtailor is for inference"
        )
        if "gradients" not in _warned:
            _warned.add("gradients")
            warnings.warn(
                "kvtailor leaves graphs that need gradients untouched: "
                "run the model under torch.no_grad() or torch.inference_mode()",
                stacklevel=2,
            )
        return _checked(inner_compile(gm, example_inputs, opts), gm, report)

    # Whoever wants to know what the passes did must have them run, and what a pass of the user's
    # own does is in no key.
    kept, rewritten = None, None
    if not (_looked_at() or opts.strict or opts.dump_dir or opts.extra_passes):
        start = time.perf_counter()
        kept, rewritten = warm_start.load(gm, example_inputs, opts)
        report.load_ms = 1e3 * (time.perf_counter() - start)
    if rewritten is not None:
        log.info("%s: the rewritten graph was found in %s", report.name, kept)
    else:
        try:
            with _asked_early(example_inputs, opts):
                rewritten = rewrite(gm, example_inputs, opts, report)
        except CaptureError as error:
            _untouched(report, opts, error.code, str(error))
            return _checked(inner_compile(gm, example_inputs, opts), gm, report)
        if kept is not None:
            warm_start.save(kept, rewritten)

    start = time.perf_counter()
    compiled = compile_packed(rewritten, example_inputs, opts, report)
    report.inner_ms = 1e3 * (time.perf_counter() - start)
    return _checked(compiled, gm, report)


@contextmanager
def _asked_early(example_inputs: Sequence[Any], opts: Options) -> Iterator[None]:
    """What Inductor asks the C++ compiler about this machine is asked beside other work."""
    devices = {x.device.type for x in example_inputs if isinstance(x, torch.Tensor)}
    thread = ask_early() if opts.inner == "inductor" and devices == {"cpu"} else None
    try:
        yield
    finally:
        if thread is not None:
            thread.join()


def rewrite(
    gm: fx.GraphModule, example_inputs: Sequence[Any], opts: Options, report: GraphReport
) -> fx.GraphModule:
    """Capture a Dynamo graph and run the passes over it. Raises CaptureError, StrictError."""
    start = time.perf_counter()
    captured = capture(gm, example_inputs)
    report.capture_ms = 1e3 * (time.perf_counter() - start)
    if _looked_at():
        before = flops_by_layer(captured)
        report.flops_before, report.graph_before = sum(before.values()), show(captured)
    with packing(captured, example_inputs, opts.pack) as groups:
        run_passes(captured, opts, report)
    report.packed = groups
    if _looked_at():
        after = flops_by_layer(captured)
        report.flops_after, report.graph_after = sum(after.values()), show(captured)
        report.layers = [
            LayerWork(name, before.get(name, 0), after.get(name, 0)) for name in {**before, **after}
        ]
        report.row_spaces = row_spaces(captured)
    if opts.strict:
        _raise_if_left_alone(report)
    return captured


def compile_packed(
    gm: fx.GraphModule, example_inputs: Sequence[Any], opts: Options, report: GraphReport
) -> Compiled:
    """gm compiled in pieces; packed weights, if it has any, are added to its arguments."""
    inputs: tuple[PackedInput, ...] = gm.meta.get(PACKED, ())
    if not inputs:
        return compile_pieces(gm, example_inputs, opts, report)
    assert opts.pack != "off"
    packed = PackedWeights(inputs, opts.pack)
    packed(example_inputs)
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

    A piece that does not compile runs as it is, with a reason in the report; StrictError under
    ``strict``.
    """
    recorder = make_recorder() if opts.graphs else None
    if opts.graphs and recorder is None:
        log.info("%s gets no CUDA graphs: there is no CUDA device", report.name)
    if opts.regions == "none" and recorder is None:
        return inner_compile(gm, example_inputs, opts)
    resident = _resident(gm, example_inputs)
    start = time.perf_counter()
    try:
        cut = split(gm, layers=opts.regions == "layer", rows=recorder is not None)
    except NotSplittable as error:
        report.whole = str(error)
        log.warning("%s is compiled as a whole: %s", report.name, error)
        return inner_compile(gm, example_inputs, opts)
    report.split_ms = 1e3 * (time.perf_counter() - start)
    report.pieces = describe(cut.pieces, count_flops=_looked_at())

    # Kernels that a C++ compiler is still at work on while the next piece is traced.
    waited: dict[int, Collector] = {}
    kernels: dict[Any, Kernel] = {}

    def make(i: int) -> Compiled:
        piece, start = cut.pieces[i], time.perf_counter()
        try:
            with _context_of_its_own(), collected(kernels) as waited[i]:
                compiled = inner_compile(
                    piece.module(), piece.example(), opts if not piece.idle else _PLAIN
                )
        except RestartAnalysis:
            raise
        except Exception as error:
            waited.pop(i, None)
            compiled = give_up(piece, error)
        report.pieces[i].compile_ms = 1e3 * (time.perf_counter() - start)
        log.info("%s: %s: %.0f ms", report.name, piece.name, report.pieces[i].compile_ms)
        return compiled

    def give_up(piece: Piece, error: Exception) -> Compiled:
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if opts.strict:
            raise StrictError(f"{report.name}: piece {piece.name} failed: {why}") from error
        log.warning("%s: piece %s runs uncompiled: %s", report.name, piece.name, why)
        counters["kvtailor"]["failed_pieces"] += 1
        for each, other in zip(report.pieces, cut.pieces):
            each.reason = why if other.key == piece.key else each.reason
        return piece.module().forward

    names = [p.name for p in cut.pieces]
    keys = [p.key for p in cut.pieces]
    calls = compile_once(keys, names, make, show=opts.inner != "eager")
    for i, collector in waited.items():
        start = time.perf_counter()
        try:
            collector.finish()
        except Exception as error:
            plain = give_up(cut.pieces[i], error)
            calls = [plain if key == keys[i] else call for key, call in zip(keys, calls)]
        report.pieces[i].compile_ms += 1e3 * (time.perf_counter() - start)
    counters["kvtailor"]["pieces"] += len(calls)
    counters["kvtailor"]["compiled_pieces"] += len(set(keys))
    results = [(r.name, r.constant) for r in cut.results]
    if recorder is not None:
        returned = {name for name, _ in results if name is not None}
        for i, piece in enumerate(cut.pieces):
            calls[i] = _graphed(
                calls[i], piece, resident | set(cut.constants), returned, opts, recorder, report
            )
    taken = {name for piece in cut.pieces for name in piece.inputs}
    steps = [
        Step(call, piece.inputs, piece.outputs, _layouts(piece, taken))
        for call, piece in zip(calls, cut.pieces)
    ]
    return straight_line(cut.inputs, cut.constants, cut.symbols, steps, results)


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
    call: Compiled,
    piece: Piece,
    resident: set[str],
    returned: set[str],
    opts: Options,
    recorder: cuda_graphs.Recorder,
    report: GraphReport,
) -> Compiled:
    """The piece's call behind CUDA graphs, or itself where there is a reason against them."""
    about = next(r for r in report.pieces if r.name == piece.name)
    try:
        if about.reason or piece.idle:
            raise NotCapturable("there is nothing compiled to capture")
        shape = graph_shape(piece, resident)
        if shape.rows is not None and shape.rows > max(opts.capture_sizes):
            raise NotCapturable(f"its {shape.rows} rows are more than {max(opts.capture_sizes)}")
    except NotCapturable as error:
        about.no_graph = str(error)
        log.info("%s: piece %s gets no CUDA graph: %s", report.name, piece.name, error)
        return call
    sizes = opts.capture_sizes if shape.rows is None else (shape.rows,)
    about.capture_sizes = sorted(sizes)
    at = {i for i, name in enumerate(piece.outputs) if name in returned}
    return GraphedPiece(piece.name, call, shape, sizes, recorder, at)


@contextmanager
def _context_of_its_own() -> Iterator[None]:
    """Compiling a piece must not overwrite what is known about the whole graph."""
    context = TracingContext.try_get()
    if context is None:
        yield
        return
    with tracing(TracingContext(context.fake_mode)):
        yield


def inner_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], opts: Options) -> Compiled:
    """The inner compiler's callable for gm."""
    if opts.inner == "eager":
        return gm.forward
    if opts.inner == "tensorrt":
        refused = tensorrt.refusal(gm)
        if refused is None:
            return tensorrt.compile_piece(gm, example_inputs)
        log.info("a piece goes to Inductor instead of TensorRT: %s", refused)
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = list_mode_options(opts.mode) if opts.mode else {}
    # The graphs are ours, each sized to its piece.
    patches.pop("triton.cudagraphs", None)
    with joined():
        compiled = compile_fx(gm, list(example_inputs), config_patches=patches)
    assert callable(compiled)
    return compiled


def _needs_gradients(example_inputs: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs
    )


def _untouched(report: GraphReport, opts: Options, code: str, why: str) -> None:
    report.captured = False
    report.reason = f"{code}: {why}"
    counters["kvtailor"]["untouched"] += 1
    log.warning("%s is left untouched: %s", report.name, report.reason)
    if opts.strict:
        raise StrictError(f"{report.name} is left untouched: {report.reason}")


def _raise_if_left_alone(report: GraphReport) -> None:
    left = [f"{site.site}: {site.reason}" for site in report.attention if site.reason]
    if left:
        raise StrictError(f"{report.name} has sites left alone: " + "; ".join(left))


def _checked(compiled: Compiled, gm: fx.GraphModule, report: GraphReport) -> Compiled:
    """compiled itself, or, under a checking recorder, a wrapper that also runs gm."""
    if not any(r.check and report in r.graphs for r in _recorders):
        return compiled

    def run(*args: Any) -> Any:
        copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        with journal() as replay:
            with torch.no_grad():
                expected = gm.forward(*copies)
            replay()
            actual = compiled(*args)
        # Inputs count too: a cache that was written to must hold what eager wrote.
        error = relative_error([*actual, *args], [*expected, *copies])
        report.max_error = max(error, report.max_error or 0.0)
        return actual

    return run


def relative_error(actual: Sequence[Any], expected: Sequence[Any]) -> float:
    """Largest |actual - expected| over the tensors, each relative to its largest value.

    Infinity when shapes, dtypes or non-finite entries differ.
    """
    worst = 0.0
    for a, e in zip(actual, expected, strict=True):
        if not isinstance(e, torch.Tensor):
            continue
        if a.shape != e.shape or a.dtype != e.dtype:
            return float("inf")
        if not e.numel() or a is e:
            continue
        if not (e.is_floating_point() or e.is_complex()):
            worst = max(worst, 0.0 if torch.equal(a, e) else float("inf"))
            continue
        finite = torch.isfinite(e)
        infinite = [x.masked_fill(~x.isinf(), 0.0) for x in (a, e)]
        if not torch.equal(a.isnan(), e.isnan()) or not torch.equal(*infinite):
            return float("inf")
        a64, e64 = a[finite].double(), e[finite].double()
        if not e64.numel():
            continue
        if not torch.isfinite(a64).all():
            return float("inf")
        largest = e64.abs().max().item()
        worst = max(worst, (a64 - e64).abs().max().item() / (largest or 1.0))
    return worst
