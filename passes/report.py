"""What the passes did, and why not: the data behind ``kvtailor inspect``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

# An attention kind is what the mask means; "masked" is a mask that was not proved.
KINDS = ("full", "causal", "sliding", "chunked", "cross", "masked")


@dataclass
class Skip:
    """A near miss: where, a stable reason code, and one sentence."""

    at: str
    code: str
    why: str


@dataclass
class PassReport:
    """One pass over one graph. ``ms`` and ``name`` are filled in by the runner.

    error: why the pass failed and was undone, None when it did not. packed: linears it packed, or
    could have; the graph's report has those of all passes.
    """

    rewrites: int = 0
    skipped: list[Skip] = field(default_factory=list)
    name: str = ""
    ms: float = 0.0
    error: str | None = None
    packed: list[PackedGroup] = field(default_factory=list)

    def skip(self, at: str, code: str, why: str) -> None:
        self.skipped.append(Skip(at, code, why))


@dataclass
class AttentionSite:
    """One attention of the graph. Made by recognise_attention, completed by later passes.

    site: module path. kv_owner: the module that produced the keys, None when they came from
    outside the graph. queries, keys: how many there were in the traced call; offset: the key
    index of its first query, None where that is known at run time only. query_rows and key_rows:
    "all", or how many rows are computed or read. rows_reason: who asks for every row, None where
    the rows were narrowed.
    proof: the proved predicate as text over b, h, q, k. residual: what of the mask was not
    proved. reason: why the site was not rewritten further, None when it was.
    """

    site: str
    node: str
    kind: str = "full"
    causal: bool = False
    window: int | None = None
    chunk: int | None = None
    padding: bool = False
    segments: bool = False
    sinks: bool = False
    softcap: float | None = None
    cross: bool = False
    residual: str | None = None
    proof: str | None = None
    kv_owner: str | None = None
    queries: int = 0
    keys: int = 0
    offset: int | None = None
    query_rows: int | str = "all"
    key_rows: int | str = "all"
    rows_reason: str | None = None
    lowering: str | None = None
    reason: str | None = None

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class RowSpace:
    """Consecutive work on one row count: the head on all rows, the tail on the narrowed ones."""

    name: str
    rows: int | str
    ops: int
    flops: int


@dataclass
class PackedGroup:
    """Linears over one source whose weights are packed, or could be.

    source, parts: module paths. inputs: width of the source; widths: of the parts. rows: how many
    rows of the source there are, or "symbolic". form: what is done, "separate" or "one matmul" or
    both by rows; by_rows: what the measurements say for any number of rows.
    """

    source: str
    parts: list[str]
    inputs: int
    widths: list[int]
    rows: int | str
    form: str
    by_rows: str


@dataclass
class LayerWork:
    """Floating-point operations of one layer before and after; layer "" is all the rest."""

    layer: str
    before: int
    after: int


@dataclass
class PieceReport:
    """One piece of a graph, in running order.

    rows: its row counts. shared_with: the first piece that its compiled form was made for, None
    where that is this one. compile_ms: what making it took, 0 for a shared one. reason: why it
    is not compiled, None when it is. capture_sizes: row counts it may be captured for as a CUDA
    graph, its own where shapes are fixed; None where it cannot be, and ``no_graph`` says why.
    """

    name: str
    rows: list[int | str]
    ops: int
    flops: int
    shared_with: str | None = None
    compile_ms: float = 0.0
    reason: str | None = None
    capture_sizes: list[int] | None = None
    no_graph: str | None = None


@dataclass
class GraphReport:
    """Everything known about one captured graph.

    whole: why it is not in pieces. without: what failed, and how it went on. load_ms: looking for
    the rewritten graph on disk; inner_ms: cutting and compiling, split_ms of it for cutting.
    """

    name: str = "graph_0"
    captured: bool = True
    reason: str | None = None
    attention: list[AttentionSite] = field(default_factory=list)
    passes: list[PassReport] = field(default_factory=list)
    packed: list[PackedGroup] = field(default_factory=list)
    row_spaces: list[RowSpace] = field(default_factory=list)
    pieces: list[PieceReport] = field(default_factory=list)
    whole: str | None = None
    without: list[str] = field(default_factory=list)
    layers: list[LayerWork] = field(default_factory=list)
    flops_before: int = 0
    flops_after: int = 0
    graph_before: str = ""
    graph_after: str = ""
    load_ms: float = 0.0
    capture_ms: float = 0.0
    split_ms: float = 0.0
    inner_ms: float = 0.0
    max_error: float | None = None

    def asdict(self) -> dict[str, Any]:
        out = asdict(self)
        for each in out["passes"]:
            del each["packed"]
        out["flops"] = {"before": out.pop("flops_before"), "after": out.pop("flops_after")}
        return out
