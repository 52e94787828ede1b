"""prove_masks: what is proved, in which words, and that flags plus remainder equal the mask.

Every mask of a family is one attention of one graph, compiled once with static and once with
symbolic sizes. The graph before and after the pass then runs on adversarial inputs (no padding,
left, right, everything masked, random), and for each attention the scores that may be seen and
the results, empty rows included, must agree.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from harness import captured, tidied
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from transformers import DynamicCache, LlamaConfig, StaticCache
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    chunked_overlay,
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
    eager_mask,
    or_masks,
    sdpa_mask,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from kvtailor.backend import recording
from kvtailor.cli.models import shrunk
from kvtailor.kernels import reference
from kvtailor.kernels.ops import attend
from kvtailor.passes.attend import Attend
from kvtailor.passes.capture.capture import capture
from kvtailor.passes.graph import SITE, val
from kvtailor.passes.prove_masks import prove_masks
from kvtailor.passes.recognise_attention import recognise_attention
from kvtailor.passes.report import AttentionSite, PassReport
from kvtailor.passes.text import show

B, H, D = 2, 2, 4
# A mask entry at most this is hidden.
HIDDEN = -1e9


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def attending(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **flags: Any) -> Tensor:
    """attend, with a mask of as many dimensions as its maker gives it."""
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    return attend(q, k, v, mask, **flags)


# --- the brute force


class Calls(fx.Interpreter):
    """Runs a graph and keeps the arguments of every attend."""

    def record(self, *inputs: Any) -> list[dict[str, Any]]:
        self.calls: list[dict[str, Any]] = []
        with torch.no_grad():
            self.run(*inputs)
        return self.calls

    def run_node(self, n: fx.Node) -> Any:
        if n.target is attend:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            self.calls.append(dict(vars(Attend.bind(args, kwargs))))
        return super().run_node(n)


def scores(call: dict[str, Any]) -> Tensor:
    """What flags and mask add to the scores ``[B, H, Tq, Tk]``: -inf hides, whoever hides."""
    q, k, mask = call["q"], call["k"], call.get("mask")
    flags = ("q_positions", "chunk_origin", "causal", "q_offset", "window", "chunk")
    seen = reference.visible(
        q.shape[2], k.shape[2], q.device, **{n: call[n] for n in flags if call.get(n) is not None}
    )
    out = torch.zeros(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        out = out + mask.float()
    out = out.masked_fill(~seen, float("-inf"))
    return out.masked_fill(out <= HIDDEN, float("-inf"))


def disagreement(before: dict[str, Any], after: dict[str, Any]) -> str:
    """How two calls differ, "" when they do not."""
    if not torch.equal(scores(before), scores(after)):
        return "different keys are visible"
    one, two = (attend(**call) for call in (before, after))
    error = (one - two).abs().max().item()
    return "" if error <= 1e-5 else f"results differ by {error}"


# --- families of masks


Mask = Callable[["Inputs"], Tensor | None]


@dataclass
class Inputs:
    """What a mask may be made of. T of x is Tq, of keys Tk."""

    x: Tensor
    keys: Tensor
    pad: Tensor
    short: Tensor
    pos: Tensor
    ids: Tensor
    lengths: Tensor
    past: Tensor
    bias: Tensor
    square: Tensor

    @property
    def Tq(self) -> int:
        return self.x.shape[2]

    @property
    def Tk(self) -> int:
        return self.keys.shape[2]

    @property
    def q(self) -> Tensor:
        return torch.arange(self.Tq)[:, None]

    @property
    def k(self) -> Tensor:
        return torch.arange(self.Tk)[None, :]

    @property
    def embeds(self) -> Tensor:
        return self.x.new_zeros(self.x.shape[0], self.x.shape[2], 8)

    def tril(self, diagonal: int = 0, dtype: torch.dtype = torch.bool) -> Tensor:
        return torch.tril(torch.ones(self.Tq, self.Tk, dtype=dtype), diagonal)

    def filled(self, value: float) -> Tensor:
        return torch.full((self.Tq, self.Tk), value)

    def sdpa(self, function: Any, pad: Tensor | None = None, **offsets: Any) -> Tensor:
        return sdpa_mask(
            self.x.shape[0],
            self.Tq,
            self.Tk,
            mask_function=function,
            attention_mask=None if pad is None else pad.bool(),
            allow_is_causal_skip=False,
            **offsets,
        )

    def eager(self, function: Any, pad: Tensor | None = None, **offsets: Any) -> Tensor:
        return eager_mask(
            self.x.shape[0],
            self.Tq,
            self.Tk,
            mask_function=function,
            attention_mask=None if pad is None else pad.bool(),
            **offsets,
        )

    def left(self, pad: Tensor) -> Tensor:
        """Number of pads in front, as transformers counts them."""
        return (pad.cumsum(-1) == torch.zeros_like(pad)).sum(-1)


def config(implementation: str) -> LlamaConfig:
    made = LlamaConfig(hidden_size=8, num_attention_heads=2)
    made.sliding_window = made.attention_chunk_size = 4
    made._attn_implementation = implementation
    return made


SDPA, EAGER = config("sdpa"), config("eager")


def make_inputs(tq: int, tk: int, seed: int = 0) -> Inputs:
    torch.manual_seed(seed)
    short = torch.ones(B, max(tk - 5, 2), dtype=torch.long)
    short[0, :2] = 0
    return Inputs(
        x=torch.randn(B, H, tq, D),
        keys=torch.randn(B, H, tk, D),
        pad=torch.ones(B, tk, dtype=torch.long),
        short=short,
        pos=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 5, 6, 0, 1]])[
            :, :tq
        ].clone(),
        ids=torch.randint(-1, 3, (B, tk)),
        lengths=torch.tensor([max(tk - 3, 1), tk]),
        past=torch.tensor(max(tk - tq - 4, 0)),
        bias=torch.randn(H, tk),
        square=torch.rand(B, 1, tq, tk) > 0.5,
    )


def adversaries(inputs: Inputs) -> list[Inputs]:
    """The same sizes with other contents: empty rows, pads on either side, odd positions."""
    found = [inputs]
    tq, tk = inputs.Tq, inputs.Tk
    left, right, nothing = (inputs.pad.clone() for _ in range(3))
    left[0, : tk // 2] = 0
    right[1, tk // 2 :] = 0
    nothing[:] = 0
    for n, pad in enumerate((left, right, nothing, torch.randint(0, 2, (B, tk)))):
        other = make_inputs(tq, tk, seed=n + 1)
        other.pad = pad
        other.short = torch.randint(0, 2, inputs.short.shape)
        other.pos = torch.randint(0, 4, inputs.pos.shape)
        if n == 0:
            other.pos = torch.arange(tq).expand(B, -1).contiguous()
        other.lengths = torch.tensor([[0, 1], [tk, 2], [-1, tk + 3], [3, 3]][n])
        other.past = torch.tensor([0, tk - tq, tk + 2, -2][n])
        other.ids = torch.randint(-1, 2, inputs.ids.shape)
        found.append(other)
    return found


@dataclass
class Outcome:
    """One attention after the pass. short: the size of Inputs.short, if it is in the graph."""

    site: AttentionSite
    node: fx.Node
    short: list[Any]
    disagreements: list[str]

    def line(self) -> str:
        """kind | proof | what stays dense and why | flags | mask, sizes by their letters.

        B batch and heads, Q queries, T keys, P = T - Q, S a mask shorter than the keys.
        """
        given = vars(Attend.of(self.node))
        flags = ["causal"] if given["causal"] else []
        flags += [f"{n} {given[n]}" for n in ("window", "chunk") if given[n] is not None]
        if not statically_known_true(val(given["q_offset"]) == 0):
            flags.append(f"offset {self.offset(val(given['q_offset']))}")
        for name in ("q_positions", "chunk_origin"):
            if given[name] is not None:
                flags.append(f"{name}{self.shape(given[name])}")
        why = (self.site.reason or "").split(":")[0]
        return " | ".join(
            (
                self.site.kind,
                self.proof(),
                " ".join(filter(None, (why, self.site.residual))) or "-",
                " ".join(flags) or "-",
                "-" if given["mask"] is None else self.shape(given["mask"]),
            )
        )

    @property
    def rows(self) -> Any:
        return val(self.node.args[0]).shape[2]

    @property
    def keys(self) -> Any:
        return val(self.node.args[1]).shape[2]

    def offset(self, offset: Any) -> str:
        past = self.keys - self.rows
        return "P" if statically_known_true(offset == past) else str(offset)

    def shape(self, node: fx.Node) -> str:
        letters = {str(self.rows): "Q", str(self.keys): "T", "1": "1"}
        letters[str(val(self.node.args[0]).shape[0])] = "B"
        return f"[{','.join(letters[str(n)] for n in val(node).shape)}]"

    def proof(self) -> str:
        text = str(self.site.proof)
        if self.rows is self.keys or self.rows == self.keys:
            return text
        past = f"{self.keys} - {self.rows}"
        if isinstance(self.keys, int):
            past = str(self.keys - self.rows)
        text = re.sub(rf"\b{past}\b", "P", text)
        for short in self.short:
            text = re.sub(rf"\b{short}\b", "S", text)
        return text


def hint(n: Any) -> int:
    return n if isinstance(n, int) else n.node.hint


class Family:
    """Masks of one pair of sizes, proved in one graph and run on every adversary."""

    def __init__(self, masks: dict[str, Mask], tq: int, tk: int, dynamic: bool) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self.second: PassReport | None = None
        names = list(masks)

        def attentions(
            x: Tensor,
            keys: Tensor,
            pad: Tensor,
            short: Tensor,
            pos: Tensor,
            ids: Tensor,
            lengths: Tensor,
            past: Tensor,
            bias: Tensor,
            square: Tensor,
        ) -> list[Tensor]:
            i = Inputs(x, keys, pad, short, pos, ids, lengths, past, bias, square)
            return [attending(x, keys, keys, masks[n](i), scale=0.5) for n in names]

        def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            assert not self.outcomes, "one graph serves every adversary"
            before = capture(gm, examples)
            after = copy.deepcopy(before)
            prove_masks(after)
            tidied(after)
            nodes = after.graph.find_nodes(op="call_function", target=attend)
            inputs = [val(n) for n in before.graph.find_nodes(op="placeholder")]
            twos = [x for x in inputs if isinstance(x, Tensor) and x.dim() == 2]
            short = [x.shape[1] for x in twos if hint(x.shape[1]) == max(tk - 5, 2)]
            for name, node in zip(names, nodes, strict=True):
                self.outcomes[name] = Outcome(copy.copy(node.meta[SITE]), node, short[:1], [])
            self.second = prove_masks(after)
            for name, node in zip(names, nodes, strict=True):
                again = node.meta[SITE]
                if again != self.outcomes[name].site:
                    self.outcomes[name].disagreements.append(f"second run says {again}")

            def run(*args: Any) -> Any:
                pairs = zip(Calls(before).record(*args), Calls(after).record(*args), strict=True)
                for name, (one, two) in zip(names, pairs, strict=True):
                    if how := disagreement(one, two):
                        self.outcomes[name].disagreements.append(how)
                return gm.forward(*args)

            return run

        torch._dynamo.reset()
        compiled = torch.compile(attentions, backend=backend, dynamic=dynamic, fullgraph=True)
        with torch.no_grad():
            for inputs in adversaries(make_inputs(tq, tk)):
                compiled(*vars(inputs).values())
        torch._dynamo.reset()


def packed(i: Inputs, function: Any) -> Tensor:
    """A mask for packed rows as transformers makes it from position_ids alone."""
    first = i.pos[:, :1] - 1
    segment = (torch.diff(i.pos, prepend=first, dim=-1) != 1).cumsum(-1)

    def remapped(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        inner = function(b, h, i.pos[b, q], i.pos[b, k])
        return inner & (segment[b, q] == segment[b, k])

    return i.sdpa(remapped)


# Name -> (mask, expected line). T is the size of queries and keys, 9 when static.
SELF: dict[str, tuple[Mask, str]] = {
    # transformers, bool
    "causal": (lambda i: i.sdpa(causal_mask_function), "causal | k <= q | - | causal | -"),
    "causal_padding": (
        lambda i: i.sdpa(causal_mask_function, i.pad),
        "causal | k <= q & padding[b, k] | - | causal | [B,1,1,T]",
    ),
    "sliding_padding": (
        lambda i: i.sdpa(sliding_window_causal_mask_function(4), i.pad),
        "sliding | k <= q & q - k < 4 & padding[b, k] | - | causal window 4 | [B,1,1,T]",
    ),
    "chunked": (
        lambda i: i.sdpa(chunked_causal_mask_function(4, torch.zeros(B, dtype=torch.long))),
        "chunked | k <= q & k//4 == q//4 | - | causal chunk 4 | -",
    ),
    "chunked_left_padding": (
        lambda i: i.sdpa(chunked_causal_mask_function(4, i.left(i.pad)), i.pad),
        "chunked | k <= q & (k - origin[b])//4 == (q - origin[b])//4 & padding[b, k] | - | "
        "causal chunk 4 chunk_origin[B] | [B,1,1,T]",
    ),
    "bidirectional_padding": (
        lambda i: i.sdpa(bidirectional_mask_function, i.pad),
        "full | padding[b, k] | - | - | [B,1,1,T]",
    ),
    "two_sided": (
        lambda i: i.sdpa(lambda b, h, q, k: (q - k).abs() <= 2),
        "sliding | k <= q + 2 & q + 2 - k < 5 | - | causal window 5 offset 2 | -",
    ),
    "chunk_and_window": (
        lambda i: i.sdpa(
            and_masks(
                sliding_window_overlay(3),
                chunked_overlay(4, torch.zeros(B, dtype=torch.long)),
                causal_mask_function,
            )
        ),
        "chunked | k <= q & q - k < 3 & k//4 == q//4 | - | causal window 3 chunk 4 | -",
    ),
    "blockwise_overlay": (
        lambda i: i.sdpa(or_masks(causal_mask_function, blockwise_overlay(i.ids))),
        "masked | None | residual or[k <= q, x[b, q] == x[b, k] & x[b, q] >= 0] | - | [B,1,T,T]",
    ),
    # transformers, packed rows
    "packed_own_positions": (
        lambda i: create_causal_mask(
            SDPA, i.embeds, None, None, position_ids=torch.arange(i.Tq)[None]
        ),
        "causal | k <= q | - | causal | -",
    ),
    "packed_causal": (
        lambda i: packed(i, causal_mask_function),
        "causal | k <= q & segment[b, q] == segment[b, k] | - | causal | [B,1,T,T]",
    ),
    "packed_sliding": (
        lambda i: packed(i, sliding_window_causal_mask_function(3)),
        "sliding | k <= q & q - k < 3 & segment[b, q] == segment[b, k] | - | causal window 3 | "
        "[B,1,T,T]",
    ),
    "packed_chunked": (
        lambda i: packed(i, lambda b, h, q, k: (k <= q) & (k // 3 == q // 3)),
        "chunked | k <= q & (k - origin[b, q])//3 == (q - origin[b, q])//3 & "
        "segment[b, q] == segment[b, k] | - | causal chunk 3 chunk_origin[B,T] | [B,1,T,T]",
    ),
    "document_ids": (
        lambda i: (i.ids[:, None, :, None] == i.ids[:, None, None, :]) & i.tril(),
        "causal | k <= q & segment[b, q] == segment[b, k] | - | causal | [B,1,T,T]",
    ),
    # transformers, the public functions
    "create_sliding": (
        lambda i: create_sliding_window_causal_mask(SDPA, i.embeds, i.pad, None),
        "sliding | k <= q & q - k < 4 & padding[b, k] | - | causal window 4 | [B,1,1,T]",
    ),
    "create_chunked": (
        lambda i: create_chunked_causal_mask(SDPA, i.embeds, i.pad, None),
        "chunked | k <= q & (k - origin[b])//4 == (q - origin[b])//4 & padding[b, k] | - | "
        "causal chunk 4 chunk_origin[B] | [B,1,1,T]",
    ),
    "create_bidirectional_sliding": (
        lambda i: create_bidirectional_sliding_window_mask(SDPA, i.embeds, i.pad),
        "sliding | k <= q + 4 & q + 4 - k < 9 & padding[b, k] | - | causal window 9 offset 4 | "
        "[B,1,1,T]",
    ),
    "create_block_ids": (
        lambda i: create_causal_mask(SDPA, i.embeds, None, None, block_sequence_ids=i.ids),
        "masked | None | residual or[k <= q, x[b, q] == x[b, k] & x[b, q] >= 0] | - | [B,1,T,T]",
    ),
    # additive
    "eager_causal": (
        lambda i: i.eager(causal_mask_function),
        "causal | k <= q | - | causal | -",
    ),
    "eager_sliding": (
        lambda i: i.eager(sliding_window_causal_mask_function(4)),
        "sliding | k <= q & q - k < 4 | - | causal window 4 | -",
    ),
    "eager_two_sided": (
        lambda i: create_bidirectional_sliding_window_mask(EAGER, i.embeds, None),
        "sliding | k <= q + 4 & q + 4 - k < 9 | - | causal window 9 offset 4 | -",
    ),
    "eager_padding": (
        lambda i: i.eager(causal_mask_function, i.pad),
        "causal | k <= q & padding[b, k] | empty-row | - | [B,1,T,T]",
    ),
    "eager_bidirectional_padding": (
        lambda i: create_bidirectional_mask(EAGER, i.embeds, i.pad),
        "full | padding[b, k] | empty-row | - | [B,1,T,T]",
    ),
    "eager_documents": (
        lambda i: torch.where(
            (i.ids[:, None, :, None] == i.ids[:, None, None, :]) & i.tril(),
            0.0,
            torch.finfo(torch.float32).min,
        ),
        "causal | k <= q & segment[b, q] == segment[b, k] | - | causal | [B,1,T,T]",
    ),
    "strictly_causal_minimum": (
        lambda i: torch.where(i.k < i.q, 0.0, torch.finfo(torch.float32).min),
        "causal | k <= q - 1 | empty-row | - | [1,1,T,T]",
    ),
    "two_minima_added": (
        lambda i: (
            i.filled(torch.finfo(torch.float32).min).triu(1)
            + torch.where(i.pad[:, None, None, :].bool(), 0.0, torch.finfo(torch.float32).min)
        ),
        "causal | k <= q & padding[b, k] | empty-row | - | [B,1,T,T]",
    ),
    "minus_infinity": (
        lambda i: i.filled(float("-inf")).triu(1),
        "causal | k <= q | - | causal | -",
    ),
    "minus_infinity_padding": (
        lambda i: (
            i.filled(float("-inf")).triu(1)
            + torch.zeros(B, 1, 1, i.Tk).masked_fill(i.pad[:, None, None, :] == 0, float("-inf"))
        ),
        "causal | k <= q & padding[b, k] | - | causal | [B,1,1,T]",
    ),
    "minus_1e9": (
        lambda i: (1.0 - i.tril(dtype=torch.float32)) * -1e9,
        "causal | k <= q | - | causal | -",
    ),
    "minus_1e4_is_not_hidden": (
        lambda i: (1.0 - i.tril(dtype=torch.float32)) * -1e4,
        "masked | None | bias a constant | - | [1,1,T,T]",
    ),
    "bert_bool": (
        lambda i: (1.0 - i.pad[:, None, None, :].bool().float()) * torch.finfo(torch.float32).min,
        "full | padding[b, k] | empty-row | - | [B,1,1,T]",
    ),
    "bert_int": (
        lambda i: (1.0 - i.pad[:, None, None, :].float()) * torch.finfo(torch.float32).min,
        "masked | None | bias bias(b, k) | - | [B,1,1,T]",
    ),
    "alibi": (
        lambda i: i.filled(float("-inf")).triu(1) + i.bias[:, None, :],
        "causal | k <= q | bias bias(h, k) | - | [1,B,T,T]",
    ),
    "alibi_alone": (
        lambda i: i.bias[:, None, :] * 0.5,
        "full | True | bias bias(h, k) | - | [1,B,1,T]",
    ),
    "temperature": (
        lambda i: torch.where(i.tril(), 0.5, float("-inf")),
        "causal | k <= q | bias a constant | - | [1,1,T,T]",
    ),
    "nothing_added": (lambda i: torch.zeros(i.Tq, i.Tk), "full | True | - | - | -"),
    # by hand
    "tril": (lambda i: i.tril(), "causal | k <= q | - | causal | -"),
    "tril_compared": (
        lambda i: i.tril(dtype=torch.float32) != 0,
        "causal | k <= q | - | causal | -",
    ),
    "not_triu": (
        lambda i: ~torch.triu(torch.ones(i.Tq, i.Tk, dtype=torch.bool), 1),
        "causal | k <= q | - | causal | -",
    ),
    "masked_fill": (
        lambda i: torch.zeros(i.Tq, i.Tk).masked_fill(i.k > i.q, float("-inf")),
        "causal | k <= q | - | causal | -",
    ),
    "band": (
        lambda i: i.tril() & torch.triu(torch.ones(i.Tq, i.Tk, dtype=torch.bool), -3),
        "sliding | k <= q & q - k < 4 | - | causal window 4 | -",
    ),
    "difference_of_triangles": (
        lambda i: i.tril() ^ i.tril(-4),
        "sliding | k <= q & q - k < 4 | - | causal window 4 | -",
    ),
    "absolute_distance": (
        lambda i: ~((i.q - i.k).abs() > 2),
        "sliding | k <= q + 2 & q + 2 - k < 5 | - | causal window 5 offset 2 | -",
    ),
    "window_alone": (
        lambda i: i.q - i.k < 3,
        "sliding | q - k < 3 | - | window 3 | -",
    ),
    "window_wider_than_keys": (
        lambda i: i.tril() & (i.q - i.k < 1 + 4096),
        "sliding | k <= q & q - k < 4097 | - | causal window 4097 | -",
    ),
    "chunk_alone": (
        lambda i: torch.div(i.q, 3, rounding_mode="floor") == i.k // 3,
        "chunked | k//3 == q//3 | - | chunk 3 | -",
    ),
    "chunk_shifted": (
        lambda i: ((i.q + 1) // 3 == (i.k + 1) // 3) & i.tril(),
        "chunked | k <= q & (k + 1)//3 == (q + 1)//3 | - | causal chunk 3 chunk_origin[] | -",
    ),
    "chunks_that_do_not_match": (
        lambda i: ((i.q + 1) // 3 == i.k // 3) & i.tril(),
        "causal | k <= q | residual (q + 1)//3 == k//3 | - | [1,1,T,T]",
    ),
    "up_to_own_chunk": (
        lambda i: i.k // 3 <= i.q // 3,
        "masked | None | residual k//3 <= q//3 | - | [1,1,T,T]",
    ),
    "dilated": (
        lambda i: ((i.q - i.k) % 3 == 0) & i.tril(),
        "causal | k <= q | residual q == k + 3*((q - k)//3) | - | [1,1,T,T]",
    ),
    "padding_by_length": (
        lambda i: i.k[None, None] < i.lengths[:, None, None, None],
        "full | k < length[b] | - | - | [B,1,1,T]",
    ),
    "padding_expanded_first": (
        lambda i: i.pad[:, None, None, :].expand(-1, -1, i.Tq, -1).bool(),
        "full | padding[b, k] | - | - | [B,1,1,T]",
    ),
    "padding_filled_in": (
        lambda i: i.tril()[None, None].masked_fill(i.pad[:, None, None, :] == 0, False),
        "causal | k <= q & padding[b, k] | - | causal | [B,1,1,T]",
    ),
    "two_paddings": (
        lambda i: i.tril() & i.pad[:, None, None, :].bool() & (i.ids[:, None, None, :] != 2),
        "causal | k <= q & padding[b, k] & padding2[b, k] != 2 | - | causal | [B,1,1,T]",
    ),
    "rows_by_length": (
        lambda i: (i.q < i.lengths[:, None, None, None]) & i.tril(),
        "causal | k <= q & q < length[b] | - | causal | [B,1,T,1]",
    ),
    "rows_and_keys": (
        lambda i: (i.q < i.lengths[:, None, None, None]) & (i.k < i.lengths[:, None, None, None]),
        "full | q < length[b] & k < length[b] | - | - | [B,1,T,T]",
    ),
    "prefix": (
        lambda i: i.tril() | (i.k < i.lengths[:, None, None, None]),
        "masked | None | residual or[k <= q, k < x[b]] | - | [B,1,T,T]",
    ),
    "global_token": (
        lambda i: i.tril() & ((i.q - i.k < 3) | (i.k == 0)),
        "causal | k <= q | residual or[k >= q - 2, k == 0] | - | [1,1,T,T]",
    ),
    "positions": (
        lambda i: i.k[None, None] <= i.pos[:, None, :, None],
        "causal | k <= position[b, q] | - | causal q_positions[B,T] | -",
    ),
    "window_per_head": (
        lambda i: i.tril() & ((i.q - i.k)[None] < torch.tensor([2, 4])[:, None, None]),
        "causal | k <= q | residual k >= q - x[h] + 1 | - | [1,B,T,T]",
    ),
    "given_mask": (lambda i: i.square, "masked | None | residual x[b, 0, q, k] | - | [B,1,T,T]"),
    "given_mask_and_tril": (
        lambda i: i.square & i.tril(),
        "causal | k <= q | residual x[b, 0, q, k] | - | [B,1,T,T]",
    ),
    "given_floats": (
        lambda i: i.square.float() * 2,
        "masked | None | bias a constant | - | [B,1,T,T]",
    ),
    "everything": (
        lambda i: torch.ones(i.Tq, i.Tk, dtype=torch.bool),
        "full | True | - | - | -",
    ),
    "nothing": (
        lambda i: torch.zeros(i.Tq, i.Tk, dtype=torch.bool),
        "masked | None | all-masked | - | [1,1,T,T]",
    ),
    "written_in_place": (
        lambda i: F.pad(torch.ones(i.Tq, 4, dtype=torch.bool), (0, i.Tk - 4)),
        "full | k < 4 | - | - | [1,1,1,T]",
    ),
    "buffer_slice": (
        lambda i: torch.tril(torch.ones(32, 32, dtype=torch.bool))[: i.Tq, : i.Tk],
        "causal | k <= q | - | causal | -",
    ),
    "joined": (
        lambda i: torch.cat(
            [torch.ones(i.Tq, 2, dtype=torch.bool), i.tril()[:, : i.Tk - 2]], dim=1
        ),
        "causal | k <= q + 2 | - | causal offset 2 | -",
    ),
    "flipped": (
        lambda i: torch.triu(torch.ones(i.Tq, i.Tk, dtype=torch.bool)).flip(0, 1),
        "causal | k <= q | - | causal | -",
    ),
}


def static_past(i: Inputs, function: Any, pad: Tensor | None = None) -> Tensor:
    """As a StaticCache masks: keys of the whole cache, the past a 0-dim tensor."""
    return i.sdpa(function, pad, q_offset=i.past)


def dynamic_past(i: Inputs, function: Any, pad: Tensor | None = None) -> Tensor:
    """As a DynamicCache masks: the past is what the keys have more than the queries."""
    return i.sdpa(function, pad, q_offset=i.Tk - i.Tq)


# Queries of a continued prefill: Tq 3, Tk 12. P is Tk - Tq.
CACHED: dict[str, tuple[Mask, str]] = {
    "static_causal": (
        lambda i: static_past(i, causal_mask_function),
        "causal | k <= q + offset | - | causal q_positions[Q] | -",
    ),
    "static_sliding": (
        lambda i: static_past(i, sliding_window_causal_mask_function(4)),
        "sliding | k <= q + offset & q + offset - k < 4 | - | causal window 4 q_positions[Q] | -",
    ),
    "static_mask_shorter_than_cache": (
        lambda i: static_past(i, causal_mask_function, i.short),
        "causal | k <= q + offset & k < S & padding[b, k] | - | causal q_positions[Q] | [B,1,1,T]",
    ),
    "static_chunked_left_padding": (
        lambda i: static_past(i, chunked_causal_mask_function(4, i.left(i.short)), i.short),
        "chunked | k <= q + offset & (k - origin[b])//4 == (q + offset - origin[b])//4 & "
        "k < S & padding[b, k] | - | causal chunk 4 q_positions[Q] chunk_origin[B] | [B,1,1,T]",
    ),
    "static_eager": (
        lambda i: i.eager(causal_mask_function, q_offset=i.past),
        "causal | k <= q + offset | empty-row | - | [B,1,Q,T]",
    ),
    "dynamic_causal": (
        lambda i: dynamic_past(i, causal_mask_function),
        "causal | k <= q + P | - | causal offset P | -",
    ),
    "dynamic_eager": (
        lambda i: i.eager(causal_mask_function, q_offset=i.Tk - i.Tq),
        "causal | k <= q + P | - | causal offset P | -",
    ),
    "dynamic_padding": (
        lambda i: dynamic_past(i, causal_mask_function, i.pad),
        "causal | k <= q + P & padding[b, k] | - | causal offset P | [B,1,1,T]",
    ),
    "dynamic_sliding_padding": (
        lambda i: dynamic_past(i, sliding_window_causal_mask_function(5), i.pad),
        "sliding | k <= q + P & q + P - k < 5 & padding[b, k] | - | causal window 5 offset P | "
        "[B,1,1,T]",
    ),
    "dynamic_chunked": (
        lambda i: dynamic_past(
            i, chunked_causal_mask_function(5, torch.zeros(B, dtype=torch.long))
        ),
        "chunked | k <= q + P & k//5 == (q + P)//5 | - | causal chunk 5 offset P | -",
    ),
    "both_offsets": (
        lambda i: i.sdpa(
            sliding_window_causal_mask_function(8), q_offset=i.Tk - i.Tq + 6, kv_offset=6
        ),
        "sliding | k <= q + P & q + P - k < 8 | - | causal window 8 offset P | -",
    ),
    # SDPA's is_causal on such sizes is this one, and never bottom-right.
    "top_left": (lambda i: i.k <= i.q, "causal | k <= q | - | causal | -"),
    "last_rows_of_a_buffer": (
        lambda i: torch.tril(torch.ones(i.Tk, i.Tk, dtype=torch.bool))[i.Tk - i.Tq :],
        "causal | k <= q + P | - | causal offset P | -",
    ),
}

# One query against 12 keys.
DECODE: dict[str, tuple[Mask, str]] = {
    "static": (
        lambda i: static_past(i, causal_mask_function),
        "causal | k <= q + offset | - | causal q_positions[1] | -",
    ),
    "static_short_padding": (
        lambda i: static_past(i, sliding_window_causal_mask_function(4), i.short),
        "sliding | k <= q + offset & q + offset - k < 4 & k < S & padding[b, k] | - | "
        "causal window 4 q_positions[1] | [B,1,1,T]",
    ),
    "static_chunked": (
        lambda i: static_past(i, chunked_causal_mask_function(4, torch.zeros(B, dtype=torch.long))),
        "chunked | k <= q + offset & k//4 == (q + offset)//4 | - | "
        "causal chunk 4 q_positions[1] | -",
    ),
    "dynamic": (
        lambda i: dynamic_past(i, causal_mask_function),
        "causal | k <= q + P | - | causal offset P | -",
    ),
    "dynamic_padding": (
        lambda i: dynamic_past(i, causal_mask_function, i.pad),
        "causal | k <= q + P & padding[b, k] | - | - | [B,1,1,T]",
    ),
    "dynamic_sliding": (
        lambda i: dynamic_past(i, sliding_window_causal_mask_function(5)),
        "sliding | k <= q + P & q + P - k < 5 | - | causal window 5 offset P | -",
    ),
    "dynamic_chunked": (
        lambda i: dynamic_past(
            i, chunked_causal_mask_function(5, torch.zeros(B, dtype=torch.long))
        ),
        "chunked | k <= q + P & k//5 == (q + P)//5 | - | causal chunk 5 offset P | -",
    ),
    "full_eager": (
        lambda i: i.eager(causal_mask_function, q_offset=i.Tk - 1),
        "causal | k <= q + P | - | causal offset P | -",
    ),
    "keys_below_a_length": (
        lambda i: i.k < i.lengths[:, None, None, None],
        "full | k < length[b] | - | - | [B,1,1,T]",
    ),
}

FAMILIES = {"self": (SELF, 9, 9), "cached": (CACHED, 3, 12), "decode": (DECODE, 1, 12)}
PROVED: dict[tuple[str, bool], Family] = {}


def family(name: str, dynamic: bool) -> Family:
    if (name, dynamic) not in PROVED:
        table, tq, tk = FAMILIES[name]
        masks = {n: mask for n, (mask, _) in table.items()}
        PROVED[name, dynamic] = Family(masks, tq, tk, dynamic)
    return PROVED[name, dynamic]


CASES = [(f, n) for f, (table, _, _) in FAMILIES.items() for n in table]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize(("name", "mask"), CASES, ids=[f"{f}-{n}" for f, n in CASES])
def test_mask(name: str, mask: str, dynamic: bool) -> None:
    """The proof and the rewrite in words, and equality on every adversary."""
    outcome = family(name, dynamic).outcomes[mask]
    assert not outcome.disagreements
    expected = FAMILIES[name][0][mask][1]
    assert outcome.line() == expected


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", FAMILIES)
def test_second_run_rewrites_nothing(name: str, dynamic: bool) -> None:
    second = family(name, dynamic).second
    assert second is not None and second.rewrites == 0


# --- one graph, read in full


def proved(gm: fx.GraphModule) -> PassReport:
    report = prove_masks(gm)
    tidied(gm)
    return report


def test_golden() -> None:
    def f(x: Tensor, pad: Tensor) -> Tensor:
        T = x.shape[2]
        near = torch.arange(T)[:, None] - torch.arange(T) < 3
        mask = torch.ones(T, T, dtype=torch.bool).tril() & near & pad[:, None, None, :]
        return attending(x, x, x, mask, scale=0.5)

    gm = captured(f, torch.randn(2, 1, 5, 4), torch.ones(2, 5, dtype=torch.bool))
    assert proved(gm).rewrites == 1
    assert_expected_inline(
        show(gm),
        """\
