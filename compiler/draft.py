"""The graph of one piece, made call by call from the whole, and when two such graphs are equal."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor, fx

from kvtailor.compiler.piece import Piece, symbols_of
from kvtailor.passes.capture.capture import BOUND
from kvtailor.passes.effects import computes, is_attention, is_number, is_unsafe, is_view
from kvtailor.passes.graph import ROWS, SIZE_OPS, is_tensor


class NotSplittable(Exception):
    """The graph holds something that cuts are not known to be safe for; the text says what."""


class Whole:
    """The graph that is cut, and what its drafts have to know of it.

    rematerialised: views that no piece owns; every piece that reads one makes it. rows: the row
    count of each node. sources: symbol -> the size input, or the (tensor input, axis), that holds
    it; sizes: its value.
    """

    def __init__(self, gm: fx.GraphModule):
        self.gm = gm
        self.rematerialised: set[fx.Node] = set()
        # What has no row count of its own runs on the rows of what it reads.
        self.rows: dict[fx.Node, int | str] = {}
        for n in gm.graph.nodes:
            read = [self.rows[x] for x in n.all_input_nodes if self.rows[x] != "all"]
            self.rows[n] = n.meta.get(ROWS, read[-1] if read else "all")
        self.sources: dict[str, str | tuple[str, int]] = {}
        self.sizes: dict[str, torch.SymInt] = {}
        self.placeholders = gm.graph.find_nodes(op="placeholder")
        values = {n.name: n.meta["val"] for n in self.placeholders}
        for name, value in values.items():
            self._add(value, name)
        for name, value in values.items():
            for axis, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
                self._add(size, (name, axis))

    def _add(self, value: Any, source: str | tuple[str, int]) -> None:
        if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
            name = str(value.node.expr)
            self.sources.setdefault(name, source)
            self.sizes.setdefault(name, _current(value))

    def constant(self, node: fx.Node) -> Any:
        """The tensor of a get_attr."""
        return operator.attrgetter(str(node.target))(self.gm)


class Draft:
    """The graph of one piece, made call by call; its inputs come in order of first use."""

    def __init__(self, whole: Whole, nodes: list[fx.Node]):
        self.whole, self.nodes = whole, nodes
        self.graph = fx.Graph()
        self.env: dict[fx.Node, Any] = {}
        self.last_input: fx.Node | None = None
        self.inputs: list[str] = []
        self.read: list[fx.Node] = []
        self.symbols: dict[str, fx.Node] = {}
        self.constants: dict[str, Tensor] = {}
        # Set once all drafts are there: positions of what others need, and of what is returned.
        self.text = ""
        self.needed: set[int] = set()
        self.outputs: list[int] = []
        self.own = set(nodes)
        for node in nodes:
            self.env[node] = self._copy(node)
        self._bind_symbols()

    def _input(self, name: str, value: Any) -> fx.Node:
        where = (
            self.graph.inserting_after(self.last_input)
            if self.last_input is not None
            else self.graph.inserting_before(next(iter(self.graph.nodes), None))
        )
        with where:
            node = self.graph.placeholder(f"x{len(self.inputs)}")
        node.meta["val"] = value
        self.last_input = node
        self.inputs.append(name)
        return node

    def _copy(self, node: fx.Node) -> fx.Node:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._get)
        new = self.graph.create_node("call_function", node.target, args, kwargs)
        new.meta = {k: v for k, v in node.meta.items() if k in ("val", "stack_trace")}
        new.meta[ROWS] = self.whole.rows.get(node, "all")
        return new

    def _get(self, x: fx.Node) -> Any:
        if x in self.env:
            return self.env[x]
        value = x.meta["val"]
        if isinstance(value, torch.SymInt):
            made = self._size(x, value.node.expr)
        elif is_number(x) or (x in self.whole.rematerialised and x not in self.own):
            made = self._copy(x)
        elif x.op == "get_attr" and _is_inlined(x, value):
            target = f"c{len(self.constants)}"
            self.constants[target] = self.whole.constant(x)
            made = self.graph.create_node("get_attr", target)
            made.meta["val"] = value
        else:
            self.read.append(x)
            made = self._input(x.name, value)
        self.env[x] = made
        return made

    def _size(self, x: fx.Node, expr: sympy.Expr) -> Any:
        """A size, made from symbols where the graph's inputs hold them, else as x makes it."""
        if expr.is_Integer:
            return int(expr)
        if not all(str(s) in self.whole.sources for s in expr.free_symbols):
            if x.op == "placeholder":
                raise NotSplittable(f"the size {expr} is an input of its own")
            return self._copy(x)
        return self._expression(expr)

    def _expression(self, expr: sympy.Expr) -> Any:
        if expr.is_Integer:
            return int(expr)
        if expr.is_Symbol:
            return self._symbol(expr)
        op = SIZE_OPS.get(type(expr).__name__)
        if op is None:
            raise NotSplittable(f"there is no op for the size {expr}")
        made = self._expression(expr.args[0])
        for arg in expr.args[1:]:
            other = self._expression(arg)
            node = self.graph.call_function(op, (made, other))
            values = [v.meta["val"] if isinstance(v, fx.Node) else v for v in (made, other)]
            node.meta["val"] = op(*values)
            made = node
        return made

    def _symbol(self, symbol: sympy.Symbol) -> fx.Node:
        name = str(symbol)
        if name not in self.symbols:
            source = self.whole.sources[name]
            value = self.whole.sizes[name]
            self.symbols[name] = self._input(
                source if isinstance(source, str) else size_name(name), value
            )
        return self.symbols[name]

    def _bind_symbols(self) -> None:
        """Every symbol in a shape is an input too: compilers need not solve for it."""
        found = symbols_of(self.graph.nodes)
        for symbol in sorted(found, key=str):
            if str(symbol) in self.whole.sources:
                self._symbol(symbol)
        given = [n for n in self.graph.find_nodes(op="placeholder") if is_tensor(n)]
        if not {str(s) for s in symbols_of(given)} <= set(self.whole.sources):
            raise NotSplittable("a size that depends on data crosses a cut")

    def finish(self, name: str) -> Piece:
        order = {n: i for i, n in enumerate(self.graph.nodes)}
        self.graph.output(tuple(n for n in self.graph.nodes if order[n] in self.outputs))
        made = {order[n]: x.name for x, n in self.env.items() if x in self.own}
        return Piece(
            name,
            self.graph,
            self.constants,
            self.inputs,
            [made[i] if i in self.needed else None for i in self.outputs],
            hashlib.sha256(f"{self.text}\n{self.outputs}".encode()).hexdigest(),
            idle=not any(computes(n) for n in self.nodes),
            unsafe=next((str(n.target) for n in self.nodes if is_unsafe(n)), None),
        )


