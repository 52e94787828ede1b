"""A rewritten graph as plain data for JSON and back; nothing in it is code.

Only graphs without symbolic sizes. A file says which calls are made of what, and no more: names
are made here, ops must be ones that only compute, and every value's dtype, shape, strides and
device are found by running the calls on fake tensors. So a file that was made up can give a graph
that computes something else, and nothing worse.
"""

from __future__ import annotations

import functools
import json
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from kvtailor.kernels.ops import store_kv
from kvtailor.passes.capture.capture import BOUND
from kvtailor.passes.effects import KNOWN
from kvtailor.passes.graph import PACKED, ROWS, aten, module_path, output_node
from kvtailor.runtime.packed_weights import PackedInput

# Tensors that tracing lifted out of the code are kept up to this many bytes.
LARGEST_CONSTANT = 4096
# Lists within lists within an argument.
DEEPEST = 6

_FUNCTIONS: dict[str, Callable[..., Any]] = {"getitem": operator.getitem}

# What `_only_computes` lets through of ops that have no public name, that write, or take text.
_PRIVATE = ("_to_copy", "_unsafe_view", "_softmax", "_log_softmax", "__and__", "__or__", "__xor__")
_WRITING = (aten.copy_.default, store_kv)
_TEXTS = ("empty_row", "approximate", "rounding_mode", "reduce", "mode", "padding", "equation")
_ARGUMENT = re.compile(r"(Optional\[|List\[)*(Tensor|int|float|number|bool|Device|Generator|str)]*")
# Module paths and numbers of rows.
_TEXT = re.compile(r"[\w. *+/()-]{0,300}")


class NotPlain(Exception):
    """Something has no form as plain data; the text says what."""


def to_plain(gm: fx.GraphModule) -> dict[str, Any]:
    """The graph as lists, dicts, strings and numbers. Raises NotPlain."""
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    nodes: list[dict[str, Any]] = []
    for node in gm.graph.nodes:
        if node.op == "output":
            break
        plain: dict[str, Any] = {"op": node.op}
        if node.op == "get_attr":
            if str(node.target).startswith(BOUND):
                plain["target"] = str(node.target)
            else:
                plain["constant"] = _constant(getattr(gm, str(node.target)))
        elif node.op == "call_function":
            plain["target"] = _name(node.target)
            plain["args"] = [encode(a, order) for a in node.args]
            plain["kwargs"] = {name: encode(a, order) for name, a in node.kwargs.items()}
            plain["module"] = _text(module_path(node))
            plain["rows"] = _text(node.meta.get(ROWS, "all"))
        elif node.op != "placeholder":
            raise NotPlain(f"a {node.op} node")
        _check_static(node.meta["val"])
        nodes.append(plain)
    packed = [[list(each.parts), list(each.rows)] for each in gm.meta.get(PACKED, ())]
    output = [encode(a, order) for a in output_node(gm).args[0]]  # type: ignore[union-attr]
    return {"nodes": nodes, "output": output, "packed": packed}


def from_plain(
    plain: Mapping[str, Any],
    inputs: Sequence[Any],
    attributes: Mapping[str, Tensor],
    mode: FakeTensorMode,
) -> fx.GraphModule:
    """The graph again; inputs: example values, without packed ones. attributes: the user's own
    tensors by flat name. mode: of the new graph's values.

    Raises any kind of Exception for what ``to_plain`` never makes.
    """
    packed = tuple(_packed(each, inputs) for each in plain["packed"])
    given = [*inputs, *(_joined(each, inputs) for each in packed)]
    graph = fx.Graph()
    replay = _Replay([*given, *attributes.values()], mode)
    made: list[fx.Node] = []
    held: dict[str, Tensor] = {}
    for each in plain["nodes"]:
        if each["op"] == "placeholder" and given:
            node = graph.placeholder(f"arg{len(made)}")
            replay.give(node, given.pop(0))
        elif each["op"] == "get_attr":
            name = each["target"] if "target" in each else f"constant{len(held)}"
            held[name] = attributes[name] if "target" in each else _tensor(each["constant"])
            node = graph.create_node("get_attr", name)
            replay.give(node, held[name])
        elif each["op"] == "call_function":
            args = tuple(decode(a, made) for a in each["args"])
            kwargs = {name: decode(a, made) for name, a in each["kwargs"].items()}
            function = _function(each["target"])
            node = graph.call_function(function, args, kwargs)
            replay.call(node)
            if _text(each["module"]):
                node.meta["nn_module_stack"] = {"": (each["module"], "")}
            if _text(each["rows"]) != "all":
                node.meta[ROWS] = each["rows"]
        else:
            raise ValueError(f"op must be one to_plain writes, got {each['op']!r}")
        made.append(node)
    if given:
        raise ValueError(f"a graph must take its {len(given)} other inputs too")
    graph.output(tuple(decode(each, made) for each in plain["output"]))
    graph.lint()
    found = fx.GraphModule(held, graph)
    if packed:
        found.meta[PACKED] = packed
    return found


