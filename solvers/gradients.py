"""How a solve is differentiated: the table of kinds, and their protocol.

| kind         | differentiates                               | methods             | tensors kept of N steps  | projections |
| ------------ | -------------------------------------------- | ------------------- | ------------------------ | ----------- |
| `backprop`   | the computed steps                           | all                 | every evaluation's       | yes         |
| `checkpoint` | the computed steps                           | all                 | O(sqrt N) steps'         | yes         |
| `reversible` | the computed steps, of its own scheme        | `HasReversibleForm` | two states               | no          |
| `adjoint`    | the ODE, with an error of the method's order | all                 | one state for a segment  | `enter`     |

`reversible` and `adjoint` give parameter gradients to autograd segment by segment.

These combinations work; the others raise ConfigError:

- fields that draw random numbers: `backprop` and `checkpoint`
- scripted fields: `backprop` and `checkpoint`, since the others must see the tensors that a field
  uses
- half precision: all but `reversible`
- `torchdiffeq:scipy_solver`: `adjoint` only, since it leaves torch
- implicit methods: `backprop` and `checkpoint`, first derivatives only
- second derivatives: `backprop` and `checkpoint`, not of compiled steps
- `torch.func.grad` and `vmap` (fixed steps): `backprop`, not of the time of an event
- fields that keep a tensor that they computed from parameters: `backprop`, and `checkpoint` with
  adaptive steps. `adjoint` and `reversible` notice it if the field keeps it from its first
  evaluation on, or uses the parameters in no other way

`checkpoint` recomputes torchdiffeq's methods by whole segments. Forward mode (`torch.func.jvp`,
`forward_ad`) uses the plain steps of explicit methods with every kind. Every kind differentiates
learned times (`solvers.learned_time`).
"""  # noqa: E501  # a table

from __future__ import annotations

import dataclasses

from solvers.adjoint import Adjoint
from solvers.checkpoint import Checkpoint
from solvers.errors import look_up
from solvers.march import Gradient, march
from solvers.reversible import Reversible


@dataclasses.dataclass(frozen=True)
class Backprop(Gradient):
    """Autograd through every operation of every step: exact, with memory proportional to the number
    of evaluations.
    """

    dense = True
    integrate = staticmethod(march)


GRADIENTS: dict[str, Gradient] = {
    "backprop": Backprop(),
    "checkpoint": Checkpoint(),
    "reversible": Reversible(),
    "adjoint": Adjoint(),
}


def get_gradient(gradient: str | Gradient) -> Gradient:
    """The gradient of that name, or the object itself. Raises ConfigError with the nearest name
    otherwise.
    """
    if not isinstance(gradient, (str, type)) and isinstance(gradient, Gradient):
        return gradient
    return look_up("gradient", gradient, GRADIENTS)
