"""Section 4: the Hamiltonian H(P) = sup -<P, f> over each placement's velocities, its maximisers,
and a cost lam/2 |f|^2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.control import EllipsoidSlice, KineticCost, TangentSpace, WholeSpace
from ctrans.control.certificate import certify
from ctrans.control.ellipsoid import ellipsoid_value
from ctrans.control.set_of_placement import admissible_set
from ctrans.control.sets_by_norm import image_of
from ctrans.dynamics.norm import SphereNorm
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.theory.payoffs import largest_payoff, none_better, payoff
from ctrans.theory.random_norms import PAPERS, random_norm
from ctrans.theory.statement import (
    Printed,
    Trial,
    Trials,
    at_most,
    equal,
    holds_if,
    known,
    statement,
)

SECTION = 4


def _named(P: Tensor) -> str:
    return f"{P.shape[0]} tokens of width {P.shape[1]}"


def _problem(draw: Draw, name: str | None = None, eps: float = 0.0) -> tuple[SphereNorm, Tensor]:
    chosen = random_norm(draw, name, eps=eps)
    return chosen, draw.log_uniform(-2, 2) * draw.rows(chosen.width)


@statement(
    "theorem-2",
    "Kan, theorem 2",
    "none and pre: H(P) = +inf for P other than 0, along f = -R P/|P|",
    1e-12,
    as_printed=True,
)
def unbounded(draw: Draw) -> Trials:
    """-<P, f> = R|P| along f = -R P/|P|."""
    P = draw.normal(3, 5)
    radius = draw.log_uniform(0, 8)
    space = WholeSpace()
    gained = equal(
        payoff(P, space.witness(P, radius)),
        radius * P.norm(),
        f"-<P, f> against R|P|, R = {radius:.3g}",
    )
    return [gained, holds_if(float(space.support(P)) == math.inf, "H(P) = +inf")]


@statement(
    "theorem-2-weights",
    "Kan, theorem 2",
    "theorem 2 through the model's own last map: the best value grows like |W|^1",
    0.01,
    0.01,
    as_printed=True,
)
def unbounded_weights(draw: Draw) -> Trial:
    """The best value over last maps with |W| = R grows like R^1, by an ascent over actual
    weights.
    """
    P = draw.normal(4, 6)
    h = draw.normal(4, 8)
    found = known(certify(WholeSpace(), P, features=h).growth)
    return Trial(abs(found.exponent - 1), f"value ~ R^{found.exponent:.4f} by weights of norm R")


@statement(
    "appendix-j",
    "ctrans, on Kan, appendix J",
    "post and pre_post: H(P) = 0 where P is normal to the image (orthogonally), else +inf",
    1e-12,
    printed="H(P) = 0 where the tangent part of P (eq. 132) is 0",
)
def projection_decides(draw: Draw, printed: bool) -> Trials:
    """H = 0 at p_j = u_j/gamma, normal to the image; H = +inf at a random P; <u/gamma, v> = 0 for
    the tangent part v of P.

    Printed: at P = gamma * u the tangent part of eq. 132 is 0, but unit tangent velocities have a
    positive payoff.
    """
    chosen = random_norm(draw, width=3 + draw.integer(8))
    X = chosen(draw.normal(3, chosen.width))
    space = TangentSpace(chosen, X)
    u = chosen.coordinates(X)
    if printed:
        P = chosen.gamma * u
        part = float(chosen.tangent(X, P).abs().max())
        gained = float(payoff(P, space.witness(P, 1.0)) / P.norm())
        return Trial(
            gained,
            f"P = gamma*u: tangent part {part:.1g}, yet a unit tangent velocity gains"
            f" {gained:.3g} |P|",
        )
    P = draw.normal(*X.shape)
    normal = u / chosen.gamma
    part = float(chosen.tangent(X, normal).abs().max())
    return [
        holds_if(
            float(space.support(normal)) == 0,
            f"P normal to the image: H = 0, though eq. 132 leaves {part:.2g} of it",
        ),
        holds_if(float(space.support(P)) == math.inf, "P not normal: H = +inf"),
        equal(
            (normal * chosen.tangent(X, P)).sum() / normal.norm() / P.norm(),
            0.0,
            "tangent velocities against the normal",
        ),
    ]


@statement(
    "eq-99",
    "Kan, eq. 99-100",
    "RMSNorm at the output: H = sum_j sqrt(d)|gamma*p_j|, attained at -sqrt(d) gamma^2"
    " p_j/|gamma*p_j|",
    1e-12,
    as_printed=True,
)
def ellipsoid(draw: Draw) -> Trials:
    """Eq. 99: the printed maximiser attains the value, and no point of the image exceeds it."""
    return _attained(draw, *_problem(draw, "rmsnorm"))


@statement(
    "eq-99-layernorm",
    "Kan, eq. 99-100",
    "LayerNorm at the output: H = sum_j sqrt(d)|C(gamma*p_j)| - <p_j, beta>, attained on the slice",
    1e-10,
    printed=Printed("H = sum_j sqrt(d)|gamma*p_j| - <p_j, beta>, attained", 1e-7, 0.05),
)
def layernorm_slice(draw: Draw, printed: bool) -> Trials:
    """H = sum_j sqrt(d)|C(gamma*p_j)| - <p_j, beta>: f* in the image attains it, none of 30 random
    outputs exceeds it.

    Printed: eq. 99 against the best value that ascents through the module find.
    """
    if not printed:
        return _attained(draw, *_problem(draw, "layernorm"))
    chosen, P = _problem(draw, "layernorm", eps=1e-5)
    best = known(certify(EllipsoidSlice(chosen), P).velocities)
    value = float(ellipsoid_value(chosen, P))
    words = (
        f"{_named(P)}: eq. 99 says {value:.6g}, the best found through LayerNorm is {best.best:.6g}"
    )
    return Trial((value - best.best) / abs(value), words)


def _attained(draw: Draw, chosen: SphereNorm, P: Tensor) -> Trials:
    w = chosen.gamma * P
    if chosen.centred:
        w = w - w.mean(-1, keepdim=True)
    else:
        w = w
    best = -math.sqrt(chosen.width) * chosen.gamma * w / w.norm(dim=-1, keepdim=True)
    value = math.sqrt(chosen.width) * w.norm(dim=-1).sum()
    if chosen.centred:
        best = chosen.beta + best
        value = value - (P @ chosen.beta).sum()
    image = image_of(chosen)
    scale = largest_payoff(P, best)
    words = _named(P)
    return [
        equal(image.support(P), value, f"H against the formula, {words}", scale),
        equal(payoff(P, best), value, f"-<P, f*> against H, {words}", scale),
        Trial(float(image.residual(best)), f"f* is in the image, {words}"),
        none_better(
            P,
            chosen(draw.normal(30, *P.shape)),
            value,
            scale,
            f"the best of 30 image points against H, {words}",
        ),
    ]


@statement(
    "eq-99-ascent",
    "ctrans",
    "ascents through the norm's module, which know no closed form, reach H and no more, for both"
    " norms",
    1e-7,
    0.05,
)
def climbed(draw: Draw) -> Trial:
    """The closed form against ascents through the module, for both norms."""
    chosen, P = _problem(draw, eps=1e-5)
    best = known(certify(image_of(chosen), P).velocities)
    return Trial(
        abs(best.gap), f"{_named(P)}: the best found through the norm misses H by {best.gap:.2g}"
    )


@statement(
    "eq-99-bound",
    "ctrans",
    "for LayerNorm the ellipsoid's value is an upper bound, equal where 1'(gamma*p_j) = 0",
    1e-11,
)
def printed_value_is_a_bound(draw: Draw) -> Trials:
    """H <= eq. 99's value under LayerNorm at a random P, and H equals it at a P with 1'(gamma*p_j)
    = 0.
    """
    chosen, P = _problem(draw, "layernorm")
    image = EllipsoidSlice(chosen)
    cases = []
    for at in (P, chosen.centre(chosen.gamma * P) / chosen.gamma):
        value = ellipsoid_value(chosen, at)
        H = image.support(at)
        scale = value.abs() + (at @ chosen.beta).abs().sum()
        above = Trial(float((H - value) / scale), f"H against eq. 99, {_named(P)}")
        cases.append(above if at is P else equal(H, value, "the two where 1'(gamma*p) = 0", scale))
    return cases


@statement(
    "unique-maximiser",
    "Kan, eq. 99-100",
    "the maximiser is unique except where C(gamma*p_j) = 0, where every point of the image"
    " attains H",
    1e-11,
    printed=Printed("the optimal velocity is unique", 1e-6, 0.25),
)
def unique_maximiser(draw: Draw, printed: bool) -> Trials:
    """H - value = |w| |du|^2/(2 sqrt d) without ties; at a tie all points attain H.

    Printed: the distance between two maximisers, for any P; a token's costate may be 0.
    """
    if printed:
        chosen, P, best, other = _tie(draw)
        lost = float((P * (other - best)).sum()) / float(largest_payoff(P, best))
        apart = float((other - best).norm() / best.norm())
        if chosen.centred:
            name = "gamma*p constant"
        else:
            name = "p = 0"
        words = f"{name}: two maximisers {apart:.2f} |f| apart, values differ by {abs(lost):.1g}"
        return Trial(apart if lost < 1e-12 else 0.0, words)
    second = _second_best(draw)
    chosen, P, best, other = _tie(draw)
    value = image_of(chosen).support(P)
    return [
        second,
        equal(payoff(P, other), value, "at a tie, another image point", largest_payoff(P, best)),
    ]


def _tie(draw: Draw) -> tuple[SphereNorm, Tensor, Tensor, Tensor]:
    """A costate whose first token ties, a maximiser, and another one with a different velocity for
    that token.
    """
    chosen = random_norm(draw, width=3 + draw.integer(8))
    P = draw.normal(2, chosen.width)
    if chosen.centred:
        P[0] = 2 / chosen.gamma
    else:
        P[0] = 0.0
    best = image_of(chosen).maximizer(P)
    other = best.clone()
    other[0] = chosen(draw.normal(chosen.width))
    return chosen, P, best, other


def _second_best(draw: Draw) -> Trial:
    chosen = random_norm(draw)
    P = draw.normal(1, chosen.width)
    root = math.sqrt(chosen.width)
    image = image_of(chosen)
    w = chosen.centre(chosen.gamma * P)
    other = chosen(draw.normal(20, 1, chosen.width))
    apart = (
        (chosen.coordinates(other) - chosen.coordinates(image.maximizer(P))).square().sum((-2, -1))
    )
    scale = root * w.norm() + P.norm() * chosen.beta.norm()
    lost = image.support(P) - payoff(P, other)
    return equal(
        lost, w.norm() * apart / (2 * root), "H - value against |w||du|^2/(2 sqrt d)", scale
    )


@statement(
    "sampling",
    "ctrans",
    "sampling underestimates the supremum in high dimension: 50,000 samples at d = 16 stay at least"
    " 3% below",
    0.0,
    0.01,
    printed=Printed("the supremum can be estimated by sampling", 0.01),
)
def sampling(draw: Draw, printed: bool) -> Trial:
    """max -<P, f - beta> over 50,000 random f <= 0.97 of its supremum, one token under LayerNorm at
    d = 16. Printed: equals it.
    """
    chosen = random_norm(draw, "layernorm", width=16)
    P = draw.normal(1, 16)
    points = chosen(draw.normal(50_000, 16)) - chosen.beta
    best = float((-(P * points).sum(-1)).max())
    exact = float(EllipsoidSlice(chosen).support(P) + (P @ chosen.beta).sum())
    words = "the best of 50,000 samples at d = 16"
    if printed:
        return Trial(1 - best / exact, f"{words} is {best:.4g}, H is {exact:.4g}")
    return at_most(best, 0.97 * exact, f"{words} against 0.97 H")


@statement("kkt", "ctrans", "the maximisers satisfy the KKT conditions of their image", 1e-10)
def stationarity(draw: Draw) -> Trial:
    """The larger of feasibility and gamma*p_j + eta u_j + mu 1 = 0 (mu for LayerNorm only) at the
    maximiser, with the best multipliers.
    """
    chosen, P = _problem(draw)
    image = image_of(chosen)
    return Trial(
        float(image.kkt(P, image.maximizer(P))), f"KKT residual at the maximiser, {_named(P)}"
    )


@statement(
    "kinetic-cost",
    "OT-Transformer; ctrans",
    "running cost lam/2 |f|^2 on the whole space: H = |P|^2/(2 lam), f* = -P/lam",
    1e-12,
    as_printed=True,
)
def whole_space(draw: Draw) -> Trials:
    """H = |P|^2/(2 lam) and f* = -P/lam over all velocities, for lam from 1e-3 to 1e3."""
    P = draw.normal(3, 5)
    lam = draw.log_uniform(-3, 3)
    cost = KineticCost(WholeSpace(), lam)
    return [
        equal(
            cost.support(P),
            P.square().sum() / (2 * lam),
            f"H against |P|^2/(2 lam), lam = {lam:.3g}",
        ),
        equal(cost.maximizer(P), -P / lam, "the maximiser against -P/lam"),
    ]


@statement(
    "kinetic-well-posed",
    "OT-Transformer; ctrans",
    "with a kinetic cost every placement has a finite H, attained over the closure of its"
    " velocities",
    1e-10,
    0.03,
    as_printed=True,
)
def every_placement(draw: Draw) -> Trials:
    """H is finite, its f* attains it, and ascents through the modules agree."""
    placement = draw.choice(PLACEMENTS)
    lam = draw.log_uniform(-1, 1)
    chosen = random_norm(draw, width=6, eps=1e-5)
    P = draw.normal(3, 6)
    if PLACEMENTS[placement].state_norm:
        state = chosen(draw.normal(3, 6))
    else:
        state = None
    allowed = admissible_set(chosen, placement, state=state, kinetic=lam)
    H = allowed.support(P)
    f = allowed.maximizer(P)
    scale = H.abs() + P.norm() * f.norm()
    return [
        equal(
            payoff(P, f) - lam / 2 * f.square().sum(),
            H,
            f"payoff of f* against H, {placement}",
            scale,
        ),
        holds_if(
            math.isfinite(float(H)) and certify(allowed, P).agrees,
            f"H finite, the certificate's findings agree, {placement}",
        ),
    ]


@statement(
    "kinetic-with-eps",
    "ctrans",
    "with a kinetic cost and eps > 0 the admissible set is the filled ellipsoid (slice): a best"
    " velocity inside is attained, the surface's value exceeded",
    1e-6,
    0.05,
    printed="the ellipsoid itself is the admissible set",
)
def with_eps(draw: Draw, printed: bool) -> Trials:
    """max of -<P, f> - lam/2 |f|^2 over 30 outputs f of the norm <= H over the filled ellipsoid
    (slice), which ascents reach.

    Printed: <= H over the ellipsoid (slice) itself. Both are relative to |H| + 1.
    """
    name = draw.choice(PAPERS)
    lam = draw.log_uniform(0, 1)
    chosen = random_norm(draw, name, width=5, eps=1e-5)
    chosen.beta.zero_()  # puts f = 0 inside the set
    P = 0.1 * draw.normal(2, 5)
    sharp = random_norm(draw, name, width=5)
    sharp.load_state_dict(chosen.state_dict())
    sizes = torch.logspace(-6, 1, 15, dtype=torch.float64).reshape(-1, 1, 1)
    f = chosen(torch.cat([-sizes * chosen.centre(chosen.gamma * P), sizes * draw.normal(15, 2, 5)]))
    reached = float((payoff(P, f) - lam / 2 * f.square().sum((-2, -1))).max())
    allowed = admissible_set(sharp if printed else chosen, "peri", kinetic=lam)
    value = float(allowed.support(P))
    if printed:
        named = f"the surface allows {value:.4g}"
    else:
        named = f"filled image {value:.4g}"
    above = Trial(
        (reached - value) / (abs(value) + 1),
        f"lam = {lam:.3g}: {named}, the norm reaches {reached:.4g}",
    )
    if printed:
        return above
    best = known(certify(allowed, P).velocities)
    return [
        above,
        Trial(
            abs(best.gap),
            f"ascents through the norm miss the filled image's value by {best.gap:.2g}",
        ),
    ]
