"""How flat costate and velocity are in the middle of a deep model, with and without kinetic cost.

With velocities that are free at each token and a running cost lam/2 |v|^2, |P| and |v| are constant
in depth (THEORY.md). Here the velocities come from weights. A GPT of many blocks learns a text on
which no model can have loss zero, with several lam. The columns are the largest |P| or |v| over the
smallest one in the middle half of the depth, for attention and FFN: 1 is flat.

python examples/turnpike.py [--placement pre]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from ctrans.control.costate import costate
from ctrans.control.maximum_principle import MaximumPrinciple, maximum_principle
from ctrans.control.turnpike import flatness_by_kind
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.training.objective import Objective
from ctrans.training.settings import TrainConfig

TEXT = (
    "the state is what the past leaves",
    "the state is how the road begins",
    "the state is all that layers see",
    "the state is not what it seems to",
)
HEADS = ("lam", "loss", "mean |v|", "|P| attention", "|P| FFN", "|v| attention", "|v| FFN")


def main(arguments: Sequence[str] | None = None) -> dict[str, MaximumPrinciple]:
    parser = argparse.ArgumentParser(description="How flat |P| and |v| are in the middle.")
    parser.add_argument("--placement", default="pre")
    parser.add_argument("--depth", type=int, default=16, help="blocks")
    parser.add_argument("--horizon", type=float, default=8.0, help="T, depth-time in all")
    parser.add_argument("--steps", type=int, default=300, help="of Adam")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lam", type=float, nargs="*", default=[0.0, 0.001, 0.01, 0.1])
    given = parser.parse_args(arguments)
    length = min(map(len, TEXT))
    text = torch.tensor([list(line[:length].encode()) for line in TEXT])
    config = GPTConfig(
        vocab_size=128,
        context=length,
        depth=given.depth,
        width=16,
        heads=2,
        placement=given.placement,
        dt=given.horizon / (2 * given.depth),
        embedding_std=0.5,
    )
    print(f"{given.placement}, {given.depth} blocks, T = {given.horizon:g}, seed {given.seed}")
    print(" ".join(f"{head:>13}" for head in HEADS))
    found = {}
    runs = {"untrained": (0.0, 0)} | {f"{lam:g}": (lam, given.steps) for lam in given.lam}
    for name, (lam, steps) in runs.items():
        model = GPT(config, seed=given.seed).double()
        train(model, text, lam, steps)
        found[name] = maximum_principle(model.depth, costate(model, text[:, :-1], text[:, 1:]))
        print(" ".join(f"{cell:>13}" for cell in (name, *cells(found[name]))))
    return found


def train(model: GPT, text: Tensor, lam: float, steps: int) -> None:
    objective = Objective(model, TrainConfig(kinetic=lam)).train()
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        adam.zero_grad()
        objective(text[:, :-1], text[:, 1:]).total.backward()
        adam.step()


def cells(principle: MaximumPrinciple) -> list[str]:
    sizes = [size for size in principle.velocity_norm if size is not None]
    costates = flatness_by_kind(principle.kinds, principle.costate_norm)
    velocities = flatness_by_kind(principle.kinds, principle.velocity_norm)
    flat = [f"{value:.2f}" for value in (*costates.values(), *velocities.values())]
    return [f"{principle.loss:.4f}", f"{sum(sizes) / len(sizes):.3g}", *flat]


if __name__ == "__main__":
    main()
