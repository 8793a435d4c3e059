"""How rules look at a training's past: what is outside of a limit, grows towards one, spikes,
differs by depth, or stands still.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from ctrans.monitor.past import Array, Past, Trend, trend

Limits = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Sighting:
    """What a check found: where, the figure and its limit, since which step, how fast it grows and
    when it will pass the limit.

    `below` says that it is a finding for being below the limit.
    """

    place: str
    value: float
    limit: float
    since: int
    doubling: float = math.inf
    crossing: float = math.inf
    below: bool = False


PastCheck = Callable[[Past, Limits], Sighting | None]
NONE = Trend(0.0, 0.0)


def beyond(name: str, transform: Callable[[Array, Past], Array] | None = None, *, below: bool = False) -> PastCheck:
    """A value above `limit` (or below it) in each of the last `reports` reports; the worst place."""

    def check(past: Past, limits: Limits) -> Sighting | None:
        steps, values = _values(past, name, transform)
        count = int(limits.get("reports", 1))
        if len(steps) < count:
            return None
        outside = values < limits["limit"] if below else values > limits["limit"]
        places = np.flatnonzero(outside[-count:].all(0))
        if not len(places):
            return None
        worst = places[int((np.argmin if below else np.argmax)(values[-1, places]))]
        value, since = float(values[-1, worst]), _since(steps, outside[:, worst])
        return Sighting(past.place(name, int(worst)), value, limits["limit"], since, below=below)

    return check


def grows(name: str, transform: Callable[[Array, Past], Array] | None = None) -> PastCheck:
    """A value above `limit`, or above `low` and on its way there: log-linear over the last `window`
    reports with R^2 of at least `fit`, passing the limit within `ahead` times the steps that were
    seen.
    """

    def check(past: Past, limits: Limits) -> Sighting | None:
        steps, values = _values(past, name, transform)
        window = int(limits.get("window", 6))
        found: list[tuple[float, Sighting]] = []
        for place in range(values.shape[1] if len(steps) else 0):
            line, value = values[-window:, place], float(values[-1, place])
            if not value > limits["low"]:
                continue
            run = trend(steps[-window:], line) if len(line) >= min(window, 4) else NONE
            crossing = run.crossing(past.step, value, limits["limit"])
            near = crossing - past.step <= limits.get("ahead", 4.0) * (steps[-1] - steps[-len(line)])
            if value >= limits["limit"] or (near and run.fit >= limits.get("fit", 0.8)):
                since = _since(steps, values[:, place] > limits["low"])
                found.append((crossing, Sighting(past.place(name, place), value, limits["limit"], since, run.doubling, crossing)))
        return min(found, key=lambda each: (each[0], -each[1].value))[1] if found else None

    return check


def spike(steps: list[int], values: list[float], limits: Limits, what: str, *, additive: bool = False) -> Sighting | None:
    """A value of the last `recent` ones that is `factor` times the median of the `window` before
    it, or so many deviations above.

    The deviation is 1.48 times the median distance from the median, and at least `floor`.
    """
    window, recent = int(limits["window"]), int(limits["recent"])
    worst: Sighting | None = None
    for end in range(max(int(limits.get("least", 5)), len(values) - recent), len(values)):
        before = np.array(values[max(0, end - window) : end])
        before = before[np.isfinite(before)]
        if len(before) < limits.get("least", 5):
            continue
        middle = float(np.median(before))
        deviation = max(1.48 * float(np.median(np.abs(before - middle))), limits.get("floor", 0.0))
        limit = middle + limits["factor"] * deviation if additive else limits["factor"] * middle
        if values[end] > limit and (worst is None or values[end] > worst.value):
            worst = Sighting(what, values[end], limit, steps[end])
    return worst


def loss_spike(past: Past, limits: Limits) -> Sighting | None:
    """loss > median + factor max(1.48 median distance from it, floor) of the `window` steps before,
    among the `recent` ones.
    """
    return spike([s for s, _ in past.losses], [v for _, v in past.losses], limits, "the loss", additive=True)


def gradient_spike(past: Past, limits: Limits) -> Sighting | None:
    """Of every step's norm where they are given, else of those of the reports."""
    if past.norms:
        return spike([s for s, _ in past.norms], [v for _, v in past.norms], limits, "the gradient")
    steps, values = past.of("gradient_norm")
    return spike([int(s) for s in steps], [float(v) for v in values[:, 0]] if len(steps) else [], limits, "the gradient")


def by_depth(past: Past, limits: Limits, *, exploding: bool) -> Sighting | None:
    """c_0 over c_K, c_k = |dL/dX_k||X_k|: how much of the gradient's relative size comes back
    through the depth.
    """
    steps, costates = past.of("costate")
    _, sizes = past.of("rms")
    count = int(limits.get("reports", 2))
    if len(steps) < count or costates.shape != sizes.shape:
        return None
    known = costates[-count:, :] * sizes[-count:, :]
    ends = known[:, :-1] if np.isnan(known[:, -1]).any() else known
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = ends[:, 0] / ends[:, -1]
    outside = ratios > limits["limit"] if exploding else ratios < limits["limit"]
    if not outside.all():
        return None
    where = "from the last state to the first"
    return Sighting(where, float(ratios[-1]), limits["limit"], int(steps[-count]), below=not exploding)


