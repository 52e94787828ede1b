"""Attention, however it is written, becomes one op.

Before:  s = matmul(q, permute(expand(k, ...), ...)); s = mul(s, 0.25); s = add(s, mask)
         p = softmax(s, -1); o = matmul(p, expand(v, ...))
After:   o = kvtailor.attend(q, k, v, mask, scale=0.25)

From a softmax the walk goes up to the contraction that made the scores and down to the one that
takes the values. Every dimension is followed by its axes, so that layout, head order and repeated
heads are read off and never assumed. What does not fit is left alone, with a reason.

Rows that see no key keep what they get in eager mode: zero from SDPA, the mean of v where hidden
scores are filled with a finite minimum, NaN where they are -inf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from kvtailor.kernels.ops import attend
from kvtailor.passes.axes import (
    Axis,
    AxisError,
    Dims,
    Labelled,
    aligned,
    arrange,
    is_cast,
    leaves,
    peel,
    push,
    split,
)
from kvtailor.passes.graph import (
    SITE,
    NotDerivable,
    ancestors,
    as_node,
    aten,
    clean_module_path,
    emit,
    is_call,
    is_tensor,
    module_path,
    same,
    shape,
    sites,
    val,
)
from kvtailor.passes.normalise import maximum_over
from kvtailor.passes.report import AttentionSite, PassReport

# A score filled with this or less has weight 0 in any row that sees a key.
HIDING = -1e4
# Added to a float32 or bfloat16 score, this or less swallows it: the sum is the fill.
ABSORBING = -1e30
FP16_MIN = torch.finfo(torch.float16).min
FP32_MIN = torch.finfo(torch.float32).min
# Constant masks up to this many elements are computed to see whether a row is empty.
EVALUATED = 1 << 26


class Miss(Exception):
    """Nearly an attention. ``code`` is stable, the text says what does not fit."""

    def __init__(self, code: str, why: str):
        super().__init__(why)
        self.code = code


def recognise_attention(gm: fx.GraphModule) -> PassReport:
    """Replace every attention by ``kvtailor::attend`` and give it an AttentionSite.

    A near miss (an SDPA call, or a softmax over scores from a matmul) gets a skip with its code
    and a site whose lowering is "untouched".
    """
    report = PassReport()
    gm.graph.eliminate_dead_code()
    names = _Names(gm)
    streams = _Streams()
    for node in list(gm.graph.nodes):
        sdpa = is_call(node, aten.scaled_dot_product_attention)
        if not sdpa and not (is_call(node, aten.softmax) and _is_scored(node.args[0])):
            continue
        at = node
        try:
            found = _read_sdpa(node) if sdpa else _read_softmax(node)
            at = found.result
            new = _rewrite(gm, found)
        except Miss as miss:
            site = AttentionSite(names.unique(at), at.name, lowering="untouched", reason=str(miss))
            report.skip(site.site, miss.code, str(miss))
            sites(gm).append(site)
            continue
        q, k = as_node(new.args[0]), as_node(new.args[1])
        site = AttentionSite(names.unique(at), new.name, softcap=found.softcap)
        site.sinks = found.sinks is not None
        site.kv_owner = names.owner(k)
        site.cross = names.owner(q) is not None and streams.differ(q, k)
        new.meta[SITE] = site
        sites(gm).append(site)
        report.rewrites += 1
    return report


# ---- what is read off the graph ----


@dataclass
class Add:
    """scores + times * value."""

    value: Labelled
    dtype: torch.dtype
    times: float = 1.0


@dataclass
class Fill:
    """Scores where keep (or not keep, inverted) holds, ``value`` elsewhere."""

    keep: Labelled
    value: float
    dtype: torch.dtype
    inverted: bool = False


@dataclass
class Factor:
    """The scores are multiplied or divided by a tensor or a symbolic number."""

    value: Labelled | fx.Node
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


def _read_sdpa(node: fx.Node) -> Attention:
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
        kv_batch[-1] = _known(split, batch[-1], shape(k)[-3])[0]
    factors: list[Factor] = []
    scale: Any = node.kwargs.get("scale")
    if scale is None:
        if not isinstance(shape(q)[-1], int):
            raise Miss("scale", "the head dimension, and so the scale, is symbolic")
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
        q=_known(aligned, q, [*batch, rows, inner]),
        k=_known(aligned, k, [*kv_batch, keys, inner]),
        v=_known(aligned, v, [*kv_batch, keys, width]),
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
        value = _known(aligned, as_node(mask), [*batch, rows, keys])
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


def _known(function: Any, *args: Any) -> Any:
    """function(*args), with axes that cannot be followed as a near miss."""
    try:
        return function(*args)
    except AxisError as error:
        raise Miss("layout", str(error)) from None
    except NotDerivable as error:
        raise Miss("symbolic", str(error)) from None


def _read_softmax(softmax: fx.Node) -> Attention:
    source = as_node(softmax.args[0])
    over = int(softmax.args[1]) % val(source).dim()  # type: ignore[arg-type]
    scores = Labelled(source, [[Axis(n)] for n in shape(source)])
    weights = Labelled(softmax, scores.dims)
    scores, column = _take_off_sinks(scores, over)
    keys = scores.dims[over]
    walk = _Upwards(scores, keys, column is not None)
    walk.run()
    first, second, free = walk.operands()
    if any(axis in first.leaves() for axis in leaves(keys)) or (
        not leaves(keys) and _has(first, keys)
    ):
        first, second, free = second, first, free[::-1]
    if not _has(second, keys) or _has(first, keys):
        raise Miss("keys", "the softmax does not run over the keys alone")
    inner = walk.contracted
    weights, consumer = _downwards(weights, keys, over, column is not None)
    v, out, width = _values(weights, consumer, keys)

    others = [dim for d, dim in enumerate(scores.dims) if d != over]
    rows = _query_rows(others, free[0], v, walk.masks)
    return Attention(
        result=consumer,
        out=out,
        q=first,
        k=second,
        v=v,
        batch=[dim for dim in others if dim is not rows],
        rows=rows,
        keys=keys,
        inner=inner,
        width=width,
        scale=walk.scale,
        factors=walk.factors,
        softcap=walk.softcap,
        masks=walk.masks[::-1],
        sinks=column,
    )


def _has(x: Labelled, axes: list[Axis]) -> bool:
    """Whether x varies along these axes: all of them, and those of size 1 by name."""
    wanted = leaves(axes)
    if wanted:
        return all(axis in x.leaves() for axis in wanted)
    return any(axis in dim for axis in axes for dim in x.dims)


def _take_off_sinks(scores: Labelled, over: int) -> tuple[Labelled, Labelled | None]:
    """cat([scores, column], -1), its row maximum taken off or not, apart."""
    node = scores.node
    while True:
        if is_cast(node):
            node = as_node(node.args[0])
        elif is_call(node, aten.sub.Tensor) and maximum_over(*node.args[:2]) == over:
            # The same for all keys of a row: softmax does not see it.
            node = as_node(node.args[0])
        else:
            break
    if not is_call(node, aten.cat) or len(node.args[0]) != 2:  # type: ignore[arg-type]
        return Labelled(node, scores.dims), None
    inner, column = (as_node(x) for x in node.args[0])  # type: ignore[union-attr]
    dim = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
    if dim % len(scores.dims) != over or not same(shape(column)[over], 1):
        raise Miss("sinks", "what is joined to the scores is not one last column of sinks")
    dims = [*scores.dims]
    dims[over] = [Axis(shape(inner)[over])]
    without = [*scores.dims]
    without[over] = []
    return Labelled(inner, dims), _known(aligned, column, without)


class _Upwards:
    """From the softmax up to the contraction: mask, then softcap, then scale."""

    def __init__(self, x: Labelled, keys: list[Axis], sinks: bool):
        self.x, self.keys, self.sinks = x, keys, sinks
        self.scale = 1.0
        self.factors: list[Factor] = []
        self.softcap: float | None = None
        # In the order met: the last one applied first.
        self.masks: list[Add | Fill] = []
        self.contracted: list[Axis] = []

    def run(self) -> None:
        while _contraction(self.x.node) is None:
            node = self.x.node
            if (source := _known(peel, self.x)) is not None:
                self.x = source
            elif is_cast(node):
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
                self._subtract(node)
            elif is_call(node, aten.where):
                self._where(node)
            elif is_call(node, aten.masked_fill):
                keep = self._beside(node.args[1])
                self._mask(Fill(keep, _number(node.args[2]), val(node).dtype, inverted=True))
                self._on(node.args[0])
            else:
                raise Miss("scores", f"{_op(node)} stands between the scores and the softmax")

    def operands(self) -> tuple[Labelled, Labelled, list[list[Axis]]]:
        """Both sides of the contraction, and for each the axes that the other does not have."""
        contraction = _contraction(self.x.node)
        assert contraction is not None
        if contraction.bias is not None:
            self._mask(
                Add(self._beside(contraction.bias), val(self.x.node).dtype, contraction.beta)
            )
        if isinstance(contraction.alpha, fx.Node):
            self.factors.append(Factor(contraction.alpha, aten.mul.Tensor))
        else:
            self.scale *= contraction.alpha
        axes = dict(zip(contraction.out, self.x.dims))
        sides = []
        for operand, letters in contraction.sides:
            for n, letter in zip(shape(operand), letters):
                if letter not in axes:
                    if not all(letter in other for _, other in contraction.sides):
                        raise Miss("contraction", "a dimension is summed over on one side")
                    axes[letter] = [Axis(n)]
                    self.contracted.extend(axes[letter])
            sides.append(_known(aligned, operand, [axes[letter] for letter in letters]))
        (_, a), (_, b) = contraction.sides
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
        self.x = _known(aligned, as_node(source), self.x.dims)

    def _beside(self, other: Any) -> Labelled:
        if not is_tensor(other):
            raise Miss("mask", "a number is added to the scores")
        return _known(aligned, other, self.x.dims)

    def _multiply(self, other: Any, op: Any) -> None:
        if isinstance(other, fx.Node):
            value = self._beside(other) if is_tensor(other) else other
            self.factors.append(Factor(value, op))
        else:
            self.scale = self.scale * other if op is aten.mul.Tensor else self.scale / other

    def _cap(self) -> None:
        if self.softcap is not None:
            raise Miss("softcap", "two tanh between the scores and the softmax")
        if self.factors:
            raise Miss("softcap", "the softcap is not a constant")
        if not self.scale > 0:
            raise Miss("softcap", f"a softcap must be positive, got {self.scale}")
        # cap * tanh(rest * scores): attend divides cap * rest by the cap again.
        self.softcap = self.scale

    def _mask(self, mask: Add | Fill) -> None:
        if self.scale != 1.0 or self.factors or self.softcap is not None:
            raise Miss("order", "scores are masked before they are scaled or capped")
        self.masks.append(mask)

    def _subtract(self, node: fx.Node) -> None:
        x, other = node.args
        if is_tensor(other) and not (self.masks or self.sinks or self.factors):
            over = maximum_over(x, other)
            first = self.scale == 1.0 and self.softcap is None
            if over is not None and first and self.x.dims[over] == self.keys:
                return self._on(x)
        spine, other = _spine(node)
        if spine is not node.args[0]:
            raise Miss("scores", "the scores are subtracted from something")
        self._mask(Add(self._beside(other), val(node).dtype, -_alpha(node)))
        return self._on(spine)

    def _where(self, node: fx.Node) -> None:
        condition, a, b = node.args
        if val(condition).dtype != torch.bool:
            raise Miss("mask", "a condition must be bool")
        spine, other = _spine(node, a, b)
        keep = self._beside(condition)
        self._mask(Fill(keep, _number(other), val(node).dtype, inverted=spine is b))
        self._on(spine)


def _length(x: Labelled, axes: list[Axis]) -> Any:
    return math.prod(
        n for n, dim in zip(shape(x.node), x.dims) if any(axis in dim for axis in axes)
    )


def _alpha(node: fx.Node) -> float:
    alpha = node.kwargs.get("alpha", 1)
    if isinstance(alpha, fx.Node):
        raise Miss("mask", "a mask is scaled by a symbolic number")
    if alpha != 1 and not _is_scored(node.args[0]):
        raise Miss("scores", "the scores are scaled inside an add")
    return float(alpha)  # type: ignore[arg-type]


def _spine(node: fx.Node, *operands: Any) -> tuple[fx.Node, Any]:
    """The operand that leads to the scores' contraction, and the other one."""
    a, b = operands or node.args[:2]
    scored = [_is_scored(x) for x in (a, b)]
    if scored == [True, True]:
        raise Miss("ambiguous", f"both operands of {_op(node)} hold a matmul")
    assert any(scored), "the walk starts where a contraction can be reached"
    return (as_node(a), b) if scored[0] else (as_node(b), a)


