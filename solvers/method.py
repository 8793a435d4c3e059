"""The protocols of methods. `solve` needs only the first; kinds of gradient use the others.

| protocol            | user                             | what it provides                                           |
| ------------------- | -------------------------------- | ---------------------------------------------------------- |
| `Method`            | `solve`                          | integrates a state over a segment                          |
| `HasFixedSteps`     | measured orders of convergence   | the same weights with steps of equal size                  |
| `Replayable`        | `checkpoint`, for recomputation  | each of its steps can be repeated alone                    |
| `HasReversibleForm` | `reversible`                     | a scheme made from it that can be solved backward exactly  |
"""  # noqa: E501  # a table

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

from torch import Tensor

from solvers.run import Run, Step
from solvers.segment import Map, Segment


@runtime_checkable
class Method(Protocol):
    """Integrates a state over one segment. `order` is p of its global error O(h^p). An `adaptive`
    method chooses its steps itself.
    """

    @property
    def order(self) -> int: ...

    @property
    def adaptive(self) -> bool: ...

    def advance(self, segment: Segment, x: Tensor, run: Run) -> Tensor:
        """The state at the segment's end. Counts its work in `run`. Raises Stopped if it cannot get
        there.
        """


FIXED = frozenset({"steps", "save='steps'"})
ADAPTIVE = frozenset({"rtol", "atol", "norm", "max_steps", "save='steps'"})
BOUNDED = ADAPTIVE | {"first_step", "min_step", "max_step"}


def options_of(method: Method) -> frozenset[str]:
    """The options of `solve` that the method uses: its `options`, or those of its kind. `solve`
    rejects all others.
    """
    if method.adaptive:
        options_of_kind = ADAPTIVE
    else:
        options_of_kind = FIXED
    options: frozenset[str] = getattr(method, "options", options_of_kind)
    return options


def has_capability(method: object, capability: str) -> bool:
    """Whether a method, or a kind of gradient, has this capability: a true attribute `dense`,
    `implicit`, `shows_steps`, `compiled` or `inverts`, which it may lack.
    """
    return bool(getattr(method, capability, None))


@runtime_checkable
class HasFixedSteps(Protocol):
    """A method that can take equal steps. A fixed-step method may return itself."""

    def fixed(self) -> Method: ...


@runtime_checkable
class Replayable(HasFixedSteps, Protocol):
    """A one-step method: a step needs only the state at its start, so some of its steps can be
    repeated with the same bits.

    It appends each accepted step to `run.trace`. One step of `fixed()` over a segment that is an
    accepted step repeats that step.
    """

    def pieces(self, segment: Segment, steps: int) -> Iterator[Segment]:
        """The equal steps over the segment, as segments of one step each."""


Pair = tuple[Tensor, Tensor]
Pull = Callable[[Map, Tensor, Tensor], Pair]
"""(function, x, c) -> function(x) and (d function/dx)' c. It also adds up the gradients of captured
tensors.
"""


@runtime_checkable
class ReversibleForm(Method, Protocol):
    """A scheme on pairs of states (y, z), equal at the start. It moves y, and keeps z in
    `run.partner` and its steps in `run.trace`.
    """

    def step_back(
        self, step: Step, pair: Pair, cotangents: Pair, pull: Pull, run: Run
    ) -> tuple[Pair, Pair]:
        """The pair before the step and (dL/dy, dL/dz) there, from those after it."""


@runtime_checkable
class HasReversibleForm(Protocol):
    """A method that has a reversible scheme. A smaller coupling in (0, 1] damps more, and its
    inverse is less accurate.
    """

    def reversible(self, coupling: float) -> ReversibleForm: ...
