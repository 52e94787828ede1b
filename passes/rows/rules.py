"""Row by row: how each op passes a demand for rows on to its inputs.

One rule per kind of op: (node, need) -> Plan, or None where the op is not known to work row by
row for that need. A rule never looks at a model, only at shapes and arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvtailor.kernels.ops import attend, packed_linear, paged_attend
from kvtailor.passes.graph import (
    SITE,
    NotDerivable,
    argument,
    as_int,
    as_node,
    aten,
    axes,
    emit,
    is_call,
    is_tensor,
    same,
    shape,
    sym_arg,
    val,
)
from kvtailor.passes.rows.demand import (
    All,
    Demand,
    Index,
    Need,
    PerBatch,
    Range,
    Size,
    count_arg,
    demand_range,
    guarded_at_least,
    least,
    take,
)


@dataclass
class Plan:
    """How to compute a node for a demand: what it needs of its inputs, and the new node.

    needs of None mean that any rows will do. ``build`` gets a function (input, need) -> node
    that holds exactly the needed rows. A narrowed node is always rebuilt; ``shrink`` marks a
    slice or gather that a narrower input makes superfluous, ``always`` one that may not stay.
    """

    needs: list[tuple[fx.Node, Need | None]]
    build: Callable[[Fetch], fx.Node]
    shrink: bool = False
    always: bool = False


Fetch = Callable[..., fx.Node]
Rule = Callable[[fx.Node, Need], "Plan | None"]


def plan_for(node: fx.Node, need: Need) -> Plan | None:
    rule = RULES.get(getattr(node.target, "overloadpacket", node.target))
    if rule is None and _is_pointwise(node):
        rule = _pointwise
    if rule is None:
        return None
    try:
        return rule(node, need)
    except NotDerivable:
        return None


def _map_inputs(
    node: fx.Node,
    needs: dict[fx.Node, Need | None],
    fetch: Fetch,
    fix: Callable[..., Any] | None = None,
) -> fx.Node:
    """The node again, over narrowed inputs; ``fix`` changes the arguments first."""
    args, kwargs = node.args, node.kwargs
    if fix is not None:
        args = fix(args)
    args, kwargs = fx.node.map_arg(
        (args, kwargs), lambda n: fetch(n, needs[n]) if n in needs else n
    )
    assert callable(node.target)
    return emit(node.graph, node.target, *args, like=node, **kwargs)


WHOLE = All("it has no rows")


def _over(node: fx.Node, rows: dict[fx.Node, Need], fix: Callable[..., Any] | None = None) -> Plan:
    """A plan that needs ``rows`` of some inputs and everything of the others."""
    needs: dict[fx.Node, Need | None] = {x: rows.get(x, WHOLE) for x in node.all_input_nodes}
    return Plan(list(needs.items()), lambda fetch: _map_inputs(node, needs, fetch, fix))


def _by_batch(need: Demand) -> bool:
    """Whether the batch axis is an axis of its own that the rows depend on."""
    return isinstance(need.rows, PerBatch) and same(need.pre, 1)


def _fixed(need: Demand) -> set[int]:
    """Axes an op may not work along."""
    return {need.dim, need.batch} if _by_batch(need) else {need.dim}


def _is_pointwise(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _pointwise(node: fx.Node, need: Need) -> Plan | None:
    if isinstance(need, All) or not is_tensor(node):
        return None
    rank, T = len(shape(node)), shape(node)[need.dim]
    needs: dict[fx.Node, Need | None] = {}
    unaligned: set[fx.Node] = set()
    for x in node.all_input_nodes:
        needs[x] = WHOLE
        if not is_tensor(x):
            continue
        dim = need.dim - (rank - len(shape(x)))
        if dim < 0 or (same(shape(x)[dim], 1) and not same(T, 1)):
            continue
        if not same(shape(x)[dim], T):
            return None
        batch = need.batch - (rank - len(shape(x)))
        lacks = batch < 0 or not same(shape(x)[batch], shape(node)[need.batch])
        if _by_batch(need) and lacks:
            unaligned.add(x)
            continue
        needs[x] = need.at(dim, max(batch, 0))

    def build(fetch: Fetch) -> fx.Node:
        def get(x: fx.Node) -> fx.Node:
            return fetch(x, need, rank) if x in unaligned else fetch(x, needs[x])

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), get)
        assert callable(node.target)
        return emit(node.graph, node.target, *args, like=node, **kwargs)

    return Plan(list(needs.items()), build)


def _pairs(node: fx.Node, need: Need) -> Plan | None:
    """Complex numbers as pairs along a last axis of their own, and back."""
    x = as_node(node.args[0])
    if isinstance(need, All) or max(_fixed(need)) >= min(len(shape(x)), len(shape(node))):
        return None
    return _over(node, {x: need})


def _new(node: fx.Node, need: Need) -> Plan | None:
    """new_ones and its kin: not even the shape of the input counts."""
    if isinstance(need, Demand):
        return None
    x = node.args[0]
    return Plan([(n, None if n is x else WHOLE) for n in node.all_input_nodes], lambda _: node)


def _along(node: fx.Node, need: Need) -> Plan | None:
    """Softmax, cumsum: row-wise unless the rows are the axis worked along."""
    if isinstance(need, All):
        return None
    if set(axes(argument(node, "dim"), len(shape(node)))) & _fixed(need):
        return None
    return _over(node, {as_node(node.args[0]): need})


def _reduce(node: fx.Node, need: Need) -> Plan | None:
    """mean, std, amax over given axes."""
    x = as_node(node.args[0])
    given, keep = argument(node, "dim"), argument(node, "keepdim", False)
    if isinstance(need, All) or given is None or given == []:
        return None
    rank = len(shape(x))
    dims = set(axes(given, rank))
    kept = [d for d in range(rank) if keep or d not in dims]
    before = need.at(kept[need.dim], kept[need.batch])
    return None if dims & _fixed(before) else _over(node, {x: before})


def _normalisation(node: fx.Node, need: Need) -> Plan | None:
    """layer_norm, rms_norm: the last len(normalized_shape) axes are worked along."""
    x = as_node(node.args[0])
    if isinstance(need, All) or need.dim >= len(shape(x)) - len(node.args[1]):  # type: ignore[arg-type]
        return None
    return _over(node, {x: need})


def _linear(node: fx.Node, need: Need) -> Plan | None:
    x = as_node(node.args[0])
    if isinstance(need, All) or need.dim == len(shape(node)) - 1 or x in node.args[1:]:
        return None
    return _over(node, {x: need})


def _matmul(node: fx.Node, need: Need) -> Plan | None:
    """mm, bmm, matmul: rows of the first factor, or a batch axis of both."""
    a, b = as_node(node.args[0]), as_node(node.args[1])
    rank = len(shape(node))
    if isinstance(need, All) or a is b or need.dim == rank - 1 or len(shape(a)) != rank:
        return None
    needs: dict[fx.Node, Need] = {}
    for x in (a, b):
        lead = rank - len(shape(x))
        dim, batch = need.dim - lead, need.batch - lead
        if (x is b and need.dim == rank - 2) or dim < 0 or same(shape(x)[dim], 1):
            continue
        lacks = batch < 0 or not same(shape(x)[batch], shape(node)[need.batch])
        if not same(shape(x)[dim], shape(node)[need.dim]) or (_by_batch(need) and lacks):
            return None
        needs[x] = need.at(dim, max(batch, 0))
    return _over(node, needs)


def _addmm(node: fx.Node, need: Need) -> Plan | None:
    bias, a, b = (as_node(x) for x in node.args[:3])
    if isinstance(need, All) or need.dim != 0 or a in (bias, b) or len(shape(bias)) != 1:
        return None
    return _over(node, {a: need})


def _embedding(node: fx.Node, need: Need) -> Plan | None:
    table, ids = as_node(node.args[0]), as_node(node.args[1])
    if isinstance(need, All) or need.dim >= len(shape(ids)) or table is ids:
        return None
    return _over(node, {ids: need})


def _reorder(node: fx.Node, need: Need) -> Plan | None:
    """permute, transpose, t."""
    x = as_node(node.args[0])
    rank = len(shape(x))
    if isinstance(need, All):
        return None
    order = list(range(rank))
    if is_call(node, aten.permute):
        order = axes(node.args[1], rank)
    elif rank >= 2:
        a, b = axes(node.args[1:3] or (0, 1), rank)
        order[a], order[b] = b, a
    return _over(node, {x: need.at(order[need.dim], order[need.batch])})


def _unsqueeze(node: fx.Node, need: Need) -> Plan | None:
    x = as_node(node.args[0])
    if isinstance(need, All):
        return None
    new = as_int(node.args[1]) % len(shape(node))
    if need.dim == new:
        return None
    batch = need.batch
    if batch == new:
        if _by_batch(need):
            return None
        batch = need.dim
    return _over(node, {x: need.at(need.dim - (need.dim > new), batch - (batch > new))})


def _squeeze(node: fx.Node, need: Need) -> Plan | None:
    x = as_node(node.args[0])
    if isinstance(need, All) or len(node.args) < 2:
        return None
    rank = len(shape(x))
    given = node.args[1]
    dims = set(axes(given, rank))
    kept = [d for d in range(rank) if d not in dims or not same(shape(x)[d], 1)]
    if len(kept) != len(shape(node)):
        return None
    return _over(node, {x: need.at(kept[need.dim], kept[need.batch])})


def _expand(node: fx.Node, need: Need) -> Plan | None:
    x = as_node(node.args[0])
    if isinstance(need, All):
        return None
    lead = len(shape(node)) - len(shape(x))
    dim, batch = need.dim - lead, need.batch - lead
    needs: dict[fx.Node, Need | None] = dict.fromkeys(node.all_input_nodes, WHOLE)
    if dim >= 0 and same(shape(x)[dim], shape(node)[need.dim]):
        lacks = batch < 0 or not same(shape(x)[batch], shape(node)[need.batch])
        if _by_batch(need) and lacks:
            return None
        needs[x] = need.at(dim, max(batch, 0))

    def build(fetch: Fetch) -> fx.Node:
        graph = node.graph
        sizes = [fetch(s, WHOLE) if isinstance(s, fx.Node) else s for s in node.args[1]]  # type: ignore[union-attr]
        sizes[need.dim] = count_arg(graph, need)
        return emit(graph, aten.expand.default, fetch(x, needs[x]), sizes, like=node)

    return Plan(list(needs.items()), build)


def _view(node: fx.Node, need: Need) -> Plan | None:
    """view, reshape: the rows must be an axis of the input too, perhaps merged with outer ones."""
    x = as_node(node.args[0])
    if isinstance(need, All):
        return None
    before = _axis_before_view(shape(x), shape(node), need)
    if before is None:
        return None
    needs: dict[fx.Node, Need | None] = dict.fromkeys(node.all_input_nodes, WHOLE)
    needs[x] = before

    def build(fetch: Fetch) -> fx.Node:
        graph = node.graph
        sizes = [_size_arg(graph, node, d, fetch) for d in range(len(shape(node)))]
        sizes[need.dim] = count_arg(graph, need)
        return emit(graph, aten.reshape.default, fetch(x, before), sizes, like=node)

    return Plan(list(needs.items()), build)


def _size_arg(graph: fx.Graph, view: fx.Node, dim: int, fetch: Fetch) -> int | fx.Node:
    """A size of a view's result: the argument it was made with, unless that is -1."""
    given = list(view.args[1])[dim]  # type: ignore[arg-type]
    if isinstance(given, fx.Node):
        return fetch(given, WHOLE)
    return sym_arg(graph, shape(view)[dim]) if given == -1 else int(given)


