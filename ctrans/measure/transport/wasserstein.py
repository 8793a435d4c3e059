"""Exact Wasserstein distances between samples of equal size."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from solvers import ConfigError
from solvers.run import finite

ORDERS = (1, 2)


def wasserstein(
    a: Float[Tensor, " samples *state"], b: Float[Tensor, " samples *state"], p: int = 2
) -> float:
    """W_p = min over permutations s of (1/N sum_i sum_entries |a_i - b_s(i)|^p)^(1/p), for p = 1 or
    2, in float64.

    It is the distance between the two empirical measures with the entry-wise p-norm of Kan's
    theorem 6. Between equal numbers of points of equal weight an optimal plan is an assignment.
    Raises ConfigError if the samples have different shapes, are empty or not finite, or p is not 1
    or 2.
    """
    check_order(p)
    if a.shape != b.shape or not a.numel():
        raise ConfigError(
            f"the samples have shapes {tuple(a.shape)} and {tuple(b.shape)}: give the same number"
            " of states of one shape, at least one"
        )
    if not (finite(a) and finite(b)):
        raise ConfigError("the samples have entries that are not finite: leave those states out")
    first = a.detach().cpu().double().reshape(len(a), -1)
    second = b.detach().cpu().double().reshape(len(b), -1)
    # a matrix product is faster but loses half the digits of small distances
    distances = torch.cdist(first, second, p=p, compute_mode="donot_use_mm_for_euclid_dist")
    cost = (distances**p).numpy()
    rows, columns = linear_sum_assignment(cost)
    return float(np.mean(cost[rows, columns]) ** (1 / p))


def check_order(p: int) -> None:
    """Raises ConfigError unless p is 1 or 2."""
    if p not in ORDERS:
        raise ConfigError(f"p = {p!r}: choose 1 or 2")
