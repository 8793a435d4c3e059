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

WINDOW, LEAST, LATE = 16, 12, 36
"""Reports of a past, at most and at least; the first report at which growth counts."""
FACTOR, FLOOR = 12.0, 0.1
"""Deviations from the median of the past, and the least deviation of a logarithm."""
FIT, GROWTH = 0.95, 10.0
"""R^2 of the line of logarithms over `LEAST` reports, and the factor of its growth."""
RULE = (
    f"a logarithm leaves its past if this report and the next are {FACTOR:g} deviations or more"
    f" from the median of the last {WINDOW} reports (1.48 median distances, at least {FLOOR:g}), if"
    f" it grew or shrank {GROWTH:g}-fold along a line with R^2 of {FIT:g} over {LEAST} reports (a"
    " schedule may), or if it is not finite any more"
)
SIGMA, STEPS, REPORTS = 6.0, 128, 8
"""OLMo-core's SkipStep: deviations above the mean of that many steps before. Here of the reports in
them, or of that many reports if these are more.
"""
DEPTH = ("rms", "largest", "velocity", "step_share", "logit", "routing")
ORDER = (
    *(
        "learning_rate",
        "adam_memory",
        "softmaxes",
        "unmoved",
        *DEPTH,
        "log_z",
        "largest_logit",
        "loss",
    ),
    *("costate", "gradient", "gradient_outside", "gradient_norm", "highest_gradient_norm"),
    *("adam_gradient_ratio", "adam_gradient_ratio_outside", "update", "update_outside"),
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
    found = list[tuple[tuple[float, ...], Deviation]]()
    for rank, name in enumerate(ORDER):
        series = log.series(name)
        for t, index, times, away in _leaving(
            series.reshape(len(series), -1), name != "learning_rate"
        ):
            place = past.place(name, index)
            key = (ORDER.index(DEPTH[0]), _depth(past, place), rank) if name in DEPTH else (rank,)
            found.append(((log.steps[t], *key), Deviation(name, place, log.steps[t], times, away)))
    losses = log.series("loss")
    rises = [
        t
        for t in range(LEAST, len(losses) - 2)
        if losses[t : t + 3].min() > losses[max(0, t - WINDOW) : t].max()
    ]
    loss = min([*rises, *np.flatnonzero(~np.isfinite(losses)).tolist()], default=None)
    seen = [step for name in ("loss", "gradient_norm") if (step := _sigma(log, name)) is not None]
    found.sort(key=lambda pair: pair[0])
    return PostMortem(
        [each for _, each in found],
        None if loss is None else log.steps[loss],
        min(seen, default=None),
    )


def _leaving(
    values: NDArray[np.float64], growth: bool = True
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
            out |= growth & (t >= LATE) & fits & (np.abs(slopes) * LEAST > math.log(GROWTH))
            out |= ~np.isfinite(logs[t]) & np.isfinite(logs[t - 1])
            for index in np.flatnonzero(out & inside):
                yield (
                    t,
                    int(index),
                    float(np.exp(logs[t, index] - middle[index])),
                    float(abs(away[0, index])),
                )
            inside &= ~out


def _depth(past: Past, place: str) -> float:
    """How deep a place is in the pass forward; a state lies before its sublayer."""
    name = place.removeprefix("the state before ").split(", head")[0]
    return (
        past.places.index(name) if name in past.places else len(past.places)
    ) - 0.5 * place.startswith("the state")


def _sigma(log: MonitorLog, name: str) -> int | None:
    """The first step at which the 6-sigma rule sees a figure of the run."""
    steps = np.array(log.steps)
    values = log.series(name)
    for t in range(REPORTS, len(values)):
        before = values[min(t - REPORTS, int(np.searchsorted(steps, steps[t] - STEPS))) : t]
        if np.isfinite(before).all() and not values[t] <= before.mean() + SIGMA * before.std():
            return int(steps[t])
    return None
