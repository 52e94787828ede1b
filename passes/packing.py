"""Linears over one source as one matmul over packed weights: what two passes share.

Before:  q = linear(x, wq, bq); k = linear(x, wk); v = linear(x, wv, bv)
After:   y = linear(x, packed, cat([bq, 0, bv])); q, k, v = slices of y

``packed`` is one more input, made at call time of the weights' own memory
(``runtime/packed_weights.py``). Where separate matmuls are faster for the rows at hand, nothing is
rewritten; where a batched one is, y is [parts, ..., width] of a bmm; where the rows are symbolic,
``kvtailor::packed_linear`` chooses at call time.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from kvtailor.kernels.ops import packed_linear
from kvtailor.kernels.packed_linear import Form, batched_linear
from kvtailor.passes.effects import is_view, seen_outside
from kvtailor.passes.few_rows import few_rows_form
from kvtailor.passes.graph import (
    PACKED,
    ROWS,
    argument,
    as_node,
    aten,
    emit,
    fake_mode,
    is_call,
    is_placeholder,
    module_path,
    refresh_values,
    replace_node,
    shape,
    val,
)
from kvtailor.passes.inline import inline
from kvtailor.passes.report import PackedGroup, PassReport
from kvtailor.runtime.packed_weights import (
    Mode,
    PackedInput,
    are_alone,
    existing_order,
    neighbours,
    why_not,
)
from kvtailor.runtime.packing_table import (
    NAMES,
    NEVER,
    Measured,
    Plan,
    at_rows,
    current_table,
    lookup,
    plan,
    plan_text,
)


@dataclass
class Weights:
    """The real parameters behind a graph's inputs, by the placeholder's name.

    few_rows: whether lower_few_rows will take what is left of the linears.
    """

    mode: Mode
    parameters: dict[str, Any]
    few_rows: bool = False

    def of(self, node: Any) -> Any:
        return self.parameters.get(node.name) if is_placeholder(node) else None


def weights_of(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    mode: Mode | Literal["off"],
    few_rows: bool = False,
) -> Weights | None:
    """What the packing passes may see of the real inputs; None where nothing is to be packed."""
    names = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    return None if mode == "off" else Weights(mode, dict(zip(names, example_inputs)), few_rows)


def pack_linears(
    gm: fx.GraphModule,
    report: PassReport,
    linears: Iterable[fx.Node],
    cluster: Callable[[fx.Node], str],
    weights: Weights | None,
) -> None:
    """Pack what reads one source, where that pays; the report gets the groups.

    cluster: what a linear belongs to more closely (its layer). Where one matmul over all of a
    source's linears does not pay, one per cluster may.
    """
    if weights is None:
        return
    by_source: dict[Any, list[fx.Node]] = {}
    for node in linears:
        weight = val(argument(node, "weight"))
        # Symbolic sizes have no hash, and no parameter has any.
        K = weight.shape[1] if isinstance(weight.shape[1], int) else None
        key = (argument(node, "input"), weight.dtype, weight.device, K)
        by_source.setdefault(key, []).append(node)
    made: list[fx.Node] = []
    outside = seen_outside(gm)
    for group in by_source.values():
        parts = _packable(gm, weights, group, report)
        if len(parts) < 2:
            continue
        made += _pack_best(gm, weights, parts, cluster, report, outside)
    refresh_values(gm, made)


def _name(node: fx.Node) -> str:
    return module_path(node) or node.name


def _packable(
    gm: fx.GraphModule, weights: Weights, group: list[fx.Node], report: PassReport
) -> list[fx.Node]:
    """The linears whose weights can become neighbours, in the order to pack them."""
    if len(group) < 2:
        return []
    times = Counter(argument(node, "weight") for node in group)
    parts: list[fx.Node] = []
    for node in group:
        weight, bias = argument(node, "weight"), argument(node, "bias")
        example = weights.of(weight)
        reason = why_not(example, weights.mode)
        if reason is None and not all(isinstance(n, int) for n in shape(weight)):
            reason = "symbolic-size", f"the weight has shape {list(shape(weight))}"
        if reason is None and times[weight] > 1:
            reason = "tied", "the weight is another linear's over the same source, too"
        if reason is None and bias is not None and not is_placeholder(bias):
            reason = "computed-bias", "the bias is computed"
        if reason is None:
            parts.append(node)
        else:
            report.skip(_name(node), *reason)
    if weights.mode == "copy" or len(parts) < 2:
        return parts

    def tensors(nodes: list[fx.Node]) -> list[Any]:
        return [weights.of(argument(n, "weight")) for n in nodes]

    parts = [parts[i] for i in existing_order(tensors(parts))]
    while len(parts) > 1:
        found = tensors(parts)
        if neighbours(found, [t.shape[0] for t in found]) is not None or are_alone(found):
            return parts
        shared = [n for n, t in zip(parts, found) if not are_alone(found, only=_address(t))]
        for node in shared:
            report.skip(_name(node), "shared", "the weight's memory is also another tensor's")
        parts = [n for n in parts if n not in shared]
    return parts


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _pack_best(
    gm: fx.GraphModule,
    weights: Weights,
    parts: list[fx.Node],
    cluster: Callable[[fx.Node], str],
    report: PassReport,
    outside: set[fx.Node],
) -> list[fx.Node]:
    """Pack all parts, or each cluster, or none: what the table says is fastest."""
    clusters: dict[str, list[fx.Node]] = {}
    for node in parts:
        clusters.setdefault(cluster(node), []).append(node)
    closer = [c for c in clusters.values() if len(c) > 1]
    choices = [[parts]]
    if len(clusters) > 1 and closer:
        choices.append(closer)
    x, weight = (argument(parts[0], name) for name in ("input", "weight"))
    rows = _rows(x)
    few = None
    if rows is not None and weights.few_rows:
        few = few_rows_form(val(x), val(weight)).form
    measured = [_measured(choice[0]) for choice in choices]
    # Of few rows, one loop over all weights, whatever the libraries are best at.
    best: int | None = 0
    if few is None and rows is None:
        best = next((i for i, m in enumerate(measured) if plan(m) != NEVER), None)
    elif few is None and rows is not None:
        found = [at_rows(m, rows).best() for m in measured]
        best = max(range(len(choices)), key=lambda i: found[i][1])
        if found[best][0] == Form.SEPARATE:
            best = None
    made: list[fx.Node] = []
    for group in choices[best or 0]:
        near = _measured(group)
        by_rows = plan(near)
        chosen: Plan | Form = by_rows
        if rows is not None:
            chosen = Form.ONE if few is not None else at_rows(near, rows).best()[0]
        form = _form_text(chosen) if best is not None else NAMES[Form.SEPARATE]
        if few is not None:
            form += f", {few}"
        report.packed.append(
            PackedGroup(
                source=_name(argument(group[0], "input")),
                parts=[_name(n) for n in group],
                inputs=int(shape(argument(group[0], "weight"))[1]),
                widths=_widths(group),
                rows=rows if rows is not None else "symbolic",
                form=form,
                by_rows=plan_text(by_rows),
            )
        )
        # Clusters of other widths than the first may not pay.
        if best is None or chosen in (Form.SEPARATE, NEVER):
            continue
        report.rewrites += 1
        made += _emit(gm, group, chosen, outside)
    return made


def _form_text(chosen: Plan | Form) -> str:
    return plan_text(chosen) if isinstance(chosen, Plan) else NAMES[chosen]


def _rows(x: Any) -> int | None:
    rows = 1
    for n in shape(x)[:-1]:
        if not isinstance(n, int):
            return None
        rows *= n
    return rows


def _widths(group: list[fx.Node]) -> list[int]:
    return [int(shape(argument(n, "weight"))[0]) for n in group]


def _measured(group: list[fx.Node]) -> list[Measured]:
    weight = val(argument(group[0], "weight"))
    table, kind = current_table(), weight.device.type
    return lookup(table, kind, weight.dtype, weight.shape[1], _widths(group))


def _emit(
    gm: fx.GraphModule,
    group: list[fx.Node],
    chosen: Plan | Form,
    outside: set[fx.Node],
) -> list[fx.Node]:
    """The packed matmul in place of the group's first linear; returns the parts.

    chosen: a form, in ops that the inner compiler knows, or a choice at call time.
    """
    graph = gm.graph
    sources = [as_node(argument(n, "weight")) for n in group]
    widths = _widths(group)
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    packed = PackedInput(tuple(inputs.index(w) for w in sources), tuple(widths))
    weight = _packed_placeholder(gm, packed, inputs, sources)
    order = {n: i for i, n in enumerate(graph.nodes)}
    first = min(group, key=order.__getitem__)
    x = argument(first, "input")
    biases = [argument(n, "bias") for n in group]
    sizes = tuple(widths)
    with graph.inserting_before(first):
        bias = inline(graph, _joined, *biases, widths=sizes) if any(biases) else None
        if isinstance(chosen, Plan):
            forms = [int(form) for form in chosen.forms]
            borders = list(chosen.borders)
            y = emit(graph, packed_linear, x, weight, bias, widths, borders, forms, like=first)
        elif chosen == Form.BATCHED:
            y = inline(graph, batched_linear, x, weight, bias, parts=len(widths), like=first)
        else:
            y = emit(graph, aten.linear.default, x, weight, bias, like=first)
        if ROWS in first.meta and chosen != Form.BATCHED:
            y.meta[ROWS] = first.meta[ROWS]
        made = [_part(y, node, i, widths, chosen, outside) for i, node in enumerate(group)]
    for node, part in zip(group, made):
        replace_node(node, part)
    return made


def _part(
    y: fx.Node, node: fx.Node, i: int, widths: list[int], chosen: Plan | Form, outside: set[fx.Node]
) -> fx.Node:
    """What one linear is of the packed one's result."""
    graph = y.graph
    if isinstance(chosen, Plan):
        return emit(graph, operator.getitem, y, i, like=node)
    if chosen == Form.BATCHED:
        part = emit(graph, aten.select.int, y, 0, i, like=node)
    else:
        start = sum(widths[:i])
        part = emit(graph, aten.slice.Tensor, y, -1, start, start + widths[i], like=node)
    if _layout_matters(node, outside):
        flat = torch.contiguous_format
        part = emit(graph, aten.clone.default, part, memory_format=flat, like=node)
    return part


