"""What `ctrans coordinate-check` shows: whether a rate transfers, and what moves with width or
depth.
"""

from __future__ import annotations

from ctrans.report.sections import (
    Answer,
    Cell,
    Chapter,
    Column,
    JSONObject,
    Line,
    Plot,
    Table,
    table,
)
from ctrans.training.coordinate_check import FLAT, LOSS, PlaceGrowth, Transfer

MOST_LINES = 7
"""Places of a chart: those whose changes grow or shrink most."""
CHANGE = (
    "k of mean |change| ~ size^k after the updates, with its standard error over seeds and rates; 0"
    " where one rate suits every size"
)
START = "k of mean |x| ~ size^k before the first update"
VERDICT = f"whether |k| is below {FLAT:.2f}, by two standard errors; the loss does not count"


def chapters(models: JSONObject, result: JSONObject) -> list[Chapter]:
    """The verdict, exponents by place, and changes against width and depth."""
    parts = list[Answer | Table]()
    charts = list[Plot]()
    for name, found in models.items():
        parts.append(Answer(found["answer"], "good" if found["verdict"] == "transfers" else "note"))
        for axis, sizes in found["sizes"].items():
            growths = [PlaceGrowth(**each) for each in found["growths"] if each["axis"] == axis]
            columns = [
                "place",
                Column("k", CHANGE),
                Column("k at the start", START),
                Column("verdict", VERDICT),
            ]
            rows = [
                [
                    each.place,
                    Cell(str(each), each.exponent),
                    each.at_start,
                    "" if each.place == LOSS else each.verdict,
                ]
                for each in growths
            ]
            title = ", ".join(filter(None, (name, f"growth with the {axis}")))
            parts.append(
                table(
                    columns, rows, title, "Places are modules by name; * stands for every number."
                )
            )
            most = sorted(growths, key=lambda each: -abs(each.exponent))[:MOST_LINES]
            lines = [Line(each.place, sizes, each.changes) for each in most]
            charts.append(Plot(title, axis, "mean |change|", lines, log_x=True))
    return [
        Chapter("Does the rate transfer?", parts),
        Chapter("By width and depth", charts, picture="coordinate-check"),
    ]


def transfer_words(found: Transfer) -> str:
    """The verdict, with the place that decides it for each axis."""
    why = [(each, each.verdict) for each in map(found.worst, found.sizes)]
    said = [
        f"{each.axis}: {verdict}, the change of {each.place} goes like {each}"
        for each, verdict in why
    ]
    return f"The rate {'is ' * (found.verdict == 'undecided')}{found.verdict}. {'; '.join(said)}."
