"""Text of graphs: before, after, and their difference."""

from __future__ import annotations

import difflib
import re

from kvtailor.passes.report import GraphReport


def graph_text(report: GraphReport, which: str) -> str:
    """The captured graph, the rewritten one, or their difference."""
    if which == "before":
        return report.graph_before
    if which == "after":
        return report.graph_after
    return graph_diff(report.graph_before, report.graph_after)


def graph_diff(before: str, after: str) -> str:
    """Lines with - and +; values are renumbered between the two, so numbers alone don't differ."""
    old, new = before.splitlines(), after.splitlines()
    matcher = difflib.SequenceMatcher(
        a=[anonymous(line) for line in old], b=[anonymous(line) for line in new], autojunk=False
    )
    lines: list[str] = []
    for group in matcher.get_grouped_opcodes(n=2):
        lines.append("...")
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                lines += [f"  {line}" for line in new[j1:j2]]
            else:
                lines += [f"- {line}" for line in old[i1:i2]]
                lines += [f"+ {line}" for line in new[j1:j2]]
    return "\n".join(lines)


def anonymous(line: str) -> str:
    return re.sub(r"%\d+", "%", line)
