"""Norms of queries and keys, for each head separately. A new one is an entry of `QK_NORMS`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.base.shapes import ByHead
from ctrans.dynamics.norm import LayerNorm, RMSNorm

NormPair = tuple[nn.Module, nn.Module]
"""The norm of queries and that of keys."""


class UnitLength(nn.Module):
    """y = s_h x/sqrt(|x|^2 + eps), s_h a learned number for each head, or 1 without `scale`."""

    def __init__(self, eps: float, scale: Float[Tensor, " heads"] | None = None):
        super().__init__()
        self.eps = eps
        if scale is None:
            self.scale = None
        else:
            self.scale = nn.Parameter(scale)

    def forward(self, x: ByHead) -> ByHead:
        y = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + self.eps)
        if self.scale is None:
            return y
        return y * self.scale.view(-1, 1, 1)


QK_NORMS: dict[str, Callable[[int, int, float], NormPair]] = {
    "rms": lambda heads, head, eps: (RMSNorm(head, eps), RMSNorm(head, eps)),
    "layer": lambda heads, head, eps: (LayerNorm(head, eps), LayerNorm(head, eps)),
    "l2": lambda heads, head, eps: (
        UnitLength(eps, torch.full((heads,), float(head))),
        UnitLength(eps),
    ),
}
"""Makers from the number of heads, their width and eps. The first two have a gain for each entry,
which all heads share. Scores of l2 are s_h <q, k>/(|q||k|) over tau sqrt(d_h) (Henry et al. 2020).
s_h starts at d_h, which equals RMSNorms with gain 1.
"""
