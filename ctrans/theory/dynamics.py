"""Statements of sections 1 and 2: the switched ODE, the discrete Transformer as its Euler step, and
the two limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.model.orders import Convergence, depth_convergence, own_methods, substep_convergence
from ctrans.theory.random_models import described, random_model, random_state, smooth_model
from ctrans.theory.random_norms import random_norm
from ctrans.theory.statement import Printed, Trial, Trials, at_most, equal, holds_if, statement
from solvers import Segment
from solvers.solve import solve

SECTION = 1

ORDER = 0.15
"""The largest distance of a fitted order from the formal order."""


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
    made = random_model(draw, draw.choice(PLACEMENTS))
    x = random_state(draw, made)
    return equal(
        solve(made.depth.segments(), x, method="euler", steps=1).x1, made.depth(x), described(made)
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
    made = random_model(draw, "peri", depth=1 + int(draw.uniform(0, 6)))
    return equal(made.depth.times[-1], 2 * made.depth.blocks * made.config.dt, described(made))


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
    made = random_model(draw, draw.choice(STEPS))
    x = random_state(draw, made)
    sublayer = draw.choice(made.depth.sublayers)
    expected = STEPS[made.config.placement](sublayer, x, made.config.dt)
    return equal(sublayer.step(x, made.config.dt), expected, described(made))


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
    chosen = random_norm(draw, eps=eps)
    x, f = draw.normal(2, 3, chosen.width)
    found = chosen(alpha * x + f)
    chosen.eps = eps / alpha**2
    return equal(found, chosen(x + f / alpha), f"alpha {alpha:.3g}, eps {eps:.2g}")


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
    made = random_model(draw, draw.choice(PLACEMENTS), eps=0.0)
    x = random_state(draw, made)
    c = draw.uniform(2, 5)
    if PLACEMENTS[made.config.placement].state_norm:
        power = 1
    else:
        power = 0
    return equal(made.head(c * x), c**power * made.head(x), described(made))


SECTION = 2


def _order(found: Convergence, words: str) -> Trial:
    """|p - formal order|, p the fitted order."""
    return Trial(
        abs(found.order - found.formal), f"{words}: order {found.order:.3f} against {found.formal}"
    )


@statement(
    "substeps-euler",
    "ctrans",
    "D fixed, M Euler substeps per segment: error O(dt/M), for every placement",
    ORDER,
    0.005,
)
def substeps(draw: Draw) -> Trial:
    """|p - 1|, p the fitted order of Euler with M = 64 to 256 substeps per segment, D fixed, for a
    random placement.
    """
    placement = draw.choice(PLACEMENTS)
    return _order(substep_convergence("euler", placement), f"euler on {placement}")


@statement(
    "substeps-order-p",
    "ctrans",
    "D fixed, M substeps of a method of order p: error O((dt/M)^p)",
    ORDER,
    0.005,
)
def higher_orders(draw: Draw) -> Trial:
    """|p - formal order|, p fitted over M substeps per segment, D fixed, for a random Runge-Kutta
    method and placement.
    """
    method = draw.choice(own_methods())
    placement = draw.choice(PLACEMENTS)
    return _order(substep_convergence(method, placement), f"{method} on {placement}")


def _switches(draw: Draw) -> tuple[list[Segment], list[Segment], Tensor, Tensor]:
    """The ODE as segments and as one field of t, an initial state, and the exact final state."""
    made = random_model(
        draw, "peri", depth=3, width=16, dt=1.0, activation="gelu", norm="layernorm"
    )
    segments = made.depth.segments()
    x0 = draw.normal(1, 4, 16)
    whole = [
        Segment(0, len(segments), lambda t, x: segments[min(int(t), len(segments) - 1)].field(t, x))
    ]
    return segments, whole, x0, solve(segments, x0, method="tsit5", rtol=1e-12, atol=1e-13).x1


@statement(
    "undeclared-switches",
    "ctrans",
    "steps across switches lose the order: RK4 has order 4 with switches declared, about 1 across"
    " them",
    0.0,
    0,
    printed=Printed("a Runge-Kutta method keeps its order on the whole depth", 0.3),
)
def undeclared_switches(draw: Draw, printed: bool) -> Trial:
    """The larger of |p - 4| - 0.3 and q - 1.5. p is RK4's order with declared switches, q its order
    with steps across them: an odd number of steps over six segments. Printed: |q - 4|.
    """
    segments, whole, x0, exact = _switches(draw)

    def order(parts: list[Segment], counts: tuple[int, int]) -> float:
        first, last = (
            float((solve(parts, x0, method="rk4", steps=n).x1 - exact).norm()) for n in counts
        )
        return math.log(first / last) / math.log(counts[1] / counts[0])

    across = order(whole, (97, 385))
    if printed:
        return Trial(
            abs(across - 4), f"rk4 with steps across switches: order {across:.3f} against 4"
        )
    declared = order(segments, (16, 64))
    words = f"rk4: order {declared:.2f} with switches declared, {across:.2f} across them"
    return Trial(max(abs(declared - 4) - 0.3, across - 1.5), words)


@statement(
    "adaptive-switches",
    "ctrans",
    "an adaptive solver across undeclared switches takes twice the evaluations or makes twice the"
    " error, at least",
    0.0,
    0,
)
def adaptive_switches(draw: Draw) -> Trial:
    """2 - max(ratio of evaluations, ratio of errors) of dopri5 at 1e-5: undeclared over declared
    switches.
    """
    segments, whole, x0, exact = _switches(draw)
    declared, across = (
        solve(parts, x0, method="torchdiffeq:dopri5", rtol=1e-5, atol=1e-5)
        for parts in (segments, whole)
    )
    error, worse = (float((s.x1 - exact).norm() / exact.norm()) for s in (declared, across))
    cost = across.stats.evaluations / declared.stats.evaluations
    words = (
        f"dopri5 at 1e-5 across switches: {cost:.1f} times the evaluations, {worse / error:.1f}"
        " times the error"
    )
    return Trial(2 - max(cost, worse / error), words)


@statement(
    "depth-limit",
    "ctrans (Lie-Trotter)",
    "T fixed, D to infinity, weights smooth in depth: order 1 to dX/dt = (v_attn + v_ffn)/2",
    ORDER,
    0.01,
)
def depth_limit(draw: Draw) -> Trial:
    """|p - 1|, p the fitted order in D = 12 to 48 of plain blocks against dX/dt = (v_attn +
    v_ffn)/2, weights linear in depth.
    """
    placement = draw.choice(PLACEMENTS)
    return _order(depth_convergence(placement), f"plain blocks, {placement}")


@statement(
    "depth-limit-symmetric",
    "ctrans (Strang; Lu et al. 2020)",
    "symmetric blocks, half FFN, attention, half FFN: order 2 to the same limit",
    ORDER,
    0.005,
)
def strang(draw: Draw) -> Trial:
    """|p - 2|, p the fitted order in D = 12 to 48 of symmetric blocks against dX/dt = (v_attn +
    v_ffn)/2, weights linear in depth.
    """
    placement = draw.choice(PLACEMENTS)
    return _order(depth_convergence(placement, symmetric=True), f"symmetric blocks, {placement}")


BLOCKS = (16, 32, 64, 128)


@statement(
    "independent-blocks",
    "ctrans",
    "weights of mean zero, independent from block to block, have a trivial limit: at fixed T, |X_D"
    " - X_0| falls like D^(-1/2)",
    0.15,
    0.005,
    printed=Printed("without weights smooth in depth there is no limit", 0.0),
)
def independent_blocks(draw: Draw, printed: bool) -> Trial:
    """|s + 1/2|, s the slope of log |X_D - X_0|/|X_0| over log D, D = 16 to 128 independent blocks
    at T = 2.

    |X_D - X_0| is the root mean square over four models. Printed: without a limit, |X_D - X_0|
    would not shrink.
    """
    x0 = draw.normal(1, 4, 16)
    ends = []
    for blocks in BLOCKS:
        models = [smooth_model(draw, blocks, 1 / blocks) for _ in range(4)]
        squares = [
            float((made.depth(x0) - x0).square().sum() / x0.square().sum()) for made in models
        ]
        ends.append(math.sqrt(sum(squares) / len(squares)))
    first = BLOCKS[0]
    last = BLOCKS[-1]
    if printed:
        return at_most(
            ends[0] / ends[-1],
            1.5,
            f"{first} to {last} independent blocks, |X_D - X_0| shrinks by a factor",
        )
    slope = float(np.polyfit(np.log(BLOCKS), np.log(ends), 1)[0])
    words = (
        f"|X_D - X_0|/|X_0| = {ends[0]:.3g} at {first}, {ends[-1]:.3g} at {last} blocks:"
        f" D^{slope:.2f}"
    )
    return Trial(abs(slope + 0.5), words)


@statement(
    "parallel-limit",
    "ctrans (Lie-Trotter)",
    "at equal weights parallel and sequential blocks have one limit: at fixed T they differ by"
    " O(dt)",
    0.15,
    0.01,
)
def parallel_limit(draw: Draw) -> Trials:
    """The same weights at every depth, T fixed: parallel and sequential blocks differ by O(dt)."""
    seed = draw.seed()
    x = draw.normal(1, 4, 8)
    config = {"depth": 1, "norm": "rmsnorm", "activation": "gelu", "causal": True, "dt": 1.0}
    one, other = (
        random_model(Draw(seed), "pre", spread=0.0, parallel_blocks=parallel, **config).depth
        for parallel in (False, True)
    )
    gaps = [
        float((one.refine(blocks)(x) - other.refine(blocks)(x)).norm()) for blocks in (16, 32, 64)
    ]
    words = f"{gaps[0]:.2g}, {gaps[1]:.2g}, {gaps[2]:.2g} apart at 16, 32 and 64 blocks"
    return [
        holds_if(gaps[-1] > 0, "they differ"),
        Trial(abs(math.log2(gaps[1] / gaps[2]) - 1), words),
    ]
