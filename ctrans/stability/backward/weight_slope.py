"""How a sublayer's sensitivity follows its weights' scale."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from ctrans.depth import Depth
from ctrans.stability.backward.sensitivity import TOLERANCE, sublayer_sensitivity
from ctrans.stability.forward.weight_scaling import FACTORS, log_slope, scaled
from ctrans.sublayer import Sublayer
from ctrans.walk import Instrument, StepContext


@dataclasses.dataclass(frozen=True)
class Slope:
    """S(c) = |dv/dX|_2 with the weights scaled by c, and the slope of log S against log c over all
    c; nan where S is unknown.
    """

    scaling: str
    factors: list[float]
    values: list[float | None]
    slope: float


def sensitivity_slope(
    sublayer: Sublayer,
    x: Float[Tensor, "*batch tokens width"],
    scaling: str,
    *,
    factors: Sequence[float] = FACTORS,
    eps: float | None = 0.0,
    tolerance: float = TOLERANCE,
) -> Slope:
    """d log S / d log c: 1 where nothing normalises f, 0 behind an output norm (Kan, propositions 7
    and 8; theory, section 7).

    `eps` is put in place of the norms' own, because with eps > 0 the invariance fails where f is
    not large against it. Scaling W1 is invariant only for a positively homogeneous phi without
    bias; its slope falls to 0 as phi saturates to one.
    """
    found = [sublayer_sensitivity(scaled(sublayer, scaling, c, eps=eps), x, tolerance=tolerance).value for c in factors]
    return Slope(scaling, list(factors), found, log_slope(factors, found))


class SlopeAt(Instrument):
    """`sensitivity_slope` of one segment, at the state that enters it; None where the walk does not
    reach it.
    """

    def __init__(self, k: int, scaling: str, *, tolerance: float = TOLERANCE):
        self.k, self.scaling, self.tolerance = k, scaling, tolerance

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._found: Slope | None = None

    def forward(self, at: StepContext) -> None:
        if at.k == self.k:
            self._found = sensitivity_slope(at.sublayer, at.x, self.scaling, tolerance=self.tolerance)

    def figures(self) -> Slope | None:
        return self._found
