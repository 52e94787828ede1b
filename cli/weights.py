"""Real weights: language models from GGUF files."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from kvtailor.files import cache_base, written_whole


def load_gguf(path: Path, dtype: torch.dtype, attn: str = "sdpa") -> Any:
    """A causal language model from a GGUF file, its weights unpacked to dtype."""
    import transformers

    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        # From 5.24 on, weights stay packed unless asked otherwise.
        options["quantization_config"] = transformers.GgufConfig(
            gguf_file=path.name, dequantize=True
        )
    return transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=dtype, attn_implementation=attn, **options
    ).eval()


def gguf_file(weights: Any) -> Path:
    """The GGUF file in the cache folder, put there whole or not at all."""
    folder = cache_base() or Path(tempfile.gettempdir())
    path = folder / weights.MODEL_NAME
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as part:
            weights.assemble(part, overwrite=True)
    return path
