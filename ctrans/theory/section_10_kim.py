"""Section 10: initial weights under Peri-LN and of any rule, gradients of the last layer (Kim)."""

from __future__ import annotations

import math

from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.dynamics.sublayer import Sublayer
from ctrans.measure.initialisation.over_seeds import (
    HiddenGrowth,
    Setting,
    interval,
)
from ctrans.measure.initialisation.theory import LastLayer, last_layer_bound
from ctrans.measure.walk import states_of
from ctrans.model.initialisation import INITIALISATIONS
from ctrans.theory.random_models import random_block, random_model
from ctrans.theory.section_10_xiong import SEEDS, gradient_slope_trial, growth_trials
from ctrans.theory.statement import Printed, Trial, Trials, at_most, equal, not_none, statement

SECTION = 10


@statement(
    "theorem-1-peri",
    "ctrans",
    "peri: the last layer's gradient falls like L^(-1/2), as under pre",
    0.0,
    0,
)
def peri_gradient(draw: Draw) -> Trial:
    """|s + 1/2| of |dL/dW_2| ~ D^s, D = 8 to 32 peri blocks."""
    return gradient_slope_trial("peri")


@statement(
    "kim-3.1",
    "Kim, proposition 3.1",
    "dt = 1: |dL/dW2| <= |h||dL/do| times 1 (pre), g sqrt(d)/|C(x + a)| (post), g sqrt(d)/|C a|"
    " (peri)",
    printed=Printed("the same with |a|, |x + a| under LayerNorm", share=0.05),
)
def last_layer(draw: Draw, *, printed: bool) -> Trial:
    """Bound |dL/dW_2| <= Kim's bound with LayerNorm's centring, at the last FFN of a random model
    of any placement and gradient.

    Printed: without it, for a nearly constant output of the last FFN under peri.
    """
    if printed:
        model = random_model(draw, "peri", norm="layernorm", spread=0, depth=1)
        sublayer = model.depth.sublayers[-1]
        offset = draw.uniform(10, 100)
        sublayer.field.down.bias.fill_(offset)
        x, pull = draw.normal(2, 1, 1, model.config.width)
        gradient = last_layer_bound(sublayer, 1.0, x, pull)
        case = f"peri, LayerNorm, a = {offset:.3g} + noise: |dL/dW_2|"
        return at_most(gradient.measured, gradient.printed, case)
    model, x = random_block(draw, draw.choice(sorted(PLACEMENTS)))
    last = model.depth.sublayers[-1]
    gradient = last_layer_bound(last, model.depth.dt, x, draw.normal(*x.shape))
    return at_most(gradient.measured, gradient.bound, "|dL/dW_2| of the last FFN")


@statement(
    "initial-variances",
    "Kim, section 4; Xiong; DeepNet; Emadi",
    "drawn weights have the deviations of 0.02, Xavier, He, LeCun, 10/d, 1/(10 d) and their rules"
    " by depth",
    0.0,
    0.05,
    as_printed=True,
)
def deviations(draw: Draw) -> Trials:
    """The standard deviation of drawn entries against its formula, within five standard errors."""
    name = draw.choice(INITIALISATIONS)
    model = random_model(draw, "pre", spread=0, initialisation=name, width=32, ffn_width=64)
    rule = INITIALISATIONS[name]
    cases = []
    for sublayer in model.depth.sublayers:
        for matrix in sublayer.field.matrices():
            weight = matrix.weight
            std = rule.gain(matrix.role, model.depth.blocks) * rule.std(
                weight.shape[1], weight.shape[0]
            )
            drawn = float(weight.square().mean().sqrt())
            if std:
                error = abs(drawn / std - 1) * math.sqrt(2 * weight.numel())
            else:
                error = float(weight.abs().max())
            case = f"{name}, {matrix.role}: {error:.1f} standard errors from {std:.3g}"
            cases.append(Trial(error - 5, case))
    return cases


