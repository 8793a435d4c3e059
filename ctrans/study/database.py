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
import json
import os
import shlex
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from ctrans.base.given_files import check_file
from ctrans.study.database_tables import fingerprints_of, prepare, put_row, rows_of
from ctrans.study.description import PlannedRun
from ctrans.study.finished import Finished, Row, finished_of, planned_run, row_of
from ctrans.study.run_key import PLUGINS, run_key
from ctrans.study.training import FAILED, RunResult
from ctrans.training.directory_lock import DirectoryLock, locked
from solvers import ConfigError

FILE = "study.sqlite"
LOCK = ".study.lock"
WAY_ON = "its runs are kept where it is now, so give the same command again with that --out"
"""The advice for a study whose directory was moved away."""
BESIDE = ("-wal", "-journal", "-shm")
"""Ends of the names of files that SQLite keeps beside its own."""
STORE_FILES = (FILE, LOCK, *(FILE + end for end in BESIDE))
"""The names of all files of a store."""


class Store:
    """An open study file. Use `open_store`. `damaged` has a line for each row that it left out.

    What writes raises ConfigError, and writes nothing, if the directory is no longer the one that
    `lock` locked.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: Path,
        damaged: Sequence[str] = (),
        lock: DirectoryLock | None = None,
    ):
        self.connection = connection
        self.path = path
        self.damaged = damaged
        self._lock = lock

    def about(self, name: str) -> Any:
        """The value of that name, or None."""
        row = self.connection.execute("SELECT value FROM about WHERE name = ?", (name,)).fetchone()
        if row is None:
            return None
        return json.loads(row[0])

    def tell(self, name: str, value: Any) -> None:
        """Stores a JSON value under that name."""
        self._check_ours()
        with self.connection:
            self.connection.execute("DELETE FROM about WHERE name = ?", (name,))
            put_row(self.connection, "about", {"name": name, "value": json.dumps(value)})

    def known(self, fingerprints: Mapping[int, str]) -> dict[str, str]:
        """The stored keys of all runs by their present keys, for data with these fingerprints, by
        context.

        A run whose stored key does not match its stored fields, for example of other data or of a
        plugin that was edited, has its stored key only. A run that failed is not known, so that it
        is tried again.
        """
        columns = 'key, ending, model, training, trained, "commit"'
        rows = self.connection.execute(f"SELECT {columns} FROM runs ORDER BY rowid")
        last_tries = {row[0]: row for row in rows}
        done = [row for row in last_tries.values() if row[1] != FAILED]
        stored_keys = {row[0]: row[0] for row in done}
        for key, _, *texts, commit in done:
            model, training, trained = map(json.loads, texts)
            measure = tuple(trained.get("asked", ()))
            fingerprint = fingerprints.get(model.get("context"))
            if fingerprint is None:
                continue
            # one without plugins, or of an earlier version, has no digest of plugins
            keys = {
                run_key(model, training, fingerprint, measure, plugins)
                for plugins in ("", PLUGINS["digest"])
            }
            if key in keys:
                run = planned_run(model, training, {}, measure, commit)
                stored_keys[run.key(fingerprint)] = key
        return stored_keys

    def number_of_others(self, runs: Iterable[PlannedRun], names: Iterable[str]) -> int:
        """How many stored runs have the configuration of one of these runs, and none of these
        stored keys, so that they are of other data. Runs that failed do not count.
        """
        configurations = {_configuration(run) for run in runs}
        rows = self.connection.execute(
            'SELECT key, model, training, trained, "commit" FROM runs WHERE ending != ?', (FAILED,)
        )
        others = {row[0]: row[1:] for row in rows}
        for name in names:
            others.pop(name, None)
        number = 0
        for *texts, commit in others.values():
            model, training, trained = map(json.loads, texts)
            measure = tuple(trained.get("asked", ()))
            with suppress(ConfigError):  # a run of another version is no run of this study
                run = planned_run(model, training, {}, measure, commit)
                number += int(_configuration(run) in configurations)
        return number

    def data(self) -> dict[int, str]:
        """The fingerprints of the study's data by context; {} for a store without them."""
        return fingerprints_of(self.about("data") or {})

    def begin_on(self, fingerprints: Mapping[int, str]) -> None:
        """Stores the fingerprints of data by context, for the contexts that it has too: those of
        the newest data.
        """
        by_context = {**self.data(), **fingerprints}
        self.tell("data", {str(context): by_context[context] for context in by_context})

    def spent(self, keys: Iterable[str]) -> float:
        """The processor seconds of these runs, over all tries."""
        selected = set(keys)
        rows = self.connection.execute("SELECT key, seconds FROM runs")
        return float(sum(seconds for key, seconds in rows if key in selected))

    def add(self, done: Sequence[tuple[str, PlannedRun, RunResult]], commit: str) -> None:
        """Adds the rows of runs in one transaction."""
        self._check_ours()
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with self.connection:
            for key, run, result in done:
                row = row_of(Finished(key, run, result, commit, now))
                put_row(self.connection, "runs", row)

    def _check_ours(self) -> None:
        if self._lock is not None:
            self._lock.check_held()

    def runs(self, keys: Iterable[str] | None = None) -> list[Finished]:
        """All stored runs, or those with these keys, in the order in which they ended."""
        all_rows = rows_of(self.connection, "runs")
        if keys is None:
            rows = list(all_rows)
        else:
            selected = set(keys)
            rows = [row for row in all_rows if row["key"] in selected]
        tries = Counter(row["key"] for row in rows)
        last_tries = {row["key"]: row for row in rows}
        runs = [
            dataclasses.replace(finished_of(row), tries=tries[key])
            for key, row in last_tries.items()
        ]
        return sorted(runs, key=lambda run: (run.finished, run.key))

    def table_of_runs(self, keys: Iterable[str]) -> tuple[list[str], list[tuple[Any, ...]]]:
        """The columns of the runs' table, and its rows with these keys."""
        selected = set(keys)
        cursor = self.connection.execute("SELECT * FROM runs")
        columns = [column[0] for column in cursor.description]
        place = columns.index("key")
        return columns, [row for row in cursor if row[place] in selected]