%0: float32[2, 1, 5, 4] = input
%1: bool[2, 5] = input
%2: bool[2, 1, 5] = aten::unsqueeze(%1, 1)
%3: bool[2, 1, 1, 5] = aten::unsqueeze(%2, 2)
%4: float32[2, 1, 5, 4] = kvtailor::attend(%0, %0, %0, %3, scale=0.5, causal=True, window=3)
return %4""",
    )


def test_golden_symbolic_offset() -> None:
    """The offset of a continued prefill is arithmetic on the inputs' sizes, nothing else."""

    def f(x: Tensor, keys: Tensor) -> Tensor:
        past = keys.shape[2] - x.shape[2]
        q = torch.arange(x.shape[2])[:, None] + past
        return attending(x, keys, keys, torch.arange(keys.shape[2]) <= q, scale=0.5)

    gm = captured(f, torch.randn(2, 1, 3, 4), torch.randn(2, 1, 7, 4), dynamic=True)
    assert proved(gm).rewrites == 1
    (node,) = gm.graph.find_nodes(op="call_function", target=attend)
    offset = Attend.of(node).q_offset
    assert statically_known_true(val(offset) == val(node.args[1]).shape[2] - val(node).shape[2])
    assert [n.op for n in gm.graph.nodes if isinstance(n.meta.get("val"), Tensor)] == [
        "placeholder",
        "placeholder",
        "call_function",
    ]


