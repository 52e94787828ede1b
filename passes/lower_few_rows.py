"""Linears of few rows on a CPU: up to four become products and sums in fp32, more our own kernel.

Before:  y = linear(x, w, b)                                  x [1, K], w [N, K]
After:   y = (x * w).sum(-1) + b                              in fp32, then the dtype of x

Such a linear reads its weights once and does little else, and the inner compiler's loop over them
takes what memory gives: 2 to 3 times what CPU libraries do there (``benchmarks/qcrosskv.py``).
What comes after is fused into the loop. Every decode step of one sequence is of this kind, and the
tail of a prefill. Only for Inductor: run as they are, the products would be as large as w.

Other linears are ``kvtailor::few_rows_linear``, where that has a kernel (up to eight rows, AVX512),
and linears of a symbolic number of rows too; the rest stays as it is.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx

from kvtailor.kernels import few_rows
from kvtailor.kernels.ops import few_rows_linear
from kvtailor.passes.flops import FLOPS, node_flops
from kvtailor.passes.graph import (
    INNER,
    argument,
    aten,
    emit,
    in_place_of,
    module_path,
    replace_node,
    shape,
    val,
)
from kvtailor.passes.report import PassReport

# Every row is one more product per weight.
MOST_WRITTEN_OUT = 4
WRITTEN_OUT = (torch.float32, torch.bfloat16, torch.float16)
# Bytes of several rows in fp32, which pass through the first-level cache once per output. Matmuls
# of fp32 itself are so slow here that it does not matter.
LARGEST_WIDENED = 12 << 10
# Outputs, below which there is too little for two cores to share.
LEAST_OUTPUTS = 64


class FewRows(NamedTuple):
    """What becomes of a linear; where it nearly was one of few rows, why it stays."""

    form: Literal["written out", "own kernel"] | None
    why: str | None = None


def lower_few_rows(gm: fx.GraphModule) -> PassReport:
    """Give every linear of few rows the form it has by ``few_rows_form``."""
    report = PassReport()
    for node in gm.graph.find_nodes(op="call_function", target=aten.linear.default):
        form, why = few_rows_form(gm, argument(node, "input"), argument(node, "weight"))
        if form is not None:
            with in_place_of(node):
                new = _written_out(node) if form == "written out" else _own(node)
            replace_node(node, new)
            report.rewrites += 1
        elif why is not None:
            report.skip(module_path(node), "few-rows", why)
    return report


def few_rows_form(gm: fx.GraphModule, input: fx.Node, weight: fx.Node) -> FewRows:
    """What a linear of this input and weight will be in gm."""
    if gm.meta.get(INNER) != "inductor":
        return FewRows(None)
    return form_of(val(input), val(weight))


def form_of(x: Tensor, w: Tensor) -> FewRows:
    """What a linear of x ``[..., K]`` and w ``[N, K]`` will be under Inductor."""
    fixed = all(isinstance(n, int) for n in x.shape)
    rows = math.prod(x.shape[:-1]) if fixed else None
    few = rows is None or 0 < rows <= few_rows.MOST_ROWS
    if w.device.type != "cpu" or w.dim() != 2 or not few:
        return FewRows(None)
    why = None
    if x.dtype != w.dtype:
        why = f"x is {x.dtype} and the weight {w.dtype}"
    elif not all(isinstance(n, int) for n in w.shape) or not w.is_contiguous():
        why = "the weight has symbolic sizes or is not contiguous"
    elif w.shape[0] < LEAST_OUTPUTS:
        why = f"{w.shape[0]} outputs are too few for threads to share"
    if rows is None:
        # The op sees at call time how many there are.
        return FewRows("own kernel" if why is None and few_rows.has_kernel(x.dtype) else None)
    if why is not None:
        return FewRows(None, why)
    fits = rows == 1 or x.dtype == torch.float32 or 4 * rows * x.shape[-1] <= LARGEST_WIDENED
    if x.dtype in WRITTEN_OUT and rows <= MOST_WRITTEN_OUT and fits:
        return FewRows("written out")
    if few_rows.takes(x, w):
        return FewRows("own kernel")
    if not few_rows.has_kernel(x.dtype):
        return FewRows(None, f"this machine has no kernel for {rows} rows of {x.dtype}")
    return FewRows(None, f"{rows} rows of {x.shape[-1]} {x.dtype} do not stay in the cache")


def _own(node: fx.Node) -> fx.Node:
    args = (argument(node, name) for name in ("input", "weight", "bias"))
    return emit(node.graph, few_rows_linear, *args, like=node)


def _written_out(node: fx.Node) -> fx.Node:
    graph = node.graph
    x, weight, bias = (argument(node, name) for name in ("input", "weight", "bias"))

    def make(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return emit(graph, target, *args, like=node, **kwargs)

    *lead, K = shape(x)
    rows, N = math.prod(lead), shape(weight)[0]
    wide = make(aten.reshape.default, x, [rows, K])
    wide = make(aten.clone.default, wide, memory_format=torch.contiguous_format)
    if val(wide).dtype != torch.float32:
        wide = make(aten._to_copy.default, wide, dtype=torch.float32)
    # Inductor would make x anew for each of the N sums; it does not look through strides.
    wide = make(aten.as_strided.default, wide, [rows, K], [K, 1])
    sums = []
    for i in range(rows):
        row = wide if rows == 1 else make(aten.slice.Tensor, wide, 0, i, i + 1)
        # fp32 by promotion: a cast of its own could be written out, as large as the weight.
        products = make(aten.mul.Tensor, row, weight)
        sums.append(make(aten.sum.dim_IntList, products, [-1]))
    sums[0].meta[FLOPS] = node_flops(node)
    y = sums[0] if rows == 1 else make(aten.stack.default, sums)
    if bias is not None:
        y = make(aten.add.Tensor, y, bias)
    y = make(aten._to_copy.default, y, dtype=val(node).dtype)
    return make(aten.view.default, y, [*lead, N])
