"""The validation loss and other figures of the validation windows, over all processes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from ctrans.training.data import Data
from ctrans.training.processes import Processes


@torch.no_grad()
def evaluate(
    module: nn.Module, data: Data, windows: int, size: int, processes: Processes
) -> dict[str, float]:
    """Evaluates on fixed windows, `size` at a time over all processes. All processes make the same
    number of calls.

    - `validation_loss`: the mean cross-entropy in nats per token
    - `growth`: rms X_T / rms X_0; inf or nan if X_0 is 0
    - `largest`: the largest |entry| of all X_k
    - `accuracy`: the share of targets that have the largest logit
    """
    tokens, targets = data.validation_windows(windows)
    sums = torch.zeros(5, dtype=torch.float64, device=processes.device)
    largest = torch.zeros((), dtype=torch.float64, device=processes.device)
    module.eval()
    size_here = max(1, size // processes.world)
    for windows_here in shares(len(tokens), size_here, processes.rank, processes.world):
        # a process without windows still takes part in collective operations
        rows = windows_here or [0]
        losses = module(tokens[rows].to(processes.device), targets[rows].to(processes.device))
        means = [
            losses.cross_entropy,
            losses.first_square,
            losses.last_square,
            losses.accuracy,
            torch.ones_like(losses.cross_entropy),
        ]
        sums += len(windows_here) * torch.stack([mean.double() for mean in means])
        largest = torch.maximum(largest, losses.largest.double())
    module.train()
    loss, first_square, last_square, right, count = processes.sum(sums).tolist()
    return {
        "validation_loss": loss / count,
        "growth": _growth(first_square, last_square),
        "largest": float(processes.max(largest)),
        "accuracy": right / count,
    }


def _growth(first_square: float, last_square: float) -> float:
    """rms X_T / rms X_0 from their squares."""
    if first_square:
        return math.sqrt(last_square / first_square)
    if last_square:
        return math.inf
    return math.nan


def shares(count: int, size: int, rank: int, world: int) -> Iterator[list[int]]:
    """The windows of this process out of `count`, at most `size` at a time. All processes get the
    same number of lists, so some may be empty.
    """
    windows = range(rank, count, world)
    largest_share = -(-count // world)
    for start in range(0, largest_share, size):
        yield list(windows[start : start + size])
