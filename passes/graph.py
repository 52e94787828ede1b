"""FX helpers that several passes share.

Every node made here carries a true fake value in ``meta["val"]`` from the start.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvtailor.passes.report import AttentionSite

aten = torch.ops.aten

# What capture makes of an op that writes to its arguments.
functional_form = auto_functionalized_v2

# All that graphs keep in meta besides torch's own keys, with whose it is:
#
#   module  SITES   list of AttentionSite   recognise_attention and prove_masks; the report
#   module  PACKED  tuple of PackedInput    packing: what the placeholders added at the end hold,
#                                           in their order; compiler/pieces and the warm start
#   node    SITE    AttentionSite           an attend's own, one of SITES
#   node    ROWS    str                     narrow_rows: how many rows the node runs on
#   node    SIZE    True                    sym_arg: a size, right below the inputs
#   node    FLOPS   int                     lowerings that write an op out: its work, for flops
#
# What a node made in place of another inherits is INHERITED; options are no keys, but bound to
# the passes that take them when the pipeline is put together.
SITES = "kvtailor_sites"
PACKED = "kvtailor_packed"
SITE = "kvtailor_site"
ROWS = "kvtailor_rows"
SIZE = "kvtailor_size"
FLOPS = "kvtailor_flops"

# What a node made in place of another inherits.
INHERITED = ("nn_module_stack", "stack_trace", SITE, ROWS)

# A slice that ends here runs to the end.
END = 2**63 - 1


def flat(value: Any) -> Iterator[Any]:
    """The leaves of an argument: lists, tuples and slices are taken apart."""
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from flat(each)
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def as_node(arg: Any) -> fx.Node:
    """The argument as a Node; an invariant, so an assertion."""
    assert isinstance(arg, fx.Node), f"expected a node, got {arg!r}"
    return arg


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """An argument of an aten call by its name in the schema, wherever it was given."""
    if name in node.kwargs:
        return node.kwargs[name]
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    at = names.index(name) if name in names else len(node.args)
    return node.args[at] if at < len(node.args) else default


# What a call's key can hold besides nodes; everything else equals nothing.
_PLAIN = (
    *(bool, int, float, complex, str, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def frozen(arg: Any, of_node: Callable[[fx.Node], Hashable] = lambda node: node) -> Hashable:
    """An argument as a key, equal exactly for arguments that an op cannot tell apart.

    of_node: what stands for a node. Raises TypeError for a symbolic number, whose value may yet
    be found to equal another one's.
    """
    if isinstance(arg, fx.Node):
        return fx.Node, of_node(arg)
    if isinstance(arg, (list, tuple)):
        kind = list if isinstance(arg, list) else tuple
        return kind, tuple(frozen(x, of_node) for x in arg)
    if isinstance(arg, dict):
        return dict, tuple((name, frozen(x, of_node)) for name, x in sorted(arg.items()))
    if isinstance(arg, slice):
        return slice, *(frozen(x, of_node) for x in (arg.start, arg.stop, arg.step))
    if isinstance(arg, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise TypeError("a symbolic number has no key")
    # The type tells 1 from 1.0 and True, repr 0.0 from -0.0.
    return (type(arg), repr(arg)) if isinstance(arg, _PLAIN) else object()


def call_key(node: fx.Node) -> Hashable | None:
    """Equal for calls of one op on equal arguments; None for one that no other equals."""
    try:
        return node.target, frozen(node.args), frozen(node.kwargs)
    except TypeError:
        return None


def as_int(arg: Any) -> int:
    """A static integer argument (an axis, an index); an invariant, so an assertion."""
    assert isinstance(arg, int), f"expected an int, got {arg!r}"
    return arg


def axes(arg: Any, rank: int) -> list[int]:
    """An axis or a list of axes, each counted from the front."""
    given = arg if isinstance(arg, (list, tuple)) else [arg]
    return [as_int(d) % rank for d in given]


def val(arg: Any) -> Any:
    """The fake value of a node; anything else is its own value."""
    return arg.meta["val"] if isinstance(arg, fx.Node) else arg


def shape(arg: Any) -> tuple[Any, ...]:
    """Sizes of a tensor node, ints or SymInts."""
    return tuple(val(arg).shape)


def hint(value: Any) -> Any:
    """The value a symbolic number had when it was traced, 1 when it had none."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        known = value.node.hint
        return 1 if known is None else known
    return value


