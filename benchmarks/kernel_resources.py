"""Compile the kernels without a GPU and list registers, shared memory and spills.

    python -m kvtailor.benchmarks.kernel_resources  # what stands for the rest, every target
    python -m kvtailor.benchmarks.kernel_resources --all  # every configuration of the launch table
    python -m kvtailor.benchmarks.kernel_resources --all --target cuda:90 --dtype bf16 --dim 128

Targets are cuda:80, cuda:90 and hip:gfx942. ``--json`` prints one line per kernel instead of a
table. Exits 1 if a kernel does not compile or breaks a limit of ``problems``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvtailor.kernels import launch as launches

TARGETS = tuple(launches.SHARED_LIMIT)
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
DIMS = (16, 64, 80, 96, 100, 128, 256)

# What a layer may ask of the kernel, and what of it changes the code.
VARIANTS: dict[str, dict[str, Any]] = {
    "window": {"window": 512},
    "causal": {},
    "chunk": {"chunk": 512, "origin": True},
    "extras": {"window": 512, "softcap": 50.0, "sinks": True, "alibi": True},
    "bias": {"mask": 2, "positions": True},
    "bool": {"mask": 1, "positions": True},
    "keys": {"key_mask": True, "chunk": 512, "origin": True},
    "splits": {"splits": 8},
}


class Case(NamedTuple):
    """One kernel to compile."""

    kernel: str
    target: str
    dtype: str
    dim: int
    kind: str = ""
    layout: str = ""
    variant: str = ""
    group: int = 4
    page: int = 16


class Usage(NamedTuple):
    """What the compiler made of it. Registers per thread; shared memory and spills in bytes."""

    registers: int
    shared: int
    spills: int


def all_cases(targets: tuple[str, ...] = TARGETS) -> Iterator[Case]:
    """Every entry of the launch table with every variant; other dims and fp16 with one."""
    for target in targets:
        for dtype, dim in ((dtype, dim) for dtype in ITEMSIZE for dim in DIMS):
            whole = dtype != "fp16" and dim in launches.TABLE["cuda", "decode", 2]
            for variant in VARIANTS if whole else ("window",):
                for kind in ("decode",) if variant == "splits" else ("prefill", "decode"):
                    for layout in ("dense",) if variant == "keys" else ("paged", "dense"):
                        yield Case("attend", target, dtype, dim, kind, layout, variant)
            yield Case("merge", target, dtype, dim)
            yield Case("store_kv", target, dtype, dim)
        # Groups that widen the decode tile, and a block that holds whole tiles.
        yield Case("attend", target, "bf16", 128, "decode", "paged", "window", group=64)
        yield Case("attend", target, "bf16", 64, "decode", "paged", "window", page=256)
        yield Case("attend", target, "bf16", 128, "prefill", "paged", "window", page=64)


def some_cases(targets: tuple[str, ...] = TARGETS) -> Iterator[Case]:
    """A sample that meets every kernel, kind, layout, variant and column of the table."""
    for target in targets:
        for dtype, dim, kind, layout, variant in (
            ("bf16", 64, "prefill", "paged", "window"),
            ("bf16", 80, "prefill", "dense", "extras"),
            ("bf16", 128, "prefill", "dense", "keys"),
            ("bf16", 128, "prefill", "paged", "bias"),
            ("bf16", 128, "decode", "paged", "splits"),
            ("bf16", 256, "prefill", "dense", "causal"),
            ("fp16", 64, "decode", "dense", "window"),
            ("fp32", 64, "prefill", "paged", "chunk"),
            ("fp32", 128, "decode", "paged", "bool"),
        ):
            yield Case("attend", target, dtype, dim, kind, layout, variant)
        yield Case("merge", target, "bf16", 128)
        yield Case("store_kv", target, "bf16", 80)


def _gpu_target(target: str) -> Any:
    from triton.backends.compiler import GPUTarget

    vendor, arch = target.split(":")
    return GPUTarget("cuda", int(arch), 32) if vendor == "cuda" else GPUTarget("hip", arch, 64)


def _compile(
    kernel: Any, types: dict[str, str], consts: dict[str, Any], target: str, **options: int
) -> Any:
    """Compile as a launch would: pointers missing from ``types`` are None, other numbers int32.

    Pointers and strides are taken for multiples of 16, as they most often are.
    """
    import triton
    from triton.compiler import ASTSource

    constexprs, signature, attrs = dict(consts), {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name not in consts and name not in types and name.endswith("_ptr"):
            constexprs[name] = None
        signature[name] = "constexpr" if name in constexprs else types.get(name, "i32")
        if signature[name].startswith("*") or name.startswith("stride_"):
            attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs, attrs)
    return triton.compile(source, target=_gpu_target(target), options=options)


def usage(compiled: Any, target: str) -> Usage:
    """Registers, shared memory and spilt bytes of a compiled kernel, from its assembly."""
    shared = int(compiled.metadata.shared)
    if target.startswith("hip"):
        text = compiled.asm["amdgcn"]

        def field(name: str) -> int:
            found = re.search(rf"\.{name}:\s*(\d+)", text)
            if found is None:
                raise RuntimeError(f"no {name} in the kernel's metadata")
            return int(found[1])

        shared = max(shared, field("group_segment_fixed_size"))
        return Usage(field("vgpr_count"), shared, 4 * field("vgpr_spill_count"))
    from triton.backends.nvidia.compiler import get_ptxas

    arch = int(target.split(":")[1])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(compiled.asm["ptx"])
        name = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
        log = subprocess.run(
            [get_ptxas(arch).path, "-v", f"--gpu-name={name}", str(path), "-o", os.devnull],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill", log)
    if registers is None or not spills:
        raise RuntimeError(f"ptxas reported no registers or spills: {log}")
    return Usage(int(registers[1]), shared, sum(map(int, spills)))


def _compile_attend(case: Case) -> tuple[Any, dict[str, int]]:
    from kvtailor.kernels import paged_attention as attention

    vendor = case.target.split(":")[0]
    features = VARIANTS[case.variant]
    mask, splits = features.get("mask", attention.NO_MASK), features.get("splits", 1)
    rows = 1 if case.kind == "decode" else 512
    kind, launch = launches.launch_for(
        vendor, case.dim, ITEMSIZE[case.dtype], rows, case.group, mask != attention.NO_MASK
    )
    paged = case.layout == "paged"
    shape = attention.Shape(
        8, 8 * rows, rows, 8 * case.group, 8, case.dim, case.dim, 4096, paged=paged
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
        interior=kind == "prefill",
    )
    data = f"*{case.dtype}"
    types = {"q_ptr": data, "k_ptr": data, "v_ptr": data, "scale": "fp32", "softcap": "fp32"}
    types["out_ptr"] = "*fp32" if splits > 1 else data
    for there, more in (
        (splits > 1, {"lse_ptr": "*fp32"}),
        (paged, {"table_ptr": "*i32", "start_ptr": "*i32", "lens_ptr": "*i32"}),
        (features.get("origin"), {"origin_ptr": "*i64"}),
        (features.get("positions"), {"position_ptr": "*i64"}),
        (features.get("sinks"), {"sink_ptr": data}),
        (features.get("alibi"), {"slope_ptr": "*fp32"}),
        (features.get("key_mask"), {"key_mask_ptr": "*u8"}),
        (mask == attention.BOOL_MASK, {"mask_ptr": "*u8"}),
        (mask == attention.BIAS, {"mask_ptr": "*fp32"}),
    ):
        if there:
            types |= more
    compiled = _compile(
        attention.attend_kernel, types, consts, case.target,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    tiles = {name: side for name, side in consts.items() if name.startswith("BLOCK_")}
    return compiled, {**tiles, "warps": launch.warps, "stages": launch.stages}


def _compile_merge(case: Case) -> tuple[Any, dict[str, int]]:
    from kvtailor.kernels import paged_attention as attention

    block_r, block_dv = attention.merge_tile(8, case.dim)
    consts = {"HEADS": 32, "DV": case.dim, "SPLITS": 8, "BLOCK_R": block_r, "BLOCK_DV": block_dv}
    types = dict.fromkeys(("partial_ptr", "top_ptr", "total_ptr", "lse_ptr"), "*fp32")
    types["out_ptr"] = f"*{case.dtype}"
    return _compile(attention.merge_kernel, types, consts, case.target, num_warps=4), {}


def _compile_store_kv(case: Case) -> tuple[Any, dict[str, int]]:
    from kvtailor.kernels import store_kv

    consts = {"BLOCK_SIZE": 16, **store_kv.constants(8, case.dim, case.dim)}
    types = dict.fromkeys(("k_ptr", "v_ptr", "k_page_ptr", "v_page_ptr"), f"*{case.dtype}")
    types["slot_ptr"] = "*i64"
    return _compile(store_kv.store_kv_kernel, types, consts, case.target, num_warps=4), {}


COMPILE = {"attend": _compile_attend, "merge": _compile_merge, "store_kv": _compile_store_kv}


def compile_case(case: Case) -> tuple[Usage, dict[str, int]]:
    """Compile one kernel: what it uses, and its tile sides, warps and stages."""
    compiled, tiles = COMPILE[case.kernel](case)
    return usage(compiled, case.target), tiles


def problems(case: Case, used: Usage, tiles: dict[str, int]) -> list[str]:
    """What is wrong with a compiled kernel; empty if it may ship."""
    found = []
    limit = launches.SHARED_LIMIT[case.target]
    if used.shared > limit:
        found.append(f"shared memory {used.shared} exceeds {limit}")
    if case.target == "cuda:90" and case.dim <= 128 and used.spills:
        found.append(f"spills {used.spills} bytes")
    for name, side in tiles.items():
        if name.startswith("BLOCK_") and side < launches.MIN_TILE:
            found.append(f"{name} is {side}, below {launches.MIN_TILE}")
    return found


HEADER = (
    f"{'target':<11}{'kernel':<9}{'dtype':<6}{'dim':>4} {'kind':<8}{'layout':<7}"
    f"{'variant':<8}{'tile':>9}{'warps':>6}{'regs':>6}{'shared':>8}{'spills':>7}"
)


def line(case: Case, used: Usage, tiles: dict[str, int], wrong: list[str]) -> str:
    """One kernel's row under ``HEADER``."""
    tile = f"{tiles['BLOCK_M']}x{tiles['BLOCK_K']}" if tiles else ""
    return (
        f"{case.target:<11}{case.kernel:<9}{case.dtype:<6}{case.dim:>4} {case.kind:<8}"
        f"{case.layout:<7}{case.variant:<8}{tile:>9}{tiles.get('warps', 4):>6}"
        f"{used.registers:>6}{used.shared:>8}{used.spills:>7}  {'; '.join(wrong)}"
    ).rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--json", action="store_true")
    for name, of in (
        ("kernel", str), ("target", str), ("dtype", str), ("dim", int), ("kind", str),
        ("layout", str), ("variant", str),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", action="append", type=of, help=f"only this {name}")
    options = parser.parse_args()
    if launches.interpreting():
        parser.error("TRITON_INTERPRET is set: nothing would be compiled")

    failed = 0
    if not options.json:
        print(HEADER)
    for case in all_cases() if options.all else some_cases():
        if any(
            chosen is not None and getattr(case, name) not in chosen
            for name, chosen in vars(options).items()
            if name in Case._fields
        ):
            continue
        try:
            used, tiles = compile_case(case)
            wrong = problems(case, used, tiles)
        except Exception as error:
            used, tiles, wrong = Usage(0, 0, 0), {}, [f"{type(error).__name__}: {error}"]
        failed += bool(wrong)
        if options.json:
            row = {**case._asdict(), **used._asdict(), "tiles": tiles, "problems": wrong}
            print(json.dumps(row), flush=True)
        else:
            print(line(case, used, tiles, wrong), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
