"""Every architecture: each attention recognised, its kind right, the result eager's.

The default run takes one implementation per architecture without a cache, left-padded, and the
caches on a few; ``-m slow`` takes both implementations with every cache, prefill and decode.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from kvtailor.cli.drive import generate_like
from kvtailor.cli.inspection import InspectError, Request, run_inspection
from kvtailor.compiler.check import relative_error
from kvtailor.tests.models import (
    EAGER_ONLY,
    ENCODER_DECODERS,
    ENCODERS,
    MODELS,
    build,
    implementations,
)

FULL, CAUSAL, CROSS = ("full", None, None), ("causal", None, None), ("cross", None, None)
SLIDING, CHUNKED = ("sliding", 8, None), ("chunked", None, 8)
ENCODER_DECODER = {FULL: 2, CAUSAL: 2, CROSS: 2}

# (kind, window, chunk) -> how many sites of one prefill.
EXPECTED: dict[str, dict[tuple[str, int | None, int | None], int]] = {
    **{key: {CAUSAL: 4} for key in ("llama", "granite", "gpt_neox", "opt")},
    **{key: {CAUSAL: 3} for key in ("gpt2", "bloom")},
    **{key: {SLIDING: 4} for key in ("mistral", "phi3", "starcoder2")},
    **{key: {SLIDING: 2, CAUSAL: 2} for key in ("ministral", "gemma2", "gpt_oss")},
    **{key: {SLIDING: 2, CAUSAL: 2} for key in ("qwen2", "qwen3", "smollm3")},
    **dict.fromkeys(("gemma3_text", "gemma3n_text", "gemma4_text"), None),
    **dict.fromkeys(("cohere2", "olmo3", "exaone4"), None),
    "llama4_text": {CHUNKED: 2, CAUSAL: 2},
    # Two-sided: 4 keys to each side and the token itself.
    "modernbert": {FULL: 2, ("sliding", 9, None): 2},
    **{key: {FULL: 4} for key in ("bert", "roberta")},
    "vit": {FULL: 3},
    **dict.fromkeys(ENCODER_DECODERS, ENCODER_DECODER),
}
RESIDUAL = ("bloom", "t5")


def request_for(name: str, attn: str, cache: str, **kwargs) -> Request:
    padding = 0 if name in ("vit", "whisper") else 3
    kwargs = {"tokens": 24, "batch": 2, "padding": padding, **kwargs}
    return Request(f"hf:{name}", cache=cache, attn=attn, **kwargs)


def inspect(name: str, attn: str, cache: str, decode: int = 0, dynamic: str = "auto"):
    found = run_inspection(request_for(name, attn, cache, decode=decode, dynamic=dynamic))
    assert found.failure() is None, found.failure()
    for graph in found.recorder.graphs:
        assert graph.captured, graph.reason
        for site in graph.attention:
            # A site is rewritten, or says why it is not.
            assert site.lowering not in (None, "untouched"), (site.site, site.reason)
            assert site.kind != "masked" or site.reason, site.site
    return [g for g in found.recorder.graphs if g.attention]


def kinds(graph) -> Counter:
    return Counter((s.kind, s.window, s.chunk) for s in graph.attention)


def check(name: str, attn: str, cache: str, decode: int = 0, dynamic: str = "auto") -> None:
    graphs = inspect(name, attn, cache, decode, dynamic)
    prefill = graphs[0]
    # An encoder that runs apart from its decoder makes a graph of its own.
    sites = [s for g in graphs[: 1 if not decode else None] for s in g.attention]
    if not decode:
        assert len(sites) == MODELS[name]
    if name == "mllama":
        text = [s for s in sites if "vision" not in s.site]
        assert Counter(s.kind for s in text)["causal"] >= 2
        assert all(s.kind in ("causal", "cross", "masked") for s in text)
        return
    expected = EXPECTED[name]
    if not decode and expected is not None:
        assert kinds(prefill) == Counter(expected)
    if not decode and expected is None:
        # One full layer in so many, as the architecture has it.
        assert set(kinds(prefill)) == {SLIDING, CAUSAL}
    if name in RESIDUAL:
        own = [s for s in sites if s.kind != "cross"]
        assert all(s.residual and "bias" in s.residual and s.reason for s in own)
    if name == "gpt_oss":
        assert all(s.sinks for s in sites)
    if name == "gemma2":
        assert all(s.softcap == 50.0 for s in sites)
    if name in ENCODERS or name in ENCODER_DECODERS or name in RESIDUAL:
        return
    if decode:
        # One query at the end of a growing cache sees everything in it.
        allowed = {"sliding", "chunked", "causal", "full"}
        assert {s.kind for s in sites} <= allowed


@pytest.mark.parametrize("name", MODELS)
def test_prefill(name):
    check(name, implementations(name)[0], "none")


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gemma3n_text", "llama4_text", "bart"])
def test_caches(name, cache):
    check(name, "sdpa", cache, decode=1)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_paged_cache(name):
    """Pages are made within the compiled prefill; its blocks are given out once, though it runs
    twice, in eager mode and compiled."""
    graphs = inspect(name, "sdpa", "paged", decode=2)
    assert len(graphs) == 2
    assert all(s.lowering == "paged" for g in graphs for s in g.attention)


@pytest.mark.parametrize("name", ["opt", "bloom", "mllama"])
def test_static_caches_are_driven_as_generate_does(name):
    """OPT takes positions from outside, Bloom a mask of the cache's length, Mllama two lengths."""
    model, inputs = build(name, implementations(name)[0], padding=3)

    def logits(cache: str) -> list[torch.Tensor]:
        made = []

        def call(**kwargs):
            made.append(model(**kwargs))
            return made[-1]

        with torch.no_grad():
            generate_like(call, model=model, inputs=inputs, cache=cache, decode=2, logits_to_keep=1)
        return [out.logits for out in made]

    static, dynamic = logits("static"), logits("dynamic")
    assert len(static) == 3
    assert relative_error(static, dynamic) <= 1e-5


