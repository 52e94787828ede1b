"""QCrossKVLinear: the projections of a cross-attention, for people who write models.

Queries come from the decoder, keys and values from the encoder in one matmul, and not at all when
there are no new encoder states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

# Checkpoint names of separate projections, and of one over q, k and v.
_SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("q", "k", "v"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
)
_PACKED = ("qkv_proj", "in_proj", "qkv", "Wqkv")
_KV = ("kv_proj", "kv")


class QCrossKVLinear(nn.Module):
    """``(q, kv, q_bias, kv_bias) = layer(decoder_states, encoder_states)``.

    hidden: width of both states. head_dim, num_heads, num_kv_heads: num_heads must be a multiple
    of num_kv_heads. bias: all of q, k and v have one; a checkpoint may lack some, they are zero
    then (Whisper has none on k). skip_bias_add: leave the biases to the caller and return them.

    Parameters: q_weight [num_heads * head_dim, hidden], kv_weight [2, num_kv_heads * head_dim,
    hidden], keys first, q_bias and kv_bias to match. ``load_state_dict`` also takes checkpoints
    of separate projections (q_proj, k_proj, v_proj, and other usual names) and of packed ones
    (qkv_proj, in_proj, kv_proj). Raises ValueError for sizes that make no sense.
    """

    def __init__(
        self,
        hidden: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        bias: bool = False,
        skip_bias_add: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, value in (
            ("hidden", hidden),
            ("head_dim", head_dim),
            ("num_heads", num_heads),
            ("num_kv_heads", num_kv_heads),
        ):
            if value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}"
            )
        self.hidden, self.head_dim = hidden, head_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.skip_bias_add = skip_bias_add
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        q, kv = num_heads * head_dim, num_kv_heads * head_dim
        self.q_weight = nn.Parameter(torch.empty(q, hidden, **kind))
        # Keys and values on a dimension of their own, so that a shard of heads holds both.
        self.kv_weight = nn.Parameter(torch.empty(2, kv, hidden, **kind))
        if bias:
            self.q_bias = nn.Parameter(torch.empty(q, **kind))
            self.kv_bias = nn.Parameter(torch.empty(2, kv, **kind))
        else:
            self.register_parameter("q_bias", None)
            self.register_parameter("kv_bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As nn.Linear does: uniform within 1/sqrt(hidden)."""
        bound = self.hidden**-0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self, decoder_states: Tensor, encoder_states: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """decoder_states [..., T, hidden], encoder_states [..., S, hidden] or None.

        q [..., T, num_heads * head_dim]; kv [..., S, 2 * num_kv_heads * head_dim], keys first,
        None without encoder states: keys and values that a cache has are not made again. The two
        batches may differ: pass the states of the new requests alone. q_bias and kv_bias are
        None unless skip_bias_add. Of a sharded layer, q, kv and the biases are this rank's heads.
        """
        q_weight, kv_weight = _local(self.q_weight), _local(self.kv_weight)
        q_bias, kv_bias = _local(self.q_bias), _local(self.kv_bias)
        kv_bias = None if kv_bias is None else kv_bias.flatten()
        add = not self.skip_bias_add
        q = F.linear(self._entering(decoder_states), q_weight, q_bias if add else None)
        kv = None
        if encoder_states is not None:
            kv = F.linear(
                self._entering(encoder_states), kv_weight.flatten(0, 1), kv_bias if add else None
            )
        if add:
            return q, kv, None, None
        return q, kv, q_bias, kv_bias if kv is not None else None

    def _entering(self, states: Tensor) -> Tensor:
        """The same states; their gradient is summed over the ranks of a sharded layer."""
        weight = self.q_weight
        if not isinstance(weight, DTensor):
            return states
        mesh = weight.device_mesh
        whole = (
            states
            if isinstance(states, DTensor)
            else DTensor.from_local(states, mesh, [Replicate()])
        )
        return whole.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])

    def extra_repr(self) -> str:
        return (
            f"hidden={self.hidden}, head_dim={self.head_dim}, num_heads={self.num_heads}, "
            f"num_kv_heads={self.num_kv_heads}, bias={self.q_bias is not None}, "
            f"skip_bias_add={self.skip_bias_add}"
        )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for kind in ("weight", "bias") if self.q_bias is not None else ("weight",):
            self._translate(state_dict, prefix, kind)
        for name, parameter in self.named_parameters(recurse=False):
            given = state_dict.get(prefix + name)
            if not isinstance(given, Tensor) or isinstance(given, DTensor):
                continue
            if isinstance(parameter, DTensor) and given.shape == parameter.shape:
                state_dict[prefix + name] = distribute_tensor(
                    given.to(parameter.device), parameter.device_mesh, parameter.placements
                )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _translate(self, state_dict: dict[str, Any], prefix: str, kind: str) -> None:
        """Other layouts of weight or bias, in the checkpoint, become ours."""
        widths = [self.num_heads * self.head_dim] + 2 * [self.num_kv_heads * self.head_dim]

        def take(names: tuple[str, ...]) -> Tensor | None:
            keys = [f"{prefix}{n}.{kind}" for n in names] + [f"{prefix}{n}_{kind}" for n in names]
            own = (f"{prefix}q_{kind}", f"{prefix}kv_{kind}")
            return next((state_dict.pop(k) for k in keys if k not in own and k in state_dict), None)

        packed = take(_PACKED)
        if packed is not None and packed.shape[0] == sum(widths):
            q, k, v = packed.split(widths)
        else:
            q, k, v = (take(tuple(names)) for names in zip(*_SEPARATE))
            both = take(_KV)
            if both is not None and both.shape[0] == 2 * widths[1]:
                k, v = both.split(widths[1:])
        if kind == "bias":
            given = [b for b in (q, k, v) if b is not None]
            if given:
                q, k, v = (
                    b if b is not None else given[0].new_zeros(n) for b, n in zip((q, k, v), widths)
                )
        if q is not None:
            state_dict[f"{prefix}q_{kind}"] = q
        if k is not None and v is not None:
            state_dict[f"{prefix}kv_{kind}"] = torch.stack([k, v])


def _local(x: Any) -> Any:
    return x.to_local() if isinstance(x, DTensor) else x


class ColwiseQCrossKV(ParallelStyle):
    """Shard a QCrossKVLinear by heads: ``parallelize_module(model, mesh, {name: this})``.

    Every rank holds num_heads / ranks query heads and the key and value heads they read, and
    ``forward`` gives that rank's part. Raises ValueError when the heads don't divide.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, QCrossKVLinear):
            raise ValueError(f"the module must be a QCrossKVLinear, got {type(module).__name__}")
        ranks = device_mesh.size()
        if module.num_kv_heads % ranks:
            raise ValueError(
                "num_kv_heads must be a multiple of the number of ranks, "
                f"got {module.num_kv_heads} heads and {ranks} ranks"
            )
        for name, parameter in list(module.named_parameters(recurse=False)):
            along: list[Placement] = [Shard(1 if name.startswith("kv") else 0)]
            shard = distribute_tensor(parameter.data, device_mesh, along)
            setattr(module, name, nn.Parameter(shard, requires_grad=parameter.requires_grad))
        return module
