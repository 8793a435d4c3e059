"""Section 10: statements about initial weights (Xiong; Kim). Confidence intervals over seeds test
expectations.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from ctrans.model.initialisation import INITIALISATIONS
from ctrans.model.random_models import random_block, random_model
from ctrans.placement import PLACEMENTS
from ctrans.stability.initialisation.over_seeds import HiddenGrowth, Setting, gradient_slope, hidden_growth
from ctrans.stability.initialisation.theory import SLOPES, last_layer_bound
from ctrans.statement import Draw, Printed, Trial, Trials, at_most, statement

SMALL = Setting(width=32, tokens=6)
SEEDS = 16


@statement(
    "xiong-lemma-1", 10, "Xiong, lemma 1", "E|relu(x)|^2 = sigma^2 d/2 for x ~ N(0, sigma^2 I)", 0.0, 0.02, as_printed=True
)
def relu_half(draw: Draw) -> Trial:
    """E|relu(x)|^2 = sigma^2 d/2 of x ~ N(0, sigma^2), within five standard errors of 100,000
    draws.
    """
    sigma = draw.uniform(0.1, 10)
    squares = (sigma * draw.normal(100_000)).relu().square()
    error = abs(float(squares.mean()) - sigma**2 / 2) / float(squares.std()) * math.sqrt(len(squares))
    return Trial(
        error - 5,
        f"sigma = {sigma:.3g}: mean {float(squares.mean()):.4g} against {sigma**2 / 2:.4g}, {error:.1f} standard errors",
    )


def _growth_case(growth: HiddenGrowth, words: str) -> list[Trial]:
    """Distance of the intervals over the seeds from their ranges."""
    places = zip(growth.measured, growth.low, growth.high, strict=True)
    return [
        Trial(m.outside(low, high), f"{words}: {m.mean:.3f} in [{m.low:.3f}, {m.high:.3f}], theory [{low:.3g}, {high:.3g}]")
        for m, low, high in places
    ]


@statement(
    "xiong-lemma-2-pre",
    10,
    "Xiong, lemma 2",
    "pre, W_Q = W_K = 0, Xavier, ReLU, d_ff = d: E|x_l|^2/d in [1 + l/2, 1 + 3l/2]",
    0.0,
    0,
    as_printed=True,
)
def pre_growth(draw: Draw) -> Trials:
    """E|x_l|^2/d in [1 + l/2, 1 + 3l/2] after each of 6 pre blocks: how far the interval over 16
    seeds lies outside.
    """
    (growth,) = hidden_growth("pre", 6, SEEDS, SMALL)
    return _growth_case(growth, "pre, E|x_l|^2/d")


@statement(
    "xiong-lemma-2-post",
    10,
    "ctrans, on Xiong, lemma 2",
    "post: E|x|^2/d = 3/2 before the FFN's norm, and in [1, 2] before the attention's",
    0.0,
    0,
    printed=Printed("post: 3/2 before each norm", 0.0, 0),
)
def post_growth(draw: Draw, printed: bool) -> Trials:
    """E|x|^2/d = 3/2 before the FFN's norm, in [1, 2] before the attention's, in each of 6 post
    blocks, by intervals over 16 seeds.

    Printed: 3/2 before the attention's norm too.
    """
    attention, ffn = hidden_growth("post", 6, SEEDS, SMALL)
    if printed:
        attention = dataclasses.replace(attention, low=[1.5] * 6, high=[1.5] * 6)
    before_attention = _growth_case(attention, f"post, {attention.where}")
    return before_attention if printed else [*_growth_case(ffn, f"post, {ffn.where}"), *before_attention]


@statement(
    "xiong-lemma-2-any",
    10,
    "Xiong, lemma 2",
    "for every initialisation: [1 + l f, 1 + l (a + f)], a = d^2 s_V^2 s_O^2, f = d d_ff s_1^2 s_2^2/2",
    0.0,
    0.03,
    printed=Printed("[1 + l/2, 1 + 3l/2] whatever the initialisation", 0.0, 0),
)
def every_initialisation(draw: Draw, printed: bool) -> Trials:
    """E|x_l|^2/d in [1 + l f, 1 + l (a + f)] after 3 pre blocks of a drawn initialisation, two
    heads, d_ff = 2 d, 16 seeds.

    Printed: [1 + l/2, 1 + 3l/2] for He's.
    """
    if printed:
        (growth,) = hidden_growth("pre", 3, SEEDS, dataclasses.replace(SMALL, initialisation="he"))
        claimed = dataclasses.replace(growth, low=[1 + k / 2 for k in (1, 2, 3)], high=[1 + 3 * k / 2 for k in (1, 2, 3)])
        return _growth_case(claimed, "pre, He, E|x_l|^2/d")
    name = draw.choice(INITIALISATIONS)
    (growth,) = hidden_growth("pre", 3, SEEDS, dataclasses.replace(SMALL, initialisation=name, heads=2, ffn_width=64))
    return _growth_case(growth, f"pre, {name}, E|x_l|^2/d")


def _gradient_slope(placement: str) -> Trial:
    """Slope of |dL/dW_2| of the last FFN against depth: the mean slope over seeds, within 0.1 of
    theory's.
    """
    with torch.enable_grad():
        found = gradient_slope(placement, (8, 16, 32), 10, Setting(width=48, tokens=4))
    expected = SLOPES[placement]
    words = f"{placement}: slope {found.mean:.3f} in [{found.low:.3f}, {found.high:.3f}], theory {expected}"
    return Trial(abs(found.mean - expected) - 0.1, words)


@statement(
    "xiong-theorem-1-post",
    10,
    "Xiong, theorem 1",
    "post: the last layer's gradient does not depend on the depth",
    0.0,
    0,
    as_printed=True,
)
def post_gradient(draw: Draw) -> Trial:
    """|s| of |dL/dW_2| ~ D^s, D = 8 to 32 post blocks."""
    return _gradient_slope("post")


@statement(
    "xiong-theorem-1-pre",
    10,
    "Xiong, theorem 1",
    "pre: the last layer's gradient falls like L^(-1/2)",
    0.0,
    0,
    as_printed=True,
)
def pre_gradient(draw: Draw) -> Trial:
    """|s + 1/2| of |dL/dW_2| ~ D^s, D = 8 to 32 pre blocks."""
    return _gradient_slope("pre")


@statement("theorem-1-peri", 10, "ctrans", "peri: the last layer's gradient falls like L^(-1/2), as under pre", 0.0, 0)
def peri_gradient(draw: Draw) -> Trial:
    """|s + 1/2| of |dL/dW_2| ~ D^s, D = 8 to 32 peri blocks."""
    return _gradient_slope("peri")


@statement(
    "kim-3.1",
    10,
    "Kim, proposition 3.1",
    "|dL/dW2| <= |h||dL/do| times 1 (pre), g sqrt(d)/|C(x + a)| (post), g sqrt(d)/|C a| (peri)",
    printed=Printed("the same with |a|, |x + a| under LayerNorm", share=0.05),
)
def last_layer(draw: Draw, printed: bool) -> Trial:
    """Bound |dL/dW_2| <= Kim's bound with LayerNorm's centring, at the last FFN of a random model
    of any placement and gradient.

    Printed: without it, for a nearly constant output of the last FFN under peri.
    """
    if printed:
        made = random_model(draw, "peri", norm="layernorm", spread=0, depth=1)
        sublayer, offset = made.depth.sublayers[-1], draw.uniform(10, 100)
        sublayer.field.down.bias.fill_(offset)
        x, pull = draw.normal(2, 1, 1, made.config.width)
        found = last_layer_bound(sublayer, 1.0, x, pull)
        return at_most(found.measured, found.printed, f"peri, LayerNorm, a = {offset:.3g} + noise: |dL/dW_2|")
    made, x = random_block(draw, draw.choice(sorted(PLACEMENTS)))
    found = last_layer_bound(made.depth.sublayers[-1], made.depth.dt, x, draw.normal(*x.shape))
    return at_most(found.measured, found.bound, "|dL/dW_2| of the last FFN")


@statement(
    "initial-variances",
    10,
    "Kim, section 4; Xiong; DeepNet; Emadi",
    "drawn weights have the deviations of 0.02, Xavier, He, LeCun, 10/d, 1/(10 d) and their rules by depth",
    0.0,
    0.05,
    as_printed=True,
)
def deviations(draw: Draw) -> Trials:
    """The standard deviation of drawn entries against its formula, within five standard errors."""
    name = draw.choice(INITIALISATIONS)
    made = random_model(draw, "pre", spread=0, initialisation=name, width=32, ffn_width=64)
    rule = INITIALISATIONS[name]
    cases = []
    for sublayer in made.depth.sublayers:
        for matrix in sublayer.field.matrices():
            weight = matrix.weight
            std = rule.gain(matrix.role, made.depth.blocks) * rule.std(weight.shape[1], weight.shape[0])
            drawn = float(weight.square().mean().sqrt())
            error = abs(drawn / std - 1) * math.sqrt(2 * weight.numel()) if std else float(weight.abs().max())
            cases.append(Trial(error - 5, f"{name}, {matrix.role}: {error:.1f} standard errors from {std:.3g}"))
    return cases
