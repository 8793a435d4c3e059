"""Section 2: the two limits, more steps per segment and more blocks."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.model.orders import Convergence, depth_convergence, own_methods, substep_convergence
from ctrans.theory.random_models import random_model, smooth_model
from ctrans.theory.statement import Printed, Trial, Trials, at_most, holds_if, statement
from solvers import Segment
from solvers.solve import solve

SECTION = 2


ORDER = 0.15
"""The largest distance of a fitted order from the formal order."""


def _order(convergence: Convergence, case: str) -> Trial:
    """|p - formal order|, p the fitted order."""
    return Trial(
        abs(convergence.order - convergence.formal),
        f"{case}: order {convergence.order:.3f} against {convergence.formal}",
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
    model = random_model(
        draw, "peri", depth=3, width=16, dt=1.0, activation="gelu", norm="layernorm"
    )
    segments = model.depth.segments()
    x0 = draw.normal(1, 4, 16)
    one_field = [
        Segment(0, len(segments), lambda t, x: segments[min(int(t), len(segments) - 1)].field(t, x))
    ]
    return segments, one_field, x0, solve(segments, x0, method="tsit5", rtol=1e-12, atol=1e-13).x1


@statement(
    "undeclared-switches",
    "ctrans",
    "steps across switches lose the order: RK4 has order 4 with switches declared, about 1 across"
    " them",
    0.0,
    0,
    printed=Printed("a Runge-Kutta method keeps its order on the whole depth", 0.3),
)
def undeclared_switches(draw: Draw, *, printed: bool) -> Trial:
    """The larger of |p - 4| - 0.3 and q - 1.5. p is RK4's order with declared switches, q its order
    with steps across them: an odd number of steps over six segments. Printed: |q - 4|.
    """
    segments, one_field, x0, exact = _switches(draw)

    def error(parts: list[Segment], steps: int) -> float:
        return float((solve(parts, x0, method="rk4", steps=steps).x1 - exact).norm())

    def order(parts: list[Segment], few: int, many: int) -> float:
        return math.log(error(parts, few) / error(parts, many)) / math.log(many / few)

    across = order(one_field, 97, 385)
    if printed:
        return Trial(
            abs(across - 4), f"rk4 with steps across switches: order {across:.3f} against 4"
        )
    declared = order(segments, 16, 64)
    case = f"rk4: order {declared:.2f} with switches declared, {across:.2f} across them"
    return Trial(max(abs(declared - 4) - 0.3, across - 1.5), case)


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
    segments, one_field, x0, exact = _switches(draw)
    declared = solve(segments, x0, method="torchdiffeq:dopri5", rtol=1e-5, atol=1e-5)
    across = solve(one_field, x0, method="torchdiffeq:dopri5", rtol=1e-5, atol=1e-5)
    error = float((declared.x1 - exact).norm() / exact.norm())
    worse = float((across.x1 - exact).norm() / exact.norm())
    cost = across.stats.evaluations / declared.stats.evaluations
    case = (
        f"dopri5 at 1e-5 across switches: {cost:.1f} times the evaluations, {worse / error:.1f}"
        " times the error"
    )
    return Trial(2 - max(cost, worse / error), case)


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
def independent_blocks(draw: Draw, *, printed: bool) -> Trial:
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
            float((model.depth(x0) - x0).square().sum() / x0.square().sum()) for model in models
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
    case = (
        f"|X_D - X_0|/|X_0| = {ends[0]:.3g} at {first}, {ends[-1]:.3g} at {last} blocks:"
        f" D^{slope:.2f}"
    )
    return Trial(abs(slope + 0.5), case)


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
    sequential = random_model(Draw(seed), "pre", spread=0.0, parallel_blocks=False, **config).depth
    parallel = random_model(Draw(seed), "pre", spread=0.0, parallel_blocks=True, **config).depth
    gaps = [
        float((sequential.refine(blocks)(x) - parallel.refine(blocks)(x)).norm())
        for blocks in (16, 32, 64)
    ]
    case = f"{gaps[0]:.2g}, {gaps[1]:.2g}, {gaps[2]:.2g} apart at 16, 32 and 64 blocks"
    return [
        holds_if("they differ", condition=gaps[-1] > 0),
        Trial(abs(math.log2(gaps[1] / gaps[2]) - 1), case),
    ]
