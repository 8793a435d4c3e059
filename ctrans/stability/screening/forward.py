"""The screening's first two steps: is training well-posed, and how do hidden states grow?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ctrans.control.costate import Costate, costate
from ctrans.control.model_check import ModelCheck, Remedy, SegmentCheck, check_segment
from ctrans.stability.forward.bounds import ForwardBounds, forward_bounds
from ctrans.stability.forward.growth_law import GrowthLaw, growth_law
from ctrans.stability.forward.moments import moments
from ctrans.stability.forward.single_entries import DataVariance, Massive, data_variance, massive_activations
from ctrans.stability.screening.case import Case, Finding, attempt, exponent, spread
from ctrans.stability.screening.score import decades
from ctrans.stability.weight_scaling import WeightScaling, weight_scaling

CERTIFIED_TOKENS = 64
"""How many tokens a certificate is for: its verdict is about each token alone."""
FOLLOWS = 0.25
"""Exponents in the weights above this say that the weights are followed, and above 1 + this that they are outrun."""
RESOLVED = 1e-6
"""Logarithms of a ratio below this are no growth but rounding."""
LAW_POINTS = 8
"""Points from which laws are compared: with fewer, Akaike's correction for small samples decides and not the fit."""


def screen_well_posedness(case: Case) -> Finding:
    """Kan's step 1: the Hamiltonian's certificates on some segments, at the discrete model's costates (theory, section 4).

    The ingredient is the largest k of sup -<P, f> ~ R^k with weights bounded by R: 0 where H is finite, 1 where it is not.
    """
    x, y = case.part(case.tokens)[:1, :CERTIFIED_TOKENS], case.part(case.targets)[:1, :CERTIFIED_TOKENS]
    found = costate(case.model, x, y)
    sublayers = case.model.depth.sublayers
    chosen = spread(len(sublayers), case.effort.certified)
    segments = [_certify(case, found, k) for k in chosen]
    names = sorted({sublayer.placement.name for sublayer in sublayers})
    check = ModelCheck(", ".join(names), found.loss, x.numel(), tuple(segments))
    exponents = [_exponent(segment) for segment in segments]
    k = max(exponents)
    top = check.largest.certificate
    gaps = [abs(s.certificate.velocities.gap) for s in segments if s.certificate.velocities is not None]
    size = f"H is finite, ascents come within {max(gaps):.0e} of it" if check.verdict == "well-posed" else "H is infinite"
    why = (
        f"velocities: {top.words}; {size}, and the best value grows like R^{exponent(k)} with a bound R on the weights, as "
        f"certified on {len(chosen)} of {len(sublayers)} segments"
    )
    notes = [f"the evidence disagrees: {failure}" for failure in check.failures]
    return Finding(check.verdict, f"H ~ R^{exponent(k)}", why, {"H in weights": k}, notes, check)


def _certify(case: Case, found: Costate, k: int) -> SegmentCheck:
    """A norm around the state needs a state on its image, which the embedding is not on."""
    sublayer = case.model.depth.sublayers[k]
    if sublayer.state_norm is not None:
        x, p = found.starts[k]
        starts = (*found.starts[:k], (sublayer.state_norm.retract(x), p), *found.starts[k + 1 :])
        found = dataclasses.replace(found, starts=starts)
    return check_segment(sublayer, found, k, Remedy())


def _exponent(segment: SegmentCheck) -> float:
    """The measured one, where an ascent over weights was made; otherwise what the verdict means."""
    grown = segment.certificate.growth
    if grown is not None:
        return max(grown.exponent, 0.0)
    return 0.0 if segment.certificate.verdict == "well-posed" else 1.0


@dataclasses.dataclass(frozen=True)
class ForwardStep:
    """Moments by depth-time as far as states are finite, their bounds and growth laws, single entries, and weight scaling.

    `used` is the mean absolute value over its sharper bound at the last time.
    """

    times: list[float]
    mean_abs: list[float]
    variance: list[float]
    rms: list[float]
    bounds: ForwardBounds | None
    used: float | None
    mean_abs_law: GrowthLaw | None
    variance_law: GrowthLaw | None
    massive: Massive
    data: DataVariance | None
    scaling: WeightScaling | None


def screen_forward(case: Case) -> Finding:
    """Kan's step 2: moments, bounds and growth laws by depth, and under scaled weights (theory, section 6).

    Ingredients: the exponent of mean|X_D| in the weights; and by how many decades RMS grows from the input, or from 1, the size
    of a normalised token, if the input is smaller.
    """
    depth, states = case.model.depth, case.reached
    notes: list[str] = []
    each = [moments(x) for x in states]
    times = list(depth.times[: len(states)])
    mean_abs, variance, rms = ([getattr(m, name) for m in each] for name in ("mean_abs", "variance", "rms"))
    bounds = attempt(notes, forward_bounds, depth, states)
    scaling = attempt(notes, weight_scaling, depth, case.part(states[0]))
    result = ForwardStep(
        times,
        mean_abs,
        variance,
        rms,
        bounds,
        None if bounds is None or not bounds.mean_abs[len(states) - 1] else mean_abs[-1] / bounds.mean_abs[len(states) - 1],
        _law(times, mean_abs),
        _law(times, variance),
        massive_activations(states),
        attempt(notes, data_variance, depth, states, bounds) if bounds is not None else None,
        scaling,
    )
    slope = math.nan if scaling is None else run_away(scaling.slope, scaling.mean_abs)
    if case.broken is not None:
        start = f"which starts at t = {times[-1]:.3g} with mean|x| = {mean_abs[-1]:.3g}"
        why = f"activations become non-finite in segment {case.broken}, {start}"
        ingredients = {"|x| in weights": slope, "|x| in depth": math.inf}
        return Finding("non-finite", f"t = {times[-1]:.3g}", why, ingredients, notes, result)
    ingredients = {"|x| in weights": slope, "|x| in depth": decades(rms[-1] / max(rms[0], 1.0))}
    figure = f"|x| {mean_abs[0]:.2g} to {mean_abs[-1]:.2g}"
    return Finding(weights_verdict(slope), figure, _why_forward(result, slope), ingredients, notes, result)


def _why_forward(result: ForwardStep, slope: float) -> str:
    law = "no law" if result.mean_abs_law is None else f"{result.mean_abs_law.law} by AIC"
    used = "without a bound" if result.used is None else f"{result.used:.0%} of its bound"
    massive = result.massive.ratio[-1]
    return (
        f"mean|x| goes from {result.mean_abs[0]:.3g} to {result.mean_abs[-1]:.3g} ({law}), {used}; it follows weights a hundred "
        f"times as large and more like c^{exponent(slope)}, and the largest entry is {massive:.1f} times the median"
    )


def _law(times: Sequence[float], values: Sequence[float]) -> GrowthLaw | None:
    """None for few points, and for a moment that does not change."""
    positive = [value for value in values if value > 0]
    if len(positive) < max(len(values), LAW_POINTS) or math.log(max(positive) / min(positive)) < RESOLVED:
        return None
    return growth_law(times, values)


def run_away(slope: float, values: Sequence[float | None]) -> float:
    """The slope, or inf where it is unknown because values overflowed."""
    overflowed = any(value is not None and not math.isfinite(value) for value in values)
    return math.inf if math.isnan(slope) and overflowed else slope


def weights_verdict(exponent: float) -> str:
    """In a word, what larger weights do, from the exponent of what they make grow."""
    if math.isnan(exponent):
        return "unknown"
    return "held" if exponent < FOLLOWS else "follows weights" if exponent < 1 + FOLLOWS else "outruns weights"
