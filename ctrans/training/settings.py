"""The settings of a training run, checked when they are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ctrans.base.option import (
    BELOW_ONE,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    Range,
    check_options,
    option,
)
from ctrans.dynamics.fields.attention import check_temperature
from ctrans.dynamics.residual import RESIDUALS
from ctrans.dynamics.scheme import METHOD_WORDS, Scheme
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.parametrisation import STANDARD, WeightGroup
from ctrans.training.layerwise import EPS, LayerwiseMaximisation
from ctrans.training.optimiser import OPTIMISERS
from solvers import GRADIENTS, ConfigError, shown, unknown
from solvers.methods import get_method

SCHEDULES: dict[str, Callable[[float, int, int], float]] = {
    "cosine": lambda peak, s, warmup: peak * (s + 1) / warmup,
    "nanogpt": lambda peak, s, warmup: peak * (s + 1) / (warmup + 1),
    "nanogpt-0": lambda peak, s, warmup: peak * s / warmup,
}
"""The learning rate in the warm-up, from its peak, the step from 0 and the number of warm-up steps.

- "cosine": reaches the peak at the last step of the warm-up
- "nanogpt": reaches the peak one step later
- "nanogpt-0": starts at 0, as the first versions of nanoGPT and the OT-Transformer do
"""
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""The dtype of computations. Weights are float64 with float64, else float32 (bfloat16 is autocast).
"""

