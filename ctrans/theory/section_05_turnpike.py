"""Section 5: costates and velocities that are flat in the middle of the depth."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.base.shapes import UnbatchedRows
from ctrans.control import EllipsoidHull, KineticCost, WholeSpace
from ctrans.control.admissible import VelocitySet
from ctrans.control.turnpike import (
    Extremal,
    LinearQuadratic,
    linear_quadratic_extremal,
)
from ctrans.theory.random_norms import random_norm
from ctrans.theory.statement import Trial, Trials, at_most, equal, statement

SECTION = 5

SEGMENTS = 6
DESCENTS = 3000
"""Steps of the projected gradient, which converges linearly: the cost is strongly convex."""


def _best_velocities(
    velocities: VelocitySet, lam: float, h: float, x0: UnbatchedRows, pull: Tensor, goal: Tensor
) -> Tensor:
    """argmin of sum_k h lam/2 |v_k|^2 + |(X_0 + h sum_k v_k - goal) pull|^2/2 over v_k in a convex
    set, by projected gradients in all v_k together, from unequal ones.
    """
    v = velocities.nearest(torch.linspace(-1, 1, SEGMENTS).to(x0).reshape(-1, 1, 1) + 0 * x0)
    curvature = lam + h * SEGMENTS * torch.linalg.matrix_norm(pull @ pull.mT, 2)
    for _ in range(DESCENTS):
        P = (x0 + h * v.sum(0) - goal) @ pull @ pull.mT
        moved = velocities.nearest(v - (lam * v + P) / curvature)
        if torch.equal(moved, v):
            break
        v = moved
    return v


@statement(
    "kinetic-flat",
    "ctrans",
    "min int lam/2 |v|^2 dt + G(X(T)), dX/dt = v free in a convex set: P = grad G(X(T)) and v* ="
    " argmax of -<P, v> - lam/2 |v|^2 are constant in depth, and X(T) is the minimum of G(z) + |z -"
    " X(0)|^2 lam/(2 T) in the reachable set",
    1e-7,
    0.1,
)
def kinetic_flat(draw: Draw) -> Trials:
    """Free velocities of six segments, found together by projected gradients, against the maximiser
    at P of the last state: in the whole space and in a norm's filled image.

    The sum over k of h lam/2 |v_k|^2 is at least T lam/2 |mean v|^2, with equality for equal v_k
    alone, and the mean is in the convex set. Then v is stationary at -<P, v> - lam/2 |v|^2.
    """
    width = 2 + draw.integer(3)
    lam = draw.log_uniform(-0.5, 0.5)
    h = draw.uniform(0.1, 0.5)
    x0, goal = draw.normal(2, 2, width)
    pull = draw.normal(width, width) / math.sqrt(width)
    velocities: VelocitySet = WholeSpace()
    name = "whole space"
    if draw.choice(("all", "hull")) == "hull":
        velocities = EllipsoidHull(random_norm(draw, "rmsnorm", width=width, eps=1e-5))
        name = "norm's filled image"
    v = _best_velocities(velocities, lam, h, x0, pull, 3 * goal)
    P = (x0 + h * v.sum(0) - 3 * goal) @ pull @ pull.mT
    best = KineticCost(velocities, lam).maximizer(P)
    case = f"{name}, lam = {lam:.3g}, T = {SEGMENTS * h:.3g}"
    trials = [equal(v, best.expand_as(v), f"each segment's velocity against v*, {case}")]
    if name == "whole space":
        T = SEGMENTS * h
        eye = torch.eye(width, dtype=x0.dtype)
        proximal = torch.linalg.solve(pull @ pull.mT + lam / T * eye, (x0 - 3 * goal).mT).mT
        trials.append(equal(P, lam / T * proximal @ pull @ pull.mT, f"P in closed form, {case}"))
    return trials


def _problem(draw: Draw, width: int) -> LinearQuadratic:
    """A symmetric linear field with free velocities added, and a cost q/2 |x - a|^2 of the state:
    then the rates are sqrt(a_i^2 + q/lam), a_i the eigenvalues of A.
    """
    A = draw.normal(width, width)
    A = (A + A.mT) / 2
    eye = torch.eye(width, dtype=A.dtype)
    F = draw.normal(width, width)
    return LinearQuadratic(
        A=A,
        B=eye,
        state_cost=draw.log_uniform(-0.5, 0.5) * eye,
        target=draw.normal(width),
        control_cost=draw.log_uniform(-0.5, 0.5),
        terminal_cost=F @ F.mT / width,
        terminal_target=draw.normal(width),
    )


def _slowest(problem: LinearQuadratic) -> float:
    """mu = sqrt(min a_i^2 + q/lam)."""
    smallest = torch.linalg.eigvalsh(problem.A).square().min()
    return float((smallest + problem.state_cost[0, 0] / problem.control_cost).sqrt())


def _deviation(problem: LinearQuadratic, found: Extremal) -> Float[Tensor, "times three width"]:
    """(x, P, v) - steady state at each time."""
    x, p = problem.steady
    v = -p / problem.control_cost
    return torch.stack([found.x - x, found.p - p, found.u - v], 1)


@statement(
    "turnpike-linear",
    "ctrans, on Trelat and Zuazua 2015",
    "dX/dt = A X + v, A symmetric, running cost q/2 |X - a|^2 + lam/2 |v|^2: z = (X, P, v) - steady"
    " state has |z(t)| <= exp(-mu t) |z(0)| + exp(-mu (T - t)) |z(T)|, mu = sqrt(min a_i^2 +"
    " q/lam); attained for long T",
    1e-6,
    0.25,
)
def turnpike_linear(draw: Draw) -> Trials:
    """z(t) = (sinh(S (T - t)) z(0) + sinh(S t) z(T))/sinh(S T), S^2 = A^2 + q/lam, the bound that
    follows, and the largest of |z(t)| exp(mu t)/|z(0)| for one state and a long T.

    The Hamiltonian matrix M has M^2 = diag(S^2, S^2), so z'' = S^2 z. sinh(s (T - t))/sinh(s T) is
    at most exp(-s t), and falls in s.
    """
    width = 1 + draw.integer(3)
    problem = _problem(draw, width)
    mu = _slowest(problem)
    horizon = draw.log_uniform(-0.5, 1.5) / mu
    times = [horizon * k / 16 for k in range(17)]
    found = linear_quadratic_extremal(problem, draw.normal(width), horizon, times)
    z = _deviation(problem, found)
    a, basis = torch.linalg.eigh(problem.A)
    rates = (a.square() + problem.state_cost[0, 0] / problem.control_cost).sqrt()
    modes = z @ basis
    case = f"d = {width}, mu = {mu:.3g}, T = {horizon:.3g}"
    trials = [equal(problem.rate, mu, f"rate of the closed loop, {case}")]
    for t, mode, deviation in zip(times, modes, z, strict=True):
        from_start = _sinh_ratio(rates, horizon - t, horizon) * modes[0]
        from_end = _sinh_ratio(rates, t, horizon) * modes[-1]
        trials.append(equal(mode, from_start + from_end, f"z({t:.3g}), {case}", modes.abs().max()))
        bound = math.exp(-mu * t) * z[0].norm() + math.exp(mu * (t - horizon)) * z[-1].norm()
        trials.append(at_most(deviation.norm(), bound, f"|z({t:.3g})|, {case}"))
    return [*trials, _attained(draw)]


def _attained(draw: Draw) -> Trial:
    """|z(t)| of one state in the first quarter of a long horizon against exp(-mu t) |z(0)|."""
    problem = _problem(draw, 1)
    mu = _slowest(problem)
    horizon = 60 / mu
    found = linear_quadratic_extremal(problem, draw.normal(1), horizon, [0.0, horizon / 4])
    start, later = _deviation(problem, found).flatten(1).norm(dim=-1).tolist()
    measured = math.log(start / later) / (horizon / 4)
    return equal(measured, mu, "rate from the start, d = 1")


def _sinh_ratio(rates: Tensor, t: float, horizon: float) -> Tensor:
    """sinh(s t)/sinh(s T), without overflow."""
    growth = torch.exp(rates * (t - horizon))
    return growth * torch.expm1(-2 * rates * t) / torch.expm1(-2 * rates * horizon)
