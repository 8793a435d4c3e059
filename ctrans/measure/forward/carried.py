"""Further states that pass through the depth during a walk: perturbed inputs, also with larger
weights, and the moments of X_D under larger weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from ctrans.base.shapes import TokenRows
from ctrans.dynamics.depth import Depth
from ctrans.measure.forward.moments import moments
from ctrans.measure.forward.weight_scaling import FACTORS, log_slope, maps_are_known, times
from ctrans.measure.walk import Instrument, StepContext
from solvers import ConfigError

Start = tuple[float, TokenRows]
"""(c, X_0): the state passes through the discrete model with f_k -> c f_k in each segment."""


class CarriedStates(Instrument):
    """X_D for several (c, X_0) of one shape, as one batch: each map is evaluated once for all."""

    def __init__(self, starts: Sequence[Start]):
        self._factors, self._starts = zip(*starts, strict=True)

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._states = torch.stack(self._starts)

    def forward(self, at: StepContext) -> None:
        factors = self._states.new_tensor(self._factors).reshape(
            -1, *[1] * (self._states.dim() - 1)
        )
        self._states = times(at.sublayer, factors).step(self._states, at.h)

    def figures(self) -> list[Tensor]:
        return list(self._states)


@dataclasses.dataclass(frozen=True)
class WeightGrowth:
    """Moments of X_D with each sublayer's last linear map times c, and the slope of log MA against
    log c over the largest two c.

    Slope 1: the state is proportional to the weights (`pre`). Slope 0: norms bound it (`peri`,
    `output`, and any norm around the state).
    """

    factors: list[float]
    mean_abs: list[float]
    variance: list[float]
    slope: float


class GrowthWithWeights(Instrument):
    """MA and Var of X_D as functions of c, with f_k -> c f_k in each segment and the lane's X_0;
    inf or nan if the state overflows. Raises ConfigError for a model read by its sums.
    """

    def __init__(self, factors: Sequence[float] = FACTORS):
        self._factors = list(factors)

    def begin(self, depth: Depth, x0: Tensor) -> None:
        if not maps_are_known(depth):
            raise ConfigError(
                "growth with weights needs known maps, and this model is read by its sums x + f(x)"
            )
        self._carried = CarriedStates([(c, x0) for c in self._factors])
        self._carried.begin(depth, x0)

    def forward(self, at: StepContext) -> None:
        self._carried.forward(at)

    def figures(self) -> WeightGrowth:
        ends = [moments(x, self.kept) for x in self._carried.figures()]
        mean_abs = [end.mean_abs for end in ends]
        return WeightGrowth(
            self._factors,
            mean_abs,
            [end.variance for end in ends],
            log_slope(self._factors[-2:], mean_abs[-2:]),
        )
