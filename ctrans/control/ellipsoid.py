"""Ellipsoids and their slices: images of norms that divide a token by its size. H is attained for eps = 0, off ties at one point.

The image of a norm with eps > 0: the inside of the ellipsoid too, which matters as soon as velocities cost something.

Products of ellipsoids: the image of a norm of groups of channels. Each group is a problem by itself."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.control.admissible import ROUNDING, GainSlope, Posedness, VelocitySet, check_costate, length, nowhere, ratio
from ctrans.control.ascent import Chart
from ctrans.control.gains import gain_slope
from ctrans.control.norm_image import NormImage
from ctrans.control.trust_region import in_ball, on_sphere
from ctrans.norm import GroupRMSNorm, SphereNorm
from solvers import ConfigError

CLOSENESS = 1e-11
"""A norm with eps keeps |u|^2 below d by a share eps/variance: ascents begin at inputs where that is 1e-11, below what they
are to certify."""
VARIANCES = 1e5
"""How many times eps the variance of an input is that counts as typical: eps then takes a share of 5e-6 from the norm's output."""


@dataclasses.dataclass(frozen=True, eq=False)
class SphereImage(NormImage):
    """{beta + gamma * u : |u|^2 = d, C u = u} for each token: H(P) = sum_j sqrt(d) |C(gamma * p_j)| - <p_j, beta>.

    With w_j = C(gamma * p_j), the maximiser is beta - sqrt(d) gamma * w_j/|w_j|. It is unique except where w_j = 0: every
    point ties there, and the rule is `Norm.maximizer`'s. Zero gains flatten the set and negative ones mirror it; both are
    allowed.

    This is the image for eps = 0. For eps > 0 it is filled, |u|^2 < d: see `FilledImage`, with the same H, but different
    velocities under a running cost.
    """

    norm: SphereNorm

    @abc.abstractmethod
    def _spectrum(self) -> tuple[Float[Tensor, " rank"], Float[Tensor, "width rank"]]:
        """Eigenvalues and orthonormal eigenvectors of C Gamma^2 C on the range of C."""

    def nearest(self, y: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        curvature, slope, basis = self.quadratic(y)
        u = on_sphere(curvature, slope, math.sqrt(self.norm.width))[0] @ basis.mT
        return self.norm.beta + self.norm.gamma * u

    def equidistant(self, y: Float[Tensor, "*batch tokens width"]) -> Bool[Tensor, "*batch tokens"]:
        curvature, slope, _ = self.quadratic(y)
        # along a flat direction an entry of u is free without showing in f
        curved = curvature.amin() > ROUNDING * torch.finfo(y.dtype).eps * curvature.amax()
        return on_sphere(curvature, slope, math.sqrt(self.norm.width))[1] & curved

    def kkt(
        self, P: Float[Tensor, "*batch tokens width"], f: Float[Tensor, "*batch tokens width"], kinetic: float = 0.0
    ) -> Float[Tensor, "*batch"]:
        """Stationarity: gamma * (p_j + kinetic f_j) + eta u_j + mu 1 = 0 (Kan, eq. 95 times Gamma; mu for LayerNorm only)."""
        u, slope, scale = self.lagrangian(P, f, kinetic)
        eta = -ratio((u * slope).sum(-1, keepdim=True), u.square().sum(-1, keepdim=True))
        return torch.maximum(ratio(length(slope + eta * u), scale).amax(-1), self.residual(f))

    def slope_in_gains(self, P: Float[Tensor, "tokens width"]) -> GainSlope | None:
        """For one number g in all channels, gamma = g/sqrt(d): H grows like g sum_j |C p_j|, exactly."""
        if not self.trained:
            return None
        if self.norm.gains == "each":
            return gain_slope(self.norm, P)
        gain = float(length(self.norm.centre(P)).sum())
        return GainSlope(gain, 0.0, gain, gain)

    @property
    def spread(self) -> float:
        return math.sqrt(max(1.0, self.norm.eps / CLOSENESS))

    def input(self, f: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width"]:
        """x with norm(x) = f but for a share 1/VARIANCES of it."""
        return math.sqrt(max(1.0, VARIANCES * self.norm.eps)) * self.point(f)

    def quadratic(self, y: Float[Tensor, "*batch tokens width"]) -> tuple[Tensor, Tensor, Tensor]:
        """A, b and an orthonormal basis Q with |beta + gamma * Q s - y|^2/2 = s'As/2 + b's + constant, A diagonal."""
        curvature, basis = self._spectrum()
        return curvature, (self.norm.gamma * (self.norm.beta - y)) @ basis, basis

    def lagrangian(self, P: Tensor, f: Tensor, kinetic: float) -> tuple[Tensor, Tensor, Tensor]:
        """u with f = beta + gamma * u, the gradient C(gamma * (P + kinetic f)) in u, and the size of that gradient's terms."""
        gamma = self.norm.gamma
        slope = self.norm.centre(gamma * (P + kinetic * f))
        # f is a difference of terms of its set's size, whose rounding alone must not show
        rounding = torch.finfo(P.dtype).eps ** (1 / 3) * math.sqrt(self.norm.width) * float(gamma.square().amax())
        return self.point(f), slope, length(gamma * P) + kinetic * length(gamma * f).clamp_min(rounding)

    def point(self, f: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        """u with f = beta + gamma * u. Entries hidden by a zero gain are chosen as at an optimum: equal, with 1'u = 0
        (LayerNorm), or 0 (RMSNorm)."""
        hidden = self.norm.gamma == 0
        u = torch.where(hidden, 0.0, (f - self.norm.beta) / torch.where(hidden, 1.0, self.norm.gamma))
        rest = -u.sum(-1, keepdim=True) / hidden.sum().clamp_min(1) if self.norm.centred else 0.0
        return torch.where(hidden, rest, u)


@dataclasses.dataclass(frozen=True, eq=False)
class Ellipsoid(SphereImage):
    """{f : |Gamma^-1 (f_j - beta)|^2 = d}, RMSNorm's image: H(P) = sum_j sqrt(d) |gamma * p_j| (Kan, eq. 87 and 99)."""

    def __post_init__(self) -> None:
        if self.norm.centred:
            raise ConfigError(
                "the image of a norm that centres, such as LayerNorm, is only a slice of the ellipsoid: use EllipsoidSlice"
            )

    @property
    def words(self) -> str:
        return f"f_j = beta + gamma * u_j, |u_j|^2 = {self.norm.width}"

    def _spectrum(self) -> tuple[Tensor, Tensor]:
        gain = self.norm.gamma.detach().square()
        return gain, torch.eye(len(gain), dtype=gain.dtype, device=gain.device)


@dataclasses.dataclass(frozen=True, eq=False)
class EllipsoidSlice(SphereImage):
    """{f : |Gamma^-1 (f_j - beta)|^2 = d, 1' Gamma^-1 (f_j - beta) = 0}, LayerNorm's image (Kan, Lemma 1, corrected)."""

    def __post_init__(self) -> None:
        if not self.norm.centred or self.norm.width < 2:
            raise ConfigError("an ellipsoid's slice is the image of a LayerNorm of width 2 or more: use Ellipsoid for RMSNorm")

    @property
    def words(self) -> str:
        return f"f_j = beta + gamma * u_j, |u_j|^2 = {self.norm.width}, 1'u_j = 0"

    def _spectrum(self) -> tuple[Tensor, Tensor]:
        gain = self.norm.gamma.detach().square()
        inner = self.norm.centre(self.norm.centre(torch.diag(gain)).mT)
        # 1 is an eigenvector, lifted above the others so that it comes last
        values, vectors = torch.linalg.eigh(inner + 2 * gain.amax() / len(gain))
        return values[:-1], vectors[:, :-1]


def ellipsoid_value(norm: SphereNorm, P: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch"]:
    """sum_j sqrt(d) |gamma * p_j| - <p_j, beta>: H as Kan prints it for either norm (eq. 99); for LayerNorm an upper bound.

    It equals LayerNorm's H only where 1'(gamma * p_j) = 0 for each token.
    """
    check_costate(P, norm.gamma.dtype, width=norm.width)
    return (math.sqrt(norm.width) * length(norm.gamma * P) - P @ norm.beta).sum(-1)


@dataclasses.dataclass(frozen=True, eq=False)
class FilledImage(VelocitySet):
    """{beta + gamma * u : |u|^2 <= d, C u = u} for each token, the closure of what a norm with eps > 0 reaches; convex.

    H and its maximiser are those of the image itself. The point nearest to y is unique, so a kinetic cost has no ties here.
    """

    image: SphereImage

    def __post_init__(self) -> None:
        if not self.image.norm.reaches_inside:
            raise ConfigError("a norm with eps = 0 reaches no velocity inside its image: use the image itself")

    @property
    def words(self) -> str:
        return f"convex hull of {self.image.words}"

    @property
    def verdict(self) -> Posedness:
        return self.image.verdict

    def check(self, P: Tensor) -> None:
        self.image.check(P)

    def support(self, P: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch"]:
        return self.image.support(P)

    def maximizer(self, P: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        return self.image.maximizer(P)

    def base(self, P: Float[Tensor, "tokens width"]) -> float:
        return self.image.base(P)

    def magnification(self, f: Float[Tensor, "tokens width"]) -> float:
        return self.image.magnification(f)

    def ties(self, P: Float[Tensor, "*batch tokens width"]) -> Bool[Tensor, "*batch tokens"]:
        return self.image.ties(P)

    def residual(self, f: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch"]:
        norm, u = self.image.norm, self.image.point(f)
        outside = (u.square().mean(-1) - 1).clamp_min(0)
        off_centre = (u - norm.centre(u)).abs().amax(-1)
        off_flat = torch.where(norm.gamma == 0, f - norm.beta, 0.0).abs().amax(-1)
        return torch.stack([outside, off_centre, off_flat]).amax(0).amax(-1)

    def nearest(self, y: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        norm = self.image.norm
        curvature, slope, basis = self.image.quadratic(y)
        return norm.beta + norm.gamma * (in_ball(curvature, slope, math.sqrt(norm.width)) @ basis.mT)

    def equidistant(self, y: Float[Tensor, "*batch tokens width"]) -> Bool[Tensor, "*batch tokens"]:
        return nowhere(y)

    def kkt(
        self, P: Float[Tensor, "*batch tokens width"], f: Float[Tensor, "*batch tokens width"], kinetic: float = 0.0
    ) -> Float[Tensor, "*batch"]:
        """As for the image, with eta >= 0 and eta (1 - |u_j|^2/d) = 0."""
        u, slope, scale = self.image.lagrangian(P, f, kinetic)
        eta = ratio(-(u * slope).sum(-1), u.square().sum(-1)).clamp_min(0)
        slack = eta * length(u) * (1 - u.square().mean(-1)).abs()
        error = torch.maximum(length(slope + eta.unsqueeze(-1) * u), slack)
        return torch.maximum(ratio(error, scale).amax(-1), self.residual(f))

    def chart(self, P: Float[Tensor, "tokens width"]) -> Chart:
        chart = self.image.chart(P)
        return dataclasses.replace(chart, degree=None, velocity=self._velocity, project=self._into_ball, spread=1.0)

    def _velocity(self, u: Tensor) -> Tensor:
        """norm(x) at the x with x_hat = u: undoing the norm makes its inside as easy to reach as its edge."""
        velocity: Tensor = self.image.norm(self.image.norm.preimage(u))
        return velocity

    def _into_ball(self, u: Tensor) -> Tensor:
        largest = 1 - max(CLOSENESS, ROUNDING * torch.finfo(u.dtype).eps)
        u = self.image.norm.centre(u)
        return u / (u.square().mean(-1, keepdim=True) / largest).clamp_min(1).sqrt()


@dataclasses.dataclass(frozen=True, eq=False)
class EllipsoidProduct(NormImage):
    """{f : |f_jg/gamma_g|^2 = m for each group g of m channels}: H(P) = sum_j sum_g sqrt(m) |gamma_g * p_jg|.

    Every answer is that of the groups' ellipsoids. `inner` takes their insides too, as a norm with eps > 0 reaches them.
    """

    norm: GroupRMSNorm
    inner: bool = False

    @functools.cached_property
    def factors(self) -> list[Ellipsoid | FilledImage]:
        """Each group's set."""
        ellipsoids = [Ellipsoid(part) for part in self.norm.parts]
        return [FilledImage(each) for each in ellipsoids] if self.inner else list(ellipsoids)

    @property
    def words(self) -> str:
        sign = "<=" if self.inner else "="
        return f"f_j = gamma * u_j, |u_jg|^2 {sign} {self.norm.each} in each of {self.norm.groups} groups"

    @property
    def parts(self) -> int:
        return self.norm.groups

    @property
    def spread(self) -> float:
        return Ellipsoid(self.norm.parts[0]).spread

    def input(self, f: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width"]:
        return torch.cat([Ellipsoid(part).input(y) for part, y in zip(self.norm.parts, self._apart(f), strict=True)], -1)

    def residual(self, f: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch"]:
        return self._each("residual", f).amax(0)

    def nearest(self, y: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        return torch.cat([factor.nearest(part) for factor, part in zip(self.factors, self._apart(y), strict=True)], -1)

    def equidistant(self, y: Float[Tensor, "*batch tokens width"]) -> Bool[Tensor, "*batch tokens"]:
        return self._each("equidistant", y).any(0)

    def kkt(
        self, P: Float[Tensor, "*batch tokens width"], f: Float[Tensor, "*batch tokens width"], kinetic: float = 0.0
    ) -> Float[Tensor, "*batch"]:
        parts = zip(self.factors, self._apart(P), self._apart(f), strict=True)
        return torch.stack([factor.kkt(p, v, kinetic) for factor, p, v in parts]).amax(0)

    def slope_in_gains(self, P: Float[Tensor, "tokens width"]) -> GainSlope | None:
        """The groups' gains share one bound: sum_g r_g kappa_g over |r| = 1 is |kappa|, and RMSNorm's kappa_g are proven."""
        slopes = [gain_slope(part, p) for part, p in zip(self.norm.parts, self._apart(P), strict=True)]
        gain, upper = (math.hypot(*(getattr(slope, name) for slope in slopes)) for name in ("lower", "upper"))
        return GainSlope(gain, 0.0, gain, upper)

    def chart(self, P: Float[Tensor, "tokens width"]) -> Chart:
        chart = super().chart(P)
        if not self.inner:
            return chart
        charts = [factor.chart(p) for factor, p in zip(self.factors, self._apart(P), strict=True)]

        def velocity(u: Tensor) -> Tensor:
            return torch.cat([chart.velocity(part) for chart, part in zip(charts, self._apart(u), strict=True)], -1)

        def project(u: Tensor) -> Tensor:
            return torch.cat([chart.project(part) for chart, part in zip(charts, self._apart(u), strict=True)], -1)

        return dataclasses.replace(chart, degree=None, velocity=velocity, project=project, spread=1.0)

    def _each(self, name: str, y: Tensor) -> Tensor:
        return torch.stack([getattr(factor, name)(part) for factor, part in zip(self.factors, self._apart(y), strict=True)])

    def _apart(self, x: Tensor) -> Sequence[Tensor]:
        groups: Sequence[Tensor] = x.split(self.norm.each, -1)
        return groups