def _op(node: fx.Node) -> str:
    target: Any = node.target
    packet = getattr(target, "overloadpacket", None)
    return str(packet or getattr(target, "__name__", target)).removeprefix("aten.")


def _number(x: Any) -> float:
    """The number that a fill value is: a Python number, or a tensor filled with one."""
    node = x
    while isinstance(node, fx.Node):
        if is_call(node, aten.full, aten.full_like, aten.new_full):
            node = node.args[-1] if not is_call(node, aten.new_full) else node.args[2]
        elif is_call(node, *_TRANSPARENT, aten.scalar_tensor, aten.lift_fresh_copy):
            node = node.args[0]
        elif is_call(node, aten.zeros, aten.zeros_like, aten.new_zeros):
            node = 0.0
        elif node.op == "get_attr" and node.graph.owning_module is not None:
            tensor = getattr(node.graph.owning_module, str(node.target), None)
            constant = str(node.target).startswith("_tensor_constant")
            if not constant or not isinstance(tensor, torch.Tensor) or tensor.numel() != 1:
                break
            with unset_fake_temporarily():
                node = float(tensor)
        else:
            break
    if isinstance(node, fx.Node):
        raise Miss("fill", "scores are filled with a value that is not a constant")
    return float(node)


# ---- contractions ----


