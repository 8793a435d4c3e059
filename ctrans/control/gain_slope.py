"""What training an output norm's gains and offsets adds: H grows in proportion to them, and this is how fast.

With w_j = C(gamma * p_j), H(P) = sqrt(d) sum_j |w_j| - <beta, sum_j p_j> is convex and homogeneous of degree 1 in (gamma, beta). So
its maximum over |gamma|^2 + |beta|^2 <= R^2 is R sqrt(kappa^2 + |sum_j p_j|^2), kappa the maximum of the first term over |gamma| = 1.

For RMSNorm |w_j|^2 = sum_i s_i p_ji^2 with s = gamma^2, and kappa is a concave programme over the simplex. For LayerNorm it is not
concave, but has the same dual bound: with M_j = diag(p_j) C diag(p_j) and any lengths l_j > 0, Cauchy-Schwarz gives
(sum_j |w_j|)^2 <= sum_j l_j gamma' (sum_j M_j/l_j) gamma <= sum_j l_j lambda_max(sum_j M_j/l_j). At l_j = |w_j| the bound is met where
gamma is the top eigenvector; that it is an eigenvector is the first-order condition. So the bound says whether a maximum is global.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.control.admissible import ROUNDING, GainSlope, check_costate, length, ratio
from ctrans.norm import Norm

STEPS, TOLERANCE = 5000, 0.75
"""The most steps, and the power of the machine epsilon below which gains that still move count as found."""
ROUGH_STEPS, ROUGH_TOLERANCE = 500, 0.5
"""Where a proven bound stands beside what is found."""
STARTS = 2
"""Beside gamma_i = |p_i|, p_i entry i over the tokens: for LayerNorm signs matter."""


def has_offset(norm: Norm) -> bool:
    """Whether the norm has an offset to train."""
    return any(parameter.data_ptr() == norm.beta.data_ptr() for parameter in norm.parameters())


@torch.no_grad()
def gain_slope(norm: Norm, P: Float[Tensor, "tokens width"]) -> GainSlope:
    """How fast H grows with gains and offsets that are bounded together, from below and from above."""
    check_costate(P, norm.gamma.dtype, width=norm.width)
    gamma = best_gains(norm, P, ROUGH_STEPS, ROUGH_TOLERANCE)
    lengths = length(norm.centre(gamma * P))
    gain = float(math.sqrt(norm.width) * lengths.sum())
    offset = float(P.sum(0).norm()) if has_offset(norm) else 0.0
    # a token without length is bounded by itself: |w_j| <= |p_j|_inf, as |gamma| = 1
    seen = lengths > ROUNDING * torch.finfo(P.dtype).eps * lengths.amax()
    weighted = ratio(P[seen], lengths[seen].unsqueeze(-1))
    form = torch.diag((P[seen] * weighted).sum(0))
    if norm.centred:
        form = form - weighted.mT @ P[seen] / norm.width
    top = float(torch.linalg.eigvalsh(form)[-1].clamp_min(0))
    unseen = float(P[~seen].abs().amax(-1).sum()) if bool((~seen).any()) else 0.0
    above = math.sqrt(norm.width) * (math.sqrt(top * float(lengths[seen].sum())) + unseen)
    return GainSlope(gain, offset, math.hypot(gain, offset), math.hypot(max(gain, above), offset))


@torch.no_grad()
def best_gains(
    norm: Norm, P: Float[Tensor, "*batch tokens width"], steps: int = STEPS, tolerance: float = TOLERANCE
) -> Float[Tensor, "*batch width"]:
    """argmax over |gamma| = 1 of sum_j |C(gamma * p_j)|, by gamma <- its gradient over its length, which never lets the sum fall.

    That is Frank-Wolfe's step on the unit ball, full because the sum is convex. The best of some starts; signs are the rule's.
    """
    scale = P.abs().amax((-2, -1), keepdim=True)
    p = ratio(P, scale).unsqueeze(-3)
    generator = torch.Generator().manual_seed(0)
    signs = torch.randn(STARTS if norm.centred else 0, P.shape[-1], generator=generator, dtype=P.dtype).to(P.device)
    first = p.square().sum(-2).sqrt()
    gamma = torch.cat([first, first * signs.expand(*P.shape[:-2], *signs.shape)], -2)
    gamma = _unit(gamma)
    for _ in range(steps):
        w = norm.centre(gamma.unsqueeze(-2) * p)
        slope = (p * ratio(w, length(w).unsqueeze(-1))).sum(-2)
        new = torch.where(length(slope).unsqueeze(-1) > 0, _unit(slope), gamma)
        # the sum is flat at its maximum: gains right to sqrt(eps) give it to rounding
        done = float((new - gamma).abs().amax()) <= torch.finfo(P.dtype).eps ** tolerance
        gamma = new
        if done:
            break
    value = length(norm.centre(gamma.unsqueeze(-2) * p)).sum(-1)
    chosen = value.argmax(-1)[..., None, None].expand(*P.shape[:-2], 1, P.shape[-1])
    return gamma.gather(-2, chosen).squeeze(-2)


def boxed_value(norm: Norm, P: Float[Tensor, "*batch tokens width"], gain: float, offset: float = 0.0) -> Float[Tensor, "*batch"]:
    """sqrt(d) g sum_j |p_j| + b |sum_j p_j|_1: what bounds H over all |gamma_i| <= g and |beta_i| <= b.

    RMSNorm, which has no offset, attains it at gamma = g; LayerNorm stays below by what centring removes.
    """
    check_costate(P, width=norm.width)
    return math.sqrt(norm.width) * gain * length(P).sum(-1) + offset * P.sum(-2).abs().sum(-1)


def _unit(x: Tensor) -> Tensor:
    return ratio(x, length(x).unsqueeze(-1))
