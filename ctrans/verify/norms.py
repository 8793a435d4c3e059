"""Sections 3, 4 and 6: what each norm of the table says of itself, and what follows for H and for growth."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ctrans.control import GainDecay, certify
from ctrans.control.ascent import ascend
from ctrans.control.gains import has_offset
from ctrans.control.sets_by_norm import image_of
from ctrans.fields import spectral_norm
from ctrans.norm import NORMS, ClipNorm, Norm, SquashNorm
from ctrans.verify.draws import below, between, described, model, noise, one_of, size, text
from ctrans.verify.statement import Check, Statement, Trial, at_most, equal, holds_if, worst

SURFACES = sorted(name for name, kind in NORMS.items() if kind(2).has_tangent)
SQUASHING = sorted(name for name, kind in NORMS.items() if isinstance(kind(2), SquashNorm))
DECAYING = ["derf", "dyt", "group_rmsnorm", "rmsnorm", "scalenorm"]
"""Norms with gains whose decay has one maximum; LayerNorm's local ones are `gain-decay`'s."""
CLIPPING = sorted(name for name, kind in NORMS.items() if isinstance(kind(2), ClipNorm))


def any_norm(generator: torch.Generator, names: list[str] | None = None, *, eps: float = 0.0) -> Norm:
    """A norm of the table as training may leave it: gains of any sign, offsets, and what is inside of it."""
    chosen = NORMS[one_of(generator, names or sorted(NORMS))](2 + below(generator, 11), eps).double().requires_grad_(False)
    for parameter in chosen.parameters():
        signs = torch.where(torch.rand(parameter.shape, generator=generator) < 0.25, -1.0, 1.0)
        parameter.mul_(signs * (0.5 * noise(generator, *parameter.shape).clamp(-3, 3)).exp())
        if not bool(parameter.any()):
            parameter.add_(0.5 * noise(generator, *parameter.shape))
    return chosen


def words_of(norm: Norm) -> str:
    """The norm in a few words, for a case."""
    return f"{type(norm).__name__}, d = {norm.width}"


def support_is_a_bound(generator: torch.Generator) -> Trial:
    """<p, N(x)> at 500 inputs of sizes 1e-3 to 1e3 and at the ends of ascents from 4 of them, against sup <p, z>."""
    norm = any_norm(generator, eps=one_of(generator, (0.0, 1e-5, 0.1)))
    p = noise(generator, norm.width)
    x = torch.logspace(-3, 3, 500, dtype=torch.float64).unsqueeze(-1) * noise(generator, 500, norm.width)
    climbed = ascend(lambda z: norm(z) @ p, x[::125], (-1,)).best
    found = torch.cat([norm(x) @ p, climbed]).max() - p @ norm.beta
    return at_most(found, norm.support(p) - p @ norm.beta, f"best <p, N(x) - beta>, {words_of(norm)}")


def maximiser_has_it(generator: torch.Generator) -> Trial:
    """<p, z*> = sup <p, z> and the residual of z*, the maximiser, which is on the image's closure."""
    norm = any_norm(generator)
    p = noise(generator, 5, norm.width)
    best = norm.maximizer(p)
    value = equal((p * best).sum(-1), norm.support(p), f"<p, z*> against the support, {words_of(norm)}")
    return worst(value, Trial(float(norm.constraint_violation(best).max()), f"residual of z*, {words_of(norm)}"))