def _joined(*biases: Tensor | None, widths: tuple[int, ...]) -> Tensor:
    """One bias. A part without gets zeros, and they are written, not left over."""
    like = next(b for b in biases if b is not None)
    return torch.cat([like.new_zeros(n) if b is None else b for b, n in zip(biases, widths)])


def _packed_placeholder(
    gm: fx.GraphModule, packed: PackedInput, inputs: list[fx.Node], sources: list[fx.Node]
) -> fx.Node:
    known: tuple[PackedInput, ...] = gm.meta.get(PACKED, ())
    if packed in known:
        return inputs[known.index(packed) - len(known)]
    with gm.graph.inserting_after(inputs[-1]):
        node = gm.graph.placeholder(f"packed_{len(known)}")
    with fake_mode(gm.graph):
        first = val(sources[0])
        node.meta["val"] = torch.empty(
            sum(packed.rows), first.shape[1], dtype=first.dtype, device=first.device
        )
    gm.meta[PACKED] = (*known, packed)
    return node


# Views that any strides survive: whatever else looks at memory gets a part of its own.
_STRIDES_DO = (
    aten.reshape,
    aten.permute,
    aten.slice,
    aten.select,
    aten.unsqueeze,
    aten.squeeze,
    aten.expand,
    aten.split,
    aten.split_with_sizes,
    aten.chunk,
    aten.unbind,
    aten.unflatten,
    operator.getitem,
)


def _layout_matters(linear: fx.Node, outside: set[fx.Node]) -> bool:
    """Whether a caller, or an op that reads strides, would see that a part is a slice."""
    if linear in outside:
        return True
    todo = [linear]
    while todo:
        for user in todo.pop().users:
            if is_call(user, *_STRIDES_DO):
                todo.append(user)
            elif is_view(user):
                return True
    return False
