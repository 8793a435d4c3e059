"""How close two computations of one thing come."""

from __future__ import annotations

import math

import torch


def tolerance(dtype: torch.dtype) -> float:
    """The relative difference up to which two ways to compute a block, or a part of it, count as the same.

    What is in float32 even where the model's numbers are finer decides how close the two can be.
    """
    return math.sqrt(unit(dtype))


def unit(dtype: torch.dtype) -> float:
    """The rounding of one operation: that of the type, or of float32 where the type is finer."""
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
