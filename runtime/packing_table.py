"""When one matmul over packed weights beats one per part: a small table of measurements.

``packing_table.json`` beside this file holds what was measured where kvtailor is developed;
``kvtailor calibrate`` measures on the machine at hand and writes its own, which is then used.
"""

from __future__ import annotations

import json
import logging
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor
from torch.nn import functional as F

from kvtailor.files import cache_base, written_whole

log = logging.getLogger(__name__)

SHIPPED = Path(__file__).with_name("packing_table.json")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1500, 2048)
# One matmul is taken where it is faster by more than what such measurements scatter by.
WORTH_IT = 1.05
# Where nobody measured (a GPU, as yet): one launch instead of several does not lose.
UNMEASURED = 1.1
# Input width, parts, width of a part: two and three projections of a layer, and the keys and
# values of twelve layers.
SHAPES = tuple((K, parts, K) for K in (512, 1024, 2048) for parts in (2, 3)) + (
    (512, 12, 512),
    (1024, 24, 1024),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Entry(BaseModel):
    """gain[i]: time of separate matmuls over time of one, at rows[i] of the table."""

    model_config = ConfigDict(extra="forbid")

    dtype: str
    inputs: int
    parts: int
    width: int
    gain: list[float]


class Device(BaseModel):
    """What was measured on one device."""

    model_config = ConfigDict(extra="forbid")

    machine: str
    torch: str
    threads: int
    rows: list[int]
    entries: list[Entry]


Table = dict[str, Device]


def table_path() -> Path | None:
    """Where ``kvtailor calibrate`` writes; None where nothing is kept on disk."""
    folder = cache_base()
    return None if folder is None else folder / "packing_table.json"


def read_table(path: Path) -> Table:
    """Raises ValueError, one line, for a file that is no table."""
    try:
        return {kind: Device(**fields) for kind, fields in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError, ValidationError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"{path.name} must be written by kvtailor calibrate: {first}") from None


@lru_cache
def current_table() -> Table:
    """The shipped table, and over it what was calibrated here."""
    table = read_table(SHIPPED)
    path = table_path()
    if path is not None and path.exists():
        try:
            table |= read_table(path)
        except ValueError as error:
            log.warning("%s; the shipped table is used", error)
    return table


def gains(
    table: Table, device: str, dtype: torch.dtype, inputs: int, parts: int, width: int
) -> list[tuple[int, float]]:
    """(rows, gain) of the measured shape nearest to this one, by ratio; one pair if unmeasured."""
    name = str(dtype).removeprefix("torch.")
    known = [e for e in table[device].entries if e.dtype == name] if device in table else []
    if not known:
        return [(1, UNMEASURED)]

    def distance(entry: Entry) -> float:
        pairs = ((entry.inputs, inputs), (entry.parts, parts), (entry.width, width))
        return sum(abs(math.log2(a / b)) for a, b in pairs)

    return list(zip(table[device].rows, min(known, key=distance).gain))


def gain_at(gains: Sequence[tuple[int, float]], rows: int) -> float:
    """The gain at the measured row count nearest to this one, by ratio."""
    return min(gains, key=lambda pair: abs(math.log2(max(rows, 1) / pair[0])))[1]


def flips(gains: Iterable[tuple[int, float]]) -> tuple[int, ...]:
    """Row counts at which the faster form changes, as ``packed_linear`` takes them."""
    out: list[int] = []
    packed, before = True, 1
    for rows, gain in gains:
        if (gain >= WORTH_IT) != packed:
            packed = not packed
            # Between two measurements, each counts up to their geometric mean.
            out.append(1 if rows == 1 else math.ceil(math.sqrt(before * rows)))
        before = rows
    return tuple(out)


def form_text(flips: Sequence[int]) -> str:
    """The forms by rows in words: ``one matmul for 1-63, 256+ rows``."""
    if not flips:
        return "one matmul"
    if tuple(flips) == (1,):
        return "separate"
    ranges = []
    for low, high in zip_longest([1, *flips[1::2]], flips[::2]):
        if high is None:
            ranges.append(f"{low}+")
        elif high > low:
            ranges.append(f"{low}-{high - 1}" if high - 1 > low else str(low))
    return f"one matmul for {', '.join(ranges)} rows"


def measure(
    device: str,
    progress: Callable[[str], None] = lambda text: None,
    *,
    shapes: Sequence[tuple[int, int, int]] = SHAPES,
    rows: Sequence[int] = ROWS,
    dtypes: Sequence[torch.dtype] = DTYPES,
    seconds: float = 0.15,
) -> Device:
    """Measure every shape, about ``seconds`` per form; progress gets a line per shape."""
    entries = []
    for dtype in dtypes:
        for inputs, parts, width in shapes:
            name = str(dtype).removeprefix("torch.")
            progress(f"{name}: {parts} projections {inputs} -> {width}")
            weight = torch.randn(parts * width, inputs, device=device).to(dtype)
            pieces = weight.split(width)
            gain = []
            for M in rows:
                x = torch.randn(M, inputs, device=device).to(dtype)
                gain.append(_gain(x, weight, pieces, seconds))
            entries.append(Entry(dtype=name, inputs=inputs, parts=parts, width=width, gain=gain))
    return Device(
        machine=torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        rows=list(rows),
        entries=entries,
    )


def write_table(path: Path, kind: str, device: Device) -> None:
    """Put one device's measurements into the table at path, atomically."""
    table = read_table(path) if path.exists() else {}
    table[kind] = device
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({name: each.model_dump() for name, each in table.items()})
    with written_whole(path) as part:
        part.write_text(text.replace('{"dtype"', '\n{"dtype"') + "\n")
    current_table.cache_clear()


def _gain(x: Tensor, weight: Tensor, pieces: Sequence[Tensor], seconds: float) -> float:
    """Median time of one matmul per piece over that of one for all, the two taking turns."""
    times: tuple[list[float], list[float]] = ([], [])
    with torch.inference_mode():
        for turn in range(200):
            for form, taken in enumerate(times):
                _synchronise(x)
                start = time.perf_counter()
                if form:
                    F.linear(x, weight)
                else:
                    for piece in pieces:
                        F.linear(x, piece)
                _synchronise(x)
                if turn:
                    taken.append(time.perf_counter() - start)
            if turn >= 5 and sum(times[0]) >= seconds:
                break
    separate, packed = map(statistics.median, times)
    return round(separate / packed, 3)


def _synchronise(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def cpu_name() -> str:
    """What the processor calls itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