def is_tensor(arg: Any) -> bool:
    return isinstance(arg, fx.Node) and isinstance(arg.meta.get("val"), Tensor)


def is_call(arg: Any, *targets: Any) -> bool:
    """Whether arg is a call of one of these overloads (or packets)."""
    if not isinstance(arg, fx.Node) or arg.op != "call_function":
        return False
    packet = getattr(arg.target, "overloadpacket", None)
    return arg.target in targets or (packet is not None and packet in targets)


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for all values the shape environment allows."""
    return statically_known_true(a == b)


def is_placeholder(arg: Any) -> bool:
    return isinstance(arg, fx.Node) and arg.op == "placeholder"


def fake_mode(graph: fx.Graph) -> FakeTensorMode:
    mode = detect_fake_mode([n.meta.get("val") for n in graph.find_nodes(op="placeholder")])
    assert mode is not None, "a captured graph always has fake inputs"
    return mode


def emit(
    graph: fx.Graph,
    target: Callable[..., Any],
    *args: Any,
    like: fx.Node | None = None,
    **kwargs: Any,
) -> fx.Node:
    """A call at the graph's insertion point, with its fake value; ``like`` lends module names."""
    node = graph.call_function(target, args, kwargs)
    set_value(node)
    if like is not None:
        lend_names(like, node)
    return node


def lend_names(like: fx.Node, node: fx.Node) -> None:
    """node stands in the module that ``like`` stands in."""
    for key in ("nn_module_stack", "stack_trace"):
        if key in like.meta:
            node.meta[key] = like.meta[key]


def replace_node(old: fx.Node, new: fx.Node) -> None:
    """new takes old's place, with its site, rows and module names; old is erased."""
    inherit(old, new)
    old.replace_all_uses_with(new)
    refresh_users(old, new)
    old.graph.erase_node(old)


