"""Section 3: velocities tangent to a norm's image, the retraction, and what the dynamics conserve."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ctrans.norm import LayerNorm, SphereNorm
from ctrans.stability.forward.conservation import conservation_drift
from ctrans.verify.convergence import own_methods
from ctrans.verify.draws import below, described, learned, model, noise, norm, norm_words, one_of
from ctrans.verify.statement import Check, Statement, Trial, as_printed, at_most, equal, worst
from solvers import Segment, fixed_step, solve
from solvers.segment import Map


def printed_tangent(chosen: SphereNorm, x: Tensor, f: Tensor) -> Tensor:
    """f - (x - beta)'Sigma f/((x - beta)'Sigma (x - beta)) (x - beta), Sigma = Gamma^-2 (Kan, eq. 132)."""
    away = x - chosen.beta
    weighted = away / chosen.gamma.square()
    return f - away * (weighted * f).sum(-1, keepdim=True) / (weighted * away).sum(-1, keepdim=True)


def printed_tangent_is_tangent(generator: torch.Generator) -> Trial:
    """u.(v/gamma) = 0 and, for LayerNorm, 1'(v/gamma) = 0, over sqrt(d)|f/gamma|: v by eq. 132, without C, at image points."""
    chosen, f = _norm_and_field(generator, one_of(generator, ("layernorm", "rmsnorm")))
    x = chosen(noise(generator, 4, chosen.width))
    return _tangency(chosen, x, f, printed_tangent(chosen, x, f))


def tangent_is_tangent(generator: torch.Generator) -> Trial:
    """u.(v/gamma) = 0, for LayerNorm 1'(v/gamma) = 0, and tangent(x, v) = v: v = tangent(x, f), with C, at image points."""
    chosen, f = _norm_and_field(generator, one_of(generator, ("layernorm", "rmsnorm")))
    x = chosen(noise(generator, 4, chosen.width))
    projected = chosen.tangent(x, f)
    return worst(
        _tangency(chosen, x, f, projected),
        equal(chosen.tangent(x, projected), projected, "the tangent part of a tangent velocity"),
    )


def _norm_and_field(generator: torch.Generator, name: str) -> tuple[SphereNorm, Tensor]:
    chosen = norm(generator, name, width=3 + below(generator, 10))
    return chosen, noise(generator, 4, chosen.width)


def _tangency(chosen: SphereNorm, x: Tensor, f: Tensor, v: Tensor) -> Trial:
    """The rates at which v leaves the equations |u|^2 = d and, for LayerNorm, 1'u = 0, relative to the field's."""
    u, rate, scale = chosen.coordinates(x), v / chosen.gamma, (f / chosen.gamma).norm()
    off = (u * rate).sum(-1).abs().max() / (math.sqrt(chosen.width) * scale)
    tilt = rate.sum(-1).abs().max() / (math.sqrt(chosen.width) * scale) if chosen.centred else torch.zeros(())
    return Trial(
        float(max(off, tilt)), f"{norm_words(chosen)}: leaves |u|^2 = d at rate {float(off):.2g}, 1'u = 0 at {float(tilt):.2g}"
    )


def stays_on_ellipsoid(generator: torch.Generator) -> Trial:
    """|u|^2 = d at t = 1, moved by eq. 132's part of a constant field from three image points of a drawn norm."""
    chosen, x0, f = _motion(generator)
    end = _solve(lambda x: printed_tangent(chosen, x, f), x0)
    square = ((end - chosen.beta) / chosen.gamma).square().sum(-1)
    return equal(square, torch.full_like(square, chosen.width), f"|u|^2 at t = 1, {norm_words(chosen)}")


def stays_on_printed_image(generator: torch.Generator) -> Trial:
    """`Norm.residual` at t = 1, moved by eq. 132's part, without C, of a constant field from three outputs of LayerNorm."""
    chosen, x0, f = _motion(generator, "layernorm")
    return _on_image(chosen, _solve(lambda x: printed_tangent(chosen, x, f), x0))


