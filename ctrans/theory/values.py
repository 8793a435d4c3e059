"""Section 4: the value function of bounded velocities is Hopf-Lax; that of the whole space is flat
and has a jump.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.control.hjb import Grid, solve_hjb
from ctrans.control.hjb.hopf_lax import hopf_lax, velocity_ball, velocity_hull
from ctrans.control.hjb.study import NearestTarget
from ctrans.control.sets_by_norm import image_of
from ctrans.dynamics.norm import RMSNorm, SphereNorm
from ctrans.theory.random_norms import norm_words, random_norm
from ctrans.theory.statement import Printed, Trial, Trials, at_most, equal, statement
from solvers import Segment
from solvers.solve import solve

SECTION = 4


def _smooth(x: Tensor) -> Tensor:
    """A terminal cost whose slope never vanishes, so no kink forms within the times below."""
    return x[..., 0] + 0.5 * x[..., 1] + 0.2 * torch.sin(2 * x[..., 0]) * torch.cos(1.5 * x[..., 1])


@statement(
    "hopf-lax",
    "Kan, eq. 56; Hopf-Lax",
    "Phi(x, t) = min of G over the set reachable in T - t solves -dPhi/dt + H(grad Phi) = 0 behind"
    " an output norm",
    1e-4,
    0.05,
    as_printed=True,
)
def solves_hjb(draw: Draw) -> Trial:
    """-dPhi/dt + H(grad Phi) = 0, by central differences of the minimum itself."""
    chosen = _slow(draw)
    remaining = draw.uniform(0.05, 0.25)
    h = 1e-4
    x = draw.normal(5, 2)
    hull = velocity_hull(chosen)

    def phi(points: Tensor, time_to_go: float) -> Tensor:
        return hopf_lax(_smooth, points, time_to_go, hull)

    steps = h * torch.eye(2, dtype=torch.float64)
    gradient = torch.stack(
        [(phi(x + step, remaining) - phi(x - step, remaining)) / (2 * h) for step in steps], -1
    )
    rate = (phi(x, remaining + h) - phi(x, remaining - h)) / (
        2 * h
    )  # -dPhi/dt, as t = T - remaining
    H = image_of(chosen).support(gradient.unsqueeze(-2))
    return equal(
        H, -rate, f"{norm_words(chosen)}, T - t = {remaining:.2f}: H(grad Phi) against dPhi/dt"
    )


def _slow(draw: Draw) -> SphereNorm:
    """A norm of width 2 whose velocities are too slow to join two basins of G, so Phi has no
    kinks.
    """
    chosen = random_norm(draw, width=2, signed=False)
    chosen.gamma.clamp_(0.5, 1)
    chosen.beta.clamp_(-0.3, 0.3)
    return chosen


@statement(
    "reachable-set",
    "ctrans",
    "RMSNorm at the output reaches |Gamma^-1 (z - x)| <= sqrt(d) (T - t), the inside too, and no"
    " more",
    1e-9,
    0.1,
)
def reachable(draw: Draw) -> Trials:
    """A target just inside the ellipsoid of radius T - t is reached; one just outside is not."""
    chosen = random_norm(draw, "rmsnorm", width=2 + draw.integer(3))
    remaining = draw.uniform(0.1, 2)
    u = draw.normal(chosen.width)
    edge = remaining * math.sqrt(chosen.width) * chosen.gamma * u / u.norm()
    target = NearestTarget(((0.0,) * chosen.width,))
    inside, outside = hopf_lax(
        target, torch.stack([0.99 * edge, 1.01 * edge]), remaining, velocity_hull(chosen)
    )
    missed = 1e-4 * remaining * float(chosen.gamma.abs().min())
    return [
        Trial(
            float(inside) / float(edge.norm()),
            f"{norm_words(chosen)}: from 0.99 of the edge the target is missed by"
            f" {float(inside):.2g}",
        ),
        at_most(missed, outside, "from 1.01 of the edge it is missed by at least"),
    ]


@statement(
    "reachable-slice",
    "ctrans, on Kan, eq. 99",
    "LayerNorm at the output reaches the slice 1'Gamma^-1 (z - x - (T - t) beta) = 0 of it only",
    1e-9,
    0.1,
    printed="LayerNorm reaches the whole ellipsoid",
)
def layernorm_value(draw: Draw, printed: bool) -> Trial:
    """G = z_1: Phi = x_1 + (T - t)(beta_1 - sqrt(d) |gamma_1| |C e_1|).

    Printed: for Kan's ellipsoid, sqrt(d) |gamma_1| instead of sqrt(d - 1) |gamma_1|.
    """
    chosen = random_norm(draw, "layernorm", width=2 + draw.integer(4))
    remaining = draw.uniform(0.1, 2)
    x = draw.normal(5, chosen.width)
    speed = math.sqrt(chosen.width if printed else chosen.width - 1) * chosen.gamma[0].abs()
    expected = x[:, 0] + remaining * (chosen.beta[0] - speed)
    words = f"Phi for G = z_1, {norm_words(chosen)}{', by the ellipsoid' if printed else ''}"
    return equal(
        hopf_lax(lambda z: z[..., 0], x, remaining, velocity_hull(chosen)), expected, words
    )


@statement(
    "flat-value",
    "ctrans, on Kan, theorem 2",
    "with whole-space velocities Phi(x, t) = inf G for every t < T: flat, with a jump at T",
    1e-9,
    0.1,
)
def flat(draw: Draw) -> Trials:
    """Velocities up to R with R (T - t) beyond the targets: Phi = inf G = 0 everywhere, and Phi = G
    at t = T.
    """
    remaining = draw.log_uniform(-4, 0)
    x = draw.normal(20, 2)
    terminal = NearestTarget()
    hull = velocity_ball(20 / remaining, 2)
    most = float(hopf_lax(terminal, x, remaining, hull).amax())
    G = terminal(x)
    words = (
        f"T - t = {remaining:.1g}: Phi is at most {most:.1g} where G is up to {float(G.amax()):.2g}"
    )
    return [Trial(most, words), equal(hopf_lax(terminal, x, 0.0, hull), G, "Phi at T against G")]


@statement(
    "theorem-2-optimum",
    "Kan, theorem 2",
    "where G has a least point z, optimal fields have every sup|f| >= |z - X_0|/T, and none less;"
    " under cross-entropy without a final norm none is optimal where w_y is no weighted mean of the"
    " other rows: a loss of e takes T sup|f| >= log((V - 1)/(exp(e) - 1))/max_v |w_y - w_v| -"
    " |X_0|, attained",
    1e-9,
    0.25,
    printed=Printed("the optimal velocity is unbounded in magnitude", share=0.05),
)
def optimal_fields(draw: Draw, printed: bool) -> Trials:
    """The straight field (z - X_0)/T, and the same with a detour R cos(2 pi t/T) e that ends where
    it began, both reach z to rounding, by RK4; R is free. No field is slower: |z - X_0| <= T
    sup|f|.

    Cross-entropy of V classes: the bound at random states for V = 3 to 6, equal for V = 2 along w_y
    - w_v from X_0 = 0. Behind a final norm the loss of c x does not fall with c. Rows 0, w and -w
    with y the first have the least loss log 3, at x = 0.

    Printed: the straight field, whose size is |z - X_0|/T, is no optimum. The paper's text reads
    "can be arbitrarily large", as the detour is: this is right where G has a least point.
    """
    d = 2 + draw.integer(4)
    horizon = draw.uniform(0.2, 3)
    size = draw.log_uniform(0, 3)
    x0, z, e = draw.normal(3, d)
    straight = (z - x0) / horizon
    detour = size * e / e.norm()

    def end(radius: float) -> Tensor:
        segment = Segment(
            0.0,
            horizon,
            lambda t, x: straight + radius * math.cos(2 * math.pi * t / horizon) * detour,
        )
        return solve([segment], x0, method="rk4", steps=8).x1

    if printed:
        missed = float((end(0.0) - z).norm())
        return Trial(
            1.0 - missed,
            f"sup|f| = {float(straight.norm()):.3g} misses the least point of G by {missed:.1g}",
        )
    if draw.flag():
        classes = 2
    else:
        classes = 3 + draw.integer(4)
    w = draw.normal(classes, d)
    x = draw.of_any_size(d)
    steepest = (w[0] - w[1:]).norm(dim=-1).max()
    if classes == 2:
        x = x.norm() * (w[0] - w[1]) / steepest
    loss = _entropy(w @ x)
    behind = [_entropy(w @ RMSNorm(d, 0.0).double()(c * x)) for c in (1.0, 1000.0)]
    needed = ((classes - 1) / loss.expm1()).log() / steepest
    return [
        equal(end(0.0), z, "the straight field's end"),
        equal(end(1.0), z, f"the end of a field with a detour of {size:.3g}", size),
        at_most(
            needed,
            x.norm(),
            f"{classes} classes, loss {float(loss):.3g}: the length needed against |X(T)|",
        ),
        equal(
            x.norm() if classes == 2 else needed,
            needed,
            "two classes, straight: |X(T)| against the length needed",
        ),
        equal(behind[1], behind[0], "behind a final norm, the loss of 1000 x against that of x"),
        at_most(
            math.log(3),
            _entropy(torch.stack([0 * x, w[1], -w[1]]) @ x),
            "w_y = 0 between w and -w: log 3 against the loss",
        ),
    ]


def _entropy(logits: Tensor) -> Tensor:
    """-log softmax_0 of logits, to relative rounding."""
    return (logits[1:] - logits[0]).exp().sum().log1p()


@statement(
    "grid-solution", "ctrans", "a grid solver of the PDE converges to Hopf-Lax in the plane", 0.0, 0
)
def grid_agrees(draw: Draw) -> Trial:
    """WENO on a grid against Hopf-Lax, at the nodes that the edges do not affect."""
    chosen = _slow(draw)
    horizon = 0.25
    hull = velocity_hull(chosen)
    errors = []
    for points in (21, 41):
        grid = Grid((-1.5, -1.5), (1.5, 1.5), (points, points))
        solution = solve_hjb(
            image_of(chosen), _smooth, grid, [0.0], horizon=horizon, scheme="weno5"
        )
        mask = solution.untouched(0.0)
        errors.append(
            float(
                (
                    solution.values[0][mask]
                    - hopf_lax(_smooth, grid.nodes[mask], horizon, hull, starts=4)
                )
                .abs()
                .mean()
            )
        )
    return at_most(
        errors[1],
        errors[0] / 2,
        f"{norm_words(chosen)}: the grid's error at 41 x 41 against half of that at 21 x 21",
    )
