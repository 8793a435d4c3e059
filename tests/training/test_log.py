"""The log: rows that are whole or not there, on a full disk too, and what a resumed run keeps of
them.
"""

import contextlib
import json
import logging
import os
import resource
import tracemalloc

import pytest

from ctrans.training import log
from ctrans.training.monitor import log as monitor_log
from ctrans.training.monitor import read_log
from ctrans.training.settings import TrainConfig
from ctrans.training.training_state import Progress, State
from solvers import ConfigError
from tests.training.helpers import start


def test_a_torn_last_line_of_the_log_is_not_read(tmp_path):
    log.append(tmp_path, {"step": 1, "loss": float("nan")})
    with (tmp_path / log.LOG).open("a") as file:
        file.write('{"step": 2, "lo')
    assert list(log.read(tmp_path)) == [{"step": 1, "loss": "nan"}]
    log.cut(tmp_path, 1)
    assert (tmp_path / log.LOG).read_text() == '{"step": 1, "loss": "nan"}\n'


@contextlib.contextmanager
def little_space():
    """Inside, files end at 100 bytes: those of whoever runs the tests too, so no longer than a
    call.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_row_that_does_not_fit_is_one_sentence_and_leaves_the_log_as_it_was(tmp_path):
    log.append(tmp_path, {"step": 1})
    with (
        pytest.raises(
            ConfigError, match=r"cannot write .*log\.jsonl': File too large; free some space"
        ),
        little_space(),
    ):
        log.append(tmp_path, {"step": 2, "why": 200 * "x"})
    assert (tmp_path / log.LOG).read_text() == '{"step": 1}\n'


def test_a_first_row_that_does_not_fit_does_not_advise_to_resume_a_run_without_a_checkpoint(
    tmp_path,
):
    """A log of 0 bytes stays, which the same command replaces."""
    row = {"step": 0, "run": 200 * "x", "validation_loss": 5.0}
    with (
        pytest.raises(ConfigError, match="free some space, then give the same command again"),
        little_space(),
    ):
        log.append(tmp_path, row)
    assert (tmp_path / log.LOG).read_text() == ""
    start(tmp_path, iterations=1)


def test_a_log_that_cannot_be_cut_stays_whole_without_litter(tmp_path):
    for step in range(20):
        log.append(tmp_path, {"step": step})
    with (
        pytest.raises(ConfigError, match=r"cannot write .*log\.jsonl': File too large"),
        little_space(),
    ):
        log.cut(tmp_path, 15)
    assert [path.name for path in tmp_path.iterdir()] == [log.LOG]
    assert len(list(log.read(tmp_path))) == 20


@pytest.mark.parametrize(
    "damaged", [b'{"step": 2, "lo\x00s', b"\xff\xfe{}", b"3", b'{"stap": 2}', b'{"step": "2"}', b""]
)
def test_a_damaged_line_of_the_log_is_passed_over(damaged, tmp_path):
    (tmp_path / log.LOG).write_bytes(b'{"step": 1}\n' + damaged + b'\n{"step": 3}\n')
    log.cut(tmp_path, 3)
    assert (tmp_path / log.LOG).read_text() == '{"step": 1}\n{"step": 3}\n'


ROW = {"loss": 2.0, "learning_rate": 0.1, "gradient_norm": 1.0}
EVALUATED = {"validation_loss": 3.0, "growth": 1.0, "largest": 2.0}


@pytest.mark.parametrize("name", [*ROW, *EVALUATED])
@pytest.mark.parametrize("odd", [None, {}, [], "", "x", True, 10**400, "\ud800"])
def test_a_row_with_an_odd_figure_is_passed_over_and_the_curves_are_those_of_the_rest(
    name, odd, tmp_path
):
    rows = [{"step": step, **ROW, **EVALUATED} for step in range(3)]
    text = "".join(
        json.dumps({**row, name: odd} if row["step"] == 1 else row) + "\n" for row in rows
    )
    (tmp_path / log.LOG).write_text(text)
    assert list(log.read(tmp_path)) == [rows[0], rows[2]]
    assert log.curves(log.read(tmp_path)) == log.curves([rows[0], rows[2]])


@pytest.mark.parametrize("name", [*ROW, *EVALUATED])
def test_a_row_that_lacks_a_figure_is_in_no_curve(name):
    rows = [{"step": step, **ROW, **EVALUATED} for step in range(3)]
    lacking = [*rows[:2], {key: value for key, value in rows[2].items() if key != name}]
    found, both = log.curves(lacking), log.curves(rows[:2])
    curve = {"loss": "training", "validation_loss": "validation"}.get(name, name)
    assert found[curve] == both[curve]


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"step": 1, "loss": ' + "[" * 100_000])
def test_a_line_nested_too_deep_is_passed_over(deep, tmp_path):
    (tmp_path / log.LOG).write_text('{"step": 0}\n' + deep + '\n{"step": 2}\n')
    assert [row["step"] for row in log.read(tmp_path)] == [0, 2]


def a_link_to_zeros(path):
    path.symlink_to("/dev/zero")


def a_sparse_terabyte(path):
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("make", [a_link_to_zeros, a_sparse_terabyte])
@pytest.mark.parametrize("read", [log, monitor_log])
def test_a_log_without_end_is_refused_for_little_memory(make, read, tmp_path):
    make(tmp_path / read.LOG)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        ConfigError,
        match=r"no regular file|a line of over 16,777,216 characters|no log of a monitor",
    ):
        list(log.read(tmp_path)) if read is log else read_log(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


def test_a_verdict_and_settings_given_anew_do_not_outlive_the_resume_that_undoes_them(tmp_path):
    rows = [
        {"step": 1},
        {"step": 1, "settings": {"clip": 2.0}},
        {"step": 2},
        {"step": 2, "settings": {"clip": 3.0}},
        {"step": 2, "diverged": "why"},
    ]
    for row in rows:
        log.append(tmp_path, row)
    log.cut(tmp_path, 2)
    assert list(log.read(tmp_path)) == rows[:3]


ROWS = [{"step": step, "loss": 1.0} for step in (0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("rows", "step", "words"),
    [
        ([], 3, "had no rows, and the run continues from step 3"),
        (ROWS[:2], 3, "ended at step 1, and the run continues from step 3"),
        (ROWS, 3, ""),
        (ROWS, 2, ""),
        ([], 0, ""),
        (ROWS[1:], 3, "lacks 1 of the rows before step 3"),
        (ROWS[2:], 3, "lacks 2 of the rows before step 3"),
        (ROWS[::3], 3, "lacks 2 of the rows before step 3"),
    ],
)
def test_a_log_that_lacks_steps_before_those_of_a_resumed_run_is_said(
    rows, step, words, tmp_path, caplog
):
    for row in rows:
        log.append(tmp_path, row)
    with caplog.at_level(logging.WARNING, "ctrans.training"):
        log.cut(tmp_path, step)
    assert len(caplog.messages) == bool(words)
    assert words in "".join(caplog.messages)


def test_a_log_that_is_removed_or_cut_while_a_run_goes_on_is_said_once(tmp_path, caplog):
    run_log = log.RunLog(tmp_path)
    for step in range(3):
        run_log.append({"step": step})
    assert not caplog.messages
    (tmp_path / log.LOG).unlink()
    run_log.append({"step": 3})
    (tmp_path / log.LOG).write_text("")
    run_log.append({"step": 4})
    assert len(caplog.messages) == 1
    assert "lack rows before step 3" in caplog.text


FIRST = {"step": 0, "run": "this", "validation_loss": 2.5}
FIRST_OF_EARLIER_VERSION = {"step": 0, "validation_loss": 2.5, "growth": 1.0, "largest": 1.0}
LATER = {"step": 4, "loss": 2.0, "learning_rate": 1.0, "gradient_norm": 1.0}


@pytest.mark.parametrize(
    ("row", "run", "first", "is_of_run"),
    [
        (FIRST, "this", 2.5, True),
        (FIRST, "that", 2.5, False),
        (FIRST, "this", 2.25, False),
        (FIRST, "", 2.5, True),
        (FIRST, "", 2.25, False),
        (FIRST_OF_EARLIER_VERSION, "this", 2.5, True),
        (FIRST_OF_EARLIER_VERSION, "this", 2.25, False),
        (LATER, "this", 2.25, True),
    ],
)
@pytest.mark.parametrize("name", [log.LOG, ".checkpoints.log.jsonl"])
def test_the_log_of_another_run_is_refused(name, row, run, first, is_of_run, tmp_path):
    (tmp_path / name).write_text(json.dumps(row) + "\n")
    if name != log.LOG:  # another run was to overwrite this one
        log.append(tmp_path, {"step": 0, "validation_loss": 1.0})
    state = State(Progress(first=first), TrainConfig(), {}, "", run=run)
    if is_of_run:
        log.check_of_run(tmp_path, "checkpoints", state)
        return
    with pytest.raises(ConfigError, match=r"is the log of another run .* move the log away"):
        log.check_of_run(tmp_path, "checkpoints", state)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([LATER, FIRST | {"run": "that"}], "another run"),
        ([LATER, {"step": 4, "run": "that"}], "another run"),
        ([{}, FIRST | {"validation_loss": 2.25}], "another run"),
        ([LATER, {"step": 4, "validation_loss": 1.5}], "losses at step 4 are 1.5 and 1.25"),
        ([{}, FIRST, LATER, {"step": 4, "validation_loss": 1.25}], ""),
    ],
)
def test_any_row_may_show_that_a_log_is_of_another_run(rows, words, tmp_path):
    """The first row may be missing, or not be the first line."""
    (tmp_path / log.LOG).write_text("".join(json.dumps(row) + "\n" for row in rows))
    progress = Progress(step=4, first=2.5, best=1.25, best_step=4)
    state = State(progress, TrainConfig(), {}, "", run="this")
    if not words:
        log.check_of_run(tmp_path, "checkpoints", state)
        return
    with pytest.raises(ConfigError, match=words):
        log.check_of_run(tmp_path, "checkpoints", state)


def test_a_long_log_is_cut_and_summed_up_a_row_at_a_time(tmp_path):
    rows = ({"step": step, **ROW, "more": 500 * "x"} for step in range(4000))
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / log.LOG).write_text(text)
    tracemalloc.start()
    try:
        log.cut(tmp_path, 4000)
        log.summary(log.read(tmp_path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < len(text) / 4
    assert (tmp_path / log.LOG).read_text() == text


def test_a_row_of_a_step_that_was_there_is_not_kept(tmp_path):
    rows = [{"step": step, **ROW} for step in range(3)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    added = [{"step": 1}, {"step": 2, **ROW}]
    (tmp_path / log.LOG).write_text(text + "".join(json.dumps(row) + "\n" for row in added))
    log.cut(tmp_path, 3)
    assert (tmp_path / log.LOG).read_text() == text


def test_a_log_that_cannot_be_looked_at_is_not_said_to_be_removed(tmp_path, monkeypatch, caplog):
    run_log = log.RunLog(tmp_path)
    run_log.append({"step": 0})

    def fails(path, **options):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(type(tmp_path), "stat", fails)
    with caplog.at_level(logging.WARNING), contextlib.suppress(ConfigError, OSError):
        run_log.append({"step": 1})
    assert "removed or cut" not in caplog.text
