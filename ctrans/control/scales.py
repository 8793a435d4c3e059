"""Sizes apart from directions, so that no square or product of tiny or huge numbers is 0 or inf.

The penalty that is needed is homogeneous in states and costates. It is computed at unit size, and
the sizes are multiplied back at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.base.shapes import AnyShape
from ctrans.dynamics.norm.norm import row_length


def at_unit_size(rows: Float[Tensor, "*rows width"]) -> tuple[Float[Tensor, "*rows width"], float]:
    """The rows over the length of the longest, and that length; rows of zeros as they are."""
    size = float(row_length(rows).amax())
    if size == 0:
        return rows, 1.0
    # in two steps: the length of a tiny row may be less precise than its largest entry
    largest = rows.abs().amax()
    rows = rows / largest
    longest = row_length(rows).amax()
    return rows / longest, product(float(largest), float(longest))


def product(*factors: float) -> float:
    """The product of factors, rounded once; inf if it is above the largest number."""
    fraction = 1.0
    exponent = 0
    for factor in factors:
        part, power = math.frexp(factor)
        fraction, more = math.frexp(fraction * part)
        exponent += power + more
    try:
        return math.ldexp(fraction, exponent)
    except OverflowError:
        return math.copysign(math.inf, fraction)


def total_length(x: AnyShape) -> float:
    """|x|_2 over all entries."""
    largest = float(x.abs().amax())
    if largest == 0 or not math.isfinite(largest):
        return largest
    return product(largest, float(torch.linalg.vector_norm(x / x.abs().amax())))


def is_precise(x: AnyShape) -> bool:
    """Whether the largest entry has all digits of its dtype: a smaller one was rounded to a few."""
    largest = float(x.abs().amax())
    numbers = torch.finfo(x.dtype)
    return largest == 0 or largest >= numbers.tiny / numbers.eps


def times_power(x: Tensor, exponent: int) -> Tensor:
    """x * 2^exponent, where 2^exponent itself may be no number of the dtype of x."""
    half = exponent // 2
    return (x.double() * 2.0**half * 2.0 ** (exponent - half)).to(x.dtype)


def near_one(x: Tensor) -> tuple[Tensor, int]:
    """x over a power of two, with a largest entry between 1/2 and 1, and that power's exponent.
    Zeros as they are.
    """
    _, exponent = math.frexp(float(x.abs().max()))
    return times_power(x, -exponent), exponent


def times_powers(numbers: Sequence[float], exponent: int) -> tuple[float, ...]:
    """The numbers times 2^exponent; inf above the largest number."""
    half = exponent // 2
    return tuple(number * 2.0**half * 2.0 ** (exponent - half) for number in numbers)
