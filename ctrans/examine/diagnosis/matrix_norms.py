"""Norms of large matrices, a part in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ctrans.dynamics.fields import spectral_norm

SAFE = (1e-140, 1e140)
"""Lengths between these come from squares that float64 holds."""
EXACT = 2**18
"""Up to so many entries the spectral norm is exact."""
AT_ONCE = 2**20
"""So many entries are converted at once."""
VECTORS = 8
"""Vectors of the power iteration."""
PASSES = 6
"""Passes of the power iteration over the matrix."""


def chunks(weight: Tensor) -> Iterator[Tensor]:
    """The rows in float32 or float64, a part at a time."""
    if not weight.dim():
        weight = weight.unsqueeze(0)
    rows_at_once = max(AT_ONCE // max(weight[:1].numel(), 1), 1)
    for part in weight.split(rows_at_once):
        if part.dtype == torch.float64:
            yield part
        else:
            yield part.float()


def frobenius_norm(chunk: Tensor) -> float:
    """The Frobenius norm, also of entries whose squares overflow or underflow."""
    length = float(torch.linalg.vector_norm(chunk, dtype=torch.float64))
    if SAFE[0] < length < SAFE[1] or not chunk.numel():
        return length
    largest = float(chunk.abs().max())
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * float(torch.linalg.vector_norm(chunk.double() / largest))


def largest_entry(weight: Tensor) -> float:
    """The largest absolute value."""
    largest = 0.0
    for chunk in chunks(weight):
        low, high = chunk.aminmax()
        largest = max(largest, float(high), -float(low))
    return largest


def unit_of(largest: float) -> float:
    """The power of two by which a matrix with this largest entry is divided before its entries are
    squared: 1 unless its squares leave the range of float32.
    """
    if 1e-15 < largest < 1e15:
        return 1.0
    return math.ldexp(1.0, math.frexp(largest)[1] - 1)


def divided_chunks(weight: Tensor, unit: float) -> Iterator[Tensor]:
    """The chunks divided by the power of two: in float64, unless it is 1."""
    for chunk in chunks(weight):
        if unit == 1:
            yield chunk
        else:
            yield chunk.double() / unit


def spectral_norm_of(matrix: Tensor, unit: float) -> float:
    """|W/unit|_2: exact for a small matrix. For a large one from below, by block power iteration:
    about 5% too small for random entries, and exact to 3 digits if few singular values are large.
    """
    if matrix.numel() <= EXACT:
        return spectral_norm(torch.cat(list(divided_chunks(matrix, unit))).float())
    rows = torch.randn(VECTORS, matrix.shape[1], generator=torch.Generator().manual_seed(0))
    rows = rows.to(matrix.device)
    image = rows
    for _ in range(PASSES):
        rows = torch.linalg.qr(image.T).Q.T.contiguous()
        image = torch.zeros_like(rows)
        for chunk in divided_chunks(matrix, unit):
            chunk = chunk.float()
            # with few rows BLAS is several times faster than with few columns
            image += (rows @ chunk.T) @ chunk
    return math.sqrt(max(float(torch.linalg.eigvalsh((rows @ image.T).double())[-1]), 0.0))
