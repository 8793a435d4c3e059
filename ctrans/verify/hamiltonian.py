"""Section 4: the Hamiltonian H(P) = sup -<P, f> over the velocities that each placement allows, and its maximisers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ctrans.control import (
    EllipsoidSlice,
    TangentSpace,
    WholeSpace,
    admissible_set,
    certify,
    ellipsoid_value,
)
from ctrans.control.sets_by_norm import image_of
from ctrans.norm import SphereNorm
from ctrans.verify.draws import below, noise, norm, size
from ctrans.verify.statement import Check, Statement, Trial, as_printed, at_most, equal, holds_if, worst

CLIMBED = 1e-7
"""How near to its maximum an ascent through a norm with eps comes, relatively."""


def _named(P: Tensor) -> str:
    return f"{P.shape[0]} tokens of width {P.shape[1]}"


def _problem(generator: torch.Generator, name: str | None = None, eps: float = 0.0) -> tuple[SphereNorm, Tensor]:
    chosen = norm(generator, name, eps=eps)
    return chosen, size(generator, -2, 2) * noise(generator, 1 + below(generator, 4), chosen.width)


def unbounded(generator: torch.Generator) -> Trial:
    """-<P, f> = R|P| along f = -R P/|P|."""
    P, radius, space = noise(generator, 3, 5), size(generator, 0, 8), WholeSpace()
    gained = equal(-(P * space.witness(P, radius)).sum(), radius * P.norm(), f"-<P, f> against R|P|, R = {radius:.3g}")
    return worst(gained, holds_if(float(space.support(P)) == math.inf, "H(P) = +inf"))


def unbounded_weights(generator: torch.Generator) -> Trial:
    """The best value over last maps with |W| = R grows like R^1: seen by ascent through actual weights."""
    P, h = noise(generator, 4, 6), noise(generator, 4, 8)
    found = certify(WholeSpace(), P, features=h).growth
    assert found is not None, "an infinite value has a growth"
    return Trial(abs(found.exponent - 1), f"value ~ R^{found.exponent:.4f} by weights of norm R")


def printed_tangent_decides(generator: torch.Generator) -> Trial:
    """At P = gamma * u the tangent part of eq. 132 is 0; what unit tangent velocities still gain."""
    chosen, space, X = _tangent_problem(generator)
    P = chosen.gamma * chosen.coordinates(X)
    part = float(chosen.tangent(X, P).abs().max())
    gained = float(-(P * space.witness(P, 1.0)).sum() / P.norm())
    return Trial(gained, f"P = gamma*u: tangent part {part:.1g}, yet a unit tangent velocity gains {gained:.3g} |P|")


def projection_decides(generator: torch.Generator) -> Trial:
    """H = 0 at p_j = u_j/gamma, normal to the image; H = +inf at a random P; <u/gamma, v> = 0 for the tangent part v of P."""
    chosen, space, X = _tangent_problem(generator)
    P, normal = noise(generator, *X.shape), chosen.coordinates(X) / chosen.gamma
    part = float(chosen.tangent(X, normal).abs().max())
    return worst(
        holds_if(float(space.support(normal)) == 0, f"P normal to the image: H = 0, though eq. 132 leaves {part:.2g} of it"),
        holds_if(float(space.support(P)) == math.inf, "P not normal: H = +inf"),
        equal((normal * chosen.tangent(X, P)).sum() / normal.norm() / P.norm(), 0.0, "tangent velocities against the normal"),
    )


def _tangent_problem(generator: torch.Generator) -> tuple[SphereNorm, TangentSpace, Tensor]:
    chosen = norm(generator, width=3 + below(generator, 8))
    X = chosen(noise(generator, 3, chosen.width))
    return chosen, TangentSpace(chosen, X), X


def ellipsoid(generator: torch.Generator) -> Trial:
    """Eq. 99: the value, attained by the printed maximiser, and exceeded by no point of the image."""
    chosen, P = _problem(generator, "rmsnorm")
    scaled = chosen.gamma * P
    best = -math.sqrt(chosen.width) * chosen.gamma * scaled / scaled.norm(dim=-1, keepdim=True)
    return _attained(chosen, P, math.sqrt(chosen.width) * scaled.norm(dim=-1).sum(), best, generator)


def layernorm_slice(generator: torch.Generator) -> Trial:
    """H = sum_j sqrt(d)|C(gamma*p_j)| - <p_j, beta>: attained by its f* in the image, exceeded by none of 30 random outputs."""
    chosen, P = _problem(generator, "layernorm")
    w = chosen.gamma * P
    w = w - w.mean(-1, keepdim=True)
    best = chosen.beta - math.sqrt(chosen.width) * chosen.gamma * w / w.norm(dim=-1, keepdim=True)
    return _attained(chosen, P, math.sqrt(chosen.width) * w.norm(dim=-1).sum() - (P @ chosen.beta).sum(), best, generator)


def _attained(chosen: SphereNorm, P: Tensor, value: Tensor, best: Tensor, generator: torch.Generator) -> Trial:
    image = image_of(chosen)
    scale = (P.norm(dim=-1) * best.norm(dim=-1)).sum()
    others = chosen(noise(generator, 30, *P.shape))
    above = float((-(P * others).sum((-2, -1))).max() - value) / float(scale)
    return worst(
        equal(image.support(P), value, f"H against the formula, {_named(P)}", scale),
        equal(-(P * best).sum(), value, f"-<P, f*> against H, {_named(P)}", scale),
        Trial(float(image.residual(best)), f"f* is in the image, {_named(P)}"),
        Trial(above, f"the best of 30 image points against H, {_named(P)}"),
    )


def printed_value_is_attained(generator: torch.Generator) -> Trial:
    """Eq. 99 for LayerNorm against the best that ascents through the module find."""
    chosen, P = _problem(generator, "layernorm", eps=1e-5)
    best = certify(EllipsoidSlice(chosen), P).velocities
    assert best is not None, "a finite value has an ascent"
    printed = float(ellipsoid_value(chosen, P))
    gap = (printed - best.best) / abs(printed)
    return Trial(gap, f"{_named(P)}: eq. 99 says {printed:.6g}, the best found through LayerNorm is {best.best:.6g}")


def climbed(generator: torch.Generator) -> Trial:
    """The closed form against ascents through the module, for both norms."""
    chosen, P = _problem(generator, eps=1e-5)
    best = certify(admissible_set(chosen, "peri"), P).velocities
    assert best is not None, "a finite value has an ascent"
    return Trial(abs(best.gap), f"{_named(P)}: the best found through the norm misses H by {best.gap:.2g}")


def printed_value_is_a_bound(generator: torch.Generator) -> Trial:
    """H <= eq. 99's value under LayerNorm at a random P, and H = that value at the same P made to have 1'(gamma*p_j) = 0."""
    chosen, P = _problem(generator, "layernorm")
    centred = chosen.centre(chosen.gamma * P) / chosen.gamma
    scale = ellipsoid_value(chosen, P).abs() + (P @ chosen.beta).abs().sum()
    below_it = Trial(
        float((EllipsoidSlice(chosen).support(P) - ellipsoid_value(chosen, P)) / scale), f"H against eq. 99, {_named(P)}"
    )
    exact = ellipsoid_value(chosen, centred)
    scale = exact.abs() + (centred @ chosen.beta).abs().sum()
    return worst(below_it, equal(EllipsoidSlice(chosen).support(centred), exact, "the two where 1'(gamma*p) = 0", scale))


def unique_everywhere(generator: torch.Generator) -> Trial:
    """How far apart two maximisers are; P may be anything, a token may have none."""
    chosen, P, best, other = _tie(generator)
    lost = float((P * (other - best)).sum()) / float((P.norm(dim=-1) * best.norm(dim=-1)).sum())
    apart = float((other - best).norm() / best.norm())
    name = "gamma*p constant" if chosen.centred else "p = 0"
    return Trial(
        apart if lost < 1e-12 else 0.0, f"{name}: two maximisers {apart:.2f} |f| apart, values differ by {abs(lost):.1g}"
    )


def unique_off_ties(generator: torch.Generator) -> Trial:
    """H - value = |w| |du|^2/(2 sqrt d) off the ties; at a tie all points attain H."""
    return worst(_second_best(generator), _tied(generator))


def _tie(generator: torch.Generator) -> tuple[SphereNorm, Tensor, Tensor, Tensor]:
    """A costate whose first token ties, a maximiser, and the same with that token's velocity another point of the image."""
    chosen = norm(generator, width=3 + below(generator, 8))
    P = noise(generator, 2, chosen.width)
    P[0] = 2 / chosen.gamma if chosen.centred else 0.0
    best = admissible_set(chosen, "peri").maximizer(P)
    other = best.clone()
    other[0] = chosen(noise(generator, chosen.width))
    return chosen, P, best, other


