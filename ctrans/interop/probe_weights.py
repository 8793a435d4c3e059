"""Temporary weights, and states, with which a model's structure can be read: a map of zeros or of
nan shows nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

SEED = 0


@contextlib.contextmanager
def probe_weights(model: nn.Module) -> Iterator[list[str]]:
    """Inside, weights that are all 0, except offsets, and entries that are not finite are random
    numbers. Afterwards all weights are restored bit for bit. Gives the names of weights with
    entries that are not finite.

    A random matrix with n columns has entries of size 1/sqrt(n); a vector, such as LayerScale's,
    about 1/2. Scalars and weights on demand are not changed. Versions of weights stay the same, so
    that a user's earlier graph through them can still run backward.
    """
    generator = torch.Generator().manual_seed(SEED)
    before: list[tuple[Tensor, Tensor]] = []
    broken = []
    for name, parameter in model.named_parameters():
        weight = parameter.data
        if weight.is_meta or not weight.is_floating_point() or weight.numel() < 2:
            continue
        to_draw = ~weight.isfinite()
        if to_draw.any():
            broken.append(name)
        elif "bias" in name.rpartition(".")[2] or weight.any():
            continue
        else:
            to_draw = torch.ones_like(to_draw)
        before.append((weight, weight.clone()))
        weight.copy_(torch.where(to_draw, _drawn(weight, generator), weight))
    try:
        yield broken
    finally:
        for weight, original in before:
            weight.copy_(original)


def random_states(like: Tensor) -> Tensor:
    """Fixed random numbers with the shape, dtype and device of `like`, at which maps are read."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(SEED)).to(like)


def _drawn(weight: Tensor, generator: torch.Generator) -> Tensor:
    drawn: Tensor
    if weight.dim() == 1:
        drawn = 0.25 + 0.5 * torch.rand(weight.shape, generator=generator)
    else:
        drawn = torch.randn(weight.shape, generator=generator) / math.sqrt(weight.shape[-1])
    return drawn.to(weight)


def versions_of(model: nn.Module) -> tuple[int, ...]:
    """How often each weight was changed in place, as torch counts it: other numbers mean other
    weights. Changes of `weight.data` are not counted.
    """
    return tuple(0 if weight.is_inference() else weight._version for weight in model.parameters())