def stays_on_image(generator: torch.Generator) -> Trial:
    """`Norm.residual` at t = 1, moved by the tangent part, with C, of a constant field from three outputs of a drawn norm."""
    chosen, x0, f = _motion(generator)
    return _on_image(chosen, _solve(lambda x: chosen.tangent(x, f), x0))


def _on_image(chosen: SphereNorm, end: Tensor) -> Trial:
    off = float(chosen.constraint_violation(end).max())
    return Trial(off, f"off the image at t = 1, {norm_words(chosen)}: {off:.2g}")


def _motion(generator: torch.Generator, name: str | None = None) -> tuple[SphereNorm, Tensor, Tensor]:
    """A norm with a constant field, from points of its image."""
    chosen = norm(generator, name, width=3 + below(generator, 6))
    return chosen, chosen(noise(generator, 3, chosen.width)), noise(generator, 3, chosen.width)


def _solve(velocity: Map, x0: Tensor) -> Tensor:
    return solve([Segment(0, 1, lambda t, x: velocity(x))], x0, method="tsit5", rtol=1e-10, atol=1e-12).x1


def retraction(generator: torch.Generator) -> Trial:
    """R(z) = z at five image points, and `Norm.residual` of R(y) at five random y."""
    chosen = norm(generator)
    z, y = chosen(noise(generator, 5, chosen.width)), 3 * noise(generator, 5, chosen.width)
    return worst(
        equal(chosen.retract(z), z, f"R is the identity on the image, {norm_words(chosen)}"),
        Trial(float(chosen.constraint_violation(chosen.retract(y)).max()), f"R(y) is on the image, {norm_words(chosen)}"),
    )


STEP_COUNTS = (50, 100, 200)


def _projected_errors(generator: torch.Generator, plain: bool, unit: bool) -> list[float]:
    """|X_M - X(1)| of M steps of an FFN field, each projected by the retraction or the plain norm, against the projected ODE."""
    made = model(generator, "none", width=6, depth=1, activation="gelu")
    chosen = LayerNorm(6, 0.0).double().requires_grad_(False)
    if not unit:
        learned(generator, chosen, 0.3, signed=False)
    f = made.depth.sublayers[1].field
    x0 = chosen.retract(noise(generator, 4, 6))
    exact = solve([Segment(0, 1, lambda t, x: chosen.tangent(x, f(x)))], x0, method="tsit5", rtol=1e-10, atol=1e-12).x1
    project = chosen if plain else chosen.retract
    parts = [Segment(0, 1, lambda t, x: f(x), project=project)]
    return [float((solve(parts, x0, steps=m).x1 - exact).norm()) for m in STEP_COUNTS]


def _order_of(errors: list[float], words: str) -> Trial:
    slope = -float(np.polyfit(np.log(STEP_COUNTS), np.log(errors), 1)[0])
    return Trial(
        abs(slope - 1), f"{words}: error {errors[0]:.2g} to {errors[-1]:.2g} from {STEP_COUNTS[0]} to {STEP_COUNTS[-1]} steps"
    )


def retraction_converges(generator: torch.Generator) -> Trial:
    """|p - 1|, p the order of R(X + dt f(X)) to the projected ODE, 50 to 200 steps, LayerNorm with learned gain and offset."""
    return _order_of(_projected_errors(generator, plain=False, unit=False), "the retraction, learned gain and offset")


def plain_step_converges(generator: torch.Generator) -> Trial:
    """|p - 1|, p the order of N(X + dt f(X)) to the projected ODE, 50 to 200 steps, LayerNorm with learned gain and offset."""
    return _order_of(_projected_errors(generator, plain=True, unit=False), "N itself, learned gain and offset")


def plain_step_with_unit_gain(generator: torch.Generator) -> Trial:
    """|p - 1| of N(X + dt f(X)) at gamma = 1, beta = 0; with learned ones the error at 200 steps is >= half that at 50."""
    unit = _order_of(_projected_errors(generator, plain=True, unit=True), "N itself, gain 1 and offset 0")
    errors = _projected_errors(generator, plain=True, unit=False)
    stays = at_most(0.5 * errors[0], errors[-1], "N with learned gain and offset keeps half its error at least")
    return worst(unit, stays)


