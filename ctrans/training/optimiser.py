"""Optimisers by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ctrans.model.parametrisation import StepGrowth
from ctrans.training.adam_step import adam_step
from ctrans.training.layerwise import EPS, LayerwiseMaximisation

FUSED = frozenset({"cpu", "cuda", "mps", "xpu"})
"""Devices for which torch has a fused AdamW."""
SCHULZ = (3.4445, -4.775, 2.0315)
"""Muon's polynomial (Jordan et al., 2024)."""
ROUNDS = 5
"""How often it acts: singular values end near 1."""

Groups = list[dict[str, Any]]
Make = Callable[[Groups, float, tuple[float, float]], torch.optim.Optimizer]


def adamw(
    groups: Groups, learning_rate: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, 2019), fused if torch can."""
    fused = all(weight.device.type in FUSED for group in groups for weight in group["params"])
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused)


def sgd(groups: Groups, learning_rate: float, betas: tuple[float, float]) -> torch.optim.Optimizer:
    """Gradient descent with the first beta as momentum. Weight decay is a quadratic penalty."""
    return torch.optim.SGD(groups, lr=learning_rate, momentum=betas[0])


def orthogonalised(matrix: Tensor) -> Tensor:
    """U V' of the matrix U S V', up to singular values between about 0.7 and 1.2, by Newton-Schulz
    steps in its dtype.
    """
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x: Tensor = matrix
    if is_tall:
        x = matrix.mT
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-30)
    a, b, c = SCHULZ
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    if is_tall:
        x = x.mT
    return x


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) for groups with `orthogonal`: W - r (max(1, rows/columns))^(1/2) U
    V' of the Nesterov momentum by the first beta, with decoupled decay. Other groups take steps of
    AdamW.
    """

    def __init__(self, groups: Groups, lr: float, betas: tuple[float, float]):
        super().__init__(
            groups, {"lr": lr, "betas": betas, "eps": EPS, "weight_decay": 0.0, "orthogonal": False}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step. Returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                if group["orthogonal"]:
                    self._orthogonal_step(weight, group)
                else:
                    adam_step(weight, group, self.state[weight])
        return loss

    def _orthogonal_step(self, weight: Tensor, group: dict[str, Any]) -> None:
        first, _ = group["betas"]
        momentum = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
        momentum.mul_(first).add_(weight.grad)
        size = math.sqrt(max(1.0, weight.shape[-2] / weight.shape[-1]))
        weight.add_(orthogonalised(weight.grad + first * momentum), alpha=-group["lr"] * size)


@dataclasses.dataclass(frozen=True)
class Optimiser:
    """An optimiser, and how its step grows. `orthogonal` ones treat matrices of the depth apart.
    `layerwise` ones see the states and costates of each sublayer, so they are attached to the
    depth.
    """

    make: Make
    steps: StepGrowth
    orthogonal: bool = False
    layerwise: bool = False


OPTIMISERS: dict[str, Optimiser] = {
    "adamw": Optimiser(adamw, StepGrowth(matrices=1.0)),
    "sgd": Optimiser(sgd, StepGrowth(matrices=0.0, entries=-1.0, of_gradient=True)),
    "muon": Optimiser(Muon, StepGrowth(matrices=0.0), orthogonal=True),
    "msa": Optimiser(LayerwiseMaximisation, StepGrowth(matrices=0.0), layerwise=True),
}
