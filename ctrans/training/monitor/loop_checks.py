"""How alarms judge what a loop does: its targets, its batches, and its optimiser."""

from __future__ import annotations

import numpy as np

from ctrans.training.monitor.past import Array, Past
from ctrans.training.monitor.past_checks import beyond
from ctrans.training.monitor.sightings import Limits, PastCheck, Sighting

THE_TARGETS = "the targets"
THE_BATCH = "the batch"


def last_of(past: Past, name: str, count: float) -> Array | None:
    """The last `count` values of a figure of the run; None if there are fewer."""
    _, values = past.of(name)
    if len(values) < count:
        return None
    last: Array = values[-int(count) :, 0]
    return last


def raised(past: Past, limits: Limits) -> Sighting | None:
    """All targets have the same weight below 0, in what the optimiser lowers, in each of the last
    `reports` reports. Weights that differ are those of a policy gradient, or of rejected answers
    beside chosen ones.
    """
    is_raised = last_of(past, "raised_targets", limits["reports"])
    weights = last_of(past, "target_weight", limits["reports"])
    if is_raised is None or weights is None or not (is_raised == 1).all():
        return None
    return Sighting(THE_TARGETS, float(weights[-1]), 0.0, past.step, below=True)


def not_divided(past: Past, limits: Limits) -> Sighting | None:
    """In each of the last `reports` reports several backward passes, whose targets together weigh
    more than `limit`, and at most as much as there are passes.
    """
    weights = last_of(past, "target_weight", limits["reports"])
    passes = last_of(past, "backward_passes", limits["reports"])
    if weights is None or passes is None:
        return None
    if not ((weights > limits["limit"]) & (weights <= 1.02 * passes) & (passes > 1)).all():
        return None
    return Sighting(THE_TARGETS, float(weights[-1]), 1.0, past.step)


def shifted(past: Past, limits: Limits) -> Sighting | None:
    """The targets of the last `reports` reports are not the next tokens."""
    ahead = last_of(past, "target_ahead", limits["reports"])
    if ahead is None or (ahead != ahead[-1]).any() or ahead[-1] == 1:
        return None
    return Sighting(THE_TARGETS, float(ahead[-1]), np.inf, past.step)


def guessing(past: Past, limits: Limits) -> Sighting | None:
    """In the last `reports` reports, the last of them behind `steps` steps, the loss is nowhere
    `margin` nats below that of guessing, nor in all together `deviations` standard deviations below
    that of exchanged targets. Not while the learning rate still rises.
    """
    over = last_of(past, "over_guessing", limits["reports"])
    deviations = last_of(past, "exchanged_targets", limits["reports"])
    rates = last_of(past, "learning_rate", limits["reports"])
    if over is None or deviations is None or past.step < limits["steps"]:
        return None
    if rates is not None and (np.diff(rates) > 0).all():
        return None
    if not (over > -limits["margin"]).all() or not _together(deviations) > -limits["deviations"]:
        return None
    return Sighting(THE_TARGETS, float(over[-1]), -limits["margin"], past.step)


def unrelated(past: Past, limits: Limits) -> Sighting | None:
    """The loss is that of exchanged targets in the last `reports` reports, the last of them behind
    `steps` steps: it is not `deviations` standard deviations below, in none of them nor in all
    together. It must be below that of guessing, or nothing is learned at all.
    """
    deviations = last_of(past, "exchanged_targets", limits["reports"])
    over = last_of(past, "over_guessing", limits["reports"])
    if deviations is None or over is None or past.step < limits["steps"]:
        return None
    if not min(deviations.min(), _together(deviations)) > -limits["deviations"]:
        return None
    if not (over < -limits["margin"]).all():
        return None
    return Sighting(THE_TARGETS, float(deviations[-1]), -limits["deviations"], past.step)


def _together(deviations: Array) -> float:
    """The deviations of several batches as one number of variance 1."""
    return float(deviations.sum() / np.sqrt(len(deviations)))


def unlike(past: Past, limits: Limits) -> Sighting | None:
    """The tokens of the last `reports` batches are unlike those before. Of the `least` or more
    reports before they lie above the median m by `deviations` d, where d = 1.48 median |value - m|
    as in `past_checks.spike`, and by `nats`, and they lie above all of them but the first `early`.
    """
    _, values = past.of("unlike_before")
    count = int(limits["reports"])
    before = values[:-count]
    if len(before) < limits["least"]:
        return None
    middle = float(np.median(before))
    deviation = 1.48 * float(np.median(np.abs(before - middle)))
    limit = middle + max(limits["deviations"] * deviation, limits["nats"])
    limit = max(limit, float(before[int(limits["early"]) :].max()))
    if not (values[-count:] > limit).all():
        return None
    return Sighting(THE_BATCH, float(values[-1, 0]), limit, past.step)


def ungrouped(past: Past, limits: Limits) -> Sighting | None:
    """A sublayer with matrices that are in no group of the optimiser and do not move, in each of
    the last `reports` reports. Not if that is so of all sublayers and other weights move: then a
    head is trained alone.
    """
    sighting = beyond("ungrouped")(past, limits)
    if sighting is None:
        return None
    _, values = past.of("ungrouped")
    _, outside = past.of("update_outside")
    if (values[-1] == 1).all() and len(outside) and outside[-1].any():
        return None
    count = int((values[-1] > 0).sum())
    place = f"{sighting.place}, and {count - 1} more of {values.shape[1]} sublayers"
    if count == 1:
        place = sighting.place
    return Sighting(place, sighting.value, sighting.limit, sighting.since)


def decayed(past: Past, limits: Limits) -> Sighting | None:
    """In the reports that are kept, weight decay alone takes the share `decay` of a gain, and the
    median gain has fallen to less than `share`, not much further than by the decay. Gains that
    begin below `size` count from 0, and not from 1.
    """
    steps, shares = past.of("gain_decay")
    _, sizes = past.of("gain_size")
    if len(steps) < 2 or len(sizes) != len(steps) or not sizes[0, 0] >= limits["size"]:
        return None
    exponent = float((shares[:-1, 0] * np.diff(steps)).sum())
    left = float(sizes[-1, 0] / sizes[0, 0])
    if np.exp(-exponent) > 1 - limits["decay"] or not np.exp(-2 * exponent) < left:
        return None
    if left >= limits["share"]:
        return None
    return Sighting("the gains", left, limits["share"], past.step, below=True)


def forgotten(past: Past, limits: Limits) -> Sighting | None:
    """The optimiser has counted less than `share` of the steps of this run: at the first report of
    a run that goes on from a step above `steps`, or behind one at which it had counted `known`.
    """
    _, values = past.of("optimizer_steps")
    if not len(values) or not values[-1, 0] < limits["share"]:
        return None
    if len(values) > 1:
        knew = values[-2, 0] > limits["known"]
    else:
        knew = bool(past.losses) and past.losses[0][0] > limits["steps"]
    if not knew:
        return None
    return Sighting("the optimizer", float(values[-1, 0]), limits["share"], past.step, below=True)


def median_beyond(name: str) -> PastCheck:
    """The median place's value above `limit` in each of the last `reports` reports."""

    def check(past: Past, limits: Limits) -> Sighting | None:
        _, values = past.of(name)
        count = int(limits["reports"])
        if len(values) < count:
            return None
        medians = np.median(np.nan_to_num(values), 1)
        if not (medians[-count:] > limits["limit"]).all():
            return None
        return Sighting("the median sublayer", float(medians[-1]), limits["limit"], past.step)

    return check
