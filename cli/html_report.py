"""``kvtailor inspect --html``: one self-contained page that shows what became of a model.

The page is made of the reports alone; nothing is loaded from anywhere when it is opened.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvtailor
from kvtailor.cli.tables import count, flop_change, kind, packed_rows, si, why_not
from kvtailor.files import write_named
from kvtailor.kernels.flags import Flags
from kvtailor.passes.flops import layer_of
from kvtailor.passes.report import AttentionSite, GraphReport
from kvtailor.passes.text import anonymous

if TYPE_CHECKING:
    from kvtailor.cli.inspection import Inspection

TEMPLATE = Path(__file__).with_name("templates") / "report.html.j2"

# Tiles along each side of a mask's picture, and points looked at along each side of a tile.
TILES, POINTS = 16, 4


def write_html(result: Inspection, path: str | Path) -> None:
    """The page, as ``write_named`` writes it. Raises OSError."""
    write_named(path, html(result))


def html(result: Inspection) -> str:
    """The page as text."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["si"] = si
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    about = {k: v for k, v in result.about.items() if v not in (None, 0) and k != "model"}
    return template.render(
        model=result.about["model"],
        about=about,
        breaks=result.breaks,
        limit=result.recompile_limit,
        graphs=[_graph(i, report) for i, report in enumerate(result.recorder.graphs)],
        failure=result.failure(),
        version=kvtailor.__version__,
    )


@dataclass
class LayerRow:
    """One layer: its attention sites, its FLOPs, and the FLOPs as shares of the largest layer's."""

    name: str
    sites: list[AttentionSite]
    before: int
    after: int
    before_share: float = 0.0
    after_share: float = 0.0
    rows: str = "all rows"


@dataclass
class Picture:
    """A mask as tiles: tiles[row][column] is "on", "part", "off" or "unasked"."""

    title: str
    tiles: list[list[str]]
    proof: str
    sites: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Line:
    """One line of a graph; ``other`` is the id of the same call on the other side."""

    id: str
    text: str
    other: str | None = None
    mark: str = ""


def _graph(number: int, report: GraphReport) -> dict[str, Any]:
    before, after = linked_graphs(f"g{number}", report.graph_before, report.graph_after)
    left = [(site.site or site.node, why) for site in report.attention if (why := why_not(site))]
    return {
        "id": f"g{number}",
        "report": report,
        "flops": flop_change(report.flops_before, report.flops_after),
        "sites": count(len(report.attention), "attention site"),
        "layers": layer_rows(report),
        "pictures": pictures(report.attention),
        "packed": packed_rows(report.packed),
        "left": left,
        "before": before,
        "after": after,
        "kind": kind,
    }


def layer_rows(report: GraphReport) -> list[LayerRow]:
    """Every layer in the order of the graph; what stands in none comes last."""
    sites: dict[str, list[AttentionSite]] = {}
    for site in report.attention:
        sites.setdefault(layer_of(site.site) or site.site, []).append(site)
    work = {each.layer: each for each in report.layers}
    rows = []
    for name in sorted({**work, **sites}, key=lambda n: n == ""):
        flops = work.get(name)
        row = LayerRow(
            name or "outside the layers",
            sites.get(name, []),
            flops.before if flops else 0,
            flops.after if flops else 0,
        )
        row.rows = _rows(row.sites)
        rows.append(row)
    largest = max((max(r.before, r.after) for r in rows), default=0) or 1
    for row in rows:
        row.before_share, row.after_share = row.before / largest, row.after / largest
    return rows


def _rows(sites: Sequence[AttentionSite]) -> str:
    parts = []
    for site in sites:
        if site.query_rows == "all":
            parts.append(f"{site.queries} rows" if site.queries else "all rows")
        else:
            parts.append(f"{site.queries} → {site.query_rows} rows")
    return ", ".join(dict.fromkeys(parts))


def pictures(sites: Iterable[AttentionSite]) -> list[Picture]:
    """One picture per distinct mask, with the sites that have it."""
    found: dict[tuple[Any, ...], Picture] = {}
    for site in sites:
        if not site.queries or not site.keys:
            continue
        key = (
            kind(site), site.queries, site.keys, site.offset, site.query_rows, site.proof,
            site.residual, site.lowering,
        )  # fmt: skip
        if key not in found:
            found[key] = _picture(site)
        found[key].sites.append(site.site or site.node)
    return list(found.values())


def _picture(site: AttentionSite) -> Picture:
    notes = []
    offset = site.offset
    if offset is None:
        # The last rows are the usual case, and the picture says that it is one.
        offset = max(0, site.keys - site.queries)
        if site.causal or site.window or site.chunk:
            notes.append("positions are given at run time: drawn for the last rows")
    if site.chunk and "origin" in (site.proof or ""):
        notes.append("the grid of chunks shifts per row: drawn for origin 0")
    if site.padding:
        notes.append("padding hides more keys")
    if site.segments:
        notes.append("packed segments hide more keys")
    if site.residual:
        notes.append(f"not proved: {site.residual}")
    asked = site.queries
    if isinstance(site.query_rows, int):
        asked = min(site.query_rows, site.queries)
        notes.append(f"{asked} of {site.queries} rows are asked for")
    elif site.query_rows != "all":
        notes.append(f"{site.query_rows} rows are asked for")
    if site.lowering:
        notes.append(f"lowering: {site.lowering}")
    flags = Flags(site.causal, site.window, site.chunk)
    rows, columns = min(TILES, site.queries), min(TILES, site.keys)
    tiles = []
    for i in range(rows):
        q = _points(i, rows, site.queries)
        if q[-1] < site.queries - asked:
            tiles.append(columns * ["unasked"])
            continue
        line = []
        for j in range(columns):
            k = _points(j, columns, site.keys)
            seen = [flags.visible(p + offset, key, site.keys) for p in q for key in k]
            line.append("on" if all(seen) else "part" if any(seen) else "off")
        tiles.append(line)
    title = f"{kind(site)}, {site.queries} x {site.keys}"
    return Picture(title, tiles, site.proof or "not proved", [], notes)


def _points(tile: int, tiles: int, size: int) -> list[int]:
    """Indices to look at in a tile: its first, its last, and some between."""
    first, end = tile * size // tiles, (tile + 1) * size // tiles
    steps = min(POINTS, end - first)
    if steps == 1:
        return [first]
    return [first + i * (end - 1 - first) // (steps - 1) for i in range(steps)]


def linked_graphs(prefix: str, before: str, after: str) -> tuple[list[Line], list[Line]]:
    """Both graphs by line; calls that are equal but for the numbering are linked."""
    sides = [
        [Line(f"{prefix}{side}{i}", text) for i, text in enumerate(graph.splitlines())]
        for side, graph in (("b", before), ("a", after))
    ]
    old, new = sides
    matcher = difflib.SequenceMatcher(
        a=[anonymous(line.text) for line in old],
        b=[anonymous(line.text) for line in new],
        autojunk=False,
    )
    for line in old:
        line.mark = "gone"
    for line in new:
        line.mark = "new"
    for i, j, size in matcher.get_matching_blocks():
        for a, b in zip(old[i : i + size], new[j : j + size]):
            a.other, b.other = b.id, a.id
            a.mark = b.mark = ""
    return old, new
