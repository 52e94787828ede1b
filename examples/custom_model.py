"""A decoder written by hand: its masks are proved all the same.

    python examples/custom_model.py
    kvtailor inspect examples/custom_model.py:build

Attention is spelled out, every other layer sees a window only, and one token's logits are asked
for. kvtailor finds the attention, proves both masks and runs the end of the model on few rows.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from kvtailor.backend import recording

WIDTH, HEADS, LAYERS, WINDOW, VOCABULARY = 64, 4, 4, 8, 128


class Attention(nn.Module):
    def __init__(self, window: int | None):
        super().__init__()
        self.window = window
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, _ = x_BTC.shape
        q, k, v = (
            part.view(B, T, HEADS, -1).transpose(1, 2) for part in self.qkv(x_BTC).chunk(3, dim=-1)
        )
        scores_BHTT = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        seen_TT = torch.ones(T, T, dtype=torch.bool, device=x_BTC.device).tril()
        if self.window is not None:
            seen_TT = seen_TT.triu(1 - self.window)
        weights_BHTT = scores_BHTT.masked_fill(~seen_TT, float("-inf")).softmax(-1)
        return self.out((weights_BHTT @ v).transpose(1, 2).reshape(B, T, WIDTH))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = nn.ModuleList(
            Attention(WINDOW if i % 2 == 0 else None) for i in range(LAYERS)
        )
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.norm = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2 * LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits of the token after the last one, [B, VOCABULARY]."""
        x = self.embed(ids_BT)
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlp)):
            x = x + attention(self.norm[2 * i](x))
            x = x + mlp(self.norm[2 * i + 1](x))
        return self.head(x[:, -1])


def build() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """What `kvtailor inspect FILE.py:FUNCTION` wants: a model, and how to call it."""
    torch.manual_seed(0)
    return Decoder().eval(), (torch.randint(VOCABULARY, (2, 32)),), {}


def main() -> None:
    model, args, kwargs = build()
    # "inductor" is the default and the fast one; "eager" compiles in a second.
    compiled = torch.compile(model, backend="kvtailor", options={"inner": "eager"})
    with recording() as recorder, torch.no_grad():
        difference = (compiled(*args, **kwargs) - model(*args, **kwargs)).abs().max()
    print(f"largest difference from eager: {difference:.1e}")
    for site in recorder.graphs[0].attention:
        print(f"  {site.site}: {site.proof}, queries {site.query_rows}, keys {site.key_rows}")


if __name__ == "__main__":
    main()
