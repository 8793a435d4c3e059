"""Prediction of the largest stable learning rate from the initial weights: a constant and a few
monotone terms, each with a reason.

    log10 eta = c - sum_j b_j x_j,  b_j >= 0,

x_j is a figure of `ctrans screen`, or its logarithm, with the sign of its reason. `predictor.json`
in this directory has the fit. A third of the families was trained only after the fit was committed.
On tasks that need depth it failed (docs/why/prediction.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctrans.base.given_files import read_json
from solvers import ConfigError

FILE = Path(__file__).parent / "predictor.json"
SMALLEST = 1e-12
ScreenFigures = Mapping[str, float | None]


@dataclasses.dataclass(frozen=True)
class Term:
    """A figure with a monotone effect on rates: `sign` 1 if a larger figure needs a smaller rate,
    -1 if it allows a larger one. It enters by its logarithm, or unchanged if `plain` (a share, or a
    logarithm already).
    """

    why: str
    sign: int = 1
    plain: bool = False

    def value(self, figure: float | None) -> float:
        """x_j; nan if the figure is unknown."""
        if figure is None or not math.isfinite(figure):
            return math.nan
        return self.sign * (figure if self.plain else math.log10(max(figure, SMALLEST)))


TERMS: dict[str, Term] = {
    "segments with infinite H": Term(
        "where the Hamiltonian is infinite, velocities grow with the weights without a bound, and"
        " so does the effect of a step",
        plain=True,
    ),
    "growth": Term(
        "the more a state exceeds its input, the more of it depends on the weights and moves with"
        " them",
        plain=True,
    ),
    "weight size": Term(
        "a step of Adam moves each weight by about the rate, which is a smaller share of a larger"
        " weight",
        sign=-1,
    ),
}
"""Terms by the figure's name, chosen on the two thirds of the families that were trained first."""
SEALED = {
    "architectures": 43,
    "within a factor of 3": 0.77,
    "in the interval": 0.65,
    "their placement's median within it": 0.86,
}
"""Accuracy on architectures of held-out families, as docs/why/prediction.md has it; a test
compares.
"""
SHARES = frozenset({"segments with infinite H"})
"""Terms that were 0 or 1 in all trainings."""
TRIED = (1e-3, 0.3)
"""The smallest and the largest rate tried."""
FRAME: tuple[str, ...] = ("parameters", "blocks")
"""Further figures that are compared with the studied ranges."""


@dataclasses.dataclass(frozen=True)
class Predictor:
    """c (`constant`), b by term (`slopes`), the value of a missing figure (`usual`), and the ranges
    of the fit.

    - `low`, `high`: 80% of the measured log10 eta lie at most this far below and above the
      prediction, by cross-validation over families
    - `ranges`: the least and the largest figure of each term and of `FRAME` among the
      `architectures`
    """

    constant: float
    slopes: dict[str, float]
    usual: dict[str, float]
    low: float
    high: float
    ranges: dict[str, list[float]]
    architectures: int

    def log_rate(self, figures: ScreenFigures) -> float:
        """log10 of the predicted largest stable learning rate."""
        return self.constant - math.fsum(
            b * self._value(name, figures.get(name)) for name, b in self.slopes.items()
        )

    def _value(self, name: str, figure: float | None) -> float:
        value = TERMS[name].value(figure)
        return self.usual[name] if math.isnan(value) else value

    def outside(self, figures: ScreenFigures) -> list[str]:
        """The figures outside the studied ranges, by more than rounding."""
        found = []
        for name, (least, largest) in self.ranges.items():
            value = figures.get(name)
            if value is not None and not least - 1e-9 * abs(least) <= value <= largest + 1e-9 * abs(
                largest
            ):
                found.append(f"{name} {value:.3g}, studied from {least:.3g} to {largest:.3g}")
            elif value is not None and name in SHARES and 0 < value < 1:
                found.append(f"{name} {value:.3g}, studied at 0 and at 1 only")
        return found


@dataclasses.dataclass(frozen=True)
class PredictedRate:
    """The rate with its interval, and the figures outside the ranges of the fit."""

    rate: float
    low: float
    high: float
    outside: list[str]


def predicted_rate(figures: ScreenFigures, predictor: Predictor | None = None) -> PredictedRate:
    """The predictor's rate for these figures. Raises ConfigError if a figure that it needs is
    unknown.
    """
    known = read_predictor() if predictor is None else predictor
    missing = [name for name in known.slopes if math.isnan(TERMS[name].value(figures.get(name)))]
    if missing:
        raise ConfigError(f"{', '.join(missing)} not known, so no learning rate is predicted")
    log_rate = known.log_rate(figures)
    rate, outside = 10**log_rate, known.outside(figures)
    if not TRIED[0] <= rate <= TRIED[1]:
        outside.append(f"rates were tried from {TRIED[0]:g} to {TRIED[1]:g} only")
    return PredictedRate(rate, 10 ** (log_rate - known.low), 10 ** (log_rate + known.high), outside)


def read_predictor(path: Path = FILE) -> Predictor:
    """The committed predictor. Raises ConfigError if it is missing or damaged."""
    if not path.is_file():
        raise ConfigError(
            f"there is no {path.name}: fit one with python -m benchmarks.prediction, and commit it"
            f" as {str(path)!r}"
        )
    content: Any = read_json(path)
    try:
        predictor = Predictor(**content)
    except TypeError:
        raise ConfigError(f"{str(path)!r} is no predictor") from None
    if predictor.slopes.keys() != TERMS.keys():
        raise ConfigError(
            f"{str(path)!r} has the terms {', '.join(predictor.slopes)}, and this ctrans"
            f" {', '.join(TERMS)}: fit it anew"
        )
    return predictor
