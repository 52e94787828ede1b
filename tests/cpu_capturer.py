"""A capturer of pieces on a CPU, which shows what a CUDA graph would do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kvtailor.runtime.driver import Compiled


class ChangedAddress(RuntimeError):
    """A recorded call would read or write memory that has moved."""


class StaleRows(RuntimeError):
    """A recorded call would read rows of an earlier call."""


class CpuCapturer:
    """Records the ops of a call and repeats them on the memory they ran on, as a graph does.

    Buffers are spoilt after each call; a replay that finds spoilt entries raises StaleRows, one
    that finds memory elsewhere ChangedAddress.
    """

    def capture(self, call: Compiled, inputs: list[Any], buffers: list[Tensor]) -> CpuRecording:
        with _Listener() as listener:
            results = list(call(*inputs))
        tensors = [r for r in results if isinstance(r, Tensor)]
        memory = sum(t.nbytes for t in (*buffers, *tensors))
        return CpuRecording(listener.calls, results, buffers, memory)

    def spoil(self, buffers: Sequence[Tensor]) -> None:
        for buffer in buffers:
            if buffer.dtype in _SPOILT:
                view, value = _SPOILT[buffer.dtype]
                buffer.view(view).fill_(value)


# Floats are spoilt with a NaN nothing computes.
_SPOILT = {
    torch.float32: (torch.int32, 0x7FC0DEAD),
    torch.float64: (torch.int64, 0x7FF80000DEADDEAD),
    torch.bfloat16: (torch.int16, 0x7FDE),
    torch.int32: (torch.int32, -777_777_777),
    torch.int64: (torch.int64, -777_777_777_777_777_777),
}


@dataclass
class _Call:
    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Any]
    addresses: list[int]


class _Listener(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = op(*args, **(kwargs or {}))
        flat = pytree.tree_leaves(results)
        call = _Call(op, args, kwargs or {}, flat, [])
        call.addresses = _addresses(call)
        self.calls.append(call)
        return results


def _addresses(call: _Call) -> list[int]:
    leaves = pytree.tree_leaves((call.args, call.kwargs, call.results))
    return [x.data_ptr() for x in leaves if isinstance(x, Tensor)]


@dataclass
class CpuRecording:
    calls: list[_Call]
    results: list[Any]
    buffers: list[Tensor]
    memory: int

    def replay(self) -> None:
        for buffer in self.buffers:
            if buffer.dtype in _SPOILT:
                view, value = _SPOILT[buffer.dtype]
                if (buffer.view(view) == value).any():
                    raise StaleRows(f"a buffer of {list(buffer.shape)} was not filled")
        for call in self.calls:
            if _addresses(call) != call.addresses:
                raise ChangedAddress(f"memory of {call.op} has moved")
            if call.op.is_view:
                continue
            results = pytree.tree_leaves(call.op(*call.args, **call.kwargs))
            for old, new in zip(call.results, results):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
