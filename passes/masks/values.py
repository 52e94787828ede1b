"""What one element of a tensor in a mask subgraph can be.

Bool                a predicate (logic.py)
sympy expression    an integer
Real                a float: a constant plus float elements nobody knows
Pick                one number where a condition holds, another elsewhere
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from sympy import Expr, Integer
from torch import fx

from kvtailor.passes.graph import argument, val
from kvtailor.passes.masks.integers import Atom
from kvtailor.passes.masks.logic import FALSE, TRUE, Bool

INTEGERS = (torch.int64, torch.int32)


class Unreadable(Exception):
    """An element that no rule understands; it becomes an atom."""


@dataclass(frozen=True)
class Real:
    """const plus the unknown elements in parts."""

    const: float
    parts: tuple[Atom, ...] = ()


@dataclass(frozen=True)
class Pick:
    """then where condition holds, other elsewhere; both are numbers, never Bool."""

    condition: Bool
    then: Num
    other: Num


Num: TypeAlias = "Expr | Real | Pick"
Value: TypeAlias = "Bool | Expr | Real | Pick"
Index: TypeAlias = "tuple[Expr, ...]"


def leaves(v: Value) -> int:
    """How many cases a value has."""
    return leaves(v.then) + leaves(v.other) if isinstance(v, Pick) else 1


def constant(value: float) -> Expr | Real:
    """A Python number as a value. Raises Unreadable for NaN, which equals nothing."""
    if isinstance(value, int):
        return Integer(int(value))
    if math.isnan(value):
        raise Unreadable("nan")
    return Real(float(value))


def stored(v: Num, dtype: torch.dtype) -> Value:
    """A number, not a Pick, converted to a dtype as torch would. Raises Unreadable."""
    plain: torch.Tensor | None = None
    if isinstance(v, Real) and not v.parts:
        plain = torch.tensor(v.const, dtype=torch.float64, device="cpu")
    elif isinstance(v, Expr) and v.is_Integer:
        plain = torch.tensor(int(v), dtype=torch.int64, device="cpu")
    if plain is not None:
        found = constant(plain.to(dtype).item())
        if dtype == torch.bool:
            return TRUE if found == 1 else FALSE
        return found
    if isinstance(v, Expr) and dtype in INTEGERS:
        return v
    raise Unreadable("a value in another dtype")


def size_expr(n: Any) -> Expr:
    """A size, int or SymInt, as an expression."""
    if not isinstance(n, torch.SymInt):
        return Integer(n)
    e = n.node.expr
    return e if e.is_Symbol else sympy.expand(e)


def sizes(node: fx.Node) -> tuple[Expr, ...]:
    return tuple(size_expr(n) for n in val(node).shape)


def broadcast_index(have: Index, want: Index, index: Index) -> Index:
    """Index into a tensor of sizes have that is broadcast to sizes want."""
    skip = len(want) - len(have)
    # A dimension of one row on both sides keeps its symbol: row 0 of a decode step is still "the
    # query", and reads as one.
    return tuple(
        Integer(0) if n == 1 and m != 1 else i for i, n, m in zip(index[skip:], have, want[skip:])
    )


def dimension(node: fx.Node, rank: int, default: int = 0) -> int:
    """A dim argument, counted from the front."""
    dim = argument(node, "dim")
    return int(default if dim is None else dim) % rank


def replaced(index: Index, dim: int, *new: Expr) -> Index:
    """index with the entry at dim replaced by new ones, or by none."""
    return (*index[:dim], *new, *index[dim + 1 :])
