"""Models with an encoder, generating with packed projections; the X cases of tests/README.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvtailor.backend import recording
from kvtailor.cli.inspection import Request, run_inspection
from kvtailor.cli.models import shrunk
from kvtailor.tests.models import MODELS, implementations

OPTIONS = {"inner": "eager"}


pytestmark = pytest.mark.usefixtures("always_pack")


def build(name: str, tokens: int = 11, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    model, inputs = shrunk(name, tokens=tokens, **kwargs)
    config: Any = model.generation_config
    config.decoder_start_token_id = 0
    config.suppress_tokens = config.forced_eos_token_id = None
    return model, {k: v for k, v in inputs.items() if not k.startswith("decoder")}


def generate(model: Any, inputs: dict[str, Any], beams: int = 1, cache: str | None = None) -> Any:
    return model.generate(
        **inputs,
        max_new_tokens=8,
        min_new_tokens=8,
        do_sample=False,
        num_beams=beams,
        cache_implementation=cache,
        disable_compile=True,
        output_scores=True,
        return_dict_in_generate=True,
    )


def same_scores(ours: Any, theirs: Any) -> None:
    assert torch.equal(ours.sequences, theirs.sequences)
    for a, b in zip(ours.scores, theirs.scores, strict=True):
        finite = torch.isfinite(b)
        assert torch.equal(finite, torch.isfinite(a))
        assert (a - b)[finite].abs().max() <= 1e-5 * b[finite].abs().max()


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [
        "bart",
        "t5",
        "whisper",
        pytest.param("marian", marks=slow),
        pytest.param("pegasus", marks=slow),
    ],
)
def test_generation_with_an_encoder(name: str):
    """Dynamic cache, three beams, padded encoder; keys and values of the encoder once."""
    model, inputs = build(name, padding=0 if name == "whisper" else 4)
    wanted = [generate(model, inputs, beams) for beams in (1, 3)]
    model.compile(backend="kvtailor", options=OPTIONS)
    with recording() as recorder:
        for beams, want in zip((1, 3), wanted):
            same_scores(generate(model, inputs, beams), want)
    cross = [
        [g for g in graph.packed if any("ncoder_attn" in p or "EncDec" in p for p in g.parts)]
        for graph in recorder.graphs
    ]
    # The first graph of each batch size makes all layers' keys and values; decode makes none.
    made = [groups for groups in cross if groups]
    assert 1 <= len(made) <= 2 and not cross[-1]
    assert all(len(g.parts) == 4 for groups in made for g in groups)
    for graph, groups in zip(recorder.graphs, cross):
        if not groups:
            rows = inputs[model.main_input_name].shape[1]
            lines = [t for t in graph.graph_after.splitlines() if "aten::linear" in t]
            assert lines and not any(f", {rows}, " in t.split(" = ")[0] for t in lines)


@pytest.mark.parametrize("name", ["bart", "t5", "llama", pytest.param("whisper", marks=slow)])
def test_generation_with_a_static_cache(name: str):
    model, inputs = build(name)
    want = generate(model, inputs, cache="static")
    model.compile(backend="kvtailor", options=OPTIONS)
    with recording() as recorder:
        same_scores(generate(model, inputs, cache="static"), want)
    assert all(graph.packed for graph in recorder.graphs)


@pytest.mark.parametrize(
    "name",
    [
        n if n in ("mllama", "gemma3n_text", "llama4_text") else pytest.param(n, marks=slow)
        for n in MODELS
    ],
)
def test_every_architecture_packed(name: str):
    for attn in implementations(name)[:1]:
        decode = 2 if name not in ("bert", "roberta", "modernbert", "vit") else 0
        cache = "dynamic" if decode else "none"
        request = Request(
            f"hf:{name}", tokens=12, batch=2, padding=3, decode=decode, cache=cache, attn=attn
        )
        found = run_inspection(request)
        assert found.failure() is None
        whole = name in ("gpt2", "gpt_neox", "bloom", "phi3", "modernbert")
        assert whole or any(graph.packed for graph in found.recorder.graphs)


@pytest.mark.parametrize("gates", [0.0, 1.0])
def test_x02_rows_that_see_no_image(gates: float):
    """Mllama: what a blocked text row gets from the image is whatever eager gives it."""
    model, inputs = shrunk("mllama", tokens=4, batch=1)
    for layer in model.model.language_model.layers:
        if hasattr(layer, "cross_attn_attn_gate"):
            layer.cross_attn_attn_gate.data.fill_(gates)
            layer.cross_attn_mlp_gate.data.fill_(gates)
    run = torch.compile(model, backend="kvtailor", options=OPTIONS)
    for blocked in ([0, 1], [0, 1, 2, 3], []):
        seen = inputs["cross_attention_mask"].clone().fill_(1)
        seen[:, blocked] = 0
        given = {**inputs, "cross_attention_mask": seen}
        with torch.no_grad():
            ours, theirs = run(**given).logits, model(**given).logits
        assert torch.isfinite(ours).all()
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_x03_position_bias_counts_on_in_decode(cache: str):
    """T5, one token at a time against all at once: the learned bias must not start over."""
    from transformers import DynamicCache, EncoderDecoderCache, StaticCache

    model, inputs = build("t5")
    ids = torch.randint(2, 64, (2, 7))
    with torch.no_grad():
        states = model.get_encoder()(**inputs)
        want = model(encoder_outputs=states, decoder_input_ids=ids, use_cache=False).logits
        run = torch.compile(model, backend="kvtailor", options=OPTIONS)
        config = model.config.get_text_config(decoder=True)
        parts: list[Any] = [
            DynamicCache(config=config)
            if cache == "dynamic"
            else StaticCache(config=config, max_cache_len=length)
            for length in (8, 11)
        ]
        past = EncoderDecoderCache(*parts)
        steps = []
        for t in range(7):
            out = run(
                encoder_outputs=states,
                decoder_input_ids=ids[:, t : t + 1],
                past_key_values=past,
                use_cache=True,
            )
            steps.append(out.logits)
    assert (torch.cat(steps, 1) - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_x06_how_far_the_encoder_is_padded_changes_nothing(name: str):
    model, _ = build(name)
    ids = torch.randint(2, 64, (2, 6))
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    decoder = torch.randint(2, 64, (2, 5))
    run = torch.compile(model, backend="kvtailor", options=OPTIONS)

    def logits(width: int, rows: list[int]) -> Tensor:
        pad = (0, width - 6)
        with torch.no_grad():
            return run(
                input_ids=torch.nn.functional.pad(ids, pad)[rows],
                attention_mask=torch.nn.functional.pad(mask, pad)[rows],
                decoder_input_ids=decoder[rows],
            ).logits

    short = logits(6, [0, 1])
    assert (logits(11, [0, 1]) - short).abs().max() <= 2e-6 * short.abs().max()
    assert (logits(11, [1, 0])[[1, 0]] - short).abs().max() <= 2e-6 * short.abs().max()


def test_x07_t5_does_not_scale():
    model, inputs = shrunk("t5", tokens=6)
    run = torch.compile(model, backend="kvtailor", options=OPTIONS)
    with torch.no_grad(), recording() as recorder:
        ours, theirs = run(**inputs).logits, model(**inputs).logits
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    (graph,) = recorder.graphs
    assert graph.packed and len(graph.attention) == 6
    # Its cross-attention has no bias beside the mask: nothing is left over there.
    cross = [site for site in graph.attention if "EncDecAttention" in site.site]
    assert [site.residual for site in cross] == [None, None]
    wrong = 8**-0.5
    for module in model.modules():
        if hasattr(module, "scaling"):
            assert module.scaling == 1.0
            module.scaling = wrong
    with torch.no_grad():
        other = model(**inputs).logits
    assert (other - theirs).abs().max() > 1e-3
