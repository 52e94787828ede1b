"""recognise_attention on real architectures: every attention of every model, cache or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import tidied
from models import ENCODER_DECODERS, ENCODERS, MODELS, build, implementations
from torch import Tensor, fx, nn

from kvtailor.backend import recording
from kvtailor.cli.models import shrunk
from kvtailor.compiler.check import relative_error
from kvtailor.kernels.ops import attend
from kvtailor.passes.capture.capture import capture
from kvtailor.passes.graph import SITE, sites
from kvtailor.passes.normalise import normalise
from kvtailor.passes.recognise_attention import recognise_attention
from kvtailor.passes.report import AttentionSite

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def recognised(model: nn.Module, **compile_args: Any) -> list[fx.GraphModule]:
    """Compile with capture, normalise and recognise_attention; the graphs, as they come."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graph = capture(gm, example_inputs)
        for each in (normalise, recognise_attention):
            each(graph)
            tidied(graph)
        graphs.append(graph)
        return graph.forward

    model.compile(backend=backend, fullgraph=True, **compile_args)
    return graphs


def check_sites(gm: fx.GraphModule) -> list[AttentionSite]:
    found = sites(gm)
    assert [site.reason for site in found if site.lowering == "untouched"] == []
    assert len({site.site for site in found}) == len(found)
    attends = gm.graph.find_nodes(op="call_function", target=attend)
    assert [n.meta[SITE] for n in attends] == found
    return found


# One of each kind of graph; the others are slow only because there are many.
FIRST = ("llama", "gemma2", "gemma3n_text", "gpt_oss", "bert", "gpt2", "bloom", "t5", "mllama")
CASES = [
    pytest.param(name, impl, marks=() if name in FIRST else pytest.mark.slow)
    for name in MODELS
    for impl in implementations(name)
]


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_every_attention(name: str, implementation: str) -> None:
    model, inputs = build(name, implementation, padding=3)
    if name not in ENCODERS:
        inputs["use_cache"] = False
    with torch.no_grad():
        expected = model(**inputs).logits
        graphs = recognised(model)
        actual = model(**inputs).logits
    assert relative_error([actual], [expected]) <= 1e-5
    (gm,) = graphs
    found = check_sites(gm)
    assert len(found) == MODELS[name]
    crossing = {"mllama": 2, **dict.fromkeys(ENCODER_DECODERS, 2)}.get(name, 0)
    assert sum(site.cross for site in found) == crossing
    assert all(site.sinks == (name == "gpt_oss") for site in found)
    assert all(site.softcap == (50.0 if name == "gemma2" else None) for site in found)
    if name not in ("gemma3n_text", "gemma4_text"):
        assert all(site.kv_owner == site.site for site in found)


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_shared_keys_have_an_owner(name: str) -> None:
    """Layers 4 and 5 of six read the keys of layers 2 and 3, and are not cross attention."""
    model, inputs = build(name, num_hidden_layers=6)
    graphs = recognised(model)
    with torch.no_grad():
        model(**inputs, use_cache=False)
    found = sites(graphs[0])
    owners = [site.kv_owner for site in found]
    assert owners == [f"model.layers.{i}.self_attn" for i in (0, 1, 2, 3, 2, 3)]
    assert [site.site for site in found] == [f"model.layers.{i}.self_attn" for i in range(6)]
    assert not any(site.cross for site in found)


def _cache(kind: str, model: Any, encodes: bool) -> Any:
    from transformers import DynamicCache, EncoderDecoderCache, StaticCache

    config = model.config.get_text_config(decoder=True)

    def one(length: int) -> Any:
        if kind == "static":
            return StaticCache(config=config, max_cache_len=length)
        return DynamicCache(config=config)

    # Cross attention's keys fill their cache: 24 encoder tokens.
    return EncoderDecoderCache(one(32), one(24)) if encodes else one(32)


