"""The entropy of attention rows."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def entropy_of_rows(weights: Float[Tensor, "*rows tokens"]) -> Float[Tensor, "*rows"]:
    """H(a) = -sum_j a_j log a_j in nats of each row of attention weights, with 0 log 0 = 0."""
    entropies: Tensor = torch.special.entr(weights).sum(-1)
    return entropies
