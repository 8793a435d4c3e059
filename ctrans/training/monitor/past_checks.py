"""How alarms judge the past of a training: a figure outside of a limit or growing towards one, a
spike, a difference by depth, a layer that stands still.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

from ctrans.training.monitor.past import Array, Past, Trend, trend
from ctrans.training.monitor.sightings import (
    Limits,
    PastCheck,
    Sighting,
    Transform,
    medians,
    places_outside,
    seen_at,
    values_of,
)

REPORTS_AROUND = 5
"""Reports of which a median loss is taken."""


def beyond(name: str, transform: Transform | None = None, *, below: bool = False) -> PastCheck:
    """A value above `limit` (or below it) in each of the last `reports` reports, at the worst
    place.
    """

    def check(past: Past, limits: Limits) -> Sighting | None:
        _, values = values_of(past, name, transform)
        if below:
            outside = values < limits["limit"]
        else:
            outside = values > limits["limit"]
        places = places_outside(outside, limits)
        if not len(places):
            return None
        last = values[-1, places]
        if below:
            worst = int(places[np.argmin(last)])
        else:
            worst = int(places[np.argmax(last)])
        return seen_at(past, name, worst, values, limits["limit"], outside, below=below)

    return check


def grows(name: str, transform: Transform | None = None) -> PastCheck:
    """A value above `limit`, or above `low` and on its way there.

    On its way means: a line fits the logarithms of the last `window` reports with R^2 of at least
    `fit`, and passes the limit within `ahead` times the steps of these reports.
    """

    def check(past: Past, limits: Limits) -> Sighting | None:
        steps, values = values_of(past, name, transform)
        is_high = values > limits["low"]
        window = int(limits.get("window", 6))
        sightings: list[Sighting] = []
        for index in range(values.shape[1]):
            line = values[-window:, index]
            value = float(values[-1, index])
            if not is_high[-1, index]:
                continue
            growth = Trend(0.0, 0.0)
            if len(line) >= min(window, 4):
                growth = trend(steps[-window:], line)
            crossing = growth.crossing(past.step, value, limits["limit"])
            horizon = limits.get("ahead", 4.0) * (steps[-1] - steps[-len(line)])
            is_near = crossing - past.step <= horizon
            if value >= limits["limit"] or (is_near and growth.fit >= limits.get("fit", 0.8)):
                sighting = seen_at(past, name, index, values, limits["limit"], is_high)
                sightings.append(
                    dataclasses.replace(sighting, doubling=growth.doubling, crossing=crossing)
                )
        if not sightings:
            return None
        return min(sightings, key=lambda sighting: (sighting.crossing, -sighting.value))

    return check


def spike(
    series: Iterable[tuple[int, float]], limits: Limits, place: str, *, additive: bool = False
) -> Sighting | None:
    """The largest spike of the last `recent` ones of (step, value) pairs.

    A spike is larger than `factor` times the median m of the `window` values before it. With
    `additive` it is larger than m + factor d, where d = 1.48 median |value - m|, at least `floor`.
    """
    pairs = list(series)
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
    products = costates[-count:, :] * sizes[-count:, :]
    if np.isnan(products[:, -1]).any():
        products = products[:, :-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = products[:, 0] / products[:, -1]
    if exploding:
        outside = ratios > limits["limit"]
    else:
        outside = ratios < limits["limit"]
    if not outside.all():
        return None
    return Sighting(
        "from the last state to the first",
        float(ratios[-1]),
        limits["limit"],
        int(steps[-count]),
        below=not exploding,
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
                values = values / medians(values)
        outside = values < limit
        places = places_outside(outside, limits)
        if len(places):
            return seen_at(past, name, int(places[0]), values, limit, outside, below=True)
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
        ratios /= medians(ratios)
    outside = ratios > limits["limit"]
    places = places_outside(outside, limits)
    if not len(places):
        return None
    worst = int(places[np.argmax(ratios[-1, places])])
    return seen_at(past, "velocity", worst, ratios, limits["limit"], outside)


def collapsed(past: Past, limits: Limits) -> Sighting | None:
    """A router that uses its experts less evenly than it did: below `share` of its median of the
    `least` or more reports before. Or one that never began to: below `limit`, where its largest
    value was at most `low` times its least. Each in the last `reports` reports.
    """
    _, values = past.of("routing")
    before = values[: -int(limits["reports"])]
    if len(before) < limits["least"]:
        return None
    with np.errstate(all="ignore"):
        fell = values < limits["share"] * np.median(before, 0)
        stayed = (values < limits["limit"]) & (values.max(0) <= limits["low"] * values.min(0))
    outside = fell | stayed
    places = places_outside(outside, limits)
    if not len(places):
        return None
    worst = int(places[np.argmin(values[-1, places])])
    limit = max(limits["limit"], limits["share"] * float(np.median(before[:, worst])))
    return seen_at(past, "routing", worst, values, limit, outside, below=True)


def ended(past: Past, limits: Limits) -> Sighting | None:
    """The learning rate of the last `reports` reports is below `share` of the largest before."""
    _, rates = past.of("learning_rate")
    count = int(limits["reports"])
    before = rates[:-count]
    if not len(before):
        return None
    limit = limits["share"] * float(before.max())
    if not (rates[-count:] < limit).all():
        return None
    return Sighting("the optimizer", float(rates[-1, 0]), limit, past.step, below=True)


def frozen(past: Past, limits: Limits) -> Sighting | None:
    """A sublayer with a matrix that the steps do not change, where at most a share of `share` of
    the sublayers has one: more of them are frozen on purpose.
    """
    _, values = past.of("unmoved")
    still = values > 0
    places = places_outside(still, limits)
    if not len(places) or len(places) > limits["share"] * values.shape[1]:
        return None
    worst = int(places[np.argmax(values[-1, places])])
    return seen_at(past, "unmoved", worst, values, 0.0, still)


def still(past: Past, limits: Limits) -> Sighting | None:
    """No weight changes, inside of the depth or outside, in each of the last `reports` reports. A
    scaler or a reaction skips single steps.
    """
    _, updates = past.of("update")
    _, updates_outside = past.of("update_outside")
    count = int(limits["reports"])
    if len(updates) < count or np.nan_to_num(updates[-count:]).any():
        return None
    if not len(updates_outside) or updates_outside[-count:].any():
        return None
    return Sighting("all weights", 0.0, 0.0, past.step, below=True)


def slow(past: Past, limits: Limits) -> Sighting | None:
    """The difference of the median sublayer's update and its weight decay, over its learning rate,
    below `limit` in each of the last `reports` reports with a rate above 0, in a training with
    Adam's moments.

    A step that moves no weight at all was skipped, by a scaler or a reaction: none of these may be.
    """
    _, rates = past.of("learning_rate")
    _, updates = past.of("update")
    _, updates_outside = past.of("update_outside")
    _, rate_shares = past.of("rate_share")
    _, decay_shares = past.of("decay_share")
    adam_steps, _ = past.of("adam_gradient_ratio")
    count = int(limits["reports"])
    if min(len(rates), len(updates), len(rate_shares)) < count or not len(adam_steps):
        return None
    if updates.shape[1] != rate_shares.shape[1] or not (rates[-count:] > 0).all():
        return None
    moved = np.nan_to_num(updates[-count:]).max(1) > 0
    if len(updates_outside) >= count:
        moved |= updates_outside[-count:, 0] > 0
    if not moved.all():
        return None
    expected = rate_shares[-count:]
    if decay_shares.shape == rate_shares.shape:
        decay = decay_shares[-count:]
    else:
        decay = 0.0 * expected
    # unknown where the rate is 0, or where decay is most of a step
    with np.errstate(divide="ignore", invalid="ignore"):
        known_share = np.where(expected > 2 * decay, expected, np.nan)
        shares = medians(np.abs(updates[-count:] / rates[-count:] - decay) / known_share)
    if not (shares < limits["limit"]).all():
        return None
    return Sighting(
        "the median sublayer", float(shares[-1, 0]), limits["limit"], past.step, below=True
    )


def leak(past: Past, limits: Limits) -> Sighting | None:
    """In each of the last `reports` reports: a model whose attention reads later tokens names the
    next token more often than its own, by `margin`; or a causal one names its own token at a share
    above `limit`, with a loss below half of log V. (Tied weights do so before a training too.)

    A model of hidden tokens reads later ones and names its own token: this is no leak. Nor is
    anything known of a model of which nobody knows whether a head reads later tokens.
    """
    _, ahead = past.of("ahead")
    _, copied = past.of("copied")
    _, foreseen = past.of("foreseen")
    count = int(limits["reports"])
    if min(len(ahead), len(copied)) < count:
        return None
    if (ahead[-1] > limits["reads"]).any():
        name = "foreseen"
        shares = foreseen
        limit = copied + limits["margin"]
    elif np.isnan(ahead[-1]).any():
        return None
    else:
        half_of_guessing = 0.5 * math.log(max(2, past.vocabulary))
        if not past.losses or not past.losses[-1][1] < half_of_guessing:
            return None
        name = "copied"
        shares = copied
        limit = np.full_like(copied, limits["limit"])
    if not (shares[-count:] > limit[-count:]).all():
        return None
    return seen_at(past, name, 0, shares, float(limit[-1, 0]), shares > limit)


def not_finite(past: Past, limits: Limits) -> Sighting | None:
    """The first inf or nan: of a loss between the last report and this one, of a gauge in the order
    of a pass, or of this step's loss.

    After a loss that is not finite all weights are nan, unless that step was skipped, so the gauges
    no longer show where it began. An earlier loss belongs to the report before.
    """
    if len(past.reports) > 1:
        last_report = past.reports[-2][0]
    else:
        last_report = 0
    # >=: a trainer may give the loss of a report's own step after the report
    bad_losses = [
        (step, loss)
        for step, loss in past.losses
        if step >= last_report and not math.isfinite(loss)
    ]
    if bad_losses:
        step, loss = bad_losses[0]
        if step < past.step:
            where = (
                f"the loss of step {step}, between reports, so the gauges do not show where it"
                " began (use every=1)"
            )
            return Sighting(where, loss, math.inf, step)
    if past.broken:
        name, index = past.broken[0]
        where = f"{past.place(name, index)} ({name.replace('_', ' ')})"
        return Sighting(where, math.nan, math.inf, past.step)
    if bad_losses:
        return Sighting("the loss", loss, math.inf, step)
    return None


def half_range(past: Past, limits: Limits) -> Sighting | None:
    """A state in float16 whose largest entry grows towards the end of its range."""
    if past.half:
        return grows("largest")(past, limits)
    return None


def probed(name: str) -> PastCheck:
    """A figure of the last probe above `limit`."""

    def check(past: Past, limits: Limits) -> Sighting | None:
        pairs = [(step, figures[name]) for step, figures in past.probes if name in figures]
        if not pairs:
            return None
        step, value = pairs[-1]
        if not value > limits["limit"]:
            return None
        return Sighting("the loss at the held batch", value, limits["limit"], step)

    return check


def held_loss_rises(past: Past, limits: Limits) -> Sighting | None:
    """The loss at the held batch above its least one by `limit` nats in the last `probes` probes,
    while the loss of the training fell.
    """
    pairs = [
        (step, figures["held_loss"]) for step, figures in past.probes if "held_loss" in figures
    ]
    count = int(limits["probes"])
    if len(pairs) <= count:
        return None
    recent = pairs[-count:]
    least_step, least = min(pairs[:-count], key=lambda pair: pair[1])
    limit = least + limits["limit"]
    if not all(value > limit for _, value in recent):
        return None
    steps, losses = past.of("loss")
    before = losses[steps <= least_step][-REPORTS_AROUND:]
    after = losses[steps > least_step][-REPORTS_AROUND:]
    if not len(before) or not len(after) or not np.median(after) < np.median(before):
        return None
    step, value = recent[-1]
    return Sighting("the loss at the held batch", value, limit, step)


def over_first(values: Array, past: Past, name: str) -> Array:
    """Values over those of the first report."""
    with np.errstate(all="ignore"):
        ratios: Array = values / np.asarray(past.first[name], dtype=float).reshape(1, -1)
    return ratios


def median_by_depth(values: Array, past: Past) -> Array:
    """The median sublayer's value at each place, for a check of the model as a whole."""
    with np.errstate(all="ignore"):
        return np.repeat(medians(values), values.shape[1], 1)
