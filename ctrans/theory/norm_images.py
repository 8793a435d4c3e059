"""Section 4: the support function of each norm in NORMS, and H behind it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ctrans.base.draw import Draw
from ctrans.control import GainDecay
from ctrans.control.ascent import ascend
from ctrans.control.certificate import certify
from ctrans.control.gains import has_offset
from ctrans.control.sets_by_norm import image_of
from ctrans.dynamics.norm import NORMS, Norm, SquashNorm
from ctrans.theory.random_norms import EPSILONS, SQUASHING, any_norm, norm_words
from ctrans.theory.statement import Trial, Trials, at_most, equal, holds_if, known, statement

SECTION = 4

DECAYING = ["derf", "dyt", "group_rmsnorm", "rmsnorm", "scalenorm"]
"""Norms with gains whose decay has one maximum. LayerNorm has local ones, see `gain-decay`."""
IMPROVED, STILL = 20_000, 1e-7
"""The largest number of steps that improve gains, and the change below which they stop. Convergence
is slow if a best gain is nearly 0.
"""


@statement(
    "norm-supports",
    "ctrans, on Kan, eq. 99",
    "no input of a norm exceeds its support function, for gains of either sign, any eps, and"
    " ascents",
)
def support_is_a_bound(draw: Draw) -> Trial:
    """<p, N(x)> at 500 inputs of sizes 1e-3 to 1e3, and at the ends of ascents from 4 of them,
    against sup <p, z>.
    """
    norm = any_norm(draw, eps=draw.choice(EPSILONS))
    p = draw.normal(norm.width)
    x = torch.logspace(-3, 3, 500, dtype=torch.float64).unsqueeze(-1) * draw.normal(500, norm.width)
    climbed = ascend(lambda z: norm(z) @ p, x[::125], (-1,)).best
    found = torch.cat([norm(x) @ p, climbed]).max() - p @ norm.beta
    return at_most(
        found, norm.support(p) - p @ norm.beta, f"best <p, N(x) - beta>, {norm_words(norm)}"
    )


@statement(
    "norm-closed-forms",
    "ctrans, on Kan, eq. 99",
    "sqrt(d)|C(gamma*p)|, of groups the sum of theirs, of a box sum_i abs(gamma_i p_i), of a ball c"
    " sqrt(d)|p|; each plus <p, beta>",
    1e-12,
)
def closed_forms(draw: Draw) -> Trial:
    """sup <p, z> against the formula of each norm."""
    norm = any_norm(draw)
    p = draw.normal(norm.width)
    d = norm.width
    q = norm.gamma * p
    drift = p @ norm.beta
    parts = q.split(q.shape[0] // getattr(norm, "groups", 1))
    forms: dict[str, Callable[[], Tensor]] = {
        "ellipsoid": lambda: math.sqrt(d) * q.norm() + drift,
        "slice": lambda: math.sqrt(d) * (q - q.mean()).norm() + drift,
        "ellipsoids": (
            lambda: torch.stack([math.sqrt(len(part)) * part.norm() for part in parts]).sum()
        ),
        "box": lambda: q.abs().sum() + drift,
        "ball": lambda: norm.gamma[0] * math.sqrt(d) * p.norm(),
    }
    return equal(norm.support(p), forms[norm.image](), f"support, {norm_words(norm)}")


@statement(
    "norm-maximisers",
    "ctrans, on Kan, eq. 100",
    "each norm's maximiser is on the closure of its image and attains its support",
    1e-9,
)
def maximiser_has_it(draw: Draw) -> Trials:
    """<p, z*> = sup <p, z> for the maximiser z*, and the residual of z* is 0."""
    norm = any_norm(draw)
    p = draw.normal(5, norm.width)
    best = norm.maximizer(p)
    value = equal(
        (p * best).sum(-1), norm.support(p), f"<p, z*> against the support, {norm_words(norm)}"
    )
    return [
        value,
        Trial(float(norm.constraint_violation(best).max()), f"residual of z*, {norm_words(norm)}"),
    ]


@statement(
    "norm-approach",
    "ctrans",
    "inputs within r approach the support at each norm's rate: eps d/(2 r^2) of it, 2 exp(-2 alpha "
    "r/sqrt(d)) under DyT, 0 clipped",
    1e-9,
)
def approached(draw: Draw) -> Trials:
    """sup <p, z> less the best <p, N(x)> within |x - c| <= r, by projected ascent, r from 1/10 to
    30, against the stated rate.
    """
    norm = any_norm(draw, eps=draw.choice(EPSILONS))
    p = draw.normal(norm.width)
    radius = draw.log_uniform(-1, 1.5)
    if isinstance(norm, SquashNorm):
        c = -norm.shift / norm.alpha
    else:
        c = torch.zeros(1, dtype=torch.float64)

    def within(x: Tensor) -> Tensor:
        inside: Tensor = c + (x - c) / ((x - c).norm(dim=-1, keepdim=True) / radius).clamp_min(1)
        return inside

    starts = torch.cat([radius * draw.normal(3, norm.width), radius * _way(norm, p)])
    best = ascend(lambda x: norm(x) @ p, starts + c, (-1,), within).best.max()
    top = norm.support(p)
    scale = top - p @ norm.beta
    late = Trial(
        float((top - best - norm.shortfall(p, radius)) / scale),
        f"sup less the best within {radius:.3g}, {norm_words(norm)}",
    )
    return [
        late,
        Trial(
            float((best - top) / scale),
            f"the best within {radius:.3g} against sup, {norm_words(norm)}",
        ),
    ]


def _way(norm: Norm, p: Tensor) -> Tensor:
    """The unit direction of inputs along which a norm's output approaches its maximiser."""
    q = norm.gamma * p
    if norm.image == "box":
        q = q.sign() * (norm.alpha.sign() if isinstance(norm, SquashNorm) else 1.0)
    elif norm.image == "slice":
        q = q - q.mean()
    elif norm.image == "ellipsoids":
        parts = q.split(len(q) // getattr(norm, "groups", 1))
        q = torch.cat([part / part.norm() for part in parts])
    way: Tensor = (q / q.norm()).unsqueeze(0)
    return way


@statement(
    "squashing-not-attained",
    "ctrans, on Zhu et al. 2025",
    "behind DyT and Derf H is finite but not attained: the image is an open box",
    0.0,
)
def squashing_has_no_maximiser(draw: Draw) -> Trial:
    """<p, N(x)> < sup <p, z> strictly, at the largest inputs that float64 distinguishes: abs(alpha
    x + s) up to 4 (1 - erf(4) = 1.5e-8).
    """
    norm = any_norm(draw, SQUASHING)
    assert isinstance(norm, SquashNorm), "those are drawn"
    p = draw.normal(norm.width)
    y = 4 * (norm.gamma * p).sign()
    short = norm.support(p) - p @ norm((y - norm.shift) / norm.alpha)
    return holds_if(
        float(short) > 0,
        f"H less the value at abs(alpha x + s) = 4: {float(short):.3g}, {norm_words(norm)}",
    )


@statement(
    "norm-verdicts",
    "ctrans, on Kan, appendix E",
    "behind every norm H is finite and certified; without bounds on gains only if the norm has no"
    " gains or offsets",
    0.0,
    0.2,
)
def verdicts(draw: Draw) -> Trial:
    """H behind each norm is finite, its certificate's findings agree, and it needs bounded gains
    exactly if the norm has parameters.
    """
    norm = any_norm(draw, eps=draw.choice((0.0, 1e-5)))
    P = draw.rows(norm.width)
    found = certify(image_of(norm), P)
    if list(norm.parameters()):
        verdict = "well-posed for bounded gains"
    else:
        verdict = "well-posed"
    failed = [words for words, holds in found.findings.items() if not holds]
    return holds_if(
        found.verdict == verdict and not failed,
        f"{norm_words(norm)}: {found.verdict}, {'; '.join(failed) or 'agrees'}",
    )


@statement(
    "norm-gain-slopes",
    "ctrans",
    "trained gains and offsets: H grows like |(a, sum_j p_j)|, a_i = sum_j abs(p_ji), behind a box,"
    " like sum_j |p_j| with one gain",
    1e-9,
    0.5,
)
def gain_slopes(draw: Draw) -> Trials:
    """H at 200 random gains and offsets with |gamma|^2 + |beta|^2 = 1 against the proven slope,
    which the best ones attain.

    A box attains it at gamma proportional to a_i = sum_j abs(p_ji) and beta to -sum_j p_j; one
    shared gain at g = 1.
    """
    norm = any_norm(
        draw,
        sorted(
            name for name in NORMS if NORMS[name](2).linear_parameters() and name != "layernorm"
        ),
    )
    P = draw.rows(norm.width)
    slope = known(image_of(norm).slope_in_gains(P))
    own = [norm.get_parameter(name) for name in norm.linear_parameters()]
    best = -math.inf
    for k in range(200):
        parts = [draw.normal(*parameter.shape) for parameter in own]
        if k == 0 and isinstance(norm, SquashNorm):
            parts = [P.abs().sum(0), -P.sum(0)]
        length = math.sqrt(sum(float(part.square().sum()) for part in parts))
        for parameter, part in zip(own, parts, strict=True):
            parameter.copy_(part / length)
        best = max(best, float(norm.support(-P).sum()))
    words = f"H at gains and offsets of length 1, {norm_words(norm)}"
    if isinstance(norm, SquashNorm) or norm.gains == "one":
        met = equal(best, slope.lower, words)
    else:
        met = Trial(-1.0, words)
    assert has_offset(norm) == (slope.offset > 0), "offsets count where there are any"
    return [at_most(best, slope.upper, words), met]


@statement(
    "gain-decay-norms",
    "ctrans",
    "cost lam/2 (|gamma|^2 + |beta|^2): 2 lam H = |a|^2 + |sum_j p_j|^2 behind a box, (sum_j"
    " |p_j|)^2 for one gain, over groups sum_g kappa_g^2",
    1e-8,
    0.25,
)
def decayed_gains(draw: Draw) -> Trials:
    """(kappa^2 + |sum_j p_j|^2)/(2 lam) against its formula, and against gains that improve step by
    step by the norm's support.
    """
    norm = any_norm(draw, DECAYING)
    P = draw.rows(norm.width)
    lam = draw.log_uniform(-1, 1)
    H = float(GainDecay(norm, lam).support(P))
    own = [norm.get_parameter(name) for name in norm.linear_parameters()]
    best = max(_improved(norm, P, lam, own, draw) for _ in range(2))
    if has_offset(norm):
        drift = float(P.sum(0).square().sum())
    else:
        drift = 0.0
    words = f"{norm_words(norm)}, {len(P)} tokens, lam = {lam:.3g}"
    found = [at_most(best, H, f"{words}: gains that improve step by step against H")]
    if norm.image == "box":
        found.append(
            equal(H, (float(P.abs().sum(0).square().sum()) + drift) / (2 * lam), f"{words}: H")
        )
    if norm.gains == "one":
        found.append(equal(H, float(P.norm(dim=-1).sum()) ** 2 / (2 * lam), f"{words}: H"))
    return [*found, equal(best, H, f"{words}: the best gains against H")]


def _improved(
    norm: Norm, P: Tensor, lam: float, own: list[torch.nn.Parameter], draw: Draw
) -> float:
    """The value after improving random gains and offsets step by step: each step takes the best
    ones for the linearised H.
    """
    for parameter in own:
        parameter.copy_(draw.normal(*parameter.shape))
    for _ in range(IMPROVED):
        with torch.enable_grad():
            wanted = [parameter.requires_grad_() for parameter in own]
            slopes = torch.autograd.grad(norm.support(-P).sum(), wanted)
        moved = 0.0
        for parameter, slope in zip(own, slopes, strict=True):
            moved = max(moved, float((slope / lam - parameter).abs().max()))
            parameter.requires_grad_(False).copy_(slope / lam)
        if moved < STILL:
            break
    return float(norm.support(-P).sum()) - lam / 2 * sum(float(each.square().sum()) for each in own)
