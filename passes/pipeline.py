"""The pass order, and the runner that keeps the graph honest between passes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._logging import trace_structured

from kvtailor.config import Options
from kvtailor.files import write_named
from kvtailor.passes.effects import flat, root_of
from kvtailor.passes.failures import CONTROL_FLOW, Snapshot, one_line, only_describing
from kvtailor.passes.fuse_gate_up import fuse_gate_up
from kvtailor.passes.fuse_qcrosskv import fuse_qcrosskv
from kvtailor.passes.graph import SITES, output_node
from kvtailor.passes.lower_dense_attention import lower_dense_attention
from kvtailor.passes.lower_few_rows import lower_few_rows
from kvtailor.passes.lower_local_attention import lower_local_attention
from kvtailor.passes.lower_paged_attention import lower_paged_attention
from kvtailor.passes.narrow_rows import narrow_rows
from kvtailor.passes.normalise import normalise
from kvtailor.passes.opsets import STAGES, unlawful
from kvtailor.passes.packing import weights_of
from kvtailor.passes.prove_masks import prove_masks
from kvtailor.passes.recognise_attention import recognise_attention
from kvtailor.passes.report import GraphReport, PassReport
from kvtailor.passes.store_in_place import store_in_place
from kvtailor.passes.text import show

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

# These cannot be switched off: later passes read one spelling of everything, and sites left as
# attend would run the oracle.
ALWAYS = ("normalise", "lower_dense_attention")
PASS_NAMES = tuple(p.__name__ for p in PASSES if p.__name__ not in ALWAYS)


def bound(
    gm: fx.GraphModule, options: Options, example_inputs: Sequence[Any]
) -> Iterator[tuple[str, Pass]]:
    """Every pass in order, the user's own among them, with the options it takes; and its name."""
    few_rows = options.inner == "inductor" and options.enabled(lower_few_rows.__name__)
    weights = weights_of(gm, example_inputs, options.pack, few_rows)
    takes: dict[str, dict[str, Any]] = {
        fuse_qcrosskv.__name__: {"weights": weights},
        fuse_gate_up.__name__: {"weights": weights},
        lower_few_rows.__name__: {"inner": options.inner},
    }
    at = PASSES.index(LOWERING)
    for each in PASSES[:at]:
        yield each.__name__, partial(each, **takes.get(each.__name__, {}))
    for each in options.extra_passes:
        yield getattr(each, "__name__", type(each).__name__), each
    for each in PASSES[at:]:
        yield each.__name__, partial(each, **takes.get(each.__name__, {}))


def run_passes(
    gm: fx.GraphModule, options: Options, report: GraphReport, example_inputs: Sequence[Any] = ()
) -> None:
    """Run every enabled pass over gm, in place, and record what each did in ``report``.

    example_inputs: what gm was captured with; without it, no weights are packed. One that raises,
    or leaves a graph that is none, is undone; its report says so.
    """
    dump(gm, options, report, 0, "capture")
    stage = "captured"
    for number, (name, each) in enumerate(bound(gm, options, example_inputs), 1):
        if not options.enabled(name):
            continue
        ops = len(gm.graph.nodes)
        start = time.perf_counter()
        reached = STAGES.get(name, stage)
        result = _run_or_undo(each, gm, reached)
        result.name = name
        result.ms = 1e3 * (time.perf_counter() - start)
        report.passes.append(result)
        report.packed += result.packed
        counters["kvtailor"][name] += result.rewrites
        if result.error is None:
            stage = reached
        else:
            counters["kvtailor"]["failed_passes"] += 1
            log.warning("%s: pass %s failed and is undone: %s", report.name, name, result.error)
        log.info(
            "%s: pass %d %s: %d rewrites, %d skipped, ops %d -> %d, %.1f ms",
            report.name,
            number,
            name,
            result.rewrites,
            len(result.skipped),
            ops,
            len(gm.graph.nodes),
            result.ms,
        )
        for skip in result.skipped:
            log.debug("%s: %s: %s [%s] %s", report.name, result.name, skip.at, skip.code, skip.why)
        dump(gm, options, report, number, name)
    report.attention = list(gm.meta.get(SITES, []))
    gm.recompile()


def _run_or_undo(each: Pass, gm: fx.GraphModule, stage: str) -> PassReport:
    """What the pass reports; where it fails, the error, and gm as it was before."""
    before, promised = Snapshot(gm), interface(gm)
    try:
        result = each(gm)
        if not isinstance(result, PassReport):
            raise TypeError(f"a pass must return a PassReport, got {result!r}")
        gm.graph.eliminate_dead_code()
        validate(gm, promised, stage)
    except CONTROL_FLOW:
        raise
    except Exception as error:
        log.debug("the pass failed", exc_info=True)
        before.restore()
        return PassReport(error=one_line(error))
    return result


Interface = tuple[list[str], list[Any]]


def interface(gm: fx.GraphModule) -> Interface:
    """What callers count on: the inputs, by name; of each result what it is, and whose memory."""
    inputs = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    results = list(flat(output_node(gm).args[0]))
    roots = [root_of(x) if isinstance(x, fx.Node) else None for x in results]
    outside = [r.name if r and r.op in ("placeholder", "get_attr") else "" for r in roots]
    shared = [(roots.index(r), name) for r, name in zip(roots, outside)]
    return inputs, [(_kind(x), *whose) for x, whose in zip(results, shared)]


def _kind(result: Any) -> Any:
    """dtype and shape of a tensor; a symbolic size may be written in several ways."""
    value = result.meta.get("val") if isinstance(result, fx.Node) else result
    if not isinstance(value, Tensor):
        return None
    return value.dtype, [n if isinstance(n, int) else "symbolic" for n in value.shape]


def validate(gm: fx.GraphModule, promised: Interface, stage: str = "captured") -> None:
    """The invariants every pass keeps: a sound graph, a value on every node, the interface.

    stage: what may stand in the graph, see opsets.py. Inputs may be added at the end. Raises
    RuntimeError, or what ``lint`` raises.
    """
    gm.graph.lint()
    for node in gm.graph.nodes:
        if node.op != "output" and "val" not in node.meta:
            raise RuntimeError(f"{node} has no value")
        why = unlawful(node, stage)
        if why is not None:
            raise RuntimeError(f"{node}: {why}")
    inputs, results = interface(gm)
    if inputs[: len(promised[0])] != promised[0]:
        raise RuntimeError("the graph has other inputs than before")
    if results != promised[1]:
        raise RuntimeError("the graph has other results than before")


def dump(gm: fx.GraphModule, options: Options, report: GraphReport, number: int, name: str) -> None:
    """The graph into dump_dir and, when tracing is on, as an artifact for tlparse."""
    if options.dump_dir is not None:
        with only_describing("a dumped graph"):
            folder = Path(options.dump_dir) / report.name
            folder.mkdir(parents=True, exist_ok=True)
            write_named(folder / f"{number:02d}_{name}.txt", show(gm) + "\n")
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"kvtailor_{number:02d}_{name}", "encoding": "string"},
        payload_fn=lambda: show(gm),
    )
