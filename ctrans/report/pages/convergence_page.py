"""The page of `ctrans convergence`: measured orders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctrans.report.sections import Cell, Chapter, Column, Line, Plot, Table, cell, digits, number, numbers

FAR = 0.3
"""An order so far below the formal one is marked."""


def models(result: Mapping[str, Any]) -> dict[str, Any]:
    """Each series of errors, by what it is a limit of, method and placement."""
    return {f"{each['limit']}, {each['method']}, {each['placement']}": each for each in result["results"]}


def chapters(models: Mapping[str, Any], result: Mapping[str, Any]) -> list[Chapter]:
    """Orders beside what the method's theory says, and errors against the number of steps."""
    columns = [
        Column("series"),
        Column("order", "p of the fit error ~ n^-p (1 + c/n)"),
        Column("formal order", "what the method's theory says of smooth fields"),
        Column("error at the finest", "relative, at the end of the depth"),
    ]
    rows = []
    for name, each in models.items():
        order, formal = number(each["order"]), number(each["formal"]) or 0.0
        far = order is None or order < formal - FAR
        rows.append(
            [
                Cell(name),
                Cell("–" if order is None else digits(order), order, "bad" if far else ""),
                cell(formal),
                cell(each["errors"][-1]),
            ]
        )
    charts = []
    for limit, method in dict.fromkeys((each["limit"], each["method"]) for each in models.values()):
        mine = {name: each for name, each in models.items() if (each["limit"], each["method"]) == (limit, method)}
        x = "steps per segment" if limit == "substeps" else "blocks"
        lines = [
            Line(each["placement"], [float(n) for n in each["sizes"]], numbers(each["errors"]), each["placement"])
            for each in mine.values()
        ]
        charts.append(Plot(f"{limit}: {method}", x, "relative error", lines, log_x=True))
    return [Chapter("Orders", [Table("", columns, rows)]), Chapter("Errors", charts)]
