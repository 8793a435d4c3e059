"""The page of a result whose command has no entry in `SECTIONS`: all its values, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctrans.report.sections import Chapter, Column, Table, cell

ABOUT = ("command", "options", "environment", "model")
"""Keys of every result, which other parts of the page show."""
LONGEST = 2000
"""Rows of a list that a page shows; the JSON has all."""


def chapters(name: str, result: Mapping[str, Any]) -> list[Chapter]:
    """Single values in one table; each map or list of objects in one of its own."""
    own = {key: value for key, value in result.items() if key not in ABOUT}
    single = {key: value for key, value in own.items() if not isinstance(value, Mapping) and not _is_of_objects(value)}
    title = f"{name}: result" if name else "Result"
    parts = (
        [Table("", [Column("figure"), Column("value")], [[cell(key), cell(value)] for key, value in single.items()])]
        if single
        else []
    )
    return [Chapter(title, parts)] * bool(parts) + [
        Chapter(key, [table(value)]) for key, value in own.items() if key not in single
    ]


def table(value: Mapping[str, Any] | Sequence[Any]) -> Table:
    """A map or list of objects as rows."""
    rows = list(value.items()) if isinstance(value, Mapping) else list(enumerate(value))
    rows = rows[:LONGEST]
    if rows and all(isinstance(row, Mapping) for _, row in rows):
        keys = list(dict.fromkeys(key for _, row in rows for key in row))
        return Table(
            "", [Column(""), *map(Column, keys)], [[cell(name), *(cell(row.get(key)) for key in keys)] for name, row in rows]
        )
    return Table("", [Column(""), Column("value")], [[cell(name), cell(row)] for name, row in rows])


def _is_of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) for each in value)
