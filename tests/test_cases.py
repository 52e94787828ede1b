"""Cases from public bug reports that take a whole model; ids as in tests/README.md."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtailor.backend import recording
from kvtailor.cli.models import shrunk

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Compiled:
    """A shrunk model under kvtailor; every graph it makes is checked against eager."""

    def __init__(self, name: str, attn: str = "sdpa", **overrides) -> None:
        self.model, inputs = shrunk(name, attn, tokens=12, num_hidden_layers=2, **overrides)
        self.ids = inputs["input_ids"]
        self.eager, _ = shrunk(name, attn, tokens=12, num_hidden_layers=2, **overrides)
        self.model.compile(backend="kvtailor", options={"inner": "eager"})

    def __call__(self, ids: Tensor, **kwargs):
        with recording(check=True) as recorder, torch.no_grad():
            out = self.model(ids, **{"use_cache": False, **kwargs})
        self.graphs = recorder.graphs
        assert all(g.max_error is not None and g.max_error <= 1e-5 for g in recorder.graphs)
        return out

    def plain(self, ids: Tensor, **kwargs) -> Tensor:
        with torch.no_grad():
            return self.eager(ids, **{"use_cache": False, **kwargs}).logits

    @property
    def sites(self):
        return next(g.attention for g in self.graphs if g.attention)


def close(actual: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def test_m01_left_padding_spoils_no_row():
    run = Compiled("llama")
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :3] = 0
    logits = run(run.ids[:, :6], attention_mask=mask).logits
    assert torch.isfinite(logits).all()
    close(logits[:1, 3:], run.plain(run.ids[:1, 3:6]))
    close(logits, run.plain(run.ids[:, :6], attention_mask=mask))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_m02_a_prompt_in_chunks_equals_one_shot(kind):
    from transformers import DynamicCache, StaticCache

    run = Compiled("llama")
    whole = run.plain(run.ids[:1, :10])
    cache = (
        DynamicCache(config=run.model.config)
        if kind == "dynamic"
        else StaticCache(config=run.model.config, max_cache_len=16)
    )
    at, parts = 0, []
    for n in (4, 4, 2):
        parts.append(run(run.ids[:1, at : at + n], past_key_values=cache, use_cache=True).logits)
        at += n
    close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize(("window", "kind"), [(4, "sliding"), (1, "sliding"), (None, "causal")])
def test_m03_a_window_of_w_sees_w_keys(window, kind):
    run = Compiled("mistral", sliding_window=window)
    ids = run.ids[:, :8]
    close(run(ids).logits, run.plain(ids))
    assert {(s.kind, s.window) for s in run.sites} == {(kind, window)}


def test_m04_the_chunk_grid_starts_at_each_row_s_first_token():
    run = Compiled("llama4_text", attention_chunk_size=4)
    ids = run.ids[:, :10]
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0
    logits = run(ids, attention_mask=mask).logits
    close(logits, run.plain(ids, attention_mask=mask))
    close(logits[:1, 3:], run.plain(ids[:1, 3:]), atol=2e-5)
    chunked = [s for s in run.sites if s.kind == "chunked"]
    assert chunked and all(s.chunk == 4 and "origin[b]" in str(s.proof) for s in chunked)


@pytest.mark.parametrize("prefill", [3, 4, 8])
def test_m05_decoding_past_the_chunk(prefill):
    run = Compiled("llama4_text", attention_chunk_size=4)
    ids = run.ids[:1, :10]
    whole = run.plain(ids)
    out = run(ids[:, :prefill], use_cache=True)
    close(out.logits[:, -1], whole[:, prefill - 1], atol=2e-5)
    for p in range(prefill, 10):
        out = run(ids[:, p : p + 1], past_key_values=out.past_key_values, use_cache=True)
        close(out.logits[:, -1], whole[:, p], atol=2e-5)


@pytest.mark.parametrize("case", ["no mask", "all ones", "default cache"])
def test_m06_packed_rows_are_what_eager_makes_of_them(case):
    """Eager isolates packed rows in the first case alone: equality is the promise, not more."""
    run = Compiled("llama")
    ids = run.ids[:1, :7]
    kwargs: dict[str, object] = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]])}
    if case == "all ones":
        kwargs["attention_mask"] = torch.ones(1, 7, dtype=torch.long)
    if case == "default cache":
        kwargs["use_cache"] = True
    logits = run(ids, **kwargs).logits
    close(logits, run.plain(ids, **kwargs))
    alone = run.plain(ids[:, 3:])
    isolated = (logits[:, 3:] - alone).abs().max() < 1e-5
    assert bool(isolated) == (case == "no mask")
    assert all(s.segments == (case == "no mask") for s in run.sites)
    if case != "no mask":
        assert {s.kind for s in run.sites} == {"causal"}


def test_m11_alibi_with_six_heads_and_left_padding():
    run = Compiled("bloom", "eager", hidden_size=48, n_head=6)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, :2] = 0
    ids = run.ids[:, :8]
    logits = run(ids, attention_mask=mask).logits
    close(logits, run.plain(ids, attention_mask=mask))
    close(logits[:1, 2:], run.plain(ids[:1, 2:]), atol=2e-5)
    assert all(s.residual and "bias" in s.residual for s in run.sites)


def test_m14_a_prompt_longer_than_the_window():
    run = Compiled("mistral", sliding_window=4)
    ids = run.ids[:, :10]
    for kwargs in ({}, {"use_cache": True}):
        logits = run(ids, **kwargs).logits
        assert torch.isfinite(logits).all()
        close(logits, run.plain(ids))


def test_c01_a_growing_cache_compiles_three_graphs():
    run = Compiled("llama")
    made = []
    with recording() as recorder, torch.no_grad():
        for prompt in (run.ids[:, :10], run.ids[:, :7]):
            out = run.model(prompt, use_cache=True)
            for _ in range(8):
                token = out.logits[:, -1:].argmax(-1)
                out = run.model(token, past_key_values=out.past_key_values, use_cache=True)
            made.append(len(recorder.graphs))
    # Prefill, first step, growing steps; the second prompt may add its own length.
    assert made[0] == 3 and made[1] <= 4


def test_c02_a_static_cache_answers_its_own_prompt():
    from transformers import StaticCache

    run = Compiled("llama")
    cache = StaticCache(config=run.model.config, max_cache_len=32)
    prompts = [run.ids[:1, :6], run.ids[1:, :9], run.ids[:1, :6]]
    for prompt, reuse in [(p, True) for p in prompts] + [(prompts[0], False)]:
        if reuse:
            cache.reset()
        else:
            cache = StaticCache(config=run.model.config, max_cache_len=32)
        close(run(prompt, past_key_values=cache, use_cache=True).logits, run.plain(prompt))
