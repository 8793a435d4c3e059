"""Section 4: what the weights of the last linear map attain, at fixed features h, against the non-parametric value."""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from ctrans.control import FrobeniusBall, LastMapDecay
from ctrans.control.certificate import climb_weights
from ctrans.control.last_map import Features
from ctrans.control.sets_by_norm import image_of
from ctrans.control.statements.payoffs import largest_payoff, payoff
from ctrans.norm import SphereNorm
from ctrans.norm.random_norms import PAPERS, random_norm
from ctrans.statement import Draw, Printed, Trial, equal, statement, worst


@statement("frobenius-ball", 4, "ctrans", "pre with the last map in a ball |W| <= R: H = R|h'P|, attained at -R P'h/|h'P|", 1e-12)
def ball(draw: Draw) -> Trial:
    """H = R|h'P|, attained at W = -R P'h/|h'P| and exceeded by none of 30 random W with |W| = R."""
    h, P, radius = draw.normal(4, 6), draw.normal(4, 5), draw.log_uniform(-2, 3)
    allowed = FrobeniusBall(h, radius)
    value = radius * (h.mT @ P).norm()
    best = -radius * P.mT @ h / (h.mT @ P).norm()
    others = draw.normal(30, 5, 6)
    others = radius * others / others.flatten(1).norm(dim=-1)[:, None, None]
    return worst(
        equal(allowed.support(P), value, f"H against R|h'P|, R = {radius:.3g}"),
        equal(allowed.weights(P), best, "the maximiser against -R P'h/|h'P|"),
        equal(payoff(P, h @ best.mT), value, "what it attains"),
        Trial(float(payoff(P, h @ others.mT).max() / value) - 1, "the best of 30 weights of norm R"),
    )


@statement(
    "last-map-decay",
    4,
    "ctrans, on Kan, section 3.2",
    "pre with cost lam/2 |W|^2 of the last map, its features fixed: H = |h'P|^2/(2 lam), attained at -P'h/lam",
    1e-12,
)
def decay(draw: Draw) -> Trial:
    """H = |h'P|^2/(2 lam), attained by W* = -P'h/lam: -<P, h W*'> - lam/2 |W*|^2 = H."""
    h, P, lam = draw.normal(4, 6), draw.normal(4, 5), draw.log_uniform(-3, 2)
    allowed = LastMapDecay(h, lam)
    H, best = allowed.support(P), -P.mT @ h / lam
    return worst(
        equal(H, (h.mT @ P).square().sum() / (2 * lam), f"H against |h'P|^2/(2 lam), lam = {lam:.3g}"),
        equal(allowed.weights(P), best, "the maximiser against -P'h/lam"),
        equal(payoff(P, h @ best.mT) - lam / 2 * best.square().sum(), H, "what it attains"),
    )


@statement(
    "weights-attain",
    4,
    "ctrans",
    "behind an output norm, rank(h) = n lets the weights of the last map attain the closed form",
    1e-6,
    0.05,
)
def full_rank(draw: Draw) -> Trial:
    """An ascent over weights through the norm reaches H."""
    chosen = random_norm(draw, width=5 + draw.integer(6), eps=1e-5)
    tokens = 2 + draw.integer(5)
    P, h = draw.normal(tokens, chosen.width), draw.normal(tokens, tokens + draw.integer(6))
    gap = _gap(chosen, P, h, draw)
    return Trial(abs(gap), f"{_shape(P, h)}: weights miss H by {gap:.2g}")


@statement(
    "fewer-features",
    4,
    "ctrans",
    "rank(h) < n keeps weights strictly below H if (n - rank)(d - 1) >= n (RMSNorm: d for d - 1), not in narrower layers",
    0.0,
    0.03,
    printed=Printed("with fewer features than tokens the supremum over weights is strictly smaller", 0.0, 0.03),
)
def fewer_features(draw: Draw, printed: bool) -> Trial:
    """A gap where (n - rank)(d - 1) >= n: the case's excess is 1e-6 less the gap.

    Printed: n = 16, d = 3, rank 15. Weights with norm(h W') the maximiser exist where (I - hh^+) diag(s) U = 0 has a solution s > 0.
    """
    tokens, width, rank = (16, 3, 15) if printed else (8, 8, draw.choice((2, 5, 6)))
    chosen = random_norm(draw, width=width)
    P, h = draw.normal(tokens, width), draw.normal(tokens, rank) @ draw.normal(rank, 20)
    if not printed:
        gap = _gap(chosen, P, h, draw)
        return Trial(1e-6 - gap, f"{_shape(P, h)}: the best weights stay {gap:.2g} |H| below")
    image = image_of(chosen)
    U = chosen.coordinates(image.maximizer(P))
    missed = torch.eye(len(P), dtype=P.dtype) - h @ torch.linalg.pinv(h)
    equations = torch.stack([torch.outer(missed[:, j], U[j]).flatten() for j in range(len(P))], -1)
    longer, _ = nnls(equations.numpy(), -equations.sum(-1).numpy())  # s = 1 + longer
    W = (torch.linalg.pinv(h) @ (torch.from_numpy(1 + np.asarray(longer)).unsqueeze(-1) * U)).mT
    H = float(image.support(P))
    gap = (H - float(payoff(P, chosen(h @ W.mT)))) / abs(H)
    return Trial(1e-6 - gap, f"{_shape(P, h)}: weights attain H to {gap:.1g}")


@statement("weights-bounded", 4, "ctrans", "whatever the rank, no weights exceed the non-parametric value", 1e-12)
def never_above(draw: Draw) -> Trial:
    """Any weights, any gains with zeros and either sign, any eps."""
    name, eps = draw.choice(PAPERS), draw.choice((0.0, 1e-5, 0.1))
    chosen = random_norm(draw, name, eps=eps)
    chosen.gamma[: draw.integer(3)] = 0
    tokens = 1 + draw.integer(6)
    P, h = draw.normal(tokens, chosen.width), draw.normal(tokens, 1 + draw.integer(8))
    W = draw.log_uniform(-6, 6) * draw.normal(chosen.width, h.shape[1])
    image = image_of(chosen)
    scale = float(largest_payoff(P, image.maximizer(P))) or 1.0
    value, H = float(payoff(P, chosen(h @ W.mT))), float(image.support(P))
    return Trial((value - H) / scale, f"{_shape(P, h)}: weights attain {value:.6g}, H is {H:.6g}")


def _gap(chosen: SphereNorm, P: Tensor, h: Tensor, draw: Draw) -> float:
    image = image_of(chosen)
    return climb_weights(image.chart(P), Features(h), float(image.support(P)), 2, draw.generator).gap


def _shape(P: Tensor, h: Tensor) -> str:
    return f"n = {P.shape[0]}, d = {P.shape[1]}, rank {min(int(torch.linalg.matrix_rank(h)), *h.shape)}"
