"""Gain of the product of hyper-connections' mixing matrices, by depth."""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.dynamics.depth import Depth
from ctrans.dynamics.residual import MixesStreams
from solvers import ConfigError


def mixing_gains(depth: Depth) -> list[float]:
    """Gains |M_k ... M_0|_2 after each segment k: the largest growth of a state's length by mixing
    alone.

    Gradients pass through the transposes, so it also bounds the effect of mixing on them. Doubly
    stochastic M keep it at 1; free M can make it grow or vanish exponentially with the number of
    segments. Raises ConfigError if the state is one stream.
    """
    mixing: list[Tensor] = []
    for k, sublayer in enumerate(depth.sublayers):
        if not isinstance(sublayer.residual, MixesStreams):
            raise ConfigError(
                f"segment {k} mixes no streams: choose residual hyper_connections or mhc"
            )
        mixing.append(sublayer.residual.mixing.detach().double())
    return product_gains(torch.stack(mixing))


def product_gains(mixing: Float[Tensor, "segments n n"]) -> list[float]:
    """|M_k ... M_0|_2 of given matrices for each k."""
    products = itertools.accumulate(mixing, lambda product, each: each @ product)
    return [float(torch.linalg.matrix_norm(product, 2)) for product in products]
