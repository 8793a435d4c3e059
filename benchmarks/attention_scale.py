"""Does the best learning rate move with the width if attention logits shrink with it? Models with
muP and four heads, whose scores are <q, k>/d^p, d = width/4, equal at width 32. Beside it what
`transfer_check` says.

    python benchmarks/attention_scale.py
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from ctrans.base.threads import wait_passively

wait_passively()

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.record import keep
from ctrans.training.coordinate_check import transfer_check

BASE, WIDE, HEADS, DEPTH, VOCABULARY, TOKENS = 32, 256, 4, 4, 16, 12
UPDATES = 16
SEEDS = 3
RATES = [2.0**k for k in range(-9, -2)]
POWERS = (0.5, 1.0, 2.0)
BATCH = torch.randint(0, VOCABULARY, (8, TOKENS + 1), generator=torch.Generator().manual_seed(0))


class MupBlock(nn.Module):
    """X + f(N X)/2, with attention at scores <q, k>/d^p, and an FFN."""

    def __init__(self, width: int, power: float):
        super().__init__()
        base_head = BASE / HEADS
        self.scale = base_head ** (power - 0.5) * (width / HEADS) ** -power
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.ffn = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = parts.movedim(-3, 0).transpose(-3, -2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        x = x + 0.5 * self.out(y.transpose(-3, -2).flatten(-2))
        return x + 0.5 * self.ffn(self.norm2(x))


class MupModel(nn.Module):
    """Hidden matrices with variance 1/inputs, and logits times base width/width."""

    def __init__(self, width: int, power: float):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(TOKENS, width))
        self.blocks = nn.ModuleList([MupBlock(width, power) for _ in range(DEPTH)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.multiplier = BASE / width
        for weight in self.hidden():
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        nn.init.normal_(self.head.weight, std=0.03)

    def hidden(self) -> list[Tensor]:
        return [weight for weight in self.blocks.parameters() if weight.dim() == 2]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.multiplier


def loss_of(model: nn.Module) -> Tensor:
    logits = model(BATCH[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), BATCH[:, 1:].flatten())


def optimiser(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Adam, with hidden rates over the width, as muP has it."""
    assert isinstance(model, MupModel)
    hidden = model.hidden()
    of_hidden = set(map(id, hidden))
    others = [weight for weight in model.parameters() if id(weight) not in of_hidden]
    groups = [{"params": hidden, "lr": rate * model.multiplier}, {"params": others, "lr": rate}]
    return torch.optim.Adam(groups)


def trained_loss(width: int, power: float, rate: float, seed: int) -> float:
    torch.manual_seed(seed)
    model = MupModel(width, power)
    stepping = optimiser(model, rate)
    for _ in range(UPDATES):
        stepping.zero_grad()
        loss_of(model).backward()
        stepping.step()
    return loss_of(model).item()


def best_rate(width: int, power: float) -> float:
    """The rate with the least loss after the updates, between the tried ones by a parabola."""
    losses = [
        statistics.fmean(trained_loss(width, power, rate, seed) for seed in range(SEEDS))
        for rate in RATES
    ]
    k = min(range(1, len(RATES) - 1), key=losses.__getitem__)
    below, at, above = losses[k - 1 : k + 2]
    return 2.0 ** (math.log2(RATES[k]) + 0.5 * (below - above) / (below - 2 * at + above))


def main() -> None:
    torch.set_num_threads(1)
    lines = [
        f"best rate at width {WIDE} over that at {BASE}, after {UPDATES} updates, {SEEDS} seeds",
        "",
        "scores over  best rate times  attention logits  transfer_check",
    ]
    for power in POWERS:
        moved = best_rate(WIDE, power) / best_rate(BASE, power)
        found = transfer_check(
            lambda width, _, power=power: MupModel(width, power),
            optimiser,
            loss_of,
            widths=(32, 64, 128, 256),
            depths=(DEPTH,),
            rates=(1e-3,),
        )
        (scores,) = [growth for growth in found.growths if growth.place == "attention logits"]
        lines.append(f"d^{power:<9g}  x{moved:<14.2f}  {scores!s:16}  {found.verdict}")
        print(lines[-1], flush=True)
    keep("attention-scale", lines)


if __name__ == "__main__":
    main()
