"""A study small enough to be carried out many times."""

import contextlib
import sqlite3

from ctrans.study.carry_out import prospect
from ctrans.study.description import Study

BASE = {
    "vocab_size": 256,
    "depth": 1,
    "width": 16,
    "heads": 2,
    "context": 8,
    "iterations": 4,
    "batch": 20,
    "warmup": 1,
    "eval_every": 2,
    "eval_windows": 2,
}


def given():
    """What a small study is made of."""
    return {
        "name": "small",
        "base": BASE,
        "vary": {"placement": ["pre", "peri"]},
        "learning_rates": [1e-3, 1e-2],
    }


def small(name="small", **changes):
    return Study(**{**given(), "name": name, **changes})


def one_by_one(jobs):
    """An engine in this process."""
    for job in jobs:
        yield job, job.carry_out()


def left(study, store=None):
    return prospect(study, store).left


FORMAT_1 = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE runs (
    key TEXT PRIMARY KEY, "case" TEXT NOT NULL, seed INTEGER NOT NULL, learning_rate REAL NOT NULL,
    model TEXT NOT NULL, training TEXT NOT NULL, ending TEXT NOT NULL, message TEXT NOT NULL,
    first_loss REAL, last_loss REAL, best_loss REAL, steps INTEGER NOT NULL, seconds REAL NOT NULL,
    curve TEXT NOT NULL, trained TEXT NOT NULL, environment TEXT NOT NULL, "commit" TEXT NOT NULL, finished TEXT NOT NULL
);
CREATE TABLE outcomes (
    "case" TEXT NOT NULL, name TEXT NOT NULL, value REAL, PRIMARY KEY ("case", name)
) WITHOUT ROWID;
"""
"""The tables of study files of before the digests."""


def to_format_1(path):
    """Makes the study file one of format 1, with the same runs."""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        tables = {
            name: connection.execute(f"SELECT * FROM {name}").fetchall()
            for name in ("about", "runs")
        }
        for name in tables:
            connection.execute(f"DROP TABLE {name}")
        connection.executescript(FORMAT_1)
        for name, rows in tables.items():
            marks = ", ".join("?" * (len(rows[0]) - 1))
            connection.executemany(
                f"INSERT INTO {name} VALUES ({marks})", [row[:-1] for row in rows]
            )
        connection.execute("UPDATE about SET value = '1' WHERE name = 'format'")