def _axis_before_view(
    before: tuple[Size, ...], after: tuple[Size, ...], need: Demand
) -> Demand | None:
    """The same rows, named by the axes of a view's input.

    Both shapes are read as [outer, T, inner]; T must end at an axis boundary of the input.
    """
    inner, outer = _product(after[need.dim + 1 :]), _product(after[: need.dim])
    for dim in range(len(before)):
        if not same(_product(before[dim + 1 :]), inner) or same(before[dim], 1):
            continue
        lead = _product(before[:dim])
        for pre in (1, need.pre, outer, need.pre * outer):
            # outer axes merged into this one: their product stays what it was
            if same(before[dim], pre * need.length) and same(lead * pre, outer * need.pre):
                return _with_batch(before, after, replace(need, dim=dim, pre=pre), need)
    return None


def _with_batch(
    before: tuple[Size, ...], after: tuple[Size, ...], new: Demand, old: Demand
) -> Demand | None:
    if not isinstance(new.rows, PerBatch):
        return replace(new, batch=0)
    B = shape(new.rows.rows)[0]
    # Only a leading batch axis, or one merged directly with the rows, can be followed.
    old_ok = (same(old.pre, B) and old.dim == 0) or (same(old.pre, 1) and old.batch == 0)
    merged = same(new.pre, B) and new.dim == 0
    apart = same(new.pre, 1) and new.dim > 0 and same(before[0], B)
    return replace(new, batch=0) if old_ok and (merged or apart) else None


