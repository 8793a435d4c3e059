"""The tables of a study's database: definitions, rows with digests, and damaged rows.

Tables of format 1, which had no digests, become those of this format.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from ctrans.study.finished import OBJECTS, Row, finished_of
from solvers import ConfigError

FORMAT = 2
SCHEMA = {
    "about": "CREATE TABLE about (name TEXT, value TEXT, digest TEXT)",
    "runs": (
        "CREATE TABLE runs (\n"
        '    key TEXT, "case" TEXT, seed INTEGER, learning_rate REAL, model TEXT, training TEXT,'
        " ending TEXT, message TEXT,\n"
        "    first_loss REAL, last_loss REAL, best_loss REAL, steps INTEGER, seconds REAL,\n"
        '    curve TEXT, trained TEXT, environment TEXT, "commit" TEXT, finished TEXT,'
        " digest TEXT\n"
        ")"
    ),
}
"""The tables, as SQLite keeps their definitions. Another line break would be another schema."""
TEXTS = ("key", "ending", "message", "commit", "finished")
"""Columns of a run's row that are texts."""


def prepare(connection: sqlite3.Connection, *, write: bool) -> list[tuple[str, Row]]:
    """Makes the tables, or checks them and their rows. Removes damaged rows, and returns them, each
    with its table. Raises DatabaseError for another schema, and for a damaged page.
    """
    connection.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
    connection.execute("BEGIN IMMEDIATE")
    with connection:
        tables = dict(connection.execute("SELECT name, sql FROM sqlite_master"))
        kinds = {kind for (kind,) in connection.execute("SELECT type FROM sqlite_master")}
        foreign_kinds = sorted(kinds - {"table", "index"})
        if foreign_kinds:  # reading or writing a row would run their SQL
            raise sqlite3.DatabaseError(
                f"it has a {foreign_kinds[0]}, and a study of ctrans has tables alone"
            )
        if write and not tables:
            _check(connection)  # a damaged list of tables may be empty too
            _make(connection)
            return []
        row = connection.execute("SELECT value FROM about WHERE name = 'format'").fetchone()
        if row == ("1",):
            damaged = _from_format_1(connection)
        elif row == (str(FORMAT),) and tables == SCHEMA:
            damaged = _take_damaged_rows(connection)
        else:
            raise sqlite3.DatabaseError(
                f"its format or its tables are not those of format 1 or {FORMAT}"
            )
        _check(connection)
    return damaged


def _take_damaged_rows(connection: sqlite3.Connection) -> list[tuple[str, Row]]:
    """Removes the rows that are not as ctrans wrote them, and returns them with their tables."""
    damaged = [
        (table, row) for table in SCHEMA for row in rows_of(connection, table) if not _sound(row)
    ]
    for table, row in damaged:
        connection.execute(f"DELETE FROM {table} WHERE rowid = ?", (row["rowid"],))
    return damaged


def _check(connection: sqlite3.Connection) -> None:
    """Raises DatabaseError for a damaged page, and for one that nothing uses."""
    (problem,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if problem != "ok":
        raise sqlite3.DatabaseError(problem)


def _make(connection: sqlite3.Connection) -> None:
    for definition in SCHEMA.values():
        connection.execute(definition)
    put_row(connection, "about", {"name": "format", "value": json.dumps(FORMAT)})


def _from_format_1(connection: sqlite3.Connection) -> list[tuple[str, Row]]:
    """Brings the file to this format. Returns its rows that cannot be read, which have no
    digest.
    """
    rows = [(table, row) for table in SCHEMA for row in rows_of(connection, table, "*")]
    for table in (*SCHEMA, "outcomes"):
        connection.execute(f"DROP TABLE IF EXISTS {table}")
    _make(connection)
    damaged = []
    for table, row in rows:
        if not _legible(row):
            damaged.append((table, row))
        elif row.get("name") != "format":
            put_row(connection, table, row)
    return damaged


def _legible(row: Row) -> bool:
    """Whether a row of format 1, which had no digests, can be read."""
    if "digest" in row:
        return False
    try:
        "".join(value for value in row.values() if isinstance(value, str)).encode()
        if "name" in row:
            about = json.loads(row["value"])
            return row["name"] != "data" or bool(fingerprints_of(about))
        if not _parses(row) or not all(isinstance(row[name], str) for name in TEXTS):
            return False
        finished = finished_of(row)
        finished.run.case.encode()  # the runs of a case are found by it
        numbers = [finished.result.seconds, *(step["step"] for step in finished.result.curve)]
    except ConfigError:
        return True  # a field that this ctrans does not have: reading it says so
    except (ValueError, TypeError, LookupError, AttributeError):
        return False
    return all(isinstance(number, (int, float)) for number in numbers)


def rows_of(connection: sqlite3.Connection, table: str, columns: str = "rowid, *") -> Iterator[Row]:
    """The rows of a table as objects, in the order in which they were stored. Raises DatabaseError
    for a damaged page, also for one whose sizes are more than the memory.
    """
    with _sizes_fit():
        cursor = connection.execute(f"SELECT {columns} FROM {table}")
    names = [column[0] for column in cursor.description]

    def rows() -> Iterator[Row]:
        with _sizes_fit():
            for row in cursor:
                yield dict(zip(names, row, strict=True))

    return rows()


@contextmanager
def _sizes_fit() -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise sqlite3.DatabaseError("a size in it is more than the memory") from None


def put_row(connection: sqlite3.Connection, table: str, row: Row) -> None:
    """Inserts a row with its digest."""
    row = {**row, "digest": _digest(row)}
    names = ", ".join(f'"{name}"' for name in row)
    connection.execute(
        f"INSERT INTO {table} ({names}) VALUES ({', '.join('?' * len(row))})", [*row.values()]
    )


def _digest(row: Row) -> str:
    """SHA-256 of the row's values by name, as JSON."""
    values = {name: value for name, value in row.items() if name not in ("rowid", "digest")}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=repr).encode()).hexdigest()


def _sound(row: Row) -> bool:
    """Whether a row is as ctrans wrote it. That of the format is checked by its value."""
    if row.get("name") == "format":
        return True
    if row["digest"] != _digest(row):
        return False
    is_of_a_run = "name" not in row
    return not is_of_a_run or _parses(row)


def _parses(row: Row) -> bool:
    """Whether each column of a run that is JSON can be parsed."""
    try:
        for name in OBJECTS:
            json.loads(row[name])
    except (ValueError, TypeError, LookupError):
        return False
    return True


def fingerprints_of(data: dict[str, str]) -> dict[int, str]:
    """The fingerprint of the data by context length, from the row `data` of the table `about`,
    whose JSON has these lengths as texts.
    """
    return {int(context): fingerprint for context, fingerprint in data.items()}
