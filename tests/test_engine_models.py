"""Architectures: served as generate() computes them, or refused in words about the model."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from test_engine import is_as_new, own_tokens, prompts_of

from kvtailor.cli.models import shrunk
from kvtailor.runtime.engine.engine import Engine

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
    "bloom": "attention must go through transformers' AttentionInterface",
    "blt": "a config must say which layers it has",
    "doge": "attention must leave masks to the pages",
    "falcon": "must leave attention and its masks to transformers' interfaces",
    "led": "attention must go through transformers' AttentionInterface",
    "m2m_100": "no count of its own over the keys, got another way in M2M100Sinus",
    "mamba": "every layer must keep keys and values only",
    "moshi": "must have the mask its config says",
    "mpt": "must leave attention and its masks to transformers' interfaces",
    "nllb-moe": "no count of its own over the keys",
    "openai-gpt": "a model must return a cache of keys and values",
    "prophetnet": "a decoder must have as many layers as its config's num_hidden_layers",
    "rwkv": "a model must return a cache of keys and values",
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


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises(ValueError) as refused:
        engine_of(made(name))
    assert REFUSED[name] in str(refused.value)
    assert not any(raw in str(refused.value) for raw in RAW)


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
