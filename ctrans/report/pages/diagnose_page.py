"""What `ctrans diagnose` shows: findings in words, the most severe first, and how far each figure
is from its limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ctrans.findings import SEVERITIES, Reading
from ctrans.report.sections import Answer, Chapter, Findings, JSONObject, Line, Plot, Section, Words, table
from ctrans.stability.diagnosis.diagnostic_checks import CHECKS

REACH = 3.0
"""Powers of ten from a limit at which charts are cut off."""
NEAR = ("model", "check", "place", "figure", "a finding where it is")
OF_PARTS = "A diagnosis looks for faults of single parts. ctrans screen measures how the whole model behaves."


def chapters(models: JSONObject, result: JSONObject) -> list[Chapter]:
    """Findings by model, what is close to a limit, figures by depth, and what was not measured."""
    several = len(models) > 1
    near = [row for name, model in models.items() for row in _near(name, model)]
    return [
        Chapter("Findings", [*findings(models), Words(OF_PARTS)]),
        Chapter("Close to a limit", [table("", NEAR, near)]),
        Chapter(
            "Distance from the limits", [_distances(name if several else "", m) for name, m in models.items()], picture="diagnose"
        ),
        Chapter("Figures by depth", _figures(models), folded=True),
        Chapter("Not measured", [_unknown(name, model) for name, model in models.items()], folded=True),
    ]


def findings(models: JSONObject) -> list[Section]:
    """An answer for each model, and then what was found in each."""
    answers = [answer(name, model) for name, model in models.items()]
    return [*answers, *(Findings(model["findings"], name if len(models) > 1 else "") for name, model in models.items())]


def answer(name: str, model: JSONObject) -> Answer:
    """How many findings a model has and which is the worst, or that nothing was found."""
    measured = sum(bool(model["readings"].get(check.quantity)) for check in CHECKS.values())
    looked = f"{measured} of {len(CHECKS)} checks were measured"
    if not model["findings"]:
        return Answer(f"{name}: nothing found in single parts; {looked}.", "good")
    worst = model["findings"][0]
    mark: Any = "note" if worst["severity"] == "note" else "bad"
    return Answer(f"{name}: {counted(model['findings'])}, the worst: {worst['check']}, {worst['place']}; {looked}.", mark)


def counted(found: Sequence[JSONObject]) -> str:
    """How many findings there are by severity: "3 findings (1 broken, 2 note)"."""
    known = [each["severity"] for each in found]
    by_severity = ", ".join(f"{known.count(each)} {each}" for each in dict.fromkeys((*SEVERITIES, *known)) if each in known)
    return f"{len(known)} finding{'s' * (len(known) != 1)} ({by_severity})"


def _near(name: str, model: JSONObject) -> list[list[str]]:
    """Of each check that found nothing, the reading that is closest to its limit, where one is
    close.
    """
    close = CHECKS.near(_readings(model), [each["check"] for each in model["findings"]])
    return [[name, check, nearest.place, nearest.figure, CHECKS[check].limit] for check, nearest in close.items()]


def _readings(model: JSONObject) -> dict[str, list[Reading]]:
    return {quantity: [Reading(**each) for each in found] for quantity, found in model["readings"].items()}


def _distances(model_name: str, model: JSONObject) -> Plot:
    """By check and segment, how many powers of ten the worst figure is beyond its limit."""
    lines, readings = [], _readings(model)
    for name, check in CHECKS.items():
        worst: dict[float, float] = {}
        for reading in readings.get(check.quantity, ()):
            if reading.segment is not None and not math.isnan(reading.value):
                excess = min(REACH, max(-REACH, check.excess(reading.value)))
                worst[reading.segment] = max(excess, worst.get(reading.segment, -REACH))
        if worst:
            lines.append(Line(name, sorted(worst), [worst[k] for k in sorted(worst)]))
    meaning = f"Above 0 is outside of the limit. Distances of more than {REACH:g} powers of ten are drawn as {REACH:g}."
    title = f"{model_name}: distance from the limits" if model_name else "Distance from the limits"
    return Plot(title, "segment", "powers of ten beyond the limit", lines, meaning, log=False)


def _figures(models: JSONObject) -> list[Plot]:
    """A chart for each quantity that has figures at several segments."""
    descriptions = {check.quantity: check.description for check in CHECKS.values()}
    charts = []
    for quantity in dict.fromkeys(quantity for model in models.values() for quantity in model["readings"]):
        lines = []
        for name, model in models.items():
            known = {each["segment"]: each["value"] for each in model["readings"].get(quantity, ())}
            at = sorted(segment for segment in known if segment is not None)
            if len(at) > 1:
                lines.append(Line(name, at, [known[k] for k in at], name))
        charts.append(Plot(quantity, "segment", quantity, lines, descriptions.get(quantity, "")))
    return charts


def _unknown(name: str, model: JSONObject) -> Words:
    """What could not be measured and why, and the checks that had no figure, with what each one
    requires.
    """
    lines = [f"{what}: {why}" for what, why in (model["unknown"] or {}).items()]
    without = [name for name, check in CHECKS.items() if not model["readings"].get(check.quantity)]
    lines += [f"{name} requires {CHECKS[name].requires or 'a text'}" for name in without]
    return Words(f"{name}: these checks were not measured, so that they neither passed nor failed.", lines)
