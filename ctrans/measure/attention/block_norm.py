"""The block norm |X|_{inf,rms} = max_i |x_i|_2 / sqrt(d), and a map's local gain in it (Emadi,
definition 3.1).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ctrans.base.shapes import PerBatch, TokenRows, UnbatchedRows
from ctrans.dynamics.fields import Kind, SupportsTokenSubset, mixes_tokens
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.backward.singular_values import Linearisation, linearise, unit
from ctrans.measure.forward.moments import token_lengths
from solvers import Map

OneToken = Float[Tensor, "rows 1 width"]
"""One token for each row."""

RowsOfTokens = Float[Tensor, "rows tokens width"]
"""A sequence for each row."""

RowIds = Int[Tensor, " rows"]
"""An index for each row."""


def block_norm(x: TokenRows) -> PerBatch:
    """|X|_{inf,rms} = max_i |x_i|_2 / sqrt(d), the root mean square of the largest token."""
    return token_lengths(x).amax(-1) / math.sqrt(x.shape[-1])


def block_gain(
    function: Map,
    x: UnbatchedRows,
    *,
    rows: RowIds | None = None,
    iterations: int = 8,
    generator: torch.Generator | None = None,
) -> float:
    """`gain_of_rows` at the state x of a function that maps (batch, tokens, width) to the same
    shape, sequence by sequence.

    `rows` are the output tokens, all by default. The function must have second derivatives.
    """
    if rows is None:
        rows = torch.arange(x.shape[0], device=x.device)
    linear = linearise(lambda x: chosen(function(x), rows), one_for_each(rows, x))
    return gain_of_rows(linear, iterations=iterations, generator=generator)


def one_for_each(rows: RowIds, x: UnbatchedRows) -> RowsOfTokens:
    """The state, once for each output token in `rows`."""
    return x.detach().expand(len(rows), *x.shape).contiguous()


def chosen(x: RowsOfTokens, rows: RowIds) -> OneToken:
    """Token rows[i] of state i."""
    return x[torch.arange(len(rows), device=x.device), rows].unsqueeze(-2)


def map_at(field: nn.Module, kind: Kind, x: RowsOfTokens, rows: RowIds) -> OneToken:
    """f(x) at one token of each state: from that token alone if f does not mix tokens, or by f's
    own method (`SupportsTokenSubset`).
    """
    if isinstance(field, SupportsTokenSubset):
        return field.at_tokens(x, rows).unsqueeze(-2)
    if mixes_tokens(field, kind):
        return chosen(field(x), rows)
    y: Tensor = field(chosen(x, rows))
    return y


def step_at(sublayer: Sublayer, h: float, x: RowsOfTokens, rows: RowIds) -> OneToken:
    """The discrete step at one token of each state. Norms and residual act on each token alone."""
    x = sublayer.enter(x)
    token = chosen(x, rows)
    v = map_at(sublayer.field, sublayer.kind, sublayer.given(x), rows)
    return sublayer.moved(token, sublayer.raw_velocity(v, token), h)


@torch.no_grad()
def gain_of_rows(
    linear: Linearisation, *, iterations: int = 8, generator: torch.Generator | None
) -> float:
    """Lower bound on max_i sup of |sum_j J_ij h_j|_2 over tokens |h_j|_2 <= 1: |J|_{inf,rms ->
    inf,rms} of a map's Jacobian.

    The iterates h attain it, and it never decreases: from a unit y for output token i, h_j = J_ij'
    y / |J_ij' y|, then y = sum_j J_ij h_j / |.|. `linear` maps `one_for_each` state to its token i,
    (rows, 1, width). Time and memory grow with the number of rows.
    """
    like = linear.y
    y = (
        torch.randn(len(like), like.shape[-1], dtype=like.dtype, generator=generator)
        .to(like.device)
        .unsqueeze(-2)
    )
    gains = torch.zeros(len(like), dtype=like.dtype, device=like.device)
    for _ in range(iterations):
        y = linear.push(unit(linear.pull(unit(y))))
        gains = torch.maximum(gains, token_lengths(y).squeeze(-1))
    return float(gains.max())
