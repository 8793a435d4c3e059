"""The predictor of the largest stable learning rate: few terms, each monotone with a reason, and a constant.

    log10 eta = c - sum_j b_j x_j,  b_j >= 0,

x_j the logarithm of a figure that should be small. Fitted by least squares under b >= 0 (Lawson and Hanson 1974). What is committed
is `predictor.json` beside this file.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from ctrans.given_files import read_json
from solvers import ConfigError

FILE = Path(__file__).parent / "predictor.json"
SMALLEST = 1e-12
Figures = Mapping[str, float | None]

TERMS: dict[str, str] = {
    "Adam Hessian": "a step of Adam at rate eta is stable on a quadratic while eta times this is below 38",
    "response": "how far one step of Adam at a fixed rate moves the function, which is in proportion to eta at first",
    "Euler": "a Transformer is an Euler step, which is stable while |dv/dX| dt is below 2",
    "condition": "a relative change of a state grows by as much on its way to the end",
    "gradient spread": "one rate serves all layers, and is bounded by the steepest of them",
}
"""The terms by their figures (`ctrans.study.prediction.predictors`), each with why a larger one should need a smaller rate."""
PLAIN = frozenset({"gradient spread"})
"""Figures that are logarithms as they are."""


@dataclasses.dataclass(frozen=True)
class Predictor:
    """c, b by term, what a missing figure counts as, and the deviation of log10 eta that cross-validation by family found."""

    constant: float
    slopes: dict[str, float]
    usual: dict[str, float]
    deviation: float
    architectures: int

    def log_rate(self, figures: Figures) -> float:
        """log10 of the predicted largest stable learning rate."""
        return self.constant - math.fsum(b * _value(figures, name, self.usual) for name, b in self.slopes.items())


def _value(figures: Figures, name: str, usual: Mapping[str, float]) -> float:
    value = figures.get(name)
    if value is None or not math.isfinite(value):
        return usual[name]
    return value if name in PLAIN else math.log10(max(value, SMALLEST))


def fit(figures: Sequence[Figures], log_rates: Sequence[float], deviation: float = math.nan) -> Predictor:
    """The least-squares predictor of these architectures. ConfigError for fewer of them than terms."""
    if len(figures) <= len(TERMS):
        raise ConfigError(
            f"{len(figures)} architectures are done, and the predictor has {len(TERMS)} terms: train more of them first"
        )
    usual = {name: _usual(figures, name) for name in TERMS}
    x = np.array([[_value(each, name, usual) for name in TERMS] for each in figures])
    y = np.array(log_rates)
    slopes, _ = nnls(-(x - x.mean(0)), y - y.mean())
    constant = float(y.mean() + x.mean(0) @ slopes)
    return Predictor(constant, dict(zip(TERMS, map(float, slopes), strict=True)), usual, deviation, len(figures))


def _usual(figures: Sequence[Figures], name: str) -> float:
    known = [_value(each, name, {name: math.nan}) for each in figures]
    known = [value for value in known if not math.isnan(value)]
    return float(np.median(known)) if known else 0.0


def cross_validated(figures: Sequence[Figures], log_rates: Sequence[float], families: Sequence[str]) -> list[float]:
    """Each architecture's prediction by the predictor of all other families; nan where they are too few."""
    found = [math.nan] * len(figures)
    for family in dict.fromkeys(families):
        others = [i for i, other in enumerate(families) if other != family]
        if len(others) <= len(TERMS):
            continue
        predictor = fit([figures[i] for i in others], [log_rates[i] for i in others])
        for i, mine in enumerate(families):
            if mine == family:
                found[i] = predictor.log_rate(figures[i])
    return found


def to_text(predictor: Predictor) -> str:
    """As `predictor.json` has it."""
    return json.dumps(dataclasses.asdict(predictor), indent=1) + "\n"


def read_predictor(path: Path = FILE) -> Predictor:
    """The committed predictor. ConfigError where there is none, or it is damaged."""
    if not path.is_file():
        raise ConfigError(
            f"there is no {path.name} yet: fit one with ctrans study predict, and commit what it writes as {str(path)!r}"
        )
    content: Any = read_json(path)
    try:
        predictor = Predictor(**content)
    except TypeError:
        raise ConfigError(f"{str(path)!r} is no predictor") from None
    if predictor.slopes.keys() != TERMS.keys():
        raise ConfigError(
            f"{str(path)!r} has the terms {', '.join(predictor.slopes)}, and this ctrans {', '.join(TERMS)}: fit it anew"
        )
    return predictor
