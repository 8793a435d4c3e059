"""Section 4: the Hamiltonian with a running cost lam/2 |f|^2 of velocities."""

from __future__ import annotations

import math

import torch

from ctrans.base.draw import Draw
from ctrans.control import KineticCost, WholeSpace
from ctrans.control.certificate import certify
from ctrans.control.set_of_placement import admissible_set
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.theory.payoffs import payoff
from ctrans.theory.random_norms import PAPERS, random_norm
from ctrans.theory.statement import (
    Trial,
    Trials,
    equal,
    holds_if,
    not_none,
    statement,
)

SECTION = 4


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
    norm = random_norm(draw, width=6, eps=1e-5)
    P = draw.normal(3, 6)
    state = None
    if PLACEMENTS[placement].state_norm:
        state = norm(draw.normal(3, 6))
    allowed = admissible_set(norm, placement, state=state, kinetic=lam)
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
            f"H finite, the certificate's findings agree, {placement}",
            condition=math.isfinite(float(H)) and certify(allowed, P).agrees,
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
def with_eps(draw: Draw, *, printed: bool) -> Trials:
    """max of -<P, f> - lam/2 |f|^2 over 30 outputs f of the norm <= H over the filled ellipsoid
    (slice), which ascents reach.

    Printed: <= H over the ellipsoid (slice) itself. Both are relative to |H| + 1.
    """
    name = draw.choice(PAPERS)
    lam = draw.log_uniform(0, 1)
    norm = random_norm(draw, name, width=5, eps=1e-5)
    norm.beta.zero_()  # puts f = 0 inside the set
    P = 0.1 * draw.normal(2, 5)
    sharp = random_norm(draw, name, width=5)
    sharp.load_state_dict(norm.state_dict())
    sizes = torch.logspace(-6, 1, 15, dtype=torch.float64).reshape(-1, 1, 1)
    f = norm(torch.cat([-sizes * norm.centre(norm.gamma * P), sizes * draw.normal(15, 2, 5)]))
    reached = float((payoff(P, f) - lam / 2 * f.square().sum((-2, -1))).max())
    if printed:
        allowed = admissible_set(sharp, "peri", kinetic=lam)
        value = float(allowed.support(P))
        claim = f"the surface allows {value:.4g}"
    else:
        allowed = admissible_set(norm, "peri", kinetic=lam)
        value = float(allowed.support(P))
        claim = f"filled image {value:.4g}"
    above = Trial(
        (reached - value) / (abs(value) + 1),
        f"lam = {lam:.3g}: {claim}, the norm reaches {reached:.4g}",
    )
    if printed:
        return above
    best = not_none(certify(allowed, P).velocities)
    return [
        above,
        Trial(
            abs(best.gap),
            f"ascents through the norm miss the filled image's value by {best.gap:.2g}",
        ),
    ]
