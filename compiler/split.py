"""Cut a rewritten graph into pieces: by layer, by row count, and around ops no CUDA graph takes.

Before:                            After:
    h0, cos = embed(ids)               prologue:  h0, cos = f(ids, w_embed)
    h1 = layer(h0, cos, w0)            layers.0:  h1 = g(h0, cos, w0)
    h2 = layer(h1, cos, w1)            layers.1:  h2 = g(h1, cos, w1)    one g, compiled once
    y = head(h2)                       epilogue:  y = e(h2, w_head)

Values cross cuts as they are, without copies. A write to an input stays in the piece that makes
what is written, after every reader of the old value. Views of inputs are made where they are
read, sizes from the symbols they are made of. Pieces that are equal but for the tensors they are
given have equal keys.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_symbols, statically_known_true

from kvtailor.compiler.places import Layer, Place, find_layers, find_places
from kvtailor.passes.capture.capture import BOUND
from kvtailor.passes.effects import (
    Memory,
    computes,
    is_attention,
    is_number,
    is_random,
    is_unsafe,
    is_view,
    may_alias,
    seen_outside,
)
from kvtailor.passes.graph import (
    ROWS,
    SIZE_OPS,
    as_node,
    aten,
    call_key,
    emit,
    flat,
    is_tensor,
    output_node,
    val,
)

# After all calls.
_END = Place(2**31, 0, 0)


class NotSplittable(Exception):
    """The graph holds something that cuts are not known to be safe for; the text says what."""


@dataclass
class Piece:
    """Consecutive work: ``graph`` takes ``inputs`` and returns ``outputs``, names of values.

    outputs: None for one that only equals of this piece are asked for. key: equal where one
    compiled artefact serves. idle: nothing but views, not worth compiling. unsafe: an op that
    keeps it out of CUDA graphs, None without one.
    """

    name: str
    graph: fx.Graph
    constants: dict[str, Tensor]
    inputs: list[str]
    outputs: list[str | None]
    key: str
    idle: bool = False
    unsafe: str | None = None

    def module(self) -> fx.GraphModule:
        """A module of its own each time: inner compilers change what they are given."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.output(graph.graph_copy(self.graph, copies))
        for old, new in copies.items():
            new.meta = dict(old.meta)
        return fx.GraphModule(self.constants, graph)

    def example(self) -> list[Any]:
        """Fake inputs."""
        return [n.meta["val"] for n in self.graph.find_nodes(op="placeholder")]

    def results(self) -> list[Any]:
        """Fake results."""
        (output,) = self.graph.find_nodes(op="output")
        return [n.meta["val"] for n in output.args[0]]


@dataclass
class Pieces:
    """A graph as pieces in running order, and where every value comes from.

    inputs: names of the graph's inputs in order. constants: attributes by name. symbols: name ->
    (tensor input, axis) for sizes that are no input themselves. results: what the graph returns,
    names or constants.
    """

    pieces: list[Piece]
    inputs: list[str]
    constants: dict[str, Tensor]
    symbols: dict[str, tuple[str, int]]
    results: list[Result]


@dataclass(frozen=True)
class Result:
    """One value the graph returns: a name, or where that is None a constant."""

    name: str | None
    constant: Any = None


def split(gm: fx.GraphModule, *, layers: bool = True, rows: bool = False) -> Pieces:
    """The pieces of gm, which is used up.

    layers: cut at layer boundaries. rows: cut where the row count changes and around ops tagged
    ``torch.Tag.cudagraph_unsafe``. Raises NotSplittable.
    """
    for node in gm.graph.nodes:
        if node.op in ("call_module", "call_method"):
            raise NotSplittable(f"it calls {node.target} as a {node.op.removeprefix('call_')}")
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise NotSplittable(f"it has the higher-order op {node.target}")
    memory = Memory(gm.graph.nodes)
    of_layer = find_layers(gm) if layers else {}
    places = find_places(gm, memory, of_layer, rows)
    _merge_equal(gm, places, memory)
    memory = Memory(gm.graph.nodes)
    return _Cutter(gm, memory, places, of_layer, taken_late=not rows).cut()


