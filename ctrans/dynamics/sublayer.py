"""A sublayer: the map f (attention or FFN), the norms that its placement puts around it, and how
its output joins the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.base.shapes import StreamRows, TokenRows
from ctrans.dynamics.fields import Branch, Kind, SumOfMaps, check_shape
from ctrans.dynamics.norm import Norm
from ctrans.dynamics.placement import UNKNOWN, Placement, placement_with
from ctrans.dynamics.residual import Residual
from solvers import ConfigError, Segment, Time, checked


@checked
class Sublayer(nn.Module):
    """r(X) = gain * W N_out f(s N_in X), each norm if it is given: the velocity of one segment,
    before any tangent projection.

    - `field`: any module from (*batch, tokens, width) to the same shape, such as ctrans's own
      attention or that of an imported model
    - `state_norm`: the norm around the residual sum
    - `gain`: 1, or DeepNorm's 1/alpha
    - `residual`: W and s, from an entry of `RESIDUALS`; without one W = I and s = 1
    - `placement`: the entry of `PLACEMENTS` with these norms and this gain, if known

    `step`, `moved`, `met`, `pulled` and `segment` raise ConfigError for arguments that do not fit.
    The other methods are parts of every forward pass, and check nothing.
    """

    field: Any  # an nn.Module; mypy would take its attributes for tensors

    def __init__(
        self,
        field: nn.Module,
        kind: Kind,
        *,
        input_norm: Norm | None = None,
        output_norm: Norm | None = None,
        state_norm: Norm | None = None,
        gain: float = 1.0,
        residual: Residual | None = None,
        placement: Placement | None = None,
    ):
        super().__init__()
        self._placement = placement
        self.field = field
        self.kind = kind
        self.gain = gain
        self.input_norm = input_norm
        self.output_norm = output_norm
        self.state_norm = state_norm
        if placement is not None and not self._has_norms_of(placement):
            raise ConfigError(
                f"placement {placement.name!r} has other norms than this sublayer: make them agree"
            )
        if residual is None:
            residual = Residual()
        self.residual = residual

    def with_field(self, field: nn.Module) -> Sublayer:
        """The same sublayer with another map. It shares the norms."""
        return Sublayer(
            field,
            self.kind,
            input_norm=self.input_norm,
            output_norm=self.output_norm,
            state_norm=self.state_norm,
            gain=self.gain,
            residual=self.residual,
            placement=self._placement,
        )

    @property
    def placement(self) -> Placement:
        """The sublayer's placement. If it was made without one: the placement with its norms, with
        a gain if its gain is not 1; `UNKNOWN` for a part that is not read.

        Raises ConfigError if no placement has these norms.
        """
        if self._placement is not None:
            return self._placement
        if self.kind == "part":
            return UNKNOWN
        return placement_with(
            input_norm=self.input_norm is not None,
            output_norm=self.output_norm is not None,
            state_norm=self.state_norm is not None,
            gain=self.gain != 1,
        )

    def _has_norms_of(self, placement: Placement) -> bool:
        return (
            placement.input_norm == (self.input_norm is not None)
            and placement.output_norm == (self.output_norm is not None)
            and placement.state_norm == (self.state_norm is not None)
        )

    def forward(self, x: TokenRows) -> TokenRows:
        """The raw velocity r(X). Raises ConfigError for a map that changes its input's shape."""
        u = self.given(x)
        return self.raw_velocity(check_shape(self.field, self.kind, u, self.field(u)), x)

    def raw_velocity(self, f: TokenRows, x: StreamRows) -> StreamRows:
        """r = gain * W N_out f at X, with f the output of the map."""
        if self.output_norm is None:
            return self.joined(f, x)
        return self.joined(self.output_norm(f), x)

    def enter(self, x: StreamRows) -> StreamRows:
        """The state on entering the segment: X, with its streams mixed."""
        return self.residual.enter(x)

    def given(self, x: StreamRows) -> TokenRows:
        """U = s N_in R X, the map's input for a state that has entered the segment."""
        u = self.residual.read(x)
        if self.input_norm is not None:
            u = self.input_norm(u)
        if self.input_scale == 1.0:
            return u
        return self.input_scale * u

    def joined(self, v: TokenRows, x: StreamRows) -> StreamRows:
        """r = gain * W v at X, with v the normalised output of the map."""
        if self.gain != 1.0:
            v = self.gain * v
        r: Tensor = self.residual(v, x)
        return r

    def pulled(self, p: StreamRows) -> TokenRows:
        """gain * W'p, so that <p, r> = <pulled(p), v>: H over the velocities r is that over v at
        this costate.
        """
        return self.gain * self.residual.pull(p)

    @property
    def branches(self) -> Mapping[Kind, Branch]:
        """The map by its kind, or the maps of a sum. The input of each is
        `branch.given(sublayer.given(x))`.
        """
        if isinstance(self.field, SumOfMaps):
            return self.field.branches
        return {self.kind: Branch(self.field)}

    @property
    def attention(self) -> Branch | None:
        """The attention, alone or in a sum; None without attention."""
        return self.branches.get("attention")

    @property
    def streams(self) -> int:
        """The number of the state's streams."""
        return self.residual.streams

    @property
    def input_scale(self) -> float:
        """s, the factor of the map's input."""
        return self.residual.input_scale

    @property
    def image(self) -> Norm | None:
        """The residual's own norm, which bounds the map's effect; None if r is linear in the map's
        output.
        """
        return self.residual.image

    @property
    def largest_gain(self) -> float:
        """|gain W|_2, the largest ratio of a velocity to v."""
        return self.gain * self.residual.largest

    def velocity(self, x: TokenRows) -> TokenRows:
        """The ODE's velocity v(X): r(X), or its part tangent to the state norm's image (Kan, eq.
        132).
        """
        v: Tensor = self(x)
        if self.state_norm is None:
            return v
        return self.state_norm.tangent(x, v)

    def step(self, x: TokenRows, dt: float) -> TokenRows:
        """The discrete Transformer's step: X + dt r(X) of the state that has entered the segment,
        with the state norm around it if there is one.
        """
        entered = self.enter(x)
        return self.moved(entered, self(entered), dt)

    def moved(self, x: StreamRows, r: StreamRows, dt: float) -> StreamRows:
        """X + dt r, with the state norm around it if there is one."""
        y = x + dt * r
        if self.state_norm is not None:
            y = self.state_norm(y)
        return y

    def met(
        self,
        x: StreamRows,
        before: StreamRows,
        p: StreamRows,
        dt: float,
    ) -> tuple[StreamRows, StreamRows]:
        """The state and costate at the input of the segment's field, after X has entered. dL/dX =
        `before` and dL/dX_next = `p`.
        """
        if not self.residual.jumps:
            return x, before
        entered = self.enter(x)
        pull_back = torch.func.vjp(lambda y: y + dt * self(y), entered)[1]
        return entered, pull_back(p)[0]

    def segment(self, t0: Time, t1: Time, *, continuous: bool = False) -> Segment:
        """This sublayer as a segment of depth-time.

        By default the model's own step: field r, with the state norm as projection. With
        `continuous` the ODE: field v, with the state retracted to the state norm's image on
        entering. Without a state norm both are the same. Raises ConfigError for the ODE if the
        image of the state norm has no tangent spaces.
        """
        if self.state_norm is None or not continuous:
            jump = self.enter if self.residual.jumps else None
            return Segment(t0, t1, lambda t, x: self(x), project=self.state_norm, enter=jump)
        if not self.state_norm.has_tangent:
            raise self.state_norm.no_ode()
        return Segment(t0, t1, lambda t, x: self.velocity(x), enter=self.state_norm.retract)
