"""The table of when one matmul pays: lookup, words, and what calibrate writes and reads."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtailor.kernels.packed_linear import in_one_matmul
from kvtailor.runtime import packing_table
from kvtailor.runtime.packing_table import (
    SHIPPED,
    UNMEASURED,
    WORTH_IT,
    Device,
    Entry,
    flips,
    form_text,
    gain_at,
    gains,
    measure,
    read_table,
    table_path,
    write_table,
)


def device(*entries: Entry, rows: list[int] | None = None) -> Device:
    return Device(machine="m", torch="2", threads=1, rows=rows or [1, 8], entries=list(entries))


def entry(inputs: int, parts: int, width: int, gain: list[float], dtype: str = "float32") -> Entry:
    return Entry(dtype=dtype, inputs=inputs, parts=parts, width=width, gain=gain)


@pytest.mark.parametrize(
    "changes, words",
    [
        ((), "one matmul"),
        ((1,), "separate"),
        ((64,), "one matmul for 1-63 rows"),
        ((2,), "one matmul for 1 rows"),
        ((1, 8, 64), "one matmul for 8-63 rows"),
        ((4, 8), "one matmul for 1-3, 8+ rows"),
        ((1, 8), "one matmul for 8+ rows"),
    ],
)
def test_forms_in_words(changes: tuple[int, ...], words: str):
    assert form_text(changes) == words


@given(st.lists(st.floats(0.5, 2), min_size=1, max_size=8))
def test_flips_are_the_nearest_measurement(values: list[float]):
    pairs = [(4**i, gain) for i, gain in enumerate(values)]
    changes = flips(pairs)
    assert list(changes) == sorted(set(changes))
    for rows, gain in pairs:
        assert in_one_matmul(rows, changes) == (gain >= WORTH_IT)
    # Between powers of 4 the border is at twice the lower one.
    for rows in (3, 5, 7, 9, 31, 33):
        assert in_one_matmul(rows, changes) == (gain_at(pairs, rows) >= WORTH_IT)


def test_the_nearest_shape_is_taken_and_what_nobody_measured_is_packed():
    table = {"cpu": device(entry(512, 2, 512, [2, 2]), entry(1024, 24, 1024, [3, 3]))}
    assert gains(table, "cpu", torch.float32, 768, 3, 512) == [(1, 2), (8, 2)]
    assert gains(table, "cpu", torch.float32, 1024, 12, 512) == [(1, 3), (8, 3)]
    for kind, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        assert gains(table, kind, dtype, 768, 3, 512) == [(1, UNMEASURED)]


def test_the_shipped_table_is_whole():
    table = read_table(SHIPPED)
    assert {e.dtype for e in table["cpu"].entries} >= {"float32", "bfloat16"}
    for each in table["cpu"].entries:
        assert len(each.gain) == len(table["cpu"].rows) and min(each.gain) > 0


def test_what_is_measured_is_written_and_read(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTAILOR_CACHE_DIR", str(tmp_path / "new"))
    packing_table.current_table.cache_clear()
    lines: list[str] = []
    found = measure(
        "cpu",
        lines.append,
        shapes=[(16, 2, 8)],
        rows=[1, 4],
        dtypes=[torch.float32],
        seconds=1e-4,
    )
    assert lines == ["float32: 2 projections 16 -> 8"]
    path = table_path()
    assert path is not None
    write_table(path, "cpu", found)
    write_table(path, "cuda", device())
    assert read_table(path) == {"cpu": found, "cuda": device()}
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert packing_table.current_table() == {"cpu": found, "cuda": device()}
    packing_table.current_table.cache_clear()


@pytest.mark.parametrize("text", ["", "[]", "{}x", '{"cpu": 3}', '{"cpu": {"rows": []}}'])
def test_a_broken_table_is_refused_and_the_shipped_one_used(text, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("KVTAILOR_CACHE_DIR", str(tmp_path))
    path = table_path()
    assert path is not None
    path.write_text(text)
    packing_table.current_table.cache_clear()
    assert packing_table.current_table() == read_table(SHIPPED)
    assert "must be written by kvtailor calibrate" in caplog.text
    # And it is not overwritten with what was not understood.
    with pytest.raises(ValueError, match="must be written by kvtailor calibrate"):
        write_table(path, "cpu", device())
    assert path.read_text() == text
    packing_table.current_table.cache_clear()


def test_the_file_is_json_with_a_line_per_shape(tmp_path):
    path = tmp_path / "t.json"
    write_table(path, "cpu", device(entry(8, 2, 8, [1.0, 2.0]), entry(8, 3, 8, [1.0, 2.0])))
    assert len(path.read_text().splitlines()) == 3
    assert set(json.loads(path.read_text())) == {"cpu"}


def test_calibrate_says_what_is_wrong_before_it_measures(tmp_path, monkeypatch, capsys):
    from kvtailor import cli

    monkeypatch.setenv("KVTAILOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "packing_table.json").write_text("[]")
    monkeypatch.setattr(packing_table, "measure", lambda *a: pytest.fail("measured"))
    monkeypatch.setattr("sys.argv", ["kvtailor", "calibrate"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert "to start anew" in capsys.readouterr().err
