"""Weights of several linears as parts of one tensor, without a second copy of them.

A packed weight has no memory of its own: the parameters' data become neighbouring parts of one
buffer. To everybody else each part is a storage by itself, so that saving, copying and sharing
take a parameter for what it is; the buffer lives as long as any part does. So the parameters stay
what they were (names, values, shapes, identity), whoever changes them in place changes the packed
weight, and a parameter that was moved (``.to()``, another tensor assigned) is no neighbour any
more, which is seen at the next call and mended by packing again.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

log = logging.getLogger(__name__)

Mode = Literal["view", "copy"]

# Kernels read aligned addresses, and Inductor would copy inputs that are not, at every call.
ALIGNMENT = 16

_lock = threading.RLock()
# Packed buffers by their addresses. What keeps one alive is the storages of its parts.
_buffers: dict[int, weakref.ref[Tensor]] = {}

# Steps of any optimizer so far: fused ones leave no other trace on a parameter.
_steps = 0
_hook: Any = None


@dataclass(frozen=True)
class PackedInput:
    """An extra input of a rewritten graph: weights [rows[i], K] of the inputs at parts[i]."""

    parts: tuple[int, ...]
    rows: tuple[int, ...]


class PackedWeights:
    """The packed tensors for a graph's arguments.

    mode "view": as the module says. "copy": the packed tensors are copies, remade when a part is
    another tensor or was changed in place, and after a step of any ``torch.optim.Optimizer``.
    Changes through ``.data``, under inference_mode, through NumPy or DLPack, or by a fused kernel
    that is called by itself leave no trace and are not seen.
    """

    def __init__(self, inputs: Sequence[PackedInput], mode: Mode = "view"):
        self.inputs = tuple(inputs)
        self.mode = mode
        self._parts = [at for each in self.inputs for at in each.parts]
        # Where the parts were when last they were neighbours: nothing else is kept of them, so
        # that memory a model left is free.
        self._addresses: list[int] = []
        self._copies: dict[PackedInput, tuple[Any, Tensor]] = {}
        self._warned = False
        if mode == "copy":
            _follow_optimizers()

    def __call__(self, args: Sequence[Any]) -> list[Tensor]:
        """One [sum(rows), K] tensor per packed input, for the arguments of this call."""
        if self.mode == "copy":
            return [self._copy(each, args) for each in self.inputs]
        with torch.no_grad():
            if [args[at].data_ptr() for at in self._parts] == self._addresses:
                known = [_joined(args[each.parts[0]], sum(each.rows)) for each in self.inputs]
                if all(x is not None for x in known):
                    return known  # type: ignore[return-value]
                # Else the same addresses, of other storages.
            found = [self._view(each, args) for each in self.inputs]
            self._addresses = [args[at].data_ptr() for at in self._parts]
            if any(t.data_ptr() != args[e.parts[0]].data_ptr() for t, e in zip(found, self.inputs)):
                self._addresses = []
            return found

    def _view(self, packed: PackedInput, args: Sequence[Any]) -> Tensor:
        parts = [args[at] for at in packed.parts]
        joined = neighbours(parts, packed.rows)
        if joined is not None:
            return joined
        with _lock:
            joined = neighbours(parts, packed.rows)
            if joined is None and can_move(parts):
                log.info("packing %d weights of %s rows", len(parts), packed.rows)
                pack(parts)
                joined = neighbours(parts, packed.rows)
        if joined is not None:
            return joined
        if not self._warned:
            self._warned = True
            log.warning(
                "weights of %d packed linears now share their memory with other tensors: "
                "they are copied together at every call",
                len(parts),
            )
        return torch.cat(parts)

    def _copy(self, packed: PackedInput, args: Sequence[Any]) -> Tensor:
        parts = [args[at] for at in packed.parts]
        state = [_steps, *((p.data_ptr(), p._version) for p in parts)]
        with _lock:
            known = self._copies.get(packed)
            if known is None or known[0] != state:
                with torch.inference_mode(False), torch.no_grad():
                    known = state, concatenated([p.detach() for p in parts])
                self._copies[packed] = known
        return known[1]


def neighbours(parts: Sequence[Tensor], rows: Sequence[int]) -> Tensor | None:
    """One view [sum(rows), K] over contiguous parts [rows[i], K] that follow each other in one
    buffer, in this order; None when they don't."""
    first = parts[0]
    expected = first.data_ptr()
    bytes_per_row = first.shape[1] * first.element_size()
    for part, n in zip(parts, rows):
        if part.data_ptr() != expected:
            return None
        expected += n * bytes_per_row
    with torch.no_grad():
        return _joined(first, sum(rows))


def _joined(first: Tensor, rows: int) -> Tensor | None:
    """So many rows from the start of first [n, K] on, of the buffer it is in.

    None when that is no buffer, or ends too early: two storages may happen to touch.
    """
    address = first.data_ptr()
    buffer = _buffer_at(address)
    if buffer is None or buffer.dtype != first.dtype or buffer.shape[1:] != first.shape[1:]:
        return None
    skipped, rest = divmod(address - buffer.data_ptr(), buffer.stride(0) * buffer.element_size())
    if rest or skipped + rows > buffer.shape[0]:
        return None
    return buffer if rows == buffer.shape[0] else buffer.narrow(0, skipped, rows)


