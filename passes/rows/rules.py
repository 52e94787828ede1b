"""Which rule passes a demand for rows on through which op."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from kvtailor.passes.graph import NotDerivable, aten
from kvtailor.passes.opsets import RESHAPES, is_pointwise, packet
from kvtailor.passes.rows import attention, elementwise, indexing, views
from kvtailor.passes.rows.demand import Demand, Need
from kvtailor.passes.rows.plan import NotRowWise, Plan, Rule, WholeRule

_R = TypeVar("_R")


def _by_op(ops: Mapping[_R, Sequence[Any]]) -> dict[Any, _R]:
    return {op: rule for rule, each in ops.items() for op in each}


# What asks for the same rows as it is asked for; pointwise ops besides.
ROW_WISE: dict[Any, Rule] = _by_op(
    {
        attention.dense: (torch.ops.kvtailor.attend,),
        attention.paged: (torch.ops.kvtailor.paged_attend,),
        elementwise.linear: (aten.linear, torch.ops.kvtailor.few_rows_linear),
        elementwise.matmul: (aten.mm, aten.bmm, aten.matmul),
        elementwise.addmm: (aten.addmm,),
        elementwise.embedding: (aten.embedding,),
        elementwise.normalisation: (aten.layer_norm, aten.rms_norm),
        elementwise.along: (aten.softmax, aten._softmax, aten.log_softmax, aten.cumsum),
        elementwise.reduction: (
            *(aten.mean, aten.sum, aten.std, aten.var, aten.linalg_vector_norm),
            *(aten.amax, aten.amin, aten.argmax, aten.any, aten.all),
        ),
        elementwise.pairs: (aten.view_as_real, aten.view_as_complex),
        views.view: RESHAPES,
        views.expand: (aten.expand,),
        views.reorder: (aten.permute, aten.transpose, aten.t),
        views.unsqueeze: (aten.unsqueeze,),
        views.squeeze: (aten.squeeze,),
        views.cat: (aten.cat,),
        views.stack: (aten.stack,),
        views.repeat: (aten.repeat,),
        indexing.scatter: (aten.slice_scatter, aten.select_scatter),
        indexing.getitem: (operator.getitem,),
    }
)

# What asks for fewer rows than it is asked for: for all of its result, too.
SHRINKING: dict[Any, WholeRule] = _by_op(
    {
        indexing.slice_: (aten.slice,),
        indexing.select: (aten.select,),
        indexing.index: (aten.index,),
        indexing.index_select: (aten.index_select,),
        indexing.gather: (aten.gather,),
        indexing.sym_size: (aten.sym_size,),
        elementwise.filled: (aten.new_ones, aten.new_zeros, aten.new_full),
    }
)


def plan_for(node: fx.Node, need: Need) -> Plan | None:
    """How to compute the node for this need; None where it is not known to work row by row."""
    op = packet(node)
    try:
        if op in SHRINKING:
            return SHRINKING[op](node, need)
        if not isinstance(need, Demand):
            return None
        if op in ROW_WISE:
            return ROW_WISE[op](node, need)
        return elementwise.pointwise(node, need) if is_pointwise(node) else None
    except (NotDerivable, NotRowWise):
        return None
