"""Adam's step of one weight, for optimisers that treat other weights apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def adam_step(weight: Tensor, group: dict[str, Any], state: dict[str, Tensor]) -> None:
    """w - r m/(sqrt(v) + eps) with the corrected moments m and v of the gradient (Kingma and Ba,
    2015), kept in `state`. It decays nothing.
    """
    gradient = weight.grad
    assert gradient is not None, "only weights with a gradient take a step"
    first, second = group["betas"]
    # a tensor, which checkpoints keep
    step = state.setdefault("step", torch.zeros(())).add_(1).item()
    mean = state.setdefault("exp_avg", torch.zeros_like(weight))
    mean.lerp_(gradient, 1 - first)
    square = state.setdefault("exp_avg_sq", torch.zeros_like(weight))
    square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
    root = (square / (1 - second**step)).sqrt_().add_(group["eps"])
    weight.addcdiv_(mean, root, value=-group["lr"] / (1 - first**step))