def _packed(plain: Any, inputs: Sequence[Any]) -> PackedInput:
    parts, rows = map(tuple, plain)
    weights = [inputs[_index(at, len(inputs))] for at in parts]
    kinds = {(w.dtype, w.device, w.shape[1:]) for w in weights}
    if len(kinds) != 1 or tuple(w.shape[0] for w in weights) != rows or weights[0].dim() != 2:
        raise ValueError(f"parts of a packed input must be weights of one width, got {parts}")
    return PackedInput(parts, rows)


def _joined(packed: PackedInput, inputs: Sequence[Any]) -> Tensor:
    first: Tensor = inputs[packed.parts[0]]
    return first.new_empty(sum(packed.rows), first.shape[1])


# --- values ---------------------------------------------------------------------------------------


class _Replay:
    """The values of nodes, found by running their calls on fake tensors.

    What capture found out is not in the file, where it could be wrong. A call on values that an
    earlier one had, as layers make them, is not run again.
    """

    def __init__(self, known: Sequence[Any], mode: FakeTensorMode):
        self._devices = {torch.device("cpu")} | {x.device for x in known if isinstance(x, Tensor)}
        self._mode = mode
        # Without symbols, and never the real op in place of a fake one that is missing.
        self._own = FakeTensorMode(allow_fallback_kernels=False)
        self._values: dict[fx.Node, Any] = {}
        # Nodes of one kind have values that differ in nothing an op can see.
        self._kinds: dict[Any, int] = {}
        self._kind_of: dict[fx.Node, int] = {}
        self._results: dict[str, Any] = {}

    def give(self, node: fx.Node, value: Any) -> None:
        """The value of a node that is no call."""
        self._put(node, _like(value, self._own))

    def call(self, node: fx.Node) -> None:
        """Run a call. Raises what the op does for wrong arguments, ValueError for a result."""
        given = [encode(list(node.args), self._kind_of)]
        given += [[name, encode(a, self._kind_of)] for name, a in node.kwargs.items()]
        key = json.dumps([str(node.target), given])
        if key not in self._results:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self._values.__getitem__)
            with self._own:
                self._results[key] = node.target(*args, **kwargs)  # type: ignore[operator]
            for each in node.all_input_nodes:
                if self._kinds.get(self._key(self._values[each])) != self._kind_of[each]:
                    raise ValueError(f"{node.target} must leave the memory of {each} as it is")
        self._put(node, self._results[key])

    def _put(self, node: fx.Node, value: Any) -> None:
        self._values[node] = value
        key = self._key(value)
        self._kind_of[node] = self._kinds.setdefault(key, len(self._kinds))
        node.meta["val"] = _like(value, self._mode)

    def _key(self, value: Any) -> Any:
        """All that an op can see of a value. Raises ValueError for one that no graph has."""
        if isinstance(value, (list, tuple)):
            return tuple(map(self._key, value))
        if not isinstance(value, Tensor):
            if value is not None and type(value) not in (int, bool, float):
                raise ValueError(
                    f"a value must be a tensor or a number, got {type(value).__name__}"
                )
            return repr(value)
        if value.layout != torch.strided or value.device not in self._devices:
            raise ValueError(f"a tensor must be on {self._devices}, got {value.device}")
        room, size = value.untyped_storage().nbytes(), value.element_size()
        if (value.storage_offset() + _span(value)) * size > room:
            raise ValueError(f"a view must lie within its {room} bytes of memory")
        if value.numel() * size > _memory():
            raise ValueError(f"a tensor must fit into memory, got {list(value.shape)}")
        where = value.shape, value.stride(), value.storage_offset(), room
        return value.dtype, value.device, where, value.is_conj(), value.is_neg()


def _like(value: Any, mode: FakeTensorMode) -> Any:
    """A fake value of this mode that looks like the given one, in memory of its own."""
    if isinstance(value, (list, tuple)):
        return tuple(_like(v, mode) for v in value)
    if not isinstance(value, Tensor):
        return value
    with mode:
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )


def _span(value: Tensor) -> int:
    """Elements from the first to the last in memory."""
    if value.numel() == 0:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride()))


@functools.cache
def _memory() -> int:
    """Bytes of memory of this machine, or more than any has."""
    if not hasattr(os, "sysconf"):
        return 1 << 48
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check_static(value: Any) -> None:
    """Raises NotPlain for a value that would not be found again."""
    if isinstance(value, (list, tuple)):
        for each in value:
            _check_static(each)
    elif isinstance(value, Tensor):
        if value.layout != torch.strided or any(not isinstance(n, int) for n in value.shape):
            raise NotPlain("a tensor of symbolic shape, or one without strides")
    elif value is not None and type(value) not in (int, bool):
        raise NotPlain(f"a value of type {type(value).__name__}")


# --- leaves ---------------------------------------------------------------------------------------

_TORCH = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


