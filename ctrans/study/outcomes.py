"""Outcomes of all runs of a case: the largest stable learning rate, the sensitivity to the learning
rate, and the best loss.

Let l(eta) be the validation loss at the end of a run with learning rate eta, l_0 the loss before
its first step, and l* the best loss of the case. With l(eta) = l_0 for a run that diverged
(Wortsman et al., arXiv 2309.14322, section 2):

    sensitivity = mean over eta of min(l(eta), l_0) - l*.

The largest stable rate has one of two rules (`RULES`). By the depthless floor F: going up from the
best rate, the rate at which the mean loss crosses (l* + F)/2 (`rate_by_floor`). Without a floor, by
the share of the gain: a rate is stable if all its runs finished at min(l, l_0) <= l* + SHARE (l_0 -
l*). The largest one is the end of the unbroken row of stable rates from the best rate upwards. A
case with one rate has neither figure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ctrans.study.database import Finished, FinishedRuns
from ctrans.study.training import FAILED

ByCase = dict[str, dict[str, list[Any]]]
"""By case, an axis and what is known at each of its places, as by `spread`."""
BY_FLOOR, BY_SHARE = "depthless floor", "share of the gain"
RULES = {
    BY_FLOOR: "the mean loss is nearer to the best one than to that of a model without depth",
    BY_SHARE: "every seed kept at least nine tenths of what the best rate gained",
}
"""When a learning rate is stable, by rule."""
DEEPER = 0.1
"""The share of the depthless floor that the best loss must lie below it. The level between them is
then at least a twentieth of the floor below it. Trained models without depth ended within that: at
most 0.026 of the floor below (text, recall, counting; their best of several rates).
"""
SHARE = 0.1
"""The share of the best run's gain that a stable run may miss."""
LEARNED = 0.1
"""The best run of a case must end this number of nats below the loss of token frequencies.
Otherwise its losses and rates mean nothing.
"""


@dataclass(frozen=True)
class Floor:
    """The mean losses in nats per target of a model without `depth`, and of a `guess` among the
    answers, which is that of no training.
    """

    depth: float
    guess: float


@dataclass(frozen=True)
class StableRate:
    """The largest stable learning rate; None with the `reason`. With `at_least` it is the largest
    rate that was tried, and the true one is higher.
    """

    rate: float | None
    at_least: bool = False
    reason: str = ""


def rate_by_floor(ends: Mapping[float, Sequence[float]], floor: Floor) -> StableRate:
    """The rate, going up from the best one, at which the mean over seeds of min(l, guess) crosses
    (l* + F)/2, linear in log rate. nan and inf count as the guess.

    - `ends`: the losses at the end over seeds, by learning rate
    - `floor`: F and the guess

    l* is the lowest mean. The rate is None if l* > (1 - DEEPER) F.
    """
    means = {
        rate: fmean(
            min(loss, floor.guess) if loss < math.inf else floor.guess for loss in ends[rate]
        )
        for rate in sorted(ends)
        if ends[rate]
    }
    if not means:
        return StableRate(None, reason="no run is done")
    best = min(means.values())
    if best > (1 - DEEPER) * floor.depth:
        return StableRate(
            None,
            reason=(
                f"the best loss {best:.3g} is less than {DEEPER:.0%} below the depthless floor"
                f" {floor.depth:.3g}"
            ),
        )
    level = (best + floor.depth) / 2
    above = list(itertools.dropwhile(lambda point: point[1] > best, means.items()))
    for (low, before), (high, after) in itertools.pairwise(above):
        if after > level:
            return StableRate(low * (high / low) ** ((level - before) / (after - before)))
    return StableRate(above[-1][0], at_least=True)


def by_case(runs: FinishedRuns) -> dict[str, list[Finished]]:
    """The runs of each case."""
    found: dict[str, list[Finished]] = {}
    for run in runs:
        found.setdefault(run.run.case, []).append(run)
    return found


def end_loss(run: Finished) -> float:
    """min(l, l_0); l_0 for a run that diverged; nan if it is unknown, as for a run that failed."""
    if run.result.ending == FAILED:
        return math.nan
    if run.first is None:
        first = math.nan
    else:
        first = run.first
    if run.last is None:
        return first
    return min(run.last, first)


def by_rate(runs: FinishedRuns) -> dict[float, list[Finished]]:
    """The runs of each learning rate, ascending."""
    rates = sorted({run.run.training.learning_rate for run in runs})
    return {rate: [run for run in runs if run.run.training.learning_rate == rate] for rate in rates}


def spread(axis: str, values: Mapping[Any, Sequence[float]]) -> dict[str, list[Any]]:
    """The mean, the lowest and the highest value at each place of an axis."""
    return {
        axis: list(values),
        "mean": [fmean(each) for each in values.values()],
        "lowest": [min(each) for each in values.values()],
        "highest": [max(each) for each in values.values()],
    }


