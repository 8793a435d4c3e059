"""Section 6: how large hidden states can become in depth."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ctrans.fields import Attention, spectral_norm
from ctrans.fields.scale import scale_linear
from ctrans.model.gpt import GPT
from ctrans.norm import RMSNorm
from ctrans.stability.forward.bounds import ForwardBounds, forward_bounds
from ctrans.stability.forward.moments import MomentsByDepth, moments
from ctrans.stability.forward.single_entries import DataVariance, data_variance
from ctrans.verify.draws import between, described, model, noise, one_of, size, state
from ctrans.verify.statement import Check, Statement, Trial, as_printed, at_most, worst
from ctrans.walk import states_of, walk_depth

OUTPUT = ("peri", "output")


def _walk(generator: torch.Generator, *placements: str) -> tuple[GPT, list[Tensor], ForwardBounds]:
    """A model of one of the placements, its states by depth, and their bounds."""
    made = model(generator, one_of(generator, placements), spread=between(generator, 0, 1))
    states = states_of(made.depth, state(generator, made, batch=2))
    return made, states, forward_bounds(made.depth, states)


def _level(made: GPT) -> float:
    """g_max + b_max over the output norms."""
    norms = [s.output_norm for s in made.depth.sublayers if s.output_norm is not None]
    return max(float(n.gamma.abs().max()) for n in norms) + max(float(n.beta.abs().max()) for n in norms)


def mean_as_printed(generator: torch.Generator) -> Trial:
    """MA(X_D) <= |X_0|/sqrt(N) + T (g_max + b_max), T = 2 D dt, N the entries of X, under peri or output."""
    made, states, _ = _walk(generator, *OUTPUT)
    x0 = states[0]
    bound = float(x0.norm()) / math.sqrt(x0.numel()) + made.depth.times[-1] * _level(made)
    return at_most(moments(states[-1]).mean_abs, bound, f"MA(X_D), {described(made)}")


def variance_as_printed(generator: torch.Generator) -> Trial:
    """Var(X_D) <= (|X_0| + T sqrt(N)(g_max + b_max))^2/(N - 1), T = 2 D dt, N the entries of X, under peri or output."""
    made, states, _ = _walk(generator, *OUTPUT)
    x0, entries = states[0], states[0].numel()
    bound = (float(x0.norm()) + made.depth.times[-1] * math.sqrt(entries) * _level(made)) ** 2 / (entries - 1)
    return at_most(moments(states[-1]).variance, bound, f"Var(X_D), {described(made)}")


def sharper(generator: torch.Generator) -> Trial:
    """MA(X_0) + dt sum_k (g_k + b_k), and the same increments for the norm."""
    made, states, _ = _walk(generator, *OUTPUT)
    levels = [
        float(s.output_norm.gamma.abs().max() + s.output_norm.beta.abs().max())
        for s in made.depth.sublayers
        if s.output_norm is not None
    ]
    start, end, grown = moments(states[0]), moments(states[-1]), made.config.dt * sum(levels)
    return worst(
        at_most(end.mean_abs, start.mean_abs + grown, f"MA(X_D), {described(made)}"),
        at_most(end.rms, start.rms + grown, f"|X_D|/sqrt(nd), {described(made)}"),
    )


def sharper_is_attained(generator: torch.Generator) -> Trial:
    """A constant velocity of signs: every step adds dt to every entry."""
    made = model(generator, "peri", spread=0, norm="rmsnorm", eps=0.0)
    for sublayer in made.depth.sublayers:
        sublayer.field.output_projection.weight.zero_()
        sublayer.field.output_projection.bias.fill_(1.0)
    x0 = torch.full((1, 1, made.config.width), between(generator, 0.1, 2), dtype=torch.float64)
    bound = forward_bounds(made.depth, [x0] * (len(made.depth.times))).mean_abs[-1]
    found = moments(made.depth(x0)).mean_abs
    return Trial(abs(found / bound - 1), f"constant velocity: MA(X_D) = {found:.6g}, bound {bound:.6g}")


def entries_over_data(generator: torch.Generator) -> Trial:
    """Theorem 5 as printed, and the ratio that makes it loose."""
    made, found = _data(generator)
    assert found.printed_bound is not None, "behind output norms the theorem speaks"
    return at_most(found.largest[-1], found.printed_bound[-1], f"Var over data, {described(made)}")


def entries_over_data_sharper(generator: torch.Generator) -> Trial:
    """max over entries of X_D of Var over 6 inputs <= max over entries of E(|x_0| + growth)^2 <= theorem 5's printed bound."""
    made, found = _data(generator)
    assert found.printed_bound is not None, "behind output norms the theorem speaks"
    return worst(
        at_most(found.largest[-1], found.bound[-1], f"Var over data, {described(made)}"),
        at_most(found.bound[-1], found.printed_bound[-1], "the sharper bound against the printed one"),
    )