def _tied(generator: torch.Generator) -> Trial:
    chosen, P, best, other = _tie(generator)
    scale = (P.norm(dim=-1) * best.norm(dim=-1)).sum()
    return equal(-(P * other).sum(), admissible_set(chosen, "peri").support(P), "at a tie, another image point", scale)


def _second_best(generator: torch.Generator) -> Trial:
    chosen = norm(generator)
    P = noise(generator, 1, chosen.width)
    image = admissible_set(chosen, "peri")
    w = chosen.centre(chosen.gamma * P)
    other = chosen(noise(generator, 20, 1, chosen.width))
    apart = (chosen.coordinates(other) - chosen.coordinates(image.maximizer(P))).square().sum((-2, -1))
    lost = image.support(P) + (P * other).sum((-2, -1))
    scale = math.sqrt(chosen.width) * w.norm() + P.norm() * chosen.beta.norm()
    return equal(lost, w.norm() * apart / (2 * math.sqrt(chosen.width)), "H - value against |w||du|^2/(2 sqrt d)", scale)


def sampling(generator: torch.Generator) -> Trial:
    """max -<P, f - beta> over 50,000 random f <= 0.97 of its supremum, one token under LayerNorm at d = 16."""
    best, exact = _sampled(generator)
    return at_most(best, 0.97 * exact, "the best of 50,000 samples at d = 16 against 0.97 H")


