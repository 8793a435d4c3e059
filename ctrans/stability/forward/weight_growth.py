"""How the last hidden state depends on the scale of the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from ctrans.depth import Depth
from ctrans.stability.forward.carried import CarriedStates
from ctrans.stability.forward.moments import moments
from ctrans.stability.forward.weight_scaling import FACTORS, log_slope
from ctrans.walk import Instrument, StepContext, walk_depth
from ctrans.walk.instrument import of_text


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
    inf or nan if the state overflows.
    """

    def __init__(self, factors: Sequence[float] = FACTORS):
        self._factors = list(factors)

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._carried = CarriedStates([(c, x0) for c in self._factors])
        self._carried.begin(depth, x0)

    def forward(self, at: StepContext) -> None:
        self._carried.forward(at)

    def figures(self) -> WeightGrowth:
        ends = [moments(of_text(x, self.kept)) for x in self._carried.figures()]
        mean_abs = [end.mean_abs for end in ends]
        return WeightGrowth(self._factors, mean_abs, [end.variance for end in ends], log_slope(self._factors[-2:], mean_abs[-2:]))


def weight_growth(depth: Depth, x0: Float[Tensor, "*batch tokens width"], *, factors: Sequence[float] = FACTORS) -> WeightGrowth:
    """`GrowthWithWeights` from X_0."""
    found: WeightGrowth = walk_depth(depth, x0, [GrowthWithWeights(factors)])[0]
    return found
