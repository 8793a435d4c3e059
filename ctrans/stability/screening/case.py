"""What a step of the screening is given, and what it gives back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from ctrans.stability.screening.score import step_score
from ctrans.walk import DescribedModel
from solvers import ConfigError, SolveError
from solvers.run import finite

Value = TypeVar("Value")
Arguments = TypeVar("Arguments")


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much work a screening may be.

    `tokens` of the text's sequences enter the Jacobians, the certificates and the attention rows, `sequences` of them the
    Jacobians; `tolerance` is that of singular values, `starts` the number of blocks i with a |J_{i:D}|; `certified` segments get
    a certificate, `layers` attention layers their sensitivity, spread evenly over the depth; `vectors` is how many Lyapunov
    exponents there are; `blocks` how many blocks' Lipschitz constants are measured.
    """

    tokens: int
    sequences: int
    tolerance: float
    starts: int
    certified: int
    layers: int
    vectors: int
    blocks: int


EFFORTS: dict[str, Effort] = {
    "quick": Effort(tokens=32, sequences=1, tolerance=0.02, starts=4, certified=4, layers=3, vectors=2, blocks=0),
    "full": Effort(tokens=256, sequences=1, tolerance=0.01, starts=6, certified=12, layers=12, vectors=4, blocks=3),
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """The answer of one step: a verdict in a word, the figure it rests on, and one sentence of why.

    `ingredients` are the exponents and decades that enter the score (see `step_score`), `notes` what could not be computed, and
    `result` all figures. A step that does not apply has the verdict "n/a" and no result.
    """

    verdict: str
    figure: str
    why: str
    ingredients: dict[str, float] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    result: Any = None

    @property
    def score(self) -> float | None:
        """In [0, 1]; None where there is no ingredient."""
        return step_score(self.ingredients)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A model on a text: tokens, targets, the states of the discrete model (finite or not), and another text where one is given."""

    model: DescribedModel
    tokens: Int[Tensor, "batch tokens"]
    targets: Int[Tensor, "batch tokens"]
    states: list[Float[Tensor, "batch tokens width"]]
    other: Int[Tensor, "batch tokens"] | None
    effort: Effort
    seed: int
    trained: bool = False

    @property
    def broken(self) -> int | None:
        """The first segment whose state is not finite."""
        return next((k - 1 for k, x in enumerate(self.states) if not finite(x)), None)

    @property
    def reached(self) -> list[Float[Tensor, "batch tokens width"]]:
        """The states up to the last finite one."""
        return self.states if self.broken is None else self.states[: self.broken + 1]

    def part(self, x: Tensor) -> Tensor:
        """The tokens and sequences of x, or of a state, that the effort lets into Jacobians."""
        return x[: self.effort.sequences, : self.effort.tokens]


def spread(count: int, wanted: int) -> list[int]:
    """At most so many of the indices 0 .. count - 1, spread evenly, the ends among them."""
    return sorted(set(np.linspace(0, count - 1, min(wanted, count)).round().astype(int).tolist()))


def attempt(notes: list[str], function: Callable[..., Value], *arguments: Any, **named: Any) -> Value | None:
    """The function's value; None where it says that it cannot, and its reason goes to the notes."""
    try:
        return function(*arguments, **named)
    except (ConfigError, SolveError) as error:
        notes.append(str(error))
        return None


def exponent(k: float) -> str:
    """k with two decimals for a sentence, without a sign on zero."""
    return "unknown" if math.isnan(k) else f"{round(k, 2) + 0.0:.2f}"


def three(value: float) -> str:
    """Three significant digits for a sentence."""
    return "unknown" if math.isnan(value) else f"{value:.3g}"


def largest(values: Sequence[float | None]) -> float:
    """The largest of the known values; nan of none."""
    return max((value for value in values if value is not None and not math.isnan(value)), default=math.nan)
