"""Scaling of linear maps in place."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def scale_linear(linear: nn.Linear, c: float) -> None:
    """W -> c W and b -> c b, in place."""
    linear.weight.mul_(c)
    if linear.bias is not None:
        linear.bias.mul_(c)
