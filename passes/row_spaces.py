"""Which part of a rewritten graph runs on which rows: the head on all, the tail on the fewest."""

from __future__ import annotations

from torch import fx

from kvtailor.passes.flops import node_flops
from kvtailor.passes.graph import ROWS
from kvtailor.passes.report import RowSpace


def row_spaces(gm: fx.GraphModule) -> list[RowSpace]:
    """Ops and FLOPs by row count, in the order of the graph; one "head" when nothing narrows."""
    found: dict[int | str, RowSpace] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        rows = node.meta.get(ROWS, "all")
        space = found.setdefault(rows, RowSpace(f"rows {rows}", rows, 0, 0))
        space.ops += 1
        space.flops += node_flops(node)
    # Axes that are no token axis shrink too (one entry of a stack); nothing is computed there.
    spaces = [s for s in found.values() if s.flops or s.rows == "all"]
    spaces.sort(key=lambda s: s.rows != "all")
    if spaces and spaces[0].rows == "all":
        spaces[0].name = "head"
    if len(spaces) > 1:
        spaces[-1].name = "tail"
    return spaces
