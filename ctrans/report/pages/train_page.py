"""The page of `ctrans train`: how a run ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctrans.report.sections import Cell, Chapter, Column, Line, Plot, Table, cell, number

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
    """One row a run, its losses by step, and its loss at other depths."""
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
    found = [Chapter("How it ended", [Table("", columns, rows)])]
    curves = _curves(models, names)
    if curves:
        found.append(Chapter("Losses by step", curves))
    chart = Plot("The same weights in other numbers of blocks", "blocks", "validation loss, nats a token", lines, log=False)
    return [*found, Chapter("Other depths", [chart])] if lines else found


CURVES = {
    "training": ("Training loss", "Of the batches that it is trained on, as means over about a hundred stretches of steps."),
    "validation": ("Validation loss", "Of text that it is not trained on."),
}


def _curves(models: Mapping[str, Any], names: Mapping[str, str]) -> list[Plot]:
    """A picture for each kind of loss, with a line for each run."""
    found = []
    for kind, (title, meaning) in CURVES.items():
        lines = []
        for name, each in models.items():
            known = (each.get("losses") or {}).get(kind) or []
            if known:
                x, y = [number(step) or 0.0 for step, _ in known], [number(loss) for _, loss in known]
                lines.append(Line(names[name], x, y, (each.get("model") or {}).get("placement")))
        if lines:
            found.append(Plot(title, "iteration", "cross-entropy, nats a token", lines, meaning, log=False))
    return found


def _cell(key: str, each: Mapping[str, Any]) -> Cell:
    shown = cell(each.get(key))
    bad = key == "ending" and each.get(key) not in ("finished", "done", "completed")
    return Cell(shown.text, shown.value, "note" if bad else "")
