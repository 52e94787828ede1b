"""A rewritten graph as plain data for JSON and back; nothing in it is code.

Only graphs without symbolic sizes. Ops are looked up by name among torch's registered ones,
values are dtype, shape, strides and device.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from kvtailor.passes.capture.capture import BOUND
from kvtailor.passes.graph import ROWS, module_path, output_node
from kvtailor.passes.packing import PACKED
from kvtailor.runtime.packed_weights import PackedInput

# Tensors that tracing lifted out of the code are kept up to this many bytes.
LARGEST_CONSTANT = 4096

_FUNCTIONS: dict[str, Callable[..., Any]] = {"getitem": operator.getitem}


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
            plain["target"] = str(node.target)
            if not plain["target"].startswith(BOUND):
                plain["constant"] = _constant(getattr(gm, plain["target"]))
        elif node.op == "call_function":
            plain["target"] = _name(node.target)
            plain["args"] = encode(list(node.args), order)
            plain["kwargs"] = encode(dict(node.kwargs), order)
            plain["module"] = module_path(node)
            plain["rows"] = node.meta.get(ROWS, "all")
        elif node.op != "placeholder":
            raise NotPlain(f"a {node.op} node")
        plain["val"] = _value(node.meta["val"])
        nodes.append(plain)
    packed = [[list(each.parts), list(each.rows)] for each in gm.meta.get(PACKED, ())]
    return {"nodes": nodes, "output": encode(output_node(gm).args[0], order), "packed": packed}


def from_plain(
    plain: Mapping[str, Any], attributes: Mapping[str, Tensor], mode: FakeTensorMode
) -> fx.GraphModule:
    """The graph again; attributes: the user's own tensors by flat name.

    Raises LookupError, ValueError, TypeError, AttributeError or RuntimeError for what
    ``to_plain`` never makes.
    """
    graph = fx.Graph()
    made: list[fx.Node] = []
    held = {
        each["target"]: _tensor(each["constant"])
        if "constant" in each
        else attributes[each["target"]]
        for each in plain["nodes"]
        if each["op"] == "get_attr"
    }
    with mode:
        for each in plain["nodes"]:
            op = each["op"]
            if op == "placeholder":
                node = graph.placeholder(f"arg{len(made)}")
            elif op == "get_attr":
                node = graph.create_node("get_attr", each["target"])
            elif op == "call_function":
                args = decode(each["args"], made)
                kwargs = decode(each["kwargs"], made)
                node = graph.call_function(_function(each["target"]), tuple(args), kwargs)
                if each["module"]:
                    node.meta["nn_module_stack"] = {"": (each["module"], "")}
                if each["rows"] != "all":
                    node.meta[ROWS] = each["rows"]
            else:
                raise ValueError(f"op must be one to_plain writes, got {op!r}")
            node.meta["val"] = _fake(each["val"])
            made.append(node)
    graph.output(decode(plain["output"], made))
    graph.lint()
    found = fx.GraphModule(held, graph)
    inputs = len(graph.find_nodes(op="placeholder")) - len(plain["packed"])
    packed = tuple(PackedInput(tuple(parts), tuple(rows)) for parts, rows in plain["packed"])
    if any(not 0 <= at < inputs for each in packed for at in each.parts):
        raise ValueError(f"parts of a packed input must be among the {inputs} inputs")
    if packed:
        found.meta[PACKED] = packed
    return found


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
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {"dict": {k: encode(v, order) for k, v in value.items()}}
    raise NotPlain(f"an argument of type {type(value).__name__}")


def decode(plain: Any, made: Sequence[fx.Node]) -> Any:
    if not isinstance(plain, dict):
        return plain
    ((kind, value),) = plain.items()
    if kind == "node":
        return made[value]
    if kind == "float":
        return float.fromhex(value)
    if kind == "device":
        return torch.device(value)
    if kind in _TORCH:
        found = getattr(torch, value)
        if not isinstance(found, _TORCH[kind]):
            raise ValueError(f"{kind} must name one, got {value!r}")
        return found
    if kind == "slice":
        return slice(*(decode(v, made) for v in value))
    if kind == "ellipsis":
        return ...
    if kind in ("list", "tuple"):
        decoded = [decode(v, made) for v in value]
        return decoded if kind == "list" else tuple(decoded)
    if kind == "dict":
        return {k: decode(v, made) for k, v in value.items()}
    raise ValueError(f"an argument must be of a kind encode writes, got {kind!r}")


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload) and str(target).count(".") == 2:
        return str(target)
    for name, function in _FUNCTIONS.items():
        if target is function:
            return name
    raise NotPlain(f"the function {target}")


def _function(name: str) -> Callable[..., Any]:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    namespace, op, overload = name.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), op), overload)
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(f"a target must be an op, got {name!r}")
    return found


def _value(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.layout != torch.strided or any(not isinstance(n, int) for n in value.shape):
            raise NotPlain("a tensor of symbolic shape, or one without strides")
        return {
            "dtype": str(value.dtype).removeprefix("torch."),
            "device": str(value.device),
            "shape": list(value.shape),
            "stride": list(value.stride()),
        }
    if isinstance(value, (list, tuple)):
        return [_value(v) for v in value]
    if value is None or type(value) in (int, bool):
        return value
    raise NotPlain(f"a value of type {type(value).__name__}")


def _fake(plain: Any) -> Any:
    if isinstance(plain, list):
        return tuple(_fake(p) for p in plain)
    if not isinstance(plain, dict):
        return plain
    dtype, device = getattr(torch, plain["dtype"]), torch.device(plain["device"])
    return torch.empty_strided(plain["shape"], plain["stride"], dtype=dtype, device=device)


def _constant(value: Any) -> dict[str, Any]:
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        raise NotPlain("a constant that is no CPU tensor")
    if value.nbytes > LARGEST_CONSTANT:
        raise NotPlain(f"a constant of {value.nbytes} bytes")
    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"data": data.hex(), "shape": list(value.shape), "dtype": str(value.dtype)[6:]}


def _tensor(plain: Mapping[str, Any]) -> Tensor:
    data = torch.frombuffer(bytearray.fromhex(plain["data"]), dtype=torch.uint8)
    return data.view(getattr(torch, plain["dtype"])).reshape(plain["shape"])
