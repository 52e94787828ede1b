"""Packed projections against separate ones, and generation with an encoder end to end.

    python benchmarks/qcrosskv.py                       everything, about a quarter of an hour
    python benchmarks/qcrosskv.py --only projections    keys and values of twelve layers, a minute
    python benchmarks/qcrosskv.py --only whisper        one family, end to end

Projections: 24 linears of width 1,024 over one source, as twelve decoder layers make their keys
and values of the encoder's states. The form (one matmul or several) is the table's choice; run
``kvtailor calibrate`` first on a machine of another kind; few rows have a form of their own.
"kvtailor" is what a graph of fixed sizes has, "kvtailor, symbolic" the op that chooses at call
time. Against the workaround of old: a fused QKV projection per layer, run on both sources, a third
of each thrown away.

End to end: models of the shape of BART-large (bf16) and Whisper-base (fp32), random weights, 128
new tokens.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvtailor.benchmarks.harness import TOLERANCE, Bench
from kvtailor.kernels.ops import packed_linear
from kvtailor.kernels.packed_linear import Form, batched_linear, form_at
from kvtailor.passes.few_rows import few_rows_form
from kvtailor.runtime.packed_weights import concatenated
from kvtailor.runtime.packing_table import current_table, lookup, plan, plan_text

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WIDTH, LAYERS = 1024, 12
ROWS = {1: 1.15, 8: 1.4, 64: None, 512: None, 1500: None}
DECODER_ROWS = 8


def projections(bench: Bench, dtype: str) -> None:
    torch.manual_seed(0)
    kind: dict[str, Any] = {"dtype": DTYPES[dtype]}
    scale = WIDTH**-0.5
    weights = [(torch.randn(WIDTH, WIDTH) * scale).to(**kind) for _ in range(2 * LAYERS)]
    packed = concatenated(weights)
    widths = 2 * LAYERS * [WIDTH]
    by_rows = plan(lookup(current_table(), "cpu", DTYPES[dtype], WIDTH, widths))
    bench.note(f"{dtype}: {plan_text(by_rows)}")

    few = torch.compile(lambda x: F.linear(x, packed), backend="kvtailor", dynamic=False)

    def of(x: Tensor) -> dict[str, Callable[[], Any]]:
        fixed = {
            # As where another graph of the model has packed the weights.
            Form.SEPARATE: lambda: [F.linear(x, w) for w in packed.split(widths)],
            Form.ONE: lambda: F.linear(x, packed).split(widths, -1),
            Form.BATCHED: lambda: batched_linear(x, packed, None, 2 * LAYERS).unbind(0),
        }
        ours = fixed[form_at(x.shape[0], *by_rows)]
        if few_rows_form(x, packed).form is not None:
            ours = lambda: few(x).split(widths, -1)  # noqa: E731
        return {
            "separate": lambda: [F.linear(x, w) for w in weights],
            "kvtailor": ours,
            "kvtailor, symbolic": lambda: packed_linear(x, packed, None, widths, *by_rows),
        }

    for rows, wanted in ROWS.items():
        name = f"keys and values of {LAYERS} layers, {dtype}, {rows} rows"
        runs = 15 * bench.runs if rows < 100 else 3 * bench.runs
        with torch.inference_mode():
            group = bench.compare(name, of(torch.randn(rows, WIDTH).to(**kind)), runs=runs)
        least = wanted if wanted is not None and dtype == "bf16" else 0.97
        bench.check(f"{name}: speedup", group.speedup("kvtailor", "separate"), at_least=least)
        symbolic = group.speedup("kvtailor, symbolic", "separate")
        bench.check(f"{name}: speedup, symbolic", symbolic, at_least=0.97)

    queries = [(torch.randn(WIDTH, WIDTH) * scale).to(**kind) for _ in range(LAYERS)]
    fused = [torch.cat([q, k, v]) for q, k, v in zip(queries, weights[::2], weights[1::2])]
    states = torch.randn(DECODER_ROWS, WIDTH).to(**kind)
    memory = torch.randn(1500, WIDTH).to(**kind)

    def twice() -> list[Tensor]:
        both = [(F.linear(states, w), F.linear(memory, w)) for w in fused]
        kv = [part for _, out in both for part in out[..., WIDTH:].split(WIDTH, -1)]
        return [q[..., :WIDTH] for q, _ in both] + kv

    def once() -> list[Tensor]:
        keys_values = of(memory)["kvtailor"]()
        pairs = zip(keys_values[::2], keys_values[1::2])
        return [F.linear(states, w) for w in queries] + [x for pair in pairs for x in pair]

    name = f"QKV of {LAYERS} layers, {dtype}, 1,500 rows"
    with torch.inference_mode():
        group = bench.compare(name, {"double QKV": twice, "kvtailor": once}, runs=2 * bench.runs)
    bench.check(f"{name}: speedup", group.speedup("kvtailor", "double QKV"), at_least=1.3)


def bart(
    dtype: torch.dtype, layers: int = 12, width: int = 1024, init_std: float = 0.02
) -> tuple[Any, Callable[[int], dict[str, Tensor]]]:
    from transformers import BartConfig, BartForConditionalGeneration

    size = _encoder_decoder(layers, width, init_std)
    model: Any = BartForConditionalGeneration(BartConfig(**size))
    return model.to(dtype), lambda batch: {"input_ids": torch.randint(5, 50000, (batch, 256))}


def whisper(
    dtype: torch.dtype, layers: int = 6, width: int = 512, init_std: float = 0.02
) -> tuple[Any, Callable[[int], dict[str, Tensor]]]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    size = _encoder_decoder(layers, width, init_std)
    model: Any = WhisperForConditionalGeneration(WhisperConfig(**size, begin_suppress_tokens=None))
    return model.to(dtype), lambda batch: {"input_features": torch.randn(batch, 80, 3000).to(dtype)}


def _encoder_decoder(layers: int, width: int, init_std: float) -> dict[str, Any]:
    size: dict[str, Any] = {"d_model": width, "init_std": init_std}
    for part in ("encoder", "decoder"):
        size |= {f"{part}_layers": layers, f"{part}_ffn_dim": 4 * width}
        size |= {f"{part}_attention_heads": width // 64}
    return size


def generation(bench: Bench, family: str, batch: int, tokens: int) -> None:
    build, dtype = {"bart": (bart, "bf16"), "whisper": (whisper, "fp32")}[family]
    cases: dict[str, Callable[[], Tensor]] = {}
    shares: list[float] = []
    torch.manual_seed(0)
    # Built once: what a first build imports may draw random numbers of its own.
    original, example = build(DTYPES[dtype])
    original.eval()
    original.generation_config.forced_eos_token_id = None
    original.generation_config.suppress_tokens = None
    inputs = example(batch)
    for backend in ("eager", "inductor", "kvtailor"):
        torch._dynamo.reset()
        model = copy.deepcopy(original)
        if backend == "eager":
            shares = projection_seconds(model)
        else:
            model.compile(backend=backend)

        def case(model: Any = model) -> Tensor:
            # Logits, not tokens: random weights leave ties that rounding decides.
            out = model.generate(
                **inputs,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                num_beams=1,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            return out.logits[0]

        start = time.perf_counter()
        case()
        bench.note(
            f"{family} {dtype} batch {batch}, {backend}: first call "
            f"{time.perf_counter() - start:.1f} s"
        )
        cases[backend] = case
    name = f"{family}-shaped, {dtype}, batch {batch}, {tokens} new tokens"
    # generate returns float32 logits, of a model that may compute in less.
    tolerance = TOLERANCE[DTYPES[dtype]]
    runs = max(3, bench.runs // 2)
    group = bench.compare(name, cases, tolerance=tolerance, runs=runs)
    for against in ("inductor", "eager"):
        wanted = {"at_least": 1.0} if against == "inductor" else {}
        bench.check(f"{name}: × {against}", group.speedup("kvtailor", against), **wanted)
    calls = bench.warmup + runs + 1
    share = sum(shares) / calls / group.cases["eager"].median
    bench.check(f"{name}: projections' share of eager", share)


def projection_seconds(model: Any) -> list[float]:
    """Seconds of every q, k and v projection, appended as the model runs."""
    seconds: list[float] = []
    started: list[float] = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj"):
            module.register_forward_pre_hook(lambda *_: started.append(time.perf_counter()))
            module.register_forward_hook(
                lambda *_: seconds.append(time.perf_counter() - started.pop())
            )
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("projections", "bart", "whisper"), default=None)
    bench = Bench.from_args("qcrosskv", parser=parser)
    only = bench.args.only
    if only is not None:
        bench.name = f"qcrosskv_{only}"
    if only in (None, "projections"):
        for dtype in DTYPES:
            projections(bench, dtype)
    tokens = 16 if bench.quick else 128
    for family in ("whisper", "bart"):
        if only in (None, family):
            for batch in (1, 8):
                generation(bench, family, batch, tokens)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
