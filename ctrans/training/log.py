"""The run's log: one JSON object per line and iteration."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOG = "log.jsonl"
Row = dict[str, Any]


def append(directory: Path, row: Row) -> None:
    """Adds a line; a number that JSON lacks is written as its name in quotes."""
    line = json.dumps({key: value if _finite(value) else str(value) for key, value in row.items()}, allow_nan=False)
    with (directory / LOG).open("a") as file:
        file.write(line + "\n")


def read(directory: Path) -> Iterator[Row]:
    """The rows, up to a line that was not finished."""
    path = directory / LOG
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            if not line.endswith("\n"):
                return
            yield json.loads(line)


def cut(directory: Path, step: int) -> None:
    """Keeps the rows up to that iteration: those after it will be written again."""
    path, temporary = directory / LOG, directory / f".{LOG}"
    temporary.write_text("".join(json.dumps(row) + "\n" for row in read(directory) if row["step"] <= step))
    os.replace(temporary, path)


def _finite(value: Any) -> bool:
    return not isinstance(value, float) or abs(value) < float("inf")
