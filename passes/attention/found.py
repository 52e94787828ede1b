"""An attention as it was read off the graph, or why it is none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from kvtailor.passes.attention.axes import Axis, AxisError, Dims, Labelled, leaves
from kvtailor.passes.graph import NotDerivable


class Miss(Exception):
    """Nearly an attention. ``code`` is stable, the text says what does not fit."""

    def __init__(self, code: str, why: str):
        super().__init__(why)
        self.code = code


@dataclass
class Add:
    """scores + times * operand."""

    operand: Labelled
    dtype: torch.dtype
    times: float | fx.Node = 1.0


@dataclass
class Fill:
    """Scores where the operand holds (inverted: does not hold), ``value`` elsewhere."""

    operand: Labelled
    value: float
    dtype: torch.dtype
    inverted: bool = False


@dataclass
class Factor:
    """The scores are multiplied or divided by a tensor, a symbolic number, or a size's root."""

    value: Labelled | fx.Node | torch.SymInt
    op: Any


@dataclass
class Attention:
    """One attention, read and not yet rewritten.

    rows and keys are the axes of Tq and Tk, width those of v's last dimension; batch are the other
    dimensions of the scores, outermost first. Masks are in the order they are applied.
    """

    result: fx.Node
    out: Dims
    q: Labelled
    k: Labelled
    v: Labelled
    batch: Dims
    rows: list[Axis]
    keys: list[Axis]
    inner: list[Axis]
    width: list[Axis]
    scale: float = 1.0
    factors: list[Factor] = field(default_factory=list)
    softcap: float | None = None
    masks: list[Add | Fill] = field(default_factory=list)
    sinks: Labelled | None = None
    causal: bool = False
    by_hand: bool = True


def known(function: Any, *args: Any) -> Any:
    """function(*args), with axes that cannot be followed as a near miss."""
    try:
        return function(*args)
    except AxisError as error:
        raise Miss("layout", str(error)) from None
    except NotDerivable as error:
        raise Miss("symbolic", str(error)) from None


def has(x: Labelled, axes: list[Axis]) -> bool:
    """Whether x varies along these axes: all of them, and those of size 1 by name."""
    wanted = leaves(axes)
    if wanted:
        return all(axis in x.leaves() for axis in wanted)
    return any(axis in dim for axis in axes for dim in x.dims)


def op_name(node: fx.Node) -> str:
    target: Any = node.target
    packet = getattr(target, "overloadpacket", None)
    return str(packet or getattr(target, "__name__", target)).removeprefix("aten.")
