"""Images of norms: the set of velocities behind an output norm. It is bounded, so H is finite.

Boxes and balls are here, ellipsoids in `ctrans.control.ellipsoids`.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod

import torch
from torch import Tensor

from ctrans.base.shapes import PerBatch, TokenMask, TokenRows, UnbatchedRows
from ctrans.control.admissible import (
    GainSlope,
    Posedness,
    VelocitySet,
    check_costate,
    length,
    no_ties,
    ratio,
    rounding_of,
    verdict_of,
)
from ctrans.control.ascent import Chart, Gains, Map, identity
from ctrans.control.gains import BestGains, GainMask, GainPoints, PerGain, has_offset, unit
from ctrans.dynamics.norm import ClipEntries, ClipLength, Norm, SquashNorm
from solvers import ConfigError

NEARLY = 1 - 5e-6
"""The |u_i| that stands for 1 where only infinite inputs attain 1: typical inputs lose the same
share to a norm's eps.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class NormImage(VelocitySet):
    """{f : each f_j in the closure of the norm's image}: H(P) = sum_j support(-p_j), with the
    support and the maximiser of `Norm`.
    """

    norm: Norm

    @property
    def trained(self) -> bool:
        """Whether the norm has gains or offsets to train. H is proportional to them."""
        return bool(self.norm.linear_parameters())

    @property
    def verdict(self) -> Posedness:
        return verdict_of(finite=True, bounded_gains=self.trained)

    @property
    def attained(self) -> bool:
        return self.norm.attained

    def check(self, P: Tensor) -> None:
        check_costate(P, self.norm.gamma.dtype, width=self.norm.width)

    def support(self, P: TokenRows) -> PerBatch:
        self.check(P)
        return self.norm.support(-P).sum(-1)

    def maximizer(self, P: TokenRows) -> TokenRows:
        self.check(P)
        return self.norm.maximizer(-P)

    def ties(self, P: TokenRows) -> TokenMask:
        self.check(P)
        return self.norm.ties(P)

    def residual(self, f: TokenRows) -> PerBatch:
        return self.norm.constraint_violation(f).amax(-1)

    def base(self, P: UnbatchedRows) -> float:
        return -float((P @ self.norm.beta).sum())

    def magnification(self, f: UnbatchedRows) -> float:
        """The largest (|f_i| + |beta_i|)/|gamma_i|: u = (f - beta)/gamma has entries of about 1."""
        nonzero = self.norm.gamma != 0
        if not nonzero.any():
            return 1.0
        shares = (f.abs() + self.norm.beta.abs()) / self.norm.gamma.abs()
        return float(shares[..., nonzero].max())

    def chart(self, P: UnbatchedRows) -> Chart:
        """Raw outputs x, through the module itself."""
        self.check(P)
        gains: Gains | None = None
        if self.trained:
            gains = self._gains
        return Chart(
            P,
            P.shape,
            self.norm,
            degree=0,
            project=self.inside,
            spread=self.spread,
            raw=self.input,
            gains=gains,
            parts=self.parts,
        )

    @property
    def hull(self) -> NormImage:
        """The convex hull of the set; itself if it is convex."""
        return self

    def kkt(self, P: TokenRows, f: TokenRows, kinetic: float = 0.0) -> PerBatch:
        """The duality gap max over f' of <g, f - f'> = H(g) + <g, f>, g = P + kinetic f, of a
        convex set; relative.
        """
        slope = P + kinetic * f
        beta = self.norm.beta
        gap = self.norm.support(-slope) + (slope * f).sum(-1)
        scale = (
            self.norm.support(-P)
            + P @ beta
            + (P * beta).abs().sum(-1)
            + kinetic * f.square().sum(-1)
        )
        return torch.maximum(ratio(gap.clamp_min(0), scale).amax(-1), self.residual(f))

    @property
    def parts(self) -> int:
        """Into how many problems of consecutive entries the problem of one token splits."""
        return 1

    @property
    def inside(self) -> Map:
        """Projects inputs of an ascent to where the norm has a nonzero slope."""
        return identity

    @property
    @abstractmethod
    def spread(self) -> float:
        """The standard deviation of random inputs from which ascents begin."""

    @abstractmethod
    def input(self, f: UnbatchedRows) -> UnbatchedRows:
        """x with norm(x) = f, approximately if no input has exactly that, and so large that eps
        does not matter.
        """

    def best_gains(self, P: TokenRows) -> BestGains:
        """gamma of length 1 with the largest H at beta = 0, and whether other gains have it too.
        Raises ConfigError if none is known.
        """
        raise ConfigError(
            f"no closed form is known here for a decay of the gains of {type(self.norm).__name__}:"
            " leave gain_decay out; kinetic applies"
        )

    def allowed_gains(self, gamma: Tensor) -> Tensor:
        """The nearest gains that the norm can have."""
        return gamma

    def points(self, P: TokenRows, gamma: PerGain) -> GainPoints:
        """u_j of the closed image before gains with the largest -<p_j, gamma * u_j>; 0 if every
        point ties.
        """
        raise NotImplementedError(f"{type(self).__name__} has no points")

    def points_tie(self, P: TokenRows, gamma: PerGain) -> GainMask:
        """The tokens for which several points have the largest value at these gains."""
        raise NotImplementedError(f"{type(self).__name__} has no points")

    @property
    def gains_have_local_maxima(self) -> bool:
        """Whether an ascent over points and gains needs more starts."""
        return False

    @property
    def point_chart(self) -> tuple[Map, Map, float]:
        """Coordinates of u for an ascent: their map to u, their projection, and the size of
        starts.
        """
        return self.norm.standardize, identity, self.spread

    @property
    def _gains(self) -> Gains:
        norm = self.norm
        if norm.gains == "each":
            gamma = norm.gamma
            beta = norm.beta
            has_trained_offset = has_offset(norm)
            scale = 1.0
        else:
            gamma = torch.linalg.vector_norm(norm.gamma).reshape(1)
            beta = torch.zeros_like(gamma)
            has_trained_offset = False
            scale = math.sqrt(norm.width)

        def velocity(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
            return gamma / scale * norm.standardize(x) + beta

        return Gains(gamma, beta, has_trained_offset, velocity)


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
        if self.attained:
            sign = "<="
        else:
            sign = "<"
        return f"f_j = beta + gamma * u_j, abs(u_ji) {sign} 1"

    def chart(self, P: UnbatchedRows) -> Chart:
        """Raw outputs x. Raises ConfigError for an alpha of 0, at which the image is the one point
        beta, and the box only what it becomes at any other alpha.
        """
        if isinstance(self.norm, SquashNorm) and not self.norm.alpha.any():
            raise ConfigError(
                f"alpha of a {type(self.norm).__name__} is 0, so it returns its offset whatever it"
                " reads: H is not known there; give alpha a small number"
            )
        return super().chart(P)

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
        if not self.attained:
            u = NEARLY * u
        return self.norm.preimage(u)

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
        offset = 0.0
        if has_offset(self.norm):
            offset = float(P.sum(0).norm())
        slope = math.hypot(gain, offset)
        return GainSlope(gain, offset, lower=slope, upper=slope)

    def best_gains(self, P: TokenRows) -> BestGains:
        """kappa = |a| at gamma = a/|a|, a_i = sum_j abs(p_ji)."""
        gamma = unit(P.abs().sum(-2))
        return BestGains(gamma, no_ties(gamma))

    def points(self, P: TokenRows, gamma: PerGain) -> GainPoints:
        return -torch.sign(gamma * P)

    def points_tie(self, P: TokenRows, gamma: PerGain) -> GainMask:
        size = (gamma * P).abs()
        zero = size <= rounding_of(P) * size.amax((-2, -1), keepdim=True)
        return (zero & (gamma != 0)).any(-1)

    @property
    def point_chart(self) -> tuple[Map, Map, float]:
        """u itself in the closed box, because only infinite inputs have its corners."""
        return identity, lambda u: u.clamp(-1, 1), 0.5


class Ball(NormImage):
    """{f : |f_j| <= c sqrt(d)}: H(P) = c sqrt(d) sum_j |p_j|, attained at -c sqrt(d) p_j/|p_j|; if
    p_j = 0 all points tie.
    """

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
        """The norm itself: outside the ball it has no slope along the input, so an ascent would not
        leave a costly velocity.
        """
        return self.norm

    @property
    def spread(self) -> float:
        return self.norm.radius

    def input(self, f: UnbatchedRows) -> UnbatchedRows:
        return f

    def nearest(self, y: TokenRows) -> TokenRows:
        return y / (length(y).unsqueeze(-1) / self.radius).clamp_min(1)
