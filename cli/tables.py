"""Reports as text for a terminal: what ``kvtailor inspect`` and ``kvtailor demo`` print."""

from __future__ import annotations

import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtailor.passes.report import (
    AttentionSite,
    GraphReport,
    PackedGroup,
    PassReport,
    PieceReport,
    RowSpace,
)
from kvtailor.passes.text import graph_text

if TYPE_CHECKING:
    from kvtailor.cli.against import Change
    from kvtailor.cli.bisect import Bisection
    from kvtailor.cli.inspection import Inspection

# Wide enough for a row per site where no terminal says otherwise.
PIPE_WIDTH = 160


def make_console(stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else max(PIPE_WIDTH, shutil.get_terminal_size().columns)
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def inspection_view(result: Inspection, graph: str | None = None) -> RenderableType:
    """Everything ``kvtailor inspect`` found; ``graph`` (before, after, diff) adds the graphs."""
    about = ", ".join(
        f"{name} {value}" for name, value in result.about.items() if value not in (None, 0)
    )
    parts: list[RenderableType] = [Text(about)]
    for each in result.breaks:
        times = f" ({each['count']} times)" if each["count"] > 1 else ""
        parts.append(
            Text(f"graph break at {each['at'] or 'a frame'}: {each['reason']}{times}", "yellow")
        )
    if result.recompile_limit is not None:
        limit = result.recompile_limit
        parts.append(
            Text(
                f"{count(len(result.recorder.graphs), 'graph')} compiled, then the limit was hit: "
                f"torch._dynamo.config.{limit['name']} is {limit['limit']}, "
                "so later calls ran without kvtailor",
                "yellow",
            )
        )
    for report in result.recorder.graphs:
        parts.append(graph_view(report))
        if graph is not None:
            parts.append(Text("\n" + graph_text(report, graph)))
    return Group(*parts)


def changes_view(changes: Sequence[Change], a: str, b: str) -> RenderableType:
    """What ``kvtailor inspect A --against B`` found."""
    if not changes:
        return Text(f"nothing differs between {a} and {b}")
    table = _table("graph", "at", "what", "A", "B")
    for change in changes:
        values = ["" if v is None else str(v) for v in (change.a, change.b)]
        table.add_row(change.graph, change.at, change.what, *values)
    return Group(Text(f"A: {a}\nB: {b}\n"), table)


def bisection_view(found: Bisection) -> RenderableType:
    """What ``kvtailor bisect`` found: the error after each pass, and who is to blame."""
    table = _table("passes up to", "error")
    for step in found.steps:
        wrong = not step.error <= found.bound
        table.add_row(step.upto, Text(f"{step.error:.1e}", "red" if wrong else ""))
    if found.blamed is None:
        verdict = f"no pass breaks the bound of {found.bound:g}"
    elif found.steps[-1].error <= found.bound:
        verdict = f"{found.blamed} fails and is undone"
    else:
        verdict = f"{found.blamed} breaks the bound of {found.bound:g}"
    return Group(table, Text(verdict, "bold"))


def doctor_view(facts: dict[str, Any]) -> RenderableType:
    """What ``kvtailor doctor`` found: a version table and an on/off table."""
    versions = _table("found", "")
    for name, value in facts["versions"].items():
        versions.add_row(name, value)
    switches = _table("part", "state", "why")
    for each in facts["parts"]:
        switches.add_row(each["name"], "on" if each["on"] else "off", each["why"])
    return Group(versions, Text(), switches)


def graph_view(report: GraphReport) -> RenderableType:
    """One graph: a headline, a row per attention site, pass, packed group and piece."""
    parts: list[RenderableType] = [headline(report)]
    if report.attention:
        parts.append(attention_table(report.attention))
    if report.passes:
        parts.append(pass_table(report.passes))
    if report.packed:
        parts.append(packed_table(report.packed))
    if report.row_spaces:
        parts.append(row_space_table(report.row_spaces))
    if report.pieces:
        parts.append(piece_table(report.pieces))
    parts += [Text(each, "yellow") for each in report.without]
    if report.whole:
        parts.append(Text(f"compiled as a whole: {report.whole}", "yellow"))
    return Group(*parts)


def headline(report: GraphReport) -> Text:
    text = Text.assemble("\n", (report.name, "bold"))
    if not report.captured:
        return text.append(f"  left untouched: {report.reason}", "yellow")
    text.append(f"  {count(len(report.attention), 'attention site')}")
    text.append(f", {flop_change(report.flops_before, report.flops_after)}")
    if report.max_error is not None:
        text.append(f", max error {report.max_error:.1e} against eager")
    return text.append(f", capture {report.capture_ms / 1e3:.1f} s", "dim")


def attention_table(sites: Sequence[AttentionSite]) -> Table:
    """A row per site; columns that no site fills are left out, its own keys are not named."""
    columns = {
        "attention": [site.site or site.node for site in sites],
        "kind": [kind(site) for site in sites],
        "proved": [site.proof or "" for site in sites],
        "keys from": [site.kv_owner or "" if site.kv_owner != site.site else "" for site in sites],
        "queries": [str(site.query_rows) for site in sites],
        "keys": [str(site.key_rows) for site in sites],
        "lowering": [site.lowering or "" for site in sites],
        "why not": [why_not(site) for site in sites],
    }
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    table = _table(*columns)
    for row in zip(*columns.values()):
        table.add_row(*row)
    return table


def why_not(site: AttentionSite) -> str:
    reason = site.reason or ""
    if site.residual and site.residual not in reason:
        return "; ".join(filter(None, (f"residual: {site.residual}", reason)))
    return reason


def kind(site: AttentionSite) -> str:
    """The kind with its size and what goes with it: ``sliding 8 + padding``."""
    size = site.window if site.window is not None else site.chunk
    name = f"{site.kind} {size}" if size is not None else site.kind
    extras = [n for n in ("padding", "segments", "sinks") if getattr(site, n)]
    if site.softcap is not None:
        extras.append(f"softcap {site.softcap:g}")
    return " + ".join([name, *extras])


def pass_table(passes: Iterable[PassReport]) -> Table:
    table = _table("pass", "rewrites", "ms", "skipped")
    for each in passes:
        seen: dict[tuple[str, str], list[str]] = {}
        for skip in each.skipped:
            seen.setdefault((skip.code, skip.why), []).append(skip.at)
        lines = [f"{_places(places)}: {why} [{code}]" for (code, why), places in seen.items()]
        if each.error is not None:
            lines.append(f"failed and undone: {each.error}")
        table.add_row(each.name, str(each.rewrites), f"{each.ms:.1f}", "\n".join(lines))
    return table


def _places(places: list[str]) -> str:
    return places[0] + (f" and {len(places) - 1} more" if len(places) > 1 else "")


def packed_table(groups: Iterable[PackedGroup]) -> Table:
    table = _table("projections of", "parts", "in, out", "rows", "form", "by rows")
    for row in packed_rows(groups):
        table.add_row(*row)
    return table


def packed_rows(groups: Iterable[PackedGroup]) -> list[tuple[str, ...]]:
    """A row per kind of group, as ``packed_table`` has them: those of equal layers share one."""
    kinds: dict[tuple[str, str, str, str, str, str], int] = {}
    for each in groups:
        widths = ", ".join(
            f"{n} x {width}" if n > 1 else str(width) for width, n in Counter(each.widths).items()
        )
        row = (
            _every_layer(each.source),
            _parts(each.parts),
            f"{each.inputs} -> {widths}",
            str(each.rows),
            each.form,
            each.by_rows if each.by_rows != each.form else "",
        )
        kinds[row] = kinds.get(row, 0) + 1
    return [
        (*row[:-2], row[-2] + (f" ({times} times)" if times > 1 else ""), row[-1])
        for row, times in kinds.items()
    ]


def _parts(paths: list[str]) -> str:
    """``layers.*.self_attn: q_proj, k_proj, v_proj``."""
    owners: dict[str, dict[str, None]] = {}
    for path in map(_every_layer, paths):
        owner, _, name = path.rpartition(".")
        owners.setdefault(owner, {})[name] = None
    return "; ".join(f"{owner}: {', '.join(names)}" for owner, names in owners.items())


def _every_layer(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def row_space_table(spaces: Iterable[RowSpace]) -> Table:
    table = _table("row space", "rows", "ops", "GFLOPs")
    for space in spaces:
        table.add_row(space.name, str(space.rows), str(space.ops), f"{space.flops / 1e9:.3g}")
    return table


def piece_table(pieces: Sequence[PieceReport]) -> Table:
    """A row per compiled artefact, with the pieces that share it."""
    shares: dict[str, list[PieceReport]] = {}
    for piece in pieces:
        shares.setdefault(piece.shared_with or piece.name, []).append(piece)
    reasons = any(p.reason for p in pieces)
    graphs = any(p.capture_sizes or p.no_graph for p in pieces)
    more = ["CUDA graphs"] * graphs + ["why not"] * reasons
    table = _table("piece", "times", "rows", "ops", "GFLOPs", "compile s", *more)
    for first, *others in shares.values():
        name = first.name + (f" … {others[-1].name}" if others else "")
        cells = [name, str(1 + len(others)), ", ".join(map(str, first.rows)), str(first.ops)]
        cells += [f"{first.flops / 1e9:.3g}", f"{first.compile_ms / 1e3:.1f}"]
        cells += [_sizes(first.capture_sizes) or f"none: {first.no_graph}"] * graphs
        table.add_row(*cells, *[first.reason or ""] * reasons)
    return table


_NUMERIC = "rewrites", "ms", "rows", "ops", "GFLOPs", "queries", "keys", "times", "compile s"


def _sizes(sizes: list[int] | None) -> str:
    """1 2 4 … 512 (51 sizes)"""
    if sizes is None or len(sizes) <= 6:
        return " ".join(map(str, sizes or ()))
    return f"{' '.join(map(str, sizes[:3]))} … {sizes[-1]} ({len(sizes)} sizes)"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold cyan")
    for name in columns:
        numeric = name in _NUMERIC
        whole = numeric or name in ("attention", "pass")
        table.add_column(
            name, justify="right" if numeric else "left", overflow="fold", no_wrap=whole
        )
    return table


def figures(*columns: str) -> Table:
    """A name, then figures."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold cyan")
    for name in columns:
        table.add_column(name, justify="right" if name else "left")
    return table


def flop_change(before: int, after: int) -> str:
    if not before:
        return "0 FLOPs"
    saved = 100 * (before - after) / before
    change = f" (-{saved:.0f} %)" if saved >= 0.5 else ""
    return f"{si(before)}FLOPs -> {si(after)}FLOPs{change}"


def si(value: float) -> str:
    """A number with its decimal prefix: 4.3 G."""
    for prefix in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.3g} {prefix}"
        value /= 1000
    return f"{value:.3g} T"


def count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
