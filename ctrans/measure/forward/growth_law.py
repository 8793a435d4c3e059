"""Growth of hidden states: laws fitted to a moment by depth, ranked by Akaike's information
criterion (AIC).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, minimize_scalar

Array = NDArray[np.float64]
Fitted = tuple[dict[str, float], Array]
"""The parameters of a fitted law by name, and the fitted log m."""
RESOLVED = 1e-10
"""Relative misfits below this count as exact, so that of two exact laws the one with fewer
parameters wins.
"""


@dataclass(frozen=True)
class Fit:
    """A law m(t) fitted to a moment by depth: its parameters by name, `misfit` = RMS of log m - log
    law, and AIC.
    """

    law: str
    parameters: dict[str, float]
    misfit: float
    aic: float


@dataclass(frozen=True)
class GrowthLaw:
    """All fits, best first by AIC. `weights` are their Akaike weights, the relative support for
    each law.
    """

    fits: list[Fit]
    weights: list[float]

    @property
    def law(self) -> str:
        return self.fits[0].law


@dataclass(frozen=True)
class Law:
    """A growth law with `count` parameters. `fit(s, log m)`, times s from 0 to 1, returns the
    parameters by name and the fitted log m.
    """

    count: int
    fit: Callable[[Array, Array], Fitted]


def _constant(s: Array, log: Array) -> Fitted:
    return {"start": math.exp(log.mean())}, np.full_like(log, log.mean())


def _exponential(s: Array, log: Array) -> Fitted:
    rate, start = np.polyfit(s, log, 1)
    return {"start": math.exp(start), "rate": rate}, start + rate * s


def _polynomial(degree: int) -> Callable[[Array, Array], Fitted]:
    """m(s) = sum_j c_j binom(k, j) s^j (1-s)^(k-j) with all c_j > 0, so m is positive."""

    def fit(s: Array, log: Array) -> Fitted:
        basis = np.stack(
            [math.comb(degree, j) * s**j * (1 - s) ** (degree - j) for j in range(degree + 1)], -1
        )

        def law(c: Array) -> Array:
            return np.log(np.maximum(basis @ np.exp(c), np.finfo(float).tiny))

        begin = np.interp(np.arange(degree + 1) / degree, s, np.exp(log))
        coefficients = least_squares(
            lambda c: law(c) - log, np.log(begin), xtol=1e-14, ftol=1e-14, gtol=1e-14
        ).x
        names = ["start", "end"]
        if degree == 2:
            names = ["start", "middle", "end"]
        parameters = dict(zip(names, np.exp(coefficients).tolist(), strict=True))
        return parameters, law(coefficients)

    return fit


def _power(s: Array, log: Array) -> Fitted:
    """m = start (1 + s/onset)^exponent. For a given onset it is a straight line in the
    logarithms.
    """

    def at(log_onset: float) -> tuple[float, float, Array]:
        z = np.log1p(s / math.exp(log_onset))
        exponent, start = np.polyfit(z, log, 1)
        return exponent, start, start + exponent * z

    def misfit(log_onset: float) -> float:
        return float(np.square(at(log_onset)[2] - log).sum())

    # from a tenth of the first step to ten times the whole depth; later onsets look like
    # exponentials
    grid = np.linspace(math.log(s[1] / 10), math.log(10), 60)
    best = grid[int(np.argmin([misfit(value) for value in grid]))]
    around = best - (grid[1] - grid[0]), best + (grid[1] - grid[0])
    onset = float(
        minimize_scalar(misfit, bounds=around, method="bounded", options={"xatol": 1e-10}).x
    )
    exponent, start, fitted = at(onset)
    return {"start": math.exp(start), "exponent": float(exponent), "onset": math.exp(onset)}, fitted


LAWS: dict[str, Law] = {
    "constant": Law(1, _constant),
    "linear": Law(2, _polynomial(1)),
    "quadratic": Law(3, _polynomial(2)),
    "exponential": Law(2, _exponential),
    "power": Law(3, _power),
}


def growth_law(times: Sequence[float], values: Sequence[float]) -> GrowthLaw | None:
    """The law of LAWS with the least AIC = n log(RSS/n) + 2k + 2k(k+1)/(n-k-1), RSS of log m - log
    law, k parameters with RSS/n.

    Errors are relative to the moment, so all layers have equal weight. Times in the parameters are
    fractions of the depth. Values that are not positive and finite do not count. A law needs at
    least three more points than parameters; the result is None if no law has enough.
    """
    t = np.asarray(times, dtype=float)
    m = np.asarray(values, dtype=float)
    usable = np.isfinite(m) & (m > 0)
    t = t[usable]
    log = np.log(m[usable])
    fits = []
    for name, law in LAWS.items():
        if len(t) >= law.count + 3:
            parameters, fitted = law.fit((t - t[0]) / (t[-1] - t[0]), log)
            misfit = float(np.sqrt(np.square(log - fitted).mean()))
            fits.append(
                Fit(
                    name,
                    {key: float(value) for key, value in parameters.items()},
                    misfit,
                    _aic(len(t), misfit, law.count + 1),
                )
            )
    if not fits:
        return None
    fits.sort(key=lambda fit: fit.aic)
    likelihoods = [math.exp((fits[0].aic - fit.aic) / 2) for fit in fits]
    return GrowthLaw(fits, [value / sum(likelihoods) for value in likelihoods])


def _aic(points: int, misfit: float, parameters: int) -> float:
    correction = 2 * parameters * (parameters + 1) / (points - parameters - 1)
    return 2 * points * math.log(max(misfit, RESOLVED)) + 2 * parameters + correction
