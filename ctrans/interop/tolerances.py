"""How close two computations of one thing come."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def tolerance(dtype: torch.dtype) -> float:
    """The relative difference up to which two ways to compute a block, or a part of it, count as
    the same.

    What is in float32 even where the model's numbers are finer decides how close the two can be.
    """
    return math.sqrt(unit(dtype))


def unit(dtype: torch.dtype) -> float:
    """The rounding of one operation: that of the type, or of float32 where the type is finer."""
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


def difference(found: Tensor, expected: Tensor) -> float:
    """|found - expected|/|expected|; infinite where the shapes differ, or nothing is expected but
    zeros.
    """
    size = float(expected.norm())
    return float((found - expected).norm()) / size if found.shape == expected.shape and size > 0 else math.inf


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether the two differ by no more than the rounding of a few operations."""
    close = 64 * unit(expected.dtype)
    return found.shape == expected.shape and float((found - expected).norm()) <= close * float(expected.norm())