def _steps(model: Any, inputs: dict[str, Any], kind: str, encodes: bool) -> list[torch.Tensor]:
    """Logits of a prefill and two decode steps."""
    from transformers.modeling_outputs import BaseModelOutput

    inputs = dict(inputs)
    token = "decoder_input_ids" if encodes else "input_ids"
    cache = _cache(kind, model, encodes)
    logits = []
    for step in range(3):
        out = model(**inputs, past_key_values=cache, use_cache=True)
        logits.append(out.logits)
        inputs[token] = torch.full((2, 1), 5 + step)
        if encodes:
            inputs.pop("input_ids", None)
            inputs.pop("input_features", None)
            if step == 0:
                states = BaseModelOutput(last_hidden_state=out.encoder_last_hidden_state)
                inputs["encoder_outputs"] = states
        elif "attention_mask" in inputs:
            one = torch.ones(2, 1, dtype=torch.int64)
            inputs["attention_mask"] = torch.cat([inputs["attention_mask"], one], 1)
        for key in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"):
            inputs.pop(key, None)
        if "cross_attention_mask" in inputs:
            inputs["cross_attention_mask"] = inputs["cross_attention_mask"][:, -1:]
    return logits


def _check_cache(name: str, implementation: str, kind: str) -> None:
    model, inputs = build(name, implementation, padding=3)
    encodes = name in ENCODER_DECODERS
    with torch.no_grad():
        expected = _steps(model, inputs, kind, encodes)
        graphs = recognised(model)
        actual = _steps(model, inputs, kind, encodes)
    assert relative_error(actual, expected) <= 1e-5
    # A growing cache gets a graph for its first length and one for all later ones.
    assert len(graphs) == (2 if kind == "static" else 3)
    crossing = {"mllama": 2, **dict.fromkeys(ENCODER_DECODERS, 2)}.get(name, 0)
    for gm in graphs:
        found = check_sites(gm)
        assert sum(site.cross for site in found) == crossing
        # Keys that only come from the cache have no owner in this graph.
        assert all(site.kv_owner for site in found if not site.cross)
    prefill, *decode = (sites(gm) for gm in graphs)
    assert len(prefill) == MODELS[name]
    encoder = {"mllama": 3, **dict.fromkeys(ENCODER_DECODERS, 2)}.get(name, 0)
    assert all(len(found) == MODELS[name] - encoder for found in decode)
    assert all(site.kv_owner is None for found in decode for site in found if site.cross)