def losses(runs: FinishedRuns) -> ByCase:
    """For each case, its learning rates, ascending, and the mean, lowest and highest min(l, l_0)
    over seeds.
    """
    return {
        case: spread(
            "rates", {rate: list(map(end_loss, same)) for rate, same in by_rate(each).items()}
        )
        for case, each in by_case(runs).items()
    }


def curves(runs: FinishedRuns) -> ByCase:
    """For each case with one learning rate, iterations and the validation losses of its runs."""
    found = {}
    for case, each in by_case(runs).items():
        at: dict[int, list[float]] = {}
        for row in (
            row
            for run in each
            for row in run.result.evaluations
            if isinstance(row["validation_loss"], float)
        ):
            at.setdefault(row["step"], []).append(row["validation_loss"])
        if len(by_rate(each)) == 1:
            found[case] = spread("steps", dict(sorted(at.items())))
    return found


def states(runs: FinishedRuns) -> ByCase:
    """For each case whose runs measured moments, segments and the mean |X| behind each of them over
    the trained models.
    """
    found = {}
    for case, each in by_case(runs).items():
        measured = [run.result.trained.get("after", {}).get("moments") for run in each]
        sizes = [moments["mean_abs"] for moments in measured if isinstance(moments, dict)]
        if sizes:
            found[case] = spread("segments", dict(enumerate(zip(*sizes, strict=True))))
    return found


def stable_rate(runs: FinishedRuns, floor: Floor) -> StableRate:
    """`rate_by_floor` of the runs of one case. None if one failed, whose loss is unknown, or with
    one rate.
    """
    ends = {
        rate: [math.nan if run.last is None else run.last for run in each]
        for rate, each in by_rate(runs).items()
    }
    if failed := sum(run.result.ending == FAILED for run in runs):
        return StableRate(None, reason=f"{failed} of {len(runs)} runs failed")
    if len(ends) > 1:
        return rate_by_floor(ends, floor)
    return StableRate(None, reason="it has one learning rate")


def case_outcomes(runs: FinishedRuns, floor: Floor | None = None) -> dict[str, float | None]:
    """The outcomes of the runs of one case. The largest stable rate is None if no rate is known to
    be stable. With a `floor`, `at least` is 1 if it is the largest rate that was tried.
    """
    if floor is not None:
        found = stable_rate(runs, floor)
        return {
            **_by_share(runs),
            "largest stable learning rate": found.rate,
            "at least": float(found.at_least),
        }
    return _by_share(runs)


def _by_share(runs: FinishedRuns) -> dict[str, float | None]:
    rates = by_rate(runs)
    means = {rate: fmean(map(end_loss, each)) for rate, each in rates.items()}
    known = {rate: mean for rate, mean in means.items() if not math.isnan(mean)}
    found: dict[str, float | None] = {
        "runs": float(len(runs)),
        "diverged": float(sum(run.result.ending == "diverged" for run in runs)),
        "failed": float(sum(run.result.ending == "failed" for run in runs)),
        "seconds": math.fsum(run.result.seconds for run in runs),
    }
    if not known:
        return found
    best_rate = min(known, key=known.__getitem__)
    best = known[best_rate]
    first = fmean(run.first for run in runs if run.first is not None)
    row = (rate for rate in rates if rate >= best_rate)
    most = best + SHARE * (first - best)
    stable = list(
        itertools.takewhile(
            lambda rate: all(run.last is not None and end_loss(run) <= most for run in rates[rate]),
            row,
        )
    )
    return {
        **found,
        "best loss": best,
        "best learning rate": best_rate,
        "sensitivity": (
            fmean(min(mean, first) - best for mean in known.values()) if len(known) > 1 else None
        ),
        "largest stable learning rate": (
            stable[-1] if stable and best < first and len(rates) > 1 else None
        ),
    }


def outcomes_of(
    runs: FinishedRuns, floor: Floor | None = None
) -> dict[str, dict[str, float | None]]:
    """`case_outcomes` of each case."""
    return {case: case_outcomes(each, floor) for case, each in by_case(runs).items()}


def stable_rule(runs: FinishedRuns, floor: Floor | None) -> dict[str, Any]:
    """The rule of the largest stable rates, its floor, and why cases have none by that rule."""
    if floor is None:
        rates = {}
    else:
        rates = {case: stable_rate(each, floor) for case, each in by_case(runs).items()}
    unknown = {case: found.reason for case, found in rates.items() if found.rate is None}
    begins = {"rule": BY_SHARE if floor is None else BY_FLOOR, "unknown": unknown}
    return {**begins, "depthless_loss": floor and floor.depth, "guess_loss": floor and floor.guess}
