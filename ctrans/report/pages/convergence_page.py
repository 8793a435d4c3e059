"""What `ctrans convergence` shows: measured orders of convergence next to those of theory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctrans.report.sections import Answer, Cell, Chapter, Column, Line, Plot, Table, cell, number, numbers

FAR = 0.3
"""An order so far below the formal one is marked."""
SERIES = (
    Column("limit", "substeps: more steps per sublayer; depth: more blocks over the same depth-time"),
    Column("method"),
    Column("order in theory", "p of a method whose error is proportional to steps^-p"),
)
ORDER = "measured order with this placement of norms, by a fit of error ~ n^-p (1 + c/n)"


def models(result: Mapping[str, Any]) -> dict[str, Any]:
    """Each series of errors, by limit, method and placement."""
    return {_name(each): each for each in result["results"]}


def _name(each: Mapping[str, Any]) -> str:
    return f"{each['limit']}, {each['method']}, {each['placement']}"


def chapters(models: Mapping[str, Any], result: Mapping[str, Any]) -> list[Chapter]:
    """Orders by method and placement, errors against the number of steps."""
    series: dict[tuple[str, str, str], dict[str, Any]] = {}
    for name, each in models.items():
        series.setdefault((name.removesuffix(_name(each)), each["limit"], each["method"]), {})[each["placement"]] = each
    placements = list(dict.fromkeys(each["placement"] for each in models.values()))
    orders = [[*_labels(key, row), *(_order(row.get(p)) for p in placements)] for key, row in series.items()]
    errors = [
        [*_labels(key, row), *(cell(row[p]["errors"][-1] if p in row else None) for p in placements)]
        for key, row in series.items()
    ]
    columns = [*SERIES, *(Column(name, ORDER) for name in placements)]
    finest = Table("", [*SERIES, *map(Column, placements)], errors, "Relative error at the end of the depth.")
    return [
        Chapter("Orders", [_answer(models), Table("", columns, orders)]),
        Chapter("Errors", [_chart(*key, row) for key, row in series.items()], picture="convergence"),
        Chapter("Error with the most steps", [finest], folded=True),
    ]


def _answer(models: Mapping[str, Any]) -> Answer:
    below = [name for name, each in models.items() if _order(each).mark]
    if below:
        return Answer(f"{len(below)} of {len(models)} measured orders are below theory: {'; '.join(below)}.", "bad")
    return Answer(f"All {len(models)} measured orders of convergence agree with theory (none is more than {FAR} below).", "good")


def _labels(key: tuple[str, str, str], row: Mapping[str, Any]) -> list[Cell]:
    source, limit, method = key
    return [Cell(source + limit), Cell(method), cell(next(iter(row.values()))["formal"])]


def _order(each: Mapping[str, Any] | None) -> Cell:
    order = None if each is None else number(each["order"])
    if each is None or order is None or order != order:
        return Cell("–", None, "" if each is None else "bad")
    return Cell(f"{order:.2f}", order, "bad" if order < each["formal"] - FAR else "")


def _chart(source: str, limit: str, method: str, row: Mapping[str, Any]) -> Plot:
    """Errors by placement, and the slope of the order in theory."""
    lines = [Line(name, [float(n) for n in each["sizes"]], numbers(each["errors"]), name) for name, each in row.items()]
    first = next(iter(row.values()))
    level = 1.6 * max((line.y[0] or 0.0 for line in lines), default=1.0)
    slope = [level * (n / first["sizes"][0]) ** -first["formal"] for n in first["sizes"]]
    lines.append(Line("order in theory", lines[0].x, slope, "mixed", bound=True))
    x = "steps per sublayer" if limit == "substeps" else "blocks"
    return Plot(f"{source}{limit}: {method}, order {first['formal']}", x, "relative error", lines, log_x=True)
