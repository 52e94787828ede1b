"""What is found out about a model before it is served: layers, lengths, encoder, refusals."""

from __future__ import annotations

import traceback
from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvtailor.runtime.engine.dispatch import try_attention
from kvtailor.runtime.kv.layout import cross_specs, decoder_config, layer_specs, with_geometry
from kvtailor.runtime.kv.spec import KVSpec

__all__ = ["ServedModel", "Unfit", "nothing_attended", "refusal"]

# Fields of a generation config that change scores, and what leaves them alone. Those the engine
# applies are in `ServedModel.processors`.
_UNSUPPORTED: dict[str, Any] = {
    "bad_words_ids": None,
    "constraints": None,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "guidance_scale": None,
    "min_length": 0,
    "min_new_tokens": None,
    "sequence_bias": None,
    "watermarking_config": None,
}


class Unfit(ValueError):
    """The model does what pages cannot; the text says what."""


def refusal(model: Any, failure: Exception, must: str) -> ValueError:
    """What a model that raised when it was tried is told: what it `must`, and where it did not."""
    if isinstance(failure, Unfit):
        return failure
    name_of = {module: name for name, module in model.named_modules()}
    where = type(model).__name__
    for frame, _ in traceback.walk_tb(failure.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module) and name_of.get(module):
            where = f"{type(module).__name__} at {name_of[module]} of {type(model).__name__}"
    return ValueError(f"a model must {must}, got another way in {where}")


