"""Rows through views: axes that move, come, go or merge."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from kvtailor.passes.graph import (
    argument,
    as_int,
    as_node,
    aten,
    axes,
    emit,
    is_call,
    same,
    shape,
    sym_arg,
)
from kvtailor.passes.rows.demand import Demand, PerBatch, Size, count_arg
from kvtailor.passes.rows.plan import Plan, aligned, over


def reorder(node: fx.Node, need: Demand) -> Plan | None:
    """permute, transpose, t."""
    x = as_node(node.args[0])
    rank = len(shape(x))
    order = list(range(rank))
    if is_call(node, aten.permute):
        order = axes(node.args[1], rank)
    elif rank >= 2:
        a, b = axes(node.args[1:3] or (0, 1), rank)
        order[a], order[b] = b, a
    return over(node, {x: need.at(order[need.dim], order[need.batch])})


def unsqueeze(node: fx.Node, need: Demand) -> Plan | None:
    new = as_int(node.args[1]) % len(shape(node))
    return None if new in need.fixed else over(node, {as_node(node.args[0]): need.without(new)})


def squeeze(node: fx.Node, need: Demand) -> Plan | None:
    x = as_node(node.args[0])
    if len(node.args) < 2:
        return None
    rank = len(shape(x))
    dims = set(axes(node.args[1], rank))
    kept = [d for d in range(rank) if d not in dims or not same(shape(x)[d], 1)]
    if len(kept) != len(shape(node)):
        return None
    return over(node, {x: need.at(kept[need.dim], kept[need.batch])})


def expand(node: fx.Node, need: Demand) -> Plan | None:
    x = as_node(node.args[0])
    return _resized(node, {x: aligned(x, node, need)}, need, aten.expand.default, node.args[1])


def view(node: fx.Node, need: Demand) -> Plan | None:
    """view, reshape: the rows must be an axis of the input too, perhaps merged with outer ones."""
    x = as_node(node.args[0])
    before = _axis_before_view(shape(x), shape(node), need)
    if before is None:
        return None
    given: Any = node.args[1]
    return _resized(node, {x: before}, need, aten.reshape.default, given)


def _resized(
    node: fx.Node,
    rows: dict[fx.Node, Any],
    need: Demand,
    op: Callable[..., Any],
    given: Any,
) -> Plan:
    """A call that is told the sizes of its result: the given ones but for the rows."""

    def call(get: Callable[[Any], Any]) -> fx.Node:
        sizes = list(get(given))
        for d, size in enumerate(sizes):
            if not isinstance(size, fx.Node) and size == -1:
                sizes[d] = sym_arg(node.graph, shape(node)[d])
        sizes[need.dim] = count_arg(node.graph, need)
        return emit(node.graph, op, get(node.args[0]), sizes, like=node)

    return over(node, rows, call)


def _axis_before_view(
    before: tuple[Size, ...], after: tuple[Size, ...], need: Demand
) -> Demand | None:
    """The same rows, named by the axes of a view's input.

    Both shapes are read as [outer, T, inner]; T must end at an axis boundary of the input.
    """
    inner, outer = math.prod(after[need.dim + 1 :]), math.prod(after[: need.dim])
    for dim in range(len(before)):
        if not same(math.prod(before[dim + 1 :]), inner) or same(before[dim], 1):
            continue
        lead = math.prod(before[:dim])
        for pre in (1, need.pre, outer, need.pre * outer):
            # outer axes merged into this one: their product stays what it was
            if same(before[dim], pre * need.length) and same(lead * pre, outer * need.pre):
                return _with_batch(before, replace(need, dim=dim, pre=pre), need)
    return None


def _with_batch(before: tuple[Size, ...], new: Demand, old: Demand) -> Demand | None:
    if not isinstance(new.rows, PerBatch):
        return replace(new, batch=0)
    B = shape(new.rows.rows)[0]
    # Only a leading batch axis, or one merged directly with the rows, can be followed.
    old_ok = (same(old.pre, B) and old.dim == 0) or (same(old.pre, 1) and old.batch == 0)
    merged = same(new.pre, B) and new.dim == 0
    apart = same(new.pre, 1) and new.dim > 0 and same(before[0], B)
    return replace(new, batch=0) if old_ok and (merged or apart) else None


def stack(node: fx.Node, need: Demand) -> Plan | None:
    new = as_int(argument(node, "dim", 0)) % len(shape(node))
    if new in need.fixed:
        return None
    return over(node, dict.fromkeys(node.all_input_nodes, need.without(new)))


def cat(node: fx.Node, need: Demand) -> Plan | None:
    parts = node.all_input_nodes
    if as_int(argument(node, "dim", 0)) % len(shape(node)) in need.fixed:
        return None
    if any(len(shape(x)) != len(shape(node)) for x in parts):
        return None
    return over(node, dict.fromkeys(parts, need))


def repeat(node: fx.Node, need: Demand) -> Plan | None:
    """repeat, where the rows themselves are not repeated."""
    x, times = as_node(node.args[0]), argument(node, "repeats")
    lead = len(times) - len(shape(x))
    if min(need.fixed) < lead or any(times[d] != 1 for d in need.fixed):
        return None
    return over(node, {x: need.at(need.dim - lead, max(need.batch - lead, 0))})
