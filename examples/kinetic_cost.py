"""What the kinetic cost buys in loss at fewer steps afterwards: `python examples/kinetic_cost.py`.

The same GPT learns to sort, for each weight lam of the running cost lam/2 int |v|^2 dt. Then
the trained weights run with fewer, larger steps over the same depth-time: each new block has the
mean weights of those that it replaces. The table shows the validation loss by the number of blocks.
It also shows the straightness |X_T - X_0|^2 / (T int |v|^2 dt) of the path, which is at most 1.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ctrans import GPT, GPTConfig
from ctrans.control.action import Action, ActionByDepth
from ctrans.measure.walk import walk
from ctrans.training.depth_tasks import sorting
from ctrans.training.objective import Objective
from ctrans.training.rows import Labelled
from ctrans.training.settings import TrainConfig

BLOCKS = 8
ROWS = 500


@dataclass(frozen=True)
class Outcome:
    """A trained model: its loss in nats by the number of blocks, and its action."""

    kinetic: float
    seed: int
    losses: dict[int, float]
    action: Action


def trained(data: Labelled, kinetic: float, steps: int, seed: int) -> GPT:
    """The model after so many steps of AdamW on cross-entropy + lam/2 int |v|^2 dt."""
    config = GPTConfig(
        vocab_size=16, context=15, depth=BLOCKS, width=32, heads=2, dt=0.5, embedding_std=0.5
    )
    model = GPT(config, seed=seed)
    objective = Objective(model, TrainConfig(kinetic=kinetic)).train()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        warm_up = min(1.0, (step + 1) / (0.1 * steps))
        optimizer.param_groups[0]["lr"] = 5e-3 * warm_up * (1 - step / steps)
        optimizer.zero_grad()
        objective(*data.batch(step, 0, batch=32, seed=seed)).total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


@torch.no_grad()
def outcome(model: GPT, data: Labelled, kinetic: float, seed: int) -> Outcome:
    """The losses with fewer blocks over the same depth-time, and the action with all."""
    tokens, targets = data.validation_windows(ROWS)
    losses = {}
    blocks = BLOCKS
    while blocks >= 1:
        losses[blocks] = float(model.at_depth(blocks, "constant")(tokens, targets)[1])
        blocks //= 2
    return Outcome(kinetic, seed, losses, walk(model, tokens[:100], None, [ActionByDepth()])[0])


def main(arguments: Sequence[str] | None = None) -> list[Outcome]:
    parser = argparse.ArgumentParser(description="What kinetic cost buys at fewer steps.")
    parser.add_argument("--steps", type=int, default=500, help="of each training")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--kinetic", type=float, nargs="+", default=[0.0, 0.01, 0.1, 1.0])
    given = parser.parse_args(arguments)
    data = sorting()
    print(f"loss in nats; a model without depth has {data.depthless_loss():.3f}")
    numbers = [f"{BLOCKS >> halvings:>2} blocks" for halvings in range(4)]
    print("     lam  seed  " + "  ".join(numbers) + "   action  straightness")
    outcomes = []
    for kinetic, seed in itertools.product(given.kinetic, range(given.seeds)):
        model = trained(data, kinetic, given.steps, seed)
        result = outcome(model, data, kinetic, seed)
        losses = "  ".join(f"{loss:9.3f}" for loss in result.losses.values())
        path = f"{result.action.action:7.1f}  {result.action.straightness:12.3f}"
        print(f"{kinetic:8g}  {seed:4}  {losses}  {path}", flush=True)
        outcomes.append(result)
    return outcomes


if __name__ == "__main__":
    main()
