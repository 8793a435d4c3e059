"""The predictor's fit: least squares under b >= 0 (Lawson and Hanson 1974), and cross-validation
over families.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from benchmarks.prediction.predicted_rate import FRAME, TERMS, Predictor, ScreenFigures
from solvers import ConfigError

COVERED = 0.8
"""The share of measured rates that lie in the predictor's interval."""


def fit(figures: Sequence[ScreenFigures], log_rates: Sequence[float]) -> Predictor:
    """The least-squares predictor of those of these architectures that have a rate, its interval
    not known yet. ConfigError for fewer of them than terms.
    """
    learned = [i for i, rate in enumerate(log_rates) if not math.isnan(rate)]
    figures, log_rates = [figures[i] for i in learned], [log_rates[i] for i in learned]
    if len(figures) <= len(TERMS):
        raise ConfigError(
            f"{len(figures)} architectures are done, and the predictor has {len(TERMS)} terms:"
            " train more of them first"
        )
    x = np.array([[term.value(each.get(name)) for name, term in TERMS.items()] for each in figures])
    usual = [
        float(np.median(column[~np.isnan(column)])) if not np.isnan(column).all() else 0.0
        for column in x.T
    ]
    x, y = np.where(np.isnan(x), usual, x), np.array(log_rates)
    slopes, _ = nnls(-(x - x.mean(0)), y - y.mean())
    constant = float(y.mean() + x.mean(0) @ slopes)
    by_name = dict(zip(TERMS, map(float, slopes), strict=True))
    ranges = {name: found for name in (*TERMS, *FRAME) if (found := _range(figures, name))}
    return Predictor(
        constant,
        by_name,
        dict(zip(TERMS, usual, strict=True)),
        math.nan,
        math.nan,
        ranges,
        len(figures),
    )


def _range(figures: Sequence[ScreenFigures], name: str) -> list[float]:
    known = [
        value for each in figures if (value := each.get(name)) is not None and math.isfinite(value)
    ]
    return [min(known), max(known)] if known else []


def cross_validated(
    figures: Sequence[ScreenFigures], log_rates: Sequence[float], families: Sequence[str]
) -> list[float]:
    """Each architecture's prediction by the predictor of all other families; nan where too few of
    those have a rate.
    """
    found = [math.nan] * len(figures)
    for family in dict.fromkeys(families):
        others = [
            i
            for i, other in enumerate(families)
            if other != family and not math.isnan(log_rates[i])
        ]
        if len(others) <= len(TERMS):
            continue
        predictor = fit([figures[i] for i in others], [log_rates[i] for i in others])
        for i, mine in enumerate(families):
            if mine == family:
                found[i] = predictor.log_rate(figures[i])
    return found


def with_interval(
    predictor: Predictor, predicted: Sequence[float], log_rates: Sequence[float]
) -> Predictor:
    """With `COVERED` of measured less predicted inside of its interval, as much beyond each end."""
    errors = [
        rate - guess
        for guess, rate in zip(predicted, log_rates, strict=True)
        if not math.isnan(rate - guess)
    ]
    low, high = (
        np.quantile(errors, [(1 - COVERED) / 2, (1 + COVERED) / 2])
        if errors
        else (math.nan, math.nan)
    )
    return dataclasses.replace(predictor, low=float(max(0.0, -low)), high=float(max(0.0, high)))


def to_text(predictor: Predictor) -> str:
    """As `predictor.json` has it."""
    return json.dumps(dataclasses.asdict(predictor), indent=1) + "\n"
