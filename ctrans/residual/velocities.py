"""Residuals of a state of one stream: what W is, and what moves towards a norm's image."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.norm import Norm


class Residual(nn.Module):
    """r = W v with W = I, of a map that is given s N_in X, s = `input_scale`."""

    input_scale: float = 1.0
    bounded: bool = False
    """Whether what is trained of W stays within limits whatever it is trained to."""
    streams: int = 1
    """How many streams of the map's width the state has."""
    image: Norm | None
    """A norm of the residual's own, whose image v is put on first: r = W (N v - X) then, affine and
    bounded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.image = None

    @property
    def gains(self) -> Float[Tensor, " entries"] | None:
        """g where W = diag(g), as one entry for all channels or one for each; None where W is the
        identity or no such matrix.
        """
        return None

    @property
    def largest(self) -> float:
        """|W|_2, by which velocities can be longer than the map's outputs."""
        return 1.0 if self.gains is None else float(self.gains.detach().abs().max())

    @property
    def stretch(self) -> float | None:
        """c where |W v| = c |v| for every v; None where there is no such number."""
        return self.largest if self.gains is None or self.gains.numel() == 1 else None

    @property
    def words(self) -> str | None:
        """W before a map's output f, for a set in words; None for the identity."""
        if self.gains is None:
            return None
        return f"{float(self.gains):.3g} f" if self.gains.numel() == 1 else f"g f, |g| up to {self.largest:.3g}"

    def enter(self, x: Float[Tensor, "*batch tokens state"]) -> Float[Tensor, "*batch tokens state"]:
        """E X, the state as the segment begins."""
        return x

    def read(self, x: Float[Tensor, "*batch tokens state"]) -> Float[Tensor, "*batch tokens width"]:
        """R X, what an input norm and the map see of the state."""
        return x

    def forward(
        self, v: Float[Tensor, "*batch tokens width"], x: Float[Tensor, "*batch tokens state"]
    ) -> Float[Tensor, "*batch tokens state"]:
        """r = W v, or what else joins a state X."""
        return v if self.gains is None else self.gains * v

    def pull(self, p: Float[Tensor, "*batch tokens state"]) -> Float[Tensor, "*batch tokens width"]:
        """W'p: the costate that v meets where the state's is p."""
        return p if self.gains is None else self.gains * p


class Gain(Residual):
    """dX/dt = g * v, g trained: one entry for every channel (LayerScale), or one for all (ReZero,
    SkipInit).
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
    """dX/dt = T_X a * (N v - X), a by channel and T_X the projection of a norm around the state: X
    goes to where the map points, on the norm's image. The discrete step is the retraction with a
    step, N(X + dt a * (N v - X)).
    """

    def __init__(self, norm: Norm, start: float):
        super().__init__(norm.width, start)
        self.image = norm

    @property
    def words(self) -> str:
        return f"the tangent part of a * (f - X), |a| up to {self.largest:.3g}"

    def forward(self, v: Tensor, x: Tensor) -> Tensor:
        assert self.image is not None, "it is made with a norm"
        r: Tensor = self.gain * (self.image(v) - x)
        return r
