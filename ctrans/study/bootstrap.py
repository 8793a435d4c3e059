"""Intervals by resampling: what a mean, or a rank correlation, might have been with other seeds or other cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.stats import rankdata

RESAMPLES = 4000
LEVEL = 0.95

Statistic = Callable[[np.ndarray], float]


def interval(values: Sequence[float] | np.ndarray, statistic: Statistic, *, seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap at `LEVEL`: the statistic of `RESAMPLES` draws of as many rows with replacement. (nan, nan) of none.

    It knows no more than the rows do, and is too narrow for few of them.
    """
    rows = np.asarray(values, dtype=float)
    if not len(rows):
        return math.nan, math.nan
    generator = np.random.default_rng(seed)
    found = np.array([statistic(rows[generator.integers(0, len(rows), len(rows))]) for _ in range(RESAMPLES)])
    found = found[np.isfinite(found)]
    if not len(found):
        return math.nan, math.nan
    low, high = np.quantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def mean_interval(values: Sequence[float] | np.ndarray, *, seed: int = 0) -> tuple[float, float]:
    """Of the mean."""
    return interval(values, lambda rows: float(rows.mean()), seed=seed)


def spearman(pairs: np.ndarray) -> float:
    """The rank correlation of the two columns, ties at their mean rank; nan where one is constant."""
    x, y = (rankdata(column) for column in np.asarray(pairs, dtype=float).T)
    spread = float(x.std() * y.std())
    return float(((x - x.mean()) * (y - y.mean())).mean() / spread) if spread else math.nan
