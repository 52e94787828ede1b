"""Several linears over one input, in the form that is fastest for the rows of the call."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional as F

from kvtailor.kernels import few_rows

# torch has these ops too, but by its stubs they return nothing.
aten = torch.ops.aten


class Form(IntEnum):
    """How packed linears run.

    SEPARATE: a matmul per part. ONE: one matmul over all. BATCHED: one batched matmul, for parts
    of one width.
    """

    SEPARATE = 0
    ONE = 1
    BATCHED = 2


def form_at(rows: int, borders: Sequence[int], forms: Sequence[int]) -> Form:
    """The form for so many rows.

    forms[i] holds from borders[i - 1] rows on; borders ascend and are one fewer than forms.
    """
    return Form(forms[bisect_right(borders, rows)])


def packed_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    widths: Sequence[int],
    borders: Sequence[int],
    forms: Sequence[int],
) -> list[Tensor]:
    """x [..., K] times packed weight [N, K] -> [..., widths[i]] each, widths summing to N.

    Where there is a kernel of our own for so few rows, it is taken; else the form for them.
    """
    if few_rows.takes(x, weight):
        out = few_rows.few_rows_linear(x, weight, bias)
        return list(aten.split_with_sizes_copy(out, list(widths), -1))
    form = form_at(x.shape[:-1].numel(), borders, forms)
    return in_form(form, x, weight, bias, widths)


def in_form(
    form: Form, x: Tensor, weight: Tensor, bias: Tensor | None, widths: Sequence[int]
) -> list[Tensor]:
    """As ``packed_linear``, by torch's matmuls.

    The results have memory of their own, in any form: one buffer for all would be so large
    where there are many rows that its pages cost more than the matmuls save.
    """
    sizes = list(widths)
    if form == Form.ONE:
        return list(aten.split_with_sizes_copy(F.linear(x, weight, bias), sizes, -1))
    if form == Form.BATCHED:
        return list(aten.unbind_copy(batched_linear(x, weight, bias, len(sizes))))
    biases = bias.split(sizes) if bias is not None else [None] * len(sizes)
    return [F.linear(x, w, b) for w, b in zip(weight.split(sizes), biases)]


def batched_linear(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> Tensor:
    """x [..., K] times packed weight [parts * width, K] -> [parts, ..., width]."""
    width, K = weight.shape[0] // parts, weight.shape[1]
    # No copies: all parts read the same x, and the weight as it lies.
    each_x = x.reshape(-1, K).expand(parts, -1, -1)
    each_w = weight.view(parts, width, K).transpose(1, 2)
    if bias is None:
        out = torch.bmm(each_x, each_w)
    else:
        out = torch.baddbmm(bias.view(parts, 1, width), each_x, each_w)
    return out.view(parts, *x.shape[:-1], width)
