"""Section 4: values that weights attain at fixed features, and trained gains."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.control import FrobeniusBall, GainDecay, LastMapDecay
from ctrans.control.ascent import ascend
from ctrans.control.certificate import certify
from ctrans.control.evidence import climb_weights
from ctrans.control.gains import boxed_value, gain_slope
from ctrans.control.last_map import Features, gap_of_rank
from ctrans.control.sets_by_norm import image_of
from ctrans.dynamics.norm import SphereNorm
from ctrans.theory.payoffs import largest_payoff, payoff
from ctrans.theory.random_norms import (
    EPSILONS,
    PAPERS,
    describe_norm,
    norm_and_costate,
    random_norm,
)
from ctrans.theory.statement import (
    Printed,
    Trial,
    Trials,
    at_most,
    equal,
    holds_if,
    not_none,
    statement,
)

SECTION = 4


@statement(
    "frobenius-ball",
    "ctrans",
    "pre with the last map in a ball |W| <= R: H = R|h'P|, attained at -R P'h/|h'P|",
    1e-12,
)
def ball(draw: Draw) -> Trials:
    """H = R|h'P|, attained at W = -R P'h/|h'P|; none of 30 random W with |W| = R exceeds it."""
    h = draw.normal(4, 6)
    P = draw.normal(4, 5)
    radius = draw.log_uniform(-2, 3)
    allowed = FrobeniusBall(h, radius)
    value = radius * (h.mT @ P).norm()
    best = -radius * P.mT @ h / (h.mT @ P).norm()
    directions = draw.normal(30, 5, 6)
    weights = radius * directions / directions.flatten(1).norm(dim=-1)[:, None, None]
    return [
        equal(allowed.support(P), value, f"H against R|h'P|, R = {radius:.3g}"),
        equal(allowed.weights(P), best, "the maximiser against -R P'h/|h'P|"),
        equal(payoff(P, h @ best.mT), value, "its value"),
        Trial(
            float(payoff(P, h @ weights.mT).max() / value) - 1, "the best of 30 weights of norm R"
        ),
    ]


@statement(
    "last-map-decay",
    "ctrans, on Kan, section 3.2",
    "pre with cost lam/2 |W|^2 of the last map, its features fixed: H = |h'P|^2/(2 lam), attained"
    " at -P'h/lam",
    1e-12,
)
def decay(draw: Draw) -> Trials:
    """H = |h'P|^2/(2 lam), attained by W* = -P'h/lam: -<P, h W*'> - lam/2 |W*|^2 = H."""
    h = draw.normal(4, 6)
    P = draw.normal(4, 5)
    lam = draw.log_uniform(-3, 2)
    allowed = LastMapDecay(h, lam)
    H = allowed.support(P)
    best = -P.mT @ h / lam
    return [
        equal(
            H, (h.mT @ P).square().sum() / (2 * lam), f"H against |h'P|^2/(2 lam), lam = {lam:.3g}"
        ),
        equal(allowed.weights(P), best, "the maximiser against -P'h/lam"),
        equal(payoff(P, h @ best.mT) - lam / 2 * best.square().sum(), H, "its value"),
    ]


@statement(
    "weights-attain",
    "ctrans",
    "behind an output norm, rank(h) = n lets the weights of the last map attain the closed form",
    1e-6,
    0.05,
)
def full_rank(draw: Draw) -> Trial:
    """An ascent over weights through the norm reaches H."""
    norm = random_norm(draw, width=5 + draw.integer(6), eps=1e-5)
    tokens = 2 + draw.integer(5)
    P = draw.normal(tokens, norm.width)
    h = draw.normal(tokens, tokens + draw.integer(6))
    gap = _gap(norm, P, h, draw)
    return Trial(abs(gap), f"{_shape(P, h)}: weights miss H by {gap:.2g}")


@statement(
    "fewer-features",
    "ctrans",
    "rank(h) < n keeps weights strictly below H if (n - rank)(d - 1) >= n (RMSNorm: d for d - 1),"
    " not in narrower layers",
    0.0,
    0.03,
    printed="with fewer features than tokens the supremum over weights is strictly smaller",
)
def fewer_features(draw: Draw, *, printed: bool) -> Trial:
    """A gap if (n - rank)(d - 1) >= n: the case's excess is 1e-6 less the gap.

    Printed: n = 16, d = 3, rank 15. Weights with norm(h W') = maximiser exist if (I - hh^+) diag(s)
    U = 0 has a solution s > 0.
    """
    if not printed:
        norm, P, h = _features_of_rank(draw, tokens=8, width=8, rank=draw.choice((2, 5, 6)))
        gap = _gap(norm, P, h, draw)
        return Trial(1e-6 - gap, f"{_shape(P, h)}: the best weights stay {gap:.2g} |H| below")
    norm, P, h = _features_of_rank(draw, tokens=16, width=3, rank=15)
    image = image_of(norm)
    U = norm.coordinates(image.maximizer(P))
    missed = torch.eye(len(P), dtype=P.dtype) - h @ torch.linalg.pinv(h)
    equations = torch.stack([torch.outer(missed[:, j], U[j]).flatten() for j in range(len(P))], -1)
    longer, _ = nnls(equations.numpy(), -equations.sum(-1).numpy())  # s = 1 + longer
    W = (torch.linalg.pinv(h) @ (torch.from_numpy(1 + np.asarray(longer)).unsqueeze(-1) * U)).mT
    H = float(image.support(P))
    gap = (H - float(payoff(P, norm(h @ W.mT)))) / abs(H)
    return Trial(1e-6 - gap, f"{_shape(P, h)}: weights attain H to {gap:.1g}")


