"""The largest eigenvalue of the loss's Hessian, and of Adam's preconditioned one, by Lanczos with
products alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ctrans.dynamics.fields import reference_kernels
from ctrans.measure.backward.curvature import ADAM_EPS
from ctrans.measure.backward.singular_values import second_derivatives
from ctrans.model.gpt import GPT

STEPS = 12
"""Lanczos steps: a largest eigenvalue apart from the rest is found to a few percent in as many."""
PARTS = 4


def largest_eigenvalue(
    product: Callable[[Tensor], Tensor], like: Tensor, steps: int = STEPS, seed: int = 0
) -> float:
    """The largest eigenvalue of a symmetric operator on vectors like `like`, by Lanczos with full
    reorthogonalisation; from below.
    """
    generator = torch.Generator(like.device).manual_seed(seed)
    v = torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)
    basis = [v / v.norm()]
    diagonal: list[float] = []
    off: list[float] = []
    for _ in range(min(steps, like.numel())):
        w = product(basis[-1])
        diagonal.append(float(w @ basis[-1]))
        for _ in range(2):  # once is not enough where vectors have nearly been found
            for each in basis:
                w = w - (w @ each) * each
        length = float(w.norm())
        if not math.isfinite(length) or length <= 1e-10 * max(map(abs, diagonal)):
            break
        off.append(length)
        basis.append(w / length)
    k = len(diagonal)
    tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for i in range(k - 1):
        tridiagonal[i, i + 1] = tridiagonal[i + 1, i] = off[i]
    if not torch.isfinite(tridiagonal).all():
        return math.nan
    return float(torch.linalg.eigvalsh(tridiagonal)[-1])


def hessian_edges(
    model: GPT, tokens: Tensor, targets: Tensor, steps: int = STEPS
) -> tuple[float, float]:
    """lambda_max of H and of P^-1/2 H P^-1/2, H the Hessian of the mean cross-entropy by all
    weights, P = sqrt(nu) + eps.

    nu is the mean square of the gradients of `PARTS` parts of the sequences, as Adam's second
    moments come to be. Gradient descent is stable for lambda eta < 2, Adam for lambda eta < 38
    (Cohen et al. 2022).
    """
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def gradients(x: Tensor, y: Tensor, create_graph: bool = False) -> Sequence[Tensor]:
        _, loss = model(x, y)
        return torch.autograd.grad(loss, weights, create_graph=create_graph, materialize_grads=True)

    with reference_kernels(model), second_derivatives(), torch.enable_grad():
        parts = [
            gradients(x, y) for x, y in zip(tokens.chunk(PARTS), targets.chunk(PARTS), strict=True)
        ]
        nu = flat(
            [
                sum((each[i] ** 2 for each in parts), torch.zeros_like(w)) / len(parts)
                for i, w in enumerate(weights)
            ]
        )
        first = gradients(tokens, targets, create_graph=True)

        def product(v: Tensor) -> Tensor:
            pieces = [
                piece.view_as(w)
                for piece, w in zip(v.split([w.numel() for w in weights]), weights, strict=True)
            ]
            along = sum(
                ((g * piece).sum() for g, piece in zip(first, pieces, strict=True)), torch.zeros(())
            )
            return flat(
                torch.autograd.grad(along, weights, retain_graph=True, materialize_grads=True)
            )

        scale = (nu.sqrt() + ADAM_EPS).rsqrt()
        plain = largest_eigenvalue(product, nu, steps)
        adam = largest_eigenvalue(lambda v: scale * product(scale * v), nu, steps)
    return plain, adam


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """All entries as one vector."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
