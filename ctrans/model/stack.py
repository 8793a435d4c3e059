"""A whole stack of blocks as one velocity with the same weights at all times: dX/dt = N_f(stack(X))
over [0, T], in any number of steps.

The OT-Transformer (Kan et al., arXiv:2501.18793) has T = 1 and 1/dt steps. The blocks inside have
steps of length 1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ctrans.dynamics.depth import Depth, check_count
from ctrans.dynamics.fields import HasOutputProjection, why_not
from ctrans.dynamics.norm import Norm
from ctrans.dynamics.placement import Placement
from ctrans.dynamics.sublayer import Sublayer
from solvers import ConfigError

MOST_STEPS = 10_000
"""The largest number of steps of a stack. Instruments visit each step as a segment."""


class Stack(nn.Module):
    """f(x): the blocks in order, with steps of length 1.

    If the last sublayer only adds its output, f ends in a linear map: f(x) = y + h W_2 (+ b). y is
    the last sublayer's input, and h the features of its map. Then f(x) =
    output_projection(pre_projection(x)) with features [h y] and last map [W_2 I].
    """

    mixes_tokens = True

    def __init__(self, blocks: Depth):
        super().__init__()
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x)
        return y

    @property
    def why_not(self) -> str:
        return "it is a whole stack of blocks and no single map"

    @property
    def output_projection(self) -> AddedTo:
        """[W_2 I]. Raises AttributeError if the last sublayer does more than add its output, or its
        map has no known last linear map.
        """
        sublayer, length = self._ending()
        return AddedTo(sublayer.field.output_projection, length * sublayer.gain)

    def pre_projection(self, x: Tensor) -> Tensor:
        """[h y]."""
        last, _ = self._ending()
        steps = list(zip(self.blocks.sublayers, self.blocks.lengths, strict=True))
        for sublayer, length in steps[:-1]:
            x = sublayer.step(x, length)
        return torch.cat([last.field.pre_projection(last.given(x)), x], -1)

    def _ending(self) -> tuple[Sublayer, float]:
        sublayer = self.blocks.sublayers[-1]
        plain = (
            sublayer.output_norm is None
            and sublayer.state_norm is None
            and sublayer.residual.is_identity
        )
        if not plain or not isinstance(sublayer.field, HasOutputProjection):
            raise AttributeError(f"the stack does not end in a linear map{why_not(sublayer.field)}")
        return sublayer, self.blocks.lengths[-1]


class AddedTo(nn.Module):
    """[h y] -> c (W h + b) + y: the linear map [c W, I] with the parameters of one `nn.Linear`."""

    def __init__(self, map_: nn.Linear, scale: float):
        super().__init__()
        self.map = map_
        self.scale = scale

    @property
    def weight(self) -> Tensor:
        w = self.map.weight
        return torch.cat([self.scale * w, torch.eye(len(w), dtype=w.dtype, device=w.device)], 1)

    @property
    def bias(self) -> Tensor | None:
        if self.map.bias is None:
            return None
        return self.scale * self.map.bias

    def forward(self, h: Tensor) -> Tensor:
        features, x = h.split([h.shape[-1] - len(self.map.weight), len(self.map.weight)], -1)
        y: Tensor = x + self.scale * self.map(features)
        return y


def stacked(blocks: Depth, steps: int, dt: float, norm: Norm | None) -> Depth:
    """`steps` segments of length dt with the one velocity N_f(blocks(X)), or blocks(X) without a
    norm. All segments share the weights.
    """
    check_count("steps", steps, MOST_STEPS)
    velocity = Sublayer(Stack(blocks), "attention", output_norm=norm)
    return Depth([velocity] * steps, dt, per_block=1, shared=True)


def check_stack(placements: list[Placement], streams: int, *, experts: bool) -> None:
    """Raises ConfigError for blocks that cannot be one velocity."""
    for placement in placements:
        if placement.state_norm:
            raise ConfigError(
                f"placement {placement.name!r} has a norm around the state, and a stack as a"
                " velocity has no state of its own: choose pre, peri, output or none, or leave out"
                " stack_steps"
            )
    if streams > 1:
        raise ConfigError(
            "a stack as a velocity has one stream: choose another residual, or leave out"
            " stack_steps"
        )
    if experts:
        raise ConfigError(
            "ffn 'moe' balances its experts by their load, which ctrans does not measure inside a"
            " stack: choose another ffn, or leave out stack_steps"
        )
