"""The Triton kernels on a real GPU: right first, then how fast.

    python benchmarks/gpu_check.py              # under five minutes on one GPU
    python benchmarks/gpu_check.py --quick      # a third of the kernels, small sizes, not saved

Every configuration of the launch table is run against the oracle, in several processes since
compiling takes most of the time; the engine serves small models, its tokens compared with
generate's. Then prefill and decode are timed against SDPA and compiled
flex_attention. All cases run as CUDA graphs, so Python is not timed, and so that a kernel that
reads anything on the host fails. Bandwidth and FLOP/s count what the mask lets be seen, not what a
kernel reads or computes. Last, a model in pieces runs with and without CUDA graphs of its own: what
is captured, launched and held.

Where there is no CUDA device it says so and exits with 2: nothing was checked.
"""

from __future__ import annotations

import argparse
import functools
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvtailor.benchmarks.harness import Bench, Group
from kvtailor.kernels import launch, paged_attention, reference
from kvtailor.kernels import store_kv as store

NOT_RUN = "not run: no CUDA device"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

# Largest error relative to the oracle's largest value. float32 products are three TF32 ones.
TOLERANCE = {"fp16": 2e-3, "bf16": 1.6e-2, "fp32": 2e-5}

STARTED = time.perf_counter()

# Calls in one CUDA graph.
CALLS = 10


# --- numerics ---------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """One configuration: a column of the launch table and what changes the kernel's code."""

    dtype: str
    dim: int
    value_dim: int
    kind: str
    layout: str
    variant: str
    group: int = 4
    page: int = 16


def kernels(quick: bool = False) -> Iterator[Kernel]:
    """All of the launch table with every variant; odd head dims, groups and pages with one."""
    for dtype in DTYPES:
        for dim in (64, 128, 256):
            for kind in ("prefill", "decode"):
                for variant in VARIANTS:
                    # fp16 compiles to what bf16 does, but for the element type.
                    once = dtype == "fp16" or (quick and (dim, dtype) != (128, "bf16"))
                    if once and variant != "window":
                        continue
                    for layout in ("paged", "dense"):
                        if layout == "paged" and variant in DENSE_ONLY:
                            continue
                        if layout == "dense" and variant == "origin":
                            continue
                        yield Kernel(dtype, dim, dim, kind, layout, variant)
        for dim, value_dim in ((8, 8), (16, 16), (32, 32), (80, 80), (96, 96), (100, 100),
                               (192, 128), (40, 256)):  # fmt: skip
            for kind in ("prefill", "decode"):
                yield Kernel(dtype, dim, value_dim, kind, "paged", "window")
    for kind in ("prefill", "decode"):
        for group in (1, 3, 8, 16, 71):
            yield Kernel("bf16", 64, 64, kind, "paged", "window", group)
        for page in (1, 2, 32, 64, 128, 256):
            yield Kernel("bf16", 128, 128, kind, "paged", "window", page=page)


VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {},
    "all": {"causal": False},
    "window": {"window": 100},
    "chunk": {"chunk": 100},
    "origin": {"chunk": 100},
    "both": {"window": 70, "chunk": 100},
    "softcap": {"window": 100, "softcap": 2.0},
    "sinks": {"chunk": 100},
    "alibi": {},
    "positions": {"window": 100},
    "bool": {"window": 100},
    "bias": {"softcap": 2.0},
    "keys": {"chunk": 100},
    "uniform": {"empty_row": "uniform"},
    "splits": {"window": 500},
}
DENSE_ONLY = ("keys", "uniform")


