"""The tables of results in README and docs, their plot, and the README's picture.

    python benchmarks/report.py            all of them
    python benchmarks/report.py --picture  the picture alone, which no measurement is part of

A table is what lies between two markers in a page, and comes from ``benchmarks/results``: the
scenarios of ``kvtailor bench --out benchmarks/results/alternatives.json``, and every group of the
other files that times kvtailor beside Inductor. A provisional record is refused. The picture is
one model's work by layer, before and after, as the backend reports it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtailor.benchmarks.harness import against_best, duration

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "results.md"
# Beginnings of the titles of the README's rows: each system once, on the work it is made for.
SHOWN = (
    "Gemma3n-shaped",
    "Gemma-3-270M, real weights, window",
    "Llama4-shaped, 4 layers",
    "BART-shaped",
    "Gemma-3-270M, real weights: 8 prompts",
    "BERT-shaped",
)
PICTURE = ROOT / "docs" / "layers.svg"
PLOT = RESULTS / "results.svg"
MARKERS = ("<!-- results: python benchmarks/report.py -->", "<!-- end of results -->")

OURS = "kvtailor"
COLUMNS = ("eager", "inductor")
COLOURS = {
    "eager": "#9a9a9a",
    "inductor": "#d9822b",
    "kvtailor": "#1f6feb",
    "flex_attention": "#8250df",
    "openvino": "#2da44e",
    "continuous_batching": "#bf3989",
    "ctranslate2": "#b08800",
    "vllm": "#cf222e",
}
# A path from the root, of which a page says nothing.
PATH = re.compile(r"(?<![\w.])(/[\w.+-]+){2,}/?")


@dataclass
class Entry:
    """One scenario. ms: alternative -> median in milliseconds; absent: alternative -> why not.

    first, warm: milliseconds of the first result, in a process with empty caches and in the next
    one; peak: MiB a call needs. They too by alternative, where they were measured.
    """

    title: str
    ms: dict[str, float]
    machine: str
    absent: dict[str, str] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    warm: dict[str, float] = field(default_factory=dict)
    peak: dict[str, float] = field(default_factory=dict)

    @property
    def rivals(self) -> dict[str, float]:
        return {name: ms for name, ms in self.ms.items() if name != OURS}

    def verdict(self) -> str:
        best, ratio = against_best(self.ms, OURS)
        if ratio == 1:
            return f"level with {best}"
        if ratio < 1:
            return f"**{best}**, {1 / ratio:.2f}×"
        return f"kvtailor, {ratio:.2f}×"


def entries(folder: Path = RESULTS) -> list[Entry]:
    """What was measured, in the order of the files' names. Raises ValueError for a bad record."""
    found: list[Entry] = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        if record["provisional"] or record.get("quick"):
            raise ValueError(f"a record must be of a full run on an idle machine, got {path.name}")
        machine = machine_line(record)
        if "scenarios" in record:
            for each in record["scenarios"]:
                rows = each["rows"]
                ms = {r["alternative"]: 1e3 * r["median"] for r in rows if r["median"] is not None}
                absent = {r["alternative"]: r["why"] for r in rows if r["median"] is None}
                costs = [
                    {r["alternative"]: r[key] * by for r in rows if r.get(key) is not None}
                    for key, by in (("first", 1e3), ("warm", 1e3), ("peak", 2**-20))
                ]
                if OURS in ms:
                    found.append(Entry(f"{each['title']}, fp32", ms, machine, absent, *costs))
        else:
            for group in record["groups"]:
                ms = {name: case["median_ms"] for name, case in group["cases"].items()}
                if {OURS, "inductor"} <= set(ms):
                    found.append(Entry(group["name"], ms, machine))
    return found


def machine_line(record: dict[str, Any]) -> str:
    machine = record["machine"]
    versions = machine["versions"]
    what = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores, {machine['capability']}"
    shown = {name: versions[name] for name in ("torch", "transformers") if name in versions}
    for scenario in record.get("scenarios", ()):
        for row in scenario["rows"]:
            # Of its own environment, what the alternative itself needs beyond these.
            shown = row.get("versions", {}) | shown
    order = ["torch", "transformers", *sorted(shown.keys() - {"torch", "transformers", OURS})]
    names = ", ".join(f"{name} {shown[name]}" for name in order if name in shown)
    return f"{what}, {machine['threads']} threads, {names}"