@dataclass
class Contraction:
    """beta * bias + alpha * sum over the letters that ``out`` lacks, like an einsum."""

    sides: list[tuple[fx.Node, list[Any]]]
    out: list[Any]
    alpha: Any = 1.0
    bias: fx.Node | None = None
    beta: float = 1.0


def _contraction(node: Any) -> Contraction | None:
    if is_call(node, aten.matmul, aten.bmm, aten.mm):
        a, b = (as_node(x) for x in node.args[:2])
        return _matmul(a, b)
    if is_call(node, aten.baddbmm):
        bias, a, b = (as_node(x) for x in node.args[:3])
        found = _matmul(a, b)
        found.alpha = node.kwargs.get("alpha", 1)
        beta = node.kwargs.get("beta", 1)
        if isinstance(beta, fx.Node):
            return None
        if beta != 0:
            found.bias, found.beta = bias, float(beta)
        return found
    if is_call(node, aten.einsum) and len(node.args[1]) == 2 and "." not in node.args[0]:
        sides, arrow, out = node.args[0].replace(" ", "").partition("->")
        letters = [list(side) for side in sides.split(",")]
        if arrow and all(len(set(x)) == len(x) for x in letters):
            return Contraction(list(zip(node.args[1], letters)), list(out))
    return None


def _matmul(a: fx.Node, b: fx.Node) -> Contraction:
    ranks = len(shape(a)), len(shape(b))
    batch = list(range(max(*ranks, 2) - 2))
    first = ["m", "n"] if ranks[0] > 1 else ["n"]
    second = ["n", "p"] if ranks[1] > 1 else ["n"]
    sides = [
        (a, batch[len(batch) - max(ranks[0] - 2, 0) :] + first),
        (b, batch[len(batch) - max(ranks[1] - 2, 0) :] + second),
    ]
    return Contraction(sides, batch + first[:-1] + second[1:])


