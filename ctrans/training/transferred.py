"""What `ctrans coordinate-check` measures, as one table: whether a rate transfers, and what moves
with width or depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctrans.base.from_json import from_json
from ctrans.measure.findings import Mark
from ctrans.measure.measured import Answer, Measured, Value
from ctrans.measure.measures import MEASURES, Measure
from ctrans.training.coordinate_check import FLAT, LOSS, Transfer

AXES = ("width", "depth")
"""The sizes that are varied."""
for _axis in AXES:
    MEASURES.add(
        "ctrans coordinate-check",
        {
            f"exponent in {_axis}": Measure(
                formula=(
                    f"k of mean |change| ~ {_axis}^k after the updates, with its standard error"
                    " over seeds and rates; 0 where one rate suits every size"
                ),
                decimals=2,
                topic=f"growth with the {_axis}",
            ),
            f"exponent in {_axis} at the start": Measure(
                formula=f"k of mean |x| ~ {_axis}^k before the first update",
                decimals=2,
                topic=f"growth with the {_axis}",
            ),
            f"verdict by {_axis}": Measure(
                formula=f"whether |k| is below {FLAT:.2f}, by two standard errors",
                topic=f"growth with the {_axis}",
            ),
            f"change by {_axis}": Measure(
                formula="geometric mean over seeds and rates of mean |x_t - x_0|",
                unit="mean |change|",
                scope="size",
                over=_axis,
                log_x=True,
            ),
        },
    )


def measured(transfer: Transfer) -> Measured:
    """The table of a check; a place of the model stands where other tables have a model."""
    values = []
    for growth in transfer.growths:
        axis = growth.axis
        place = growth.place
        values.append(Value(place, f"exponent in {axis}", growth.exponent, error=growth.error))
        values.append(Value(place, f"exponent in {axis} at the start", growth.at_start))
        if place != LOSS:
            values.append(Value(place, f"verdict by {axis}", None, words=growth.verdict))
        for size, change in zip(transfer.sizes[axis], growth.changes, strict=True):
            values.append(Value(place, f"change by {axis}", change, step=size))
    mark: Mark = "good" if transfer.verdict == "transfers" else "note"
    return Measured(
        values=tuple(values),
        answers=(Answer(in_words(transfer), mark),),
        notes={"": ["Places are modules by name; * stands for every number."]},
    )


def in_words(transfer: Transfer) -> str:
    """The verdict, with the place that decides it for each axis."""
    reasons = []
    for axis in transfer.sizes:
        worst = transfer.worst(axis)
        reasons.append(f"{axis}: {worst.verdict}, the change of {worst.place} goes like {worst}")
    verb = "is undecided" if transfer.verdict == "undecided" else transfer.verdict
    return f"The rate {verb}. {'; '.join(reasons)}."


def measured_in(result: Mapping[str, Any]) -> Measured:
    """The table of a check's JSON of version 1. Raises ConfigError for another object."""
    return measured(from_json(Transfer, result))
