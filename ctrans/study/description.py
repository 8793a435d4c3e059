"""A study: a base configuration, the fields that vary, learning rates and seeds; and its runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields
from typing import Any

from ctrans.base.option import LARGEST, POSITIVE, SEED, SMALLEST, Range
from ctrans.model.config import GPTConfig
from ctrans.study.measures import STUDIED
from ctrans.study.run_key import PLUGINS, run_key
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
        return run_key(
            asdict(self.model), asdict(self.training), fingerprint, self.measure, PLUGINS["digest"]
        )


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
    - `measure`: names of `ctrans.study.measures.STUDIED`, measured of each model before and after
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
        self._check_fields("base", self.base)
        self._check_fields("vary", self.vary)
        for i, case in enumerate(self.cases):
            self._check_fields(f"case {i}", case)
        for name, values in self.vary.items():
            _check_list(name, values)
        _check_list("learning_rates", self.learning_rates)
        _check_list("seeds", self.seeds)
        in_cases = {name for case in self.cases for name in case}
        # without a list of learning rates the base's one counts; seeds always have a list
        _check_has_no_list("base", {"seed"} & self.base.keys())
        _check_has_no_list("vary", self.vary.keys() & {*OWN})
        _check_has_no_list("cases", in_cases & {*OWN})
        twice = in_cases & self.vary.keys()
        if twice:
            raise ConfigError(f"{min(twice)} varies in cases and in vary: leave one of them out")
        if not isinstance(self.measure, (list, tuple)):
            raise ConfigError(f"measure = {self.measure!r}: give a list of names")
        for name in self.measure:
            look_up("measure", name, STUDIED)
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

    def _check_fields(self, where: str, settings: Mapping[str, Any]) -> None:
        """Raises ConfigError for an unknown field, and for one that the task fixes."""
        for name in settings:
            if name not in MODEL | TRAINING:
                raise unknown(f"field in {where}", name, MODEL | TRAINING)
        if self.task is None:
            return
        fixed = settings.keys() & self.task.architecture.keys()
        if fixed:
            raise ConfigError(
                f"task {self.source['task']} fixes {min(fixed)}: leave it out of {where}"
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
        usual: Mapping[str, Any] = {}
        fixed: Mapping[str, Any] = {}
        if self.task is not None:
            usual = self.task.settings
            fixed = self.task.architecture
        grid = [
            dict(zip(self.vary, values, strict=True))
            for values in itertools.product(*self.vary.values())
        ]
        runs = []
        for case, point in itertools.product(self.cases or ({},), grid):
            varied = {**case, **point}
            settings = {**usual, **self.base, **varied, **fixed}
            model = GPTConfig(**{name: value for name, value in settings.items() if name in MODEL})
            training = TrainConfig(
                **{name: value for name, value in settings.items() if name in TRAINING}
            )
            for rate, seed in itertools.product(rates, self.seeds):
                own_training = dataclasses.replace(training, learning_rate=float(rate), seed=seed)
                runs.append(PlannedRun(model, own_training, varied, tuple(self.measure)))
        return runs

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
    needs = {
        (run.model.context, run.model.vocab_size, run.training.batch * run.training.accumulate)
        for run in study.runs()
    }
    for context, vocabulary, sequences in needs:
        data[context].check_batch(sequences)
        data[context].check_vocabulary(vocabulary)


def _check_has_no_list(where: str, names: Set[str]) -> None:
    """Raises ConfigError if there are names: those of fields that have a list of their own."""
    if names:
        name = min(names)
        raise ConfigError(f"{name} in {where}: give the list {name}s in its place")


def _check_list(name: str, values: object) -> None:
    if not isinstance(values, (list, tuple)):
        raise ConfigError(f"{name} = {values!r}: give a list of values")
    if not values and name != "learning_rates":
        raise ConfigError(f"{name} is empty: give at least one value")
    if len(set(map(_comparable, values))) < len(values):
        raise ConfigError(f"{name} = {list(values)} has a value twice: give each once")
    for value in values:
        if name == "seeds":
            SEED.check("a value of seeds", value, whole=True)
        if name == "learning_rates":
            POSITIVE.check("a value of learning_rates", value)


def _comparable(value: object) -> object:
    """A number itself, anything else as JSON: 1 equals 1.0, True does not."""
    if type(value) in (int, float):
        return value
    return json.dumps(value, sort_keys=True)
