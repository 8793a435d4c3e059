"""A last linear map with a scale by channel behind it, as LayerScale (Touvron et al. 2021) has it."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from ctrans.fields.protocols import HasOutputProjection
from solvers import ConfigError


class ScaledLinear(nn.Module):
    """h -> s * (W h + b): what `nn.Linear` is to s * W and s * b, by the parameters of W and b.

    s has a number for each channel, or one for all, and is none of its parameters. Where no entry
    of s is 0, its values as W and b vary are those of a linear map.
    """

    def __init__(self, linear: nn.Linear, scale: Tensor):
        super().__init__()
        self.linear, self._scale = linear, scale.detach()

    @property
    def in_features(self) -> int:
        return self.linear.in_features

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        w = self.linear.weight
        return self._scale.to(w).reshape(-1, 1) * w

    @property
    def bias(self) -> Float[Tensor, " out"] | None:
        b: Tensor | None = self.linear.bias
        return None if b is None else self._scale.to(b) * b

    @property
    def zeros(self) -> int:
        """How many entries of s are 0: no W moves these channels."""
        return int((self._scale == 0).sum())

    def forward(self, h: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        y: Tensor = self.linear(h)
        return self._scale.to(y) * y


def scaled_parts(field: object) -> list[ScaledLinear]:
    """The last linear map, or of two side by side each, that has a scale behind it, so that its
    weight is not the one that decays.
    """
    try:
        last = field.output_projection if isinstance(field, HasOutputProjection) else nn.Identity()
    except ConfigError:  # it has no last linear map, and says why
        return []
    return [part for part in last.modules() if isinstance(part, ScaledLinear)]
