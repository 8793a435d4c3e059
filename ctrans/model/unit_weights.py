"""Weights on the sphere (nGPT): each matrix is normalised along its embedding dimension.

This is a projection after each optimiser step, not a parametrisation. So matrices stay plain
parameters, and the gradient is that of the weights, as in the paper.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ctrans.dynamics.fields import ExposesWeights
from ctrans.dynamics.sublayer import Sublayer


@torch.no_grad()
def put_on_spheres(
    sublayers: Iterable[Sublayer], embeddings: Iterable[nn.Embedding | nn.Linear] = ()
) -> None:
    """Normalises the rows of embeddings and of matrices that read the state, and the columns of
    matrices that write to it.

    On states of the sphere of radius sqrt(d) a unit row gives an output of size 1. nGPT's rescaling
    s_u sqrt(d) has the same effect on its sphere of radius 1. A row or column of zeros stays.
    """
    for sublayer in sublayers:
        if isinstance(sublayer.field, ExposesWeights):
            for matrix in sublayer.field.matrices():
                if matrix.last:
                    _normalise(matrix.weight, axis=0)
                else:
                    _normalise(matrix.weight, axis=1)
    for embedding in embeddings:
        _normalise(embedding.weight, axis=1)


def _normalise(weight: torch.Tensor, *, axis: int) -> None:
    length = torch.linalg.vector_norm(weight, dim=axis, keepdim=True)
    weight.div_(torch.where(length == 0, 1.0, length))
