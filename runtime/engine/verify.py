"""Whether a model computes the same flattened over pages as it does by itself.

Two checks, on random tokens, before the engine takes a request:

- scores: two prompts of unequal length, one of them in two pieces beside the other's decoding,
  against the model's own forward on each prompt alone;
- masks: the window or chunk each layer's spec names, against the mask function the model asks
  transformers for, at the positions where the two could differ.

Windows are longer than what the first check runs, so the second is needed too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

from kvtailor.runtime.engine.step import (
    PagedStep,
    forget_attention,
    make_batch,
    refusal,
    with_attention,
)
from kvtailor.runtime.kv.hybrid import HybridManager
from kvtailor.runtime.kv.spec import CrossSpec, KVSpec

__all__ = ["first_run", "verify_step"]

# Largest |paged - own| over the largest |own|.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
HALF_TOLERANCE = 0.2

OVER_PAGES = (
    "run on tokens of several sequences in a row, each at a position it is given, with no mask and "
    "no count of its own over the keys"
)

_numbers = itertools.count()


def verify_step(
    step: PagedStep, layers: dict[str, KVSpec], encode: Callable[[], Tensor] | None
) -> None:
    """Raise ValueError where the step is not what the model computes.

    encode: for a model with an encoder, its states [1, M, width] for some input; a new input at
    every call.
    """
    _check_scores(step, encode)
    _check_masks(step, layers, encode)


def _own_scores(step: PagedStep, tokens: list[int], states: Tensor | None) -> Tensor:
    """The model's own logits [T, vocab] of a sequence, without a cache."""
    ids = torch.tensor([tokens], device=step.device)
    arguments: dict[str, Any] = {"use_cache": False}
    if states is None:
        arguments["input_ids"] = ids
    else:
        encoded = step.encoder_output(last_hidden_state=states)
        # Without it, some hide a padding token among the ids, which they do not in generate.
        every = torch.ones_like(ids)
        arguments |= {"decoder_input_ids": ids, "decoder_attention_mask": every}
        arguments["encoder_outputs"] = encoded
    with torch.no_grad():
        return step.raw.forward(**arguments).logits[0]


def _check_scores(step: PagedStep, encode: Callable[[], Tensor] | None) -> None:
    vocab = step.raw.get_input_embeddings().num_embeddings
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(vocab, (n,), generator=generator).tolist() for n in (5, 4))
    states: list[Tensor | None] = [encode() if encode else None for _ in range(2)]
    own_a, own_b = (_own_scores(step, t, s) for t, s in zip((a, b), states))

    kv = HybridManager(step.layout.specs, step.pages.num_blocks)
    for name, state in enumerate(states):
        length = None if state is None else state.shape[1]
        kv.allocate(name, (), reuse=False, salt=name, encoder_tokens=length)
    got, want = [], []
    pieces = [[(0, a, 0, 3), (1, b, 0, 3)], [(0, a, 3, 5), (1, b, 3, 4)]]
    for number, parts in enumerate(pieces):
        for name, _, start, stop in parts:
            kv.append(name, stop - start)
        lens = [0 if state is None else state.shape[1] for state in states]
        new: list[Tensor | None] = [None, None]
        step.set(make_batch(kv, parts, new if number else states, lens))
        rows = range(sum(stop - start for _, _, start, stop in parts))
        try:
            got.append(step.run(rows, compiled=False))
        except Exception as failure:
            raise refusal(step.raw, failure, OVER_PAGES) from failure
        want += [own[start:stop] for own, (_, _, start, stop) in zip((own_a, own_b), parts)]
        for name, tokens, start, stop in parts:
            kv.settle(name, tokens[start:stop])
    actual, expected = torch.cat(got).float(), torch.cat(want).float()
    error = float((actual - expected).abs().max() / expected.abs().max())
    limit = TOLERANCE.get(step.raw.dtype, HALF_TOLERANCE)
    if not error <= limit:
        raise ValueError(
            f"the model must compute the same over pages as by itself, within {limit:g} of its "
            f"largest score, got {error:.3g} for {type(step.raw).__name__}"
        )


