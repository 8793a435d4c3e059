"""Section 6: bounds on the growth of hidden states in depth."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.dynamics.fields import Attention
from ctrans.dynamics.fields.projected_map import scale_linear
from ctrans.dynamics.norm import NORMS, RMSNorm
from ctrans.measure.forward.bounds import ForwardBounds, forward_bounds, printed_level
from ctrans.measure.forward.moments import moments
from ctrans.measure.forward.single_entries import data_variance, variance_over_inputs
from ctrans.measure.walk import states_of
from ctrans.model.gpt import GPT
from ctrans.theory.random_models import (
    describe_model,
    random_model,
    random_state,
    random_text,
    smooth_model,
)
from ctrans.theory.statement import Trial, Trials, at_most, not_none, statement

SECTION = 6

OUTPUT = ("peri", "output")


@statement(
    "norm-growth",
    "ctrans, on Kan, theorem 4",
    "behind any output norm states grow at most linearly in depth: |X_D| <= |X_0| + sum_k dt"
    " sup|N_k|, by that norm's own bound",
)
def growth_behind_norm(draw: Draw) -> Trial:
    """|X_D|_F <= |X_0|_F + sqrt(n) sum_k dt sup|N_k|, sup|N| the length of the farthest point of
    the output norm's image.
    """
    model = random_model(draw, draw.choice(OUTPUT), norm=draw.choice(sorted(NORMS)))
    x0 = draw.log_uniform(-1, 1) * model.embed(random_text(draw))
    tokens = x0.numel() // x0.shape[-1]
    width = x0.shape[-1]
    steps = zip(model.depth.sublayers, model.depth.lengths, strict=True)
    grown = sum(
        h * math.sqrt(tokens) * math.sqrt(width) * not_none(part.output_norm).level
        for part, h in steps
    )
    return at_most(
        model.depth(x0).norm(),
        x0.norm() + grown,
        f"|X_D| against |X_0| + sum of the images' bounds, {describe_model(model)}",
    )


def _walk(draw: Draw, *placements: str) -> tuple[GPT, list[Tensor], ForwardBounds]:
    """A model of one of the placements, its states by depth, and their bounds."""
    model = random_model(draw, draw.choice(placements), spread=draw.uniform(0, 1))
    states = states_of(model.depth, random_state(draw, model, batch=2))
    return model, states, forward_bounds(model.depth, states)


def _levels(model: GPT) -> tuple[float, float]:
    """sum_k (g_k + b_k) and g_max + b_max over the output norms."""
    norms = [not_none(part.output_norm) for part in model.depth.sublayers]
    return sum(norm.level for norm in norms), printed_level(norms)


@statement(
    "theorem-4-mean",
    "Kan, theorem 4, eq. 11",
    "MA(X_D) <= MA(X_0) + dt sum_k (g_k + b_k), and the same holds for |X_D|/sqrt(nd)",
    printed="MA(X_D) <= |X_0|/sqrt(nd) + 2 D dt (g_max + b_max)",
)
def mean(draw: Draw, *, printed: bool) -> Trials:
    """MA(X_0) + dt sum_k (g_k + b_k), and the same increments for the norm.

    Printed: MA(X_D) <= |X_0|/sqrt(N) + T (g_max + b_max), T = 2 D dt, N the entries of X, under
    peri or output.
    """
    model, states, _ = _walk(draw, *OUTPUT)
    x0 = states[0]
    start = moments(states[0])
    end = moments(states[-1])
    levels, level = _levels(model)
    case = f"MA(X_D), {describe_model(model)}"
    if printed:
        return at_most(
            end.mean_abs,
            float(x0.norm()) / math.sqrt(x0.numel()) + model.depth.times[-1] * level,
            case,
        )
    grown = model.config.dt * levels
    return [
        at_most(end.mean_abs, start.mean_abs + grown, case),
        at_most(end.rms, start.rms + grown, f"|X_D|/sqrt(nd), {describe_model(model)}"),
    ]


@statement(
    "theorem-4-variance",
    "Kan, theorem 4, eq. 12",
    "Var(X_D) <= (|X_0| + 2 D dt sqrt(nd)(g_max + b_max))^2/(nd - 1)",
    as_printed=True,
)
def variance_as_printed(draw: Draw) -> Trial:
    """Var(X_D) <= (|X_0| + T sqrt(N)(g_max + b_max))^2/(N - 1), T = 2 D dt, N the entries of X,
    under peri or output.
    """
    model, states, _ = _walk(draw, *OUTPUT)
    x0 = states[0]
    entries = states[0].numel()
    _, level = _levels(model)
    longest = float(x0.norm()) + model.depth.times[-1] * math.sqrt(entries) * level
    bound = longest**2 / (entries - 1)
    return at_most(moments(states[-1]).variance, bound, f"Var(X_D), {describe_model(model)}")


@statement(
    "theorem-4-attained",
    "ctrans",
    "a constant velocity of signs attains the sharper bound on the mean",
    1e-12,
    0.1,
)
def sharper_is_attained(draw: Draw) -> Trial:
    """A constant velocity of signs: each step adds dt to the size of each entry."""
    model = random_model(draw, "peri", spread=0, norm="rmsnorm", eps=0.0)
    for sublayer in model.depth.sublayers:
        sublayer.field.output_projection.weight.zero_()
        sublayer.field.output_projection.bias.fill_(1.0)
    x0 = torch.full((1, 1, model.config.width), draw.uniform(0.1, 2), dtype=torch.float64)
    bound = forward_bounds(model.depth, [x0] * (len(model.depth.times))).mean_abs[-1]
    size = moments(model.depth(x0)).mean_abs
    return Trial(
        abs(size / bound - 1), f"constant velocity: MA(X_D) = {size:.6g}, bound {bound:.6g}"
    )


@statement(
    "theorem-5",
    "Kan, theorem 5",
    "an entry's variance over data is at most max over entries of E(|x_0| + growth of a token)^2,"
    " below the printed bound",
    share=0.5,
    printed=(
        "an entry's variance over data is at most the mean of (|X_0| + 2 D dt sqrt(nd)(g_max +"
        " b_max))^2"
    ),
)
def entries_over_data(draw: Draw, *, printed: bool) -> Trials:
    """max over entries of X_D of Var over 6 inputs <= max over entries of E(|x_0| + growth)^2 <=
    theorem 5's printed bound.

    Printed: the first against the last.
    """
    model = random_model(draw, draw.choice(OUTPUT))
    states = states_of(model.depth, random_state(draw, model, batch=6))
    variance = data_variance(
        model.depth,
        states[0],
        list(map(variance_over_inputs, states)),
        forward_bounds(model.depth, states),
    )
    printed_bound = not_none(variance.printed_bound)[-1]
    sharper = variance.bound[-1]
    case = f"Var over data, {describe_model(model)}"
    if printed:
        return at_most(variance.largest[-1], printed_bound, case)
    return [
        at_most(variance.largest[-1], sharper, case),
        at_most(sharper, printed_bound, "the sharper bound against the printed one"),
    ]


@statement(
    "theorem-3",
    "Kan, theorem 3, eq. 82",
    "under pre MA(X_D) <= (1 + C)^D |X_0|/sqrt(nd), with D_i = sigma(x_i) in C, which is"
    " |x_i|/sqrt(d) for RMSNorm",
    printed="the same with D_i = |x_i|",
)
def theorem_3(draw: Draw, *, printed: bool) -> Trials:
    """D_i = |x_i|/sqrt(d), for one token under attention with W V = I, and for models.

    Printed: the factor 1 + dt |W V| max|gamma|/D of an attention sublayer (eq. 82) with D_i =
    |x_i|, for that token.
    """
    width = 16
    dt = draw.uniform(0.1, 1)
    attention = Attention(width, 1, bias=False).double()
    norm = RMSNorm(width, 0.0).double()
    for part in (attention.qkv.weight[2 * width :], attention.out.weight):
        part.copy_(torch.eye(width))
    x = draw.log_uniform(-1, 0.5) * draw.normal(1, width)
    after = (x + dt * attention(norm(x))).norm()
    start = float(x.norm())
    case = f"one token, d = {width}, W V = I"
    if printed:
        return at_most(after, start * (1 + dt / start), f"{case}, dt = {dt:.2g}: |X|")
    model, states, bounds = _walk(draw, "pre")
    return [
        at_most(after, start * (1 + dt * math.sqrt(width) / start), f"{case}: |X|"),
        at_most(
            moments(states[-1]).mean_abs,
            not_none(bounds.seed_mean_abs)[-1],
            f"MA(X_D), {describe_model(model)}",
        ),
    ]


@statement(
    "pre-bound",
    "ctrans",
    "under pre |X_{k+1}| <= |X_k| + dt |f_k(N X_k)|, the last term bounded by weights, gains and"
    " offsets alone",
)
def pre_bound(draw: Draw) -> Trials:
    """|X_k|/sqrt(nd) <= RMS bound of `forward_bounds` at every k >= 1, for a random model under
    pre.
    """
    model, states, bounds = _walk(draw, "pre")
    case = f"|X_k|/sqrt(nd), {describe_model(model)}"
    return [
        at_most(moments(x).rms, bound, case)
        for x, bound in zip(states[1:], bounds.rms[1:], strict=True)
    ]


@statement(
    "pre-linear",
    "ctrans, on Kan, theorem 3",
    "under pre with bounded weights states grow at most linearly in depth",
    0.0,
    0,
    printed="theorem 3's exponential is the rate of growth (to half of it)",
)
def linear_growth(draw: Draw, *, printed: bool) -> Trials:
    """From 16 to 32 blocks under pre the bound on |X_D| grows by a factor of 1.8 to 2.2, |X_D|
    itself by at most 2.2.

    Printed: O(e^D): with weights of one size, doubling the depth would square the growth.
    """
    x = draw.normal(2, 5, 16)
    measured = []
    sharp = []
    claimed = []
    for blocks in (8, 16, 32):
        model = smooth_model(draw, blocks)
        states = states_of(model.depth, x)
        bounds = forward_bounds(model.depth, states)
        measured.append(moments(states[-1]).rms)
        sharp.append(bounds.rms[-1])
        claimed.append(not_none(bounds.seed_mean_abs)[-1])
    if printed:
        rate = math.log(measured[2] / measured[1]) / 16
        most = math.log(claimed[2] / claimed[1]) / 16
        return at_most(
            0.5 * most,
            rate,
            f"theorem 3 allows e^({most:.2g} D), states grow like e^({rate:.2g} D): half its rate",
        )
    sizes = ", ".join(f"{size:.3g}" for size in measured)
    bounds_of_sizes = ", ".join(f"{bound:.3g}" for bound in sharp)
    case = f"8, 16, 32 blocks: |X_D| {sizes}, bound {bounds_of_sizes}"
    return [
        Trial(abs(sharp[2] / sharp[1] - 2) - 0.2, f"{case}: doubling the depth doubles the bound"),
        Trial(measured[2] / measured[1] / 2 - 1.1, case),
    ]


@statement(
    "growing-weights",
    "ctrans",
    "exponential growth in depth needs weight norms that grow with depth: last maps ~ 1.4^k give"
    " states ~ 1.4^k",
    0.15,
    0,
)
def growing_weights(draw: Draw) -> Trial:
    """A model whose last maps grow by a factor of 1.4 per sublayer."""
    model = smooth_model(draw, 16)
    for k, sublayer in enumerate(model.depth.sublayers):
        scale_linear(sublayer.field.output_projection, 1.4**k)
    sizes = [math.log(moments(x).rms) for x in states_of(model.depth, draw.normal(2, 5, 16))[1:]]
    rate = float(np.polyfit(np.arange(len(sizes) - 6), sizes[6:], 1)[0])
    return Trial(
        abs(rate / math.log(1.4) - 1),
        f"weights ~ 1.4^k: the state grows like e^({rate:.3g} k), log 1.4 = {math.log(1.4):.3g}",
    )
