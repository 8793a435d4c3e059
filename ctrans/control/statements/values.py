"""Section 4: the value function of bounded velocities is Hopf-Lax; that of the whole space is flat
and has a jump.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ctrans.control.hjb import Grid, solve_hjb
from ctrans.control.hjb_study import NearestTarget
from ctrans.control.hopf_lax import hopf_lax, velocity_ball, velocity_hull
from ctrans.control.sets_by_norm import image_of
from ctrans.norm import SphereNorm
from ctrans.norm.random_norms import norm_words, random_norm
from ctrans.statement import Draw, Printed, Trial, Trials, at_most, equal, statement


def _smooth(x: Tensor) -> Tensor:
    """A terminal cost whose slope never vanishes, so no kink forms within the times below."""
    return x[..., 0] + 0.5 * x[..., 1] + 0.2 * torch.sin(2 * x[..., 0]) * torch.cos(1.5 * x[..., 1])


@statement(
    "hopf-lax",
    4,
    "Kan, eq. 56; Hopf-Lax",
    "Phi(x, t) = min of G over the set reachable in T - t solves -dPhi/dt + H(grad Phi) = 0 behind an output norm",
    1e-4,
    0.05,
    as_printed=True,
)
def solves_hjb(draw: Draw) -> Trial:
    """-dPhi/dt + H(grad Phi) = 0, by central differences of the minimum itself."""
    chosen, remaining, h = _slow(draw), draw.uniform(0.05, 0.25), 1e-4
    x, hull = draw.normal(5, 2), velocity_hull(chosen)

    def phi(points: Tensor, time_to_go: float) -> Tensor:
        return hopf_lax(_smooth, points, time_to_go, hull)

    steps = h * torch.eye(2, dtype=torch.float64)
    gradient = torch.stack([(phi(x + step, remaining) - phi(x - step, remaining)) / (2 * h) for step in steps], -1)
    rate = (phi(x, remaining + h) - phi(x, remaining - h)) / (2 * h)  # -dPhi/dt, as t = T - remaining
    H = image_of(chosen).support(gradient.unsqueeze(-2))
    return equal(H, -rate, f"{norm_words(chosen)}, T - t = {remaining:.2f}: H(grad Phi) against dPhi/dt")


def _slow(draw: Draw) -> SphereNorm:
    """A norm of width 2 whose velocities are too slow to join two basins of G, so Phi has no kinks."""
    chosen = random_norm(draw, width=2, signed=False)
    chosen.gamma.clamp_(0.5, 1)
    chosen.beta.clamp_(-0.3, 0.3)
    return chosen


@statement(
    "reachable-set",
    4,
    "ctrans",
    "RMSNorm at the output reaches |Gamma^-1 (z - x)| <= sqrt(d) (T - t), the inside too, and no more",
    1e-9,
    0.1,
)
def reachable(draw: Draw) -> Trials:
    """A target just inside the ellipsoid of radius T - t is reached; one just outside is not."""
    chosen, remaining = random_norm(draw, "rmsnorm", width=2 + draw.integer(3)), draw.uniform(0.1, 2)
    u = draw.normal(chosen.width)
    edge = remaining * math.sqrt(chosen.width) * chosen.gamma * u / u.norm()
    target = NearestTarget(((0.0,) * chosen.width,))
    inside, outside = hopf_lax(target, torch.stack([0.99 * edge, 1.01 * edge]), remaining, velocity_hull(chosen))
    missed = 1e-4 * remaining * float(chosen.gamma.abs().min())
    return [
        Trial(
            float(inside) / float(edge.norm()),
            f"{norm_words(chosen)}: from 0.99 of the edge the target is missed by {float(inside):.2g}",
        ),
        at_most(missed, outside, "from 1.01 of the edge it is missed by at least"),
    ]


def _first(z: Tensor) -> Tensor:
    return z[..., 0]


@statement(
    "reachable-slice",
    4,
    "ctrans, on Kan, eq. 99",
    "LayerNorm at the output reaches the slice 1'Gamma^-1 (z - x - (T - t) beta) = 0 of it only",
    1e-9,
    0.1,
    printed=Printed("LayerNorm reaches the whole ellipsoid", 1e-9, 0.1),
)
def layernorm_value(draw: Draw, printed: bool) -> Trial:
    """G = z_1: Phi = x_1 + (T - t)(beta_1 - sqrt(d) |gamma_1| |C e_1|).

    Printed: for Kan's ellipsoid, sqrt(d) |gamma_1| instead of sqrt(d - 1) |gamma_1|.
    """
    chosen, remaining = random_norm(draw, "layernorm", width=2 + draw.integer(4)), draw.uniform(0.1, 2)
    x = draw.normal(5, chosen.width)
    speed = math.sqrt(chosen.width if printed else chosen.width - 1) * chosen.gamma[0].abs()
    expected = x[:, 0] + remaining * (chosen.beta[0] - speed)
    words = f"Phi for G = z_1, {norm_words(chosen)}{', by the ellipsoid' if printed else ''}"
    return equal(hopf_lax(_first, x, remaining, velocity_hull(chosen)), expected, words)


@statement(
    "flat-value",
    4,
    "ctrans, on Kan, theorem 2",
    "with whole-space velocities Phi(x, t) = inf G for every t < T: flat, with a jump at T",
    1e-9,
    0.1,
)
def flat(draw: Draw) -> Trials:
    """Velocities up to R with R (T - t) beyond the targets: Phi = inf G = 0 everywhere, and Phi = G
    at t = T.
    """
    remaining, x = draw.log_uniform(-4, 0), draw.normal(20, 2)
    terminal, hull = NearestTarget(), velocity_ball(20 / remaining, 2)
    most, G = float(hopf_lax(terminal, x, remaining, hull).amax()), terminal(x)
    words = f"T - t = {remaining:.1g}: Phi is at most {most:.1g} where G is up to {float(G.amax()):.2g}"
    return [Trial(most, words), equal(hopf_lax(terminal, x, 0.0, hull), G, "Phi at T against G")]


@statement("grid-solution", 4, "ctrans", "a grid solver of the PDE converges to Hopf-Lax in the plane", 0.0, 0)
def grid_agrees(draw: Draw) -> Trial:
    """WENO on a grid against Hopf-Lax, at the nodes that the edges do not affect."""
    chosen, horizon = _slow(draw), 0.25
    hull = velocity_hull(chosen)
    errors = []
    for points in (21, 41):
        grid = Grid((-1.5, -1.5), (1.5, 1.5), (points, points))
        solution = solve_hjb(image_of(chosen), _smooth, grid, [0.0], horizon=horizon, scheme="weno5")
        mask = solution.untouched(0.0)
        errors.append(
            float((solution.values[0][mask] - hopf_lax(_smooth, grid.nodes[mask], horizon, hull, starts=4)).abs().mean())
        )
    return at_most(errors[1], errors[0] / 2, f"{norm_words(chosen)}: the grid's error at 41 x 41 against half of that at 21 x 21")