def check_paged(kernel: Kernel, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Result and log-sum-exp, by the kernel and by the oracle. Unused slots are NaN."""
    make = torch.Generator().manual_seed(0)
    dtype = DTYPES[kernel.dtype]
    if kernel.kind == "decode":
        query_lens, key_lens = [1, 1, 0, 1, 1], [1000, 33, 40, 1, 257]
    else:
        query_lens, key_lens = [200, 64, 0, 130, 1], [200, 300, 17, 131, 77]
    S, Hkv, Hq = len(key_lens), 2, 2 * kernel.group
    blocks = -(-max(key_lens) // kernel.page)
    table = torch.randperm(S * blocks + 3, generator=make)[: S * blocks].reshape(S, blocks)
    pools = []
    for dim in (kernel.dim, kernel.value_dim):
        pool = torch.full(((S * blocks + 3) * kernel.page, Hkv, dim), math.nan)
        for s, length in enumerate(key_lens):
            key = torch.arange(length)
            slots = table[s, key // kernel.page] * kernel.page + key % kernel.page
            pool[slots] = torch.randn(length, Hkv, dim, generator=make)
        pools.append(pool.unflatten(0, (-1, kernel.page)).to(device, dtype))
    N = sum(query_lens)
    q = torch.randn(N, Hq, kernel.dim, generator=make).to(device, dtype)
    start = torch.tensor([0, *query_lens]).cumsum(0)
    args = [q, *pools, *(x.to(device, torch.int32) for x in (table, start, torch.tensor(key_lens)))]
    flags: dict[str, Any] = {"scale": kernel.dim**-0.5, **VARIANTS[kernel.variant]}
    match kernel.variant:
        case "origin":
            flags["chunk_origin"] = torch.tensor([3, -5, 0, 99, 250], device=device)
        case "sinks":
            flags["sinks"] = torch.randn(Hq, generator=make).to(device)
        case "alibi":
            flags["alibi_slopes"] = torch.rand(Hq, generator=make).to(device) / 8
        case "positions":
            flags["q_positions"] = torch.randint(-3, 400, (N,), generator=make).to(device)
        case "bool":
            flags["mask"] = (torch.rand(N, 1, max(key_lens), generator=make) > 0.5).to(device)
        case "bias":
            flags["mask"] = torch.randn(N, Hq, max(key_lens), generator=make).to(device, dtype)
    splits = 8 if kernel.variant == "splits" else None
    out, lse = paged_attention.paged_attend(*args, return_lse=True, splits=splits, **flags)
    assert lse is not None
    return (out, lse, *reference.paged_attend(*args, **flags))


def check_dense(kernel: Kernel, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``check_paged``, over strided dense keys; the oracle has no log-sum-exp."""
    make = torch.Generator().manual_seed(0)
    dtype = DTYPES[kernel.dtype]
    B, Tq, Tk = (3, 1, 700) if kernel.kind == "decode" else (2, 260, 300)
    Hkv, Hq = 2, 2 * kernel.group

    def random(heads: int, tokens: int, dim: int) -> Tensor:
        return torch.randn(B, tokens, heads, dim, generator=make).to(device, dtype).transpose(1, 2)

    q = random(Hq, Tq, kernel.dim)
    k, v = random(Hkv, Tk, kernel.dim), random(Hkv, Tk, kernel.value_dim)
    flags: dict[str, Any] = {"scale": kernel.dim**-0.5, "causal": True, **VARIANTS[kernel.variant]}
    if kernel.variant != "positions":
        flags["q_offset"] = Tk - Tq
    pads = torch.tensor([120, 0, 31][:B], device=device)
    match kernel.variant:
        case "sinks":
            flags["sinks"] = torch.randn(Hq, generator=make).to(device)
        case "alibi":
            # The oracle takes slopes as a bias.
            slopes = torch.rand(Hq, generator=make).to(device) / 8
            p = torch.arange(Tk - Tq, Tk, device=device)[:, None]
            bias = slopes[:, None, None] * (torch.arange(Tk, device=device) - p)
            got = paged_attention.dense_attend(q, k, v, alibi_slopes=slopes, **flags)[0]
            return got, pads, reference.attend(q, k, v, mask=bias[None], **flags), pads
        case "positions":
            flags["q_positions"] = torch.randint(-3, 400, (B, Tq), generator=make).to(device)
        case "bool" | "uniform":
            mask = torch.rand(B, 1, Tq, Tk, generator=make) > 0.5
            mask[0, :, Tq // 2] = False
            flags["mask"] = mask.to(device)
        case "bias":
            flags["mask"] = torch.randn(1, Hq, Tq, Tk, generator=make).to(device, dtype)
        case "keys":
            flags["mask"] = (torch.arange(Tk, device=device) >= pads[:, None])[:, None, None]
            flags["chunk_origin"] = pads
    splits = 8 if kernel.variant == "splits" else None
    got = paged_attention.dense_attend(q, k, v, splits=splits, **flags)[0]
    return got, pads, reference.attend(q, k, v, **flags), pads


def check_kernel(kernel: Kernel, device: str = "cuda") -> tuple[Kernel, float, str]:
    """Error relative to the oracle's largest value, and what is wrong, if anything."""
    try:
        run = check_paged if kernel.layout == "paged" else check_dense
        out, lse, want, want_lse = run(kernel, device)
    except Exception as error:
        return kernel, math.nan, f"{type(error).__name__}: {str(error)[:200]}"
    error = float((out.float() - want.float()).abs().max() / want.float().abs().max())
    if not out.isfinite().all():
        return kernel, error, "result is not finite"
    if not error <= TOLERANCE[kernel.dtype]:
        return kernel, error, f"error {error:.2g} exceeds {TOLERANCE[kernel.dtype]:.2g}"
    hidden = want_lse == -math.inf
    if not torch.equal(lse == -math.inf, hidden):
        return kernel, error, "log-sum-exp: other rows are empty"
    lse_error = float((lse - want_lse).masked_fill(hidden, 0).abs().max())
    if not lse_error <= 4 * TOLERANCE[kernel.dtype]:
        return kernel, error, f"log-sum-exp: error {lse_error:.2g}"
    return kernel, error, ""


def check_store_kv(device: str = "cuda") -> float:
    """Largest difference between the kernel's pages and the oracle's."""
    make = torch.Generator().manual_seed(0)
    worst = 0.0
    for dtype in DTYPES.values():
        k = torch.randn(300, 3, 80, generator=make).to(device, dtype)
        v = torch.randn(300, 3, 128, generator=make).to(device, dtype)
        slots = torch.randperm(40 * 16, generator=make)[:300].to(device)
        slots[::7] = -1
        pages = [torch.zeros(40, 16, 3, d, device=device, dtype=dtype) for d in (80, 128, 80, 128)]
        store.store_kv(k, v, pages[0], pages[1], slots)
        reference.store_kv(k, v, pages[2], pages[3], slots)
        worst = max(worst, *((pages[i] - pages[i + 2]).abs().max().item() for i in (0, 1)))
    return worst


def numerics(bench: Bench) -> None:
    """Run all of it and record counts; raises with the failures, for no figure is worth them."""
    todo = list(kernels(bench.quick))
    start = time.perf_counter()
    # Spawned: a forked process cannot use CUDA.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), mp_context=spawn) as pool:
        results = list(pool.map(check_kernel, todo, chunksize=4))
    failed = [(kernel, why) for kernel, _, why in results if why]
    for kernel, why in failed:
        bench.console.print(f"[red]wrong[/] {' '.join(map(str, kernel))}: {why}")
    bench.note(f"{len(todo)} kernels against the oracle in {time.perf_counter() - start:.0f} s")
    bench.check("kernels that are wrong", len(failed), at_most=0)
    for name in DTYPES:
        worst = max(error for kernel, error, why in results if kernel.dtype == name and not why)
        bench.check(f"largest relative error, {name}", worst, at_most=TOLERANCE[name])
    bench.check("store_kv: difference", check_store_kv(), at_most=0)
    if failed:
        raise SystemExit(bench.finish())


# --- speed ------------------------------------------------------------------------------------


def graphed(fn: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """``CALLS`` calls of fn as one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            out = fn()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


@functools.cache
def compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


class Size(NamedTuple):
    """A layer and its load. window and chunk as in ``attend``."""

    batch: int
    queries: int
    keys: int
    q_heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    window: int | None = None
    chunk: int | None = None
    dtype: torch.dtype = torch.bfloat16

    def visible(self) -> int:
        """Pairs of query and key that see each other, for one head of the batch."""
        p = torch.arange(self.keys - self.queries, self.keys)
        low = torch.zeros_like(p)
        if self.window is not None:
            low = torch.maximum(low, p - self.window + 1)
        if self.chunk is not None:
            low = torch.maximum(low, p - p % self.chunk)
        return int((p + 1 - low).sum()) * self.batch

    def flops(self) -> float:
        return 4.0 * self.visible() * self.q_heads * self.dim

    def key_bytes(self) -> float:
        """Of the keys and values some query sees, read once."""
        first = self.keys - self.queries
        low = 0
        if self.window is not None:
            low = max(low, first - self.window + 1)
        if self.chunk is not None:
            low = max(low, first - first % self.chunk)
        per_key = 2 * self.kv_heads * self.dim * self.dtype.itemsize
        return float(self.batch * (self.keys - low) * per_key)


def cases(size: Size, device: str = "cuda", page: int = 16) -> dict[str, Callable[[], Tensor]]:
    """SDPA, flex_attention and the kernel over dense keys and over pages; one result each.

    SDPA gets the form that lets it run fastest: a flag where it is only causal, the visible keys
    alone in decode, else a mask.
    """
    make = torch.Generator(device=device).manual_seed(0)
    B, Tq, Tk, Hq, Hkv, D, window, chunk, dtype = size

    def random(heads: int, tokens: int) -> Tensor:
        return torch.randn(B, tokens, heads, D, generator=make, device=device, dtype=dtype)

    q, k, v = random(Hq, Tq), random(Hkv, Tk), random(Hkv, Tk)
    q_BHTD, k_BHTD, v_BHTD = (x.transpose(1, 2) for x in (q, k, v))
    scale = D**-0.5
    blocks = -(-Tk // page)
    table = torch.randperm(B * blocks, generator=make, device=device).reshape(B, blocks)
    pages = []
    for x in (k, v):
        pool = torch.zeros(B * blocks, page, Hkv, D, device=device, dtype=dtype)
        padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, blocks * page - Tk))
        pool[table.flatten()] = padded.reshape(B * blocks, page, Hkv, D)
        pages.append(pool)
    start = torch.arange(B + 1, device=device, dtype=torch.int32) * Tq
    lens = torch.full((B,), Tk, device=device, dtype=torch.int32)
    packed = q.flatten(0, 1)
    table = table.to(torch.int32)
    flags: dict[str, Any] = {"scale": scale, "causal": True, "window": window, "chunk": chunk}
    offset = Tk - Tq

    def paged() -> Tensor:
        out, _ = paged_attention.paged_attend(packed, *pages, table, start, lens, **flags)
        return out.unflatten(0, (B, Tq)).transpose(1, 2)

    def dense() -> Tensor:
        return paged_attention.dense_attend(q_BHTD, k_BHTD, v_BHTD, q_offset=offset, **flags)[0]

    low = 0
    if Tq == 1:
        low = max(0, Tk - window) if window else (Tk - 1) // chunk * chunk if chunk else 0
    keys, values = k_BHTD[:, :, low:], v_BHTD[:, :, low:]
    local = window is not None or chunk is not None
    mask = None
    if Tq > 1 and (local or Tq != Tk):
        mask = reference.visible(
            Tq, Tk, torch.device(device), causal=True, q_offset=offset, window=window, chunk=chunk
        )

    def plain_sdpa() -> Tensor:
        return sdpa(
            q_BHTD, keys, values, attn_mask=mask, is_causal=Tq > 1 and mask is None,
            scale=scale, enable_gqa=True,
        )  # fmt: skip

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        p = i + offset
        seen = j <= p
        if window is not None:
            seen = seen & (p - j < window)
        if chunk is not None:
            seen = seen & (p // chunk == j // chunk)
        return seen

    block_mask = create_block_mask(sees, None, None, Tq, Tk, device=device)

    def flex() -> Tensor:
        return compiled_flex()(
            q_BHTD, k_BHTD, v_BHTD, block_mask=block_mask, scale=scale, enable_gqa=True
        )

    return {"sdpa": plain_sdpa, "flex_attention": flex, "dense": dense, "paged": paged}


def sizes(quick: bool) -> dict[str, Size]:
    """The groups that are timed. Prefill first, decode after."""
    t = 2048 if quick else 8192
    long = 8192 if quick else 65536
    return {
        "prefill, causal": Size(1, t, t),
        "prefill, window 1024": Size(1, t, t, window=1024),
        "prefill, chunk 1024": Size(1, t, t, chunk=1024),
        "prefill, window 512, D 64": Size(1, t, t, 8, 8, 64, window=512),
        "prefill, window 512, D 256": Size(1, t, t, 4, 1, 256, window=512),
        "prefill, causal, fp32": Size(1, t // 2, t // 2, 8, 8, 64, dtype=torch.float32),
        "prefill, 512 after a history": Size(4, 512, t),
        "decode, 64 sequences": Size(64, 1, t),
        "decode, one long sequence": Size(1, 1, long),
        "decode, window 1024": Size(32, 1, t, window=1024),
        "decode, MQA, D 256": Size(8, 1, t, 8, 1, 256),
    }


def speed(bench: Bench) -> None:
    """Time every size and record speedups and what was achieved."""
    for name, size in sizes(bench.quick).items():
        if time.perf_counter() - STARTED > bench.args.budget:
            bench.note(f"{name}: left out, over {bench.args.budget} s")
            continue
        runs = cases(size)
        graphs, left_out = {}, []
        for case, fn in runs.items():
            try:
                graphs[case] = graphed(fn)
            except Exception as error:
                if case in ("dense", "paged"):
                    raise
                left_out.append(f"{name}: {case} left out, {type(error).__name__}")
        for text in left_out:
            bench.note(text)
        group = bench.compare(f"{name} ({CALLS} calls)", graphs, reference="dense")
        achieved(bench, name, group, size)
        del runs, graphs
        torch.cuda.empty_cache()


def achieved(bench: Bench, name: str, group: Group, size: Size) -> None:
    for case, timing in group.cases.items():
        seconds = timing.median / CALLS
        if size.queries == 1:
            bench.check(f"{name}: {case}, GB/s", size.key_bytes() / seconds / 1e9)
        else:
            bench.check(f"{name}: {case}, TFLOP/s", size.flops() / seconds / 1e12)
    for ours in ("dense", "paged"):
        for other in ("sdpa", "flex_attention"):
            if other in group.cases:
                bench.check(f"{name}: {ours} against {other}", group.speedup(ours, other))


# --- pieces as CUDA graphs --------------------------------------------------------------------


def pieces(bench: Bench) -> None:
    """A long prefill whose tail alone is replayed, and decode steps, with and without graphs."""
    from torch._dynamo.utils import counters
    from transformers import StaticCache

    from kvtailor.backend import recording
    from kvtailor.cli.models import gemma3n_shaped

    tokens = 1024 if bench.quick else 4096
    model = gemma3n_shaped(15, 5).to("cuda", torch.bfloat16).eval()
    ids = torch.randint(0, model.config.vocab_size, (2, tokens), device="cuda")
    for kind in ("prefill", "decode"):
        runs: dict[str, Callable[[], Tensor]] = {}
        for case in ("plain", "graphs"):
            torch._dynamo.reset()
            counters["kvtailor"].clear()
            reserved = torch.cuda.memory_reserved()
            options = {"cuda_graphs": case == "graphs"}
            call = torch.compile(model, backend="kvtailor", dynamic=False, options=options)
            cache, given = None, ids
            if kind == "decode":
                cache, given = (
                    StaticCache(config=model.config, max_cache_len=2 * tokens),
                    ids[:, -1:],
                )
                with torch.no_grad():
                    model(ids, past_key_values=cache, logits_to_keep=1)
            runs[case] = functools.partial(last_logits, call, given, cache)
            with recording() as recorder:
                for _ in range(3):
                    runs[case]()
            name = f"{kind}, {case}"
            for event, number in launches(runs[case]).items():
                bench.check(f"{name}: {event}", number)
            if case == "graphs":
                captured = counters["kvtailor"]["captured_graphs"]
                bench.check(f"{name}: graphs captured", captured, at_least=1)
                bench.check(f"{name}: MB of graphs", counters["kvtailor"]["graph_bytes"] / 1e6)
                bench.check(
                    f"{name}: MB more reserved", (torch.cuda.memory_reserved() - reserved) / 1e6
                )
                left = {p.no_graph for g in recorder.graphs for p in g.pieces if p.no_graph}
                bench.note(f"{name}: no graph where {sorted(left)}")
        # A static cache moves on with every step, for both cases alike.
        group = bench.compare(f"{kind}, pieces", runs, reference="plain", tolerance=0.05)
        bench.check(f"{kind}: graphs against plain", group.speedup("graphs", "plain"))


def last_logits(call: Callable[..., Any], ids: Tensor, cache: Any) -> Tensor:
    given = {"use_cache": False} if cache is None else {"past_key_values": cache}
    with torch.no_grad():
        return call(ids, logits_to_keep=1, **given).logits


def launches(run: Callable[[], Any]) -> dict[str, int]:
    """How often a call launches a kernel, and a graph."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    counts = {"kernel launches": 0, "graph launches": 0}
    for event in found.key_averages():
        if "LaunchKernel" in event.key:
            counts["kernel launches"] += event.count
        elif "GraphLaunch" in event.key:
            counts["graph launches"] += event.count
    return counts


# --- the engine --------------------------------------------------------------------------------

SERVED = ("llama", "gemma3_text", "gemma3n_text", "llama4_text", "gpt_oss", "bart")


def serve(bench: Bench, device: str = "cuda", inner: str = "inductor") -> None:
    """Prompts, decode steps, prefixes and preemption on small models: the tokens of generate."""
    import random

    from torch._dynamo.utils import counters

    from kvtailor.cli.models import shrunk
    from kvtailor.runtime.engine.engine import Engine

    rng = random.Random(0)
    prompts = [[rng.randrange(2, 64) for _ in range(n)] for n in (30, 7, 13, 1, 21)]
    prompts.append(prompts[0][:20] + [5])
    for name in SERVED:
        model: Any = shrunk(name, "eager" if name == "gpt_oss" else "sdpa")[0].to(device)
        model.generation_config.forced_eos_token_id = None
        model.generation_config.decoder_start_token_id = 0
        expected = []
        for prompt in prompts:
            out = model.generate(
                torch.tensor([prompt], device=device), max_new_tokens=8, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            expected.append(out[0, -8:].tolist())
        ways: dict[str, dict[str, Any] | None] = {"plain": None}
        if name in ("llama", "gemma3n_text"):
            # With graphs, steps of one token per request are captured.
            ways |= {"compiled": {}, "graphs": {"cuda_graphs": True, "capture_sizes": [1, 2, 4]}}
        for how, options in ways.items():
            if options is not None:
                torch._dynamo.reset()
                counters["kvtailor"].clear()
                model.compile(backend="kvtailor", options={"inner": inner, **options})
            engine = Engine(model, block_size=16, token_budget=24, max_tokens=48, encoder_tokens=32)
            # Room for little more than one request: the others wait, or give way.
            pool = engine._kv.pool
            pool.allocate(pool.num_blocks - 2 * engine._step.layout.request_blocks(48, 24))
            wrong = 0
            for _ in range(2):
                results = engine.generate(prompts, max_new_tokens=8, ignore_eos=True)
                wrong += sum(r.token_ids != e for r, e in zip(results, expected))
            bench.check(f"engine, {name}, {how}: wrong results", wrong, at_most=0)
            if how == "graphs":
                captured = counters["kvtailor"]["captured_graphs"]
                bench.check(f"engine, {name}, {how}: graphs captured", captured, at_least=1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=int, default=270, help="seconds after which to stop")
    parser.add_argument("--numerics", action="store_true", help="no timing")
    if not torch.cuda.is_available():
        parser.parse_known_args()
        print(NOT_RUN)
        return 2
    if paged_attention.INTERPRETED:
        print("not run: TRITON_INTERPRET is set")
        return 2
    bench = Bench.from_args("gpu_check", parser=parser, runs=5, warmup=1)
    # A GPU is not timed by the processor's load.
    bench.allow_busy = True
    bench.note(f"{torch.cuda.get_device_name()}, {launch.processors(0)} processors")
    numerics(bench)
    serve(bench)
    if not bench.args.numerics:
        speed(bench)
        pieces(bench)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
