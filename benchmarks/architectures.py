"""What kvtailor does with one architecture of transformers, against eager: no figure, no timing.

    survey("llama")  ->  {"sites": 4, "error": 2e-7, "generate": "equal", ...}

Small models with random weights from `kvtailor.cli.models`; `docs/make_models.py` runs them all.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from kvtailor.backend import recording
from kvtailor.cli.drive import cache_argument, make_cache
from kvtailor.cli.inspection import FP32_BOUND, first_line, one_line
from kvtailor.cli.models import shrunk
from kvtailor.compiler.check import relative_error
from kvtailor.passes.report import GraphReport
from kvtailor.runtime.engine.engine import Engine

GROUPS: dict[str, str] = {
    "Decoders": """
        afmoe apertus arcee biogpt bitnet bloom codegen cohere cohere2 ctrl deepseek_v2 deepseek_v3
        diffllama doge dots1 ernie4_5 exaone4 falcon flex_olmo gemma gemma2 gemma3_text gemma3n_text
        gemma4_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite
        granitemoe helium hunyuan_v1_dense jetmoe llama llama4_text ministral mistral mixtral
        modernbert-decoder mpt nanochat nemotron olmo olmo2 olmo3 olmoe openai-gpt opt persimmon phi
        phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2 vaultgemma
        xglm xlnet""",
    "Hybrids and recurrent models": """
        bamba falcon_h1 falcon_mamba granitemoehybrid jamba lfm2 mamba mamba2 minimax nemotron_h
        olmo_hybrid qwen3_next recurrent_gemma rwkv zamba2""",
    "Encoders": """
        albert bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra
        ernie esm eurobert fnet funnel ibert layoutlm longformer luke megatron-bert mobilebert
        modernbert mpnet nomic_bert nystromformer rembert roberta roformer squeezebert
        xlm-roberta""",
    "Encoders with a decoder": """
        bart bigbird_pegasus blenderbot led longt5 m2m_100 marian mbart mt5 mvp nllb-moe pegasus
        pegasus_x plbart prophetnet switch_transformers t5 t5gemma umt5""",
    "Vision": """
        beit data2vec-vision deit dinov2 dinov3_vit dpt ijepa pvt segformer swin swinv2 vit vit_mae
        yolos""",
    "Vision and language": """
        altclip aya_vision blip clip gemma3 git got_ocr2 idefics3 internvl llava mistral3 mllama
        paligemma qwen2_5_vl qwen2_vl qwen3_vl siglip smolvlm vilt""",
    "Speech": """
        audio-spectrogram-transformer data2vec-audio hubert moonshine parakeet_ctc seamless_m4t sew
        speech_to_text unispeech wav2vec2 wav2vec2-bert wav2vec2-conformer wavlm whisper""",
}
NAMES = [name for names in GROUPS.values() for name in names.split()]

EQUAL = "equal"
NEW_TOKENS = 3
PADDING = 3
# Text that is an exception's, not ours.
RAW = re.compile(
    r"\b[A-Z]\w*(Error|Exception)\b|has no attribute|positional argument|keyword argument"
    r"|object is not|not subscriptable|unsupported operand|size of tensor|out of range"
)

Inputs = dict[str, Any]


def survey(name: str) -> dict[str, Any]:
    """Compare forward, generate, the engine and a paged cache of one model_type with eager.

    error: of every tensor of the output, relative to its largest value, with padding where the
    model takes a mask. sites, graphs: how many. left: reason -> how many attentions, or graphs,
    it holds for. generate (compiled), engine, paged (a PagedCache in generate): "equal", a
    sentence that says why not, or None for a model that generates nothing.
    """
    model, inputs, attn = _build(name)
    row: dict[str, Any] = {"inputs": sorted(inputs), "attn": attn}
    generates = model.can_generate()
    with torch.no_grad():
        expected = _forward(model, inputs)
        row |= dict.fromkeys(("generate", "engine", "paged"))
        if generates:
            tokens = _generate(model, inputs)
            row["engine"] = answer(lambda: _served(model, inputs))
            row["paged"] = answer(lambda: _paged(model, inputs))
        torch._dynamo.reset()
        model.compile(backend="kvtailor", options={"inner": "eager"})
        with recording() as recorder:
            row["error"] = relative_error(_forward(model, inputs), expected)
        if generates:
            row["generate"] = answer(lambda: _generate(model, inputs), tokens)
    return row | _sites(recorder.graphs)


def run(name: str, limit: float) -> dict[str, Any]:
    """One survey in a process of its own that may take ``limit`` seconds."""
    context = multiprocessing.get_context("forkserver")
    # What every child needs is imported once, before they part.
    context.set_forkserver_preload(["kvtailor.benchmarks.architectures", "torch._dynamo"])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, there))
    process.start()
    there.close()
    try:
        if not here.poll(limit):
            return {"failed": f"no result within {limit:g} seconds"}
        found: dict[str, Any] = here.recv()
        return found
    except EOFError:
        return {"failed": "the process ended without a result"}
    finally:
        process.kill()
        process.join()


def is_right(row: dict[str, Any]) -> bool:
    """Whether the forward is eager's and every other answer is "equal" or a reason in our words."""
    if "error" not in row:
        return False
    answers = [row[key] for key in ("generate", "engine", "paged")]
    said = [*row["left"], *(answer for answer in answers if answer is not None)]
    return row["error"] <= FP32_BOUND and not any(
        RAW.search(text) or text.startswith("differs") for text in said
    )


