"""Boxes of velocities: images of norms that act entry by entry. Clipping attains H, squashing
approaches it.
"""

from __future__ import annotations

import math

import torch

from ctrans.base.shapes import TokenRows, UnbatchedRows
from ctrans.control.admissible import GainSlope, no_ties, ratio, rounding_of
from ctrans.control.ascent import Map, identity
from ctrans.control.gains import BestGains, GainMask, GainPoints, PerGain, has_offset, unit
from ctrans.control.norm_image import NormImage
from ctrans.dynamics.norm import ClipEntries, SquashNorm

NEARLY = 1 - 5e-6
"""The |u_i| that stands for 1 where only infinite inputs attain 1: typical inputs lose the same
share to a norm's eps.
"""


class Box(NormImage):
    """{beta + gamma * u : abs(u_i) <= 1} for each token, or its inside: H(P) = sum_ji abs(gamma_i
    p_ji) - <p_j, beta>.

    Each entry is a separate problem, so the maximiser is a corner, beta - gamma * sign(gamma *
    p_j). Entries with gamma_i p_ji = 0 tie. The set is convex, so the point nearest to y is unique:
    y with its entries clamped.
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
        if isinstance(self.norm, ClipEntries):
            return self.norm
        return identity

    @property
    def spread(self) -> float:
        """The size of inputs with u = 1/2, where the norm bends."""
        half = torch.full_like(self.norm.gamma, 0.5)
        return float((self.norm.preimage(half) - self.norm.preimage(0 * half)).abs().amax())

    def input(self, f: UnbatchedRows) -> UnbatchedRows:
        gamma = self.norm.gamma
        u = torch.where(gamma == 0, 0.0, ratio(f - self.norm.beta, gamma))
        return self.norm.preimage(u if self.attained else NEARLY * u)

    def nearest(self, y: TokenRows) -> TokenRows:
        beta = self.norm.beta
        reach = self.norm.gamma.abs()
        return torch.minimum(torch.maximum(y, beta - reach), beta + reach)

    def slope_in_gains(self, P: UnbatchedRows) -> GainSlope | None:
        """H + <p, beta> = <abs(gamma), a>, a_i = sum_j abs(p_ji): linear in abs(gamma), so both
        bounds are |a|.
        """
        if not self.trained:
            return None
        self.check(P)
        gain = float(P.abs().sum(0).norm())
        if has_offset(self.norm):
            offset = float(P.sum(0).norm())
        else:
            offset = 0.0
        return GainSlope(gain, offset, math.hypot(gain, offset), math.hypot(gain, offset))

    def best_gains(self, P: TokenRows) -> BestGains:
        """kappa = |a| at gamma = a/|a|, a_i = sum_j abs(p_ji)."""
        gamma = unit(P.abs().sum(-2))
        return BestGains(gamma, no_ties(gamma))

    def points(self, P: TokenRows, gamma: PerGain) -> GainPoints:
        return -torch.sign(gamma * P)

    def points_tie(self, P: TokenRows, gamma: PerGain) -> GainMask:
        size = (gamma * P).abs()
        unseen = size <= rounding_of(P) * size.amax((-2, -1), keepdim=True)
        return (unseen & (gamma != 0)).any(-1)

    @property
    def point_chart(self) -> tuple[Map, Map, float]:
        """u itself in the closed box, because only infinite inputs have its corners."""
        return identity, lambda u: u.clamp(-1, 1), 0.5