def _product(sizes: tuple[Size, ...]) -> Size:
    total: Size = 1
    for s in sizes:
        total = total * s
    return total


def _slice(node: fx.Node, need: Need) -> Plan | None:
    x = as_node(node.args[0])
    args = [*node.args, *[None] * (5 - len(node.args))]
    dim = as_int(args[1] or 0) % len(shape(x))
    if isinstance(need, Demand) and need.dim != dim:
        return _over(node, {x: need})
    if args[4] not in (None, 1) or not _may_shrink(x, dim):
        return None
    T = shape(x)[dim]
    bounds = _slice_bounds(args[2], args[3], T, shape(node)[dim])
    if bounds is None:
        return None
    lo, hi = bounds
    if isinstance(need, Demand):
        if not isinstance(need.rows, Range) or not same(need.pre, 1):
            return None
        lo, hi = lo + need.rows.lo, lo + need.rows.hi
    return _shrink(node, x, demand_range(lo, hi, dim, T, need.cause))


def _slice_bounds(start: Any, end: Any, T: Size, n: Size) -> tuple[Size, Size] | None:
    """The n rows lo <= t < hi that a slice of T rows takes, None where symbols leave it open."""
    lo = 0 if start is None else val(start)
    if same(n, 0):
        return None
    if same(lo, 0):
        return 0, n
    if statically_known_true(lo < 0):
        if end is None or same(val(end), 2**63 - 1):
            return T - n, T
        lo = T + lo
    if statically_known_true(lo >= 0) and statically_known_true(lo + n <= T):
        return lo, lo + n
    return None


