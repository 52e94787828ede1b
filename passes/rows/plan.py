"""What a rule says of one call: the rows it needs of its inputs, and the call over those.

A rule is (node, demand) -> Plan, or None where the call is not known to work row by row for that
demand. It never looks at a model, only at shapes and arguments. A node used twice in a call gets
one need, so rules that narrow one input refuse it as another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from kvtailor.passes.graph import emit, same, shape
from kvtailor.passes.rows.demand import WHOLE, Demand, Need

Fetch = Callable[[fx.Node, "Need | None"], fx.Node]


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


Rule = Callable[[fx.Node, Demand], "Plan | None"]

# A rule that also knows what is needed for all rows of the result.
WholeRule = Callable[[fx.Node, Need], "Plan | None"]


class NotRowWise(Exception):
    """The rows of the result are not rows of this input."""


def over(
    node: fx.Node,
    rows: Mapping[fx.Node, Need],
    call: Callable[[Callable[[Any], Any]], fx.Node] | None = None,
) -> Plan:
    """A plan that needs ``rows`` of some inputs and everything of the others.

    call: makes the new node where that is not the same call over narrowed inputs; it gets a
    function (arguments) -> the arguments narrowed.
    """

    def build(fetch: Fetch) -> fx.Node:
        def get(args: Any) -> Any:
            return fx.node.map_arg(args, lambda n: fetch(n, rows.get(n, WHOLE)))

        if call is not None:
            return call(get)
        args, kwargs = get((node.args, node.kwargs))
        assert callable(node.target)
        return emit(node.graph, node.target, *args, like=node, **kwargs)

    return Plan([(x, asked(rows.get(x, WHOLE))) for x in node.all_input_nodes], build)


def asked(need: Need) -> Need:
    """What an input is asked for: all of it, where its rows are first broadcast, then taken."""
    return WHOLE if isinstance(need, Demand) and need.rank is not None else need


def broadcast(x: fx.Node, node: fx.Node, need: Demand) -> Need:
    """Rows of x, which is broadcast to the shape of node. Raises NotRowWise."""
    rank, T = len(shape(node)), shape(node)[need.dim]
    lead = rank - len(shape(x))
    dim, batch = need.dim - lead, need.batch - lead
    if dim < 0 or (same(shape(x)[dim], 1) and not same(T, 1)):
        return WHOLE
    if not same(shape(x)[dim], T):
        raise NotRowWise
    lacks = batch < 0 or not same(shape(x)[batch], shape(node)[need.batch])
    if need.by_batch and lacks:
        return replace(need, rank=rank)
    return need.at(dim, max(batch, 0))


def aligned(x: fx.Node, node: fx.Node, need: Demand) -> Need:
    """``broadcast`` for a call that does not broadcast x by itself. Raises NotRowWise."""
    found = broadcast(x, node, need)
    if asked(found) is not found:
        raise NotRowWise
    return found


def shrink(
    node: fx.Node, x: fx.Node, need: Need, after: Callable[[fx.Node], fx.Node] = lambda n: n
) -> Plan:
    """A slice or gather: x with fewer rows is the result, but for what ``after`` does."""
    others: list[tuple[fx.Node, Need | None]] = [
        (n, WHOLE) for n in node.all_input_nodes if n is not x
    ]
    return Plan([(x, need), *others], lambda fetch: after(fetch(x, need)), shrink=True)