def test_layers_share_what_is_emitted() -> None:
    """Thirty layers, two masks: each position and origin is made once, each mask read once."""

    def f(x: Tensor, pad: Tensor, past: Tensor) -> list[Tensor]:
        i = torch.arange(x.shape[2])
        q = (i + past)[:, None]
        left = (~pad).cumsum(-1)[:, -1][:, None, None, None]
        causal = (i <= q) & pad[:, None, None, :]
        chunked = causal & ((i - left) // 4 == (q - left) // 4)
        return [attending(x, x, x, (causal, chunked)[n % 2], scale=0.5) for n in range(30)]

    gm = captured(f, torch.randn(2, 1, 6, 4), torch.ones(2, 6, dtype=torch.bool), torch.tensor(0))
    assert proved(gm).rewrites == 30
    nodes = gm.graph.find_nodes(op="call_function", target=attend)
    kept = [
        [getattr(Attend.of(n), a) for a in ("mask", "q_positions", "chunk_origin")] for n in nodes
    ]
    assert kept[2:] == kept[:2] * 14
    assert kept[0][:2] == kept[1][:2]
    assert {n.meta[SITE].kind for n in nodes[::2]} == {"causal"}
    assert {n.meta[SITE].kind for n in nodes[1::2]} == {"chunked"}


def test_flags_without_a_mask_are_described() -> None:
    """SDPA's is_causal arrives as a flag, top-left whatever the sizes."""

    def f(x: Tensor, keys: Tensor) -> list[Tensor]:
        return [
            attending(x, keys, keys, scale=0.5),
            attending(x, keys, keys, scale=0.5, causal=True),
            attending(x, keys, keys, scale=0.5, causal=True, window=2, q_offset=4),
            attending(x, keys, keys, scale=0.5, causal=True, chunk=4),
        ]

    gm = captured(f, torch.randn(2, 1, 3, 4), torch.randn(2, 1, 7, 4))
    report = proved(gm)
    assert (report.rewrites, report.skipped) == (0, [])
    sites = [n.meta[SITE] for n in gm.graph.find_nodes(op="call_function", target=attend)]
    assert [(s.kind, s.proof) for s in sites] == [
        ("full", "True"),
        ("causal", "k <= q"),
        ("sliding", "k <= q + 4 & q + 4 - k < 2"),
        ("chunked", "k <= q & k//4 == q//4"),
    ]


def test_flags_and_mask_together() -> None:
    """A mask that says what the flags say already goes; what they contradict hides everything."""

    def f(x: Tensor) -> list[Tensor]:
        i = torch.arange(x.shape[2])
        q = i[:, None]
        return [
            attending(x, x, x, i <= q + 1, scale=0.5, causal=True),
            attending(x, x, x, q - i < 2, scale=0.5, causal=True),
            attending(x, x, x, i > q, scale=0.5, causal=True),
        ]

    gm = captured(f, torch.randn(2, 1, 5, 4))
    report = proved(gm)
    sites = [n.meta[SITE] for n in gm.graph.find_nodes(op="call_function", target=attend)]
    assert [(s.kind, s.proof) for s in sites] == [
        ("causal", "k <= q"),
        ("sliding", "k <= q & q - k < 2"),
        ("masked", None),
    ]
    assert [s.code for s in report.skipped] == ["all-masked"]
    assert report.rewrites == 2


@pytest.mark.parametrize(
    ("cross", "mask", "kind"),
    [
        (True, lambda x, p: None, "cross"),
        (True, lambda x, p: p[:, None, None, :], "cross"),
        (True, lambda x, p: torch.ones(x.shape[2], x.shape[2]).tril() > 0, "causal"),
        (False, lambda x, p: None, "full"),
        (False, lambda x, p: p[:, None, None, :], "full"),
        (True, lambda x, p: p[:, None, :, None] ^ p[:, None, None, :], "masked"),
    ],
)
def test_cross(cross: bool, mask: Any, kind: str) -> None:
    def f(x: Tensor, p: Tensor) -> Tensor:
        return attending(x, x, x, mask(x, p), scale=0.5)

    gm = captured(f, torch.randn(2, 1, 5, 4), torch.rand(2, 5) > 0.5)
    (node,) = gm.graph.find_nodes(op="call_function", target=attend)
    node.meta[SITE] = AttentionSite(site="layer", node=node.name, cross=cross)
    proved(gm)
    assert node.meta[SITE].kind == kind


def test_rows_that_always_see_a_key_need_no_empty_row_rule() -> None:
    """``uniform`` matters only where a row may be empty; without it SDPA has a form."""

    def f(x: Tensor, pad: Tensor) -> list[Tensor]:
        T = x.shape[2]
        causal = torch.ones(T, T, dtype=torch.bool).tril()
        return [
            attending(x, x, x, causal, scale=0.5, empty_row="uniform"),
            attending(x, x, x, causal & pad[:, None, None, :], scale=0.5, empty_row="uniform"),
        ]

    gm = captured(f, torch.randn(2, 1, 5, 4), torch.zeros(2, 5, dtype=torch.bool))
    before = copy.deepcopy(gm)
    assert proved(gm).rewrites == 2
    nodes = gm.graph.find_nodes(op="call_function", target=attend)
    assert [Attend.of(n).empty_row for n in nodes] == ["zero", "uniform"]
    inputs = torch.randn(2, 1, 5, 4), torch.zeros(2, 5, dtype=torch.bool)
    for one, two in zip(Calls(before).record(*inputs), Calls(gm).record(*inputs), strict=True):
        assert not disagreement(one, two)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("padded", [False, True], ids=["causal", "padded"])
def test_guard_against_empty_rows(padded: bool, dynamic: bool) -> None:
    """By hand, -inf alone makes NaN. A proof that no row is empty takes the test for it away."""

    def f(x: Tensor, pad: Tensor) -> Tensor:
        T = x.shape[2]
        scores = x @ x.transpose(-1, -2)
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
        if padded:
            hidden = hidden | ~pad[:, None, None, :]
        return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ x

    torch.manual_seed(0)
    x, pad = torch.randn(2, 3, 5, 4), torch.rand(2, 5) > 0.5
    pad[0, 0] = False
    gm = captured(f, x, pad, dynamic=dynamic)
    recognise_attention(gm)
    assert proved(gm).rewrites == 1
    guards = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.where.ScalarSelf)
    assert len(guards) == padded
    torch._dynamo.reset()
    compiled = torch.compile(f, backend="kvtailor", options={"inner": "eager"}, dynamic=dynamic)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, pad), f(x, pad), equal_nan=True)


