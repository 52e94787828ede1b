"""Which part of a rewritten graph runs on which rows: the head on all, the tail on the fewest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from kvtailor.compiler.piece import Piece
from kvtailor.passes.effects import computes
from kvtailor.passes.flops import node_flops
from kvtailor.passes.graph import ROWS
from kvtailor.passes.report import PieceReport, RowSpace


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


def describe(pieces: Sequence[Piece], count_flops: bool) -> list[PieceReport]:
    """A report for each piece; counting FLOPs takes a moment, so only where someone looks."""
    firsts: dict[str, PieceReport] = {}
    reports = []
    for piece in pieces:
        first = firsts.get(piece.key)
        if first is not None:
            reports.append(replace(first, name=piece.name, shared_with=first.name))
            continue
        nodes = [n for n in piece.graph.nodes if computes(n)]
        flops = [node_flops(n) if count_flops else 0 for n in nodes]
        # Axes that are no token axis shrink too; where there are products, their rows count.
        heavy = [n.meta[ROWS] for n, f in zip(nodes, flops) if f]
        rows = list(dict.fromkeys(heavy or [n.meta[ROWS] for n in nodes]))
        rows.sort(key=lambda r: r != "all")
        firsts[piece.key] = PieceReport(piece.name, rows, len(nodes), sum(flops))
        reports.append(firsts[piece.key])
    return reports
