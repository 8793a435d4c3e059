"""A small network of depth-time whose outputs multiply the coefficients of weights (after qkvflow,
Tong et al. 2025).
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

FREQUENCIES = 4
"""sin and cos of 1, 2, 4, 8 half turns over the depth. Blocks could not resolve higher frequencies.
"""
HIDDEN = 32
"""Features of the network, which has about a thousand weights for all parameters of a model."""


def time_embedding(s: Fraction) -> list[float]:
    """e(s) = [sin(2^i pi s), cos(2^i pi s)], i = 0 .. FREQUENCIES - 1."""
    angles = [math.pi * float(s) * 2**i for i in range(FREQUENCIES)]
    return [f(angle) for angle in angles for f in (math.sin, math.cos)]


class TimeNetwork(nn.Module):
    """u(s) = W_2 silu(W_1 e(s) + b_1) in R^count, smooth in s and 0 at first (W_2 = 0). W_1 has
    variance 1/fan_in and is drawn from the generator.

    One network serves all parameters of a model. It computes in its weights' dtype even under
    autocast, because its error would be an error of every weight.
    """

    def __init__(self, count: int, generator: torch.Generator):
        super().__init__()
        inputs = 2 * FREQUENCIES
        self.up = nn.Parameter(torch.randn(HIDDEN, inputs, generator=generator) / math.sqrt(inputs))
        self.bias = nn.Parameter(torch.zeros(HIDDEN))
        self.down = nn.Parameter(torch.zeros(count, HIDDEN))

    def forward(self, s: Fraction) -> Float[Tensor, " count"]:
        with torch.autocast(self.up.device.type, enabled=False):
            hidden = F.silu(self.up @ self.up.new_tensor(time_embedding(s)) + self.bias)
            return self.down @ hidden
