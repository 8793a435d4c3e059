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
    scaling: Sequence[Tensor | float] = [1.0] * len(weights) if scales is None else scales
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
            parts = [
                part.view_as(weight) for part, weight in zip(v.split(sizes), weights, strict=True)
            ]
            along = [part * scale for part, scale in zip(parts, scaling, strict=True)]
            total = sum(
                ((g * p).sum() for g, p in zip(gradients, along, strict=True)),
                torch.zeros((), device=v.device),
            )
            found = torch.autograd.grad(
                total, list(weights), retain_graph=True, materialize_grads=True
            )
            return torch.cat(
                [
                    (part * scale).detach().flatten()
                    for part, scale in zip(found, scaling, strict=True)
                ]
            )

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
        steps, (beta_1, beta_2) = float(state["step"]), options["betas"]
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
    found = {"sharpness": plain}
    if optimizer is None:
        return found
    group = optimizer.param_groups[0]
    rate = max(float(each["lr"]) for each in optimizer.param_groups)
    scales = adam_scales(weights, optimizer)
    if rate > 0 and scales is not None:
        seen = sharpness(model, weights, tokens, targets, scales)
        limit = edge(rate, float(group["betas"][0]))
        found |= {"preconditioned": seen, "edge": limit, "preconditioned_over_edge": seen / limit}
    elif rate > 0 and "betas" not in group:
        limit = 2 * (1 + float(group.get("momentum", 0.0))) / rate
        found |= {"edge": limit, "preconditioned_over_edge": plain / limit}
    return found


def _largest(product: Any, start: Tensor) -> float:
    """The largest Ritz value, with two orthogonalisations of each vector."""
    basis = [start / start.norm()]
    diagonal = list[float]()
    beside = list[float]()
    for _ in range(min(STEPS, len(start))):
        w = product(basis[-1])
        diagonal.append(float(w @ basis[-1]))
        for _ in range(2):
            for q in basis:
                w = w - (w @ q) * q
        residual = float(w.norm())
        matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        if beside:
            off = torch.diag(torch.tensor(beside, dtype=torch.float64), 1)
            matrix = matrix + off + off.mT
        if not torch.isfinite(matrix).all() or not math.isfinite(residual):
            return math.nan
        values, vectors = torch.linalg.eigh(matrix)
        found = float(values[-1])
        if residual * abs(float(vectors[-1, -1])) <= TOLERANCE * abs(found) or residual == 0:
            break
        beside.append(residual)
        basis.append(w / residual)
    return found
