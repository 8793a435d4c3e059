"""Confidence intervals by resampling over seeds or cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from solvers import ConfigError, shown

RESAMPLES = 2000
LEVEL = 0.95
MOST_ROWS = 10_000

Statistic = Callable[[np.ndarray], np.ndarray]
"""Maps samples (samples, rows, *row) to (samples,)."""


def interval(
    values: Sequence[float] | np.ndarray, statistic: Statistic, *, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap at `LEVEL`: the statistic of `RESAMPLES` draws of the rows with
    replacement; (nan, nan) without rows. It is too narrow for few rows.
    """
    rows = np.asarray(values, dtype=float)
    if not len(rows):
        return math.nan, math.nan
    draws = np.random.default_rng(seed).integers(0, len(rows), (RESAMPLES, len(rows)))
    statistics = statistic(rows[draws])
    statistics = statistics[np.isfinite(statistics)]
    if not len(statistics):
        return math.nan, math.nan
    low, high = np.quantile(statistics, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def mean_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """The interval of a mean, on each side the wider of the bootstrap's and Student's, mean -+
    t_(n-1) s/sqrt(n); (nan, nan) for fewer than two values, and if one is nan.

    For three values the bootstrap gives their range, which covers the mean of a normal variable in
    3 of 4 cases. With Student's interval it covers 95% for normal values, and about 88% for three
    exponential ones.
    """
    rows = np.asarray(values, dtype=float)
    if len(rows) < 2 or np.isnan(rows).any():
        return math.nan, math.nan
    low, high = interval(rows, lambda samples: samples.mean(-1))
    # the quantile of Student's t; imported here, so that other commands import no scipy
    from scipy.special import stdtrit

    half = stdtrit(len(rows) - 1, (1 + LEVEL) / 2) * rows.std(ddof=1) / math.sqrt(len(rows))
    return float(np.fmin(low, rows.mean() - half)), float(np.fmax(high, rows.mean() + half))


def rows_to_decide(values: Sequence[float] | np.ndarray) -> int | None:
    """How many rows would put 0 outside of Student's interval, were their mean and deviation those
    of these values: the least n with t_(n-1) s/sqrt(n) < |mean|. None above `MOST_ROWS`, or for
    fewer than two values.
    """
    rows = np.asarray(values, dtype=float)
    if len(rows) < 2:
        return None
    from scipy.special import stdtrit

    n = np.arange(2, MOST_ROWS + 1)
    enough = stdtrit(n - 1, (1 + LEVEL) / 2) * rows.std(ddof=1) / np.sqrt(n) < abs(rows.mean())
    if enough.any():
        return int(n[enough.argmax()])
    return None


def gap_over_seeds(losses: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Is a gap between two settings normal? The gap, the spread over seeds, and how often seeds
    alone make a gap at least as large.

    - gap: mean of `others` minus mean of `losses`
    - spread: the deviation over seeds, s = (sum of squares about both means/(n + m - 2))^(1/2)
    - how often: P(|t| >= |gap|/(s (1/n + 1/m)^(1/2))) for Student's t with n + m - 2 degrees, which
      is exact if both have one normal distribution

    One of them may have one value only. Raises ConfigError for fewer than three in all, and for
    losses that are not finite.
    """
    from scipy.special import stdtr

    n = len(losses)
    m = len(others)
    if min(n, m, n + m - 2) < 1 or not all(map(math.isfinite, [*losses, *others])):
        raise ConfigError(
            f"losses {shown(losses)} and {shown(others)}: give finite ones of two settings, three"
            " or more in all"
        )
    gap = float(np.mean(others) - np.mean(losses))
    spread = math.sqrt((n * np.var(losses) + m * np.var(others)) / (n + m - 2))
    deviation = spread * math.sqrt(1 / n + 1 / m) or math.ulp(0.0)
    return gap, spread, float(2 * stdtr(n + m - 2, -abs(gap) / deviation))
