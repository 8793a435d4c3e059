"""Section 4: the Hamiltonian with a running cost lam/2 |f|^2 on velocities."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ctrans.control import (
    Ellipsoid,
    EllipsoidSlice,
    FilledImage,
    KineticCost,
    WholeSpace,
    admissible_set,
    certify,
)
from ctrans.norm import SphereNorm
from ctrans.placement import PLACEMENTS
from ctrans.verify.draws import PAPERS, noise, norm, one_of, size
from ctrans.verify.statement import Check, Statement, Trial, as_printed, equal, holds_if, worst


def kinetic_whole_space(generator: torch.Generator) -> Trial:
    """H = |P|^2/(2 lam) and f* = -P/lam over all velocities, for lam from 1e-3 to 1e3."""
    P, lam = noise(generator, 3, 5), size(generator, -3, 3)
    cost = KineticCost(WholeSpace(), lam)
    return worst(
        equal(cost.support(P), P.square().sum() / (2 * lam), f"H against |P|^2/(2 lam), lam = {lam:.3g}"),
        equal(cost.maximizer(P), -P / lam, "the maximiser against -P/lam"),
    )


def kinetic_everywhere(generator: torch.Generator) -> Trial:
    """Finite, attained, and agreed with by ascents through the modules."""
    placement, lam = one_of(generator, PLACEMENTS), size(generator, -1, 1)
    chosen, P = norm(generator, width=6, eps=1e-5), noise(generator, 3, 6)
    state = chosen(noise(generator, 3, 6)) if PLACEMENTS[placement].state_norm else None
    allowed = admissible_set(chosen, placement, state=state, kinetic=lam)
    H, f = allowed.support(P), allowed.maximizer(P)
    found = certify(allowed, P)
    return worst(
        equal(
            -(P * f).sum() - lam / 2 * f.square().sum(), H, f"payoff of f* against H, {placement}", H.abs() + P.norm() * f.norm()
        ),
        holds_if(math.isfinite(float(H)) and found.agrees, f"H finite, the certificate's findings agree, {placement}"),
    )


def _surface(generator: torch.Generator) -> tuple[SphereNorm, Tensor, float, float, float]:
    """A norm with eps, a small costate, a cost, the surface's value and the best payoff of real outputs of the norm."""
    name, lam = one_of(generator, PAPERS), size(generator, 0, 1)
    chosen = norm(generator, name, width=5, eps=1e-5)
    chosen.beta.zero_()  # so that resting, f = 0, is inside the set
    P = 0.1 * noise(generator, 2, 5)
    sharp = norm(generator, name, width=5)
    sharp.load_state_dict(chosen.state_dict())
    image = EllipsoidSlice(sharp) if sharp.centred else Ellipsoid(sharp)
    sizes = torch.logspace(-6, 1, 15, dtype=torch.float64).reshape(-1, 1, 1)
    toward = chosen.centre(chosen.gamma * P)
    f = chosen(torch.cat([-sizes * toward, sizes * noise(generator, 15, 2, 5)]))
    payoff = float((-(P * f).sum((-2, -1)) - lam / 2 * f.square().sum((-2, -1))).max())
    return chosen, P, lam, float(KineticCost(image, lam).support(P)), payoff


def kinetic_on_surface(generator: torch.Generator) -> Trial:
    """max of -<P, f> - lam/2 |f|^2 over 30 outputs f of a norm with eps = 1e-5 <= H over the ellipsoid (slice), relative to |H| + 1."""
    _, _, lam, surface, payoff = _surface(generator)
    return Trial(
        (payoff - surface) / (abs(surface) + 1),
        f"lam = {lam:.3g}: the surface allows {surface:.4g}, the norm reaches {payoff:.4g}",
    )


def kinetic_filled(generator: torch.Generator) -> Trial:
    """max of -<P, f> - lam/2 |f|^2 over 30 outputs f of the norm <= H over the filled ellipsoid (slice), which ascents reach."""
    chosen, P, lam, _, payoff = _surface(generator)
    image = EllipsoidSlice(chosen) if chosen.centred else Ellipsoid(chosen)
    allowed = KineticCost(FilledImage(image), lam)
    value = float(allowed.support(P))
    above = Trial(
        (payoff - value) / (abs(value) + 1), f"lam = {lam:.3g}: filled image {value:.4g}, the norm reaches {payoff:.4g}"
    )
    best = certify(allowed, P).velocities
    assert best is not None, "a finite value has an ascent"
    return worst(above, Trial(abs(best.gap), f"ascents through the norm miss the filled image's value by {best.gap:.2g}"))


STATEMENTS: tuple[Statement, ...] = (
    as_printed(
        "kinetic-cost",
        4,
        "OT-Transformer; ctrans",
        "running cost lam/2 |f|^2 on the whole space: H = |P|^2/(2 lam), f* = -P/lam",
        Check(kinetic_whole_space, 1e-12),
    ),
    as_printed(
        "kinetic-well-posed",
        4,
        "OT-Transformer; ctrans",
        "with a kinetic cost every placement has a finite H, attained over the closure of its velocities",
        Check(kinetic_everywhere, 1e-10, 0.03),
    ),
    Statement(
        "kinetic-with-eps",
        4,
        "ctrans",
        "with a kinetic cost and eps > 0 the admissible set is the filled ellipsoid (slice): a best velocity "
        "inside is attained, the surface's value exceeded",
        Check(kinetic_filled, 1e-6, 0.05),
        Check(kinetic_on_surface, 1e-6, 0.05),
        "the ellipsoid itself is the admissible set",
    ),
)
