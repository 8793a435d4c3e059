"""The figures of a run that presets compare; None for a run without the figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from ctrans.study.finished import Finished
from ctrans.study.outcomes import end_loss
from ctrans.study.training import FAILED

Figure = Callable[[Finished], float | None]
LEAST = 1e-12
"""The least theta of which a logarithm is taken."""


def _diverged(run: Finished) -> float | None:
    """1 for a run that diverged or ended above its first loss, else 0."""
    if run.result.ending == FAILED:
        return None
    if run.last is None or run.first is None:
        return float(run.result.ending == "diverged")
    return float(run.last > run.first)


def _loss(run: Finished) -> float | None:
    """The validation loss at the end, at most the first, in nats."""
    loss = end_loss(run)
    if math.isnan(loss):
        return None
    return loss


def _trained(
    measure: str, name: str, figure: Callable[..., float | None], *, change: bool = False
) -> Figure:
    """A figure of a measure by depth of the trained model. With `change`, `figure` gets the measure
    before the training and after it.
    """
    times = ["after"]
    if change:
        times = ["before", "after"]

    def of_run(run: Finished) -> float | None:
        values = []
        for time in times:
            measured = run.result.trained.get(time, {}).get(measure)
            if not isinstance(measured, dict):
                return None
            values.append(measured[name])
        return figure(*values)

    return of_run


def _decades(before: float, after: float) -> float | None:
    """The powers of ten by which a positive figure grew."""
    if before > 0 and after > 0:
        return math.log10(after / before)
    return None


def _drift(before: Sequence[float], after: Sequence[float]) -> float:
    """The mean |change| over attention sublayers."""
    return fmean(abs(b - a) for a, b in zip(before, after, strict=True))


def _growth_exponent(size: Sequence[float]) -> float | None:
    """p of mean|X_k| ~ k^p from the middle of the depth to its end."""
    if size[-1] > 0:
        return math.log2(size[-1] / size[len(size) // 2])
    return None


def _last_size(size: Sequence[float]) -> float | None:
    """log10 of the last state's mean absolute entry."""
    if size[-1] > 0:
        return math.log10(size[-1])
    return None


def _last_grown(before: Sequence[float], after: Sequence[float]) -> float | None:
    return _decades(before[-1], after[-1])


def _largest_grown(before: Sequence[float], after: Sequence[float]) -> float | None:
    return _decades(max(before), max(after))


def _log_drift(before: Sequence[float], after: Sequence[float]) -> float:
    return _drift(_logs(before), _logs(after))


def _logs(theta: Sequence[float]) -> list[float]:
    return [math.log10(max(value, LEAST)) for value in theta]


FIGURES: dict[str, Figure] = {
    "diverged": _diverged,
    "loss": _loss,
    "growth exponent": _trained("moments", "mean_abs", _growth_exponent),
    # of the last state's variance
    "variance grown": _trained("moments", "variance", _last_grown, change=True),
    # of the largest ratio of a largest to a median entry
    "massive grown": _trained("massive", "ratio", _largest_grown, change=True),
    "size": _trained("moments", "mean_abs", _last_size),
    "theta": _trained("attention", "theta", fmean),
    "theta drift": _trained("attention", "theta", _log_drift, change=True),
    "S drift": _trained("attention", "log_S", _drift, change=True),
}
"""Figures by name: functions of a run."""
