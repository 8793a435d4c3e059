"""The page of `ctrans diagnose`: findings in words, the most severe first, and readings by depth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctrans.report.sections import Cell, Chapter, Column, Line, Mark, Plot, Table, Words, cell, number

MARKS: dict[str, Mark] = {"broken": "bad", "serious": "bad", "note": "note"}
OTHERS = "what others there are, and what each takes, ctrans diagnose says at its end"
COLUMNS = (
    Column("finding"),
    Column("severity", "broken: the model cannot work so; serious: it costs training or quality; note: worth knowing"),
    Column("where", "the place where it is worst"),
    Column("figure"),
    Column("what it does"),
    Column("what helps"),
    Column("limit", "beyond which it is a finding, and where that limit is from"),
)


def chapters(models: Mapping[str, Any], result: Mapping[str, Any]) -> list[Chapter]:
    """Findings by model, readings by segment, what was not looked at."""
    unknown = [
        Words(f"{name}: {what}: {why}") for name, model in models.items() for what, why in (model["unknown"] or {}).items()
    ]
    return [
        *findings(models),
        Chapter("By depth", _charts(models, result.get("checks") or {})),
        *([Chapter("Not looked at", unknown, folded=True)] if unknown else []),
    ]


def findings(models: Mapping[str, Any], beside: str = "") -> list[Chapter]:
    """What is wrong with each model, or that nothing was found; `beside` says what else on the page that does not speak of."""
    if not models:
        return []
    rows = [_row(name, finding) for name, model in models.items() for finding in model["findings"]]
    healthy = [name for name, model in models.items() if not model["findings"]]
    said = (
        [Words(f"Nothing found in {', '.join(healthy)}, of the kinds of finding that were examined; {OTHERS}.{beside}")]
        if healthy
        else []
    )
    return [
        Chapter("Diagnosis, the most severe first", [*said, *([Table("", [Column("model"), *COLUMNS], rows)] if rows else [])])
    ]


def _row(name: str, finding: Mapping[str, Any]) -> list[Cell]:
    more = max(0, len(finding["places"]) - 1)
    place = finding["place"] + (f", and {more} more place{'s' * (more > 1)}" if more else "")
    severity = list(MARKS).index(finding["severity"]) if finding["severity"] in MARKS else len(MARKS)
    return [
        cell(name),
        Cell(finding["check"]),
        Cell(finding["severity"], float(severity), MARKS.get(finding["severity"], "")),
        Cell(place),
        Cell(finding["figure"], number(finding["value"])),
        Cell(finding["impact"]),
        Cell(finding["remediation"]),
        Cell(f"{finding['limit']} ({finding['source']})"),
    ]


def _charts(models: Mapping[str, Any], checks: Mapping[str, Any]) -> list[Plot]:
    says = {each["quantity"]: each["description"] for each in checks.values()}
    quantities = dict.fromkeys(quantity for model in models.values() for quantity in model["readings"])
    charts = []
    for quantity in quantities:
        lines = []
        for name, model in models.items():
            known = [each for each in model["readings"].get(quantity, []) if each["segment"] is not None]
            if len({each["segment"] for each in known}) > 1:
                worst: dict[int, float | None] = {each["segment"]: number(each["value"]) for each in known}
                at = sorted(worst)
                lines.append(Line(name, [float(k) for k in at], [worst[k] for k in at], name))
        if lines:
            charts.append(Plot(quantity, "segment", quantity, lines, says.get(quantity, "")))
    return charts
