"""A transformers ``Cache`` whose keys and values lie in blocks of the block manager.

    cache = PagedCache(model.config, max_tokens=2048, batch_size=4)
    model.generate(ids, cache=cache)

``update`` stores the new keys and values in their pages and returns a dense gather of what the
layer may still see, so any model is right in eager mode. Sliding and chunked layers keep blocks
for their window only; layers that share another's keys have none.

Letters: B batch, T new tokens, K keys returned, H key heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, EncoderDecoderCache

from kvtailor.kernels.ops import store_kv
from kvtailor.runtime.kv.hybrid import HybridManager
from kvtailor.runtime.kv.layout import (
    KVLayout,
    Pages,
    cross_name,
    cross_specs,
    decoder_config,
    layer_specs,
)
from kvtailor.runtime.kv.spec import CrossSpec
from kvtailor.runtime.kv.store import Store

__all__ = ["PagedCache", "PagedEncoderDecoderCache"]


def _require_inference(k: Tensor, v: Tensor) -> None:
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise ValueError(
            "a paged cache must be used without gradients, got keys that require them: "
            "run under torch.no_grad()"
        )


class _Layer(CacheLayerMixin):
    """What the layers of a paged cache have in common; `length` counts the tokens given."""

    is_croppable = True
    is_sliding = False

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.name = name
        self.length = 0
        super().__init__()

    # The mixin sets these in its constructor; models read them for a layer's whole content.
    @property
    def keys(self) -> Tensor | None:
        return self._content(0)

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        assert value is None

    @property
    def values(self) -> Tensor | None:
        return self._content(1)

    @values.setter
    def values(self, value: Tensor | None) -> None:
        assert value is None

    @property
    def is_initialized(self) -> bool:
        return self.name in self.store.pages

    @is_initialized.setter
    def is_initialized(self, value: bool) -> None:
        assert not value

    def _first(self, length: int) -> int:
        """The first position a query after `length` tokens sees."""
        return 0

    def _content(self, which: int) -> Tensor | None:
        if not self.length:
            return None
        return self.store.gather(self.name, which, self._first(self.length), self.length)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the pages for keys [B, H, T, D] and values [B, H, T, Dv]."""
        heads, dim = key_states.shape[1], key_states.shape[3]
        self.store.pages.make(
            self.name, heads, dim, value_states.shape[3], key_states.dtype, key_states.device
        )

    def get_seq_length(self) -> int:
        return self.length

    def reset(self) -> None:
        self.length = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise NotImplementedError("rows belong to all layers: reorder the cache")


class PagedLayer(_Layer):
    """One self-attention layer."""

    def __init__(self, store: Store, name: str) -> None:
        super().__init__(store, name)
        self.spec = store.layout.spec(name)
        self.is_sliding = self.spec.kind != "full"

    @property
    def batch_size(self) -> int:
        return len(self.store.rows) or -1

    def _first(self, length: int) -> int:
        return self.spec.skipped(length)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys [B, H, T, D] and values [B, H, T, Dv]; returns all that T may see, [.. K ..].

        K is what `get_mask_sizes` said. Raises ValueError, before anything is stored, when the
        pool or max_tokens is too small, or the batch changes.
        """
        _require_inference(key_states, value_states)
        self.lazy_initialization(key_states, value_states)
        batch, _, tokens, _ = key_states.shape
        if self.length == self.store.length:
            # The first layer of a step asks for slots, the others find them.
            self.store.begin_step(batch, tokens, key_states.device)
        start, stop = self.length, self.length + tokens
        if stop != self.store.length:
            raise ValueError(
                f"every layer must be given the {self.store.length - start} tokens of a step, got "
                f"{tokens} for layer {self.name}, as layers that attend across to images are"
            )
        assert self.store.slots is not None
        slots = self.store.slots[self.store.layout.group_of[self.name]]
        _store(self.store, self.name, key_states, value_states, slots)
        self.length = stop
        first = self.spec.skipped(start)
        return (
            self.store.gather(self.name, 0, first, stop),
            self.store.gather(self.name, 1, first, stop),
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys `update` with that many tokens returns, and the position of the first."""
        start = self.spec.skipped(self.length)
        return self.length + query_length - start, start

    def get_max_length(self) -> int:
        return self.store.layout.max_tokens

    def crop(self, tokens_to_remove: int) -> None:
        self.length = max(0, self.length + tokens_to_remove)


