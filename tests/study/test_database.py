"""One row a run, each run once, whatever happens: also to a process that is killed."""

import contextlib
import csv
import dataclasses
import io
import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from ctrans.study import carry_out, export
from ctrans.study.carry_out import carry_out_study, prospect
from ctrans.study.database import FILE, open_store
from ctrans.study.database_tables import rows_of
from ctrans.study.outcomes import outcomes_of
from ctrans.study.training import RunResult, train_run
from ctrans.training.data import from_text
from ctrans.training.train import train
from solvers import ConfigError
from tests.study.helpers import BASE, one_by_one, small, to_format_1
from tests.training.helpers import TEXT


def carried_out(study, directory, engine=one_by_one):
    with open_store(directory) as store:
        return carry_out_study(prospect(study, store), store, engine)


def rows(directory):
    with open_store(directory, write=False) as store:
        return store.runs()


def test_a_run_has_the_losses_of_the_same_ctrans_train(tmp_path):
    run = small().runs()[0]
    data = from_text(TEXT, run.model.context)
    mine = train_run(run, data)
    theirs = train(run.model, run.training, TEXT, out=tmp_path / "run")
    assert [row["loss"] for row in mine.curve[1:]] == [row["loss"] for row in theirs.rows[1:]]
    assert [row["validation_loss"] for row in mine.evaluations] == [
        row["validation_loss"] for row in theirs.rows if "validation_loss" in row
    ]


def test_what_is_kept_is_what_was_found(tmp_path):
    study = small(measure=["moments"])
    assert carried_out(study, tmp_path)
    kept = rows(tmp_path)
    assert {run.run.case for run in kept} == {run.case for run in study.runs()}
    for run in kept:
        assert run.run in study.runs()
        assert run.last == run.losses[-1]
        assert run.first == run.losses[0]
        assert len(run.result.trained["after"]["moments"]["mean_abs"]) == 3
        assert run.result.environment["threads"] >= 1


def test_divergence_and_failure_are_outcomes_and_no_errors(tmp_path):
    study = small(
        cases=[{"temperature_start": 2.0, "temperature_steps": 2, "attention": "linear"}, {}],
        learning_rates=[1e-3, 1e30],
    )
    assert carried_out(study, tmp_path)
    endings = [run.result.ending for run in rows(tmp_path)]
    assert sorted(set(endings)) == ["diverged", "failed", "finished"]
    failed = next(run for run in rows(tmp_path) if run.result.ending == "failed")
    assert "no temperature" in failed.result.message
    # at rate 1e30 one is not finite; at 1e-3 two steps do not reach the loss of token frequencies
    assert outcomes_of(rows(tmp_path))['{"placement": "pre"}']["diverged"] == 2.0


def test_a_run_that_failed_is_tried_again_and_replaced(tmp_path):
    def failing(jobs):
        for i, job in enumerate(jobs):
            yield (
                job,
                (
                    job.carry_out()
                    if i
                    else [RunResult("failed", "no memory", [], 1.0, {}) for _ in job.runs]
                ),
            )

    carried_out(small(), tmp_path, failing)
    failed = {run.key for run in rows(tmp_path) if run.result.ending == "failed"}
    assert failed
    with open_store(tmp_path) as store:
        assert prospect(small(), store).left.keys() == failed
    carried_out(small(), tmp_path)
    assert [run.result.ending for run in rows(tmp_path)] == 4 * ["finished"]


def test_each_try_of_a_run_that_fails_is_counted_and_its_seconds_too(tmp_path):
    def failing(jobs):
        for job in jobs:
            yield job, [RunResult("failed", "half a letter \ud800", [], 1.0, {}) for _ in job.runs]

    for tries in (1, 2, 3):
        carried_out(small(), tmp_path, failing)
        assert [run.tries for run in rows(tmp_path)] == 4 * [tries]
    with open_store(tmp_path, write=False) as store:
        assert store.spent(run.key for run in store.runs()) == 12.0
    carried_out(small(), tmp_path)
    assert [(run.tries, run.result.ending) for run in rows(tmp_path)] == 4 * [(4, "finished")]


