"""Section 4: trained gains, decay of both factors of a path, and the discrete step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ctrans.control import GainDecay, LastMapDecay, StepImage, boxed_value, certify, gain_slope, gap_of_rank
from ctrans.control.ascent import ascend
from ctrans.control.decay_threshold import UnitsPath, ValuePath, climb_factors, decay_threshold, with_evidence
from ctrans.control.last_map import Features
from ctrans.control.sets_by_norm import image_of
from ctrans.control.statements.payoffs import largest_payoff, payoff
from ctrans.control.tangent import TangentSpace
from ctrans.fields import ACTIVATIONS
from ctrans.norm import SphereNorm
from ctrans.norm.random_norms import norm_words, random_norm
from ctrans.statement import Draw, Printed, Trial, at_most, equal, holds_if, known, statement, worst


def _problem(draw: Draw, tokens: int | None = None) -> tuple[SphereNorm, Tensor]:
    chosen = random_norm(draw, width=3 + draw.integer(6))
    return chosen, draw.normal(tokens or 1 + draw.integer(6), chosen.width)


@statement(
    "bounded-gains",
    4,
    "Kan, section 3.3 and eq. 99",
    "behind an output norm H is finite for bounded gains: R sqrt(kappa^2 + |sum_j p_j|^2) over |gamma|^2 + |beta|^2 <= R^2",
    1e-9,
    0.25,
    printed=Printed("the output norm bounds velocities, whatever training does (gamma and beta are trainable)", 1e-6, 0.05),
)
def bounded_gains(draw: Draw, printed: bool) -> Trial:
    """Gains and offsets from their own ascent, 30 of norm R, reach R sqrt(kappa^2 + |sum p|^2) and no more.

    The dual bound proves that for RMSNorm and meets it; for LayerNorm it need not. Printed: H with the gains a thousand times as
    large, over H, which a bound on the velocities would make 1.
    """
    chosen, P = _problem(draw)
    if printed:
        before, after = (_without_offset(chosen, P, factor) for factor in (1, 1000))
        return at_most(after, before, f"{norm_words(chosen)}: H with trained gains against H with frozen ones")
    slope, radius = gain_slope(chosen, P), draw.log_uniform(-2, 3)
    gamma = draw.normal(30, 1, chosen.width)
    for _ in range(60):
        w = chosen.centre(gamma * P)
        gamma = (P * w / w.norm(dim=-1, keepdim=True).clamp_min(1e-300)).sum(-2, keepdim=True)
        gamma = gamma / gamma.norm(dim=-1, keepdim=True)
    found = float((math.sqrt(chosen.width) * chosen.centre(gamma * P).norm(dim=-1).sum(-1)).amax())
    best = radius * math.hypot(found, slope.offset)
    words = f"{norm_words(chosen)}, {len(P)} tokens"
    return worst(
        at_most(best, radius * slope.upper, f"{words}: gains within {radius:.3g} against the proven bound"),
        at_most(radius * slope.lower, radius * slope.upper, f"{words}: what is attained against what is proven"),
        at_most(best, radius * slope.lower, f"{words}: gains of another ascent against those found"),
        at_most(slope.lower if chosen.centred else slope.upper, slope.lower, f"{words}: what is proven against what is attained"),
    )


def _without_offset(chosen: SphereNorm, P: Tensor, factor: float) -> float:
    """H + <P, beta> with the gains multiplied by the factor."""
    chosen.gamma.mul_(factor)
    return float(image_of(chosen).support(P) + (P @ chosen.beta).sum())


@statement(
    "gain-decay",
    4,
    "ctrans",
    "cost lam/2 (|gamma|^2 + |beta|^2) behind an output norm: H = (kappa^2 + |sum_j p_j|^2)/(2 lam), any gains",
    1e-8,
    0.05,
)
def gain_decay(draw: Draw) -> Trial:
    """(kappa^2 + |sum p|^2)/(2 lam), and ascents through the norm over inputs, gains and offsets reach no more."""
    chosen, P = _problem(draw, 4)
    lam = draw.log_uniform(-1, 1)
    decay = GainDecay(chosen, lam)
    H = float(decay.support(P))
    found = known(certify(decay, P, pairs=1).velocities)
    words = norm_words(chosen)
    return worst(
        equal(H, gain_slope(chosen, P).lower ** 2 / (2 * lam), f"{words}: H against kappa, lam = {lam:.3g}"),
        at_most(found.best, decay.ceiling(P), f"{words}: the best found against the bound"),
        equal(found.best, H, f"{words}: the best found against H"),
        Trial(float(decay.kkt(P, decay.maximizer(P))), f"{words}: stationary gains"),
    )


@statement(
    "gain-box",
    4,
    "ctrans",
    "|gamma_i| <= g, |beta_i| <= b: H <= sqrt(d) g sum_j |p_j| + b |sum_j p_j|_1, attained by RMSNorm",
    1e-12,
)
def gain_box(draw: Draw) -> Trial:
    """H <= sqrt(d) g sum_j |p_j| + b |sum_j p_j|_1 for 30 gains and offsets in the box; equal for RMSNorm at gamma = g."""
    chosen, P = _problem(draw)
    g, b = draw.log_uniform(-2, 2), draw.log_uniform(-2, 2) if chosen.centred else 0.0
    bound = float(boxed_value(chosen, P, g, b))
    cases = []
    for _ in range(30):
        chosen.gamma.copy_(g * draw.normal(chosen.width).clamp(-1, 1))
        if chosen.centred:
            chosen.beta.copy_(b * draw.normal(chosen.width).clamp(-1, 1))
        cases.append(at_most(float(image_of(chosen).support(P)), bound, f"{norm_words(chosen)}, gains in a box"))
    chosen.gamma.fill_(g)
    if not chosen.centred:
        cases.append(equal(image_of(chosen).support(P), bound, "RMSNorm at the box's corner"))
    return worst(*cases)


@statement(
    "rank-gap",
    4,
    "ctrans",
    "rank(h) < n: no weights come nearer to H than sqrt(d)/2 min_j |w_j|/(G^-1)_jj, G = (I - hh^+) * (U* U*')",
    1e-9,
)
def rank_gap(draw: Draw) -> Trial:
    """Ascents over the weights stay below H by at least the bound; it is positive where dimensions are twice as many as it takes.

    With just as many, n, it is positive for almost all P, but may be so small that rounding hides it. In half of the cases the best
    velocities are nearly some weights': there the bound is nearly sharp.
    """
    chosen, P = _problem(draw, 3 + draw.integer(5))
    rank = 1 + draw.integer(len(P) - 1)
    h = draw.normal(len(P), rank) @ draw.normal(rank, 9)
    u = Features(h).svd[0]
    if draw.integer(2):
        made = chosen.standardize(u @ draw.normal(rank, chosen.width))
        P = -chosen.centre(made + draw.log_uniform(-1.5, 0) * draw.normal(*P.shape)) / chosen.gamma
    H, proven = float(image_of(chosen).support(P)), gap_of_rank(chosen, P, Features(h))
    starts = torch.cat([draw.normal(4, rank, chosen.width), -(u.mT @ chosen.centre(chosen.gamma * P)).unsqueeze(0)])
    climbed = ascend(lambda z: payoff(P, chosen(u @ z)), starts, (-2, -1), steps=300)
    free = chosen.width - 1 if chosen.centred else chosen.width
    words = f"{norm_words(chosen)}, {len(P)} tokens, rank {rank}"
    scale = float(largest_payoff(P, chosen.maximizer(-P)))
    lost = H - float(climbed.best.amax())
    return worst(
        Trial((proven - lost) / scale, f"{words}: the best weights lose {lost:.6g}, at least {proven:.6g}"),
        holds_if(proven > 0 or (len(P) - rank) * free < 2 * len(P), f"{words}: a gap of {proven:.2g}"),
    )


@statement(
    "discrete-hamiltonian",
    4,
    "ctrans, on Kan, appendix J",
    "post, pre_post, deepnorm: of the step N(X + dt r), H = (sum_j sqrt(d)|C(gamma*p_j)| - <p_j, beta> + <P, X>)/dt",
    1e-9,
)
def step(draw: Draw) -> Trial:
    """The discrete step's H at dt from 1 to 1/1000: never exceeded by 30 raw velocities, approached by long ones along f*."""
    chosen, P = _problem(draw)
    dt, X = draw.log_uniform(-3, 0), draw.normal(*P.shape)
    allowed = StepImage(image_of(chosen), X, dt)
    H = float(allowed.support(P))
    scale = float(largest_payoff(P, allowed.maximizer(P))) + float((P * X).abs().sum()) / dt
    raw = draw.log_uniform(-2, 6) * draw.normal(30, *P.shape)
    best = (1e6 * chosen.coordinates(X + dt * allowed.maximizer(P)) - X) / dt
    made, reached = (payoff(P, chosen(X + dt * f) - X) / dt for f in (raw, best))
    words = f"{norm_words(chosen)}, dt = {dt:.3g}"
    return worst(
        Trial((float(made.amax()) - H) / scale, f"{words}: the best of 30 raw velocities against H"),
        equal(reached, H, f"{words}: a long raw velocity", scale),
    )


