"""How closely two computations of the same quantity must agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

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


def difference(computed: Tensor, expected: Tensor) -> float:
    """|computed - expected|/|expected|; infinite if shapes differ, or `expected` is zero or has a
    nan.
    """
    size = float(expected.norm())
    if computed.shape == expected.shape and size > 0:
        return float((computed - expected).norm()) / size
    return math.inf


def coarsest(tensors: Iterable[Tensor]) -> torch.dtype:
    """The dtype of the least precision among these and float32."""
    dtypes = [each.dtype for each in tensors if each.is_floating_point()]
    return max([torch.float32, *dtypes], key=unit)


def same_where_finite(
    computed: Tensor, expected: Tensor, dtype: torch.dtype = torch.float64
) -> bool:
    """Whether the two agree, where entries that are finite in neither count as equal: so does a
    passing of states that computes nan where the module does. Two outputs of zeros agree. `dtype`
    is what they were computed in, if it is less precise than what they are.
    """
    if computed.shape != expected.shape:
        return False
    if torch.equal(computed, expected):
        return True
    neither = ~computed.isfinite() & ~expected.isfinite()
    if neither.all():
        return True
    missed = difference(computed.masked_fill(neither, 0.0), expected.masked_fill(neither, 0.0))
    return missed <= max(tolerance(expected.dtype), tolerance(dtype))


def same(computed: Tensor, expected: Tensor) -> bool:
    """Whether the two differ by no more than the rounding of a few operations."""
    if computed.shape != expected.shape:
        return False
    close = 64 * unit(expected.dtype)
    return float((computed - expected).norm()) <= close * float(expected.norm())


def has_pull(
    function: Callable[[Tensor], Tensor],
    state: Tensor,
    pull: Tensor,
    own: Tensor | None,
    dtype: torch.dtype,
) -> bool:
    """Whether the derivative of <pull, function(x)> by x at that state is `own`; None means 0. The
    function computes in that dtype.
    """
    x = state.clone().requires_grad_()
    with torch.enable_grad():
        product = (function(x) * pull).sum()
        if not product.requires_grad:
            return own is None or not own.any()
        (found,) = torch.autograd.grad(product, x)
    if own is None:
        own = torch.zeros_like(found)
    return same_where_finite(found, own, dtype)


def likely_number(value: float, numbers: Iterable[float], close: float, digits: int) -> float:
    """The nearest of a module's own numbers if it is within the error of a fit, `close` times the
    value. Otherwise a number of few digits, at most `digits`, or the value itself.
    """
    nearest = min(numbers, key=lambda number: abs(number - value), default=0.0)
    rounded = [float(f"{value:.{n}g}") for n in range(1, digits + 1)]
    for number in (nearest, *rounded):
        if abs(number - value) <= close * abs(value):
            return number
    return value