def test_any_number_has_the_digest_that_its_stored_value_has(tmp_path):
    """SQLite keeps 1 in a column of type REAL as 1.0, and -0.0 as 0.0."""
    (run,) = small(vary={}, learning_rates=[1]).runs()
    curve = [
        {"step": 0, "validation_loss": -0.0},
        {"step": 1, "validation_loss": 7},
        {"step": 2, "validation_loss": float("nan")},
    ]
    with open_store(tmp_path) as store:
        store.add([("a", run, RunResult("finished", "\x00 é", curve, 0, {}))], "")
    with open_store(tmp_path) as store:
        assert not store.damaged
        assert [each.first for each in store.runs()] == [0.0]


def test_the_same_command_finds_nothing_to_do(tmp_path):
    carried_out(small(), tmp_path)

    def none_left(jobs):
        assert not list(jobs)
        yield from ()

    assert carried_out(small(), tmp_path, none_left)
    assert len(rows(tmp_path)) == 4


def test_a_study_that_grows_runs_what_is_new(tmp_path):
    carried_out(small(), tmp_path)
    with open_store(tmp_path) as store:
        left = prospect(small(seeds=[0, 1]), store).left
        assert {run.training.seed for run in left.values()} == {1}
        with pytest.raises(ConfigError, match="'small', not 'other'"):
            prospect(small("other"), store)


@pytest.mark.slow
def test_outcomes_are_of_the_study_as_it_is_now(tmp_path):
    """Runs of what the study was before stay in the store, and are no runs of its cases."""
    carried_out(small(), tmp_path)
    longer = small(base={**BASE, "iterations": 6})
    carried_out(longer, tmp_path)
    assert len(rows(tmp_path)) == 8
    with open_store(tmp_path, write=False) as store:
        kept = prospect(longer, store).kept(store)
        assert {figures["runs"] for figures in outcomes_of(kept).values()} == {2.0}
        assert {run.run.training.iterations for run in kept} == {6}


def test_a_study_that_varies_more_has_what_was_kept_in_its_own_cases(tmp_path):
    carried_out(small(), tmp_path)
    wider = small(vary={"placement": ["pre", "peri"], "dt": [1.0, 0.5]})
    carried_out(wider, tmp_path)
    with open_store(tmp_path, write=False) as store:
        assert set(outcomes_of(prospect(wider, store).kept(store))) == {
            run.case for run in wider.runs()
        }
        assert len(rows(tmp_path)) == 8


def test_what_is_under_way_when_the_budget_is_spent_is_kept(tmp_path):
    def two_at_once(jobs):
        while two := list(itertools.islice(jobs, 2)):
            yield from [(job, job.carry_out()) for job in two]

    assert not carried_out(small(budget=1e-9), tmp_path, two_at_once)
    assert len(rows(tmp_path)) == 2


def test_a_damaged_file_is_no_traceback(tmp_path):
    with pytest.raises(ConfigError, match="is damaged: page lost"), open_store(tmp_path):
        raise sqlite3.DatabaseError("page lost")


@pytest.mark.parametrize("count", [0, 1])
def test_a_page_whose_sizes_exceed_the_memory_is_damaged(count):
    """SQLite raises MemoryError for it, at the first row or at a later one."""
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE texts (number)")
    connection.executemany("INSERT INTO texts VALUES (?)", [[0], [1]])

    def sized(number):
        if number == count:
            raise MemoryError
        return number

    connection.create_function("sized", 1, sized)
    with pytest.raises(sqlite3.DatabaseError, match="more than the memory"):
        list(rows_of(connection, "texts", "sized(number)"))


