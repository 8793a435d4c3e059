"""Section 4, last lines: the value function of bounded velocities is Hopf-Lax, that of the whole space is flat and jumps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ctrans.control import admissible_set
from ctrans.control.hjb import Grid, solve_hjb
from ctrans.control.hjb_study import NearestTarget
from ctrans.control.hopf_lax import hopf_lax, velocity_ball, velocity_hull
from ctrans.norm import SphereNorm
from ctrans.verify.draws import below, between, noise, norm, norm_words
from ctrans.verify.statement import Check, Statement, Trial, as_printed, at_most, equal, worst


def _smooth(x: Tensor) -> Tensor:
    """A slope that never vanishes, so that no kink forms in the times below."""
    return x[..., 0] + 0.5 * x[..., 1] + 0.2 * torch.sin(2 * x[..., 0]) * torch.cos(1.5 * x[..., 1])


def solves_hjb(generator: torch.Generator) -> Trial:
    """-dPhi/dt + H(grad Phi) = 0, by central differences of the minimum itself."""
    chosen, remaining, h = _slow(generator), between(generator, 0.05, 0.25), 1e-4
    x, hull = noise(generator, 5, 2), velocity_hull(chosen)

    def phi(points: Tensor, time_to_go: float) -> Tensor:
        return hopf_lax(_smooth, points, time_to_go, hull)

    steps = h * torch.eye(2, dtype=torch.float64)
    gradient = torch.stack([(phi(x + step, remaining) - phi(x - step, remaining)) / (2 * h) for step in steps], -1)
    rate = (phi(x, remaining + h) - phi(x, remaining - h)) / (2 * h)  # -dPhi/dt, as t = T - remaining
    H = admissible_set(chosen, "peri").support(gradient.unsqueeze(-2))
    return equal(H, -rate, f"{norm_words(chosen)}, T - t = {remaining:.2f}: H(grad Phi) against dPhi/dt")


def _slow(generator: torch.Generator) -> SphereNorm:
    """A norm in the plane whose velocities are too slow to bring two basins of G together, so that Phi has no kinks."""
    chosen = norm(generator, width=2, signed=False)
    chosen.gamma.clamp_(0.5, 1)
    chosen.beta.clamp_(-0.3, 0.3)
    return chosen


def reachable(generator: torch.Generator) -> Trial:
    """A target just inside the ellipsoid of radius T - t is reached, one just outside is missed."""
    chosen, remaining = norm(generator, "rmsnorm", width=2 + below(generator, 3)), between(generator, 0.1, 2)
    u = noise(generator, chosen.width)
    edge = remaining * math.sqrt(chosen.width) * chosen.gamma * u / u.norm()
    target = NearestTarget(((0.0,) * chosen.width,))
    inside, outside = hopf_lax(target, torch.stack([0.99 * edge, 1.01 * edge]), remaining, velocity_hull(chosen))
    missed = 1e-4 * remaining * float(chosen.gamma.abs().min())
    return worst(
        Trial(
            float(inside) / float(edge.norm()),
            f"{norm_words(chosen)}: from 0.99 of the edge the target is missed by {float(inside):.2g}",
        ),
        at_most(missed, outside, "from 1.01 of the edge it is missed by at least"),
    )


def _first(z: Tensor) -> Tensor:
    return z[..., 0]


def layernorm_value(generator: torch.Generator) -> Trial:
    """G = z_1: Phi = x_1 + (T - t)(beta_1 - sqrt(d) |gamma_1| |C e_1|)."""
    chosen, remaining = norm(generator, "layernorm", width=2 + below(generator, 4)), between(generator, 0.1, 2)
    x = noise(generator, 5, chosen.width)
    speed = math.sqrt(chosen.width - 1) * chosen.gamma[0].abs()
    expected = x[:, 0] + remaining * (chosen.beta[0] - speed)
    return equal(hopf_lax(_first, x, remaining, velocity_hull(chosen)), expected, f"Phi for G = z_1, {norm_words(chosen)}")


def ellipsoid_value_for_layernorm(generator: torch.Generator) -> Trial:
    """What is reached, against Kan's ellipsoid: sqrt(d) |gamma_1| in place of sqrt(d - 1) |gamma_1|."""
    chosen, remaining = norm(generator, "layernorm", width=2 + below(generator, 4)), between(generator, 0.1, 2)
    x = noise(generator, 5, chosen.width)
    printed = x[:, 0] + remaining * (chosen.beta[0] - math.sqrt(chosen.width) * chosen.gamma[0].abs())
    return equal(
        hopf_lax(_first, x, remaining, velocity_hull(chosen)), printed, f"Phi for G = z_1, {norm_words(chosen)}, by the ellipsoid"
    )