def _may_shrink(x: fx.Node, dim: int) -> bool:
    """The last axis holds features, or keys of a mask: never rows."""
    return len(shape(x)) >= 2 and dim < len(shape(x)) - 1


def _shrink(
    node: fx.Node, x: fx.Node, need: Need, after: Callable[[fx.Node], fx.Node] = lambda n: n
) -> Plan:
    others: list[tuple[fx.Node, Need | None]] = [
        (n, WHOLE) for n in node.all_input_nodes if n is not x
    ]
    return Plan([(x, need), *others], lambda fetch: after(fetch(x, need)), shrink=True)


def _select(node: fx.Node, need: Need) -> Plan | None:
    x = as_node(node.args[0])
    dim = as_int(node.args[1]) % len(shape(x))
    if isinstance(need, Demand):
        return _over(
            node,
            {x: need.at(need.dim + (need.dim >= dim), need.batch + (need.batch >= dim))},
        )
    i, T = val(node.args[2]), shape(x)[dim]
    if not _may_shrink(x, dim):
        return None
    if statically_known_true(i < 0):
        i = T + i
    if not statically_known_true(i >= 0) or not statically_known_true(i < T):
        return None
    return _shrink(
        node,
        x,
        demand_range(i, i + 1, dim, T, need.cause),
        lambda n: emit(node.graph, aten.select.int, n, dim, 0, like=node),
    )


def _index(node: fx.Node, need: Need) -> Plan | None:
    """index[:, rows] and index[arange(B), rows]."""
    x = as_node(node.args[0])
    where = list(node.args[1])  # type: ignore[arg-type]
    at = [d for d, i in enumerate(where) if i is not None]
    if isinstance(need, Demand):
        one = len(at) == 1 and val(where[at[0]]).dim() == 1 and at[0] not in _fixed(need)
        return _over(node, {x: need}) if one and val(where[at[0]]).dtype == torch.int64 else None
    if len(at) == 1 and _is_index(where[at[0]], 1) and _may_shrink(x, at[0]):
        dim = at[0]
        return _shrink(node, x, Demand(Index(where[dim]), dim, shape(x)[dim], cause=need.cause))
    if at == [0, 1] and _is_index(where[1], 1) and _may_shrink(x, 1):
        B = shape(x)[0]
        if _is_arange(where[0], B) and same(shape(where[1])[0], B):
            return _shrink(
                node,
                x,
                Demand(PerBatch(where[1]), 1, shape(x)[1], cause=need.cause),
                lambda n: emit(node.graph, aten.select.int, n, 1, 0, like=node),
            )
    return None


def _index_select(node: fx.Node, need: Need) -> Plan | None:
    x = as_node(node.args[0])
    dim = as_int(node.args[1]) % len(shape(x))
    rows = node.args[2]
    if isinstance(need, Demand):
        return _over(node, {x: need}) if dim not in _fixed(need) else None
    if not _is_index(rows, 1) or not _may_shrink(x, dim):
        return None
    return _shrink(node, x, Demand(Index(as_node(rows)), dim, shape(x)[dim], cause=need.cause))


