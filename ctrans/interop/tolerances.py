"""How closely two computations of the same quantity must agree."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def tolerance(dtype: torch.dtype) -> float:
    """The relative difference up to which two ways to compute a block, or a part of it, count as
    equal.

    Parts of a model may compute in float32 even if its weights are in float64, which limits the
    agreement.
    """
    return math.sqrt(unit(dtype))


def unit(dtype: torch.dtype) -> float:
    """The rounding of one operation: of the dtype, or of float32 for finer dtypes."""
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


def difference(found: Tensor, expected: Tensor) -> float:
    """|found - expected|/|expected|; infinite if shapes differ or `expected` is zero."""
    size = float(expected.norm())
    return float((found - expected).norm()) / size if found.shape == expected.shape and size > 0 else math.inf


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether the two differ by no more than the rounding of a few operations."""
    close = 64 * unit(expected.dtype)
    return found.shape == expected.shape and float((found - expected).norm()) <= close * float(expected.norm())