ITERATIONS = Range(0, 10**9, "a whole number from 0 to 10^9")
OF_EXPERTS = ("balance", "router_z", "bias_rate")
"""Settings that only a mixture of experts uses."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The settings of a training: with the architecture, the data and the number of threads, they
    determine the weights.

    Each field is an option of `ctrans train`. Raises ConfigError with the value and the fix for an
    invalid one. The learning rate grows over `warmup` iterations (see `SCHEDULES`), then falls as a
    cosine to `min_learning_rate` at `iterations`. `temperature_start` decays geometrically to the
    model's temperature. Steps, tolerances and `gradient` are those of `solvers.solve`; euler with
    one step and backprop is the discrete model. A run has diverged when a loss or gradient is not
    finite, or when `patience` evaluations in a row lie more than `margin` nats above the first.
    """

    option_group: ClassVar[str] = "Training"

    batch: int = option(8, "Sequences of a micro-batch, over all processes.", limits=COUNT)
    accumulate: int = option(1, "Micro-batches of an iteration.", limits=COUNT)
    iterations: int = option(2500, "Updates of the weights.", limits=COUNT)
    optimiser: str = option(
        "adamw",
        "The optimiser. msa maximises the augmented Hamiltonian of each sublayer (E-MSA).",
        choices=OPTIMISERS,
    )
    learning_rate: float = option(3e-3, "Peak of the learning rate.", limits=POSITIVE)
    min_learning_rate: float | None = option(
        None, "Learning rate at the end of the cosine.", default_words="a tenth of the peak"
    )
    warmup: int = option(
        100, "Iterations in which the learning rate grows linearly.", limits=ITERATIONS
    )
    schedule: str = option(
        "cosine",
        "How the learning rate grows. nanoGPT's first of w steps is 1/(w + 1) of the peak, ours"
        " 1/w.",
        choices=SCHEDULES,
    )
    weight_decay: float = option(
        0.1, "Weight decay of matrices; with --decay-gains of all weights.", limits=NOT_NEGATIVE
    )
    decay_gains: bool = option(
        False,
        "Apply weight decay to gains and offsets of norms and to biases, too. A finite H behind an"
        " output norm needs it.",
    )
    beta1: float = option(
        0.9, "Decay of the first moment, or the momentum of sgd.", limits=BELOW_ONE
    )
    beta2: float = option(0.99, "Decay of the second moment.", limits=BELOW_ONE)
    clip: float = option(1.0, "Largest norm of the gradient.", limits=POSITIVE)
    temperature_start: float | None = option(
        None, "Attention's temperature at the start. It decays to --temperature."
    )
    temperature_steps: int = option(0, "Iterations of that decay.", limits=ITERATIONS)
    kinetic: float = option(
        0.0, "Weight lam of the running cost lam/2 int |v|^2 dt.", limits=NOT_NEGATIVE
    )
    balance: float = option(
        0.01,
        "Weight of the load-balancing loss of a mixture of experts, summed over FFNs.",
        limits=NOT_NEGATIVE,
    )
    router_z: float = option(
        0.001, "Weight of the router's z-loss, summed over FFNs.", limits=NOT_NEGATIVE
    )
    bias_rate: float = option(
        0.0,
        "How much each update moves the biases that balance experts without a loss; 0 leaves them.",
        limits=NOT_NEGATIVE,
    )
    low_rank: int = option(
        0,
        "Rank r: train W + B A for each linear map W of the model of --from, with A and B alone; 0"
        " trains all weights.",
        limits=ITERATIONS,
    )
    method: str = option(
        "euler", f"Method of integration: {METHOD_WORDS}.", group="Solver", metavar="NAME"
    )
    steps: int = option(1, "Steps per segment of a fixed-step method.", group="Solver")
    rtol: float | None = option(
        None, "Relative tolerance of an adaptive method.", group="Solver", default_words="1e-6"
    )
    atol: float | None = option(
        None, "Absolute tolerance of an adaptive method.", group="Solver", default_words="1e-8"
    )
    gradient: str = option(
        "backprop", "How gradients are computed.", group="Solver", choices=GRADIENTS
    )
    dtype: str = option(
        "float32", "Type of the numbers. bfloat16 is autocast.", group="Solver", choices=PRECISIONS
    )
    compile: bool = option(False, "Compile the model.", group="Solver")
    eval_every: int = option(100, "Iterations between validation losses.", limits=COUNT)
    eval_windows: int = option(
        64, "Validation sequences, evenly spaced, always the same.", limits=COUNT
    )
    save_every: int = option(
        100, "Iterations between checkpoints. The best is always kept.", limits=COUNT
    )
    theta: bool = option(
        False, "Measure attention's balanced-mass factor with every validation loss."
    )
    margin: float = option(
        1.0,
        "Nats above the first validation loss from which a run counts as diverging.",
        limits=POSITIVE,
    )
    patience: int = option(3, "Validation losses in a row above it that end the run.", limits=COUNT)
    seed: int = option(0, "Seed of the weights and the batches.", group="Weights", limits=SEED)

    def __post_init__(self) -> None:
        check_options(self)
        low = self.min_learning_rate
        if low is not None:
            Range(0, self.learning_rate, "0 to learning_rate").check("min_learning_rate", low)
        # fields compute in this dtype, and the error estimate has its rounding
        self.scheme.check_numbers(PRECISIONS[self.dtype])
        start = self.temperature_start
        steps = self.temperature_steps
        if (start is None) != (steps == 0):
            raise ConfigError(
                f"temperature_start = {shown(start)} with temperature_steps = {steps}: a"
                " temperature warm-up needs both, or neither"
            )
        if start is not None:
            check_temperature(start)
        if start is not None and self.compile:
            raise ConfigError(
                "a temperature warm-up changes a constant of the compiled model at each step: leave"
                " out one of them"
            )
        if OPTIMISERS[self.optimiser].layerwise:
            self._check_layerwise()
        if self.compile and GRADIENTS[self.gradient].detached:
            raise ConfigError(
                f"gradient {self.gradient!r} cannot be compiled: choose {attached_gradients()}, or"
                " leave out compile"
            )
        if self.compile and getattr(get_method(self.method), "implicit", False):
            raise ConfigError(
                f"method {self.method!r} differentiates each field twice, and a compiled one has"
                " first derivatives only: choose an explicit method, as tsit5, or leave out compile"
            )

    def _check_layerwise(self) -> None:
        """Raises ConfigError for what an optimiser of sublayers cannot work with: it needs one pass
        of the discrete model, which it can repeat.
        """
        clashes = {
            "accumulate 1": self.accumulate != 1,
            "method euler with one step, and gradient backprop": not self.scheme.evaluates_once,
            "kinetic 0": self.kinetic != 0,
            "dtype float32 or float64": self.dtype == "bfloat16",
            "low_rank 0": self.low_rank != 0,
            "no compile": self.compile,
        }
        for needed, clashing in clashes.items():
            if clashing:
                raise ConfigError(
                    f"optimiser {self.optimiser!r} looks at each sublayer of one pass of the"
                    f" discrete model: choose {needed}, or another optimiser"
                )

    def make_optimiser(
        self, parameters: Iterable[nn.Parameter], *, model: GPT | None = None
    ) -> torch.optim.Optimizer:
        """The optimiser of these settings for the parameters that need a gradient, at the peak
        learning rate. Muon and parametrisations need the `model`. A group whose rate they scale has
        the key "scale".

        Matrices decay. Vectors (gains, offsets, biases) decay with `decay_gains` only. Behind an
        output norm only decay of the gains bounds the velocity: the norm removes the scale of the
        matrices before it.
        """
        optimiser = OPTIMISERS[self.optimiser]
        if optimiser.layerwise:
            _check_layerwise_model(self.optimiser, model)
        if optimiser.orthogonal and model is None:
            raise ConfigError(
                f"optimiser {self.optimiser!r} treats the matrices of a GPT's depth apart: give the"
                " model, or choose adamw"
            )
        scaled: GPTConfig | None = None
        inside_depth = set[int]()
        if model is not None and (optimiser.orthogonal or model.config.parametrisation != STANDARD):
            scaled = model.config
            inside_depth = {id(p) for p in model.depth.parameters()}
        members: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for p in parameters:
            if p.requires_grad:
                is_vector = p.dim() < 2
                members.setdefault((is_vector, id(p) in inside_depth), []).append(p)
        groups = []
        for is_vector, inside in sorted(members):
            decays = self.decay_gains or not is_vector
            group: dict[str, Any] = {
                "params": members[is_vector, inside],
                "weight_decay": self.weight_decay if decays else 0.0,
            }
            if scaled is not None:
                part = _weight_group(is_vector=is_vector, inside=inside)
                rate, eps = scaled.rules.scales(
                    part, scaled.times_wider, scaled.times_deeper, optimiser.steps
                )
                group["weight_decay"] /= rate
                group |= {"scale": rate, "lr": self.learning_rate * rate, "eps": EPS * eps}
                group["orthogonal"] = optimiser.orthogonal and part == "matrices"
            groups.append(group)
        made = optimiser.make(groups, self.learning_rate, (self.beta1, self.beta2))
        if isinstance(made, LayerwiseMaximisation) and model is not None:
            made.attach(model.depth)
        return made

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype of weights and optimiser state."""
        if self.dtype == "float64":
            return torch.float64
        return torch.float32

    @property
    def lowest(self) -> float:
        """The learning rate at the end of the cosine."""
        if self.min_learning_rate is None:
            return self.learning_rate / 10
        return self.min_learning_rate

    @property
    def scheme(self) -> Scheme:
        """How the model is integrated."""
        return Scheme(self.method, self.steps, self.rtol, self.atol, self.gradient)


MAY_CHANGE = frozenset(
    {
        "iterations",
        "save_every",
        "eval_every",
        "eval_windows",
        "theta",
        "margin",
        "patience",
        "learning_rate",
        "min_learning_rate",
        "warmup",
        "schedule",
        "weight_decay",
        "decay_gains",
        "clip",
    }
)
"""The settings that a resumed run may change: those that do not affect weights, and those that help
a run that diverged.
"""


def _weight_group(*, is_vector: bool, inside: bool) -> WeightGroup:
    """The group of a weight in a parametrisation. `inside` is whether it is in the depth."""
    if not inside:
        return "ends"
    if is_vector:
        return "vectors"
    return "matrices"


def _check_layerwise_model(name: str, model: GPT | None) -> None:
    """Raises ConfigError for no model, and for one that an optimiser of sublayers does not fit."""
    if model is None:
        raise ConfigError(
            f"optimiser {name!r} maximises over each sublayer of a GPT: give the model, or choose"
            " adamw"
        )
    if model.config.parametrisation != STANDARD or RESIDUALS[model.config.residual].unit_weights:
        raise ConfigError(
            f"optimiser {name!r} follows no parametrisation and keeps no weight on a sphere: choose"
            f" parametrisation {STANDARD} and another residual than ngpt, or adamw"
        )


def attached_gradients() -> str:
    """The gradient kinds that use the modules' own passes, in words."""
    return " or ".join(name for name, kind in GRADIENTS.items() if not kind.detached)


def from_saved(settings: Mapping[str, Any]) -> TrainConfig:
    """The settings in a checkpoint. Raises ConfigError with the nearest name for an unknown key."""
    check_names(settings)
    return TrainConfig(**settings)


def check_names(
    names: Iterable[str], kind: type = TrainConfig, what: str = "training setting"
) -> None:
    """Raises ConfigError with the nearest name for a name that is no field of the dataclass."""
    fields = [field.name for field in dataclasses.fields(kind)]
    for name in names:
        if name not in fields:
            raise unknown(what, name, fields)
