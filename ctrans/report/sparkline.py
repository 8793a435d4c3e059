"""Values as a line of bars, for a terminal and a cell of a table."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

BARS = "▁▂▃▄▅▆▇█"
"""From the least value to the largest."""


def sparkline(values: Sequence[float] | np.ndarray, width: int) -> str:
    """The values as bars, each the mean of its stretch, from the least to the largest; x where one
    is not finite.

    Logarithms are drawn where all are positive and span more than a factor of 4.
    """
    if not len(values):
        return ""
    array = np.asarray(values, dtype=float)
    parts = np.array_split(array, min(width, len(array)))
    with np.errstate(over="ignore"):
        means = np.array([_finite_mean(part) for part in parts])
    finite_means = means[np.isfinite(means)]
    if not len(finite_means):
        return "x" * len(means)
    if finite_means.min() > 0 and finite_means.max() / 4 > finite_means.min():
        means = np.log(means)
        finite_means = np.log(finite_means)
    low = finite_means.min() / 2
    span = finite_means.max() / 2 - finite_means.min() / 2
    return "".join(_bar((mean / 2 - low) / (span or 1.0)) for mean in means)


def _finite_mean(values: np.ndarray) -> float:
    """The mean of the values that are finite; nan if there are none."""
    finite_values = values[np.isfinite(values)]
    if not len(finite_values):
        return math.nan
    return float(finite_values.mean())


def _bar(level: float) -> str:
    """The bar of a level from 0 to 1, or x for one that is not finite."""
    if not math.isfinite(level):
        return "x"
    return BARS[min(len(BARS) - 1, int(level * len(BARS)))]
