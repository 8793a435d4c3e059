"""What `ctrans screen` measures of a model, as one table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ctrans.base.from_json import from_json
from ctrans.control.model_check import ModelCheck
from ctrans.examine import (
    diagnosed,
    simulated,  # noqa: F401  # it has the entries of the measures by depth
)
from ctrans.examine.screening.attention import AttentionStep, InitialisationStep
from ctrans.examine.screening.backward import BackwardStep, TransportStep
from ctrans.examine.screening.case import HasValues, StepVerdict
from ctrans.examine.screening.forward import ForwardStep
from ctrans.examine.screening.screen import Screening
from ctrans.examine.screening.screening_checks import (
    QUESTIONS,
    STEPS,
    limits_of,
    measures_of_steps,
)
from ctrans.examine.screening.updates import UpdateStep
from ctrans.measure.findings import SEVERITIES, Finding, Mark
from ctrans.measure.measured import Answer, Measured, Value
from ctrans.measure.measures import MEASURES, Measure
from ctrans.measure.missing import NOT_APPLICABLE

NAMED = 7
"""Up to so many models have an answer each. More are sorted by the number of quantities outside of
their limits.
"""
LIMITS = (
    "The limits are deliberately wide. A model outside them passes its input through unchanged,"
    " diverges, or cannot learn with these weights (red), or would grow faster than weights that"
    " grow (yellow). Within the limits nothing is said about which model is better, nor which"
    " learning rate to take: ctrans study measures that."
)
RESULTS: dict[str, type] = {
    "well-posedness": ModelCheck,
    "forward": ForwardStep,
    "backward": BackwardStep,
    "transport": TransportStep,
    "attention": AttentionStep,
    "updates": UpdateStep,
    "initialisation": InitialisationStep,
}
"""The class of each step's result."""

MEASURES.add(
    "ctrans screen",
    {
        **{
            f"verdict: {step}": Measure(formula=question, title=step, topic="Verdicts")
            for step, question in QUESTIONS.items()
        },
        "added along the depth": Measure(
            formula=(
                "|X_k - Y_k| / |X_k|, Y the state without any sublayer: what is left of the"
                " embedded text"
            ),
            title="added by the depth",
            unit="share of the state, |X − Y| / |X|",
            scope="state",
        ),
        "tokens apart": Measure(
            formula=(
                "1 - mean cosine of two tokens: towards 0 all tokens of a sequence become the same"
                " vector"
            ),
            unit="1 − mean cosine of two tokens",
            scope="state",
        ),
        "velocity's sensitivity": Measure(
            formula=(
                "largest singular value of a velocity's Jacobian: what a small change of the state"
                " can become in a step of length 1"
            ),
            title="sensitivity of a sublayer",
            unit="largest gain, |dv/dX|",
            scope="sublayer",
        ),
        "gradient of a sublayer": Measure(
            formula="|dL/dW|, the norm of the loss's gradient by the weights of each sublayer",
            title="gradients",
            unit="norm of a sublayer's, |dL/dW|",
            scope="sublayer",
        ),
        "gain up to the end": Measure(
            formula=(
                "|J_i:D| |X_i| / |X_D|: how much a relative change of the state at block i can grow"
                " up to the end"
            ),
            title="what a small change becomes",
            unit="relative gain up to the end",
            scope="size",
            over="block that it is made before",
        ),
        "one step of Adam": Measure(
            formula=(
                "by how much of itself one step at learning rate 0.001 on this sublayer's weights"
                " moves the state at the end, to first order; a weight that sublayers share counts"
                " as a free one of each"
            ),
            unit="relative change of the state at the end",
            scope="sublayer",
        ),
        "one step of gradient descent": Measure(
            formula="the same for gradient descent at learning rate 0.1",
            unit="relative change of the state at the end",
            scope="sublayer",
            detail=True,
        ),
        "attention's rows alone": Measure(
            formula="how much a relative change of the state grows through the attention rows",
            unit="relative gain through the softmax",
            scope="sublayer",
        ),
    },
)


