"""The spectral norm of a weight matrix."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def spectral_norm(matrix: Float[Tensor, "rows columns"]) -> float:
    """|M|_2 = sqrt(largest eigenvalue of the smaller Gram matrix), in float64: relative error below 1e-8, much faster than
    singular values.
    """
    m = matrix.detach().double()
    if not bool(torch.isfinite(m).all()):
        return math.inf
    gram = m.T @ m if m.shape[0] > m.shape[1] else m @ m.T
    return math.sqrt(max(float(torch.linalg.eigvalsh(gram)[-1]), 0.0))
