"""Section 4: the Hamiltonian with a running cost lam/2 |f|^2 on velocities."""

from __future__ import annotations

import math

import torch

from ctrans.control import KineticCost, WholeSpace, admissible_set, certify
from ctrans.control.statements.payoffs import payoff
from ctrans.norm.random_norms import PAPERS, random_norm
from ctrans.placement import PLACEMENTS
from ctrans.statement import Draw, Printed, Trial, equal, holds_if, known, statement, worst


@statement(
    "kinetic-cost",
    4,
    "OT-Transformer; ctrans",
    "running cost lam/2 |f|^2 on the whole space: H = |P|^2/(2 lam), f* = -P/lam",
    1e-12,
    as_printed=True,
)
def whole_space(draw: Draw) -> Trial:
    """H = |P|^2/(2 lam) and f* = -P/lam over all velocities, for lam from 1e-3 to 1e3."""
    P, lam = draw.normal(3, 5), draw.log_uniform(-3, 3)
    cost = KineticCost(WholeSpace(), lam)
    return worst(
        equal(cost.support(P), P.square().sum() / (2 * lam), f"H against |P|^2/(2 lam), lam = {lam:.3g}"),
        equal(cost.maximizer(P), -P / lam, "the maximiser against -P/lam"),
    )


@statement(
    "kinetic-well-posed",
    4,
    "OT-Transformer; ctrans",
    "with a kinetic cost every placement has a finite H, attained over the closure of its velocities",
    1e-10,
    0.03,
    as_printed=True,
)
def every_placement(draw: Draw) -> Trial:
    """H is finite, its f* attains it, and ascents through the modules agree."""
    placement, lam = draw.choice(PLACEMENTS), draw.log_uniform(-1, 1)
    chosen, P = random_norm(draw, width=6, eps=1e-5), draw.normal(3, 6)
    state = chosen(draw.normal(3, 6)) if PLACEMENTS[placement].state_norm else None
    allowed = admissible_set(chosen, placement, state=state, kinetic=lam)
    H, f = allowed.support(P), allowed.maximizer(P)
    scale = H.abs() + P.norm() * f.norm()
    return worst(
        equal(payoff(P, f) - lam / 2 * f.square().sum(), H, f"payoff of f* against H, {placement}", scale),
        holds_if(
            math.isfinite(float(H)) and certify(allowed, P).agrees,
            f"H finite, the certificate's findings agree, {placement}",
        ),
    )


@statement(
    "kinetic-with-eps",
    4,
    "ctrans",
    "with a kinetic cost and eps > 0 the admissible set is the filled ellipsoid (slice): a best velocity "
    "inside is attained, the surface's value exceeded",
    1e-6,
    0.05,
    printed=Printed("the ellipsoid itself is the admissible set", 1e-6, 0.05),
)
def with_eps(draw: Draw, printed: bool) -> Trial:
    """max of -<P, f> - lam/2 |f|^2 over 30 outputs f of the norm <= H over the filled ellipsoid (slice), which ascents reach.

    Printed: <= H over the ellipsoid (slice) itself. Both are relative to |H| + 1.
    """
    name, lam = draw.choice(PAPERS), draw.log_uniform(0, 1)
    chosen = random_norm(draw, name, width=5, eps=1e-5)
    chosen.beta.zero_()  # so that resting, f = 0, is inside the set
    P = 0.1 * draw.normal(2, 5)
    sharp = random_norm(draw, name, width=5)
    sharp.load_state_dict(chosen.state_dict())
    sizes = torch.logspace(-6, 1, 15, dtype=torch.float64).reshape(-1, 1, 1)
    f = chosen(torch.cat([-sizes * chosen.centre(chosen.gamma * P), sizes * draw.normal(15, 2, 5)]))
    reached = float((payoff(P, f) - lam / 2 * f.square().sum((-2, -1))).max())
    allowed = admissible_set(sharp if printed else chosen, "peri", kinetic=lam)
    value = float(allowed.support(P))
    named = f"the surface allows {value:.4g}" if printed else f"filled image {value:.4g}"
    above = Trial((reached - value) / (abs(value) + 1), f"lam = {lam:.3g}: {named}, the norm reaches {reached:.4g}")
    if printed:
        return above
    best = known(certify(allowed, P).velocities)
    return worst(above, Trial(abs(best.gap), f"ascents through the norm miss the filled image's value by {best.gap:.2g}"))
