"""The SQLite file of a study. One process writes it, and it is whole after a kill at any time.

    about   name, value       the study's description, and the fingerprints of its data
    runs    a row per try     key, case, configuration, seed, curve, outcome, environment, commit

The row of a run is one transaction at its end (WAL, flushed). The key is a hash of all that
determines a run. A run that failed has a row per try, and the last one counts. After a kill, the
same command repeats only the runs that had not ended.

Each row ends with a digest of its values. `open_store` leaves damaged rows out, so that their runs
are done again. No table has an index, so that a damaged row can be removed by its number.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from ctrans.base.given_files import check_file
from ctrans.base.printable import printable
from ctrans.model.config import GPTConfig
from ctrans.study.description import PlannedRun
from ctrans.study.run_key import BEFORE, run_key
from ctrans.study.training import FAILED, RunResult
from ctrans.training.run_directory import lock
from ctrans.training.settings import TrainConfig
from solvers import ConfigError

FILE, LOCK = "study.sqlite", ".study.lock"
BESIDE = ("-wal", "-journal", "-shm")
"""Ends of the names of files that SQLite keeps beside its own."""
FORMAT = 2
SCHEMA = {
    "about": "CREATE TABLE about (name TEXT, value TEXT, digest TEXT)",
    "runs": (
        """CREATE TABLE runs (
    key TEXT, "case" TEXT, seed INTEGER, learning_rate REAL, model TEXT, training TEXT, ending TEXT, message TEXT,
    first_loss REAL, last_loss REAL, best_loss REAL, steps INTEGER, seconds REAL,
    curve TEXT, trained TEXT, environment TEXT, "commit" TEXT, finished TEXT, digest TEXT
)"""
    ),
}
"""The tables, as SQLite keeps their definitions."""
OBJECTS = ("model", "training", "curve", "trained", "environment")
TEXTS = ("key", "ending", "message", "commit", "finished")
"""Columns of `runs` that are JSON, and that are texts."""

Row = dict[str, Any]
"""A row by the names of its columns."""


@dataclasses.dataclass(frozen=True)
class Finished:
    """A run of the store, as its last try left it. Losses are validation losses in nats, None for a
    missing or not finite one.
    """

    key: str
    run: PlannedRun
    result: RunResult
    commit: str
    finished: str
    tries: int = 1

    @property
    def losses(self) -> list[float | None]:
        """The validation losses; the first one is before the first step."""
        return [finite(row["validation_loss"]) for row in self.result.evaluations]

    @property
    def first(self) -> float | None:
        """The loss before the first step."""
        return next(iter(self.losses), None)

    @property
    def last(self) -> float | None:
        """The loss at the end; None for a run that did not finish."""
        if self.result.ending == "finished" and self.losses:
            return self.losses[-1]
        return None

    @property
    def best(self) -> float | None:
        """The lowest loss."""
        return min((loss for loss in self.losses if loss is not None), default=None)


FinishedRuns = Sequence[Finished]


class Store:
    """An open study file. Use `open_store`. `damaged` has a line for each row that it left out."""

    def __init__(self, connection: sqlite3.Connection, path: Path, damaged: Sequence[str] = ()):
        self.connection = connection
        self.path = path
        self.damaged = damaged

    def about(self, name: str) -> Any:
        """The value of that name, or None."""
        row = self.connection.execute("SELECT value FROM about WHERE name = ?", (name,)).fetchone()
        if row is None:
            return None
        return json.loads(row[0])

    def tell(self, name: str, value: Any) -> None:
        """Stores a JSON value under that name."""
        with self.connection:
            self.connection.execute("DELETE FROM about WHERE name = ?", (name,))
            _put(self.connection, "about", {"name": name, "value": json.dumps(value)})

    def known(self, fingerprints: Mapping[int, str]) -> dict[str, str]:
        """The stored keys of all runs by their present keys, for data with these fingerprints, by
        context.

        A run whose stored key does not match its stored fields, for example of other data, has its
        stored key only. A run that failed is not known, so that it is tried again.
        """
        columns = 'key, ending, model, training, trained, "commit"'
        last = {
            row[0]: row
            for row in self.connection.execute(f"SELECT {columns} FROM runs ORDER BY rowid")
        }
        rows = [row for row in last.values() if row[1] != FAILED]
        found = {row[0]: row[0] for row in rows}
        for key, _, *texts, commit in rows:
            model, training, trained = map(json.loads, texts)
            measure = tuple(trained.get("asked", ()))
            fingerprint = fingerprints.get(model.get("context"))
            if fingerprint is not None and run_key(model, training, fingerprint, measure) == key:
                found[_planned(model, training, {}, measure, commit).key(fingerprint)] = key
        return found

    def data(self) -> dict[int, str]:
        """The fingerprints of the study's data by context; {} for a store without them."""
        return _fingerprints(self.about("data") or {})

    def begin_on(self, fingerprints: Mapping[int, str]) -> None:
        """Stores the fingerprints of data by context, except for contexts that it has."""
        self.tell(
            "data",
            {str(context): each for context, each in {**fingerprints, **self.data()}.items()},
        )

    def spent(self, keys: Iterable[str]) -> float:
        """The processor seconds of these runs, over all tries."""
        wanted = set(keys)
        rows = self.connection.execute("SELECT key, seconds FROM runs")
        return float(sum(seconds for key, seconds in rows if key in wanted))

    def add(self, done: Sequence[tuple[str, PlannedRun, RunResult]], commit: str) -> None:
        """Adds the rows of runs in one transaction."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with self.connection:
            for key, run, result in done:
                _put(self.connection, "runs", _row(Finished(key, run, result, commit, now)))

    def runs(self, keys: Iterable[str] | None = None) -> list[Finished]:
        """All stored runs, or those with these keys, in the order in which they ended."""
        if keys is None:
            wanted = None
        else:
            wanted = set(keys)
        rows = [
            row for row in _rows(self.connection, "runs") if wanted is None or row["key"] in wanted
        ]
        tries = Counter(row["key"] for row in rows)
        last = {row["key"]: row for row in rows}
        found = [dataclasses.replace(_read(row), tries=tries[key]) for key, row in last.items()]
        return sorted(found, key=lambda each: (each.finished, each.key))

    def table(self, name: str) -> tuple[list[str], list[tuple[Any, ...]]]:
        """The columns and rows of a table."""
        cursor = self.connection.execute(f'SELECT * FROM "{name}"')
        return [column[0] for column in cursor.description], cursor.fetchall()


@contextmanager
def open_store(directory: Path, *, write: bool = True) -> Iterator[Store]:
    """Opens the study file in that directory. With `write` it makes the file if needed, brings one
    of format 1 to this format, removes damaged rows, and locks it against other writers. Without,
    it does the same to a copy in memory.

    Raises ConfigError if another process writes to it, the file is missing or no study file, a page
    of it is damaged, or the disk fails.
    """
    path = directory / FILE
    with ExitStack() as stack:
        try:
            if write:
                directory.mkdir(parents=True, exist_ok=True)
                stack.enter_context(
                    lock(directory / LOCK, f"works on the study in {str(directory)!r}")
                )
            elif not path.is_file():
                raise ConfigError(
                    f"there is no {FILE} in {str(directory)!r}: give the --out of a study"
                )
            for each in (path, *(path.with_name(FILE + end) for end in BESIDE)):
                if each.exists():
                    check_file(each)  # SQLite would wait for a pipe
            # a reader may have to undo what a killed process began to write
            mode = f"{path.absolute().as_uri()}?mode={'rwc' if write else 'rw'}"
            connection = stack.enter_context(closing(sqlite3.connect(mode, uri=True, timeout=30.0)))
            if not write:
                memory = stack.enter_context(closing(sqlite3.connect(":memory:")))
                connection.backup(memory)
                connection = memory
            store = Store(connection, path, _prepare(connection, write))
            if write:
                stack.callback(_one_file, connection)
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
        except OSError as error:
            raise ConfigError(
                f"cannot write to {str(directory)!r}: {error.strerror or error}; choose another"
                " --out"
            ) from None
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot use {str(path)!r} as a study: {error}; check the space on its disk, or"
                " restore the file from a copy; if you move it away, the study begins anew"
            ) from None
        try:
            yield store
        except sqlite3.OperationalError as error:
            raise ConfigError(
                f"cannot use {str(path)!r}: {error}; its runs are whole: free some space, and give"
                " the same command again"
            ) from None
        except sqlite3.DatabaseError as error:
            raise ConfigError(
                f"{str(path)!r} is damaged: {error}; choose another --out, or a copy from before"
            ) from None


def _prepare(connection: sqlite3.Connection, write: bool) -> list[str]:
    """Makes the tables, or checks them and their rows. Removes damaged rows, and returns a line for
    each. Raises DatabaseError for another schema, and for a damaged page.
    """
    connection.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
    connection.execute("BEGIN IMMEDIATE")
    with connection:
        tables = dict(connection.execute("SELECT name, sql FROM sqlite_master"))
        if write and not tables:
            _check(connection)  # a damaged list of tables may be empty too
            _make(connection)
            return []
        kept = connection.execute("SELECT value FROM about WHERE name = 'format'").fetchone()
        if kept == ("1",):
            damaged = _from_format_1(connection)
        elif kept == (str(FORMAT),) and SCHEMA.items() <= tables.items():
            damaged = [
                (table, row)
                for table in SCHEMA
                for row in _rows(connection, table)
                if not _sound(row)
            ]
            for table, row in damaged:
                connection.execute(f"DELETE FROM {table} WHERE rowid = ?", (row["rowid"],))
        else:
            raise sqlite3.DatabaseError(
                f"its format or its tables are not those of format 1 or {FORMAT}"
            )
        _check(connection)
    return [_named(table, row) for table, row in damaged]


def _check(connection: sqlite3.Connection) -> None:
    """Raises DatabaseError for a damaged page, and for one that nothing uses."""
    (problem,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if problem != "ok":
        raise sqlite3.DatabaseError(problem)


def _make(connection: sqlite3.Connection) -> None:
    for definition in SCHEMA.values():
        connection.execute(definition)
    _put(connection, "about", {"name": "format", "value": json.dumps(FORMAT)})


def _from_format_1(connection: sqlite3.Connection) -> list[tuple[str, Row]]:
    """Brings the file to this format. Returns its rows that cannot be read, which have no
    digest.
    """
    rows = [(table, row) for table in SCHEMA for row in _rows(connection, table, "*")]
    for table in (*SCHEMA, "outcomes"):
        connection.execute(f"DROP TABLE IF EXISTS {table}")
    _make(connection)
    legible = [_legible(row) for _, row in rows]
    for (table, row), whole in zip(rows, legible, strict=True):
        if whole and row.get("name") != "format":
            _put(connection, table, row)
    return [each for each, whole in zip(rows, legible, strict=True) if not whole]


def _legible(row: Row) -> bool:
    """Whether a row of format 1, which had no digests, can be read."""
    if "digest" in row:
        return False
    try:
        "".join(each for each in row.values() if isinstance(each, str)).encode()
        if "name" in row:
            value = json.loads(row["value"])
            return row["name"] != "data" or bool(_fingerprints(value))
        if not _parses(row) or not all(isinstance(row[name], str) for name in TEXTS):
            return False
        each = _read(row)
        each.run.case.encode()  # the runs of a case are found by it
        numbers = [each.result.seconds, *(step["step"] for step in each.result.curve)]
    except ConfigError:
        return True  # a field that this ctrans does not have: reading it says so
    except (ValueError, TypeError, LookupError, AttributeError):
        return False
    return all(isinstance(number, (int, float)) for number in numbers)


def _rows(connection: sqlite3.Connection, table: str, columns: str = "rowid, *") -> Iterator[Row]:
    """The rows of a table as objects, in the order in which they were stored."""
    cursor = connection.execute(f"SELECT {columns} FROM {table}")
    names = [column[0] for column in cursor.description]
    return (dict(zip(names, row, strict=True)) for row in cursor)


def _put(connection: sqlite3.Connection, table: str, row: Row) -> None:
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
    return (row["digest"] == _digest(row) and _parses(row)) or row.get("name") == "format"


def _parses(row: Row) -> bool:
    """Whether each column of a run that is JSON can be parsed."""
    try:
        for name in () if "name" in row else OBJECTS:
            json.loads(row[name])
    except (ValueError, TypeError, LookupError):
        return False
    return True


def _named(table: str, row: Row) -> str:
    if table == "about":
        return f"{FILE} is damaged: its entry {row['name']!r:.40} is left out"
    which = (
        f"case {row.get('case')!s:.200}, seed {row.get('seed')!s:.20}, key {row.get('key')!s:.12}"
    )
    return f"{FILE} is damaged: a run is left out, and ctrans study does it again: {which}"


def _one_file(connection: sqlite3.Connection) -> None:
    """Merges the WAL into the file, unless another process reads it."""
    with suppress(sqlite3.DatabaseError):
        connection.execute("PRAGMA journal_mode = DELETE")


def finite(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    usable = isinstance(value, (int, float)) and abs(value) < float("inf")
    # SQLite keeps no -0.0
    if usable:
        return float(value) + 0.0
    return None


def _fingerprints(data: dict[str, str]) -> dict[int, str]:
    return {int(context): fingerprint for context, fingerprint in data.items()}


def _row(each: Finished) -> Row:
    """The row of a run."""
    run = each.run
    result = each.result
    return {
        "key": each.key,
        "case": run.case,
        "seed": run.training.seed,
        "learning_rate": float(run.training.learning_rate),
        "model": json.dumps(dataclasses.asdict(run.model)),
        "training": json.dumps(dataclasses.asdict(run.training)),
        "ending": result.ending,
        "message": printable(result.message),
        "first_loss": each.first,
        "last_loss": each.last,
        "best_loss": each.best,
        "steps": max((row.get("step", 0) for row in result.curve), default=0),
        "seconds": float(result.seconds),
        "curve": json.dumps(result.curve),
        "trained": json.dumps(result.trained),
        "environment": json.dumps(result.environment),
        "commit": each.commit,
        "finished": each.finished,
    }


def _read(row: Row) -> Finished:
    row = {name: json.loads(value) if name in OBJECTS else value for name, value in row.items()}
    asked = tuple(row["trained"].get("asked", ()))
    run = _planned(row["model"], row["training"], json.loads(row["case"]), asked, row["commit"])
    result = RunResult(
        row["ending"],
        row["message"],
        row["curve"],
        row["seconds"],
        row["environment"],
        row["trained"],
    )
    return Finished(row["key"], run, result, row["commit"], row["finished"])


def _planned(
    model: dict[str, Any],
    training: dict[str, Any],
    varied: dict[str, Any],
    measure: tuple[str, ...],
    commit: str,
) -> PlannedRun:
    """A stored run, with the fields that are newer than it. Raises ConfigError for a field that
    this ctrans does not have.
    """
    made: dict[str, Any] = {}
    for kind, cls, kept in (("model", GPTConfig, model), ("training", TrainConfig, training)):
        fields = {**BEFORE[kind], **kept}
        gone = fields.keys() - {field.name for field in dataclasses.fields(cls)}
        if gone:
            raise ConfigError(
                f"the study has runs with {min(gone)}, which this ctrans does not know: read it"
                " with the ctrans that wrote it" + (f", commit {commit}" if commit else "")
            )
        made[kind] = cls(**fields)
    return PlannedRun(**made, varied=varied, measure=measure)
