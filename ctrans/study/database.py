"""The SQLite file of a study. One process writes it, and it is whole after a kill at any time.

    about     name, value              the study's description, and the fingerprints of its data
    runs      a row per finished run   key, case, configuration, seed, curve, outcome, environment, commit
    outcomes  a row per case, figure   figures of all runs of a case (see `ctrans.study.outcomes`)

The row of a run is one transaction at its end (WAL, flushed). The key is a hash of all that
determines a run. After a kill, the same command repeats only the runs that had not ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctrans.model.config import GPTConfig
from ctrans.study.description import PlannedRun
from ctrans.study.run_key import BEFORE, run_key
from ctrans.study.training import FAILED, RunResult
from ctrans.training.run_directory import lock
from ctrans.training.settings import TrainConfig
from solvers import ConfigError

FILE, LOCK = "study.sqlite", ".study.lock"
FORMAT = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS runs (
    key TEXT PRIMARY KEY, "case" TEXT NOT NULL, seed INTEGER NOT NULL, learning_rate REAL NOT NULL,
    model TEXT NOT NULL, training TEXT NOT NULL, ending TEXT NOT NULL, message TEXT NOT NULL,
    first_loss REAL, last_loss REAL, best_loss REAL, steps INTEGER NOT NULL, seconds REAL NOT NULL,
    curve TEXT NOT NULL, trained TEXT NOT NULL, environment TEXT NOT NULL, "commit" TEXT NOT NULL, finished TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS outcomes (
    "case" TEXT NOT NULL, name TEXT NOT NULL, value REAL, PRIMARY KEY ("case", name)
) WITHOUT ROWID;
"""
OBJECTS = ("model", "training", "curve", "trained", "environment")
"""Columns of `runs` that are JSON."""


@dataclasses.dataclass(frozen=True)
class Finished:
    """A run of the store. Losses are validation losses in nats, None for a missing or not finite
    one.
    """

    key: str
    run: PlannedRun
    result: RunResult
    commit: str
    finished: str

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
        return self.losses[-1] if self.result.ending == "finished" and self.losses else None

    @property
    def best(self) -> float | None:
        """The lowest loss."""
        return min((loss for loss in self.losses if loss is not None), default=None)


