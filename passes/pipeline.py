"""The pass order, and the runner that keeps the graph honest between passes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from torch import fx
from torch._dynamo.utils import counters
from torch._logging import trace_structured

from kvtailor.config import Options
from kvtailor.passes.fuse_gate_up import fuse_gate_up
from kvtailor.passes.fuse_qcrosskv import fuse_qcrosskv
from kvtailor.passes.graph import INNER, SITES, show
from kvtailor.passes.lower_dense_attention import lower_dense_attention
from kvtailor.passes.lower_few_rows import lower_few_rows
from kvtailor.passes.lower_local_attention import lower_local_attention
from kvtailor.passes.lower_paged_attention import lower_paged_attention
from kvtailor.passes.narrow_rows import narrow_rows
from kvtailor.passes.normalise import normalise
from kvtailor.passes.prove_masks import prove_masks
from kvtailor.passes.recognise_attention import recognise_attention
from kvtailor.passes.report import GraphReport, PassReport
from kvtailor.passes.store_in_place import store_in_place

log = logging.getLogger(__name__)

Pass = Callable[[fx.GraphModule], PassReport]

PASSES: tuple[Pass, ...] = (
    normalise,
    recognise_attention,
    prove_masks,
    narrow_rows,
    # After the rows are known: a narrowed query reads other rows than its keys.
    fuse_qcrosskv,
    fuse_gate_up,
    lower_paged_attention,
    lower_local_attention,
    lower_dense_attention,
    lower_few_rows,
    store_in_place,
)

# Passes of the user's own come before this one: after all that is proved, before any lowering.
LOWERING = lower_paged_attention

# Sites left as attend would run the oracle: this one cannot be switched off.
ALWAYS = ("lower_dense_attention",)
PASS_NAMES = tuple(p.__name__ for p in PASSES if p.__name__ not in ALWAYS)


def run_passes(gm: fx.GraphModule, options: Options, report: GraphReport) -> None:
    """Run every enabled pass over gm, in place, and record what each did in ``report``."""
    dump(gm, options, report, 0, "capture")
    gm.meta[INNER] = options.inner if options.enabled(lower_few_rows.__name__) else None
    at = PASSES.index(LOWERING)
    for number, each in enumerate((*PASSES[:at], *options.extra_passes, *PASSES[at:]), 1):
        if not options.enabled(each.__name__):
            continue
        ops = len(gm.graph.nodes)
        start = time.perf_counter()
        result = each(gm)
        if not isinstance(result, PassReport):
            raise ValueError(
                f"a pass must return a PassReport, {each.__name__} returned {result!r}"
            )
        gm.graph.eliminate_dead_code()
        result.name = each.__name__
        result.ms = 1e3 * (time.perf_counter() - start)
        validate(gm, each.__name__)
        report.passes.append(result)
        counters["kvtailor"][each.__name__] += result.rewrites
        log.info(
            "%s: pass %d %s: %d rewrites, %d skipped, ops %d -> %d, %.1f ms",
            report.name,
            number,
            each.__name__,
            result.rewrites,
            len(result.skipped),
            ops,
            len(gm.graph.nodes),
            result.ms,
        )
        for skip in result.skipped:
            log.debug("%s: %s: %s [%s] %s", report.name, result.name, skip.at, skip.code, skip.why)
        dump(gm, options, report, number, each.__name__)
    del gm.meta[INNER]
    report.attention = list(gm.meta.get(SITES, []))
    gm.recompile()


def validate(gm: fx.GraphModule, after: str) -> None:
    """The invariants every pass keeps: a sound graph, and a value on every node."""
    gm.graph.lint()
    for node in gm.graph.nodes:
        assert node.op == "output" or "val" in node.meta, f"after {after}: {node} has no value"


def dump(gm: fx.GraphModule, options: Options, report: GraphReport, number: int, name: str) -> None:
    """The graph into dump_dir and, when tracing is on, as an artifact for tlparse."""
    if options.dump_dir is not None:
        folder = Path(options.dump_dir) / report.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02d}_{name}.txt").write_text(show(gm) + "\n")
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"kvtailor_{number:02d}_{name}", "encoding": "string"},
        payload_fn=lambda: show(gm),
    )
