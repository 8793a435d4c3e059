"""The page of `ctrans hjb-check`: is the Hamiltonian finite, under which assumptions, and what is the evidence?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctrans.report.sections import Cell, Chapter, Column, Line, Plot, Table, Words, cell, number, numbers

COLUMNS = (
    Column("model"),
    Column("by the ODE", "the weakest of the segments' verdicts for the flow"),
    Column("by the discrete step", "the same for the model as it is computed"),
    Column("evidence", "whether ascents that do not know the closed form agree with it"),
    Column("largest H", "of the segment with the largest costate"),
    Column("gap", "(H − best value that an ascent found)/|H|: 0 where the formula is attained"),
    Column("skipped", "segments that could not be certified"),
)


def models(result: Mapping[str, Any]) -> dict[str, Any]:
    """Checks by norm and placement; the norm is named where there are several."""
    checks = result["checks"]
    return {name if len(checks) == 1 else f"{norm}, {name}": check for norm, row in checks.items() for name, check in row.items()}


def chapters(models: Mapping[str, Any], result: Mapping[str, Any]) -> list[Chapter]:
    """Verdicts with evidence, then costates and Hamiltonians by depth, and the sets that velocities come from."""
    refused = [Words(f"{name}: {why}") for name, why in (result.get("not_applicable") or {}).items()]
    sets = [[cell(name), *_set(segment)] for name, model in models.items() for segment in model["segments"]]
    columns = [Column("model"), Column("segment"), Column("velocities that the placement allows"), Column("verdict"), Column("H")]
    return [
        Chapter(
            "Verdicts",
            [
                Table("", COLUMNS, [_row(name, model) for name, model in models.items()]),
                Words(
                    "A finite H says that the best velocity exists at one text's costates, not that training succeeds; an infinite one, "
                    "that the best velocity runs away unless something bounds the weights. It does not say that the model is bad."
                ),
                *refused,
            ],
        ),
        Chapter("By depth", [chart for chart in _charts(models) if chart.lines]),
        Chapter("Segment by segment", [Table("", columns, sets)], folded=True),
    ]


def _row(name: str, model: Mapping[str, Any]) -> list[Cell]:
    evidence = model["evidence"] or {}
    largest = next((s for s in model["segments"] if s["segment"] == model["largest"]), None)
    failures = model["failures"]
    return [
        cell(name),
        cell(model["verdict"]),
        cell(model["step_verdict"]),
        Cell(
            "agrees" if model["agrees"] else "; ".join(map(str, failures)) or "does not agree",
            mark="good" if model["agrees"] else "bad",
        ),
        cell(None if largest is None else largest["certificate"].get("hamiltonian")),
        cell(evidence.get("gap")),
        cell("; ".join(f"{k}: {why}" for k, why in (model.get("skipped") or {}).items()) or None),
    ]


def _set(segment: Mapping[str, Any]) -> list[Cell]:
    certificate = segment["certificate"]
    where = Cell(f"{segment['segment']} ({segment['kind']})", float(segment["segment"]))
    return [where, cell(certificate["words"]), cell(certificate["verdict"]), cell(certificate.get("hamiltonian"))]


def _charts(models: Mapping[str, Any]) -> list[Plot]:
    def lines(value: str, certificate: bool) -> list[Line]:
        found = []
        for name, model in models.items():
            values = numbers([(s["certificate"] if certificate else s).get(value) for s in model["segments"]])
            if any(v is not None for v in values):
                found.append(Line(name, [number(s["time"]) or 0.0 for s in model["segments"]], values, model["placement"]))
        return found

    return [
        Plot("Costate", "depth-time t", "|P| = |dL/dX|", lines("costate_norm", False), "The loss's gradient by the state."),
        Plot(
            "Hamiltonian",
            "depth-time t",
            "H(P) = sup of −<P, f>",
            lines("hamiltonian", True),
            "Where it is infinite there is no point.",
        ),
    ]
