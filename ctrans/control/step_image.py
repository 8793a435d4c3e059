"""Discrete steps with a norm around the state: their velocities are bounded for every dt, unlike
those of the ODE.

If a residual's gains are 0 in some channels, the sum X + dt g * f keeps X's entries there for every
f. The next states are then a section of the norm's image (ctrans, `residual-section` of `ctrans
verify`).
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.base.shapes import PerBatch, TokenMask, TokenRows, UnbatchedRows
from ctrans.control.admissible import (
    GainSlope,
    Posedness,
    VelocitySet,
    check_costate,
    check_positive,
    length,
    ratio,
    rounding_of,
)
from ctrans.control.ascent import Chart
from ctrans.control.sets_by_norm import image_of
from ctrans.control.tangent import AtState
from ctrans.dynamics.norm import SphereNorm
from solvers import ConfigError

STEPS_OVER = 10.0
"""Ascents begin at raw velocities so many times as long as a step that would cancel the state:
every direction is then near.
"""
NO_DIRECTION = 1e-6
"""A shorter remainder of a unit vector is rounding."""


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
        return GainSlope(
            gain=slope.gain / self.dt,
            offset=slope.offset / self.dt,
            lower=slope.lower / self.dt,
            upper=slope.upper / self.dt,
        )

    def chart(self, P: UnbatchedRows) -> Chart:
        """Raw velocities r, through the norm around X + dt r."""
        self.check(P)
        chart = self.image.chart(P)
        size = float(self.state.square().mean().sqrt())
        gains = chart.gains
        if gains is not None:
            next_state = gains.velocity
            gains = dataclasses.replace(
                gains,
                velocity=lambda r, gamma, beta: self._from_next(
                    next_state(self._next(r), gamma, beta)
                ),
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


@dataclasses.dataclass(frozen=True, eq=False)
class SectionImage(AtState):
    """{N(y) : y_i = X_i in the inactive channels}: its closure is half a sphere of one dimension
    more than the active channels make.

    H(P) = sum_j sqrt(d) (|a_j|^2 + max(0, b_j)^2)^(1/2) - <p_j, beta>, a_j = V'q_j and b_j = <q_j,
    e_j>, q = -gamma * p. V is an orthonormal basis of C span(e_i : i is active), r = C X projected
    off V, e = r/(|r|^2 + d eps)^(1/2). If b_j <= 0 outputs only approach it.
    """

    norm: SphereNorm
    active: Bool[Tensor, " width"]

    @property
    def words(self) -> str:
        return (
            f"N(y), y of X's entries in {int((~self.active).sum())} of {self.norm.width} channels,"
            f" so in: {image_of(self.norm).words}"
        )

    @property
    def verdict(self) -> Posedness:
        return image_of(self.norm).verdict

    @cached_property
    def _basis(self) -> Float[Tensor, "width rank"]:
        """V."""
        unit_vectors = torch.eye(self.norm.width).to(self.norm.gamma)[self.active]
        columns = self.norm.centre(unit_vectors).mT
        svd = torch.linalg.svd(columns, full_matrices=False)
        rounding = self.norm.width * rounding_of(columns)
        basis: Tensor = svd.U[:, rounding < svd.S]
        return basis

    @cached_property
    def _off_basis(self) -> tuple[TokenRows, Float[Tensor, "*batch tokens 1"]]:
        """r and (|r|^2 + d eps)^(1/2)."""
        centred = self.norm.centre(self.state)
        r = centred - (centred @ self._basis) @ self._basis.mT
        rounding = self.norm.width * rounding_of(r)
        # 0 if V has full rank
        nonzero = length(r) > rounding * length(centred)
        r = torch.where(nonzero.unsqueeze(-1), r, 0.0)
        return r, (r.square().sum(-1, keepdim=True) + self.norm.width * self.norm.eps).sqrt()

    @property
    def _frame(self) -> Float[Tensor, "*batch tokens width columns"]:
        """V and e as columns: u = V a + c e of the coordinates s = (a, c)."""
        r, size = self._off_basis
        e = ratio(r, size)
        return torch.cat([self._basis.expand(*e.shape, -1), e.unsqueeze(-1)], -1)

    def _slope(self, P: Tensor) -> Tensor:
        """(a, b) of q = -gamma * P."""
        return ((-self.norm.gamma * P).unsqueeze(-2) @ self._frame).squeeze(-2)

    def _uphill(self, P: Tensor) -> Tensor:
        """(a, max(0, b)): H is sqrt(d) times its length, less <p, beta>."""
        self.check(P)
        slope = self._slope(P)
        return torch.cat([slope[..., :-1], slope[..., -1:].clamp_min(0)], -1)

    def support(self, P: TokenRows) -> PerBatch:
        return (math.sqrt(self.norm.width) * length(self._uphill(P)) - P @ self.norm.beta).sum(-1)

    def maximizer(self, P: TokenRows) -> TokenRows:
        """If all active channels tie, the direction of V's first column."""
        best = self._uphill(P)
        size = length(best).unsqueeze(-1)
        first = torch.zeros_like(best)
        first[..., 0] = 1
        s = math.sqrt(self.norm.width) * torch.where(size == 0, first, ratio(best, size))
        return self.norm.beta + self.norm.gamma * (self._frame @ s.unsqueeze(-1))[..., 0]

    def ties(self, P: TokenRows) -> TokenMask:
        return length(self._uphill(P)) <= rounding_of(P) * length(self.norm.gamma * P)

    def _point(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """(a, c) and the remainder of u, with f = beta + gamma * (V a + c e + remainder), in the
        channels with nonzero gamma.

        If these channels do not determine all of (a, c), the undetermined part takes the length
        that the sphere leaves, in a direction that f does not depend on.
        """
        hidden = self.norm.gamma == 0
        frame = self._frame
        u = torch.where(hidden, 0.0, ratio(f - self.norm.beta, self.norm.gamma))
        visible_frame = torch.where(hidden.unsqueeze(-1), 0.0, frame)
        # absolute, as the columns are unit vectors
        inverse = torch.linalg.pinv(visible_frame, atol=self.norm.width * rounding_of(u))
        point = (inverse @ u.unsqueeze(-1))[..., 0]
        off_visible = torch.eye(frame.shape[-1]).to(u) - inverse @ visible_frame
        point = point + self._spare_length(point) * _highest_direction(off_visible)
        remainder = torch.where(hidden, 0.0, u - (frame @ point.unsqueeze(-1))[..., 0])
        return point, remainder

    def _spare_length(self, u: Tensor) -> Tensor:
        """(d - |u|^2)^(1/2), 0 to rounding."""
        spare = self.norm.width - u.square().sum(-1, keepdim=True)
        return torch.where(spare > self.norm.width * rounding_of(u), spare, 0.0).sqrt()

    def residual(self, f: TokenRows) -> PerBatch:
        point, remainder = self._point(f)
        radius = math.sqrt(self.norm.width)
        off_sphere = (point.square().sum(-1) / self.norm.width - 1).abs()
        below = (-point[..., -1]).clamp_min(0) / radius
        off_section = length(remainder) / radius
        return torch.stack([off_sphere, below, off_section]).amax(0).amax(-1)

    def kkt(self, P: TokenRows, f: TokenRows, kinetic: float = 0.0) -> PerBatch:
        """Stationarity on the half sphere: (a, b) = eta (a_u, c_u); at its edge c_u = 0 with max(0,
        b) in place of b.
        """
        slope = P + kinetic * f
        u, _ = self._point(f)
        edge = u[..., -1:] <= math.sqrt(torch.finfo(P.dtype).eps * self.norm.width)
        g = torch.where(edge, self._uphill(slope), self._slope(slope))
        eta = ratio((g * u).sum(-1, keepdim=True), u.square().sum(-1, keepdim=True))
        stationarity = ratio(length(g - eta * u), length(self.norm.gamma * slope))
        return torch.maximum(stationarity.amax(-1), self.residual(f))

    def base(self, P: UnbatchedRows) -> float:
        return -float((P @ self.norm.beta).sum())

    def magnification(self, f: UnbatchedRows) -> float:
        return image_of(self.norm).magnification(f)

    def nearest(self, y: TokenRows) -> TokenRows:
        raise ConfigError(
            "a kinetic cost of a step with zero gain in some channels has no closed form: leave"
            " --kinetic out, or give these channels a small gain"
        )

    def equidistant(self, y: TokenRows) -> TokenMask:
        return self.nearest(y).any(-1)

    def chart(self, P: UnbatchedRows) -> Chart:
        """States y = r + V v through the module itself, v = s a/c by a = V'z and c = <z,
        r>^2/(|r||z|): smooth where v becomes infinite.
        """
        self.check(P)
        r, size = self._off_basis
        basis = self._basis
        scale = torch.where(size == 0, 1.0, size)
        pole = ratio(r, length(r).unsqueeze(-1))
        # if r = 0 any direction serves as the pole
        first_channel = torch.zeros_like(pole)
        first_channel[..., 0] = 1
        pole = torch.where((r == 0).all(-1, keepdim=True), first_channel, pole)

        def velocity(z: Tensor) -> Tensor:
            c = (z * pole).sum(-1, keepdim=True).square() / length(z).unsqueeze(-1)
            v = scale * (z @ basis) / c.clamp_min(torch.finfo(z.dtype).tiny ** 0.25)
            y: Tensor = self.norm(r + v @ basis.mT)
            return y

        return Chart(P, P.shape, velocity)


def _highest_direction(projection: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """A unit vector of the space projected on, with the largest possible last entry; 0 if the space
    is trivial.
    """
    sizes = length(projection.mT)
    last = sizes.shape[-1] - 1
    column = torch.where(sizes[..., -1] > NO_DIRECTION, last, sizes.argmax(-1))
    z = torch.take_along_dim(projection, column[..., None, None], -1)[..., 0]
    size = length(z).unsqueeze(-1)
    return torch.where(size > NO_DIRECTION, ratio(z, size), 0.0)
