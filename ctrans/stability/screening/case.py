"""What a step of the screening is given, what it asks of the walk, and what it gives back."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.depth import Depth
from ctrans.stability.backward.sensitivity import Sensitivities, StepGraphs
from ctrans.stability.backward.singular_values import Singular, first_of
from ctrans.stability.diagnosis.forward_instruments import HeadRows
from ctrans.stability.diagnosis.reading import cut
from ctrans.stability.forward.bounds import BoundsByDepth
from ctrans.stability.screening.screening_checks import flags
from ctrans.stability.transport.perturbations import AT_ONCE, worst_directions
from ctrans.walk import Attempt, DescribedModel, Instrument, StepContext
from solvers import ConfigError, SolveError
from solvers.deprecated import old_names
from solvers.run import finite

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much work a screening may be.

    - `tokens`, `sequences`: how many of the text's enter the Jacobians; `tokens` also the
      certificates
    - `several`: how many sequences of so many tokens enter sensitivities by depth and attention
      rows, of which the worst counts, where graphs of their depth have room (`AT_ONCE`); where
      weights are made on demand that is `sequences`, as these would be met so many times more
    - `tolerance`: of singular values, which are given with the error that was reached: the
      screening meets each sublayer's matrices 11 times and more for one of them, and that is most
      of a wide model's quick screening
    - `starts`: the number of blocks i with a |J_{i:D}|
    - `certified`: segments that get a certificate
    - `layers`: attention layers that get their sensitivity, spread evenly over the depth
    - `vectors`: how many Lyapunov exponents there are
    - `blocks`: how many blocks' Lipschitz constants are measured
    - `updates`: of how many segments the response to an optimiser's step is measured, spread evenly
      over the depth
    - `curvature`: whether Gauss-Newton matrices and the tangent kernel are looked at
    - `lanczos`: steps of the spectrum of J_{0:D}; 0 leaves it out
    """

    tokens: int
    sequences: int
    several: int
    tolerance: float
    starts: int
    certified: int
    layers: int
    vectors: int
    blocks: int
    updates: int
    curvature: bool
    lanczos: int


EFFORTS: dict[str, Effort] = {
    "quick": Effort(
        tokens=32,
        sequences=1,
        several=1,
        tolerance=0.05,
        starts=4,
        certified=4,
        layers=3,
        vectors=2,
        blocks=0,
        updates=6,
        curvature=False,
        lanczos=0,
    ),
    "full": Effort(
        tokens=256,
        sequences=1,
        several=4,
        tolerance=0.01,
        starts=6,
        certified=12,
        layers=12,
        vectors=4,
        blocks=3,
        updates=12,
        curvature=True,
        lanczos=48,
    ),
}


@dataclasses.dataclass(frozen=True)
class StepVerdict:
    """The answer of one step: a verdict in a word, the figure it rests on, and one sentence of why.

    - `quantities`: what it measures, by name; nan where it is unknown
    - `errors`: the errors of those that are estimates, where they are known
    - `notes`: what could not be computed
    - `result`: all figures; None for a step that does not apply, whose verdict is "n/a"
    """

    verdict: str
    figure: str
    why: str
    quantities: dict[str, float] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    result: Any = None
    errors: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def flags(self) -> dict[str, str]:
        """The quantities outside of their limits, and what they are called there."""
        return flags(self.quantities)


LaneName = Literal["text", "several", "part", "certified"]
"""Lanes of the screening's walk: all sequences of the text; those of which the worst counts; those
that the effort lets into other Jacobians; what is certified.
"""
NOT_IN_QUICK = "{} is left out, as it takes minutes in a large model: screen in full"
CERTIFIED_TOKENS = 64
"""How many tokens a certificate is for: its verdict is about each token alone."""


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What a step asks: instruments by the lane they look at, and what it concludes from them when
    the walk is done.

    An instrument that cannot speak of a model raises ConfigError or SolveError, and so does
    `conclude` then; put it into an `Attempt` where the step goes on without it.
    """

    instruments: Mapping[LaneName, Sequence[Instrument]]
    conclude: Callable[[], StepVerdict]


class Reach(Instrument):
    """How far states are finite."""

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._finite = [finite(x0)]

    def forward(self, at: StepContext) -> None:
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
    """A model on a text, with another text where one is given. `trained` weights are not those of
    the configuration's initialisation. `reach` and `bounds` look at the whole text, for every step
    that asks, `graphs` at its lane `part`, where the model is in memory; `heads` at the rows of all
    heads, as the diagnosis does. `worst` are the leading singular values of J_{0:D}, several
    sequences' at a time, once known.
    """

    model: DescribedModel
    tokens: Tensor
    targets: Any
    other: Tensor | None
    effort: Effort
    seed: int
    trained: bool = False
    reach: Reach = dataclasses.field(default_factory=Reach)
    bounds: BoundsByDepth = dataclasses.field(default_factory=BoundsByDepth)
    graphs: StepGraphs = dataclasses.field(default_factory=StepGraphs)
    worst: list[Singular] = dataclasses.field(default_factory=list)
    heads: Attempt = dataclasses.field(default_factory=lambda: Attempt(HeadRows()))

    @property
    def broken(self) -> int | None:
        """The first segment whose state is not finite."""
        return self.reach.broken

    @property
    def shared_graphs(self) -> StepGraphs | None:
        """`graphs`, or None where weights made on demand let nothing of the depth be kept."""
        return None if self.model.depth.streamed else self.graphs

    @functools.cached_property
    def jacobians(self) -> Sensitivities:
        """Sensitivities by depth of the lane `several`, for every step that asks; one of them puts
        it into the walk.
        """
        graphs = self.shared_graphs if self.sequences("several") == self.sequences("part") else None
        whole = None if self.model.depth.streamed else lambda: first_of(self.worst, self.sequences("several"))
        return Sensitivities(tolerance=self.effort.tolerance, starts=self.effort.starts, graphs=graphs, whole=whole)

    def worst_directions(self) -> Float[Tensor, "batch tokens width"]:
        """The unit right singular vector of J_{0:D} of every sequence, for the transport step;
        `worst` has the triplets from then on.
        """
        x = self.model.embed(cut(self.tokens, len(self.tokens), self.effort.tokens)).detach()
        self.worst.extend(worst_directions(self.model.depth, x, tolerance=self.effort.tolerance))
        return torch.cat([each.right.squeeze(-3) for each in self.worst])

    def sequences(self, lane: LaneName) -> int:
        """How many sequences there are in that lane."""
        length = cut(self.tokens, 1, self.effort.tokens).shape[1] if self.tokens.dim() == 2 else self.effort.tokens
        room = AT_ONCE // (length * self.model.config.width)
        several = self.effort.sequences if self.model.depth.streamed else max(1, min(self.effort.several, room))
        most = {"several": several, "part": self.effort.sequences, "certified": 1}
        return min(len(self.tokens), most.get(lane, len(self.tokens)))

    def batch(self, lane: LaneName) -> tuple[Tensor, Any]:
        """The tokens and targets of that lane."""
        x, y = self.tokens, self.targets
        if lane != "text":
            x, y = (cut(each, self.sequences(lane), self.effort.tokens) for each in (x, y))
        return (cut(x, 1, CERTIFIED_TOKENS), cut(y, 1, CERTIFIED_TOKENS)) if lane == "certified" else (x, y)

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
    """The instrument's figures; None where it could not speak of the model, and its reason goes to
    the notes.
    """
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


__getattr__ = old_names(__name__)
