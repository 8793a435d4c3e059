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
from ctrans.theory.random_norms import EPSILONS, SQUASHING, any_norm, describe_norm
from ctrans.theory.statement import Trial, Trials, at_most, equal, holds_if, not_none, statement

SECTION = 4

DECAYING = ["derf", "dyt", "group_rmsnorm", "rmsnorm", "scalenorm"]
"""Norms with gains whose decay has one maximum. LayerNorm has local ones, see `gain-decay`."""
IMPROVEMENTS = 20_000
"""The most steps that improve gains. Convergence is slow if a best gain is nearly 0."""
STILL = 1e-7
"""The change of gains below which the steps stop."""


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
    best = torch.cat([norm(x) @ p, climbed]).max() - p @ norm.beta
    return at_most(
        best, norm.support(p) - p @ norm.beta, f"best <p, N(x) - beta>, {describe_norm(norm)}"
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
    return equal(norm.support(p), forms[norm.image](), f"support, {describe_norm(norm)}")


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
    case = describe_norm(norm)
    return [
        equal((p * best).sum(-1), norm.support(p), f"<p, z*> against the support, {case}"),
        Trial(float(norm.constraint_violation(best).max()), f"residual of z*, {case}"),
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
    case = describe_norm(norm)
    return [
        Trial(
            float((top - best - norm.shortfall(p, radius)) / scale),
            f"sup less the best within {radius:.3g}, {case}",
        ),
        Trial(float((best - top) / scale), f"the best within {radius:.3g} against sup, {case}"),
    ]


def _way(norm: Norm, p: Tensor) -> Tensor:
    """The unit direction of inputs along which a norm's output approaches its maximiser."""
    q = norm.gamma * p
    if norm.image == "box":
        q = q.sign()
        if isinstance(norm, SquashNorm):
            q = q * norm.alpha.sign()
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
        f"H less the value at abs(alpha x + s) = 4: {float(short):.3g}, {describe_norm(norm)}",
        condition=float(short) > 0,
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
    certificate = certify(image_of(norm), P)
    if list(norm.parameters()):
        verdict = "well-posed for bounded gains"
    else:
        verdict = "well-posed"
    failed = [finding for finding, holds in certificate.findings.items() if not holds]
    return holds_if(
        f"{describe_norm(norm)}: {certificate.verdict}, {'; '.join(failed) or 'agrees'}",
        condition=certificate.verdict == verdict and not failed,
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
    with_gains = [name for name in NORMS if NORMS[name](2).linear_parameters()]
    norm = any_norm(draw, sorted(name for name in with_gains if name != "layernorm"))
    P = draw.rows(norm.width)
    slope = not_none(image_of(norm).slope_in_gains(P))
    parameters = [norm.get_parameter(name) for name in norm.linear_parameters()]
    best = -math.inf
    for k in range(200):
        parts = [draw.normal(*parameter.shape) for parameter in parameters]
        if k == 0 and isinstance(norm, SquashNorm):
            parts = [P.abs().sum(0), -P.sum(0)]
        length = math.sqrt(sum(float(part.square().sum()) for part in parts))
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.copy_(part / length)
        best = max(best, float(norm.support(-P).sum()))
    case = f"H at gains and offsets of length 1, {describe_norm(norm)}"
    attained = Trial(-1.0, case)
    if isinstance(norm, SquashNorm) or norm.gains == "one":
        attained = equal(best, slope.lower, case)
    assert has_offset(norm) == (slope.offset > 0), "offsets count where there are any"
    return [at_most(best, slope.upper, case), attained]


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
    parameters = [norm.get_parameter(name) for name in norm.linear_parameters()]
    best = max(_improved(norm, P, lam, parameters, draw) for _ in range(2))
    drift = 0.0
    if has_offset(norm):
        drift = float(P.sum(0).square().sum())
    case = f"{describe_norm(norm)}, {len(P)} tokens, lam = {lam:.3g}"
    trials = [at_most(best, H, f"{case}: gains that improve step by step against H")]
    if norm.image == "box":
        sizes = float(P.abs().sum(0).square().sum())
        trials.append(equal(H, (sizes + drift) / (2 * lam), f"{case}: H"))
    if norm.gains == "one":
        size = float(P.norm(dim=-1).sum())
        trials.append(equal(H, size**2 / (2 * lam), f"{case}: H"))
    return [*trials, equal(best, H, f"{case}: the best gains against H")]


def _improved(
    norm: Norm, P: Tensor, lam: float, parameters: list[torch.nn.Parameter], draw: Draw
) -> float:
    """The value after improving random gains and offsets step by step: each step takes the best
    ones for the linearised H.
    """
    for parameter in parameters:
        parameter.copy_(draw.normal(*parameter.shape))
    for _ in range(IMPROVEMENTS):
        with torch.enable_grad():
            for parameter in parameters:
                parameter.requires_grad_()
            slopes = torch.autograd.grad(norm.support(-P).sum(), parameters)
        moved = 0.0
        for parameter, slope in zip(parameters, slopes, strict=True):
            moved = max(moved, float((slope / lam - parameter).abs().max()))
            parameter.requires_grad = False
            parameter.copy_(slope / lam)
        if moved < STILL:
            break
    squares = sum(float(parameter.square().sum()) for parameter in parameters)
    return float(norm.support(-P).sum()) - lam / 2 * squares
