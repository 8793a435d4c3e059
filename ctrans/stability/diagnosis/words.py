"""A diagnosis in plain words: what the command prints and what `print(diagnosis)` gives."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import TYPE_CHECKING

from ctrans import findings
from ctrans.findings import SEVERITIES
from ctrans.stability.diagnosis.diagnostic_checks import CHECKS

if TYPE_CHECKING:
    from ctrans.stability.diagnosis.diagnose import Diagnosis

OF_PARTS = "A diagnosis looks for faults of single parts"
WIDTH = 80
"""Columns of a diagnosis as text."""


def summary(name: str, diagnosis: Diagnosis) -> str:
    """How many findings there are, or that there is none, and of how many kinds that were examined."""
    count, looked = len(diagnosis.findings), f"{len(diagnosis.examined)} of {len(CHECKS)} kinds of finding were examined"
    if diagnosis.unexamined:
        looked += ", the others need parts or options that are not here"
    if diagnosis.healthy:
        return f"{name}: nothing found in single parts; {looked}"
    by_severity = {severity: sum(each.severity == severity for each in diagnosis.findings) for severity in SEVERITIES}
    words = ", ".join(f"{found} {severity}" for severity, found in by_severity.items() if found)
    return f"{name}: {count} finding{'s' * (count > 1)} ({words}); {looked}"


def close_to_limits(diagnosis: Diagnosis) -> list[str]:
    """What is inside of a limit and not far from it, a line each."""
    return [
        f"close to a limit: {name}: {reading.place}: {reading.figure} (a finding {CHECKS[name].limit})"
        for name, reading in diagnosis.near.items()
    ]


def not_looked_at(diagnosis: Diagnosis) -> list[str]:
    """What could not be looked at and why, and the kinds of finding that were not examined with
    what each takes, a line each.
    """
    lines = [f"not looked at: {what}: {why}" for what, why in diagnosis.unknown.items()]
    if diagnosis.unexamined:
        wanting = [f"{name} (takes {CHECKS[name].requires or 'a walk'})" for name in diagnosis.unexamined]
        lines.append(f"not examined, so neither found nor ruled out: {'; '.join(wanting)}")
    return lines


def in_words(diagnosis: Diagnosis, name: str = "diagnosis") -> str:
    """The whole diagnosis as text of 80 columns."""
    lines = textwrap.wrap(summary(name, diagnosis), WIDTH)
    for i, finding in enumerate(diagnosis.findings, 1):
        lines += ["", f"{i}. {finding.check} ({finding.severity})"]
        for word, text in findings.in_words(dataclasses.asdict(finding)).items():
            lines += textwrap.wrap(text, WIDTH, initial_indent=f"   {word:<7}", subsequent_indent=" " * 10)
    for said in ([*close_to_limits(diagnosis)], not_looked_at(diagnosis)):
        lines += ["", *(line for each in said for line in textwrap.wrap(each, WIDTH, subsequent_indent="  "))] if said else []
    return "\n".join(lines)
