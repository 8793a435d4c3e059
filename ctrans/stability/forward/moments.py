"""Moments of the hidden state by depth."""

from __future__ import annotations

import dataclasses

from jaxtyping import Float
from torch import Tensor

from ctrans.depth import Depth
from ctrans.walk import Instrument, StepContext
from ctrans.walk.instrument import of_text


@dataclasses.dataclass(frozen=True)
class Moments:
    """Moments of all entries of a hidden state: mean absolute value, sample variance, root mean
    square |X|/sqrt(nd).
    """

    mean_abs: float
    variance: float
    rms: float


def moments(x: Float[Tensor, "*batch tokens width"]) -> Moments:
    """The moments over all entries, in float64 if the device has it."""
    x = x.detach().double() if x.device.type != "mps" else x.detach()
    return Moments(float(x.abs().mean()), float(x.var()) if x.numel() > 1 else 0.0, float(x.square().mean().sqrt()))


class MomentsByDepth(Instrument):
    """`Moments` of X_0 and of X at each segment's end."""

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._each = [moments(of_text(x0, self.kept))]

    def forward(self, at: StepContext) -> None:
        self._each.append(moments(of_text(at.y, self.kept)))

    def figures(self) -> list[Moments]:
        return self._each
