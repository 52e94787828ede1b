"""The table of which form pays: lookup, words, and what calibrate writes and reads."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtailor.kernels.packed_linear import Form, form_at
from kvtailor.runtime import packing_table
from kvtailor.runtime.packing_table import (
    SHIPPED,
    UNMEASURED,
    WORTH_IT,
    Device,
    Entry,
    Measured,
    Plan,
    at_rows,
    lookup,
    measure,
    plan,
    plan_text,
    read_table,
    table_path,
    write_table,
)


def device(*entries: Entry, rows: list[int] | None = None) -> Device:
    return Device(machine="m", torch="2", threads=1, rows=rows or [1, 8], entries=list(entries))


def entry(inputs: int, parts: int, width: int, one: list[float], dtype: str = "float32") -> Entry:
    batched = [gain / 2 for gain in one]
    return Entry(dtype=dtype, inputs=inputs, parts=parts, width=width, one=one, batched=batched)


S, ONE, B = Form.SEPARATE, Form.ONE, Form.BATCHED


@pytest.mark.parametrize(
    "borders, forms, words",
    [
        ((), (ONE,), "one matmul"),
        ((), (S,), "separate"),
        ((), (B,), "batched"),
        ((64,), (ONE, S), "one matmul for 1-63 rows"),
        ((2,), (ONE, S), "one matmul for 1 rows"),
        ((8, 64), (S, ONE, S), "one matmul for 8-63 rows"),
        ((4, 8), (ONE, S, ONE), "one matmul for 1-3, 8+ rows"),
        ((2, 8, 64), (ONE, B, ONE, S), "one matmul for 1, 8-63; batched for 2-7 rows"),
        ((8,), (S, B), "batched for 8+ rows"),
    ],
)
def test_forms_in_words(borders: tuple[int, ...], forms: tuple[Form, ...], words: str):
    assert plan_text(Plan(borders, forms)) == words


@given(st.lists(st.tuples(st.floats(0.5, 2), st.floats(0.5, 2)), min_size=1, max_size=8))
def test_a_plan_is_the_nearest_measurement(values: list[tuple[float, float]]):
    measured = [Measured(4**i, *gains) for i, gains in enumerate(values)]
    found = plan(measured)
    assert list(found.borders) == sorted(set(found.borders))
    assert len(found.forms) == len(found.borders) + 1
    assert all(a != b for a, b in pairwise(found.forms))
    # Between powers of 4 the border is at twice the lower one.
    for rows in (*(each.rows for each in measured), 3, 5, 7, 9, 31, 33):
        form, gain = at_rows(measured, rows).best()
        assert form_at(rows, *found) == form
        assert gain == max(1.0, gain) and (form == S or gain >= WORTH_IT)


def test_the_fastest_form_is_taken_where_it_is_worth_it():
    assert Measured(1, 1.2, 1.35).best() == (B, 1.35)
    assert Measured(1, 1.3, 1.2).best() == (ONE, 1.3)
    assert Measured(1, 1.2, 1.22).best() == (ONE, 1.2)
    assert Measured(1, 1.09, 1.11).best() == (B, 1.11)
    assert Measured(1, 1.09, 1.09).best() == (S, 1.0)


def test_the_nearest_shape_is_taken_and_what_nobody_measured_is_packed():
    table = {"cpu": device(entry(512, 2, 512, [2, 2]), entry(1024, 24, 1024, [3, 3]))}
    near = lookup(table, "cpu", torch.float32, 768, [512, 512, 512])
    assert near == [Measured(1, 2, 1), Measured(8, 2, 1)]
    far = lookup(table, "cpu", torch.float32, 1024, 12 * [512])
    assert far == [Measured(1, 3, 1.5), Measured(8, 3, 1.5)]
    for kind, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        found = lookup(table, kind, dtype, 768, [512, 512])
        assert found == [Measured(1, UNMEASURED, 0.0)] and plan(found) == Plan((), (ONE,))


def test_parts_of_several_widths_are_never_batched():
    table = {"cpu": device(entry(512, 2, 512, [1, 1]))}
    table["cpu"].entries[0].batched = [9, 9]
    for widths, form in (([512, 512], B), ([512, 256], S)):
        assert plan(lookup(table, "cpu", torch.float32, 512, widths)) == Plan((), (form,))


def test_the_shipped_table_is_whole():
    table = read_table(SHIPPED)
    assert {e.dtype for e in table["cpu"].entries} >= {"float32", "bfloat16"}
    for each in table["cpu"].entries:
        assert min(each.one + each.batched) > 0


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


def one_entry(rows: list[int], **gains: list[float]) -> str:
    shape = {"dtype": "float32", "inputs": 8, "parts": 2, "width": 8, **gains}
    fields = {"machine": "", "torch": "", "threads": 1, "rows": rows, "entries": [shape]}
    return json.dumps({"cpu": fields})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}x",
        '{"cpu": 3}',
        '{"cpu": {"rows": []}}',
        # As tables were before there was a batched form.
        one_entry([1, 8], gain=[1.0, 2.0]),
        one_entry([1, 8], one=[1.0, 2.0], batched=[1.0]),
        one_entry([8, 1], one=[1.0, 2.0], batched=[1.0, 2.0]),
        # What no measurement gives, and lookups would divide by.
        one_entry([0, 1], one=[1.0, 2.0], batched=[1.0, 2.0]),
        one_entry([], one=[], batched=[]),
        one_entry([1], one=[float("nan")], batched=[1.0]),
        one_entry([1], one=[-1.0], batched=[1.0]),
        one_entry([1 << 80], one=[1.0], batched=[1.0]),
        "[" * 100_000,
        " " * (2 << 20),
    ],
)
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
    from kvtailor.cli import main as cli

    monkeypatch.setenv("KVTAILOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "packing_table.json").write_text("[]")
    monkeypatch.setattr(packing_table, "measure", lambda *a: pytest.fail("measured"))
    monkeypatch.setattr("sys.argv", ["kvtailor", "calibrate"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert "to start anew" in capsys.readouterr().err
