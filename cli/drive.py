"""Calling a model as ``generate`` would: a prompt, then one-token steps, with any kind of cache."""

from __future__ import annotations

import inspect as signatures
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def accepts(model: nn.Module, name: str) -> bool:
    """Whether the model's forward has an argument of this name."""
    return name in signatures.signature(model.forward).parameters


def cache_argument(model: nn.Module) -> str | None:
    """transformers renamed past_key_values to cache in 5.24; None for a model without a cache."""
    for name in ("cache", "past_key_values"):
        if accepts(model, name):
            return name
    return None


def make_cache(model: Any, kind: str, batch: int, length: int, source_length: int) -> Any:
    """A fresh transformers cache: dynamic, or static or paged for ``length`` tokens.

    source_length: tokens of the encoder, or of the images, that a decoder attends across to.
    """
    if kind == "paged":
        return _paged_cache(model, batch, length, source_length)
    from transformers import DynamicCache, EncoderDecoderCache, StaticCache
    from transformers.cache_utils import StaticLayer

    config = model.config.get_text_config(decoder=True)
    if kind == "dynamic":
        own: Any = DynamicCache(config=config)
        cross: Any = DynamicCache()
    else:
        own = StaticCache(config=config, max_cache_len=length)
        cross = StaticCache(config=config, max_cache_len=source_length)
        for layer in _cross_layers(model):
            own.layers[layer] = StaticLayer(max_cache_len=source_length)
    return EncoderDecoderCache(own, cross) if model.config.is_encoder_decoder else own


def _paged_cache(model: Any, batch: int, length: int, source_length: int) -> Any:
    from kvtailor.runtime.kv.paged_cache import PagedCache, PagedEncoderDecoderCache

    if model.config.is_encoder_decoder:
        return PagedEncoderDecoderCache(
            model.config, max_tokens=length, encoder_tokens=source_length, batch_size=batch
        )
    return PagedCache(model.config, max_tokens=length, batch_size=batch)


def generate_like(
    call: Callable[..., Any],
    *,
    model: Any,
    inputs: dict[str, Any],
    cache: str,
    decode: int,
    logits_to_keep: int,
) -> None:
    """One call on the prompt, then ``decode`` greedy one-token steps, as ``generate`` does them.

    Unlike ``generate``, an encoder runs inside the first call, so that it is inspected too.
    """
    kwargs = dict(inputs)
    is_encoder_decoder = model.config.is_encoder_decoder
    ids = "decoder_input_ids" if is_encoder_decoder else "input_ids"
    if cache != "none":
        batch, tokens = kwargs[ids].shape
        name = cache_argument(model)
        assert name is not None
        # Room beyond the last token: a static cache is never exactly full in practice.
        length = 2 * tokens + decode
        kwargs[name] = make_cache(model, cache, batch, length, _source_length(model, kwargs))
        kwargs["use_cache"] = True
    elif accepts(model, "use_cache"):
        kwargs["use_cache"] = False
    if accepts(model, "logits_to_keep"):
        kwargs["logits_to_keep"] = logits_to_keep
    static = cache == "static" and not is_encoder_decoder
    past, out = 0, None
    for step in range(decode + 1):
        if step:
            past += kwargs[ids].shape[1]
            kwargs = _next_step(kwargs, out, ids, is_encoder_decoder)
        out = call(**kwargs | (_beside_static_cache(model, kwargs, past) if static else {}))


def _beside_static_cache(model: Any, kwargs: dict[str, Any], past: int) -> dict[str, Any]:
    """What ``generate`` adds beside a static cache, which keeps its length in a tensor.

    Positions, so that no model reads that length as a number. And for a model that makes more
    than a mask of the padding, ALiBi say, a padding mask as long as the cache. Other masks
    ``generate`` makes whole; here the model makes them, so that they are seen and proved.
    """
    ids, mask = kwargs["input_ids"], kwargs.get("attention_mask")
    added: dict[str, Any] = {}
    if accepts(model, "position_ids"):
        if mask is None:
            positions = torch.arange(past, past + ids.shape[1])[None]
        else:
            positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)[:, -ids.shape[1] :]
        added["position_ids"] = positions
    cache_name = cache_argument(model)
    if mask is not None and cache_name and hasattr(model, "create_masks_for_generate"):
        made = model.create_masks_for_generate(
            config=model.config,
            inputs_embeds=torch.empty(*ids.shape, 0, dtype=model.dtype),
            attention_mask=mask,
            cache=kwargs[cache_name],
        )
        if isinstance(made, Tensor) and made.dim() == 2:
            added["attention_mask"] = made
    return added


def _cross_layers(model: Any) -> list[int]:
    """The layers of a decoder that attend to images instead of to its own tokens."""
    config = model.config.get_text_config(decoder=True)
    return list(getattr(config, "cross_attention_layers", None) or ())


def _source_length(model: Any, inputs: dict[str, Any]) -> int:
    """How many tokens cross attention sees: the encoder's, or the images' patches."""
    if "pixel_values" in inputs and _cross_layers(model):
        vision = model.config.vision_config
        patches = (vision.image_size // vision.patch_size) ** 2 + 1
        return math.prod(inputs["pixel_values"].shape[1:-3]) * patches
    source = model.main_input_name
    return int(inputs[source].shape[-1]) // (2 if source == "input_features" else 1)


def _next_step(kwargs: dict[str, Any], out: Any, ids: str, encoded: bool) -> dict[str, Any]:
    """The arguments of the step after ``out``."""
    kwargs = dict(kwargs)
    kwargs[ids] = out.logits[:, -1:].argmax(-1)
    if encoded:
        from transformers.modeling_outputs import BaseModelOutput

        # The encoder runs once.
        kwargs.pop("input_ids", None)
        kwargs.pop("input_features", None)
        kwargs["encoder_outputs"] = BaseModelOutput(last_hidden_state=out.encoder_last_hidden_state)
    elif "attention_mask" in kwargs:
        mask = kwargs["attention_mask"]
        kwargs["attention_mask"] = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)
    # An image enters the cache with the prompt.
    for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"):
        kwargs.pop(name, None)
    if "cross_attention_mask" in kwargs:
        kwargs["cross_attention_mask"] = kwargs["cross_attention_mask"][:, -1:]
    return kwargs
