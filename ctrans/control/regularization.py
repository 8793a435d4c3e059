"""Costs that make a Hamiltonian finite: of velocities (kinetic), of an output norm's gains, or of
weights.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ctrans.base.option import Range
from ctrans.base.shapes import BatchMask, PerBatch, TokenMask, TokenRows, UnbatchedRows
from ctrans.control.admissible import (
    AdmissibleSet,
    Posedness,
    Supremum,
    VelocitySet,
    check_positive,
    length,
    ratio,
    verdict_of,
)
from ctrans.control.ascent import Chart, Map
from ctrans.control.gains import has_offset, unit
from ctrans.control.norm_image import NormImage
from ctrans.control.sets_by_norm import image_of
from ctrans.dynamics.norm import Norm
from solvers import ConfigError

RUNNING_COSTS = Range(1e-12, 1e12, "a positive number from 1e-12 to 1e+12")
"""H is about |P|^2/lam. Outside these limits rounding decides whether evidence holds."""


@dataclass(frozen=True)
class Regularization:
    """Costs lam/2 times a square; each field is lam, or None.

    - `weight_decay`: of all matrices, once in a training loss. It regularises only above the
      threshold of `DecayThreshold`

    The others are running costs, per unit of depth-time: a penalty lam in a training loss is one of
    lam/dt.

    - `last_map_decay`: of the last linear map with its bias, at fixed features
    - `gain_decay`: of an output norm's gains and offsets
    - `kinetic`: of the velocity
    """

    weight_decay: float | None = None
    last_map_decay: float | None = None
    gain_decay: float | None = None
    kinetic: float | None = None

    def __post_init__(self) -> None:
        if self.weight_decay is not None:
            check_positive("weight_decay", self.weight_decay)
        for name, value in vars(self).items():
            if value is not None and name != "weight_decay":
                RUNNING_COSTS.check(name, value)


@dataclass(frozen=True, eq=False)
class KineticCost(AdmissibleSet):
    """H(P) = max over f in a set of -<P, f> - lam/2 |f|^2, attained at the point of the set nearest
    to -P/lam.

    Over the whole space it is |P|^2/(2 lam) at f = -P/lam. If several points are nearest they tie,
    and `nearest` selects one.
    """

    velocities: VelocitySet
    kinetic: float

    def __post_init__(self) -> None:
        check_positive("kinetic", self.kinetic)

    @property
    def words(self) -> str:
        return f"{self.velocities.words}; running cost {self.kinetic:g}/2 |f|^2"

    @property
    def verdict(self) -> Posedness:
        return verdict_of(finite=True)

    def check(self, P: Tensor) -> None:
        self.velocities.check(P)

    def support(self, P: TokenRows) -> PerBatch:
        f = self.maximizer(P)
        return -(P * f).sum((-2, -1)) - self.kinetic / 2 * f.square().sum((-2, -1))

    def maximizer(self, P: TokenRows) -> TokenRows:
        self.check(P)
        return self.velocities.nearest(-P / self.kinetic)

    def ties(self, P: TokenRows) -> TokenMask:
        self.check(P)
        return self.velocities.equidistant(-P / self.kinetic)

    def residual(self, f: TokenRows) -> PerBatch:
        return self.velocities.residual(f)

    def kkt(self, P: TokenRows, f: TokenRows) -> PerBatch:
        return self.velocities.kkt(P, f, self.kinetic)

    def magnification(self, f: UnbatchedRows) -> float:
        return self.velocities.magnification(f)

    def base(self, P: UnbatchedRows) -> float:
        """H - scale, so the difference H - base does not cancel."""
        return float(self.support(P)) - self.scale(P)

    def scale(self, P: UnbatchedRows) -> float:
        """|H - b| + |b| + lam/2 |f*|^2, b the base without cost."""
        base = self.velocities.base(P)
        cost = self.kinetic / 2 * float(self.maximizer(P).square().sum())
        return abs(float(self.support(P)) - base) + abs(base) + cost

    def chart(self, P: UnbatchedRows) -> Chart:
        chart = self.velocities.chart(P)
        return replace(chart, cost=lambda z, f: self.kinetic / 2 * f.square().sum(chart.axes))


@dataclass(frozen=True, eq=False)
class GainDecay(Supremum):
    """sup over u, gamma and beta of -<P, beta + gamma * u_j> - lam/2 (|gamma|^2 + |beta|^2), u_j in
    the norm's image before gains.

    H(P) = (kappa^2 + |sum_j p_j|^2)/(2 lam), kappa the maximum over |gamma| = 1 of the image's H at
    beta = 0. A norm without offset lacks the second term. kappa is

    - sqrt(d) sum_j |C(gamma * p_j)| behind a sphere norm
    - the root of the sum of the groups' kappa_g^2 behind a norm of groups
    - |a| with a_i = sum_j abs(p_ji) behind a box
    - sum_j |p_j| for one gain

    The best gains are kappa/lam times those of `NormImage.best_gains`, the best offset is -sum_j
    p_j/lam. For LayerNorm kappa has local maxima, and `support` is the best value found. H is
    between it and `ceiling`: lower^2/(2 lam) and upper^2/(2 lam) of the slope in gains, which are
    equal if the maximum is proven.
    """

    norm: Norm
    gain_decay: float

    def __post_init__(self) -> None:
        check_positive("gain_decay", self.gain_decay)
        if self.norm.gains == "none":
            raise ConfigError(
                f"{type(self.norm).__name__} has no gains or offsets that could decay: leave"
                " gain_decay out, as H is finite whatever is trained"
            )

    @functools.cached_property
    def image(self) -> NormImage:
        """The norm's image at its own gains."""
        return image_of(self.norm)

    @property
    def words(self) -> str:
        return (
            f"{self.image.words}, any gamma and beta; running cost {self.gain_decay:g}/2 (|gamma|^2"
            " + |beta|^2)"
        )

    @property
    def verdict(self) -> Posedness:
        return verdict_of(finite=True)

    @property
    def attained(self) -> bool:
        return self.norm.attained

    def check(self, P: Tensor) -> None:
        self.image.check(P)

    def gains(self, P: TokenRows) -> tuple[Tensor, Tensor]:
        """gamma and beta that attain H, of shape (*batch, 1, width)."""
        self.check(P)
        best = self.image.best_gains(P.detach()).gamma.unsqueeze(-2)
        kappa = -(P * best * self.image.points(P, best)).sum((-2, -1))[..., None, None]
        if has_offset(self.norm):
            drift = P.sum(-2, keepdim=True)
        else:
            drift = torch.zeros_like(best)
        return kappa / self.gain_decay * best, -drift / self.gain_decay

    def support(self, P: TokenRows) -> PerBatch:
        gamma, beta = self.gains(P)
        return self.gain_decay / 2 * (gamma.square() + beta.square()).sum((-2, -1))

    def maximizer(self, P: TokenRows) -> TokenRows:
        gamma, beta = self.gains(P)
        return beta + gamma * self.image.points(P, gamma)

    def ties(self, P: TokenRows) -> TokenMask:
        gamma, _ = self.gains(P)
        return self.image.points_tie(P, gamma) | self.gains_tie(P).unsqueeze(-1)

    def gains_tie(self, P: TokenRows) -> BatchMask:
        return self.image.best_gains(P.detach()).tied

    def kkt(self, P: TokenRows, f: TokenRows) -> PerBatch:
        """The violation of lam gamma = -sum_j p_j * u_j at the best gains and points, and the
        distance of f from theirs; relative.
        """
        gamma, beta = self.gains(P)
        u = self.image.points(P, gamma)
        remainder = f - beta - gamma * u
        distance = ratio(remainder.flatten(-2).norm(dim=-1), f.flatten(-2).norm(dim=-1))
        slope = self.image.allowed_gains((P * u).sum(-2, keepdim=True))
        error = (self.gain_decay * gamma + slope).norm(dim=(-2, -1))
        stationarity = ratio(error, self.gain_decay * gamma.norm(dim=(-2, -1)))
        return torch.maximum(distance, stationarity)

    def chart(self, P: UnbatchedRows) -> Chart:
        """Raw outputs. The gains are eliminated: for given u the best are -sum_j p_j * u_j/lam. A
        joint ascent would converge slowly.

        There are local maxima, so there are guesses: the best points at random gains.
        """
        self.check(P)
        image = self.image
        standardize, project, spread = image.point_chart
        if has_offset(self.norm):
            beta = -P.sum(0) / self.gain_decay
        else:
            beta = torch.zeros_like(P[0])

        def best_gamma(u: Tensor) -> Tensor:
            return -image.allowed_gains((P * u).sum(-2, keepdim=True)) / self.gain_decay

        def velocity(x: Tensor) -> Tensor:
            u = standardize(x)
            return beta + best_gamma(u) * u

        def cost(x: Tensor, f: Tensor) -> Tensor:
            gamma = best_gamma(standardize(x))
            return self.gain_decay / 2 * (gamma.square().sum((-2, -1)) + beta.square().sum())

        def best_points(gamma: Tensor) -> Tensor:
            u = image.points(P, gamma)
            # for a token without costate any direction serves, but a norm without eps has none at 0
            any_direction = image.points(-torch.ones_like(P), gamma)
            u = torch.where(length(u).unsqueeze(-1) > 0, u, any_direction)
            return math.sqrt(self.norm.width) * spread * unit(u)

        guess: Map | None = None
        if image.gains_have_local_maxima:
            guess = best_points
        return Chart(
            P,
            P.shape,
            velocity,
            axes=(-2, -1),
            cost=cost,
            project=project,
            spread=spread,
            guess=guess,
            joint=True,
        )

    def ceiling(self, P: UnbatchedRows) -> float:
        slope = self.image.slope_in_gains(P)
        assert slope is not None, "the norm has gains to train"
        return slope.upper**2 / (2 * self.gain_decay)
