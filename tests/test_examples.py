"""Every example runs offline, in a process of its own, and equals eager."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtailor.cli.inspection import Request, run_inspection

EXAMPLES = Path(__file__).parent.parent / "examples"


def output_of(name: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_generate_gives_the_same_tokens():
    out = output_of("generate.py")
    assert "same as eager: True" in out
    assert "model.layers.0.self_attn: sliding 8" in out
    assert "model.layers.3.self_attn: causal" in out


@pytest.mark.parametrize("name", ["custom_model.py", "classifier.py"])
def test_differences_from_eager_are_small(name):
    errors = re.findall(r"largest difference from eager: (\S+)", output_of(name))
    assert errors and all(float(error) <= 1e-5 for error in errors)


def test_the_classifiers_end_on_one_row():
    out = output_of("classifier.py")
    assert re.search(r"bert\.encoder\.layer\.2\S*: full, queries 1, keys all", out)
    assert re.search(r"model\.layers\.2\.self_attn: causal, queries 1, keys all", out)


def test_the_custom_models_masks_are_proved():
    result = run_inspection(Request(f"{EXAMPLES / 'custom_model.py'}:build"))
    assert result.failure() is None
    (graph,) = result.recorder.graphs
    assert [(site.kind, site.window) for site in graph.attention] == [
        ("sliding", 8),
        ("causal", None),
    ] * 2
    assert graph.attention[-1].query_rows == 1


def test_serving_gives_the_tokens_of_generate():
    out = output_of("serve.py")
    assert "same as generate: True" in out
    found = re.search(r"(\d+) of 208 prompt tokens found in the cache", out)
    assert found is not None and int(found[1]) >= 24
