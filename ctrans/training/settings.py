"""The settings of a training run, checked when they are made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ctrans.depth import check_count
from ctrans.fields.attention import check_temperature
from ctrans.scheme import Scheme
from ctrans.training.optimiser import OPTIMISERS, make_optimiser
from ctrans.training.schedule import SCHEDULES
from solvers import GRADIENTS, ConfigError
from solvers.errors import look_up, unknown

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""What the maps compute in; weights are float64 with float64, else float32 (bfloat16 is autocast)."""


OF_EXPERTS = ("balance", "router_z", "bias_rate")
"""Settings that only maps of several experts have a use for."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run's weights besides the architecture, the data and the number of threads.

    `batch` counts the sequences of one micro-batch over all processes, of which `accumulate` make an iteration. Learning rate:
    linear over `warmup` iterations (which `schedule`, a name of `SCHEDULES`, says exactly), then a cosine to `min_learning_rate` (a
    tenth if None) at `iterations`. `temperature_start` decays geometrically to the model's own temperature over
    `temperature_steps`. `kinetic` is the lam of lam/2 int |v|^2 dt. `balance` and `router_z` weigh the terms of these names that maps
    of experts have, summed over maps (`MixtureOfExperts.auxiliary`); `bias_rate` is by how much every update of the weights moves
    the biases that balance experts without a loss. `low_rank` is the rank r of updates W + B A of every linear map of a trained
    model's depth, of which alone A and B are trained then; 0 trains all weights.
    Steps, tolerances and `gradient` are those of `solvers.solve`; euler with one step and backprop is the discrete model.
    `decay_gains` makes norms' gains and offsets, and biases, decay like matrices.
    A run has diverged when a loss or gradient is not finite, or when `patience` evaluations in a row lie more than `margin`
    nats above the first. Each field is checked when the object is made: ConfigError names the value and the fix.
    """

    batch: int = 8
    accumulate: int = 1
    iterations: int = 2500
    optimiser: str = "adamw"
    learning_rate: float = 3e-3
    min_learning_rate: float | None = None
    warmup: int = 100
    schedule: str = "cosine"
    weight_decay: float = 0.1
    decay_gains: bool = False
    beta1: float = 0.9
    beta2: float = 0.99
    clip: float = 1.0
    temperature_start: float | None = None
    temperature_steps: int = 0
    kinetic: float = 0.0
    balance: float = 0.01
    router_z: float = 0.001
    bias_rate: float = 0.0
    low_rank: int = 0
    method: str = "euler"
    steps: int = 1
    rtol: float | None = None
    atol: float | None = None
    gradient: str = "backprop"
    dtype: str = "float32"
    compile: bool = False
    eval_every: int = 100
    eval_windows: int = 64
    save_every: int = 100
    theta: bool = False
    margin: float = 1.0
    patience: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "accumulate", "iterations", "eval_every", "eval_windows", "save_every", "patience"):
            check_count(name, getattr(self, name))
        for name in ("warmup", "temperature_steps", "low_rank"):
            _check(name, getattr(self, name), lambda value: whole(value) and value <= 10**9, "a whole number from 0 to 10^9")
        _check("seed", self.seed, lambda value: whole(value) and value < 2**63, "a whole number from 0 to 2^63 - 1")
        for name in ("learning_rate", "clip", "margin"):
            _check(name, getattr(self, name), positive, "a positive finite number")
        for name in ("weight_decay", "kinetic", *OF_EXPERTS):
            _check(name, getattr(self, name), lambda value: value == 0 or positive(value), "a finite number of at least 0")
        for name in ("beta1", "beta2"):
            _check(name, getattr(self, name), lambda value: number(value) and 0 <= value < 1, "a number in [0, 1)")
        for name in ("compile", "theta", "decay_gains"):
            _check(name, getattr(self, name), lambda value: isinstance(value, bool), "True or False")
        low = self.min_learning_rate
        if low is not None:
            _check(
                "min_learning_rate", low, lambda value: number(value) and 0 <= value <= self.learning_rate, "0 to learning_rate"
            )
        look_up("schedule", self.schedule, SCHEDULES)
        look_up("optimiser", self.optimiser, OPTIMISERS)
        look_up("gradient", self.gradient, GRADIENTS)
        look_up("dtype", self.dtype, PRECISIONS)
        self.scheme.check_numbers(self.weight_dtype)
        self._check_temperature()
        if self.compile and GRADIENTS[self.gradient].detached:
            raise ConfigError(
                f"a compiler does not see into gradient {self.gradient!r}: choose {attached_gradients()}, or leave out compile"
            )

    def _check_temperature(self) -> None:
        start, steps = self.temperature_start, self.temperature_steps
        if (start is None) != (steps == 0):
            raise ConfigError(
                f"temperature_start = {start} with temperature_steps = {steps}: a temperature warm-up needs both, or neither"
            )
        if start is None:
            return
        check_temperature(start)
        if self.compile:
            raise ConfigError(
                "a temperature warm-up changes a constant of the compiled model at every step: leave one of them out"
            )

    def make_optimiser(self, parameters: Iterable[nn.Parameter], device: torch.device) -> torch.optim.Optimizer:
        """The optimiser of these settings, at the learning rate that a schedule starts from."""
        return make_optimiser(
            self.optimiser,
            parameters,
            learning_rate=self.learning_rate,
            betas=(self.beta1, self.beta2),
            weight_decay=self.weight_decay,
            decay_gains=self.decay_gains,
            device=device,
        )

    @property
    def weight_dtype(self) -> torch.dtype:
        """The type that weights and optimiser state are kept in."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    @property
    def lowest(self) -> float:
        """The learning rate that the cosine ends at."""
        return self.learning_rate / 10 if self.min_learning_rate is None else self.min_learning_rate

    @property
    def scheme(self) -> Scheme:
        """How the model is integrated."""
        return Scheme(self.method, self.steps, self.rtol, self.atol, self.gradient)


MAY_CHANGE = frozenset(
    {
        *("iterations", "save_every", "eval_every", "eval_windows", "theta", "margin", "patience"),
        *("learning_rate", "min_learning_rate", "warmup", "schedule", "weight_decay", "decay_gains", "clip"),
    }
)
"""What a resumed run may set anew: what leaves the weights alone, and what a run that diverged needs less of."""


def attached_gradients() -> str:
    """The gradient kinds whose passes are the modules' own."""
    return " or ".join(name for name, kind in GRADIENTS.items() if not kind.detached)


def from_saved(settings: Mapping[str, Any]) -> TrainConfig:
    """The settings that a checkpoint holds; ConfigError with the nearest name for an unknown key."""
    check_names(settings)
    return TrainConfig(**settings)


def check_names(given: Iterable[str]) -> None:
    """Raises ConfigError with the nearest name for one that no setting has."""
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    for name in given:
        if name not in names:
            raise unknown("training setting", name, names)


def number(value: object) -> bool:
    """Whether it is an int or float, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def positive(value: Any) -> bool:
    """Whether it is a positive finite number."""
    return number(value) and 0 < value < math.inf


def whole(value: Any) -> bool:
    """Whether it is a whole number of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check(name: str, value: object, holds: Any, wanted: str) -> None:
    if not holds(value):
        raise ConfigError(f"{name} = {value!r}: give {wanted}")
