"""A proof from below of the least loss: behind a final norm the cross-entropy is convex in x_hat.

The logits are W (gamma * x_hat + beta), x_hat = sqrt(d) n with |n| <= 1, and C n = n if the norm
removes the mean. If all states within reach lie in a ball of radius r < |c| around c, the direction
of C z is within the angle arcsin(r/|c|) of C c. With eps, |n| is at least s = sqrt(m/(m + eps)), m
the least of |C z|^2/d. Hence n lies in

    {|n| <= 1, <n, C c/|C c|> >= s sqrt(1 - (r/|C c|)^2)},

which is convex. The least of a convex function over a convex set is at least its value at any of
its points less max <grad, n - m> over the m of the set, which has a closed form here. The head of
another library's model is read by its values (`ctrans.control.probed_head`). Where its logits are
within e of those of the map, the loss is within 2 e of that of the map.
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
from ctrans.control.probed_head import probed_head
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
    """The loss of a final norm, a linear map and the cross-entropy, as a function of n. `slack` is
    what the loss of the model may be below it, for each token.
    """

    norm: SphereNorm
    losses: Callable[[Tensor], LossTerms]
    slack: float = 0.0

    def proven(self, centre: TokenRows, radius: float, z: TokenRows) -> LossTerms:
        """What each token adds to the loss at least, for states in a ball around the centre. A
        radius of inf allows all states. z is a state in the ball, where the search begins.
        """
        around = self.norm.centre(centre)
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

        n = self.norm.standardize(z) / math.sqrt(self.norm.width)
        swept = sweep(self.losses, extreme, n, sweeps=SWEEPS, close=CLOSE, least=LEAST)
        return (swept.lower - self.slack).clamp_min(0)


def convex_head(
    model: Model, losses_of_logits: Callable[[Tensor], LossTerms], like: TokenRows, number: int
) -> ConvexHead:
    """The head of a model, if the loss is convex in x_hat behind its final norm.

    - `losses_of_logits`: from logits to what each token adds to the loss
    - `like`: states of the shape that the head reads
    - `number`: how many targets count

    Raises ConfigError for a loss of the model's own, and for a head that is not one linear map
    behind a norm with x_hat on a sphere.
    """
    if own_loss(model) is not None:
        raise ConfigError("the loss is not the cross-entropy of the logits, which is convex")
    if isinstance(model, GPT) and isinstance(model.final_norm, SphereNorm):
        if model.config.state_streams > 1:
            raise ConfigError("the head reads the mean of several streams")
        return _head_of_gpt(model, model.final_norm, losses_of_logits)
    probed = probed_head(model.head, like)
    return ConvexHead(
        probed.norm, lambda n: losses_of_logits(probed.logits(n)), 2 * probed.error / number
    )


def _head_of_gpt(
    model: GPT, norm: SphereNorm, losses_of_logits: Callable[[Tensor], LossTerms]
) -> ConvexHead:
    weight = model.head_weight().detach()

    def logits(n: Tensor) -> Tensor:
        return F.linear(math.sqrt(norm.width) * norm.gamma * n + norm.beta, weight)

    return ConvexHead(norm, lambda n: losses_of_logits(logits(n)))
