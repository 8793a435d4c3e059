"""Input of a screening step (`Case`), the instruments that it adds to the walk (`StepPlan`), and
its result (`StepVerdict`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from ctrans.base.protocol import AsksTheInstance
from ctrans.base.shapes import SequenceRows
from ctrans.dynamics.depth import Depth
from ctrans.examine.diagnosis.diagnose import Examination
from ctrans.examine.diagnosis.reading import cut
from ctrans.examine.screening.screening_checks import flags
from ctrans.measure.backward.sensitivity import Sensitivities, StepGraphs
from ctrans.measure.backward.singular_values import Singular, first_of
from ctrans.measure.forward.bounds import BoundsByDepth
from ctrans.measure.measured import Value
from ctrans.measure.transport.perturbations import AT_ONCE, worst_directions
from ctrans.measure.walk import DescribedModel, Instrument, StepContext
from solvers.run import finite


@dataclass(frozen=True)
class Effort:
    """The size of a screening.

    - `tokens`, `sequences`: how many tokens and sequences of the text enter Jacobians; `tokens`
      also limits certificates
    - `several`: how many sequences enter sensitivities by depth and attention rows, where the worst
      one counts. It is smaller if their graphs exceed `AT_ONCE` entries, and `sequences` if weights
      are made on demand
    - `tolerance`: relative error of singular values, which are reported with their error. One of
      them takes 11 or more products with each sublayer's matrices, most of the time of a wide
      model's quick screening
    - `starts`: number of blocks i with a |J_{i:D}|
    - `certified`: number of segments with a certificate
    - `layers`: number of attention layers with a sensitivity, spread evenly over the depth
    - `vectors`: number of Lyapunov exponents
    - `blocks`: number of blocks with a measured Lipschitz constant
    - `updates`: number of segments with a response to an optimiser's step, spread evenly over the
      depth
    - `curvature`: whether to compute Gauss-Newton matrices and the tangent kernel
    - `lanczos`: Lanczos steps of the spectrum of J_{0:D}; 0 for no spectrum

    The defaults are those of a full screening.
    """

    tokens: int = 256
    sequences: int = 1
    several: int = 4
    tolerance: float = 0.01
    starts: int = 6
    certified: int = 12
    layers: int = 12
    vectors: int = 4
    blocks: int = 3
    updates: int = 12
    curvature: bool = True
    lanczos: int = 48


EFFORTS: dict[str, Effort] = {
    "quick": Effort(
        tokens=32,
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
    "full": Effort(),
}


@runtime_checkable
class HasValues(Protocol, metaclass=AsksTheInstance):
    """A step's result with rows of the table, such as its figures by depth."""

    def values(self, model: str) -> Iterator[Value]:
        """The rows. `model` is the name of the model, which each row has."""
        ...


@dataclass(frozen=True)
class StepVerdict:
    """The result of one step: a verdict in a word, the figure that it is based on, and the reason
    in one sentence.

    - `quantities`: measured quantities by name; nan if unknown
    - `errors`: errors of those that are estimates, if known
    - `notes`: remarks on the figures
    - `missing`: figures that could not be computed, with reasons
    - `result`: all figures. If it `HasValues`, its rows are in the table of the screening
    """

    verdict: str
    figure: str
    why: str
    quantities: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    result: Any = None
    errors: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def flags(self) -> dict[str, str]:
        """The quantities outside their limits, with the verdict."""
        return flags(self.quantities)


LaneName = Literal["text", "several", "part", "certified"]
"""Lanes of the screening's walk: the whole text; the sequences of which the worst counts; those in
other Jacobians; the tokens of certificates.
"""
NOT_IN_QUICK = "{} needs a full screening, because it takes minutes for a large model"
CERTIFIED_TOKENS = 64
"""Number of tokens of a certificate, whose verdict is about each token alone."""


@dataclass(frozen=True)
class StepPlan:
    """The instruments of a step, by lane, and the function that makes its verdict after the walk.

    An instrument raises ConfigError or SolveError if it does not support a model. The step then has
    no verdict, and `Screening.missing` has the message. Wrap an instrument that the step does not
    need in an `Attempt`, which files its message in a dictionary: that is `StepVerdict.missing`.
    """

    instruments: Mapping[LaneName, Sequence[Instrument]]
    conclude: Callable[[], StepVerdict]