def _features_of_rank(
    draw: Draw, *, tokens: int, width: int, rank: int
) -> tuple[SphereNorm, Tensor, Tensor]:
    """A norm, a costate, and 20 features of that rank."""
    norm = random_norm(draw, width=width)
    P = draw.normal(tokens, width)
    return norm, P, draw.normal(tokens, rank) @ draw.normal(rank, 20)


@statement(
    "weights-bounded", "ctrans", "for any rank, no weights exceed the non-parametric value", 1e-12
)
def never_above(draw: Draw) -> Trial:
    """Any weights, any gains (zero or of either sign), any eps."""
    name = draw.choice(PAPERS)
    eps = draw.choice(EPSILONS)
    norm = random_norm(draw, name, eps=eps)
    norm.gamma[: draw.integer(3)] = 0
    tokens = 1 + draw.integer(6)
    P = draw.normal(tokens, norm.width)
    h = draw.normal(tokens, 1 + draw.integer(8))
    W = draw.log_uniform(-6, 6) * draw.normal(norm.width, h.shape[1])
    image = image_of(norm)
    scale = float(largest_payoff(P, image.maximizer(P))) or 1.0
    value = float(payoff(P, norm(h @ W.mT)))
    H = float(image.support(P))
    return Trial((value - H) / scale, f"{_shape(P, h)}: weights attain {value:.6g}, H is {H:.6g}")


def _gap(norm: SphereNorm, P: Tensor, h: Tensor, draw: Draw) -> float:
    image = image_of(norm)
    return climb_weights(
        image.chart(P), Features(h), float(image.support(P)), 2, draw.generator
    ).gap


def _shape(P: Tensor, h: Tensor) -> str:
    return (
        f"n = {P.shape[0]}, d = {P.shape[1]}, rank"
        f" {min(int(torch.linalg.matrix_rank(h)), *h.shape)}"
    )


@statement(
    "bounded-gains",
    "Kan, section 3.3 and eq. 99",
    "behind an output norm H is finite for bounded gains: R sqrt(kappa^2 + |sum_j p_j|^2) over"
    " |gamma|^2 + |beta|^2 <= R^2",
    1e-9,
    0.25,
    printed=Printed(
        "the output norm bounds velocities, whatever training does (gamma and beta are trainable)",
        1e-6,
        0.05,
    ),
)
def bounded_gains(draw: Draw, *, printed: bool) -> Trials:
    """30 gains of norm R, by an ascent of their own, reach R sqrt(kappa^2 + |sum p|^2) and do not
    exceed it.

    For RMSNorm the dual bound proves this and is attained; for LayerNorm it need not be. Printed: H
    with gains a thousand times as large, over H; a bound on the velocities would make it 1.
    """
    norm, P = norm_and_costate(draw)
    if printed:
        before = _without_offset(norm, P)
        norm.gamma.mul_(1000)
        after = _without_offset(norm, P)
        return at_most(
            after,
            before,
            f"{describe_norm(norm)}: H with trained gains against H with frozen ones",
        )
    slope = gain_slope(norm, P)
    radius = draw.log_uniform(-2, 3)
    gamma = draw.normal(30, 1, norm.width)
    for _ in range(60):
        w = norm.centre(gamma * P)
        gamma = (P * w / w.norm(dim=-1, keepdim=True).clamp_min(1e-300)).sum(-2, keepdim=True)
        gamma = gamma / gamma.norm(dim=-1, keepdim=True)
    climbed = float((math.sqrt(norm.width) * norm.centre(gamma * P).norm(dim=-1).sum(-1)).amax())
    best = radius * math.hypot(climbed, slope.offset)
    proven = slope.upper
    if norm.centred:
        proven = slope.lower
    case = f"{describe_norm(norm)}, {len(P)} tokens"
    return [
        at_most(
            best,
            radius * slope.upper,
            f"{case}: gains within {radius:.3g} against the proven bound",
        ),
        at_most(
            radius * slope.lower,
            radius * slope.upper,
            f"{case}: the attained slope against the proven one",
        ),
        at_most(best, radius * slope.lower, f"{case}: gains of another ascent against those found"),
        at_most(proven, slope.lower, f"{case}: the proven slope against the attained one"),
    ]


