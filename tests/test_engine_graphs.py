"""The engine's steps of one new token per request, as CUDA graphs: on the CPU capturer."""

from __future__ import annotations

import random

import pytest
import torch
from test_engine import is_as_new, model_of, own_tokens, prompts_of

from kvtailor.backend import recording
from kvtailor.kernels.ops import paged_attend
from kvtailor.runtime.engine.engine import Engine

OPTIONS = {"inner": "eager", "cuda_graphs": True, "capture_sizes": [1, 2, 4]}
SLOW = ("gemma2", "gemma3_text", "gemma4_text", "llama4_text", "gpt_oss", "qwen3", "phi3", "bart")
# Layers whose experts work on other rows than there are tokens.
UNPADDED = {"llama4_text": 1, "gpt_oss": 4}


@pytest.mark.parametrize(
    "name", ["llama", "gemma3n_text", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)]
)
def test_decode_steps_are_replayed_for_any_number_of_requests(name, pieces):
    model = model_of(name)
    rng = random.Random(2)
    rounds = [prompts_of(model, rng, count) for count in (3, 5, 2, 1)]
    expected = [[own_tokens(model, p, 6) for p in prompts] for prompts in rounds]
    model.compile(backend="kvtailor", options=OPTIONS)
    engine = Engine(
        model, block_size=4, max_tokens=48, max_memory="4MiB", encoder_tokens=32, graph_decode=True
    )
    with recording() as seen:
        for prompts, want in zip(rounds, expected):
            for _ in range(2):
                results = engine.generate(prompts, max_new_tokens=6, ignore_eos=True)
                assert [r.token_ids for r in results] == want
    assert is_as_new(engine)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    # Two graphs for decode: of any number of requests, captured at all sizes, and of one.
    several, one = seen.graphs[1], seen.graphs[-1]
    for graph, sizes, missing in (several, [1, 2, 4], UNPADDED.get(name, 0)), (one, [1], 0):
        captured = [p for p in graph.pieces if "layers" in p.name and p.capture_sizes == sizes]
        assert len(captured) == layers - missing
    for piece in pieces:
        if "layers" in piece.name:
            assert piece.reason is None and piece.counts.replays > piece.counts.plain


def test_rows_that_are_asked_for_narrow_steps_of_one_row_each():
    def attend(q, pages, table, lens, rows):
        return paged_attend(q, pages, pages, table, None, lens, scale=0.5)[rows] * 2

    q = torch.randn(5, 2, 8)
    pages = torch.randn(7, 4, 2, 8)
    table = torch.randint(1, 7, (5, 3), dtype=torch.int32)
    lens = torch.tensor([3, 12, 1, 7, 5], dtype=torch.int32)
    call = torch.compile(attend, backend="kvtailor", options={"inner": "eager"})
    with recording() as seen:
        for rows in (torch.tensor([3, 0]), torch.tensor([4, 4, 1])):
            want = attend(q, pages, table, lens, rows)
            torch.testing.assert_close(call(q, pages, table, lens, rows), want)
    (line,) = [x for x in seen.graphs[0].graph_after.splitlines() if "paged_attend" in x]
    assert "float32[2, 2, 8]" in line
    whole = paged_attend(
        q, pages, pages, table, torch.arange(6, dtype=torch.int32), lens, scale=0.5
    )
    assert torch.equal(paged_attend(q, pages, pages, table, None, lens, scale=0.5), whole)
    with pytest.raises(ValueError, match="without query_start every sequence has one row, got 4"):
        paged_attend(q[:4], pages, pages, table, None, lens, scale=0.5)
