"""The torch.compile backend: capture, run the passes, hand the result to an inner compiler.

    torch.compile(model, backend="kvtailor")      # or model.compile(backend="kvtailor")

Read this first. A graph that cannot be captured, or that needs gradients, goes to the inner
compiler untouched, and the log and the report say so.
"""

from __future__ import annotations

import itertools
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import counters

from kvtailor.config import Options, parse_options
from kvtailor.passes.capture import CaptureError, capture
from kvtailor.passes.flops import flops_by_layer
from kvtailor.passes.graph import show
from kvtailor.passes.packing import WEIGHTS, Weights, attach_weights
from kvtailor.passes.pipeline import PASS_NAMES, run_passes
from kvtailor.passes.report import GraphReport, LayerWork
from kvtailor.passes.row_spaces import row_spaces
from kvtailor.runtime.packed_weights import PackedWeights

log = logging.getLogger(__name__)

Compiled = Callable[..., Any]

_numbers = itertools.count()
_recorders: list[Recorder] = []
_warned: set[str] = set()


class StrictError(RuntimeError):
    """``strict=True`` and something was left alone."""


class Recorder:
    """Collects a GraphReport for every graph compiled while it is active.

    check: compare every call of a compiled graph with the graph Dynamo made, run eagerly on
    copies of the same inputs; the largest relative error goes into the report.
    """

    def __init__(self, check: bool = False):
        self.check = check
        self.graphs: list[GraphReport] = []


@contextmanager
def recording(check: bool = False) -> Iterator[Recorder]:
    """``with recording() as r: model(x)`` leaves a report per graph in ``r.graphs``."""
    recorder = Recorder(check)
    _recorders.append(recorder)
    try:
        yield recorder
    finally:
        _recorders.remove(recorder)


def kvtailor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """Compile one Dynamo graph; torch.compile calls this, users do not.

    Raises ValueError for wrong options, StrictError under ``strict``.
    """
    opts = parse_options(options, mode, pass_names=PASS_NAMES)
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

    start = time.perf_counter()
    try:
        captured = capture(gm, example_inputs)
    except CaptureError as error:
        _untouched(report, opts, error.code, str(error))
        return _checked(inner_compile(gm, example_inputs, opts), gm, report)
    report.capture_ms = 1e3 * (time.perf_counter() - start)
    if _recorders:
        before = flops_by_layer(captured)
        report.flops_before, report.graph_before = sum(before.values()), show(captured)
    weights = attach_weights(captured, example_inputs, opts.pack) if opts.pack != "off" else None
    run_passes(captured, opts, report)
    captured.meta.pop(WEIGHTS, None)
    if weights is not None:
        report.packed = weights.groups
    if _recorders:
        after = flops_by_layer(captured)
        report.flops_after, report.graph_after = sum(after.values()), show(captured)
        report.layers = [
            LayerWork(name, before.get(name, 0), after.get(name, 0)) for name in {**before, **after}
        ]
        report.pieces = row_spaces(captured)
    if opts.strict:
        _raise_if_left_alone(report)

    start = time.perf_counter()
    compiled = _compile_packed(captured, example_inputs, opts, weights)
    report.inner_ms = 1e3 * (time.perf_counter() - start)
    return _checked(compiled, gm, report)


def _compile_packed(
    gm: fx.GraphModule, example_inputs: Sequence[Any], opts: Options, weights: Weights | None
) -> Compiled:
    """The inner compiler's callable; packed weights, if any, are added to its arguments."""
    if weights is None or not weights.packed:
        return inner_compile(gm, example_inputs, opts)
    packed = PackedWeights(weights.packed, weights.mode)
    packed(example_inputs)
    fakes = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    examples = [*example_inputs, *fakes[len(example_inputs) :]]
    for at in {at for each in weights.packed for at in each.parts}:
        # Dynamo has seen the real one elsewhere in memory.
        examples[at] = fakes[at]
    compiled = inner_compile(gm, examples, opts)

    def run(*args: Any) -> Any:
        return compiled(*args, *packed(args))

    return run


def inner_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], opts: Options) -> Compiled:
    """The inner compiler's callable for gm."""
    if opts.inner == "eager":
        return gm.forward
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = list_mode_options(opts.mode) if opts.mode else {}
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
        with torch.no_grad():
            expected = gm.forward(*copies)
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
