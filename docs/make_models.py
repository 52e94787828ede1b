"""Write docs/models.md from docs/models.json, and that from runs, each in a process of its own.

python docs/make_models.py --all            what has no result yet; --again: everything
python docs/make_models.py --only llama bert
python docs/make_models.py --page           the page alone

A result is written as soon as it is there: what was interrupted goes on with --all.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvtailor.benchmarks.architectures import EQUAL, GROUPS, NAMES, is_right, run

PAGE = Path(__file__).with_name("models.md")
RESULTS = PAGE.with_suffix(".json")
HEAD = """# Models

Made by `python docs/make_models.py` from runs: {count} architectures of transformers
{transformers}, with torch {torch}, small and with random weights, as `kvtailor inspect hf:NAME`
builds them; fp32 on a CPU, `inner="eager"`, two rows, the first with padding where the model takes
a mask.

- **error**: of the compiled forward against eager, relative to the largest value of each
  output; 0e+00 is equal to the bit.
- **sites**: attentions recognised in the graphs of that forward. What was left alone, and why,
  stands below each table.
- **generate**: greedy tokens of the compiled model against eager's. **engine**: tokens of
  `kvtailor.Engine` against `generate()` for each prompt alone; a model of images or sound with text
  gets text alone. **pages**: `generate()` over a `PagedCache` against a `DynamicCache`. ✓ is
  equal, – a model that generates no text, a number the reason below the table.
"""


def load() -> dict[str, Any]:
    if not RESULTS.exists():
        return {"versions": {}, "models": {}}
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def store(results: dict[str, Any]) -> None:
    import torch
    import transformers

    results["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    models = results["models"]
    results["models"] = {name: models[name] for name in NAMES if name in models}
    lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in results["models"].items()]
    head = json.dumps(results["versions"])
    text = f'{{"versions": {head}, "models": {{\n' + ",\n".join(lines) + "\n}}\n"
    aside = RESULTS.with_suffix(".new")
    aside.write_text(text)
    aside.replace(RESULTS)


def run_all(names: list[str], jobs: int, limit: float) -> None:
    results = load()
    with ThreadPoolExecutor(jobs) as pool:
        # In this order, so that one thread writes.
        for name, row in zip(names, pool.map(lambda n: run(n, limit), names)):
            results["models"][name] = row
            store(results)
            print(name, "right" if is_right(row) else json.dumps(row), flush=True)


class _Notes:
    """Numbered reasons below a table; what is the same for several models has one number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> str:
        return f"({self.numbers.setdefault(text, len(self.numbers) + 1)})"

    def lines(self) -> list[str]:
        return [f"{number}. {_plain(text)}" for text, number in self.numbers.items()]


def _plain(text: str) -> str:
    """As Markdown shows it: no markup in it."""
    for mark in "\\`*_<|":
        text = text.replace(mark, "\\" + mark)
    return text


def line(name: str, row: dict[str, Any], note: _Notes) -> str:
    if "failed" in row:
        return f"| {name} | | | {note(row['failed'])} | | | |"

    def answer(text: str | None) -> str:
        return "–" if text is None else "✓" if text == EQUAL else note(text)

    left = " ".join(f"{n} × {note(why)}" for why, n in row["left"].items())
    sites = f"{row['sites']}, left: {left}" if left else str(row["sites"])
    answers = " | ".join(answer(row[key]) for key in ("generate", "engine", "paged"))
    return f"| {name} | {', '.join(_inputs(row))} | {row['error']:.0e} | {sites} | {answers} |"


def _inputs(row: dict[str, Any]) -> list[str]:
    words = {
        "input_ids": "text",
        "pixel_values": "image",
        "input_values": "sound",
        "input_features": "sound",
        "attention_mask": "padding",
    }
    return [word for name, word in words.items() if name in row["inputs"]]


def page() -> str:
    results = load()
    models = results["models"]
    parts = [HEAD.format(count=len(models), **results["versions"])]
    for title, names in GROUPS.items():
        note = _Notes()
        rows = [line(name, models[name], note) for name in names.split() if name in models]
        parts += [f"## {title}\n\n| model | inputs | error | sites | generate | engine | pages |"]
        parts += ["|---|---|---:|---|---|---|---|", *rows, "", *note.lines(), ""]
    return "\n".join(parts).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every model without a right result")
    parser.add_argument("--again", action="store_true", help="with --all: those that have one, too")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", choices=NAMES)
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one model")
    parser.add_argument("--page", action="store_true", help="write the page alone (the default)")
    asked = parser.parse_args()
    known = load()["models"]
    names = asked.only
    if asked.all:
        names = [n for n in NAMES if asked.again or not is_right(known.get(n, {}))]
    if names and not asked.page:
        run_all(names, asked.jobs, asked.limit)
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
