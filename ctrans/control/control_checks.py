"""The checks of `ctrans hjb-check`: the certificates of segments as findings."""

from __future__ import annotations

import math
import sys

from ctrans.control.model_check import ModelCheck
from ctrans.control.segment_check import SegmentCheck
from ctrans.measure.findings import OURS, Check, Finding, Reading
from ctrans.measure.measures import MEASURES, Measure, checks_of

MEASURES.add(
    "ctrans hjb-check",
    {
        "failures": Measure(
            formula="certificate's evidence that does not support its verdict",
            scope="sublayer",
            checks={
                "evidence disagrees": Check(
                    severity="broken",
                    source=f"{OURS}: tolerances of the ascents",
                    impact=(
                        "The verdict of this segment is not certified: an ascent ended early, or"
                        " the verdict is wrong."
                    ),
                    remediation=(
                        "Compare another --seed, --batch or --context, and use --dtype float64. If"
                        " the same evidence disagrees there, report it with the command and"
                        " hjb-check.json."
                    ),
                    high=0.0,
                    near=None,
                )
            },
        ),
        "H of a segment": Measure(
            formula="sup of -<P, f> over the velocities f that the placement allows",
            scope="sublayer",
            checks={
                "Hamiltonian is infinite": Check(
                    severity="note",
                    source="Kan et al. 2025: training is well-posed where H is finite",
                    impact=(
                        "The best velocity of the segment is infinite: only the size of its weights"
                        " bounds it. This holds for GPT-2 and Llama. It is no defect of the model."
                    ),
                    remediation=(
                        "To make H finite: a norm behind each sublayer (--placement peri or"
                        " output), a weight penalty above the one needed (--weight-decay; none"
                        " suffices for a gated FFN), or a kinetic cost (--kinetic)."
                    ),
                    high=sys.float_info.max,
                    condition="H is infinite",
                    near=None,
                )
            },
        ),
        "open segments": Measure(
            formula="segments for which neither a bound on H nor a counterexample was found",
            scope="sublayer",
            checks={
                "Hamiltonian is undecided": Check(
                    severity="note",
                    source=OURS,
                    impact="Whether the best velocity of the segment is finite is not known.",
                    remediation=(
                        "Compare another --weight-decay, or a cost with a closed form (--kinetic,"
                        " --last-map-decay). Where H is 0 because the head is 0, train it first."
                    ),
                    high=0.0,
                    condition="no bound on H and no counterexample was found",
                    near=None,
                )
            },
        ),
    },
    topic="control",
)
CHECKS = checks_of("control")
VERDICTS = {"degenerate": "Hamiltonian is infinite", "open": "Hamiltonian is undecided"}


def findings_of(name: str, check: ModelCheck) -> list[Finding]:
    """The findings of a model's certificates; `name` is the model's name in places."""
    readings_by_rule = {
        rule: [_reading(name, segment) for segment in check.segments if segment.verdict == verdict]
        for verdict, rule in VERDICTS.items()
    }
    readings_by_rule["evidence disagrees"] = [
        Reading(
            float(len(segment.failures)),
            _place(name, segment),
            "; ".join(segment.failures),
            segment.segment,
        )
        for segment in check.segments
        if segment.failures
    ]
    findings = []
    for rule, readings in readings_by_rule.items():
        if len(readings) == 1:
            findings.append(CHECKS.finding(rule, readings[0], places=[]))
        elif readings:
            findings.append(CHECKS.finding(rule, readings[0], places=readings))
    return CHECKS.ordered(findings)


def _reading(name: str, segment: SegmentCheck) -> Reading:
    value = segment.hamiltonian
    if value is None:
        value = math.nan
        text = "H is not known"
    else:
        text = f"H = {value:.3g}"
    growth = segment.certificate.growth
    if growth is not None:
        text += (
            f", the best value grows like R^{max(growth.exponent, 0.0):.2g} with a bound R on the"
            " weights"
        )
    return Reading(value, _place(name, segment), text, segment.segment)


def _place(name: str, segment: SegmentCheck) -> str:
    return f"{name}, segment {segment.segment} ({segment.kind})"
