"""From the weights of an attention down to the contraction that takes the values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from kvtailor.passes.attention.axes import Axis, Dims, Labelled, aligned, is_cast, leaves, push
from kvtailor.passes.attention.contraction import contraction
from kvtailor.passes.attention.found import Add, Fill, Miss, has, known, op_name
from kvtailor.passes.graph import aten, is_call, same, shape, val


def downwards(
    weights: Labelled, keys: list[Axis], over: int, sinks: bool
) -> tuple[Labelled, fx.Node]:
    """The weights as the value contraction takes them, and that contraction."""
    joined = weights.dims[over]
    while True:
        users = list(weights.node.users)
        if len(users) != 1:
            raise Miss("weights-used", "the attention weights are used elsewhere too")
        user = users[0]
        if user.op == "output":
            raise Miss("weights-used", "the attention weights are returned")
        if is_cast(user):
            weights = Labelled(user, weights.dims)
        elif is_call(user, aten.dropout):
            raise Miss("dropout", "dropout is active")
        elif sinks and is_call(user, aten.slice):
            weights = _drop_sinks(weights, user, keys, joined)
            sinks = False
        elif contraction(user) is not None:
            break
        else:
            pushed = known(push, weights, user)
            if pushed is None:
                raise Miss("weights", f"{op_name(user)} changes the attention weights")
            weights = pushed
    if sinks:
        raise Miss("sinks", "the sinks' weights are not dropped")
    return weights, user


def _drop_sinks(weights: Labelled, user: fx.Node, keys: list[Axis], joined: list[Axis]) -> Labelled:
    args: list[Any] = [*user.args[1:], *(0, None, None, 1)[len(user.args) - 1 :]]
    dim, start, end, step = args
    dims = [*weights.dims]
    length = shape(weights.node)[dim]
    whole = start in (0, None) and step == 1 and (end == -1 or same(val(end), length - 1))
    if not whole or dims[dim] != joined:
        raise Miss("sinks", "the weights' last column is not what is dropped")
    dims[dim] = keys
    return Labelled(user, dims)


def values(
    weights: Labelled, consumer: fx.Node, keys: list[Axis]
) -> tuple[Labelled, Dims, list[Axis]]:
    """v, the axes of the result, and those among them that come from v alone."""
    found = contraction(consumer)
    assert found is not None
    if found.bias is not None or found.alpha != 1:
        raise Miss("values", "the result is scaled or added to inside the matmul")
    ours = [side for side in found.sides if side[0] is weights.node]
    theirs = [side for side in found.sides if side[0] is not weights.node]
    if len(ours) != 1 or len(theirs) != 1:
        raise Miss("values", "the weights are multiplied with themselves")
    axes = dict(zip(ours[0][1], weights.dims))
    summed = [axis for letter in ours[0][1] if letter not in found.out for axis in axes[letter]]
    node, letters = theirs[0]
    width: list[Axis] = []
    for n, letter in zip(shape(node), letters):
        if letter in axes:
            continue
        if letter not in found.out:
            raise Miss("values", "a dimension of v is summed over alone")
        axes[letter] = [Axis(n)]
        width.extend(axes[letter])
    v = known(aligned, node, [axes[letter] for letter in letters])
    missing = any(letter not in letters and letter not in found.out for letter in ours[0][1])
    if leaves(summed) != leaves(keys) or missing or (leaves(keys) and not has(v, keys)):
        raise Miss("values", "the result does not sum over the keys alone")
    return v, [axes[letter] for letter in found.out], width


def query_rows(
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
        masked = [axis for m in masks for axis in m.operand.leaves()]
        told = [dim for dim in candidates if any(axis in masked for axis in leaves(dim))]
        candidates = told or candidates
    if candidates:
        return candidates[-1]
    if free_leaves:
        raise Miss("queries", "no dimension of the scores belongs to the queries alone")
    ones = [dim for dim in others if not leaves(dim)]
    return ones[-1] if ones else []
