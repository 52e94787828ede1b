"""docs/models.md: every architecture is right or says why, and the surveys behind it are honest."""

from __future__ import annotations

import json

import pytest
import torch

from kvtailor.benchmarks import architectures
from kvtailor.benchmarks.architectures import NAMES, RAW, is_right, run, survey
from kvtailor.cli.models import shrunk
from kvtailor.tests.test_docs import maker

KEYS = {
    "inputs", "attn", "error", "graphs", "sites", "left", "generate", "engine", "paged"
}  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    return maker("make_models").load()["models"]


def test_the_page_has_a_hundred_architectures(rows):
    assert len(rows) >= 100
    assert set(rows) == set(NAMES)
    assert len(NAMES) == len(set(NAMES))


def test_every_architecture_is_right_or_says_why(rows):
    wrong = {name: row for name, row in rows.items() if not is_right(row)}
    assert not wrong, json.dumps(wrong, indent=1)
    assert all(set(row) == KEYS for row in rows.values())
    # Every attention has a site, or there is a reason.
    assert all(row["sites"] or row["left"] for row in rows.values())


def fresh(model_type: str) -> dict:
    torch._dynamo.reset()
    row = survey(model_type)
    torch._dynamo.reset()
    return row


def test_a_decoder_is_surveyed():
    row = fresh("gpt2")
    assert set(row) == KEYS and is_right(row)
    assert (row["sites"], row["left"]) == (3, {})
    assert (row["generate"], row["engine"], row["paged"]) == ("equal",) * 3
    assert row["inputs"] == ["attention_mask", "input_ids"]


def test_what_differs_or_fails_is_not_right(monkeypatch):
    monkeypatch.setattr(architectures, "_served", lambda *_: False)
    monkeypatch.setattr(architectures, "_paged", lambda *_: [][1])
    monkeypatch.setattr(architectures, "relative_error", lambda *_: 1e-3)
    row = fresh("gpt2")
    assert row["engine"] == "differs from the tokens of plain generate()"
    assert RAW.search(row["paged"])
    right = {"error": 0.0, "left": {}, "generate": "equal", "engine": None, "paged": None}
    assert is_right(right) and not is_right({"failed": "no result within 1 seconds"})
    for key in ("error", "engine", "paged"):
        assert not is_right(right | {key: row[key]})


def test_a_process_of_its_own_reports_and_may_be_late():
    row = run("vit", 300)
    assert row["sites"] == 3 and is_right(row)
    assert run("no-such-model", 300)["failed"].startswith("ValueError: unknown model")
    assert run("llama", 0.01) == {"failed": "no result within 0.01 seconds"}


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("clip", {"input_ids", "attention_mask", "pixel_values"}),
        ("qwen2_vl", {"input_ids", "attention_mask", "pixel_values", "image_grid_thw",
                      "mm_token_type_ids"}),
        ("wav2vec2", {"input_values", "attention_mask"}),
        ("moonshine", {"input_values", "attention_mask", "decoder_input_ids"}),
        ("speech_to_text", {"input_features", "attention_mask", "decoder_input_ids"}),
    ],
)  # fmt: skip
def test_inputs_are_what_forward_takes(name, names):
    model, inputs = shrunk(name, tokens=12, padding=3)
    assert set(inputs) == names
    with torch.no_grad():
        model(**inputs)


def test_an_image_is_seen():
    """Its tokens stand in the text, and what they hold changes the scores."""
    model, inputs = shrunk("llava", tokens=12, padding=3)
    assert (inputs["input_ids"] == model.config.image_token_id).any(1).all()
    with torch.no_grad():
        one = model(**inputs).logits
        two = model(**inputs | {"pixel_values": -inputs["pixel_values"]}).logits
    assert not torch.allclose(one, two)
