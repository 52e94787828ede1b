"""Which layers of a model keep keys, in which groups, and where their pages lie.

    layers = layer_specs(model.config)                # one spec per layer that owns keys
    layout = KVLayout(layers, max_tokens=4096)
    pages = Pages(layout, num_blocks=1024, device="cpu")
    k_pages, v_pages = pages["3"]                     # of layer 3, after pages.make("3", ...)

A block is one number for all groups, so layers at the same place of different groups share a page
tensor: they never own the same block. Large groups are split, so that all have about as many
layers and little of a block lies idle.

Letters: B block size in tokens, H key heads, D head dim of k, Dv head dim of v.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from kvtailor.runtime.kv.spec import (
    ChunkedSpec,
    CrossSpec,
    FullSpec,
    KVGroup,
    KVSpec,
    SlidingSpec,
    group_layers,
)

__all__ = ["KVLayout", "Pages", "cross_name", "decoder_config", "layer_specs"]

# More groups cost more bookkeeping per step than the memory is worth.
MAX_GROUPS = 8


def cross_name(layer: int) -> str:
    """What the cross-attention of decoder layer `layer` is called."""
    return f"cross.{layer}"


def decoder_config(config: Any) -> Any:
    """The config of the part that generates, with `num_hidden_layers` that of its decoder."""
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        for name in ("decoder_layers", "num_decoder_layers"):
            if isinstance(getattr(config, name, None), int):
                # text may be a copy with fields renamed: ask the config itself.
                count = getattr(config, name)
                if text.num_hidden_layers != count:
                    text = copy.deepcopy(text)
                    text.num_hidden_layers = count
                break
    return text


def layer_specs(config: Any, *, block_size: int = 16, chunks: bool = True) -> dict[str, KVSpec]:
    """A spec for every decoder layer that owns keys, by its index as a string.

    Layers that share another's keys are not in it. Kinds are read from the cache transformers
    itself would build for the config. chunks=False takes chunked layers as sliding ones, which
    hold what a chunk grid shifted by left padding can reach. Heads and head dims are left at
    their defaults. Raises ValueError for layers that keep anything but keys and values.
    """
    text = decoder_config(config)
    try:
        built = cache_utils.DynamicCache(config=text).layers
    except KeyError as error:
        raise ValueError(f"layers must be attention over keys, got layer type {error}") from None
    kinds = getattr(text, "layer_types", None)
    specs: dict[str, KVSpec] = {}
    for index, layer in enumerate(built):
        if type(layer).__name__ == "DummyLayer":
            continue
        if type(layer) is cache_utils.DynamicLayer:
            specs[str(index)] = FullSpec(block_size=block_size)
        elif type(layer) is cache_utils.DynamicSlidingWindowLayer:
            extent = int(layer.sliding_window)
            chunked = (
                kinds[index] == "chunked_attention"
                if kinds is not None
                else getattr(text, "sliding_window", None) is None
            )
            if chunked and chunks:
                specs[str(index)] = ChunkedSpec(extent, block_size=block_size)
            else:
                specs[str(index)] = SlidingSpec(extent, block_size=block_size)
        else:
            raise ValueError(
                f"every layer must keep keys and values only, got {type(layer).__name__} "
                f"for layer {index}"
            )
    if not specs:
        # An older config without layer types: the cache grows a layer at a time.
        full = FullSpec(block_size=block_size)
        specs = {str(index): full for index in range(text.num_hidden_layers)}
    return specs


@dataclass(frozen=True)
class _Place:
    """Where a layer's pages are: its geometry (block size, heads, head dims) and number there."""

    geometry: tuple[int, ...]
    number: int


