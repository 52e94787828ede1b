"""Ops that change state of the host, in a graph that is run twice to compare the results.

with journal() as replay:
    expected = graph(*copies)       # the state moves on
    replay()
    actual = compiled(*args)        # the same results again, the state stays
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class _Journal:
    def __init__(self) -> None:
        self.results: list[object] = []
        self.read: int | None = None  # of the results, once they are replayed

    def next(self, call: Callable[[], object]) -> object:
        if self.read is None:
            self.results.append(call())
            return self.results[-1]
        if self.read == len(self.results):
            raise RuntimeError(f"a graph run again must make its {self.read} calls and no more")
        self.read += 1
        return self.results[self.read - 1]


class _Open(threading.local):
    """The journals of this thread."""

    def __init__(self) -> None:
        self.journals: list[_Journal] = []


_open = _Open()


def once(call: Callable[[], T]) -> T:
    """call(), which changes state; within a `journal` that replays, what it returned before."""
    return _open.journals[-1].next(call) if _open.journals else call()  # type: ignore[return-value]


@contextmanager
def journal() -> Iterator[Callable[[], None]]:
    """Within it, results of `once` are kept; after calling what this yields, they come again."""
    mine = _Journal()

    def replay() -> None:
        mine.read = 0

    _open.journals.append(mine)
    try:
        yield replay
    finally:
        _open.journals.remove(mine)
