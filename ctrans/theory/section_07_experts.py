"""Section 7: the derivative of a flow that crosses a switch of experts."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.dynamics.fields import MixtureOfExperts
from ctrans.theory.random_experts import describe_mixture, nearest_switch, random_mixture
from ctrans.theory.statement import Trial, statement
from solvers import Segment
from solvers.solve import solve

SECTION = 7

END = 0.1
"""How long the flow is that crosses a switch."""
STEPS = 5
"""Steps of rk4 in each of its two parts."""
Velocity = Callable[[object, Tensor], Tensor]


def _held(mixture: MixtureOfExperts, x: Tensor) -> MixtureOfExperts:
    """The mixture with the choice that it makes at x, everywhere."""
    piece = copy.deepcopy(mixture)
    piece.choice_bias += 100 * piece.route(x.unsqueeze(0)).chosen[0]
    return piece


def _velocity(piece: MixtureOfExperts, drift: Tensor) -> Velocity:
    return lambda t, x: piece(x) + drift


def _along(velocity: Velocity, x: Tensor, time: float) -> Tensor:
    return solve([Segment(0.0, time, velocity)], x, method="rk4", steps=STEPS).x1


def _until(velocity: Velocity, x: Tensor, on: Tensor, normal: Tensor) -> tuple[float, Tensor]:
    """When and where the flow meets the plane n.x = n.on, by Newton's method."""
    time = 0.02
    for _ in range(5):
        y = _along(velocity, x, time)[0]
        time -= float((y - on) @ normal / (velocity(time, y.unsqueeze(0))[0] @ normal))
    return time, _along(velocity, x, time)


@statement(
    "experts-switch",
    "ctrans (saltation: Aizerman and Gantmakher 1958)",
    "across a switch of experts the flow's derivative is J_+ (I + (f_+ - f_-) n'/(n'f_-)) J_-, n"
    " the switch's normal",
    1e-4,
    0.02,
    printed="J_+ J_-, the product of the pieces' derivatives",
)
def crossing(draw: Draw, *, printed: bool) -> Trial:
    """dx/dt = f(x) + c n, carried across one switch: differences of the exact flow against J_+ S
    J_-. Printed: S = I.

    Each piece is smooth everywhere with its choice held by biases; c is large enough for n'dx/dt >=
    5 on both sides of the switch.
    """
    mixture = random_mixture(draw, smooth=True)
    on, normal = nearest_switch(mixture, draw.normal(mixture.up.in_features))
    before_switch = _held(mixture, on - 1e-7 * normal)
    after_switch = _held(mixture, on + 1e-7 * normal)
    speeds = [float(piece(on.unsqueeze(0)).norm()) for piece in (before_switch, after_switch)]
    drift = 5 + max(speeds)
    before = _velocity(before_switch, drift * normal)
    after = _velocity(after_switch, drift * normal)
    start = (on - 0.02 * drift * normal).unsqueeze(0)
    crossed, y = _until(before, start, on, normal)

    def exact(x: Tensor) -> Tensor:
        time, reached = _until(before, x, on, normal)
        return _along(after, reached, END - time)

    f = before(0.0, y)[0]
    g = after(0.0, y)[0]
    direction = draw.normal(*start.shape)
    carried = torch.func.jvp(lambda x: _along(before, x, crossed), (start,), (direction,))[1]
    if not printed:
        carried = carried + (g - f) * (carried @ normal) / (normal @ f)
    derivative = torch.func.jvp(lambda x: _along(after, x, END - crossed), (y,), (carried,))[1]
    step = 1e-5
    measured = (exact(start + step * direction) - exact(start - step * direction)) / (2 * step)
    error = float((derivative - measured).norm() / measured.norm())
    case = describe_mixture(mixture)
    return Trial(error, f"{case}: differs from differences of the exact flow by {error:.2g} of it")
