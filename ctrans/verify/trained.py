"""Section 4: what holds when gains are trained, when both factors of a path decay, and for the discrete step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ctrans.control import GainDecay, LastMapDecay, StepImage, admissible_set, boxed_value, certify, gain_slope, gap_of_rank
from ctrans.control.ascent import ascend
from ctrans.control.decay_threshold import UnitsPath, ValuePath, climb_factors, decay_threshold, with_evidence
from ctrans.control.last_map import Features
from ctrans.control.sets_by_norm import image_of
from ctrans.control.tangent import TangentSpace
from ctrans.fields import ACTIVATIONS
from ctrans.norm import SphereNorm
from ctrans.verify.draws import below, noise, norm, norm_words, size
from ctrans.verify.statement import Check, Statement, Trial, at_most, equal, holds_if, worst


def _problem(generator: torch.Generator, tokens: int | None = None) -> tuple[SphereNorm, Tensor]:
    chosen = norm(generator, width=3 + below(generator, 6))
    return chosen, noise(generator, tokens or 1 + below(generator, 6), chosen.width)


def frozen_gains(generator: torch.Generator) -> Trial:
    """H with the gains a thousand times as large, over H: a bound on the velocities would make it 1."""
    chosen, P = _problem(generator)
    before = float(admissible_set(chosen, "peri").support(P) + (P @ chosen.beta).sum())
    chosen.gamma.mul_(1000)
    after = float(admissible_set(chosen, "peri").support(P) + (P @ chosen.beta).sum())
    return at_most(after, before, f"{norm_words(chosen)}: H with trained gains against H with frozen ones")


def bounded_gains(generator: torch.Generator) -> Trial:
    """Gains and offsets from their own ascent, 30 of norm R, reach R sqrt(kappa^2 + |sum p|^2) and no more.

    For RMSNorm that is proven by the dual bound, which meets it; for LayerNorm it need not.
    """
    chosen, P = _problem(generator)
    slope, radius = gain_slope(chosen, P), size(generator, -2, 3)
    gamma = noise(generator, 30, 1, chosen.width)
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


def gain_decay(generator: torch.Generator) -> Trial:
    """(kappa^2 + |sum p|^2)/(2 lam), and ascents through the norm over inputs, gains and offsets reach no more."""
    chosen, P = _problem(generator, 4)
    lam = size(generator, -1, 1)
    decay = GainDecay(chosen, lam)
    H = float(decay.support(P))
    found = certify(decay, P, pairs=1).velocities
    assert found is not None, "a finite value has an ascent"
    words = norm_words(chosen)
    return worst(
        equal(H, gain_slope(chosen, P).lower ** 2 / (2 * lam), f"{words}: H against kappa, lam = {lam:.3g}"),
        at_most(found.best, decay.ceiling(P), f"{words}: the best found against the bound"),
        equal(found.best, H, f"{words}: the best found against H"),
        Trial(float(decay.kkt(P, decay.maximizer(P))), f"{words}: stationary gains"),
    )


def gain_box(generator: torch.Generator) -> Trial:
    """H <= sqrt(d) g sum_j |p_j| + b |sum_j p_j|_1 for 30 gains and offsets in the box; equal for RMSNorm at gamma = g."""
    chosen, P = _problem(generator)
    g, b = size(generator, -2, 2), size(generator, -2, 2) if chosen.centred else 0.0
    bound = float(boxed_value(chosen, P, g, b))
    cases = []
    for _ in range(30):
        chosen.gamma.copy_(g * noise(generator, chosen.width).clamp(-1, 1))
        if chosen.centred:
            chosen.beta.copy_(b * noise(generator, chosen.width).clamp(-1, 1))
        cases.append(at_most(float(admissible_set(chosen, "peri").support(P)), bound, f"{norm_words(chosen)}, gains in a box"))
    chosen.gamma.fill_(g)
    if not chosen.centred:
        cases.append(equal(admissible_set(chosen, "peri").support(P), bound, "RMSNorm at the box's corner"))
    return worst(*cases)


def rank_gap(generator: torch.Generator) -> Trial:
    """Ascents over the weights stay below H by at least the bound; it is positive where dimensions are twice as many as it takes.

    With just as many, n, it is positive for almost all P, but may be so small that rounding hides it. In half of the cases the best
    velocities are nearly some weights': there the bound is nearly sharp.
    """
    chosen, P = _problem(generator, 3 + below(generator, 5))
    rank = 1 + below(generator, len(P) - 1)
    h = noise(generator, len(P), rank) @ noise(generator, rank, 9)
    u = Features(h).svd[0]
    if below(generator, 2):
        made = chosen.standardize(u @ noise(generator, rank, chosen.width))
        P = -chosen.centre(made + size(generator, -1.5, 0) * noise(generator, *P.shape)) / chosen.gamma
    H, proven = float(admissible_set(chosen, "peri").support(P)), gap_of_rank(chosen, P, Features(h))
    starts = torch.cat([noise(generator, 4, rank, chosen.width), -(u.mT @ chosen.centre(chosen.gamma * P)).unsqueeze(0)])
    climbed = ascend(lambda z: -(P * chosen(u @ z)).sum((-2, -1)), starts, (-2, -1), steps=300)
    free = chosen.width - 1 if chosen.centred else chosen.width
    words = f"{norm_words(chosen)}, {len(P)} tokens, rank {rank}"
    scale = float((P.norm(dim=-1) * chosen.maximizer(-P).norm(dim=-1)).sum())
    lost = H - float(climbed.best.amax())
    return worst(
        Trial((proven - lost) / scale, f"{words}: the best weights lose {lost:.6g}, at least {proven:.6g}"),
        holds_if(proven > 0 or (len(P) - rank) * free < 2 * len(P), f"{words}: a gap of {proven:.2g}"),
    )


def step(generator: torch.Generator) -> Trial:
    """The discrete step's H at dt from 1 to 1/1000: never exceeded by 30 raw velocities, approached by long ones along f*."""
    chosen, P = _problem(generator)
    dt, X = size(generator, -3, 0), noise(generator, *P.shape)
    allowed = StepImage(image_of(chosen), X, dt)
    H = float(allowed.support(P))
    scale = float((P.norm(dim=-1) * allowed.maximizer(P).norm(dim=-1)).sum()) + float((P * X).abs().sum()) / dt
    raw = size(generator, -2, 6) * noise(generator, 30, *P.shape)
    made = -(P * (chosen(X + dt * raw) - X)).sum((-2, -1)) / dt
    best = (1e6 * chosen.coordinates(X + dt * allowed.maximizer(P)) - X) / dt
    reached = -(P * (chosen(X + dt * best) - X)).sum() / dt
    return worst(
        Trial((float(made.amax()) - H) / scale, f"{norm_words(chosen)}, dt = {dt:.3g}: the best of 30 raw velocities against H"),
        equal(reached, H, f"{norm_words(chosen)}, dt = {dt:.3g}: a long raw velocity", scale),
    )


