"""A Transformer block as an ODE: attention and FFN act in sequence, each for depth-time dt, by any
method of `solvers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ctrans.base.shapes import TokenRows
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.fields import AroundMap, Kind
from ctrans.dynamics.norm import NORMS, Norm
from ctrans.dynamics.placement import get_placement
from ctrans.dynamics.scheme import Scheme
from ctrans.dynamics.sublayer import Sublayer
from solvers import ConfigError, Gradient, Method, checked, look_up


class Called(AroundMap):
    """f(x) = field(x, **context), for fields that need masks or positions besides the state.

    The context is bound here and not stored in the field, because gradients other than backprop
    evaluate the field after the forward pass to which the context belongs.
    """

    def __init__(self, field: nn.Module, context: Mapping[str, Any]):
        super().__init__(field)
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.field(x, **self.context)
        return y


def in_context(depth: Depth, context: Mapping[str, Any]) -> Depth:
    """The same sublayers with shared weights. Each map with attention gets `context` as keyword
    arguments.
    """
    if not context:
        return depth
    sublayers = []
    for sublayer in depth.sublayers:
        if sublayer.kind != "ffn":
            sublayer = sublayer.with_field(Called(sublayer.field, context))
        sublayers.append(sublayer)
    return Depth(sublayers, depth.dt, spans=depth.spans, per_block=depth.per_block)


@checked
class ODEBlock(nn.Module):
    """X(2 dt) of dX/dt = v_attention(X) on [0, dt], v_ffn(X) on [dt, 2 dt]: a block x -> x for use
    in any model.

    - `attention`, `ffn`: modules from (*batch, tokens, width) to the same shape
    - `placement`: a name in `PLACEMENTS`, which determines where norms act around both
    - `dt`: the depth-time of each
    - `method`, `steps`, `rtol`, `atol`, `gradient`: the block's `Scheme`. One Euler step is the
      discrete block X + dt f(N X) (or as the placement defines it), bit for bit
    - `norm`, `width`, `eps`: the norms made here, by a name in `NORMS`. The default width is
      `attention.width`
    - `gain`: a factor of both maps (DeepNorm's 1/alpha)

    The state dict has the names depth.sublayers.0 (attention) and depth.sublayers.1 (FFN), each
    with field, input_norm, output_norm and state_norm. Raises ConfigError for an unknown placement,
    norm, method or gradient, and for an unknown width.
    """

    def __init__(
        self,
        attention: nn.Module,
        ffn: nn.Module,
        placement: str = "pre",
        dt: float = 1.0,
        method: str | Method = "euler",
        *,
        steps: int = 1,
        rtol: float | None = None,
        atol: float | None = None,
        gradient: str | Gradient = "backprop",
        norm: str = "layernorm",
        width: int | None = None,
        eps: float = 1e-5,
        gain: float = 1.0,
    ):
        super().__init__()
        self.scheme = Scheme(method, steps, rtol, atol, gradient)
        norms_around = get_placement(placement)
        norm_class = look_up("norm", norm, NORMS)
        if width is None:
            width = getattr(attention, "width", None)
        # the width of a foreign attention may be anything
        self.width: int | None = width if isinstance(width, int) else None

        def make_norm() -> Norm:
            if width is None:
                raise ConfigError(
                    f"placement {placement!r} has norms, which need the width: give width"
                )
            return norm_class(width, eps)

        def make_sublayer(field: nn.Module, kind: Kind) -> Sublayer:
            return Sublayer(
                field,
                kind,
                input_norm=make_norm() if norms_around.input_norm else None,
                output_norm=make_norm() if norms_around.output_norm else None,
                state_norm=make_norm() if norms_around.state_norm else None,
                gain=gain,
                placement=norms_around,
            )

        self.depth = Depth([make_sublayer(attention, "attention"), make_sublayer(ffn, "ffn")], dt)
        self.scheme.check(self.depth)

    def forward(self, x: TokenRows, **context: Any) -> TokenRows:
        """The block's output. Keyword arguments, such as masks and positions, go to each evaluation
        of the attention.

        Raises ConfigError for a state of another width than the block's, and SolveError if the
        solve fails.
        """
        if self.width is not None and x.shape[-1:] != (self.width,):
            raise ConfigError(
                f"the state is {tuple(x.shape)}, but the block's width is {self.width}: give"
                f" (*batch, tokens, {self.width})"
            )
        return self.scheme.solve(in_context(self.depth, context), x).x1
