"""Section 10: initial weights under Pre-LN and Post-LN (Xiong).

Confidence intervals over seeds test expectations.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace

import torch
from scipy import stats
from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.measure.initialisation.over_seeds import (
    STREAM,
    HiddenGrowth,
    Setting,
    gradient_slope,
    hidden_growth,
    interval,
)
from ctrans.measure.initialisation.theory import SLOPES
from ctrans.model.initialisation import INITIALISATIONS
from ctrans.theory.statement import Printed, Trial, Trials, at_most, equal, statement

SECTION = 10

SMALL = Setting(width=32, tokens=6)
SEEDS = 16


@statement(
    "xiong-lemma-1",
    "Xiong, lemma 1",
    "E|relu(x)|^2 = sigma^2 d/2 for x ~ N(0, sigma^2 I)",
    0.0,
    0.02,
    as_printed=True,
)
def relu_half(draw: Draw) -> Trial:
    """E|relu(x)|^2 = sigma^2 d/2 of x ~ N(0, sigma^2), within five standard errors of 100,000
    draws.
    """
    sigma = draw.uniform(0.1, 10)
    squares = (sigma * draw.normal(100_000)).relu().square()
    mean = float(squares.mean())
    error = abs(mean - sigma**2 / 2) / float(squares.std()) * math.sqrt(len(squares))
    return Trial(
        error - 5,
        f"sigma = {sigma:.3g}: mean {mean:.4g} against {sigma**2 / 2:.4g},"
        f" {error:.1f} standard errors",
    )


def growth_trials(growth: HiddenGrowth, case: str) -> list[Trial]:
    """Distance of the intervals over the seeds from their ranges."""
    places = zip(growth.measured, growth.low, growth.high, strict=True)
    return [
        Trial(
            m.outside(low, high),
            f"{case}: {m.mean:.3f} in [{m.low:.3f}, {m.high:.3f}], theory [{low:.3g}, {high:.3g}]",
        )
        for m, low, high in places
    ]


@statement(
    "xiong-lemma-2-pre",
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
    return growth_trials(growth, "pre, E|x_l|^2/d")


@statement(
    "xiong-lemma-2-post",
    "ctrans, on Xiong, lemma 2",
    "post: E|x|^2/d = 3/2 before the FFN's norm, and in [1, 2] before the attention's",
    0.0,
    0,
    printed=Printed("post: 3/2 before each norm"),
)
def post_growth(draw: Draw, *, printed: bool) -> Trials:
    """E|x|^2/d = 3/2 before the FFN's norm, in [1, 2] before the attention's, in each of 6 post
    blocks, by intervals over 16 seeds.

    Printed: 3/2 before the attention's norm too.
    """
    attention, ffn = hidden_growth("post", 6, SEEDS, SMALL)
    if printed:
        attention = replace(attention, low=[1.5] * 6, high=[1.5] * 6)
    before_attention = growth_trials(attention, f"post, {attention.where}")
    if printed:
        return before_attention
    return [*growth_trials(ffn, f"post, {ffn.where}"), *before_attention]


@statement(
    "xiong-lemma-2-any",
    "Xiong, lemma 2",
    "for every initialisation: [1 + l f, 1 + l (a + f)], a = d^2 s_V^2 s_O^2, f = d d_ff s_1^2"
    " s_2^2/2",
    0.0,
    0.03,
    printed=Printed("[1 + l/2, 1 + 3l/2] whatever the initialisation", share=0),
)
def every_initialisation(draw: Draw, *, printed: bool) -> Trials:
    """E|x_l|^2/d in [1 + l f, 1 + l (a + f)] after 3 pre blocks of a drawn initialisation, two
    heads, d_ff = 2 d, 16 seeds.

    Printed: [1 + l/2, 1 + 3l/2] for He's.
    """
    if printed:
        (growth,) = hidden_growth("pre", 3, SEEDS, replace(SMALL, initialisation="he"))
        claimed = replace(
            growth, low=[1 + k / 2 for k in (1, 2, 3)], high=[1 + 3 * k / 2 for k in (1, 2, 3)]
        )
        return growth_trials(claimed, "pre, He, E|x_l|^2/d")
    name = draw.choice(INITIALISATIONS)
    (growth,) = hidden_growth(
        "pre", 3, SEEDS, replace(SMALL, initialisation=name, heads=2, ffn_width=64)
    )
    return growth_trials(growth, f"pre, {name}, E|x_l|^2/d")


def gradient_slope_trial(placement: str) -> Trial:
    """Slope of |dL/dW_2| of the last FFN against depth: the mean slope over seeds, within 0.1 of
    theory's.
    """
    with torch.enable_grad():
        slope = gradient_slope(placement, (8, 16, 32), 10, Setting(width=48, tokens=4))
    expected = SLOPES[placement]
    case = (
        f"{placement}: slope {slope.mean:.3f} in [{slope.low:.3f}, {slope.high:.3f}], theory"
        f" {expected}"
    )
    return Trial(abs(slope.mean - expected) - 0.1, case)


@statement(
    "xiong-theorem-1-post",
    "Xiong, theorem 1",
    "post: the last layer's gradient does not depend on the depth",
    0.0,
    0,
    as_printed=True,
)
def post_gradient(draw: Draw) -> Trial:
    """|s| of |dL/dW_2| ~ D^s, D = 8 to 32 post blocks."""
    return gradient_slope_trial("post")


@statement(
    "xiong-theorem-1-pre",
    "Xiong, theorem 1",
    "pre: the last layer's gradient falls like L^(-1/2)",
    0.0,
    0,
    as_printed=True,
)
def pre_gradient(draw: Draw) -> Trial:
    """|s + 1/2| of |dL/dW_2| ~ D^s, D = 8 to 32 pre blocks."""
    return gradient_slope_trial("pre")


@functools.cache
def _one_token(placement: str, width: int, depth: int, seeds: int) -> Tensor:
    """|dL/dW_2|_F^2/d of each FFN, (seeds, depth), at Xiong's initial weights: one token, and a
    loss of the last norm's output with derivatives of +1 and -1 by its entries, so G = 1.
    """
    setting = Setting(width=width, tokens=1)
    squares = []
    with torch.enable_grad():
        for seed in range(seeds):
            model = setting.model(placement, depth, seed)
            x = setting.inputs(seed)
            draw = Draw(seed + 2 * STREAM)
            loss = (model.final_norm(model.depth(x)) * draw.normal(width).sign()).sum()
            weights = [
                part.field.output_projection.weight for part in list(model.depth.sublayers)[1::2]
            ]
            gradients = torch.autograd.grad(loss, weights)
            squares.append([float(slope.square().sum()) / width**2 for slope in gradients])
    return torch.tensor(squares, dtype=torch.float64)


@statement(
    "xiong-gradients-by-layer",
    "Xiong, section 3.3 (extended theory)",
    "E|dL/dW_2|^2 of layer l, for one token, W_Q = W_K = 0 and derivatives +-G of the loss: d^2"
    " G^2/(2 + 3 l) under pre, for any number of layers, and d^2 G^2/3 under post, for any layer",
    0.0,
    0,
    printed=Printed(
        "it decays towards the input under post, and is the same in all layers under pre"
    ),
)
def gradients_by_layer(draw: Draw, *, printed: bool) -> Trials:
    """Means over 200 seeds at d = 64 of 6 layers, over theory's times 1 - 2/d for what the last
    norm projects out: distance of their intervals from [1 - k/d, 1 + k/d], k the sublayers passed.

    Under pre |P_l|^2 = |P_L|^2 s_L/s_l, s_l = 1 + 3l/2 the state's mean square, because each step
    adds the same share to the costate's as to the state's. Printed: the first layer's under post is
    at most half of the last one's, and under pre at most twice that.

    Figure 3 (a, b) has the length of the mean gradient over batches. That is another quantity: over
    256 inputs it does grow with the layer under post.
    """
    squares = {name: _one_token(name, 64, 6, 200) for name in ("post", "pre")}
    if printed:
        first = {name: float(of_layers[:, 0].mean()) for name, of_layers in squares.items()}
        last = {name: float(of_layers[:, -1].mean()) for name, of_layers in squares.items()}
        return [
            at_most(
                first["post"],
                last["post"] / 2,
                "post: the first layer's mean square gradient against half of the last one's",
            ),
            at_most(
                first["pre"], 2 * last["pre"], "pre: the first layer's against twice the last one's"
            ),
        ]
    cases = []
    for name, of_layers in squares.items():
        for layer in range(6):
            divisor = 5 + 3 * layer
            if name == "post":
                divisor = 3
            exact = (1 - 2 / 64) / divisor
            mean = interval((of_layers[:, layer] / exact).tolist(), 12)
            case = (
                f"{name}, layer {layer + 1}: {mean.mean:.3f} of theory in [{mean.low:.3f},"
                f" {mean.high:.3f}]"
            )
            slack = (2 + 2 * (5 - layer)) / 64
            cases.append(Trial(mean.outside(1 - slack, 1 + slack), case))
    return cases


@statement(
    "xiong-theorem-1-scale",
    "Xiong, theorem 1",
    "for one token, W_Q = W_K = 0 and derivatives +-G of the loss, the last layer's |dL/dW_2| is of"
    " order d G/sqrt(3) (post) and d G/sqrt(2 + 3 L) (pre), without sqrt(ln d)",
    0.05,
    0,
    printed=Printed(
        "at most d sqrt(ln d) (post), d sqrt(ln d/L) (pre), with probability 0.99 - delta - e/(0.9"
        " + e)",
        0.0,
    ),
)
def scale_in_width(draw: Draw, *, printed: bool) -> Trials:
    """The root mean square gradient over d at d = 64 and 256, 1 and 3 layers, 100 seeds, against
    theory's constant, which leaves no room for sqrt(ln d).

    Printed, with a constant of 1 and the paper's (e, delta) = (0.1, 0.125): the share of seeds
    beyond.
    """
    cases = []
    for name, width, layers in itertools.product(("post", "pre"), (64, 256), (1, 3)):
        squares = _one_token(name, width, layers, 100)[:, -1]
        if name == "post":
            printed_bound = math.log(width)
            divisor = 3
        else:
            printed_bound = math.log(width) / layers
            divisor = 2 + 3 * layers
        case = f"{name}, d = {width}, L = {layers}"
        if printed:
            beyond = float((squares > printed_bound).double().mean())
            allowed = 1 - 0.99 + 0.125 + 0.1
            cases.append(Trial(beyond - allowed, f"{case}: {beyond:.1%} beyond the bound"))
        else:
            expected = math.sqrt((1 - 2 / width) / divisor)
            cases.append(equal(squares.mean().sqrt(), expected, f"{case}: rms over d"))
    return cases


@statement(
    "xiong-definition-1",
    "Xiong, definition 1",
    "|Y|^2 of Y ~ N(0, I_d): P(|Y|^2 >= (1 + e) d) <= exp(-(1 - ln 2) d e^2/2), 0 < e <= 1,"
    " attained in the exponent",
    printed=Printed("P(|Y|^2 >= (1 + e) d) <= exp(-d e^2/8)"),
)
def concentration(draw: Draw, *, printed: bool) -> Trial:
    """The bound's exponent over that of the chi-square distribution's own tail; at e = 1, in one
    case of 4, they agree to 2 log(d)/d.
    """
    d = int(draw.log_uniform(0, 5))
    e = 1.0
    if draw.integer(4):
        e = draw.uniform(0.01, 1)
    constant = (1 - math.log(2)) / 2
    if printed:
        constant = 1 / 8
    exponent = d * e * e * constant
    return at_most(
        exponent, -float(stats.chi2.logsf((1 + e) * d, d)), f"d = {d}, e = {e:.3g}: exponents"
    )


@statement(
    "xiong-definition-1-two-sided",
    "ctrans, on Xiong, definition 1 and theorem 1",
    "|Z/EZ - 1| <= e with probability 1 - delta leaves Z >= 0.1 EZ with that probability, e <= 0.9",
    0.0,
    0.1,
    printed=Printed(
        "Z <= (1 + e) EZ with probability 1 - delta leaves Z >= 0.1 EZ with 1 - delta - e/(0.9"
        " + e)",
        share=0.05,
    ),
)
def two_sided(draw: Draw, *, printed: bool) -> Trial:
    """P(Z < 0.1 EZ) <= P(|Z/EZ - 1| > e) of random Z of five values, e up to 0.9. In half the cases
    Z is 0 or 1 and e = 0.9: both are P(Z = 0) as long as 1 <= 1.9 EZ.

    Printed: Z = 1/q with probability q, else 0. EZ = 1, and Z <= EZ with probability 1 - q, so that
    (e, delta) = (0.01, q) allow for q + 0.011, but P(Z = 0) = 1 - q.
    """
    q = draw.uniform(0.01, 0.2)
    if printed:
        return at_most(
            1 - q, q + 0.01 / 0.91, f"Z = 1/q with probability q = {q:.3g}: P(Z < 0.1 EZ)"
        )
    z = draw.unit(5) ** draw.choice((1, 10))
    p = draw.unit(5)
    p = p / p.sum()
    e = draw.uniform(0.01, 0.9)
    if draw.choice((True, False)):
        z = (torch.arange(5) > 0).to(z)
        e = 0.9
    low = z < 0.1 * (p @ z)
    far = (z / (p @ z) - 1).abs() > e
    return at_most(float(p[low].sum()), float(p[far].sum()), f"e = {e:.3g}: P(Z < 0.1 EZ)")
