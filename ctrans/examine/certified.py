"""What `ctrans hjb-check` measures of a model, as one table: which weights need a bound or a decay
so that every layer has a finite best output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ctrans.base.from_json import from_json
from ctrans.control.admissible import VERDICTS, Posedness
from ctrans.control.control_checks import findings_of
from ctrans.control.costate import ZERO_GRADIENT
from ctrans.control.model_check import ModelCheck
from ctrans.control.segment_check import SegmentCheck
from ctrans.examine.penalties import decay_notes, penalties, why_no_penalty
from ctrans.measure import state_measures as state_measures  # the kind of a sublayer
from ctrans.measure.measured import Answer, Measured, Value
from ctrans.measure.measures import MEASURES, Measure

SHORT = {
    "well-posed for bounded gains": "well-posed (bounded gains)",
    "well-posed, the rest fixed": "well-posed ({held} fixed)",
}
"""Verdicts as a table writes them."""
SENTENCES = {
    "well-posed": "well-posed",
    "well-posed for bounded gains": "well-posed while the norms' gains stay bounded",
    "well-posed, the rest fixed": "well-posed while {held} stay fixed",
    "open": "not decided",
    "degenerate": "degenerate",
}
"""Verdicts as the answer writes them."""
MEANINGS = {
    "well-posed": "In a well-posed model each layer has a finite best output.",
    "degenerate": (
        "In a degenerate one a larger output is always better, so that only a bound or a penalty on"
        " the weights limits it; GPT-2 and Llama are degenerate and train well."
    ),
}
"""What a verdict means, by its first word."""
VerdictWhileHeld = tuple[Posedness, str]
"""A verdict, and what it holds fixed."""
NO_ODE = "no ODE"
NOT_CHECKED = "verdict, Transformer"
"""The measure that the reason is filed under if a regularization does not apply to a placement."""

MEASURES.add(
    "ctrans hjb-check",
    {
        "verdict, Transformer": Measure(
            formula=(
                "whether each layer of the Transformer has a finite best output. Well-posed: the"
                " Hamiltonian H of its step is finite. Degenerate: H is infinite. Bounded gains: H"
                " is finite at the norms' present gains and offsets, and grows in proportion to"
                " them. Biases or gains fixed: only if they are not trained. A question mark: the"
                " evidence disagrees"
            ),
            title="verdict",
        ),
        "verdict, ODE": Measure(
            formula=(
                "the verdict of the ODE that the Transformer solves by Euler steps. No ODE: a norm"
                " around the state that is no projection on a surface"
            ),
            detail=True,
        ),
        "steepest descent": Measure(
            formula=(
                "loss decrease per depth-time by a layer's best output. It is H(P) = sup -<P, f>,"
                " in closed form, of the Transformer's step at the segment with the"
                " largest costate"
            ),
            source="Kan, section 3",
        ),
        "steepest descent of the ODE": Measure(
            formula="the same for the ODE, where the Transformer's step has an H of its own",
            detail=True,
        ),
        "penalty needed": Measure(
            formula=(
                "weight penalty above which the rate is finite, if the loss has lam/2 |W|^2 of"
                " every matrix. AdamW's decoupled decay is no such penalty. It is dt lam* at this"
                " text and these input gains and residuals, proven of the model as read. None: no"
                " penalty suffices"
            ),
            shown_by="interval",
        ),
        "penalty needed by the ODE": Measure(
            formula=(
                "the same for the ODE, where the Transformer needs none; an estimate, for its"
                " gradients are those of a solver"
            ),
            detail=True,
            shown_by="interval",
        ),
        "penalty too small": Measure(
            formula="a weight penalty with which the best output is infinite, as found by search",
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
            formula="that of each segment of the ODE. Where it is infinite there is no point",
            title="steepest descent of the ODE",
            unit="H(P) = sup −<P, f>",
            scope="sublayer",
        ),
        "verdict of a segment": Measure(
            formula="that of each segment of the ODE",
            title="verdict of the ODE",
            scope="sublayer",
            detail=True,
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
    """The verdict of each model, and where its ODE has another one. `placements` has the placement
    of each model.
    """
    wrong = [name for name, check in models.items() if not check.agrees]
    if wrong:
        return Answer(
            "The numerical evidence disagrees with the verdict for"
            f" {_in_a_sentence(wrong, placements)}.",
            "bad",
        )
    of_models: dict[VerdictWhileHeld, list[str]] = {}
    of_odes: dict[VerdictWhileHeld, dict[VerdictWhileHeld, list[str]]] = {}
    for name, check in models.items():
        held = " and ".join(check.held) or "the other weights"
        of_transformer = (check.step_verdict, held)
        of_ode = (check.verdict, held)
        if of_ode == of_transformer or not check.has_ode:
            of_models.setdefault(of_transformer, []).append(name)
        else:
            of_odes.setdefault(of_ode, {}).setdefault(of_transformer, []).append(name)
    sentences = []
    for verdict in sorted({*of_models, *of_odes}, key=lambda key: VERDICTS.index(key[0])):
        parts = []
        if verdict in of_models:
            parts.append(_in_a_sentence(of_models[verdict], placements))
        for of_transformer, names in of_odes.get(verdict, {}).items():
            shown = _in_a_sentence(names, placements)
            parts.append(f"read as an ODE, {shown}, whose Transformer is {_words(of_transformer)}")
        words = _words(verdict)
        sentences.append(f"{words[0].upper()}{words[1:]}: {'; and, '.join(parts)}.")
    text = " ".join(sentences)
    sentences += [meaning for word, meaning in MEANINGS.items() if word in text.lower()]
    hopeless = [name for name, check in models.items() if _no_penalty_suffices(check)]
    if hopeless:
        sentences.append(f"No penalty suffices for {_in_a_sentence(hopeless, placements)}.")
    return Answer(" ".join([*sentences, "Numerical searches agree."]), "good")


def _words(verdict: VerdictWhileHeld) -> str:
    name, held = verdict
    return SENTENCES[name].format(held=held)


def _no_penalty_suffices(check: ModelCheck) -> bool:
    threshold = check.training_threshold
    is_degenerate = "degenerate" in (check.verdict, check.step_verdict)
    return is_degenerate and threshold is not None and math.isinf(threshold.lower)


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


def values_of(model: str, check: ModelCheck) -> Iterator[Value]:
    """The rows of a model."""
    yield Value(model, "verdict, Transformer", None, words=_verdict(check, check.step_verdict))
    of_the_ode = NO_ODE
    if check.has_ode:
        of_the_ode = _verdict(check, check.verdict)
    yield Value(model, "verdict, ODE", None, words=of_the_ode)
    top = check.largest
    yield from _steepest(model, top)
    if _penalty(check) != "penalty needed":
        yield from penalties(model, "penalty needed", None)
    yield from penalties(model, _penalty(check), check.training_threshold)
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
    no_penalty = why_no_penalty(check)
    if no_penalty:
        reasons[_penalty(check)] = no_penalty
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


def _steepest(model: str, segment: SegmentCheck) -> Iterator[Value]:
    """H of the Transformer's step, and of the ODE where that is another one."""
    if segment.step is None or not segment.ode:
        yield _rate(model, "steepest descent", segment)
        return
    ceiling = segment.step.ceiling
    words = ""
    if ceiling is not None:
        words = f"{segment.step.hamiltonian:.3g}..{ceiling:.3g}"
    yield Value(model, "steepest descent", segment.step.hamiltonian, words=words)
    yield _rate(model, "steepest descent of the ODE", segment)


