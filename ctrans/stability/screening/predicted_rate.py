"""The largest stable learning rate as predicted from the initial weights: few terms, each monotone
with a reason, and a constant.

    log10 eta = c - sum_j b_j x_j,  b_j >= 0,

x_j a figure of the screening, or its logarithm, with the sign that its reason has. What was learned
from which trainings is `predictor.json` in this directory. `benchmarks/prediction` fits it; a third
of the families was trained only after the fit was committed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctrans.given_files import read_json
from solvers import ConfigError

FILE = Path(__file__).parent / "predictor.json"
SMALLEST = 1e-12
ScreenFigures = Mapping[str, float | None]


@dataclasses.dataclass(frozen=True)
class Term:
    """A figure that rates depend on in one direction: `sign` 1 if a larger one needs a smaller
    rate, -1 if it allows a larger. It enters by its logarithm, unless it is one, or a share, as it
    is (`plain`).
    """

    why: str
    sign: int = 1
    plain: bool = False

    def value(self, figure: float | None) -> float:
        """x_j; nan of a figure that is not known."""
        if figure is None or not math.isfinite(figure):
            return math.nan
        return self.sign * (figure if self.plain else math.log10(max(figure, SMALLEST)))


TERMS: dict[str, Term] = {
    "segments with infinite H": Term(
        "where the Hamiltonian is infinite, velocities grow with the weights without a bound, and so does what a step in them does",
        plain=True,
    ),
    "growth": Term(
        "the more a state has outgrown its input, the more of it is the weights', and moves when they move", plain=True
    ),
    "weight size": Term("a step of Adam moves every weight by about the rate, which is less of a larger one", sign=-1),
}
"""By the figure's name; chosen on the two thirds that were trained first."""
SEALED = {"architectures": 43, "within a factor of 3": 0.77, "in the interval": 0.65, "their placement's median within it": 0.86}
"""How it did on architectures of families that it had not seen (`python -m benchmarks.prediction
--report`; a test compares).
"""
CAVEAT = (
    "It was learned of options around pre at dt 1 and peri at dt 0.3: peri at dt 1 took smaller rates than that, and whether it tells "
    "architectures of one placement apart is not known."
)
"""What was found of it after that (docs/why/prediction.md)."""
SHARES = frozenset({"segments with infinite H"})
"""Terms that were 0 or 1 in everything that was trained."""
TRIED = (1e-3, 0.3)
"""The smallest and the largest rate that was tried."""
FRAME: tuple[str, ...] = ("parameters", "blocks")
"""What else is said to be outside of what was studied."""


@dataclasses.dataclass(frozen=True)
class Predictor:
    """c, b by term, what a missing figure counts as, and what it was learned from.

    - `low`, `high`: how far below and above the prediction 80% of the measured log10 eta lie, by
      cross-validation over families
    - `ranges`: the least and the largest of each term's and of `FRAME`'s figures among the
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
        return self.constant - math.fsum(b * self._value(name, figures.get(name)) for name, b in self.slopes.items())

    def _value(self, name: str, figure: float | None) -> float:
        value = TERMS[name].value(figure)
        return self.usual[name] if math.isnan(value) else value

    def outside(self, figures: ScreenFigures) -> list[str]:
        """The figures that are beyond what was studied, by more than rounding."""
        found = []
        for name, (least, largest) in self.ranges.items():
            value = figures.get(name)
            if value is not None and not least - 1e-9 * abs(least) <= value <= largest + 1e-9 * abs(largest):
                found.append(f"{name} {value:.3g}, studied from {least:.3g} to {largest:.3g}")
            elif value is not None and name in SHARES and 0 < value < 1:
                found.append(f"{name} {value:.3g}, studied at 0 and at 1 only")
        return found


@dataclasses.dataclass(frozen=True)
class PredictedRate:
    """The rate with its interval, of how many architectures it was learned, in what the model is
    outside of them, and how it did on those that it had not seen.
    """

    rate: float
    low: float
    high: float
    architectures: int
    outside: list[str]
    sealed: dict[str, float] = dataclasses.field(default_factory=lambda: dict(SEALED))


def predicted_rate(figures: ScreenFigures, predictor: Predictor | None = None) -> PredictedRate:
    """What was learned, applied. ConfigError where a figure that it needs is not known."""
    known = read_predictor() if predictor is None else predictor
    missing = [name for name in known.slopes if math.isnan(TERMS[name].value(figures.get(name)))]
    if missing:
        raise ConfigError(f"{', '.join(missing)} not known, so no learning rate is predicted")
    log_rate = known.log_rate(figures)
    rate, outside = 10**log_rate, known.outside(figures)
    if not TRIED[0] <= rate <= TRIED[1]:
        outside.append(f"rates were tried from {TRIED[0]:g} to {TRIED[1]:g} only")
    return PredictedRate(rate, 10 ** (log_rate - known.low), 10 ** (log_rate + known.high), known.architectures, outside)


def read_predictor(path: Path = FILE) -> Predictor:
    """The committed predictor. ConfigError where there is none, or it is damaged."""
    if not path.is_file():
        raise ConfigError(
            f"there is no {path.name} yet: fit one with python -m benchmarks.prediction, and commit what it writes as {str(path)!r}"
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
