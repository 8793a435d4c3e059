"""Optimisers by name. Weight decay acts on matrices, and on request on gains, offsets and biases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from solvers.errors import look_up

FUSED = frozenset({"cpu", "cuda", "mps", "xpu"})
"""Devices for which torch has a fused AdamW."""

Groups = list[dict[str, Any]]
Make = Callable[[Groups, float, tuple[float, float], torch.device], torch.optim.Optimizer]


def adamw(groups: Groups, learning_rate: float, betas: tuple[float, float], device: torch.device) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, 2019), fused if torch can."""
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=device.type in FUSED)


def sgd(groups: Groups, learning_rate: float, betas: tuple[float, float], device: torch.device) -> torch.optim.Optimizer:
    """Gradient descent with the first beta as momentum. Weight decay is a quadratic penalty."""
    return torch.optim.SGD(groups, lr=learning_rate, momentum=betas[0])


OPTIMISERS: dict[str, Make] = {"adamw": adamw, "sgd": sgd}


def make_optimiser(
    name: str,
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
    device: torch.device,
    decay_gains: bool = False,
) -> torch.optim.Optimizer:
    """The optimiser of that name for the parameters that need a gradient. Raises ConfigError with
    the nearest name for an unknown one.
    """
    make = look_up("optimiser", name, OPTIMISERS)
    groups = decay_groups([p for p in parameters if p.requires_grad], weight_decay, decay_gains)
    return make(groups, learning_rate, betas, device)


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float, decay_gains: bool = False) -> Groups:
    """Two groups: matrices, which decay, and vectors (gains, offsets, biases), which decay with
    `decay_gains` only.

    Behind an output norm only decay of the gains bounds the velocity: the norm removes the scale of
    the matrices before it.
    """
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in parameters:
        (matrices if parameter.dim() >= 2 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": weight_decay * decay_gains}]
    return [group for group in groups if group["params"]]
