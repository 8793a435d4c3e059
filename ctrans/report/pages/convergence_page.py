"""What `ctrans convergence` shows: measured orders of convergence next to those of theory."""

from __future__ import annotations

import math
from typing import Any

from ctrans.report.sections import (
    Answer,
    Cell,
    Chapter,
    Column,
    JSONObject,
    Line,
    Plot,
    cell,
    table,
)

FAR = 0.3
"""An order so far below the formal one is marked."""
SERIES = (
    Column(
        "limit", "substeps: more steps per sublayer; depth: more blocks over the same depth-time"
    ),
    "method",
    Column("order in theory", "p of a method whose error is proportional to steps^-p"),
)
ORDER = "measured order with this placement of norms, by a fit of error ~ n^-p (1 + c/n)"


def models(result: JSONObject) -> dict[str, Any]:
    """Each series of errors, by limit, method and placement."""
    return {_name(each): each for each in result["results"]}


def _name(each: JSONObject) -> str:
    return f"{each['limit']}, {each['method']}, {each['placement']}"


def chapters(models: JSONObject, result: JSONObject) -> list[Chapter]:
    """Orders by method and placement, errors against the number of steps."""
    series: dict[tuple[str, str, str], dict[str, Any]] = {}
    for name, each in models.items():
        series.setdefault((name.removesuffix(_name(each)), each["limit"], each["method"]), {})[
            each["placement"]
        ] = each
    placements = list(dict.fromkeys(each["placement"] for each in models.values()))
    orders = [
        [*_labels(key, row), *(_order(row.get(p)) for p in placements)]
        for key, row in series.items()
    ]
    errors = [
        [*_labels(key, row), *(row[p]["errors"][-1] if p in row else None for p in placements)]
        for key, row in series.items()
    ]
    columns = [*SERIES, *(Column(name, ORDER) for name in placements)]
    finest = table(
        [*SERIES, *placements], errors, meaning="Relative error at the end of the depth."
    )
    return [
        Chapter("Orders", [_answer(models), table(columns, orders)]),
        Chapter(
            "Errors", [_chart(*key, row) for key, row in series.items()], picture="convergence"
        ),
        Chapter("Error with the most steps", [finest], folded=True),
    ]


def _answer(models: JSONObject) -> Answer:
    below = [name for name, each in models.items() if _order(each).mark]
    if below:
        return Answer(
            f"{len(below)} of {len(models)} measured orders are below theory: {'; '.join(below)}.",
            "bad",
        )
    return Answer(
        f"All {len(models)} measured orders of convergence agree with theory (none is more than"
        f" {FAR} below).",
        "good",
    )


def _labels(key: tuple[str, str, str], row: JSONObject) -> list[Any]:
    source, limit, method = key
    return [source + limit, method, next(iter(row.values()))["formal"]]


def _order(each: JSONObject | None) -> Cell:
    if each is None:
        return cell(None)
    order = each["order"]
    if order is None or math.isnan(order):
        return cell(None, "bad")
    return Cell(f"{order:.2f}", order, "bad" if order < each["formal"] - FAR else "")


def _chart(source: str, limit: str, method: str, row: JSONObject) -> Plot:
    """Errors by placement, and the slope of the order in theory."""
    lines = [Line(name, each["sizes"], each["errors"], name) for name, each in row.items()]
    first = next(iter(row.values()))
    level = 1.6 * max((line.y[0] or 0.0 for line in lines), default=1.0)
    slope = [level * (n / first["sizes"][0]) ** -first["formal"] for n in first["sizes"]]
    lines.append(Line("order in theory", lines[0].x, slope, "mixed", bound=True))
    if limit == "substeps":
        x = "steps per sublayer"
    else:
        x = "blocks"
    return Plot(
        f"{source}{limit}: {method}, order {first['formal']}",
        x,
        "relative error",
        lines,
        log_x=True,
    )