def step_limit(generator: torch.Generator) -> Trial:
    """dt H is <P, X - z> for every dt, z the norm of a long raw output towards the image's lowest point.

    X on the image: positive for P at random, where the ODE's H is infinite, and 0 for the P whose lowest point is X, as the ODE's.
    X beyond the lowest point: negative, so that H goes to -inf.
    """
    chosen, P = _problem(generator)
    image = image_of(chosen)
    z = chosen(-1e6 * chosen.centre(chosen.gamma * P))
    X, beyond = chosen(noise(generator, *P.shape)), chosen.beta + (1 + size(generator, -1, 2)) * (z - chosen.beta)
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


def decayed_path(generator: torch.Generator) -> Trial:
    """An ascent over both factors: R^2/2 (lam* - lam) below lam*, nothing above it."""
    path, P = _path(generator)
    threshold = with_evidence(decay_threshold(path, P), path, P)
    assert threshold.below is not None, "it was given evidence"
    radius, value = threshold.below.radii[-1], threshold.below.values[-1]
    words = f"{type(path).__name__}, lam* = {threshold.lower:.3g}"
    return worst(
        *(holds_if(holds, f"{words}: {finding}") for finding, holds in threshold.findings.items()),
        at_most(value, radius**2 / 2 * (threshold.upper - 0.9 * threshold.lower), f"{words}: value against R^2/2 (lam* - lam)"),
    )


def _path(generator: torch.Generator) -> tuple[ValuePath | UnitsPath, Tensor]:
    P = noise(generator, 6, 4)
    if below(generator, 2):
        return ValuePath(noise(generator, 1 + below(generator, 3), 6, 4), 2), P
    return UnitsPath(noise(generator, 6, 4), ACTIVATIONS["relu"], 16, 4), P


def decay_as_printed(generator: torch.Generator) -> Trial:
    """At half of lam* the best value of both factors, for a bound ten times as large, over what it was."""
    path, P = _path(generator)
    found = climb_factors(path, P, decay_threshold(path, P).lower / 2)
    growth = found.values[-1] / max(found.values[-2], 1e-300)
    return at_most(growth, 1.0, f"{type(path).__name__}, lam = lam*/2: the best value with a tenfold bound")