def short_table(found: Sequence[Entry]) -> str:
    """Markdown: the rows of SHOWN, and the machines."""
    rows = [each for each in found if each.title.startswith(SHOWN)]
    return "\n".join([*rows_of(rows), "", *machines_of(rows)]).strip()


def table(found: Sequence[Entry]) -> str:
    """Markdown: a row per scenario, what compiling costs, what gave no figure, the machines."""
    lines = [*rows_of(found), "", *cost_table([each for each in found if each.first])]
    missing: dict[str, list[str]] = {}
    for each in found:
        for name, why in each.absent.items():
            missing.setdefault(f"{name}: {plain(why)}", []).append(each.title.split(",")[0])
    lines += [f"- No figure of {what} ({', '.join(at)})" for what, at in missing.items()]
    lines += ["", *machines_of(found)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def rows_of(found: Sequence[Entry]) -> list[str]:
    lines = ["| scenario | eager | Inductor | others | kvtailor | fastest |"]
    lines.append("|---|---:|---:|---:|---:|---|")
    for each in found:
        others = [f"{n} {time(ms)}" for n, ms in each.rivals.items() if n not in COLUMNS]
        cells = [each.title, *(time(each.ms.get(name)) for name in COLUMNS)]
        cells += [", ".join(others), time(each.ms[OURS]), each.verdict()]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def machines_of(found: Sequence[Entry]) -> list[str]:
    named = unique(each.machine for each in found)
    # A record that lists the alternatives' versions too says all that a shorter line says.
    machines = [m for m in named if not any(n != m and n.startswith(m) for n in named)]
    return [f"Medians of runs in turns, on {'; '.join(machines)}."] if found else []


def cost_table(found: Sequence[Entry]) -> list[str]:
    """What compiling costs, and the memory of a call: eager, Inductor and kvtailor."""
    if not found:
        return []
    names = ("eager", "inductor", OURS)
    lines = [
        "| eager / Inductor / kvtailor | first result | the same, warm | peak memory of a call |"
    ]
    lines.append("|---|---:|---:|---:|")
    for each in found:
        columns = [
            " / ".join(time(values.get(name)) or "–" for name in names) if values else ""
            for values in (each.first, each.warm)
        ]
        memory = [f"{each.peak[name]:,.0f}" if name in each.peak else "–" for name in names]
        lines.append(f"| {each.title} | {' | '.join(columns)} | {' / '.join(memory)} MiB |")
    return [*lines, ""]


def plain(text: str) -> str:
    """Of an error, what may stand in a page: no path, no markup."""
    return PATH.sub("…", text).replace("|", "/").replace("<", "‹").replace(">", "›")


def unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def time(ms: float | None) -> str:
    return duration(None if ms is None else ms / 1e3)


def placed(page: str, body: str) -> str:
    """The page with body between the markers. Raises ValueError where they are not there once."""
    start, end = MARKERS
    if page.count(start) != 1 or page.count(end) != 1:
        raise ValueError(f"the page must have each marker once: {start} {end}")
    before, rest = page.split(start)
    return f"{before}{start}\n\n{body}\n\n{end}{rest.split(end)[1]}"


def plot(found: Sequence[Entry], path: Path) -> None:
    """How many times as fast as Inductor (eager, where that was not run), a group per scenario."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "kvtailor"
    matplotlib.rcParams["svg.fonttype"] = "none"
    bars = sum(len(each.ms) for each in found) + len(found)
    figure = Figure(figsize=(9, 0.9 + 0.19 * bars), layout="constrained")
    axes = figure.subplots()
    at, ticks, seen = 0.0, [], set()
    for each in found:
        base = each.ms.get("inductor", each.ms.get("eager", each.ms[OURS]))
        top = at
        for name, ms in sorted(each.ms.items(), key=lambda item: list(COLOURS).index(item[0])):
            label = None if name in seen else name
            axes.barh(at, base / ms, color=COLOURS[name], label=label, height=0.9)
            axes.text(base / ms, at, f" {base / ms:.2f}", va="center", fontsize=7)
            seen.add(name)
            at += 1
        ticks.append(((top + at - 1) / 2, each.title.replace(": ", ":\n", 1)))
        at += 1
    axes.set_yticks([y for y, _ in ticks], [title for _, title in ticks], fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1, color="#555555", linewidth=0.8)
    axes.set_xlabel("times as fast as Inductor, or as eager where Inductor was not run")
    axes.margins(y=0.5 / at if at else 0)
    figure.legend(fontsize=8, loc="outside lower center", ncols=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, format="svg", metadata={"Date": None}, facecolor="white")


@dataclass
class Layer:
    """rows: of its attention, before and after; flops likewise, relative to the largest layer."""

    name: str
    kind: str
    rows: tuple[int, int]
    work: tuple[float, float]


def layers_of_a_model() -> list[Layer]:
    """Fifteen Gemma3n-shaped layers, five of which share keys; 1,024 tokens, logits of the last."""
    import torch

    from kvtailor.backend import recording
    from kvtailor.cli.models import gemma3n_shaped

    tokens = 1024
    model = gemma3n_shaped(15, 5)
    torch._dynamo.reset()
    run = torch.compile(model, backend="kvtailor", options={"inner": "eager"}, dynamic=False)
    with torch.no_grad(), recording() as recorder:
        run(torch.randint(2, 8192, (1, tokens)), use_cache=False, logits_to_keep=1)
    (graph,) = recorder.graphs
    work = {each.layer: each for each in graph.layers}
    most = max(work[site.site.rpartition(".")[0]].before for site in graph.attention)
    return [
        Layer(
            layer.removeprefix("model."),
            site.kind if site.window is None else f"{site.kind} {site.window}",
            (
                site.queries,
                site.queries if site.query_rows == "all" else int(site.query_rows),
            ),
            (work[layer].before / most, work[layer].after / most),
        )
        for site in graph.attention
        for layer in [site.site.rpartition(".")[0]]
    ]


STYLE = """text{font:12px system-ui,sans-serif;fill:#1f2328}.dim{fill:#59636e}
.before{fill:#d0d7de}.after{fill:#1f6feb}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#9198a1}
.before{fill:#3d444d}.after{fill:#4493f8}}"""


def picture(layers: Sequence[Layer]) -> str:
    """SVG: a row per layer, its work before in grey, and after in blue upon it."""
    step, top, left, wide = 19, 46, 190, 330
    total = tuple(sum(layer.work[i] for layer in layers) for i in (0, 1))
    height = top + step * len(layers) + 12
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 {height}" role="img">',
        f"<title>Work of {len(layers)} layers before and after kvtailor</title>",
        f"<style>{STYLE}</style>",
        '<text x="0" y="16">A prefill of 1,024 tokens that asks for the last token’s logits</text>',
        '<text x="0" y="34" class="dim">work of each layer before (grey) and after (blue): '
        f"{total[1] / total[0]:.0%} of it is left</text>",
        f'<text x="{left + wide + 12}" y="34" class="dim">rows of its attention</text>',
    ]
    for i, layer in enumerate(layers):
        y = top + step * i
        before, after = layer.rows
        rows = f"{before:,}" if before == after else f"{before:,} → {after:,}"
        lines += [
            f'<text x="0" y="{y + 12}">{layer.name}</text>',
            f'<text x="72" y="{y + 12}" class="dim">{layer.kind}</text>',
            *(
                f'<rect class="{name}" x="{left}" y="{y + inset}" rx="2" '
                f'width="{max(1.5, wide * share):.1f}" height="{14 - 2 * inset}"/>'
                for name, share, inset in zip(("before", "after"), layer.work, (0, 3))
            ),
            f'<text x="{left + wide + 12}" y="{y + 12}">{rows}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--picture", action="store_true")
    only_picture = parser.parse_args().picture
    try:
        PICTURE.write_text(picture(layers_of_a_model()))
        if not only_picture:
            found = entries()
            PAGE.write_text(placed(PAGE.read_text(), table(found)))
            README.write_text(placed(README.read_text(), short_table(found)))
            plot(found, PLOT)
    except ValueError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
