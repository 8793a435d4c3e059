"""Activations of an FFN, with the constants that bounds use. A new one is an entry of
`ACTIVATIONS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Activation:
    """phi with phi(0) = 0 and abs(phi(z)) <= abs(z)^degree.

    - `slope`, rounded up: Lip(phi) for degree 1. For degree 2, which has no Lipschitz constant, the
      c in abs(phi'(z)) <= c abs(z)
    - `at_infinity`: c in phi(r z)/r -> c max(z, 0) for large r
    - `homogeneous`: whether phi(r z) = r^degree phi(z) for every r > 0
    """

    function: Callable[[Tensor], Tensor]
    slope: float
    at_infinity: float = 1.0
    homogeneous: bool = False
    degree: int = 1

    def __call__(self, z: Tensor) -> Tensor:
        return self.function(z)


def squared_relu(z: Tensor) -> Tensor:
    """max(z, 0)^2 (So et al. 2021, Primer)."""
    return z.relu().square()


ACTIVATIONS: dict[str, Activation] = {
    # GELU's slope is largest at sqrt(2), SiLU's at 2.3994
    "gelu": Activation(F.gelu, 1.12891),
    "relu": Activation(F.relu, 1.0, homogeneous=True),
    "tanh": Activation(torch.tanh, 1.0, at_infinity=0.0),
    "silu": Activation(F.silu, 1.09984),
    "relu2": Activation(squared_relu, 2.0, at_infinity=float("inf"), homogeneous=True, degree=2),
}
