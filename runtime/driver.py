"""A graph's pieces at call time: straight-line code that runs one after the other.

def run(a0, a1, a2):
    v0, v1 = p0(a0, a1)
    v0 = v0.contiguous()
    v2, = p1(v0, v1, a2)
    del v0
    return v2,
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Compiled = Callable[..., Any]


@dataclass(frozen=True)
class Call:
    """A call of a piece: values it is given, names of its results, None for an unused one.

    layouts: strides of results on which a later piece counts, () for contiguous. An inner
    compiler may return others than the graph says, and refuses to take others than it says.
    """

    function: Compiled
    inputs: Sequence[str]
    outputs: Sequence[str | None]
    layouts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def straight_line(
    inputs: Sequence[str],
    constants: Mapping[str, Tensor],
    symbols: Mapping[str, tuple[str, int]],
    calls: Sequence[Call],
    results: Sequence[tuple[str | None, Any]],
) -> Compiled:
    """A function of ``inputs`` that makes the calls and returns the results as a tuple.

    constants: values that are no inputs. symbols: sizes, by tensor input and axis. results: the
    name of a value, or None and a constant. Values are dropped after their last use.
    """
    names: dict[str, str] = {}
    scope: dict[str, Any] = {"laid_out": laid_out}

    def local(value: str) -> str:
        return names.setdefault(value, f"v{len(names)}")

    last: dict[str, int] = {}
    for i, call in enumerate(calls):
        last |= dict.fromkeys(call.inputs, i)
        last = dict.fromkeys(filter(None, call.outputs), i) | last
    kept = {name for name, _ in results} | set(constants)
    lines = [f"def run({', '.join(map(local, inputs))}):"]
    for name, tensor in constants.items():
        scope[local(name)] = tensor
    for name, (holder, axis) in symbols.items():
        lines.append(f"    {local(name)} = {local(holder)}.size({axis})")
    shared: dict[int, str] = {}
    for i, call in enumerate(calls):
        function = shared.setdefault(id(call.function), f"p{len(shared)}")
        scope[function] = call.function
        made = "".join(f"{'_' if x is None else local(x)}, " for x in call.outputs)
        equals = f"{made.rstrip()} = " if made else ""
        lines.append(f"    {equals}{function}({', '.join(map(local, call.inputs))})")
        for value, strides in call.layouts.items():
            name = local(value)
            fixed = f"laid_out({name}, {strides})" if strides else f"{name}.contiguous()"
            lines.append(f"    {name} = {fixed}")
        done = [local(v) for v, at in last.items() if at == i and v not in kept]
        if None in call.outputs:
            done.append("_")
        if done:
            lines.append(f"    del {', '.join(dict.fromkeys(done))}")
    returned = []
    for i, (result, constant) in enumerate(results):
        if result is None:
            scope[f"r{i}"] = constant
        returned.append(f"r{i}" if result is None else local(result))
    lines.append(f"    return {''.join(r + ', ' for r in returned).rstrip() or '()'}")
    exec("\n".join(lines), scope)
    run = scope["run"]
    run.source = "\n".join(lines)
    return run


def laid_out(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """x, or a copy of it with these strides."""
    if x.stride() == strides:
        return x
    return x.new_empty_strided(x.shape, strides).copy_(x)
