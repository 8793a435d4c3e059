"""Large random weights for the linear maps of a foreign model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from ctrans.control.large_weights import LARGE
from ctrans.interop.module_chain import TransposedLinear, is_linear

MODERATE = 1e3
"""How much larger they get first: norms that round to float32 overflow at LARGE."""
SPIKE = 30.0
"""How much larger one row and one column of a spiky matrix are."""
DENSE = "dense"
SPIKY = "spiky"
ONE_SIDED = "one-sided"
"""Shapes of large weights."""
MATRICES = ("weight", "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
OFFSETS = ("bias", "in_proj_bias")
"""The matrices and offsets of linear maps and of torch's attention."""


def with_matrices(block: nn.Module) -> Iterator[nn.Module]:
    """The parts of the block whose matrices are known: linear maps, and torch's attention."""
    for part in block.modules():
        if is_linear(part) or isinstance(part, nn.MultiheadAttention):
            yield part


@contextlib.contextmanager
def large_weights(
    parts: Iterable[nn.Module],
    *,
    bias: float,
    shape: str,
    times: float = LARGE,
    others: Iterable[Tensor] = (),
) -> Iterator[None]:
    """Inside, weights are random and so many times as large, at least of that size, and biases
    random of size `bias`. `others` are further weights, which no linear map has.

    SPIKY weights have rank 1 and one row and column of most of their size, as the best ones may: a
    limit relative to the matrix shows there. With ONE_SIDED weights all outputs of a token have one
    sign, so that functions which vanish on one side, as features of linear attention, do so.
    """
    weights: dict[int, Tensor] = {}
    biases: dict[int, Tensor] = {}
    inputs_first: set[int] = set()
    for part in parts:
        if isinstance(part, TransposedLinear):
            inputs_first.add(id(part._parameters["weight"]))
        for names, kind in ((MATRICES, weights), (OFFSETS, biases)):
            for parameter in map(part._parameters.get, names):
                if parameter is not None:
                    kind[id(parameter)] = parameter.data
    for other in others:
        weights.setdefault(id(other), other.data)
    kept = [(tensor, tensor.clone()) for tensor in (*weights.values(), *biases.values())]
    generator = torch.Generator().manual_seed(0)

    def random_like(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)

    try:
        for number, weight in weights.items():
            size = weight.square().mean().sqrt().clamp_min(1.0)  # clips have limits of their own
            drawn = random_like(weight)
            if shape == ONE_SIDED and number in inputs_first:
                drawn = -drawn[:, :1].expand_as(drawn)
            elif shape == ONE_SIDED:
                drawn = -drawn[:1].expand_as(drawn)
            if shape == SPIKY:
                drawn = drawn[:, :1] * drawn[:1]
                drawn[0] *= SPIKE
                drawn[:, 0] *= SPIKE
            weight.copy_(times * size * drawn)
        for offset in biases.values():
            offset.copy_(bias * random_like(offset))
        yield
    finally:
        for tensor, before in kept:
            tensor.copy_(before)