CACHED = [n for n in MODELS if n not in ENCODERS]
EVERYTHING = [
    *[(name, attn, "none", 0) for name in MODELS for attn in implementations(name)],
    *[
        (name, attn, cache, decode)
        for name in CACHED
        for attn in implementations(name)
        for cache in ("dynamic", "static")
        for decode in (0, 1)
    ],
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attn", "cache", "decode"), EVERYTHING)
def test_everything(name, attn, cache, decode):
    check(name, attn, cache, decode)


SYMBOLIC = [
    *[(name, attn, "none", 0) for name in MODELS for attn in implementations(name)],
    *[
        (name, implementations(name)[0], cache, 1)
        for name in CACHED
        for cache in ("dynamic", "static")
    ],
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attn", "cache", "decode"), SYMBOLIC)
def test_symbolic_sizes(name, attn, cache, decode):
    """dynamic=True: the same kinds, though no size is a number while they are proved."""
    check(name, attn, cache, decode, dynamic="yes")


# Of other families: latent attention (keys wider than values), part-rotary heads, gated or
# differential attention, experts.
OTHERS = ("deepseek_v2", "codegen", "gptj", "diffllama", "afmoe", "mixtral", "glm4_moe", "cohere")


@pytest.mark.parametrize(
    "name", ["deepseek_v3", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_other_families(name):
    graphs = inspect(name, "sdpa", "dynamic", decode=2)
    assert {s.kind for s in graphs[0].attention} <= {"causal", "sliding"}


def test_eager_only_models_refuse_sdpa_in_one_line():
    for name in EAGER_ONLY:
        with pytest.raises(InspectError, match="scaled_dot_product_attention"):
            run_inspection(Request(f"hf:{name}", attn="sdpa", tokens=8))


def check_under_inductor(name: str, batch: int, dynamic: str = "auto") -> None:
    """Pieces compiled for real take what the others return.

    With dynamic="auto", the second token has the sizes of its own cache and the third a graph
    with symbols for them, found equal while it was captured.
    """
    caches = name not in ENCODERS
    request = request_for(
        name,
        implementations(name)[0],
        "dynamic" if caches else "none",
        decode=3 * caches,
        batch=batch,
        padding=0 if batch == 1 or name in ("vit", "whisper") else 3,
        inner="inductor",
        dynamic=dynamic,
    )
    # Inductor's own cache doesn't tell apart all that it compiles differently.
    with torch.compiler.config.patch(force_disable_caches=True):
        found = run_inspection(request)
    assert found.failure() is None, found.failure()
    assert found.max_error < 1e-4
    for graph in found.recorder.graphs:
        assert graph.captured, graph.reason
        failed = {p.name: p.reason for p in graph.pieces if p.reason and "compile" not in p.reason}
        assert not failed, failed


def test_growing_cache_under_inductor():
    check_under_inductor("gemma3_text", 2)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_under_inductor(name, batch):
    check_under_inductor(name, batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_symbolic_under_inductor(name):
    check_under_inductor(name, 2, dynamic="yes")