def encode(value: Any, order: Mapping[fx.Node, int]) -> Any:
    """An argument as plain data; floats as text that keeps every bit. Raises NotPlain."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, fx.Node):
        return {"node": order[value]}
    if type(value) is int:
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if type(value) is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind, of in _TORCH.items():
        if isinstance(value, of):
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, slice):
        return {"slice": [encode(v, order) for v in (value.start, value.stop, value.step)]}
    if value is ...:
        return {"ellipsis": True}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [encode(v, order) for v in value]}
    raise NotPlain(f"an argument of type {type(value).__name__}")


def decode(plain: Any, made: Sequence[fx.Node], depth: int = 0) -> Any:
    """What ``encode`` was given. Raises ValueError or TypeError."""
    if plain is None or isinstance(plain, (bool, int, str)):
        return plain
    if depth > DEEPEST or not isinstance(plain, dict):
        raise ValueError(f"an argument must be what encode writes, got {str(plain)[:50]}")
    ((kind, value),) = plain.items()
    if kind == "node":
        return made[_index(value, len(made))]
    if kind == "float":
        return float.fromhex(value)
    if kind == "complex":
        return complex(*map(float.fromhex, value))
    if kind == "device":
        return torch.device(_text(value))
    if kind in _TORCH:
        return _named(kind, value)
    if kind == "ellipsis":
        return ...
    decoded = [decode(v, made, depth + 1) for v in value]
    if kind == "slice":
        return slice(*decoded)
    if kind in ("list", "tuple"):
        return decoded if kind == "list" else tuple(decoded)
    raise ValueError(f"an argument must be of a kind encode writes, got {kind!r}")


def _index(value: Any, length: int) -> int:
    if type(value) is not int or not 0 <= value < length:
        raise ValueError(f"an index must be 0 to {length - 1}, got {value!r}")
    return value


def _named(kind: str, name: Any) -> Any:
    """torch's dtype, layout or memory format of this name."""
    found = getattr(torch, _text(name))
    if not isinstance(found, _TORCH[kind]):
        raise ValueError(f"{kind} must name one, got {name!r}")
    return found


def _text(value: Any) -> Any:
    """A name or a number that is kept. Raises NotPlain for one with characters out of place."""
    if type(value) is not int and not (isinstance(value, str) and _TEXT.fullmatch(value)):
        raise NotPlain(f"the name {value!r:.50}")
    return value


def _name(target: Any) -> str:
    for name, function in _FUNCTIONS.items():
        if target is function:
            return name
    if not isinstance(target, torch._ops.OpOverload) or not _only_computes(target):
        raise NotPlain(f"the function {target}")
    return str(target)


def _function(name: str) -> Callable[..., Any]:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    namespace, op, overload = _text(name).split(".")
    if namespace not in KNOWN:
        raise ValueError(f"a target must be of {KNOWN}, got {name!r}")
    found = getattr(getattr(getattr(torch.ops, namespace), op), overload)
    if not isinstance(found, torch._ops.OpOverload) or not _only_computes(found):
        raise ValueError(f"a target must be an op that only computes, got {name!r}")
    return found


@functools.cache
def _only_computes(op: torch._ops.OpOverload) -> bool:
    """Whether a call makes tensors and numbers of its arguments, and touches nothing else.

    Ops without a public name check little of what they are given, text may name a file, and what
    is not registered with the dispatcher is TorchScript's.
    """
    name = op.name().partition("::")[2].partition(".")[0]
    types = {a.name: str(a.type) for a in op._schema.arguments}
    return (
        op.namespace in KNOWN
        and torch._C._dispatch_has_kernel(op.name())
        and (not op._schema.is_mutable or op in _WRITING)
        and (not name.startswith("_") or name in _PRIVATE)
        and all(_ARGUMENT.fullmatch(each) for each in types.values())
        and all(arg in _TEXTS for arg, each in types.items() if "str" in each)
    )


def _constant(value: Any) -> dict[str, Any]:
    """A CPU tensor by the bytes of its memory, which strides may read more than once."""
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        raise NotPlain("a constant that is no CPU tensor")
    if value.layout != torch.strided or value.is_quantized or value.requires_grad:
        raise NotPlain("a constant without strides, quantised, or that needs gradients")
    value = value.resolve_conj().resolve_neg()
    size = _span(value) * value.element_size()
    if size > LARGEST_CONSTANT:
        raise NotPlain(f"a constant of {size} bytes")
    memory = value.as_strided((_span(value),), (1,)).contiguous().view(torch.uint8)
    return {
        "data": memory.numpy().tobytes().hex(),
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "stride": list(value.stride()),
    }


def _tensor(plain: Mapping[str, Any]) -> Tensor:
    data = bytearray.fromhex(plain["data"])
    dtype = _named("dtype", plain["dtype"])
    if len(data) > LARGEST_CONSTANT or (dtype == torch.bool and any(b > 1 for b in data)):
        raise ValueError(f"a constant must be up to {LARGEST_CONSTANT} bytes of {dtype}")
    memory = torch.empty(len(data), dtype=torch.uint8)
    if data:
        memory.copy_(torch.frombuffer(data, dtype=torch.uint8))
    return memory.view(dtype).as_strided(plain["shape"], plain["stride"])
