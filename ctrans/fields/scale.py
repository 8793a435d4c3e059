"""Scaling of linear maps in place."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def scale_linear(linear: nn.Module, c: float) -> None:
    """W -> c W and b -> c b, in place; of all that it is made of, where it is two maps side by side."""
    for parameter in linear.parameters():
        parameter.mul_(c)
