"""``kvtailor bisect``: which pass makes a model differ from eager.

The passes run in a fixed order, so the model is run with the first none, one, two, ... of them;
the one after which the error leaves the bound is to blame, and so is one that fails and is undone.
What is wrong already with none of them is capture's, the inner compiler's, or an always-on pass's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvtailor.cli.inspection import FP32_BOUND, Inspection, run_inspection
from kvtailor.cli.options import Request
from kvtailor.passes.pipeline import PASS_NAMES

NONE = "no pass"


@dataclass(frozen=True)
class Trial:
    """The error against eager with all passes up to and including ``upto``."""

    upto: str
    error: float


@dataclass(frozen=True)
class Bisection:
    """steps: in pass order. blamed: the pass, NONE for what comes before any, None for nobody."""

    steps: list[Trial]
    bound: float
    blamed: str | None

    def asdict(self) -> dict[str, Any]:
        steps = [
            {"upto": s.upto, "error": "inf" if math.isinf(s.error) else s.error} for s in self.steps
        ]
        return {"bound": self.bound, "blamed": self.blamed, "steps": steps}


def bisect_passes(
    request: Request,
    bound: float = FP32_BOUND,
    progress: Callable[[str], None] = lambda text: None,
) -> Bisection:
    """Run the model once per pass; bound: largest error, relative to the largest value.

    Stops at the first pass that breaks it. Raises InspectError as ``run_inspection`` does.
    """
    enabled = [name for name in PASS_NAMES if name not in request.disable]
    steps: list[Trial] = []
    for i, upto in enumerate([NONE, *enabled]):
        progress(f"with {upto}" if i == 0 else f"up to {upto}")
        off = (*request.disable, *enabled[i:])
        found = run_inspection(request.model_copy(update={"disable": off}))
        steps.append(Trial(upto, _error(found)))
        failed = _failed(found)
        if failed is not None:
            return Bisection(steps, bound, failed)
        if not steps[-1].error <= bound:
            return Bisection(steps, bound, upto)
    return Bisection(steps, bound, None)


def _error(found: Inspection) -> float:
    return found.max_error if found.recorder.graphs else math.inf


def _failed(found: Inspection) -> str | None:
    """A pass that was undone; one that cannot be switched off may be it from the first step on."""
    passes = [each for graph in found.recorder.graphs for each in graph.passes]
    return next((each.name for each in passes if each.error is not None), None)
