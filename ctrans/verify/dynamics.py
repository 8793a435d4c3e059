"""Sections 1 and 2: the switched ODE, the discrete Transformer as its Euler step, and the two limits."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ctrans.norm import Norm, SphereNorm
from ctrans.placement import PLACEMENTS
from ctrans.sublayer import Sublayer
from ctrans.verify.convergence import depth_convergence, own_methods, substep_convergence
from ctrans.verify.draws import between, described, model, noise, norm, one_of, size, state
from ctrans.verify.statement import Check, Statement, Trial, as_printed, at_most, equal
from solvers import Segment, solve

ORDER = 0.15
"""How far a fitted order may be from the formal one."""


def discrete_step(generator: torch.Generator) -> Trial:
    """X_D of one Euler step per segment of the ODE = X_D of the discrete model, equal to the bit, any placement."""
    made = model(generator, one_of(generator, PLACEMENTS))
    x = state(generator, made)
    return equal(solve(made.depth.segments(), x, method="euler", steps=1).x1, made.depth(x), described(made))


def horizon(generator: torch.Generator) -> Trial:
    """T = 2 D dt, T the last of the depth's times, for 1 to 6 blocks and a random dt."""
    made = model(generator, "peri", depth=1 + int(between(generator, 0, 6)))
    return equal(made.depth.times[-1], 2 * made.depth.blocks * made.config.dt, described(made))


def _on(norm: Norm | None) -> SphereNorm:
    assert isinstance(norm, SphereNorm), "the placement has this norm, one of the papers"
    return norm


Step = Callable[[Sublayer, Tensor, float], Tensor]
STEPS: dict[str, Step] = {
    "none": lambda s, x, h: x + h * s.field(x),
    "pre": lambda s, x, h: x + h * s.field(_on(s.input_norm)(x)),
    "peri": lambda s, x, h: x + h * _on(s.output_norm)(s.field(_on(s.input_norm)(x))),
    "output": lambda s, x, h: x + h * _on(s.output_norm)(s.field(x)),
    "post": lambda s, x, h: _on(s.state_norm)(x + h * s.field(x)),
    "pre_post": lambda s, x, h: _on(s.state_norm)(x + h * s.field(_on(s.input_norm)(x))),
    "deepnorm": lambda s, x, h: _on(s.state_norm)(x + h * s.gain * s.field(x)),
}
"""The table of placements, as equations."""


def placement_steps(generator: torch.Generator) -> Trial:
    """X_{k+1} of a random sublayer at a random state against its placement's equation in STEPS."""
    made = model(generator, one_of(generator, STEPS))
    x, sublayer = state(generator, made), one_of(generator, made.depth.sublayers)
    expected = STEPS[made.config.placement](sublayer, x, made.config.dt)
    return equal(sublayer.step(x, made.config.dt), expected, described(made))


def deepnorm_scale(generator: torch.Generator) -> Trial:
    """N_eps(alpha y) = N_(eps/alpha^2)(y)."""
    alpha, eps = between(generator, 0.5, 5), size(generator, -8, -1)
    chosen = norm(generator, eps=eps)
    x, f = noise(generator, 2, 3, chosen.width)
    found = chosen(alpha * x + f)
    chosen.eps = eps / alpha**2
    return equal(found, chosen(x + f / alpha), f"alpha {alpha:.3g}, eps {eps:.2g}")


def final_norm(generator: torch.Generator) -> Trial:
    """Behind a final norm the logits forget the state's length; without one they are linear in it."""
    made = model(generator, one_of(generator, PLACEMENTS), eps=0.0)
    x, c = state(generator, made), between(generator, 2, 5)
    power = 1 if PLACEMENTS[made.config.placement].state_norm else 0
    return equal(made.head(c * x), c**power * made.head(x), described(made))


def substeps(generator: torch.Generator) -> Trial:
    """|p - 1|, p the fitted order of Euler with M substeps per segment, M = 64 to 256, D fixed, for a drawn placement."""
    placement = one_of(generator, PLACEMENTS)
    return _order(substep_convergence("euler", placement).order, 1, f"euler on {placement}")


