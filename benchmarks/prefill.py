"""Prefill and decode of whole models: kvtailor against Inductor on the untouched model.

    python benchmarks/prefill.py                  every group, about half an hour of compiling
    python benchmarks/prefill.py --only llama     one family

Gemma3n-shaped models (width 512, 1,024 tokens, random weights) ask for the last row's logits, so
the shared-KV tail runs on one row; the Llama-shaped model has next to nothing to gain, and must
lose nothing. bf16 runs of a random-weight Gemma3n are off by their own size in eager mode
already: their results are judged in fp32.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

# A cold compile is cold: nothing of an earlier run may be found.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="kvtailor-bench-")

import torch
from torch import Tensor

from kvtailor.backend import recording
from kvtailor.benchmarks.harness import Bench
from kvtailor.cli.models import gemma3n_shaped

TOKENS = 1024
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def llama_shaped(dtype: torch.dtype) -> Any:
    """Eight layers, width 512, grouped heads, random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(dtype).eval()


def compiled(model: Any, backend: str, **kwargs: Any) -> Callable[..., Any]:
    return torch.compile(model, backend=backend, **kwargs)


def last_logits(run: Callable[..., Any], ids: Tensor) -> Callable[[], Tensor]:
    """A prefill that asks for the logits of the last token alone."""

    def case() -> Tensor:
        with torch.no_grad():
            return run(ids, use_cache=False, logits_to_keep=1).logits

    return case


def decode_step(
    run: Callable[..., Any], model: Any, ids: Tensor, kind: str
) -> Callable[[], Tensor]:
    """One more token over a cache of all but the last of ids.

    Each call steps on from the one before in a static cache; a dynamic one is cropped back.
    """
    from transformers import DynamicCache, StaticCache

    cache: Any
    if kind == "static":
        cache = StaticCache(config=model.config, max_cache_len=2 * TOKENS)
    else:
        cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
    position = torch.tensor([[ids.shape[1] - 1]])

    def case() -> Tensor:
        with torch.no_grad():
            out = run(ids[:, -1:], past_key_values=cache, use_cache=True, position_ids=position)
        position.add_(1)
        return out.logits

    return case


def gemma3n(bench: Bench, layers: int, shared: int, dtype: str, at_least: float) -> None:
    name = f"gemma3n-shaped {layers}/{shared} {dtype}, {TOKENS} tokens"
    model = gemma3n_shaped(layers, shared).to(DTYPES[dtype])
    torch.manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (1, TOKENS))
    cases = {}
    for backend in ("inductor", "kvtailor"):
        torch._dynamo.reset()
        cases[backend] = last_logits(compiled(model, backend), ids)
        shares = compile_shares(cases[backend])
        if shares is not None and backend == "kvtailor":
            capture, passes = shares
            bench.check(
                f"{name}: share of capture and passes in the cold compile",
                capture + passes,
                at_most=0.15,
            )
            bench.check(f"{name}: of it, capture: torch's AOT tracing", capture)
    group = bench.compare(name, cases, tolerance=2.0 if dtype == "bf16" else None)
    bench.check(f"{name}: speedup", group.speedup("kvtailor", "inductor"), at_least=at_least)


def compile_shares(first_call: Callable[[], Tensor]) -> tuple[float, float] | None:
    """The shares that capture and kvtailor's passes had in a first call; None without any."""
    with recording() as recorder:
        start = time.perf_counter()
        first_call()
        total = time.perf_counter() - start
    if not recorder.graphs:
        return None
    capture = sum(g.capture_ms for g in recorder.graphs) / 1e3
    passes = sum(p.ms for g in recorder.graphs for p in g.passes) / 1e3
    return capture / total, passes / total


def llama(bench: Bench, dtype: str) -> None:
    torch.manual_seed(1)
    ids = torch.randint(0, 4096, (1, TOKENS))
    kinds = ("prefill", "decode, dynamic cache", "decode, static cache")
    for kind in kinds:
        cases = {}
        for backend in ("inductor", "kvtailor"):
            torch._dynamo.reset()
            model = llama_shaped(DTYPES[dtype])
            run = compiled(model, backend)
            if kind == "prefill":
                cases[backend] = last_logits(run, ids)
            else:
                cases[backend] = decode_step(run, model, ids, kind.split()[-2])
            for _ in range(4):  # a growing cache is compiled anew for its first lengths
                cases[backend]()
        name = f"llama-shaped, 8 layers, {dtype}: {kind}"
        runs = bench.runs if kind == "prefill" else 10 * bench.runs
        group = bench.compare(name, cases, runs=runs)
        bench.check(f"{name}: speedup", group.speedup("kvtailor", "inductor"), at_least=1.0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("gemma3n", "gemma3n-deep", "llama"), default=None)
    bench = Bench.from_args("prefill", parser=parser)
    only = bench.args.only
    if only is not None:
        bench.name = f"prefill_{only}"
    if only in (None, "llama"):
        for dtype in DTYPES:
            llama(bench, dtype)
    if only in (None, "gemma3n"):
        gemma3n(bench, 15, 5, "bf16", at_least=1.45)
        gemma3n(bench, 15, 5, "fp32", at_least=1.4)
    if only in (None, "gemma3n-deep"):
        gemma3n(bench, 35, 15, "bf16", at_least=1.6)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
