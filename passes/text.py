"""Text of graphs: before, after, and their difference."""

from __future__ import annotations

import difflib
import re
from typing import Any

from torch import fx

from kvtailor.passes.graph import END, flat, is_tensor, op_text
from kvtailor.passes.report import GraphReport


def show(gm: fx.GraphModule) -> str:
    """The graph as short text with renumbered values; stable across torch versions."""
    names: dict[fx.Node, str] = {}
    lines = []

    def text(arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return names[arg]
        if isinstance(arg, (list, tuple)):
            return "[" + ", ".join(text(a) for a in arg) + "]"
        return "end" if arg == END else str(arg)

    for node in gm.graph.nodes:
        if node.op == "output":
            lines.append("return " + ", ".join(text(a) for a in flat(node.args[0])))
            continue
        names[node] = f"%{len(names)}"
        dims = ""
        if is_tensor(node):
            v = node.meta["val"]
            dims = f": {str(v.dtype).removeprefix('torch.')}[{', '.join(str(s) for s in v.shape)}]"
        if node.op == "placeholder":
            lines.append(f"{names[node]}{dims} = input")
            continue
        args = [text(a) for a in node.args] + [f"{k}={text(v)}" for k, v in node.kwargs.items()]
        lines.append(f"{names[node]}{dims} = {op_text(node)}({', '.join(args)})")
    return "\n".join(lines)


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
