"""A rewrite written as the torch function that it means, traced into the graph.

Before:  y = mul(x, sigmoid(x))
After:   y = silu(x)                         by inline(graph, torch.nn.functional.silu, x)

``linear``, ``matmul``, attention and the like stay whole, dtypes are promoted inside the ops, and a
size that the function reads off a tensor is a node of the graph where it is symbolic.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from kvtailor.passes.graph import (
    END,
    as_node,
    aten,
    fake_mode,
    frozen,
    in_place_of,
    is_call,
    lend_names,
    replace_node,
    val,
)
from kvtailor.passes.opsets import RENAMED

# Layers ask for the same traces. Kept by graph: traces hold on to their fake mode.
_traces: WeakKeyDictionary[fx.Graph, dict[Hashable, fx.Graph]] = WeakKeyDictionary()


def trace(function: Callable[..., Any], values: Sequence[Any], whole: bool = True) -> Any:
    """What function does to tensors and symbolic numbers like these, as a GraphModule.

    whole: composite ops such as linear stay one.
    """
    return make_fx(function, tracing_mode="real", pre_dispatch=whole)(*values)


def inline(
    graph: fx.Graph,
    function: Callable[..., Any],
    *args: Any,
    like: fx.Node | None = None,
    **constants: Any,
) -> Any:
    """``function(*args, **constants)`` at the graph's insertion point.

    function: torch code on tensors, without effects, that chooses by shapes, dtypes and constants
        alone. args: nodes; None and numbers are constants too. like: lends its module names.

    Returns what the function does, a tensor or a tuple, as nodes with their values.
    Raises TypeError for a constant that is a symbolic number: pass its node.
    """
    nodes = list(dict.fromkeys(x for x in args if isinstance(x, fx.Node)))

    def kind(node: fx.Node) -> Hashable:
        # A node given twice is one tensor to the function.
        return nodes.index(node), _kind(val(node))

    key = function, frozen(args, kind), frozen(constants), torch.is_grad_enabled()
    known = _traces.setdefault(graph, {})
    if key not in known:
        at = {i: nodes.index(x) for i, x in enumerate(args) if isinstance(x, fx.Node)}
        plain = [None if i in at else x for i, x in enumerate(args)]

        # A trace keeps it alive: it must not hold the graph's nodes.
        def call(*values: Any) -> Any:
            given = [values[at[i]] if i in at else x for i, x in enumerate(plain)]
            return function(*given, **constants)

        with fake_mode(graph):
            known[key] = trace(call, [val(x) for x in nodes]).graph
    return paste(graph, known[key], nodes, like)


def replace(node: fx.Node, function: Callable[..., Any], *args: Any, **constants: Any) -> fx.Node:
    """``function(*args, **constants)``, a tensor, takes node's place; node is erased."""
    with in_place_of(node):
        new = as_node(inline(node.graph, function, *args, like=node, **constants))
    replace_node(node, new)
    return new


def _kind(x: Any) -> Hashable:
    """All of a node's value that a trace can depend on; symbolic sizes as expressions."""
    if not isinstance(x, Tensor):
        return type(x), _size(x)
    sizes = tuple(map(_size, (*x.shape, *x.stride(), x.storage_offset())))
    return x.dtype, x.device, x.layout, x.requires_grad, sizes


def _size(n: Any) -> Hashable:
    return n.node.expr if isinstance(n, (torch.SymInt, torch.SymFloat)) else n


def paste(
    graph: fx.Graph, traced: fx.Graph, inputs: list[fx.Node], like: fx.Node | None = None
) -> Any:
    """A trace at the graph's insertion point, reading ``inputs``; returns its results."""
    pasted: dict[fx.Node, Any] = {}
    left = iter(inputs)
    for node in traced.nodes:
        if node.op == "placeholder":
            pasted[node] = next(left)
        elif node.op == "output":
            return fx.node.map_arg(node.args[0], pasted.__getitem__)
        elif node.op != "call_function":
            raise ValueError(f"an inlined function must make its constants by ops, got {node}")
        elif not node.users:
            continue
        elif (same := _unchanged(node)) is not None:
            pasted[node] = pasted[same]
        else:
            pasted[node] = new = graph.node_copy(node, pasted.__getitem__)
            new.meta = {"val": node.meta["val"]}
            _tidy(new)
            if like is not None:
                lend_names(like, new)
    raise AssertionError("a trace has an output")


def _unchanged(node: fx.Node) -> fx.Node | None:
    """The argument that a call returns as it is, as indexing and ``to`` do."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    whole = is_call(node, aten.slice.Tensor) and node.args[2:] == (0, END)
    cast = is_call(node, aten.to.dtype) and val(node).dtype == val(source).dtype
    return source if whole or cast else None


def _tidy(node: fx.Node) -> None:
    """The spelling that captured graphs have."""
    if is_call(node, aten.to.dtype):
        node.target = aten._to_copy.default
        node.args, node.kwargs = node.args[:1], {"dtype": val(node).dtype}
    elif "__" in str(node.target):
        # x & y is __and__ to torch.
        node.target = RENAMED.get(node.target, node.target)
    elif node.kwargs.get("pin_memory") is False:
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != "pin_memory"}
