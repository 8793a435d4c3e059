"""The velocities of a discrete step with a norm around the state: bounded for every dt, unlike
those of the ODE.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from ctrans.base.shapes import PerBatch, TokenMask, TokenRows, UnbatchedRows
from ctrans.control.admissible import (
    GainSlope,
    Posedness,
    VelocitySet,
    check_costate,
    check_positive,
)
from ctrans.control.ascent import Chart
from solvers import checked


@checked
@dataclasses.dataclass(frozen=True, eq=False)
class StepImage(VelocitySet):
    """{(z - X)/dt : z in the norm's image}: the velocities of X_{k+1} = N(X_k + dt r) over all raw
    velocities r.

    H(P) = (sum_j sqrt(d)|C(gamma * p_j)| - <p_j, beta> + <P, X>)/dt, P being the costate at the
    step's end. As dt goes to 0:

    - For X on the image H goes to +inf like 1/dt, unless X is the image's lowest point for P. There
      it is 0, the ODE's value (see `TangentSpace`). The ODE sees only the tangent, so its H is 0 at
      the other critical points of P too
    - An X off the image, such as an embedding, must first reach the image: dt H is then any number,
      and H may go to -inf
    """

    image: VelocitySet
    state: TokenRows
    dt: float

    def __post_init__(self) -> None:
        check_positive("dt", self.dt)
        check_costate(self.state, what="state")

    @property
    def words(self) -> str:
        return f"(z - X)/dt, dt = {self.dt:g}, z in: {self.image.words}"

    @property
    def verdict(self) -> Posedness:
        return self.image.verdict

    @property
    def attained(self) -> bool | None:
        return self.image.attained

    def check(self, P: Tensor) -> None:
        self.image.check(P)
        check_costate(P, self.state.dtype, tokens=self.state.shape[-2], width=self.state.shape[-1])

    def support(self, P: TokenRows) -> PerBatch:
        self.check(P)
        return (self.image.support(P) + (P * self.state).sum((-2, -1))) / self.dt

    def maximizer(self, P: TokenRows) -> TokenRows:
        self.check(P)
        return self._from_next(self.image.maximizer(P))

    def ties(self, P: TokenRows) -> TokenMask:
        return self.image.ties(P)

    def residual(self, f: TokenRows) -> PerBatch:
        return self.image.residual(self._next(f))

    def nearest(self, y: TokenRows) -> TokenRows:
        return self._from_next(self.image.nearest(self._next(y)))

    def equidistant(self, y: TokenRows) -> TokenMask:
        return self.image.equidistant(self._next(y))

    def kkt(self, P: TokenRows, f: TokenRows, kinetic: float = 0.0) -> PerBatch:
        """The residual of the next state z: P + kinetic f = (P - kinetic X/dt) + kinetic/dt^2 (dt
        z), scaled by dt.
        """
        return self.image.kkt(P - kinetic / self.dt * self.state, self._next(f), kinetic / self.dt)

    def base(self, P: UnbatchedRows) -> float:
        return (self.image.base(P) + float((P * self.state).sum())) / self.dt

    def magnification(self, f: UnbatchedRows) -> float:
        """That of the next state X + dt f, a sum of terms as large as X."""
        return self.image.magnification(self.state.abs() + self.dt * f.abs())

    def slope_in_gains(self, P: UnbatchedRows) -> GainSlope | None:
        slope = self.image.slope_in_gains(P)
        if slope is None:
            return None
        return GainSlope(*(part / self.dt for part in dataclasses.astuple(slope)))

    def chart(self, P: UnbatchedRows) -> Chart:
        """Raw velocities r, through the norm around X + dt r."""
        self.check(P)
        chart = self.image.chart(P)
        size = float(self.state.square().mean().sqrt())
        gains = chart.gains
        if gains is not None:
            inner = gains.velocity
            gains = dataclasses.replace(
                gains,
                velocity=lambda r, gamma, beta: self._from_next(inner(self._next(r), gamma, beta)),
            )
        return dataclasses.replace(
            chart,
            velocity=lambda r: self._from_next(chart.velocity(self._next(r))),
            project=lambda r: self._from_next(chart.project(self._next(r))),
            raw=lambda f: self._from_next(chart.raw(self._next(f))),
            spread=max(chart.spread, STEPS_OVER * size) / self.dt,
            gains=gains,
        )

    def _next(self, f: Tensor) -> Tensor:
        return self.state + self.dt * f

    def _from_next(self, z: Tensor) -> Tensor:
        return (z - self.state) / self.dt


STEPS_OVER = 10.0
"""Ascents begin at raw velocities so many times as long as a step that would cancel the state:
every direction is then near.
"""
