"""A kinetic running cost on any admissible set: the control problem of optimal transport, well-posed on all of them."""

from __future__ import annotations

import dataclasses

from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.control.admissible import AdmissibleSet, Posedness, VelocitySet, check_positive
from ctrans.control.ascent import Chart


@dataclasses.dataclass(frozen=True, eq=False)
class KineticCost(AdmissibleSet):
    """H(P) = max over f in a set of -<P, f> - lam/2 |f|^2, attained at the point of the set nearest to -P/lam.

    Over the whole space it is |P|^2/(2 lam) at f = -P/lam. Where several points are nearest they tie; `nearest` has the rule.
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
        return "well-posed"

    def check(self, P: Tensor) -> None:
        self.velocities.check(P)

    def support(self, P: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch"]:
        f = self.maximizer(P)
        return -(P * f).sum((-2, -1)) - self.kinetic / 2 * f.square().sum((-2, -1))

    def maximizer(self, P: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        self.check(P)
        return self.velocities.nearest(-P / self.kinetic)

    def ties(self, P: Float[Tensor, "*batch tokens width"]) -> Bool[Tensor, "*batch tokens"]:
        self.check(P)
        return self.velocities.equidistant(-P / self.kinetic)

    def residual(self, f: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch"]:
        return self.velocities.residual(f)

    def kkt(self, P: Float[Tensor, "*batch tokens width"], f: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch"]:
        return self.velocities.kkt(P, f, self.kinetic)

    def magnification(self, f: Float[Tensor, "tokens width"]) -> float:
        return self.velocities.magnification(f)

    def base(self, P: Float[Tensor, "tokens width"]) -> float:
        """So far below H that no cost makes the difference cancel."""
        return float(self.support(P)) - self.scale(P)

    def scale(self, P: Float[Tensor, "tokens width"]) -> float:
        """|H - b| + |b| + lam/2 |f*|^2, b the base without cost."""
        base = self.velocities.base(P)
        return abs(float(self.support(P)) - base) + abs(base) + self.kinetic / 2 * float(self.maximizer(P).square().sum())

    def chart(self, P: Float[Tensor, "tokens width"]) -> Chart:
        chart = self.velocities.chart(P)
        return dataclasses.replace(chart, cost=lambda z, f: self.kinetic / 2 * f.square().sum(chart.axes))