def sampling_suffices(generator: torch.Generator) -> Trial:
    """1 - (max over 50,000 random f)/(supremum) of -<P, f - beta>, one token under LayerNorm at d = 16."""
    best, exact = _sampled(generator)
    return Trial(1 - best / exact, f"the best of 50,000 samples at d = 16 is {best:.4g}, H is {exact:.4g}")


def _sampled(generator: torch.Generator) -> tuple[float, float]:
    """The largest -<P, f - beta> of 50,000 random points of LayerNorm's image at d = 16, and of all."""
    chosen, P = norm(generator, "layernorm", width=16), noise(generator, 1, 16)
    points = chosen(noise(generator, 50_000, 16)) - chosen.beta
    return float((-(P * points).sum(-1)).max()), float(EllipsoidSlice(chosen).support(P) + (P @ chosen.beta).sum())


def stationarity(generator: torch.Generator) -> Trial:
    """The larger of feasibility and gamma*p_j + eta u_j + mu 1 = 0 (mu for LayerNorm only) at the maximiser, best multipliers."""
    chosen, P = _problem(generator)
    image = admissible_set(chosen, "peri")
    return Trial(float(image.kkt(P, image.maximizer(P))), f"KKT residual at the maximiser, {_named(P)}")


STATEMENTS: tuple[Statement, ...] = (
    as_printed(
        "theorem-2",
        4,
        "Kan, theorem 2",
        "none and pre: H(P) = +inf for P other than 0, along f = -R P/|P|",
        Check(unbounded, 1e-12),
    ),
    as_printed(
        "theorem-2-weights",
        4,
        "Kan, theorem 2",
        "the same through the model's own last map: the best value grows like |W|^1",
        Check(unbounded_weights, 0.01, 0.01),
    ),
    Statement(
        "appendix-j",
        4,
        "ctrans, on Kan, appendix J",
        "post and pre_post: H(P) = 0 where P is normal to the image (orthogonally), else +inf",
        Check(projection_decides, 1e-12),
        Check(printed_tangent_decides, 1e-12),
        "H(P) = 0 where the tangent part of P (eq. 132) is 0",
    ),
    as_printed(
        "eq-99",
        4,
        "Kan, eq. 99-100",
        "RMSNorm at the output: H = sum_j sqrt(d)|gamma*p_j|, attained at -sqrt(d) gamma^2 p_j/|gamma*p_j|",
        Check(ellipsoid, 1e-12),
    ),
    Statement(
        "eq-99-layernorm",
        4,
        "Kan, eq. 99-100",
        "LayerNorm at the output: H = sum_j sqrt(d)|C(gamma*p_j)| - <p_j, beta>, attained on the slice",
        Check(layernorm_slice, 1e-10),
        Check(printed_value_is_attained, CLIMBED, 0.05),
        "H = sum_j sqrt(d)|gamma*p_j| - <p_j, beta>, attained",
    ),
    Statement(
        "eq-99-ascent",
        4,
        "ctrans",
        "ascents through the norm's module, which know no closed form, reach H and no more, for both norms",
        Check(climbed, CLIMBED, 0.05),
    ),
    Statement(
        "eq-99-bound",
        4,
        "ctrans",
        "for LayerNorm the ellipsoid's value is an upper bound, equal where 1'(gamma*p_j) = 0",
        Check(printed_value_is_a_bound, 1e-11),
    ),
    Statement(
        "unique-maximiser",
        4,
        "Kan, eq. 99-100",
        "the maximiser is unique except where C(gamma*p_j) = 0, where every point of the image attains H",
        Check(unique_off_ties, 1e-11),
        Check(unique_everywhere, 1e-6, 0.25),
        "the optimal velocity is unique",
    ),
    Statement(
        "sampling",
        4,
        "ctrans",
        "sampling the supremum falls short in high dimension: 50,000 samples at d = 16 stay 3% below, at least",
        Check(sampling, 0.0, 0.01),
        Check(sampling_suffices, 0.01, 0.01),
        "the supremum can be estimated by sampling",
    ),
    Statement(
        "kkt",
        4,
        "ctrans",
        "the maximisers satisfy the KKT conditions of their image",
        Check(stationarity, 1e-10),
    ),
)