def _store(
    store: Store, layer: str, key_states: Tensor, value_states: Tensor, slots: Tensor
) -> None:
    k_pages, v_pages = store.pages[layer]
    if key_states.dtype != k_pages.dtype or value_states.dtype != v_pages.dtype:
        raise ValueError(
            f"keys and values must stay {k_pages.dtype}, "
            f"got {key_states.dtype} and {value_states.dtype}"
        )
    # [B, H, T, D] -> [B * T, H, D], the order of the slots.
    store_kv(
        key_states.transpose(1, 2).flatten(0, 1),
        value_states.transpose(1, 2).flatten(0, 1),
        k_pages,
        v_pages,
        slots,
    )


class PagedCache(Cache):
    """Keys and values of a batch in pages, for a decoder-only model or a decoder's own attention.

    config: the model's. max_tokens: the longest row. batch_size: the most rows, which sizes the
    pool; num_blocks sizes it directly. block_size: tokens per block.

    `manager` is the block manager and `pages` the page tensors, whose addresses never change.
    Left-padded batches are stored as they come, so chunked layers keep a window of the chunk's
    size: where the grid of a padded row starts, the cache cannot know.
    """

    def __init__(
        self,
        config: Any,
        *,
        max_tokens: int,
        batch_size: int = 1,
        block_size: int = 16,
        num_blocks: int | None = None,
    ) -> None:
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(
                "a model with an encoder needs PagedEncoderDecoderCache, "
                f"got {type(config).__name__} for PagedCache"
            )
        layers = layer_specs(config, block_size=block_size, chunks=False)
        layout = KVLayout(layers, max_tokens)
        self._setup(config, Store(layout, _pool_size(layout, batch_size, num_blocks)), layers)

    def _setup(self, config: Any, store: Store, layers: Iterable[str]) -> None:
        self._store = store
        owners = set(layers)
        super().__init__(
            layers=[
                PagedLayer(store, str(index)) if str(index) in owners else DummyLayer()
                for index in range(decoder_config(config).num_hidden_layers)
            ]
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store.length} tokens, {self.manager})"

    @property
    def manager(self) -> HybridManager:
        return self._store.kv

    @property
    def pages(self) -> Pages:
        return self._store.pages

    def _paged(self) -> list[PagedLayer]:
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    def reset(self) -> None:
        """Forget everything; all blocks go back, the pages stay where they are."""
        self._store.clear()
        for layer in self._paged():
            layer.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens; more than there are takes all.

        Raises ValueError, changing nothing, when a sliding layer no longer holds what the next
        token would see: call `activate_past_recording` first, as assisted decoding does.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove must be negative, or 0, got {tokens_to_remove}: "
                "it counts tokens to take away"
            )
        self._store.crop(-tokens_to_remove)
        for layer in self._paged():
            layer.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i goes on from what row beam_idx[i] holds, sharing its blocks."""
        self._store.branch(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, sharing blocks."""
        rows = range(len(self._store.rows))
        self._store.branch([row for row in rows for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows only; a bool mask of the rows does as well."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self._store.branch(indices.tolist())

    def activate_past_recording(self) -> None:
        """From now on `crop` can take back all since the last `crop`, in sliding layers too."""
        self._store.record_past = True


class PagedCrossLayer(_Layer):
    """The cross-attention of one decoder layer: the encoder's keys, stored once."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the encoder's keys [B, H, T, D] and values [B, H, T, Dv], and return them."""
        _require_inference(key_states, value_states)
        self.lazy_initialization(key_states, value_states)
        tokens, spec = key_states.shape[2], self.store.layout.spec(self.name)
        assert isinstance(spec, CrossSpec)
        if self.length:
            raise ValueError("the encoder's keys are stored once, got them again: reset first")
        if tokens > spec.encoder_tokens:
            raise ValueError(
                f"the encoder's output must have at most encoder_tokens={spec.encoder_tokens} "
                f"states, got {tokens}"
            )
        _store(self.store, self.name, key_states, value_states, self._slots(tokens))
        self.length = tokens
        return key_states, value_states

    @torch._dynamo.disable
    def _slots(self, tokens: int) -> Tensor:
        """int64 [B * tokens]: where the encoder's keys of every row go."""
        store = self.store
        group = store.layout.group_of[self.name]
        slots = np.concatenate([store.kv.slots(row, group, 0, tokens) for row in store.rows])
        return torch.from_numpy(slots).to(store.pages[self.name][0].device)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length, 0

    def get_max_length(self) -> int:
        spec = self.store.layout.spec(self.name)
        assert isinstance(spec, CrossSpec)
        return spec.encoder_tokens

    def crop(self, tokens_to_remove: int) -> None:
        """The encoder's keys don't depend on the tokens."""


class _PagedSelfCache(PagedCache):
    """The decoder's own attention, in the pool it shares with the cross-attention."""

    def __init__(self, config: Any, store: Store, layers: Iterable[str]) -> None:
        self._setup(config, store, layers)


class _PagedCrossCache(Cache):
    """The cross-attention of all layers; without any where a model's generate makes a new one."""

    def __init__(self, layers: Iterable[Any] = (), **_: Any) -> None:
        super().__init__(layers=list(layers))


class PagedEncoderDecoderCache(EncoderDecoderCache):
    """Both attentions of a decoder with an encoder, in pages of one pool.

    As `PagedCache`; encoder_tokens: the longest encoder output, for which every row has blocks.
    """

    def __init__(
        self,
        config: Any,
        *,
        max_tokens: int,
        encoder_tokens: int,
        batch_size: int = 1,
        block_size: int = 16,
        num_blocks: int | None = None,
    ) -> None:
        if not getattr(config, "is_encoder_decoder", False):
            raise ValueError(
                f"config must be of a model with an encoder, got {type(config).__name__}"
            )
        own = layer_specs(config, block_size=block_size, chunks=False)
        layout = KVLayout({**own, **cross_specs(config, encoder_tokens, block_size)}, max_tokens)
        store = Store(layout, _pool_size(layout, batch_size, num_blocks))
        self._store = store
        cross: list[Any] = [PagedCrossLayer(store, cross_name(i)) for i in range(len(own))]
        super().__init__(_PagedSelfCache(config, store, own), _PagedCrossCache(cross))

    @property
    def cross_attention_cache(self) -> Any:
        return self._cross

    @cross_attention_cache.setter
    def cross_attention_cache(self, value: Any) -> None:
        # T5Gemma's generate puts an empty one of the same type in its place: the pages stay.
        if value.layers:
            self._cross = value

    @property
    def manager(self) -> HybridManager:
        return self._store.kv

    @property
    def pages(self) -> Pages:
        return self._store.pages

    def check_dynamic_cache(self, method: str) -> None:
        """transformers allows crop and batch changes to its dynamic caches only; here they work."""

    def reorder_cache(self, beam_idx: Any) -> None:
        self.self_attention_cache.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.self_attention_cache.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.self_attention_cache.batch_select_indices(indices)


def _pool_size(layout: KVLayout, batch_size: int, num_blocks: int | None) -> int:
    if num_blocks is not None:
        return num_blocks
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive, got {batch_size}")
    return batch_size * layout.request_blocks(layout.max_tokens, layout.max_tokens)
