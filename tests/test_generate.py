"""``kvtailor generate``: text as it comes, in the order of the prompts, and one line when wrong."""

from __future__ import annotations

import json
import sys

import pytest
from test_engine import Letters, model_of, own_tokens

from kvtailor.cli import generation
from kvtailor.cli import main as cli
from kvtailor.cli.options import GenerateOptions
from kvtailor.runtime.engine.engine import Engine


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the console script in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def call(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvtailor", "generate", *argv])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return call


def test_tokens_of_several_prompts(run, tmp_path):
    model = model_of("gemma3_text")
    file = tmp_path / "prompts.txt"
    file.write_text("5 6 7 8 9\n\n11, 12\n")
    prompts = [[5, 6, 7], [5, 6, 7, 8, 9], [11, 12]]
    code, out, err = run(
        "hf:gemma3_text", "-p", "5 6 7", "--prompts-file", str(file), "--max-new-tokens", "5"
    )
    expected = [own_tokens(model, p, 5, eos_token_id=1) for p in prompts]
    assert (code, out.splitlines()) == (
        0,
        [f"[{i}] {' '.join(map(str, e))} " for i, e in enumerate(expected, 1)],
    )
    assert "15 tokens in" in err and "prompt tokens found in the cache" in err


def test_json(run):
    code, out, _ = run(
        "hf:bart", "-p", "5 6 7", "--json", "--seed", "3", "--temperature", "1", "--top-k", "9"
    )
    if code:
        pytest.fail(out)
    report = json.loads(out)
    (result,) = report["results"]
    assert result["finish_reason"] in ("stop", "length") and result["error"] is None
    assert len(result["token_ids"]) > 0 and report["tokens_per_second"] > 0


def test_text_streams_in_the_order_of_the_prompts(monkeypatch):
    model = model_of("llama")
    monkeypatch.setattr(generation, "_load", lambda name, dtype: (model, Letters()))
    shown: list[tuple[int, str]] = []
    done = generation.run_generate(
        GenerateOptions(model="x", prompt=("abcdef", "gh", "abc"), max_new_tokens=6),
        lambda index, text, _: shown.append((index, text)),
    )
    assert [index for index, _ in shown] == sorted(index for index, _ in shown)
    for index, result in enumerate(done.results):
        assert "".join(text for i, text in shown if i == index) == result.text + "\n"
    # The first prompt's text comes token by token.
    assert sum(index == 0 for index, _ in shown) >= 3
    engine = Engine(model, Letters(), max_memory="1MiB")
    assert [r.text for r in done.results] == [
        r.text for r in engine.generate(["abcdef", "gh", "abc"], max_new_tokens=6)
    ]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["hf:llama"], "a prompt must be given: --prompt TEXT or --prompts-file FILE"),
        (["hf:llama", "-p", "a b"], "takes token ids like '5 9 12', got 'a b'"),
        (["hf:llama", "--prompts-file", "no/such/file"], "cannot read no/such/file"),
        (["hf:llama", "-p", "5", "--dtype", "floaty"], "unknown dtype 'floaty'"),
        (["hf:llama", "-p", "5", "--inner", "gcc"], "unknown compiler 'gcc'"),
        (["hf:llama", "-p", "5", "--top-p", "7"], "top_p must be above 0 and at most 1, got 7.0"),
        (["hf:llama", "-p", "5", "--max-memory", "much"], "max_memory must be bytes or a text"),
        (["hf:lama", "-p", "5"], "unknown model 'lama'"),
        (["hf:bloom", "-p", "5"], "attention must go through transformers' AttentionInterface"),
        (["./no-such-folder", "-p", "5"], "cannot load ./no-such-folder"),
    ],
)
def test_wrong_input_is_one_line(run, argv, message):
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    (line,) = [x for x in err.splitlines() if x.startswith("kvtailor:")]
    assert message in line


def test_a_bad_prompt_spoils_no_other(run):
    code, out, err = run("hf:llama", "-p", "99", "-p", "5 6", "--max-new-tokens", "3")
    assert code == 1 and out.splitlines()[0] == "[1] "
    assert out.splitlines()[1].startswith("[2] ")
    assert "kvtailor: prompt 1: tokens must be 0 to 63, got 99" in err