@statement(
    "discrete-hamiltonian-limit",
    4,
    "ctrans",
    "as dt goes to 0, for X on the image, it goes to +inf like 1/dt, unless X is the lowest point for P: there it is 0, as the ODE's",
    1e-9,
)
def step_limit(draw: Draw) -> Trial:
    """dt H is <P, X - z> for every dt, z the norm of a long raw output towards the image's lowest point.

    X on the image: positive for P at random, where the ODE's H is infinite, and 0 for the P whose lowest point is X, as the ODE's.
    X beyond the lowest point: negative, so that H goes to -inf.
    """
    chosen, P = _problem(draw)
    image = image_of(chosen)
    z = chosen(-1e6 * chosen.centre(chosen.gamma * P))
    X, beyond = chosen(draw.normal(*P.shape)), chosen.beta + (1 + draw.log_uniform(-1, 2)) * (z - chosen.beta)
    lowest = -chosen.centre(chosen.coordinates(X)) / chosen.gamma
    cases = []
    for at, costate, wanted in ((X, P, 1), (X, lowest, 0), (beyond, P, -1)):
        exact = float((costate * (at - (X if wanted == 0 else z))).sum())
        scale = float((costate * at).abs().sum() + (costate * z).abs().sum())
        found = [dt * float(StepImage(image, at, dt).support(costate)) for dt in (1.0, 1e-2, 1e-4)]
        cases += [equal(value, exact, "dt H against <P, X - z>", scale) for value in found]
        cases.append(holds_if(wanted * exact > 0 or wanted == 0, f"<P, X - z> = {exact:.3g}"))
    tangent = TangentSpace(chosen, X)
    return worst(
        *cases,
        holds_if(float(tangent.support(lowest)) == 0, "the ODE's H is 0 where X is the lowest point"),
        holds_if(math.isinf(float(tangent.support(P))), "the ODE's H is infinite at another P"),
    )


