"""The image of a norm with eps > 0: the inside of the ellipsoid too, which matters as soon as velocities cost something."""

from __future__ import annotations

import dataclasses
import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.control.admissible import ROUNDING, Posedness, VelocitySet, length, nowhere, ratio
from ctrans.control.ascent import Chart
from ctrans.control.ellipsoids import CLOSENESS, SphereImage
from ctrans.control.secular_equation import in_ball
from solvers import ConfigError


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
