"""matmul, bmm, baddbmm and einsum as one thing: a sum of products over named dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from kvtailor.passes.effects import is_number
from kvtailor.passes.graph import as_node, aten, is_call, shape
from kvtailor.passes.opsets import COPIES, RESHAPES


@dataclass
class Contraction:
    """beta * bias + alpha * sum over the letters that ``out`` lacks, as einsum writes it."""

    sides: list[tuple[fx.Node, list[Any]]]
    out: list[Any]
    alpha: Any = 1.0
    bias: fx.Node | None = None
    beta: Any = 1.0


def contraction(node: Any) -> Contraction | None:
    """What node computes, if it contracts two tensors."""
    if is_call(node, aten.matmul, aten.bmm, aten.mm):
        return _matmul(as_node(node.args[0]), as_node(node.args[1]))
    if is_call(node, aten.baddbmm):
        bias, a, b = (as_node(x) for x in node.args[:3])
        found = _matmul(a, b)
        found.alpha = node.kwargs.get("alpha", 1)
        beta = node.kwargs.get("beta", 1)
        if isinstance(beta, fx.Node) or beta != 0:
            found.bias, found.beta = bias, beta
        return found
    if is_call(node, aten.einsum) and len(node.args[1]) == 2:
        return _einsum(node.args[0], [as_node(x) for x in node.args[1]])
    return None


def _einsum(equation: str, operands: list[fx.Node]) -> Contraction | None:
    left, arrow, right = equation.replace(" ", "").partition("->")
    sides = left.split(",")
    # Dimensions under an ellipsis count from its right end: -1, -2, ...
    under = [len(shape(x)) - len(side.replace("...", "")) for x, side in zip(operands, sides)]
    spread = [0 if "..." not in side else n for n, side in zip(under, sides)]
    letters = [_letters(side, n) for side, n in zip(sides, spread)]
    # A letter twice in one operand is a diagonal.
    if not arrow or any(len(set(side)) != len(side) for side in letters):
        return None
    return Contraction(list(zip(operands, letters)), _letters(right, max(spread)))


def _letters(side: str, spread: int) -> list[Any]:
    before, dots, after = side.partition("...")
    return [*before, *(range(-spread, 0) if dots else ()), *after]


def _matmul(a: fx.Node, b: fx.Node) -> Contraction:
    ranks = len(shape(a)), len(shape(b))
    batch: list[Any] = list(range(max(*ranks, 2) - 2))
    first = ["m", "n"] if ranks[0] > 1 else ["n"]
    second = ["n", "p"] if ranks[1] > 1 else ["n"]
    sides = [
        (a, batch[len(batch) - max(ranks[0] - 2, 0) :] + first),
        (b, batch[len(batch) - max(ranks[1] - 2, 0) :] + second),
    ]
    return Contraction(sides, batch + first[:-1] + second[1:])


# Ops that only move values, or change their dtype.
MOVES = (
    *(*COPIES, *RESHAPES, aten._to_copy),
    *(aten.expand, aten.permute, aten.repeat, aten.slice),
    *(aten.squeeze, aten.transpose, aten.unsqueeze),
)


# What makes new features of its input, or takes nothing of it but its shape: no scores beyond.
_ENDS = (
    *(aten.linear, aten.addmm, aten.embedding, aten.softmax, aten.scaled_dot_product_attention),
    *(aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution, aten.lstm, aten.gru),
    *(aten.layer_norm, aten.rms_norm, aten.group_norm, aten.batch_norm),
    *(aten.empty_like, aten.full_like, aten.ones_like, aten.zeros_like),
    *(aten.new_empty, aten.new_full, aten.new_ones, aten.new_zeros),
)


def is_scored(x: Any) -> bool:
    """Whether a contraction is reached from x before any linear, embedding or softmax.

    Rows times one plain weight is a linear by another name, so a router is no attention.
    """
    seen: set[fx.Node] = set()
    todo = [x]
    while todo:
        node = todo.pop()
        if not isinstance(node, fx.Node) or node in seen or node.op != "call_function":
            continue
        seen.add(node)
        found = contraction(node)
        if found is not None or is_call(node, aten.einsum):
            if found is None or not _is_linear(found):
                return True
            continue
        # Sizes carry no score.
        if not is_call(node, *_ENDS) and not is_number(node):
            todo.extend(node.all_input_nodes)
    return False


def _is_linear(found: Contraction) -> bool:
    nodes = [node for node, _ in found.sides]
    for weight, other in (nodes, nodes[::-1]):
        while is_call(weight, aten.permute, aten.transpose, aten.t, aten._to_copy):
            weight = as_node(weight.args[0])
        if weight.op in ("placeholder", "get_attr") and len(shape(weight)) <= 2 < len(shape(other)):
            return True
    return False
