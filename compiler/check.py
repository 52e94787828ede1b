"""Compiled calls compared with eager ones, where a recorder asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from kvtailor.compiler.reports import to_check
from kvtailor.passes.report import GraphReport
from kvtailor.runtime.driver import Compiled
from kvtailor.runtime.host_state import journal


def checked(compiled: Compiled, gm: fx.GraphModule, report: GraphReport) -> Compiled:
    """compiled itself, or, under a checking recorder, a wrapper that also runs gm."""
    if not to_check(report):
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