def _data(generator: torch.Generator) -> tuple[GPT, DataVariance]:
    made = model(generator, one_of(generator, OUTPUT))
    return made, data_variance(made.depth, states_of(made.depth, state(generator, made, batch=6)))


def _identity_attention(generator: torch.Generator) -> tuple[float, float, float, float]:
    """|X + dt W V N(X)| for one token, W V = I: its size, |X|, dt and the width."""
    width, dt = 16, between(generator, 0.1, 1)
    attention, chosen = Attention(width, 1, bias=False).double(), RMSNorm(width, 0.0).double()
    for part in (attention.qkv.weight[2 * width :], attention.out.weight):
        part.copy_(torch.eye(width))
    x = size(generator, -1, 0.5) * noise(generator, 1, width)
    return float((x + dt * attention(chosen(x))).norm()), float(x.norm()), dt, width


def theorem_3_as_printed(generator: torch.Generator) -> Trial:
    """D_i = |x_i|: the factor 1 + dt |W V| max|gamma|/D for an attention sublayer (eq. 82)."""
    after, start, dt, width = _identity_attention(generator)
    return at_most(after, start * (1 + dt / start), f"one token, d = {width}, W V = I, dt = {dt:.2g}: |X|")


def theorem_3(generator: torch.Generator) -> Trial:
    """D_i = |x_i|/sqrt(d), for that example and for models."""
    after, start, dt, width = _identity_attention(generator)
    made, states, bounds = _walk(generator, "pre")
    assert bounds.seed_mean_abs is not None, "under pre the theorem speaks"
    return worst(
        at_most(after, start * (1 + dt * math.sqrt(width) / start), f"one token, d = {width}, W V = I: |X|"),
        at_most(moments(states[-1]).mean_abs, bounds.seed_mean_abs[-1], f"MA(X_D), {described(made)}"),
    )


def pre_bound(generator: torch.Generator) -> Trial:
    """|X_k|/sqrt(nd) <= RMS bound of `forward_bounds` at every k >= 1, for a random model under pre."""
    made, states, bounds = _walk(generator, "pre")
    return worst(
        *(
            at_most(moments(x).rms, bound, f"|X_k|/sqrt(nd), {described(made)}")
            for x, bound in list(zip(states, bounds.rms, strict=True))[1:]
        )
    )


def _by_depth(generator: torch.Generator) -> tuple[list[float], list[float], list[float]]:
    """RMS of X_D, its sharper bound, and theorem 3's, for 8, 16 and 32 blocks."""
    rows = []
    x = noise(generator, 2, 5, 16)
    for blocks in (8, 16, 32):
        made = model(generator, "pre", spread=0, depth=blocks, width=16, dt=1.0, norm="layernorm", activation="gelu")
        states = states_of(made.depth, x)
        bounds = forward_bounds(made.depth, states)
        assert bounds.seed_mean_abs is not None, "under pre the theorem speaks"
        rows.append((moments(states[-1]).rms, bounds.rms[-1], bounds.seed_mean_abs[-1]))
    measured, sharp, printed = (list(column) for column in zip(*rows, strict=True))
    return measured, sharp, printed


