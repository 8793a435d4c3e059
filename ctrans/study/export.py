"""A study's tables for other programs: CSV, and Parquet by pyarrow."""

from __future__ import annotations

import csv
import importlib.util
import io
from collections.abc import Callable

from ctrans.study.store import Store
from solvers import ConfigError
from solvers.errors import look_up

TABLES = ("runs", "predictors", "outcomes")


def as_csv(store: Store, table: str) -> bytes:
    """The table with a head of its columns' names; what is an object is JSON."""
    columns, rows = store.table(table)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue().encode()


def as_parquet(store: Store, table: str) -> bytes:
    """The same as Parquet."""
    import pyarrow
    import pyarrow.parquet

    columns, rows = store.table(table)
    values = list(zip(*rows, strict=True)) or [() for _ in columns]
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({name: list(column) for name, column in zip(columns, values, strict=True)}), buffer)
    return buffer.getvalue()


FORMATS: dict[str, Callable[[Store, str], bytes]] = {"csv": as_csv, "parquet": as_parquet}


def check_format(name: str) -> str:
    """The format's name; ConfigError for one that is none, or whose library is missing."""
    look_up("export format", name, FORMATS)
    if name == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError("Parquet needs pyarrow, which is not installed: pip install 'ctrans[parquet]', or export csv")
    return name


def files(name: str) -> dict[str, Callable[[Store], bytes]]:
    """What an export in that format writes: names of files, and what makes them."""
    make = look_up("export format", name, FORMATS)
    return {f"{table}.{name}": lambda store, table=table: make(store, table) for table in TABLES}  # type: ignore[misc]  # the default binds the loop's table