def higher_orders(generator: torch.Generator) -> Trial:
    """|p - formal order|, p fitted over M substeps per segment, D fixed, for a drawn Runge-Kutta method and placement."""
    method, placement = one_of(generator, own_methods()), one_of(generator, PLACEMENTS)
    found = substep_convergence(method, placement)
    return _order(found.order, found.formal, f"{method} on {placement}")


def depth_limit(generator: torch.Generator) -> Trial:
    """|p - 1|, p the fitted order in D of plain blocks, 12 to 48, to dX/dt = (v_attn + v_ffn)/2, weights linear in depth."""
    placement = one_of(generator, PLACEMENTS)
    return _order(depth_convergence(placement).order, 1, f"plain blocks, {placement}")


def strang(generator: torch.Generator) -> Trial:
    """|p - 2|, p the fitted order in D of symmetric blocks, 12 to 48, to dX/dt = (v_attn + v_ffn)/2, weights linear in depth."""
    placement = one_of(generator, PLACEMENTS)
    return _order(depth_convergence(placement, symmetric=True).order, 2, f"symmetric blocks, {placement}")


def _order(found: float, formal: int, words: str) -> Trial:
    return Trial(abs(found - formal), f"{words}: order {found:.3f} against {formal}")


def _switches(generator: torch.Generator) -> tuple[list[Segment], list[Segment], Tensor, Tensor]:
    """The ODE with its switches declared and as one field of t, an initial state, and the exact end."""
    made = model(generator, "peri", depth=3, width=16, dt=1.0, activation="gelu", norm="layernorm")
    segments, x0 = made.depth.segments(), noise(generator, 1, 4, 16)
    whole = [Segment(0, len(segments), lambda t, x: segments[min(int(t), len(segments) - 1)].field(t, x))]
    return segments, whole, x0, solve(segments, x0, method="tsit5", rtol=1e-12, atol=1e-13).x1


def _switch_orders(generator: torch.Generator) -> tuple[float, float]:
    """RK4's order with switches declared, and with steps that fall across them (an odd number over six segments)."""
    segments, whole, x0, exact = _switches(generator)

    def order(parts: list[Segment], counts: tuple[int, int]) -> float:
        first, last = (float((solve(parts, x0, method="rk4", steps=n).x1 - exact).norm()) for n in counts)
        return math.log(first / last) / math.log(counts[1] / counts[0])

    return order(segments, (16, 64)), order(whole, (97, 385))


def undeclared_switches(generator: torch.Generator) -> Trial:
    """The larger of |p - 4| - 0.3, p RK4's order with switches declared, and q - 1.5, q its order with steps across them."""
    declared, across = _switch_orders(generator)
    words = f"rk4: order {declared:.2f} with switches declared, {across:.2f} across them"
    return Trial(max(abs(declared - 4) - 0.3, across - 1.5), words)


def switches_do_not_matter(generator: torch.Generator) -> Trial:
    """|q - 4|, q RK4's order with steps that fall across the switches."""
    _, across = _switch_orders(generator)
    return _order(across, 4, "rk4 with steps across switches")


def adaptive_switches(generator: torch.Generator) -> Trial:
    """2 - max(ratio of evaluations, ratio of errors), dopri5 at 1e-5 with switches undeclared over declared."""
    segments, whole, x0, exact = _switches(generator)
    declared, across = (solve(parts, x0, method="torchdiffeq:dopri5", rtol=1e-5, atol=1e-5) for parts in (segments, whole))
    error, worse = (float((s.x1 - exact).norm() / exact.norm()) for s in (declared, across))
    cost = across.stats.evaluations / declared.stats.evaluations
    words = f"dopri5 at 1e-5 across switches: {cost:.1f} times the evaluations, {worse / error:.1f} times the error"
    return Trial(2 - max(cost, worse / error), words)


BLOCKS = (16, 32, 64, 128)


def _independent_blocks(generator: torch.Generator) -> list[float]:
    """|X_D - X_0|/|X_0| at T = 2 for D blocks with weights drawn independently, root mean square over models."""
    x0 = noise(generator, 1, 4, 16)
    ends = []
    for blocks in BLOCKS:
        squares = []
        for _ in range(4):
            made = model(generator, "pre", spread=0, depth=blocks, width=16, dt=1 / blocks, norm="layernorm", activation="gelu")
            squares.append(float((made.depth(x0) - x0).square().sum() / x0.square().sum()))
        ends.append(math.sqrt(sum(squares) / len(squares)))
    return ends


