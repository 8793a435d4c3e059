"""Ellipsoids, their slices and products: images of norms that divide a token by its size.

For eps = 0 a norm's outputs lie on the ellipsoid and attain H, at one point unless it ties. With
eps > 0 they fill its inside (`EllipsoidHull`), which matters only if velocities have a cost.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.base.shapes import PerBatch, TokenMask, TokenRows, UnbatchedRows
from ctrans.control.admissible import (
    GainSlope,
    check_costate,
    length,
    no_ties,
    ratio,
    rounding_of,
)
from ctrans.control.ascent import Chart, Map
from ctrans.control.gains import (
    BestGains,
    GainMask,
    GainPoints,
    PerGain,
    best_gains,
    gain_slope,
    unit,
)
from ctrans.control.norm_image import NormImage
from ctrans.control.trust_region import in_ball, on_sphere
from ctrans.dynamics.norm import GroupRMSNorm, SphereNorm
from solvers import ConfigError

CLOSENESS = 1e-11
"""A norm with eps keeps |u|^2 below d by a share eps/variance. Ascents begin at inputs where it is
1e-11, below their accuracy.
"""
VARIANCES = 1e5
"""The variance of a typical input in units of eps: eps then takes a share of 5e-6 from the norm's
output.
"""


@dataclass(frozen=True, eq=False)
class SphereImage(NormImage):
    """{beta + gamma * u : |u|^2 = d, C u = u} for each token: H(P) = sum_j sqrt(d) |C(gamma * p_j)|
    - <p_j, beta>.

    With w_j = C(gamma * p_j), the maximiser is beta - sqrt(d) gamma * w_j/|w_j|. It is unique
    unless w_j = 0: then every point ties, and `Norm.maximizer` selects one. Zero gains flatten the
    set and negative ones mirror it; both are allowed. This is the image for eps = 0.
    """

    norm: SphereNorm

    @property
    def words(self) -> str:
        sphere = f"f_j = beta + gamma * u_j, |u_j|^2 = {self.norm.width}"
        if self.norm.centred:
            return f"{sphere}, 1'u_j = 0"
        return sphere

    @property
    def hull(self) -> NormImage:
        return EllipsoidHull(self.norm)

    @property
    def radius(self) -> float:
        """|u| = sqrt(d)."""
        return math.sqrt(self.norm.width)

    @property
    def _spectrum(self) -> tuple[Float[Tensor, " rank"], Float[Tensor, "width rank"]]:
        """Eigenvalues and orthonormal eigenvectors of C Gamma^2 C on the range of C."""
        gain = self.norm.gamma.detach().square()
        if not self.norm.centred:
            return gain, torch.eye(len(gain), dtype=gain.dtype, device=gain.device)
        inner = self.norm.centre(self.norm.centre(torch.diag(gain)).mT)
        # 1 is an eigenvector; the shift makes its eigenvalue the last
        values, vectors = torch.linalg.eigh(inner + 2 * gain.amax() / len(gain))
        return values[:-1], vectors[:, :-1]

    def nearest(self, y: TokenRows) -> TokenRows:
        curvature, slope, basis = self._quadratic(y)
        return self._velocity_of(on_sphere(curvature, slope, self.radius)[0] @ basis.mT)

    def equidistant(self, y: TokenRows) -> TokenMask:
        curvature, slope, _ = self._quadratic(y)
        # along a flat direction f does not depend on u
        curved = curvature.amin() > rounding_of(y) * curvature.amax()
        return on_sphere(curvature, slope, self.radius)[1] & curved

    def kkt(self, P: TokenRows, f: TokenRows, kinetic: float = 0.0) -> PerBatch:
        """Stationarity: gamma * (p_j + kinetic f_j) + eta u_j + mu 1 = 0 (Kan, eq. 95 times Gamma;
        mu for LayerNorm only).
        """
        u, slope, scale = self._lagrangian(P, f, kinetic)
        eta = -ratio((u * slope).sum(-1, keepdim=True), u.square().sum(-1, keepdim=True))
        stationarity = ratio(length(slope + eta * u), scale)
        return torch.maximum(stationarity.amax(-1), self.residual(f))

    def slope_in_gains(self, P: UnbatchedRows) -> GainSlope | None:
        """With one number g for all channels, gamma = g/sqrt(d), H grows like g sum_j |C p_j|,
        exactly.
        """
        if not self.trained:
            return None
        if self.norm.gains == "each":
            return gain_slope(self.norm, P)
        gain = float(length(self.norm.centre(P)).sum())
        return GainSlope(gain, offset=0.0, lower=gain, upper=gain)

    def best_gains(self, P: TokenRows) -> BestGains:
        """kappa = sqrt(d) max sum_j |C(gamma * p_j)|: a concave programme in gamma^2 for RMSNorm,
        with local maxima for LayerNorm.
        """
        if self.norm.gains == "each":
            return best_gains(self.norm, P)
        gamma = torch.full_like(P[..., 0, :], 1 / math.sqrt(P.shape[-1]))
        return BestGains(gamma, no_ties(gamma))

    def allowed_gains(self, gamma: Tensor) -> Tensor:
        if self.norm.gains == "each":
            return gamma
        return gamma.mean(-1, keepdim=True).expand_as(gamma)

    def points(self, P: TokenRows, gamma: PerGain) -> GainPoints:
        return -self.radius * unit(self.norm.centre(gamma * P))

    def points_tie(self, P: TokenRows, gamma: PerGain) -> GainMask:
        scaled = gamma * P
        return length(self.norm.centre(scaled)) <= rounding_of(P) * length(scaled)

    @property
    def gains_have_local_maxima(self) -> bool:
        return self.norm.centred or self.norm.width == 1

    @property
    def spread(self) -> float:
        return math.sqrt(max(1.0, self.norm.eps / CLOSENESS))

    def input(self, f: UnbatchedRows) -> UnbatchedRows:
        """x with norm(x) = f up to a share 1/VARIANCES of it."""
        return math.sqrt(max(1.0, VARIANCES * self.norm.eps)) * self._point(f)

    def _velocity_of(self, u: Tensor) -> Tensor:
        return self.norm.beta + self.norm.gamma * u

    def _quadratic(self, y: TokenRows) -> tuple[Tensor, Tensor, Tensor]:
        """A, b and an orthonormal basis Q with |beta + gamma * Q s - y|^2/2 = s'As/2 + b's +
        constant, A diagonal.
        """
        curvature, basis = self._spectrum
        return curvature, (self.norm.gamma * (self.norm.beta - y)) @ basis, basis

    def _lagrangian(self, P: Tensor, f: Tensor, kinetic: float) -> tuple[Tensor, Tensor, Tensor]:
        """u with f = beta + gamma * u, the gradient C(gamma * (P + kinetic f)) in u, and the size
        of that gradient's terms.
        """
        gamma = self.norm.gamma
        slope = self.norm.centre(gamma * (P + kinetic * f))
        # f is a difference of terms of its set's size: ignores their rounding
        rounding = torch.finfo(P.dtype).eps ** (1 / 3) * self.radius * float(gamma.square().amax())
        scale = length(gamma * P) + kinetic * length(gamma * f).clamp_min(rounding)
        return self._point(f), slope, scale

    def _point(self, f: TokenRows) -> TokenRows:
        """u with f = beta + gamma * u. A zero gain hides an entry; hidden entries are those of an
        optimum: equal with 1'u = 0 (LayerNorm), or 0 (RMSNorm).
        """
        hidden = self.norm.gamma == 0
        u = torch.where(hidden, 0.0, ratio(f - self.norm.beta, self.norm.gamma))
        if not self.norm.centred:
            return u
        hidden_entry = -u.sum(-1, keepdim=True) / hidden.sum().clamp_min(1)
        return torch.where(hidden, hidden_entry, u)


@dataclass(frozen=True, eq=False)
class Ellipsoid(SphereImage):
    """{f : |Gamma^-1 (f_j - beta)|^2 = d}, RMSNorm's image: H(P) = sum_j sqrt(d) |gamma * p_j|
    (Kan, eq. 87 and 99).
    """

    def __post_init__(self) -> None:
        if self.norm.centred:
            raise ConfigError(
                "the image of a norm that centres, such as LayerNorm, is only a slice of the"
                " ellipsoid: use EllipsoidSlice"
            )


@dataclass(frozen=True, eq=False)
class EllipsoidSlice(SphereImage):
    """{f : |Gamma^-1 (f_j - beta)|^2 = d, 1' Gamma^-1 (f_j - beta) = 0}, LayerNorm's image (Kan,
    Lemma 1, corrected).
    """

    def __post_init__(self) -> None:
        if not self.norm.centred or self.norm.width < 2:
            raise ConfigError(
                "an ellipsoid's slice is the image of a LayerNorm of width 2 or more: use Ellipsoid"
                " for RMSNorm"
            )


@dataclass(frozen=True, eq=False)
class EllipsoidHull(SphereImage):
    """{beta + gamma * u : |u|^2 <= d, C u = u} for each token: the closure of the outputs of a norm
    with eps > 0; convex.

    H and its maximiser are those of the image itself. The point nearest to y is unique, so a
    kinetic cost has no ties.
    """

    def __post_init__(self) -> None:
        if not self.norm.reaches_inside:
            raise ConfigError(
                "a norm with eps = 0 reaches no velocity inside its image: use the image itself"
            )

    @property
    def words(self) -> str:
        return f"convex hull of {super().words}"

    @property
    def hull(self) -> NormImage:
        return self

    def residual(self, f: TokenRows) -> PerBatch:
        norm = self.norm
        u = self._point(f)
        outside = (u.square().mean(-1) - 1).clamp_min(0)
        off_centre = (u - norm.centre(u)).abs().amax(-1)
        off_flat = torch.where(norm.gamma == 0, f - norm.beta, 0.0).abs().amax(-1)
        return torch.stack([outside, off_centre, off_flat]).amax(0).amax(-1)

    def nearest(self, y: TokenRows) -> TokenRows:
        curvature, slope, basis = self._quadratic(y)
        return self._velocity_of(in_ball(curvature, slope, self.radius) @ basis.mT)

    def equidistant(self, y: TokenRows) -> TokenMask:
        return no_ties(y)

    def kkt(self, P: TokenRows, f: TokenRows, kinetic: float = 0.0) -> PerBatch:
        """As for the image, with eta >= 0 and eta (1 - |u_j|^2/d) = 0."""
        u, slope, scale = self._lagrangian(P, f, kinetic)
        eta = ratio(-(u * slope).sum(-1), u.square().sum(-1)).clamp_min(0)
        slack = eta * length(u) * (1 - u.square().mean(-1)).abs()
        error = torch.maximum(length(slope + eta.unsqueeze(-1) * u), slack)
        return torch.maximum(ratio(error, scale).amax(-1), self.residual(f))

    def chart(self, P: UnbatchedRows) -> Chart:
        """Velocities norm(x) at the x with x_hat = u: in this coordinate the inside is as easy to
        reach as the surface.
        """
        norm = self.norm
        chart = super().chart(P)
        return replace(
            chart,
            degree=None,
            velocity=lambda u: norm(norm.preimage(u)),
            project=self._into_ball,
            spread=1.0,
        )

    def _into_ball(self, u: Tensor) -> Tensor:
        largest = 1 - max(CLOSENESS, rounding_of(u))
        u = self.norm.centre(u)
        return u / (u.square().mean(-1, keepdim=True) / largest).clamp_min(1).sqrt()


@dataclass(frozen=True, eq=False)
class EllipsoidProduct(NormImage):
    """{f : |f_jg/gamma_g|^2 = m for each group g of m channels}: H(P) = sum_j sum_g sqrt(m)
    |gamma_g * p_jg|.

    Each group of channels is a separate problem over its own ellipsoid, one of `factors`. `inner`
    includes the inside of each ellipsoid, which a norm with eps > 0 reaches.
    """

    norm: GroupRMSNorm
    inner: bool = False

    @functools.cached_property
    def factors(self) -> Sequence[SphereImage]:
        """Each group's set."""
        if self.inner:
            return [EllipsoidHull(part) for part in self.norm.parts]
        return [Ellipsoid(part) for part in self.norm.parts]

    @property
    def words(self) -> str:
        if self.inner:
            sign = "<="
        else:
            sign = "="
        return (
            f"f_j = gamma * u_j, |u_jg|^2 {sign} {self.norm.group_width}"
            f" in each of {self.norm.groups} groups"
        )

    @property
    def hull(self) -> NormImage:
        return EllipsoidProduct(self.norm, inner=True)

    @property
    def parts(self) -> int:
        return self.norm.groups

    @property
    def spread(self) -> float:
        return self.factors[0].spread

    def input(self, f: UnbatchedRows) -> UnbatchedRows:
        return torch.cat(self._each("input", f), -1)

    def residual(self, f: TokenRows) -> PerBatch:
        return torch.stack(self._each("residual", f)).amax(0)

    def nearest(self, y: TokenRows) -> TokenRows:
        return torch.cat(self._each("nearest", y), -1)

    def equidistant(self, y: TokenRows) -> TokenMask:
        return torch.stack(self._each("equidistant", y)).any(0)

    def kkt(self, P: TokenRows, f: TokenRows, kinetic: float = 0.0) -> PerBatch:
        return torch.stack(self._each("kkt", P, f, kinetic=kinetic)).amax(0)

    def slope_in_gains(self, P: UnbatchedRows) -> GainSlope | None:
        """The groups' gains share one bound: sum_g r_g kappa_g over |r| = 1 is |kappa|, and
        RMSNorm's kappa_g are proven.
        """
        slopes = [
            gain_slope(factor.norm, p)
            for factor, p in zip(self.factors, self._split(P), strict=True)
        ]
        gain = math.hypot(*(slope.lower for slope in slopes))
        upper = math.hypot(*(slope.upper for slope in slopes))
        return GainSlope(gain, offset=0.0, lower=gain, upper=upper)

    def best_gains(self, P: TokenRows) -> BestGains:
        """kappa^2 = sum_g kappa_g^2: over |gamma| = 1 the gains of a group have a length
        proportional to its kappa_g.
        """
        by_group = self._each("best_gains", P)
        gammas = [
            best.gamma * length(best.gamma.unsqueeze(-2) * p).sum(-1, keepdim=True)
            for best, p in zip(by_group, self._split(P), strict=True)
        ]
        nonzero = torch.stack([gamma.abs().amax(-1) > 0 for gamma in gammas])
        tied = torch.stack([best.tied for best in by_group])
        return BestGains(unit(torch.cat(gammas, -1)), (tied & nonzero).any(0))

    def points(self, P: TokenRows, gamma: PerGain) -> GainPoints:
        return torch.cat(self._each("points", P, gamma), -1)

    def points_tie(self, P: TokenRows, gamma: PerGain) -> GainMask:
        return torch.stack(self._each("points_tie", P, gamma)).any(0)

    @property
    def gains_have_local_maxima(self) -> bool:
        return self.norm.group_width == 1

    def chart(self, P: UnbatchedRows) -> Chart:
        chart = super().chart(P)
        if not self.inner:
            return chart
        charts = self._each("chart", P)

        def by_group(maps: list[Map]) -> Map:
            return lambda u: torch.cat(
                [of_group(part) for of_group, part in zip(maps, self._split(u), strict=True)], -1
            )

        velocity = by_group([group_chart.velocity for group_chart in charts])
        project = by_group([group_chart.project for group_chart in charts])
        return replace(chart, degree=None, velocity=velocity, project=project, spread=1.0)

    def _each(self, method: str, *rows: Tensor, **options: float) -> list[Any]:
        """The results of a method of each factor for its own channels of the rows."""
        groups = zip(self.factors, *map(self._split, rows), strict=True)
        return [getattr(factor, method)(*parts, **options) for factor, *parts in groups]

    def _split(self, x: Tensor) -> Sequence[Tensor]:
        groups: Sequence[Tensor] = x.split(self.norm.group_width, -1)
        return groups


def ellipsoid_value(norm: SphereNorm, P: TokenRows) -> PerBatch:
    """sum_j sqrt(d) |gamma * p_j| - <p_j, beta>: H as Kan prints it for both norms (eq. 99); for
    LayerNorm an upper bound.

    It equals LayerNorm's H only if 1'(gamma * p_j) = 0 for each token.
    """
    check_costate(P, norm.gamma.dtype, width=norm.width)
    return (math.sqrt(norm.width) * length(norm.gamma * P) - P @ norm.beta).sum(-1)
