"""Section 3: what each norm of the table NORMS says of itself."""

from __future__ import annotations

import torch

from ctrans.base.draw import Draw
from ctrans.dynamics.norm import NORMS, ClipNorm, SquashNorm
from ctrans.theory.random_norms import SQUASHING, any_norm, norm_words
from ctrans.theory.statement import Trial, Trials, at_most, dense_jacobian, equal, statement
from solvers import Segment
from solvers.solve import solve

SECTION = 3

SURFACES = sorted(name for name, kind in NORMS.items() if kind(2).has_tangent)
CLIPPING = sorted(name for name, kind in NORMS.items() if isinstance(kind(2), ClipNorm))


@statement(
    "norm-jacobians",
    "ctrans",
    "each norm of the table has the Jacobian, its bound at x and its bound anywhere that it says",
    1e-9,
)
def jacobians(draw: Draw) -> Trials:
    """J in closed form against autograd, relative to the slope stated; |J|_2 <= slope(x) <=
    steepest; at inputs of any size.
    """
    norm = any_norm(draw, eps=draw.choice((1e-5, 0.1)))
    x = draw.of_any_size(norm.width)
    dense = dense_jacobian(norm, x)
    slope = norm.slope(x)
    words = norm_words(norm)
    return [
        equal(norm.jacobian(x), dense, f"J against autograd, {words}", slope),
        Trial(
            float(torch.linalg.matrix_norm(dense, 2) - slope) / (float(slope) or 1.0),
            f"|J|_2 against the slope, {words}",
        ),
        at_most(slope, norm.steepest, f"the slope against the steepest, {words}"),
    ]


@statement(
    "norm-surfaces",
    "ctrans, on Kan, eq. 132",
    "ellipsoids, their slices and products have tangent parts off the normals, and a retraction"
    " that agrees to second order",
    1e-9,
)
def surfaces(draw: Draw) -> Trials:
    """Tangent parts: n'v = 0 for the normals n, T(T f) = T f. R(z) = z on the image, R(y) is on it,
    R(x + hf) = x + h T f + O(h^2).
    """
    norm = any_norm(draw, SURFACES)
    if (norm.image == "slice" and norm.width == 2) or norm.width == 1:
        return Trial(-1.0, "two points have no tangent")
    x = norm(draw.normal(norm.width))
    f = draw.normal(norm.width)
    h = 1e-4
    words = norm_words(norm)
    v = norm.tangent(x, f)
    length = f.norm() * (norm.gamma.abs().max() / norm.gamma.abs().min()) ** 2
    normals = norm.normals(x)
    gap = (norm.retract(x + h * f) - x - h * v).norm() / (h * length)
    return [
        Trial(
            float((normals.mT @ v).abs().max() / (normals.norm() * length)),
            f"normals against T f, {words}",
        ),
        equal(norm.tangent(x, v), v, f"T(T f) against T f, {words}", length),
        equal(norm.retract(x), x, f"R against the identity on the image, {words}"),
        Trial(
            float(norm.constraint_violation(norm.retract(draw.log_uniform(-1, 1) * f + norm.beta))),
            f"residual of R(y), {words}",
        ),
        Trial(
            1e-9 * float(gap / (100 * h * length / norm.gamma.abs().min())),
            f"R(x + hf) less x + h T f, {words}",
        ),
    ]


@statement(
    "norm-projected-flow",
    "ctrans, on Kan, prop. 12",
    "a state that moves with its tangent part stays on the image of every norm that has tangent"
    " spaces",
    1e-6,
    0.1,
)
def projected_flow(draw: Draw) -> Trial:
    """The residual at t = 1 of dx/dt = T f for a constant f, by 200 steps of the classical method
    of order 4.
    """
    norm = any_norm(draw, SURFACES)
    x = norm(draw.normal(3, norm.width))
    f = 0.3 * norm.gamma.abs().min() * draw.normal(norm.width)
    x = solve(
        [Segment(0, 1, lambda t, x: norm.tangent(x, f.expand_as(x)))], x, method="rk4", steps=200
    ).x1
    return Trial(
        float(norm.constraint_violation(x).max()), f"residual after t = 1, {norm_words(norm)}"
    )


@statement(
    "clipping",
    "ctrans",
    "clipping is the projection on a closed convex set: N(N(x)) = N(x), Lipschitz with constant 1,"
    " the nearest point",
    1e-9,
)
def clipping_is_a_projection(draw: Draw) -> Trials:
    """N(N(x)) = N(x); |N(x) - N(y)| <= |x - y|; <x - N(x), z - N(x)> <= 0 for z in the set: N(x) is
    the nearest point.
    """
    norm = any_norm(draw, CLIPPING)
    x, y = (draw.of_any_size(50, norm.width) for _ in range(2))
    z = norm(x)
    words = norm_words(norm)
    others = norm(3 * draw.normal(50, norm.width))
    turn = ((x - z) * (others - z)).sum(-1).max() / (x - z).square().sum(-1).max().clamp_min(1e-12)
    return [
        equal(norm(z), z, f"N(N(x)) against N(x), {words}"),
        at_most(
            ((norm(x) - norm(y)).norm(dim=-1) / (x - y).norm(dim=-1)).max(),
            1.0,
            f"|N(x) - N(y)|/|x - y|, {words}",
        ),
        Trial(float(turn), f"<x - N(x), z - N(x)>, {words}"),
    ]


@statement(
    "squashing-around-the-state",
    "ctrans, on Zhu et al. 2025",
    "DyT and Derf around the state have no ODE as dt goes to 0: |N(x)| <= alpha phi'(0)|x| for"
    " gamma = 1; alpha phi'(0) < 1: N alone takes it to 0",
)
def squashing_jumps(draw: Draw) -> Trial:
    """With gamma = 1, beta = s = 0 and alpha < 1 for DyT (0.88 for Derf), |N(x)| <= alpha
    phi'(0)|x|: repeated, N goes to 0.
    """
    norm = NORMS[draw.choice(SQUASHING)](2 + draw.integer(11)).double().requires_grad_(False)
    assert isinstance(norm, SquashNorm), "those are drawn"
    norm.alpha.fill_(draw.uniform(0.1, 0.8))
    x = draw.of_any_size(norm.width)
    return at_most(
        norm(x).norm(),
        norm.steepest * x.norm(),
        f"|N(x)| against alpha phi'(0)|x|, {norm_words(norm)}",
    )
