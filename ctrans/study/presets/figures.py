"""The figures of a run that presets compare; None for a run without the figure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ctrans.study.database import Finished
from ctrans.study.outcomes import end_loss
from ctrans.study.training import FAILED


def _diverged(run: Finished) -> float | None:
    if run.result.ending == FAILED:
        return None
    if run.last is None or run.first is None:
        return float(run.result.ending == "diverged")
    return float(run.last > run.first)


def _loss(run: Finished) -> float | None:
    loss = end_loss(run)
    return None if math.isnan(loss) else loss


def _after(run: Finished, measure: str, name: str, when: str = "after") -> list[float] | None:
    """A measure by depth of the model, after its training or before."""
    found: Any = run.result.trained.get(when, {}).get(measure)
    return found[name] if isinstance(found, dict) else None


def _growth_exponent(run: Finished) -> float | None:
    """p of mean|X_k| ~ k^p from the middle of the depth to its end: log_2 of their ratio."""
    sizes = _after(run, "moments", "mean_abs")
    return None if sizes is None or not sizes[-1] > 0 else math.log2(sizes[-1] / sizes[len(sizes) // 2])


def _decades(measure: str, name: str, pick: Callable[[list[float]], float]) -> Callable[[Finished], float | None]:
    """The powers of ten by which a measure grew in training."""

    def figure(run: Finished) -> float | None:
        before, after = (_after(run, measure, name, when) for when in ("before", "after"))
        if before is None or after is None or not pick(before) > 0 or not pick(after) > 0:
            return None
        return math.log10(pick(after) / pick(before))

    return figure


def _size(measure: str, name: str) -> Callable[[Finished], float | None]:
    def figure(run: Finished) -> float | None:
        found = _after(run, measure, name)
        return None if found is None or not found[-1] > 0 else math.log10(found[-1])

    return figure


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _theta(run: Finished) -> float | None:
    found = _after(run, "attention", "theta")
    return None if found is None else _mean(found)


def _drift(name: str) -> Callable[[Finished], float | None]:
    """Mean over attention sublayers of |log10 after - log10 before|."""

    def figure(run: Finished) -> float | None:
        before, after = (_after(run, "attention", name, when) for when in ("before", "after"))
        if before is None or after is None:
            return None
        logs = [[value if name == "log_S" else math.log10(max(value, 1e-12)) for value in each] for each in (before, after)]
        return _mean([abs(b - a) for a, b in zip(*logs, strict=True)])

    return figure


FIGURES: dict[str, tuple[str, Callable[[Finished], float | None]]] = {
    "diverged": ("share of diverged runs", _diverged),
    "loss": ("validation loss at the end, at most the first (nats)", _loss),
    "growth exponent": ("p of mean|X_k| ~ k^p over the second half of the depth, trained", _growth_exponent),
    "variance grown": (
        "powers of ten by which the last state's variance grew in training",
        _decades("moments", "variance", lambda v: v[-1]),
    ),
    "massive grown": (
        "powers of ten by which the largest ratio of a largest to a median entry grew in training",
        _decades("massive", "ratio", max),
    ),
    "size": ("log10 of the last state's mean absolute entry, trained", _size("moments", "mean_abs")),
    "theta": ("mean theta of attention rows, trained", _theta),
    "theta drift": ("mean |change of log10 theta| in training", _drift("theta")),
    "S drift": ("mean |change of log10 S| in training", _drift("log_S")),
}
"""Figures by name: a description, and the function of a run."""
