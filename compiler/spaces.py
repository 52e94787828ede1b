"""Which part of a rewritten graph runs on which rows: the head on all, the tail on the fewest."""

from __future__ import annotations

from collections.abc import Sequence

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
    firsts: dict[str, Piece] = {}
    counted: dict[str, tuple[int, list[int | str]]] = {}
    reports = []
    for piece in pieces:
        first = firsts.setdefault(piece.key, piece)
        nodes = [n for n in piece.graph.nodes if computes(n)]
        flops = 0
        heavy: list[int | str] = []
        if count_flops:
            if piece.key not in counted:
                each = [(node_flops(n), n.meta[ROWS]) for n in nodes]
                counted[piece.key] = sum(f for f, _ in each), [r for f, r in each if f]
            flops, heavy = counted[piece.key]
        # Axes that are no token axis shrink too; where there are products, their rows count.
        rows = list(dict.fromkeys(heavy or [n.meta[ROWS] for n in nodes]))
        rows.sort(key=lambda r: r != "all")
        shared = None if first is piece else first.name
        reports.append(PieceReport(piece.name, rows, len(nodes), flops, shared))
    return reports
