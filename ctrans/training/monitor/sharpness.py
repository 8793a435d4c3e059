"""Sharpness: the largest eigenvalue of the loss's Hessian, plain or scaled, by Lanczos' method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.dynamics.fields import reference_kernels
from ctrans.measure.backward.parameter_gradients import requiring_gradients
from ctrans.measure.backward.singular_values import second_derivatives
from ctrans.measure.walk import Model, terminal_loss

STEPS = 40
"""The largest number of products with the Hessian."""
TOLERANCE = 0.02
"""The relative error of an eigenvalue, by the residual of its vector, that ends the iteration."""


def sharpness(
    model: Model,
    weights: Sequence[nn.Parameter],
    tokens: Tensor,
    targets: Any,
    scales: Sequence[Tensor | float] | None = None,
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
