"""The ball of velocities: what clipping a token's length leaves. Compact, so that H is attained."""

from __future__ import annotations

import dataclasses
import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.control.admissible import length, nowhere, ratio
from ctrans.control.ascent import Map
from ctrans.control.norm_image import NormImage
from ctrans.norm import ClipLength


@dataclasses.dataclass(frozen=True, eq=False)
class Ball(NormImage):
    """{f : |f_j| <= c sqrt(d)}: H(P) = c sqrt(d) sum_j |p_j|, attained at -c sqrt(d) p_j/|p_j|; where p_j = 0 all tie."""

    norm: ClipLength

    @property
    def radius(self) -> float:
        """c sqrt(d)."""
        return self.norm.radius * math.sqrt(self.norm.width)

    @property
    def words(self) -> str:
        return f"|f_j| <= {self.radius:g}"

    @property
    def inside(self) -> Map:
        """Outside the norm has no slope along the input, so that a velocity that costs too much would stay."""
        return self.norm

    @property
    def spread(self) -> float:
        return self.norm.radius

    def input(self, f: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width"]:
        return f

    def nearest(self, y: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        return y / (length(y).unsqueeze(-1) / self.radius).clamp_min(1)

    def equidistant(self, y: Float[Tensor, "*batch tokens width"]) -> Bool[Tensor, "*batch tokens"]:
        return nowhere(y)

    def kkt(
        self, P: Float[Tensor, "*batch tokens width"], f: Float[Tensor, "*batch tokens width"], kinetic: float = 0.0
    ) -> Float[Tensor, "*batch"]:
        """The duality gap max over f' of <g, f - f'> = c sqrt(d)|g| + <g, f>, g = P + kinetic f; relative."""
        slope = P + kinetic * f
        gap = self.radius * length(slope) + (slope * f).sum(-1)
        scale = self.radius * length(P) + kinetic * f.square().sum(-1)
        return torch.maximum(ratio(gap.clamp_min(0), scale).amax(-1), self.residual(f))
