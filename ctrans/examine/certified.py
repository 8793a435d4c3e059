"""What `ctrans hjb-check` measures of a model, as one table: which weights need a bound or a decay
so that every layer has a finite best output.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ctrans.base.from_json import from_json
from ctrans.control.control_checks import findings_of
from ctrans.control.costate import ZERO_GRADIENT
from ctrans.control.decay_threshold import DecayThreshold
from ctrans.control.model_check import ModelCheck
from ctrans.control.segment_check import SegmentCheck
from ctrans.measure import state_measures as state_measures  # the kind of a sublayer
from ctrans.measure.measured import Answer, Measured, Value
from ctrans.measure.measures import MEASURES, Measure

FREE = {
    "well-posed": "nothing",
    "well-posed for bounded gains": "gains",
    "degenerate": "weights",
    "open": "unknown",
}
"""What has to be bounded or penalised so that H is finite, by verdict."""
BY_A_BOUND = "weights, by a bound"
"""What has to be bounded where no penalty makes H finite."""
NEEDS = (
    "what must be bounded or penalised so that every layer has a finite best output: the norms'"
    " gains and offsets, or the weights. A question mark: the evidence disagrees"
)
SENTENCES = {
    "nothing": "every layer of {} has a finite best output",
    "gains": "every layer of {} has a finite best output while the norms' gains stay bounded",
    "weights": (
        "the best outputs of {} are finite only with a bound or a penalty on the weights (no fault"
        " of a model)"
    ),
    BY_A_BOUND: (
        "the best outputs of {} are finite only with a bound on the weights, as no penalty suffices"
        " (no fault of a model)"
    ),
    "unknown": "it is not known whether the best outputs of {} are finite",
}
NO_ODE = "no ODE"
NO_PENALTY = "none"
NOT_CHECKED = "verdict, Transformer"
"""The measure that the reason is filed under if a regularization does not apply to a placement."""

MEASURES.add(
    "ctrans hjb-check",
    {
        "needs a bound, ODE": Measure(formula=NEEDS),
        "needs a bound, Transformer": Measure(formula=NEEDS),
        "steepest descent": Measure(
            formula=(
                "H(P) = sup -<P, f>: loss decrease per unit of depth-time by a layer's best output,"
                " in closed form, at the segment with the largest costate"
            ),
            source="Kan, section 3",
        ),
        "penalty needed": Measure(
            formula=(
                "the weight penalty above which the Transformer's rate is finite, or the ODE's if"
                " the Transformer needs none (found-proven): dt lam* of lam/2 |W|^2 for every"
                " matrix, not AdamW's decoupled decay; at this text and these input gains. None: no"
                " penalty suffices"
            ),
            shown_by="interval",
        ),
        "verdict, ODE": Measure(
            formula=(
                "well-posed: H is finite. For bounded gains: H is finite at the norm's present"
                " gains and offsets, and grows in proportion to them. Degenerate: H is infinite."
                " Biases or gains fixed: only if they are not trained"
            ),
            detail=True,
        ),
        "verdict, Transformer": Measure(
            formula=(
                "the same for the discrete step. No ODE: a norm around the state that is no"
                " projection on a surface"
            ),
            detail=True,
        ),
        "segment of the largest costate": Measure(
            formula="the segment where H was taken, P = dL/dX", detail=True
        ),
        "found by search": Measure(
            formula=(
                "the best rate that gradient ascents found; where it is infinite, within the"
                " largest bound tried"
            ),
            detail=True,
        ),
        "Kan's value": Measure(
            formula="of H, for LayerNorm, as the paper prints it", source="Kan", detail=True
        ),
        "gap": Measure(
            key="gap",
            formula="worst distance of the best velocities that were found from H, (H - best)/S",
            detail=True,
        ),
        "weight gap": Measure(
            key="weights", formula="the same for the best last-layer weights W", detail=True
        ),
        "KKT": Measure(
            key="kkt",
            formula="worst residual of the maximiser's first-order conditions",
            detail=True,
        ),
        "apart": Measure(
            key="uniqueness",
            formula="largest distance between maximisers from different starts",
            detail=True,
        ),
        "power of R": Measure(
            key="exponent",
            formula="exponent with which the value grows, |W| bounded by R: k of R^k",
            detail=True,
        ),
        "power with gains": Measure(
            key="gained",
            formula="the same with W, gains and offsets bounded by R together",
            detail=True,
        ),
        "costate of a segment": Measure(
            formula="|P| = |dL/dX|, the loss's gradient by the state",
            title="costate",
            unit="|P| = |dL/dX|",
            scope="sublayer",
        ),
        "steepest descent of a segment": Measure(
            formula="H(P) = sup -<P, f>. Where it is infinite there is no point",
            title="steepest descent",
            unit="H(P) = sup −<P, f>",
            scope="sublayer",
        ),
        "verdict of a segment": Measure(
            formula="well-posed, degenerate or open", title="verdict", scope="sublayer", detail=True
        ),
        "velocities that the placement allows": Measure(
            formula="the admissible set of a segment", scope="sublayer", detail=True
        ),
    },
)


def name_of(norm: str, placement: str, norms: int) -> str:
    """What a model is called: by its placement, and by its norm too where there are several."""
    if norms == 1:
        return placement
    return f"{norm}, {placement}"


def measured(
    checks: Mapping[str, Mapping[str, ModelCheck]],
    refused: Mapping[str, str],
    pde: Mapping[str, Any] | None = None,
) -> Measured:
    """The table of the checks by norm and placement.

    - `refused`: by placement, why a regularization does not apply to it
    - `pde`: figures of the HJB equation in the plane
    """
    models = {
        name_of(norm, placement, len(checks)): check
        for norm, row in checks.items()
        for placement, check in row.items()
    }
    styles = {
        name_of(norm, placement, len(checks)): placement
        for norm, row in checks.items()
        for placement in row
    }
    findings = {name: findings_of(name, check) for name, check in models.items()}
    missing = {
        name_of(norm, placement, len(checks)): {NOT_CHECKED: why}
        for norm in checks
        for placement, why in refused.items()
    }
    missing |= {name: _missing(check) for name, check in models.items() if _missing(check)}
    notes = {"": [f"n/a: {why}" for why in dict.fromkeys(refused.values())]}
    notes |= {name: notes_of(check) for name, check in models.items() if notes_of(check)}
    values = [value for name, check in models.items() for value in values_of(name, check)]
    reasons: dict[str, list[str]] = {}
    if pde:
        reasons["The HJB equation in the plane"] = [
            f"{name}: {figure}" for name, figure in pde.items()
        ]
    return Measured(
        values=tuple(values),
        missing=missing,
        answers=(answer(models, styles),),
        findings={name: several for name, several in findings.items() if several},
        notes=notes,
        reasons=reasons,
        styles=styles,
    )


def answer(models: Mapping[str, ModelCheck], placements: Mapping[str, str]) -> Answer:
    """Which models have a finite best output, and what the others need. `placements` has the
    placement of each model.
    """
    wrong = [name for name, check in models.items() if not check.agrees]
    if wrong:
        return Answer(
            "The numerical evidence disagrees with the verdict for"
            f" {_in_a_sentence(wrong, placements)}.",
            "bad",
        )
    groups: dict[str, list[str]] = {}
    for name, check in models.items():
        groups.setdefault(needed(check, check.step_verdict), []).append(name)
    order = list(SENTENCES)

    def rank(need: str) -> int:
        if need in order:
            return order.index(need)
        return 0

    sentences = []
    for need in sorted(groups, key=rank):
        names = _in_a_sentence(groups[need], placements)
        sentence = SENTENCES.get(need, "every layer of {} has a finite best output with {}")
        sentences.append(sentence.format(names, need))
    text = "; ".join(sentences)
    apart = [
        name
        for name, check in models.items()
        if needed(check, check.verdict) != needed(check, check.step_verdict)
    ]
    about_ode = ""
    if apart:
        about_ode = (
            f" This is about the Transformer: the ODE of {_in_a_sentence(apart, placements)} needs"
            " more, as the table shows."
        )
    return Answer(f"{text[0].upper()}{text[1:]}.{about_ode} Numerical searches agree.", "good")


def _in_a_sentence(names: Sequence[str], placements: Mapping[str, str]) -> str:
    """The models: by their placement where those of all norms are meant, and elsewhere by placement
    and norm, without the comma of the table, which would read as two models.
    """
    written: dict[str, None] = {}
    for name in names:
        placement = placements[name]
        of_all_norms = [other for other in placements if placements[other] == placement]
        if set(of_all_norms) <= set(names):
            written[placement] = None
        else:
            norm = name.removesuffix(f", {placement}")
            written[f"{placement} with {norm}"] = None
    return ", ".join(written)


def needed(check: ModelCheck, verdict: str) -> str:
    """What has to be bounded; what must stay fixed where a penalty decides."""
    held = "+".join(check.held) or "the rest"
    threshold = check.training_threshold
    if verdict == "degenerate" and threshold is not None and math.isinf(threshold.lower):
        return BY_A_BOUND
    return FREE.get(verdict, f"{held} fixed")


def values_of(model: str, check: ModelCheck) -> Iterator[Value]:
    """The rows of a model."""
    doubt = ""
    if not check.agrees:
        doubt = "?"
    ode = NO_ODE
    if check.has_ode:
        ode = f"{needed(check, check.verdict)}{doubt}"
    yield Value(model, "needs a bound, ODE", None, words=ode)
    step = f"{needed(check, check.step_verdict)}{doubt}"
    yield Value(model, "needs a bound, Transformer", None, words=step)
    top = check.largest
    yield _steepest(model, top)
    threshold = check.training_threshold
    if threshold is None or math.isinf(threshold.lower):
        yield Value(model, "penalty needed", None, words=penalty(threshold))
    else:
        yield Value(
            model,
            "penalty needed",
            threshold.lower,
            error=threshold.upper - threshold.lower if math.isfinite(threshold.upper) else None,
            words=penalty(threshold),
        )
    of_the_ode = NO_ODE
    if check.has_ode:
        of_the_ode = _verdict(check, check.verdict)
    yield Value(model, "verdict, ODE", None, words=of_the_ode)
    yield Value(model, "verdict, Transformer", None, words=_verdict(check, check.step_verdict))
    yield Value(model, "segment of the largest costate", top.segment)
    yield Value(model, "found by search", _found(top))
    if top.ellipsoid is not None:
        yield Value(model, "Kan's value", top.ellipsoid)
    for measure, key in MEASURES.keyed("ctrans hjb-check").items():
        figure = check.evidence.get(key)
        if figure is not None:
            yield Value(model, measure, figure)
    for segment in check.segments:
        yield from _of_segment(model, segment)


def _missing(check: ModelCheck) -> dict[str, str]:
    """What was not measured, and why."""
    reasons = dict(check.missing)
    count = len(check.segments)
    without_value = [segment for segment in check.segments if segment.hamiltonian is None]
    undecided = sum(segment.verdict == "open" for segment in without_value)
    parts = []
    if undecided:
        parts.append(f"it is not known whether H is finite in {undecided} of {count} segments")
    if len(without_value) > undecided:
        parts.append(
            f"the weight decay makes H finite in {len(without_value) - undecided} of {count}"
            " segments, and its value has no closed form"
        )
    if parts:
        reasons["steepest descent of a segment"] = "; ".join(parts)
    return reasons


def _of_segment(model: str, segment: SegmentCheck) -> Iterator[Value]:
    k = segment.segment
    name = f"{k} ({segment.kind})"
    yield Value(model, "kind of a sublayer", None, depth=k, words=segment.kind)
    yield Value(model, "costate of a segment", segment.costate_norm, depth=k, place=name)
    if segment.hamiltonian is not None:
        yield Value(
            model, "steepest descent of a segment", segment.hamiltonian, depth=k, place=name
        )
    yield Value(model, "verdict of a segment", None, depth=k, words=segment.verdict)
    allowed = segment.certificate.words
    yield Value(model, "velocities that the placement allows", None, depth=k, words=allowed)


def _steepest(model: str, segment: SegmentCheck) -> Value:
    """H, from what was found to what is proven where its maximiser is the best that was found."""
    value = segment.hamiltonian
    ceiling = segment.certificate.ceiling
    if value is None and segment.verdict == "open":
        return Value(model, "steepest descent", None, words="open")
    if value is None:
        return Value(model, "steepest descent", None, words="finite")
    if ceiling is None or segment.decayed:
        return Value(model, "steepest descent", value)
    return Value(model, "steepest descent", value, words=f"{value:.3g}..{ceiling:.3g}")


def _verdict(check: ModelCheck, verdict: str) -> str:
    if check.held:
        verdict = verdict.replace("the rest fixed", f"{'+'.join(check.held)} fixed")
    if not check.agrees:
        verdict = f"{verdict}?"
    return verdict


def _found(segment: SegmentCheck) -> float | None:
    """The best value of a search; none where a weight decay decides, for which the search does not
    pay.
    """
    certificate = segment.certificate
    if segment.decayed:
        return None
    if certificate.velocities is not None:
        return certificate.velocities.best
    if certificate.growth is not None:
        return certificate.growth.values[-1]
    return None


def penalty(threshold: DecayThreshold | None) -> str:
    """dt lam*, from what was found to what is proven where these differ; a dash if it is not known,
    and NO_PENALTY if it is infinite.
    """
    if threshold is None:
        return "–"
    if math.isinf(threshold.lower):
        return NO_PENALTY
    lower = threshold.lower
    upper = threshold.upper
    if math.isinf(upper):
        return f"≥ {_two_digits(lower, decimal.ROUND_FLOOR)[0]}"
    low, power = _two_digits(lower, decimal.ROUND_FLOOR)
    high, power_of_high = _two_digits(upper, decimal.ROUND_CEILING)
    if power and power == power_of_high:  # one power for both takes less room
        low = low.removesuffix(power)
    if low == high or f"{low}{power}" == high:
        return high
    return f"{low}-{high}"


def _two_digits(value: float, rounding: str) -> tuple[str, str]:
    """A number in two digits, rounded away from the interval that it ends, and its power of ten if
    it is written with one.
    """
    exact = decimal.Decimal(value)
    if exact == 0:
        return "0", ""
    last_digit = decimal.Decimal(1).scaleb(exact.adjusted() - 1)
    rounded = exact.quantize(last_digit, rounding=rounding)
    exponent = rounded.adjusted()
    if -2 <= exponent <= 2:
        return f"{float(rounded):.4g}", ""
    power = f"e{exponent}"
    return f"{float(rounded.scaleb(-exponent)):.1f}{power}", power


def notes_of(check: ModelCheck) -> list[str]:
    """What replaces an ODE, what was skipped, what a weight decay does, and where more than one
    velocity is optimal.
    """
    lines: list[str] = []
    if check.instead is not None:
        lines.append(check.instead)
    lines += [f"{where} is skipped: {why}" for where, why in check.missing.items()]
    lines += _decay_notes(check)
    if not any(segment.costate_norm for segment in check.segments):
        lines.append(f"{ZERO_GRADIENT}; the verdict is of any other costate")
    ties = sum(segment.certificate.ties for segment in check.segments)
    if ties:
        tokens = len(check.segments) * check.tokens
        lines.append(f"a tie, more than one velocity is optimal, for {ties} of {tokens} tokens")
    return lines


def _decay_notes(check: ModelCheck) -> list[str]:
    """What the weight decay asked about does, and what no weight decay can do."""
    threshold = check.training_threshold
    decay = check.largest.weight_decay
    if decay is None:
        return []
    if check.no_threshold:
        return [f"the penalty that H needs is not known: {check.no_threshold}"]
    if threshold is None:
        unknown = sum(segment.verdict == "open" for segment in check.segments)
        if not unknown:
            return []
        return [
            f"{unknown} of {len(check.segments)} segments have a map that gives access to no path"
            " of factors that decay (a scale by channel adds one without): the decay it needs is"
            " not known"
        ]
    if math.isinf(threshold.lower):
        return [
            "no penalty makes H finite: a gated or squared FFN multiplies three factors, and its"
            " value grows like R^3 against a cost of R^2"
        ]
    is_needed = f"dt lam* is {penalty(threshold)}"
    if decay < threshold.lower:
        times = f"{threshold.lower / decay:.3g}"
        lines = [f"a penalty of {decay:g} is {times} times too small for a finite H: {is_needed}"]
    elif decay < threshold.upper:
        lines = [
            f"a penalty of {decay:g} is between the dt lam* that was found and what is proven to"
            f" suffice: {is_needed}"
        ]
    else:
        lines = [f"a penalty of {decay:g} keeps the matrices from running away: {is_needed}"]
    if threshold.bias > 0:
        lines.append(
            "biases without decay make H infinite whatever the penalty, as dt |sum_j p_j| ="
            f" {threshold.bias:.2g} is not 0"
        )
    if threshold.gains:
        lines.append(
            "trained gains of an input norm or a residual make H infinite too: they are a third"
            " factor, and the value grows like R^3"
        )
    return lines


def measured_in(result: Mapping[str, Any]) -> Measured:
    """The table of a check's JSON of version 1. Raises ConfigError for another object."""
    refused = result.get("missing") or result.get("not_applicable") or {}
    return measured(checks_in(result), refused, result.get("pde"))


def checks_in(result: Mapping[str, Any]) -> dict[str, dict[str, ModelCheck]]:
    """The checks of a JSON result, by norm and placement."""
    return {
        norm: {placement: from_json(ModelCheck, check) for placement, check in row.items()}
        for norm, row in result["checks"].items()
    }
