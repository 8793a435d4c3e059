"""What `ctrans diagnose` shows: findings in words, the most severe first, and how far each figure
is from its limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ctrans.findings import SEVERITIES
from ctrans.report.sections import Answer, Cell, Chapter, Column, Findings, Line, Plot, Section, Table, Words, number
from ctrans.stability.diagnosis.diagnostic_checks import CHECKS

REACH = 3.0
"""Powers of ten from a limit at which charts are cut off."""
NEAR = (Column("model"), Column("check"), Column("place"), Column("figure"), Column("a finding where it is"))
OF_PARTS = "A diagnosis looks for faults of single parts. ctrans screen measures how the whole model behaves."


def chapters(models: Mapping[str, Any], result: Mapping[str, Any]) -> list[Chapter]:
    """Findings by model, what is close to a limit, figures by depth, and what was not measured."""
    several = len(models) > 1
    near = [row for name, model in models.items() for row in _near(name, model)]
    return [
        Chapter("Findings", [*findings(models), Words(OF_PARTS)]),
        Chapter("Close to a limit", [Table("", NEAR, near)] if near else []),
        Chapter(
            "Distance from the limits", [_distances(name if several else "", m) for name, m in models.items()], picture="diagnose"
        ),
        Chapter("Figures by depth", _figures(models), folded=True),
        Chapter("Not measured", [_unknown(name, model) for name, model in models.items()], folded=True),
    ]


def findings(models: Mapping[str, Any]) -> list[Section]:
    """An answer for each model, and then what was found in each."""
    answers = [answer(name, model) for name, model in models.items()]
    found = [Findings(each, name if len(models) > 1 else "") for name, m in models.items() if (each := m["findings"])]
    return [*answers, *found]


def answer(name: str, model: Mapping[str, Any]) -> Answer:
    """How many findings a model has and which is the worst, or that nothing was found."""
    measured = sum(bool(model["readings"].get(check.quantity)) for check in CHECKS.values())
    looked = f"{measured} of {len(CHECKS)} checks were measured"
    if not model["findings"]:
        return Answer(f"{name}: nothing found in single parts; {looked}.", "good")
    worst = model["findings"][0]
    mark: Any = "note" if worst["severity"] == "note" else "bad"
    return Answer(f"{name}: {counted(model['findings'])}, the worst: {worst['check']}, {worst['place']}; {looked}.", mark)


def counted(found: Sequence[Mapping[str, Any]]) -> str:
    """How many findings there are by severity: "3 findings (1 broken, 2 note)"."""
    known = [each["severity"] for each in found]
    by_severity = ", ".join(f"{known.count(each)} {each}" for each in dict.fromkeys((*SEVERITIES, *known)) if each in known)
    return f"{len(known)} finding{'s' * (len(known) != 1)} ({by_severity})"


def _near(name: str, model: Mapping[str, Any]) -> list[list[Cell]]:
    """Of each check that found nothing, the reading that is closest to its limit, where one is
    close.
    """
    found = {each["check"] for each in model["findings"]}
    left_out = found | {suppressed for each in found for suppressed in CHECKS[each].suppresses}
    rows = []
    for check in CHECKS.keys() - left_out:
        close = [each for each in _readings(model, check) if CHECKS[check].close(number(each["value"]) or 0.0)]
        if close:
            nearest = max(close, key=lambda each: CHECKS[check].excess(float(each["value"])))
            rows.append([Cell(name), Cell(check), Cell(nearest["place"]), Cell(nearest["figure"]), Cell(CHECKS[check].limit)])
    return rows


def _readings(model: Mapping[str, Any], check: str) -> Sequence[Mapping[str, Any]]:
    return model["readings"].get(CHECKS[check].quantity) or ()


def _distances(name: str, model: Mapping[str, Any]) -> Plot:
    """By check and segment, how many powers of ten the worst figure is beyond its limit."""
    lines = []
    for check in CHECKS:
        worst: dict[int, float] = {}
        for reading in _readings(model, check):
            value, segment = number(reading["value"]), reading["segment"]
            if segment is not None and value is not None and not math.isnan(value):
                excess = min(REACH, max(-REACH, CHECKS[check].excess(value)))
                worst[segment] = max(excess, worst.get(segment, -REACH))
        if worst:
            lines.append(Line(check, [float(k) for k in sorted(worst)], [worst[k] for k in sorted(worst)]))
    meaning = f"Above 0 is outside of the limit. Distances of more than {REACH:g} powers of ten are drawn as {REACH:g}."
    title = f"{name}: distance from the limits" if name else "Distance from the limits"
    return Plot(title, "segment", "powers of ten beyond the limit", lines, meaning, log=False)


def _figures(models: Mapping[str, Any]) -> list[Plot]:
    """A chart for each quantity that has figures at several segments."""
    descriptions = {check.quantity: check.description for check in CHECKS.values()}
    charts = []
    for quantity in dict.fromkeys(quantity for model in models.values() for quantity in model["readings"]):
        lines = []
        for name, model in models.items():
            known = {each["segment"]: number(each["value"]) for each in model["readings"].get(quantity, ())}
            at = sorted(segment for segment in known if segment is not None)
            if len(at) > 1:
                lines.append(Line(name, [float(k) for k in at], [known[k] for k in at], name))
        charts.append(Plot(quantity, "segment", quantity, lines, descriptions.get(quantity, "")))
    return charts


def _unknown(name: str, model: Mapping[str, Any]) -> Words:
    """What could not be measured and why, and the checks that had no figure, with what each one
    requires.
    """
    lines = [f"{what}: {why}" for what, why in (model["unknown"] or {}).items()]
    lines += [f"{check} requires {CHECKS[check].requires or 'a text'}" for check in CHECKS if not _readings(model, check)]
    return Words(f"{name}: these checks were not measured, so that they neither passed nor failed.", lines)
