"""Curvature of the loss by all weights: the Gauss-Newton matrix, Adam's preconditioned one, and the
tangent kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.base.option import BELOW_ONE, Positive
from ctrans.dynamics.depth import spread
from ctrans.dynamics.fields import reference_kernels
from ctrans.measure.backward.parameter_gradients import requiring_gradients
from ctrans.measure.backward.sensitivity import ALL_AT_ONCE
from ctrans.measure.backward.singular_values import (
    Linearisation,
    jacobian_products,
    leading_singular,
)
from ctrans.measure.walk import Instrument, Model, Turn, check_targets, own_loss
from solvers import ConfigError, Finite, SolveError

PARTS = 8
"""Number of parts of the tokens. Adam's second moments are the mean of the parts' squared
gradients.
"""
ADAM_EPS = 1e-8
"""Adam's epsilon (Kingma and Ba 2015)."""
BETA = 0.9
"""Adam's first decay rate."""
KERNEL = 16
"""Largest number of outputs in the tangent kernel."""
TOLERANCE = 0.05
"""Default relative error of lambda_max. It is finer than usual grids of learning rates."""


def edge(learning_rate: Positive = 1.0, momentum: Annotated[float, BELOW_ONE] = 0.0) -> float:
    """2 (1 + b)/((1 - b) lr): the largest curvature at which gradient descent with momentum b,
    averaged as in Adam, is stable.

    On lambda/2 w^2 the iteration m <- b m + (1 - b) lambda w, w <- w - lr m has the characteristic
    polynomial z^2 - (1 + b - lr (1 - b) lambda) z + b, whose roots lie in the unit disc if and only
    if lr (1 - b) lambda <= 2 (1 + b). Without momentum the limit is 2/lr. With b = 0.9 it is 38/lr,
    Adam's edge of stability for P^-1/2 H P^-1/2 (Cohen et al. 2022, section 2).
    """
    return 2 * (1 + momentum) / ((1 - momentum) * learning_rate)


@dataclass(frozen=True)
class Spectrum:
    """lambda_max of a Gauss-Newton matrix, its estimated relative error, and the largest stable
    learning rate: `edge`(1)/lambda_max.
    """

    largest: float
    largest_error: float
    learning_rate: float


@dataclass(frozen=True)
class Curvature:
    """Spectra of the loss (`plain`) and of Adam's preconditioned loss, and the effective rank, at
    most `outputs`, of the tangent kernel.
    """

    plain: Spectrum
    adam: Spectrum
    kernel_rank: float
    outputs: int


class GaussNewton(Instrument):
    """G = J' H J/N of the mean cross-entropy of N tokens: J the Jacobian of their logits by all
    weights, H = diag(p) - p p' by token.

    G is the Hessian without the logits' own curvature, and Fisher's information matrix. It is not
    formed. G has the eigenvalues of B' J J' B/N with H = B B', B = diag(sqrt p) - p sqrt p', so
    vectors have the size of the logits, not of the weights. Adam's matrix is P^-1/2 G P^-1/2 with P
    = sqrt(nu) + eps. nu is the mean square of the gradients of `PARTS` parts of the tokens: Adam's
    second moments after that many batches. After one batch, the few entries of nu near zero would
    dominate.

    The tangent kernel is K_ij = <df_i/dW, df_j/dW> for f_i the logit of token i's target minus the
    mean of its logits, for at most `KERNEL` tokens, spread evenly. Its effective rank is exp of the
    entropy of its eigenvalues' shares (Roy and Vetterli 2007).

    It needs a walk with a loss, and builds its own graph of the whole model. Each lambda_max takes
    about 10 products to reach `TOLERANCE`, each an evaluation and a few gradients. Raises
    ConfigError if weights are made on demand.
    """

    def head(self, model: Model, at: Turn) -> None:
        if model.depth.streamed:
            raise ConfigError(f"the Gauss-Newton matrix is {ALL_AT_ONCE}")
        if own_loss(model) is not None:
            raise ConfigError(
                "the Gauss-Newton matrix needs a cross-entropy of logits, and this model has"
                " another loss"
            )
        if not math.isfinite(at.loss):
            raise SolveError("the loss is not finite, so its curvature is undefined")
        self.found = curvature(model, at.tokens, at.targets)


