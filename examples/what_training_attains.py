"""What gradient descent attains of the maximum principle: alignment 0, and the mean-field condition
for shared weights.

A small GPT learns a text on which no model can have loss zero: equal beginnings with unequal ends.
It uses full-batch Adam, then L-BFGS. The loss has a decay lam/2 of the squares of all parameters.
During training, the identity dt <P, v> = <theta, dL/dtheta> of each sublayer's last factor theta
holds to rounding. At the end, dt <P, v> = -lam |theta|^2. So the alignment with the best velocities
token by token is near 0, and their gap is nearly all of H. What the shared last factor leaves of
the best of its own size goes to 0.

python examples/what_training_attains.py [--placement peri]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ctrans.control.attained import Attained, attained
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT

LAM = 1e-3
TEXT = (
    "the state is what the past leaves",
    "the state is how the road begins",
    "the state is all that layers see",
    "the state is not what it seems to",
)


def main(arguments: Sequence[str] | None = None) -> list[Attained]:
    parser = argparse.ArgumentParser(
        description="What gradient descent attains of the maximum principle."
    )
    parser.add_argument("--placement", default="peri")
    parser.add_argument("--steps", type=int, default=300, help="of Adam, before L-BFGS")
    parser.add_argument("--polish", type=int, default=600, help="iterations of L-BFGS")
    given = parser.parse_args(arguments)
    length = min(map(len, TEXT))
    text = torch.tensor([list(line[:length].encode()) for line in TEXT])
    tokens, targets = text[:, :-1], text[:, 1:]
    config = GPTConfig(
        vocab_size=128,
        context=length,
        depth=2,
        width=16,
        heads=2,
        placement=given.placement,
        norm="rmsnorm",
        embedding_std=0.5,
    )
    model = GPT(config, seed=0).double()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def loss() -> Tensor:
        logits = model.head(model.depth(model.embed(tokens)))
        decay = LAM / 2 * torch.stack([parameter.square().sum() for parameter in parameters]).sum()
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten()) + decay

    readings: list[Attained] = []
    heads = (
        "step",
        "loss",
        "identity",
        "dt<P,v>",
        "stationarity",
        "alignment",
        "free gap/H",
        "last gap/H",
        "first order",
    )
    print(
        f"{given.placement}: sums over sublayers; identity and stationarity are the worst of them\n"
        + " ".join(f"{head:>13}" for head in heads)
    )

    def look(step: int) -> None:
        found = attained(model, tokens, targets, weight_decay=LAM, decay_gains=True)
        readings.append(found)
        print(" ".join(f"{cell:>13}" for cell in (str(step), *_cells(found))))

    adam = torch.optim.Adam(parameters, lr=1e-2)
    for step in range(given.steps):
        if step in (0, 10, 30, 100):
            look(step)
        adam.zero_grad()
        loss().backward()
        adam.step()
    look(given.steps)
    polish = torch.optim.LBFGS(
        parameters,
        max_iter=given.polish,
        tolerance_grad=1e-9,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        polish.zero_grad()
        value = loss()
        value.backward()
        return value

    polish.step(closure)
    look(given.steps + given.polish)
    return readings


def _cells(found: Attained) -> list[str]:
    work, left = sum(found.work), max(map(abs, found.stationarity))
    gaps = [gap for gap in found.pointwise_gap if math.isfinite(gap)]
    steepest = sum(gap - work for gap, work in zip(gaps, found.work, strict=False))  # dt H
    shares = [
        f"{part / steepest:.2e}" if gaps else "-"
        for part in (-work, sum(gaps), sum(found.last_gap))
    ]
    first = sum(found.first_order)
    return [
        f"{found.loss:.4f}",
        f"{max(found.identity):.0e}",
        f"{work:.2e}",
        f"{left:.1e}",
        *shares,
        f"{first:.1e}",
    ]


if __name__ == "__main__":
    main()
