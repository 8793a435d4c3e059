"""A proof from below of the least loss: behind a final norm the cross-entropy is convex in x_hat.

The logits are W (gamma * x_hat + beta), x_hat = sqrt(d) n with |n| <= 1, and C n = n if the norm
removes the mean. If all states within reach lie in a ball of radius r < |c| around c, the direction
of C z is within the angle arcsin(r/|c|) of C c. With eps, |n| is at least s = sqrt(m/(m + eps)), m
the least of |C z|^2/d. Hence n lies in

    {|n| <= 1, <n, C c/|C c|> >= s sqrt(1 - (r/|C c|)^2)},

which is convex. The least of a convex function over a convex set is at least its value at any of
its points less max <grad, n - m> over the m of the set, which has a closed form here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ctrans.base.shapes import TokenRows
from ctrans.control.admissible import length, ratio
from ctrans.control.sweeps import LossTerms, sweep
from ctrans.dynamics.norm import SphereNorm
from ctrans.measure.walk import Model, own_loss
from ctrans.model.gpt import GPT
from solvers import ConfigError

SWEEPS = 300
"""The most sweeps of a search for the proof."""
CLOSE = 1e-3
"""It ends when the gap is this share of the loss."""
LEAST = 1e-4
"""Losses below it count as it, in nats."""


@dataclass(frozen=True, eq=False)
class ConvexHead:
    """The loss of a final norm, a linear map and the cross-entropy, as a function of n."""

    norm: SphereNorm
    losses: Callable[[Tensor], LossTerms]

    def proven(self, centre: TokenRows, radius: float, z: TokenRows) -> LossTerms:
        """What each token adds to the loss at least, for states in a ball around the centre. A
        radius of inf allows all states. z is a state in the ball, where the search begins. It
        computes in float64.
        """
        around = self.norm.centre(centre.double())
        distance = length(around)
        inside = (distance - radius).clamp_min(0)
        size = inside / math.sqrt(self.norm.width)
        shortest = ratio(size, (size.square() + self.norm.eps).sqrt() + self.norm.added)
        cosine = (1 - ratio(torch.full_like(distance, radius), distance).square()).clamp_min(0)
        least = torch.where(inside > 0, shortest * cosine.sqrt(), -1.0).unsqueeze(-1)
        axis = ratio(around, distance.unsqueeze(-1))

        def extreme(_: Tensor, P: Tensor) -> Tensor:
            downhill = -self.norm.centre(P)
            free = ratio(downhill, length(downhill).unsqueeze(-1))
            along = (free * axis).sum(-1, keepdim=True)
            across = free - along * axis
            across = ratio(across, length(across).unsqueeze(-1))
            on_rim = least * axis + (1 - least.square()).clamp_min(0).sqrt() * across
            return torch.where(along >= least, free, on_rim)

        n = self.norm.standardize(z.double()) / math.sqrt(self.norm.width)
        swept = sweep(self.losses, extreme, n, sweeps=SWEEPS, close=CLOSE, least=LEAST)
        return swept.lower.clamp_min(0)


def convex_head(model: Model, losses_of_logits: Callable[[Tensor], LossTerms]) -> ConvexHead:
    """The head of a GPT, for a loss that is convex in x_hat behind its final norm.
    `losses_of_logits` maps logits to what each token adds to the loss.

    Raises ConfigError for a loss of the model's own, and for a head that is not known to be one
    linear map behind a norm with x_hat on a sphere.
    """
    if own_loss(model) is not None:
        raise ConfigError("the loss is not the cross-entropy of the logits, which is convex")
    if not isinstance(model, GPT) or not isinstance(model.final_norm, SphereNorm):
        raise ConfigError(
            "the head is not known to be one linear map behind a norm that divides by a token's"
            " size, so that the loss is not known to be convex"
        )
    if model.config.state_streams > 1:
        raise ConfigError("the head reads the mean of several streams")
    norm = model.final_norm
    weight = model.head_weight().detach()
    if weight.dtype.itemsize < torch.float32.itemsize:
        raise ConfigError(f"losses in {weight.dtype} have two or three digits: nothing is proven")
    weight = weight.double()

    def logits(n: Tensor) -> Tensor:
        return F.linear(math.sqrt(norm.width) * norm.gamma * n + norm.beta, weight)

    return ConvexHead(norm, lambda n: losses_of_logits(logits(n)))
