"""Section 4: what the weights of the last linear map can do, at fixed features h, against the non-parametric value."""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from ctrans.control import FrobeniusBall, LastMapDecay, admissible_set
from ctrans.control.certificate import climb_weights
from ctrans.control.last_map import Features
from ctrans.norm import SphereNorm
from ctrans.verify.draws import PAPERS, below, noise, norm, one_of, size
from ctrans.verify.statement import Check, Statement, Trial, equal, worst


def ball(generator: torch.Generator) -> Trial:
    """H = R|h'P|, attained at W = -R P'h/|h'P| and exceeded by none of 30 random W with |W| = R."""
    h, P, radius = noise(generator, 4, 6), noise(generator, 4, 5), size(generator, -2, 3)
    allowed = FrobeniusBall(h, radius)
    value = radius * (h.mT @ P).norm()
    best = -radius * P.mT @ h / (h.mT @ P).norm()
    others = noise(generator, 30, 5, 6)
    others = radius * others / others.flatten(1).norm(dim=-1)[:, None, None]
    above = float((-(P * (h @ others.mT)).sum((-2, -1))).max() / value) - 1
    return worst(
        equal(allowed.support(P), value, f"H against R|h'P|, R = {radius:.3g}"),
        equal(allowed.weights(P), best, "the maximiser against -R P'h/|h'P|"),
        equal(-(P * (h @ best.mT)).sum(), value, "what it attains"),
        Trial(above, "the best of 30 weights of norm R"),
    )


def decay(generator: torch.Generator) -> Trial:
    """H = |h'P|^2/(2 lam), attained by W* = -P'h/lam: -<P, h W*'> - lam/2 |W*|^2 = H."""
    h, P, lam = noise(generator, 4, 6), noise(generator, 4, 5), size(generator, -3, 2)
    allowed = LastMapDecay(h, lam)
    best = -P.mT @ h / lam
    attained = -(P * (h @ best.mT)).sum() - lam / 2 * best.square().sum()
    return worst(
        equal(allowed.support(P), (h.mT @ P).square().sum() / (2 * lam), f"H against |h'P|^2/(2 lam), lam = {lam:.3g}"),
        equal(allowed.weights(P), best, "the maximiser against -P'h/lam"),
        equal(attained, allowed.support(P), "what it attains"),
    )


def full_rank(generator: torch.Generator) -> Trial:
    """An ascent over weights through the norm reaches H."""
    chosen = norm(generator, width=5 + below(generator, 6), eps=1e-5)
    tokens = 2 + below(generator, 5)
    P, h = noise(generator, tokens, chosen.width), noise(generator, tokens, tokens + below(generator, 6))
    gap = _gap(chosen, P, h, generator)
    return Trial(abs(gap), f"{_shape(P, h)}: weights miss H by {gap:.2g}")


def fewer_features(generator: torch.Generator) -> Trial:
    """A gap where (n - rank)(d - 1) >= n: the case's excess is 1e-6 less the gap."""
    chosen, P, h = _low_rank(generator, 8, 8, one_of(generator, (2, 5, 6)))
    gap = _gap(chosen, P, h, generator)
    return Trial(1e-6 - gap, f"{_shape(P, h)}: the best weights stay {gap:.2g} |H| below")


def fewer_features_anywhere(generator: torch.Generator) -> Trial:
    """n = 16, d = 3, rank 15: weights with norm(h W') the maximiser exist where (I - hh^+) diag(s) U = 0 has a solution s > 0."""
    chosen, P, h = _low_rank(generator, 16, 3, 15)
    image = admissible_set(chosen, "peri")
    U = chosen.coordinates(image.maximizer(P))
    missed = torch.eye(len(P), dtype=P.dtype) - h @ torch.linalg.pinv(h)
    equations = torch.stack([torch.outer(missed[:, j], U[j]).flatten() for j in range(len(P))], -1)
    longer, _ = nnls(equations.numpy(), -equations.sum(-1).numpy())  # s = 1 + longer
    W = (torch.linalg.pinv(h) @ (torch.from_numpy(1 + np.asarray(longer)).unsqueeze(-1) * U)).mT
    H = float(image.support(P))
    gap = (H + float((P * chosen(h @ W.mT)).sum())) / abs(H)
    return Trial(1e-6 - gap, f"{_shape(P, h)}: weights attain H to {gap:.1g}")


def never_above(generator: torch.Generator) -> Trial:
    """Any weights, any gains with zeros and either sign, any eps."""
    name, eps = one_of(generator, PAPERS), one_of(generator, (0.0, 1e-5, 0.1))
    chosen = norm(generator, name, eps=eps)
    chosen.gamma[: below(generator, 3)] = 0
    tokens = 1 + below(generator, 6)
    P, h = noise(generator, tokens, chosen.width), noise(generator, tokens, 1 + below(generator, 8))
    W = size(generator, -6, 6) * noise(generator, chosen.width, h.shape[1])
    image = admissible_set(chosen, "peri")
    scale = float((P.norm(dim=-1) * image.maximizer(P).norm(dim=-1)).sum()) or 1.0
    value = -float((P * chosen(h @ W.mT)).sum())
    H = float(image.support(P))
    return Trial((value - H) / scale, f"{_shape(P, h)}: weights attain {value:.6g}, H is {H:.6g}")


def _low_rank(generator: torch.Generator, tokens: int, width: int, rank: int) -> tuple[SphereNorm, Tensor, Tensor]:
    chosen = norm(generator, width=width, eps=0.0)
    return chosen, noise(generator, tokens, width), noise(generator, tokens, rank) @ noise(generator, rank, 20)


def _gap(chosen: SphereNorm, P: Tensor, h: Tensor, generator: torch.Generator) -> float:
    image = admissible_set(chosen, "peri")
    return climb_weights(image.chart(P), Features(h), float(image.support(P)), 2, generator).gap


def _shape(P: Tensor, h: Tensor) -> str:
    return f"n = {P.shape[0]}, d = {P.shape[1]}, rank {min(int(torch.linalg.matrix_rank(h)), *h.shape)}"


STATEMENTS: tuple[Statement, ...] = (
    Statement(
        "frobenius-ball",
        4,
        "ctrans",
        "pre with the last map in a ball |W| <= R: H = R|h'P|, attained at -R P'h/|h'P|",
        Check(ball, 1e-12),
    ),
    Statement(
        "last-map-decay",
        4,
        "ctrans, on Kan, section 3.2",
        "pre with cost lam/2 |W|^2 of the last map, its features fixed: H = |h'P|^2/(2 lam), attained at -P'h/lam",
        Check(decay, 1e-12),
    ),
    Statement(
        "weights-attain",
        4,
        "ctrans",
        "behind an output norm, rank(h) = n lets the weights of the last map attain the closed form",
        Check(full_rank, 1e-6, 0.05),
    ),
    Statement(
        "fewer-features",
        4,
        "ctrans",
        "rank(h) < n keeps weights strictly below H if (n - rank)(d - 1) >= n (RMSNorm: d for d - 1), not in narrower layers",
        Check(fewer_features, 0.0, 0.03),
        Check(fewer_features_anywhere, 0.0, 0.03),
        "with fewer features than tokens the supremum over weights is strictly smaller",
    ),
    Statement(
        "weights-bounded",
        4,
        "ctrans",
        "whatever the rank, no weights exceed the non-parametric value",
        Check(never_above, 1e-12),
    ),
)