def linear_growth(generator: torch.Generator) -> Trial:
    """From 16 to 32 blocks under pre the bound on |X_D| grows by a factor of 1.8 to 2.2, |X_D| itself by at most 2.2."""
    measured, sharp, _ = _by_depth(generator)
    words = f"8, 16, 32 blocks: |X_D| {', '.join(f'{m:.3g}' for m in measured)}, bound {', '.join(f'{s:.3g}' for s in sharp)}"
    return worst(
        Trial(abs(sharp[2] / sharp[1] - 2) - 0.2, f"{words}: doubling the depth doubles the bound"),
        Trial(measured[2] / measured[1] / 2 - 1.1, words),
    )


def exponential_growth(generator: torch.Generator) -> Trial:
    """O(e^D): with weights of one size, doubling the depth would square the growth."""
    measured, _, printed = _by_depth(generator)
    rate, claimed = (math.log(v[2] / v[1]) / 16 for v in (measured, printed))
    return at_most(0.5 * claimed, rate, f"theorem 3 allows e^({claimed:.2g} D), states grow like e^({rate:.2g} D): half its rate")


def growing_weights(generator: torch.Generator) -> Trial:
    """Last maps that grow by 1.4 a sublayer."""
    made = model(generator, "pre", spread=0, depth=16, width=16, dt=1.0, norm="layernorm", activation="gelu")
    for k, sublayer in enumerate(made.depth.sublayers):
        scale_linear(sublayer.field.output_projection, 1.4**k)
    by_depth = walk_depth(made.depth, noise(generator, 2, 5, 16), [MomentsByDepth()])[0]
    sizes = [math.log(each.rms) for each in by_depth[1:]]
    rate = float(np.polyfit(np.arange(len(sizes) - 6), sizes[6:], 1)[0])
    return Trial(
        abs(rate / math.log(1.4) - 1), f"weights ~ 1.4^k: the state grows like e^({rate:.3g} k), log 1.4 = {math.log(1.4):.3g}"
    )


def _attention(generator: torch.Generator) -> tuple[Attention, Tensor]:
    attention = Attention(6, 2, bias=False, causal=bool(one_of(generator, (0, 1)))).double().requires_grad_(False)
    for parameter in attention.parameters():
        parameter.copy_(noise(generator, *parameter.shape))
    return attention, size(generator, -1, 1) * noise(generator, one_of(generator, (1, 3, 8)), 6)


def attention_with_root(generator: torch.Generator) -> Trial:
    """Eq. 81: |f(X)| <= sqrt(n) sum_h |W_h V_h| |X|."""
    attention, x = _attention(generator)
    return at_most(attention(x).norm(), math.sqrt(len(x)) * attention.bound().gain * float(x.norm()), f"|f(X)|, {len(x)} tokens")


def attention_rows(generator: torch.Generator) -> Trial:
    """|f(X)_i| <= sum_h |W_h V_h| max_j |x_j|, attained by equal tokens for one head."""
    attention, x = _attention(generator)
    longest = float(x.norm(dim=-1).max())
    bounded = at_most(attention(x).norm(dim=-1).max(), attention.bound().gain * longest, f"max |f(X)_i|, {len(x)} tokens")
    single = Attention(6, 1, bias=False, causal=False).double()
    for parameter in single.parameters():
        parameter.copy_(noise(generator, *parameter.shape))
    top = torch.linalg.svd(single.out.weight @ single.qkv.weight.chunk(3)[2]).Vh[0].repeat(len(x), 1)
    attained = abs(float(single(top).norm() / top.norm()) / single.bound().gain - 1)
    return worst(bounded, Trial(attained, f"{len(x)} equal tokens, one head: the gain misses its bound by {attained:.1g}"))


