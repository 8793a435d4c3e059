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
from ctrans.theory.random_models import described, random_model, random_text
from ctrans.theory.statement import Printed, Trial, Trials, equal, statement
from solvers import fixed_step, solve

SECTION = 5

TOLERANCE = 1e-9
DRIFT = 1e-6
"""The largest accepted change of <P, v> on a segment at that tolerance."""


def _trained(draw: Draw) -> tuple[GPT, Tensor, Tensor]:
    """A smooth model (a solver reaches its tolerance only on a smooth one), a text and its
    targets.
    """
    made = random_model(
        draw,
        draw.choice(PLACEMENTS),
        activation="gelu",
        dt=draw.uniform(0.1, 0.5),
        depth=1,
        eps=1e-2,
    )
    return made, random_text(draw, 1, 4), random_text(draw, 1, 4)


def _continuous(made: GPT, tokens: Tensor, targets: Tensor) -> Costate:
    return costate(made, tokens, targets, form="continuous", rtol=TOLERANCE, atol=TOLERANCE)


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
    made, tokens, targets = _trained(draw)
    with torch.enable_grad():
        # unlike a walk, the oracle keeps the graph of all steps at once
        states = [made.embed(tokens).requires_grad_()]
        for sublayer in made.depth.sublayers:
            states.append(sublayer.step(states[-1], made.config.dt))
        gradients = torch.autograd.grad(terminal_loss(made, states[-1], targets), states)
    found = costate(made, tokens, targets).costates
    words = f"P_k against dL/dX_k, {described(made)}"
    return [equal(p, gradient, words) for p, gradient in zip(found, gradients, strict=True)]


@statement(
    "adjoint-equation",
    "ctrans, on Kan, eq. 58",
    "dP/dt = -(dv/dX)' P backward from dL/dX(T) gives P(t) = dL/dX(t)",
    1e-5,
    0.02,
)
def continuous_costate(draw: Draw) -> Trial:
    """P(0) against the derivative through a fine fixed-step solution."""
    made, tokens, targets = _trained(draw)
    with torch.enable_grad(), reference_kernels(made):
        x0 = made.embed(tokens).requires_grad_()
        end = solve(
            made.depth.segments(continuous=True), x0, method=fixed_step("dopri5"), steps=12
        ).x1
        (exact,) = torch.autograd.grad(terminal_loss(made, end, targets), x0)
    found = _continuous(made, tokens, targets)
    return equal(found.costates[0], exact, f"P(0) against dL/dX(0) of the ODE, {described(made)}")


@statement(
    "conserved-product", "ctrans", "<P(t), v(X(t))> is constant on each segment", DRIFT, 0.02
)
def conserved_product(draw: Draw) -> Trial:
    """max over segments of (max - min of <P, v>)/max |P||v| along the continuous costate, at a
    tolerance of 1e-9.
    """
    made, tokens, targets = _trained(draw)
    drift = max(_continuous(made, tokens, targets).drift)
    return Trial(drift, f"drift {drift:.1g}, {described(made)}")


@statement(
    "drift",
    "ctrans",
    "drift of <P, v> is error, but not all error drifts: a wrong P(T) conserves it too",
    DRIFT,
    0.01,
    printed=Printed("a costate that conserves <P, v> is right", 0.01),
)
def drift_is_error(draw: Draw, printed: bool) -> Trial:
    """A costate that solves the adjoint equation conserves the product, right or wrong.

    Printed: |P(0) - P_right(0)|/|P_right(0)| of the costate of wrong targets if its drift is at
    most 1e-6, else 0.
    """
    made, tokens, targets = _trained(draw)
    right, wrong = (_continuous(made, tokens, each) for each in (targets, (targets + 1) % 11))
    error = float((wrong.costates[0] - right.costates[0]).norm() / right.costates[0].norm())
    drift = max(wrong.drift)
    if printed:
        return Trial(
            error if drift <= DRIFT else 0.0,
            f"drift {drift:.1g}, and the costate is wrong by {error:.0%}",
        )
    return Trial(drift, f"a costate wrong by {error:.0%} drifts by {drift:.1g}")