def _gather(node: fx.Node, need: Need) -> Plan | None:
    """gather(x, 1, rows[:, None, None].expand(B, 1, D)): one row per batch entry."""
    x, index = as_node(node.args[0]), as_node(node.args[2])
    dim = as_int(node.args[1]) % len(shape(x))
    if isinstance(need, Demand) or dim != 1 or len(shape(x)) != 3 or not _may_shrink(x, 1):
        return None
    if not is_call(index, aten.expand) or not same(shape(node)[1], 1):
        return None
    column = as_node(index.args[0])
    B = shape(x)[0]
    if len(shape(column)) != 3 or not _is_index(column, 3):
        return None
    if not (same(shape(column)[0], B) and same(shape(column)[1], 1) and same(shape(column)[2], 1)):
        return None
    if not same(shape(node)[2], shape(x)[2]):
        return None
    with node.graph.inserting_after(column):
        flat = emit(node.graph, aten.reshape.default, column, [-1])
    return _shrink(node, x, Demand(PerBatch(flat), 1, shape(x)[1], cause=need.cause))


def _is_arange(x: Any, n: Size) -> bool:
    """Whether x is arange(n)."""
    if is_call(x, aten.arange.default):
        return same(val(x.args[0]), n)
    if is_call(x, aten.arange.start):
        return val(x.args[0]) == 0 and same(val(x.args[1]), n)
    if is_call(x, aten.arange.start_step):
        step = x.args[2] if len(x.args) > 2 else 1
        return val(x.args[0]) == 0 and step == 1 and same(val(x.args[1]), n)
    return False


def _cat(node: fx.Node, need: Need) -> Plan | None:
    dim = as_int(node.args[1]) if len(node.args) > 1 else 0
    if isinstance(need, All) or dim % len(shape(node)) in _fixed(need):
        return None
    parts = [as_node(x) for x in node.args[0]]  # type: ignore[union-attr]
    if any(len(shape(x)) != len(shape(node)) for x in parts):
        return None
    return _over(node, dict.fromkeys(parts, need))


def _stack(node: fx.Node, need: Need) -> Plan | None:
    if isinstance(need, All):
        return None
    new = as_int(argument(node, "dim", 0)) % len(shape(node))
    if new in _fixed(need):
        return None
    before = need.at(need.dim - (need.dim > new), max(need.batch - (need.batch > new), 0))
    return _over(node, {as_node(x): before for x in node.args[0]})  # type: ignore[union-attr]


def _scatter(node: fx.Node, need: Need) -> Plan | None:
    """slice_scatter, select_scatter along another axis: the same rows of both."""
    x, part = as_node(node.args[0]), as_node(node.args[1])
    if isinstance(need, All):
        return None
    axis = as_int(argument(node, "dim", 0)) % len(shape(node))
    if axis in _fixed(need) or x is part:
        return None
    lost = int(is_call(node, aten.select_scatter))
    before = need.at(
        need.dim - lost * (need.dim > axis), max(need.batch - lost * (need.batch > axis), 0)
    )
    return _over(node, {x: need, part: before})


def _repeat(node: fx.Node, need: Need) -> Plan | None:
    """repeat, where the rows themselves are not repeated."""
    x = as_node(node.args[0])
    times = list(node.args[1])  # type: ignore[arg-type]
    lead = len(times) - len(shape(x))
    if isinstance(need, All) or min(_fixed(need)) < lead:
        return None
    if any(times[d] != 1 for d in _fixed(need)):
        return None
    return _over(node, {x: need.at(need.dim - lead, max(need.batch - lead, 0))})


def _getitem(node: fx.Node, need: Need) -> Plan | None:
    """One result of a split, topk or packed linear along another axis: do that to fewer rows."""
    whole = as_node(node.args[0])
    if isinstance(need, All) or not is_call(whole, *SEVERAL):
        return None
    x, *others = whole.all_input_nodes
    if others and (not is_call(whole, packed_linear) or x in whole.args[1:]):
        return None
    along_last = is_call(whole, aten.topk, aten.sort, packed_linear)
    axis = as_int(argument(whole, "dim", -1 if along_last else 0)) % len(shape(x))
    if is_call(whole, aten.unbind):
        need_x = need.at(need.dim + (need.dim >= axis), need.batch + (need.batch >= axis))
    else:
        need_x = need
    if axis in _fixed(need_x):
        return None

    def build(fetch: Fetch) -> fx.Node:
        assert callable(whole.target)
        rest = fx.node.map_arg(whole.args[1:], lambda n: fetch(n, WHOLE))
        parts = emit(node.graph, whole.target, fetch(x, need_x), *rest, like=whole, **whole.kwargs)
        return emit(node.graph, operator.getitem, parts, node.args[1], like=node)

    return Plan([(x, need_x), *((n, WHOLE) for n in others)], build)


