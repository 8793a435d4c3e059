"""A proven bound on the loss of weights behind an output norm, if the features have fewer
dimensions than there are tokens.

Let w_j = C(gamma * p_j), u*_j = -w_j/|w_j| the best direction of token j, u_j the direction that
weights give it, e_j = u_j - u*_j. The value lost is sqrt(d) sum_j |w_j|(1 - <u_j, u*_j>) >=
sqrt(d)/2 sum_j |w_j||e_j|^2 (eps shortens u_j, and >= still holds). The raw output has rows t_j u_j
with some t_j >= 0 and columns in the range of h, so with M the projection off that range M diag(t)
(U* + E) = 0. With G = M * (U* U*') entry by entry, t'G t = |M diag(t) U*|^2 <= max_j(t_j^2/|w_j|)
sum_j |w_j||e_j|^2, hence

    sum_j |w_j||e_j|^2 >= min over j of min over t with t_j^2 = |w_j| of t'G t
                        = min_j |w_j|/(G^-1)_jj.

Other tokens can only increase the loss. So the bound also holds for any subset of the tokens with
its own rows of h, and the best one counts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ctrans.base.shapes import UnbatchedRows
from ctrans.control.admissible import length, rounding_of
from ctrans.control.last_map import Features
from ctrans.dynamics.norm import SphereNorm

SUBSETS = 8
"""Number of thresholds on |w_j|. More tokens lack more features, but the smallest |w_j| decides."""


@torch.no_grad()
def gap_of_rank(norm: SphereNorm, P: UnbatchedRows, features: Features) -> float:
    """A lower bound of H(P) less the value of any weights W of the last linear map in norm(h W'); 0
    if none is proven.
    """
    w = norm.centre(norm.gamma * P)
    lengths = length(w)
    order = lengths.argsort(descending=True)
    order = order[lengths[order] > rounding_of(P) * length(norm.gamma * P)[order]]
    u, s, _, _ = features.svd
    basis = (u * (s > 0).mT)[order]
    first = features.rank + 1
    last = len(order)
    if first <= last:
        counts = sorted(
            {round(first + (last - first) * k / SUBSETS) for k in range(1, SUBSETS + 1)}
        )
    else:
        counts = []
    found = [_least_loss(w[order[:n]], lengths[order[:n]], basis[:n]) for n in counts]
    return math.sqrt(norm.width) / 2 * max(found, default=0.0)


def _least_loss(w: Tensor, lengths: Tensor, basis: Tensor) -> float:
    """min_j |w_j|/(G^-1)_jj of these tokens; 0 if G is singular to rounding."""
    n = len(w)
    eye = torch.eye(n, dtype=w.dtype, device=w.device)
    if basis.shape[-1] <= n:
        inside = torch.linalg.qr(basis).Q
    else:
        inside = eye
    off = eye - inside @ inside.mT
    best = w / lengths.unsqueeze(-1)
    values, vectors = torch.linalg.eigh(off * (best @ best.mT))
    if float(values[0]) <= n * rounding_of(w):
        return 0.0
    return float((lengths / (vectors.square() / values).sum(-1)).amin())