def _is_scored(x: Any) -> bool:
    """Whether a contraction is reached from x before any linear, embedding or softmax.

    A matmul of rows with one plain weight is a linear by another name.
    """
    seen: set[fx.Node] = set()
    todo = [x]
    while todo:
        node = todo.pop()
        if not isinstance(node, fx.Node) or node in seen or node.op != "call_function":
            continue
        seen.add(node)
        contraction = _contraction(node)
        if contraction is not None:
            if not _is_linear(contraction):
                return True
            continue
        target = node.target
        if (
            isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
        ) or is_call(node, *_TRANSPARENT):
            todo.extend(node.all_input_nodes)
    return False


_TRANSPARENT = (
    aten.alias,
    aten.cat,
    aten.clone,
    aten.contiguous,
    aten.detach,
    aten.dropout,
    aten.expand,
    aten.masked_fill,
    aten.permute,
    aten.repeat,
    aten.reshape,
    aten.slice,
    aten.squeeze,
    aten._to_copy,
    aten.transpose,
    aten.unsqueeze,
    aten.view,
    aten._unsafe_view,
    aten.where,
)


def _is_linear(contraction: Contraction) -> bool:
    nodes = [node for node, _ in contraction.sides]
    for weight, other in (nodes, nodes[::-1]):
        while is_call(weight, aten.permute, aten.transpose, aten.t, aten._to_copy):
            weight = as_node(weight.args[0])
        if weight.op in ("placeholder", "get_attr") and len(shape(weight)) <= 2 < len(shape(other)):
            return True
    return False


# ---- from the softmax down to the values ----


def _downwards(
    weights: Labelled, keys: list[Axis], over: int, sinks: bool
) -> tuple[Labelled, fx.Node]:
    """The weights as the value contraction takes them, and that contraction."""
    while True:
        users = list(weights.node.users)
        if len(users) != 1:
            raise Miss("weights-used", "the attention weights are used elsewhere too")
        user = users[0]
        if user.op == "output":
            raise Miss("weights-used", "the attention weights are returned")
        if is_cast(user):
            weights = Labelled(user, weights.dims)
        elif sinks and is_call(user, aten.slice):
            weights = _drop_sinks(weights, user, keys, over)
            sinks = False
        elif _contraction(user) is not None:
            break
        else:
            pushed = _known(push, weights, user)
            if pushed is None:
                raise Miss("weights", f"{_op(user)} changes the attention weights")
            weights = pushed
    if sinks:
        raise Miss("sinks", "the sinks' weights are not dropped")
    return weights, user


def _drop_sinks(weights: Labelled, user: fx.Node, keys: list[Axis], over: int) -> Labelled:
    rank = len(weights.dims)
    args: list[Any] = [*user.args[1:], *(0, None, None, 1)[len(user.args) - 1 :]]
    dim, start, end, step = args
    length = shape(weights.node)[over]
    if not (
        int(dim) % rank == over
        and start in (0, None)
        and (end == -1 or same(val(end), length - 1))
        and step == 1
    ):
        raise Miss("sinks", "the weights' last column is not what is dropped")
    dims = [*weights.dims]
    dims[over] = keys
    return Labelled(user, dims)


