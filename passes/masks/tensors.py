"""Build tensors for what a mask was proved to be, out of the nodes it was read from.

Only small tensors: positions ``[Tq]``, chunk origins ``[B]``, key masks ``[B, 1, 1, Tk]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sympy import Expr, Integer, Symbol
from torch import fx

from kvtailor.passes.graph import aten, emit, frozen, sym_arg, val
from kvtailor.passes.masks.integers import Atom, fdiv, terms
from kvtailor.passes.masks.logic import And, Bool, Eq, Ge, Lit, Logic, Ne, Or
from kvtailor.passes.masks.values import sizes


class CannotBuild(Exception):
    """The value has no small form in nodes of this graph."""


class TensorBuilder:
    """Emits nodes at the graph's insertion point; equal values once.

    Axes are index symbols: a tensor over axes (b, k) has one dimension for each, of size 1 where
    the value does not depend on the symbol. Nodes made for one site serve the later ones, so
    sites must come in graph order.
    """

    def __init__(self, graph: fx.Graph, logic: Logic, device: torch.device):
        self.graph = graph
        self.logic = logic
        self.device = device
        self._made: dict[Any, fx.Node] = {}

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        key = target, frozen(args), frozen(kwargs)
        if key not in self._made:
            self._made[key] = emit(self.graph, target, *args, **kwargs)
        return self._made[key]

    def size(self, e: Expr) -> int | fx.Node:
        """An expression over sizes as an op argument. Raises CannotBuild, NotDerivable."""
        if e.is_Integer:
            return int(e)
        if self.logic.shape_env is None or not self.logic.is_size(e):
            raise CannotBuild(f"{e} is no size")
        return sym_arg(self.graph, self.logic.shape_env.create_symintnode(e, hint=None))

    def split(self, e: Expr) -> tuple[Expr, Expr]:
        """e as (tensor part, part made of sizes and constants)."""
        fixed = sum((c * t for t, c in terms(e).items() if self.logic.is_size(t)), start=Integer(0))
        return e - fixed, fixed

    def integers(self, e: Expr, axes: Sequence[Symbol]) -> fx.Node:
        """int64 tensor of e, one broadcastable dimension per axis."""
        varying, fixed = self.split(e)
        total: fx.Node | None = None
        for term, c in terms(varying).items():
            if term == 1:
                continue
            part = self._term(term, axes)
            if c != 1:
                part = self._call(aten.mul.Tensor, part, int(c))
            total = part if total is None else self._call(aten.add.Tensor, total, part)
        offset = self.size(fixed)
        if total is None:
            return self._call(
                aten.full.default, [1] * len(axes), offset, dtype=torch.int64, device=self.device
            )
        if isinstance(offset, int) and offset == 0:
            return total
        return self._call(aten.add.Tensor, total, offset)

    def _term(self, term: Expr, axes: Sequence[Symbol]) -> fx.Node:
        if term in self.logic.sizes:
            if term not in axes:
                raise CannotBuild(f"{term} is no axis")
            row = self._call(
                aten.arange.default, self.size(self.logic.sizes[term]), device=self.device
            )
            return self._spread(row, [term], axes)
        if term in self.logic.atoms:
            found = self.element(self.logic.atoms[term], axes)
            if val(found).dtype != torch.int64:
                found = self._call(aten._to_copy.default, found, dtype=torch.int64)
            return found
        if isinstance(term, fdiv):
            inner = self.integers(term.args[0], axes)
            c = int(term.args[1])
            return self._call(aten.div.Tensor_mode, inner, c, rounding_mode="floor")
        raise CannotBuild(f"{term} is no tensor")

    def element(self, atom: Atom, axes: Sequence[Symbol]) -> fx.Node:
        """The atom's tensor, turned so that its dimensions follow the axes."""
        return self.placed(atom.node, atom.index, axes)

    def placed(self, node: fx.Node, index: Sequence[Expr], axes: Sequence[Symbol]) -> fx.Node:
        """node[index] as a tensor over axes, by select, permute and unsqueeze only.

        Each index must be a constant, or a bare axis that runs over the whole dimension.
        """
        if not can_place(self.logic, node, index, axes):
            raise CannotBuild(f"{node} at {index} is no plain view")
        result = node
        kept: list[Expr] = []
        for dim in reversed(range(len(index))):
            if index[dim].is_Integer:
                result = self._call(aten.select.int, result, dim, int(index[dim]))
            else:
                kept.insert(0, index[dim])
        return self._spread(result, kept, axes)

    def _spread(self, node: fx.Node, have: Sequence[Expr], axes: Sequence[Symbol]) -> fx.Node:
        """A tensor over the axes ``have`` as one over all axes."""
        order = [have.index(a) for a in axes if a in have]
        if order != sorted(order):
            node = self._call(aten.permute.default, node, order)
        for dim, axis in enumerate(axes):
            if axis not in have:
                node = self._call(aten.unsqueeze.default, node, dim)
        return node

    def predicate(self, p: Bool, axes: Sequence[Symbol]) -> fx.Node:
        """bool tensor of p over the axes."""
        if isinstance(p, Lit):
            found = self.element(p.atom, axes)
            return found if p.positive else self._call(aten.logical_not.default, found)
        if isinstance(p, (Ge, Eq, Ne)):
            return self._comparison(p, axes)
        assert isinstance(p, (And, Or)) and p.args, "a constant needs no tensor"
        target = aten.bitwise_and.Tensor if isinstance(p, And) else aten.bitwise_or.Tensor
        result, *rest = [self.predicate(each, axes) for each in p.args]
        for each in rest:
            result = self._call(target, result, each)
        return result

    def _comparison(self, p: Ge | Eq | Ne, axes: Sequence[Symbol]) -> fx.Node:
        """e >= 0 with the last axis on one side and the rest on the other, each side small."""
        left: Expr = Integer(0)
        right: Expr = Integer(0)
        for t, c in terms(p.e).items():
            if axes[-1] in self.logic.deps(t):
                left += c * t
            else:
                right -= c * t
        scalar = not self.logic.deps(right) and not any(
            s in self.logic.atoms for s in right.free_symbols
        )
        kind = {Ge: aten.ge, Eq: aten.eq, Ne: aten.ne}[type(p)]
        if scalar:
            return self._call(kind.Scalar, self.integers(left, axes), self.size(right))
        return self._call(kind.Tensor, self.integers(left, axes), self.integers(right, axes))

    def conjunction(self, parts: Sequence[fx.Node]) -> fx.Node:
        result, *rest = parts
        for each in rest:
            result = self._call(aten.bitwise_and.Tensor, result, each)
        return result

    def full_size(self, node: fx.Node, axes: Sequence[Symbol]) -> fx.Node:
        """node, a tensor over axes, with every dimension as long as its axis."""
        want = [self.size(self.logic.sizes[a]) for a in axes]
        if sizes(node) == tuple(self.logic.sizes[a] for a in axes):
            return node
        return self._call(aten.expand.default, node, want)


def can_place(logic: Logic, node: fx.Node, index: Sequence[Expr], axes: Sequence[Symbol]) -> bool:
    """Whether ``placed`` can show node[index] as a view."""
    seen = [i for i in index if not i.is_Integer]
    return len(set(seen)) == len(seen) and all(
        (i.is_Integer and i >= 0) or (i in axes and logic.sizes[i] == n)
        for i, n in zip(index, sizes(node))
    )
