"""Which form of packed linears is fastest: a small table of measurements.

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
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator
from torch import Tensor

from kvtailor.files import cache_base, read_kept, written_whole
from kvtailor.kernels.packed_linear import Form, in_form
from kvtailor.runtime.packed_weights import concatenated

log = logging.getLogger(__name__)

# A package may be installed as links.
SHIPPED = Path(__file__).with_name("packing_table.json").resolve()
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1500, 2048)
# Another form than separate matmuls is taken where it is faster by more than what such
# measurements scatter by.
WORTH_IT = 1.1
# Where nobody measured (a GPU, as yet): one launch instead of several does not lose.
UNMEASURED = 1.1
# Input width, parts, width of a part: two and three projections of a layer, and the keys and
# values of twelve layers.
SHAPES = tuple((K, parts, K) for K in (512, 1024, 2048) for parts in (2, 3)) + (
    (512, 12, 512),
    (1024, 24, 1024),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Bytes of a table; the shipped one has a hundredth.
_LARGEST = 1 << 20

Size = Annotated[PositiveInt, Field(le=1 << 31)]
Gain = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Entry(BaseModel):
    """Time of separate matmuls over that of one, and of a batched one, at rows[i] of the table."""

    model_config = ConfigDict(extra="forbid")

    dtype: str
    inputs: Size
    parts: Size
    width: Size
    one: list[Gain]
    batched: list[Gain]


class Device(BaseModel):
    """What was measured on one device. rows ascend."""

    model_config = ConfigDict(extra="forbid")

    machine: str
    torch: str
    threads: int
    rows: Annotated[list[Size], Field(min_length=1)]
    entries: list[Entry]

    @model_validator(mode="after")
    def _is_whole(self) -> Device:
        if self.rows != sorted(set(self.rows)):
            raise ValueError(f"rows must ascend, got {self.rows}")
        for each in self.entries:
            if not len(each.one) == len(each.batched) == len(self.rows):
                got = f"{len(each.one)} and {len(each.batched)}"
                raise ValueError(f"an entry must have {len(self.rows)} gains, got {got}")
        return self


class Measured(NamedTuple):
    """How many times faster than separate matmuls the other forms are, for so many rows."""

    rows: int
    one: float
    batched: float

    def best(self) -> tuple[Form, float]:
        """The form to take and its gain, 1 for separate matmuls.

        Each form must be worth it against the simpler ones before.
        """
        form, gain = Form.SEPARATE, 1.0
        for other, its in ((Form.ONE, self.one), (Form.BATCHED, self.batched)):
            if its >= WORTH_IT * gain:
                form, gain = other, its
        return form, gain


class Plan(NamedTuple):
    """Which form for how many rows, as ``packed_linear`` takes it."""

    borders: tuple[int, ...]
    forms: tuple[Form, ...]


Table = dict[str, Device]


def table_path() -> Path | None:
    """Where ``kvtailor calibrate`` writes; None where nothing is kept on disk."""
    folder = cache_base()
    return None if folder is None else folder / "packing_table.json"


def read_table(path: Path) -> Table:
    """Raises FileNotFoundError; ValueError, one line, for a file that is no table."""
    try:
        text = read_kept(path, _LARGEST)
        return {kind: Device(**fields) for kind, fields in json.loads(text).items()}
    except FileNotFoundError:
        raise
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"{path.name} must be written by kvtailor calibrate: {first}") from None


def _calibrated(path: Path | None) -> Table:
    """What was measured here, if anything was. Raises ValueError for a file that is no table."""
    try:
        return {} if path is None else read_table(path)
    except FileNotFoundError:
        return {}


@lru_cache
def current_table() -> Table:
    """The shipped table, and over it what was calibrated here."""
    table = read_table(SHIPPED)
    try:
        table |= _calibrated(table_path())
    except ValueError as error:
        log.warning("%s; the shipped table is used", error)
    return table


def lookup(
    table: Table, device: str, dtype: torch.dtype, inputs: int, widths: Sequence[int]
) -> list[Measured]:
    """What was measured of the shape nearest to this one, by ratio; one row if nothing was.

    Parts of several widths have no batched form: its gain is 0.
    """
    name = str(dtype).removeprefix("torch.")
    known = [e for e in table[device].entries if e.dtype == name] if device in table else []
    if not known:
        return [Measured(1, UNMEASURED, 0.0)]

    def distance(entry: Entry) -> float:
        width = sum(widths) // len(widths)
        pairs = ((entry.inputs, inputs), (entry.parts, len(widths)), (entry.width, width))
        return sum(abs(math.log2(a / b)) for a, b in pairs)

    entry = min(known, key=distance)
    batched = entry.batched if len(set(widths)) == 1 else len(entry.one) * [0.0]
    return list(map(Measured, table[device].rows, entry.one, batched))


def at_rows(measured: Sequence[Measured], rows: int) -> Measured:
    """The measurement nearest to so many rows, by ratio."""
    return min(measured, key=lambda each: abs(math.log2(max(rows, 1) / each.rows)))


def plan(measured: Sequence[Measured]) -> Plan:
    """The fastest form for any number of rows."""
    borders: list[int] = []
    forms: list[Form] = []
    before = 1
    for each in measured:
        form, _ = each.best()
        if forms and form != forms[-1]:
            # Between two measurements, each counts up to their geometric mean.
            borders.append(math.ceil(math.sqrt(before * each.rows)))
        if not forms or form != forms[-1]:
            forms.append(form)
        before = each.rows
    return Plan(tuple(borders), tuple(forms))


# Whatever the rows, packing does not pay.
NEVER = Plan((), (Form.SEPARATE,))
NAMES = {Form.SEPARATE: "separate", Form.ONE: "one matmul", Form.BATCHED: "batched"}


def plan_text(found: Plan) -> str:
    """The forms by rows in words: ``one matmul for 1-63, batched for 64+ rows``.

    Rows that are not named run separately.
    """
    if len(found.forms) == 1:
        return NAMES[found.forms[0]]
    ranges: dict[Form, list[str]] = {}
    for form, low, high in zip(found.forms, (1, *found.borders), (*found.borders, None)):
        if high is None:
            text = f"{low}+"
        else:
            text = f"{low}-{high - 1}" if high - 1 > low else str(low)
        ranges.setdefault(form, []).append(text)
    ranges.pop(Form.SEPARATE, None)
    named = [f"{NAMES[form]} for {', '.join(texts)}" for form, texts in ranges.items()]
    return f"{'; '.join(named)} rows"


def measure(
    device: str,
    progress: Callable[[str], None] = lambda text: None,
    *,
    shapes: Sequence[tuple[int, int, int]] = SHAPES,
    rows: Sequence[int] = ROWS,
    dtypes: Sequence[torch.dtype] = DTYPES,
    seconds: float = 0.08,
) -> Device:
    """Measure every shape, about ``seconds`` per form; progress gets a line per shape."""
    entries: list[Entry] = []
    for dtype in dtypes:
        for inputs, parts, width in shapes:
            name = str(dtype).removeprefix("torch.")
            progress(f"{name}: {parts} projections {inputs} -> {width}")
            weight = concatenated(
                [torch.randn(width, inputs, device=device).to(dtype) for _ in range(parts)]
            )
            widths = parts * [width]
            pairs = []
            for M in rows:
                x = torch.randn(M, inputs, device=device).to(dtype)
                pairs.append(_gains(x, weight, widths, seconds))
            one, batched = map(list, zip(*pairs))
            entries.append(
                Entry(
                    dtype=name,
                    inputs=inputs,
                    parts=parts,
                    width=width,
                    one=one,
                    batched=batched,
                )
            )
    return Device(
        machine=torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        rows=list(rows),
        entries=entries,
    )


def write_table(path: Path, kind: str, device: Device) -> None:
    """Put one device's measurements into the table at path, atomically."""
    table = _calibrated(path)
    table[kind] = device
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({name: each.model_dump() for name, each in table.items()})
    with written_whole(path) as part:
        part.write_text(text.replace('{"dtype"', '\n{"dtype"') + "\n")
    current_table.cache_clear()


def _gains(x: Tensor, weight: Tensor, widths: list[int], seconds: float) -> tuple[float, float]:
    """Median time of separate matmuls over that of one, and of a batched one, taking turns."""
    times: dict[Form, list[float]] = {form: [] for form in Form}
    with torch.inference_mode():
        for turn in range(200):
            for form, taken in times.items():
                _synchronise(x)
                start = time.perf_counter()
                in_form(form, x, weight, None, widths)
                _synchronise(x)
                if turn:
                    taken.append(time.perf_counter() - start)
            if turn >= 3 and sum(times[Form.SEPARATE]) >= seconds:
                break
    separate, one, batched = (statistics.median(times[form]) for form in Form)
    return round(separate / one, 3), round(separate / batched, 3)


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
