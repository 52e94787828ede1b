"""Which layers of a model keep keys, in which groups, and where their pages lie.

    layers = layer_specs(model.config)                # one spec per layer that owns keys
    layout = KVLayout(layers, max_tokens=4096)
    kv = HybridManager(layout.specs, num_blocks=1024)
    pages = Pages(layout, num_blocks=1024)
    k_pages, v_pages = pages["3"]                     # of layer 3, after pages.make("3", ...)

Layers with equal specs form a group, and every group has its block table. A block is one number
for all groups, so layers at the same place of different groups share a page tensor: they never
own the same block. Large groups are split, so that all have about as many layers and little of a
block lies idle.

Letters: B block size in tokens, H key heads, D head dim of k, Dv head dim of v.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from kvtailor.runtime.kv.spec import ChunkedSpec, CrossSpec, FullSpec, KVSpec, SlidingSpec

__all__ = [
    "KVLayout",
    "Pages",
    "cross_name",
    "cross_specs",
    "decoder_config",
    "layer_specs",
    "with_geometry",
]

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
                    text = _with_layers(text, count)
                break
    return text


def _with_layers(config: Any, count: int) -> Any:
    """A copy that names `count` layers, also where the field is another's name, or a property."""
    kind, made = type(config), copy.copy(config)
    names = {k: v for k, v in kind.attribute_map.items() if k != "num_hidden_layers"}
    fields = {"num_hidden_layers": count, "attribute_map": names}
    made.__class__ = type(kind.__name__, (kind,), fields)
    return made


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
    except AttributeError:
        raise ValueError(
            f"a config must say which layers it has, got {type(text).__name__} that does not"
        ) from None
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
            what = type(layer).__name__
            if "LinearAttention" in what:
                what = "one that keeps a state instead of keys"
            raise ValueError(
                f"every layer must keep keys and values only, got {what} for layer {index}"
            )
    if not specs:
        # An older config without layer types: the cache grows a layer at a time.
        full = FullSpec(block_size=block_size)
        specs = {str(index): full for index in range(text.num_hidden_layers)}
    return specs


def cross_specs(config: Any, encoder_tokens: int, block_size: int = 16) -> dict[str, KVSpec]:
    """A spec for the cross-attention of every decoder layer."""
    count = decoder_config(config).num_hidden_layers
    spec = CrossSpec(encoder_tokens, block_size=block_size)
    return {cross_name(index): spec for index in range(count)}


def with_geometry(spec: KVSpec, heads: int, dim: int, v_dim: int, itemsize: int) -> KVSpec:
    """The spec with a layer's real shape."""
    return replace(spec, num_kv_heads=heads, head_dim=dim, v_head_dim=v_dim, itemsize=itemsize)


@dataclass(frozen=True)
class _Group:
    """Layers that share a block table."""

    spec: KVSpec
    layers: tuple[str, ...]


class KVLayout:
    """Groups of layers with equal specs and about as many layers each.

    layers: name -> spec, of all layers that own keys, in the order they run. max_tokens: the
    longest request; windows and chunks of at least that are full attention.

    specs: one per group, what `HybridManager` takes. groups: their layers. group_of: layer ->
    group. block_bytes: what one block takes over all page tensors.

    >>> layers = {str(i): FullSpec() if i % 3 == 2 else SlidingSpec(512) for i in range(6)}
    >>> [str(spec) for spec in KVLayout(layers, max_tokens=8192).specs]
    ['sliding 512', 'sliding 512', 'full']
    """

    def __init__(self, layers: Mapping[str, KVSpec], max_tokens: int) -> None:
        if not layers:
            raise ValueError("layers must name at least one layer, got none")
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be positive, got {max_tokens}")
        sizes = sorted({spec.block_size for spec in layers.values()})
        if len(sizes) > 1:
            raise ValueError(f"layers must have one block size, got {sizes}")
        equal: dict[KVSpec, list[str]] = {}
        for name, spec in layers.items():
            equal.setdefault(_full_if_it_covers(spec, max_tokens), []).append(name)
        counts = sorted({len(names) for names in equal.values()}, reverse=True)
        candidates = [_split(equal, count) for count in counts]
        candidates = [c for c in candidates if len(c) <= MAX_GROUPS] or candidates[:1]
        self.max_tokens = max_tokens
        self.groups = min(candidates, key=lambda groups: _request_bytes(groups, max_tokens))
        self.specs = [group.spec for group in self.groups]
        self.group_of = {n: g for g, group in enumerate(self.groups) for n in group.layers}
        self.block_bytes = _block_bytes(self.groups)

    def spec(self, layer: str) -> KVSpec:
        return self.specs[self.group_of[layer]]

    def place(self, layer: str) -> int:
        """Its number in its group: layers at the same place of different groups share pages."""
        return self.groups[self.group_of[layer]].layers.index(layer)

    def request_blocks(self, num_tokens: int, in_flight: int) -> int:
        """Blocks one request of `num_tokens` holds at most."""
        return _request_blocks(self.groups, num_tokens, in_flight)


def _full_if_it_covers(spec: KVSpec, max_tokens: int) -> KVSpec:
    """A window or chunk that covers the longest request is full attention."""
    if (isinstance(spec, SlidingSpec) and spec.window >= max_tokens) or (
        isinstance(spec, ChunkedSpec) and spec.chunk >= max_tokens
    ):
        return FullSpec(**{f.name: getattr(spec, f.name) for f in fields(KVSpec)})
    return spec


def _split(equal: Mapping[KVSpec, list[str]], size: int) -> list[_Group]:
    """Groups of at most `size` layers."""
    return [
        _Group(spec, tuple(names[i : i + size]))
        for spec, names in equal.items()
        for i in range(0, len(names), size)
    ]


def _block_bytes(groups: list[_Group]) -> int:
    # Per shape, pages for as many layers as its largest group has.
    pages: dict[tuple[int, ...], int] = {}
    for group in groups:
        taken = len(group.layers) * group.spec.page_bytes
        pages[group.spec.shape] = max(taken, pages.get(group.spec.shape, 0))
    return sum(pages.values())


def _request_blocks(groups: list[_Group], num_tokens: int, in_flight: int) -> int:
    return sum(group.spec.admission_blocks(num_tokens, in_flight) for group in groups)


def _request_bytes(groups: list[_Group], num_tokens: int) -> int:
    return _request_blocks(groups, num_tokens, 1) * _block_bytes(groups)


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
        key = (self.layout.place(layer), heads, dim, v_dim, dtype, device)
        if key not in self._made:
            shape = (self.num_blocks + 1, self.layout.spec(layer).block_size, heads)
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
