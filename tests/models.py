"""The architectures the tests run on: shrunk, random weights, fixed seed."""

from __future__ import annotations

from typing import Any

import torch

from kvtailor.cli.models import shrunk

# Architecture -> number of attentions in one call.
MODELS: dict[str, int] = {
    "llama": 4,
    "mistral": 4,
    "ministral": 4,
    "gemma2": 4,
    "gemma3_text": 4,
    "gemma3n_text": 4,
    "gemma4_text": 4,
    "llama4_text": 4,
    "gpt_oss": 4,
    "qwen2": 4,
    "qwen3": 4,
    "phi3": 4,
    "granite": 4,
    "cohere2": 4,
    "olmo3": 4,
    "smollm3": 4,
    "starcoder2": 4,
    "exaone4": 4,
    "modernbert": 4,
    "bert": 4,
    "roberta": 4,
    "vit": 3,
    "gpt2": 3,
    "gpt_neox": 4,
    "opt": 4,
    "bloom": 3,
    "t5": 6,
    "bart": 6,
    "marian": 6,
    "pegasus": 6,
    "whisper": 6,
    "mllama": 7,
}

# These refuse attn_implementation="sdpa".
EAGER_ONLY = ("gemma2", "gpt_oss", "bloom")
ENCODERS = ("modernbert", "bert", "roberta", "vit")
ENCODER_DECODERS = ("t5", "bart", "marian", "pegasus", "whisper")


def implementations(name: str) -> tuple[str, ...]:
    return ("eager",) if name in EAGER_ONLY else ("sdpa", "eager")


def build(
    name: str, attn_implementation: str = "sdpa", **overrides: Any
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Model and inputs; overrides as ``kvtailor.cli.models.shrunk`` takes them."""
    return shrunk(name, attn_implementation, **overrides)
