"""States that go through the depth beside the text's own: perturbed and substituted inputs, and any
of these with larger weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.depth import Depth
from ctrans.stability.forward.weight_scaling import times
from ctrans.walk import Instrument, StepContext, walk_depth

Start = tuple[float, Float[Tensor, "*batch tokens width"]]
"""(c, X_0): the state goes through the discrete model with f_k -> c f_k in every segment."""


class CarriedStates(Instrument):
    """X_D from each X_0 of several (c, X_0), all of one shape, as extra lanes of one batch: a map
    is evaluated once for all.
    """

    def __init__(self, starts: Sequence[Start]):
        self._factors, self._starts = zip(*starts, strict=True)

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._states = torch.stack(self._starts)

    def forward(self, at: StepContext) -> None:
        factors = self._states.new_tensor(self._factors).reshape(-1, *[1] * (self._states.dim() - 1))
        self._states = times(at.sublayer, factors).step(self._states, at.h)

    def figures(self) -> list[Tensor]:
        return list(self._states)


def carried(depth: Depth, starts: Sequence[Start]) -> list[Float[Tensor, "*batch tokens width"]]:
    """`CarriedStates` alone."""
    found: list[Tensor] = walk_depth(depth, starts[0][1], [CarriedStates(starts)])[0]
    return found