@statement(
    "weight-decay",
    4,
    "Kan, section 3.2",
    "running cost lam/2 (|V|^2 + |O|^2): H = 0 for lam >= lam*, else infinite; |(A X)'P|_2 of values, max |P'relu(X w)| of units",
    1e-9,
    0.1,
    printed=Printed("with weight decay the Hamiltonian exists (whatever the decay)", 0.0, 0.02),
)
def decayed_path(draw: Draw, printed: bool) -> Trial:
    """An ascent over both factors: R^2/2 (lam* - lam) below lam*, nothing above it.

    Printed: at half of lam* the best value of both factors, for a bound ten times as large, over what it was.
    """
    P = draw.normal(6, 4)
    path = (
        ValuePath(draw.normal(1 + draw.integer(3), 6, 4), 2)
        if draw.flag()
        else UnitsPath(draw.normal(6, 4), ACTIVATIONS["relu"], 16, 4)
    )
    threshold, words = decay_threshold(path, P), type(path).__name__
    if printed:
        found = climb_factors(path, P, threshold.lower / 2)
        growth = found.values[-1] / max(found.values[-2], 1e-300)
        return at_most(growth, 1.0, f"{words}, lam = lam*/2: the best value with a tenfold bound")
    threshold = with_evidence(threshold, path, P)
    below = known(threshold.below)
    radius, value = below.radii[-1], below.values[-1]
    words = f"{words}, lam* = {threshold.lower:.3g}"
    return worst(
        *(holds_if(holds, f"{words}: {finding}") for finding, holds in threshold.findings.items()),
        at_most(value, radius**2 / 2 * (threshold.upper - 0.9 * threshold.lower), f"{words}: value against R^2/2 (lam* - lam)"),
    )


