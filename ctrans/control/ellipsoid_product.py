"""Products of ellipsoids: the image of a norm of groups of channels. Each group is a problem by itself."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.control.admissible import GainSlope
from ctrans.control.ascent import Chart
from ctrans.control.ellipsoids import Ellipsoid
from ctrans.control.filled_ellipsoid import FilledImage
from ctrans.control.gain_slope import gain_slope
from ctrans.control.norm_image import NormImage
from ctrans.norm import GroupRMSNorm


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