def _values(
    weights: Labelled, consumer: fx.Node, keys: list[Axis]
) -> tuple[Labelled, Dims, list[Axis]]:
    """v, the axes of the result, and those among them that come from v alone."""
    contraction = _contraction(consumer)
    assert contraction is not None
    if contraction.bias is not None or contraction.alpha != 1:
        raise Miss("values", "the result is scaled or added to inside the matmul")
    ours = [side for side in contraction.sides if side[0] is weights.node]
    theirs = [side for side in contraction.sides if side[0] is not weights.node]
    if len(ours) != 1 or len(theirs) != 1:
        raise Miss("values", "the weights are multiplied with themselves")
    axes = dict(zip(ours[0][1], weights.dims))
    summed = [
        axis for letter in ours[0][1] if letter not in contraction.out for axis in axes[letter]
    ]
    node, letters = theirs[0]
    width: list[Axis] = []
    for n, letter in zip(shape(node), letters):
        if letter in axes:
            continue
        if letter not in contraction.out:
            raise Miss("values", "a dimension of v is summed over alone")
        axes[letter] = [Axis(n)]
        width.extend(axes[letter])
    v = _known(aligned, node, [axes[letter] for letter in letters])
    missing = any(letter not in letters and letter not in contraction.out for letter in ours[0][1])
    if leaves(summed) != leaves(keys) or missing or not _has(v, keys):
        raise Miss("values", "the result does not sum over the keys alone")
    return v, [axes[letter] for letter in contraction.out], width


def _query_rows(
    others: Dims, free: list[Axis], v: Labelled, masks: Sequence[Add | Fill]
) -> list[Axis]:
    """The dimension of the scores that counts queries: of q alone, not of k, not of v."""
    free_leaves = leaves(free)
    used = v.leaves()
    candidates = []
    for dim in others:
        own = leaves(dim)
        # A size of 1 is told by name, it has no factor to follow.
        named = not own and any(axis in free for axis in dim)
        if named or (own and all(axis in free_leaves and axis not in used for axis in own)):
            candidates.append(dim)
    if len(candidates) > 1:
        # Several heads on one key head look like rows too, but a mask tells queries apart.
        masked = [axis for m in masks for axis in _mask_value(m).leaves()]
        told = [dim for dim in candidates if any(axis in masked for axis in leaves(dim))]
        candidates = told or candidates
    if candidates:
        return candidates[-1]
    if free_leaves:
        raise Miss("queries", "no dimension of the scores belongs to the queries alone")
    ones = [dim for dim in others if not leaves(dim)]
    return ones[-1] if ones else []


def _mask_value(mask: Add | Fill) -> Labelled:
    return mask.value if isinstance(mask, Add) else mask.keep


# ---- the rewrite ----


def _rewrite(gm: fx.GraphModule, found: Attention) -> fx.Node:
    """The attend node that replaces ``found.result``. Raises Miss, the graph then unchanged."""
    graph = gm.graph
    before = set(graph.nodes)
    try:
        with graph.inserting_before(found.result):
            return _known(_emit, gm, found)
    except Miss:
        for node in reversed(graph.nodes):
            if node not in before:
                graph.erase_node(node)
        raise


def _emit(gm: fx.GraphModule, found: Attention) -> fx.Node:
    graph, result = gm.graph, found.result
    q_chain = _chain(found.q, scores=True)
    k_chain = _chain(found.k, scores=True)
    v_chain = _chain(found.v, scores=False)
    batch, heads, group = _split_heads(found, k_chain[-1][0], v_chain[-1][0])
    all_heads = [*heads, *group]
    q, q_scale = _pick(graph, q_chain, [batch, all_heads, found.rows, found.inner])
    k, k_scale = _pick(graph, k_chain, [batch, heads, found.keys, found.inner])
    v, _ = _pick(graph, v_chain, [batch, heads, found.keys, found.width])
    for factor in found.factors:
        by = factor.value
        if isinstance(by, Labelled):
            by = arrange(graph, by, [batch, all_heads, found.rows, []], broadcast=True)
        q = emit(graph, factor.op, q, by, like=result)
    dtype = torch.promote_types(torch.promote_types(val(q).dtype, val(k).dtype), val(v).dtype)
    q, k, v = (_cast(graph, x, dtype) for x in (q, k, v))
    sinks = None
    if found.sinks is not None:
        sinks = _sinks(graph, found.sinks, all_heads)
    target = [batch, all_heads, found.rows, found.keys]
    mask, empty_row, guard = _masks(gm, found, target)
    optional = [mask, None, None, sinks]
    while optional and optional[-1] is None:
        optional.pop()
    flags: dict[str, Any] = {"scale": found.scale * q_scale * k_scale}
    if found.causal:
        flags["causal"] = True
    if found.softcap is not None:
        flags["softcap"] = found.softcap
    if empty_row != "zero":
        flags["empty_row"] = empty_row
    new = emit(graph, attend, q, k, v, *optional, like=result, **flags)
    out = new
    if guard is not None:
        out = emit(graph, aten.where.ScalarSelf, guard, float("nan"), out, like=result)
    out = _cast(graph, out, val(result).dtype)
    out = arrange(graph, Labelled(out, [batch, all_heads, found.rows, found.width]), found.out)
    assert val(out).shape == val(result).shape, "axes multiply to the sizes they came from"
    result.replace_all_uses_with(out)
    graph.erase_node(result)
    return new


