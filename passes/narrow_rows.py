"""Compute only the token rows whose results are asked for.

Before:                                After:
    h = attend(q, k, v, causal)            q1 = slice(q, 2, -1, end)
    y = linear(h, w)                       h1 = attend(q1, k, v, causal, q_offset=T-1)
    last = slice(y, 1, -1, end)            last = linear(h1, w)

Walks backwards from the outputs: row-wise ops pass demand on; attention passes it to q and the
mask rows, and asks of k and v the rows its window can reach; slices and gathers are where demand
shrinks; anything else needs every row. Then walks forwards, rebuilding what is narrowed, with
one slice or gather where a value is needed narrower than it is there.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from kvtailor.kernels.ops import attend
from kvtailor.passes.attend import Attend
from kvtailor.passes.graph import (
    ROWS,
    SITE,
    SIZE,
    inherit,
    module_path,
    op_text,
    same,
    shape,
    top,
)
from kvtailor.passes.report import AttentionSite, PassReport
from kvtailor.passes.rows.demand import (
    All,
    Demand,
    Index,
    Need,
    PerBatch,
    Size,
    count,
    join,
    same_need,
    static_size,
    take,
)
from kvtailor.passes.rows.plan import Plan
from kvtailor.passes.rows.rules import plan_for


def narrow_rows(gm: fx.GraphModule) -> PassReport:
    """Narrow every value to the rows that outputs and written inputs ask for.

    Sets query_rows and key_rows of each site; where a site keeps all rows, ``rows_reason`` says
    who asks for them.
    """
    report = PassReport()
    needs, plans = _walk_backwards(gm.graph)
    _describe_sites(gm, needs, plans, report)
    report.rewrites = _walk_forwards(gm.graph, needs, plans)
    return report


def _walk_backwards(
    graph: fx.Graph,
) -> tuple[dict[fx.Node, Need], dict[fx.Node, Plan]]:
    needs: dict[fx.Node, Need] = {}
    plans: dict[fx.Node, Plan] = {}
    any_rows: set[fx.Node] = set()

    for node in reversed(graph.nodes):
        if node.op == "output":
            for i, x in enumerate(node.all_input_nodes):
                needs[x] = All(f"output {i}{_of(x)} needs every row")
            continue
        need = needs.get(node)
        if need is None and node.is_impure():
            need = All("it is written to")
        elif need is None and node in any_rows:
            need = All("its type is used")
        if node.op != "call_function":
            needs[node] = All("it is an input")
            continue
        if need is None:
            continue
        plan = plan_for(node, need)
        if plan is None and isinstance(need, Demand):
            # Computed whole; whoever wants fewer rows takes them from the result.
            need = All(f"{op_text(node)}{_of(node)} is not known to work row by row")
            plan = plan_for(node, need)
        needs[node] = need
        if plan is None:
            assert isinstance(need, All)
            for x in node.all_input_nodes:
                needs[x] = join(needs.get(x), need)
            continue
        plans[node] = plan
        for x, x_need in plan.needs:
            if x_need is None:
                any_rows.add(x)
            else:
                needs[x] = join(needs.get(x), x_need)
    return needs, plans


def _of(node: fx.Node) -> str:
    where = module_path(node)
    return f" of {where}" if where else ""


def _walk_forwards(graph: fx.Graph, needs: dict[fx.Node, Need], plans: dict[fx.Node, Plan]) -> int:
    """Rebuild narrowed nodes; returns how many there are."""
    current: dict[fx.Node, fx.Node] = {}
    taken: dict[fx.Node, list[tuple[Demand, fx.Node]]] = {}
    narrowed = 0

    def fetch(x: fx.Node, need: Need | None) -> fx.Node:
        have = needs.get(x, All(""))
        here = current.get(x, x)
        if need is None or isinstance(need, All) or same_need(have, need):
            return here
        known = taken.setdefault(x, [])
        for other, made in known:
            if same_need(other, need) and (other.batch, other.rank) == (need.batch, need.rank):
                return made
        want = need
        if isinstance(want.rows, (Index, PerBatch)):
            rows = current.get(want.rows.rows, want.rows.rows)
            want = replace(want, rows=type(want.rows)(rows))
        made = take(graph, here, have, want)
        known.append((need, made))
        return made

    for x in _indices(needs):
        _hoist(graph, x)
    for node in list(graph.nodes):
        plan = plans.get(node)
        need = needs.get(node)
        rebuilt = plan is not None and (
            isinstance(need, Demand)
            or plan.always
            or (plan.shrink and not isinstance(needs[plan.needs[0][0]], All))
        )
        if rebuilt:
            assert plan is not None
            with graph.inserting_before(node):
                new = plan.build(fetch)
            if isinstance(need, Demand):
                narrowed += 1
                inherit(node, new)
                new.meta[ROWS] = _text(count(need.rows))
            current[node] = new
        elif node.op != "placeholder":
            node.args = fx.node.map_arg(node.args, lambda n: current.get(n, n))
            node.kwargs = fx.node.map_arg(node.kwargs, lambda n: current.get(n, n))
    return narrowed


def _text(n: Size) -> int | str:
    known = static_size(n)
    return str(n) if known is None else known


def _indices(needs: dict[fx.Node, Need]) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}
    for need in needs.values():
        if isinstance(need, Demand) and isinstance(need.rows, (Index, PerBatch)):
            found[need.rows.rows] = None
    return list(found)


def _hoist(graph: fx.Graph, x: fx.Node) -> None:
    """Move x and what it is made of to the top: its rows are taken far above its own place."""
    chain: set[fx.Node] = set()
    todo = [x]
    while todo:
        node = todo.pop()
        # Constants may stand anywhere, too.
        if node.op in ("call_function", "get_attr") and node not in chain and SIZE not in node.meta:
            chain.add(node)
            todo.extend(node.all_input_nodes)
    # In graph order, each before the first node that stays: what they need is above already.
    stays = top(graph)
    for node in [n for n in graph.nodes if n in chain]:
        if node is stays:
            stays = stays.next
        else:
            stays.prepend(node)


def _describe_sites(
    gm: fx.GraphModule, needs: dict[fx.Node, Need], plans: dict[fx.Node, Plan], report: PassReport
) -> None:
    for node in gm.graph.nodes:
        site: AttentionSite | None = node.meta.get(SITE)
        if site is None or node.target is not attend:
            continue
        need = needs.get(node)
        if need is None:
            site.query_rows, site.key_rows = 0, 0
            continue
        if isinstance(need, All):
            if not same(shape(node)[2], 1):
                site.rows_reason = need.cause
                report.skip(site.site, "all-rows", need.cause)
            continue
        if need.dim == 2:
            site.query_rows = _text(count(need.rows))
        key_need = dict(plans[node].needs)[Attend.of(node).k]
        if isinstance(key_need, Demand):
            site.key_rows = _text(count(key_need.rows))
