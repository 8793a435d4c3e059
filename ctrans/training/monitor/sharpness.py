"""Sharpness: the largest eigenvalue of the loss's Hessian, plain and preconditioned by Adam, by
Lanczos' method.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.dynamics.fields import reference_kernels
from ctrans.measure.backward.curvature import edge
from ctrans.measure.backward.parameter_gradients import requiring_gradients
from ctrans.measure.backward.singular_values import second_derivatives
from ctrans.measure.walk import Model, terminal_loss
from ctrans.training.monitor.updates import adam_states

STEPS = 40
"""The largest number of products with the Hessian."""
TOLERANCE = 0.02
"""The relative error of an eigenvalue, by the residual of its vector, that ends the iteration."""


def sharpness(
    model: Model,
    weights: Sequence[nn.Parameter],
    tokens: Tensor,
    targets: Any,
    scales: Sequence[Tensor] | None = None,
) -> float:
    """lambda_max of H = d^2 L/dW^2 at these tokens, or of S H S with S = diag(scales), by
    Rayleigh-Ritz in the Krylov space.

    The result is a lower bound, to `TOLERANCE` or after `STEPS` products. Each product is a
    gradient of a gradient, on one graph of the whole model.
    """
    assert isinstance(model, nn.Module), "only modules train"
    scaling: Sequence[Tensor | float] = [1.0] * len(weights)
    if scales is not None:
        scaling = scales
    with (
        requiring_gradients(weights),
        reference_kernels(model),
        second_derivatives(),
        torch.enable_grad(),
    ):
        loss = terminal_loss(model, model.depth(model.embed(tokens)), targets)
        gradients = torch.autograd.grad(
            loss, list(weights), create_graph=True, materialize_grads=True
        )

        def product(v: Tensor) -> Tensor:
            slope = torch.zeros((), device=v.device)
            for part, weight, scale, gradient in zip(
                v.split(sizes), weights, scaling, gradients, strict=True
            ):
                slope = slope + (gradient * (part.view_as(weight) * scale)).sum()
            second = torch.autograd.grad(
                slope, list(weights), retain_graph=True, materialize_grads=True
            )
            scaled = [part * scale for part, scale in zip(second, scaling, strict=True)]
            return torch.cat([part.detach().flatten() for part in scaled])

        sizes = [weight.numel() for weight in weights]
        start = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(0)).to(gradients[0])
        return _largest(product, start)


def adam_scales(
    weights: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer
) -> list[Tensor] | None:
    """P^-1/2 for each weight, where P = (1 - beta_1^t)(sqrt(nu) + eps) and nu are Adam's second
    moments over 1 - beta_2^t.

    None for an optimiser without them, or before its first step. Source: Cohen et al. 2022 (arXiv
    2207.14484, section 2).
    """
    states = adam_states(optimizer)
    scales = []
    for weight in weights:
        if id(weight) not in states:
            return None
        state, options = states[id(weight)]
        steps = float(state["step"])
        beta_1, beta_2 = options["betas"]
        root = (state["exp_avg_sq"] / (1 - beta_2**steps)).sqrt() + options["eps"]
        scales.append(((1 - beta_1**steps) * root).rsqrt())
    return scales


def over_edge(
    model: Model,
    weights: Sequence[nn.Parameter],
    tokens: Tensor,
    targets: Any,
    optimizer: torch.optim.Optimizer | None,
) -> dict[str, float]:
    """`sharpness`, and its ratio to the edge of stability of this optimiser.

    The edge is 2 (1 + b)/((1 - b) lr) for the preconditioned sharpness of Adam with b = beta_1
    (38/lr at 0.9), and 2 (1 + b)/lr for gradient descent with momentum b.
    """
    plain = sharpness(model, weights, tokens, targets)
    figures = {"sharpness": plain}
    if optimizer is None:
        return figures
    first_group = optimizer.param_groups[0]
    rate = max(float(group["lr"]) for group in optimizer.param_groups)
    scales = adam_scales(weights, optimizer)
    if rate > 0 and scales is not None:
        preconditioned = sharpness(model, weights, tokens, targets, scales)
        limit = edge(rate, float(first_group["betas"][0]))
        figures["preconditioned"] = preconditioned
        figures["edge"] = limit
        figures["preconditioned_over_edge"] = preconditioned / limit
    elif rate > 0 and "betas" not in first_group:
        limit = 2 * (1 + float(first_group.get("momentum", 0.0))) / rate
        figures["edge"] = limit
        figures["preconditioned_over_edge"] = plain / limit
    return figures


def _largest(product: Any, start: Tensor) -> float:
    """The largest Ritz value, with two orthogonalisations of each vector."""
    basis = [start / start.norm()]
    diagonal = list[float]()
    off_diagonal = list[float]()
    for _ in range(min(STEPS, len(start))):
        w = product(basis[-1])
        diagonal.append(float(w @ basis[-1]))
        for _ in range(2):
            for q in basis:
                w = w - (w @ q) * q
        residual = float(w.norm())
        matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        if off_diagonal:
            above = torch.diag(torch.tensor(off_diagonal, dtype=torch.float64), 1)
            matrix = matrix + above + above.mT
        if not torch.isfinite(matrix).all() or not math.isfinite(residual):
            return math.nan
        values, vectors = torch.linalg.eigh(matrix)
        largest = float(values[-1])
        error = residual * abs(float(vectors[-1, -1]))
        if error <= TOLERANCE * abs(largest) or residual == 0:
            break
        off_diagonal.append(residual)
        basis.append(w / residual)
    return largest