def _merge_equal(gm: fx.GraphModule, places: dict[fx.Node, Place], memory: Memory) -> None:
    """Equal calls before all layers become one: layers then share what is made from it.

    Results of the graph stay apart: whoever gets two of them may write to one.
    """
    outside = seen_outside(gm)
    seen: dict[Any, fx.Node] = {}
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or places[node].layer or node in outside:
            continue
        if node.is_impure() or is_random(node) or memory.touches(node):
            continue
        key = call_key(node)
        first = node if key is None else seen.setdefault(key, node)
        if first is not node and places[first] <= places[node]:
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)


class _Cutter:
    def __init__(
        self,
        gm: fx.GraphModule,
        memory: Memory,
        places: dict[fx.Node, Place],
        of_layer: dict[fx.Node, Layer],
        taken_late: bool,
    ):
        self.gm, self.memory, self.places = gm, memory, places
        self.taken_late = taken_late
        self.layer_names = {2 * v.number + 1: v.name for v in of_layer.values()}
        self.placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self.sources, self.symbol_values = _symbol_sources(self.placeholders)
        self.results = list(flat(output_node(gm).args[0]))
        # What has no row count of its own runs on the rows of what it reads.
        self.rows: dict[fx.Node, int | str] = {}
        for n in gm.graph.nodes:
            read = [self.rows[x] for x in n.all_input_nodes if self.rows[x] != "all"]
            self.rows[n] = n.meta.get(ROWS, read[-1] if read else "all")
        # Views that no piece owns: every piece that reads one makes it.
        self.homeless: set[fx.Node] = set()

    def cut(self) -> Pieces:
        groups = self._groups()
        order = sorted(groups)
        home = {node: place for place in order for node in groups[place]}
        drafts = [_Draft(self, groups[place]) for place in order]
        needed: set[fx.Node] = {x for x in self.results if isinstance(x, fx.Node)}
        for place, draft in zip(order, drafts):
            for x in draft.read:
                if x in home:
                    assert home[x] < place, f"{x} is read before it is made"
                    if self.memory.roots[x] & self.memory.written:
                        raise NotSplittable(f"{x} may be part of an input that is written to")
                    needed.add(x)
        _agree_on_outputs(drafts, needed)
        pieces = [draft.finish(self._name(place, order)) for place, draft in zip(order, drafts)]
        used = {name for piece in pieces for name in piece.inputs}
        used |= {r.name for r in map(self._result, self.results) if r.name is not None}
        return Pieces(
            pieces,
            [n.name for n in self.placeholders],
            {
                n.name: _attribute(self.gm, str(n.target))
                for n in self.gm.graph.nodes
                if n.op == "get_attr" and n.name in used
            },
            {
                _size_name(s): v
                for s, v in self.sources.items()
                if isinstance(v, tuple) and _size_name(s) in used
            },
            [self._result(x) for x in self.results],
        )

    def _groups(self) -> dict[Place, list[fx.Node]]:
        """The calls of each piece in graph order."""
        wanted = {x for x in self.results if isinstance(x, fx.Node)}
        for node in self.gm.graph.nodes:
            part = is_view(node) or node.target is operator.getitem
            touched = bool(self.memory.roots[node] & self.memory.written)
            if (part or touched) and may_alias(node) and not self._hoisted(node):
                bases = [x for x in node.all_input_nodes if not is_number(x)]
                if all(x in self.homeless or x.op in ("placeholder", "get_attr") for x in bases):
                    self.homeless.add(node)
        if self.taken_late:
            self._take_late(wanted)
        else:
            self._make_dense()
        busy = {place for n, place in self.places.items() if computes(n)}
        for node, place in self.places.items():
            if place not in busy and is_view(node) and not self._hoisted(node):
                self.homeless.add(node)
                # Returned views go with the work next to them.
                later = min((p for p in busy if p > place), default=None)
                earlier = max((p for p in busy if p < place), default=place)
                self.places[node] = later or earlier
        groups: dict[Place, list[fx.Node]] = {}
        for node in self.gm.graph.nodes:
            if node.op != "call_function" or (is_number(node) and node not in wanted):
                continue
            if node not in self.homeless or node in wanted:
                groups.setdefault(self.places[node], []).append(node)
        return groups

    def _make_dense(self) -> None:
        """A few rows of a value go across as memory of their own.

        As a view they would have the strides of all rows, and hold on to them.
        """
        for node in list(self.gm.graph.nodes):
            if not is_view(node) or not is_tensor(node) or node in self.homeless:
                continue
            if is_contiguous(val(node)):
                continue
            base = node
            while is_view(base):
                base = as_node(base.args[0])
            away = [u for u in node.users if self.places.get(u, _END) != self.places[node]]
            fewer = statically_known_true(val(node).numel() < val(base).numel())
            away = [u for u in away if u.op != "output"]
            if not away or not fewer or base.op != "call_function":
                continue
            with self.gm.graph.inserting_after(node):
                dense = emit(
                    self.gm.graph,
                    aten.clone.default,
                    node,
                    memory_format=torch.contiguous_format,
                    like=node,
                )
            for user in away:
                user.replace_input_with(node, dense)
            self.places[dense] = self.places[node]
            self.rows[dense] = self.rows[node]
            self.memory.roots[dense] = frozenset()

    def _take_late(self, wanted: set[fx.Node]) -> None:
        """Rows that a layer takes of its values for later ones alone are taken where they are used.

        Else the layer that feeds narrower ones would be no equal of those before it.
        """
        readers: dict[fx.Node, set[Place]] = {}
        for node in reversed(self.gm.graph.nodes):
            found: set[Place] = set()
            for user in node.users:
                found |= readers[user] if user in self.homeless else {self.places.get(user, _END)}
            readers[node] = found
            if node not in self.places or node in wanted or self.places[node].layer % 2 == 0:
                continue
            if not found or min(found) <= self.places[node] or node in self.homeless:
                continue
            if is_view(node):
                self.homeless.add(node)
            elif node.target is aten.index.Tensor and len(found) == 1:
                (self.places[node],) = found

    def _hoisted(self, node: fx.Node) -> bool:
        """Whether layers are given this part of an input, which they take by their index."""
        if node.target not in (aten.select.int, aten.slice.Tensor) or self.places[node].layer:
            return False
        if self.memory.roots[node] & self.memory.written:
            return False
        return any(self.places[u].layer for u in node.users if u in self.places)

    def _result(self, x: Any) -> Result:
        if not isinstance(x, fx.Node):
            return Result(None, x)
        return Result(x.name)

    def _name(self, place: Place, order: Sequence[Place]) -> str:
        if place.layer in self.layer_names:
            name = self.layer_names[place.layer]
        elif not self.layer_names:
            name = "graph"
        elif place.layer == 0:
            name = "prologue"
        elif place.layer > max(self.layer_names):
            name = "epilogue"
        else:
            name = f"after {self.layer_names[place.layer - 1]}"
        alike = [p for p in order if p.layer == place.layer]
        return name if len(alike) == 1 else f"{name}/{alike.index(place)}"


