"""A sublayer: the map f (attention or FFN) with the norms its placement puts around it."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from ctrans.fields import Kind, check_shape
from ctrans.norm import Norm
from ctrans.placement import Placement, placement_with
from solvers import ConfigError, Segment
from solvers.segment import Map, Time


class Sublayer(nn.Module):
    """r(X) = gain * N_out f(N_in X), each norm where it is given: the velocity of one segment, before any tangent projection.

    - `field`: any module from (*batch, tokens, width) to the same shape; so an imported model's attention and our own are the same
      thing here
    - `state_norm`: the norm around the residual sum
    - `gain`: 1, or DeepNorm's 1/alpha
    - `placement`: the entry of `PLACEMENTS` that these norms and this gain are from, where it is known
    """

    field: Any  # an nn.Module; its own attributes are known to those who ask for them, and mypy takes a module's for tensors

    def __init__(
        self,
        field: nn.Module,
        kind: Kind,
        *,
        input_norm: Norm | None = None,
        output_norm: Norm | None = None,
        state_norm: Norm | None = None,
        gain: float = 1.0,
        placement: Placement | None = None,
    ):
        super().__init__()
        norms = (input_norm is not None, output_norm is not None, state_norm is not None)
        if placement is not None and norms != (placement.input_norm, placement.output_norm, placement.state_norm):
            raise ConfigError(f"placement {placement.name!r} has other norms than this sublayer is given: make them agree")
        self._placement = placement
        self.field, self.kind, self.gain = field, kind, gain
        self.input_norm, self.output_norm, self.state_norm = input_norm, output_norm, state_norm

    def with_field(self, field: nn.Module) -> Sublayer:
        """The same sublayer around another map; it shares the norms."""
        return Sublayer(
            field,
            self.kind,
            input_norm=self.input_norm,
            output_norm=self.output_norm,
            state_norm=self.state_norm,
            gain=self.gain,
            placement=self._placement,
        )

    @property
    def placement(self) -> Placement:
        """The placement that it was made with; where none was given, the one with its norms and, if its gain is not 1, a gain.

        Raises ConfigError where no placement has these norms.
        """
        if self._placement is not None:
            return self._placement
        norms = (self.input_norm is not None, self.output_norm is not None, self.state_norm is not None)
        return placement_with(*norms, gain=self.gain != 1)

    def forward(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        """The raw velocity r(X). Raises ConfigError for a map that does not keep its input's shape."""
        if self.input_norm is not None:
            x = self.input_norm(x)
        v = check_shape(self.field, self.kind, x, self.field(x))
        if self.output_norm is not None:
            v = self.output_norm(v)
        return v if self.gain == 1.0 else self.gain * v

    def velocity(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        """The ODE's velocity v(X): r(X), or its part tangent to the state norm's image (Kan, eq. 132)."""
        v = self(x)
        return v if self.state_norm is None else self.state_norm.tangent(x, v)

    def step(self, x: Float[Tensor, "*batch tokens width"], dt: float) -> Float[Tensor, "*batch tokens width"]:
        """The discrete Transformer's step: X + dt r(X), inside the state norm if there is one."""
        x = x + dt * self(x)
        return x if self.state_norm is None else self.state_norm(x)

    def segment(self, t0: Time, t1: Time, *, continuous: bool = False) -> Segment:
        """This sublayer as a segment of depth-time.

        As the model's own step: field r, and the state norm as projection. With `continuous`, as the ODE: field v, the state
        put on the state norm's image on entering. Without a state norm the two are one. Raises ConfigError for the ODE of a state norm
        whose image has no tangent spaces: it has none.
        """
        if self.state_norm is None or not continuous:
            return Segment(t0, t1, lambda t, x: self(x), project=self.state_norm)
        if not self.state_norm.has_tangent:
            raise self.state_norm.no_ode()
        enter: Map = self.state_norm.retract
        return Segment(t0, t1, lambda t, x: self.velocity(x), enter=enter)