def curvature(
    model: Model, tokens: Tensor, targets: Tensor, *, tolerance: float = TOLERANCE
) -> Curvature:
    """`GaussNewton` at these tokens and targets. Targets of -1 do not count."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"a {type(model).__name__} is no nn.Module, so its weights are unknown and its"
            " attention cannot switch to a kernel with second derivatives: give an nn.Module"
        )
    check_targets(model, tokens, targets)
    weights = [weight for weight in model.parameters() if weight.is_floating_point()]
    with requiring_gradients(weights), reference_kernels(model):
        logits = _Logits(model, weights, tokens, targets)
        # Adam's edge has its first decay rate, plain gradient descent has none
        plain = _spectrum(logits, None, edge(), float(tolerance))
        scales = [1 / (nu.sqrt() + ADAM_EPS) for nu in logits.second_moments()]
        adam = _spectrum(logits, scales, edge(momentum=BETA), float(tolerance))
        del scales
        kernel = logits.tangent_kernel()
    return Curvature(plain, adam, effective_rank(kernel), len(kernel))


def effective_rank(kernel: Annotated[Float[Tensor, "size size"], Finite]) -> float:
    """exp(-sum_i s_i log s_i), s the eigenvalues' shares: 1 for rank one, the size if all are
    equal, nan for a zero matrix.
    """
    values = torch.linalg.eigvalsh(kernel.double()).clamp(min=0)
    shares = values / values.sum()
    return float(torch.special.entr(shares).sum().exp())


class _Logits:
    """The logits y (N, vocabulary) of the tokens with a target, and products with their Jacobian by
    the weights.
    """

    @torch.enable_grad()
    def __init__(self, model: Model, weights: Sequence[Tensor], tokens: Tensor, targets: Tensor):
        counted = targets.flatten() >= 0
        y = model.head(model.depth(model.embed(tokens))).flatten(0, -2)[counted]
        self.y = y.detach()
        self.targets = targets.flatten()[counted]
        self.weights = weights
        self.push, self.pull = jacobian_products(y, weights)
        self.p = self.y.softmax(-1)
        self.root = self.p.sqrt()

    def curved(self, v: Tensor) -> Tensor:
        """B v/sqrt(N)."""
        return (self.root * v - self.p * (self.root * v).sum(-1, keepdim=True)) / math.sqrt(len(v))

    def curved_back(self, v: Tensor) -> Tensor:
        """B' v/sqrt(N)."""
        return (self.root * v - self.root * (self.p * v).sum(-1, keepdim=True)) / math.sqrt(len(v))

    def gram(self, v: Tensor, scales: Sequence[Tensor] | None) -> Tensor:
        """B' J P^-1 J' B v/N."""
        pulled = self.pull(self.curved(v))
        if scales is not None:
            for of_weight, scale in zip(pulled, scales, strict=True):
                of_weight.mul_(scale)
        return self.curved_back(self.push(pulled))

    def second_moments(self) -> list[Tensor]:
        """The mean over `PARTS` parts of the squared gradients, by weight. Each part is every
        `PARTS`-th token.
        """
        gradient = self.p.clone()
        rows = torch.arange(len(gradient), device=gradient.device)
        gradient[rows, self.targets] -= 1
        parts = min(PARTS, len(gradient))
        part_of_row = rows % parts
        moments = [torch.zeros_like(weight) for weight in self.weights]
        for part in range(parts):
            inside = (part_of_row == part).unsqueeze(-1)
            by_weight = self.pull(gradient * inside / inside.sum())
            for moment, of_weight in zip(moments, by_weight, strict=True):
                moment.addcmul_(of_weight, of_weight, value=1 / parts)
        return moments

    def tangent_kernel(self) -> Tensor:
        outputs = []
        for row in spread(len(self.y), KERNEL):
            e = torch.zeros_like(self.y)
            e[row] = -1 / self.y.shape[-1]
            e[row, self.targets[row]] += 1
            outputs.append(e)
        rows = []
        for e in outputs:
            moved = self.push(self.pull(e))
            rows.append(torch.stack([(moved * output).sum() for output in outputs]))
        kernel = torch.stack(rows)
        return (kernel + kernel.mT) / 2


def _spectrum(
    logits: _Logits, scales: Sequence[Tensor] | None, allowed: float, tolerance: float
) -> Spectrum:
    """lambda_max by Rayleigh-Ritz: the square of the largest singular value of B' J P^-1/2, to half
    the tolerance.
    """
    gram = Linearisation(logits.y, logits.y, lambda v: logits.gram(v, scales), lambda v: v)
    singular = leading_singular(gram, tolerance=tolerance / 2)
    largest = singular.largest**2
    learning_rate = math.inf
    if largest:
        learning_rate = allowed / largest
    return Spectrum(largest, 2 * singular.error, learning_rate)
