"""An output projection followed by a scale for each channel, as LayerScale (Touvron et al.
2021).
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from ctrans.dynamics.fields.protocols import HasOutputProjection
from solvers import ConfigError


class ScaledLinear(nn.Module):
    """h -> s * (W h + b): acts as an `nn.Linear` with s * W and s * b. Its parameters are W and b.

    s has a number for each channel, or one for all, and is not a parameter. If no entry of s is 0,
    it reaches the same values as a linear map.
    """

    def __init__(self, linear: nn.Linear, scale: Tensor):
        super().__init__()
        self.linear = linear
        self._scale = scale.detach()

    @property
    def in_features(self) -> int:
        return self.linear.in_features

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        w = self.linear.weight
        return self._scale.to(w).reshape(-1, 1) * w

    @property
    def bias(self) -> Float[Tensor, " out"] | None:
        b = self.linear.bias
        if b is None:
            return None
        return self._scale.to(b) * b

    @property
    def zeros(self) -> int:
        """The number of channels with s = 0, which no W changes."""
        return int((self._scale == 0).sum())

    def forward(self, h: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        y: Tensor = self.linear(h)
        return self._scale.to(y) * y


def scaled_parts(field: object) -> list[ScaledLinear]:
    """The output projections of a map (two for parallel maps) that have a scale, so that weight
    decay acts on another weight.
    """
    try:
        if not isinstance(field, HasOutputProjection):
            return []
        last = field.output_projection
    except ConfigError:  # it has no output projection
        return []
    return [part for part in last.modules() if isinstance(part, ScaledLinear)]