def test_the_commit_is_ctranss_own_and_not_of_a_tree_that_it_lies_in(tmp_path, monkeypatch):
    for words in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a", "commit", "-q", "--allow-empty", "-m", "a"],
    ):
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    monkeypatch.setattr(carry_out, "__file__", str(tmp_path / "carry_out.py"))
    assert carry_out.commit_of_ctrans() == ""


def test_a_task_is_trained_as_any_text_is(tmp_path):
    base = {name: value for name, value in BASE.items() if name not in ("vocab_size", "context")}
    study = small(
        base={**base, "eval_windows": 20},
        source={"task": "digits"},
        learning_rates=[1e-3],
        measure=["massive"],
    )
    assert carried_out(study, tmp_path)
    kept = rows(tmp_path)
    assert [run.result.ending for run in kept] == ["finished"] * 2
    assert all(run.run.model.context == 65 and run.last != run.first for run in kept)
    assert all(run.result.trained["after"]["massive"]["largest"] for run in kept)


def test_a_budget_that_is_spent_stops_and_more_goes_on(tmp_path):
    assert not carried_out(small(budget=1e-9), tmp_path)
    assert len(rows(tmp_path)) == 1
    assert not carried_out(small(budget=1e-9), tmp_path)
    assert len(rows(tmp_path)) == 1
    assert carried_out(small(budget=1.0), tmp_path)
    assert len(rows(tmp_path)) == 4


def test_an_interrupted_run_is_not_kept(tmp_path):
    def interrupted(jobs):
        for i, job in enumerate(jobs):
            (result,) = job.carry_out()
            yield job, [RunResult("interrupted", "", [], 0.0, {}) if i == 1 else result]

    assert not carried_out(small(), tmp_path, interrupted)
    assert len(rows(tmp_path)) == 3


def test_two_processes_cannot_write(tmp_path):
    with (
        open_store(tmp_path),
        pytest.raises(ConfigError, match="another process"),
        open_store(tmp_path),
    ):
        pass


def test_a_link_in_the_place_of_the_study_file_is_read_and_not_written(tmp_path):
    """The lock is on its directory, and another process may have locked the file's own."""
    study = tmp_path / "study"
    with open_store(study) as store:
        store.tell("name", 1)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / FILE).symlink_to(study / FILE)
    with open_store(tmp_path / "linked", write=False) as store:
        assert store.about("name") == 1
    with (
        pytest.raises(ConfigError, match=f"is a link to .* give --out '{study}'"),
        open_store(tmp_path / "linked"),
    ):
        pass


def test_what_is_no_study_file_is_refused(tmp_path):
    with (
        pytest.raises(ConfigError, match="give the --out of a study"),
        open_store(tmp_path, write=False),
    ):
        pass
    (tmp_path / FILE).write_bytes(b"something else" * 100)
    with pytest.raises(ConfigError, match="as a study"), open_store(tmp_path):
        pass


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_study_writes_nothing_where_its_directory_is_no_more(is_replaced, tmp_path):
    directory = tmp_path / "study"
    with open_store(directory) as store:
        directory.rename(tmp_path / "moved")
        if is_replaced:
            with open_store(directory) as other:
                other.tell("name", "another study")
        with pytest.raises(ConfigError, match=r"is no longer the directory .* the same command"):
            store.tell("name", "study")
        with pytest.raises(ConfigError, match="is no longer the directory"):
            store.add([], "commit")
    if is_replaced:
        with open_store(directory, write=False) as other:
            assert other.about("name") == "another study"


