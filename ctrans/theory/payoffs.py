"""Payoffs of velocities at a costate, for statements about the Hamiltonian."""

from __future__ import annotations

from torch import Tensor

from ctrans.base.shapes import PerBatch, TokenRows, UnbatchedRows
from ctrans.control.admissible import length
from ctrans.theory.statement import Trial


def payoff(P: UnbatchedRows, f: TokenRows) -> PerBatch:
    """-<P, f>."""
    return -(P * f).sum((-2, -1))


def largest_payoff(P: UnbatchedRows, f: UnbatchedRows) -> Tensor:
    """sum_j |p_j||f_j|, the unit of differences of payoffs."""
    return (length(P) * length(f)).sum()


def none_better(
    P: UnbatchedRows,
    velocities: TokenRows,
    H: float | Tensor,
    scale: float | Tensor,
    case: str,
) -> Trial:
    """The case of -<P, f> <= H for all `velocities` f, relative to the scale."""
    return Trial((float(payoff(P, velocities).max()) - float(H)) / float(scale), case)
