"""Which keys a query sees, stated once: for ints and for tensors. Imports no torch."""

from __future__ import annotations

from typing import Any, NamedTuple


class Flags(NamedTuple):
    """The flags of ``kvtailor::attend`` that hide keys by their position.

    Chunks are counted from ``origin``, an int or an integer tensor that broadcasts with positions.
    """

    causal: bool = False
    window: int | None = None
    chunk: int | None = None
    origin: Any = 0

    def interval(self, p: Any, stop: Any, start: Any = 0) -> tuple[Any, Any]:
        """Of the keys start .. stop - 1, which the query at position p sees: low <= key < high.

        p, stop and start are ints or integer tensors that broadcast. It sees none if low >= high.
        """
        low, high = start, stop
        if self.causal:
            high = _least(high, p + 1)
        if self.window is not None:
            low = _most(low, p - self.window + 1)
        if self.chunk is not None:
            first = p - (p - self.origin) % self.chunk
            low, high = _most(low, first), _least(high, first + self.chunk)
        return low, high

    def visible(self, p: Any, key: Any, stop: Any) -> Any:
        """Whether the query at position p sees one of the keys 0 .. stop - 1: bool or tensor."""
        low, high = self.interval(p, stop)
        return (low <= key) & (key < high)


def _most(a: Any, b: Any) -> Any:
    if hasattr(b, "clamp"):
        a, b = b, a
    return a.clamp(min=b) if hasattr(a, "clamp") else max(a, b)


def _least(a: Any, b: Any) -> Any:
    if hasattr(b, "clamp"):
        a, b = b, a
    return a.clamp(max=b) if hasattr(a, "clamp") else min(a, b)