def agree_on_outputs(drafts: Sequence[Draft], needed: set[fx.Node]) -> None:
    """Drafts of one text return the same values, where that costs nothing.

    The last layers that keep keys and values for others return them, the layers before do not:
    attention has its arguments in memory anyway, so all of them may return them.
    """
    alike: dict[str, list[Draft]] = {}
    for draft in drafts:
        position = {n: i for i, n in enumerate(draft.graph.nodes)}
        draft.text = _text(draft.graph, draft.constants)
        draft.needed = {position[draft.env[n]] for n in draft.nodes if n in needed}
        alike.setdefault(draft.text, []).append(draft)
    for group in alike.values():
        nodes = list(group[0].graph.nodes)
        together = set().union(*(d.needed for d in group))
        common = set.intersection(*(d.needed for d in group))
        free = {i for i in together - common if _is_attended_to(nodes[i])}
        for draft in group:
            draft.outputs = sorted(draft.needed | free)


def _is_attended_to(node: fx.Node) -> bool:
    """Whether the value, or a view of it, is an argument of an attention op."""
    return any(is_attention(u) or (is_view(u) and _is_attended_to(u)) for u in node.users)


class _Position(NamedTuple):
    """Stands for a node in the text of a graph."""

    at: int


def _text(graph: fx.Graph, constants: dict[str, Tensor]) -> str:
    """Everything a compiled form of the graph depends on, by position instead of by name."""
    position = {n: _Position(i) for i, n in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        target = node.target
        if node.op == "placeholder":
            lines.append(_describe(node.meta["val"]))
        elif node.op == "get_attr":
            lines.append(f"{_describe(node.meta['val'])} {_bits(constants[str(target)])}")
        else:
            is_op = isinstance(target, torch._ops.OpOverload)
            name = target.name() if is_op else f"{target.__module__}.{target.__qualname__}"
            given = node.args, sorted(node.kwargs.items())
            # repr tells 1 from 1.0 and True, and 0.0 from -0.0.
            lines.append(f"{name}{fx.node.map_arg(given, position.__getitem__)!r}")
    return "\n".join(lines)


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{type(value).__name__} {value}"
    # The stride of an axis of one is never used.
    strides = [None if n == 1 else st for n, st in zip(value.shape, value.stride())]
    flags = (value.requires_grad, value.is_conj(), value.is_neg(), value.is_inference())
    return (
        f"{value.dtype} {value.layout} {value.device} {list(value.shape)} {strides} "
        f"{isinstance(value, torch.nn.Parameter)} {flags}"
    )


def _bits(value: Tensor) -> str:
    return value.reshape(-1).view(torch.uint8).numpy().tobytes().hex()


def _is_inlined(node: fx.Node, value: Any) -> bool:
    """Numbers that capture lifted out of the code: compilers may fold them.

    Attributes of the user's own can change between calls and stay inputs.
    """
    own = str(node.target).startswith(BOUND)
    return (
        not own and isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu"
    )


def size_name(symbol: str) -> str:
    """A name no node has."""
    return f"size {symbol}"


def _current(value: torch.SymInt) -> torch.SymInt:
    """The size by the symbol it has by now, which Inductor does not ask for in an input.

    Sizes found to be equal while the graph was captured are one symbol from then on, but the
    values of inputs were made before.
    """
    node = value.node
    if node._expr == node.expr:
        return value
    made = node.shape_env.create_symintnode(node.expr, hint=node.hint)
    assert isinstance(made, torch.SymInt)
    return made
