"""The page of `ctrans control`: what a model leaves of the maximum principle, by depth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ctrans.report.sections import Cell, Chapter, Column, Line, Plot, Table, Words, cell, number, numbers

COLUMNS = (
    Column("model"),
    Column("loss", "mean cross-entropy in nats"),
    Column("drift of <P, v>", "largest departure from what the ODE conserves on a segment"),
    Column(
        "largest gap", "H(P) + <P, v> >= 0: how far the layer's velocity is from the best one, free at each token; ∞ where H is"
    ),
    Column("alignment", "mean cosine between the layer's velocity and the best one; 0 at a critical point of shared weights"),
    Column("not the ODE", "why the discrete model's costate serves"),
)


def models(result: Mapping[str, Any]) -> dict[str, Any]:
    """The readings, with what training attains beside them."""
    return {
        name: {**reading, "attained": result["attained"].get(name), "instead": (result.get("instead") or {}).get(name)}
        for name, reading in result["placements"].items()
    }


def chapters(models: Mapping[str, Any], result: Mapping[str, Any]) -> list[Chapter]:
    """Figures, charts by depth-time, what training attains."""
    return [
        Chapter("What was found", [Table("", COLUMNS, [_row(name, model) for name, model in models.items()])]),
        Chapter("By depth", [chart for chart in _charts(models) if chart.lines]),
        Chapter("What training attains", _attained(models), folded=True),
    ]


def _row(name: str, model: Mapping[str, Any]) -> list[Cell]:
    return [
        cell(name),
        cell(model["loss"]),
        cell(_largest(model["drift"])),
        cell(_largest(model["gap"])),
        cell(_mean(model["alignment"])),
        cell(model["instead"]),
    ]


def _largest(values: Sequence[Any]) -> float | None:
    known = [value for value in numbers(values) if value is not None and not math.isnan(value)]
    return max(known) if known else None


def _mean(values: Sequence[Any]) -> float | None:
    known = [value for value in numbers(values) if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None


def _charts(models: Mapping[str, Any]) -> list[Plot]:
    def lines(key: str) -> list[Line]:
        return [
            Line(name, [number(t) or 0.0 for t in model["times"]], numbers(model[key]), _placement(model))
            for name, model in models.items()
            if model[key]
        ]

    time = "depth-time t"
    return [
        Plot("Costate", time, "|P| = |dL/dX|", lines("costate_norm"), "The loss's gradient by the state."),
        Plot(
            "Gap",
            time,
            "H(P) + <P, v>",
            lines("gap"),
            "To velocities that were free at each token; none where H is infinite.",
            log=False,
        ),
        Plot(
            "Alignment", time, "cosine", lines("alignment"), "With the best velocity, or with −P where H is infinite.", log=False
        ),
        Plot("Drift", time, "change of <P, v> on a segment", lines("drift"), "The ODE conserves it: this is the solver's error."),
    ]


def _placement(model: Mapping[str, Any]) -> str:
    names = set(model["placements"])
    return str(next(iter(names))) if len(names) == 1 else "mixed"


def _attained(models: Mapping[str, Any]) -> list[Words | Table]:
    parts: list[Words | Table] = []
    for name, model in models.items():
        found = model["attained"]
        if not isinstance(found, Mapping):
            parts.append(Words(f"{name}: {found or 'not computed'}"))
            continue
        keys = [key for key, value in found.items() if isinstance(value, list) and len(value) == len(found["times"])]
        rows = [[cell(k), *(cell(found[key][k]) for key in keys)] for k in range(len(found["times"]))]
        parts.append(Table(name, [Column("segment"), *(Column(key.replace("_", " ")) for key in keys)], rows))
    return parts
