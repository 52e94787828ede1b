"""One step of many sequences through a stock transformers model, flattened to ``[1, N]`` tokens.

A model built on transformers' AttentionInterface is told to use an attention function of ours:
it stores nothing densely and squares nothing, since the cache hands it the pages themselves and
this step's tables say which rows are whose.

    step = PagedStep(served, layers, layout, num_blocks)
    step.set(batch)                     # which tokens, at which positions, in which blocks
    logits = step.run(rows)             # [len(rows), vocab]: of these rows of the batch only

Steps of one new token per sequence can be given sizes that all follow from the number of
sequences: what a CUDA graph holds, padded by repeating the last sequence.

Every fact the step relies on is checked before the first real token: `verify_step` compares its
scores with the model's own, and its windows with the masks the model asks for.

Letters: N packed tokens, S sequences, H heads, D head dim.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, EncoderDecoderCache

from kvtailor.kernels.ops import paged_attend, store_kv
from kvtailor.runtime.engine.batch import Batch
from kvtailor.runtime.engine.dispatch import forget_attention, register_attention, with_attention
from kvtailor.runtime.engine.model import ServedModel, Unfit
from kvtailor.runtime.kv.layout import KVLayout, Pages, cross_name
from kvtailor.runtime.kv.spec import ChunkedSpec, CrossSpec, KVSpec, SlidingSpec

__all__ = ["PagedStep"]

# Block tables grow by this many columns at a time, so that compiled steps see few widths.
TABLE_WIDTH = 4


def _extended(array: np.ndarray, more: bool, last: int = 0) -> np.ndarray:
    return np.append(array, np.asarray([last] * more, dtype=array.dtype))


def _width(spec: KVSpec, num_tokens: int) -> int:
    """Blocks in the table of a sequence of so many tokens."""
    if isinstance(spec, CrossSpec):
        num_tokens = spec.encoder_tokens
    return spec.num_blocks(num_tokens)


def _mark(tensor: Tensor, dims: Sequence[int] | None = None) -> Tensor:
    """Let a compiled step be one for all sizes of this tensor (along `dims`), but 1."""
    for dim, size in enumerate(tensor.shape):
        if size > 1 and (dims is None or dim in dims):
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return tensor


class Form(NamedTuple):
    """How a step meets what models do with a cache; all of them come to the same scores.

    counts: a model is told how far each row is from its number (it adds its own count), else 0: it
    goes by the positions it is given. gathers: a model is given this step's keys in a row, not the
    pages, and may work on each before it attends to them.
    """

    counts: bool = True
    gathers: bool = False


FORMS = (Form(), Form(counts=False), Form(gathers=True), Form(counts=False, gathers=True))


class _Reads(NamedTuple):
    """What an attention module reads: a layer's pages, by the table of its group."""

    layer: str
    group: int
    window: int | None
    chunk: int | None
    cross: bool


class _StepLayer(CacheLayerMixin):
    """Hands out the pages of one layer, after storing the step's keys and values in them."""

    is_sliding = False

    def __init__(self, step: PagedStep, name: str, reads: _Reads) -> None:
        self.step = step
        self.reads = reads
        self.group = reads.group
        super().__init__()
        self.keys, self.values = step.pages[name]
        self.is_initialized = True
        # Layers of several groups may have the same pages; this object is this layer's alone.
        self.ticket = self.keys.view(self.keys.shape)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The pages are there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys [1, H, N, D] and values [1, H, N, Dv]; returns the pages."""
        k_pages, v_pages = self.keys, self.values
        assert k_pages is not None and v_pages is not None
        slots = self.step.slots[self.group]
        store_kv(
            key_states[0].transpose(0, 1), value_states[0].transpose(0, 1), k_pages, v_pages, slots
        )
        if self.step.form.gathers:
            self.step.latest = self.reads
            return self._gathered(k_pages), self._gathered(v_pages)
        if self.step.learning:
            return self.ticket, v_pages
        return k_pages, v_pages

    def _gathered(self, pages: Tensor) -> Tensor:
        """[1, H, S * blocks * block_size, D]: the blocks of every sequence, one after the other."""
        blocks = self.step.table(self.group).flatten().long()
        return pages[blocks].flatten(0, 1).transpose(0, 1)[None]

    def get_seq_length(self) -> Any:
        """How far each row's position is from its row number, [N]; a model adds arange(N)."""
        return self.step.offsets

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


