"""How a solve is differentiated: the table of kinds, and what `solve` asks of each.

| kind         | differentiates                       | methods                  | tensors kept of N steps | projections |
| ------------ | ------------------------------------ | ------------------------ | ----------------------- | ----------- |
| `backprop`   | what was computed                    | all                      | every evaluation's      | yes         |
| `checkpoint` | what was computed                    | all                      | O(sqrt N) steps'        | yes         |
| `reversible` | what was computed, by its own scheme | `HasReversibleForm`      | two states              | no          |
| `adjoint`    | the ODE, so up to the method's error | all                      | a state a segment       | on entering |

The last two give parameter gradients to autograd segment by segment.

Fields that draw random numbers have `backprop` and `checkpoint`; so has half precision, with the
adjoint. A scripted field, into which nothing looks, too. `torchdiffeq:scipy_solver` leaves torch
and has the adjoint only; implicit methods have `backprop` and `checkpoint`, and first derivatives
only. torchdiffeq's methods are recomputed by whole segments. Second derivatives have `backprop` and
`checkpoint`, `torch.func.grad` and `vmap` (fixed steps) `backprop`; the others raise ConfigError
there. Forward mode (`torch.func.jvp`, `forward_ad`) is taken through the plain steps of explicit
methods whatever the kind. Times of segments that are tensors are learned by every kind:
`solvers.learned_time`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from solvers.adjoint import Adjoint
from solvers.checkpoint import Checkpoint
from solvers.errors import look_up
from solvers.march import Progress, march
from solvers.method import Method
from solvers.reversible import Reversible
from solvers.run import Run
from solvers.segment import Segment
from solvers.solution import Solution


@runtime_checkable
class Gradient(Protocol):
    """What `solve` asks of a kind of gradient.

    A `detached` one computes the solution without a graph and calls the fields anew, outside their
    modules' own passes, when the gradient is wanted: a compiler does not see into it, and what
    frees weights between the passes cannot work with it. One with a true attribute `dense`
    differentiates states inside steps, too.
    """

    @property
    def detached(self) -> bool: ...

    def check(self, method: Method, segments: Sequence[Segment]) -> None:
        """Raises ConfigError where the kind does not work, naming one that does."""

    def scheme(self, method: Method) -> Method:
        """The method that computes the solution."""

    def integrate(self, method: Method, segments: Sequence[Segment], x0: Tensor, run: Run, progress: Progress | None) -> Solution:
        """The solution, differentiable if it succeeds."""


@dataclasses.dataclass(frozen=True)
class Backprop:
    """Autograd through every operation of every step: exact, with memory proportional to the number
    of evaluations.
    """

    detached = False
    dense = True
    integrate = staticmethod(march)

    def check(self, method: Method, segments: Sequence[Segment]) -> None:
        pass

    def scheme(self, method: Method) -> Method:
        return method


GRADIENTS: dict[str, Gradient] = {
    "backprop": Backprop(),
    "checkpoint": Checkpoint(),
    "reversible": Reversible(),
    "adjoint": Adjoint(),
}


def get_gradient(gradient: str | Gradient) -> Gradient:
    """The gradient of that name, or the object itself; ConfigError with the nearest name otherwise."""
    if not isinstance(gradient, (str, type)) and isinstance(gradient, Gradient):
        return gradient
    return look_up("gradient", gradient, GRADIENTS)
