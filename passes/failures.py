"""A pass may fail, the user's call may not: what may be caught, how it is told, the way back.

Whatever rewrites, cuts or describes a graph has a plain way to go on without it, and the report
and the log name what failed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx
from torch._dynamo.exc import RestartAnalysis, SkipFrame

log = logging.getLogger(__name__)

# How Dynamo is asked to begin again, or to leave a frame: no failures, never to be caught.
CONTROL_FLOW = (RestartAnalysis, SkipFrame)


def one_line(error: BaseException) -> str:
    """The error's type and the first line of what it says."""
    try:
        first = (str(error).strip().splitlines() or [""])[0]
    except Exception:
        first = "(it cannot say what)"
    return f"{type(error).__name__}: {first[:200]}"


@contextmanager
def only_describing(what: str) -> Iterator[None]:
    """An error within makes a report poorer, and is logged."""
    try:
        yield
    except CONTROL_FLOW:
        raise
    except Exception as error:
        log.warning("%s is missing from the report: %s", what, one_line(error))


class Snapshot:
    """A graph module as it is now, to go back to.

    Every pass is preceded by one and few fail, so the nodes are noted down, not copied.
    """

    def __init__(self, gm: fx.GraphModule):
        self.gm = gm
        self.nodes = [
            (n, n.op, n.target, n.args, n.kwargs, n.name, dict(n.meta)) for n in gm.graph.nodes
        ]
        self.attributes = {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in vars(gm).items()
        }
        # Of lists in the module's meta, others may hold on to the list and to what is in it.
        self.lists = [(v, list(v)) for v in gm.meta.values() if isinstance(v, list)]
        self.parts = [
            (x, dict(vars(x))) for v, _ in self.lists for x in v if hasattr(x, "__dict__")
        ]

    def restore(self) -> None:
        """Make the module what it was. Nodes are new ones, of the same names."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node, op, target, args, kwargs, name, meta in self.nodes:
            args, kwargs = fx.node.map_arg((args, kwargs), copies.__getitem__)
            new = copies[node] = graph.create_node(op, target, args, kwargs, name)
            assert new.name == name, f"{name} is {new.name} now"
            new.meta = meta
        for part, was in self.parts:
            part.__dict__.clear()
            part.__dict__.update(was)
        for each, contents in self.lists:
            each[:] = contents
        own: dict[str, Any] = vars(self.gm)
        own.clear()
        own.update(self.attributes)
        self.gm.graph = graph
