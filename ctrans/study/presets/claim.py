"""A claim as differences that must be positive, and its verdict by one rule.

Each `Contrast` is an effect with one value a seed. Over the seeds it has a mean and a bootstrap interval (95%). An effect holds if the
interval lies above 0, is refuted if it lies below, and is open otherwise, as where neither of two placements diverges. The claim is
*reproduced* if all its effects hold, *not reproduced* if one is refuted, *undecided at this scale* otherwise; with fewer than
`LEAST_SEEDS` seeds it is undecided in any case.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ctrans.study.bootstrap import mean_interval
from ctrans.study.presets.figures import FIGURES
from ctrans.study.store import Finished

LEAST_SEEDS = 3
REPRODUCED, NOT_REPRODUCED, UNDECIDED = "reproduced", "not reproduced", "undecided at this scale"


def _sensitivity(values: Sequence[float]) -> float:
    return statistics.fmean(values) - min(values)


OVER: dict[str, Callable[[Sequence[float]], float]] = {"mean": statistics.fmean, "best": min, "sensitivity": _sensitivity}
"""How the figures of runs with one seed (learning rates, and what else varies) become one."""


@dataclasses.dataclass(frozen=True)
class Contrast:
    """sign (figure of `more` - figure of `less` - beyond), which the claim says is positive.

    `more` and `less` say which runs: fields of the model or the training, and their values; `less` None is 0. `sign` -1 is for "at
    most".
    """

    says: str
    figure: str
    more: Mapping[str, Any]
    less: Mapping[str, Any] | None = None
    beyond: float = 0.0
    over: str = "mean"
    sign: int = 1

    def by_seed(self, runs: Sequence[Finished]) -> dict[int, float]:
        """The effect by seed, of the seeds for which it is known."""
        found = {}
        for seed in sorted({run.run.training.seed for run in runs}):
            mine = [run for run in runs if run.run.training.seed == seed]
            more = self._value(mine, self.more)
            less = 0.0 if self.less is None else self._value(mine, self.less)
            if more is not None and less is not None:
                found[seed] = self.sign * (more - less - self.beyond)
        return found

    def _value(self, runs: Sequence[Finished], wanted: Mapping[str, Any]) -> float | None:
        _, figure = FIGURES[self.figure]
        values = [value for run in runs if _is(run, wanted) and (value := figure(run)) is not None]
        return OVER[self.over](values) if values else None


def _is(run: Finished, wanted: Mapping[str, Any]) -> bool:
    return all(getattr(run.run.model, name, getattr(run.run.training, name, None)) == value for name, value in wanted.items())


@dataclasses.dataclass(frozen=True)
class Effect:
    """What was measured of a contrast: over how many seeds, mean and interval, and whether it holds; None is open."""

    says: str
    figure: str
    seeds: int
    mean: float
    low: float
    high: float

    @property
    def holds(self) -> bool | None:
        """By the rule above."""
        if math.isnan(self.mean):
            return None
        return True if self.low > 0 else False if self.high < 0 else None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A claim, its source, what was measured and the verdict."""

    claim: str
    source: str
    verdict: str
    effects: list[Effect]
    notes: str


def effect(contrast: Contrast, runs: Sequence[Finished]) -> Effect:
    """The contrast over the seeds of these runs."""
    values = list(contrast.by_seed(runs).values())
    low, high = mean_interval(values)
    return Effect(contrast.says, contrast.figure, len(values), statistics.fmean(values) if values else math.nan, low, high)


def judge(claim: str, source: str, contrasts: Sequence[Contrast], runs: Sequence[Finished], notes: str = "") -> Verdict:
    """The verdict of these runs."""
    effects = [effect(contrast, runs) for contrast in contrasts]
    held = [each.holds if each.seeds >= LEAST_SEEDS else None for each in effects]
    verdict = REPRODUCED if all(held) else NOT_REPRODUCED if any(each is False for each in held) else UNDECIDED
    return Verdict(claim, source, verdict, effects, notes)
