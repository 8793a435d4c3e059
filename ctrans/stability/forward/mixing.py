"""What mixing does by itself: the gain of the product of the mixing matrices of hyper-connections,
by depth.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.depth import Depth
from ctrans.residual import MixesStreams
from solvers import ConfigError


def mixing_gains(depth: Depth) -> list[float]:
    """|M_k ... M_0|_2 after every segment k: how much longer a state becomes, at most, by mixing alone.

    The costate meets the transposes, so that this bounds what mixing does to gradients too. Doubly
    stochastic M leave it at 1; free ones let it grow or vanish exponentially with the number of
    segments. Raises ConfigError for a depth whose state is one stream.
    """
    mixing: list[Tensor] = []
    for k, sublayer in enumerate(depth.sublayers):
        if not isinstance(sublayer.residual, MixesStreams):
            raise ConfigError(f"segment {k} mixes no streams: choose residual hyper_connections or mhc")
        mixing.append(sublayer.residual.mixing.detach().double())
    return product_gains(torch.stack(mixing))


def product_gains(mixing: Float[Tensor, "segments n n"]) -> list[float]:
    """|M_k ... M_0|_2 for every k, of given matrices."""
    product = torch.eye(mixing.shape[-1], dtype=mixing.dtype)
    gains = []
    for each in mixing:
        product = each @ product
        gains.append(float(torch.linalg.matrix_norm(product, 2)))
    return gains