def current(value: torch.SymInt) -> torch.SymInt:
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


def is_contiguous(value: Tensor) -> bool:
    """Whether that is known for all sizes."""
    step = 1
    for n, stride in zip(reversed(value.shape), reversed(value.stride())):
        if not (statically_known_true(n == 1) or statically_known_true(stride == step)):
            return False
        step = step * n
    return True


def _size_name(symbol: str) -> str:
    """A name no node has."""
    return f"size {symbol}"


class _Draft:
    """The graph of one piece, made call by call; its inputs come in order of first use."""

    def __init__(self, cutter: _Cutter, nodes: list[fx.Node]):
        self.cutter, self.nodes = cutter, nodes
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
        own = set(nodes)
        for node in nodes:
            self.env[node] = self._copy(node, own)
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

    def _copy(self, node: fx.Node, own: set[fx.Node]) -> fx.Node:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda x: self._get(x, own))
        new = self.graph.create_node("call_function", node.target, args, kwargs)
        new.meta = {k: v for k, v in node.meta.items() if k in ("val", "stack_trace")}
        new.meta[ROWS] = self.cutter.rows.get(node, "all")
        return new

    def _get(self, x: fx.Node, own: set[fx.Node]) -> Any:
        if x in self.env:
            return self.env[x]
        value = x.meta["val"]
        if isinstance(value, torch.SymInt):
            made = self._size(x, value.node.expr, own)
        elif is_number(x) or (x in self.cutter.homeless and x not in own):
            made = self._copy(x, own)
        elif x.op == "get_attr" and _is_inlined(x, value):
            target = f"c{len(self.constants)}"
            self.constants[target] = _attribute(self.cutter.gm, str(x.target))
            made = self.graph.create_node("get_attr", target)
            made.meta["val"] = value
        else:
            self.read.append(x)
            made = self._input(x.name, value)
        self.env[x] = made
        return made

    def _size(self, x: fx.Node, expr: sympy.Expr, own: set[fx.Node]) -> Any:
        """A size, made from symbols where the graph's inputs hold them, else as x makes it."""
        if expr.is_Integer:
            return int(expr)
        if not all(str(s) in self.cutter.sources for s in expr.free_symbols):
            if x.op == "placeholder":
                raise NotSplittable(f"the size {expr} is an input of its own")
            return self._copy(x, own)
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
            source = self.cutter.sources[name]
            value = self.cutter.symbol_values[name]
            self.symbols[name] = self._input(
                source if isinstance(source, str) else _size_name(name), value
            )
        return self.symbols[name]

    def _bind_symbols(self) -> None:
        """Every symbol in a shape is an input too: compilers need not solve for it."""
        found: set[sympy.Symbol] = set()
        for node in self.graph.nodes:
            for value in flat(node.meta.get("val")):
                if isinstance(value, (Tensor, torch.SymInt)):
                    found |= free_symbols(value)
        for symbol in sorted(found, key=str):
            if str(symbol) in self.cutter.sources:
                self._symbol(symbol)
        known = {str(s) for s in found} - set(self.cutter.sources)
        for node in self.graph.find_nodes(op="placeholder"):
            value = node.meta["val"]
            if isinstance(value, Tensor) and known & {str(s) for s in free_symbols(value)}:
                raise NotSplittable("a size that depends on data crosses a cut")

    def finish(self, name: str) -> Piece:
        order = {n: i for i, n in enumerate(self.graph.nodes)}
        self.graph.output(tuple(n for n in self.graph.nodes if order[n] in self.outputs))
        made = {order[n]: x.name for x, n in self.env.items() if x in set(self.nodes)}
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


