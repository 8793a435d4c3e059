"""Outcomes of all runs of a case: the largest stable learning rate, the sensitivity to the learning
rate, and the best loss.

Let l(eta) be the validation loss at the end of a run with learning rate eta, l_0 the loss before
its first step, and l* the best loss of the case. With l(eta) = l_0 for a run without a finite end
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ctrans.study.finished import Finished, FinishedRuns, finite
from ctrans.study.training import FAILED

ByCase = dict[str, dict[str, list[Any]]]
"""By case, an axis and what is known at each of its places, as by `spread`."""
BY_FLOOR = "depthless floor"
BY_SHARE = "share of the gain"
RULES = {
    BY_FLOOR: "the mean loss is nearer to the best one than to that of a model without depth",
    BY_SHARE: "every seed kept at least nine tenths of what the best rate gained",
}
"""When a learning rate is stable, by rule."""
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean,
    "lowest": min,
    "highest": max,
}
"""What a spread has of the values at a place."""
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
RISES = 1.0
STAYS = 100
"""A run has diverged whose loss is so many nats above its lowest one for so many steps."""
DIVERGED = (
    f"its loss is not finite, or is {RISES:g} nat above its lowest one for {STAYS} steps, or is"
    " never below that of token frequencies"
)
"""The rule of `has_diverged`, in words."""


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

    def capped(loss: float) -> float:
        if loss < math.inf:
            return min(loss, floor.guess)
        return floor.guess

    means = {rate: fmean(map(capped, ends[rate])) for rate in sorted(ends) if ends[rate]}
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
    cases: dict[str, list[Finished]] = {}
    for run in runs:
        cases.setdefault(run.run.case, []).append(run)
    return cases


def end_loss(run: Finished) -> float:
    """min(l, l_0); l_0 for a run without a finite end; nan if it is unknown, as for a run that
    failed.
    """
    if run.result.ending == FAILED:
        return math.nan
    first = math.nan
    if run.first is not None:
        first = run.first
    if run.last is None:
        return first
    return min(run.last, first)


def training_losses(run: Finished) -> list[float]:
    """The training losses of all steps, nan where one is not finite."""
    losses = [finite(row.get("loss")) for row in run.result.curve if "loss" in row]
    return [math.nan if loss is None else loss for loss in losses]


def has_diverged(run: Finished) -> bool | None:
    """Whether a run diverged, by the rule `DIVERGED`; None for a run that failed."""
    if run.result.ending == FAILED:
        return None
    if run.last is None or run.best is None:
        return run.result.ending == "diverged"
    never_learned = run.best >= run.result.environment.get("frequencies_loss", math.inf)
    return never_learned or _stays_above(training_losses(run))


def _stays_above(losses: Sequence[float]) -> bool:
    """Whether for `STAYS` steps in a row the loss is more than `RISES` above its lowest one before
    them.
    """
    lowest = math.inf
    above = 0
    for loss in losses:
        if loss <= lowest + RISES:
            lowest = min(lowest, loss)
            above = 0
        else:
            above += 1
        if above >= STAYS:
            return True
    return False


def by_rate(runs: FinishedRuns) -> dict[float, list[Finished]]:
    """The runs of each learning rate, ascending."""
    rates = sorted({run.run.training.learning_rate for run in runs})
    return {rate: [run for run in runs if run.run.training.learning_rate == rate] for rate in rates}


def spread(axis: str, values: Mapping[Any, Sequence[float]]) -> dict[str, list[Any]]:
    """The mean, the lowest and the highest value at each place of an axis."""
    along = {
        name: [statistic(at_place) for at_place in values.values()]
        for name, statistic in STATISTICS.items()
    }
    return {axis: list(values), **along}


def losses(runs: FinishedRuns) -> ByCase:
    """For each case, its learning rates, ascending, and the mean, lowest and highest min(l, l_0)
    over seeds.
    """
    spreads = {}
    for case, runs_of_case in by_case(runs).items():
        ends = {
            rate: [end_loss(run) for run in runs_at_rate]
            for rate, runs_at_rate in by_rate(runs_of_case).items()
        }
        spreads[case] = spread("rates", ends)
    return spreads


def curves(runs: FinishedRuns) -> ByCase:
    """For each case with one learning rate, iterations and the validation losses of its runs. A run
    that ended without a finite loss has its first one from there on.
    """
    spreads = {}
    for case, runs_of_case in by_case(runs).items():
        if len(by_rate(runs_of_case)) != 1:
            continue
        losses = [
            {row["step"]: finite(row["validation_loss"]) for row in run.result.evaluations}
            for run in runs_of_case
        ]
        by_step: dict[int, list[float]] = {}
        for step in sorted({step for of_run in losses for step in of_run}):
            for run, of_run in zip(runs_of_case, losses, strict=True):
                loss = of_run.get(step)
                if loss is None and run.last is None and step > _last_finite(of_run):
                    loss = run.first
                if loss is not None:
                    by_step.setdefault(step, []).append(loss)
        spreads[case] = spread("steps", by_step)
    return spreads


def _last_finite(losses: Mapping[int, float | None]) -> int:
    """The last step with a finite loss; -1 without one."""
    return max((step for step, loss in losses.items() if loss is not None), default=-1)


def states(runs: FinishedRuns) -> ByCase:
    """For each case whose runs measured moments, segments and the mean |X| behind each of them over
    the trained models.
    """
    spreads = {}
    for case, runs_of_case in by_case(runs).items():
        measured = [run.result.trained.get("after", {}).get("moments") for run in runs_of_case]
        sizes = [moments["mean_abs"] for moments in measured if isinstance(moments, dict)]
        if sizes:
            spreads[case] = spread("segments", dict(enumerate(zip(*sizes, strict=True))))
    return spreads


def stable_rate(runs: FinishedRuns, floor: Floor) -> StableRate:
    """`rate_by_floor` of the runs of one case. None if one failed, whose loss is unknown, or with
    one rate.
    """
    failed = [run for run in runs if run.result.ending == FAILED]
    if failed:
        return StableRate(None, reason=f"{len(failed)} of {len(runs)} runs failed")
    rates = by_rate(runs)
    if len(rates) < 2:
        return StableRate(None, reason="it has one learning rate")
    ends: dict[float, list[float]] = {rate: [] for rate in rates}
    for rate, runs_at_rate in rates.items():
        for run in runs_at_rate:
            if run.last is None:
                ends[rate].append(math.nan)
            else:
                ends[rate].append(run.last)
    return rate_by_floor(ends, floor)


def case_outcomes(runs: FinishedRuns, floor: Floor | None = None) -> dict[str, float | None]:
    """The outcomes of the runs of one case. The largest stable rate is None if no rate is known to
    be stable. With a `floor`, `at least` is 1 if it is the largest rate that was tried.
    """
    if floor is None:
        return _by_share(runs)
    stable = stable_rate(runs, floor)
    return {
        **_by_share(runs),
        "largest stable learning rate": stable.rate,
        "at least": float(stable.at_least),
    }


def _by_share(runs: FinishedRuns) -> dict[str, float | None]:
    rates = by_rate(runs)
    means = {}
    for rate, runs_at_rate in rates.items():
        mean = fmean(map(end_loss, runs_at_rate))
        if not math.isnan(mean):
            means[rate] = mean
    outcomes: dict[str, float | None] = {
        "runs": float(len(runs)),
        "diverged": float(sum(bool(has_diverged(run)) for run in runs)),
        "failed": float(sum(run.result.ending == "failed" for run in runs)),
        "seconds": math.fsum(run.result.seconds for run in runs),
    }
    if not means:
        return outcomes
    best_rate = min(means, key=means.__getitem__)
    best = means[best_rate]
    first = fmean(run.first for run in runs if run.first is not None)
    sensitivity = None
    if len(means) > 1:
        sensitivity = fmean(min(mean, first) - best for mean in means.values())
    largest_stable = None
    if best < first and len(rates) > 1:
        most = best + SHARE * (first - best)
        for rate in rates:
            if rate < best_rate:
                continue
            if not all(run.last is not None and end_loss(run) <= most for run in rates[rate]):
                break
            largest_stable = rate
    return {
        **outcomes,
        "best loss": best,
        "best learning rate": best_rate,
        "sensitivity": sensitivity,
        "largest stable learning rate": largest_stable,
    }


def outcomes_of(
    runs: FinishedRuns, floor: Floor | None = None
) -> dict[str, dict[str, float | None]]:
    """`case_outcomes` of each case."""
    return {
        case: case_outcomes(runs_of_case, floor) for case, runs_of_case in by_case(runs).items()
    }


def stable_rule(runs: FinishedRuns, floor: Floor | None) -> dict[str, Any]:
    """The rule of the largest stable rates, its floor, and why cases have none by that rule."""
    if floor is None:
        return {"rule": BY_SHARE, "missing": {}, "depthless_loss": None, "guess_loss": None}
    rates = {case: stable_rate(runs_of_case, floor) for case, runs_of_case in by_case(runs).items()}
    return {
        "rule": BY_FLOOR,
        "missing": {case: stable.reason for case, stable in rates.items() if stable.rate is None},
        "depthless_loss": floor.depth,
        "guess_loss": floor.guess,
    }
