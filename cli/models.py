"""Shrunk transformers models with random weights, built from their configs: nothing is downloaded.

    model, inputs = shrunk("gemma3_text")
    model(**inputs)

Any model_type transformers knows is shrunk by the same table of field names; what one
architecture needs on top is in SPECIAL. Weights are spread wider than a fresh model's, so that
attention is far from uniform and a wrong scale or mask shows.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    "num_mel_bins": 8,
    **dict.fromkeys(("initializer_range", "init_std"), 0.2),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "decoder_start_token_id"), 0),
    **dict.fromkeys(("eos_token_id", "forced_eos_token_id"), 1),
    **dict.fromkeys(("cls_token_id", "sep_token_id"), 1),
}


def _mixed(layers: int) -> list[str]:
    kinds = ["full_attention", "sliding_attention"]
    return [kinds[(layers - 1 - i) % 2] for i in range(layers)]


# What one architecture needs on top: the features worth having in a small model of it. A function
# gets the number of layers.
SPECIAL: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 3},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": lambda layers: [0.5] + [0.0] * (layers - 1),
        "altup_num_inputs": 2,
    },
    "gemma4_text": {"num_kv_shared_layers": 2, "global_head_dim": 16},
    "gpt2": {"n_layer": 3},
    "llama4_text": {"moe_layers": [], "floor_scale": 4},
    "ministral": {"layer_types": _mixed},
    "mllama_text_model": {"cross_attention_layers": [1, 3], "vocab_size": VOCAB},
    "mllama_vision_model": {
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "intermediate_layers_indices": [0, 1],
        "vision_output_dim": 96,
        "max_num_tiles": 4,
    },
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2, "layer_types": _mixed},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 2, "layer_types": _mixed},
    "smollm3": {"use_sliding_window": True, "layer_types": _mixed},
    "t5": {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16},
    "vit": {"num_hidden_layers": 3},
    "whisper": {"begin_suppress_tokens": None},
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
        order = ["ImageTextToText", *order]
    for task in order:
        candidate = getattr(auto, f"AutoModelFor{task}")
        if type(config) in candidate._model_mapping:
            return candidate
    return auto.AutoModel


def example_inputs(model: Any, tokens: int, batch: int, padding: int) -> dict[str, Any]:
    """Inputs the model's forward asks for, by its main input's name."""
    config = model.config
    # Token 0 pads and 1 ends; roberta and its kin count positions from the padding token.
    ids = torch.randint(2, VOCAB, (batch, tokens))
    dtype = model.dtype
    inputs: dict[str, Any] = {}
    main = model.main_input_name
    if main == "input_ids":
        inputs["input_ids"] = ids
        if padding:
            encodes = type(model).__name__.endswith("ForMaskedLM") or config.is_encoder_decoder
            mask = torch.ones(batch, tokens, dtype=torch.int64)
            mask[0, slice(tokens - padding, None) if encodes else slice(padding)] = 0
            inputs["attention_mask"] = mask
    elif main == "input_features":
        frames = 2 * config.max_source_positions
        inputs["input_features"] = torch.randn(batch, config.num_mel_bins, frames, dtype=dtype)
    elif main == "pixel_values":
        side = config.image_size
        inputs["pixel_values"] = torch.randn(batch, config.num_channels, side, side, dtype=dtype)
    else:
        raise ValueError(f"the model's main input must be tokens, features or pixels, got {main!r}")
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(2, VOCAB, (batch, max(1, tokens // 2)))
    if config.model_type == "mllama":
        inputs |= _mllama_images(config.vision_config, batch, tokens, dtype)
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