def test_at_rest_it_is_one_file(tmp_path):
    carried_out(small(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".study.lock", FILE]


SLOW = """
import sys, time, pathlib
from ctrans.study.carry_out import carry_out_study, prospect
from ctrans.study.database import open_store
from ctrans.study.database_tables import rows_of
from tests.study.helpers import one_by_one, small
def slow(jobs):
    for done in one_by_one(jobs):
        print("begun", flush=True)
        time.sleep(0.05)
        yield done
with open_store(pathlib.Path(sys.argv[1])) as store:
    carry_out_study(prospect(small(), store), store, slow)
"""


@pytest.mark.slow
def test_kill_9_at_any_moment_loses_at_most_what_is_in_flight_and_nothing_runs_twice(tmp_path):
    """Each attempt is killed a little after its first run began; the file is whole every time, and
    no run is done again.
    """
    seen = []
    for delay in (0.0, 0.06, 0.1):
        process = subprocess.Popen(
            [sys.executable, "-c", SLOW, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "begun\n"
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with sqlite3.connect(tmp_path / FILE) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        seen.append({run.key: (run.finished, run.result.seconds) for run in rows(tmp_path)})
    assert carried_out(small(), tmp_path)
    last = {run.key: (run.finished, run.result.seconds) for run in rows(tmp_path)}
    assert len(last) == len(rows(tmp_path)) == 4
    for before in seen:
        assert before.items() <= last.items()


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("CREATE TRIGGER t AFTER INSERT ON runs BEGIN DELETE FROM runs; END", "has a trigger"),
        ("CREATE VIEW v AS SELECT * FROM runs", "has a view"),
        ("CREATE TABLE mine (value TEXT)", "its format or its tables"),
        ("CREATE INDEX mine ON runs (seed)", "its format or its tables"),
    ],
)
@pytest.mark.parametrize("write", [True, False])
def test_a_file_with_more_than_the_tables_of_a_study_is_refused(sql, words, write, tmp_path):
    with open_store(tmp_path):
        pass
    altered(tmp_path, sql)
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(ConfigError, match=words), open_store(tmp_path, write=write):
        pass
    assert (tmp_path / FILE).read_bytes() == before


def test_exports_have_every_row(tmp_path, monkeypatch):
    carried_out(small(), tmp_path)
    with open_store(tmp_path, write=False) as store:
        keys = [run.key for run in store.runs()]
        made = {
            name: make().decode()
            for name, make in export.files(
                "csv", store, keys, {"a": {"best loss": 2.0, "none": None}}
            ).items()
        }
        table = list(csv.DictReader(io.StringIO(made["runs.csv"])))
        assert len(table) == 4
        assert json.loads(table[0]["model"])["width"] == BASE["width"]
        one = export.files("csv", store, keys[:1], {})["runs.csv"]().decode()
        rows_of_plan = list(csv.DictReader(io.StringIO(one)))
        assert [row["key"] for row in rows_of_plan] == keys[:1], "not those of an earlier plan"
        assert made["outcomes.csv"] == "case,name,value\r\na,best loss,2.0\r\na,none,\r\n"
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"pip install 'ctrans\[parquet\]'"):
            export.check_format("parquet")
    with pytest.raises(ConfigError, match="csv"):
        export.check_format("cvs")


def test_parquet_has_what_csv_has(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    carried_out(small(), tmp_path)
    with open_store(tmp_path, write=False) as store:
        keys = [run.key for run in store.runs()]
        read = parquet.read_table(
            io.BytesIO(export.files("parquet", store, keys, {})["runs.parquet"]())
        ).to_pylist()
        columns, kept = store.table_of_runs(keys)
        assert [tuple(row[name] for name in columns) for row in read] == kept


def altered(directory, *commands):
    """The study file after commands of SQL."""
    with contextlib.closing(sqlite3.connect(directory / FILE)) as connection, connection:
        for command in commands:
            connection.execute(command)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        "curve = 'x'",
        "seconds = seconds + 1e-9",
        "message = CAST(x'ff80' AS TEXT)",
        "seed = 1",
        "key = x'00'",
        "digest = NULL",
    ],
)
def test_a_damaged_row_is_named_left_out_and_its_run_done_again(change, tmp_path):
    carried_out(small(), tmp_path)
    before = outcomes_of(rows(tmp_path))
    altered(tmp_path, f"UPDATE runs SET {change} WHERE rowid = 2")
    content = (tmp_path / FILE).read_bytes()
    with open_store(tmp_path, write=False) as store:
        (line,) = store.damaged
        left = store.runs()
    assert (tmp_path / FILE).read_bytes() == content, "a reader changes nothing"
    assert "does it again: case {" in line
    assert "seed " in line
    assert "key " in line
    assert len(left) == 3
    carried_out(small(), tmp_path)
    after = outcomes_of(rows(tmp_path))
    assert {case: figures["best loss"] for case, figures in after.items()} == {
        case: figures["best loss"] for case, figures in before.items()
    }
    with open_store(tmp_path) as store:
        assert not store.damaged