def _configuration(run: PlannedRun) -> str:
    """The run's key without its data."""
    return run.key("")


@contextmanager
def open_store(directory: Path, *, write: bool = True) -> Iterator[Store]:
    """Opens the study file in that directory. With `write` it makes the file if needed, brings one
    of format 1 to this format, removes damaged rows, and locks it against other writers. Without,
    it does the same to a copy in memory.

    Raises ConfigError if another process writes to it, the file is missing or no study file, a page
    of it is damaged, or the disk fails.
    """
    path = directory / FILE
    lock: DirectoryLock | None = None
    with ExitStack() as stack:
        try:
            if write:
                _check_no_link(path)
                directory.mkdir(parents=True, exist_ok=True)
                activity = f"works on the study in {str(directory)!r}"
                lock = stack.enter_context(locked(directory / LOCK, activity, WAY_ON))
            elif not path.is_file():
                raise ConfigError(
                    f"there is no {FILE} in {str(directory)!r}: give the --out of a study"
                )
            for file in (path, *(path.with_name(FILE + end) for end in BESIDE)):
                if file.exists():
                    check_file(file)  # SQLite would wait for a pipe
            # a reader may have to undo what a killed process began to write
            mode = "rw"
            if write:
                mode = "rwc"
            uri = f"{path.absolute().as_uri()}?mode={mode}"
            connection = stack.enter_context(closing(sqlite3.connect(uri, uri=True, timeout=30.0)))
            if not write:
                memory = stack.enter_context(closing(sqlite3.connect(":memory:")))
                connection.backup(memory)
                connection = memory
            damaged = prepare(connection, write=write)
            store = Store(connection, path, [_damage(table, row) for table, row in damaged], lock)
            if lock is not None:
                stack.callback(_merge_wal, connection, lock)
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


def _check_no_link(path: Path) -> None:
    """Raises ConfigError for a link, and for a file with another name: the lock is beside this one,
    and another process may write the file by the other name.
    """
    if path.is_symlink():
        place = os.path.realpath(path)
        raise ConfigError(
            f"{str(path)!r} is a link to {place!r}, which another study may write: give --out"
            f" {os.path.dirname(place)!r}, or replace the link with a copy"
        )
    if path.is_file() and path.stat().st_nlink > 1:
        name = shlex.quote(str(path))
        raise ConfigError(
            f"{str(path)!r} has another name, a hard link, by which another study may write it:"
            f" make it a file of its own: cp {name} {name}.copy && mv {name}.copy {name}"
        )


def _damage(table: str, row: Row) -> str:
    """A line about a damaged row."""
    if table == "about":
        return f"{FILE} is damaged: its entry {row['name']!r:.40} is left out"
    run = f"case {row.get('case')!s:.200}, seed {row.get('seed')!s:.20}, key {row.get('key')!s:.12}"
    return f"{FILE} is damaged: a run is left out, and ctrans study does it again: {run}"


def _merge_wal(connection: sqlite3.Connection, lock: DirectoryLock) -> None:
    """Merges the WAL into the file, unless another process reads it, or the WAL at its path is one
    of others.
    """
    with suppress(sqlite3.DatabaseError, ConfigError):
        lock.check_held()
        connection.execute("PRAGMA journal_mode = DELETE")
