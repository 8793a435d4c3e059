"""What a step of the screening is given, what it asks of the walk, and what it gives back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from ctrans.depth import Depth
from ctrans.stability.forward.bounds import BoundsByDepth
from ctrans.stability.screening.score import step_score
from ctrans.walk import Attempt, DescribedModel, Instrument, Passage
from solvers import ConfigError, SolveError
from solvers.run import finite

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much work a screening may be.

    - `tokens`, `sequences`: how many of the text's enter the Jacobians and the attention rows; `tokens` also the certificates
    - `tolerance`: of singular values
    - `starts`: the number of blocks i with a |J_{i:D}|
    - `certified`: segments that get a certificate
    - `layers`: attention layers that get their sensitivity, spread evenly over the depth
    - `vectors`: how many Lyapunov exponents there are
    - `blocks`: how many blocks' Lipschitz constants are measured
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


LaneName = Literal["text", "part", "certified"]
"""Lanes of the screening's walk: all sequences of the text; those that the effort lets into Jacobians; what is certified."""
CERTIFIED_TOKENS = 64
"""How many tokens a certificate is for: its verdict is about each token alone."""


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What a step asks: instruments by the lane they look at, and what it concludes from them when the walk is done.

    An instrument that cannot speak of a model raises ConfigError or SolveError, and so does `conclude` then; put it into an
    `Attempt` where the step goes on without it.
    """

    instruments: Mapping[LaneName, Sequence[Instrument]]
    conclude: Callable[[], Finding]


class Reach(Instrument):
    """How far states are finite."""

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._finite = [finite(x0)]

    def forward(self, at: Passage) -> None:
        self._finite.append(finite(at.y))

    @property
    def broken(self) -> int | None:
        """The first segment whose state is not finite; -1 where the input itself is not."""
        return next((k - 1 for k, known in enumerate(self._finite) if not known), None)

    @property
    def count(self) -> int:
        """The number of states up to the last finite one."""
        return len(self._finite) if self.broken is None else self.broken + 1

    def figures(self) -> int | None:
        return self.broken


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A model on a text, with another text where one is given. `trained` weights are not those of the configuration's
    initialisation. `reach` and `bounds` look at the whole text, for every step that asks.
    """

    model: DescribedModel
    tokens: Int[Tensor, "batch tokens"]
    targets: Int[Tensor, "batch tokens"]
    other: Int[Tensor, "batch tokens"] | None
    effort: Effort
    seed: int
    trained: bool = False
    reach: Reach = dataclasses.field(default_factory=Reach)
    bounds: BoundsByDepth = dataclasses.field(default_factory=BoundsByDepth)

    @property
    def broken(self) -> int | None:
        """The first segment whose state is not finite."""
        return self.reach.broken

    def batch(self, lane: LaneName) -> tuple[Int[Tensor, "batch tokens"], Int[Tensor, "batch tokens"]]:
        """The tokens and targets of that lane."""
        x, y = self.tokens, self.targets
        if lane != "text":
            x, y = (each[: self.effort.sequences, : self.effort.tokens] for each in (x, y))
        return (x[:1, :CERTIFIED_TOKENS], y[:1, :CERTIFIED_TOKENS]) if lane == "certified" else (x, y)

    def start(self, lane: LaneName) -> Float[Tensor, "batch tokens width"]:
        """X_0 of that lane."""
        return self.model.embed(self.batch(lane)[0]).detach()


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


def found(notes: list[str], instrument: Attempt) -> Any:
    """The instrument's figures; None where it could not speak of the model, and its reason goes to the notes."""
    figures = instrument.figures()
    if instrument.note is not None:
        notes.append(instrument.note)
    return figures


def exponent(k: float) -> str:
    """k with two decimals for a sentence, without a sign on zero."""
    return "unknown" if math.isnan(k) else f"{round(k, 2) + 0.0:.2f}"


def three(value: float) -> str:
    """Three significant digits for a sentence."""
    return "unknown" if math.isnan(value) else f"{value:.3g}"


def largest(values: Sequence[float | None]) -> float:
    """The largest of the known values; nan of none."""
    return max((value for value in values if value is not None and not math.isnan(value)), default=math.nan)
