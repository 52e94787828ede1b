"""Read an attention off the graph: an SDPA call, or matmul, softmax, matmul.

From a softmax the walk goes up to the contraction that made the scores and down to the one that
takes the values. Every dimension is followed by its axes, so that layout, head order and repeated
heads are read off and never assumed. What does not fit raises Miss; nothing here changes the graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from kvtailor.passes.attention.axes import (
    Axis,
    Dims,
    Labelled,
    aligned,
    is_cast,
    leaves,
    peel,
    split,
)
from kvtailor.passes.attention.contraction import contraction, is_scored
from kvtailor.passes.attention.downwards import downwards, query_rows, values
from kvtailor.passes.attention.empty_rows import NORMAL, constant_number, magnitude
from kvtailor.passes.attention.found import Add, Attention, Factor, Fill, Miss, has, known, op_name
from kvtailor.passes.graph import as_node, aten, is_call, is_tensor, same, shape, val
from kvtailor.passes.normalise import maximum_over


def read_sdpa(node: fx.Node) -> Attention:
    defaults = (None, None, None, None, 0.0, False)
    args = [*node.args, *defaults[len(node.args) :]]
    q, k, v = (as_node(x) for x in args[:3])
    mask, dropout, causal = args[3:]
    mask = node.kwargs.get("attn_mask", mask)
    dropout = node.kwargs.get("dropout_p", dropout)
    causal = node.kwargs.get("is_causal", causal)
    if isinstance(dropout, fx.Node) or dropout != 0:
        raise Miss("dropout", "dropout is active")
    if mask is not None and causal:
        raise Miss("mask-and-causal", "is_causal together with a mask")
    batch: Dims = [[Axis(n)] for n in shape(node)[:-2]]
    rows, inner = ([Axis(n)] for n in shape(q)[-2:])
    keys, width = [Axis(shape(k)[-2])], [Axis(shape(v)[-1])]
    kv_batch = list(batch)
    if node.kwargs.get("enable_gqa") and len(shape(k)) > 2:
        if not same(shape(k)[-3], shape(v)[-3]):
            raise Miss("head-counts", "keys and values have different head counts")
        kv_batch[-1] = known(split, batch[-1], shape(k)[-3])[0]
    factors: list[Factor] = []
    scale: Any = node.kwargs.get("scale")
    if scale is None and isinstance(shape(q)[-1], torch.SymInt):
        factors.append(Factor(shape(q)[-1], aten.div.Tensor))
        scale = 1.0
    elif scale is None:
        scale = 1.0 / math.sqrt(shape(q)[-1])
    elif isinstance(scale, fx.Node):
        factors.append(Factor(scale, aten.mul.Tensor))
        scale = 1.0
    _assume_equal(shape(k)[-2:-1], shape(v)[-2:-1])
    for x in (q, k, v):
        if not node.kwargs.get("enable_gqa") or x is q:
            _assume_equal(shape(x)[:-2], shape(node)[:-2])
    found = Attention(
        result=node,
        out=[*batch, rows, width],
        q=known(aligned, q, [*batch, rows, inner]),
        k=known(aligned, k, [*kv_batch, keys, inner]),
        v=known(aligned, v, [*kv_batch, keys, width]),
        batch=batch,
        rows=rows,
        keys=keys,
        inner=inner,
        width=width,
        scale=float(scale),
        factors=factors,
        causal=bool(causal),
        by_hand=False,
    )
    if mask is not None:
        _assume_equal(shape(mask), (*shape(node)[:-1], shape(k)[-2]))
        value = known(aligned, as_node(mask), [*batch, rows, keys])
        dtype = val(mask).dtype
        if dtype == torch.bool:
            found.masks = [Fill(value, float("-inf"), dtype)]
        else:
            found.masks = [Add(value, dtype)]
    return found


def _assume_equal(sizes: Sequence[Any], others: Sequence[Any]) -> None:
    """Right-aligned sizes that SDPA demands to be equal or 1: guard that symbols are.

    A cache's keys and values have a symbol each, and nothing in the graph compares them.
    """
    for a, b in zip(sizes[::-1], others[::-1]):
        hints = [n.node.hint if isinstance(n, torch.SymInt) else n for n in (a, b)]
        if None not in hints and hints[0] == hints[1] and not same(a, b):
            bool(a == b)


def read_softmax(softmax: fx.Node) -> Attention:
    source = as_node(softmax.args[0])
    over = int(softmax.args[1]) % val(source).dim()  # type: ignore[arg-type]
    walk = _Upwards(Labelled(source, [[Axis(n)] for n in shape(source)]), over)
    walk.cast_to(val(softmax).dtype)
    others = [dim for d, dim in enumerate(walk.x.dims) if d != over]
    weights = Labelled(softmax, walk.x.dims)
    column = walk.take_off_sinks()
    keys = walk.x.dims[over]
    walk.run()
    q, k, free = walk.operands()
    if has(q, keys):
        q, k, free = k, q, free[::-1]
    if leaves(keys) and (has(q, keys) or not has(k, keys)):
        raise Miss("keys", "the softmax does not run over the keys alone")
    walk.check_users(softmax)
    weights, consumer = downwards(weights, keys, over, column is not None)
    v, out, width = values(weights, consumer, keys)
    rows = query_rows(others, free[0], v, walk.masks)
    return Attention(
        result=consumer,
        out=out,
        q=q,
        k=k,
        v=v,
        batch=[dim for dim in others if dim is not rows],
        rows=rows,
        keys=keys,
        inner=walk.contracted,
        width=width,
        scale=walk.scale,
        factors=walk.factors,
        softcap=walk.softcap,
        masks=walk.masks[::-1],
        sinks=column,
    )


def _is_item(node: fx.Node) -> bool:
    return is_call(node, operator.getitem)


class _Upwards:
    """From the softmax up to the contraction: sinks, mask, softcap, scale."""

    def __init__(self, x: Labelled, over: int):
        self.x, self.over = x, over
        self.scale = 1.0
        self.factors: list[Factor] = []
        self.softcap: float | None = None
        # In the order met: the last one applied first.
        self.masks: list[Add | Fill] = []
        self.contracted: list[Axis] = []
        self.path = [x.node]
        # The largest number that the scores can be on their way to the softmax.
        self.largest = math.inf

    def cast_to(self, dtype: torch.dtype) -> None:
        self.largest = min(self.largest, torch.finfo(dtype).max)

    def take_off_sinks(self) -> Labelled | None:
        """Go past a row maximum that is taken off, and past cat([scores, column], -1)."""
        while True:
            node = self.x.node
            shifted = is_call(node, aten.sub.Tensor)
            if shifted and maximum_over(node.args[0], node.args[1]) == self.over:
                # The same for all keys of a row: softmax does not see it.
                self._on(node.args[0])
            elif is_cast(node):
                self.cast_to(val(node).dtype)
                self._on(node.args[0])
            else:
                break
        if not is_call(node, aten.cat) or len(node.args[0]) != 2:  # type: ignore[arg-type]
            return None
        inner, column = (as_node(x) for x in node.args[0])  # type: ignore[union-attr]
        dim = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
        if dim % len(self.x.dims) != self.over or not same(shape(column)[self.over], 1):
            raise Miss("sinks", "what is joined to the scores is not one last column of sinks")
        dims = [*self.x.dims]
        dims[self.over] = []
        sinks: Labelled = known(aligned, column, dims)
        dims[self.over] = [Axis(shape(inner)[self.over])]
        self.x = Labelled(inner, dims)
        self.path.append(inner)
        return sinks

    def check_users(self, softmax: fx.Node) -> None:
        """Scores that something else reads as well are better left where they are."""
        expected = {*self.path, softmax}
        for node in self.path:
            for user in node.users:
                readers = {user}
                if is_call(user, aten.max, aten.amax):
                    # A maximum is there to be taken off again.
                    readers = {r for u in user.users for r in (u.users if _is_item(u) else [u])}
                if not readers <= expected:
                    raise Miss("scores-used", "the attention scores are used elsewhere too")

    def run(self) -> None:
        while contraction(self.x.node) is None:
            node = self.x.node
            if (source := known(peel, self.x)) is not None:
                self.x = source
                self.path.append(source.node)
            elif is_cast(node):
                self.cast_to(val(node).dtype)
                self._on(node.args[0])
            elif is_call(node, aten.mul.Tensor, aten.mul.Scalar):
                spine, other = _spine(node)
                self._multiply(other, aten.mul.Tensor)
                self._on(spine)
            elif is_call(node, aten.div.Tensor, aten.div.Scalar):
                spine, other = _spine(node)
                if spine is not node.args[0]:
                    raise Miss("scores", "something is divided by the scores")
                self._multiply(other, aten.div.Tensor)
                self._on(spine)
            elif is_call(node, aten.tanh):
                self._cap()
                self._on(node.args[0])
            elif is_call(node, aten.add.Tensor):
                spine, other = _spine(node)
                self._mask(Add(self._beside(other), val(node).dtype, _alpha(node)))
                self._on(spine)
            elif is_call(node, aten.sub.Tensor):
                spine, other = _spine(node)
                if spine is not node.args[0]:
                    raise Miss("scores", "the scores are subtracted from something")
                self._mask(Add(self._beside(other), val(node).dtype, -_alpha(node)))
                self._on(spine)
            elif is_call(node, aten.where):
                self._where(node)
            elif is_call(node, aten.masked_fill):
                keep = self._beside(node.args[1])
                dtype = val(node).dtype
                self._mask(Fill(keep, _number(node.args[2], dtype), dtype, inverted=True))
                self._on(node.args[0])
            else:
                raise Miss("scores", f"{op_name(node)} stands between the scores and the softmax")

    def operands(self) -> tuple[Labelled, Labelled, list[list[Axis]]]:
        """Both sides of the contraction, and for each the axes that the other does not have."""
        found = contraction(self.x.node)
        assert found is not None
        if found.bias is not None:
            self._mask(Add(self._beside(found.bias), val(self.x.node).dtype, found.beta))
        if isinstance(found.alpha, fx.Node):
            self.factors.append(Factor(found.alpha, aten.mul.Tensor))
        else:
            self.scale *= found.alpha
        axes = dict(zip(found.out, self.x.dims))
        sides = []
        for operand, letters in found.sides:
            for n, letter in zip(shape(operand), letters):
                if letter not in axes:
                    if not all(letter in other for _, other in found.sides):
                        raise Miss("contraction", "a dimension is summed over on one side")
                    axes[letter] = [Axis(n)]
                    self.contracted.extend(axes[letter])
            sides.append(known(aligned, operand, [axes[letter] for letter in letters]))
        (_, a), (_, b) = found.sides
        free = [
            [axis for letter in ours if letter not in theirs for axis in axes[letter]]
            for ours, theirs in ((a, b), (b, a))
        ]
        if any(
            not same(_length(s, self.contracted), _length(sides[0], self.contracted)) for s in sides
        ):
            raise Miss("contraction", "a contracted dimension is broadcast")
        return sides[0], sides[1], free

    def _on(self, source: Any) -> None:
        self.x = known(aligned, as_node(source), self.x.dims)
        self.path.append(self.x.node)

    def _beside(self, other: Any) -> Labelled:
        if not is_tensor(other):
            raise Miss("mask", "a number is added to the scores")
        return known(aligned, other, self.x.dims)

    def _multiply(self, other: Any, op: Any) -> None:
        if isinstance(other, fx.Node):
            value = self._beside(other) if is_tensor(other) else other
            self.factors.append(Factor(value, op))
        else:
            self.scale = self.scale * other if op is aten.mul.Tensor else self.scale / other

    def _cap(self) -> None:
        if self.softcap is not None:
            raise Miss("softcap", "two tanh between the scores and the softmax")
        for factor in self.factors:
            if not isinstance(factor.value, fx.Node):
                raise Miss("softcap", "the softcap is a tensor")
            self._multiply(_specialised(factor.value), factor.op)
        self.factors.clear()
        if not self.scale > 0:
            raise Miss("softcap", f"a softcap must be positive, got {self.scale}")
        # cap * tanh(rest * scores): attend divides cap * rest by the cap again.
        self.softcap = self.scale

    def _mask(self, mask: Add | Fill) -> None:
        if self.scale != 1.0 or self.factors or self.softcap is not None:
            raise Miss("order", "scores are masked before they are scaled or capped")
        if torch.finfo(mask.dtype).max > self.largest:
            # A minimum of the larger type becomes -inf on the way.
            finite = isinstance(mask, Fill) and math.isfinite(mask.value)
            if finite or (isinstance(mask, Add) and magnitude(mask.operand.node) != NORMAL):
                raise Miss("range", "masked scores are cast to a type of smaller range")
        self.masks.append(mask)

    def _where(self, node: fx.Node) -> None:
        condition, a, b = node.args
        if val(condition).dtype != torch.bool:
            raise Miss("mask", "a condition must be bool")
        spine, other = _spine(node, a, b)
        keep, dtype = self._beside(condition), val(node).dtype
        self._mask(Fill(keep, _number(other, dtype), dtype, inverted=spine is b))
        self._on(spine)


def _specialised(number: fx.Node) -> float:
    """A symbolic number as it is now, with a guard that it stays so."""
    symbol = val(number)
    if not isinstance(symbol, torch.SymFloat) or symbol.node.hint is None:
        raise Miss("symbolic", "a number is not known while compiling")
    return float(symbol)


def _length(x: Labelled, axes: list[Axis]) -> Any:
    return math.prod(
        n for n, dim in zip(shape(x.node), x.dims) if any(axis in dim for axis in axes)
    )


def _alpha(node: fx.Node) -> float:
    alpha = node.kwargs.get("alpha", 1)
    if isinstance(alpha, fx.Node):
        raise Miss("mask", "a mask is scaled by a symbolic number")
    if alpha != 1 and not is_scored(node.args[0]):
        raise Miss("scores", "the scores are scaled inside an add")
    return float(alpha)  # type: ignore[arg-type]


def _number(x: Any, dtype: torch.dtype) -> float:
    """The constant as scores of this dtype hold it."""
    if isinstance(val(x), torch.SymFloat):
        x = _specialised(x)
    number = constant_number(x, dtype)
    if number is None:
        raise Miss("fill", "scores are filled with a value that is not a constant")
    return number


def _spine(node: fx.Node, *operands: Any) -> tuple[fx.Node, Any]:
    """The operand that leads to the scores' contraction, and the other one."""
    a, b = operands or node.args[:2]
    scored = [is_scored(x) for x in (a, b)]
    if scored == [True, True]:
        # A mask may be made by a matmul too: it is told by being the same for several heads or
        # batch rows. Values do not depend on the choice, only what is called a query does.
        scored = [not _is_spread(x, node) for x in (a, b)]
        if scored[0] == scored[1]:
            raise Miss("ambiguous", f"both operands of {op_name(node)} hold a matmul")
    assert any(scored), "the walk starts where a contraction can be reached"
    return (as_node(a), b) if scored[0] else (as_node(b), a)


def _is_spread(x: Any, over: fx.Node) -> bool:
    """Whether x is broadcast to the shape of ``over``."""
    sizes = (1,) * (len(shape(over)) - len(shape(x))) + shape(x)
    return any(same(m, 1) and not same(n, 1) for m, n in zip(sizes, shape(over)))
