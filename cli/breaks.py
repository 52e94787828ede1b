"""Where Dynamo broke a graph or gave up compiling, read from its own log and counters."""

from __future__ import annotations

import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

LIMIT = "recompile limit exceeded"


class BreakLog(logging.Handler):
    """Collects graph breaks from Dynamo's own log, where each has its reason and its place."""

    NAMES = tuple(
        f"torch._dynamo.{m}.__graph_breaks" for m in ("symbolic_convert", "convert_frame")
    )

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: Counter[tuple[str, str]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage()
        if LIMIT not in f"{text} {error}":
            self.found[_read_break(text, error)] += 1

    def as_list(self) -> list[dict[str, Any]]:
        return [{"reason": r, "at": at, "count": n} for (r, at), n in self.found.items()]

    def __enter__(self) -> BreakLog:
        self.before = []
        for name in self.NAMES:
            logger = logging.getLogger(name)
            self.before.append((logger, logger.level, logger.propagate))
            # Unless TORCH_LOGS asks for them, nobody else is to see these records.
            logger.propagate = logger.propagate and logger.isEnabledFor(logging.DEBUG)
            logger.setLevel(logging.DEBUG)
            logger.addHandler(self)
        return self

    def __exit__(self, *unused: object) -> None:
        for logger, level, propagate in self.before:
            logger.removeHandler(self)
            logger.setLevel(level)
            logger.propagate = propagate


def _read_break(text: str, error: BaseException | None) -> tuple[str, str]:
    """(reason, place) of one record; the place is the innermost line outside torch and stdlib."""
    named = re.search(r"Graph Break Reason: (.*?)(?=\n\nStack var|\n\nUser code|\Z)", text, re.S)
    reason = named[1] if named else str(error or text)
    skipped = not named or "falling back to eager" in reason
    _, _, reason = reason.rpartition("Graph break encountered:\n\n")
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("Encountered graph break when attempting"):
        del lines[0]
    title = lines[0].rstrip(".:") if lines else "unknown"
    explained = [x.removeprefix("Explanation: ") for x in lines if x.startswith("Explanation: ")]
    sentence = ": ".join([title, *explained[:1]])
    if skipped:
        sentence += " The rest of this function ran without kvtailor."
    places = re.findall(r'File "([^"]+)", line (\d+)', text.partition("User code traceback:")[2])
    places = [p for p in places if not _is_plumbing(p[0])] or places
    places = places or re.findall(r"in user code at (.*):(\d+)", text)
    return sentence, f"{Path(places[-1][0]).name}:{places[-1][1]}" if places else ""


def _is_plumbing(file: str) -> bool:
    """Whether the file is torch's or the standard library's."""
    path = Path(file)
    if "site-packages" in path.parts or "dist-packages" in path.parts:
        return Path(torch.__file__).parent in path.parents
    return file.startswith("<") or Path(logging.__file__).parent.parent in path.parents


def counted() -> Counter[str]:
    """Dynamo's counts of what it could not trace, by message."""
    return counters["graph_break"] + counters["unimplemented"]


def reached_limit(counts: Counter[str]) -> dict[str, Any] | None:
    """Which of Dynamo's limits was reached, its value, and how often it was in the way."""
    for message, hits in counts.items():
        if LIMIT in message:
            accumulated = "accumulated_recompile_limit" in message
            name = "accumulated_recompile_limit" if accumulated else "recompile_limit"
            return {"name": name, "limit": getattr(torch._dynamo.config, name), "hits": hits}
    return None
