"""Section 7: bounds on the growth of gradients in the backward pass."""

from __future__ import annotations

import math

import torch

from ctrans.base.draw import Draw
from ctrans.control import Costate
from ctrans.control.costate import costate
from ctrans.dynamics.norm import Norm
from ctrans.dynamics.residual import sinkhorn
from ctrans.measure.forward.mixing import product_gains
from ctrans.model.gpt import GPT
from ctrans.theory.random_models import described, random_model, random_text
from ctrans.theory.statement import Printed, Trial, Trials, at_most, dense_matrix, equal, statement

SECTION = 7


@statement(
    "adjoint-growth",
    "ctrans, on Kan, prop. 8",
    "peri, output: |P_i| <= |P_D| prod over k >= i of (1 + dt g_out L_f g_in/(sigma_out sigma_in))",
    1e-9,
    0.25,
)
def adjoint_growth(draw: Draw) -> Trials:
    """|P_i| against the product from i on, L_f the dense spectral norm of the map's Jacobian at its
    input.
    """
    made = random_model(draw, draw.choice(("peri", "output")), width=4, ffn_width=6, depth=2)
    found = costate(made, random_text(draw, 1, 3), random_text(draw, 1, 3))
    factors = [1 + slope / sigma for slope, sigma in _slopes(made, found)]
    end = float(found.costates[-1].norm())
    return [
        at_most(
            p.norm(),
            end * math.prod(factors[i:]),
            f"{described(made)}: |P_{i}| against |P_D| times the product",
        )
        for i, p in enumerate(found.costates)
    ]


def _slopes(made: GPT, found: Costate) -> list[tuple[float, float]]:
    """h g_out L_f g_in/sigma_out of each sublayer, and sigma_in, the least over tokens (1 without
    an input norm).
    """
    slopes = []
    for sublayer, slope, x in zip(
        made.depth.sublayers, made.depth.lengths, found.states, strict=False
    ):
        u = sublayer.given(x)
        sigma = 1.0
        if isinstance(sublayer.input_norm, Norm):
            slope = slope * float(sublayer.input_norm.gamma.abs().max())
            sigma = float(sublayer.input_norm.sigma(x).min())
        if isinstance(sublayer.output_norm, Norm):
            slope *= float(sublayer.output_norm.slope(sublayer.field(u)).max())
        slopes.append(
            (slope * float(torch.linalg.matrix_norm(dense_matrix(sublayer.field, u), 2)), sigma)
        )
    return slopes


@statement(
    "adjoint-power-law",
    "ctrans",
    "sigma_out bounded below and sigma_in >= s + b k, k = 0 .. D-1: the product is at most (1 +"
    " c/s)(1 + b (D-1)/s)^(c/b)",
    1e-9,
    0.5,
    printed=Printed("the product is polynomial in depth for any sigma_in", share=0.02),
)
def power_law(draw: Draw, printed: bool) -> Trials:
    """prod_k (1 + c/(s + b k)), k = 0 to D - 1, against (1 + c/s)(1 + b (D-1)/s)^(c/b): numbers up
    to D = 10^5, and a model.

    The model's c is the largest of its sublayers' measured g_out L_f g_in dt/sigma_out, and s + b k
    lies below every sigma_in. Printed: for a sigma_in that does not grow the product is exponential
    in D: a power of D that holds at D = 10 fails at 1000.
    """
    if printed:
        c = draw.uniform(0.5, 2)
        short, long = (blocks * math.log1p(c) for blocks in (10, 1000))
        exponent = short / math.log(10)
        return at_most(
            long,
            exponent * math.log(1000),
            f"sigma_in constant, c = {c:.3g}: log of the product at D = 1000",
        )
    c = draw.log_uniform(-2, 1)
    b = draw.log_uniform(-2, 1)
    s = draw.log_uniform(-1, 1)
    steps = int(draw.log_uniform(0, 5))
    log = float(torch.log1p(c / (s + b * torch.arange(steps, dtype=torch.float64))).sum())
    numbers = at_most(
        log,
        _power_law(c, s, b, steps),
        f"c = {c:.3g}, b = {b:.3g}, s = {s:.3g}, D = {steps}: log of the product",
    )
    made = random_model(draw, "peri", width=4, ffn_width=6, depth=2)
    found = costate(made, random_text(draw, 1, 3), random_text(draw, 1, 3))
    slopes, sigmas = zip(*_slopes(made, found), strict=True)
    s = min(sigmas) / 2
    b = min((sigma - s) / k for k, sigma in enumerate(sigmas) if k)
    grown = math.log(float(found.costates[0].norm() / found.costates[-1].norm()))
    bound = _power_law(max(slopes), s, b, len(sigmas))
    # of logarithms: the growth itself may be below 1
    return [
        numbers,
        Trial(
            (grown - bound) / bound,
            f"{described(made)}: log |P_0|/|P_D| = {grown:.3g} against {bound:.3g}",
        ),
    ]


def _power_law(c: float, s: float, b: float, steps: int) -> float:
    """log of (1 + c/s)(1 + b (D-1)/s)^(c/b)."""
    return math.log1p(c / s) + c / b * math.log1p(b * (steps - 1) / s)


@statement(
    "rezero-isometry",
    "ReZero, section 3; SkipInit",
    "at a = 0, with no norm around the state, X_D = X_0 and the Jacobian is the identity",
    0.0,
    0.1,
    as_printed=True,
)
def isometry(draw: Draw) -> Trials:
    """a = 0 in every sublayer: X_D = X_0 and the Jacobian is the identity."""
    made = random_model(
        draw, draw.choice(("none", "pre", "peri", "output")), residual="rezero", spread=0.0
    )
    x = draw.of_any_size(3, 8)
    return [
        equal(made.depth(x), x, f"X_D, {described(made)}"),
        equal(dense_matrix(made.depth, x), torch.eye(x.numel(), dtype=x.dtype), "the Jacobian"),
    ]


@statement(
    "mixing-gain",
    "ctrans, on mHC and hyper-connections",
    "products of doubly stochastic M have |M_k ... M_0|_2 = 1: mixing lengthens no state and no"
    " costate; M = (1 + s) I: (1 + s)^k",
    1e-9,
    0.1,
    printed=Printed(
        "20 Sinkhorn rounds make M doubly stochastic (to 1e-3, of logits near 4 I)", 1e-3
    ),
)
def mixing(draw: Draw, printed: bool) -> Trials:
    """Products of doubly stochastic matrices have norm 1 and keep the mean stream; free ones M = (1
    + s) I have (1 + s)^k.

    Printed: rows of M after 20 Sinkhorn rounds from nearly the identity.
    """
    streams = 2 + draw.integer(5)
    logits = 4 * torch.eye(streams, dtype=torch.float64) + draw.normal(
        1 + draw.integer(30), streams, streams
    )
    each = sinkhorn(logits, 20 if printed else 3000)
    if printed:
        return equal(each.sum(-1), torch.ones(each.shape[:-1]), f"row sums of {streams} streams")
    gains = torch.tensor(product_gains(each), dtype=torch.float64)
    rows = torch.ones(streams, dtype=torch.float64) / streams
    s = draw.uniform(0.01, 0.2)
    free = product_gains((1 + s) * torch.eye(3, dtype=torch.float64).expand(len(each), 3, 3))
    return [
        equal(gains, 1.0, f"{len(each)} matrices of {streams} streams"),
        equal(torch.stack([rows @ m for m in each]), rows.expand(len(each), -1), "the mean stream"),
        equal(free[-1], (1 + s) ** len(each), "free mixing"),
    ]
