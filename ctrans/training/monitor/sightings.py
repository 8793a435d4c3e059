"""What a check of a training's past may find, and where the figures of the last reports lie outside
of a limit.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from ctrans.training.monitor.past import Array, Past

Limits = Mapping[str, float]
Transform = Callable[[Array, Past], Array]
"""Maps values (reports, places) of a gauge to the figure that a check judges."""


@dataclasses.dataclass(frozen=True)
class Sighting:
    """What a check found.

    - `place`, `value`, `limit`: where, the figure there, and its limit
    - `since`: the step at which it began
    - `doubling`, `crossing`: in how many steps the figure doubles, and the step at which it passes
      its limit
    - `below`: whether the figure is below its limit
    """

    place: str
    value: float
    limit: float
    since: int
    doubling: float = math.inf
    crossing: float = math.inf
    below: bool = False


PastCheck = Callable[[Past, Limits], Sighting | None]


def medians(values: Array) -> Array:
    """The median over places of each report as a column, without nan; nan if there is nothing
    else.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy warns of rows of nan
        return np.nanmedian(values, 1, keepdims=True)


def values_of(past: Past, name: str, transform: Transform | None) -> tuple[Array, Array]:
    """Steps and transformed values of the reports that have the gauge."""
    steps, values = past.of(name)
    if transform is not None and len(steps):
        values = transform(values, past)
    return steps, values


def places_outside(outside: NDArray[np.bool_], limits: Limits) -> NDArray[np.intp]:
    """The places that are outside in each of the last `reports` reports; none of fewer reports."""
    count = int(limits.get("reports", 1))
    if len(outside) < count:
        return np.zeros(0, dtype=np.intp)
    return np.flatnonzero(outside[-count:].all(0))


def seen_at(
    past: Past,
    name: str,
    index: int,
    values: Array,
    limit: float,
    outside: NDArray[np.bool_],
    *,
    below: bool = False,
) -> Sighting:
    """A gauge's last value at a place, since the first step of the last stretch of reports that are
    outside.
    """
    steps, _ = past.of(name)
    inside = np.flatnonzero(~outside[:, index])
    first = 0
    if len(inside):
        first = min(len(steps) - 1, int(inside[-1]) + 1)
    since = int(steps[first])
    return Sighting(past.place(name, index), float(values[-1, index]), limit, since, below=below)