def feed_forward(generator: torch.Generator) -> Trial:
    """|f(x)| <= |W_2||W_1||x| without biases, with them their terms."""
    made = model(generator, "none", bias=bool(one_of(generator, (0, 1))))
    ffn = made.depth.sublayers[1].field
    x = size(generator, -2, 2) * noise(generator, 4, made.config.width)
    outer, inner = spectral_norm(ffn.down.weight), spectral_norm(ffn.up.weight)
    offsets = [0.0 if b is None else float(b.norm()) for b in (ffn.up.bias, ffn.down.bias)]
    bounds = outer * (inner * x.norm(dim=-1) + offsets[0]) + offsets[1]
    return at_most((ffn(x).norm(dim=-1) / bounds).max(), 1.0, f"|f(x)| over its bound, {ffn.activation}")


STATEMENTS: tuple[Statement, ...] = (
    Statement(
        "theorem-4-mean",
        6,
        "Kan, theorem 4, eq. 11",
        "MA(X_D) <= MA(X_0) + dt sum_k (g_k + b_k), and |X_D|/sqrt(nd) likewise",
        Check(sharper),
        Check(mean_as_printed),
        "MA(X_D) <= |X_0|/sqrt(nd) + 2 D dt (g_max + b_max)",
    ),
    as_printed(
        "theorem-4-variance",
        6,
        "Kan, theorem 4, eq. 12",
        "Var(X_D) <= (|X_0| + 2 D dt sqrt(nd)(g_max + b_max))^2/(nd - 1)",
        Check(variance_as_printed),
    ),
    Statement(
        "theorem-4-attained",
        6,
        "ctrans",
        "a constant velocity of signs attains the sharper bound on the mean",
        Check(sharper_is_attained, 1e-12, 0.1),
    ),
    Statement(
        "theorem-5",
        6,
        "Kan, theorem 5",
        "an entry's variance over data is at most max over entries of E(|x_0| + growth of a token)^2, below the printed bound",
        Check(entries_over_data_sharper, share=0.5),
        Check(entries_over_data, share=0.5),
        "an entry's variance over data is at most the mean of (|X_0| + 2 D dt sqrt(nd)(g_max + b_max))^2",
    ),
    Statement(
        "theorem-3",
        6,
        "Kan, theorem 3, eq. 82",
        "under pre MA(X_D) <= (1 + C)^D |X_0|/sqrt(nd), with D_i = sigma(x_i) in C, which is |x_i|/sqrt(d) for RMSNorm",
        Check(theorem_3),
        Check(theorem_3_as_printed),
        "the same with D_i = |x_i|",
    ),
    Statement(
        "pre-bound",
        6,
        "ctrans",
        "under pre |X_{k+1}| <= |X_k| + dt |f_k(N X_k)|, the last term bounded by weights, gains and offsets alone",
        Check(pre_bound),
    ),
    Statement(
        "pre-linear",
        6,
        "ctrans, on Kan, theorem 3",
        "under pre with bounded weights states grow at most linearly in depth",
        Check(linear_growth, 0.0, 0),
        Check(exponential_growth, 0.0, 0),
        "theorem 3's exponential is the rate of growth (to half of it)",
    ),
    Statement(
        "growing-weights",
        6,
        "ctrans",
        "exponential growth in depth needs weight norms that grow with depth: last maps ~ 1.4^k give states ~ 1.4^k",
        Check(growing_weights, 0.15, 0),
    ),
    Statement(
        "eq-81",
        6,
        "Kan, eq. 81",
        "attention: |f(X)_i| <= sum_h |W_h V_h| max_j |x_j|, whatever the number of tokens; attained",
        Check(attention_rows),
        Check(attention_with_root),
        "|f(X)| <= sqrt(n) sum_h |W_h V_h| |X|",
    ),
    Statement(
        "ffn-bound",
        6,
        "ctrans, on Kan, appendix G",
        "FFN with abs(phi(z)) <= abs(z): |f(x)| <= |W_2|(|W_1||x| + |b_1|) + |b_2|",
        Check(feed_forward),
    ),
)
