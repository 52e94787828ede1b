"""attend and paged_attend read and written by name, never by position.

The order of the arguments stands in the ops' schemas alone. What equals its default is left out
of a node, so that one meaning has one form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvtailor.kernels import ops
from kvtailor.passes.graph import emit, same, shape, val

Call = TypeVar("Call", bound="_Call")


class _Call:
    """A call of an op whose fields are the arguments. OPS: ops of this schema, usual one first."""

    OPS: ClassVar[tuple[torch._ops.OpOverload, ...]]

    @classmethod
    def of(cls: type[Call], node: fx.Node) -> Call:
        """The arguments of a node, defaults filled in."""
        assert node.target in cls.OPS, f"{node} is no {cls.__name__}"
        return cls.bind(node.args, node.kwargs)

    @classmethod
    def bind(cls: type[Call], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        schema = cls.OPS[0]._schema.arguments
        given = {a.name: a.default_value for a in schema if a.has_default_value()}
        given |= dict(zip((a.name for a in schema), args), **kwargs)
        return cls(**given)

    def replace(self: Call, **changes: Any) -> Call:
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def nodes(self) -> dict[str, fx.Node]:
        """The arguments that are nodes, by name."""
        return {name: x for name, x in vars(self).items() if isinstance(x, fx.Node)}

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments; what stands at the end as its default is left out."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        spoken = 0
        for a in self.OPS[0]._schema.arguments:
            value = getattr(self, a.name)
            usual = a.has_default_value() and value == a.default_value
            if not a.kwarg_only:
                args.append(value)
                spoken = spoken if usual else len(args)
            elif not usual:
                kwargs[a.name] = value
        return tuple(args[:spoken]), kwargs

    def emit(
        self, graph: fx.Graph, like: fx.Node | None = None, op: torch._ops.OpOverload | None = None
    ) -> fx.Node:
        """The call at the graph's insertion point; op: another one of OPS."""
        args, kwargs = self.arguments()
        return emit(graph, op or self.OPS[0], *args, like=like, **kwargs)

    def write(self, node: fx.Node) -> None:
        """Give the node these arguments."""
        node.args, node.kwargs = self.arguments()


@dataclass(frozen=True)
class Attend(_Call):
    """``attend`` or ``local_attend``; what the arguments mean stands in kernels/ops.py."""

    OPS = (ops.attend, ops.local_attend)

    q: Any
    k: Any
    v: Any
    mask: Any = None
    q_positions: Any = None
    chunk_origin: Any = None
    sinks: Any = None
    scale: float = dataclasses.field(kw_only=True)
    causal: bool = False
    q_offset: Any = 0
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    empty_row: str = "zero"

    @property
    def is_local(self) -> bool:
        """Whether it matters where queries and keys sit."""
        return self.causal or self.window is not None or self.chunk is not None

    @property
    def is_top_left_causal(self) -> bool:
        """Whether the flags mean exactly SDPA's is_causal: k <= q, no offset."""
        return (
            self.causal
            and self.q_positions is None
            and same(val(self.q_offset), 0)
            and self.chunk is None
            and (self.window is None or statically_known_true(self.window >= shape(self.q)[2]))
        )


@dataclass(frozen=True)
class PagedAttend(_Call):
    """``paged_attend``, with or without lse."""

    OPS = (ops.paged_attend, ops.paged_attend_lse)

    q: Any
    k_pages: Any
    v_pages: Any
    block_table: Any
    query_start: Any
    seq_lens: Any
    mask: Any = None
    q_positions: Any = None
    chunk_origin: Any = None
    sinks: Any = None
    alibi_slopes: Any = None
    scale: float = dataclasses.field(kw_only=True)
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
