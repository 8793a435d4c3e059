"""A diagnosis in plain words: what the command prints and what `print(diagnosis)` gives."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ctrans.stability.diagnosis.ailments import AILMENTS, SEVERITIES

if TYPE_CHECKING:
    from ctrans.stability.diagnosis.diagnose import Diagnosis, Symptom

OF_PARTS = "A diagnosis looks for faults of single parts"
PLACES = 6
"""So many places of one finding are listed; all are in the JSON."""
WIDTH = 80
"""Columns of a diagnosis as text."""


def summary(name: str, diagnosis: Diagnosis) -> str:
    """How many findings there are, or that there is none, and of how many kinds that were examined."""
    count, looked = len(diagnosis.symptoms), f"{len(diagnosis.examined)} of {len(AILMENTS)} kinds of finding were examined"
    if diagnosis.unexamined:
        looked += ", the others need parts or options that are not here"
    if diagnosis.healthy:
        return f"{name}: nothing found in single parts; {looked}"
    by_severity = {severity: sum(s.severity == severity for s in diagnosis.symptoms) for severity in SEVERITIES}
    words = ", ".join(f"{found} {severity}" for severity, found in by_severity.items() if found)
    return f"{name}: {count} finding{'s' * (count > 1)} ({words}); {looked}"


def rows(symptom: Symptom) -> Mapping[str, str]:
    """Where, how much, beyond which limit, what it does, what helps, and where else."""
    ailment = AILMENTS[symptom.ailment]
    found = {
        "where": symptom.worst.place,
        "figure": f"{symptom.worst.said}{_spread(symptom)}",
        "limit": f"{ailment.says}: {symptom.limit} ({symptom.source})",
        "does": symptom.does,
        "helps": symptom.helps,
    }
    others = [reading.place for reading in symptom.readings[1:]]
    if others:
        more = f"; and {len(others) - PLACES} more" if len(others) > PLACES else ""
        found["also"] = "; ".join(others[:PLACES]) + more
    return found


def close_to_limits(diagnosis: Diagnosis) -> list[str]:
    """What is inside of a limit and not far from it, a line each."""
    return [
        f"close to a limit: {name}: {reading.place}: {reading.said} (a finding {AILMENTS[name].limit})"
        for name, reading in diagnosis.near.items()
    ]


def not_looked_at(diagnosis: Diagnosis) -> list[str]:
    """What could not be looked at and why, and the kinds of finding that were not examined with what each takes, a line each."""
    lines = [f"not looked at: {what}: {why}" for what, why in diagnosis.unknown.items()]
    if diagnosis.unexamined:
        wanting = [f"{name} (takes {AILMENTS[name].needs or 'a walk'})" for name in diagnosis.unexamined]
        lines.append(f"not examined, so neither found nor ruled out: {'; '.join(wanting)}")
    return lines


def limits_in_words() -> list[str]:
    """Of every finding what is measured, its limit, and who set it, a line each."""
    return [f"{name} ({a.severity}): {a.says}: {a.limit} ({a.source})" for name, a in AILMENTS.items()]


def limits_table() -> str:
    """The same as a table in Markdown."""
    cells = [[name, a.severity, a.says, a.limit, a.source] for name, a in AILMENTS.items()]
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
    return "\n".join(["| finding | severity | what is measured | limit | source |", "| --- | --- | --- | --- | --- |", *rows])


def in_words(diagnosis: Diagnosis, name: str = "diagnosis") -> str:
    """The whole diagnosis as text of 80 columns."""
    lines = textwrap.wrap(summary(name, diagnosis), WIDTH)
    for i, symptom in enumerate(diagnosis.symptoms, 1):
        lines += ["", f"{i}. {symptom.ailment} ({symptom.severity})"]
        for word, text in rows(symptom).items():
            lines += textwrap.wrap(text, WIDTH, initial_indent=f"   {word:<7}", subsequent_indent=" " * 10)
    for said in ([*close_to_limits(diagnosis)], not_looked_at(diagnosis)):
        lines += ["", *(line for each in said for line in textwrap.wrap(each, WIDTH, subsequent_indent="  "))] if said else []
    return "\n".join(lines)


def _spread(symptom: Symptom) -> str:
    """Over several texts or seeds: how many show it, and the reading that is judged with its deviation."""
    if symptom.texts == 1:
        return ""
    known = [value for value in symptom.values if math.isfinite(value)]
    mean = f"{sum(known) / len(known):.3g}" if known else "not finite"
    bar = "" if symptom.deviation is None else f" ± {symptom.deviation:.1g}"
    quantity = AILMENTS[symptom.ailment].quantity
    return f"; seen in {symptom.seen} of {symptom.texts} walks, {quantity} {mean}{bar}"
