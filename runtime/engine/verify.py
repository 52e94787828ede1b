"""Whether a model computes the same flattened over pages as it does by itself.

Two checks, on random tokens, before the engine takes a request:

- scores: two prompts of unequal length, one of them in two pieces beside the other's decoding,
  against the model's own forward on each prompt alone;
- masks: the window or chunk each layer's spec names, against the mask function the model asks
  transformers for, at the positions where the two could differ.

Windows are longer than what the first check runs, so the second is needed too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvtailor.runtime.engine.batch import make_batch
from kvtailor.runtime.engine.dispatch import try_attention
from kvtailor.runtime.engine.model import ServedModel, nothing_attended, refusal
from kvtailor.runtime.engine.step import PagedStep
from kvtailor.runtime.kv.hybrid import HybridManager
from kvtailor.runtime.kv.spec import CrossSpec, KVSpec

__all__ = ["learn_reads", "verify_step"]

# Largest |paged - own| over the largest |own|.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
HALF_TOLERANCE = 0.2

OVER_PAGES = (
    "run on tokens of several sequences in a row, each at a position it is given, with no mask and "
    "no count of its own over the keys"
)


def verify_step(step: PagedStep, served: ServedModel, layers: dict[str, KVSpec]) -> None:
    """Raise ValueError where the step is not what the model computes."""
    _check_scores(step, served)
    _check_masks(step, served, layers)


def learn_reads(step: PagedStep, served: ServedModel) -> None:
    """Without checks, two tokens still show which attention reads which layer."""
    kv = HybridManager(step.layout.specs, step.pages.num_blocks)
    states = served.sample_encoder() if served.encodes else None
    length = 0 if states is None else states.shape[1]
    kv.allocate(0, (), encoder_tokens=length)
    kv.append(0, 2)
    step.set(make_batch(kv, [(0, [0, 0], 0, 2)], [states], [length]))
    _run(step, served, range(1))


def _run(step: PagedStep, served: ServedModel, rows: range) -> Tensor:
    try:
        return step.run(rows, compiled=False)
    except Exception as failure:
        raise refusal(served.raw, failure, OVER_PAGES) from failure


def _own_scores(served: ServedModel, tokens: list[int], states: Tensor | None) -> Tensor:
    """The model's own logits [T, vocab] of a sequence, without a cache."""
    ids = torch.tensor([tokens], device=served.raw.device)
    arguments: dict[str, Any] = {"use_cache": False}
    if states is None:
        arguments["input_ids"] = ids
    else:
        # Without it, some hide a padding token among the ids, which they do not in generate.
        every = torch.ones_like(ids)
        arguments |= {"decoder_input_ids": ids, "decoder_attention_mask": every}
        arguments["encoder_outputs"] = served.encoded(states)
    with torch.no_grad():
        return served.raw.forward(**arguments).logits[0]


def _check_scores(step: PagedStep, served: ServedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(served.vocab, (n,), generator=generator).tolist() for n in (5, 4))
    states: list[Tensor | None] = [
        served.sample_encoder() if served.encodes else None for _ in range(2)
    ]
    own_a, own_b = (_own_scores(served, t, s) for t, s in zip((a, b), states))

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
        got.append(_run(step, served, rows))
        want += [own[start:stop] for own, (_, _, start, stop) in zip((own_a, own_b), parts)]
        for name, tokens, start, stop in parts:
            kv.settle(name, tokens[start:stop])
    actual, expected = torch.cat(got).float(), torch.cat(want).float()
    error = float((actual - expected).abs().max() / expected.abs().max())
    limit = TOLERANCE.get(served.raw.dtype, HALF_TOLERANCE)
    if not error <= limit:
        raise ValueError(
            f"the model must compute the same over pages as by itself, within {limit:g} of its "
            f"largest score, got {error:.3g} for {served.name}"
        )


def _check_masks(step: PagedStep, served: ServedModel, layers: dict[str, KVSpec]) -> None:
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

    states = served.sample_encoder() if served.encodes else None
    try_attention(_own_scores, attention, mask, served=served, tokens=[0, 1], states=states)
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
