"""The torch.compile backend: capture, run the passes, hand the result to an inner compiler.

    torch.compile(model, backend="kvtailor")      # or model.compile(backend="kvtailor")

Read this first. A graph that cannot be captured or rewritten, or that needs gradients, goes to the
inner compiler untouched, and the log and the report say so.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from kvtailor.compiler import inner, tensorrt, warm_start
from kvtailor.compiler.check import checked
from kvtailor.compiler.pieces import CannotPack, compile_packed
from kvtailor.compiler.reports import (
    Recorder,
    StrictError,
    compared,
    go_on,
    looked_at,
    new_report,
    raise_if_left_alone,
    recording,
    untouched,
)
from kvtailor.config import Options, parse_options
from kvtailor.passes.capture.capture import CaptureError, capture
from kvtailor.passes.failures import CONTROL_FLOW
from kvtailor.passes.pipeline import PASS_NAMES, run_passes
from kvtailor.passes.report import GraphReport
from kvtailor.runtime.driver import Compiled

__all__ = ["Recorder", "StrictError", "kvtailor", "recording"]

log = logging.getLogger(__name__)


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
    report = new_report()
    try:
        rewritten = rewrite_or_load(gm, example_inputs, opts, report)
    except (StrictError, *CONTROL_FLOW):
        raise
    except Exception as error:
        untouched(report, opts, error)
        rewritten = None
    start = time.perf_counter()
    if rewritten is None:
        compiled = inner.inner_compile(gm, example_inputs, opts)
    else:
        compiled = compile_rewritten(rewritten, gm, example_inputs, opts, report)
    report.inner_ms = 1e3 * (time.perf_counter() - start)
    return checked(compiled, gm, report)


def rewrite_or_load(
    gm: fx.GraphModule, example_inputs: Sequence[Any], opts: Options, report: GraphReport
) -> fx.GraphModule:
    """The rewritten graph, as an earlier process left it or new. Raises CaptureError, StrictError.

    What the passes did is known only if they run, and what a user's own pass does is in no key.
    """
    _refuse_gradients(example_inputs)
    if looked_at() or opts.strict or opts.dump_dir or opts.extra_passes:
        return rewrite(gm, example_inputs, opts, report)
    start = time.perf_counter()
    path, found = warm_start.load(gm, example_inputs, opts)
    report.load_ms = 1e3 * (time.perf_counter() - start)
    if found is not None:
        log.info("%s: the rewritten graph was found in %s", report.name, path)
        return found
    rewritten = rewrite(gm, example_inputs, opts, report)
    if path is not None and not any(each.error for each in report.passes):
        warm_start.save(path, rewritten)
    return rewritten


def _refuse_gradients(example_inputs: Sequence[Any]) -> None:
    if torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs
    ):
        raise CaptureError("gradients", "the graph needs gradients; kvtailor is for inference")


def rewrite(
    gm: fx.GraphModule, example_inputs: Sequence[Any], opts: Options, report: GraphReport
) -> fx.GraphModule:
    """Capture a Dynamo graph and run the passes over it. Raises CaptureError, StrictError."""
    with inner.asked_early(example_inputs, opts):
        start = time.perf_counter()
        captured = capture(gm, example_inputs)
        report.capture_ms = 1e3 * (time.perf_counter() - start)
        with compared(captured, report):
            run_passes(captured, opts, report, example_inputs)
        if opts.strict:
            raise_if_left_alone(report)
        return captured


def compile_rewritten(
    rewritten: fx.GraphModule,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    opts: Options,
    report: GraphReport,
) -> Compiled:
    """The rewritten form of gm as a callable; weights that cannot be packed stay apart."""
    try:
        return compile_packed(rewritten, example_inputs, opts, report)
    except CannotPack as error:
        # The graph reads packed weights, so another one is made.
        go_on(report, opts, f"weights are not packed: {error}")
    report.passes.clear()
    report.packed.clear()
    opts = opts.model_copy(update={"pack": "off"})
    rewritten = rewrite(gm, example_inputs, opts, report)
    return compile_packed(rewritten, example_inputs, opts, report)