def one_map_decayed(generator: torch.Generator) -> Trial:
    """-<P, h W'> - lam/2 |W|^2 at W = -P'h/lam, which 30 other W do not exceed; 10^4 times that for features 100 times as long."""
    h, P, lam = noise(generator, 5, 6), noise(generator, 5, 4), size(generator, -2, 1)

    def value(c: float, W: Tensor) -> Tensor:
        return -(P * (c * h @ W.mT)).sum((-2, -1)) - lam / 2 * W.square().sum((-2, -1))

    best = -P.mT @ h / lam
    others = best + size(generator, -3, 1) * noise(generator, 30, 4, 6)
    small, large = (float(LastMapDecay(c * h, lam).support(P)) for c in (1.0, 100.0))
    return worst(
        equal(small, value(1.0, best), "H against the value of W = -P'h/lam"),
        at_most(float(value(1.0, others).amax()), small, "the best of 30 other W against H"),
        equal(large, value(100.0, 100 * best), "H at features a hundred times as long"),
        equal(large / small, 1e4, "H at features a hundred times as long, over H"),
    )


def three_factors(generator: torch.Generator) -> Trial:
    """gamma, V and O of size R: R^3 from a decay of R^2, so that ten times lam* is exceeded for large R."""
    x, P = noise(generator, 5, 4), noise(generator, 5, 4)
    gamma, V, out = noise(generator, 4), noise(generator, 4, 4), noise(generator, 4, 4)
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


STATEMENTS: tuple[Statement, ...] = (
    Statement(
        "bounded-gains",
        4,
        "Kan, section 3.3 and eq. 99",
        "behind an output norm H is finite for bounded gains: R sqrt(kappa^2 + |sum_j p_j|^2) over |gamma|^2 + |beta|^2 <= R^2",
        Check(bounded_gains, 1e-9, 0.25),
        Check(frozen_gains, 1e-6, 0.05),
        "the output norm bounds velocities, whatever training does (gamma and beta are trainable)",
    ),
    Statement(
        "gain-decay",
        4,
        "ctrans",
        "cost lam/2 (|gamma|^2 + |beta|^2) behind an output norm: H = (kappa^2 + |sum_j p_j|^2)/(2 lam), any gains",
        Check(gain_decay, 1e-8, 0.05),
    ),
    Statement(
        "gain-box",
        4,
        "ctrans",
        "|gamma_i| <= g, |beta_i| <= b: H <= sqrt(d) g sum_j |p_j| + b |sum_j p_j|_1, attained by RMSNorm",
        Check(gain_box, 1e-12),
    ),
    Statement(
        "rank-gap",
        4,
        "ctrans",
        "rank(h) < n: no weights come nearer to H than sqrt(d)/2 min_j |w_j|/(G^-1)_jj, G = (I - hh^+) * (U* U*')",
        Check(rank_gap, 1e-9),
    ),
    Statement(
        "discrete-hamiltonian",
        4,
        "ctrans, on Kan, appendix J",
        "post, pre_post, deepnorm: of the step N(X + dt r), H = (sum_j sqrt(d)|C(gamma*p_j)| - <p_j, beta> + <P, X>)/dt",
        Check(step, 1e-9),
    ),
    Statement(
        "discrete-hamiltonian-limit",
        4,
        "ctrans",
        "as dt goes to 0, for X on the image, it goes to +inf like 1/dt, unless X is the lowest point for P: there it is 0, as the ODE's",
        Check(step_limit, 1e-9),
    ),
    Statement(
        "weight-decay",
        4,
        "Kan, section 3.2",
        "running cost lam/2 (|V|^2 + |O|^2): H = 0 for lam >= lam*, else infinite; |(A X)'P|_2 of values, max |P'relu(X w)| of units",
        Check(decayed_path, 1e-9, 0.1),
        Check(decay_as_printed, 0.0, 0.02),
        "with weight decay the Hamiltonian exists (whatever the decay)",
    ),
    Statement(
        "weight-decay-features",
        4,
        "ctrans",
        "one decayed map at fixed features h has H = |h'P|^2/(2 lam), which grows like |h|^2 where h is trained",
        Check(one_map_decayed, 1e-10, 0.25),
    ),
    Statement(
        "weight-decay-three",
        4,
        "ctrans",
        "three decayed factors (input gains, V, O): the value grows like R^3, so that H is infinite for every lam",
        Check(three_factors, 0.05, 0.25),
    ),
)
