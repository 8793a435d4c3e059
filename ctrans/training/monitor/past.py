"""The past of a training for its alarms: the last reports, losses and gradient norms."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ctrans.measure.measures import MEASURES, Figures, MeasureAt

Array = NDArray[np.float64]
REPORTS = 64
"""The number of reports, and of probes, that it keeps."""
STEPS = 1024
"""The number of losses, and of gradient norms, that it keeps."""


@dataclasses.dataclass(frozen=True)
class Trend:
    """log value = a + rate * step over some reports, with R^2 of the line as `fit`. `doubling` is
    in steps, inf without growth.
    """

    rate: float
    fit: float

    @property
    def doubling(self) -> float:
        if self.rate > 0:
            return math.log(2) / self.rate
        return math.inf

    def crossing(self, step: int, value: float, limit: float) -> float:
        """The step at which the line through (step, value) passes the limit: `step` if it has, inf
        without growth.
        """
        if value >= limit:
            return step
        if self.rate > 0 and value > 0:
            return step + math.log(limit / value) / self.rate
        return math.inf


class Past:
    """The last `REPORTS` reports and probes of a run, the first value of each gauge, and the losses
    and gradient norms of the last `STEPS` steps.
    """

    def __init__(self, places: Sequence[str], heads: Sequence[int], vocabulary: int):
        self.places = list(places)
        self.heads = list(heads)
        self.vocabulary = vocabulary
        self.half = False
        self.broken: list[MeasureAt] = []
        """(gauge, place) of the figures of the last report that are inf or nan, in the order of a
        pass.
        """
        self.first: Figures = {}
        self.reports: deque[tuple[int, Figures]] = deque(maxlen=REPORTS)
        self.losses: deque[tuple[int, float]] = deque(maxlen=STEPS)
        self.norms: deque[tuple[int, float]] = deque(maxlen=STEPS)
        self.probes: deque[tuple[int, dict[str, float]]] = deque(maxlen=REPORTS)

    @property
    def step(self) -> int:
        return self.reports[-1][0]

    def add(self, step: int, figures: Figures, broken: Sequence[MeasureAt] = ()) -> None:
        self.broken = list(broken)
        for name, value in figures.items():
            first = self.first.get(name)
            if first is None or (isinstance(first, list) and any(map(math.isnan, first))):
                self.first[name] = value
        self.reports.append((step, figures))

    def of(self, name: str) -> tuple[Array, Array]:
        """Steps (reports,) and values (reports, places) of the reports that have the gauge. A
        figure of the run has one place.
        """
        rows: list[tuple[int, list[float]]] = []
        for step, figures in self.reports:
            value = figures.get(name)
            if isinstance(value, list):
                rows.append((step, value))
            elif value is not None:
                rows.append((step, [value]))
        if not rows:
            return np.zeros(0), np.zeros((0, 0))
        width = len(rows[-1][1])
        steps = [step for step, row in rows if len(row) == width]
        values = [row for _, row in rows if len(row) == width]
        return np.array(steps, dtype=float), np.array(values, dtype=float)

    def place(self, name: str, index: int) -> str:
        """The place of an entry of a gauge, in words."""
        scope = MEASURES[name].scope
        if scope == "run":
            return "the model"
        if scope == "state":
            if index < len(self.places):
                return f"the state before {self.places[index]}"
            return "the last state"
        if scope == "sublayer":
            return self.places[index]
        for k, count in enumerate(self.heads):
            if index < count:
                return f"{self.places[k]}, head {index}"
            index -= count
        return f"head {index}"


def trend(steps: Array, values: Array) -> Trend:
    """Least squares of log values against steps. Without three values, all positive and finite, the
    rate and the fit are 0.
    """
    if len(steps) < 3 or not (np.isfinite(values).all() and (values > 0).all()):
        return Trend(0.0, 0.0)
    s = steps - steps.mean()
    log = np.log(values)
    log = log - log.mean()
    rate = float((s * log).sum() / (s * s).sum())
    total = float((log * log).sum())
    fit = 0.0
    if total > 0:
        fit = 1 - float(((log - rate * s) ** 2).sum()) / total
    return Trend(rate, fit)