def _rate(model: str, measure: str, segment: SegmentCheck) -> Value:
    """H of a segment, from what was found to what is proven where its maximiser is the best that
    was found.
    """
    value = segment.hamiltonian
    ceiling = segment.certificate.ceiling
    if value is None and segment.verdict == "open":
        return Value(model, measure, None, words="open")
    if value is None:
        return Value(model, measure, None, words="finite")
    if ceiling is None or segment.decayed:
        return Value(model, measure, value)
    return Value(model, measure, value, words=f"{value:.3g}..{ceiling:.3g}")


def _penalty(check: ModelCheck) -> str:
    """The name of the penalty: that of the Transformer, unless only its ODE needs one."""
    is_unknown = bool(check.missing) and check.training_threshold is None
    if is_unknown or any(segment.needs_penalty for segment in check.segments):
        return "penalty needed"
    return "penalty needed by the ODE"


def _verdict(check: ModelCheck, verdict: str) -> str:
    held = "+".join(check.held) or "the rest"
    words = SHORT.get(verdict, verdict).format(held=held)
    if not check.agrees:
        words = f"{words}?"
    return words


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


def notes_of(check: ModelCheck) -> list[str]:
    """What replaces an ODE, what was skipped, what a weight decay does, and where more than one
    velocity is optimal.
    """
    lines: list[str] = []
    if check.instead is not None:
        lines.append(check.instead)
    lines += [f"{where} is skipped: {why}" for where, why in check.missing.items()]
    lines += decay_notes(check)
    if not any(segment.costate_norm for segment in check.segments):
        lines.append(f"{ZERO_GRADIENT}. So no infinite H is claimed")
    ties = sum(segment.certificate.ties for segment in check.segments)
    if ties:
        lines.append(
            f"a tie, more than one velocity is optimal, for {ties} tokens, of {check.tokens} in"
            f" each of {len(check.segments)} segments"
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