def _without_offset(norm: SphereNorm, P: Tensor) -> float:
    """H + <P, beta>."""
    return float(image_of(norm).support(P) + (P @ norm.beta).sum())


@statement(
    "gain-decay",
    "ctrans",
    "cost lam/2 (|gamma|^2 + |beta|^2) behind an output norm: H = (kappa^2 + |sum_j p_j|^2)/(2"
    " lam), any gains",
    1e-8,
    0.05,
)
def gain_decay(draw: Draw) -> Trials:
    """(kappa^2 + |sum p|^2)/(2 lam); ascents through the norm over inputs, gains and offsets do not
    exceed it.
    """
    norm, P = norm_and_costate(draw, 4)
    lam = draw.log_uniform(-1, 1)
    decay = GainDecay(norm, lam)
    H = float(decay.support(P))
    ascent = not_none(certify(decay, P, pairs=1).velocities)
    case = describe_norm(norm)
    return [
        equal(
            H,
            gain_slope(norm, P).lower ** 2 / (2 * lam),
            f"{case}: H against kappa, lam = {lam:.3g}",
        ),
        at_most(ascent.best, decay.ceiling(P), f"{case}: the best found against the bound"),
        equal(ascent.best, H, f"{case}: the best found against H"),
        Trial(float(decay.kkt(P, decay.maximizer(P))), f"{case}: stationary gains"),
    ]


@statement(
    "gain-box",
    "ctrans",
    "|gamma_i| <= g, |beta_i| <= b: H <= sqrt(d) g sum_j |p_j| + b |sum_j p_j|_1, attained by"
    " RMSNorm",
    1e-12,
)
def gain_box(draw: Draw) -> Trials:
    """H <= sqrt(d) g sum_j |p_j| + b |sum_j p_j|_1 for 30 gains and offsets in the box; equal for
    RMSNorm at gamma = g.
    """
    norm, P = norm_and_costate(draw)
    g = draw.log_uniform(-2, 2)
    b = 0.0
    if norm.centred:
        b = draw.log_uniform(-2, 2)
    bound = float(boxed_value(norm, P, g, b))
    cases = []
    for _ in range(30):
        norm.gamma.copy_(g * draw.normal(norm.width).clamp(-1, 1))
        if norm.centred:
            norm.beta.copy_(b * draw.normal(norm.width).clamp(-1, 1))
        cases.append(
            at_most(
                float(image_of(norm).support(P)),
                bound,
                f"{describe_norm(norm)}, gains in a box",
            )
        )
    norm.gamma.fill_(g)
    if not norm.centred:
        cases.append(equal(image_of(norm).support(P), bound, "RMSNorm at the box's corner"))
    return cases


@statement(
    "rank-gap",
    "ctrans",
    "rank(h) < n: no weights come nearer to H than sqrt(d)/2 min_j |w_j|/(G^-1)_jj, G = (I - hh^+)"
    " * (U* U*')",
    1e-9,
)
def rank_gap(draw: Draw) -> Trials:
    """Ascents over the weights stay below H by at least the bound, which is positive if there are
    twice as many dimensions as needed.

    With just as many, n, it is positive for almost all P, but may be below rounding. In half of the
    cases the best velocities are nearly those of some weights: there the bound is nearly sharp.
    """
    norm, P = norm_and_costate(draw, 3 + draw.integer(5))
    rank = 1 + draw.integer(len(P) - 1)
    h = draw.normal(len(P), rank) @ draw.normal(rank, 9)
    u = Features(h).svd[0]
    if draw.integer(2):
        by_weights = norm.standardize(u @ draw.normal(rank, norm.width))
        noise = draw.log_uniform(-1.5, 0) * draw.normal(*P.shape)
        P = -norm.centre(by_weights + noise) / norm.gamma
    H = float(image_of(norm).support(P))
    proven = gap_of_rank(norm, P, Features(h))
    starts = torch.cat(
        [draw.normal(4, rank, norm.width), -(u.mT @ norm.centre(norm.gamma * P)).unsqueeze(0)]
    )
    lost = H - float(
        ascend(lambda z: payoff(P, norm(u @ z)), starts, (-2, -1), steps=300).best.max()
    )
    dimensions = norm.width
    if norm.centred:
        dimensions = norm.width - 1
    case = f"{describe_norm(norm)}, {len(P)} tokens, rank {rank}"
    scale = float(largest_payoff(P, norm.maximizer(-P)))
    return [
        Trial(
            (proven - lost) / scale,
            f"{case}: the best weights lose {lost:.6g}, at least {proven:.6g}",
        ),
        holds_if(
            f"{case}: a gap of {proven:.2g}",
            condition=proven > 0 or (len(P) - rank) * dimensions < 2 * len(P),
        ),
    ]
