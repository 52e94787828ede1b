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
from typing import Any, Literal

import torch
from torch import fx

from kvtailor.kernels import few_rows
from kvtailor.kernels.ops import few_rows_linear
from kvtailor.passes.flops import FLOPS, node_flops
from kvtailor.passes.graph import (
    INNER,
    argument,
    aten,
    emit,
    in_place_of,
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


def lower_few_rows(gm: fx.GraphModule) -> PassReport:
    """Give every linear of few rows the form it has by ``few_rows_form``."""
    report = PassReport()
    for node in gm.graph.find_nodes(op="call_function", target=aten.linear.default):
        form = few_rows_form(gm, argument(node, "input"), argument(node, "weight"))
        if form is not None:
            with in_place_of(node):
                new = _written_out(node) if form == "written out" else _own(node)
            replace_node(node, new)
            report.rewrites += 1
    return report


def few_rows_form(
    gm: fx.GraphModule, input: fx.Node, weight: fx.Node
) -> Literal["written out", "own kernel"] | None:
    """What a linear of this input and weight will be, None if it stays."""
    x, w = val(input), val(weight)
    if gm.meta.get(INNER) != "inductor" or w.device.type != "cpu" or x.dtype != w.dtype:
        return None
    if w.dim() != 2 or not all(isinstance(n, int) for n in w.shape):
        return None
    if w.shape[0] < LEAST_OUTPUTS or not w.is_contiguous():
        return None
    if all(isinstance(n, int) for n in x.shape):
        rows = math.prod(x.shape[:-1])
        fits = rows == 1 or x.dtype == torch.float32 or 4 * rows * x.shape[-1] <= LARGEST_WIDENED
        if x.dtype in WRITTEN_OUT and 0 < rows <= MOST_WRITTEN_OUT and fits:
            return "written out"
        return "own kernel" if few_rows.takes(x, w) else None
    # Of a number of rows that changes, the op sees at call time how many there are.
    return "own kernel" if few_rows.has_kernel(x.dtype) else None


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