SEVERAL = (
    packed_linear,
    aten.split,
    aten.split_with_sizes,
    aten.chunk,
    aten.unbind,
    aten.topk,
    aten.sort,
)


def _sym_size(node: fx.Node, need: Need) -> Plan | None:
    """A size does not ask for rows: it is computed from the graph's inputs instead."""
    if node.args[0].op == "placeholder":  # type: ignore[union-attr]
        return None
    made = as_node(sym_arg(node.graph, val(node)))
    return Plan([], lambda _: made, always=True)


# --- attention ---------------------------------------------------------------------------------


def _attend(node: fx.Node, need: Need) -> Plan | None:
    """Rows of the queries; of the keys and values, what those queries can reach."""
    if isinstance(need, All) or need.dim != 2:
        return None
    q, k, v = (as_node(x) for x in node.args[:3])
    mask, q_positions, chunk_origin, sinks = [*node.args[3:], *[None] * (7 - len(node.args))][:4]
    flags = dict(node.kwargs)
    B, _, Tq, _ = shape(node)
    per_batch = isinstance(need.rows, PerBatch)
    if per_batch and need.batch != 0:
        return None
    Tk = shape(k)[2]
    keys = _reachable_keys(node, need.rows) if q_positions is None else None
    site = node.meta.get(SITE)
    name = site.site if site else str(node)
    every = f"attention {name} can see every key"
    key_need: Need = All(every)
    if keys is not None:
        key_need = demand_range(keys.lo, keys.hi, 2, Tk, every)

    needs: list[tuple[fx.Node, Need | None]] = [(q, need.at(2, 0)), (k, key_need), (v, key_need)]
    row_needs: dict[fx.Node, Need] = {}
    unaligned: set[fx.Node] = set()
    for x, dim in ((mask, -2), (q_positions, -1), (chunk_origin, -1)):
        if not isinstance(x, fx.Node):
            continue
        rank = len(shape(x))
        row_needs[x] = WHOLE
        has_rows = rank + dim >= 0 and same(shape(x)[dim], Tq) and not same(Tq, 1)
        if x is chunk_origin and rank != 2:
            has_rows = False
        if has_rows:
            if per_batch and not (rank >= 2 and same(shape(x)[0], B)):
                if x is not mask:
                    return None
                unaligned.add(x)
            else:
                row_needs[x] = need.at(rank + dim, 0)
    needs += list(row_needs.items())
    needs += [(x, WHOLE) for x in node.all_input_nodes if x not in {n for n, _ in needs}]

    def build(fetch: Fetch) -> fx.Node:
        graph = node.graph
        lo_k = key_need.rows.lo if isinstance(key_need, Demand) else 0  # type: ignore[union-attr]
        new_mask = mask
        if isinstance(mask, fx.Node):
            new_mask = fetch(mask, need, 4) if mask in unaligned else fetch(mask, row_needs[mask])
            if isinstance(key_need, Demand) and not same(shape(new_mask)[-1], 1):
                last = len(shape(new_mask)) - 1
                new_mask = take(graph, new_mask, All(""), key_need.at(last))
        new = dict(flags)
        offset = val(flags.get("q_offset", 0))
        new_positions: Any = None
        if _places_matter(flags):
            if isinstance(q_positions, fx.Node):
                new_positions = fetch(q_positions, row_needs[q_positions])
            elif isinstance(need.rows, Range):
                offset = offset + need.rows.lo
            else:
                new_positions = _positions(graph, fetch(need.rows.rows, WHOLE), Tq, per_batch)
            new["q_offset"] = sym_arg(graph, offset - lo_k)
        origin = (
            fetch(chunk_origin, row_needs[chunk_origin])
            if isinstance(chunk_origin, fx.Node)
            else None
        )
        return emit(
            graph,
            attend,
            fetch(q, need.at(2, 0)),
            fetch(k, key_need),
            fetch(v, key_need),
            new_mask,
            new_positions,
            origin,
            fetch(sinks, WHOLE) if isinstance(sinks, fx.Node) else None,
            like=node,
            **{n: fetch(a, WHOLE) if isinstance(a, fx.Node) else a for n, a in new.items()},
        )

    return Plan(needs, build)


