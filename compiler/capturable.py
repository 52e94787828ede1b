"""Whether a piece can live in a CUDA graph, and how its inputs have to be handed to it.

A piece whose row count is a symbol is padded by repeating its last row. That is harmless when no
row of a result depends on another row: the same rules that narrow_rows narrows by must let the
last row be left out everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from kvtailor.compiler.piece import Piece, symbols_of
from kvtailor.kernels.ops import store_kv
from kvtailor.passes.effects import Memory, computes, is_number_read, is_random, written
from kvtailor.passes.graph import argument, as_node, aten, flat, is_call, output_node
from kvtailor.passes.opsets import RESHAPES
from kvtailor.passes.rows.demand import All, Demand, Need, Range, join
from kvtailor.passes.rows.rules import plan_for
from kvtailor.runtime.cuda_graphs import Signature


class NotCapturable(Exception):
    """Why a piece stays out of CUDA graphs."""


def graph_signature(piece: Piece, resident: Collection[str]) -> Signature:
    """How to run the piece as a CUDA graph. Raises NotCapturable.

    resident: values that stay where they are from call to call: parameters, buffers.
    """
    if piece.unsafe is not None:
        raise NotCapturable(f"{piece.unsafe} is not for CUDA graphs")
    gm = piece.module()
    nodes = list(gm.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    _refuse(nodes)
    memory = Memory(nodes)
    written_to = {i for i, n in enumerate(inputs) if memory.roots[n] & memory.written}
    in_place = written_to | {i for i, name in enumerate(piece.inputs) if name in resident}
    results = list(flat(output_node(gm).args[0]))
    kept = [n for n in results if memory.roots.get(n)]
    if kept:
        raise NotCapturable(f"it returns {kept[0]}, which is part of an input")
    symbols = symbols_of(nodes)
    if len(symbols) > 1:
        raise NotCapturable(f"it has more than one size that changes: {sorted(map(str, symbols))}")
    symbol = next(iter(symbols), None)
    axes = [_row_axis(n, symbol) for n in inputs]
    if symbol is None:
        return Signature(in_place, written_to, axes, [], None, rows=_product_rows(nodes))
    resized = [i for i in in_place if axes[i] is not None]
    if resized:
        raise NotCapturable(f"{piece.inputs[resized[0]]} stays in place but changes its size")
    _check_rows(gm, symbol, {n: a for n, a in zip(inputs, axes) if a is not None}, results)
    sizes = [i for i, n in enumerate(inputs) if isinstance(n.meta["val"], torch.SymInt)]
    result_axes = [_row_axis(n, symbol) for n in results]
    return Signature(in_place, written_to, axes, sizes, result_axes, rows=None)


def _refuse(nodes: list[fx.Node]) -> None:
    for node in nodes:
        if is_number_read(node):
            raise NotCapturable(f"{node} reads a number on the host")
        if is_random(node):
            raise NotCapturable(f"{node} draws random numbers")
        if torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ()) and _is_dynamic(node):
            raise NotCapturable(f"the shape of {node} depends on data")
        if node.op == "placeholder" and not isinstance(node.meta["val"], (Tensor, torch.SymInt)):
            raise NotCapturable(f"an input is a {type(node.meta['val']).__name__}")


def _is_dynamic(node: fx.Node) -> bool:
    """Of an op that may give a shape that depends on data: indexing does by masks alone."""
    if not is_call(node, aten.index):
        return True
    indices = [n.meta["val"] for n in flat(node.args[1]) if n is not None]
    return any(i.dtype in (torch.bool, torch.uint8) for i in indices)


def _product_rows(nodes: list[fx.Node]) -> int:
    """Rows of the largest matrix product, or of the largest result where there is none."""
    calls = [n for n in nodes if computes(n) and isinstance(n.meta["val"], Tensor)]
    products = [n for n in calls if n.target is aten.linear.default]
    shapes = [n.meta["val"].shape for n in products or calls]
    return max((math.prod(s[:-1]) for s in shapes), default=1)


def _row_axis(node: fx.Node, symbol: object) -> int | None:
    """The one axis of size ``symbol``; None for a tensor of fixed shape, and for sizes."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return None
    moving = [i for i, n in enumerate(value.shape) if isinstance(n, torch.SymInt)]
    if len(moving) > 1:
        raise NotCapturable(f"{list(value.shape)} changes along more than one axis")
    if not moving:
        return None
    size: Any = value.shape[moving[0]]
    if size.node.expr != symbol:
        raise NotCapturable(f"an axis has size {size}, which is no row count")
    return moving[0]


def _check_rows(
    gm: fx.GraphModule, symbol: object, axes: dict[fx.Node, int], results: list[fx.Node]
) -> None:
    """Ask for all rows but the last of every result; no input may then be needed whole."""
    needs: dict[fx.Node, Need] = {}

    def ask(node: fx.Node, axis: int) -> None:
        n = node.meta["val"].shape[axis]
        needs[node] = join(needs.get(node), Demand(Range(0, n - 1), axis, n))

    for node in results:
        axis = _row_axis(node, symbol)
        if axis is None:
            needs[node] = All(f"{node} is a result without rows")
        else:
            ask(node, axis)
    for node in reversed(gm.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is store_kv:
            # The same row is stored once more to the same slot.
            for name in ("k", "v", "slot_mapping"):
                ask(as_node(argument(node, name)), 0)
            continue
        if written(node):
            needs[node] = All(f"{node} writes to an input")
        need = needs.get(node)
        if need is None:
            continue
        if isinstance(need, All):
            found: list[tuple[fx.Node, Need | None]] = [(x, need) for x in node.all_input_nodes]
        elif (plan := plan_for(node, need)) is not None:
            found = plan.needs
        else:
            every = All(f"{node} is not known to work row by row")
            found = [(x, every) for x in node.all_input_nodes]
        for x, n in found:
            if n is not None:
                needs[x] = join(needs.get(x), n)
    for node, axis in axes.items():
        need = needs.get(node)
        if isinstance(need, All):
            raise NotCapturable(f"padding would change results: {need.cause}")
        if need is not None and need.dim != axis:
            raise NotCapturable("rows change their axis")
    for node in gm.graph.find_nodes(op="placeholder"):
        # The padded count would be taken for the true one.
        if isinstance(node.meta["val"], torch.SymInt) and any(
            user.op == "call_function" and not _is_shape_argument(user) for user in node.users
        ):
            raise NotCapturable("it computes with the row count itself")


def _is_shape_argument(node: fx.Node) -> bool:
    return is_call(node, *RESHAPES, aten.expand)
