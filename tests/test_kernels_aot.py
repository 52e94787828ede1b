"""The kernels compile for GPUs this machine does not have, within their limits.

Green in the interpreter does not mean that a kernel builds: this does. ``python -m
kvtailor.benchmarks.kernel_resources`` compiles; it runs in a process of its own, without the interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from kvtailor.benchmarks import kernel_resources as aot
from kvtailor.kernels import launch


def run(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "kvtailor.benchmarks.kernel_resources", "--json", *arguments],
        env=env,
        capture_output=True,
        text=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows, done.stderr
    assert done.returncode == int(any(row["problems"] for row in rows)), done.stderr
    return rows


def show(rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print("\n" + aot.HEADER)
        for row in rows:
            case = aot.Case(**{name: row[name] for name in aot.Case._fields})
            used = aot.Usage(**{name: row[name] for name in aot.Usage._fields})
            print(aot.line(case, used, row["tiles"], row["problems"]))


def assert_sound(rows: list[dict[str, Any]], cases: list[aot.Case]) -> None:
    assert len(rows) == len(cases)
    assert not [row for row in rows if row["problems"]]
    for row in rows:
        assert 0 < row["registers"] <= (512 if row["target"].startswith("hip") else 255)
        assert row["shared"] <= launch.SHARED_LIMIT[row["target"]]
        if row["kernel"] == "attend":
            sides = {n: side for n, side in row["tiles"].items() if n.startswith("BLOCK_")}
            assert len(sides) == 4 and min(sides.values()) >= launch.MIN_TILE
            # Dots need operands in shared memory or registers: a kernel without is not ours.
            assert row["shared"] > 0
        if row["target"] == "cuda:90" and row["dim"] <= 128:
            assert row["spills"] == 0


def test_a_sample_compiles_for_every_target(tmp_path, capsys):
    rows = run(tmp_path)
    show(rows, capsys)
    cases = list(aot.some_cases())
    assert_sound(rows, cases)
    assert {case.target for case in cases} == {"cuda:80", "cuda:90", "hip:gfx942"}
    for name in ("kernel", "kind", "layout", "variant"):
        assert {getattr(c, name) for c in cases} == {getattr(c, name) for c in aot.all_cases()}


@pytest.mark.slow
@pytest.mark.parametrize("target", aot.TARGETS)
def test_every_configuration_compiles(target, tmp_path, capsys):
    rows = run(tmp_path, "--all", "--target", target)
    show(rows, capsys)
    assert_sound(rows, list(aot.all_cases((target,))))


def test_limits_are_found():
    case = aot.Case("attend", "cuda:90", "bf16", 128, "prefill", "paged", "window")
    tiles = {"BLOCK_M": 128, "BLOCK_K": 8, "warps": 4}
    found = aot.problems(case, aot.Usage(255, 300_000, 4), tiles)
    assert found == [
        "shared memory 300000 exceeds 232448",
        "spills 4 bytes",
        "BLOCK_K is 8, below 16",
    ]
    assert aot.problems(case, aot.Usage(255, 232_448, 0), {"BLOCK_M": 16}) == []


def test_refuses_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "kvtailor.benchmarks.kernel_resources"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "TRITON_INTERPRET is set" in done.stderr