def measured(screenings: Mapping[str, Screening]) -> Measured:
    """The table of several models. More than `NAMED` come `by_verdict`."""
    notes = [LIMITS]
    if len(screenings) > NAMED:
        notes.insert(0, "Fewest quantities outside of their limits first.")
    return Measured(
        values=tuple(value for name, model in screenings.items() for value in values(name, model)),
        missing={name: missing(model) for name, model in screenings.items() if missing(model)},
        answers=tuple(answers(screenings)),
        findings={name: findings(model) for name, model in screenings.items()},
        notes={"": notes},
        reasons={name: reasons(model) for name, model in screenings.items()},
        styles={name: model.placement for name, model in screenings.items()},
    )


def by_verdict(screenings: Mapping[str, Screening]) -> dict[str, Screening]:
    """The same, sorted by the number of quantities outside their limits. Models with non-finite
    states come last.
    """

    def badness(name: str) -> tuple[bool, int]:
        screening = screenings[name]
        return screening.broken is not None, len(screening.flags)

    return {name: screenings[name] for name in sorted(screenings, key=badness)}


def findings(screening: Screening) -> list[Finding]:
    """What the screening and the diagnosis of single parts found, the most severe first."""
    every = [*screening.findings, *screening.diagnosis.findings]
    return sorted(every, key=lambda finding: SEVERITIES.index(finding.severity))


def answers(screenings: Mapping[str, Screening]) -> list[Answer]:
    """An answer for each of a few models, or one for all."""
    if len(screenings) <= NAMED:
        return [answer(name, model) for name, model in screenings.items()]
    within = sum(not model.flags and model.broken is None for model in screenings.values())
    return [
        Answer(
            f"{within} of {len(screenings)} models have all measured quantities within their"
            " limits."
        )
    ]


def answer(name: str, screening: Screening) -> Answer:
    """How many quantities are outside of their limits, how many are unknown, and how much the
    diagnosis found.
    """
    if screening.broken == -1:
        return Answer(f"{name}: the embedded text is not finite.", "bad")
    if screening.broken is not None:
        return Answer(
            f"{name}: the hidden states are not finite from segment {screening.broken} on.", "bad"
        )
    figures = [value for step in screening.steps.values() for value in step.quantities.values()]
    count = sum(not math.isnan(figure) for figure in figures)
    flags = len(screening.flags)
    single = screening.diagnosis.findings
    if flags:
        parts = [f"{flags} of {count} measured quantities outside their limits"]
    else:
        parts = [f"{count} of {count} measured quantities within limits"]
    if count < len(figures):
        parts.append(f"{len(figures) - count} unknown")
    if single:
        parts.append(f"{diagnosed.counted(single)} in single parts")
    else:
        parts.append("nothing found in single parts")
    serious = any(finding.severity != "note" for finding in findings(screening))
    mark: Mark = "good"
    if serious:
        mark = "bad"
    elif single or flags:
        mark = "note"
    return Answer(f"{name}: {', '.join(parts)}.", mark)


def values(model: str, screening: Screening) -> Iterator[Value]:
    """The rows: verdicts and quantities of the whole model, the rows of the steps' results,
    such as figures by depth, and the readings of its parts.
    """
    for step, verdict in screening.steps.items():
        yield Value(model, _verdict_of(step), None, words=verdict.verdict)
    readings = screening.diagnosis.readings
    of_whole_model = set()
    for verdict in screening.steps.values():
        for name, figure in verdict.quantities.items():
            if name in readings and MEASURES[name].scope != "run":
                continue  # the diagnosis has its rows by depth, of which the step judges one
            of_whole_model.add(name)
            yield Value(
                model,
                name,
                figure,
                error=verdict.errors.get(name),
                words=verdict.flags.get(name, ""),
            )
    for verdict in screening.steps.values():
        yield from _of_result(model, verdict.result)
    for value in diagnosed.values(model, readings):
        if value.measure not in of_whole_model:
            yield value


