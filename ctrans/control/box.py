"""Boxes of velocities: images of norms that act entry by entry. H is attained by clipping, and approached by squashing."""

from __future__ import annotations

import dataclasses
import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.control.admissible import GainSlope, check_costate, nowhere, ratio
from ctrans.control.ascent import Map, unchanged
from ctrans.control.gains import has_offset
from ctrans.control.norm_image import NormImage
from ctrans.norm import ClipEntries, SquashNorm

NEARLY = 1 - 5e-6
"""What |u_i| = 1 is approached by where only infinite inputs have it: the share that typical inputs lose to a norm's eps."""


@dataclasses.dataclass(frozen=True, eq=False)
class Box(NormImage):
    """{beta + gamma * u : abs(u_i) <= 1} for each token, or its inside: H(P) = sum_ji abs(gamma_i p_ji) - <p_j, beta>.

    Each entry is a problem by itself, so the maximiser is a corner, beta - gamma * sign(gamma * p_j); entries with gamma_i p_ji = 0
    tie. The set is convex, so that the point nearest to y is unique: y with its entries clamped.
    """

    norm: SquashNorm | ClipEntries

    @property
    def words(self) -> str:
        return f"f_j = beta + gamma * u_j, abs(u_ji) {'<=' if self.attained else '<'} 1"

    @property
    def parts(self) -> int:
        return self.norm.width

    @property
    def inside(self) -> Map:
        return self.norm if isinstance(self.norm, ClipEntries) else unchanged

    @property
    def spread(self) -> float:
        """Where u = 1/2: there the norm bends."""
        half = torch.full_like(self.norm.gamma, 0.5)
        return float((self.norm.preimage(half) - self.norm.preimage(0 * half)).abs().amax())

    def input(self, f: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width"]:
        gamma = self.norm.gamma
        u = torch.where(gamma == 0, 0.0, (f - self.norm.beta) / torch.where(gamma == 0, 1.0, gamma))
        return self.norm.preimage(u if self.attained else NEARLY * u)

    def nearest(self, y: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        beta, reach = self.norm.beta, self.norm.gamma.abs()
        return torch.minimum(torch.maximum(y, beta - reach), beta + reach)

    def equidistant(self, y: Float[Tensor, "*batch tokens width"]) -> Bool[Tensor, "*batch tokens"]:
        return nowhere(y)

    def kkt(
        self, P: Float[Tensor, "*batch tokens width"], f: Float[Tensor, "*batch tokens width"], kinetic: float = 0.0
    ) -> Float[Tensor, "*batch"]:
        """The duality gap max over f' of <g, f - f'>, g = P + kinetic f: 0 just at a maximiser of a concave payoff; relative."""
        reach, slope = self.norm.gamma.abs(), P + kinetic * f
        gap = (reach * slope.abs() + slope * (f - self.norm.beta)).sum(-1)
        scale = (reach * P.abs() + kinetic * f.square() + P.abs() * self.norm.beta.abs()).sum(-1)
        return torch.maximum(ratio(gap.clamp_min(0), scale).amax(-1), self.residual(f))

    def slope_in_gains(self, P: Float[Tensor, "tokens width"]) -> GainSlope | None:
        """H + <p, beta> = <abs(gamma), a>, a_i = sum_j abs(p_ji): linear in abs(gamma), so that the bounds meet, at |a|."""
        if not self.trained:
            return None
        check_costate(P, self.norm.gamma.dtype, width=self.norm.width)
        gain = float(P.abs().sum(0).norm())
        offset = float(P.sum(0).norm()) if has_offset(self.norm) else 0.0
        return GainSlope(gain, offset, math.hypot(gain, offset), math.hypot(gain, offset))
