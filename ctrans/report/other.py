"""The page of a result without a table of measured values: all that it holds, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctrans.report.sections import Chapter, JSONObject, Table, table

ABOUT = ("command", "options", "environment", "model")
"""Keys of every result, which other parts of the page show."""
LONGEST = 2000
"""Rows of a list that a page shows; the JSON has all."""


def chapters(models: JSONObject) -> list[Chapter]:
    """Single values in one table; each map or list of objects in one of its own."""
    result_chapters: list[Chapter] = []
    for name, result in models.items():
        values = {key: value for key, value in result.items() if key not in ABOUT}
        single = {key: value for key, value in values.items() if not _has_rows(value)}
        title = f"{name}: result" if name else "Result"
        result_chapters.append(Chapter(title, [table(["figure", "value"], single.items())]))
        for key, value in values.items():
            if key not in single:
                result_chapters.append(Chapter(key, [_of_objects(value)]))
    return result_chapters


def _of_objects(value: JSONObject | Sequence[Any]) -> Table:
    """A map or list of objects as rows."""
    rows: list[tuple[Any, Any]]
    if isinstance(value, Mapping):
        rows = list(value.items())
    else:
        rows = list(enumerate(value))
    rows = rows[:LONGEST]
    if rows and all(isinstance(row, Mapping) for _, row in rows):
        keys = list(dict.fromkeys(key for _, row in rows for key in row))
        return table(["", *keys], [[name, *(row.get(key) for key in keys)] for name, row in rows])
    return table(["", "value"], rows)


def _has_rows(value: Any) -> bool:
    if not value:
        return False
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list) and all(isinstance(row, Mapping) for row in value)
