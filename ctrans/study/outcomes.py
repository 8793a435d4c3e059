"""Outcomes of all runs of a case: the largest stable learning rate, the sensitivity to the learning
rate, and the best loss.

Let l(eta) be the validation loss at the end of a run with learning rate eta, l_0 the loss before
its first step, and l* the best loss of the case. With l(eta) = l_0 for a run that diverged
(Wortsman et al., arXiv 2309.14322, section 2):

    sensitivity = mean over eta of min(l(eta), l_0) - l*.

A rate is stable if all its runs finished at min(l, l_0) <= l* + SHARE (l_0 - l*). The largest
stable rate is the end of the unbroken row of stable rates from the best rate upwards. A case with
one rate has neither figure.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ctrans.study.database import Finished
from ctrans.study.training import FAILED

SHARE = 0.1
"""The share of the best run's gain that a stable run may miss."""
LEARNED = 0.1
"""The best run of a case must end this number of nats below the loss of token frequencies.
Otherwise its losses and rates mean nothing.
"""


def by_case(runs: Sequence[Finished]) -> dict[str, list[Finished]]:
    """The runs of each case."""
    found: dict[str, list[Finished]] = {}
    for run in runs:
        found.setdefault(run.run.case, []).append(run)
    return found


def end_loss(run: Finished) -> float:
    """min(l, l_0); l_0 for a run that diverged; nan if it is unknown, as for a run that failed."""
    if run.result.ending == FAILED:
        return math.nan
    first = math.nan if run.first is None else run.first
    return first if run.last is None else min(run.last, first)


def by_rate(runs: Sequence[Finished]) -> dict[float, list[Finished]]:
    """The runs of each learning rate, ascending."""
    rates = sorted({run.run.training.learning_rate for run in runs})
    return {rate: [run for run in runs if run.run.training.learning_rate == rate] for rate in rates}


def spread(axis: str, values: Mapping[Any, Sequence[float]]) -> dict[str, list[Any]]:
    """The mean, the lowest and the highest value at each place of an axis."""
    return {
        axis: list(values),
        "mean": [statistics.fmean(each) for each in values.values()],
        "lowest": [min(each) for each in values.values()],
        "highest": [max(each) for each in values.values()],
    }


def losses(runs: Sequence[Finished]) -> dict[str, dict[str, list[Any]]]:
    """For each case, its learning rates, ascending, and the mean, lowest and highest min(l, l_0)
    over seeds.
    """
    return {
        case: spread("rates", {rate: list(map(end_loss, same)) for rate, same in by_rate(each).items()})
        for case, each in by_case(runs).items()
    }


def curves(runs: Sequence[Finished]) -> dict[str, dict[str, list[Any]]]:
    """For each case with one learning rate, iterations and the validation losses of its runs."""
    found = {}
    for case, each in by_case(runs).items():
        at: dict[int, list[float]] = {}
        for row in (row for run in each for row in run.result.evaluations if isinstance(row["validation_loss"], float)):
            at.setdefault(row["step"], []).append(row["validation_loss"])
        if len(by_rate(each)) == 1:
            found[case] = spread("steps", dict(sorted(at.items())))
    return found


def states(runs: Sequence[Finished]) -> dict[str, dict[str, list[Any]]]:
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


def case_outcomes(runs: Sequence[Finished]) -> dict[str, float | None]:
    """The outcomes of the runs of one case. The largest stable rate is None if no rate is known to
    be stable.
    """
    rates = by_rate(runs)
    means = {rate: statistics.fmean(map(end_loss, each)) for rate, each in rates.items()}
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
    first = statistics.fmean(run.first for run in runs if run.first is not None)
    row = (rate for rate in rates if rate >= best_rate)
    stable = list(itertools.takewhile(lambda rate: _stable(rates[rate], best, first), row))
    return {
        **found,
        "best loss": best,
        "best learning rate": best_rate,
        "sensitivity": statistics.fmean(min(mean, first) - best for mean in known.values()) if len(known) > 1 else None,
        "largest stable learning rate": stable[-1] if stable and best < first and len(rates) > 1 else None,
    }


def _stable(runs: Sequence[Finished], best: float, first: float) -> bool:
    return all(run.last is not None and end_loss(run) <= best + SHARE * (first - best) for run in runs)


def outcomes_of(runs: Sequence[Finished]) -> dict[str, dict[str, float | None]]:
    """`case_outcomes` of each case."""
    return {case: case_outcomes(each) for case, each in by_case(runs).items()}
