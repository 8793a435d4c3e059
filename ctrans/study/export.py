"""The tables of a study as CSV, and as Parquet by pyarrow."""

from __future__ import annotations

import csv
import importlib.util
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ctrans.study.database import Store
from solvers import ConfigError, look_up

Columns = Sequence[str]
Rows = Sequence[tuple[Any, ...]]
Outcomes = Mapping[str, Mapping[str, float | None]]


def as_csv(columns: Columns, rows: Rows) -> bytes:
    """The table as CSV with a header. Objects are JSON."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue().encode()


def as_parquet(columns: Columns, rows: Rows) -> bytes:
    """The table as Parquet."""
    import pyarrow
    import pyarrow.parquet

    values = list(zip(*rows, strict=True)) or [() for _ in columns]
    buffer = io.BytesIO()
    table = pyarrow.table(
        {name: list(column) for name, column in zip(columns, values, strict=True)},
        metadata={"ctrans": "written by ctrans"},
    )
    pyarrow.parquet.write_table(table, buffer)
    return buffer.getvalue()


FORMATS: dict[str, Callable[[Columns, Rows], bytes]] = {"csv": as_csv, "parquet": as_parquet}


def check_format(name: str) -> str:
    """Returns the name. Raises ConfigError for an unknown format, or if its library is missing."""
    look_up("export format", name, FORMATS)
    if name == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(
            "Parquet needs pyarrow, which is not installed: pip install 'ctrans[parquet]', or"
            " export csv"
        )
    return name


def names(form: str) -> list[str]:
    """The names of the files of an export."""
    return [f"runs.{form}", f"outcomes.{form}"]


def files(
    name: str, store: Store, keys: Iterable[str], outcomes: Outcomes
) -> dict[str, Callable[[], bytes]]:
    """The files of an export by name, each with the function that makes its contents: the stored
    runs with these keys, and the outcomes of their cases.
    """
    make = look_up("export format", name, FORMATS)
    rows = [
        (case, figure, value)
        for case, figures in outcomes.items()
        for figure, value in figures.items()
    ]
    return {
        f"runs.{name}": lambda: make(*store.table_of_runs(keys)),
        f"outcomes.{name}": lambda: make(("case", "name", "value"), rows),
    }
