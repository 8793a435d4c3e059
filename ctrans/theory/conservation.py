"""Section 3: the order of the projected step, and conserved quantities."""

from __future__ import annotations

from ctrans.base.draw import Draw
from ctrans.dynamics.norm import LayerNorm
from ctrans.measure.forward.conservation import DriftByDepth
from ctrans.measure.forward.weight_scaling import log_slope
from ctrans.measure.walk import observe
from ctrans.model.orders import own_methods
from ctrans.theory.random_models import described, random_model
from ctrans.theory.random_norms import learned
from ctrans.theory.statement import Trial, Trials, at_most, known, statement
from solvers import Segment
from solvers.methods import fixed_step
from solvers.solve import solve

SECTION = 3

STEP_COUNTS = (50, 100, 200)


def _projected_errors(draw: Draw, plain: bool, unit: bool = False) -> list[float]:
    """Errors |X_M - X(1)| of M steps of an FFN field, each projected by the retraction or the plain
    norm, against the projected ODE.

    The norm is LayerNorm with learned gains and offsets, or with gain 1 and offset 0.
    """
    made = random_model(draw, "none", width=6, depth=1, activation="gelu")
    chosen = LayerNorm(6, 0.0).double().requires_grad_(False)
    if not unit:
        learned(draw, chosen, 0.3, signed=False)
    f = made.depth.sublayers[1].field
    x0 = chosen.retract(draw.normal(4, 6))
    exact = solve(
        [Segment(0, 1, lambda t, x: chosen.tangent(x, f(x)))],
        x0,
        method="tsit5",
        rtol=1e-10,
        atol=1e-12,
    ).x1
    parts = [Segment(0, 1, lambda t, x: f(x), project=chosen if plain else chosen.retract)]
    return [float((solve(parts, x0, steps=m).x1 - exact).norm()) for m in STEP_COUNTS]


def _order_of(errors: list[float], words: str) -> Trial:
    """|p - 1|, p the order fitted to the errors."""
    slope = -log_slope(STEP_COUNTS, errors)
    return Trial(
        abs(slope - 1), f"{words}: error {errors[0]:.2g} to {errors[-1]:.2g} from 50 to 200 steps"
    )


@statement(
    "retraction-order",
    "ctrans",
    "X+ = R(X + dt f(X)) converges at order 1 to the projected ODE for every gamma, beta",
    0.15,
    0.02,
)
def retraction_converges(draw: Draw) -> Trial:
    """|p - 1|, p the order of R(X + dt f(X)) to the projected ODE, 50 to 200 steps, LayerNorm with
    learned gain and offset.
    """
    return _order_of(
        _projected_errors(draw, plain=False), "the retraction, learned gain and offset"
    )


@statement(
    "post-ln-limit",
    "Kan, appendix J",
    "N(X + dt f(X)) converges to the projected ODE for gamma = 1, beta = 0; learned gains and"
    " offsets leave it no such limit",
    0.15,
    0.02,
    printed="the Post-LN step is the discretisation of the projected ODE",
)
def plain_step(draw: Draw, printed: bool) -> Trials:
    """Error |p - 1| of N(X + dt f(X)) at gamma = 1, beta = 0; with learned ones the error at 200
    steps is >= half that at 50.

    Printed: |p - 1| with learned gain and offset.
    """
    if printed:
        return _order_of(_projected_errors(draw, plain=True), "N itself, learned gain and offset")
    unit = _order_of(
        _projected_errors(draw, plain=True, unit=True), "N itself, gain 1 and offset 0"
    )
    errors = _projected_errors(draw, plain=True)
    return [
        unit,
        at_most(
            0.5 * errors[0],
            errors[-1],
            "N with learned gain and offset keeps at least half its error",
        ),
    ]


@statement(
    "conserved-mean",
    "ctrans",
    "under peri and output with LayerNorm 1'Gamma^-1 x_j grows by dt 1'Gamma^-1 beta a segment, in"
    " any Runge-Kutta method",
    1e-12,
    0.5,
)
def conserved(draw: Draw) -> Trial:
    """max |1'Gamma^-1 (x_j+ - x_j - dt beta)|/d over tokens and segments, peri or output,
    LayerNorm, a drawn Runge-Kutta method.
    """
    made = random_model(draw, draw.choice(("peri", "output")), norm="layernorm", depth=1)
    method = draw.choice(own_methods())
    x0 = draw.normal(2, 3, made.config.width)
    steps = 1 + draw.integer(3)
    solution = solve(
        made.depth.segments(), x0, method=fixed_step(method), steps=steps, save="segments"
    )
    (found,) = observe(made.depth, solution.states, [DriftByDepth()])
    drift = max(known(found)[1])
    return Trial(drift, f"{method}, {described(made)}: drift {drift:.2g}")


@statement(
    "constant-mean",
    "ctrans",
    "with gamma = 1, beta = 0 each token's mean is constant in depth",
    1e-12,
    0.25,
)
def mean_is_constant(draw: Draw) -> Trial:
    """max_j |mean x_j(T) - mean x_j(0)| of the discrete model, peri or output, LayerNorm with gamma
    = 1 and beta = 0.
    """
    made = random_model(draw, draw.choice(("peri", "output")), norm="layernorm", spread=0)
    x0 = draw.normal(2, 3, made.config.width)
    gap = (made.depth(x0).mean(-1) - x0.mean(-1)).abs().max()
    return Trial(float(gap), f"{described(made)}: means change by {float(gap):.2g}")
