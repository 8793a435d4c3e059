"""Section 4: the Hamiltonian of the discrete step with a norm around the state."""

from __future__ import annotations

import math

from ctrans.base.draw import Draw
from ctrans.control import (
    StepImage,
)
from ctrans.control.sets_by_norm import image_of
from ctrans.control.tangent import TangentSpace
from ctrans.theory.payoffs import largest_payoff, payoff
from ctrans.theory.random_norms import describe_norm, norm_and_costate
from ctrans.theory.statement import (
    Trial,
    Trials,
    equal,
    holds_if,
    statement,
)

SECTION = 4


@statement(
    "discrete-hamiltonian",
    "ctrans, on Kan, appendix J",
    "post, pre_post, deepnorm: of the step N(X + dt r), H = (sum_j sqrt(d)|C(gamma*p_j)| - <p_j,"
    " beta> + <P, X>)/dt",
    1e-9,
)
def step(draw: Draw) -> Trials:
    """The discrete step's H at dt from 1 to 1/1000: 30 raw velocities do not exceed it, long ones
    along f* approach it.
    """
    norm, P = norm_and_costate(draw)
    dt = draw.log_uniform(-3, 0)
    X = draw.normal(*P.shape)
    allowed = StepImage(image_of(norm), X, dt)
    H = float(allowed.support(P))
    scale = float(largest_payoff(P, allowed.maximizer(P))) + float((P * X).abs().sum()) / dt
    raw = draw.log_uniform(-2, 6) * draw.normal(30, *P.shape)
    best = (1e6 * norm.coordinates(X + dt * allowed.maximizer(P)) - X) / dt
    random_values = payoff(P, norm(X + dt * raw) - X) / dt
    reached = payoff(P, norm(X + dt * best) - X) / dt
    best_random = float(random_values.max())
    case = f"{describe_norm(norm)}, dt = {dt:.3g}"
    return [
        Trial((best_random - H) / scale, f"{case}: the best of 30 raw velocities against H"),
        equal(reached, H, f"{case}: a long raw velocity", scale),
    ]


@statement(
    "discrete-hamiltonian-limit",
    "ctrans",
    "as dt goes to 0, for X on the image, it goes to +inf like 1/dt, unless X is the lowest point"
    " for P: there it is 0, as the ODE's",
    1e-9,
)
def step_limit(draw: Draw) -> Trials:
    """dt H is <P, X - z> for every dt, z the norm of a long raw output towards the image's lowest
    point.

    - X on the image: positive for a random P, where the ODE's H is infinite, and 0 for the P whose
      lowest point is X, as in the ODE
    - X beyond the lowest point: negative, so H goes to -inf
    """
    norm, P = norm_and_costate(draw)
    image = image_of(norm)
    z = norm(-1e6 * norm.centre(norm.gamma * P))
    X = norm(draw.normal(*P.shape))
    beyond = norm.beta + (1 + draw.log_uniform(-1, 2)) * (z - norm.beta)
    lowest = -norm.centre(norm.coordinates(X)) / norm.gamma
    cases = []
    for at, costate, sign in ((X, P, 1), (X, lowest, 0), (beyond, P, -1)):
        end = z
        if sign == 0:
            end = X
        exact = float((costate * (at - end)).sum())
        scale = float((costate * at).abs().sum() + (costate * z).abs().sum())
        for dt in (1.0, 1e-2, 1e-4):
            measured = dt * float(StepImage(image, at, dt).support(costate))
            cases.append(equal(measured, exact, "dt H against <P, X - z>", scale))
        cases.append(holds_if(f"<P, X - z> = {exact:.3g}", condition=sign * exact > 0 or sign == 0))
    tangent = TangentSpace(norm, X)
    return [
        *cases,
        holds_if(
            "the ODE's H is 0 where X is the lowest point",
            condition=float(tangent.support(lowest)) == 0,
        ),
        holds_if(
            "the ODE's H is infinite at another P", condition=math.isinf(float(tangent.support(P)))
        ),
    ]
