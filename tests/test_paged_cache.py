"""PagedCache against transformers' own DynamicCache: the same tokens, the same scores."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from models import EAGER_ONLY, ENCODER_DECODERS, build
from transformers import DynamicCache

from kvtailor.runtime.kv.layout import layer_specs
from kvtailor.runtime.kv.paged_cache import PagedCache, PagedEncoderDecoderCache

MODELS = (
    "llama",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "llama4_text",
    "gpt_oss",
    "qwen3",
    "phi3",
    "bart",
    "t5",
    "whisper",
)
DECODERS = tuple(name for name in MODELS if name not in ENCODER_DECODERS)


def make(name: str, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    return build(name, "eager" if name in EAGER_ONLY else "sdpa", **kwargs)


def paged(model: Any, batch: int = 2, **kwargs: Any) -> Any:
    kwargs = {"max_tokens": 96, "block_size": 4, **kwargs}
    if model.config.is_encoder_decoder:
        return PagedEncoderDecoderCache(model.config, batch_size=batch, encoder_tokens=64, **kwargs)
    return PagedCache(model.config, batch_size=batch, **kwargs)


def generate(model: Any, inputs: dict[str, Any], cache: Any = None, **kwargs: Any) -> torch.Tensor:
    inputs = {k: v for k, v in inputs.items() if not k.startswith("decoder_")}
    if cache is not None:
        kwargs["cache"] = cache
    kwargs = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None, **kwargs}
    if model.config.is_encoder_decoder:
        kwargs["decoder_start_token_id"] = 0
    with torch.no_grad():
        return model.generate(**inputs, pad_token_id=0, **kwargs)


@pytest.mark.parametrize("name", MODELS)
def test_generate_equals_dynamic_cache(name: str) -> None:
    model, inputs = make(name, tokens=21, padding=0 if name == "whisper" else 5)
    cache = paged(model)
    expected = generate(model, inputs)
    actual = generate(model, inputs, cache)
    assert torch.equal(actual, expected)
    addresses = {layer: cache.pages[layer][0].data_ptr() for layer in cache.pages.layout.group_of}
    # The same cache again, and for another batch size: nothing of the first run shows.
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.manager.stats.free_blocks == cache.manager.pool.num_blocks
    row = {k: v[1:] for k, v in inputs.items()}
    assert torch.equal(generate(model, row, cache), generate(model, row))
    assert addresses == {layer: cache.pages[layer][0].data_ptr() for layer in addresses}


@pytest.mark.parametrize("name", MODELS)
def test_beams_share_blocks_and_do_not_mix(name: str) -> None:
    # C06
    model, inputs = make(name, tokens=11)
    cache = paged(model, batch=6)
    expected = generate(model, inputs, num_beams=3, max_new_tokens=8)
    assert torch.equal(generate(model, inputs, cache, num_beams=3, max_new_tokens=8), expected)
    assert cache.manager.stats.copies > 0


@pytest.mark.parametrize("name", DECODERS)
def test_scores_of_every_step(name: str) -> None:
    # M02, M05, C03, C08, K02: prefill of several lengths, then pieces, against no cache at all.
    model, inputs = make(name, tokens=20, batch=2)
    ids = inputs["input_ids"]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        for pieces in ([9, 1, 1, 4, 5], [1, 3, 8, 8], [8, 8, 4], [20]):
            cache = paged(model)
            start = 0
            for piece in pieces:
                stop = start + piece
                actual = model(ids[:, start:stop], cache=cache).logits
                error = (actual - expected[:, start:stop]).abs().max() / expected.abs().max()
                assert error < 1e-5, (pieces, start)
                start = stop


@pytest.mark.parametrize("name", ["mistral", "gemma3n_text", "llama4_text"])
def test_local_layers_hold_their_window_only(name: str) -> None:
    model, _ = make(name)
    cache = paged(model, batch=1, max_tokens=128)
    ids = torch.randint(2, 64, (1, 100))
    layout = cache.pages.layout
    with torch.no_grad():
        for start in range(0, 100, 5):
            model(ids[:, start : start + 5], cache=cache)
            live = cache.manager.stats.live_blocks
            for spec, blocks in zip(layout.specs, live):
                # A step's own tokens settle with the next.
                assert blocks <= spec.admission_blocks(start + 5, 5)
    assert all(layer not in cache.pages for layer in ("9", "cross.0"))
    owners = set(layer_specs(model.config))
    assert set(layout.group_of) == owners
    if name == "gemma3n_text":
        assert owners == {"0", "1"} and len(cache.layers) == 4


def test_crop() -> None:
    # C04: 0 tokens, some, and more than there are; then go on as if they had never been.
    model, inputs = make("llama", tokens=9)
    ids = inputs["input_ids"]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        for crop in (0, -1, -4, -5, -50):
            cache = paged(model)
            model(torch.cat([ids[:, :5], ids[:, :3]], dim=1)[:, : 5 + min(-crop, 3)], cache=cache)
            length = cache.get_seq_length()
            cache.crop(crop)
            left = max(0, length + crop)
            assert cache.get_seq_length() == left
            assert cache.manager.stats.live_blocks == (2 * -(-left // 4),)
            keep = min(left, 5)
            cache.crop(keep - left)
            actual = model(ids[:, keep:], cache=cache).logits
            assert torch.allclose(actual, expected[:, keep:], atol=1e-5)
    with pytest.raises(ValueError, match="tokens_to_remove must be negative, or 0, got 3"):
        cache.crop(3)


def test_crop_past_a_window_is_refused_and_changes_nothing() -> None:
    # C05
    model, inputs = make("mistral", tokens=30)
    ids = inputs["input_ids"]
    cache = paged(model)
    with torch.no_grad():
        model(ids[:, :20], cache=cache)
        model(ids[:, 20:24], cache=cache)
        expected = model(ids[:, :25], use_cache=False).logits[:, -1:]
        with pytest.raises(ValueError, match="a rollback must stay in what every group still"):
            cache.crop(-12)
        actual = model(ids[:, 24:25], cache=cache).logits
    assert torch.allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("how", ["assistant", "prompt_lookup"])
def test_assisted_decoding(name: str, how: str) -> None:
    # C05: identical tokens, past the window too.
    model, inputs = make(name, tokens=12, batch=1)
    inputs = {"input_ids": torch.cat([inputs["input_ids"]] * 2, dim=1)}
    expected = generate(model, inputs)
    if how == "assistant":
        helper, _ = make(name, seed=1)
        helper.generation_config.num_assistant_tokens = 3
        extra: dict[str, Any] = {"assistant_model": helper}
    else:
        extra = {"prompt_lookup_num_tokens": 3}
    assert torch.equal(generate(model, inputs, paged(model, batch=1), **extra), expected)


def test_select_and_repeat() -> None:
    model, inputs = make("gemma3_text", tokens=14, batch=3)
    ids = inputs["input_ids"]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        cache = paged(model, batch=6)
        model(ids[:, :11], cache=cache)
        cache.batch_repeat_interleave(2)
        twice = ids.repeat_interleave(2, 0)
        actual = model(twice[:, 11:12], cache=cache).logits[:, 0]
        assert torch.allclose(actual, expected.repeat_interleave(2, 0)[:, 11], atol=1e-5)
        cache.batch_select_indices(torch.tensor([4, 0]))
        actual = model(twice[[4, 0], 12:13], cache=cache).logits[:, 0]
        assert torch.allclose(actual, expected[[2, 0], 12], atol=1e-5)
        keep = torch.tensor([False, True])
        cache.batch_select_indices(keep)
        actual = model(twice[:1, 13:14], cache=cache).logits[:, 0]
        assert torch.allclose(actual, expected[:1, 13], atol=1e-5)
    cache.reset()
    assert cache.manager.stats.free_blocks == cache.manager.pool.num_blocks


def test_reorder_copies_before_it_writes() -> None:
    # C06: [2, 0, 0]; beams 1 and 2 then go different ways.
    model, inputs = make("llama", tokens=10, batch=3)
    ids = inputs["input_ids"]
    cache = paged(model, batch=3)
    with torch.no_grad():
        model(ids[:, :6], cache=cache)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        table = cache.manager.block_tables(cache._store.rows)
        assert (table[1] == table[2]).all()
        assert cache.manager.pool.ref_count(int(table[1][1])) == 2
        rows = torch.cat([ids[[2, 0, 0], :6], torch.tensor([[3, 4], [5, 6], [7, 8]])], dim=1)
        expected = model(rows, use_cache=False).logits
        for at in (6, 7):
            actual = model(rows[:, at : at + 1], cache=cache).logits[:, 0]
            assert torch.allclose(actual, expected[:, at], atol=1e-5)


def test_recycled_blocks_do_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    # P09, P07: everything not written holds NaN; a window drops blocks, others take them.
    for name in DECODERS:
        model, inputs = make(name, tokens=21, padding=3)
        cache = paged(model)
        ids = inputs["input_ids"]
        with torch.no_grad():
            model(ids[:, :1], cache=cache)
            cache.reset()
            for layer in cache.pages.layout.group_of:
                for pages in cache.pages[layer]:
                    pages.fill_(float("nan"))
        assert torch.equal(generate(model, inputs, cache), generate(model, inputs)), name


def test_old_argument_name() -> None:
    model, inputs = make("llama", tokens=6)
    with torch.no_grad():
        expected = model(inputs["input_ids"], use_cache=False).logits
        actual = model(inputs["input_ids"], past_key_values=paged(model)).logits
    assert torch.allclose(actual, expected, atol=1e-5)


def test_padded_encoder_input() -> None:
    # X06, X03: the answer doesn't change with the padding, in any order of the rows.
    for name in ("bart", "t5"):
        model, inputs = make(name, tokens=11, padding=7)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        alone = generate(model, {"input_ids": ids[:1, :4]}, max_new_tokens=7)
        both = {"input_ids": ids, "attention_mask": mask}
        actual = generate(model, both, paged(model), max_new_tokens=7)
        assert torch.equal(actual[:1], alone)
        beams = generate(model, both, paged(model, batch=6), num_beams=3, max_new_tokens=7)
        assert torch.equal(beams, generate(model, both, num_beams=3, max_new_tokens=7))


def test_refusals_leave_the_cache_usable() -> None:
    model, inputs = make("llama", tokens=12)
    ids = inputs["input_ids"]
    cache = paged(model, num_blocks=7)
    with torch.no_grad():
        with pytest.raises(ValueError, match="the pool must hold 2 rows of 16 tokens, got 7"):
            model(torch.cat([ids, ids[:, :4]], dim=1), cache=cache)
        assert cache.manager.stats.free_blocks == 7 and cache.get_seq_length() == 0
        model(ids, cache=cache)
        with pytest.raises(ValueError, match="the pool must hold 2 rows of 13 tokens"):
            model(ids[:, :1], cache=cache)
        with pytest.raises(ValueError, match="the batch must stay 2 rows, got 1"):
            model(ids[:1, :1], cache=cache)
        with pytest.raises(ValueError, match="at most max_tokens=96 tokens, got 97"):
            model(ids.repeat(1, 8)[:, :85], cache=cache)
        assert cache.get_seq_length() == 12
    cache.reset()
    with pytest.raises(ValueError, match="without gradients"):
        model(ids, cache=cache)
    with pytest.raises(ValueError, match="needs PagedEncoderDecoderCache"):
        PagedCache(make("bart")[0].config, max_tokens=8)
    with pytest.raises(ValueError, match="must be of a model with an encoder"):
        PagedEncoderDecoderCache(model.config, max_tokens=8, encoder_tokens=8)


def test_random_use() -> None:
    """Any order of steps, crops and branches: scores as without a cache, and nothing leaked."""
    rng = random.Random(0)
    model, _ = make("gemma3_text")
    for seed in range(12):
        torch.manual_seed(seed)
        cache = paged(model, batch=4, block_size=rng.choice([1, 3, 4, 16]))
        rows = torch.randint(2, 64, (rng.randint(1, 3), 0))
        with torch.no_grad():
            for _ in range(9):
                move = rng.choice(["step", "step", "crop", "branch"]) if rows.shape[1] else "step"
                if move == "step":
                    new = torch.randint(2, 64, (rows.shape[0], rng.choice([1, 1, 2, 7])))
                    rows = torch.cat([rows, new], dim=1)
                    if rows.shape[1] > 60:
                        break
                    actual = model(new, cache=cache).logits
                    expected = model(rows, use_cache=False).logits[:, -new.shape[1] :]
                    error = (actual - expected).abs().max() / expected.abs().max()
                    assert error < 1e-5, (seed, move)
                elif move == "crop":
                    # What the latest step brought can always be taken back.
                    crop = rng.randint(0, new.shape[1])
                    cache.crop(-crop)
                    rows, new = rows[:, : rows.shape[1] - crop], new[:, :0]
                else:
                    parents = [rng.randrange(len(rows)) for _ in range(rng.randint(1, 4))]
                    cache.batch_select_indices(torch.tensor(parents))
                    rows, new = rows[parents], new[:, :0]
        cache.reset()
        assert cache.manager.stats.free_blocks == cache.manager.pool.num_blocks
        assert sum(cache.manager.stats.live_blocks) == 0


def test_dynamic_cache_is_the_reference() -> None:
    """The masks a model builds are those for what the layers return, key by key."""
    for name in DECODERS:
        model, _ = make(name)
        reference, cache = DynamicCache(config=model.config), paged(model)
        ids = torch.randint(2, 64, (2, 30))
        with torch.no_grad():
            for start, stop in ((0, 11), (11, 12), (12, 19), (19, 20)):
                for layer in range(len(cache.layers)):
                    if isinstance(cache.layers[layer], type(reference.layers[-1])):
                        continue
                    assert cache.get_mask_sizes(stop - start, layer) == reference.get_mask_sizes(
                        stop - start, layer
                    ), (name, layer)
                model(ids[:, start:stop], cache=cache)
                model(ids[:, start:stop], cache=reference)
