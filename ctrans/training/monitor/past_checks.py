"""How alarms judge the past of a training: a figure outside of a limit or growing towards one, a
spike, a difference by depth, a layer that stands still.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from ctrans.training.monitor.past import Array, Past, Trend, trend

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


def beyond(name: str, transform: Transform | None = None, *, below: bool = False) -> PastCheck:
    """A value above `limit` (or below it) in each of the last `reports` reports, at the worst
    place.
    """

    def check(past: Past, limits: Limits) -> Sighting | None:
        _, values = _values(past, name, transform)
        if below:
            outside = values < limits["limit"]
        else:
            outside = values > limits["limit"]
        places = _always(outside, limits)
        if not len(places):
            return None
        worst = int(places[int((np.argmin if below else np.argmax)(values[-1, places]))])
        return _seen(past, name, worst, values, limits["limit"], outside, below=below)

    return check


def grows(name: str, transform: Transform | None = None) -> PastCheck:
    """A value above `limit`, or above `low` and on its way there.

    On its way means: a line fits the logarithms of the last `window` reports with R^2 of at least
    `fit`, and passes the limit within `ahead` times the steps of these reports.
    """

    def check(past: Past, limits: Limits) -> Sighting | None:
        steps, values = _values(past, name, transform)
        window = int(limits.get("window", 6))
        found: list[tuple[float, Sighting]] = []
        for place in range(values.shape[1]):
            line = values[-window:, place]
            value = float(values[-1, place])
            if not value > limits["low"]:
                continue
            if len(line) >= min(window, 4):
                run = trend(steps[-window:], line)
            else:
                run = Trend(0.0, 0.0)
            crossing = run.crossing(past.step, value, limits["limit"])
            near = crossing - past.step <= limits.get("ahead", 4.0) * (
                steps[-1] - steps[-len(line)]
            )
            if value >= limits["limit"] or (near and run.fit >= limits.get("fit", 0.8)):
                sighting = _seen(past, name, place, values, limits["limit"], values > limits["low"])
                found.append(
                    (
                        crossing,
                        dataclasses.replace(sighting, doubling=run.doubling, crossing=crossing),
                    )
                )
        if found:
            return min(found, key=lambda each: (each[0], -each[1].value))[1]
        return None

    return check


def spike(
    known: Iterable[tuple[int, float]], limits: Limits, place: str, *, additive: bool = False
) -> Sighting | None:
    """The largest spike of the last `recent` ones of (step, value) pairs.

    A spike is larger than `factor` times the median m of the `window` values before it. With
    `additive` it is larger than m + factor d, where d = 1.48 median |value - m|, at least `floor`.
    """
    pairs = list(known)
    values = [value for _, value in pairs]
    window = int(limits["window"])
    recent = int(limits["recent"])
    least = int(limits.get("least", 5))
    worst: Sighting | None = None
    for end in range(max(least, len(values) - recent), len(values)):
        before = np.array(values[max(0, end - window) : end])
        before = before[np.isfinite(before)]
        if len(before) < least:
            continue
        middle = float(np.median(before))
        deviation = max(1.48 * float(np.median(np.abs(before - middle))), limits.get("floor", 0.0))
        if additive:
            limit = middle + limits["factor"] * deviation
        else:
            limit = limits["factor"] * middle
        if values[end] > limit and (worst is None or values[end] > worst.value):
            worst = Sighting(place, values[end], limit, pairs[end][0])
    return worst


def loss_spike(past: Past, limits: Limits) -> Sighting | None:
    """A spike of the loss, over the deviation of the losses before it."""
    return spike(past.losses, limits, "the loss", additive=True)


def risen(past: Past, limits: Limits) -> Sighting | None:
    """All losses of a stretch up to now, of `recent` to `window` steps, are above each of the
    `window` ones before it.
    """
    pairs = [pair for pair in past.losses if math.isfinite(pair[1])]
    values = [value for _, value in pairs]
    window = int(limits["window"])
    for count in range(int(limits["recent"]), window + 1):
        before = values[-window - count : -count]
        last = values[-count:]
        if len(before) < limits["least"]:
            break
        if min(last) > max(before):
            return Sighting("the loss", min(last), max(before), pairs[-count][0])
    return None


def gradient_spike(past: Past, limits: Limits) -> Sighting | None:
    """A spike of the gradient norms of all steps if they are known, or else of those of reports."""
    steps, values = past.of("gradient_norm")
    reported = [
        (int(step), float(value)) for step, value in zip(steps, values[:, :1].flat, strict=True)
    ]
    return spike(past.norms or reported, limits, "the gradient")


def by_depth(past: Past, limits: Limits, *, exploding: bool) -> Sighting | None:
    """c_0/c_K with c_k = |dL/dX_k||X_k|, above `limit` (or below it) in each of the last `reports`
    reports. If dL/dX_K is not known, K is the last sublayer's input.
    """
    steps, costates = past.of("costate")
    _, sizes = past.of("rms")
    count = int(limits["reports"])
    if len(steps) < count or costates.shape != sizes.shape:
        return None
    known = costates[-count:, :] * sizes[-count:, :]
    if np.isnan(known[:, -1]).any():
        ends = known[:, :-1]
    else:
        ends = known
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = ends[:, 0] / ends[:, -1]
    if not (ratios > limits["limit"] if exploding else ratios < limits["limit"]).all():
        return None
    where = "from the last state to the first"
    return Sighting(
        where, float(ratios[-1]), limits["limit"], int(steps[-count]), below=not exploding
    )


def dead(past: Past, limits: Limits) -> Sighting | None:
    """The first sublayer whose velocity is the same for all tokens up to a share of `same`, or
    whose velocity or gradient is below `limit` times the median sublayer's.
    """
    for name, limit in (
        ("spread", limits["same"]),
        ("velocity", limits["limit"]),
        ("gradient", limits["limit"]),
    ):
        _, values = past.of(name)
        if name != "spread":
            if values.shape[1] < 3:
                continue
            with np.errstate(all="ignore"):
                values = values / _medians(values)
        outside = values < limit
        places = _always(outside, limits)
        if len(places):
            return _seen(past, name, int(places[0]), values, limit, outside, below=True)
    return None


def outgrown(past: Past, limits: Limits) -> Sighting | None:
    """A sublayer's velocity over its median of the reports before, of which there must be `least`,
    over that of the median sublayer: above `limit` in each of the last `reports` reports.
    """
    _, values = past.of("velocity")
    before = values[: -int(limits["reports"])]
    if len(before) < limits["least"]:
        return None
    with np.errstate(all="ignore"):
        ratios = values / np.median(before, 0)
        ratios /= _medians(ratios)
    outside = ratios > limits["limit"]
    places = _always(outside, limits)
    if not len(places):
        return None
    return _seen(
        past,
        "velocity",
        int(places[np.argmax(ratios[-1, places])]),
        ratios,
        limits["limit"],
        outside,
    )


def frozen(past: Past, limits: Limits) -> Sighting | None:
    """A sublayer with a matrix that the steps do not change, where at most a share of `share` of
    the sublayers has one: more of them are frozen on purpose.
    """
    _, values = past.of("unmoved")
    still = values > 0
    places = _always(still, limits)
    if not len(places) or len(places) > limits["share"] * values.shape[1]:
        return None
    return _seen(past, "unmoved", int(places[np.argmax(values[-1, places])]), values, 0.0, still)


def slow(past: Past, limits: Limits) -> Sighting | None:
    """The difference of the median sublayer's update and its weight decay, over its learning rate,
    below `limit` in each of the last `reports` reports with a rate above 0, in a training with
    Adam's moments.

    A step that moves no weight at all was skipped, by a scaler or a reaction: none of these may be.
    """
    names = ("learning_rate", "update", "rate_share", "decay_share")
    (_, rates), (_, values), (_, shares), (_, decays) = map(past.of, names)
    count = int(limits["reports"])
    known = (
        min(len(rates), len(values), len(shares)) >= count and values.shape[1] == shares.shape[1]
    )
    if not known or not len(past.of("adam_gradient_ratio")[0]) or not (rates[-count:] > 0).all():
        return None
    _, outside = past.of("update_outside")
    moved = np.nan_to_num(values[-count:]).max(1) > 0
    if not (moved | (outside[-count:, 0] > 0 if len(outside) >= count else False)).all():
        return None
    if decays.shape == shares.shape:
        decay = decays[-count:]
    else:
        decay = 0.0 * shares[-count:]
    expected = shares[-count:]
    with np.errstate(
        divide="ignore", invalid="ignore"
    ):  # unknown where the rate is 0, or where decay is most of a step
        known_share = np.where(expected > 2 * decay, expected, np.nan)
        shares = _medians(np.abs(values[-count:] / rates[-count:] - decay) / known_share)
    if not (shares < limits["limit"]).all():
        return None
    return Sighting(
        "the median sublayer", float(shares[-1, 0]), limits["limit"], past.step, below=True
    )


def leak(past: Past, limits: Limits) -> Sighting | None:
    """In each of the last `reports` reports: a model whose attention reads later tokens names the
    next token more often than its own, by `margin`; or a causal one names its own token at a share
    above `limit`, with a loss below half of log V. (Tied weights do so before a training too.)

    A model of hidden tokens reads later ones and names its own token: this is no leak.
    """
    (_, ahead), (_, own), (_, following) = (
        past.of(name) for name in ("ahead", "copied", "foreseen")
    )
    count = int(limits["reports"])
    if min(len(ahead), len(own)) < count:
        return None
    reads = ahead[-1].max() > limits["reads"]
    if reads:
        known, limit = (following, own + limits["margin"])
    else:
        known, limit = (own, np.full_like(own, limits["limit"]))
    low = past.losses and past.losses[-1][1] < 0.5 * math.log(max(2, past.vocabulary))
    if not (known[-count:] > limit[-count:]).all() or not (reads or low):
        return None
    return _seen(
        past, "foreseen" if reads else "copied", 0, known, float(limit[-1, 0]), known > limit
    )


def not_finite(past: Past, limits: Limits) -> Sighting | None:
    """The first inf or nan: of a loss between the last report and this one, of a gauge in the order
    of a pass, or of this step's loss.

    After a loss that is not finite all weights are nan, unless that step was skipped, so the gauges
    no longer show where it began. An earlier loss belongs to the report before.
    """
    # >=: a trainer may give the loss of a report's own step after the report
    if len(past.reports) > 1:
        last = past.reports[-2][0]
    else:
        last = 0
    bad = next(
        ((step, loss) for step, loss in past.losses if step >= last and not math.isfinite(loss)),
        None,
    )
    if bad is not None and bad[0] < past.step:
        place = (
            f"the loss of step {bad[0]}, between reports, so the gauges do not show where it began"
            " (use every=1)"
        )
        return Sighting(place, bad[1], math.inf, bad[0])
    if past.broken:
        name, index = past.broken[0]
        return Sighting(
            f"{past.place(name, index)} ({name.replace('_', ' ')})", math.nan, math.inf, past.step
        )
    if bad is None:
        return None
    return Sighting("the loss", bad[1], math.inf, bad[0])


def half_range(past: Past, limits: Limits) -> Sighting | None:
    """A state in float16 whose largest entry grows towards the end of its range."""
    if past.half:
        return grows("largest")(past, limits)
    return None


def probed(name: str) -> PastCheck:
    """A figure of the last probe above `limit`."""

    def check(past: Past, limits: Limits) -> Sighting | None:
        found = [(step, figures[name]) for step, figures in past.probes if name in figures]
        if not found or not found[-1][1] > limits["limit"]:
            return None
        return Sighting("the loss at the held batch", found[-1][1], limits["limit"], found[-1][0])

    return check


def over_first(values: Array, past: Past, name: str) -> Array:
    """Values over those of the first report."""
    with np.errstate(all="ignore"):
        ratios: Array = values / np.asarray(past.first[name], dtype=float).reshape(1, -1)
    return ratios


def median_by_depth(values: Array, past: Past) -> Array:
    """The median sublayer's value at each place, for a check of the model as a whole."""
    with np.errstate(all="ignore"):
        return np.repeat(_medians(values), values.shape[1], 1)


def _medians(values: Array) -> Array:
    """The median over places of each report as a column, without nan; nan if there is nothing
    else.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy warns of rows of nan
        return np.nanmedian(values, 1, keepdims=True)


def _values(past: Past, name: str, transform: Transform | None) -> tuple[Array, Array]:
    steps, values = past.of(name)
    return steps, values if transform is None or not len(steps) else transform(values, past)


def _always(outside: NDArray[np.bool_], limits: Limits) -> NDArray[np.intp]:
    """The places that are outside in each of the last `reports` reports; none of fewer reports."""
    count = int(limits.get("reports", 1))
    return np.flatnonzero(outside[-count:].all(0) & (len(outside) >= count))


def _seen(
    past: Past,
    name: str,
    place: int,
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
    inside = np.flatnonzero(~outside[:, place])
    since = int(steps[min(len(steps) - 1, inside[-1] + 1 if len(inside) else 0)])
    return Sighting(past.place(name, place), float(values[-1, place]), limit, since, below=below)
