"""Section 5: the costate, and what it conserves."""

from __future__ import annotations

import torch
from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.control.costate import Costate, costate
from ctrans.dynamics.fields import reference_kernels
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.measure.walk import terminal_loss
from ctrans.model.gpt import GPT
from ctrans.theory.random_models import describe_model, random_model, random_text
from ctrans.theory.statement import Printed, Trial, Trials, equal, statement
from solvers import fixed_step
from solvers.solve import solve

SECTION = 5

TOLERANCE = 1e-9
DRIFT = 1e-6
"""The largest accepted change of <P, v> on a segment at that tolerance."""


def _trained(draw: Draw) -> tuple[GPT, Tensor, Tensor]:
    """A smooth model (a solver reaches its tolerance only on a smooth one), a text and its
    targets.
    """
    model = random_model(
        draw,
        draw.choice(PLACEMENTS),
        activation="gelu",
        dt=draw.uniform(0.1, 0.5),
        depth=1,
        eps=1e-2,
    )
    return model, random_text(draw, 1, 4), random_text(draw, 1, 4)


def _continuous(model: GPT, tokens: Tensor, targets: Tensor) -> Costate:
    return costate(model, tokens, targets, form="continuous", rtol=TOLERANCE, atol=TOLERANCE)


@statement(
    "discrete-costate",
    "ctrans, on Kan, eq. 15-16",
    "on the discrete model the costate is the gradient with respect to the hidden state",
    1e-11,
    0.25,
)
def discrete_costate(draw: Draw) -> Trials:
    """P_k = dL/dX_k at every state: `costate` of the discrete model against autograd through its
    steps, any placement.
    """
    model, tokens, targets = _trained(draw)
    with torch.enable_grad():
        # unlike a walk, the oracle keeps the graph of all steps at once
        states = [model.embed(tokens).requires_grad_()]
        for sublayer in model.depth.sublayers:
            states.append(sublayer.step(states[-1], model.config.dt))
        gradients = torch.autograd.grad(terminal_loss(model, states[-1], targets), states)
    costates = costate(model, tokens, targets).costates
    case = f"P_k against dL/dX_k, {describe_model(model)}"
    return [equal(p, gradient, case) for p, gradient in zip(costates, gradients, strict=True)]


@statement(
    "adjoint-equation",
    "ctrans, on Kan, eq. 58",
    "dP/dt = -(dv/dX)' P backward from dL/dX(T) gives P(t) = dL/dX(t)",
    1e-5,
    0.02,
)
def continuous_costate(draw: Draw) -> Trial:
    """P(0) against the derivative through a fine fixed-step solution."""
    model, tokens, targets = _trained(draw)
    with torch.enable_grad(), reference_kernels(model):
        x0 = model.embed(tokens).requires_grad_()
        end = solve(
            model.depth.segments(continuous=True), x0, method=fixed_step("dopri5"), steps=12
        ).x1
        (exact,) = torch.autograd.grad(terminal_loss(model, end, targets), x0)
    P0 = _continuous(model, tokens, targets).costates[0]
    return equal(P0, exact, f"P(0) against dL/dX(0) of the ODE, {describe_model(model)}")


@statement(
    "conserved-product", "ctrans", "<P(t), v(X(t))> is constant on each segment", DRIFT, 0.02
)
def conserved_product(draw: Draw) -> Trial:
    """max over segments of (max - min of <P, v>)/max |P||v| along the continuous costate, at a
    tolerance of 1e-9.
    """
    model, tokens, targets = _trained(draw)
    drift = max(_continuous(model, tokens, targets).drift)
    return Trial(drift, f"drift {drift:.1g}, {describe_model(model)}")


@statement(
    "drift",
    "ctrans",
    "drift of <P, v> is error, but not all error drifts: a wrong P(T) conserves it too",
    DRIFT,
    0.01,
    printed=Printed("a costate that conserves <P, v> is right", 0.01),
)
def drift_is_error(draw: Draw, *, printed: bool) -> Trial:
    """A costate that solves the adjoint equation conserves the product, right or wrong.

    Printed: |P(0) - P_right(0)|/|P_right(0)| of the costate of wrong targets if its drift is at
    most 1e-6, else 0.
    """
    model, tokens, targets = _trained(draw)
    right = _continuous(model, tokens, targets)
    wrong = _continuous(model, tokens, (targets + 1) % 11)
    error = float((wrong.costates[0] - right.costates[0]).norm() / right.costates[0].norm())
    drift = max(wrong.drift)
    if printed:
        case = f"drift {drift:.1g}, and the costate is wrong by {error:.0%}"
        if drift <= DRIFT:
            return Trial(error, case)
        return Trial(0.0, case)
    return Trial(drift, f"a costate wrong by {error:.0%} drifts by {drift:.1g}")
