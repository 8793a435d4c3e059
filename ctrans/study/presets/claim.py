"""A claim as effects that must be positive, and its verdict.

Each `Contrast` is an effect with one value per seed, a mean over seeds and a 95% interval
(`mean_interval`). An effect holds if the interval lies above 0, is refuted if it lies below, and is
open otherwise. The claim is *reproduced* if all its effects hold, *not reproduced* if one is
refuted, and *undecided at this scale* otherwise. So it is with fewer than `LEAST_SEEDS` seeds, and
where depth taught too little: of a task whose loss can be 0, the best case must end below half of
the loss of a model without depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from ctrans.model.config import GPTConfig
from ctrans.study.bootstrap import mean_interval, rows_to_decide
from ctrans.study.database import FinishedRuns
from ctrans.study.presets.figures import FIGURES
from ctrans.training.settings import TrainConfig

LEAST_SEEDS = 3
REPRODUCED, NOT_REPRODUCED, UNDECIDED = "reproduced", "not reproduced", "undecided at this scale"


ModelAndTraining = tuple[GPTConfig, TrainConfig]
"""The settings of a run, without its seed."""
Values = Mapping[ModelAndTraining, float]


def _best(mine: Values, others: Values) -> float:
    """The value of the setting that is best on the other seeds. The lowest value of this seed would
    be too low, by its noise.
    """
    known = {setting: value for setting, value in others.items() if setting in mine} or mine
    return mine[min(known, key=known.__getitem__)]


OVER: dict[str, Callable[[Values, Values], float]] = {
    "mean": lambda mine, others: fmean(mine.values()),
    "best": _best,
    "sensitivity": lambda mine, others: fmean(mine.values()) - min(mine.values()),
}
"""How the figures of a seed become one: functions of this seed's values by setting (learning rate
and varied fields), and of the means of other seeds.
"""


@dataclass(frozen=True)
class Contrast:
    """The effect sign (figure of `more` - figure of `less` - beyond), which is positive if the
    claim holds.

    `more` and `less` select runs by fields of the model or the training; for `less` None the figure
    is 0. `sign` is -1 for "at most".
    """

    says: str
    more: Mapping[str, Any]
    less: Mapping[str, Any] | None = None
    figure: str = "loss"
    beyond: float = 0.0
    over: str = "mean"
    sign: int = 1

    def by_seed(self, runs: FinishedRuns) -> dict[int, float]:
        """The effect for each seed for which it is known."""
        found = {}
        for seed in sorted({run.run.training.seed for run in runs}):
            more = self._value(runs, self.more, seed)
            less = 0.0 if self.less is None else self._value(runs, self.less, seed)
            if more is not None and less is not None:
                found[seed] = self.sign * (more - less - self.beyond)
        return found

    def _value(self, runs: FinishedRuns, wanted: Mapping[str, Any], seed: int) -> float | None:
        figure = FIGURES[self.figure]
        mine: dict[ModelAndTraining, float] = {}
        others: dict[ModelAndTraining, list[float]] = {}
        for run in runs:
            settings = {**vars(run.run.training), **vars(run.run.model)}
            if wanted.items() <= settings.items() and (value := figure(run)) is not None:
                setting = run.run.model, replace(run.run.training, seed=0)
                if run.run.training.seed == seed:
                    mine[setting] = value
                else:
                    others.setdefault(setting, []).append(value)
        means = {setting: fmean(values) for setting, values in others.items()}
        if mine:
            return OVER[self.over](mine, means)
        return None


@dataclass(frozen=True)
class Effect:
    """The result of a contrast: the number of seeds, the mean and the interval of its effect, and
    how many seeds would decide it, were they like these (`rows_to_decide`).
    """

    says: str
    figure: str
    seeds: int
    mean: float
    low: float
    high: float
    seeds_to_decide: int | None

    @property
    def holds(self) -> bool | None:
        """Whether the effect holds; None if it is open."""
        if math.isnan(self.mean):
            return None
        if self.low > 0:
            return True
        if self.high < 0:
            return False
        return None


@dataclass(frozen=True)
class Verdict:
    """A claim, its source, its effects and the verdict.

    - `best_loss`: the lowest mean over seeds of a setting's loss at the end
    - `depthless_loss`: the loss that it must halve, None for a text
    """

    claim: str
    source: str
    verdict: str
    effects: list[Effect]
    notes: str
    best_loss: float | None
    depthless_loss: float | None


def effect(contrast: Contrast, runs: FinishedRuns) -> Effect:
    """The contrast over the seeds of these runs."""
    values = list(contrast.by_seed(runs).values())
    if values:
        mean = fmean(values)
    else:
        mean = math.nan
    return Effect(
        contrast.says,
        contrast.figure,
        len(values),
        mean,
        *mean_interval(values),
        rows_to_decide(values),
    )


def judge(
    claim: str,
    source: str,
    contrasts: Sequence[Contrast],
    runs: FinishedRuns,
    notes: str = "",
    depthless_loss: float | None = None,
) -> Verdict:
    """The verdict of these runs, on a task with this loss of a model without depth."""
    effects = [effect(contrast, runs) for contrast in contrasts]
    held = [each.holds if each.seeds >= LEAST_SEEDS else None for each in effects]
    best = _best_loss(runs)
    learned = depthless_loss is None or (best is not None and best < depthless_loss / 2)
    if all(held):
        verdict = REPRODUCED
    elif any(each is False for each in held):
        verdict = NOT_REPRODUCED
    else:
        verdict = UNDECIDED
    return Verdict(
        claim, source, verdict if learned else UNDECIDED, effects, notes, best, depthless_loss
    )


def _best_loss(runs: FinishedRuns) -> float | None:
    losses: dict[ModelAndTraining, list[float]] = {}
    for run in runs:
        if (loss := FIGURES["loss"](run)) is not None:
            losses.setdefault((run.run.model, replace(run.run.training, seed=0)), []).append(loss)
    return min((fmean(each) for each in losses.values()), default=None)
