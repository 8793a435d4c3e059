"""The page of `ctrans watch`: how a training goes, its alarms, its figures over the steps and, by a slider, by depth."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from ctrans.monitor.gauge_table import GAUGES
from ctrans.monitor.history import kept_reports
from ctrans.report.sections import Cell, Chapter, Column, Line, Plot, Table, Words, cell, numbers
from ctrans.report.words import ALONG, WATCHED

OVER_TIME = {
    "loss": ("Loss", "loss, as it was given (nats a token)"),
    "highest_loss": ("Highest loss", "largest loss since the report before"),
    "gradient_norm": ("Gradient", "|dL/dW|, all weights"),
    "learning_rate": ("Learning rate", "learning rate"),
    "largest_logit": ("Largest logit", "largest |logit|"),
}
"""Titles and axes of the figures of a whole run."""
MOMENTS = 200
"""At most so many positions of the slider where several runs are shown together."""
ALARM = (
    Column("run"),
    Column("step", "when it was raised"),
    Column("what"),
    Column("grade", "danger: the run may be lost; notice: worth knowing, and often meant so"),
    Column("where"),
    Column("figure"),
    Column("limit"),
    Column("it"),
    Column("helps"),
)


def chapters(models: Mapping[str, Any], result: Mapping[str, Any]) -> list[Chapter]:
    """Runs, alarms, charts over the steps and by depth."""
    runs = {name or "run": each for name, each in models.items()}
    over_time = [_over_time(runs, gauge) for gauge in OVER_TIME]
    by_depth = [_by_depth(runs, gauge) for gauge in WATCHED]
    kept = [f"{len(each['history']['steps'])} of {len(each['steps'])}" for each in runs.values()]
    words = (
        f"The slider moves over {', '.join(kept)} reports that the log holds; the log itself keeps the older ones ever sparser. "
        "The vertical axis stays as it is while the slider moves."
    )
    return [
        Chapter("How it goes", [_runs(runs)]),
        Chapter("Alarms", [_alarms(runs)]),
        Chapter("Over the steps", [chart for chart in over_time if chart.lines]),
        Chapter("By depth", [Words(words), *(chart for chart in by_depth if chart.lines)]),
    ]


def _runs(runs: Mapping[str, Any]) -> Table:
    columns = [
        Column("run"),
        Column("model"),
        Column("sublayers"),
        Column("step", "of the last report"),
        Column("of"),
        Column("ended"),
        Column("loss at first"),
        Column("loss at last"),
        Column("dangers", "alarms of the grade danger"),
        Column("notices"),
    ]
    rows = []
    for name, run in runs.items():
        grades = [alarm["grade"] for alarm in run["alarms"]]
        steps, losses = run["steps"] or [None], run["loss"] or [None]
        rows.append([
            Cell(name),
            cell(run["log"]["model"]),
            cell(len(run["log"]["places"])),
            cell(steps[-1]),
            cell(run["log"]["total"]),
            cell(run["ended"] or "no end yet: it goes on, or was killed"),
            cell(losses[0]),
            cell(losses[-1]),
            cell(grades.count("danger"), "bad" if "danger" in grades else ""),
            cell(grades.count("notice"), "note" if "notice" in grades else ""),
        ])  # fmt: skip
    return Table("", columns, rows)


def _alarms(runs: Mapping[str, Any]) -> Table | Words:
    rows = [
        [
            Cell(name),
            cell(alarm["step"]),
            cell(alarm["rule"]),
            Cell(alarm["grade"], mark="bad" if alarm["grade"] == "danger" else "note"),
            cell(alarm["place"]),
            cell(alarm["value"]),
            cell(alarm.get("limit")),
            cell(alarm.get("does")),
            cell(alarm.get("helps")),
        ]
        for name, run in runs.items()
        for alarm in run["alarms"]
    ]
    return Table("", ALARM, rows) if rows else Words("None were raised.")


def _over_time(runs: Mapping[str, Any], gauge: str) -> Plot:
    title, unit = OVER_TIME[gauge]
    lines = [
        Line(name, [float(step) for step in run["steps"]], numbers(values))
        for name, run in runs.items()
        if len(values := run["history"]["over_time"].get(gauge, ())) > 1
    ]
    return Plot(title, "training step", unit, lines, GAUGES[gauge].says, log=gauge not in ("loss", "highest_loss"))


def _by_depth(runs: Mapping[str, Any], gauge: str) -> Plot:
    """Each run's figures along the depth; at a moment, those of its last report until then."""
    title, unit = WATCHED[gauge]
    shown = {name: run for name, run in runs.items() if gauge in run["history"]["by_depth"]}
    steps = sorted({step for run in shown.values() for step in run["history"]["steps"]})
    moments = [steps[i] for i in kept_reports(len(steps), MOMENTS)]
    places = {name: len(run["history"]["by_depth"][gauge][-1]) for name, run in shown.items()}
    frames = {f"{step:,}": [_until(run["history"], gauge, step, places[name]) for name, run in shown.items()] for step in moments}
    last = list(frames.values())[-1] if frames else []
    lines = [Line(name, [float(k) for k in range(len(y))], y) for name, y in zip(shown, last, strict=True)]
    scope = ALONG[GAUGES[gauge].scope]
    return Plot(title.capitalize(), scope, unit, lines, GAUGES[gauge].says, frames=frames, over="Training step")


def _until(history: Mapping[str, Any], gauge: str, step: int, places: int) -> Sequence[float | None]:
    at = bisect_right(history["steps"], step) - 1
    return numbers(history["by_depth"][gauge][at]) if at >= 0 else [None] * places