def _paged_attend(node: fx.Node, need: Need) -> Plan | None:
    """An index set of packed rows: each becomes a sequence of its own over its sequence's blocks.

    So the rows may come in any order, and from the middle of their sequence. Where every sequence
    has one row, any rows are some of the sequences.
    """
    if isinstance(need, All) or need.dim != 0:
        return None
    given: list[Any] = [*node.args, *[None] * (11 - len(node.args))]
    q, k, v, table, starts, lens, mask, positions, origin, sinks, slopes = given
    if node.target is not paged_attend or not same(need.pre, 1):
        return None
    if starts is None:
        if not isinstance(need.rows, (Range, Index)):
            return None
        by_row = (q, table, lens, mask, positions, origin)
        return _at_axis_0(node, need, [x for x in by_row if isinstance(x, fx.Node)])
    if not isinstance(need.rows, Index):
        return None
    rows: dict[fx.Node, Need] = {as_node(q): need.at(0)}
    for x in (mask, positions):
        if isinstance(x, fx.Node):
            rows[x] = need.at(0)
    if any(x in rows for x in (k, v, table, starts, lens, origin, sinks, slopes)):
        return None
    needs: list[tuple[fx.Node, Need | None]] = [
        (x, rows.get(x, WHOLE)) for x in node.all_input_nodes
    ]
    index = need.rows.rows
    needs.append((index, WHOLE))
    N = shape(q)[0]

    def build(fetch: Fetch) -> fx.Node:
        graph = node.graph

        def whole(x: Any) -> Any:
            return fetch(x, WHOLE) if isinstance(x, fx.Node) else x

        def narrow(x: Any) -> Any:
            return fetch(x, rows[x]) if isinstance(x, fx.Node) else None

        at = _positions(graph, whole(index), N, False)
        at = emit(graph, aten._to_copy.default, at, dtype=torch.int64)
        begins = emit(graph, aten._to_copy.default, whole(starts), dtype=torch.int64)
        lengths = whole(lens)
        # The sequence of each row: the last that begins at or before it.
        after = emit(graph, aten.searchsorted.Tensor, begins, at, right=True)
        count = sym_arg(graph, shape(lens)[0])
        last = emit(graph, operator.sub, count, 1) if isinstance(count, fx.Node) else count - 1
        owner = emit(graph, aten.clamp.default, emit(graph, aten.sub.Tensor, after, 1), 0, last)
        ends = emit(graph, aten.slice.Tensor, begins, 0, 1, 2**63 - 1)
        end = emit(graph, aten.index_select.default, ends, 0, owner)
        length = emit(graph, aten.index_select.default, lengths, 0, owner)
        where = narrow(positions)
        if where is None:
            where = emit(graph, aten.sub.Tensor, emit(graph, aten.add.Tensor, length, at), end)
        # Rows past the last sequence see nothing.
        inside = emit(graph, aten.lt.Tensor, at, end)
        length = emit(graph, aten.mul.Tensor, length, inside)
        R = sym_arg(graph, shape(index)[0])
        one_more = emit(graph, operator.add, R, 1) if isinstance(R, fx.Node) else R + 1
        each = emit(
            graph, aten.arange.default, one_more, dtype=torch.int32, device=val(node).device
        )
        own_origin = whole(origin)
        if own_origin is not None:
            own_origin = emit(graph, aten.index_select.default, own_origin, 0, owner)
        return emit(
            graph,
            paged_attend,
            narrow(q),
            whole(k),
            whole(v),
            emit(graph, aten.index_select.default, whole(table), 0, owner),
            each,
            length,
            narrow(mask),
            where,
            own_origin,
            whole(sinks),
            whole(slopes),
            like=node,
            **node.kwargs,
        )

    return Plan(needs, build)


def _at_axis_0(node: fx.Node, need: Demand, by_row: Sequence[fx.Node]) -> Plan | None:
    """The same call on fewer rows of these arguments, and all of the others."""
    rows = dict.fromkeys(by_row, need.at(0))
    if any(node.args.count(x) > 1 for x in rows):
        return None

    def build(fetch: Fetch) -> fx.Node:
        args = [fetch(x, rows.get(x, WHOLE)) if isinstance(x, fx.Node) else x for x in node.args]
        return emit(node.graph, paged_attend, *args, like=node, **node.kwargs)

    return Plan([(x, rows.get(x, WHOLE)) for x in node.all_input_nodes], build)


def _places_matter(flags: dict[str, Any]) -> bool:
    return (
        bool(flags.get("causal"))
        or flags.get("window") is not None
        or (flags.get("chunk") is not None)
    )


