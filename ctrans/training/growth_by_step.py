"""Growth of a positive series over doublings of its steps: fits of log t and of a power of t."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LAST = "sup |v| at the end"
FIRST_GAIN = "gained by the first doubling"
SECOND_GAIN = "gained by the second doubling"
SLOPE = "slope against log t"
LOG_FIT = "R^2 against log t"
POWER = "power of t"
POWER_FIT = "R^2 against a power of t"

FITTED_DOUBLINGS = 4
"""The fits see the last so many doublings."""
STEADY = 1e-3
"""Series that change by less than this share have no law of growth."""


@dataclass(frozen=True)
class FittedLaw:
    """A least-squares fit of a law of growth: its exponent or slope, and R^2 next to a constant."""

    coefficient: float
    r2: float


def log_law(steps: Sequence[float], values: Sequence[float]) -> FittedLaw:
    """a of y = a log t + b, and R^2."""
    slope, offset = np.polyfit(np.log(steps), values, 1)
    return FittedLaw(float(slope), _r2(values, slope * np.log(steps) + offset))


def power_law(steps: Sequence[float], values: Sequence[float]) -> FittedLaw:
    """p of log y = p log t + c, and R^2 of y."""
    power, offset = np.polyfit(np.log(steps), np.log(values), 1)
    return FittedLaw(float(power), _r2(values, np.exp(power * np.log(steps) + offset)))


def _r2(values: Sequence[float], fit: np.ndarray) -> float:
    y = np.asarray(values)
    return float(1 - np.square(y - fit).sum() / np.square(y - y.mean()).sum())


def growth_of(steps: Sequence[float], values: Sequence[float]) -> dict[str, float]:
    """The figures of a series at logarithmic steps up to 4N; only its ends if it does not move."""
    last = steps[-1]
    by_step = dict(zip(steps, values, strict=True))
    at_budget, doubled, at_end = (by_step[round(last / 2**k)] for k in (2, 1, 0))
    figures = {LAST: at_end, FIRST_GAIN: doubled - at_budget, SECOND_GAIN: at_end - doubled}
    fitted = [(t, y) for t, y in zip(steps, values, strict=True) if t >= last / 2**FITTED_DOUBLINGS]
    seen_steps = [t for t, _ in fitted]
    seen = [y for _, y in fitted]
    if max(seen) - min(seen) <= STEADY * max(seen):
        return figures
    logarithmic = log_law(seen_steps, seen)
    power = power_law(seen_steps, seen)
    return {
        **figures,
        SLOPE: logarithmic.coefficient,
        LOG_FIT: logarithmic.r2,
        POWER: power.coefficient,
        POWER_FIT: power.r2,
    }
