"""How fast H grows with an output norm's trained gains and offsets.

With w_j = C(gamma * p_j), H(P) = sqrt(d) sum_j |w_j| - <beta, sum_j p_j> is convex and homogeneous
of degree 1 in (gamma, beta). So its maximum over |gamma|^2 + |beta|^2 <= R^2 is R sqrt(kappa^2 +
|sum_j p_j|^2), kappa the maximum of the first term over |gamma| = 1.

For RMSNorm |w_j|^2 = sum_i s_i p_ji^2 with s = gamma^2, and kappa is a concave programme over the
simplex. For LayerNorm it is not concave, but has the same dual bound: with M_j = diag(p_j) C
diag(p_j) and any lengths l_j > 0, Cauchy-Schwarz gives (sum_j |w_j|)^2 <= sum_j l_j gamma' (sum_j
M_j/l_j) gamma <= sum_j l_j lambda_max(sum_j M_j/l_j). At l_j = |w_j| gamma attains the bound if it
is the top eigenvector; by the first-order condition it is an eigenvector. So the bound shows
whether a maximum is global.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ctrans.base.shapes import BatchMask, PerBatch, TokenRows, UnbatchedRows, Vectors
from ctrans.control.admissible import ROUNDING, GainSlope, check_costate, length, ratio, rounding_of
from ctrans.control.ascent import noise
from ctrans.dynamics.norm import Norm, SphereNorm

STARTS = 32
"""Random starts for LayerNorm, whose sum has local maxima, in addition to gamma_i = |p_i|, p_i
entry i over the tokens. RMSNorm needs none.
"""
FIRST_STEPS = 25
"""Steps from each start."""
KEPT = 8
"""The best of these starts, which continue."""
STEPS = 75
"""Steps of those that continue, before Newton's method goes on from the best."""
NEWTON = 60
"""At most so many steps: about 5 are enough where the maximum is curved; where it is flat, each
step covers 2/3 of the way.
"""
SHARES = tuple(2.0**-k for k in range(6))
"""The line search's shares of Newton's step."""
FLAT = 0.25
"""Gains tie if they differ by more than this power of the machine epsilon but are optimal to its
power 1/2.
"""
APART = 0.1
"""Gains at least so far apart can tie without a flat path between them."""


PerGain = Float[Tensor, "*gains 1 width"]
"""Gains, with an axis of one entry that broadcasts over the tokens."""

GainPoints = Float[Tensor, "*gains tokens width"]
"""A point for each token, at each of several gains."""

GainMask = Bool[Tensor, "*gains tokens"]
"""True or False for each token, at each of several gains."""


class BestGains(NamedTuple):
    """Gains of length 1 that attain kappa, and whether other gains do too. H is then the same for
    all, but its maximiser is not.
    """

    gamma: Vectors
    tied: BatchMask


def has_offset(norm: Norm) -> bool:
    """Whether the norm has an offset to train."""
    return any(parameter.data_ptr() == norm.beta.data_ptr() for parameter in norm.parameters())


@torch.no_grad()
def gain_slope(norm: SphereNorm, P: UnbatchedRows) -> GainSlope:
    """Lower and upper bound on the growth of H with gains and offsets that are bounded together;
    equal for RMSNorm.
    """
    check_costate(P, norm.gamma.dtype, width=norm.width)
    gamma = best_gains(norm, P).gamma
    lengths = length(norm.centre(gamma * P))
    gain = float(math.sqrt(norm.width) * lengths.sum())
    if has_offset(norm):
        offset = float(P.sum(0).norm())
    else:
        offset = 0.0
    # a token without length has its own bound: |w_j| <= |p_j|_inf, as |gamma| = 1
    has_length = lengths > rounding_of(P) * lengths.amax()
    form = _form(norm, P[has_length], lengths[has_length])
    top = float(torch.linalg.eigvalsh(form)[-1].clamp_min(0))
    with_length = math.sqrt(top * float(lengths[has_length].sum()))
    without_length = 0.0
    if not has_length.all():
        without_length = float(P[~has_length].abs().amax(-1).sum())
    bound = math.sqrt(norm.width) * (with_length + without_length)
    return GainSlope(
        gain=gain,
        offset=offset,
        lower=math.hypot(gain, offset),
        upper=math.hypot(max(gain, bound), offset),
    )


@torch.no_grad()
def best_gains(norm: SphereNorm, P: TokenRows) -> BestGains:
    """argmax over |gamma| = 1 of sum_j |C(gamma * p_j)|: for RMSNorm to rounding, for LayerNorm the
    best of 33 starts.

    From each start gamma <- its gradient over its length, which never lowers the sum: Frank-Wolfe's
    full step on the unit ball, for a convex sum. It converges slowly where the maximum is flat or
    at gamma_i = 0, so Newton's method continues from the best start. For RMSNorm, a maximum on the
    sphere is one of the concave programme in gamma^2, so it is global.
    """
    scale = P.abs().amax((-2, -1), keepdim=True)
    p = ratio(P, scale).unsqueeze(-3)
    generator = torch.Generator().manual_seed(0)
    if norm.centred:
        random_starts = STARTS
    else:
        random_starts = 0
    random = noise(P, generator, random_starts, P.shape[-1])
    sizes = p.square().sum(-2).sqrt()
    gamma = unit(torch.cat([sizes, random.expand(*P.shape[:-2], *random.shape)], -2))
    gamma = _climbed(norm, p, gamma, FIRST_STEPS)
    kept = _sum(norm, p, gamma).topk(min(KEPT, gamma.shape[-2])).indices.unsqueeze(-1)
    gamma = gamma.gather(-2, kept.expand(*kept.shape[:-1], P.shape[-1]))
    gamma = _climbed(norm, p, gamma, STEPS)
    values = _sum(norm, p, gamma)
    first = values.argmax(-1, keepdim=True)
    index = first.unsqueeze(-1).expand(*first.shape, P.shape[-1])
    best, flat = _newton(norm, p, gamma.gather(-2, index))
    near = values >= (1 - torch.finfo(P.dtype).eps ** 0.5) * _sum(norm, p, best)
    apart = torch.minimum(length(gamma - best), length(gamma + best)) > APART
    return BestGains(best.squeeze(-2), flat.squeeze(-1) | (near & apart).any(-1))


