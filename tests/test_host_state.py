"""State of the host that ops change: once, however often a graph is run to compare."""

from __future__ import annotations

import pytest

from kvtailor.runtime.host_state import journal, once


class Counter:
    def __init__(self) -> None:
        self.at = 0

    def next(self) -> int:
        self.at += 1
        return self.at


def test_a_journal_gives_the_same_results_again():
    counter = Counter()
    assert once(counter.next) == 1
    with journal() as replay:
        first = [once(counter.next), once(counter.next)]
        replay()
        assert [once(counter.next), once(counter.next)] == first == [2, 3]
    assert counter.at == 3
    assert once(counter.next) == 4


def test_a_run_with_more_calls_than_the_one_before_is_an_error():
    counter = Counter()
    with journal() as replay:
        once(counter.next)
        replay()
        once(counter.next)
        with pytest.raises(RuntimeError, match="make its 1 calls and no more"):
            once(counter.next)
    assert counter.at == 1


def test_journals_end_with_their_block():
    counter = Counter()
    with pytest.raises(ZeroDivisionError), journal():
        once(counter.next)
        1 / 0  # noqa: B018
    assert once(counter.next) == 2
