"""Section 10: what holds at initialisation (Xiong; Kim). Expectations are tested by confidence intervals over seeds."""

from __future__ import annotations

import dataclasses
import math

import torch

from ctrans.model.initialisation import INITIALISATIONS
from ctrans.stability.initialisation.theory import SLOPES, last_layer_bound
from ctrans.verify.attention_cases import BOUND_CASES
from ctrans.verify.draws import between, model, noise, one_of
from ctrans.verify.over_seeds import HiddenGrowth, Interval, Setting, gradient_scaling, hidden_growth
from ctrans.verify.statement import Check, Draw, Statement, Trial, as_printed, at_most, worst

SMALL = Setting(width=32, tokens=6)
SEEDS = 16
DEPTHS = (8, 16, 32)


def outside(found: Interval, low: float, high: float) -> float:
    """By how much an interval lies outside a range, relative to the range's upper end; negative inside."""
    return max(low - found.high, found.low - high) / high


def _growth_case(growth: HiddenGrowth, words: str) -> Trial:
    places = zip(growth.measured, growth.low, growth.high, strict=True)
    return worst(
        *(
            Trial(outside(m, low, high), f"{words}: {m.mean:.3f} in [{m.low:.3f}, {m.high:.3f}], theory [{low:.3g}, {high:.3g}]")
            for m, low, high in places
        )
    )


def relu_half(generator: torch.Generator) -> Trial:
    """Xiong, lemma 1: E|relu(x)|^2 = sigma^2 d/2 of x ~ N(0, sigma^2), within five standard errors of 100,000 draws."""
    sigma = between(generator, 0.1, 10)
    squares = (sigma * noise(generator, 100_000)).relu().square()
    error = abs(float(squares.mean()) - sigma**2 / 2) / float(squares.std()) * math.sqrt(len(squares))
    return Trial(
        error - 5,
        f"sigma = {sigma:.3g}: mean {float(squares.mean()):.4g} against {sigma**2 / 2:.4g}, {error:.1f} standard errors",
    )


def pre_growth(generator: torch.Generator) -> Trial:
    """E|x_l|^2/d in [1 + l/2, 1 + 3l/2] after each of 6 pre blocks: how far the interval over 16 seeds lies outside."""
    (growth,) = hidden_growth("pre", 6, SEEDS, SMALL)
    return _growth_case(growth, "pre, E|x_l|^2/d")


def post_growth(generator: torch.Generator) -> Trial:
    """E|x|^2/d = 3/2 before the FFN's norm, in [1, 2] before the attention's, in each of 6 post blocks, by intervals over 16 seeds."""
    attention, ffn = hidden_growth("post", 6, SEEDS, SMALL)
    return worst(_growth_case(ffn, f"post, {ffn.where}"), _growth_case(attention, f"post, {attention.where}"))


def post_growth_everywhere(generator: torch.Generator) -> Trial:
    """3/2 before the attention's norm too."""
    attention, _ = hidden_growth("post", 6, SEEDS, SMALL)
    claimed = dataclasses.replace(attention, low=[1.5] * 6, high=[1.5] * 6)
    return _growth_case(claimed, f"post, {attention.where}")


def every_initialisation(generator: torch.Generator) -> Trial:
    """E|x_l|^2/d in [1 + l f, 1 + l (a + f)] after 3 pre blocks of a drawn initialisation, two heads, d_ff = 2 d, 16 seeds."""
    name = one_of(generator, INITIALISATIONS)
    (growth,) = hidden_growth("pre", 3, SEEDS, dataclasses.replace(SMALL, initialisation=name, heads=2, ffn_width=64))
    return _growth_case(growth, f"pre, {name}, E|x_l|^2/d")


def xavier_everywhere(generator: torch.Generator) -> Trial:
    """[1 + l/2, 1 + 3l/2] of an initialisation that is not Xavier's."""
    (growth,) = hidden_growth("pre", 3, SEEDS, dataclasses.replace(SMALL, initialisation="he"))
    claimed = dataclasses.replace(growth, low=[1 + k / 2 for k in (1, 2, 3)], high=[1 + 3 * k / 2 for k in (1, 2, 3)])
    return _growth_case(claimed, "pre, He, E|x_l|^2/d")


def gradient_slope(placement: str) -> Draw:
    """|dL/dW_2| of the last FFN against depth: the mean slope over seeds, within 0.1 of theory's."""

    def draw(generator: torch.Generator) -> Trial:
        with torch.enable_grad():
            found = gradient_scaling(placement, DEPTHS, 10, Setting(width=48, tokens=4)).slope
        expected = SLOPES[placement]
        distance = abs(found.mean - expected) - 0.1
        return Trial(distance, f"{placement}: slope {found.mean:.3f} in [{found.low:.3f}, {found.high:.3f}], theory {expected}")

    return draw


