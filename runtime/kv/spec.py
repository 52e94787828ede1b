"""What each attention layer keeps in the KV cache, and what that costs.

A spec describes one layer: how many keys a query may look back on, and how large a page of
`block_size` tokens is. Layers with equal specs form a group and share one block table per
request; `plan_kv` groups a model's layers and says what a memory budget buys:

    layers = {f"layers.{i}": SlidingSpec(512, num_kv_heads=1, head_dim=256) for i in range(5)}
    layers["layers.5"] = FullSpec(num_kv_heads=1, head_dim=256)
    print(plan_kv(layers, memory=1 << 30, max_tokens=8192, in_flight=512))

Letters: n computed tokens (so n is also the position of the next query), B block size in
tokens, W window, C chunk. Pure Python; importing this needs neither torch nor numpy.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

__all__ = [
    "ChunkedSpec",
    "CrossSpec",
    "FullSpec",
    "KVGroup",
    "KVPlan",
    "KVSpec",
    "SharedSpec",
    "SlidingSpec",
    "group_layers",
    "plan_kv",
]


def _require_positive(spec: object, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """What every spec has: the geometry of one layer's page.

    block_size: tokens per block. num_kv_heads, head_dim: of one layer. v_head_dim: of the
    values where it differs from the keys'. itemsize: bytes per number (2 for bf16).
    """

    block_size: int = 16
    num_kv_heads: int = 1
    head_dim: int = 64
    v_head_dim: int | None = None
    itemsize: int = 2

    kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        _require_positive(self, "block_size", "num_kv_heads", "head_dim", "itemsize")
        if self.v_head_dim is not None:
            _require_positive(self, "v_head_dim")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value in one layer."""
        v_head_dim = self.head_dim if self.v_head_dim is None else self.v_head_dim
        return self.num_kv_heads * (self.head_dim + v_head_dim) * self.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer: B tokens of keys and values."""
        return self.block_size * self.token_bytes

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill: ceil(num_tokens / B)."""
        return -(-num_tokens // self.block_size)

    def last_page_len(self, num_tokens: int) -> int:
        """Tokens in the last of those blocks: 1 to B, or 0 when there is none."""
        return num_tokens - max(0, self.num_blocks(num_tokens) - 1) * self.block_size

    def skipped(self, n: int) -> int:
        """How many leading tokens no query at position >= n can see."""
        return 0

    def computed_to_skip(self, num_tokens: int) -> int:
        """The least n with skipped(n) >= num_tokens > 0; sys.maxsize when there is none."""
        return sys.maxsize

    def visible(self, position: int) -> range:
        """The key positions that the query at `position` sees, itself included."""
        return range(self.skipped(position), position + 1)

    def free_hit(self, limit: int, align: int) -> int:
        """The longest multiple of `align` up to `limit` after which no earlier key is read."""
        return 0

    def admission_blocks(self, num_tokens: int, in_flight: int) -> int:
        """The most blocks one request of `num_tokens` tokens ever holds.

        in_flight: tokens scheduled but not settled, at most. Both the sizing of the pool and
        the gate at run time use this, so that what was sized for can also be admitted.
        """
        return self.num_blocks(num_tokens)

    def max_bytes(self, num_tokens: int, in_flight: int) -> int:
        """Bytes that one layer of one request takes at most."""
        return self.admission_blocks(num_tokens, in_flight) * self.page_bytes

    def __str__(self) -> str:
        return self.kind


@dataclass(frozen=True)
class FullSpec(KVSpec):
    """A causal layer that sees every earlier token.

    >>> FullSpec(num_kv_heads=8, head_dim=128).page_bytes
    65536
    """

    kind: ClassVar[str] = "full"


@dataclass(frozen=True)
class SlidingSpec(KVSpec):
    """A layer whose query at p sees the keys p-W+1 .. p (W in all, itself included).

    >>> list(SlidingSpec(4).visible(9))
    [6, 7, 8, 9]
    """

    window: int

    kind: ClassVar[str] = "sliding"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(self, "window")

    def skipped(self, n: int) -> int:
        return max(0, n - self.window + 1)

    def computed_to_skip(self, num_tokens: int) -> int:
        return num_tokens + self.window - 1

    def free_hit(self, limit: int, align: int) -> int:
        return limit - limit % align if self.window == 1 else 0

    def admission_blocks(self, num_tokens: int, in_flight: int) -> int:
        # One more than the tokens fill: a window starts anywhere in its first block. Short
        # requests start at block 0, so they never need it.
        spanned = self.num_blocks(min(self.window - 1 + in_flight, num_tokens)) + 1
        return min(spanned, self.num_blocks(num_tokens))

    def __str__(self) -> str:
        return f"sliding {self.window}"


@dataclass(frozen=True)
class ChunkedSpec(KVSpec):
    """A layer whose query at p sees the keys of its own chunk up to p. C may be any multiple.

    >>> [len(ChunkedSpec(4).visible(p)) for p in range(6)]
    [1, 2, 3, 4, 1, 2]
    """

    chunk: int

    kind: ClassVar[str] = "chunked"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(self, "chunk")

    def skipped(self, n: int) -> int:
        return n - n % self.chunk

    def computed_to_skip(self, num_tokens: int) -> int:
        return -(-num_tokens // self.chunk) * self.chunk

    def free_hit(self, limit: int, align: int) -> int:
        # At the start of a chunk nothing earlier is visible.
        return limit - limit % math.lcm(self.chunk, align)

    def admission_blocks(self, num_tokens: int, in_flight: int) -> int:
        spanned = self.num_blocks(min(self.chunk + in_flight, num_tokens))
        # A chunk that is no multiple of the block may start inside a block.
        if self.chunk % self.block_size:
            spanned += 1
        return min(spanned, self.num_blocks(num_tokens))

    def __str__(self) -> str:
        return f"chunked {self.chunk}"


@dataclass(frozen=True)
class CrossSpec(KVSpec):
    """A cross-attention layer: keys of at most `encoder_tokens` encoder states, stored once."""

    encoder_tokens: int

    kind: ClassVar[str] = "cross"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(self, "encoder_tokens")

    def admission_blocks(self, num_tokens: int, in_flight: int) -> int:
        return self.num_blocks(self.encoder_tokens)

    def visible(self, position: int) -> range:
        return range(self.encoder_tokens)

    def __str__(self) -> str:
        return f"cross {self.encoder_tokens}"


@dataclass(frozen=True)
class SharedSpec:
    """A layer that owns no keys: it reads the blocks of the earlier layer `owner`.

    spec: what this layer would keep if it owned keys. Where given, it must equal the owner's.
    """

    owner: str
    spec: KVSpec | None = None


@dataclass(frozen=True)
class KVGroup:
    """Layers that share a block table: `layers` own pages, `sharers` read an owner's."""

    spec: KVSpec
    layers: tuple[str, ...]
    sharers: tuple[str, ...] = ()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: a page for every owning layer."""
        return len(self.layers) * self.spec.page_bytes


def _normalised(spec: KVSpec, max_tokens: int | None) -> KVSpec:
    """A window or chunk that covers the longest request is full attention."""
    if max_tokens is None:
        return spec
    covers_all = (isinstance(spec, SlidingSpec) and spec.window >= max_tokens) or (
        isinstance(spec, ChunkedSpec) and spec.chunk >= max_tokens
    )
    return _as_full(spec) if covers_all else spec


def _as_full(spec: KVSpec) -> KVSpec:
    return FullSpec(**{f.name: getattr(spec, f.name) for f in fields(KVSpec)})


def group_layers(
    layers: Mapping[str, KVSpec | SharedSpec], max_tokens: int | None = None
) -> list[KVGroup]:
    """Equal specs form a group; a sharing layer joins its owner's group.

    layers: name -> spec, in the order they run. max_tokens: the longest request; windows and
    chunks of at least that join full attention. Raises ValueError, naming the layer, when a
    layer shares with a later layer, with another kind, or with nobody.
    """
    own: dict[KVSpec, list[str]] = {}
    sharers: dict[KVSpec, list[str]] = {}
    spec_of: dict[str, KVSpec] = {}
    for name, layer in layers.items():
        if isinstance(layer, KVSpec):
            spec = spec_of[name] = _normalised(layer, max_tokens)
            own.setdefault(spec, []).append(name)
            continue
        if layer.owner not in layers:
            raise ValueError(
                f"a sharing layer must name a layer that exists, "
                f"got {name!r} sharing with {layer.owner!r}"
            )
        if layer.owner not in spec_of:
            raise ValueError(
                f"a sharing layer must name an earlier layer, "
                f"got {name!r} sharing with {layer.owner!r}"
            )
        spec = spec_of[name] = spec_of[layer.owner]
        if layer.spec is not None and _normalised(layer.spec, max_tokens) != spec:
            raise ValueError(
                f"a sharing layer must be of its owner's kind, got {name!r} "
                f"({layer.spec!r}) sharing with {layer.owner!r} ({spec!r})"
            )
        sharers.setdefault(spec, []).append(name)
    return [KVGroup(spec, tuple(own[spec]), tuple(sharers.get(spec, ()))) for spec in own]


# Prefix hits end where blocks of all groups do: at multiples of this many tokens at most.
_MAX_ALIGN = 1024


def _balanced(groups: Sequence[KVGroup], num_tokens: int) -> list[KVGroup]:
    """Give groups with fewer layers more tokens per block, so that blocks are about equal.

    One pool has blocks of one size; what a smaller block leaves over is lost. That size is the
    largest block's, or a little more where another group's fill it better: whichever makes a
    request of `num_tokens` smallest.
    """
    sizes = [group.block_bytes for group in groups]
    largest = max(sizes)
    candidates = [list(groups)]
    for target in sorted({largest, *(-(-largest // size) * size for size in sizes)}):
        candidate = [
            replace(group, spec=replace(group.spec, block_size=group.spec.block_size * factor))
            for group, factor in ((group, target // group.block_bytes) for group in groups)
        ]
        own = [g.spec.block_size for g in candidate if not isinstance(g.spec, CrossSpec)]
        if math.lcm(*own) <= _MAX_ALIGN:
            candidates.append(candidate)
    return min(candidates, key=lambda candidate: _request_bytes(candidate, num_tokens, 1))


def _request_bytes(groups: Sequence[KVGroup], num_tokens: int, in_flight: int) -> int:
    blocks = sum(group.spec.admission_blocks(num_tokens, in_flight) for group in groups)
    return blocks * max(group.block_bytes for group in groups)


@dataclass(frozen=True)
class KVPlan:
    """What a memory budget buys. Made by `plan_kv`; `print(plan)` shows it as a table.

    groups: in the order of their first layer; their index is the group number of the manager.
    num_blocks: blocks to hand out; the pool has one more, the null block. block_bytes: bytes
    of a block, the same for all groups.
    """

    groups: tuple[KVGroup, ...]
    memory: int
    num_blocks: int
    block_bytes: int
    max_tokens: int
    in_flight: int

    @property
    def specs(self) -> list[KVSpec]:
        """One spec per group: what `HybridManager` takes."""
        return [group.spec for group in self.groups]

    def group_of(self, layer: str) -> int:
        """The group whose block table `layer` reads."""
        for index, group in enumerate(self.groups):
            if layer in group.layers or layer in group.sharers:
                return index
        raise ValueError(f"layer must be one of the planned layers, got {layer!r}")

    def request_blocks(self, num_tokens: int, in_flight: int = 1) -> int:
        """Blocks of all groups that one request of `num_tokens` holds at most."""
        return sum(group.spec.admission_blocks(num_tokens, in_flight) for group in self.groups)

    def request_bytes(self, num_tokens: int, in_flight: int = 1) -> int:
        """The same in bytes; in_flight=1 is a request that decodes."""
        return self.request_blocks(num_tokens, in_flight) * self.block_bytes

    def full_pool_bytes(self, num_tokens: int) -> int:
        """What it takes where every layer, the sharing ones too, keeps every token."""
        total = 0
        for group in self.groups:
            spec = group.spec
            stored = spec.encoder_tokens if isinstance(spec, CrossSpec) else num_tokens
            total += (len(group.layers) + len(group.sharers)) * spec.token_bytes * stored
        return total

    @property
    def max_requests(self) -> int:
        """Requests of `max_tokens` tokens that fit at the same time."""
        return self.num_blocks // self.request_blocks(self.max_tokens, self.in_flight)

    def __str__(self) -> str:
        head = ("group", "kind", "layers", "sharing", "block", "page", "padding", "per request")
        rows = [
            (
                str(index),
                str(group.spec),
                str(len(group.layers)),
                str(len(group.sharers)),
                f"{group.spec.block_size} tokens",
                _human(group.spec.page_bytes),
                f"{1 - group.block_bytes / self.block_bytes:.1%}",
                f"{group.spec.admission_blocks(self.max_tokens, 1)} blocks",
            )
            for index, group in enumerate(self.groups)
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows)]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in (head, *rows)
        ]
        used = self.request_bytes(self.max_tokens)
        full = self.full_pool_bytes(self.max_tokens)
        return "\n".join(
            [
                f"{_human(self.memory)} buys {self.num_blocks:,} blocks of "
                f"{_human(self.block_bytes)}, and the null block",
                *lines,
                f"one request of {self.max_tokens:,} tokens: {_human(used)} while it decodes "
                f"({_human(self.request_bytes(self.max_tokens, self.in_flight))} with "
                f"{self.in_flight:,} tokens in flight)",
                f"every layer keeping every token: {_human(full)}, {full / used:.2f} times that",
                f"requests of that length at once: {self.max_requests:,}",
            ]
        )


def plan_kv(
    layers: Mapping[str, KVSpec | SharedSpec],
    *,
    memory: int,
    max_tokens: int,
    in_flight: int | None = None,
    balance: bool = True,
    hybrid: bool = True,
) -> KVPlan:
    """Group a model's layers and say how many blocks `memory` bytes buy.

    layers: name -> spec in the order they run. max_tokens: the longest request. in_flight: the
    most tokens of one request in unsettled steps (default: its whole prompt). balance: let
    groups with fewer layers have larger blocks, so that less is lost to padding; without it
    every spec keeps its block size. hybrid=False treats every self-attention layer as full
    attention: what a pool without local layers takes, and still right for them.

    Raises ValueError when the memory doesn't hold one request of `max_tokens`.
    """
    for name, value in (("memory", memory), ("max_tokens", max_tokens)):
        if value < 1:
            raise ValueError(f"{name} must be positive, got {value}")
    in_flight = max_tokens if in_flight is None else in_flight
    if in_flight < 1:
        raise ValueError(f"in_flight must be positive, got {in_flight}")
    if not layers:
        raise ValueError("layers must name at least one layer, got none")
    groups = group_layers(layers, max_tokens)
    if not hybrid:
        # Grouped a second time, so that errors of sharing speak of the specs as given.
        groups = group_layers({k: _unwindowed(v) for k, v in layers.items()}, max_tokens)
    if balance:
        groups = _balanced(groups, max_tokens)
    block_bytes = max(group.block_bytes for group in groups)
    plan = KVPlan(
        groups=tuple(groups),
        memory=memory,
        num_blocks=memory // block_bytes - 1,
        block_bytes=block_bytes,
        max_tokens=max_tokens,
        in_flight=in_flight,
    )
    needed = plan.request_blocks(max_tokens, in_flight)
    if plan.num_blocks < needed:
        raise ValueError(
            f"memory must hold one request of {max_tokens:,} tokens with {in_flight:,} in flight: "
            f"{(needed + 1) * block_bytes:,} bytes, got {memory:,}"
        )
    return plan


def _unwindowed(layer: KVSpec | SharedSpec) -> KVSpec | SharedSpec:
    if isinstance(layer, SharedSpec):
        return replace(layer, spec=None)
    return layer if isinstance(layer, CrossSpec) else _as_full(layer)


def _human(num_bytes: float) -> str:
    power = min(3, int(math.log2(max(1, num_bytes)) // 10))
    unit = ("B", "KiB", "MiB", "GiB")[power]
    return f"{num_bytes / 1024**power:.{2 if power else 0}f} {unit}"
