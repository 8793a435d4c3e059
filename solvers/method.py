"""What `solve` asks of a method, and what a kind of gradient may ask of it besides: small
protocols, all but the first optional.

| protocol            | who asks                                   | what it promises                                        |
| ------------------- | ------------------------------------------ | ------------------------------------------------------- |
| `Method`            | `solve`                                    | takes a state over a segment                            |
| `HasFixedSteps`     | measured orders of convergence             | the same weights with steps of equal size               |
| `Replayable`        | `checkpoint`, to recompute a few steps     | each of its steps can be taken again alone              |
| `HasReversibleForm` | `reversible`                               | a scheme made of it that can be solved backward exactly |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

from torch import Tensor

from solvers.run import Run, Step
from solvers.segment import Map, Segment


@runtime_checkable
class Method(Protocol):
    """Takes a state over one segment. `order` is p of its global error O(h^p); an `adaptive` one
    chooses its steps itself.
    """

    @property
    def order(self) -> int: ...

    @property
    def adaptive(self) -> bool: ...

    def advance(self, segment: Segment, x: Tensor, run: Run) -> Tensor:
        """The state at the segment's end. Counts in `run` what it does; raises Stopped where it
        cannot get there.
        """


FIXED = frozenset({"steps", "save='steps'"})
ADAPTIVE = frozenset({"rtol", "atol", "norm", "max_steps", "save='steps'"})
BOUNDED = ADAPTIVE | {"first_step", "min_step", "max_step"}


def options_of(method: Method) -> frozenset[str]:
    """The options of `solve` that the method uses, its `options` or those of its kind. Others are
    errors.
    """
    used: frozenset[str] = getattr(method, "options", ADAPTIVE if method.adaptive else FIXED)
    return used


@runtime_checkable
class HasFixedSteps(Protocol):
    """A method that can take equal steps; one with fixed steps may return itself."""

    def fixed(self) -> Method: ...


@runtime_checkable
class Replayable(HasFixedSteps, Protocol):
    """A one-step method: a step needs the state at its start only, so a part of its steps gives the
    same bits as before.

    It appends each accepted step to `run.trace`. One step of `fixed()` over a segment that is an
    accepted step is that step again.
    """

    def pieces(self, segment: Segment, steps: int) -> Iterator[Segment]:
        """The steps of equal size over the segment, as segments of one step each."""


Pair = tuple[Tensor, Tensor]
Pull = Callable[[Map, Tensor, Tensor], Pair]
"""(function, x, c) -> function(x) and (d function/dx)' c; the share of whatever else the function
depends on is put down.
"""


@runtime_checkable
class ReversibleForm(Method, Protocol):
    """A scheme on pairs of states (y, z), equal at the start: it moves y, and keeps z in
    `run.partner` and steps in `run.trace`.
    """

    def step_back(self, step: Step, pair: Pair, cotangents: Pair, pull: Pull, run: Run) -> tuple[Pair, Pair]:
        """The pair before the step and (dL/dy, dL/dz) there, from those after it."""


@runtime_checkable
class HasReversibleForm(Protocol):
    """A method of which a reversible scheme is made; smaller couplings in (0, 1] damp more and are
    harder to undo.
    """

    def reversible(self, coupling: float) -> ReversibleForm: ...
