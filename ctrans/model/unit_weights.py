"""Weights on the sphere, as nGPT has them: every matrix normalised along its embedding dimension.

A projection after every optimiser's step and no parametrisation: matrices stay plain parameters, so
that kernels, checkpoints and whatever reads a matrix meet the weights themselves, and the gradient
is that of the weights, as in the paper.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ctrans.fields import ExposesWeights
from ctrans.sublayer import Sublayer


@torch.no_grad()
def put_on_spheres(sublayers: Iterable[Sublayer], embeddings: Iterable[nn.Embedding | nn.Linear] = ()) -> None:
    """Rows of length 1 of matrices that read the state and of embeddings, columns of length 1 of
    those that write to it.

    On states of the sphere of radius sqrt(d) a unit row gives an output of the size of 1, which
    nGPT's rescaling s_u sqrt(d) is for on its sphere of radius 1. A row or column of zeros stays.
    """
    for sublayer in sublayers:
        if isinstance(sublayer.field, ExposesWeights):
            for matrix in sublayer.field.matrices():
                _normalise(matrix.weight, 0 if matrix.last else 1)
    for embedding in embeddings:
        _normalise(embedding.weight, 1)


def _normalise(weight: torch.Tensor, axis: int) -> None:
    length = torch.linalg.vector_norm(weight, dim=axis, keepdim=True)
    weight.div_(torch.where(length == 0, 1.0, length))