class Reach(Instrument):
    """`broken`: the first segment whose state is not finite, -1 if the input is not, None if all
    are.
    """

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self.broken: int | None = None
        if not finite(x0):
            self.broken = -1

    def forward(self, at: StepContext) -> None:
        if self.broken is None and not finite(at.y):
            self.broken = at.k

    def figures(self) -> Any:
        return self.broken


@dataclass(frozen=True, eq=False)
class Case:
    """A model on a text, with the figures that several steps share.

    - `other`: another text, or None
    - `trained`: whether weights differ from those of the configuration's initialisation
    - `reach`, `bounds`: instruments of the whole text
    - `graphs`: linearised steps in the lane `part`, if the model is in memory
    - `worst`: leading singular triplets of J_{0:D}, in batches of sequences, once known
    """

    model: DescribedModel
    tokens: Tensor
    targets: Any
    other: Tensor | None
    effort: Effort
    seed: int
    trained: bool = False
    reach: Reach = field(default_factory=Reach)
    bounds: BoundsByDepth = field(default_factory=BoundsByDepth)
    graphs: StepGraphs = field(default_factory=StepGraphs)
    worst: list[Singular] = field(default_factory=list)

    @property
    def broken(self) -> int | None:
        """The first segment whose state is not finite."""
        return self.reach.broken

    @property
    def shared_graphs(self) -> StepGraphs | None:
        """`graphs`, or None if weights are made on demand."""
        if self.model.depth.streamed:
            return None
        return self.graphs

    @cached_property
    def jacobians(self) -> Sensitivities:
        """The instrument of sensitivities by depth in the lane `several`. The backward step adds it
        to the walk.
        """
        graphs: StepGraphs | None = None
        if self.sequences("several") == self.sequences("part"):
            graphs = self.shared_graphs
        of_the_depth: Callable[[], Singular | None] | None = None
        if not self.model.depth.streamed:
            of_the_depth = self._worst_of_several
        return Sensitivities(
            tolerance=self.effort.tolerance,
            starts=self.effort.starts,
            graphs=graphs,
            whole=of_the_depth,
        )

    def _worst_of_several(self) -> Singular | None:
        """The triplets of J_{0:D} in the lane `several`, once they are known."""
        return first_of(self.worst, self.sequences("several"))

    @cached_property
    def examination(self) -> Examination:
        """The instruments of the diagnosis, in the lane `text`."""
        return Examination(self.model, sensitivities=self.jacobians)

    def worst_directions(self) -> SequenceRows:
        """The unit right singular vector of J_{0:D} of each sequence, for the transport step. It
        keeps the triplets in `worst`.
        """
        x = self.model.embed(cut(self.tokens, len(self.tokens), self.effort.tokens)).detach()
        self.worst.extend(worst_directions(self.model.depth, x, tolerance=self.effort.tolerance))
        return torch.cat([singular.right.squeeze(-3) for singular in self.worst])

    def sequences(self, lane: LaneName) -> int:
        """Number of sequences in the lane."""
        if self.tokens.dim() == 2:
            length = cut(self.tokens, 1, self.effort.tokens).shape[1]
        else:
            length = self.effort.tokens
        room = AT_ONCE // (length * self.model.config.width)
        if self.model.depth.streamed:
            several = self.effort.sequences
        else:
            several = max(1, min(self.effort.several, room))
        most = {"several": several, "part": self.effort.sequences, "certified": 1}
        return min(len(self.tokens), most.get(lane, len(self.tokens)))

    def batch(self, lane: LaneName) -> tuple[Tensor, Any]:
        """The tokens and targets of the lane."""
        if lane == "text":
            return self.tokens, self.targets
        count = self.sequences(lane)
        x = cut(self.tokens, count, self.effort.tokens)
        y = cut(self.targets, count, self.effort.tokens)
        if lane == "certified":
            return cut(x, 1, CERTIFIED_TOKENS), cut(y, 1, CERTIFIED_TOKENS)
        return x, y


def exponent(k: float) -> str:
    """k with two decimals, without a sign on zero."""
    if math.isnan(k):
        return "unknown"
    return f"{round(k, 2) + 0.0:.2f}"


def three(value: float) -> str:
    """The value with three significant digits."""
    if math.isnan(value):
        return "unknown"
    return f"{value:.3g}"


def largest(values: Sequence[float | None]) -> float:
    """The largest known value; nan if there is none."""
    return max(
        (value for value in values if value is not None and not math.isnan(value)), default=math.nan
    )