def _child(name: str, back: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["KVTAILOR_CACHE_DIR"] = "off"
    try:
        back.send(survey(name))
    except BaseException as error:
        back.send({"failed": one_line(error)})


def _build(name: str) -> tuple[Any, Inputs, str]:
    """Model, inputs and the attention it takes."""
    options: dict[str, Any] = {"tokens": 12, "padding": PADDING}
    try:
        return *shrunk(name, "sdpa", **options), "sdpa"
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
    return *shrunk(name, "eager", **options), "eager"


def _forward(model: Any, inputs: Inputs) -> list[Tensor]:
    # ViT-MAE draws the patches it hides.
    torch.manual_seed(0)
    return [*_tensors(model(**_copied(inputs)))]


def _copied(inputs: Inputs) -> Inputs:
    """For each call its own: BLIP's generate writes into the ids it is given."""
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}


def _tensors(out: Any) -> Iterator[Tensor]:
    """The tensors of an output; what caches hold shows in the tokens that follow."""
    if isinstance(out, Tensor):
        yield out
    elif hasattr(out, "to_tuple") or isinstance(out, tuple | list):
        for part in out.to_tuple() if hasattr(out, "to_tuple") else out:
            yield from _tensors(part)


def answer(run: Callable[[], Any], expected: Any = True) -> str:
    """Whether it is equal, or why not: the text of a ValueError, type and text of anything else."""
    try:
        found = run()
    except ValueError as error:
        return first_line(error)
    except Exception as error:
        return one_line(error)
    if isinstance(expected, Tensor):
        return EQUAL if torch.equal(found, expected) else "differs from eager's tokens"
    return EQUAL if found == expected else "differs from the tokens of plain generate()"


def _generate(model: Any, inputs: Inputs) -> Tensor:
    return model.generate(**_copied(inputs), max_new_tokens=NEW_TOKENS, do_sample=False)


def _paged(model: Any, inputs: Inputs) -> bool:
    """Whether tokens over a paged cache are those over a DynamicCache."""
    name = cache_argument(model)
    if name is None:
        raise ValueError("its forward takes no cache")
    batch, length = inputs[model.main_input_name].shape[0], 128

    def tokens(kind: str) -> Tensor:
        cache = make_cache(model, kind, batch, length, length)
        return _generate(model, inputs | {name: cache})

    return torch.equal(tokens("dynamic"), tokens("paged"))


def _served(model: Any, inputs: Inputs) -> bool:
    """Whether the engine's tokens for two prompts are those of generate() for each alone."""
    from transformers import GenerationMixin

    engine = Engine(model, max_memory="4MiB")
    main = inputs[model.main_input_name]
    ids = model.main_input_name == "input_ids"
    prompts = [main[0, PADDING:], main[1, : PADDING + 2]] if ids else [main[0], main[1]]
    results = engine.generate(
        [p.tolist() if ids else p for p in prompts], max_new_tokens=NEW_TOKENS, ignore_eos=True
    )
    for prompt, result in zip(prompts, results):
        # Whisper's own generate adds to what its decoder starts with.
        own = GenerationMixin.generate(
            model, prompt[None], max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
        )
        if result.error:
            raise ValueError(result.error)
        if result.token_ids != own[0, -NEW_TOKENS:].tolist():
            return False
    return True


def _sites(graphs: list[GraphReport]) -> dict[str, Any]:
    sites = [site for graph in graphs for site in graph.attention]
    left: Counter[str] = Counter()
    for graph in graphs:
        if not graph.captured:
            left[f"a graph is left untouched: {graph.reason}"] += 1
        near = [p for p in graph.passes if p.name == "recognise_attention"]
        left.update(skip.why for found in near for skip in found.skipped)
    left.update(s.reason or "" for s in sites if s.lowering in (None, "untouched"))
    if not sites and not left:
        text = "".join(graph.graph_before for graph in graphs)
        attends = "softmax" in text or "scaled_dot_product" in text
        left["a softmax that was not recognised" if attends else "no attention in its graphs"] = 1
    return {"graphs": len(graphs), "sites": len(sites), "left": dict(left)}