@statement(
    "weight-decay-features",
    4,
    "ctrans",
    "one decayed map at fixed features h has H = |h'P|^2/(2 lam), which grows like |h|^2 where h is trained",
    1e-10,
    0.25,
)
def one_map_decayed(draw: Draw) -> Trial:
    """-<P, h W'> - lam/2 |W|^2 at W = -P'h/lam, which 30 other W do not exceed; 10^4 times that for features 100 times as long."""
    h, P, lam = draw.normal(5, 6), draw.normal(5, 4), draw.log_uniform(-2, 1)

    def value(c: float, W: Tensor) -> Tensor:
        return payoff(P, c * h @ W.mT) - lam / 2 * W.square().sum((-2, -1))

    best = -P.mT @ h / lam
    others = best + draw.log_uniform(-3, 1) * draw.normal(30, 4, 6)
    small, large = (float(LastMapDecay(c * h, lam).support(P)) for c in (1.0, 100.0))
    return worst(
        equal(small, value(1.0, best), "H against the value of W = -P'h/lam"),
        at_most(float(value(1.0, others).amax()), small, "the best of 30 other W against H"),
        equal(large, value(100.0, 100 * best), "H at features a hundred times as long"),
        equal(large / small, 1e4, "H at features a hundred times as long, over H"),
    )


@statement(
    "weight-decay-three",
    4,
    "ctrans",
    "three decayed factors (input gains, V, O): the value grows like R^3, so that H is infinite for every lam",
    0.05,
    0.25,
)
def three_factors(draw: Draw) -> Trial:
    """gamma, V and O of size R: R^3 from a decay of R^2, so that ten times lam* is exceeded for large R."""
    x, P = draw.normal(5, 4), draw.normal(5, 4)
    gamma, V, out = draw.normal(4), draw.normal(4, 4), draw.normal(4, 4)
    product = float((P * ((gamma * x) @ V.mT @ out.mT)).sum())
    out = out if product < 0 else -out
    unit = float((gamma.square().sum() + V.square().sum() + out.square().sum()).sqrt())
    decay = 10 * ValuePath(x.unsqueeze(0), 4).threshold(P)[0]
    values = []
    for radius in (1e9, 1e10):
        r = radius / unit
        f = (r * gamma * x) @ (r * V).mT @ (r * out).mT
        values.append(-float((P * f).sum()) - decay / 2 * radius**2)
    return worst(
        holds_if(values[0] > 0, "ten times lam* is exceeded"),
        Trial(abs(math.log10(values[1] / values[0]) - 3), f"the value grows like R^{math.log10(values[1] / values[0]):.4f}"),
    )
