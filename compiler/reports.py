"""What is told of compiled graphs: reports to who records them, the log, StrictError."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx
from torch._dynamo.utils import counters

from kvtailor.compiler.spaces import row_spaces
from kvtailor.config import Options
from kvtailor.passes.capture.capture import CaptureError
from kvtailor.passes.failures import one_line, only_describing
from kvtailor.passes.flops import flops_by_layer
from kvtailor.passes.report import GraphReport, LayerWork
from kvtailor.passes.text import show

log = logging.getLogger(__name__)

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


def new_report() -> GraphReport:
    """A report for the next graph, in the hands of all who record."""
    report = GraphReport(name=f"graph_{next(_numbers)}")
    for recorder in _recorders:
        recorder.graphs.append(report)
    counters["kvtailor"]["graphs"] += 1
    return report


def looked_at() -> bool:
    """Whether somebody wants to know what the passes do."""
    return any(not r.warm for r in _recorders)


def to_check(report: GraphReport) -> bool:
    """Whether somebody wants the graph's calls compared with eager ones."""
    return any(r.check and report in r.graphs for r in _recorders)


@contextmanager
def compared(gm: fx.GraphModule, report: GraphReport) -> Iterator[None]:
    """Where someone looks, what gm computes before and after what is done to it within."""
    if not looked_at():
        yield
        return
    before: dict[str, int] = {}
    with only_describing("the captured graph"):
        before = flops_by_layer(gm)
        report.flops_before, report.graph_before = sum(before.values()), show(gm)
    yield
    with only_describing("the rewritten graph"):
        after = flops_by_layer(gm)
        report.flops_after, report.graph_after = sum(after.values()), show(gm)
        report.layers = [
            LayerWork(name, before.get(name, 0), after.get(name, 0)) for name in {**before, **after}
        ]
        report.row_spaces = row_spaces(gm)


def go_on(report: GraphReport, opts: Options, without: str) -> None:
    """Something failed and there is a way to go on: told, or StrictError under ``strict``."""
    if opts.strict:
        raise StrictError(f"{report.name}: {without}")
    log.warning("%s: %s", report.name, without)
    report.without.append(without)


def untouched(report: GraphReport, opts: Options, error: Exception) -> None:
    """The graph goes to the inner compiler as it came. Raises StrictError under ``strict``."""
    code, why = "rewrite", one_line(error)
    if isinstance(error, CaptureError):
        code, why = error.code, str(error)
    report.captured = False
    report.reason = f"{code}: {why}"
    counters["kvtailor"]["untouched"] += 1
    log.warning("%s is left untouched: %s", report.name, report.reason)
    if opts.strict:
        raise StrictError(f"{report.name} is left untouched: {report.reason}")
    if code == "gradients" and code not in _warned:
        _warned.add(code)
        warnings.warn(
            "kvtailor leaves graphs that need gradients untouched: "
            "run the model under torch.no_grad() or torch.inference_mode()",
            stacklevel=3,
        )


def raise_if_left_alone(report: GraphReport) -> None:
    failed = [f"{each.name}: {each.error}" for each in report.passes if each.error is not None]
    if failed:
        raise StrictError(f"{report.name} has passes that failed: " + "; ".join(failed))
    left = [f"{site.site}: {site.reason}" for site in report.attention if site.reason]
    if left:
        raise StrictError(f"{report.name} has sites left alone: " + "; ".join(left))