def test_reasons_are_reported_once_per_site() -> None:
    def f(x: Tensor, given: Tensor, pad: Tensor) -> list[Tensor]:
        T = x.shape[2]
        low = torch.finfo(x.dtype).min
        causal = torch.full((T, T), low).triu(1)
        return [
            attending(x, x, x, given, scale=0.5),
            attending(x, x, x, causal + pad[:, None, None, :], scale=0.5),
            attending(x, x, x, torch.where(given, 0.0, low), scale=0.5),
            attending(x, x, x, torch.zeros(T, T, dtype=torch.bool), scale=0.5),
        ]

    gm = captured(f, torch.randn(2, 1, 5, 4), torch.rand(2, 1, 5, 5) > 0.5, torch.randn(2, 5))
    report = proved(gm)
    assert report.rewrites == 0
    assert [s.code for s in report.skipped] == ["residual", "bias", "residual", "all-masked"]
    sites = [n.meta[SITE] for n in gm.graph.find_nodes(op="call_function", target=attend)]
    assert [s.reason for s in sites] == [
        "residual: no flag says x[b, 0, q, k]",
        "bias: the mask also adds bias(b, k)",
        "residual: no flag says x[b, 0, q, k]",
        "all-masked: no key is visible to any query",
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_minima_of_other_dtypes(dtype: torch.dtype) -> None:
    """The minimum is the mask's own dtype's; another dtype's is just a number."""

    def f(x: Tensor) -> list[Tensor]:
        hidden = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).triu(1)
        own = torch.zeros(x.shape[2], x.shape[2], dtype=dtype)
        other = torch.finfo(torch.float16).min / 2
        return [
            attending(x, x, x, own.masked_fill(hidden, torch.finfo(dtype).min), scale=0.5),
            attending(x, x, x, own.masked_fill(hidden, -1.0) * 1e9, scale=0.5),
            attending(x, x, x, own.masked_fill(hidden, other), scale=0.5),
        ]

    gm = captured(f, torch.randn(2, 1, 5, 4, dtype=dtype))
    assert proved(gm).rewrites == 2
    sites = [n.meta[SITE] for n in gm.graph.find_nodes(op="call_function", target=attend)]
    assert [s.kind for s in sites] == ["causal", "causal", "masked"]


