"""Further states that pass through the depth during a walk: perturbed inputs, also with larger
weights.
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
"""(c, X_0): the state passes through the discrete model with f_k -> c f_k in each segment."""


class CarriedStates(Instrument):
    """X_D for several (c, X_0) of one shape, as one batch: each map is evaluated once for all."""

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
    """`CarriedStates` as a walk of its own."""
    found: list[Tensor] = walk_depth(depth, starts[0][1], [CarriedStates(starts)])[0]
    return found
