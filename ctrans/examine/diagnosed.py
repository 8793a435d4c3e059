"""What `ctrans diagnose` measures of a model, as one table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ctrans.base.from_json import from_json
from ctrans.examine.diagnosis.diagnose import Diagnosis
from ctrans.examine.diagnosis.low_precision import ROUNDED
from ctrans.examine.diagnosis.weight_checks import CHANGE_CHECKS
from ctrans.examine.diagnosis.weights_only import Change, WeightDiagnosis
from ctrans.examine.search.limits import QUANTITY as SEARCHED
from ctrans.measure.findings import SEVERITIES, SEVERITY_MARKS, Finding, Mark, Reading, Readings
from ctrans.measure.measured import Answer, Measured, Value
from ctrans.measure.measures import MEASURES

NOTABLE = 0.1
"""Changes that are not larger are left out of the lines by block."""
UPDATE = "update over weight"
OF_WEIGHTS = (
    "This read the weights alone. Without --weights-only a diagnosis also runs the model on a text."
)
OF_PARTS = (
    "A diagnosis looks for faults of single parts. ctrans screen measures how the whole model"
    " behaves."
)


def measured(
    models: Mapping[str, Diagnosis],
    changes: Mapping[str, Diagnosis],
    treatment: Sequence[str] = (),
) -> Measured:
    """The table of several models, and of what changed between two."""
    every = {**models, **changes}
    weights_alone = any(isinstance(model, WeightDiagnosis) for model in models.values())
    about = OF_PARTS
    if weights_alone:
        about = OF_WEIGHTS
    notes: dict[str, list[str]] = {"": [about, *treatment]}
    for name, change in changes.items():
        notes[name] = by_block(change.readings)
    return Measured(
        values=tuple(
            value for name, model in every.items() for value in values(name, model.readings)
        ),
        missing={name: missing(model) for name, model in every.items() if missing(model)},
        answers=(
            *(answer(name, model) for name, model in models.items()),
            *(answer_of_change(name, change) for name, change in changes.items()),
        ),
        findings={name: model.findings for name, model in every.items()},
        notes=notes,
        styles={name: name for name in models},
    )


def values(model: str, readings: Readings) -> Iterator[Value]:
    """The readings as rows."""
    for quantity, several in readings.items():
        for reading in several:
            yield Value(
                model,
                quantity,
                reading.value,
                depth=_depth(quantity, reading),
                place=reading.place,
                words=reading.figure,
            )


def _depth(quantity: str, reading: Reading) -> int | None:
    """The number of the segment, or of the state X_k, which is at the end of segment k - 1."""
    is_of_a_state = quantity in MEASURES and MEASURES[quantity].scope == "state"
    if not is_of_a_state:
        return reading.segment
    if reading.segment is None:
        return 0
    return reading.segment + 1


def missing(diagnosis: Diagnosis) -> dict[str, str]:
    """What was not measured and why, and the checks without a figure, with what each requires."""
    reasons = dict(diagnosis.missing)
    broken = any(finding.check == "not finite" for finding in diagnosis.findings)
    for name in diagnosis.unexamined:
        check = diagnosis.checks[name]
        readings = diagnosis.readings.get(check.quantity, ())
        required = check.requires or "a text"
        stopped = diagnosis.stopped_by(name)
        if readings:
            why = f"it is not a number: {readings[0].place}: {readings[0].figure}"
        elif stopped:
            why = f"{stopped} was not measured"
        elif broken and "finite" not in required:
            why = f"requires {required}, and numbers that are finite"
        else:
            why = f"requires {required}"
        reasons.setdefault(check.quantity, why)
    return reasons


def answer(name: str, diagnosis: Diagnosis) -> Answer:
    """How many findings a model has and which is the worst, or that nothing was found."""
    of_weights = isinstance(diagnosis, WeightDiagnosis)
    looked = f"{len(diagnosis.examined)} of {len(diagnosis.checks)} checks were measured"
    for reading in diagnosis.readings.get("loss on this text", [])[:1]:
        looked += f". On this text {reading.figure}"
    looked += _searched(diagnosis)
    if diagnosis.healthy:
        where = "single parts"
        if of_weights:
            where = "the weights"
        mark: Mark = "good"
        if SEARCHED in diagnosis.missing:
            mark = "note"
        return Answer(f"{name}: nothing found in {where}; {looked}.", mark)
    worst = diagnosis.findings[0]
    counts = counted(diagnosis.findings)
    return Answer(
        f"{name}: {counts}, the worst: {worst.check}, {worst.place}; {looked}.",
        mark_of(diagnosis.findings),
    )


def _searched(diagnosis: Diagnosis) -> str:
    """What a search over edits came to, if it is no finding; "" without a search."""
    if SEARCHED in diagnosis.missing:
        return f". The search over edits: {diagnosis.missing[SEARCHED]}"
    for reading in diagnosis.readings.get(SEARCHED, []):
        if reading.value == 0:
            return f". The search over edits: {reading.figure}"
    return ""


def counted(findings: Sequence[Finding]) -> str:
    """How many findings there are by severity: "3 findings (1 broken, 2 note)"."""
    severities = [finding.severity for finding in findings]
    present = [severity for severity in SEVERITIES if severity in severities]
    by_severity = ", ".join(f"{severities.count(severity)} {severity}" for severity in present)
    if len(findings) == 1:
        return f"1 finding ({by_severity})"
    return f"{len(findings)} findings ({by_severity})"


def mark_of(findings: Sequence[Finding]) -> Mark:
    """The mark of several findings together: that of the most severe."""
    marks = {SEVERITY_MARKS[finding.severity] for finding in findings}
    if "bad" in marks:
        return "bad"
    if marks:
        return "note"
    return "good"


def answer_of_change(name: str, change: Diagnosis) -> Answer:
    """What changed, in a sentence."""
    parts = []
    mark = mark_of(change.findings)
    if change.findings:
        parts.append(counted(change.findings))
    elif not change.readings:
        parts.append("not compared, as no weight and no figure of the one has a name of the other")
        mark = "note"
    else:
        parts.append("no finding")
    moved = change.readings.get(UPDATE, [])
    if moved:
        most = max(moved, key=lambda reading: reading.value)
        still = sum(not reading.value for reading in moved)
        if most.value:
            parts.append(f"most in {most.place}: {most.figure}")
        else:
            parts.append("no weight changed")
        if 0 < still < len(moved):
            parts.append(f"{still} of {len(moved)} weights did not change")
    parts += [f"{what}: {why}" for what, why in change.missing.items()]
    return Answer(f"{name}: {'; '.join(parts)}.", mark)


def by_block(readings: Readings) -> list[str]:
    """For each block its largest update, and of every other quantity the reading that changed most,
    if by more than a tenth. Of weights in a format, every tensor, the largest error first.
    """
    rounded = sorted(readings.get(ROUNDED[0], []), key=lambda reading: -reading.value)
    if rounded:
        return [f"{reading.place}: {reading.figure}" for reading in rounded]
    lines: dict[int | None, list[str]] = {}
    quantities = {check.quantity: check for check in CHANGE_CHECKS.values()}
    for quantity in sorted(quantities, key=lambda name: name != UPDATE):
        check = quantities[quantity]
        worst: dict[int | None, Reading] = {}
        ordered = sorted(
            readings.get(quantity, []), key=lambda reading: check.excess(reading.value)
        )
        for reading in ordered:
            worst[reading.segment] = reading
        unchanged = 1
        if quantity.startswith(("new ", "rise ")):
            unchanged = 0
        for block, reading in worst.items():
            if quantity == UPDATE or abs(reading.value - unchanged) > NOTABLE:
                part = reading.place.split(": ", 1)[-1]
                line = f"{part}: {reading.figure}"
                if not reading.value:
                    line = "no weight changed"
                lines.setdefault(block, []).append(line)
    blocks = sorted(lines, key=lambda block: (block is None, block or 0))
    return [f"{_block(block)}: {'. '.join(lines[block])}" for block in blocks]


def _block(block: int | None) -> str:
    if block is None:
        return "outside of the blocks"
    return f"block {block}"


def measured_in(result: Mapping[str, Any]) -> Measured:
    """The table of a diagnosis's JSON of version 1. Raises ConfigError for another object."""
    options = result.get("options") or {}
    kind: type[Diagnosis] = Diagnosis
    if options.get("weights_only"):
        kind = WeightDiagnosis
    models = {name: from_json(kind, model) for name, model in result["placements"].items()}
    changes = {
        name: from_json(Change, change) for name, change in (result.get("changes") or {}).items()
    }
    return measured(models, changes, result.get("treatment") or ())