class ServedModel:
    """A model as the engine sees it. Raises ValueError, in words about it, if it can't be served.

    model: what runs; raw: the module under torch.compile. text: the config of what generates.
    encoder_tokens: the longest output of an encoder, if there is one.
    """

    def __init__(self, model: Any, encoder_tokens: int | None = None) -> None:
        self.model = model
        self.raw = getattr(model, "_orig_mod", model)
        self.name = type(self.raw).__name__
        if self.raw.training:
            raise ValueError("the model must be in eval mode, got one that trains")
        if not (hasattr(self.raw, "can_generate") and self.raw.can_generate()):
            raise ValueError(f"the model must be one that generates, got {self.name}")
        self.config = self.raw.config
        self.generation_config = getattr(self.raw, "generation_config", None)
        self.encodes = bool(getattr(self.config, "is_encoder_decoder", False))
        self.takes_text = self.raw.main_input_name == "input_ids"
        self._check_input()
        self._check_generation_config()
        self.text = decoder_config(self.config)
        self.vocab = self.raw.get_input_embeddings().num_embeddings
        if self.encodes and encoder_tokens is None:
            names = ("max_source_positions", "max_position_embeddings", "n_positions")
            encoder_tokens = _positive(names, self.config) or 512
        self.encoder_tokens = encoder_tokens
        # The type of what the encoder returns.
        self.encoder_output: Any = None

    def _check_input(self) -> None:
        names = ("num_mel_bins", "max_source_positions")
        sound = self.encodes and all(hasattr(self.config, name) for name in names)
        if not (self.takes_text or sound):
            allowed = "from text, or from features of one length" if self.encodes else "from text"
            raise ValueError(
                f"a model must generate {allowed}, "
                f"got {self.name}, which takes {self.raw.main_input_name}"
            )

    def _check_generation_config(self) -> None:
        wrong = []
        for name, neutral in _UNSUPPORTED.items():
            value = getattr(self.generation_config, name, None)
            if value is not None and value != neutral:
                wrong.append(f"{name}={value!r}")
        if wrong:
            raise ValueError(
                "the model's generation config must not change scores in ways the engine doesn't "
                f"know, got {', '.join(wrong)}"
            )

    def longest(self, max_tokens: int | None) -> int:
        """Tokens of the longest request: max_tokens, if the model takes that, or its own limit."""
        limit = _positive(
            ("max_target_positions", "max_position_embeddings"), self.config, self.text
        )
        if max_tokens is not None and limit is not None and max_tokens > limit:
            raise ValueError(f"max_tokens must be at most the model's {limit}, got {max_tokens}")
        limit = _batch_free_positions(self.text, limit)
        if max_tokens is not None and limit is not None and max_tokens > limit:
            raise ValueError(
                f"max_tokens must be at most {limit}, from where the model's rotary table depends "
                f"on the longest position of the batch, got {max_tokens}"
            )
        return max_tokens or limit or 1 << 20

    def layers(self, block_size: int) -> dict[str, KVSpec]:
        """A spec with its real shape for every layer that owns keys: from a run on one token."""
        specs = layer_specs(self.config, block_size=block_size)
        arguments: dict[str, Any] = {"use_cache": True}
        ids = torch.zeros(1, 1, dtype=torch.int64, device=self.raw.device)
        if self.encodes:
            assert self.encoder_tokens is not None
            encoded = self.encoded(self.sample_encoder())
            arguments |= {"decoder_input_ids": ids, "encoder_outputs": encoded}
            specs |= cross_specs(self.config, self.encoder_tokens, block_size)
        else:
            arguments["input_ids"] = ids
        cache = self._first_run(arguments)
        own = cache.self_attention_cache if self.encodes else cache
        shaped = {}
        for name, spec in specs.items():
            kind, _, index = name.rpartition(".")
            layer = (cache.cross_attention_cache if kind else own).layers[int(index)]
            k, v = layer.keys, layer.values
            if k is None:
                raise ValueError(
                    f"every layer must keep keys of a text alone, got none for layer {name}"
                )
            shaped[name] = with_geometry(spec, k.shape[1], k.shape[3], v.shape[3], k.element_size())
        return shaped

    def _first_run(self, arguments: dict[str, Any]) -> Any:
        """The cache the model returns for a token."""
        calls = []

        def attention(
            module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
        ) -> tuple[Tensor, None]:
            calls.append(module)
            return nothing_attended(query, value)

        try:
            out = try_attention(self.raw.forward, attention, **arguments)
        except Exception as failure:
            must = "leave attention and its masks to transformers' interfaces"
            raise refusal(self.raw, failure, must) from failure
        cache = getattr(out, "cache", None)
        if cache is None:
            cache = out.get("past_key_values")
        if not isinstance(cache, Cache):
            raise ValueError(
                "a model must return a cache of keys and values, "
                f"got {self.name}, which returns none"
            )
        if not calls:
            raise ValueError(
                "attention must go through transformers' AttentionInterface, "
                f"got {self.name}, which computes its own"
            )
        return cache

    # The encoder

    @property
    def feature_shape(self) -> tuple[int, int]:
        return self.config.num_mel_bins, 2 * self.config.max_source_positions

    def encode(self, encoder_input: Tensor) -> Tensor:
        """States [1, M, width] of token ids [T] or features [bins, frames], by itself."""
        with torch.no_grad():
            out = self.raw.get_encoder()(encoder_input[None].to(self.raw.device))
        # Decoders read what their own encoder returns, field by field.
        self.encoder_output = type(out)
        states: Tensor = out.last_hidden_state
        return states

    def encoded(self, states: Tensor) -> Any:
        """States [1, M, width] as the encoder returns them."""
        return self.encoder_output(last_hidden_state=states)

    def sample_encoder(self) -> Tensor:
        """States [1, M, width] of some encoder input, another one at every call."""
        if not self.takes_text:
            return self.encode(torch.randn(self.feature_shape, dtype=self.raw.dtype))
        return self.encode(torch.randint(self.vocab, (6,)))

    # What generate() takes from its configs

    def start_tokens(self) -> list[int]:
        # As generate does: without a token of its own, a decoder starts as any text does.
        for name in ("decoder_start_token_id", "bos_token_id"):
            for config in (self.generation_config, self.config):
                start = getattr(config, name, None)
                if start is not None:
                    return [start]
        raise ValueError("the model names no decoder_start_token_id: give a decoder_prompt")

    def eos(self) -> set[int]:
        # As generate does: where there is a generation config, it alone says what ends a text.
        eos = getattr(self.generation_config or self.text, "eos_token_id", None)
        if eos is None:
            return set()
        return set(eos) if isinstance(eos, (list, tuple)) else {eos}

    def processors(self, num_prompt: int, max_new_tokens: int) -> Any:
        """What the generation config does to scores: the processors generate() would make."""
        if self.generation_config is None:
            return []
        config = copy(self.generation_config)
        config.do_sample, config.max_length = False, num_prompt + max_new_tokens
        return self.raw._get_logits_processor(config, num_prompt, device=str(self.raw.device))


def nothing_attended(query: Tensor, value: Tensor) -> tuple[Tensor, None]:
    """What an attention function returns for query [B, H, T, D] and value, with zeros for it."""
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    return query.new_zeros(shape), None


def _positive(names: tuple[str, ...], *configs: Any) -> int | None:
    """The first of these fields that is a positive number in one of the configs."""
    for name in names:
        for config in configs:
            value = getattr(config, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _batch_free_positions(text: Any, limit: int | None) -> int | None:
    """The length up to which a row's rotary table doesn't depend on the other rows'.

    transformers grows "dynamic" tables, and switches "longrope" ones, by the largest position of
    a call.
    """
    given = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    tables = [given, *(value for value in given.values() if isinstance(value, dict))]
    for table in tables:
        if table.get("rope_type", table.get("type")) in ("dynamic", "longrope"):
            original = (
                table.get("original_max_position_embeddings")
                or getattr(text, "original_max_position_embeddings", None)
                or text.max_position_embeddings
            )
            limit = original if limit is None else min(limit, original)
    return limit
