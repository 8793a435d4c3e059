"""Optimisers by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
