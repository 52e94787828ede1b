"""Rows through ops that compute: pointwise, along an axis, matrix products."""

from __future__ import annotations

from torch import fx

from kvtailor.passes.graph import argument, as_node, axes, is_tensor, shape
from kvtailor.passes.rows.demand import WHOLE, Demand, Need
from kvtailor.passes.rows.plan import Plan, aligned, broadcast, over


def pointwise(node: fx.Node, need: Demand) -> Plan | None:
    return over(node, {x: broadcast(x, node, need) for x in node.all_input_nodes if is_tensor(x)})


def pairs(node: fx.Node, need: Demand) -> Plan | None:
    """Complex numbers as pairs along a last axis of their own, and back."""
    x = as_node(node.args[0])
    if max(need.fixed) >= min(len(shape(x)), len(shape(node))):
        return None
    return over(node, {x: need})


def filled(node: fx.Node, need: Need) -> Plan | None:
    """new_ones and its kin: not even the shape of the input counts."""
    if isinstance(need, Demand):
        return None
    x = node.args[0]
    return Plan([(n, None if n is x else WHOLE) for n in node.all_input_nodes], lambda _: node)


def along(node: fx.Node, need: Demand) -> Plan | None:
    """Softmax, cumsum: row-wise unless the rows are the axis worked along."""
    if set(axes(argument(node, "dim"), len(shape(node)))) & need.fixed:
        return None
    return over(node, {as_node(node.args[0]): need})


def reduction(node: fx.Node, need: Demand) -> Plan | None:
    """mean, std, amax over given axes."""
    x = as_node(node.args[0])
    given, keep = argument(node, "dim"), argument(node, "keepdim", False)
    if given is None or given == []:
        return None
    rank = len(shape(x))
    dims = set(axes(given, rank))
    kept = [d for d in range(rank) if keep or d not in dims]
    before = need.at(kept[need.dim], kept[need.batch])
    return None if dims & before.fixed else over(node, {x: before})


def normalisation(node: fx.Node, need: Demand) -> Plan | None:
    """layer_norm, rms_norm: the last len(normalized_shape) axes are worked along."""
    x, last = as_node(node.args[0]), argument(node, "normalized_shape")
    if need.dim >= len(shape(x)) - len(last):
        return None
    return over(node, {x: need})


def linear(node: fx.Node, need: Demand) -> Plan | None:
    x = as_node(node.args[0])
    if need.dim == len(shape(node)) - 1 or x in node.args[1:]:
        return None
    return over(node, {x: need})


def matmul(node: fx.Node, need: Demand) -> Plan | None:
    """mm, bmm, matmul: rows of the first factor, or a batch axis of both."""
    a, b = as_node(node.args[0]), as_node(node.args[1])
    rank = len(shape(node))
    if a is b or need.dim == rank - 1 or len(shape(a)) != rank:
        return None
    rows = {a: aligned(a, node, need)}
    if need.dim != rank - 2:
        rows[b] = aligned(b, node, need)
    return over(node, rows)


def addmm(node: fx.Node, need: Demand) -> Plan | None:
    bias, a, b = (as_node(x) for x in node.args[:3])
    if need.dim != 0 or a in (bias, b) or len(shape(bias)) != 1:
        return None
    return over(node, {a: need})


def embedding(node: fx.Node, need: Demand) -> Plan | None:
    table, ids = as_node(node.args[0]), as_node(node.args[1])
    if need.dim >= len(shape(ids)) or table is ids:
        return None
    return over(node, {ids: need})
