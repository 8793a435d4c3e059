"""Mixtures of experts: size, slope, jumps at switches, and the derivative of a flow that crosses
one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.dynamics.fields import EXPERTS, ROUTERS, ExpertOptions, MixtureOfExperts
from ctrans.theory.statement import Trial, Trials, at_most, dense_jacobian, statement
from solvers import Segment
from solvers.solve import solve

END, STEPS = 0.1, 5
"""Of the flow that crosses a switch: how long it is, and steps of rk4 in each of its two parts."""
Velocity = Callable[[object, Tensor], Tensor]


def mixture(draw: Draw, *, smooth: bool = False) -> MixtureOfExperts:
    """Two to five experts of any kind and router, of which every token goes through fewer than all,
    with weights of size 1.
    """
    count = 2 + draw.integer(4)
    k = 1 + draw.integer(count - 1)
    router = draw.choice([name for name, rule in ROUTERS.items() if k > 1 or not rule.normalised])
    expert = draw.choice([name for name in EXPERTS if name != "reglu" or not smooth])
    options = ExpertOptions(
        experts=count, top_k=k, shared_experts=draw.integer(2), router=router, expert=expert
    )
    made = MixtureOfExperts(3 + draw.integer(4), 4, options=options).double().requires_grad_(False)
    for parameter in made.parameters():
        parameter.copy_(draw.normal(*parameter.shape) / 2)
    made.use_reference_kernel = True
    return made


def words(made: MixtureOfExperts) -> str:
    """The mixture in a few words, for a case."""
    options = made.options
    return (
        f"{options.top_k} of {options.experts} experts, {options.expert}, {options.router}, d ="
        f" {made.up.in_features}"
    )


SECTION = 6


@statement(
    "experts-bound",
    "ctrans",
    "top-k of E experts: |f(x)| is at most the largest bound of an expert, plus the shared ones'"
    " and |b_2|, whatever the router says",
)
def bound(draw: Draw) -> Trial:
    """|f(x)| against the bound at |x|, of 50 tokens of one length."""
    made = mixture(draw)
    x = draw.normal(50, made.up.in_features)
    x = draw.log_uniform(-1, 1.5) * x / x.norm(dim=-1, keepdim=True)
    return at_most(
        float(made(x).norm(dim=-1).max()), made.bound().at(float(x.norm(dim=-1).max())), words(made)
    )


SECTION = 9


@statement(
    "experts-slope",
    "ctrans",
    "between switches |df/dx| <= max_e L_e + max_e B_e max_e |w_e| + L_shared, w_e the router's"
    " rows",
    share=0.5,
    printed="the same for two tokens wherever they are",
)
def slope(draw: Draw, printed: bool) -> Trial:
    """The largest singular value of the dense Jacobian against the constant between switches.

    Printed: |f(y) - f(x)|/|y - x| across the nearest switch against the same constant.
    """
    made = mixture(draw)
    if printed:
        on, normal = nearest_switch(made, draw.normal(made.up.in_features))
        x = (on - 1e-6 * normal).unsqueeze(0)
        y = (on + 1e-6 * normal).unsqueeze(0)
        constant = made.lipschitz_between_switches(float(torch.maximum(x.norm(), y.norm())))
        return at_most(
            (made(y) - made(x)).norm() / (y - x).norm(), constant, f"{words(made)}: across a switch"
        )
    x = draw.of_any_size(1, made.up.in_features)
    jacobian = dense_jacobian(made, x)[0, :, 0]
    return at_most(
        torch.linalg.matrix_norm(jacobian, 2),
        made.lipschitz_between_switches(float(x.norm())),
        words(made),
    )


@statement(
    "experts-distance",
    "ctrans",
    "a token goes through the same experts up to the distance min (z_e - z_e')/|w_e - w_e'|, e"
    " chosen and e' not, and no further",
    0.0,
)
def distance(draw: Draw) -> Trials:
    """30 tokens at the distance to the switch go where x goes, and the one just beyond the plane
    goes elsewhere.
    """
    made = mixture(draw)
    x = draw.normal(1, made.up.in_features)
    far = float(made.distance_to_switch(x))
    around = draw.normal(30, made.up.in_features)
    around = x + far * (1 - 1e-9) * around / around.norm(dim=-1, keepdim=True)
    here = made.route(x).chosen
    on, normal = nearest_switch(made, x[0])
    beyond = made.route((on + 1e-9 * normal).unsqueeze(0)).chosen
    return [
        Trial(
            float((made.route(around).chosen != here).any()),
            f"{words(made)}: another choice nearer than {far:.3g}",
        ),
        Trial(float(torch.equal(beyond, here)), f"{words(made)}: the same choice beyond {far:.3g}"),
    ]


def nearest_switch(made: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest token on a switch, and the unit normal that leads across, where biases do not
    enter the choice.
    """
    routing = made.route(x.unsqueeze(0))
    rows = made.router.weight
    (z,), (chosen,) = routing.logits, routing.chosen
    pairs = [(a, b) for a in range(len(z)) for b in range(len(z)) if chosen[a] and not chosen[b]]
    gap, a, b = min((float((z[a] - z[b]) / (rows[a] - rows[b]).norm()), a, b) for a, b in pairs)
    normal = (rows[b] - rows[a]) / (rows[b] - rows[a]).norm()
    return x + gap * normal, normal


def _held(made: MixtureOfExperts, x: Tensor) -> MixtureOfExperts:
    piece = copy.deepcopy(made)
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


SECTION = 7


@statement(
    "experts-switch",
    "ctrans (saltation: Aizerman and Gantmakher 1958)",
    "across a switch of experts the flow's derivative is J_+ (I + (f_+ - f_-) n'/(n'f_-)) J_-, n"
    " the switch's normal",
    1e-4,
    0.02,
    printed="J_+ J_-, the product of the pieces' derivatives",
)
def crossing(draw: Draw, printed: bool) -> Trial:
    """dx/dt = f(x) + c n, carried across one switch: differences of the exact flow against J_+ S
    J_-. Printed: S = I.

    Each piece is smooth everywhere with its choice held by biases; c is large enough for n'dx/dt >=
    5 on both sides of the switch.
    """
    made = mixture(draw, smooth=True)
    on, normal = nearest_switch(made, draw.normal(made.up.in_features))
    sides = [_held(made, on + side * 1e-7 * normal) for side in (-1, 1)]
    drift = 5 + max(float(piece(on.unsqueeze(0)).norm()) for piece in sides)
    before, after = (_velocity(piece, drift * normal) for piece in sides)
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
    found = torch.func.jvp(lambda x: _along(after, x, END - crossed), (y,), (carried,))[1]
    step = 1e-5
    measured = (exact(start + step * direction) - exact(start - step * direction)) / (2 * step)
    error = float((found - measured).norm() / measured.norm())
    return Trial(
        error, f"{words(made)}: differs from differences of the exact flow by {error:.2g} of it"
    )
