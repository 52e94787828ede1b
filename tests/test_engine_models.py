"""Architectures: served as generate() computes them, or refused in words about the model."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from test_engine import is_as_new, own_tokens, prompts_of

from kvtailor.cli.drive import cache_argument
from kvtailor.cli.models import shrunk
from kvtailor.runtime.engine.engine import Engine
from kvtailor.runtime.kv.paged_cache import PagedCache, PagedEncoderDecoderCache

# Those that were wrong or crashed once, and one of each kind of refusal.
SERVED = [
    "afmoe",
    "t5gemma",
    "switch_transformers",
    "deepseek_v2",
    "deepseek_v3",
    "opt",
    "biogpt",
    "jetmoe",
    "longt5",
    "diffllama",
]
REFUSED = {
    "bert": "the model must be one that generates",
    "bert-generation": "a model must return a cache of keys and values",
    "blip": "a model must generate from text, got BlipFor",
    "bloom": "attention must go through transformers' AttentionInterface",
    "blt": "a config must say which layers it has",
    "doge": "attention must leave masks to the pages",
    "falcon": "must leave attention and its masks to transformers' interfaces",
    "led": "attention must go through transformers' AttentionInterface",
    "m2m_100": "no count of its own over the keys, got another way in M2M100Sinus",
    "mamba": "every layer must keep keys and values only, got one that keeps a state instead",
    "moonshine": "generate from text, or from features of one length, got Moonshine",
    "moshi": "must have the mask its config says",
    "mpt": "must leave attention and its masks to transformers' interfaces",
    "nllb-moe": "no count of its own over the keys",
    "openai-gpt": "a model must return a cache of keys and values",
    "prophetnet": "attention must go through transformers' AttentionInterface",
    "parakeet_ctc": "a model must generate from text, got ParakeetFor",
    "rwkv": "a model must return a cache of keys and values",
    "speech_to_text": "generate from text, or from features of one length, got Speech2Text",
    "t5gemma2": "must leave attention and its masks to transformers' interfaces",
    "xglm": "attention must go through transformers' AttentionInterface",
    "xlnet": "a model must return a cache of keys and values",
}
MORE = [
    "llama",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "mistral",
    "ministral",
    "olmo",
    "olmo2",
    "olmoe",
    "glm",
    "glm4",
    "glm4_moe",
    "granitemoe",
    "helium",
    "cohere",
    "cohere2",
    "nemotron",
    "starcoder2",
    "exaone4",
    "smollm3",
    "bitnet",
    "ernie4_5",
    "ernie4_5_moe",
    "hunyuan_v1_dense",
    "lfm2",
    "hunyuan_v1_moe",
    "arcee",
    "apertus",
    "seed_oss",
    "gpt_oss",
    "vaultgemma",
    "flex_olmo",
    "modernbert-decoder",
    "longcat_flash",
    "codegen",
    "gptj",
    "gpt_bigcode",
    "ctrl",
    "phi",
    "persimmon",
    "stablelm",
    "bart",
    "mbart",
    "blenderbot-small",
    "pegasus_x",
    "bigbird_pegasus",
    "plbart",
    "umt5",
    "mt5",
    "whisper",
    "jamba",
    "qwen3_next",
    "minimax",
    "recurrent_gemma",
    "falcon_mamba",
    "falcon_h1",
    "nemotron_h",
    "blenderbot",
    "roberta",
    "electra",
    "camembert",
    "xlm",
    "xlm-roberta",
    "megatron-bert",
    "rembert",
    "roformer",
    "data2vec-text",
    "fsmt",
    "trocr",
    "xlstm",
]
# What a raw exception reads like.
RAW = ("Error", "object has no", "NoneType", "argument", "size of tensor", "Traceback", "\n")


def made(name: str) -> Any:
    try:
        model, _ = shrunk(name, "sdpa")
    except ValueError:
        model, _ = shrunk(name, "eager")
    config: Any = getattr(model, "generation_config", None)
    if config is not None:
        config.forced_eos_token_id = None
    return model


def engine_of(model: Any, **kwargs: Any) -> Engine:
    encodes = model.config.is_encoder_decoder
    return Engine(
        model,
        max_memory="4MiB",
        block_size=4,
        max_tokens=48,
        token_budget=16,
        encoder_tokens=32 if encodes else None,
        **kwargs,
    )


def serve(engine: Engine, model: Any) -> None:
    prompts = prompts_of(model, random.Random(0), 4)
    results = engine.generate(prompts, max_new_tokens=6, ignore_eos=True)
    assert [r.token_ids for r in results] == [own_tokens(model, p, 6) for p in prompts]
    assert is_as_new(engine)


@pytest.mark.parametrize("name", SERVED)
def test_served(name: str) -> None:
    model = made(name)
    serve(engine_of(model), model)


@pytest.mark.parametrize("name", ["opt", "deepseek_v2", "switch_transformers"])
def test_served_unverified(name: str) -> None:
    model = made(name)
    serve(engine_of(model, verify=False), model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opt", "deepseek_v3"])
@pytest.mark.parametrize("graph_decode", [False, True])
def test_served_compiled(name: str, graph_decode: bool) -> None:
    model = made(name)
    torch._dynamo.reset()
    model.compile(backend="kvtailor", options={"inner": "eager"})
    serve(engine_of(model, graph_decode=graph_decode), model)


# Blt isn't shrunk by the fields of the others.
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "blt" else n for n in REFUSED]
)
def test_refused(name: str) -> None:
    with pytest.raises(ValueError) as refused:
        engine_of(made(name))
    assert REFUSED[name] in str(refused.value)
    assert not any(raw in str(refused.value) for raw in RAW)


@pytest.mark.parametrize("name", ["prophetnet", "t5gemma"])
def test_generate_over_paged_caches(name: str) -> None:
    """Decoders with another count than the encoder's, and a cross cache that generate replaces."""
    model, inputs = shrunk(name, "eager", tokens=9, padding=2)
    rows = inputs["input_ids"].shape[0]
    paged = PagedEncoderDecoderCache(model.config, max_tokens=16, encoder_tokens=9, batch_size=rows)
    tokens = [
        model.generate(**inputs, max_new_tokens=5, do_sample=False, **given)
        for given in ({}, {cache_argument(model): paged})
    ]
    assert torch.equal(*tokens) and paged.get_seq_length() > 1 and "cross.1" in paged.pages


def test_a_layer_across_to_images_is_refused_in_words() -> None:
    model, inputs = shrunk("mllama", "sdpa")
    cache = PagedCache(model.config, max_tokens=64, batch_size=2)
    with pytest.raises(ValueError, match="for layer 1, as layers that attend across to images are"):
        model.generate(**inputs, cache=cache, max_new_tokens=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_served_or_refused(name: str) -> None:
    model = made(name)
    try:
        engine = engine_of(model)
    except ValueError as refused:
        assert not any(raw in str(refused) for raw in RAW)
        return
    serve(engine, model)
