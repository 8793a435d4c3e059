"""Activations of an FFN, with what bounds rely on; a new one is an entry of `ACTIVATIONS`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Activation:
    """phi with phi(0) = 0 and abs(phi(z)) <= abs(z), which affine bounds rely on, and `slope` = Lip(phi), rounded up.

    `at_infinity` is c in phi(r z)/r -> c max(z, 0) for large r: how phi grows. `homogeneous` says that phi(r z) = r phi(z) for every
    r > 0.
    """

    function: Callable[[Tensor], Tensor]
    slope: float
    at_infinity: float = 1.0
    homogeneous: bool = False

    def __call__(self, z: Tensor) -> Tensor:
        return self.function(z)


ACTIVATIONS: dict[str, Activation] = {
    # GELU's slope is largest at sqrt(2), SiLU's at 2.3994
    "gelu": Activation(F.gelu, 1.12891),
    "relu": Activation(F.relu, 1.0, homogeneous=True),
    "tanh": Activation(torch.tanh, 1.0, at_infinity=0.0),
    "silu": Activation(F.silu, 1.09984),
}