class Store:
    """An open study file. Use `open_store`."""

    def __init__(self, connection: sqlite3.Connection, path: Path):
        self.connection, self.path = connection, path

    def about(self, name: str) -> Any:
        """The value of that name, or None."""
        row = self.connection.execute("SELECT value FROM about WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def tell(self, name: str, value: Any) -> None:
        """Stores a JSON value under that name."""
        with self.connection:
            self.connection.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (name, json.dumps(value)))

    def known(self, fingerprints: Mapping[int, str]) -> dict[str, str]:
        """The stored keys of all runs by their present keys, for data with these fingerprints, by
        context.

        A run whose stored key does not match its stored fields, for example of other data, has its
        stored key only. A run that failed is not known, so that it is tried again.
        """
        columns = 'key, model, training, trained, "commit"'
        rows = self.connection.execute(f"SELECT {columns} FROM runs WHERE ending != ?", (FAILED,)).fetchall()
        found = {row[0]: row[0] for row in rows}
        for key, *texts, commit in rows:
            model, training, trained = map(json.loads, texts)
            measure, fingerprint = tuple(trained.get("asked", ())), fingerprints.get(model["context"])
            if fingerprint is not None and run_key(model, training, fingerprint, measure) == key:
                found[_planned(model, training, {}, measure, commit).key(fingerprint)] = key
        return found

    def data(self) -> dict[int, str]:
        """The fingerprints of the study's data by context; {} for a store without them."""
        return {int(context): fingerprint for context, fingerprint in (self.about("data") or {}).items()}

    def begin_on(self, fingerprints: Mapping[int, str]) -> None:
        """Stores the fingerprints of data by context, except for contexts that it has."""
        self.tell("data", {str(context): each for context, each in {**fingerprints, **self.data()}.items()})

    def spent(self, keys: Iterable[str]) -> float:
        """The processor seconds of these runs."""
        wanted = set(keys)
        rows = self.connection.execute("SELECT key, seconds FROM runs")
        return float(sum(seconds for key, seconds in rows if key in wanted))

    def add(self, done: Sequence[tuple[str, PlannedRun, RunResult]], commit: str) -> None:
        """Adds the rows of runs in one transaction. A run that failed before has a new row."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with self.connection:
            for key, run, result in done:
                row = _row(Finished(key, run, result, commit, now))
                self.connection.execute(f"INSERT OR REPLACE INTO runs VALUES ({', '.join('?' * len(row))})", row)

    def runs(self, keys: Iterable[str] | None = None) -> list[Finished]:
        """All stored runs, or those with these keys, in the order in which they ended."""
        wanted = None if keys is None else set(keys)
        columns, rows = self.table("runs")
        found = [_read(dict(zip(columns, row, strict=True))) for row in rows if wanted is None or row[0] in wanted]
        return sorted(found, key=lambda each: (each.finished, each.key))

    def put_outcomes(self, outcomes: dict[str, dict[str, float | None]]) -> None:
        """Replaces all outcomes: figures by name for each case."""
        rows = [(case, name, finite(value)) for case, figures in outcomes.items() for name, value in figures.items()]
        with self.connection:
            self.connection.execute("DELETE FROM outcomes")
            self.connection.executemany('INSERT INTO outcomes ("case", name, value) VALUES (?, ?, ?)', rows)

    def outcomes(self) -> dict[str, dict[str, float | None]]:
        """The outcomes: figures by name for each case."""
        found: dict[str, dict[str, float | None]] = {}
        for case, name, value in self.connection.execute('SELECT "case", name, value FROM outcomes ORDER BY "case", name'):
            found.setdefault(case, {})[name] = value
        return found

    def table(self, name: str) -> tuple[list[str], list[tuple[Any, ...]]]:
        """The columns and rows of a table."""
        cursor = self.connection.execute(f'SELECT * FROM "{name}"')
        return [column[0] for column in cursor.description], cursor.fetchall()


@contextlib.contextmanager
def open_store(directory: Path, *, write: bool = True) -> Iterator[Store]:
    """Opens the study file in that directory. With `write` it makes the file if needed, and locks
    it against other writers.

    Raises ConfigError if another process writes to it, the file is missing or no study file, or the
    disk fails.
    """
    path = directory / FILE
    with contextlib.ExitStack() as stack:
        try:
            if write:
                directory.mkdir(parents=True, exist_ok=True)
                lock(stack.enter_context((directory / LOCK).open("a")), f"works on the study in {str(directory)!r}")
            elif not path.is_file():
                raise ConfigError(f"there is no {FILE} in {str(directory)!r}: give the --out of a study")
            connection = sqlite3.connect(path if write else f"{path.absolute().as_uri()}?mode=ro", uri=not write, timeout=30.0)
            stack.callback(connection.close)
            if write:
                _prepare(connection)
                stack.callback(_one_file, connection)
            connection.execute("SELECT count(*) FROM runs").fetchone()
        except OSError as error:
            raise ConfigError(f"cannot write to {str(directory)!r}: {error.strerror or error}; choose another --out") from None
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{str(path)!r} is no valid study file: {error}; choose another --out") from None
        try:
            yield Store(connection, path)
        except sqlite3.OperationalError as error:
            raise ConfigError(
                f"cannot use {str(path)!r}: {error}; its runs are whole: free some space, and give the same command again"
            ) from None
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{str(path)!r} is damaged: {error}; choose another --out, or a copy from before") from None


def _prepare(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.executescript(SCHEMA)
    with connection:
        connection.execute("INSERT OR IGNORE INTO about VALUES ('format', ?)", (json.dumps(FORMAT),))
    (kept,) = connection.execute("SELECT value FROM about WHERE name = 'format'").fetchone()
    if json.loads(kept) != FORMAT:
        raise sqlite3.DatabaseError(f"it has format {kept}, and this ctrans writes {FORMAT}")


def _one_file(connection: sqlite3.Connection) -> None:
    """Merges the WAL into the file, unless another process reads it."""
    with contextlib.suppress(sqlite3.OperationalError):
        connection.execute("PRAGMA journal_mode = DELETE")


def finite(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    usable = isinstance(value, (int, float)) and abs(value) < float("inf")
    return float(value) if usable else None


def _row(each: Finished) -> tuple[Any, ...]:
    """The row of a run, in the order of the columns of `runs`."""
    run, result = each.run, each.result
    settings = json.dumps(dataclasses.asdict(run.model)), json.dumps(dataclasses.asdict(run.training))
    named = each.key, run.case, run.training.seed, run.training.learning_rate, *settings
    steps = max((row.get("step", 0) for row in result.curve), default=0)
    ended = result.ending, result.message, each.first, each.last, each.best, steps, result.seconds
    objects = map(json.dumps, (result.curve, result.trained, result.environment))
    return *named, *ended, *objects, each.commit, each.finished


def _read(row: dict[str, Any]) -> Finished:
    row = {name: json.loads(value) if name in OBJECTS else value for name, value in row.items()}
    asked = tuple(row["trained"].get("asked", ()))
    run = _planned(row["model"], row["training"], json.loads(row["case"]), asked, row["commit"])
    result = RunResult(row["ending"], row["message"], row["curve"], row["seconds"], row["environment"], row["trained"])
    return Finished(row["key"], run, result, row["commit"], row["finished"])


def _planned(
    model: dict[str, Any], training: dict[str, Any], varied: dict[str, Any], measure: tuple[str, ...], commit: str
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
                f"the study has runs with {min(gone)}, which this ctrans does not know: read it with the ctrans that wrote it"
                + (f", commit {commit}" if commit else "")
            )
        made[kind] = cls(**fields)
    return PlannedRun(**made, varied=varied, measure=measure)
