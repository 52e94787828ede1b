"""Shrunk transformers models with random weights, built from their configs: nothing is downloaded.

    model, inputs = shrunk("gemma3_text")
    model(**inputs)

Any model_type transformers knows is shrunk by the same table of field names; what one
architecture needs on top is in SPECIAL. Weights are spread wider than a fresh model's, so that
attention is far from uniform and a wrong scale or mask shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from inspect import signature
from typing import Any

import torch

from kvtailor.config import suggest

VOCAB = 64
LAYERS = 4
WINDOW = 8

# Config field -> shrunk value; applied wherever a config has the field.
_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("pooler_output_size", "classifier_proj_size"), 32),
    **dict.fromkeys(
        ("intermediate_size", "intermediate_size_mlp", "moe_intermediate_size", "d_ff"), 48
    ),
    **dict.fromkeys(("ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_num_hidden_layers", "decoder_num_hidden_layers", "depth"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "attention_heads", "n_head", "n_heads", "num_heads"), 4
    ),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "d_kv", "global_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "laurel_rank"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    "query_pre_attn_scalar": 8,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "n_group"), 2),
    "topk_group": 1,
    "rotary_dim": 8,
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "local_attention"), WINDOW),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions"), 128),
    "original_max_position_embeddings": 128,
    "shared_expert_intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
    **dict.fromkeys(("embed_dim", "out_hidden_size", "conv_channels", "projection_dim"), 32),
    **dict.fromkeys(("image_token_id", "image_token_index"), VOCAB - 1),
    **dict.fromkeys(("video_token_id", "video_token_index"), VOCAB - 2),
    **dict.fromkeys(("vision_start_token_id", "vision_end_token_id"), VOCAB - 3),
    **dict.fromkeys(("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim"), 8),
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "mm_tokens_per_image": 4,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "entity_vocab_size": 8,
    **dict.fromkeys(("initializer_range", "init_std"), 0.2),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "decoder_start_token_id"), 0),
    **dict.fromkeys(("eos_token_id", "forced_eos_token_id"), 1),
    **dict.fromkeys(("cls_token_id", "sep_token_id"), 1),
}


_BINS = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")


def _mixed(layers: int) -> list[str]:
    kinds = ["full_attention", "sliding_attention"]
    return [kinds[(layers - 1 - i) % 2] for i in range(layers)]


# Rotary angles of time, height and width; half the head dim together.
_SECTIONS = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
}
_STAGES = {"image_size": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}

# What one architecture needs on top: the features worth having in a small model of it. A function
# gets the number of layers.
SPECIAL: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"max_length": 24, "frequency_stride": 4, "time_stride": 4},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1, 3]},
    "bloom": {"n_layer": 3},
    "dots1": {"n_shared_experts": 1},
    "esm": {"pad_token_id": 1, "mask_token_id": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": lambda layers: [0.5] + [0.0] * (layers - 1),
        "altup_num_inputs": 2,
    },
    "gemma4_text": {"num_kv_shared_layers": 2, "global_head_dim": 16},
    "gpt2": {"n_layer": 3},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "llama4_text": {"moe_layers": [], "floor_scale": 4},
    "ministral": {"layer_types": _mixed},
    "mobilebert": {"embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32},
    "mllama_text_model": {"cross_attention_layers": [1, 3], "vocab_size": VOCAB},
    "mllama_vision_model": {
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "intermediate_layers_indices": [0, 1],
        "vision_output_dim": 96,
        "max_num_tiles": 4,
    },
    "pvt": {"image_size": 64},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2, "layer_types": _mixed},
    "qwen2_vl_text": _SECTIONS,
    "qwen2_5_vl_text": _SECTIONS,
    "qwen2_5_vl_vision": {"fullatt_block_indexes": [1], "window_size": 16},
    "qwen3_vl_text": _SECTIONS,
    "qwen3_vl_vision": {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 2, "layer_types": _mixed},
    "segformer": {"image_size": 64},
    "smollm3": {"use_sliding_window": True, "layer_types": _mixed},
    "squeezebert": {"embedding_size": 32},
    "swin": _STAGES,
    "swinv2": _STAGES,
    "t5": {
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 16,
        "decoder_start_token_id": 0,
    },
    "vilt": {"num_labels": 2},
    "vit": {"num_hidden_layers": 3},
    "whisper": {"begin_suppress_tokens": None},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "num_mem_blocks": 1,
    },
}


def shrunk(
    name: str,
    attn_implementation: str = "sdpa",
    tokens: int = 24,
    batch: int = 2,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    seed: int = 0,
    **config_overrides: Any,
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A small model of a transformers model_type in eval mode, and keyword inputs for one call.

    tokens: length of the (encoder) input; a decoder with an encoder gets half of it. padding:
    how many tokens of row 0 are masked, on the left for decoders, on the right for encoders;
    with 0 no attention mask is passed. Caches are the caller's business. Raises ValueError for
    an unknown name, an attn_implementation the model refuses, and sizes that make no sense.
    """
    if tokens < 1 or batch < 1:
        raise ValueError(f"tokens and batch must be positive, got {tokens} and {batch}")
    if not 0 <= padding < tokens:
        raise ValueError(f"padding must be from 0 to tokens - 1, got {padding}")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name not in CONFIG_MAPPING:
        raise ValueError(suggest("model", name, _spellings(name, CONFIG_MAPPING)))
    if name == "whisper":
        config_overrides.setdefault("max_source_positions", tokens)
    config = _shrunk_config(CONFIG_MAPPING[name], config_overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto = auto_class(config)
        # Where several classes do, the first is taken.
        config.architectures = config.architectures or []
        model = auto.from_config(config, attn_implementation=attn_implementation, dtype=dtype)
        inputs = example_inputs(model, tokens, batch, padding)
    return model.eval(), inputs


def _spellings(name: str, known: Iterable[str]) -> list[str]:
    """The known names worth listing for a wrong one: hundreds of them help nobody."""
    import difflib

    return difflib.get_close_matches(name, list(known), n=8, cutoff=0.4) or ["llama", "bert", "t5"]


def _shrunk_config(config_class: Any, overrides: dict[str, Any]) -> Any:
    default = config_class()
    known = default.to_dict()
    aliases = set(default.attribute_map)
    fields = {k: v for k, v in _FIELDS.items() if k in known and k not in aliases}
    if known.get("pad_token_id") is None:
        # A model without a padding token keeps that: it decides how its embedding is built.
        fields.pop("pad_token_id", None)
    for part, part_class in (default.sub_configs or {}).items():
        if getattr(default, part, None) is not None and isinstance(part_class, type):
            fields[part] = _shrunk_config(type(getattr(default, part)), {}).to_dict()
    for name, value in list(fields.items()):
        if isinstance(known[name], (list, tuple)) == isinstance(value, tuple):
            continue
        if name in ("image_size", "patch_size"):
            fields[name] = [value] * len(known[name])
        elif isinstance(value, tuple) or len(set(known[name])) > 1:
            # One value per stage or for all: SPECIAL knows better.
            del fields[name]
    if "kv_lora_rank" in fields:
        # Multi-head latent attention makes keys for every head.
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    fields |= SPECIAL.get(default.model_type, {})
    fields |= overrides
    layers = fields.get("num_hidden_layers", LAYERS)
    fields = {k: v(layers) if callable(v) else v for k, v in fields.items()}
    kinds = known.get("layer_types")
    if kinds and "layer_types" not in fields:
        # One layer of each kind in turn; the last one attends to everything where any does.
        turn = sorted(set(kinds), key=lambda kind: kind == "full_attention")
        fields["layer_types"] = [turn[(i - layers) % len(turn)] for i in range(layers)]
    return config_class(**fields)


def auto_class(config: Any) -> Any:
    from transformers.models.auto import modeling_auto as auto

    order = ["MaskedLM", "CausalLM", "ImageTextToText", "ImageClassification"]
    if getattr(config, "is_encoder_decoder", False):
        order = ["Seq2SeqLM", "SpeechSeq2Seq", *order]
    elif hasattr(config, "vision_config"):
        order = ["ImageTextToText"]
    for task in order:
        candidate = getattr(auto, f"AutoModelFor{task}")
        if type(config) in candidate._model_mapping:
            return candidate
    return auto.AutoModel


def example_inputs(model: Any, tokens: int, batch: int, padding: int) -> dict[str, Any]:
    """Inputs the model's forward asks for: text, pixels or sound, or text with an image.

    Raises ValueError for a model that takes none of these.
    """
    config, main = model.config, model.main_input_name
    takes = signature(model.forward).parameters
    inputs: dict[str, Any] = {}
    images: dict[str, Any] = {}
    if "pixel_values" in takes and config.model_type != "mllama":
        images = _images(model, batch)
    if main == "input_ids" or (images and "input_ids" in takes):
        inputs = _text(model, tokens, batch, padding, images)
    elif main in ("input_features", "input_values"):
        inputs = _sound(model, tokens, batch, padding)
    elif main != "pixel_values":
        raise ValueError(f"the model's main input must be tokens, sound or pixels, got {main!r}")
    inputs |= images
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(2, VOCAB, (batch, max(1, tokens // 2)))
    if config.model_type == "mllama":
        inputs |= _mllama_images(config.vision_config, batch, tokens, model.dtype)
    return inputs


def _text(
    model: Any, tokens: int, batch: int, padding: int, images: dict[str, Any]
) -> dict[str, Any]:
    config = model.config
    marker = getattr(config, "image_token_id", None) if images else None
    patches = 0
    if marker is not None and hasattr(model, "get_image_features"):
        with torch.no_grad():
            found = model.get_image_features(**images)
        found = getattr(found, "pooler_output", found)
        patches = sum(part.numel() for part in found) // (found[0].shape[-1] * batch)
        tokens = max(tokens, padding + patches + 2)
    # Token 0 pads and 1 ends; roberta and its kin count positions from the padding token. The
    # last few stand for images.
    ids = torch.randint(2, VOCAB if marker is None else VOCAB - 4, (batch, tokens))
    inputs: dict[str, Any] = {"input_ids": ids}
    if patches:
        assert isinstance(marker, int)
        ids[:, -patches - 1 : -1] = marker
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in signature(model.forward).parameters:
                inputs[name] = ids.eq(marker).long()
    if padding:
        encodes = type(model).__name__.endswith("ForMaskedLM") or config.is_encoder_decoder
        mask = torch.ones(batch, tokens, dtype=torch.int64)
        mask[0, slice(tokens - padding, None) if encodes else slice(padding)] = 0
        inputs["attention_mask"] = mask
    return inputs


def _images(model: Any, batch: int) -> dict[str, Any]:
    """One image per row, in the form that forward takes: whole, cut in tiles, or in patches."""
    takes = signature(model.forward).parameters
    vision = getattr(model.config, "vision_config", None) or model.config
    size = vision.image_size if hasattr(vision, "image_size") else _FIELDS["image_size"]
    height, width = (size, size) if isinstance(size, int) else size
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", 3)
    if "image_grid_thw" in takes:
        # Patches in rows of 4, each of temporal_patch_size frames.
        depth = channels * vision.temporal_patch_size * vision.patch_size**2
        return {
            "pixel_values": torch.randn(batch * 16, depth, dtype=model.dtype),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * batch),
        }
    # Idefics takes several images per row.
    tiles = (1,) if model.config.model_type in ("idefics2", "idefics3", "smolvlm") else ()
    shape = (batch, *tiles, channels, height, width)
    images: dict[str, Any] = {"pixel_values": torch.randn(shape, dtype=model.dtype)}
    if getattr(vision, "model_type", None) == "pixtral":
        images["image_sizes"] = torch.tensor([[height, width]] * batch)
    return images


def _sound(model: Any, tokens: int, batch: int, padding: int) -> dict[str, Any]:
    """Spectrogram [B, T, bins] (Whisper's [B, bins, T]) or samples [B, T], padded on the right."""
    takes = signature(model.forward).parameters
    config, main = model.config, model.main_input_name
    inner = getattr(config, "encoder_config", None) or config
    bins: int | None = next((getattr(inner, n) for n in _BINS if hasattr(inner, n)), None)
    if config.model_type == "whisper":
        assert isinstance(bins, int)
        shape: tuple[int, ...] = (batch, bins, 2 * config.max_source_positions)
    elif bins is not None:
        shape = (batch, getattr(config, "max_length", tokens * 4), bins)
    else:
        # Samples per token, where the convolutions say so; Moonshine's are fixed.
        stride = math.prod(getattr(config, "conv_stride", (64, 3, 2)))
        shape = (batch, (tokens + 1) * stride)
    inputs: dict[str, Any] = {main: torch.randn(shape, dtype=model.dtype)}
    of_tokens = hasattr(config, "max_source_positions") and bins == shape[1]
    if padding and "attention_mask" in takes and not (of_tokens or hasattr(config, "max_length")):
        mask = torch.ones(shape[:2], dtype=torch.int64)
        mask[0, -(shape[1] * padding // tokens) :] = 0
        inputs["attention_mask"] = mask
    return inputs


def _mllama_images(vision: Any, batch: int, tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    """One image of two tiles (one in row 0) per row, not seen by the first token."""
    tiles, side = vision.max_num_tiles, vision.image_size
    present = torch.zeros(batch, 1, tiles, dtype=torch.int64)
    present[:, :, :2] = 1
    present[0, :, 1] = 0
    sees = present[:, None].expand(batch, tokens, 1, tiles).clone()
    sees[:, 0] = 0
    ratio = torch.full((batch, 1), 2)
    ratio[0] = 1
    return {
        "pixel_values": torch.randn(batch, 1, tiles, vision.num_channels, side, side, dtype=dtype),
        "aspect_ratio_ids": ratio,
        "aspect_ratio_mask": present,
        "cross_attention_mask": sees,
    }


def gemma3n_shaped(
    layers: int = 15, shared: int = 5, width: int = 512, window: int = 512, seed: int = 0
) -> Any:
    """A Gemma3n language model of this shape, float32, random weights.

    layers: of which the last ``shared`` read the keys and values of earlier ones. One layer in
    ``shared`` attends to everything, the last one among them, the others to a window.
    """
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    head_dim = max(8, width // 8)
    config = Gemma3nTextConfig(
        vocab_size=8192 if width >= 256 else 64,
        vocab_size_per_layer_input=8192 if width >= 256 else 64,
        hidden_size=width,
        intermediate_size=4 * width,
        hidden_size_per_layer_input=width // 4,
        num_hidden_layers=layers,
        num_kv_shared_layers=shared,
        num_attention_heads=width // head_dim,
        num_key_value_heads=2,
        head_dim=head_dim,
        laurel_rank=max(8, width // 16),
        sliding_window=window,
        layer_types=[
            "sliding_attention" if (layers - 1 - i) % shared else "full_attention"
            for i in range(layers)
        ],
        activation_sparsity_pattern=[0.0] * layers,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Gemma3nForCausalLM(config).eval()
