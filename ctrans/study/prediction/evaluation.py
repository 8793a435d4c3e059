"""How well figures of initial weights order, and the predictor calibrates, what training gave."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ctrans.study.bootstrap import interval, spearman
from ctrans.study.prediction.predictors import BASELINES

FACTOR = 3.0
"""How far off a predicted rate may be."""
PREDICTED = "the predictor"
LEAST = 4
"""Architectures that a correlation takes at least."""


@dataclasses.dataclass(frozen=True)
class Known:
    """An architecture that was trained: its figures, and its outcomes. `log_rate` is log10 of the largest stable learning rate."""

    case: str
    family: str
    figures: Mapping[str, float | None]
    log_rate: float
    sensitivity: float | None
    best_loss: float | None

    def outcome(self, name: str) -> float | None:
        """By name of `OUTCOMES`."""
        return {"largest stable learning rate": self.log_rate, "sensitivity": self.sensitivity, "best loss": self.best_loss}[name]


OUTCOMES = ("largest stable learning rate", "sensitivity", "best loss")


@dataclasses.dataclass(frozen=True)
class Correlation:
    """Spearman's between a figure and an outcome over `count` architectures, with a bootstrap interval over them."""

    outcome: str
    figure: str
    baseline: bool
    count: int
    rho: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """All correlations; the share of predicted rates within a factor of 3, as `within` and of always giving the median rate of `pre` in
    the two thirds; the deviation of log10 of predicted over measured; that by family, mean; and what each point is.
    """

    correlations: list[Correlation]
    within: float
    always_pre: float
    deviation: float
    families: dict[str, float]
    points: list[dict[str, Any]]

    @classmethod
    def from_object(cls, kept: Mapping[str, Any]) -> Evaluated:
        """As a store kept it."""
        return cls(**{**kept, "correlations": [Correlation(**each) for each in kept["correlations"]]})


def evaluate(cases: Sequence[Known], predicted: Sequence[float], build: Sequence[Known]) -> Evaluated:
    """Of these architectures and log10 of their predicted rates; `build` are those that the baseline "always pre" is from."""
    names = sorted({name for case in cases for name in case.figures})
    correlations = []
    for outcome in OUTCOMES:
        truth = [case.outcome(outcome) for case in cases]
        correlations.append(_correlation(outcome, PREDICTED, list(predicted), truth))
        correlations += [_correlation(outcome, name, [case.figures.get(name) for case in cases], truth) for name in names]
    errors = [guess - case.log_rate for guess, case in zip(predicted, cases, strict=True) if not math.isnan(guess)]
    pre = [case.log_rate for case in build if case.family == "placement pre"]
    usual = statistics.median(pre) if pre else math.nan
    by_family: dict[str, list[float]] = {}
    for guess, case in zip(predicted, cases, strict=True):
        by_family.setdefault(case.family, []).append(guess - case.log_rate)
    return Evaluated(
        correlations,
        _share(errors),
        _share([usual - case.log_rate for case in cases] if pre else []),
        math.sqrt(statistics.fmean(error**2 for error in errors)) if errors else math.nan,
        {family: statistics.fmean(each) for family, each in by_family.items()},
        [
            {"case": case.case, "family": case.family, "predicted": guess, "measured": case.log_rate}
            for guess, case in zip(predicted, cases, strict=True)
        ],
    )


def _share(errors: Sequence[float]) -> float:
    """Of those within the factor; a hair more, since rates are half a decade apart."""
    return sum(abs(error) <= math.log10(FACTOR) + 1e-9 for error in errors) / len(errors) if errors else math.nan


def _correlation(outcome: str, figure: str, values: Sequence[float | None], truth: Sequence[float | None]) -> Correlation:
    usable = [
        (v, t)
        for v, t in zip(values, truth, strict=True)
        if v is not None and t is not None and math.isfinite(v) and math.isfinite(t)
    ]
    pairs = np.array(usable, dtype=float).reshape(-1, 2)
    if len(pairs) < LEAST:
        return Correlation(outcome, figure, figure in BASELINES, len(pairs), math.nan, math.nan, math.nan)
    low, high = interval(pairs, spearman)
    return Correlation(outcome, figure, figure in BASELINES, len(pairs), float(spearman(pairs)), low, high)
