"""The spectral norm of a weight matrix: exact for small ones, an upper bound within 5% for large
ones.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
from jaxtyping import Float
from torch import Tensor

EXACT = 1024
"""Up to this smaller side, the eigenvalues of the Gram matrix are computed."""
SLACK = 0.05
"""The largest relative excess of the bound on a larger matrix."""
FAILURE = 1e-12
"""The probability, over the random start vectors, that the bound is below the norm."""
VECTORS = 16
"""Vectors that are multiplied at once. They cost as much as one, while reading the matrix takes
longer than multiplying.
"""
ROUNDING = 1e-4
"""More than the relative error of the norm from products in float32."""
SEED = 6_021_992
"""A seed that weights do not use: the vectors must be independent of the weights."""
AT_ONCE = 2**24
"""Entries of a matrix in half precision that are converted at once."""

KeptNorms = dict[tuple[object, ...], tuple[tuple[Tensor, ...], float]]
"""For each key, the matrices and their norm."""

_kept_norms: ContextVar[KeptNorms | None] = ContextVar("kept norms", default=None)


@contextlib.contextmanager
def norms_found_once() -> Iterator[None]:
    """Inside this context each norm of a matrix, or of a product of two, is computed once. No
    weight may change meanwhile.

    Several probes request bounds of the same map, and the norms of its matrices are most of the
    cost of a bound.
    """
    token = _kept_norms.set({})
    try:
        yield
    finally:
        _kept_norms.reset(token)


def spectral_norm(matrix: Float[Tensor, "rows columns"]) -> float:
    """The norm |M|_2: to a relative 1e-8 up to a smaller side of `EXACT`, otherwise an upper bound,
    at most 5% too large.

    Small: sqrt(largest eigenvalue of the smaller Gram matrix), in float64. Large: `upper_bound`.
    """
    return _once(_norm, matrix.detach())


def norm_of_product(
    left: Float[Tensor, "rows inner"], right: Float[Tensor, "inner columns"]
) -> float:
    """The norm |A B|_2, as `spectral_norm` computes it. If A has few columns, no matrix of the
    product's size is formed.

    |A B|_2 = |A L|_2 with L L' = B B'. L, from B' = Q L', has the inner dimension, such as a head's
    width for O_h V_h.
    """
    return _once(_norm_of_product, left.detach(), right.detach())


def _once(norm: Callable[..., float], *matrices: Tensor) -> float:
    kept_norms = _kept_norms.get()
    if kept_norms is None:
        return norm(*matrices)
    identities = (
        (m.data_ptr(), m._version, m.device, m.dtype, tuple(m.shape), m.stride()) for m in matrices
    )
    key = (norm, *identities)
    if key not in kept_norms:
        # the matrices are kept with their norm, so that no other matrix gets their address
        kept_norms[key] = (matrices, norm(*matrices))
    _, size = kept_norms[key]
    return size


def _norm(m: Tensor) -> float:
    if m.numel() == 0:
        return 0.0
    # by its extremes, since sums and copies of a large matrix need as much memory as the matrix
    if not math.isfinite(float(m.amax())) or not math.isfinite(float(m.amin())):
        return math.inf
    if min(m.shape) <= EXACT:
        return _exact(m.double())
    return upper_bound(m)


def _norm_of_product(left: Tensor, right: Tensor) -> float:
    a = left.double()
    b = right.double()
    if b.shape[0] < b.shape[1]:
        b = torch.linalg.qr(b.T, mode="r").R.T
    return _norm(a @ b)


def upper_bound(matrix: Float[Tensor, "rows columns"]) -> float:
    """(1 + slack) mu >= |M|_2 with probability 1 - `FAILURE`, mu <= |M|_2 the norm of M on a block
    Krylov space.

    The largest Ritz value of a symmetric A >= 0 of order n, on span(v, A v, .., A^(k-1) v) from a v
    uniform on the sphere, lies below (1 - eps) lambda_1(A) with probability at most 1.648 sqrt(n)
    exp(-sqrt(eps) (2k - 1)) (Kuczynski and Wozniakowski, 1992, theorem 4.2). With b independent v,
    the space contains that of each, so the probability is that to the power of b. Here A is the
    smaller of M'M and MM', and sqrt(1 - eps) = 1/(1 + slack) with room for rounding. k follows from
    the probability: 12 for n = 8192, with two products of M with b vectors each.
    """
    if matrix.shape[0] >= matrix.shape[1]:
        m = matrix
    else:
        m = matrix.T
    n = m.shape[1]
    eps = 1 - ((1 + ROUNDING) / (1 + SLACK)) ** 2
    log_ratio = math.log(1.648 * math.sqrt(n)) - math.log(FAILURE) / VECTORS
    steps = math.ceil(log_ratio / (2 * math.sqrt(eps)) + 0.5)
    generator = torch.Generator().manual_seed(SEED)
    v = torch.randn(n, VECTORS, generator=generator, dtype=torch.float64).to(m.device)
    basis = torch.empty(n, 0, dtype=torch.float64, device=m.device)
    images = list[Tensor]()
    for _ in range(steps):
        if images:
            v = _product(m.T, images[-1])
        for _ in range(2):  # once leaves rounding errors
            v = torch.linalg.qr(v - basis @ (basis.T @ v)).Q
        basis = torch.cat([basis, v], 1)
        images.append(_product(m, v))
    return _exact(torch.cat(images, 1)) * (1 + SLACK)


def _exact(m: Tensor) -> float:
    if m.numel() == 0:
        return 0.0
    largest = float(m.abs().max())
    if largest == 0:
        return 0.0
    if not 1e-140 < largest < 1e140:  # whose squares overflow, or underflow
        return largest * _exact(m / largest)
    if m.shape[0] > m.shape[1]:
        gram = m.T @ m
    else:
        gram = m @ m.T
    return math.sqrt(max(float(torch.linalg.eigvalsh(gram)[-1]), 0.0))


def _product(m: Tensor, v: Tensor) -> Tensor:
    """m v in m's precision, at least float32. v and the result are float64."""
    if m.dtype not in (torch.float32, torch.float64):
        v = v.float()
        rows_at_once = max(AT_ONCE // m.shape[1], 1)
        return torch.cat([part.float() @ v for part in m.split(rows_at_once)]).double()
    v = v.to(m.dtype)
    # BLAS is faster with few vectors if the matrix is stored by rows
    if m.is_contiguous():
        return (m @ v).double()
    return (v.T.contiguous() @ m.T).T.double()
