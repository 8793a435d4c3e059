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
    made: list[Chapter] = []
    for name, each in models.items():
        own = {key: value for key, value in each.items() if key not in ABOUT}
        single = {key: value for key, value in own.items() if not _has_rows(value)}
        made.append(
            Chapter(
                f"{name}: result" if name else "Result",
                [table(["figure", "value"], single.items())],
            )
        )
        made += [
            Chapter(key, [_of_objects(value)]) for key, value in own.items() if key not in single
        ]
    return made


def _of_objects(value: JSONObject | Sequence[Any]) -> Table:
    """A map or list of objects as rows."""
    rows = list(value.items() if isinstance(value, Mapping) else enumerate(value))[:LONGEST]
    if rows and all(isinstance(row, Mapping) for _, row in rows):
        keys = list(dict.fromkeys(key for _, row in rows for key in row))
        return table(["", *keys], [[name, *(row.get(key) for key in keys)] for name, row in rows])
    return table(["", "value"], rows)


def _has_rows(value: Any) -> bool:
    return bool(value) and (
        isinstance(value, Mapping)
        or (isinstance(value, list) and all(isinstance(each, Mapping) for each in value))
    )