def _with_growing_activations(
    draw: Draw, placement: str
) -> tuple[Sublayer, Tensor, Tensor, list[LastLayer]]:
    """The last FFN of a random model without biases, a state, a gradient of the next state, and the
    gradients of W_2 for W_1 grown by c = 1, 10^5 and 10^6, as which it is left.
    """
    model = random_model(draw, placement, depth=1, activation="relu", bias=False, spread=0, eps=0.0)
    sublayer = model.depth.sublayers[-1]
    x = draw.normal(2, 3, 8)
    pull = draw.normal(2, 3, 8)
    up = sublayer.field.up.weight
    first = up.clone()
    gradients = []
    for c in (1.0, 1e5, 1e6):
        up.copy_(c * first)
        gradients.append(last_layer_bound(sublayer, model.depth.dt, x, pull))
    return sublayer, x, pull, gradients


@statement(
    "kim-3.1-massive",
    "Kim, proposition 3.1",
    "as h grows to c h and a = W_2 h with it, |dL/dW_2| ~ c under pre, and ~ 1 under post and peri:"
    " to at most |h||dL/do| g sqrt(d)/|C a| (dt = 1; 0 under LayerNorm of width 2)",
    1e-3,
    0.25,
    printed=Printed(
        "under post it vanishes when a massive activation |h| occurs, by the factor |x + a|",
        0.0,
        0.02,
    ),
)
def massive_activations(draw: Draw, *, printed: bool) -> Trials:
    """The exponent of |dL/dW_2| between c = 10^5 and 10^6 at the last FFN, ReLU without biases, W_1
    grown by c and the last state's gradient fixed: |s - 1| under pre, |s| under post and peri.
    Under post the bound at 10^6 against sum_i |h_i||dL/do_i| g sqrt(d)/|C a_i|. Width 2 leaves no
    gradient under LayerNorm, whose Jacobian is 0 there.

    Printed: under post a tenth at most is left from c = 1 to 10^6.
    """
    if printed:
        *_, (at_1, _, at_a_million) = _with_growing_activations(draw, "post")
        return at_most(
            at_a_million.measured,
            at_1.measured / 10,
            "post: |dL/dW_2| at c = 10^6 against a tenth of that at 1",
        )
    cases = []
    for placement, exponent in (("pre", 1), ("post", 0), ("peri", 0)):
        sublayer, x, pull, gradients = _with_growing_activations(draw, placement)
        _, before, last = gradients
        if placement == "post":
            h = sublayer.field.pre_projection(x).norm(dim=-1)
            slopes = not_none(sublayer.state_norm).slope(sublayer.field(x))
            limit = (h * pull.norm(dim=-1) * slopes).sum()
            cases.append(equal(last.bound, limit, "post: the bound at c = 10^6, its limit"))
        slope = math.log10(last.measured / before.measured)
        cases.append(Trial(abs(slope - exponent), f"{placement}: |dL/dW_2| ~ c^{slope:.5f}"))
    return cases


@statement(
    "kim-variance",
    "ctrans, on Kim, sections 3 and 4.3",
    "peri, output, eps = 0: E|x_l|^2/d = 1 + 2 l dt^2 after l blocks, whatever the initial"
    " variance: pre has 1 + l f dt^2 to 1 + l (a + f) dt^2",
    0.0,
    0.03,
)
def peri_growth(draw: Draw) -> Trials:
    """E|x_l|^2/d after each of 4 blocks, gains 1, of a drawn initialisation and dt: how far 1 + 2 l
    dt^2 lies outside the interval over 16 seeds, all initialisations together.

    Each output norm adds a vector of length dt sqrt(d), at right angles in the mean, because the
    last matrix is as likely as its negative. With eps > 0 it is shorter.
    """
    placement = draw.choice(("peri", "output"))
    name = draw.choice(INITIALISATIONS)
    setting = Setting(initialisation=name)
    dt = draw.choice((0.3, 1.0))
    models = [(setting.model(placement, 4, seed), setting.inputs(seed)) for seed in range(SEEDS)]
    states = [states_of(Depth(list(model.depth.sublayers), dt), x0) for model, x0 in models]
    squares = [[float(x.square().mean()) for x in of_model[2::2]] for of_model in states]
    exact = [1.0 + 2 * block * dt**2 for block in range(1, 5)]
    # 100 intervals hold together: four blocks of any initialisation
    measured = [interval(of_block, 100) for of_block in zip(*squares, strict=True)]
    return growth_trials(
        HiddenGrowth("after the block", measured, exact, exact),
        f"{placement}, {name}, dt {dt}, E|x_l|^2/d",
    )
