"""What `ctrans diagnose` shows: findings in words, the most severe first, and how far each figure
is from its limit.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from ctrans.examine.diagnosis.diagnose import readings_in
from ctrans.examine.diagnosis.diagnostic_checks import CHECKS
from ctrans.examine.diagnosis.low_precision import ROUNDED
from ctrans.examine.diagnosis.weight_checks import CHANGE_CHECKS, WEIGHT_CHECKS
from ctrans.measure.findings import SEVERITIES, Checks, Reading, Readings
from ctrans.report.sections import (
    Answer,
    Chapter,
    Findings,
    JSONObject,
    Line,
    Plot,
    Section,
    Words,
    mark_of,
    table,
)

REACH = 3.0
"""Powers of ten from a limit at which charts are cut off."""
NEAR = ("model", "check", "place", "figure", "a finding where it is")
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


models = operator.itemgetter("placements")


def chapters(models: JSONObject, result: JSONObject) -> list[Chapter]:
    """Findings by model, what is close to a limit, figures by depth, and what was not measured."""
    several = len(models) > 1
    if result["options"].get("weights_only"):
        checks = WEIGHT_CHECKS
    else:
        checks = CHECKS
    near = [row for name, model in models.items() for row in _near(name, model, checks)]
    distances = [
        _distances(name if several else "", model, checks) for name, model in models.items()
    ]
    # several weights of a block have one place
    if checks is CHECKS:
        figures = _figures(models)
    else:
        figures = []
    return [
        Chapter(
            "Findings",
            [*findings(models, checks), Words(OF_PARTS if checks is CHECKS else OF_WEIGHTS)],
        ),
        Chapter(
            "What changed",
            [
                part
                for name, each in (result.get("changes") or {}).items()
                for part in _changed(name, each)
            ],
        ),
        Chapter("Treatment", [Words(line) for line in result.get("treatment", ())]),
        Chapter("Close to a limit", [table(NEAR, near)]),
        Chapter("Distance from the limits", distances, picture="diagnose"),
        Chapter("Figures by depth", figures, folded=True),
        Chapter(
            "Not measured",
            [_unknown(name, model, checks) for name, model in models.items()],
            folded=True,
        ),
    ]


def findings(models: JSONObject, checks: Checks) -> list[Section]:
    """An answer for each model, and then what was found in each."""
    answers = [answer(name, model, checks) for name, model in models.items()]
    return [
        *answers,
        *(
            Findings(model["findings"], name if len(models) > 1 else "")
            for name, model in models.items()
        ),
    ]


def answer(name: str, model: JSONObject, checks: Checks) -> Answer:
    """How many findings a model has and which is the worst, or that nothing was found."""
    measured = sum(bool(model["readings"].get(check.quantity)) for check in checks.values())
    looked = f"{measured} of {len(checks)} checks were measured"
    if not model["findings"]:
        return Answer(
            f"{name}: nothing found in {'single parts' if checks is CHECKS else 'the weights'};"
            f" {looked}.",
            "good",
        )
    worst = model["findings"][0]
    said = (
        f"{name}: {counted(model['findings'])}, the worst: {worst['check']}, {worst['place']};"
        f" {looked}."
    )
    return Answer(said, mark_of(model["findings"]))


def _changed(name: str, change: JSONObject) -> list[Section]:
    """What changed: in a sentence, the findings, and a line for each block."""
    readings = readings_in(change)
    moved = readings.get(UPDATE, [])
    said = [counted(change["findings"]) if change["findings"] else "no finding"]
    if moved:
        most = max(moved, key=lambda each: each.value)
        still = sum(not each.value for each in moved)
        said.append(f"most in {most.place}: {most.figure}" if most.value else "no weight changed")
        if 0 < still < len(moved):
            said += [f"{still} of {len(moved)} weights did not change"]
        else:
            said += []
    said += [f"{what}: {why}" for what, why in change["unknown"].items()]
    rounded = [
        (each.place, each.figure)
        for each in sorted(readings.get(ROUNDED[0], ()), key=lambda each: -each.value)
    ]
    return [
        Answer(f"{name}: {'; '.join(said)}.", mark_of(change["findings"])),
        Findings(change["findings"], name),
        (
            table(("place", "figure"), rounded, name, rows_shown=10)
            if rounded
            else Words(f"{name}, by block:", _by_block(readings))
        ),
    ]


def _by_block(readings: Readings) -> list[str]:
    """For each block its largest update, and of every other quantity the reading that changed most,
    if by more than a tenth.
    """
    lines: dict[int | None, list[str]] = {}
    for quantity, check in sorted(
        {check.quantity: check for check in CHANGE_CHECKS.values()}.items(),
        key=lambda each: each[0] != UPDATE,
    ):
        worst: dict[int | None, Reading] = {}
        for reading in sorted(
            readings.get(quantity, ()), key=lambda each: check.excess(each.value)
        ):
            worst[reading.segment] = reading
        for block, reading in worst.items():
            if quantity.startswith("new "):
                still = 0
            else:
                still = 1
            if quantity == UPDATE or abs(reading.value - still) > NOTABLE:
                place = reading.place.split(": ", 1)[-1]
                lines.setdefault(block, []).append(
                    f"{place}: {reading.figure}" if reading.value else "no weight changed"
                )
    named = sorted(lines, key=lambda block: (block is None, block or 0))
    return [
        f"{'outside of the blocks' if block is None else f'block {block}'}:"
        f" {'. '.join(lines[block])}"
        for block in named
    ]


def counted(found: Sequence[JSONObject]) -> str:
    """How many findings there are by severity: "3 findings (1 broken, 2 note)"."""
    known = [each["severity"] for each in found]
    by_severity = ", ".join(
        f"{known.count(each)} {each}"
        for each in dict.fromkeys((*SEVERITIES, *known))
        if each in known
    )
    return f"{len(known)} finding{'s' * (len(known) != 1)} ({by_severity})"


def _near(name: str, model: JSONObject, checks: Checks) -> list[list[str]]:
    """Of each check that found nothing, the reading that is closest to its limit, where one is
    close.
    """
    close = checks.near(readings_in(model), [each["check"] for each in model["findings"]])
    return [
        [name, check, nearest.place, nearest.figure, checks[check].limit]
        for check, nearest in close.items()
    ]


def _distances(model_name: str, model: JSONObject, checks: Checks) -> Plot:
    """By check and segment (of weights alone, block), how many powers of ten the worst figure is
    beyond its limit.
    """
    lines = []
    readings = readings_in(model)
    for name, check in checks.items():
        worst: dict[float, float] = {}
        for reading in readings.get(check.quantity, ()):
            if reading.segment is not None and not math.isnan(reading.value):
                excess = min(REACH, max(-REACH, check.excess(reading.value)))
                worst[reading.segment] = max(excess, worst.get(reading.segment, -REACH))
        if worst:
            lines.append(Line(name, sorted(worst), [worst[k] for k in sorted(worst)]))
    meaning = (
        f"Above 0 is outside of the limit. Distances of more than {REACH:g} powers of ten are drawn"
        f" as {REACH:g}."
    )
    if model_name:
        title = f"{model_name}: distance from the limits"
    else:
        title = "Distance from the limits"
    return Plot(
        title,
        "segment" if checks is CHECKS else "block",
        "powers of ten beyond the limit",
        lines,
        meaning,
        log=False,
    )


def _figures(models: JSONObject) -> list[Plot]:
    """A chart for each quantity that has figures at several segments."""
    descriptions = {check.quantity: check.description for check in CHECKS.values()}
    charts = []
    for quantity in dict.fromkeys(
        quantity for model in models.values() for quantity in model["readings"]
    ):
        lines = []
        for name, model in models.items():
            known = {each["segment"]: each["value"] for each in model["readings"].get(quantity, ())}
            at = sorted(segment for segment in known if segment is not None)
            if len(at) > 1:
                lines.append(Line(name, at, [known[k] for k in at], name))
        charts.append(Plot(quantity, "segment", quantity, lines, descriptions.get(quantity, "")))
    return charts


def _unknown(name: str, model: JSONObject, checks: Checks) -> Words:
    """What could not be measured and why, and the checks that had no figure, with what each one
    requires.
    """
    lines = [f"{what}: {why}" for what, why in (model["unknown"] or {}).items()]
    without = [name for name, check in checks.items() if not model["readings"].get(check.quantity)]
    lines += [f"{name} requires {checks[name].requires or 'a text'}" for name in without]
    return Words(
        f"{name}: these checks were not measured, so that they neither passed nor failed.", lines
    )
