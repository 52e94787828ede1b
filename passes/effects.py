"""What a call does beside computing its result: views, writes, reads of numbers, randomness."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import fx

from kvtailor.kernels.ops import attend, local_attend
from kvtailor.passes.graph import argument, as_node, aten, flat, is_call, output_node, shape, val
from kvtailor.passes.opsets import FRESH, draws

# Stands for the state of the random generator among the memory that is written.
RANDOM = "random"
Root: TypeAlias = "fx.Node | str"

# Namespaces of ops whose schemas tell the truth about aliases, mutation and shapes.
KNOWN = ("aten", "prims", "kvtailor")


def is_view(node: fx.Node) -> bool:
    """Whether the result is always a part of the first argument's memory."""
    return node.op == "call_function" and bool(getattr(node.target, "is_view", False))


def base_of(node: fx.Node) -> fx.Node | None:
    """What the result is a part of by its own values, None where it has memory of its own.

    Composite ops may be views or not: their fake values tell.
    """
    if node.target is operator.getitem:
        whole = as_node(node.args[0])
        return as_node(whole.args[0]) if is_view(whole) else None
    if not is_view(node):
        return None
    base = as_node(node.args[0])
    return base if storage(val(node)) == storage(val(base)) else None


def root_of(node: fx.Node) -> fx.Node:
    """The call or input whose memory the result is, or is a part of."""
    while (base := base_of(node)) is not None:
        node = base
    return node


def storage(x: torch.Tensor) -> int:
    """Equal for tensors that share memory."""
    return x.untyped_storage()._cdata


def is_number(node: fx.Node) -> bool:
    """Whether the value is a Python number, symbolic or not."""
    number = (int, bool, float, torch.SymInt, torch.SymBool, torch.SymFloat)
    return node.op == "call_function" and isinstance(node.meta.get("val"), number)


def is_number_read(node: fx.Node) -> bool:
    """Whether a number is read out of a tensor."""
    return node.target in (aten.item.default, aten._local_scalar_dense.default)


def computes(node: fx.Node) -> bool:
    """Whether the call costs anything: no view, no number, no part of a tuple."""
    if node.op != "call_function" or is_view(node) or node.target is operator.getitem:
        return False
    return not is_number(node)


def is_random(node: fx.Node) -> bool:
    """Whether the call draws random numbers: ops that can drop out, only where they do."""
    if not draws(node):
        return False
    names = {a.name for a in node.target._schema.arguments}  # type: ignore[union-attr]
    if "dropout_p" in names:
        return argument(node, "dropout_p", 0.0) != 0.0
    return argument(node, "train", True) is not False if "train" in names else True


def is_attention(node: fx.Node) -> bool:
    """Whether the call is attention over dense keys."""
    return is_call(node, attend, local_attend, aten.scaled_dot_product_attention)


def is_unsafe(node: fx.Node) -> bool:
    """Whether no CUDA graph may hold the call.

    Its op says so of itself, or it is attention over dense keys whose number may change: they
    lie elsewhere each time.
    """
    if torch.Tag.cudagraph_unsafe in getattr(node.target, "tags", ()):
        return True
    return is_attention(node) and not isinstance(shape(node.args[1])[2], int)


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments that the call writes to."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return []
    found = []
    for i, arg in enumerate(schema.arguments):
        if arg.alias_info is not None and arg.alias_info.is_write:
            value = node.args[i] if i < len(node.args) else node.kwargs.get(arg.name)
            found += [n for n in flat(value) if isinstance(n, fx.Node)]
    return found


def may_alias(node: fx.Node) -> bool:
    """Whether the result may be memory of an argument.

    Views are; composites may be, but for those known to compute; and so may what nobody knows.
    """
    if node.op != "call_function" or is_number(node):
        return False
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op.namespace not in KNOWN:
        return True
    if any(r.alias_info is not None for r in op._schema.returns):
        return True
    if op.overloadpacket in FRESH:
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def seen_outside(gm: fx.GraphModule) -> set[fx.Node]:
    """Values whose memory may be seen from outside: returned, written back, or viewed as such."""
    roots = list(output_node(gm).all_input_nodes)
    for node in gm.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            roots.extend(node.all_input_nodes)
    found: set[fx.Node] = set()
    while roots:
        node = roots.pop()
        if node in found:
            continue
        found.add(node)
        if may_alias(node):
            roots.extend(node.all_input_nodes)
    return found


class Memory:
    """Which inputs and attributes a value may be part of, and which of those are written to."""

    def __init__(self, nodes: Iterable[fx.Node]):
        self.roots: dict[fx.Node, frozenset[fx.Node]] = {}
        self.written: set[Root] = set()
        for node in nodes:
            if node.op in ("placeholder", "get_attr"):
                self.roots[node] = frozenset([node])
            elif may_alias(node):
                self.roots[node] = frozenset().union(*(self.roots[x] for x in node.all_input_nodes))
            else:
                self.roots[node] = frozenset()
            self.written |= self.writes(node)

    def writes(self, node: fx.Node) -> set[Root]:
        """The memory a call writes to."""
        found: set[Root] = {root for x in written(node) for root in self.roots[x]}
        return found | ({RANDOM} if is_random(node) else set())

    def touches(self, node: fx.Node) -> set[Root]:
        """The memory a call reads or writes and that anything in the graph writes."""
        read: set[Root] = {root for x in node.all_input_nodes for root in self.roots[x]}
        return (read & self.written) | self.writes(node)
