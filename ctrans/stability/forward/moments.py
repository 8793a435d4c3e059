"""Moments of a hidden state."""

from __future__ import annotations

import dataclasses

from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.walk.instrument import of_text


@dataclasses.dataclass(frozen=True)
class Moments:
    """Moments of all entries of a hidden state: mean absolute value, sample variance, root mean
    square |X|/sqrt(nd).
    """

    mean_abs: float
    variance: float
    rms: float


def moments(x: Float[Tensor, "*batch tokens width"], kept: Bool[Tensor, "*batch tokens"] | None = None) -> Moments:
    """The moments over all entries, or those of the tokens in `kept`; in float64 if the device has
    it.

    `States(moments)` measures them by depth.
    """
    x = of_text(x.detach(), kept)
    x = x.double() if x.device.type != "mps" else x
    return Moments(float(x.abs().mean()), float(x.var()) if x.numel() > 1 else 0.0, float(x.square().mean().sqrt()))
