"""docs/models.md: every architecture is right or says why, and the surveys behind it are honest."""

from __future__ import annotations

import json
import math

import pytest
import torch

from kvtailor.benchmarks.architectures import NAMES, answer, is_right, run, survey
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


def test_a_decoder_is_surveyed():
    row = survey("gpt2")
    torch._dynamo.reset()
    assert set(row) == KEYS and is_right(row)
    assert (row["sites"], row["left"]) == (3, {})
    assert (row["generate"], row["engine"], row["paged"]) == ("equal",) * 3
    assert row["inputs"] == ["attention_mask", "input_ids"]


def test_what_differs_or_fails_is_not_right():
    right = {"error": 0.0, "left": {}, "generate": "equal", "engine": None, "paged": "no cache"}
    assert is_right(right)
    assert not is_right({"failed": "no result within 1 seconds"})
    assert not is_right(right | {"error": 1e-3}) and not is_right(right | {"error": math.inf})
    tokens = torch.tensor([1, 2])
    assert answer(lambda: tokens, tokens) == answer(lambda: True) == "equal"
    for text in (
        answer(lambda: tokens + 1, tokens),
        answer(lambda: False),
        answer(lambda: [][1]),
        answer(lambda: None.cache),
        answer(lambda: ones(3)),
    ):
        assert not is_right(right | {"engine": text}), text
        assert not is_right(right | {"left": {text: 1}}), text


def ones(size: int) -> None:
    """Refuses as an engine did that passed on what it caught."""
    raise ValueError(f"X must run flattened over pages, got TypeError: ones({size})")


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
    model, inputs = shrunk(name, "eager", tokens=12, padding=3)
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