# --- random mask algebra

LITERALS: list[Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = [
    lambda q, k, m, x: k <= q,
    lambda q, k, m, x: k <= q + 2,
    lambda q, k, m, x: q - k < 3,
    lambda q, k, m, x: (q - k).abs() < 2,
    lambda q, k, m, x: q // 3 == k // 3,
    lambda q, k, m, x: (q - x[:, :1, None]) // 3 == (k - x[:, :1, None]) // 3,
    lambda q, k, m, x: m[:, None, :],
    lambda q, k, m, x: m[:, :, None],
    lambda q, k, m, x: x[:, :, None] == x[:, None, :],
    lambda q, k, m, x: k < x[:, :1, None],
    lambda q, k, m, x: k <= x[:, :, None],
    lambda q, k, m, x: (k == 0) | (q == 1),
    lambda q, k, m, x: (q - k) % 2 == 0,
]


@st.composite
def algebra(draw: Any, depth: int) -> Callable[..., Tensor]:
    """Conjunctions mostly, as masks are; some or, not and where."""
    if depth == 0:
        return draw(st.sampled_from(LITERALS))
    op = draw(st.sampled_from(["and", "and", "and", "or", "not", "where"]))
    a, b = draw(algebra(depth - 1)), draw(algebra(depth - 1))
    if op == "not":
        return lambda *v: ~a(*v)
    if op == "where":
        c = draw(algebra(depth - 1))
        return lambda *v: torch.where(a(*v), b(*v), c(*v))
    if op == "or":
        return lambda *v: a(*v) | b(*v)
    return lambda *v: a(*v) & b(*v)


@given(
    masks=st.lists(
        st.tuples(algebra(2), st.sampled_from(["bool", "-inf", "min"])), min_size=6, max_size=6
    ),
    seed=st.integers(0, 5),
)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_algebra(masks: list[tuple[Any, str]], seed: int) -> None:
    """Whatever is proved of a random mask, flags and remainder equal it."""

    def f(x: Tensor, keys: Tensor, m: Tensor, ids: Tensor) -> list[Tensor]:
        q, k = torch.arange(x.shape[2])[:, None], torch.arange(keys.shape[2])[None, :]
        out = []
        for make, form in masks:
            mask = make(q, k, m, ids).expand(2, x.shape[2], keys.shape[2])[:, None]
            if form != "bool":
                low = float("-inf") if form == "-inf" else torch.finfo(torch.float32).min
                mask = torch.where(mask, 0.0, low)
            out.append(attending(x, keys, keys, mask, scale=0.5))
        return out

    wrong: list[str] = []

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        before = capture(gm, examples)
        after = copy.deepcopy(before)
        proved(after)

        def run(*args: Any) -> Any:
            pairs = zip(Calls(before).record(*args), Calls(after).record(*args), strict=True)
            wrong.extend(filter(None, (disagreement(one, two) for one, two in pairs)))
            return gm.forward(*args)

        return run

    torch._dynamo.reset()
    torch.manual_seed(seed)
    T = 5
    x, keys = torch.randn(2, 1, T, 4), torch.randn(2, 1, T, 4)
    compiled = torch.compile(f, backend=backend, dynamic=False, fullgraph=True)
    with torch.no_grad():
        for p in (0.5, 0.2, -1.0, 2.0):
            compiled(x, keys, torch.rand(2, T) > p, torch.randint(-1, 4, (2, T)))
    assert not wrong


# --- real models

PROOFS: dict[str, dict[str, str]] = {
    "llama": {"causal": "k <= q"},
    "mistral": {"sliding": "k <= q & q - k < 8"},
    "gemma3_text": {"sliding": "k <= q & q - k < 8", "causal": "k <= q"},
    "llama4_text": {"chunked": "k <= q & k//8 == q//8", "causal": "k <= q"},
    "modernbert": {"sliding": "k <= q + 4 & q + 4 - k < 9", "full": "True"},
    "gpt2": {"causal": "k <= q"},
    "bart": {"full": "True", "causal": "k <= q", "cross": "True"},
    "t5": {"full": "True", "causal": "k <= q", "cross": "True"},
    "gpt_oss": {"sliding": "k <= q & q - k < 8", "causal": "k <= q"},
    "bloom": {"causal": "k <= q"},
}
PADDED = {
    "llama4_text": {
        "chunked": "k <= q & (k - origin[b])//8 == (q - origin[b])//8 & padding[b, k]",
        "causal": "k <= q & padding[b, k]",
    },
    "gemma3_text": {
        "sliding": "k <= q & q - k < 8 & padding[b, k]",
        "causal": "k <= q & padding[b, k]",
    },
}
BIASED = {"t5": "bias(h, q, k)", "bloom": "bias(h, k)"}
EAGER_ONLY = ("gpt_oss", "bloom")
MODELS = [
    (name, how)
    for name in PROOFS
    for how in ("sdpa", "eager")
    if how == "eager" or name not in EAGER_ONLY
]


def inspected(model: torch.nn.Module, *calls: dict[str, Any]) -> list[list[AttentionSite]]:
    """Sites of every graph the calls make; each result is checked against eager."""
    model.compile(backend="kvtailor", options={"inner": "eager"})
    with torch.no_grad(), recording(check=True) as recorder:
        for call in calls:
            model(**call)
    for graph in recorder.graphs:
        assert graph.captured and graph.max_error is not None and graph.max_error <= 1e-5
    return [graph.attention for graph in recorder.graphs]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), MODELS)
