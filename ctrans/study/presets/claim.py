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
from ctrans.study.finished import Finished, FinishedRuns
from ctrans.study.presets.figures import figure_of
from ctrans.training.settings import TrainConfig

LEAST_SEEDS = 3
REPRODUCED = "reproduced"
NOT_REPRODUCED = "not reproduced"
UNDECIDED = "undecided at this scale"


ModelAndTraining = tuple[GPTConfig, TrainConfig]
"""The settings of a run, without its seed."""
Values = Mapping[ModelAndTraining, float]


def _mean(of_seed: Values, of_other_seeds: Values) -> float:
    return fmean(of_seed.values())


def _best(of_seed: Values, of_other_seeds: Values) -> float:
    """The value of the setting that is best on the other seeds. The lowest value of this seed would
    be too low, by its noise.
    """
    ranking = {name: value for name, value in of_other_seeds.items() if name in of_seed}
    if not ranking:
        ranking = dict(of_seed)
    return of_seed[min(ranking, key=ranking.__getitem__)]


def _sensitivity(of_seed: Values, of_other_seeds: Values) -> float:
    return fmean(of_seed.values()) - min(of_seed.values())


OVER: dict[str, Callable[[Values, Values], float]] = {
    "mean": _mean,
    "best": _best,
    "sensitivity": _sensitivity,
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
        effects = {}
        for seed in sorted({run.run.training.seed for run in runs}):
            more = self._value(runs, self.more, seed)
            less: float | None = 0.0
            if self.less is not None:
                less = self._value(runs, self.less, seed)
            if more is not None and less is not None:
                effects[seed] = self.sign * (more - less - self.beyond)
        return effects

    def _value(self, runs: FinishedRuns, fields: Mapping[str, Any], seed: int) -> float | None:
        """The figure of the runs with these fields for a seed; None without a run that has it."""
        of_seed: dict[ModelAndTraining, float] = {}
        of_other_seeds: dict[ModelAndTraining, list[float]] = {}
        for run in runs:
            if not fields.items() <= {**vars(run.run.training), **vars(run.run.model)}.items():
                continue
            value = figure_of(run, self.figure)
            if value is None:
                continue
            if run.run.training.seed == seed:
                of_seed[_without_seed(run)] = value
            else:
                of_other_seeds.setdefault(_without_seed(run), []).append(value)
        if not of_seed:
            return None
        means = {setting: fmean(values) for setting, values in of_other_seeds.items()}
        return OVER[self.over](of_seed, means)


@dataclass(frozen=True)
class Effect:
    """The result of a contrast: the number of seeds, the mean and the interval of its effect, and
    how many seeds would decide it, were they like these (`rows_to_decide`). `beyond` is the
    contrast's limit, and `difference` the mean of the figure, or of its difference, without it.
    """

    says: str
    figure: str
    seeds: int
    mean: float
    low: float
    high: float
    seeds_to_decide: int | None
    beyond: float = 0.0
    difference: float = math.nan

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
    mean = math.nan
    if values:
        mean = fmean(values)
    return Effect(
        contrast.says,
        contrast.figure,
        len(values),
        mean,
        *mean_interval(values),
        rows_to_decide(values),
        contrast.beyond,
        contrast.sign * mean + contrast.beyond,
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
    best = _best_loss(runs)
    verdict = _verdict(effects)
    if depthless_loss is not None and (best is None or not best < depthless_loss / 2):
        verdict = UNDECIDED
    return Verdict(claim, source, verdict, effects, notes, best, depthless_loss)


def _verdict(effects: Sequence[Effect]) -> str:
    """What the effects say of the claim, whatever the runs learned."""
    with_enough_seeds = [effect for effect in effects if effect.seeds >= LEAST_SEEDS]
    if any(effect.holds is False for effect in with_enough_seeds):
        return NOT_REPRODUCED
    if len(with_enough_seeds) == len(effects) and all(effect.holds for effect in effects):
        return REPRODUCED
    return UNDECIDED


def _best_loss(runs: FinishedRuns) -> float | None:
    losses: dict[ModelAndTraining, list[float]] = {}
    for run in runs:
        loss = figure_of(run, "loss")
        if loss is not None:
            losses.setdefault(_without_seed(run), []).append(loss)
    return min(map(fmean, losses.values()), default=None)


def _without_seed(run: Finished) -> ModelAndTraining:
    return run.run.model, replace(run.run.training, seed=0)
