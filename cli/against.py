"""``kvtailor inspect A --against B``: what differs between two inspections.

B is the JSON that an earlier ``kvtailor inspect --json`` printed (by another version, say), or
changes to A's own options: ``narrow_rows=off,cache=static``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtailor.cli.inspection import run_inspection
from kvtailor.cli.options import InspectError, Request
from kvtailor.config import suggest
from kvtailor.passes.pipeline import PASS_NAMES

_SWITCH = {"on": True, "off": False}
_SITE_FIELDS = (
    "kind",
    "window",
    "chunk",
    "padding",
    "segments",
    "proof",
    "residual",
    "kv_owner",
    "query_rows",
    "key_rows",
    "lowering",
    "reason",
)


@dataclass(frozen=True)
class Change:
    """One thing that differs: where, what, and its value on both sides (None: not there)."""

    graph: str
    at: str
    what: str
    a: Any
    b: Any

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


def other_side(request: Request, against: str) -> dict[str, Any]:
    """B's inspection in the JSON shape. Raises InspectError."""
    if against.endswith(".json"):
        return _read(Path(against))
    return run_inspection(changed(request, against)).as_dict()


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        # Whatever is looked at is there.
        compare(found, found)
    except OSError as error:
        raise InspectError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise InspectError(f"{path} must be what kvtailor inspect --json prints") from None
    return found


def changed(request: Request, changes: str) -> Request:
    """The request with ``name=value`` changes, comma separated. Raises InspectError."""
    fields = [name for name in Request.model_fields if name not in ("model", "disable")]
    disabled = dict.fromkeys(request.disable, False)
    values: dict[str, Any] = {}
    for change in changes.split(","):
        name, equals, value = (part.strip() for part in change.partition("="))
        if not equals or not value:
            raise InspectError(
                f"against takes a .json file or changes like narrow_rows=off, got {change!r}"
            )
        if name in PASS_NAMES:
            if value not in _SWITCH:
                raise InspectError(suggest(f"state of {name}", value, _SWITCH))
            disabled[name] = _SWITCH[value]
        elif (name := name.replace("-", "_")) in fields:
            values[name] = value
        else:
            raise InspectError(suggest("option or pass", name, [*fields, *PASS_NAMES]))
    off = tuple(name for name, on in disabled.items() if not on)
    return Request(**request.model_dump() | values | {"disable": off})


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Change]:
    """Every difference of two inspections in the JSON shape, in the order of A's graphs."""
    changes: list[Change] = []
    graphs = [_by_position(side["graphs"]) for side in (a, b)]
    if len(a["graphs"]) != len(b["graphs"]):
        changes.append(Change("", "", "graphs", len(a["graphs"]), len(b["graphs"])))
    for name in {**graphs[0], **graphs[1]}:
        one, other = (side.get(name, {}) for side in graphs)
        changes += _graph_changes(name, one, other)
    return changes


def _by_position(graphs: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    # Names count on within a process, so they say nothing across two.
    return {f"graph {i}": graph for i, graph in enumerate(graphs)}


def _graph_changes(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Change]:
    def differ(at: str, what: str, x: Any, y: Any) -> Iterator[Change]:
        if x != y:
            yield Change(name, at, what, x, y)

    for what in ("captured", "reason"):
        yield from differ("", what, a.get(what), b.get(what))
    for when in ("before", "after"):
        flops = [side.get("flops", {}).get(when) for side in (a, b)]
        yield from differ("", f"FLOPs {when}", *flops)
    sites = [{s["site"]: s for s in side.get("attention", [])} for side in (a, b)]
    for site in {**sites[0], **sites[1]}:
        one, other = (side.get(site) for side in sites)
        if one is None or other is None:
            yield Change(name, site, "attention", one and one["kind"], other and other["kind"])
            continue
        for what in _SITE_FIELDS:
            yield from differ(site, what, one.get(what), other.get(what))
    passes = [{p["name"]: p for p in side.get("passes", [])} for side in (a, b)]
    for each in {**passes[0], **passes[1]}:
        counts = [side[each]["rewrites"] if each in side else None for side in passes]
        yield from differ(each, "rewrites", *counts)
    forms = [{", ".join(g["parts"]): g["form"] for g in side.get("packed", [])} for side in (a, b)]
    for parts in {**forms[0], **forms[1]}:
        yield from differ(parts, "packed", forms[0].get(parts), forms[1].get(parts))
    pieces = [[(p["name"], p["rows"]) for p in side.get("pieces", [])] for side in (a, b)]
    if pieces[0] != pieces[1]:
        text = [", ".join(f"{n}: {r}" for n, r in side) or None for side in pieces]
        yield Change(name, "", "pieces", *text)
