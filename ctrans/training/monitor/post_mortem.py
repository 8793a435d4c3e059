"""What moved first in a training: for each gauge and place, the first report at which it leaves its
own past.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctrans.training.monitor.log import MonitorLog
from ctrans.training.monitor.past import Past

WINDOW = 16
LEAST = 12
"""Reports of a past, at most and at least."""
LATE = 36
"""The first report at which growth counts."""
FACTOR = 12.0
FLOOR = 0.1
"""Deviations from the median of the past, and the least deviation of a logarithm."""
FIT = 0.95
GROWTH = 10.0
"""R^2 of the line of logarithms over `LEAST` reports, and the factor of its growth."""
RULE = (
    f"a logarithm leaves its past if this report and the next are {FACTOR:g} deviations or more"
    f" from the median of the last {WINDOW} reports (1.48 median distances, at least {FLOOR:g}), if"
    f" it grew or shrank {GROWTH:g}-fold along a line with R^2 of {FIT:g} over {LEAST} reports (a"
    " schedule may), or if it is not finite any more"
)
SIGMA = 6.0
STEPS = 128
REPORTS = 8
"""OLMo-core's SkipStep: deviations above the mean of that many steps before. Here of the reports in
them, or of that many reports if these are more.
"""
SETTINGS = ("learning_rate", "adam_memory", "softmaxes", "unmoved")
DEPTH = ("rms", "largest", "velocity", "step_share", "logit", "routing")
ORDER = (
    *SETTINGS,
    *DEPTH,
    "log_z",
    "largest_logit",
    "loss",
    "costate",
    "gradient",
    "gradient_outside",
    "gradient_norm",
    "highest_gradient_norm",
    "adam_gradient_ratio",
    "adam_gradient_ratio_outside",
    "update",
    "update_outside",
)
"""The gauges that are compared: settings, the pass forward, the pass back, the step. Those of
`DEPTH` are in the order of the pass.
"""


@dataclass(frozen=True)
class Deviation:
    """A gauge at a place that left its past at the report of `step`: by the factor `times` over the
    median of its past, which is that many `deviations`. nan is a figure that is not finite.
    """

    gauge: str
    place: str
    step: int
    times: float
    deviations: float


@dataclass(frozen=True)
class PostMortem:
    """What left its past, in order.

    - `deviations`: by step, and of one step in the order of causes: settings, the pass forward by
      depth, the pass back, the update
    - `loss`: the step from which on three reports have a loss above those before, or one has a loss
      that is not finite; None without one
    - `sigma`: the step at which the 6-sigma rule sees the loss or the gradient's norm
    """

    deviations: list[Deviation]
    loss: int | None
    sigma: int | None


def post_mortem(log: MonitorLog) -> PostMortem:
    """What left its past in the training of a log."""
    past = Past(log.header.places, log.header.heads, 0)
    ranked = list[tuple[tuple[float, ...], Deviation]]()
    for rank, name in enumerate(ORDER):
        series = log.series(name)
        values = series.reshape(len(series), -1)
        for t, index, times, away in _leaving(values, growth=name != "learning_rate"):
            where = past.place(name, index)
            step = log.steps[t]
            key: tuple[float, ...] = (step, rank)
            if name in DEPTH:
                key = (step, len(SETTINGS), _depth(past, where), rank)
            ranked.append((key, Deviation(name, where, step, times, away)))
    ranked.sort(key=lambda pair: pair[0])
    deviations = [deviation for _, deviation in ranked]
    sigmas = [_sigma(log, "loss"), _sigma(log, "gradient_norm")]
    sigma = min((step for step in sigmas if step is not None), default=None)
    return PostMortem(deviations, _loss_leaves(log), sigma)


def _loss_leaves(log: MonitorLog) -> int | None:
    """The step from which on three reports have a loss above those before, or one has a loss that
    is not finite; None without one.
    """
    losses = log.series("loss")
    for t, loss in enumerate(losses):
        if not math.isfinite(loss):
            return log.steps[t]
        has_past_and_future = LEAST <= t < len(losses) - 2
        if has_past_and_future and losses[t : t + 3].min() > losses[max(0, t - WINDOW) : t].max():
            return log.steps[t]
    return None


def _leaving(
    values: NDArray[np.float64], *, growth: bool = True
) -> Iterator[tuple[int, int, float, float]]:
    """Row, column, factor and deviations where each column first leaves its past, by `growth`
    too.
    """
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy warns of rows of nan
        logs = np.log(np.maximum(np.abs(values), 1e-12))
        inside = np.ones(values.shape[1], dtype=bool)
        steps = np.arange(LEAST) - (LEAST - 1) / 2
        for t in range(LEAST, len(values)):
            before = logs[max(0, t - WINDOW) : t]
            line = logs[t - LEAST + 1 : t + 1]
            middle = np.nanmedian(before, 0)
            width = np.maximum(1.48 * np.nanmedian(np.abs(before - middle), 0), FLOOR)
            away = (logs[t : t + 2] - middle) / width
            out = (len(away) == 2) & ((away > FACTOR).all(0) | (away < -FACTOR).all(0))
            slopes = steps @ (line - line.mean(0)) / (steps @ steps)
            fits = slopes**2 * (steps @ steps) > FIT * ((line - line.mean(0)) ** 2).sum(0)
            if growth and t >= LATE:
                out |= fits & (np.abs(slopes) * LEAST > math.log(GROWTH))
            out |= ~np.isfinite(logs[t]) & np.isfinite(logs[t - 1])
            for index in np.flatnonzero(out & inside):
                factor = float(np.exp(logs[t, index] - middle[index]))
                yield t, int(index), factor, float(abs(away[0, index]))
            inside &= ~out


def _depth(past: Past, where: str) -> float:
    """How deep a place is in the pass forward; a state lies before its sublayer."""
    name = where.removeprefix("the state before ").split(", head")[0]
    depth: float = len(past.places)
    if name in past.places:
        depth = past.places.index(name)
    if where.startswith("the state"):
        return depth - 0.5
    return depth


def _sigma(log: MonitorLog, name: str) -> int | None:
    """The first step at which the 6-sigma rule sees a figure of the run."""
    steps = np.array(log.steps)
    values = log.series(name)
    for t in range(REPORTS, len(values)):
        before = values[min(t - REPORTS, int(np.searchsorted(steps, steps[t] - STEPS))) : t]
        if np.isfinite(before).all() and not values[t] <= before.mean() + SIGMA * before.std():
            return int(steps[t])
    return None
