"""How a sublayer's sensitivity depends on the scale of its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from ctrans.base.shapes import TokenRows
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.backward.sensitivity import TOLERANCE, sublayer_sensitivity
from ctrans.measure.forward.weight_scaling import FACTORS, log_slope, scaled
from ctrans.measure.walk import Instrument, StepContext


@dataclasses.dataclass(frozen=True)
class Slope:
    """S(c) = |dv/dX|_2 with the weights scaled by c, and the slope of log S against log c. The
    slope is nan if an S is unknown.
    """

    scaling: str
    factors: list[float]
    values: list[float | None]
    slope: float


def sensitivity_slope(
    sublayer: Sublayer,
    x: TokenRows,
    scaling: str,
    *,
    factors: Sequence[float] = FACTORS,
    eps: float | None = 0.0,
    tolerance: float = TOLERANCE,
) -> Slope:
    """d log S / d log c: 1 where nothing normalises f, 0 behind an output norm (Kan, propositions 7
    and 8; theory, section 7).

    `eps` replaces that of the norms, because with eps > 0 the invariance fails where f is small.
    Scaling W1 is invariant only for a positively homogeneous phi without bias. Its slope falls to 0
    as phi saturates.
    """
    sensitivities = [
        sublayer_sensitivity(scaled(sublayer, scaling, c, eps=eps), x, tolerance=tolerance).value
        for c in factors
    ]
    return Slope(scaling, list(factors), sensitivities, log_slope(factors, sensitivities))


class SlopeAt(Instrument):
    """`sensitivity_slope` of segment k at its input state. None if the walk does not reach it."""

    def __init__(self, k: int, scaling: str, *, tolerance: float):
        self.k = k
        self.scaling = scaling
        self.tolerance = tolerance

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self.found: Slope | None = None

    def forward(self, at: StepContext) -> None:
        if at.k == self.k:
            self.found = sensitivity_slope(
                at.sublayer, at.x, self.scaling, tolerance=self.tolerance
            )
