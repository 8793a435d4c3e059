"""Relaxed sweeps of the maximum principle (successive approximations).

A sweep computes the slope P of the loss at the present controls, the controls that the maximum
principle asks for at this P, and moves towards them as far as the loss falls. As an algorithm these
are conditional gradients (Frank and Wolfe 1956) with steps that adapt to the curvature.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.control.admissible import ratio

LossTerms = Float[Tensor, "*rows"]
"""What each token adds to the loss. For a loss that is no sum over tokens there is one entry."""
SWEEPS = 200
"""The most sweeps of a search."""
CLOSE = 1e-3
"""A search ends when the gap is this share of the loss."""
LEAST = 1e-3
"""Losses below it count as it, in nats."""
FIRST_CURVATURE = 1e-6
"""The curvature at which the search of a step begins: too low, so that the first step is long."""
ROUNDING = 8
"""By how many machine epsilons a loss may rise."""


class Swept(NamedTuple):
    """The end of a search.

    - `z`: the controls, or the state that they lead to; `values`: their losses
    - `gap`: <P, z - z*> of each entry of the loss, the gap of the maximum principle
    - `lower`: the largest value less its gap, of all sweeps. If the loss is convex it bounds the
      least one from below
    - `history`: the loss after each sweep
    """

    z: Tensor
    values: LossTerms
    gap: LossTerms
    lower: LossTerms
    history: list[float]

    def or_better(self, other: Swept, losses: Callable[[Tensor], LossTerms]) -> Swept:
        """This search, with what `other` found for the tokens whose losses are lower there; the
        better of both as a whole, if the losses of tokens depend on each other.
        """
        better = other.values < self.values
        z = torch.where(better.unsqueeze(-1), other.z, self.z)
        values = losses(z)
        gap = torch.where(better, other.gap, self.gap)
        both = Swept(z, values, gap, torch.maximum(self.lower, other.lower), self.history)
        return min((both, self, other), key=lambda swept: float(swept.values.sum()))


@torch.no_grad()
def sweep(
    losses: Callable[[Tensor], LossTerms],
    best: Callable[[Tensor, Tensor], Tensor],
    z: Tensor,
    *,
    sweeps: int,
    close: float,
    least: float,
    floor: float = -math.inf,
) -> Swept:
    """z <- z + a (z* - z) with z* = best(z, P), P = dL/dz, from an allowed z, until the gap is
    below `close` times the loss, or times `least` for smaller losses; or until the loss is so near
    to `floor`, which it cannot be below.

    The step is a = min(1, gap/(c |z* - z|^2)). A token whose loss does not fall as much as a
    curvature of c allows stays where it is, and its c grows. So no loss ever rises, if each
    depends on its own token. The end is evaluated once more, as a head may mix tokens; where that
    has raised the sum, z stays.

    z has one more axis than the losses at its end, and may have one more at its beginning: controls
    by segment.
    """
    start = z
    values, P = value_and_slope(losses, z)
    rows = values.shape

    def of_rows(terms: Tensor) -> Tensor:
        if rows == terms.shape:
            return terms
        if rows == terms.shape[1:]:
            return terms.sum(0)
        return terms.sum().reshape(rows)

    curvature = torch.full_like(values, FIRST_CURVATURE)
    rounding = ROUNDING * torch.finfo(values.dtype).eps
    gap = torch.zeros_like(values)
    lower = torch.full_like(values, -torch.inf)
    history = [float(values.sum())]
    for _ in range(sweeps):
        move = best(z, P) - z
        gap = of_rows(-(P * move).sum(-1)).clamp_min(0)
        lower = torch.maximum(lower, values - gap)
        total = float(values.sum())
        left = min(float(gap.sum()), total - floor)
        if left <= close * max(total, least):
            break
        squared = of_rows(move.square().sum(-1))
        step = ratio(gap, curvature * squared).clamp(max=1)
        next_z = z + step.unsqueeze(-1) * move
        next_values, next_P = value_and_slope(losses, next_z)
        allowed = values - step * gap + curvature * step.square() * squared / 2
        accepted = next_values <= allowed + rounding * values.abs()
        z = torch.where(accepted.unsqueeze(-1), next_z, z)
        P = torch.where(accepted.unsqueeze(-1), next_P, P)
        values = torch.where(accepted, next_values, values)
        curvature = torch.where(accepted, curvature / 2, curvature * 4)
        history.append(float(values.sum()))
    values = losses(z)
    if float(values.sum()) > history[0] * (1 + rounding):
        z = start
        values = losses(z)
    return Swept(z, values, gap, lower, history)


def value_and_slope(losses: Callable[[Tensor], LossTerms], z: Tensor) -> tuple[LossTerms, Tensor]:
    """The losses and their slope P = dL/dz."""
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        values = losses(z)
        (P,) = torch.autograd.grad(values.sum(), z)
    return values.detach(), P