def test_a_damaged_entry_is_named_and_written_again(tmp_path):
    carried_out(small(), tmp_path)
    altered(tmp_path, "UPDATE about SET value = '{\"8\": \"0\"}' WHERE name = 'data'")
    with open_store(tmp_path) as store:
        assert store.damaged == [f"{FILE} is damaged: its entry 'data' is left out"]
        assert not store.data()
        plan = prospect(small(), store)
        assert not plan.left
        store.begin_on(plan.fingerprints)
    with open_store(tmp_path) as store:
        assert not store.damaged
        assert store.data() == plan.fingerprints


def test_a_file_of_format_1_is_read_as_it_is_and_converted_by_a_writer(tmp_path):
    carried_out(small(), tmp_path)
    before = [dataclasses.replace(run, tries=1) for run in rows(tmp_path)]
    to_format_1(tmp_path / FILE)
    content = (tmp_path / FILE).read_bytes()
    assert rows(tmp_path) == before
    assert (tmp_path / FILE).read_bytes() == content
    for _ in range(2):
        with open_store(tmp_path) as store:
            assert (store.damaged, store.runs()) == ([], before)
            assert not prospect(small(), store).left
    assert (tmp_path / FILE).read_bytes() != content
    to_format_1(tmp_path / FILE)
    altered(
        tmp_path,
        "UPDATE runs SET curve = '[1]' WHERE rowid = 1",
        "UPDATE about SET value = '[]' WHERE name = 'data'",
    )
    with open_store(tmp_path) as store:
        assert len(store.damaged) == 2
        assert len(store.runs()) == 3


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE about SET value = '3' WHERE name = 'format'",
        "DELETE FROM about",
        "DROP TABLE runs",
        "ALTER TABLE runs RENAME COLUMN seconds TO second",
        "ALTER TABLE runs RENAME TO rums",
    ],
)
def test_another_format_or_schema_is_refused_and_left_as_it_is(change, tmp_path):
    carried_out(small(), tmp_path)
    altered(tmp_path, change)
    content = (tmp_path / FILE).read_bytes()
    for write in (False, True):
        with (
            pytest.raises(ConfigError, match=r"as a study: .*restore the file"),
            open_store(tmp_path, write=write),
        ):
            pass
        assert (tmp_path / FILE).read_bytes() == content


def test_a_database_of_another_program_gets_no_tables(tmp_path):
    altered(tmp_path, "CREATE TABLE places (url TEXT)")
    with pytest.raises(ConfigError, match="as a study"), open_store(tmp_path):
        pass
    with contextlib.closing(sqlite3.connect(tmp_path / FILE)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("places",)]


def test_a_run_of_format_1_with_an_unknown_field_and_no_environment_is_left_out(tmp_path):
    carried_out(small(), tmp_path)
    to_format_1(tmp_path / FILE)
    altered(
        tmp_path,
        """UPDATE runs SET training = '{"x": 1}' WHERE rowid = 1""",
        "ALTER TABLE runs DROP COLUMN environment",
    )
    with open_store(tmp_path, write=False) as store:
        assert len(store.damaged) == 4
        assert store.runs() == []
