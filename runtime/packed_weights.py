"""Weights of several linears as parts of one tensor, without a second copy of them.

A packed weight is no tensor of its own: the parameters' data become neighbouring slices of one
buffer, and the packed tensor is a view over all of them, taken anew at every call. So the
parameters stay what they were (names, values, shapes, identity), whoever changes them in place
changes the packed weight, and a parameter that was moved (``.to()``, another tensor assigned) is
no neighbour any more, which is seen at the next call and mended by packing again.
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

log = logging.getLogger(__name__)

Mode = Literal["view", "copy"]

# Kernels read aligned addresses, and Inductor would copy inputs that are not, at every call.
ALIGNMENT = 16

_lock = threading.RLock()
# Address of a packed buffer -> the parameters that were moved there.
_packed_at: dict[int, list[weakref.ref[Tensor]]] = {}


@dataclass(frozen=True)
class PackedInput:
    """An extra input of a rewritten graph: weights [rows[i], K] of the inputs at parts[i]."""

    parts: tuple[int, ...]
    rows: tuple[int, ...]


class PackedWeights:
    """The packed tensors for a graph's arguments.

    mode "view": as the module says. "copy": the packed tensors are copies, remade when a part is
    another tensor or was changed in place; changes through ``.data`` or under inference_mode
    leave no trace and are not seen.
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

    def __call__(self, args: Sequence[Any]) -> list[Tensor]:
        """One [sum(rows), K] tensor per packed input, for the arguments of this call."""
        if self.mode == "copy":
            return [self._copy(each, args) for each in self.inputs]
        with torch.no_grad():
            if [args[at].data_ptr() for at in self._parts] == self._addresses:
                try:
                    return [_over(args[each.parts[0]], sum(each.rows)) for each in self.inputs]
                except RuntimeError:
                    # The same addresses, of other storages.
                    pass
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
        state = [(p.data_ptr(), p._version) for p in parts]
        with _lock:
            known = self._copies.get(packed)
            if known is None or known[0] != state:
                with torch.inference_mode(False), torch.no_grad():
                    known = state, concatenated([p.detach() for p in parts])
                self._copies[packed] = known
        return known[1]


def neighbours(parts: Sequence[Tensor], rows: Sequence[int]) -> Tensor | None:
    """One view [sum(rows), K] over contiguous parts [rows[i], K] that follow each other in one
    storage, in this order; None when they don't."""
    first = parts[0]
    expected = first.data_ptr()
    bytes_per_row = first.shape[1] * first.element_size()
    for part, n in zip(parts, rows):
        if part.data_ptr() != expected:
            return None
        expected += n * bytes_per_row
    try:
        with torch.no_grad():
            return _over(first, sum(rows))
    except RuntimeError:
        return None


def _over(first: Tensor, rows: int) -> Tensor:
    """So many rows from the start of first [n, K] on, in its own storage.

    Raises RuntimeError when the storage ends too early: two storages may happen to touch.
    """
    K = first.shape[1]
    return first.as_strided((rows, K), (K, 1))


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
    """Move the data of parameters [n_i, K] into one buffer, in this order."""
    with torch.inference_mode(False), torch.no_grad():
        buffer = concatenated([p.detach() for p in parts])
        for part, piece in zip(parts, buffer.split([p.shape[0] for p in parts])):
            part.data = piece
    for address in [a for a, refs in _packed_at.items() if not _still_at(a, refs)]:
        del _packed_at[address]
    _packed_at[buffer.data_ptr()] = [weakref.ref(p) for p in parts]


def can_move(parts: Sequence[Tensor]) -> bool:
    """Whether nothing but the parts, and what was packed with them before, uses their memory."""
    for part in parts:
        address = part.untyped_storage().data_ptr()
        packed = _still_at(address, _packed_at.get(address, []))
        if not are_alone([*packed, *parts], only=address):
            return False
    return True


def _still_at(address: int, refs: Sequence[weakref.ref[Tensor]]) -> list[Tensor]:
    parts = [p for ref in refs if (p := ref()) is not None]
    return [p for p in parts if p.untyped_storage().data_ptr() == address]


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
    if weight.is_inference():
        return "inference-tensor", "the weight was made under inference_mode"
    if weight.numel() * weight.element_size() % ALIGNMENT:
        size = weight.numel() * weight.element_size()
        return "alignment", f"parts must be multiples of {ALIGNMENT} bytes, got {size}"
    return None
