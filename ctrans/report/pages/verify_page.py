"""The page of `ctrans verify`: every statement of the theory with what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctrans.report.sections import Cell, Chapter, Column, Mark, Table, Words, cell

MARKS: dict[str, Mark] = {"violated": "bad", "corrected": "note"}
COLUMNS = (
    Column("result"),
    Column("statement"),
    Column(
        "verdict",
        "as printed: the source's form holds; corrected: it fails and another holds; sharpened: both hold; new: no source states it",
    ),
    Column("says"),
    Column("source"),
    Column("printed form"),
    Column("reached", "the worst case's distance from equality, or its excess"),
    Column("cases"),
)


def chapters(models: Mapping[str, Any], result: Mapping[str, Any]) -> list[Chapter]:
    """All statements in one table."""
    rows, counts = [], dict[str, int]()
    for name, each in models.items():
        for statement, found in each["statements"].items():
            counts[found["verdict"]] = counts.get(found["verdict"], 0) + 1
            rows.append([
                cell(name or "this"),
                Cell(statement),
                Cell(found["verdict"], mark=MARKS.get(found["verdict"], "good")),
                cell(found["says"]),
                cell(found["source"]),
                cell(found["printed"]),
                cell(found["corrected"]["excess"]),
                cell(found["corrected"]["cases"]),
            ])  # fmt: skip
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    words = "Checked on random cases in float64: a statement that holds here was not refuted, which is no proof of it."
    return [Chapter("Statements", [Words(f"{len(rows)} statements: {said}. {words}"), Table("", COLUMNS, rows)])]