def _buffer_at(address: int) -> Tensor | None:
    """The packed buffer that holds an address, while any of its parts lives."""
    known = _buffers.get(address)
    if known is not None:
        return known()
    for start, ref in list(_buffers.items()):
        buffer = ref()
        if buffer is not None and start <= address < start + buffer.nbytes:
            return buffer
    return None


def _follow_optimizers() -> None:
    """Count the steps of all optimizers from now on."""
    global _hook
    with _lock:
        if _hook is None:
            _hook = register_optimizer_step_post_hook(_count_step)


def _count_step(*_: Any) -> None:
    global _steps
    _steps += 1


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """The parts [n_i, K] in one new tensor, on huge pages where the system has them: a decode step
    reads all weights once, and then every page is a miss of the address cache."""
    first = parts[0]
    out = first.new_empty(sum(p.shape[0] for p in parts), first.shape[1])
    _ask_for_huge_pages(out)
    return torch.cat(list(parts), out=out)


def _ask_for_huge_pages(tensor: Tensor) -> None:
    """For memory not yet written to; only advice, and only on Linux."""
    advice, size = getattr(mmap, "MADV_HUGEPAGE", None), 2 << 20
    if advice is None or not tensor.is_cpu:
        return
    # Whole huge pages within the tensor, so that it takes no more memory than it would.
    start = -(-tensor.data_ptr() // size) * size
    length = (tensor.data_ptr() + tensor.nbytes - start) // size * size
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)


def pack(parts: Sequence[Tensor]) -> None:
    """Move the data of parameters [n_i, K] into one buffer, in this order: all of them or none."""
    with torch.inference_mode(False), torch.no_grad():
        buffer = concatenated([p.detach() for p in parts])
        # Over DLPack a part is a storage by itself, which holds its view and that the buffer.
        pieces = [torch.from_dlpack(x) for x in buffer.split([p.shape[0] for p in parts])]
        for part, piece in zip(parts, pieces):
            part.data = piece
    for address in [a for a, ref in _buffers.items() if ref() is None]:
        del _buffers[address]
    _buffers[buffer.data_ptr()] = weakref.ref(buffer)


def can_move(parts: Sequence[Tensor]) -> bool:
    """Whether nothing but the parts uses their memory, here or in another process."""
    return are_alone(parts) and not any(p.is_cpu and p.is_shared() for p in parts)


def are_alone(parts: Sequence[Tensor], only: int | None = None) -> bool:
    """Whether the parts overlap with nothing: no other tensor uses their storages (or, of these,
    the one at ``only``), and within one they keep apart."""
    users: dict[int, dict[int, Tensor]] = {}
    for part in parts:
        users.setdefault(part.untyped_storage().data_ptr(), {})[id(part)] = part
    for address, found in users.items():
        if only not in (None, address):
            continue
        ours = sorted(found.values(), key=lambda p: p.data_ptr())
        if _storage_users(ours[0].untyped_storage()) != len(ours):
            return False
        if any(a.data_ptr() + a.nbytes > b.data_ptr() for a, b in pairwise(ours)):
            return False
    return True


def _storage_users(storage: torch.UntypedStorage) -> int:
    """How many tensors use a storage.

    torch has no public way to ask. The count includes the Python object that asks.
    """
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def existing_order(parts: Sequence[Tensor]) -> list[int]:
    """The order in which to pack: as given, or the one the parts already follow each other in."""
    given = list(range(len(parts)))
    by_address = sorted(given, key=lambda i: parts[i].data_ptr())
    arranged = [parts[i] for i in by_address]
    if neighbours(arranged, [p.shape[0] for p in arranged]) is not None:
        return by_address
    return given


def why_not(weight: Any, mode: Mode) -> tuple[str, str] | None:
    """Reason code and sentence when a weight cannot become part of a packed one."""
    if not isinstance(weight, nn.Parameter):
        return "not-a-parameter", "the weight is computed, or an input, not a parameter"
    if type(weight) is not nn.Parameter or type(weight.data) is not Tensor:
        kind = type(weight if type(weight) is not nn.Parameter else weight.data).__name__
        return "tensor-subclass", f"the weight is a {kind}"
    if weight.is_quantized or weight.layout != torch.strided:
        return "layout", f"the weight has layout {weight.layout}, or is quantised"
    if weight.is_meta:
        return "meta", "the weight is on the meta device: it has no data"
    if not weight.is_contiguous():
        return "non-contiguous", f"the weight has strides {tuple(weight.stride())}"
    if mode == "view" and weight.is_cpu and weight.is_shared():
        return "shared", "the weight is in memory that processes share"
    if weight.is_inference():
        return "inference-tensor", "the weight was made under inference_mode"
    if weight.numel() * weight.element_size() % ALIGNMENT:
        size = weight.numel() * weight.element_size()
        return "alignment", f"parts must be multiples of {ALIGNMENT} bytes, got {size}"
    return None
