"""The figures of a run that presets compare; None for a run without the figure.

A new one is one entry of `MEASURES`, `run: NAME`: `compute` is a function of a run that ended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean, median

import numpy as np

from ctrans.measure.measures import MEASURES, OF_A_RUN, Measure
from ctrans.study.finished import Finished, finite
from ctrans.study.outcomes import DIVERGED, end_loss, has_diverged, training_losses

Figure = Callable[[Finished], float | None]
LEAST = 1e-12
"""The least theta of which a logarithm is taken."""
WINDOW = 128
LATE = 6
"""One block of so many is one of the last."""
FAR = 6.0
"""A spike is above the mean of so many steps by so many standard deviations."""


def _diverged(run: Finished) -> float | None:
    """1 for a run that diverged, else 0; None if it is not known."""
    diverged = has_diverged(run)
    return None if diverged is None else float(diverged)


def _spike_score(run: Finished) -> float | None:
    """The share of steps whose loss is above the mean of the `WINDOW` steps before it by `FAR`
    standard deviations of theirs; None for fewer steps. A loss that is not finite, as in a step
    that was skipped, is a spike, and not one of the steps before others.
    """
    finite_before: deque[float] = deque(maxlen=WINDOW)
    spikes = []
    for loss in training_losses(run):
        is_finite = math.isfinite(loss)
        if len(finite_before) == WINDOW:
            # numpy: Python's pstdev takes fractions, which are slow
            limit = np.mean(finite_before) + FAR * np.std(finite_before)
            spikes.append(not is_finite or bool(loss > limit))
        if is_finite:
            finite_before.append(loss)
    return fmean(spikes) if spikes else None


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
    """p of mean|X_k| ~ k^p from the middle of the depth to its end; None for a single segment."""
    end = len(size) - 1
    middle = len(size) // 2
    if end > middle and size[middle] > 0 and size[end] > 0:
        return math.log(size[end] / size[middle]) / math.log(end / middle)
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


def _early_over_late(blocks: Sequence[float]) -> float | None:
    """log10 of the median over the first blocks over the largest of the last ones."""
    late = max(1, round(len(blocks) / LATE))
    early = blocks[:-late]
    if early and median(early) > 0 and max(blocks[-late:]) > 0:
        return math.log10(median(early) / max(blocks[-late:]))
    return None


def _log_drift(before: Sequence[float], after: Sequence[float]) -> float:
    return _drift(_logs(before), _logs(after))


def _logs(theta: Sequence[float]) -> list[float]:
    return [math.log10(max(value, LEAST)) for value in theta]


MEASURES.add(
    "ctrans study",
    {
        "run: diverged": Measure(
            formula=f"1 for a run that diverged, else 0: {DIVERGED}",
            title="diverged",
            compute=_diverged,
        ),
        "run: spike score": Measure(
            formula=(
                "the share of steps whose loss is 6 standard deviations above the mean of the 128"
                " steps with a finite loss before it, or not finite"
            ),
            title="spike score",
            source="SpikeScore of OLMo-core 2.5's StabilityMonitor",
            compute=_spike_score,
        ),
        "run: loss": Measure(
            formula="the validation loss at the end, at most the first",
            title="loss",
            unit="nats a token",
            compute=_loss,
        ),
        "run: growth exponent": Measure(
            formula="p of mean |X_k| ~ k^p from the middle of the depth to its end, after training",
            title="growth exponent",
            compute=_trained("moments", "mean_abs", _growth_exponent),
        ),
        "run: variance grown": Measure(
            formula="log10 of the factor by which the last state's variance grew in the training",
            title="variance grown",
            compute=_trained("moments", "variance", _last_grown, change=True),
        ),
        "run: massive grown": Measure(
            formula=(
                "log10 of the factor by which the largest ratio of a largest to a median entry"
                " grew in the training"
            ),
            title="massive grown",
            compute=_trained("massive", "ratio", _largest_grown, change=True),
        ),
        "run: size": Measure(
            formula="log10 of the last state's mean |x| after training",
            title="size",
            compute=_trained("moments", "mean_abs", _last_size),
        ),
        "run: theta": Measure(
            formula="mean theta over attention sublayers after training",
            title="theta",
            compute=_trained("attention", "theta", fmean),
        ),
        "run: theta drift": Measure(
            formula="mean |change| of log10 theta over attention sublayers in the training",
            title="theta drift",
            compute=_trained("attention", "theta", _log_drift, change=True),
        ),
        "run: early gradient": Measure(
            formula=(
                "log10 of the median |dL/dW| over the first five sixths of blocks, over the largest"
                " of the others, after training"
            ),
            title="early gradient",
            source="Emadi, figure 1",
            compute=_trained("gradients", "blocks", _early_over_late),
        ),
        "run: S drift": Measure(
            formula="mean |change| of log10 S over attention sublayers in the training",
            title="S drift",
            compute=_trained("attention", "log_S", _drift, change=True),
        ),
    },
)


def figure_of(run: Finished, name: str) -> float | None:
    """The figure `run: NAME` of a run that ended; None if the run has none that is finite."""
    compute = MEASURES[f"{OF_A_RUN}{name}"].compute
    assert callable(compute), "a figure of a run has a function"
    return finite(compute(run))
