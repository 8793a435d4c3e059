"""Measured orders of convergence beside those of theory, as one table
(`ctrans simulate --orders`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ctrans.base.from_json import from_json
from ctrans.measure.measured import Answer, Measured, Value
from ctrans.measure.measures import MEASURES, Measure
from ctrans.model.orders import Convergence

_of_a_series = partial(Measure, topic="Orders of convergence", subject="series")
FAR = 0.3
"""An order so far below the formal one is marked."""
MEASURES.add(
    "ctrans simulate --orders",
    {
        "order": _of_a_series(
            formula="measured order with this placement, by a fit of error ~ n^-p (1 + c/n)",
            decimals=2,
        ),
        "order in theory": _of_a_series(
            formula="p of a method whose error is proportional to steps^-p", decimals=0
        ),
        "error with the most steps": _of_a_series(
            formula="relative error at the end of the depth", detail=True
        ),
        "error": _of_a_series(
            formula="|X - X_exact|/|X_exact| at the end of the depth",
            title="errors",
            unit="relative error",
            scope="size",
            over="steps per sublayer, or blocks",
            log_x=True,
        ),
    },
)


def measured(series: Sequence[Convergence]) -> Measured:
    """The table of several series of errors, each as a model of its own."""
    values = []
    styles = {}
    for convergence in series:
        name = _name(convergence)
        styles[name] = convergence.placement
        values.append(Value(name, "order", convergence.order))
        values.append(Value(name, "order in theory", float(convergence.formal)))
        values.append(Value(name, "error with the most steps", convergence.errors[-1]))
        for size, error in zip(convergence.sizes, convergence.errors, strict=True):
            values.append(Value(name, "error", error, step=size))
    return Measured(values=tuple(values), answers=(answer(series),), styles=styles)


def _name(convergence: Convergence) -> str:
    return f"{convergence.limit}, {convergence.method}, {convergence.placement}"


def answer(series: Sequence[Convergence]) -> Answer:
    """Whether the measured orders agree with theory."""
    below = [
        _name(convergence)
        for convergence in series
        if math.isnan(convergence.order) or convergence.order < convergence.formal - FAR
    ]
    if below:
        return Answer(
            f"{len(below)} of {len(series)} measured orders are below theory: {'; '.join(below)}.",
            "bad",
        )
    if len(series) == 1:
        agreement = "The measured order of convergence agrees with theory (it is not more than"
    else:
        agreement = (
            f"All {len(series)} measured orders of convergence agree with theory (none is more than"
        )
    return Answer(f"{agreement} {FAR} below).", "good")


def as_object(series: Sequence[Convergence]) -> dict[str, Any]:
    """The series in the JSON of version 1."""
    return {
        "results": [{**vars(convergence), "order": convergence.order} for convergence in series]
    }


def measured_in(result: Mapping[str, Any]) -> Measured:
    """The table of a JSON of version 1. Raises ConfigError for another object."""
    return measured([from_json(Convergence, series) for series in result["results"]])