def dead(past: Past, limits: Limits) -> Sighting | None:
    """A sublayer whose velocity or gradient is below `limit` of the median sublayer's, or says the
    same of all tokens (`same`).
    """
    steps, spread = past.of("spread")
    count = int(limits.get("reports", 2))
    alike = (spread < limits["same"])[-count:]
    if len(steps) >= count and alike.all(0).any():
        place = int(np.flatnonzero(alike.all(0))[0])
        return Sighting(past.place("spread", place), float(spread[-1, place]), limits["same"], int(steps[-count]), below=True)
    for name in ("velocity", "gradient"):
        steps, values = past.of(name)
        if len(steps) < count or values.shape[1] < 3:
            continue
        with np.errstate(all="ignore"):
            share = values / _medians(values)
        outside = share < limits["limit"]
        places = np.flatnonzero(outside[-count:].all(0))
        if len(places):
            return Sighting(
                past.place(name, int(places[0])),
                float(share[-1, places[0]]),
                limits["limit"],
                _since(steps, outside[:, places[0]]),
                below=True,
            )
    return None


def frozen(past: Past, limits: Limits) -> Sighting | None:
    """A sublayer that no step changes while most others move; where most stand still it is meant
    so.
    """
    steps, values = past.of("update")
    count = int(limits.get("reports", 2))
    if len(steps) < count:
        return None
    still = (values[-count:] == 0).all(0)
    if not still.any() or still.sum() > limits["share"] * len(still):
        return None
    place = int(np.flatnonzero(still)[0])
    return Sighting(past.place("update", place), 0.0, 0.0, _since(steps, values[:, place] == 0))


def not_finite(past: Past, limits: Limits) -> Sighting | None:
    """The first figure in the order of a pass that is inf or nan, or else a loss that is, of a step
    since the last report.

    A loss that was so at a step before this report has made every weight so since, unless that step
    was left out: where it began is then not to be seen. One from before the last report was told of
    then; weights that it left so are broken still.
    """
    # >=: a trainer may tell the loss of a report's own step after it
    last = past.reports[-2][0] if len(past.reports) > 1 else 0
    bad = next(((step, loss) for step, loss in past.losses if step >= last and not math.isfinite(loss)), None)
    if bad is not None and bad[0] < past.step:
        place = f"the loss of step {bad[0]}, between reports, so that where it began was not seen (every=1 shows it)"
        return Sighting(place, bad[1], math.inf, bad[0])
    if past.broken:
        name, index = past.broken[0]
        return Sighting(f"{past.place(name, index)} ({name.replace('_', ' ')})", math.nan, math.inf, past.step)
    return None if bad is None else Sighting("the loss", bad[1], math.inf, bad[0])


def half_range(past: Past, limits: Limits) -> Sighting | None:
    """A state of float16 whose largest entry comes near the end of its range."""
    return grows("largest")(past, limits) if past.half else None


def probed(name: str) -> PastCheck:
    """What the last probe found, above `limit`."""

    def check(past: Past, limits: Limits) -> Sighting | None:
        found = [(step, figures[name]) for step, figures in past.probes if name in figures]
        if not found or not found[-1][1] > limits["limit"]:
            return None
        return Sighting("the loss at the held batch", found[-1][1], limits["limit"], found[-1][0])

    return check


def over_first(values: Array, past: Past, name: str) -> Array:
    """Values over those of the first report."""
    first = np.asarray(past.first[name], dtype=float).reshape(1, -1)
    with np.errstate(all="ignore"):
        ratios: Array = values / first
        return ratios


def median_by_depth(values: Array, past: Past) -> Array:
    """The median sublayer's value in the place of each: what a rule says of it is of the model and
    of no sublayer.
    """
    with np.errstate(all="ignore"):
        found: Array = np.repeat(_medians(values), values.shape[1], 1)
        return found


def _medians(values: Array) -> Array:
    """The median of each report's figures that are numbers, as a column; nan where none is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # what all-nan rows are warned of is what is asked for
        found: Array = np.nanmedian(values, 1, keepdims=True)
    return found


def _values(past: Past, name: str, transform: Callable[[Array, Past], Array] | None) -> tuple[Array, Array]:
    steps, values = past.of(name)
    return steps, values if transform is None or not len(steps) else transform(values, past)


def _since(steps: Array, outside: NDArray[np.bool_]) -> int:
    """The first step of the last stretch in which it was outside."""
    inside = np.flatnonzero(~outside)
    return int(steps[min(len(steps) - 1, inside[-1] + 1 if len(inside) else 0)])
