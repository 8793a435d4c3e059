"""Confidence intervals by resampling over seeds or cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95

Statistic = Callable[[np.ndarray], np.ndarray]
"""Maps samples (samples, rows, *row) to (samples,)."""


def interval(values: Sequence[float] | np.ndarray, statistic: Statistic, *, seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap at `LEVEL`: the statistic of `RESAMPLES` draws of the rows with
    replacement; (nan, nan) without rows. It is too narrow for few rows.
    """
    rows = np.asarray(values, dtype=float)
    if not len(rows):
        return math.nan, math.nan
    draws = np.random.default_rng(seed).integers(0, len(rows), (RESAMPLES, len(rows)))
    found = statistic(rows[draws])
    found = found[np.isfinite(found)]
    if not len(found):
        return math.nan, math.nan
    low, high = np.quantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def mean_interval(values: Sequence[float] | np.ndarray, *, seed: int = 0) -> tuple[float, float]:
    """The interval of a mean, on each side the wider of the bootstrap's and Student's, mean -+
    t_(n-1) s/sqrt(n); (nan, nan) for fewer than two values.

    For three values the bootstrap gives their range, which covers the mean of a normal variable in
    3 of 4 cases. With Student's interval it covers 95% for normal values, and about 88% for three
    exponential ones.
    """
    rows = np.asarray(values, dtype=float)
    if len(rows) < 2:
        return math.nan, math.nan
    low, high = interval(rows, lambda samples: samples.mean(-1), seed=seed)
    from scipy.special import stdtrit  # the quantile of Student's t; here, so that other commands import no scipy

    half = stdtrit(len(rows) - 1, (1 + LEVEL) / 2) * rows.std(ddof=1) / math.sqrt(len(rows))
    return float(np.fmin(low, rows.mean() - half)), float(np.fmax(high, rows.mean() + half))
