"""The block norm |X|_{inf,rms} = max_i |x_i|_2 / sqrt(d) and what a map does to it locally (Emadi, definition 3.1)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ctrans.stability.backward.singular_values import Linearisation, linearise
from solvers.segment import Map


def block_norm(x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch"]:
    """|X|_{inf,rms} = max_i |x_i|_2 / sqrt(d), the root mean square of the largest token."""
    lengths: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return lengths.amax(-1) / math.sqrt(x.shape[-1])


def block_gain(
    function: Map,
    x: Float[Tensor, "tokens width"],
    *,
    rows: Int[Tensor, " rows"] | None = None,
    iterations: int = 8,
    generator: torch.Generator | None = None,
) -> float:
    """`gain_of_rows` of a function that maps (batch, tokens, width) to the same shape, sequence by sequence, at the state x.

    `rows` says which output tokens are looked at, all by default. The function must have second derivatives.
    """
    rows = torch.arange(x.shape[0], device=x.device) if rows is None else rows
    return gain_of_rows(linearise(function, one_for_each(rows, x)), rows, iterations=iterations, generator=generator)


def one_for_each(rows: Int[Tensor, " rows"], x: Float[Tensor, "tokens width"]) -> Float[Tensor, "rows tokens width"]:
    """The state once for every output token that is looked at."""
    return x.detach().expand(len(rows), *x.shape).contiguous()


@torch.no_grad()
def gain_of_rows(
    linear: Linearisation, rows: Int[Tensor, " rows"], *, iterations: int = 8, generator: torch.Generator | None = None
) -> float:
    """max_i sup of |sum_j J_ij h_j|_2 over tokens |h_j|_2 <= 1: |J|_{inf,rms -> inf,rms} of the map's Jacobian, from below.

    Attained by the h found, so a lower bound, which no iteration lets fall: from a unit y for output token i,
    h_j = J_ij' y / |J_ij' y|, then y = sum_j J_ij h_j / |.|. `linear` is linearised at `one_for_each` row; time and memory grow
    with their number.
    """
    x = linear.x
    each = torch.arange(len(rows), device=x.device)
    y = torch.randn(len(rows), x.shape[-1], dtype=x.dtype, generator=generator).to(x.device)
    gains = torch.zeros(len(rows), dtype=x.dtype, device=x.device)
    for _ in range(iterations):
        u = torch.zeros_like(linear.y)
        u[each, rows] = _unit(y)
        y = linear.push(_unit(linear.pull(u)))[each, rows]
        gains = torch.maximum(gains, torch.linalg.vector_norm(y, dim=-1))
    return float(gains.max())


def _unit(x: Tensor) -> Tensor:
    """Each row over its length; rows of zeros stay."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / torch.where(length > 0, length, 1.0)
