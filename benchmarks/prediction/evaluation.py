"""How well figures of initial weights order, and the predictor calibrates, what training gave."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import rankdata

from benchmarks.prediction.predictors import BASELINES
from ctrans.study.bootstrap import interval

FACTOR = 3.0
"""How far off a predicted rate may be."""
PREDICTED = "the predictor"
PLACEMENT = "its placement alone"
"""The hardest baseline: the median rate of the two thirds' architectures of that placement, other
families'.
"""
LEAST = 4
"""Architectures that a correlation takes at least."""
ALIKE = 10
"""Architectures of one placement that a part needs for it to be looked at alone."""


@dataclasses.dataclass(frozen=True)
class Known:
    """An architecture that was trained: its figures, and its outcomes. `log_rate` is log10 of the
    largest stable learning rate, nan of one that learned nothing at any.
    """

    case: str
    family: str
    figures: Mapping[str, float | None]
    log_rate: float
    sensitivity: float | None
    best_loss: float | None

    @property
    def placement(self) -> str:
        """As JSON: a name, or a list by block."""
        return json.dumps(json.loads(self.case).get("placement"))

    def outcome(self, name: str) -> float | None:
        """By name of `OUTCOMES`."""
        return {
            "largest stable learning rate": self.log_rate,
            "sensitivity": self.sensitivity,
            "best loss": self.best_loss,
        }[name]


OUTCOMES = ("largest stable learning rate", "sensitivity", "best loss")


@dataclasses.dataclass(frozen=True)
class Correlation:
    """Spearman's between a figure and an outcome over `count` architectures, with a bootstrap
    interval over them.
    """

    outcome: str
    figure: str
    baseline: bool
    count: int
    rho: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class WithinPlacement:
    """A figure's correlations with the largest stable rate among architectures of one placement, by
    part: one that says something there has the same sign in every part, and none near 0.
    """

    placement: str
    parts: dict[str, Correlation]

    @property
    def least(self) -> float:
        """The least |rho| over the parts; 0 where signs differ or one is not known."""
        rhos = [each.rho for each in self.parts.values()]
        same = all(rho > 0 for rho in rhos) or all(rho < 0 for rho in rhos)
        return min(map(abs, rhos)) if same else 0.0


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """How well it is predicted, and what each point is.

    - `correlations`: all of them; `by_placement`: the predictor's with the largest stable rate
      among architectures of one placement
    - `within`: the share of predicted rates within a factor of 3; `covered`: of measured ones
      inside of the predictor's interval
    - `always_pre`, `usual`: the share within that factor of always giving the median rate of `pre`
      in the two thirds, and of giving the median rate of the architecture's placement
    - `deviation`: of log10 of predicted over measured; `families`: its mean by family
    - `unlearned`: the architectures that learned nothing at any rate, which all of this leaves out
    """

    correlations: list[Correlation]
    by_placement: dict[str, Correlation]
    within: float
    covered: float
    always_pre: float
    usual: float
    deviation: float
    families: dict[str, float]
    points: list[dict[str, Any]]
    unlearned: list[str]

    @classmethod
    def from_object(cls, kept: Mapping[str, Any]) -> Evaluated:
        """As a store kept it."""
        by_placement = {name: Correlation(**each) for name, each in kept["by_placement"].items()}
        return cls(
            **{
                **kept,
                "correlations": [Correlation(**each) for each in kept["correlations"]],
                "by_placement": by_placement,
            }
        )


def evaluate(
    cases: Sequence[Known],
    predicted: Sequence[float],
    build: Sequence[Known],
    spread: tuple[float, float] = (math.nan, math.nan),
) -> Evaluated:
    """Of these architectures and log10 of their predicted rates; `build` are those that baselines
    are from, `spread` how far below and above the prediction its interval reaches.
    """
    unlearned = [case.case for case in cases if math.isnan(case.log_rate)]
    predicted = [
        guess for guess, case in zip(predicted, cases, strict=True) if not math.isnan(case.log_rate)
    ]
    cases, build = (
        [case for case in each if not math.isnan(case.log_rate)] for each in (cases, build)
    )
    truth = {outcome: [case.outcome(outcome) for case in cases] for outcome in OUTCOMES}
    usual = [_usual_rate(case, build) for case in cases]
    figures: dict[str, list[float | None]] = {PREDICTED: list(predicted), PLACEMENT: list(usual)}
    for name in sorted({name for case in cases for name in case.figures}):
        figures[name] = [case.figures.get(name) for case in cases]
    correlations = [
        _correlation(outcome, name, figures[name], truth[outcome])
        for outcome in OUTCOMES
        for name in figures
    ]
    by_placement = {}
    for placement in dict.fromkeys(case.placement for case in cases):
        mine = [i for i, case in enumerate(cases) if case.placement == placement]
        rates = [cases[i].log_rate for i in mine]
        by_placement[placement] = _correlation(
            OUTCOMES[0], PREDICTED, [predicted[i] for i in mine], rates
        )
    errors = [guess - case.log_rate for guess, case in zip(predicted, cases, strict=True)]
    known = [error for error in errors if not math.isnan(error)]
    pre = [case.log_rate for case in build if case.family == "placement pre"]
    always = statistics.median(pre) if pre else math.nan
    by_family: dict[str, list[float]] = {}
    for error, case in zip(errors, cases, strict=True):
        by_family.setdefault(case.family, []).append(error)
    low, high = spread
    return Evaluated(
        correlations,
        by_placement,
        _share(known),
        sum(-low <= -error <= high for error in known) / len(known) if known else math.nan,
        _share([always - case.log_rate for case in cases]),
        _share([rate - case.log_rate for rate, case in zip(usual, cases, strict=True)]),
        math.sqrt(statistics.fmean(error**2 for error in known)) if known else math.nan,
        {family: statistics.fmean(each) for family, each in by_family.items()},
        [
            {
                "case": case.case,
                "family": case.family,
                "predicted": guess,
                "measured": case.log_rate,
            }
            for guess, case in zip(predicted, cases, strict=True)
        ],
        unlearned,
    )


def within_placements(parts: Mapping[str, Sequence[Known]]) -> list[WithinPlacement]:
    """Of every placement with at least `ALIKE` architectures that learned in each part, each
    figure, the strongest first.
    """
    learned = {
        name: [case for case in cases if not math.isnan(case.log_rate)]
        for name, cases in parts.items()
    }
    found = []
    for placement in dict.fromkeys(case.placement for cases in learned.values() for case in cases):
        mine = {
            name: [case for case in cases if case.placement == placement]
            for name, cases in learned.items()
        }
        if min(map(len, mine.values())) < ALIKE:
            continue
        for figure in sorted(
            {name for cases in mine.values() for case in cases for name in case.figures}
        ):
            correlations = {
                name: _correlation(
                    OUTCOMES[0],
                    figure,
                    [case.figures.get(figure) for case in cases],
                    [c.log_rate for c in cases],
                )
                for name, cases in mine.items()
            }
            found.append(WithinPlacement(placement, correlations))
    return sorted(found, key=lambda each: (each.placement, -each.least))


def _usual_rate(case: Known, build: Sequence[Known]) -> float:
    """As `PLACEMENT` says; of all other families where none has that placement."""
    others = [each for each in build if each.family != case.family]
    alike = [each.log_rate for each in others if each.placement == case.placement]
    rates = alike or [each.log_rate for each in others]
    return statistics.median(rates) if rates else math.nan


def _share(errors: Sequence[float]) -> float:
    """Of those within the factor, and a hair more: rates are half a decade apart. One that is not
    known is not within.
    """
    return (
        sum(abs(error) <= math.log10(FACTOR) + 1e-9 for error in errors) / len(errors)
        if errors
        else math.nan
    )


def _correlation(
    outcome: str, figure: str, values: Sequence[float | None], truth: Sequence[float | None]
) -> Correlation:
    usable = [
        (v, t)
        for v, t in zip(values, truth, strict=True)
        if v is not None and t is not None and math.isfinite(v) and math.isfinite(t)
    ]
    baseline = figure in BASELINES or figure == PLACEMENT
    pairs = np.array(usable, dtype=float).reshape(-1, 2)
    if len(pairs) < LEAST:
        return Correlation(outcome, figure, baseline, len(pairs), math.nan, math.nan, math.nan)
    low, high = interval(pairs, spearman)
    return Correlation(outcome, figure, baseline, len(pairs), float(spearman(pairs)), low, high)


def spearman(pairs: np.ndarray) -> np.ndarray:
    """The rank correlation of the two columns of (.., rows, 2), ties at their mean rank; nan where
    one is constant.
    """
    ranks = rankdata(np.asarray(pairs, dtype=float), axis=-2)
    centred = ranks - ranks.mean(-2, keepdims=True)
    covariance, spread = centred.prod(-1).mean(-1), centred.std(-2).prod(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(spread > 0, covariance / spread, math.nan)