def refresh_users(old: fx.Node, new: fx.Node) -> None:
    """Values downstream of new, in old's place now, where it lies in memory in another way."""
    pending = set(new.users) if _strides(new) != _strides(old) else set()
    node = new
    while pending:
        node = node.next
        if node not in pending:
            continue
        pending.discard(node)
        # A new value of dynamic shape would bring a new symbol; such results are compact anyway.
        if node.op != "call_function" or torch.Tag.dynamic_output_shape in getattr(
            node.target, "tags", ()
        ):
            continue
        before = _strides(node)
        if is_call(node, aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        set_value(node)
        if _strides(node) != before:
            pending.update(node.users)


def inherit(old: fx.Node, new: fx.Node) -> None:
    for key in INHERITED:
        if key in old.meta:
            new.meta.setdefault(key, old.meta[key])


@contextmanager
def in_place_of(node: fx.Node) -> Iterator[None]:
    """What is made within stands right before node, and runs on its rows."""
    before = node.prev
    with node.graph.inserting_before(node):
        yield
    made = before.next
    while made is not node:
        if ROWS in node.meta:
            made.meta.setdefault(ROWS, node.meta[ROWS])
        made = made.next


def set_value(node: fx.Node) -> None:
    """Compute meta["val"] of a call from the values of its arguments."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    mode = detect_fake_mode((args, kwargs)) or detect_fake_mode(
        [n.meta.get("val") for n in node.graph.nodes if n.op == "placeholder"]
    )
    assert callable(node.target)
    if mode is None:
        node.meta["val"] = node.target(*args, **kwargs)
        return
    with mode:
        node.meta["val"] = node.target(*args, **kwargs)


def refresh_values(gm: fx.GraphModule, changed: Iterable[fx.Node]) -> None:
    """Recompute the values of what follows from nodes whose strides are others than before."""
    stale = set(changed)
    for node in gm.graph.nodes:
        if node.op != "call_function" or stale.isdisjoint(node.all_input_nodes):
            continue
        if torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ()):
            # A new value would bring a new symbol; such results are compact in any case.
            continue
        old = _strides(node)
        set_value(node)
        if _strides(node) != old:
            stale.add(node)


def _strides(node: fx.Node) -> list[tuple[Any, ...]]:
    value = node.meta["val"]
    each = value if isinstance(value, (list, tuple)) else [value]
    return [tuple(v.stride()) for v in each if isinstance(v, Tensor)]


def size(graph: fx.Graph, x: fx.Node, dim: int) -> int | fx.Node:
    """Size of x along dim as an argument: an int, or a node when it is symbolic."""
    n = val(x).shape[dim]
    if isinstance(n, int):
        return n
    return emit(graph, aten.sym_size.int, x, dim % val(x).dim())


class NotDerivable(Exception):
    """A symbolic size that the graph's inputs do not determine."""


def sym_arg(graph: fx.Graph, value: int | torch.SymInt) -> int | fx.Node:
    """A size as an argument: an int, or a node at the top of the graph made from its inputs.

    Raises NotDerivable when a symbol is no input's size (a data-dependent one).
    """
    if isinstance(value, int):
        return value
    expr = value.node.expr
    if expr.is_Integer:
        return int(expr)
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    made: dict[sympy.Expr, fx.Node] = {}
    for node in graph.nodes:
        known = node.meta.get("val")
        if isinstance(known, torch.SymInt) and node.meta.get(SIZE):
            made[known.node.expr] = node

    def build(e: sympy.Expr) -> int | fx.Node:
        if e.is_Integer:
            return int(e)
        if e in made:
            return made[e]
        made[e] = symbol(e) if e.is_Symbol else call(e)
        return made[e]

    def symbol(e: sympy.Expr) -> fx.Node:
        for x in inputs:
            v = x.meta["val"]
            if isinstance(v, torch.SymInt) and v.node.expr == e:
                return x
            if isinstance(v, Tensor):
                for dim, n in enumerate(v.shape):
                    if isinstance(n, torch.SymInt) and n.node.expr == e:
                        node = emit(graph, aten.sym_size.int, x, dim)
                        node.meta[SIZE] = True
                        return node
        raise NotDerivable(f"no input has size {e}")

    def call(e: sympy.Expr) -> fx.Node:
        op = SIZE_OPS.get(type(e).__name__)
        if op is None:
            raise NotDerivable(f"no way to compute {e}")
        result = build(e.args[0])
        for arg in e.args[1:]:
            result = emit(graph, op, result, build(arg))
            result.meta[SIZE] = True
        return as_node(result)

    with graph.inserting_before(top(graph)):
        return build(expr)


def top(graph: fx.Graph) -> fx.Node:
    """The first node after the inputs and the sizes made from them."""
    return next(
        n for n in graph.nodes if n.op not in ("placeholder", "get_attr") and SIZE not in n.meta
    )


SIZE_OPS: dict[str, Callable[..., Any]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}


def arith(graph: fx.Graph, op: Callable[..., Any], a: Any, b: Any) -> Any:
    """a op b on sizes, folded when both are ints."""
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        return emit(graph, op, a, b)
    return op(a, b)


def add(graph: fx.Graph, a: Any, b: Any) -> Any:
    if not isinstance(b, fx.Node) and b == 0:
        return a
    if not isinstance(a, fx.Node) and a == 0:
        return b
    return arith(graph, operator.add, a, b)


def sub(graph: fx.Graph, a: Any, b: Any) -> Any:
    if not isinstance(b, fx.Node) and b == 0:
        return a
    return arith(graph, operator.sub, a, b)


def module_path(node: fx.Node) -> str:
    """Path of the innermost module that made this node, "" when unknown."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    return clean_module_path(path)


def clean_module_path(path: str) -> str:
    """Dynamo's ``L['args'][0].model.layers[3].self_attn`` as ``model.layers.3.self_attn``."""
    path = re.sub(r"^L(\[[^\]]*\])+\.?", "", path)
    path = path.replace("._modules", "")
    path = re.sub(r"\[['\"]?([^'\"\]]*)['\"]?\]", r".\1", path)
    return path.lstrip(".")


def sites(gm: fx.GraphModule) -> list[AttentionSite]:
    """Reports of the graph's attentions, in program order; what a pass finds out goes into them."""
    return gm.meta.setdefault(SITES, [])


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and everything they depend on."""
    seen: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return seen


def output_node(gm: fx.GraphModule) -> fx.Node:
    return next(n for n in reversed(gm.graph.nodes) if n.op == "output")


def op_text(node: fx.Node) -> str:
    """The op as people write it: aten::add.Tensor, the overload "default" left out."""
    named = getattr(node.target, "_name", None) or getattr(node.target, "__name__", None)
    return str(named or node.target)
