"""The page of `ctrans train`: how a run ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctrans.report.page.parts import Cell, Chapter, Column, Diagram, Line, Sheet, cell, number

FIGURES = {
    "ending": "how it ended",
    "step": "iterations done",
    "first_validation_loss": "validation loss before the first step, nats a token",
    "validation_loss": "validation loss at the end",
    "best_validation_loss": "the lowest one",
    "best_step": "iteration at which it was the lowest",
    "parameters": "number of parameters",
    "seconds": "seconds that training took",
}


def chapters(models: Mapping[str, Any], result: Mapping[str, Any]) -> list[Chapter]:
    """One row a run, and its loss at other depths."""
    names = {name: name or str((each.get("model") or {}).get("placement", "run")) for name, each in models.items()}
    columns = [Column("run"), *(Column(key.replace("_", " "), meaning) for key, meaning in FIGURES.items())]
    rows = [[cell(names[name]), *(_cell(key, each) for key in FIGURES)] for name, each in models.items()]
    lines = []
    for name, each in models.items():
        depths = sorted((int(depth), number(loss)) for depth, loss in (each.get("other_depths") or {}).items())
        if depths:
            lines.append(
                Line(
                    names[name],
                    [float(d) for d, _ in depths],
                    [loss for _, loss in depths],
                    (each.get("model") or {}).get("placement"),
                )
            )
    found = [Chapter("How it ended", [Sheet("", columns, rows)])]
    chart = Diagram("The same weights in other numbers of blocks", "blocks", "validation loss, nats a token", lines, log=False)
    return [*found, Chapter("Other depths", [chart])] if lines else found


def _cell(key: str, each: Mapping[str, Any]) -> Cell:
    shown = cell(each.get(key))
    bad = key == "ending" and each.get(key) not in ("finished", "done", "completed")
    return Cell(shown.text, shown.value, "note" if bad else "")