def _cast(graph: fx.Graph, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    if val(x).dtype == dtype:
        return x
    return emit(graph, aten._to_copy.default, x, dtype=dtype, like=x)


def _split_heads(
    found: Attention, k: Labelled, v: Labelled
) -> tuple[list[Axis], list[Axis], list[Axis]]:
    """Batch, key heads, and the query heads on each: the axes that neither k nor v has."""
    if len(found.batch) > 1:
        batch = leaves(found.batch[0])
        rest = leaves(axis for dim in found.batch[1:] for axis in dim)
    else:
        # Merged [B * H], or a batch alone.
        merged = leaves(axis for dim in found.batch for axis in dim)
        batch, rest = merged[:1], merged[1:]
    own = [*k.leaves(), *v.leaves()]
    return batch, [x for x in rest if x in own], [x for x in rest if x not in own]


def _chain(x: Labelled, *, scores: bool) -> list[tuple[Labelled, float]]:
    """x and what it is a view of, going up, each with the number that x is that times.

    For what makes scores, constant factors and widening casts are looked through as well.
    """
    chain = [(x, 1.0)]
    scale = 1.0
    while True:
        node = x.node
        try:
            source = peel(x)
        except AxisError:
            return chain
        if source is None and scores:
            if is_cast(node) and _widens(node):
                source = Labelled(as_node(node.args[0]), x.dims)
            elif is_call(node, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
                by: Any = node.args[1]
                if not isinstance(by, fx.Node) and val(node).dtype == val(node.args[0]).dtype:
                    scale = scale * by if is_call(node, aten.mul) else scale / by
                    source = Labelled(as_node(node.args[0]), x.dims)
        if source is None:
            return chain
        x = source
        chain.append((x, scale))


def _widens(node: fx.Node) -> bool:
    old, new = val(node.args[0]).dtype, val(node).dtype
    return torch.promote_types(old, new) == new


def _pick(
    graph: fx.Graph, chain: list[tuple[Labelled, float]], target: Dims
) -> tuple[fx.Node, float]:
    """The tensor of the chain that has this layout, all factors taken off; or one rearranged."""
    total = chain[-1][1]
    wanted = leaves(axis for dim in target for axis in dim)
    usable = [
        x for x, scale in chain if scale == total and all(axis in wanted for axis in x.leaves())
    ]
    for x in reversed(usable):
        if [leaves(dim) for dim in x.dims] == [leaves(dim) for dim in target]:
            return x.node, total
    if not usable:
        raise AxisError("an operand varies along an axis it must not depend on")
    return arrange(graph, usable[0], target), total


def _sinks(graph: fx.Graph, column: Labelled, heads: list[Axis]) -> fx.Node:
    """One number per head, from a column that was expanded over batch and queries."""
    found: Labelled | None = column
    while found is not None:
        if all(axis in leaves(heads) for axis in found.leaves()):
            return arrange(graph, found, [heads])
        found = peel(found)
    raise AxisError("sinks differ between batch entries or queries")


def _masks(
    gm: fx.GraphModule, found: Attention, target: Dims
) -> tuple[fx.Node | None, str, fx.Node | None]:
    """One mask for attend, what an empty row gets, and where rows must become NaN, if any do."""
    graph = gm.graph
    if not found.masks:
        return None, "zero", None
    placed = [arrange(graph, _mask_value(mask), target, broadcast=True) for mask in found.masks]
    if not found.by_hand:
        return placed[0], "zero", None
    fills = {mask.value if isinstance(mask, Fill) else None for mask in found.masks}
    if len(fills) == 1 and None not in fills:
        (value,) = fills
        assert value is not None
        if value > HIDING:
            raise Miss("fill", f"scores filled with {value} are not hidden")
        keep = None
        for mask, condition in zip(found.masks, placed):
            if isinstance(mask, Fill) and mask.inverted:
                condition = emit(graph, aten.bitwise_not.default, condition)
            keep = (
                condition if keep is None else emit(graph, aten.bitwise_and.Tensor, keep, condition)
            )
        assert keep is not None
        if value > float("-inf"):
            return keep, "uniform", None
        if found.sinks is not None or not _may_be_empty(gm, keep):
            return keep, "zero", None
        seen = emit(graph, aten.any.dim, keep, -1, True, like=found.result)
        return keep, "zero", emit(graph, aten.bitwise_not.default, seen, like=found.result)

    total: fx.Node | None = None
    for mask, operand in zip(found.masks, placed):
        if isinstance(mask, Add):
            bias = _bias(graph, mask, operand)
            total = bias if total is None else emit(graph, aten.add.Tensor, total, bias)
        else:
            total = _fill(graph, mask, operand, total)
    assert total is not None
    if found.sinks is not None or not _may_be_empty(gm, total):
        return total, "zero", None
    top = emit(graph, aten.amax.default, total, [-1], True, like=found.result)
    return total, "zero", emit(graph, aten.eq.Scalar, top, float("-inf"), like=found.result)


def _bias(graph: fx.Graph, mask: Add, value: fx.Node) -> fx.Node:
    """An added mask as attend, which adds in float32, must be given it."""
    if not val(value).is_floating_point():
        value = _cast(graph, value, mask.dtype)
    if mask.times != 1.0:
        value = emit(graph, aten.mul.Tensor, value, mask.times)
    if mask.dtype == torch.float16 and _magnitude(value) > NORMAL:
        # float16's minimum swallows scores in float16 and not in float32.
        low = emit(graph, aten.eq.Scalar, value, FP16_MIN)
        value = _cast(graph, value, torch.float32)
        value = emit(graph, aten.where.ScalarSelf, low, FP32_MIN, value)
    return value


def _fill(graph: fx.Graph, mask: Fill, condition: fx.Node, total: fx.Node | None) -> fx.Node:
    """A fill as something added: what is hidden gets the fill, the rest what it had."""
    value = mask.value
    if mask.dtype == torch.float16 and value == FP16_MIN:
        value = FP32_MIN
    if value > ABSORBING:
        raise Miss("fill", f"scores filled with {mask.value} are then added to")
    if total is None:
        pair = (value, 0.0) if mask.inverted else (0.0, value)
        return emit(graph, aten.where.Scalar, condition, *pair)
    total = _cast(graph, total, torch.promote_types(val(total).dtype, torch.float32))
    if mask.inverted:
        return emit(graph, aten.where.ScalarSelf, condition, value, total)
    return emit(graph, aten.where.ScalarOther, condition, total, value)


# ---- empty rows ----

# How far from zero the values of a tensor can be: ordinary, huge but finite, or anything.
NORMAL, HUGE, ANY = 0, 1, 2


def _magnitude(x: Any, depth: int = 64) -> int:
    """A bound that holds for finite weights and activations; ANY where -inf cannot be ruled out."""
    if not isinstance(x, fx.Node):
        size = abs(float(x)) if isinstance(x, (int, float)) else 0.0
        return NORMAL if size < 1e30 else HUGE if math.isfinite(size) else ANY
    if not is_tensor(x) or not val(x).is_floating_point():
        return NORMAL
    if x.op != "call_function" or depth == 0:
        return ANY
    if is_call(x, aten.embedding, aten.linear, aten.zeros, aten.zeros_like, aten.new_zeros):
        return NORMAL
    if is_call(x, aten.full, aten.full_like, aten.new_full, aten.scalar_tensor):
        try:
            return _magnitude(_number(x))
        except Miss:
            return ANY
    inputs = [
        _magnitude(a, depth - 1)
        for a in (*x.args, *x.kwargs.values())
        if isinstance(a, fx.Node) or (isinstance(a, float) and is_call(x, aten.where))
    ]
    worst = max(inputs, default=ANY)
    if is_call(x, *_MOVES):
        if is_call(x, aten._to_copy) and worst == HUGE and not _widens_or_int(x):
            return ANY
        return worst
    if is_call(x, aten.add.Tensor, aten.sub.Tensor):
        return worst if inputs.count(HUGE) < 2 else ANY
    if is_call(x, aten.mul.Tensor, aten.neg, aten.abs, aten.cos, aten.sin, aten.sub.Scalar):
        numbers = [a for a in x.args if isinstance(a, (int, float))]
        return worst if worst == NORMAL and all(_magnitude(a) == NORMAL for a in numbers) else ANY
    return ANY


_MOVES = (
    aten.where,
    aten.expand,
    aten.reshape,
    aten.permute,
    aten.unsqueeze,
    aten.squeeze,
    aten.slice,
    aten.select,
    aten.clone,
    aten._to_copy,
    aten.repeat,
    aten.index,
    aten.index_select,
    aten.gather,
)


def _widens_or_int(node: fx.Node) -> bool:
    return not val(node.args[0]).is_floating_point() or _widens(node)


def _may_be_empty(gm: fx.GraphModule, mask: fx.Node) -> bool:
    """Whether some row may be hidden whole: all False, or all -inf."""
    if val(mask).dtype != torch.bool and _magnitude(mask) < ANY:
        return False
    value = _evaluate(gm, mask)
    if value is None:
        return True
    hidden = ~value if value.dtype == torch.bool else value == float("-inf")
    return bool(hidden.all(dim=-1).any())


def _evaluate(gm: fx.GraphModule, node: fx.Node) -> torch.Tensor | None:
    """The value of a node that depends on no input, if it is small enough to compute."""
    needed = ancestors([node])
    total = 0
    for n in needed:
        if n.op not in ("call_function", "get_attr") or not is_tensor(n):
            return None
        if n.op == "get_attr" and not str(n.target).startswith("_tensor_constant"):
            return None
        if not all(isinstance(size, int) for size in shape(n)):
            return None
        if isinstance(n.target, torch._ops.OpOverload) and (
            n.target.namespace != "aten" or torch.Tag.nondeterministic_seeded in n.target.tags
        ):
            return None
        total += val(n).numel()
    if total > EVALUATED:
        return None
    values: dict[fx.Node, torch.Tensor] = {}
    with unset_fake_temporarily(), torch.no_grad():
        for n in gm.graph.nodes:
            if n not in needed:
                continue
            if n.op == "get_attr":
                values[n] = getattr(gm, str(n.target))
            else:
                args, kwargs = fx.node.map_arg((n.args, n.kwargs), values.__getitem__)
                values[n] = n.target(*args, **kwargs)
    return values[node]


# ---- where a site stands ----


class _Names:
    """Module paths of sites and of what makes their keys."""

    def __init__(self, gm: fx.GraphModule):
        self.taken: dict[str, int] = {}
        self.attentions: set[str] = set()
        for node in gm.graph.nodes:
            if is_call(node, aten.scaled_dot_product_attention, aten.softmax, attend):
                near = [node, *node.users] if is_call(node, aten.softmax) else [node]
                self.attentions.update(module_path(n) for n in near if n.op == "call_function")

    def unique(self, node: fx.Node) -> str:
        path = module_path(node) or node.name
        self.taken[path] = count = self.taken.get(path, 0) + 1
        return path if count == 1 else f"{path}#{count}"

    def owner(self, x: fx.Node) -> str | None:
        """Path of the attention module with the nearest linear that x comes from."""
        seen = {x}
        queue = [x]
        for node in queue:
            if is_call(node, aten.linear, aten.addmm):
                return self._around(node)
            if is_call(node, attend, aten.embedding):
                continue
            fresh = [n for n in node.all_input_nodes if n not in seen]
            seen.update(fresh)
            queue.extend(fresh)
        return None

    def _around(self, linear: fx.Node) -> str:
        stack = [clean_module_path(p) for p, _ in linear.meta.get("nn_module_stack", {}).values()]
        for path in reversed(stack):
            if path in self.attentions:
                return path
        return stack[-2] if len(stack) > 1 else ""


class _Streams:
    """Which token streams a tensor's rows come from.

    A stream is an embedding, or a floating input of two dimensions or more. Weights of projections
    and norms are none, and attention hands on the stream of its queries.
    """

    def __init__(self) -> None:
        self.known: dict[fx.Node, frozenset[fx.Node]] = {}

    def differ(self, q: fx.Node, k: fx.Node) -> bool:
        ours, theirs = self.of(q), self.of(k)
        return bool(ours or theirs) and not ours & theirs

    def of(self, x: fx.Node) -> frozenset[fx.Node]:
        todo = [x]
        while todo:
            node = todo[-1]
            if node in self.known:
                todo.pop()
                continue
            sources = self._sources(node)
            missing = [s for s in sources if s not in self.known]
            if missing:
                todo.extend(missing)
                continue
            todo.pop()
            own = frozenset({node}) if self._is_stream(node) else frozenset()
            self.known[node] = own.union(*(self.known[s] for s in sources))
        return self.known[x]

    @staticmethod
    def _is_stream(node: fx.Node) -> bool:
        if is_call(node, aten.embedding):
            return True
        if node.op not in ("placeholder", "get_attr") or not is_tensor(node):
            return False
        return val(node).is_floating_point() and val(node).dim() >= 2

    @staticmethod
    def _sources(node: fx.Node) -> list[fx.Node]:
        if node.op != "call_function" or is_call(node, aten.embedding):
            return []
        if is_call(node, *_FIRST_ONLY):
            return [as_node(node.args[0])]
        if is_call(node, aten.addmm):
            return [as_node(node.args[1])]
        symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
        return [n for n in node.all_input_nodes if not isinstance(val(n), symbols)]


_FIRST_ONLY = (
    attend,
    aten.linear,
    aten.layer_norm,
    aten.rms_norm,
    aten.group_norm,
    aten.conv1d,
    aten.conv2d,
    aten.conv3d,
)