def closed_forms(generator: torch.Generator) -> Trial:
    """sup <p, z> against the formula of each norm, written out anew."""
    norm = any_norm(generator)
    p, d = noise(generator, norm.width), norm.width
    q, drift = norm.gamma * p, p @ norm.beta
    parts = q.split(q.shape[0] // getattr(norm, "groups", 1))
    forms: dict[str, Callable[[], Tensor]] = {
        "ellipsoid": lambda: math.sqrt(d) * q.norm() + drift,
        "slice": lambda: math.sqrt(d) * (q - q.mean()).norm() + drift,
        "ellipsoids": lambda: torch.stack([math.sqrt(len(part)) * part.norm() for part in parts]).sum(),
        "box": lambda: q.abs().sum() + drift,
        "ball": lambda: norm.gamma[0] * math.sqrt(d) * p.norm(),
    }
    return equal(norm.support(p), forms[norm.image](), f"support, {words_of(norm)}")


def approached(generator: torch.Generator) -> Trial:
    """sup <p, z> less the best <p, N(x)> within |x - c| <= r, by ascent projected there, r from 1/10 to 30, against the rate stated."""
    norm = any_norm(generator, eps=one_of(generator, (0.0, 1e-5, 0.1)))
    p, radius = noise(generator, norm.width), size(generator, -1, 1.5)
    c = -norm.shift / norm.alpha if isinstance(norm, SquashNorm) else torch.zeros(1, dtype=torch.float64)

    def within(x: Tensor) -> Tensor:
        inside: Tensor = c + (x - c) / ((x - c).norm(dim=-1, keepdim=True) / radius).clamp_min(1)
        return inside

    starts = torch.cat([radius * noise(generator, 3, norm.width), radius * _way(norm, p)])
    best = ascend(lambda x: norm(x) @ p, starts + c, (-1,), within).best.max()
    top = norm.support(p)
    scale = top - p @ norm.beta
    late = Trial(
        float((top - best - norm.shortfall(p, radius)) / scale), f"sup less the best within {radius:.3g}, {words_of(norm)}"
    )
    return worst(late, Trial(float((best - top) / scale), f"the best within {radius:.3g} against sup, {words_of(norm)}"))


def _way(norm: Norm, p: Tensor) -> Tensor:
    """The unit direction in which a norm's output goes to its maximiser."""
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


def squashing_has_no_maximiser(generator: torch.Generator) -> Trial:
    """<p, N(x)> < sup <p, z> strictly, at inputs as large as arithmetic tells apart: abs(alpha x + s) up to 4 (1 - erf(4) = 1.5e-8)."""
    norm = any_norm(generator, SQUASHING)
    assert isinstance(norm, SquashNorm), "those are drawn"
    p = noise(generator, norm.width)
    y = 4 * (norm.gamma * p).sign()
    short = norm.support(p) - p @ norm((y - norm.shift) / norm.alpha)
    return holds_if(float(short) > 0, f"H less the value at abs(alpha x + s) = 4: {float(short):.3g}, {words_of(norm)}")


def jacobians(generator: torch.Generator) -> Trial:
    """J in closed form against autograd, relative to the slope stated; |J|_2 <= slope(x) <= steepest; at inputs of any size."""
    norm = any_norm(generator, eps=one_of(generator, (1e-5, 0.1)))
    x = size(generator, -1, 1) * noise(generator, norm.width)
    dense: Tensor = torch.autograd.functional.jacobian(norm, x)  # type: ignore[no-untyped-call, unused-ignore]  # torch gives it no types
    slope, words = norm.slope(x), words_of(norm)
    return worst(
        equal(norm.jacobian(x), dense, f"J against autograd, {words}", slope),
        Trial((spectral_norm(dense) - float(slope)) / (float(slope) or 1.0), f"|J|_2 against the slope, {words}"),
        at_most(slope, norm.steepest, f"the slope against the steepest, {words}"),
    )


def surfaces(generator: torch.Generator) -> Trial:
    """Tangent parts: n'v = 0 for the normals n, T(T f) = T f. R(z) = z on the image, R(y) is on it, R(x + hf) = x + h T f + O(h^2)."""
    norm = any_norm(generator, SURFACES)
    if (norm.image == "slice" and norm.width == 2) or norm.width == 1:
        return Trial(-1.0, "two points have no tangent")
    x, f, h, words = norm(noise(generator, norm.width)), noise(generator, norm.width), 1e-4, words_of(norm)
    v, length = norm.tangent(x, f), f.norm() * (norm.gamma.abs().max() / norm.gamma.abs().min()) ** 2
    normals = norm.normals(x)
    gap = (norm.retract(x + h * f) - x - h * v).norm() / (h * length)
    return worst(
        Trial(float((normals.mT @ v).abs().max() / (normals.norm() * length)), f"normals against T f, {words}"),
        equal(norm.tangent(x, v), v, f"T(T f) against T f, {words}", length),
        equal(norm.retract(x), x, f"R against the identity on the image, {words}"),
        Trial(
            float(norm.constraint_violation(norm.retract(size(generator, -1, 1) * f + norm.beta))), f"residual of R(y), {words}"
        ),
        Trial(1e-9 * float(gap / (100 * h * length / norm.gamma.abs().min())), f"R(x + hf) less x + h T f, {words}"),
    )


def projected_flow(generator: torch.Generator) -> Trial:
    """The residual at t = 1 of dx/dt = T f for a constant f, by 200 steps of the classical method of order 4."""
    norm = any_norm(generator, SURFACES)
    x, f = norm(noise(generator, 3, norm.width)), 0.3 * norm.gamma.abs().min() * noise(generator, norm.width)
    h = 1 / 200
    for _ in range(200):
        a = norm.tangent(x, f.expand_as(x))
        b = norm.tangent(x + h / 2 * a, f.expand_as(x))
        c = norm.tangent(x + h / 2 * b, f.expand_as(x))
        d = norm.tangent(x + h * c, f.expand_as(x))
        x = x + h / 6 * (a + 2 * b + 2 * c + d)
    return Trial(float(norm.constraint_violation(x).max()), f"residual after t = 1, {words_of(norm)}")


def clipping_is_a_projection(generator: torch.Generator) -> Trial:
    """N(N(x)) = N(x); |N(x) - N(y)| <= |x - y|; <x - N(x), z - N(x)> <= 0 for z in the set: N(x) is the nearest point."""
    norm = any_norm(generator, CLIPPING)
    x, y = (size(generator, -1, 1) * noise(generator, 50, norm.width) for _ in range(2))
    z, words = norm(x), words_of(norm)
    others = norm(3 * noise(generator, 50, norm.width))
    turn = ((x - z) * (others - z)).sum(-1).max() / (x - z).square().sum(-1).max().clamp_min(1e-12)
    return worst(
        equal(norm(z), z, f"N(N(x)) against N(x), {words}"),
        at_most(((norm(x) - norm(y)).norm(dim=-1) / (x - y).norm(dim=-1)).max(), 1.0, f"|N(x) - N(y)|/|x - y|, {words}"),
        Trial(float(turn), f"<x - N(x), z - N(x)>, {words}"),
    )


def squashing_jumps(generator: torch.Generator) -> Trial:
    """With gamma = 1, beta = s = 0 and alpha < 1 for DyT (0.88 for Derf), |N(x)| <= alpha phi'(0)|x|: repeated, N goes to 0."""
    norm = NORMS[one_of(generator, SQUASHING)](2 + below(generator, 11)).double().requires_grad_(False)
    assert isinstance(norm, SquashNorm), "those are drawn"
    norm.alpha.fill_(between(generator, 0.1, 0.8))
    x = size(generator, -1, 1) * noise(generator, norm.width)
    return at_most(norm(x).norm(), norm.steepest * x.norm(), f"|N(x)| against alpha phi'(0)|x|, {words_of(norm)}")


def gain_slopes(generator: torch.Generator) -> Trial:
    """H at 200 random gains and offsets with |gamma|^2 + |beta|^2 = 1, against the largest slope proven, and that the latter is met.

    It is met at gamma in proportion to a_i = sum_j abs(p_ji), beta to -sum_j p_j for a box; at g = 1 where one gain is shared.
    """
    norm = any_norm(generator, sorted(name for name in NORMS if any_trained(name) and name != "layernorm"))
    P = noise(generator, 1 + below(generator, 4), norm.width)
    slope = image_of(norm).slope_in_gains(P)
    assert slope is not None, "the norms drawn have gains"
    own = [dict(norm.named_parameters())[name] for name in norm.linear_parameters()]
    best = -math.inf
    for k in range(200):
        parts = [noise(generator, *parameter.shape) for parameter in own]
        if k == 0 and isinstance(norm, SquashNorm):
            parts = [P.abs().sum(0), -P.sum(0)]
        length = math.sqrt(sum(float(part.square().sum()) for part in parts))
        for parameter, part in zip(own, parts, strict=True):
            parameter.copy_(part / length)
        best = max(best, float(norm.support(-P).sum()))
    words = f"H at gains and offsets of length 1, {words_of(norm)}"
    met = equal(best, slope.lower, words) if isinstance(norm, SquashNorm) or norm.gains == "one" else Trial(-1.0, words)
    assert has_offset(norm) == (slope.offset > 0), "offsets count where there are any"
    return worst(at_most(best, slope.upper, words), met)


def any_trained(name: str) -> bool:
    """Whether a norm of that name has gains or offsets to train."""
    return bool(NORMS[name](2).linear_parameters())


def verdicts(generator: torch.Generator) -> Trial:
    """H behind each norm: finite, its certificate's findings agree, well-posed without bounds just where nothing is trained."""
    norm = any_norm(generator, eps=one_of(generator, (0.0, 1e-5)))
    P = noise(generator, 1 + below(generator, 4), norm.width)
    found = certify(image_of(norm), P)
    trained = bool(list(norm.parameters()))
    verdict = "well-posed for bounded gains" if trained else "well-posed"
    failed = [words for words, holds in found.findings.items() if not holds]
    return holds_if(
        found.verdict == verdict and not failed, f"{words_of(norm)}: {found.verdict}, {'; '.join(failed) or 'agrees'}"
    )


IMPROVED, STILL = 20_000, 1e-7
"""Steps at most of gains that improve, and the change below which they stand still: slow where a best gain is nearly 0."""


def decayed_gains(generator: torch.Generator) -> Trial:
    """(kappa^2 + |sum_j p_j|^2)/(2 lam) written out anew, and what gains that improve step by step reach by the norm's own support."""
    norm = any_norm(generator, DECAYING)
    P, lam = noise(generator, 1 + below(generator, 4), norm.width), size(generator, -1, 1)
    H = float(GainDecay(norm, lam).support(P))
    own = [norm.get_parameter(name) for name in norm.linear_parameters()]
    best = -math.inf
    for _ in range(2):
        for parameter in own:
            parameter.copy_(noise(generator, *parameter.shape))
        for _ in range(IMPROVED):
            with torch.enable_grad():
                wanted = [parameter.requires_grad_() for parameter in own]
                slopes = torch.autograd.grad(norm.support(-P).sum(), wanted)
            moved = max(float((slope / lam - parameter).abs().max()) for parameter, slope in zip(own, slopes, strict=True))
            for parameter, slope in zip(own, slopes, strict=True):
                parameter.requires_grad_(False).copy_(slope / lam)
            if moved < STILL:
                break
        best = max(best, float(norm.support(-P).sum()) - lam / 2 * sum(float(each.square().sum()) for each in own))
    drift = float(P.sum(0).square().sum()) if has_offset(norm) else 0.0
    words = f"{words_of(norm)}, {len(P)} tokens, lam = {lam:.3g}"
    found = [at_most(best, H, f"{words}: gains that improve step by step against H")]
    if norm.image == "box":
        found.append(equal(H, (float(P.abs().sum(0).square().sum()) + drift) / (2 * lam), f"{words}: H"))
    if norm.gains == "one":
        found.append(equal(H, float(P.norm(dim=-1).sum()) ** 2 / (2 * lam), f"{words}: H"))
    return worst(*found, equal(best, H, f"{words}: the best gains against H"))


def linear_growth(generator: torch.Generator) -> Trial:
    """|X_D|_F <= |X_0|_F + sqrt(n) sum_k dt sup|N_k|, sup|N| the length of the farthest point of the output norm's image."""
    made = model(generator, one_of(generator, ("peri", "output")), norm=one_of(generator, sorted(NORMS)))
    x0 = size(generator, -1, 1) * made.embed(text(generator))
    end = made.depth(x0)
    count = math.sqrt(x0.numel() / x0.shape[-1])
    steps = zip(made.depth.sublayers, made.depth.lengths, strict=True)
    bound = x0.norm() + sum(h * count * math.sqrt(x0.shape[-1]) * level(sublayer.output_norm) for sublayer, h in steps)
    return at_most(end.norm(), bound, f"|X_D| against |X_0| + sum of the images' bounds, {described(made)}")


def level(norm: Norm | None) -> float:
    """The norm's own bound of a token's RMS."""
    assert norm is not None, "the placement has an output norm"
    return norm.level


STATEMENTS: tuple[Statement, ...] = (
    Statement(
        "norm-jacobians",
        3,
        "ctrans",
        "each norm of the table has the Jacobian, its bound at x and its bound anywhere that it says",
        Check(jacobians, 1e-9),
    ),
    Statement(
        "norm-surfaces",
        3,
        "ctrans, on Kan, eq. 132",
        "ellipsoids, their slices and products have tangent parts off the normals, and a retraction that agrees to second order",
        Check(surfaces, 1e-9),
    ),
    Statement(
        "norm-projected-flow",
        3,
        "ctrans, on Kan, prop. 12",
        "a state that moves with its tangent part stays on the image of every norm that has tangent spaces",
        Check(projected_flow, 1e-6, 0.1),
    ),
    Statement(
        "clipping",
        3,
        "ctrans",
        "clipping is the projection on a closed convex set: N(N(x)) = N(x), Lipschitz with constant 1, the nearest point",
        Check(clipping_is_a_projection, 1e-9),
    ),
    Statement(
        "squashing-around-the-state",
        3,
        "ctrans, on Zhu et al. 2025",
        "DyT and Derf around the state have no ODE as dt goes to 0: |N(x)| <= alpha phi'(0)|x| for gamma = "
        "1; alpha phi'(0) < 1: N alone takes it to 0",
        Check(squashing_jumps),
    ),
    Statement(
        "norm-supports",
        4,
        "ctrans, on Kan, eq. 99",
        "no input of a norm exceeds its support function, whatever the gains' signs, eps and what an ascent finds",
        Check(support_is_a_bound),
    ),
    Statement(
        "norm-closed-forms",
        4,
        "ctrans, on Kan, eq. 99",
        "sqrt(d)|C(gamma*p)|, of groups the sum of theirs, of a box sum_i abs(gamma_i p_i), of a ball c sqrt(d)|p|; each plus <p, beta>",
        Check(closed_forms, 1e-12),
    ),
    Statement(
        "norm-maximisers",
        4,
        "ctrans, on Kan, eq. 100",
        "each norm's maximiser is on the closure of its image and has its support",
        Check(maximiser_has_it, 1e-9),
    ),
    Statement(
        "norm-approach",
        4,
        "ctrans",
        "inputs within r come as near to the support as each norm says: eps d/(2 r^2) of it, 2 exp(-2 alpha "
        "r/sqrt(d)) under DyT, 0 clipped",
        Check(approached, 1e-9),
    ),
    Statement(
        "squashing-not-attained",
        4,
        "ctrans, on Zhu et al. 2025",
        "behind DyT and Derf H is finite and no velocity has it: the image is an open box",
        Check(squashing_has_no_maximiser, 0.0),
    ),
    Statement(
        "norm-verdicts",
        4,
        "ctrans, on Kan, appendix E",
        "behind every norm H is finite and certified; whatever is trained, just where the norm has no gains or offsets",
        Check(verdicts, 0.0, 0.2),
    ),
    Statement(
        "norm-gain-slopes",
        4,
        "ctrans",
        "trained gains and offsets: H grows like |(a, sum_j p_j)|, a_i = sum_j abs(p_ji), behind a box, like sum_j |p_j| with one gain",
        Check(gain_slopes, 1e-9, 0.5),
    ),
    Statement(
        "gain-decay-norms",
        4,
        "ctrans",
        "cost lam/2 (|gamma|^2 + |beta|^2): 2 lam H = |a|^2 + |sum_j p_j|^2 behind a box, (sum_j |p_j|)^2 for one gain, over groups "
        "sum_g kappa_g^2",
        Check(decayed_gains, 1e-8, 0.25),
    ),
    Statement(
        "norm-growth",
        6,
        "ctrans, on Kan, theorem 4",
        "behind any output norm states grow at most linearly in depth: |X_D| <= |X_0| + sum_k dt sup|N_k|, by that norm's own bound",
        Check(linear_growth),
    ),
)
