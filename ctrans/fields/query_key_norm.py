"""Norms of queries and keys, each head's alone; a new one is an entry of `QK_NORMS`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.norm import LayerNorm, RMSNorm

NormPair = tuple[nn.Module, nn.Module]
"""Of queries and of keys."""


class UnitLength(nn.Module):
    """y = s_h x/sqrt(|x|^2 + eps), s_h a learned number for each head, or 1 where there are none."""

    def __init__(self, eps: float, scale: Float[Tensor, " heads"] | None = None):
        super().__init__()
        self.eps = eps
        self.scale = None if scale is None else nn.Parameter(scale)

    def forward(self, x: Float[Tensor, "*batch heads tokens head"]) -> Float[Tensor, "*batch heads tokens head"]:
        y: Tensor = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + self.eps)
        return y if self.scale is None else y * self.scale.view(-1, 1, 1)


def _unit_length(heads: int, head: int, eps: float) -> NormPair:
    """Scores s_h <q, k>/(|q||k|) over tau sqrt(d_h) (Henry et al. 2020); s_h = d_h at first, where
    RMSNorms of gain 1 would be.
    """
    return UnitLength(eps, torch.full((heads,), float(head))), UnitLength(eps)


QK_NORMS: dict[str, Callable[[int, int, float], NormPair]] = {
    "rms": lambda heads, head, eps: (RMSNorm(head, eps), RMSNorm(head, eps)),
    "layer": lambda heads, head, eps: (LayerNorm(head, eps), LayerNorm(head, eps)),
    "l2": _unit_length,
}
"""From the number of heads, their width and eps. The first two have a gain for each entry, which
all heads share.
"""
