"""A study: a base configuration, the fields that vary, learning rates and seeds; and its runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ctrans.base.option import LARGEST, POSITIVE, SEED, SMALLEST, Range
from ctrans.model.config import GPTConfig
from ctrans.study.measures import MEASURES
from ctrans.study.run_key import run_key
from ctrans.training.data import Data
from ctrans.training.data_sources import Source
from ctrans.training.settings import TrainConfig
from ctrans.training.tasks import TASKS, Task
from solvers import ConfigError, look_up, unknown

MODEL = frozenset(field.name for field in fields(GPTConfig))
TRAINING = frozenset(field.name for field in fields(TrainConfig))
OWN = ("learning_rate", "seed")
"""Settings of which a study has lists, as `learning_rates` and `seeds`."""
HOURS = Range(SMALLEST, LARGEST, "a positive number of processor hours")
MOST_RUNS = 100_000
"""The largest number of runs of a study. A larger one is a mistake in a grid."""


@dataclass(frozen=True)
class PlannedRun:
    """One training of a study.

    - `varied`: the fields that vary, besides learning rate and seed
    - `measure`: the measures of the model before and after its training
    """

    model: GPTConfig
    training: TrainConfig
    varied: Mapping[str, Any]
    measure: tuple[str, ...] = ()

    @property
    def case(self) -> str:
        """`varied` as one text: the runs of a case differ in learning rate and seed."""
        return json.dumps(dict(self.varied), sort_keys=True)

    def key(self, fingerprint: str) -> str:
        """A hash of all that determines the result, with the data (see `ctrans.study.run_key`)."""
        return run_key(asdict(self.model), asdict(self.training), fingerprint, self.measure)


@dataclass(frozen=True)
class Study:
    """A base configuration and the fields that vary. Raises ConfigError with the value and the fix
    for an invalid one.

    - `name`: of letters, digits, - and _
    - `base`: fields of `GPTConfig` and of `TrainConfig`; all others have their defaults
    - `vary`: lists of values of some fields. Each combination is a case
    - `cases`: cases one by one, each with values of some fields. With `vary`, each case has all
      combinations
    - `learning_rates`, `seeds`: each case is trained with each of both. A seed is that of the
      weights and the batches
    - `measure`: names of `ctrans.study.measures.MEASURES`, measured of each model before and after
      its training
    - `budget`: hours of processor time after which no further run begins; None is no limit
    - `source`: where the data are, as `ctrans.training.data_sources.Source` has it. {"task": name}
      is one of `TASKS`, which brings fields of the architecture, that the study then leaves out,
      and settings, that `base` may replace
    """

    name: str
    base: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    vary: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    cases: Sequence[Mapping[str, Any]] = ()
    learning_rates: Sequence[float] = ()
    seeds: Sequence[int] = (0,)
    measure: Sequence[str] = ()
    budget: float | None = None
    source: Source = dataclasses.field(default_factory=lambda: {"file": None, "bin": None})

    def __post_init__(self) -> None:
        if not self.name or not all(letter.isalnum() or letter in "-_" for letter in self.name):
            raise ConfigError(f"name = {self.name!r}: give a word of letters, digits, - and _")
        for where, given in (
            ("base", self.base),
            ("vary", self.vary),
            *((f"case {i}", c) for i, c in enumerate(self.cases)),
        ):
            for name in given:
                if name not in MODEL | TRAINING:
                    raise unknown(f"field in {where}", name, MODEL | TRAINING)
            if self.task is not None and (brought := given.keys() & self.task.architecture.keys()):
                raise ConfigError(
                    f"task {self.source['task']} fixes {min(brought)}: leave it out of {where}"
                )
        for name, values in (
            *self.vary.items(),
            ("learning_rates", self.learning_rates),
            ("seeds", self.seeds),
        ):
            _check_list(name, values)
        # without a list of learning rates the base's one counts; seeds always have a list
        for name, each, taken in (
            ("base", [self.base], {"seed"}),
            ("vary", [self.vary], {*OWN}),
            ("cases", self.cases, {*OWN}),
        ):
            again = {key for given in each for key in given} & taken
            if again:
                raise ConfigError(
                    f"{min(again)} in {name}: give the list {min(again)}s in its place"
                )
        both = {key for case in self.cases for key in case} & self.vary.keys()
        if both:
            raise ConfigError(f"{min(both)} varies in cases and in vary: leave one of them out")
        if not isinstance(self.measure, (list, tuple)):
            raise ConfigError(f"measure = {self.measure!r}: give a list of names")
        for name in self.measure:
            look_up("measure", name, MEASURES)
        if self.budget is not None:
            HOURS.check("budget", self.budget, hint=", or leave it out")
        if self.count > MOST_RUNS:
            raise ConfigError(f"{self.count:,} runs: give at most {MOST_RUNS:,}, by shorter lists")
        runs = self.runs()
        if len({(run.model, run.training) for run in runs}) < len(runs):
            raise ConfigError(
                f"two cases of {self.name} have the same runs: leave out one of them, or the fields"
                " that make no difference"
            )

    @property
    def count(self) -> int:
        """The number of runs."""
        lists = (
            *self.vary.values(),
            self.cases or (None,),
            self.learning_rates or (None,),
            self.seeds,
        )
        return math.prod(map(len, lists))

    def runs(self) -> list[PlannedRun]:
        """All runs: by case, then by learning rate, then by seed. Raises ConfigError for an invalid
        configuration.
        """
        rates = self.learning_rates or (self.base.get("learning_rate", TrainConfig.learning_rate),)
        brought, usual = (
            ({}, {}) if self.task is None else (self.task.architecture, self.task.settings)
        )
        made = []
        grid = [
            dict(zip(self.vary, values, strict=True))
            for values in itertools.product(*self.vary.values())
        ]
        for case, point in itertools.product(self.cases or ({},), grid):
            varied = {**case, **point}
            settings = {**usual, **self.base, **varied, **brought}
            model = GPTConfig(**{name: value for name, value in settings.items() if name in MODEL})
            training = TrainConfig(
                **{name: value for name, value in settings.items() if name in TRAINING}
            )
            made += [
                PlannedRun(
                    model,
                    dataclasses.replace(training, learning_rate=float(rate), seed=seed),
                    varied,
                    tuple(self.measure),
                )
                for rate in rates
                for seed in self.seeds
            ]
        return made

    @property
    def task(self) -> Task | None:
        """The task of its source, None for a text. Raises ConfigError for an unknown task."""
        name = self.source.get("task")
        if name is None:
            return None
        return look_up("task", name, TASKS)


def check_data(study: Study, data: Mapping[int, Data]) -> None:
    """Raises ConfigError if the data, by context, are too few for a run, or have tokens outside of
    its vocabulary.
    """
    for context, vocabulary, sequences in {
        (each.model.context, each.model.vocab_size, each.training.batch * each.training.accumulate)
        for each in study.runs()
    }:
        data[context].check_batch(sequences)
        data[context].check_vocabulary(vocabulary)


def _check_list(name: str, values: object) -> None:
    if not isinstance(values, (list, tuple)):
        raise ConfigError(f"{name} = {values!r}: give a list of values")
    if not values and name != "learning_rates":
        raise ConfigError(f"{name} is empty: give at least one value")
    # numbers by their value: 1 equals 1.0, True does not
    if len(
        {
            value if type(value) in (int, float) else json.dumps(value, sort_keys=True)
            for value in values
        }
    ) < len(values):
        raise ConfigError(f"{name} = {list(values)} has a value twice: give each once")
    if name in ("learning_rates", "seeds"):
        if name == "seeds":
            limits = SEED
        else:
            limits = POSITIVE
        for value in values:
            limits.check(f"a value of {name}", value, whole=limits is SEED)