def _check_masks(
    step: PagedStep, layers: dict[str, KVSpec], encode: Callable[[], Tensor] | None
) -> None:
    """Compare the mask function of every layer's attention with its spec."""
    asked: dict[int, tuple[Tensor, Callable[..., Tensor]]] = {}
    seen: dict[torch.nn.Module, Callable[..., Tensor] | None] = {}

    def mask(*args: Any, q_length: int, kv_length: int, mask_function: Any, **kwargs: Any) -> Any:
        # Any tensor does: attention is only asked which one it was given, or a slice of it.
        made = torch.zeros(1, 1, q_length, kv_length, dtype=torch.bool, device=step.device)
        asked[made.untyped_storage().data_ptr()] = (made, mask_function)
        return made

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        mask = attention_mask
        given = None if mask is None else asked.get(mask.untyped_storage().data_ptr())
        seen[module] = None if given is None else given[1]
        return nothing_attended(query, value)

    name = f"kvtailor_masks_{next(_numbers)}"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    try:
        states = encode() if encode else None
        with_attention(name, _own_scores, step=step, tokens=[0, 1], states=states)
    finally:
        forget_attention(name)
    for module, reads in step.reads.items():
        spec, function = layers[reads.layer], seen.get(module)
        if isinstance(spec, CrossSpec):
            continue
        if function is None:
            raise ValueError(
                f"every layer must ask transformers for its mask, got none for {reads.layer}"
            )
        wrong = _first_difference(function, spec, step.device)
        if wrong is not None:
            raise ValueError(
                f"layer {reads.layer} must have the mask its config says, {spec}, got a mask "
                f"that differs for the query at {wrong[0]} and the key at {wrong[1]}"
            )


def nothing_attended(query: Tensor, value: Tensor) -> tuple[Tensor, None]:
    """What an attention function returns for query [B, H, T, D] and value, with zeros for it."""
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    return query.new_zeros(shape), None


def first_run(model: Any, arguments: dict[str, Any]) -> Any:
    """The cache a model returns for a token.

    Raises ValueError if there is none, or its attention is not left to transformers.
    """
    calls = []

    def attention(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        calls.append(module)
        return nothing_attended(query, value)

    name = f"kvtailor_first_{next(_numbers)}"
    AttentionInterface.register(name, attention)
    try:
        with torch.no_grad():
            out = with_attention(name, model.forward, **arguments)
    except Exception as failure:
        must = "leave attention and its masks to transformers' interfaces"
        raise refusal(model, failure, must) from failure
    finally:
        forget_attention(name)
    cache = getattr(out, "cache", None)
    if cache is None:
        cache = out.get("past_key_values")
    if not isinstance(cache, Cache):
        raise ValueError(
            "a model must return a cache of keys and values, "
            f"got {type(model).__name__}, which returns none"
        )
    if not calls:
        raise ValueError(
            "attention must go through transformers' AttentionInterface, "
            f"got {type(model).__name__}, which computes its own"
        )
    return cache


def _first_difference(
    function: Callable[..., Tensor], spec: KVSpec, device: torch.device
) -> tuple[int, int] | None:
    """A (query, key) that `function` and `spec` judge differently, near every edge of the spec."""
    extent = getattr(spec, "window", None) or getattr(spec, "chunk", None) or 64
    around = (-2, -1, 0, 1, 2)
    queries = sorted({max(0, n * extent + d) for n in (0, 1, 2, 3) for d in around})
    pairs = []
    for q in queries:
        edges = (0, q, q - extent, q - q % extent, q - q % extent - extent, q + extent, q // 2)
        keys = {k for edge in edges for d in around if (k := edge + d) >= 0}
        pairs += [(q, k) for k in sorted(keys)]
    both = torch.tensor(pairs, device=device)
    zero = torch.zeros_like(both[:, 0])
    allows = function(zero, zero, both[:, 0], both[:, 1])
    says = torch.as_tensor(allows, device=device).expand(len(pairs))
    for pair, allowed in zip(pairs, says.tolist()):
        if allowed != (pair[1] in spec.visible(pair[0])):
            return pair
    return None
