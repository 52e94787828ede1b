"""Pieces as CUDA graphs: each is padded to a size captured for it, and replayed.

    rows 3, sizes 1 2 4 8:  copy 3 rows into the static buffer of 4, repeat the last, replay,
                            hand on the first 3 rows of what lies in the static results

A piece looks at its own row count only. Above the largest size it runs plainly, whatever the
others do. What stays where it is (parameters, caches that are written) is read in place, and its
address is checked on every call; everything else is copied into buffers that all sizes share.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from kvtailor.runtime.driver import Compiled

log = logging.getLogger(__name__)

# A cache may be exchanged for another now and then; if it goes on, graphs are of no use.
MOST_MOVES = 8


@dataclass(frozen=True)
class Signature:
    """How a piece meets its graphs.

    in_place: inputs used where they are. written: those of them that are written to. axes: per
    input, the axis of its rows or None. counts: inputs that are the row count itself.
    result_axes: per result, as axes; None where all shapes are fixed, and ``rows`` says how many
    rows that are.
    """

    in_place: set[int]
    written: set[int]
    axes: list[int | None]
    counts: list[int]
    result_axes: list[int | None] | None
    rows: int | None


class Recording(Protocol):
    """A captured call. results: its static results. memory: bytes it holds."""

    results: list[Any]
    memory: int

    def replay(self) -> None: ...


class Capturer(Protocol):
    """Captures calls on static inputs."""

    def capture(self, call: Compiled, inputs: list[Any], buffers: list[Tensor]) -> Recording:
        """``buffers``: the inputs that callers copy into."""

    def spoil(self, buffers: Sequence[Tensor]) -> None:
        """Told after a call: what lies in the buffers is not to be read again."""


@dataclass
class Counts:
    """What a piece did so far. moves: how often something read in place had moved."""

    captured: list[int] = field(default_factory=list)
    replays: int = 0
    plain: int = 0
    moves: int = 0


class GraphedPiece:
    """``call`` behind graphs of the given sizes.

    Results lie in static memory until the next call, but for those at the indices ``returned``,
    which are the caller's. reason: why it captures no more, None while it does. memory: bytes of
    its graphs.
    """

    def __init__(
        self,
        name: str,
        call: Compiled,
        signature: Signature,
        sizes: Sequence[int],
        capturer: Capturer,
        returned: Collection[int] = (),
    ):
        if not sizes or min(sizes) < 1:
            raise ValueError(f"capture sizes must be positive, got {list(sizes)}")
        self.name, self.call, self.signature, self.capturer = name, call, signature, capturer
        self.sizes = sorted(set(sizes))
        self.returned = frozenset(returned)
        self.counts = Counts()
        self.reason: str | None = None
        self.memory = 0
        self._graphs: dict[int, tuple[Recording, list[Any]]] = {}
        self._in_place = sorted(signature.in_place)
        self._addresses: list[int] | None = None

    def __call__(self, *args: Any) -> Any:
        size = None if self.reason else self._size(args)
        if size is None or not self._at_home(args):
            self.counts.plain += 1
            return self.call(*args)
        if not self._graphs and not self._capture(args):
            self.counts.plain += 1
            return self.call(*args)
        recording, inputs = self._graphs[size]
        copied = [(i, b) for i, b in enumerate(inputs) if self._is_copied(i, b)]
        for i, buffer in copied:
            _fill(buffer, args[i], self.signature.axes[i])
        recording.replay()
        self.counts.replays += 1
        self.capturer.spoil([b for _, b in copied])
        return self._results(recording.results, self._rows(args), size)

    def _results(self, results: Sequence[Any], rows: int, size: int) -> list[Any]:
        axes = self.signature.result_axes
        out = list(results)
        if axes is not None and rows != size:
            out = [r if a is None else _first_rows(r, a, rows) for r, a in zip(out, axes)]
        return [r.clone() if i in self.returned else r for i, r in enumerate(out)]

    def _is_copied(self, i: int, value: Any) -> bool:
        return isinstance(value, Tensor) and i not in self.signature.in_place

    def _rows(self, args: Sequence[Any]) -> int:
        if self.signature.rows is not None:
            return self.signature.rows
        for x, axis in zip(args, self.signature.axes):
            if axis is not None:
                return int(x.shape[axis])
        return int(args[self.signature.counts[0]])

    def _size(self, args: Sequence[Any]) -> int | None:
        """The size that serves these inputs, None where they are too large."""
        rows = self._rows(args)
        at = bisect.bisect_left(self.sizes, rows)
        if rows == 0 or at == len(self.sizes):
            return None
        # Fixed shapes have one graph, of their own size.
        return rows if self.signature.rows is not None else self.sizes[at]

    def _at_home(self, args: Sequence[Any]) -> bool:
        """Whether all that is read in place lies where it did on the call before."""
        found = [args[i].data_ptr() for i in self._in_place]
        known, self._addresses = self._addresses, found
        if found == known or not found:
            return True
        if known is not None:
            moved = next(i for i, a, b in zip(self._in_place, found, known) if a != b)
            self.counts.moves += 1
            self._graphs.clear()
            log.info("%s: input %d has moved, its graphs are dropped", self.name, moved)
            if self.counts.moves >= MOST_MOVES:
                self._give_up(f"input {moved} is used in place and lies elsewhere again and again")
        return False

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self._graphs.clear()
        log.warning("%s runs without CUDA graphs: %s", self.name, reason)

    def _capture(self, args: Sequence[Any]) -> bool:
        """Graphs of all sizes, the largest first so that the smaller ones fit in its memory."""
        rows = self.signature.rows
        sizes = self.sizes[::-1] if rows is None else [rows]
        flat: list[Tensor | None] = []
        for i, (x, axis) in enumerate(zip(args, self.signature.axes)):
            if not self._is_copied(i, x):
                flat.append(None)
                continue
            layout = _layout(x, axis, sizes[0])
            if layout is None:
                self._give_up(
                    f"input {i} lies in memory in a way that has no room for more rows: "
                    f"{list(x.shape)} with strides {list(x.stride())}"
                )
                return False
            flat.append(x.new_empty(_extent(*layout)))
        before = {i: args[i].clone() for i in self.signature.written}
        self.memory = 0
        self.counts.captured = []
        for size in sizes:
            inputs: list[Any] = []
            buffers: list[Tensor] = []
            for i, (x, memory) in enumerate(zip(args, flat)):
                if memory is None:
                    inputs.append(size if i in self.signature.counts else x)
                    continue
                axis = self.signature.axes[i]
                layout = _layout(x, axis, size)
                assert layout is not None
                buffer = memory.as_strided(*layout)
                part = x if axis is None else x.narrow(axis, 0, min(size, x.shape[axis]))
                _fill(buffer, part, axis)
                inputs.append(buffer)
                buffers.append(buffer)
            recording = self.capturer.capture(self.call, inputs, buffers)
            self.memory += recording.memory
            self._graphs[size] = recording, inputs
            self.counts.captured.append(size)
        # What capturing wrote is undone: the call itself comes next.
        for i, value in before.items():
            args[i].copy_(value)
        counters["kvtailor"]["captured_graphs"] += len(sizes)
        counters["kvtailor"]["graph_bytes"] += self.memory
        log.info("%s: captured %s, %d bytes", self.name, self.counts.captured, self.memory)
        return True


def _fill(buffer: Tensor, x: Tensor, axis: int | None) -> None:
    """x into the first rows of the buffer, its last row into all others."""
    if axis is None or buffer.shape[axis] == x.shape[axis]:
        buffer.copy_(x)
        return
    n = x.shape[axis]
    buffer.narrow(axis, 0, n).copy_(x)
    rest = buffer.narrow(axis, n, buffer.shape[axis] - n)
    rest.copy_(x.narrow(axis, n - 1, 1).expand_as(rest))


def _first_rows(x: Tensor, axis: int, rows: int) -> Tensor:
    """The first rows of x, lying in memory as if there were no others."""
    part, layout = x.narrow(axis, 0, rows), _layout(x, axis, rows)
    if layout is None or layout[1] == list(part.stride()):
        return part
    return x.new_empty_strided(*layout).copy_(part)


def _layout(x: Tensor, axis: int | None, size: int) -> tuple[list[int], list[int]] | None:
    """Shape and strides of x with so many rows, as compiled code expects them.

    Dense in the same order if x is dense. In part of something larger, what is further out than
    the rows moves with their number; None where it does not, or where entries share memory.
    """
    shape = [size if d == axis else n for d, n in enumerate(x.shape)]
    if _is_dense(x):
        return shape, _strides(shape, x.stride())
    order = sorted((d for d, n in enumerate(x.shape) if n > 1), key=x.stride)
    reach = 1
    for d in order:
        if x.stride(d) < reach:
            return None
        reach = x.stride(d) * x.shape[d]
    strides = list(x.stride())
    if axis is None or axis not in order:
        return (shape, strides) if axis is None or x.shape[axis] == size else None
    for d in order[order.index(axis) + 1 :]:
        strides[d], rest = divmod(strides[d] * size, x.shape[axis])
        if rest:
            return None
    return shape, strides


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Entries from the first to the last."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides))


def _strides(shape: Sequence[int], like: Sequence[int]) -> list[int]:
    """Dense strides in the order of ``like``."""
    strides, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        strides[d] = step
        step *= max(1, shape[d])
    return strides


def _is_dense(x: Tensor) -> bool:
    wanted = _strides(x.shape, x.stride())
    return all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), wanted))


class CudaCapturer:
    """CUDA graphs of one memory pool."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()

    def capture(self, call: Compiled, inputs: list[Any], buffers: list[Tensor]) -> CudaRecording:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            # Kernels are tuned and libraries loaded outside of the capture.
            call(*inputs)
        torch.cuda.current_stream().wait_stream(self.stream)
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            results = list(call(*inputs))
        memory = max(0, torch.cuda.memory_reserved() - before)
        return CudaRecording(graph, results, memory)

    def spoil(self, buffers: Sequence[Tensor]) -> None:
        """Nothing: the next call overwrites them."""


@dataclass
class CudaRecording:
    graph: torch.cuda.CUDAGraph
    results: list[Any]
    memory: int

    def replay(self) -> None:
        self.graph.replay()


def make_capturer() -> Capturer | None:
    """The capturer of this machine, None without a CUDA device."""
    return CudaCapturer() if torch.cuda.is_available() else None