def conserved(generator: torch.Generator) -> Trial:
    """max |1'Gamma^-1 (x_j+ - x_j - dt beta)|/d over tokens and segments, peri or output, LayerNorm, a drawn Runge-Kutta method."""
    made = model(generator, one_of(generator, ("peri", "output")), norm="layernorm", depth=1)
    method = one_of(generator, own_methods())
    x0, steps = noise(generator, 2, 3, made.config.width), 1 + below(generator, 3)
    solution = solve(made.depth.segments(), x0, method=fixed_step(method), steps=steps, save="segments")
    found = conservation_drift(made.depth, solution.states)
    assert found is not None, "the law holds behind LayerNorm at the output"
    return Trial(max(found[1]), f"{method}, {described(made)}: drift {max(found[1]):.2g}")


def mean_is_constant(generator: torch.Generator) -> Trial:
    """max_j |mean x_j(T) - mean x_j(0)| of the discrete model, peri or output, LayerNorm with gamma = 1 and beta = 0."""
    made = model(generator, one_of(generator, ("peri", "output")), norm="layernorm", spread=0)
    x0 = noise(generator, 2, 3, made.config.width)
    gap = (made.depth(x0).mean(-1) - x0.mean(-1)).abs().max()
    return Trial(float(gap), f"{described(made)}: means change by {float(gap):.2g}")


STATEMENTS: tuple[Statement, ...] = (
    Statement(
        "tangent-part",
        3,
        "Kan, eq. 132",
        "with u = Gamma^-1 (x - beta), q = C Gamma^-1 f, v = Gamma (q - u (u.q)/(u.u)) is tangent to the norm's image",
        Check(tangent_is_tangent, 1e-12),
        Check(printed_tangent_is_tangent, 1e-12),
        "the same without C, which leaves LayerNorm's slice",
    ),
    as_printed(
        "prop-12",
        3,
        "Kan, prop. 12",
        "moved by eq. 132 a state stays on the ellipsoid for all t",
        Check(stays_on_ellipsoid, 1e-7, 0.05),
    ),
    Statement(
        "prop-12-image",
        3,
        "Kan, prop. 12 and the remark before it",
        "moved by the tangent part with C a state stays on the norm's image, so that it is Post-LN's continuous form",
        Check(stays_on_image, 1e-7, 0.05),
        Check(stays_on_printed_image, 1e-7, 0.05),
        "eq. 132 is the continuous form of Post-LN, whose states are outputs of LayerNorm",
    ),
    Statement(
        "retraction",
        3,
        "ctrans",
        "R(y) = beta + Gamma w sqrt(d)/|w|, w = C Gamma^-1 (y - beta), is on the image, and the identity there",
        Check(retraction, 1e-8),
    ),
    Statement(
        "retraction-order",
        3,
        "ctrans",
        "X+ = R(X + dt f(X)) converges at order 1 to the projected ODE for every gamma, beta",
        Check(retraction_converges, 0.15, 0.02),
    ),
    Statement(
        "post-ln-limit",
        3,
        "Kan, appendix J",
        "N(X + dt f(X)) converges to the projected ODE for gamma = 1, beta = 0; learned gains and offsets leave it no such limit",
        Check(plain_step_with_unit_gain, 0.15, 0.02),
        Check(plain_step_converges, 0.15, 0.02),
        "the Post-LN step is the discretisation of the projected ODE",
    ),
    Statement(
        "conserved-mean",
        3,
        "ctrans",
        "under peri and output with LayerNorm 1'Gamma^-1 x_j grows by dt 1'Gamma^-1 beta a segment, in any Runge-Kutta method",
        Check(conserved, 1e-12, 0.5),
    ),
    Statement(
        "constant-mean",
        3,
        "ctrans",
        "with gamma = 1, beta = 0 each token's mean is constant in depth",
        Check(mean_is_constant, 1e-12, 0.25),
    ),
)