def _agree_on_outputs(drafts: Sequence[_Draft], needed: set[fx.Node]) -> None:
    """Drafts of one text return the same values, where that costs nothing.

    The last layers that keep keys and values for others return them, the layers before do not:
    attention has its arguments in memory anyway, so all of them may return them.
    """
    alike: dict[str, list[_Draft]] = {}
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


def _text(graph: fx.Graph, constants: dict[str, Tensor]) -> str:
    """Everything a compiled form of the graph depends on, by position instead of by name."""
    position = {n: i for i, n in enumerate(graph.nodes)}

    def show(arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return f"%{position[arg]}"
        if isinstance(arg, (list, tuple)):
            return f"{type(arg).__name__}[{', '.join(map(show, arg))}]"
        if isinstance(arg, dict):
            return "{" + ", ".join(f"{k}: {show(v)}" for k, v in sorted(arg.items())) + "}"
        if isinstance(arg, slice):
            return f"slice[{show(arg.start)}, {show(arg.stop)}, {show(arg.step)}]"
        return f"{type(arg).__name__} {arg!r}"

    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            lines.append(_describe(node.meta["val"]))
        elif node.op == "get_attr":
            lines.append(f"{_describe(node.meta['val'])} {_bits(constants[str(node.target)])}")
        else:
            target = node.target
            name = (
                target.name()
                if isinstance(target, torch._ops.OpOverload)
                else (f"{target.__module__}.{target.__qualname__}")
            )
            lines.append(f"{name}({show(node.args)}, {show(node.kwargs)})")
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


def _attribute(gm: fx.GraphModule, path: str) -> Any:
    value: Any = gm
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _symbol_sources(
    placeholders: Sequence[fx.Node],
) -> tuple[dict[str, str | tuple[str, int]], dict[str, torch.SymInt]]:
    """Symbol -> the size input, or the (tensor input, axis), that holds it; and its value."""
    sources: dict[str, str | tuple[str, int]] = {}
    values: dict[str, torch.SymInt] = {}

    def add(value: Any, source: str | tuple[str, int]) -> None:
        if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
            name = str(value.node.expr)
            sources.setdefault(name, source)
            values.setdefault(name, current(value))

    for node in placeholders:
        add(node.meta["val"], node.name)
    for node in placeholders:
        if isinstance(node.meta["val"], Tensor):
            for axis, size in enumerate(node.meta["val"].shape):
                add(size, (node.name, axis))
    return sources, values