def _positions(graph: fx.Graph, rows: fx.Node, T: Size, per_batch: bool) -> fx.Node:
    """Row numbers as positions: negative ones count from the end; ``[R]`` or ``[B, 1]``."""
    negative = emit(graph, aten.lt.Scalar, rows, 0)
    from_end = emit(graph, aten.add.Tensor, rows, sym_arg(graph, T))
    positions = emit(graph, aten.where.self, negative, from_end, rows)
    return emit(graph, aten.unsqueeze.default, positions, 1) if per_batch else positions


def _reachable_keys(node: fx.Node, rows: Range | Index | PerBatch) -> Range | None:
    """Keys that queries lo..hi-1 can see; None for all of them.

    The last m rows below a causal window of W reach m + W - 1 keys.
    """
    flags = node.kwargs
    if not isinstance(rows, Range) or flags.get("empty_row", "zero") != "zero":
        return None
    Tk: Size = shape(node.args[1])[2]
    offset = val(flags.get("q_offset", 0))
    first, last = rows.lo + offset, rows.hi - 1 + offset
    window, chunk = flags.get("window"), flags.get("chunk")
    has_origin = len(node.args) > 5 and node.args[5] is not None
    lo: Size = 0
    hi: Size = Tk
    if window is not None and chunk is None:
        lo = first - window + 1
    elif chunk is not None and window is None and not has_origin:
        lo = first // chunk * chunk
    if not isinstance(lo, int) or lo != 0:
        above = guarded_at_least(lo, 0)
        if above is None:
            return None
        lo = lo if above else 0
    if flags.get("causal"):
        capped = least(last + 1, Tk)
        hi = Tk if capped is None else capped
    if not statically_known_true(lo < hi):
        return None
    return Range(lo, hi)


RULES: dict[Any, Rule] = {
    torch.ops.kvtailor.attend: _attend,
    torch.ops.kvtailor.paged_attend: _paged_attend,
    aten._to_copy: _pointwise,
    aten.clone: _pointwise,
    aten.contiguous: _pointwise,
    aten.masked_fill: _pointwise,
    aten.copy: _pointwise,
    aten.floor_divide: _pointwise,
    aten.__and__: _pointwise,
    aten.__or__: _pointwise,
    torch.ops.kvtailor.few_rows_linear: _linear,
    aten.where: _pointwise,
    aten.polar: _pointwise,
    aten.view_as_real: _pairs,
    aten.view_as_complex: _pairs,
    aten.zeros_like: _pointwise,
    aten.ones_like: _pointwise,
    aten.full_like: _pointwise,
    aten.new_ones: _new,
    aten.new_zeros: _new,
    aten.new_full: _new,
    aten.softmax: _along,
    aten._softmax: _along,
    aten.log_softmax: _along,
    aten.cumsum: _along,
    aten.mean: _reduce,
    aten.sum: _reduce,
    aten.amax: _reduce,
    aten.amin: _reduce,
    aten.any: _reduce,
    aten.all: _reduce,
    aten.argmax: _reduce,
    aten.std: _reduce,
    aten.var: _reduce,
    aten.linalg_vector_norm: _reduce,
    aten.layer_norm: _normalisation,
    aten.rms_norm: _normalisation,
    aten.linear: _linear,
    aten.mm: _matmul,
    aten.bmm: _matmul,
    aten.matmul: _matmul,
    aten.addmm: _addmm,
    aten.embedding: _embedding,
    aten.permute: _reorder,
    aten.transpose: _reorder,
    aten.t: _reorder,
    aten.unsqueeze: _unsqueeze,
    aten.squeeze: _squeeze,
    aten.expand: _expand,
    aten.view: _view,
    aten.reshape: _view,
    aten._unsafe_view: _view,
    aten.slice: _slice,
    aten.select: _select,
    aten.index: _index,
    aten.index_select: _index_select,
    aten.gather: _gather,
    aten.cat: _cat,
    aten.stack: _stack,
    aten.slice_scatter: _scatter,
    aten.select_scatter: _scatter,
    aten.repeat: _repeat,
    operator.getitem: _getitem,
    aten.sym_size: _sym_size,
}


def _is_index(rows: Any, rank: int) -> bool:
    """An integer tensor made of integers alone, so that it can be computed at the top."""
    if not is_tensor(rows) or val(rows).dim() != rank or val(rows).dtype != torch.int64:
        return False
    seen: set[fx.Node] = set()
    todo = [rows]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        v = node.meta.get("val")
        if isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex()):
            return False
        if node.op == "call_function" and _is_random_or_impure(node):
            return False
        todo.extend(node.all_input_nodes)
    return True


def _is_random_or_impure(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or node.is_impure()
