"""What the Triton launchers share: is Triton usable, and with which tile sizes.

Imports no Triton, so it answers on any machine.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from typing import NamedTuple

import torch
from torch import Tensor

log = logging.getLogger(__name__)

# tl.dot wants at least this many rows, columns and depth.
MIN_TILE = 16
MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# Shared memory of one thread block, in bytes.
SHARED_LIMIT = {"cuda:80": 163 * 1024, "cuda:90": 227 * 1024, "hip:gfx942": 64 * 1024}


class Launch(NamedTuple):
    """Tile sizes of one program: ``block_m`` packed query rows by ``block_k`` keys."""

    block_m: int
    block_k: int
    warps: int
    stages: int


# (vendor, kind, bytes per element) -> padded head dim -> launch. "decode" is for tiles with few
# query rows, where the keys' bytes are the cost; "prefill" for the rest, where the dots are;
# "masked" is prefill under a mask with rows, which takes registers. Sized by
# `benchmarks/kernel_resources.py`: no spills on cuda:90 up to head dim 128.
TABLE: dict[tuple[str, str, int], dict[int, Launch]] = {
    ("cuda", "prefill", 2): {
        64: Launch(128, 64, 8, 3),
        128: Launch(128, 64, 8, 3),
        256: Launch(64, 32, 8, 2),
    },
    ("cuda", "masked", 2): {
        64: Launch(64, 32, 8, 2),
        128: Launch(64, 32, 8, 2),
        256: Launch(64, 16, 8, 2),
    },
    ("cuda", "decode", 2): {
        64: Launch(16, 128, 4, 3),
        128: Launch(16, 64, 4, 3),
        256: Launch(16, 32, 4, 3),
    },
    ("cuda", "prefill", 4): {
        64: Launch(64, 32, 8, 2),
        128: Launch(32, 32, 8, 2),
        256: Launch(16, 16, 8, 2),
    },
    ("cuda", "masked", 4): {
        64: Launch(32, 32, 8, 2),
        128: Launch(16, 32, 8, 2),
        256: Launch(16, 16, 8, 2),
    },
    ("cuda", "decode", 4): {
        64: Launch(16, 64, 4, 2),
        128: Launch(16, 32, 4, 2),
        256: Launch(16, 16, 8, 2),
    },
    ("hip", "prefill", 2): {
        64: Launch(128, 64, 8, 1),
        128: Launch(64, 64, 4, 1),
        256: Launch(64, 32, 4, 1),
    },
    ("hip", "masked", 2): {
        64: Launch(64, 64, 4, 1),
        128: Launch(64, 32, 4, 1),
        256: Launch(64, 16, 4, 1),
    },
    ("hip", "decode", 2): {
        64: Launch(16, 64, 4, 1),
        128: Launch(16, 64, 4, 1),
        256: Launch(16, 32, 4, 1),
    },
    ("hip", "prefill", 4): {
        64: Launch(64, 32, 4, 1),
        128: Launch(64, 32, 4, 1),
        256: Launch(32, 16, 4, 1),
    },
    ("hip", "masked", 4): {
        64: Launch(64, 32, 4, 1),
        128: Launch(32, 32, 4, 1),
        256: Launch(32, 16, 4, 1),
    },
    ("hip", "decode", 4): {
        64: Launch(16, 32, 4, 1),
        128: Launch(16, 32, 4, 1),
        256: Launch(16, 16, 4, 1),
    },
}

# Decode tiles grow to hold all the query heads of one key head, up to here.
MAX_DECODE_M = 64


def next_power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def padded(head_dim: int) -> int:
    """Side of the tile that holds ``head_dim`` columns."""
    return max(MIN_TILE, next_power_of_two(head_dim))


def unit_last(x: Tensor) -> Tensor:
    """x, or a copy of it, whose last dimension the kernels can walk without a stride."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the attention kernel takes their dtypes and head dims."""
    dims = max(q.shape[-1], v.shape[-1])
    return q.dtype in DTYPES and q.dtype == k.dtype == v.dtype and dims <= MAX_HEAD_DIM


def launch_for(
    vendor: str, head_dim: int, itemsize: int, rows: int, group: int, masked: bool
) -> tuple[str, Launch]:
    """Kind and launch for about ``rows`` query rows per sequence, ``group`` heads per key head.

    ``head_dim`` is the larger of D and Dv; ``masked`` says whether a mask with rows comes along.
    """
    side = max(min(TABLE[vendor, "decode", itemsize]), padded(head_dim))
    if rows > 1 and rows * group > MIN_TILE:
        kind = "masked" if masked else "prefill"
        return kind, TABLE[vendor, kind, itemsize][side]
    launch = TABLE[vendor, "decode", itemsize][side]
    wanted = max(launch.block_m, next_power_of_two(min(max(rows, 1) * group, MAX_DECODE_M)))
    widest = TABLE[vendor, "masked", itemsize][side].block_m
    block_k = max(MIN_TILE, launch.block_k // 2) if masked else launch.block_k
    return "decode", launch._replace(block_m=min(wanted, widest), block_k=block_k)


def num_splits(programs: int, max_keys: int, processors: int) -> int:
    """Over how many programs to split the keys: a power of two, from shapes alone.

    Splitting pays when the programs leave processors idle and each part keeps a few tiles. The
    lengths on the device are not read, so that the choice can live in a CUDA graph.
    """
    if programs == 0:
        return 1
    idle = 2 * processors // programs
    parts = min(idle, max_keys // 256, 64)
    return 1 << (parts.bit_length() - 1) if parts > 1 else 1


def interpreting() -> bool:
    """Whether kernels decorated from now on run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def disabled_reason() -> str | None:
    """Why Triton kernels cannot run in this process, in one line; None if they can."""
    if not has_triton():
        return "Triton kernels are disabled: triton is not installed"
    if interpreting() or torch.cuda.is_available():
        return None
    return "Triton kernels are disabled: no GPU (TRITON_INTERPRET=1 runs them in the interpreter)"


@functools.cache
def usable(op: str) -> bool:
    """Whether ``op`` runs as a Triton kernel on GPU tensors; if not, says so once."""
    reason = disabled_reason()
    if reason is not None:
        log.warning("%s; %s runs in plain torch", reason, op)
    return reason is None


@functools.cache
def processors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def vendor() -> str:
    return "hip" if torch.version.hip is not None else "cuda"