def _climbed(norm: SphereNorm, p: Tensor, gamma: Tensor, steps: int) -> Tensor:
    """gamma <- its gradient over its length, so many times."""
    for _ in range(steps):
        slope = _slope(norm, p, gamma)
        gamma = torch.where(length(slope).unsqueeze(-1) > 0, unit(slope), gamma)
    return gamma


def _newton(norm: SphereNorm, p: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """The local maximum on the sphere reached from gamma, and whether it is flat.

    The sum of |w_j| has the gradient g and, with s_j = p_j * w_j/|w_j|, the Hessian sum_j (M_j -
    s_j s_j')/|w_j|. On the sphere the Hessian less |g| = <g, gamma> counts, projected off gamma.
    The method climbs along negative curvature, and takes the better of its own step and g's.
    """
    eps = torch.finfo(p.dtype).eps
    eye = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)
    for _ in range(NEWTON):
        w = norm.centre(gamma.unsqueeze(-2) * p)
        lengths = length(w)
        s = p * ratio(w, lengths.unsqueeze(-1))
        slope = s.sum(-2)
        value = lengths.sum(-1)
        tangent = slope - (slope * gamma).sum(-1, keepdim=True) * gamma
        curvature = (
            value[..., None, None] * eye
            - _form(norm, p, lengths)
            + s.mT @ ratio(s, lengths.unsqueeze(-1))
        )
        off_gamma = eye - gamma.unsqueeze(-1) * gamma.unsqueeze(-2)
        curvature = off_gamma @ curvature @ off_gamma + value[..., None, None] * (eye - off_gamma)
        values, vectors = torch.linalg.eigh((curvature + curvature.mT) / 2)
        flat = values[..., 0] <= eps**FLAT * value
        if (length(tangent) <= ROUNDING * eps * value).all():
            break
        softest = (ROUNDING * eps * value).unsqueeze(-1)
        stiffness = values.abs().maximum(softest).unsqueeze(-1)
        climb = (vectors @ ratio(vectors.mT @ tangent.unsqueeze(-1), stiffness)).squeeze(-1)
        climb = climb / length(climb).unsqueeze(-1).clamp_min(1)
        plain = torch.where(length(slope).unsqueeze(-1) > 0, unit(slope), gamma)
        candidates = torch.stack([*(unit(gamma + share * climb) for share in SHARES), plain], -2)
        heights = _sum(norm, p.unsqueeze(-4), candidates)
        # of values that are equal to rounding, the longest step has converged furthest
        highest = heights >= (1 - ROUNDING * eps) * heights.amax(-1, keepdim=True)
        first = highest.to(torch.int8).argmax(-1)
        index = first[..., None, None].expand(*first.shape, 1, p.shape[-1])
        gamma = candidates.gather(-2, index).squeeze(-2)
    return gamma, flat


def _slope(norm: SphereNorm, p: Tensor, gamma: Tensor) -> Tensor:
    """The gradient of sum_j |C(gamma * p_j)|."""
    w = norm.centre(gamma.unsqueeze(-2) * p)
    return (p * ratio(w, length(w).unsqueeze(-1))).sum(-2)


def _sum(norm: SphereNorm, p: Tensor, gamma: Tensor) -> Tensor:
    """sum_j |C(gamma * p_j)|."""
    return length(norm.centre(gamma.unsqueeze(-2) * p)).sum(-1)


def _form(norm: SphereNorm, p: Tensor, lengths: Tensor) -> Tensor:
    """sum_j M_j/l_j, M_j = diag(p_j) C diag(p_j), over the tokens with a length."""
    weighted = torch.where(lengths.unsqueeze(-1) > 0, ratio(p, lengths.unsqueeze(-1)), 0.0)
    form = torch.diag_embed((p * weighted).sum(-2))
    if norm.centred:
        return form - weighted.mT @ p / norm.width
    return form


def boxed_value(norm: SphereNorm, P: TokenRows, gain: float, offset: float = 0.0) -> PerBatch:
    """sqrt(d) g sum_j |p_j| + b |sum_j p_j|_1: an upper bound of H over all |gamma_i| <= g and
    |beta_i| <= b.

    RMSNorm, which has no offset, attains it at gamma = g. LayerNorm stays below it, because it
    centres.
    """
    check_costate(P, width=norm.width)
    by_gain = math.sqrt(norm.width) * gain * length(P).sum(-1)
    by_offset = float(offset) * P.sum(-2).abs().sum(-1)
    return by_gain + by_offset


def unit(x: Tensor) -> Tensor:
    """x/|x| of each row; 0 for 0."""
    return ratio(x, length(x).unsqueeze(-1))
