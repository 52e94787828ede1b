"""The benchmark harness refuses what would make a figure worthless, and records the rest."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import kvtailor.benchmarks.harness


@pytest.fixture
def harness() -> ModuleType:
    return kvtailor.benchmarks.harness


@pytest.fixture
def bench(harness: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A bench that saves into a folder of its own, on a machine that is never busy."""
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness._Foreign, "_now", staticmethod(lambda: None))
    return harness.Bench("demo", runs=3)


def test_cases_take_turns_after_the_check(bench: Any) -> None:
    calls: list[str] = []

    def case(name: str) -> Any:
        return lambda: (calls.append(name), torch.ones(3))[1]

    group = bench.compare("sum", {"a": case("a"), "b": case("b")})
    # One checked call and one more to warm up, then the order rotates.
    assert calls == ["a", "b", "a", "b", *"ab", *"ba", *"ab"]
    assert [len(t.seconds) for t in group.cases.values()] == [3, 3]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.tensor([1.0, 2.1]), "other: error must be at most 0.0001, got 0.05"),
        (torch.tensor([1.0, float("nan")]), "other: error must be at most 0.0001, got nan"),
        (torch.ones(3), r"other: shape \[3\], not \[2\]"),
        ((torch.ones(2), torch.ones(2)), "other: 2 tensors, the reference has 1"),
    ],
)
def test_a_wrong_result_is_not_timed(
    harness: ModuleType, bench: Any, wrong: Any, message: str
) -> None:
    right = torch.tensor([1.0, 2.0])
    with pytest.raises(harness.WrongResult, match=message):
        bench.compare("pair", {"first": lambda: right, "other": lambda: wrong})
    assert bench.groups == []


def test_a_busy_machine_is_refused_or_marked(
    harness: ModuleType, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Clock, busy seconds of all cores, of this process: others used 1 core of 2.
    moments = iter([(0.0, 0.0, 0.0), (10.0, 20.0, 10.0)] * 2)
    monkeypatch.setattr(harness._Foreign, "_now", staticmethod(lambda: next(moments)))
    monkeypatch.setattr(harness.time, "sleep", lambda seconds: None)
    with pytest.raises(harness.BusyMachine, match=r"at most 0.15 cores, got 1.00"):
        harness.Bench("demo")
    assert harness.Bench("demo", allow_busy=True).provisional


def test_checks_decide_the_exit_code_and_are_saved(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.compare("one", {"a": lambda: torch.ones(2)}, show=False)
    assert bench.check("fast", 2.0, at_least=1.5)
    assert bench.check("told", 3.0) is None
    assert bench.finish() == 0
    assert bench.check("slow", 1.2, at_most=1.1) is False
    assert bench.finish() == 1
    saved = json.loads((tmp_path / "demo.json").read_text())
    assert [c["ok"] for c in saved["checks"]] == [True, None, False]
    assert saved["machine"]["versions"]["torch"] and saved["machine"]["threads"] >= 1
    assert saved["groups"][0]["cases"]["a"]["runs_ms"] and saved["provisional"] is False
    assert "missed" in capsys.readouterr().out


def test_exponent(harness: ModuleType) -> None:
    assert harness.exponent((1, 2, 4), (3.0, 12.0, 48.0)) == pytest.approx(2.0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's memory counters")
def test_peak_memory_sees_what_is_freed_again(harness: ModuleType) -> None:
    size = 64 << 20
    peak = harness.peak_memory(lambda: torch.ones(size, dtype=torch.uint8).max())
    if peak is None:
        pytest.skip("this system does not let a process reset its high-water mark")
    # The kernel counts resident pages in batches.
    assert 0.9 * size < peak < 1.5 * size