def _verdict_of(step: str) -> str:
    """The measure of a step's verdict. A plugin's step has none of its own before."""
    name = f"verdict: {step}"
    if name not in MEASURES:
        formula = step
        if step in STEPS and STEPS[step].question:
            formula = STEPS[step].question
        measure = Measure(formula=formula, title=step, topic="Verdicts")
        MEASURES.add("ctrans screen", {name: measure})
    return name


def _of_result(model: str, result: Any) -> Iterator[Value]:
    """The rows of a step's result, if it has any. The `values` of a mapping are no rows."""
    if isinstance(result, HasValues) and not isinstance(result, Mapping):
        yield from result.values(model)


def missing(screening: Screening) -> dict[str, str]:
    """What was not measured, and why."""
    lacking = dict(diagnosed.missing(screening.diagnosis))
    lacking |= {_verdict_of(step): why for step, why in screening.missing.items()}
    for verdict in screening.steps.values():
        lacking |= verdict.missing
    return lacking


def reasons(screening: Screening) -> list[str]:
    """Why each step has its verdict, or none."""
    lines = []
    for step in dict.fromkeys((*STEPS, *screening.steps, *screening.missing)):
        if step in screening.missing:
            lines.append(f"{step}: {NOT_APPLICABLE}. {screening.missing[step]}")
        elif step in screening.steps:
            verdict = screening.steps[step]
            lines.append(f"{step}: {verdict.verdict}. {verdict.why}")
            lines += dict.fromkeys(verdict.notes)
    return lines


def as_object(screenings: Mapping[str, Screening]) -> dict[str, Any]:
    """The screenings in the JSON of version 1."""
    quantities = {
        _old_name(name): {
            "description": measure.formula,
            "gauge": measure.gauge,
            "decimals": measure.decimals,
            "share": measure.share,
            **limits_of(name),
        }
        for name, measure in measures_of_steps().items()
    }
    models = {}
    for name, screening in screenings.items():
        steps = {
            step: {
                **vars(verdict),
                "quantities": _old(verdict.quantities),
                "errors": _old(verdict.errors),
                "flags": _old(verdict.flags),
            }
            for step, verdict in screening.steps.items()
        }
        models[name] = {
            **vars(screening),
            "flags": _old(screening.flags),
            "steps": steps,
            "findings": screening.findings,
        }
    return {"quantities": quantities, "models": models}


def _old(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {_old_name(name): figure for name, figure in figures.items()}


def _old_name(name: str) -> str:
    """The name of a measure in the JSON of version 1."""
    if name in MEASURES and MEASURES[name].key:
        return MEASURES[name].key
    return name


def measured_in(result: Mapping[str, Any]) -> Measured:
    """The table of a screening's JSON of version 1. Raises ConfigError for another object."""
    return measured({name: _screening(model) for name, model in result["models"].items()})


def _screening(model: Mapping[str, Any]) -> Screening:
    new_names = {_old_name(name): name for name in measures_of_steps()}
    steps = {}
    missing = dict(model.get("missing") or {})
    for step, verdict in model["steps"].items():
        if verdict.get("verdict") == NOT_APPLICABLE:  # in place of an entry of `missing`
            missing[step] = verdict["why"]
            continue
        renamed = dict(verdict)
        for key in ("quantities", "errors"):
            renamed[key] = {
                new_names.get(name, name): figure
                for name, figure in (verdict.get(key) or {}).items()
            }
        for name, figure in renamed["quantities"].items():
            if figure is None:
                renamed["quantities"][name] = math.nan
        result = renamed.pop("result", None)
        step_verdict = from_json(StepVerdict, renamed)
        if result is not None and step in RESULTS:
            step_verdict = replace(step_verdict, result=from_json(RESULTS[step], result))
        steps[step] = step_verdict
    without_steps = from_json(Screening, {**model, "steps": {}, "missing": missing})
    return replace(without_steps, steps=steps)