def last_layer(generator: torch.Generator) -> Trial:
    """|dL/dW_2| <= Kim's bound with LayerNorm's centring, at the last FFN of a random model of any placement and gradient."""
    measured, bound = BOUND_CASES["last layer"](generator)
    return at_most(measured, bound, "|dL/dW_2| of the last FFN")


def last_layer_as_printed(generator: torch.Generator) -> Trial:
    """A nearly constant output of the last FFN, under peri with LayerNorm."""
    made = model(generator, "peri", norm="layernorm", spread=0, depth=1)
    sublayer, offset = made.depth.sublayers[-1], between(generator, 10, 100)
    sublayer.field.down.bias.fill_(offset)
    x, pull = noise(generator, 2, 1, 1, made.config.width)
    found = last_layer_bound(sublayer, 1.0, x, pull)
    return at_most(found.measured, found.printed, f"peri, LayerNorm, a = {offset:.3g} + noise: |dL/dW_2|")


def deviations(generator: torch.Generator) -> Trial:
    """The standard deviation of drawn entries against its formula, within five standard errors."""
    name = one_of(generator, INITIALISATIONS)
    made = model(generator, "pre", spread=0, initialisation=name, width=32, ffn_width=64)
    rule = INITIALISATIONS[name]
    cases = []
    for sublayer in made.depth.sublayers:
        for matrix in sublayer.field.matrices():
            weight = matrix.weight
            std = rule.gain(matrix.role, made.depth.blocks) * rule.std(weight.shape[1], weight.shape[0])
            error = (
                abs(float(weight.square().mean().sqrt()) / std - 1) * math.sqrt(2 * weight.numel())
                if std
                else float(weight.abs().max())
            )
            cases.append(Trial(error - 5, f"{name}, {matrix.role}: {error:.1f} standard errors from {std:.3g}"))
    return worst(*cases)


STATEMENTS: tuple[Statement, ...] = (
    as_printed(
        "xiong-lemma-1", 10, "Xiong, lemma 1", "E|relu(x)|^2 = sigma^2 d/2 for x ~ N(0, sigma^2 I)", Check(relu_half, 0.0, 0.02)
    ),
    as_printed(
        "xiong-lemma-2-pre",
        10,
        "Xiong, lemma 2",
        "pre, W_Q = W_K = 0, Xavier, ReLU, d_ff = d: E|x_l|^2/d in [1 + l/2, 1 + 3l/2]",
        Check(pre_growth, 0.0, 0),
    ),
    Statement(
        "xiong-lemma-2-post",
        10,
        "ctrans, on Xiong, lemma 2",
        "post: E|x|^2/d = 3/2 before the FFN's norm, and in [1, 2] before the attention's",
        Check(post_growth, 0.0, 0),
        Check(post_growth_everywhere, 0.0, 0),
        "post: 3/2 before each norm",
    ),
    Statement(
        "xiong-lemma-2-any",
        10,
        "Xiong, lemma 2",
        "for every initialisation: [1 + l f, 1 + l (a + f)], a = d^2 s_V^2 s_O^2, f = d d_ff s_1^2 s_2^2/2",
        Check(every_initialisation, 0.0, 0.03),
        Check(xavier_everywhere, 0.0, 0),
        "[1 + l/2, 1 + 3l/2] whatever the initialisation",
    ),
    as_printed(
        "xiong-theorem-1-post",
        10,
        "Xiong, theorem 1",
        "post: the last layer's gradient does not depend on the depth",
        Check(gradient_slope("post"), 0.0, 0),
    ),
    as_printed(
        "xiong-theorem-1-pre",
        10,
        "Xiong, theorem 1",
        "pre: the last layer's gradient falls like L^(-1/2)",
        Check(gradient_slope("pre"), 0.0, 0),
    ),
    Statement(
        "theorem-1-peri",
        10,
        "ctrans",
        "peri: the last layer's gradient falls like L^(-1/2), as under pre",
        Check(gradient_slope("peri"), 0.0, 0),
    ),
    Statement(
        "kim-3.1",
        10,
        "Kim, proposition 3.1",
        "|dL/dW2| <= |h||dL/do| times 1 (pre), g sqrt(d)/|C(x + a)| (post), g sqrt(d)/|C a| (peri)",
        Check(last_layer),
        Check(last_layer_as_printed, share=0.05),
        "the same with |a|, |x + a| under LayerNorm",
    ),
    as_printed(
        "initial-variances",
        10,
        "Kim, section 4; Xiong; DeepNet; Emadi",
        "0.02, Xavier, He, LeCun, 10/d, 1/(10 d) and their rules by depth are what is drawn",
        Check(deviations, 0.0, 0.05),
    ),
)
