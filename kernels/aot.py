"""Compile the kernels without a GPU and list registers, shared memory and spills.

    python -m kvtailor.kernels.aot --target cuda:90 --dtype bf16 --dim 64 --dim 128

Targets are ``cuda:80``, ``cuda:90`` and ``hip:gfx942``; every configuration of the launch table
when nothing is selected. One JSON line per kernel, or a table with ``--table``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

TARGETS = ("cuda:80", "cuda:90", "hip:gfx942")
DTYPES = {"fp16": 2, "bf16": 2, "fp32": 4}
DIMS = (16, 64, 80, 96, 128, 256)

# Attributes of the attention: what a plain causal layer, and ones with everything, ask for.
VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 512},
    "chunk": {"chunk": 512, "origin": True},
    "softcap": {"window": 512, "softcap": 50.0, "sinks": True, "alibi": True},
    "bias": {"mask": 2, "positions": True},
    "bool": {"mask": 1, "positions": True},
    "keys": {"key_mask": True, "chunk": 512, "origin": True},
    "splits": {"splits": 8},
}


class Case(NamedTuple):
    """One kernel to compile."""

    target: str
    dtype: str
    dim: int
    value_dim: int
    kind: str
    layout: str
    variant: str
    group: int = 4
    page: int = 16


class Usage(NamedTuple):
    """What the compiler made of it. Bytes, and registers per thread."""

    registers: int
    shared: int
    spills: int


def cases(
    targets: tuple[str, ...] = TARGETS,
    dtypes: tuple[str, ...] = tuple(DTYPES),
    dims: tuple[int, ...] = DIMS,
    variants: tuple[str, ...] = tuple(VARIANTS),
) -> Iterator[Case]:
    """Kinds, layouts and variants that occur together."""
    for target in targets:
        for dtype in dtypes:
            for dim in dims:
                for kind in ("prefill", "decode"):
                    for variant in variants:
                        if variant == "splits" and kind == "prefill":
                            continue
                        for layout in ("paged", "dense"):
                            if variant == "keys" and layout == "paged":
                                continue
                            yield Case(target, dtype, dim, dim, kind, layout, variant)


def _gpu_target(target: str) -> Any:
    from triton.backends.compiler import GPUTarget

    vendor, arch = target.split(":")
    if vendor == "cuda":
        return GPUTarget("cuda", int(arch), 32)
    return GPUTarget("hip", arch, 64)


def _compile(kernel: Any, types: dict[str, str], consts: dict[str, Any], case: Case, **options):  # type: ignore[no-untyped-def]
    import triton
    from triton.compiler import ASTSource

    constexprs = dict(consts)
    signature = {}
    attrs = {}
    for i, name in enumerate(kernel.arg_names):
        kind = types.get(name, "constexpr" if name in consts else "")
        if not kind and name.endswith("_ptr"):
            kind = "constexpr"
            constexprs[name] = None
        if not kind:
            # Strides: what a launch passes most often is a multiple of 16.
            kind = "i32"
            attrs[(i,)] = [["tt.divisibility", 16]]
        if kind.startswith("*"):
            attrs[(i,)] = [["tt.divisibility", 16]]
        signature[name] = kind
    source = ASTSource(kernel, signature, constexprs, attrs)
    return triton.compile(source, target=_gpu_target(case.target), options=options)


def usage(compiled: Any, target: str) -> Usage:
    """Registers, shared memory and spilt bytes of a compiled kernel."""
    shared = int(compiled.metadata.shared)
    if target.startswith("hip"):
        text = compiled.asm["amdgcn"]

        def field(name: str) -> int:
            found = re.search(rf"\.{name}:\s*(\d+)", text)
            if found is None:
                raise RuntimeError(f"no {name} in the kernel's metadata")
            return int(found[1])

        registers = field("vgpr_count")
        spills = field("vgpr_spill_count") * 4
        return Usage(registers, max(shared, field("group_segment_fixed_size")), spills)
    from triton.backends.nvidia.compiler import get_ptxas

    arch = int(target.split(":")[1])
    ptxas = get_ptxas(arch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(compiled.asm["ptx"])
        suffix = "a" if arch >= 90 else ""
        log = subprocess.run(
            [ptxas.path, "-v", f"--gpu-name=sm_{arch}{suffix}", str(path), "-o", os.devnull],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    registers = int(re.search(r"Used (\d+) registers", log)[1])  # type: ignore[index]
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", log))
    return Usage(registers, shared, spills)


def compile_case(case: Case) -> tuple[Usage, dict[str, Any]]:
    """Compile one attention kernel; its usage and the tile sizes."""
    from kvtailor.kernels import launch as launches
    from kvtailor.kernels import paged_attention as attention

    assert not attention.INTERPRETED, "unset TRITON_INTERPRET"
    vendor = case.target.split(":")[0]
    features = VARIANTS[case.variant]
    rows = 1 if case.kind == "decode" else 512
    kind, launch = launches.launch_for(
        vendor,
        max(case.dim, case.value_dim),
        DTYPES[case.dtype],
        rows,
        case.group,
        masked=features.get("mask", 0) != 0,
    )
    paged = case.layout == "paged"
    mask = features.get("mask", 0)
    splits = features.get("splits", 1)
    shape = attention.Shape(
        8, 8 * rows, rows, 8 * case.group, 8, case.dim, case.value_dim, 4096, paged
    )
    consts = attention.constants(
        shape,
        launch,
        page=case.page if paged else 0,
        causal=True,
        window=features.get("window"),
        chunk=features.get("chunk"),
        softcap=features.get("softcap"),
        mask=mask,
        key_mask=features.get("key_mask", False),
        splits=splits,
        vendor=vendor,
        upcast=False,
        interior=kind != "decode",
    )
    data = f"*{case.dtype}"
    types = {
        "q_ptr": data,
        "k_ptr": data,
        "v_ptr": data,
        "out_ptr": "*fp32" if splits > 1 else data,
        "scale": "fp32",
        "softcap": "fp32",
        **{
            name: "i32"
            for name in ("q_offset", "window", "chunk", "num_seqs", "num_rows", "q_len", "k_len")
        },
        "mask_len": "i32",
    }
    if splits > 1:
        types["lse_ptr"] = "*fp32"
    if paged:
        types |= {"table_ptr": "*i32", "start_ptr": "*i32", "lens_ptr": "*i32"}
    if features.get("origin"):
        types["origin_ptr"] = "*i64"
    if features.get("positions"):
        types["position_ptr"] = "*i64"
    if features.get("sinks"):
        types["sink_ptr"] = data
    if features.get("alibi"):
        types["slope_ptr"] = "*fp32"
    if features.get("key_mask"):
        types["key_mask_ptr"] = "*u8"
    if mask:
        types["mask_ptr"] = "*u8" if mask == 1 else "*fp32"
    compiled = _compile(
        attention.attend_kernel, types, consts, case,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    tiles = {k: v for k, v in consts.items() if k.startswith("BLOCK_")}
    return usage(compiled, case.target), {**tiles, **launch._asdict()}


if __name__ == "__main__":
    import time

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--dtype", action="append", choices=list(DTYPES))
    parser.add_argument("--dim", action="append", type=int)
    parser.add_argument("--variant", action="append", choices=list(VARIANTS))
    parser.add_argument("--kind", action="append")
    parser.add_argument("--layout", action="append")
    o = parser.parse_args()
    for case in cases(
        tuple(o.target or TARGETS),
        tuple(o.dtype or DTYPES),
        tuple(o.dim or DIMS),
        tuple(o.variant or VARIANTS),
    ):
        if o.kind and case.kind not in o.kind or o.layout and case.layout not in o.layout:
            continue
        t = time.time()
        try:
            u, tiles = compile_case(case)
            print(
                *case,
                u,
                tiles["BLOCK_M"],
                tiles["BLOCK_K"],
                tiles["warps"],
                tiles["stages"],
                f"{time.time() - t:.1f}s",
                flush=True,
            )
        except Exception as e:
            print(*case, "FAILED", type(e).__name__, str(e)[:300], flush=True)