class PagedStep:
    """A model, its pages, and the tensors of the step that runs.

    layers: name -> spec as `layer_specs` gives them, with the layers' real shapes. num_blocks:
    blocks the manager hands out. graph_tokens: the longest sequence, to give steps of one new
    token per sequence their own form, for CUDA graphs; not done for models with a learned position
    bias, which would be computed for that many keys.
    """

    def __init__(
        self,
        served: ServedModel,
        layers: dict[str, KVSpec],
        layout: KVLayout,
        num_blocks: int,
        graph_tokens: int | None = None,
    ):
        self.served = served
        self.layout = layout
        self.block_size = layout.specs[0].block_size
        self.pages = Pages(layout, num_blocks)
        self.device: torch.device = served.raw.device
        # Attention module -> what it reads: learnt in the first run, which is not compiled.
        self.reads: dict[torch.nn.Module, _Reads] = {}
        self.learning = True
        self.form = FORMS[0]
        # What the layer reads that was updated last, until an attention is found to read it.
        self.latest: _Reads | None = None

        self.slots: dict[int, Tensor] = {}
        self.tables: dict[int, Tensor] = {}
        # Whether each sequence has one new token, in the form for graphs: no query_start, and
        # tables of the greatest width, which the compiler must not take for ones that vary.
        self.one_each = False
        self.wide_tables: dict[int, Tensor] = {}
        self.tokens = self.positions = torch.zeros(0, dtype=torch.int64)
        self.offsets: Any = 0
        self.query_start = self.seq_lens = torch.zeros(0, dtype=torch.int32)
        self.encoder_lens: Tensor | None = None
        self._encoder_states: Tensor | None = None
        # Learned position bias of the layers that share it, [N, H, K].
        self._bias: Tensor | None = None

        self._arguments = inspect.signature(served.raw.forward).parameters
        self._cache_argument = "cache" if "cache" in self._arguments else "past_key_values"
        self._biased = hasattr(served.text, "relative_attention_num_buckets")
        self._widths: dict[int, int] | None = None
        if graph_tokens is not None and not self._biased:
            self._widths = {g: _width(s, graph_tokens) for g, s in enumerate(layout.specs)}
        self._cache = self._make_cache(layers)
        if served.encodes:
            hidden = getattr(served.text, "hidden_size", None) or served.config.d_model
            self._no_states = torch.zeros(1, 1, hidden, dtype=served.raw.dtype, device=self.device)
        self.implementation = register_attention(_attention_of(self))
        weakref.finalize(self, forget_attention, self.implementation)

    def _make_cache(self, layers: dict[str, KVSpec]) -> Cache:
        """The cache the model is given, of the pages of every layer, which are made."""
        raw, own, cross = self.served.raw, [], []
        for name, spec in layers.items():
            self.pages.make(name, *spec.shape, raw.dtype, self.device)
        for index in range(self.served.text.num_hidden_layers):
            name = str(index)
            own.append(self._layer(name, layers[name]) if name in layers else DummyLayer())
            if self.served.encodes:
                cross.append(self._layer(cross_name(index), layers[cross_name(index)]))
        cache = Cache(layers=own)
        return EncoderDecoderCache(cache, Cache(layers=cross)) if cross else cache

    def _layer(self, name: str, spec: KVSpec) -> Any:
        window = spec.window if isinstance(spec, SlidingSpec) else None
        chunk = spec.chunk if isinstance(spec, ChunkedSpec) else None
        reads = _Reads(name, self.layout.group_of[name], window, chunk, isinstance(spec, CrossSpec))
        return _StepLayer(self, name, reads)

    def adapt(self, check: Callable[[], None]) -> None:
        """Take the first form in which `check` passes. Raises its ValueError if there is none."""
        counted = "position_ids" in self._arguments
        refusals = []
        for form in FORMS:
            if not (form.counts or counted) or (form.gathers and self.served.encodes):
                continue
            self.form, self.learning, self.reads, self.latest = form, True, {}, None
            try:
                check()
                self.learning = False
                return
            except ValueError as error:
                refusals.append(error)
        raise next((e for e in refusals if isinstance(e, Unfit)), refusals[0])

    def table(self, group: int) -> Tensor:
        """int32 [S, blocks]: the block table of a group in this step."""
        return (self.wide_tables if self.one_each else self.tables)[group]

    def set(self, batch: Batch) -> None:
        """Make `batch` the step that `run` runs.

        With more than one token, an empty sequence is added at the end: so there are always
        several, and not as many as tokens, and a compiled step is made for one token and once
        for all other sizes. Not in the form for graphs.
        """
        self.one_each = (
            self._widths is not None
            and batch.encoder_states is None
            and bool((np.diff(batch.query_start) == 1).all())
        )
        many = len(batch.tokens) > 1 and not self.one_each
        self.tokens = self._tensor(batch.tokens)[None]
        self.positions = self._tensor(batch.positions)[None]
        rows = torch.arange(len(batch.tokens), device=self.device)
        # Models with a learned position bias count from it; they get theirs from `_position_bias`.
        offsets = self.positions.new_zeros(()) if self._biased else self.positions[0] - rows
        self.offsets = _mark(offsets) if self.form.counts else 0
        self.query_start = self._tensor(_extended(batch.query_start, many, batch.query_start[-1]))
        self.seq_lens = self._tensor(_extended(batch.seq_lens, many))
        for group, slots in batch.slots.items():
            self.slots[group] = self._tensor(slots)
        for group, table in batch.tables.items():
            if self.one_each:
                assert self._widths is not None
                wide = np.zeros((table.shape[0], self._widths[group]), dtype=np.int32)
                wide[:, : table.shape[1]] = table
                self.wide_tables[group] = self._tensor(wide, dims=(0,))
                continue
            width = max(TABLE_WIDTH, -(-table.shape[1] // TABLE_WIDTH) * TABLE_WIDTH)
            wide = np.zeros((table.shape[0] + many, width), dtype=np.int32)
            wide[: table.shape[0], : table.shape[1]] = table
            self.tables[group] = self._tensor(wide)
        self._encoder_states = batch.encoder_states
        if self._encoder_states is not None:
            _mark(self._encoder_states)
        if batch.encoder_lens is not None:
            self.encoder_lens = self._tensor(_extended(batch.encoder_lens, many))
            for group, slots in (batch.encoder_slots or {}).items():
                self.slots[group] = self._tensor(slots)

    def _tensor(self, array: np.ndarray, dims: Sequence[int] | None = None) -> Tensor:
        return _mark(torch.from_numpy(array).to(self.device), dims)

    def run(self, rows: Sequence[int], *, narrow: bool = True, compiled: bool = True) -> Tensor:
        """Run the step; returns the logits [len(rows), vocab] of those rows.

        narrow=False lets the model compute all rows up to its logits, for when most are asked
        for. compiled=False calls the module under torch.compile.
        """
        kept = list(rows)
        if self.tokens.shape[1] > 1 and len(kept) == 1:
            kept *= 2
        keep = _mark(torch.tensor(kept, dtype=torch.int64, device=self.device))
        tokens, positions = _mark(self.tokens), _mark(self.positions)
        arguments: dict[str, Any] = {self._cache_argument: self._cache, "use_cache": True}
        if self.served.encodes:
            assert isinstance(self._cache, EncoderDecoderCache)
            states = self._encoder_states
            for index in range(len(self._cache)):
                self._cache.is_updated[index] = states is None
            encoded = self.served.encoded(self._no_states if states is None else states)
            arguments["encoder_outputs"] = encoded
            arguments["decoder_input_ids"] = tokens
            # Else BART makes one, of a length that isn't a number here. It comes to nothing.
            arguments["decoder_attention_mask"] = _mark(torch.ones_like(tokens))
            if "decoder_position_ids" in self._arguments:
                arguments["decoder_position_ids"] = positions
        else:
            arguments["input_ids"] = tokens
            if "position_ids" in self._arguments:
                arguments["position_ids"] = positions
        # One token each: all rows are kept, and a list of them would be one more size.
        narrow = narrow and not self.one_each and "logits_to_keep" in self._arguments
        if narrow:
            arguments["logits_to_keep"] = keep
        self._bias = None
        call = self.served.model if compiled else self.served.raw.forward
        with torch.no_grad():
            logits: Tensor = with_attention(self.implementation, call, **arguments).logits
        self._bias = None
        return (logits[0] if narrow else logits[0, keep])[: len(rows)]

    def _attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """query [1, Hq, N, D]; key and value are pages. Returns [1, N, Hq, Dv]."""
        if attention_mask is not None or query.shape[0] != 1:
            raise Unfit(
                "attention must leave masks to the pages and have one row of tokens, "
                f"got a mask or {query.shape[0]} rows"
            )
        if self.learning and module not in self.reads:
            self._learn(module, key)
        reads = self.reads[module]
        table = self.table(reads.group)
        if self.form.gathers:
            # What the model made of this step's keys is pages as well, and nobody else's.
            key, value = (
                x[0].transpose(0, 1).unflatten(0, (-1, self.block_size)).contiguous()
                for x in (key, value)
            )
            table = torch.arange(table.numel(), dtype=table.dtype, device=self.device)
            table = table.view_as(self.table(reads.group))
        elif self.learning:
            key = self.pages[reads.layer][0]
        if sliding_window is not None and sliding_window != reads.window:
            raise Unfit(
                f"layer {reads.layer} must have the window its config says, {reads.window}, "
                f"got {sliding_window}"
            )
        bias = None
        if position_bias is not None and not reads.cross:
            bias = self._position_bias(module)
        seq_lens = self.encoder_lens if reads.cross else self.seq_lens
        assert seq_lens is not None
        out = paged_attend(
            query[0].transpose(0, 1),
            key,
            value,
            table,
            None if self.one_each else self.query_start,
            seq_lens,
            bias,
            sinks=s_aux,
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            causal=not reads.cross,
            window=reads.window,
            chunk=reads.chunk,
            softcap=softcap,
        )
        return out[None], None

    def _learn(self, module: torch.nn.Module, key: Tensor) -> None:
        """Which layer's pages `module` reads: shared layers are given their owner's."""
        if self.form.gathers:
            reads, self.latest = self.latest, None
            if reads is not None and key.shape[2] == self.table(reads.group).numel() * (
                self.block_size
            ):
                self.reads[module] = reads
                return
        self_attention = self._cache
        cross: list[Any] = []
        if isinstance(self._cache, EncoderDecoderCache):
            self_attention = self._cache.self_attention_cache
            cross = list(self._cache.cross_attention_cache.layers)
        for layer in [*self_attention.layers, *cross]:
            if isinstance(layer, _StepLayer) and key is layer.ticket:
                self.reads[module] = layer.reads
                return
        raise Unfit(
            "attention must read what the cache returned for a layer, got other keys in "
            f"{type(module).__name__}"
        )

    def _position_bias(self, module: Any) -> Tensor | None:
        """T5's learned bias [N, H, K] for this step's positions; layers without one share it."""
        if getattr(module, "has_relative_attention_bias", False):
            keys = self.tables[self.reads[module].group].shape[1] * self.block_size
            count = self.positions.shape[1]
            offsets = (self.positions[0] - torch.arange(count, device=self.device))[:, None]
            bias = module.compute_bias(count, keys, device=self.device, past_seen_tokens=offsets)
            self._bias = bias[0].transpose(0, 1)
        return self._bias


def _attention_of(step: PagedStep) -> Any:
    """The attention function of a step, which it does not keep alive."""
    reference = weakref.ref(step)

    def attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        alive = reference()
        assert alive is not None
        return alive._attend(module, *args, **kwargs)

    return attention