def flat(generator: torch.Generator) -> Trial:
    """Velocities up to R with R (T - t) beyond the targets: Phi = inf G = 0 everywhere, and G at t = T."""
    remaining, x = 10 ** between(generator, -4, 0), noise(generator, 20, 2)
    terminal = NearestTarget()
    value = hopf_lax(terminal, x, remaining, velocity_ball(20 / remaining, 2))
    at_end = hopf_lax(terminal, x, 0.0, velocity_ball(20 / remaining, 2))
    return worst(
        Trial(
            float(value.amax()),
            f"T - t = {remaining:.1g}: Phi is at most {float(value.amax()):.1g} where G is up to {float(terminal(x).amax()):.2g}",
        ),
        equal(at_end, terminal(x), "Phi at T against G"),
    )


def grid_agrees(generator: torch.Generator) -> Trial:
    """WENO on a grid against Hopf-Lax, where the edges cannot matter."""
    chosen, horizon = _slow(generator), 0.25
    hull = velocity_hull(chosen)
    errors = []
    for points in (21, 41):
        grid = Grid((-1.5, -1.5), (1.5, 1.5), (points, points))
        solution = solve_hjb(admissible_set(chosen, "peri"), _smooth, grid, [0.0], horizon=horizon, scheme="weno5")
        mask = solution.untouched(0.0)
        errors.append(
            float((solution.values[0][mask] - hopf_lax(_smooth, grid.nodes[mask], horizon, hull, starts=4)).abs().mean())
        )
    return at_most(errors[1], errors[0] / 2, f"{norm_words(chosen)}: the grid's error at 41 x 41 against half of that at 21 x 21")


STATEMENTS: tuple[Statement, ...] = (
    as_printed(
        "hopf-lax",
        4,
        "Kan, eq. 56; Hopf-Lax",
        "Phi(x, t) = min of G over the set reachable in T - t solves -dPhi/dt + H(grad Phi) = 0 behind an output norm",
        Check(solves_hjb, 1e-4, 0.05),
    ),
    Statement(
        "reachable-set",
        4,
        "ctrans",
        "RMSNorm at the output reaches |Gamma^-1 (z - x)| <= sqrt(d) (T - t), the inside too, and no more",
        Check(reachable, 1e-9, 0.1),
    ),
    Statement(
        "reachable-slice",
        4,
        "ctrans, on Kan, eq. 99",
        "LayerNorm at the output reaches the slice 1'Gamma^-1 (z - x - (T - t) beta) = 0 of it only",
        Check(layernorm_value, 1e-9, 0.1),
        Check(ellipsoid_value_for_layernorm, 1e-9, 0.1),
        "LayerNorm reaches the whole ellipsoid",
    ),
    Statement(
        "flat-value",
        4,
        "ctrans, on Kan, theorem 2",
        "with whole-space velocities Phi(x, t) = inf G for every t < T: flat, with a jump at T",
        Check(flat, 1e-9, 0.1),
    ),
    Statement(
        "grid-solution",
        4,
        "ctrans",
        "a grid solver of the PDE converges to Hopf-Lax in the plane",
        Check(grid_agrees, 0.0, 0),
    ),
)
