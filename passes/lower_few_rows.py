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

import torch
from torch import Tensor, fx

from kvtailor.config import Inner
from kvtailor.kernels.ops import few_rows_linear
from kvtailor.passes.few_rows import few_rows_form
from kvtailor.passes.flops import node_flops
from kvtailor.passes.graph import (
    FLOPS,
    argument,
    aten,
    emit,
    in_place_of,
    module_path,
    replace_node,
    shape,
    val,
)
from kvtailor.passes.inline import inline
from kvtailor.passes.report import PassReport


def lower_few_rows(gm: fx.GraphModule, inner: Inner = "inductor") -> PassReport:
    """Give every linear of few rows the form it has by ``few_rows_form``; inner: the compiler."""
    report = PassReport()
    if inner != "inductor":
        return report
    for node in gm.graph.find_nodes(op="call_function", target=aten.linear.default):
        form, why = few_rows_form(val(argument(node, "input")), val(argument(node, "weight")))
        if form is not None:
            with in_place_of(node):
                new = _written_out(node) if form == "written out" else _own(node)
            replace_node(node, new)
            report.rewrites += 1
        elif why is not None:
            report.skip(module_path(node), "few-rows", why)
    return report


def _own(node: fx.Node) -> fx.Node:
    args = (argument(node, name) for name in ("input", "weight", "bias"))
    return emit(node.graph, few_rows_linear, *args, like=node)


def _written_out(node: fx.Node) -> fx.Node:
    x, weight, bias = (argument(node, name) for name in ("input", "weight", "bias"))
    wide = inline(node.graph, _widened, x, like=node)
    sums = [
        inline(node.graph, _products, wide, weight, row=i, like=node) for i in range(shape(wide)[0])
    ]
    sums[0].meta[FLOPS] = node_flops(node)
    return inline(node.graph, _joined, x, bias, *sums, like=node)


def _widened(x: Tensor) -> Tensor:
    wide = x.reshape(-1, x.shape[-1]).clone(memory_format=torch.contiguous_format).float()
    # Inductor would make x anew for each of the N sums; it does not look through strides.
    return wide.as_strided(wide.shape, (wide.shape[1], 1))


def _products(wide: Tensor, weight: Tensor, row: int) -> Tensor:
    # fp32 by promotion: a cast of its own could be written out, as large as the weight.
    x = wide if wide.shape[0] == 1 else wide[row : row + 1]
    return (x * weight).sum(-1)


def _joined(x: Tensor, bias: Tensor | None, *sums: Tensor) -> Tensor:
    y = sums[0] if len(sums) == 1 else torch.stack(sums)
    y = y if bias is None else y + bias
    return y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])