QUICK = ["llama", "gemma3n_text", "bart", "gpt_oss"]
SLOW = [name for name in MODELS if name not in (*QUICK, *ENCODERS)]


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("name", QUICK)
def test_cached(name: str, kind: str) -> None:
    """Prefill and decode, keys out of index_copy and cat."""
    _check_cache(name, implementations(name)[0], kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("name", SLOW)
def test_cached_more(name: str, kind: str) -> None:
    if (name, kind) == ("mllama", "static"):
        pytest.skip("eager mode itself cannot: one length for text and image keys")
    for implementation in implementations(name):
        torch._dynamo.reset()
        _check_cache(name, implementation, kind)


DYNAMIC = ["llama", "gemma2", "bloom", "t5"]


@pytest.mark.slow
@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic(name: str) -> None:
    """dynamic=True: symbolic sizes, and scales and softcaps that arrive as inputs."""
    implementation = implementations(name)[-1]
    model, inputs = build(name, implementation, padding=3)
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
        graphs = recognised(model, dynamic=True)
        actual = model(**inputs, use_cache=False).logits
    assert relative_error([actual], [expected]) <= 1e-5
    assert len(check_sites(graphs[0])) == MODELS[name]


def test_returned_weights_are_left() -> None:
    """output_attentions=True: the weights are wanted, so the site stays as it is."""
    model, inputs = build("llama", "eager")
    inputs |= {"use_cache": False, "output_attentions": True}
    with torch.no_grad():
        # The first call installs hooks, which Dynamo cannot trace.
        expected = model(**inputs)
        graphs = recognised(model)
        actual = model(**inputs)
    assert len(actual.attentions) == 4
    assert all(torch.equal(a, e) for a, e in zip(actual.attentions, expected.attentions))
    found = sites(graphs[0])
    assert len(found) == 4
    assert {site.lowering for site in found} == {"untouched"}
    assert {site.reason for site in found} == {"the attention weights are used elsewhere too"}


def _reported(model: nn.Module, inputs: dict[str, Any]) -> list[AttentionSite]:
    with torch.no_grad(), recording() as recorder:
        wanted = model(**inputs)[0]
        got = torch.compile(model, backend="kvtailor", options={"inner": "eager"})(**inputs)[0]
    assert relative_error([got], [wanted]) <= 1e-5
    assert all(graph.captured for graph in recorder.graphs)
    return [site for graph in recorder.graphs for site in graph.attention]


@pytest.mark.parametrize("name", ["wav2vec2", pytest.param("hubert", marks=pytest.mark.slow)])
def test_c6_speech_with_a_mask(name: str) -> None:
    """Frames beyond a text's end are written over in place, in what idle dropout returned."""
    model, inputs = shrunk(name)
    mask = torch.ones(inputs["input_values"].shape, dtype=torch.long)
    mask[1, mask.shape[1] // 2 :] = 0
    with torch.no_grad():
        unmasked, masked = (model(**inputs, attention_mask=m)[0] for m in (None, mask))
    assert not torch.equal(unmasked, masked)
    found = _reported(model, {**inputs, "attention_mask": mask})
    assert len(found) == 4 and all(site.lowering == "sdpa" for site in found)


@pytest.mark.slow
def test_c6_attention_that_is_not_read_has_a_reason() -> None:
    """Longformer's scores lie on diagonals, and are copied from these by slices."""
    model, inputs = shrunk("longformer", attn_implementation="eager")
    found = _reported(model, inputs)
    assert len(found) == model.config.num_hidden_layers
    for site in found:
        assert site.lowering == "untouched"
        assert site.reason == "slice_scatter stands between the scores and the softmax"


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "pad": lambda s: nn.functional.pad(s, (0, 1), value=-1.0)[..., :-1],
    "slices": lambda s: torch.zeros_like(s).slice_scatter(s[..., 1:], -1, 1),
    "rows": lambda s: torch.zeros_like(s).select_scatter(s[..., 0, :], -2, 0),
    "copy": lambda s: torch.zeros_like(s).copy_(s),
    "one": lambda s: s.select(1, 0)[:, None],
    "flip": lambda s: s.flip(-1),
    "roll": lambda s: s.roll(1, -1),
    "gather": lambda s: s.gather(-1, torch.arange(s.shape[-1]).expand(s.shape)),
    "index": lambda s: s[..., torch.arange(s.shape[-1])],
    "index_select": lambda s: s.index_select(-1, torch.arange(s.shape[-1])),
    "scatter": lambda s: torch.zeros_like(s).scatter(-1, torch.zeros_like(s).long(), s),
    "split": lambda s: torch.cat(s.split(2, -1), -1),
    "unbind": lambda s: torch.stack(s.unbind(1), 1),
    "tril": lambda s: s.tril(),
    "sort": lambda s: s.sort(-1).values,
    "top": lambda s: s.topk(2, -1).values.repeat(1, 1, 1, 3),
    "strides": lambda s: s.contiguous().as_strided(s.shape, s.stride()),
    "unfold": lambda s: s.unfold(-1, 6, 1)[..., 0, :],
    "mixed heads": lambda s: torch.einsum("bhqk,hg->bgqk", s, torch.eye(2)),
    "mean": lambda s: s - s.mean(-1, keepdim=True),
    "sum": lambda s: s.cumsum(-1),
    "diagonal": lambda s: s.diagonal(dim1=-2, dim2=-1)[..., None, :].expand(s.shape),
}


@pytest.mark.parametrize("name", SCORES)
def test_c6_no_attention_is_passed_over_in_silence(name: str) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(SCORES[name](q @ k.mT), -1) @ v

    qkv = [torch.randn(2, 2, 6, 8) for _ in range(3)]
    with torch.no_grad(), recording() as recorder:
        got = torch.compile(fn, backend="kvtailor", options={"inner": "eager"})(*qkv)
    torch.testing.assert_close(got, fn(*qkv))
    (site,) = recorder.graphs[0].attention
    assert site.lowering != "untouched" or site.reason