class KVLayout:
    """Groups of layers with equal specs and about as many layers each.

    layers: name -> spec, in the order they run. max_tokens: the longest request; windows and
    chunks of at least that are full attention.

    specs: one per group, what `HybridManager` takes. group_of: layer -> group.
    """

    def __init__(self, layers: Mapping[str, KVSpec], max_tokens: int) -> None:
        if not layers:
            raise ValueError("layers must name at least one layer, got none")
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be positive, got {max_tokens}")
        whole = group_layers(dict(layers), max_tokens)
        sizes = sorted({len(group.layers) for group in whole}, reverse=True)
        candidates = [_split(whole, size) for size in sizes]
        candidates = [c for c in candidates if len(c) <= MAX_GROUPS] or candidates[:1]
        self.groups = min(candidates, key=lambda groups: _request_bytes(groups, max_tokens))
        self.max_tokens = max_tokens
        self.specs = [group.spec for group in self.groups]
        self.group_of: dict[str, int] = {}
        self._places: dict[str, _Place] = {}
        for number, group in enumerate(self.groups):
            for index, name in enumerate(group.layers):
                self.group_of[name] = number
                self._places[name] = _Place(_geometry(group.spec), index)

    @property
    def block_bytes(self) -> int:
        """Bytes one block takes over all page tensors."""
        return _block_bytes(self.groups)

    def spec(self, layer: str) -> KVSpec:
        return self.specs[self.group_of[layer]]

    def place(self, layer: str) -> _Place:
        return self._places[layer]

    def request_blocks(self, num_tokens: int, in_flight: int) -> int:
        """Blocks one request of `num_tokens` holds at most."""
        return sum(spec.admission_blocks(num_tokens, in_flight) for spec in self.specs)


def _geometry(spec: KVSpec) -> tuple[int, ...]:
    v_head_dim = spec.head_dim if spec.v_head_dim is None else spec.v_head_dim
    return (spec.block_size, spec.num_kv_heads, spec.head_dim, v_head_dim)


def _split(groups: list[KVGroup], size: int) -> list[KVGroup]:
    """Groups of at most `size` layers."""
    return [
        replace(group, layers=group.layers[i : i + size])
        for group in groups
        for i in range(0, len(group.layers), size)
    ]


def _block_bytes(groups: list[KVGroup]) -> int:
    pages: dict[tuple[int, ...], tuple[int, int]] = {}
    for group in groups:
        key = _geometry(group.spec)
        count = max(len(group.layers), pages.get(key, (0, 0))[0])
        pages[key] = (count, group.spec.page_bytes)
    return sum(count * page_bytes for count, page_bytes in pages.values())


def _request_bytes(groups: list[KVGroup], max_tokens: int) -> int:
    blocks = sum(group.spec.admission_blocks(max_tokens, 1) for group in groups)
    return blocks * _block_bytes(groups)


class Pages:
    """The page tensors of all layers, made one layer at a time; their addresses never change.

    num_blocks: blocks the manager hands out; row 0 of every tensor is the null block.
    """

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._made: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        self._of: dict[str, tuple[Tensor, Tensor]] = {}

    def __getitem__(self, layer: str) -> tuple[Tensor, Tensor]:
        """(k_pages [blocks, B, H, D], v_pages [blocks, B, H, Dv]) of a layer."""
        return self._of[layer]

    def __contains__(self, layer: str) -> bool:
        return layer in self._of

    def make(
        self, layer: str, heads: int, dim: int, v_dim: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """The pages of a layer, made now or shared with the layer in its place of another group."""
        if layer in self._of:
            return self._of[layer]
        place, block_size = self.layout.place(layer), self.layout.spec(layer).block_size
        key = (place.number, block_size, heads, dim, v_dim, dtype, device)
        if key not in self._made:
            shape = (self.num_blocks + 1, block_size, heads)
            # Normal tensors, even if the first call happens in inference mode.
            with torch.inference_mode(False):
                self._made[key] = (
                    torch.zeros(*shape, dim, dtype=dtype, device=device),
                    torch.zeros(*shape, v_dim, dtype=dtype, device=device),
                )
            if not torch.compiler.is_compiling():
                for pages in self._made[key]:
                    torch._dynamo.mark_static_address(pages)
        self._of[layer] = self._made[key]
        return self._of[layer]

    def copy_blocks(self, group: int, source: list[int], target: list[int]) -> None:
        """Copy blocks of a group's layers."""
        for name in self.layout.groups[group].layers:
            for pages in self._of.get(name, ()):
                pages[target] = pages[source]

    @property
    def num_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for pair in self._made.values() for p in pair)


def with_geometry(spec: KVSpec, heads: int, dim: int, v_dim: int, itemsize: int) -> KVSpec:
    """The spec with a layer's real shape."""
    return replace(spec, num_kv_heads=heads, head_dim=dim, v_head_dim=v_dim, itemsize=itemsize)


def cross_specs(config: Any, encoder_tokens: int, block_size: int = 16) -> dict[str, KVSpec]:
    """A spec for the cross-attention of every decoder layer."""
    count = decoder_config(config).num_hidden_layers
    spec = CrossSpec(encoder_tokens, block_size=block_size)
    return {cross_name(index): spec for index in range(count)}
