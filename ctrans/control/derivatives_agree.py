"""Whether two numbers change alike with matrices: their derivatives by central differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

STEPS = {
    torch.float64: ((1e-5, 1e-7), (1e-3, 1e-2, 3e-2)),
    torch.float32: ((3e-3, 3e-4), (1e-2, 3e-2)),
}
"""Sizes of a difference, as shares of the matrices. The smaller one of the first two counts where
the larger one crosses a kink, as of ReLU. The others are for changes that rounding hides at these:
code in float64 may compute its norms in float32.
"""
CLOSE = {torch.float64: 1e-4, torch.float32: 2e-2}
"""How closely the two derivatives must agree, as a share, besides the error of the differences."""
TELLS = 0.1
"""The error of two derivatives from which their agreement says nothing, as a share."""
ROUNDING = 32.0
"""Rounding of a loss or of logits, as a multiple of that of one number."""
SAFETY = 4.0
"""The error of a difference, as a multiple of its change with the size of the step."""


@dataclass(frozen=True, eq=False)
class Difference:
    """A derivative by central differences, by how much it may be wrong, the dtype of what was
    changed, and the size of what the number adds up.
    """

    value: float
    error: float
    dtype: torch.dtype
    size: float


Summed = tuple[float, float]
"""A number, and the size of what it adds up."""


@dataclass(frozen=True, eq=False)
class SegmentChange:
    """Matrices of a sublayer, each with a direction of its own size, and the derivative of
    <P, step> along them.
    """

    segment: int
    pairs: list[tuple[Tensor, Tensor]]
    size: float


def agree_at_a_step(
    group: Sequence[SegmentChange], along: Callable[[], Summed], number: Callable[[], Summed]
) -> float | None:
    """How closely the derivatives agree, as a share of the group's smallest change, at a size of
    the step where they can be told from others; inf if they differ at every size, and None if they
    cannot be told from others. Larger sizes count where smaller ones do not tell.
    """
    for steps in STEPS.get(group[0].pairs[0][0].dtype, STEPS[torch.float32]):
        agreement = _agree_at_one_of(steps, group, along, number)
        if agreement is not None:
            return agreement
    return None


def _agree_at_one_of(
    steps: Sequence[float],
    group: Sequence[SegmentChange],
    along: Callable[[], Summed],
    number: Callable[[], Summed],
) -> float | None:
    """The same at these sizes."""
    total = sum(change.size for change in group)
    least = min(change.size for change in group) / total if total > 0 else 1.0
    differ = True
    for step in steps:
        expected = _central(group, along, step)
        own = _central(group, number, step)
        allowed = _allowed(expected, own, least)
        if abs(expected.value - own.value) > allowed:
            continue
        differ = False
        if expected.value == 0 and expected.size == 0 and own.value == 0:
            return 0.0  # a costate of 0, and no change at all
        if allowed <= TELLS * least * abs(expected.value):
            return allowed / (least * abs(expected.value))
    return math.inf if differ else None


def _central(
    group: Sequence[SegmentChange], number: Callable[[], Summed], step: float
) -> Difference:
    """d number/ds at the weights W + s D, s = 0."""
    pairs = [pair for change in group for pair in change.pairs]
    kept = [(matrix, matrix.clone()) for matrix, _ in pairs]
    dtype = pairs[0][0].dtype
    slopes = []
    sizes = []
    try:
        for times in (1.0, 2.0):
            values = []
            for sign in (1.0, -1.0):
                for (matrix, before), (_, direction) in zip(kept, pairs, strict=True):
                    matrix.copy_(before + sign * times * step * direction)
                value, size = number()
                values.append(value)
                sizes.append(size)
            slopes.append((values[0] - values[1]) / (2 * times * step))
    finally:
        for matrix, before in kept:
            matrix.copy_(before)
    rounding = ROUNDING * torch.finfo(dtype).eps * max(sizes) / step
    error = SAFETY * abs(slopes[0] - slopes[1]) + rounding
    return Difference(slopes[0], error, dtype, max(sizes))


def _allowed(expected: Difference, own: Difference, least: float) -> float:
    """By how much two derivatives may differ; `least` is the smallest sublayer's share of them."""
    close = CLOSE.get(own.dtype, CLOSE[torch.float32])
    return close * least * max(abs(expected.value), abs(own.value)) + expected.error + own.error
