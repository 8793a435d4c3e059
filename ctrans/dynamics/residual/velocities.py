"""Residuals of a state with one stream: their W, and movement towards a norm's image."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.base.shapes import StreamRows, TokenRows
from ctrans.dynamics.norm import Norm


class Residual(nn.Module):
    """r = W v with W = I, for a map with input s N_in X, s = `input_scale`."""

    input_scale: float = 1.0
    bounded: bool = False
    """Whether W is bounded for all values of its trained parameters."""
    streams: int = 1
    """The number of streams of the map's width in the state."""
    jumps: bool = False
    """Whether entering a segment changes the state: E is not the identity."""
    image: Norm | None
    """The residual's own norm N: then r = W (N v - X), affine and bounded."""

    def __init__(self) -> None:
        super().__init__()
        self.image = None

    @property
    def gains(self) -> Float[Tensor, " entries"] | None:
        """g for W = diag(g), one entry for all channels or one for each; None for other W, and for
        the identity.
        """
        return None

    @property
    def is_identity(self) -> bool:
        """Whether r = v, with a map that gets N_in X: the usual residual connection."""
        return type(self) is Residual

    @property
    def largest(self) -> float:
        """|W|_2, the largest ratio of a velocity to the map's output."""
        if self.gains is None:
            return 1.0
        return float(self.gains.detach().abs().max())

    @property
    def stretch(self) -> float | None:
        """c with |W v| = c |v| for every v; None if there is none."""
        if self.gains is None or self.gains.numel() == 1:
            return self.largest
        return None

    @property
    def words(self) -> str | None:
        """W and the map's output f in words, for descriptions of sets; None for the identity."""
        if self.gains is None:
            return None
        if self.gains.numel() == 1:
            return f"{float(self.gains):.3g} f"
        return f"g f, |g| up to {self.largest:.3g}"

    def enter(self, x: StreamRows) -> StreamRows:
        """E X, the state on entering the segment."""
        return x

    def read(self, x: StreamRows) -> TokenRows:
        """R X, the input of the input norm and the map."""
        return x

    def forward(self, v: TokenRows, x: StreamRows) -> StreamRows:
        """The velocity r = W v of a state X."""
        if self.gains is None:
            return v
        return self.gains * v

    def pull(self, p: StreamRows) -> TokenRows:
        """W'p: the costate of v if p is that of the state."""
        if self.gains is None:
            return p
        return self.gains * p


class Gain(Residual):
    """dX/dt = g * v with trained g: one entry for each channel (LayerScale), or one for all
    (ReZero, SkipInit).
    """

    def __init__(self, entries: int, start: float):
        super().__init__()
        self.gain = nn.Parameter(torch.full((entries,), float(start)))

    @property
    def gains(self) -> Float[Tensor, " entries"]:
        return self.gain


class DepthScaled(Residual):
    """dX/dt = N_out f(N_in X/sqrt(l)) in block l = 1, 2, ..."""

    def __init__(self, block: int):
        super().__init__()
        self.input_scale = block**-0.5


class TowardsImage(Gain):
    """dX/dt = T_X a * (N v - X), a by channel, T_X the projection of a norm around the state: X
    moves along the norm's image to N v. The discrete step is the retraction of a step, N(X + dt a *
    (N v - X)).
    """

    def __init__(self, norm: Norm, start: float):
        super().__init__(norm.width, start)
        self.image = norm

    @property
    def words(self) -> str:
        return f"the tangent part of a * (f - X), |a| up to {self.largest:.3g}"

    def forward(self, v: Tensor, x: Tensor) -> Tensor:
        assert self.image is not None, "the constructor sets it"
        r: Tensor = self.gain * (self.image(v) - x)
        return r
