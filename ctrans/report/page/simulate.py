"""The page of `ctrans simulate`: how hidden states move through depth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctrans.report.page.parts import Cell, Chapter, Column, Diagram, Line, Sheet, Words, cell, number, numbers

COLUMNS = (
    Column("model"),
    Column("ended", "whether the solution reached the end of the depth"),
    Column("mean |x| at the end", "mean absolute value of the hidden state's entries"),
    Column(
        "of its bound",
        "largest share of what theory allows that was reached anywhere; above 100% the method does not resolve the ODE",
    ),
    Column("drift", "largest departure from the conservation law that the placement has, if any"),
    Column("discrete to ODE", "largest relative distance of the discrete model from the ODE that it is an Euler step of"),
)


def chapters(models: Mapping[str, Any], result: Mapping[str, Any]) -> list[Chapter]:
    """Verdicts, charts by depth-time, and remarks."""
    time = "depth-time t"
    charts = [
        Diagram(
            "Hidden states",
            time,
            "mean |x|",
            [*_lines(models, "mean_abs"), *_lines(models, "mean_abs", bound=True)],
            "Mean absolute value of the state's entries. Dashed: what the placement's theorem allows at most; n/a where there is none.",
        ),
        Diagram(
            "Variance",
            time,
            "variance over the width",
            [*_lines(models, "variance"), *_lines(models, "variance", bound=True)],
            "Variance of a token's entries, mean over tokens.",
        ),
        Diagram(
            "Discrete model and ODE",
            time,
            "|X_discrete − X_ODE| / |X_ODE|",
            _lines(models, "discrete_distance"),
            "How far the Transformer, one Euler step a sublayer, is from the flow that it discretises. Not an error of the model: a "
            "measure of how much the picture of a continuous depth describes it.",
        ),
    ]
    return [
        Chapter("What was found", [Sheet("", COLUMNS, [_row(name, model) for name, model in models.items()])]),
        Chapter("By depth", [chart for chart in charts if any(line.y for line in chart.lines)]),
        Chapter("Remarks", [Words(f"{name}: {text}") for name, model in models.items() for text in _remarks(model)], folded=True),
    ]


def _row(name: str, model: Mapping[str, Any]) -> list[Cell]:
    good = model["status"] == "success"
    used = [value for value in numbers(model["used"] or []) if value is not None]
    share = max(used) if used else None
    drift = [value for value in numbers(model["drift"] or []) if value is not None]
    apart = [value for value in numbers(model["discrete_distance"]) if value is not None]
    return [
        cell(name),
        Cell("at the end" if good else str(model["message"]), mark="" if good else "bad"),
        cell(model["mean_abs"][-1]),
        cell(None) if share is None else Cell(f"{share:.0%}", share, "bad" if share > 1 + 1e-9 else ""),
        cell(max(drift) if drift else None),
        cell(max(apart) if apart else None),
    ]


def _lines(models: Mapping[str, Any], key: str, *, bound: bool = False) -> list[Line]:
    lines = []
    for name, model in models.items():
        values = (model["bounds"] or {}).get(key) if bound else model[key]
        if values:
            times = [number(time) or 0.0 for time in model["times"]][: len(values)]
            lines.append(Line(name, times, numbers(values), model["placement"], bound))
    return lines


def _remarks(model: Mapping[str, Any]) -> list[str]:
    law = [f"conserved: {model['law']}"] if model.get("law") else []
    unbounded = [str(model["unbounded"])] if model.get("unbounded") else []
    return [*law, *unbounded, *map(str, model.get("warnings") or [])]
