"""Conservation laws of the ODE, which hold for all weights, and the drift of a trajectory from
them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import Tensor

from ctrans.dynamics.depth import Depth
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.walk import Instrument, StepContext


@dataclasses.dataclass(frozen=True)
class ConservationLaw:
    """A conservation law: the sublayers where it holds, and the `drift` of a step from X to Y over
    a time h.
    """

    name: str
    statement: str
    holds: Callable[[Sublayer], bool]
    drift: Callable[[Sublayer, Tensor, Tensor, float], Tensor]


def _mean_drift(sublayer: Sublayer, x: Tensor, y: Tensor, h: float) -> Tensor:
    norm = sublayer.output_norm
    assert norm is not None, "the law holds behind an output norm only"
    if sublayer.residual.gains is None:
        moved = y - x
    else:
        moved = (y - x) / sublayer.residual.gains
    return ((moved - h * norm.beta) / norm.gamma).sum(-1).abs().max() / x.shape[-1]


def _image_drift(sublayer: Sublayer, x: Tensor, y: Tensor, h: float) -> Tensor:
    norm = sublayer.state_norm
    assert norm is not None, "the law holds inside a state norm only"
    return norm.constraint_violation(y).max()


LAWS = (
    ConservationLaw(
        "mean",
        "1' Gamma^-1 x_j grows by h 1' Gamma^-1 beta per segment (divided by d; of x_j/g where a"
        " residual has gains g)",
        lambda s: (
            s.state_norm is None
            and s.gain == 1
            and not s.residual.jumps
            and s.output_norm is not None
            and s.output_norm.centred
        ),
        _mean_drift,
    ),
    ConservationLaw(
        "image",
        "the state stays on the image of the norm around it",
        lambda s: s.state_norm is not None,
        _image_drift,
    ),
)


class DriftByDepth(Instrument):
    """The law of this depth and its violation in each segment, largest over tokens; None if no law
    holds.

    `peri` and `output` with LayerNorm conserve each token's mean in the norm's coordinates. This
    holds in the ODE and in any Runge-Kutta method, so the drift is rounding. A norm around the
    state keeps it on the norm's image: exactly in the ODE, up to the method's error in an
    integrator without projection, up to eps/sigma^2 in the discrete model (theory, section 3). If a
    gain is zero, the drift is nan.
    """

    def begin(self, depth: Depth, x0: Tensor) -> None:
        sublayers = list(depth.sublayers)
        self._law = next((law for law in LAWS if all(law.holds(s) for s in sublayers)), None)
        self._drift: list[float] = []

    def forward(self, at: StepContext) -> None:
        if self._law is not None:
            self._drift.append(float(self._law.drift(at.sublayer, at.x, at.y, at.h)))

    def figures(self) -> tuple[ConservationLaw, list[float]] | None:
        if self._law is None:
            return None
        return (self._law, self._drift)
