"""local_attend against SDPA with a mask, SDPA's causal flag and compiled flex_attention.

8 heads, D 64, window and chunk 512, on the CPU: time at 8,192 tokens and at 256, growth of time
and of peak memory from 2,048 to 32,768 tokens.

    OMP_NUM_THREADS=2 python benchmarks/local_attention.py
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvtailor.benchmarks.harness import Bench, Case, exponent, peak_memory
from kvtailor.kernels import ops

HEADS, DIM, SPAN = 8, 64, 512
LONG, SHORT = 8192, 256
GROWTH = (2048, 4096, 8192, 16384, 32768)
KINDS = ("chunked", "sliding")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

# kind -> (times SDPA with a mask, times compiled flex_attention), bf16 at 8,192 tokens.
WANTED = {"chunked": (15.0, 1.9), "sliding": (8.0, 1.15)}


def inputs(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v ``[1, H, T, D]`` as a model makes them: views of ``[1, T, H, D]``."""
    torch.manual_seed(0)
    return tuple(  # type: ignore[return-value]
        torch.randn(1, tokens, HEADS, DIM).to(dtype).transpose(1, 2) for _ in range(3)
    )


def visible(kind: str, q: Tensor, k: Tensor) -> Tensor:
    """The predicate of flex_attention's mask_mod and of the dense mask."""
    if kind == "sliding":
        return (k <= q) & (q - k < SPAN)
    return (k <= q) & (q // SPAN == k // SPAN)


def ours(kind: str, q: Tensor, k: Tensor, v: Tensor) -> Case:
    flag = {"sliding": "window", "chunked": "chunk"}[kind]
    return lambda: ops.local_attend(q, k, v, scale=DIM**-0.5, causal=True, **{flag: SPAN})


def padded(kind: str, q: Tensor, k: Tensor, v: Tensor) -> Case:
    """The same under the key padding mask that generate always passes."""
    flag = {"sliding": "window", "chunked": "chunk"}[kind]
    mask = torch.ones(1, 1, 1, k.shape[2], dtype=torch.bool)
    return lambda: ops.local_attend(q, k, v, mask, scale=DIM**-0.5, causal=True, **{flag: SPAN})


def stock(kind: str, tokens: int, dtype: torch.dtype, backend: str) -> Case:
    """SDPA under a mask made in the model, compiled."""
    q, k, v = inputs(tokens, dtype)

    @torch.compile(backend=backend, dynamic=False)
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        index = torch.arange(q.shape[2])
        return sdpa(q, k, v, attn_mask=visible(kind, index[:, None], index))

    return lambda: attention(q, k, v)


def cases(kind: str, tokens: int, dtype: torch.dtype, flex: bool) -> dict[str, Case]:
    q, k, v = inputs(tokens, dtype)
    index = torch.arange(tokens)
    mask = visible(kind, index[:, None], index)
    found: dict[str, Case] = {"sdpa mask": lambda: sdpa(q, k, v, attn_mask=mask)}
    if flex:
        block_mask = create_block_mask(
            lambda b, h, q, k: visible(kind, q, k), None, None, tokens, tokens, device="cpu"
        )
        compiled = torch.compile(flex_attention)
        found["flex compiled"] = lambda: compiled(q, k, v, block_mask=block_mask)
    if kind == "chunked" and tokens % SPAN == 0:
        qc, kc, vc = (x.unflatten(2, (-1, SPAN))[0].transpose(0, 1) for x in (q, k, v))
        found["sdpa on chunk views"] = lambda: (
            sdpa(qc, kc, vc, is_causal=True).transpose(0, 1).flatten(1, 2)[None]
        )
    found["local_attend"] = ours(kind, q, k, v)
    found["local_attend, padding mask"] = padded(kind, q, k, v)
    return found


def main() -> int:
    bench = Bench.from_args("local_attention", __doc__, threads=2)
    long = LONG // 4 if bench.quick else LONG
    growth = GROWTH[:3] if bench.quick else GROWTH
    for kind in KINDS:
        for name, dtype in DTYPES.items():
            what = f"{kind} {name}"
            rows = bench.compare(f"{what}, T {long}", cases(kind, long, dtype, flex=True))
            for against, wanted in zip(("sdpa mask", "flex compiled"), WANTED[kind]):
                bench.check(
                    f"{what}, T {long}: times faster than {against}",
                    rows.speedup("local_attend", against),
                    at_least=wanted if name == "bf16" and not bench.quick else None,
                )
    for kind in KINDS:
        for name, dtype in DTYPES.items():
            short = cases(kind, SHORT, dtype, flex=False)
            rows = bench.compare(f"{kind} {name}, T {SHORT}", short, runs=101)
            what = f"{kind} {name}, T {SHORT}: times faster than sdpa mask"
            bench.check(f"{what}, the op", rows.speedup("local_attend", "sdpa mask"))
            # In a model, a proved site this short becomes SDPA's causal flag.
            models = {b: stock(kind, SHORT, dtype, b) for b in ("inductor", "kvtailor")}
            rows = bench.compare(f"{kind} {name}, T {SHORT}, compiled", models, runs=101)
            speedup = rows.speedup("kvtailor", "inductor")
            bench.check(f"{what}, both compiled", speedup, at_least=1.0)
    for kind in KINDS:
        for name, dtype in DTYPES.items():
            times, peaks = [], []
            for tokens in growth:
                q, k, v = inputs(tokens, dtype)
                run = ours(kind, q, k, v)
                what = f"{kind} {name}, T {tokens}, alone"
                rows = bench.compare(what, {"local_attend": run}, show=False)
                times.append(rows.cases["local_attend"].median)
                peaks.append(peak_memory(run))
            span = f"T {growth[0]} to {growth[-1]}"
            bench.check(
                f"{kind} {name}, {span}: exponent of time", exponent(growth, times), at_most=1.1
            )
            if None in peaks:
                bench.note(f"{kind} {name}: peak memory cannot be read on this system")
                continue
            # Resident memory is read in steps that are coarse beside the smallest size.
            needed = [float(p or 1) for p in peaks]
            bench.check(
                f"{kind} {name}, T {growth[1]} to {growth[-1]}: exponent of peak memory",
                exponent(growth[1:], needed[1:]),
                at_most=1.1,
            )
            for tokens, seconds, peak in zip(growth, times, needed):
                bench.note(
                    f"{kind} {name}, T {tokens}: {1e3 * seconds:.1f} ms, "
                    f"peak {peak / 2**20:.1f} MiB"
                )
    return bench.finish()


if __name__ == "__main__":
    with torch.no_grad():
        raise SystemExit(main())
