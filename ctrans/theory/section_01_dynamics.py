"""Section 1: the switched ODE, and the discrete Transformer as its Euler step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.theory.random_models import describe_model, random_model, random_state
from ctrans.theory.random_norms import random_norm
from ctrans.theory.statement import Trial, equal, statement
from solvers.solve import solve

SECTION = 1


@statement(
    "discrete-step",
    "Kan, eq. 1-4 and section 5",
    "the discrete Transformer with residual scale dt is one Euler step per segment of the switched"
    " ODE, bit for bit",
    0.0,
    0.5,
    as_printed=True,
)
def discrete_step(draw: Draw) -> Trial:
    """X_D of one Euler step per segment of the ODE = X_D of the discrete model, bit for bit, for
    any placement.
    """
    model = random_model(draw, draw.choice(PLACEMENTS))
    x = random_state(draw, model)
    return equal(
        solve(model.depth.segments(), x, method="euler", steps=1).x1,
        model.depth(x),
        describe_model(model),
    )


@statement(
    "horizon",
    "Kan, section 5",
    "D blocks of two sublayers last T = 2 D dt",
    1e-15,
    0.05,
    as_printed=True,
)
def horizon(draw: Draw) -> Trial:
    """T = 2 D dt, with T the last of the depth's times, for 1 to 6 blocks and a random dt."""
    model = random_model(draw, "peri", depth=1 + int(draw.uniform(0, 6)))
    depth = model.depth
    return equal(depth.times[-1], 2 * depth.blocks * model.config.dt, describe_model(model))


STEPS: dict[str, Callable[[Any, Tensor, float], Tensor]] = {
    "none": lambda s, x, h: x + h * s.field(x),
    "pre": lambda s, x, h: x + h * s.field(s.input_norm(x)),
    "peri": lambda s, x, h: x + h * s.output_norm(s.field(s.input_norm(x))),
    "output": lambda s, x, h: x + h * s.output_norm(s.field(x)),
    "post": lambda s, x, h: s.state_norm(x + h * s.field(x)),
    "pre_post": lambda s, x, h: s.state_norm(x + h * s.field(s.input_norm(x))),
    "deepnorm": lambda s, x, h: s.state_norm(x + h * s.gain * s.field(x)),
}
"""The equations of the placements' steps."""


@statement(
    "placements",
    "Kan, eq. 7-8; Kim, positions A, B, C",
    "each placement's step is its equation: X + dt N_out f(N_in X), or N(X + dt f(N_in X))",
    1e-12,
    0.5,
    as_printed=True,
)
def placement_steps(draw: Draw) -> Trial:
    """X_{k+1} of a random sublayer at a random state against its placement's equation in STEPS."""
    model = random_model(draw, draw.choice(STEPS))
    x = random_state(draw, model)
    sublayer = draw.choice(model.depth.sublayers)
    expected = STEPS[model.config.placement](sublayer, x, model.config.dt)
    return equal(sublayer.step(x, model.config.dt), expected, describe_model(model))


@statement(
    "deepnorm-scale",
    "DeepNet; Emadi, section 6.1",
    "N_eps(alpha X + f(X)) = N_(eps/alpha^2)(X + f(X)/alpha)",
    1e-10,
    0.5,
)
def deepnorm_scale(draw: Draw) -> Trial:
    """N_eps(alpha y) = N_(eps/alpha^2)(y)."""
    alpha = draw.uniform(0.5, 5)
    eps = draw.log_uniform(-8, -1)
    norm = random_norm(draw, eps=eps)
    x, f = draw.normal(2, 3, norm.width)
    scaled = norm(alpha * x + f)
    norm.eps = eps / alpha**2
    return equal(scaled, norm(x + f / alpha), f"alpha {alpha:.3g}, eps {eps:.2g}")


@statement(
    "final-norm",
    "Xiong, table 1",
    "none, pre, peri and output have a final norm before the head; post, pre_post and deepnorm need"
    " none",
    1e-10,
    0.1,
    as_printed=True,
)
def final_norm(draw: Draw) -> Trial:
    """With a final norm the logits do not depend on the state's length; without one they are linear
    in it.
    """
    model = random_model(draw, draw.choice(PLACEMENTS), eps=0.0)
    x = random_state(draw, model)
    c = draw.uniform(2, 5)
    if PLACEMENTS[model.config.placement].state_norm:
        power = 1
    else:
        power = 0
    return equal(model.head(c * x), c**power * model.head(x), describe_model(model))
