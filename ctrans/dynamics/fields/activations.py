"""Activations of an FFN, with the constants that bounds use. A new one is an entry of
`ACTIVATIONS`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

LARGE = 1e9
NEAR = 1e-6
"""Where an activation is compared with its limit, and how closely."""


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

    def has_its_limit(self) -> bool:
        """Whether phi(r z)/r^degree is c max(z, 0)^degree at a large r, with c = `at_infinity` for
        degree 1, and any c > 0 for degree 2. An activation that passes negative numbers on has no
        such limit.
        """
        z = torch.tensor([LARGE, -LARGE], dtype=torch.float64)
        try:
            above, below = map(float, self.function(z) / LARGE**self.degree)
        except (RuntimeError, TypeError, ValueError):  # a function of others may refuse float64
            return False
        if self.degree == 1:
            expected = self.at_infinity
            return abs(below) <= NEAR and abs(above - expected) <= NEAR * max(1.0, expected)
        return abs(below) <= NEAR and NEAR < above < math.inf


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
