"""Payoffs of velocities at a costate, for statements about the Hamiltonian."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from ctrans.statement import Trial


def payoff(P: Float[Tensor, "tokens width"], f: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch"]:
    """-<P, f>."""
    return -(P * f).sum((-2, -1))


def largest_payoff(P: Float[Tensor, "tokens width"], f: Float[Tensor, "tokens width"]) -> Tensor:
    """sum_j |p_j||f_j|, the unit of differences of payoffs."""
    largest: Tensor = (P.norm(dim=-1) * f.norm(dim=-1)).sum()
    return largest


def none_better(
    P: Float[Tensor, "tokens width"],
    others: Float[Tensor, "batch tokens width"],
    H: float | Tensor,
    scale: float | Tensor,
    words: str,
) -> Trial:
    """The case of -<P, f> <= H for all `others` f, relative to the scale."""
    return Trial((float(payoff(P, others).max()) - float(H)) / float(scale), words)