def independent_blocks(generator: torch.Generator) -> Trial:
    """|s + 1/2|, s the slope of log |X_D - X_0|/|X_0| against log D, D = 16 to 128 independent blocks at T = 2."""
    ends = _independent_blocks(generator)
    slope = float(np.polyfit(np.log(BLOCKS), np.log(ends), 1)[0])
    return Trial(
        abs(slope + 0.5),
        f"|X_D - X_0|/|X_0| = {ends[0]:.3g} at {BLOCKS[0]}, {ends[-1]:.3g} at {BLOCKS[-1]} blocks: D^{slope:.2f}",
    )


def no_limit(generator: torch.Generator) -> Trial:
    """Without a limit, ends would stay as far from X_0 as they are."""
    ends = _independent_blocks(generator)
    return at_most(ends[0] / ends[-1], 1.5, f"{BLOCKS[0]} to {BLOCKS[-1]} independent blocks, |X_D - X_0| shrinks by a factor")


STATEMENTS: tuple[Statement, ...] = (
    as_printed(
        "discrete-step",
        1,
        "Kan, eq. 1-4 and section 5",
        "the discrete Transformer with residual scale dt is one Euler step per segment of the switched ODE, bit for bit",
        Check(discrete_step, 0.0, 0.5),
    ),
    as_printed("horizon", 1, "Kan, section 5", "D blocks of two sublayers last T = 2 D dt", Check(horizon, 1e-15, 0.05)),
    as_printed(
        "placements",
        1,
        "Kan, eq. 7-8; Kim, positions A, B, C",
        "each placement's step is its equation: X + dt N_out f(N_in X), or N(X + dt f(N_in X))",
        Check(placement_steps, 1e-12, 0.5),
    ),
    Statement(
        "deepnorm-scale",
        1,
        "DeepNet; Emadi, section 6.1",
        "N_eps(alpha X + f(X)) = N_(eps/alpha^2)(X + f(X)/alpha)",
        Check(deepnorm_scale, 1e-10, 0.5),
    ),
    as_printed(
        "final-norm",
        1,
        "Xiong, table 1",
        "none, pre, peri and output have a final norm before the head; post, pre_post and deepnorm need none",
        Check(final_norm, 1e-10, 0.1),
    ),
    Statement(
        "substeps-euler",
        2,
        "ctrans",
        "D fixed, M Euler substeps per segment: error O(dt/M), for every placement",
        Check(substeps, ORDER, 0.005),
    ),
    Statement(
        "substeps-order-p",
        2,
        "ctrans",
        "D fixed, M substeps of a method of order p: error O((dt/M)^p)",
        Check(higher_orders, ORDER, 0.005),
    ),
    Statement(
        "undeclared-switches",
        2,
        "ctrans",
        "steps across switches lose the order: RK4 has order 4 with switches declared, about 1 across them",
        Check(undeclared_switches, 0.0, 0),
        Check(switches_do_not_matter, 0.3, 0),
        "a Runge-Kutta method keeps its order on the whole depth",
    ),
    Statement(
        "adaptive-switches",
        2,
        "ctrans",
        "an adaptive solver across undeclared switches takes twice the evaluations or makes twice the error, at least",
        Check(adaptive_switches, 0.0, 0),
    ),
    Statement(
        "depth-limit",
        2,
        "ctrans (Lie-Trotter)",
        "T fixed, D to infinity, weights smooth in depth: order 1 to dX/dt = (v_attn + v_ffn)/2",
        Check(depth_limit, ORDER, 0.01),
    ),
    Statement(
        "depth-limit-symmetric",
        2,
        "ctrans (Strang; Lu et al. 2020)",
        "symmetric blocks, half FFN, attention, half FFN: order 2 to the same limit",
        Check(strang, ORDER, 0.005),
    ),
    Statement(
        "independent-blocks",
        2,
        "ctrans",
        "weights of mean zero, independent from block to block, have a trivial limit: at fixed T, |X_D - X_0| falls like D^(-1/2)",
        Check(independent_blocks, 0.15, 0.005),
        Check(no_limit, 0.0, 0.005),
        "without weights smooth in depth there is no limit",
    ),
)
