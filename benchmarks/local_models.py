"""Long prompts through models with local layers: kvtailor against Inductor on the stock model.

    python benchmarks/local_models.py                     Gemma-3-270M, Llama4 and Mistral shapes
    python benchmarks/local_models.py --only gemma        real weights, 4,096 tokens (extra: demo)

Every case is a prefill as ``generate`` makes it: with an attention mask, asking for the last
row's logits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvtailor.benchmarks.harness import Bench
from kvtailor.cli.demo import gemma_270m
from kvtailor.cli.tables import make_console

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def prefill(model: Any, backend: str, ids: Tensor, mask: Tensor) -> Callable[[], Tensor]:
    torch._dynamo.reset()
    run = torch.compile(model, backend=backend, dynamic=False)

    def case() -> Tensor:
        with torch.no_grad():
            out = run(ids, attention_mask=mask, use_cache=False, logits_to_keep=1)
        return out.logits

    case()
    return case


def compare(
    bench: Bench, name: str, model: Any, ids: Tensor, mask: Tensor, at_least: float
) -> dict[str, Callable[[], Tensor]]:
    cases = {b: prefill(model, b, ids, mask) for b in ("inductor", "kvtailor")}
    group = bench.compare(name, cases)
    bench.check(f"{name}: speedup", group.speedup("kvtailor", "inductor"), at_least=at_least)
    return cases


def gemma(bench: Bench, dtype: str) -> None:
    """Real weights, a real text of 4,096 tokens; the greedy continuation must be eager's."""
    speaker = gemma_270m(make_console())
    model, ids = speaker.model.to(DTYPES[dtype]), speaker.prompts[1][:, :4096]
    mask = torch.ones_like(ids)
    compare(bench, f"Gemma-3-270M {dtype}, 4,096 tokens", model, ids, mask, at_least=1.5)

    def generate() -> list[int]:
        out = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        return out[0, ids.shape[1] :].tolist()

    expected = generate()
    torch._dynamo.reset()
    model.compile(backend="kvtailor")
    same = float(generate() == expected)
    bench.check(f"Gemma-3-270M {dtype}: greedy tokens equal to eager's", same, at_least=1.0)


def llama4_shaped(dtype: torch.dtype, tokens: int) -> Any:
    """Three chunked layers, then a full one; width 512, chunk 512, random weights."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        intermediate_size_mlp=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        attention_chunk_size=512,
        moe_layers=[],
        max_position_embeddings=tokens,
    )
    torch.manual_seed(0)
    model: Any = Llama4ForCausalLM(config)
    return model.to(dtype).eval()


def llama4(bench: Bench, dtype: str) -> None:
    tokens = 8192
    model = llama4_shaped(DTYPES[dtype], tokens)
    ids = torch.randint(0, 4096, (1, tokens))
    name = f"Llama4-shaped {dtype}, chunk 512, {tokens:,} tokens"
    compare(bench, name, model, ids, torch.ones_like(ids), at_least=2.0)


def mistral(bench: Bench, dtype: str) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    tokens = 4096
    config = MistralConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=512,
        max_position_embeddings=tokens,
    )
    torch.manual_seed(0)
    model: Any = MistralForCausalLM(config)
    model = model.to(DTYPES[dtype]).eval()
    ids = torch.randint(0, 4096, (2, tokens))
    mask = torch.ones_like(ids)
    mask[0, :1000] = 0
    name = f"Mistral-shaped {dtype}, window 512, 2 x {tokens:,} tokens, left padding"
    compare(bench, name, model, ids, mask, at_least=1.5)


FAMILIES = {"gemma": gemma, "llama4": llama4, "mistral": mistral}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=tuple(FAMILIES), default=None)
    bench = Bench.from_args("local_models", parser=parser, runs=5)
    for name, run in FAMILIES.items():
        if bench.args.only in (None, name):
            for dtype in DTYPES:
                run(bench, dtype)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