def test_model(name: str, how: str) -> None:
    model, inputs = shrunk(name, how)
    (sites,) = inspected(model, inputs)
    assert {s.kind: s.proof for s in sites} == PROOFS[name]
    biased = [s for s in sites if s.residual is not None]
    assert {s.residual for s in biased} <= {BIASED.get(name)}
    assert all(s.reason is None for s in sites if s not in biased)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sdpa", "eager"])
@pytest.mark.parametrize("name", PADDED)
def test_padded_model(name: str, how: str) -> None:
    """An additive mask with padding is proved but kept: rows may be empty."""
    model, inputs = shrunk(name, how, padding=5)
    (sites,) = inspected(model, inputs)
    assert {s.kind: s.proof for s in sites} == PADDED[name]
    codes = {(s.reason or "").split(":")[0] for s in sites}
    assert codes == ({""} if how == "sdpa" else {"empty-row"})


@pytest.mark.slow
@pytest.mark.parametrize("cache", [DynamicCache, StaticCache], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", ["gemma3_text", "llama4_text"])
def test_cached_model(name: str, cache: Any) -> None:
    """Prefill and two steps: local layers stay local, their offset clipped by the cache."""
    model, inputs = shrunk(name)
    kwargs = {"max_cache_len": 40} if cache is StaticCache else {}
    past = cache(config=model.config, **kwargs)
    ids = inputs["input_ids"]
    step = {"input_ids": ids[:, :1], "past_key_values": past, "use_cache": True}
    graphs = inspected(model, {**step, "input_ids": ids}, step, step)
    local = {"gemma3_text": "sliding", "llama4_text": "chunked"}[name]
    assert {s.kind for s in graphs[0]} == {local, "causal"}
    for sites in graphs[1:]:
        found = [s for s in sites if s.kind == local]
        assert len(found) == 2
        assert all(s.window == 8 if local == "sliding" else s.chunk == 8 for s in found)
        assert all(s.reason is None for s in found)
        full = [s for s in sites if s.kind != local]
        assert {s.kind for s in full} <= {"full", "causal"}
        if cache is StaticCache:
            assert {s.proof for s in full} == {"k <= q + offset"}
