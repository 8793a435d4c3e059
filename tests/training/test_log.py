"""The log: rows that are whole or not there, on a full disk too, and what a resumed run keeps of them."""

import contextlib
import resource

import pytest

from ctrans.training import log
from solvers import ConfigError


def test_a_torn_last_line_of_the_log_is_not_read(tmp_path):
    log.append(tmp_path, {"step": 1, "loss": float("nan")})
    with (tmp_path / log.LOG).open("a") as file:
        file.write('{"step": 2, "lo')
    assert list(log.read(tmp_path)) == [{"step": 1, "loss": "nan"}]
    log.cut(tmp_path, 1)
    assert (tmp_path / log.LOG).read_text() == '{"step": 1, "loss": "nan"}\n'


@contextlib.contextmanager
def little_space():
    """Inside, files end at 100 bytes: those of whoever runs the tests too, so no longer than a call."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_row_that_does_not_fit_is_one_sentence_and_leaves_the_log_as_it_was(tmp_path):
    log.append(tmp_path, {"step": 1})
    with pytest.raises(ConfigError, match=r"cannot write .*log\.jsonl': File too large; free some space"), little_space():
        log.append(tmp_path, {"step": 2, "why": 200 * "x"})
    assert (tmp_path / log.LOG).read_text() == '{"step": 1}\n'


def test_a_log_that_cannot_be_cut_stays_whole_without_litter(tmp_path):
    for step in range(20):
        log.append(tmp_path, {"step": step})
    with pytest.raises(ConfigError, match=r"cannot write .*log\.jsonl': File too large"), little_space():
        log.cut(tmp_path, 15)
    assert [path.name for path in tmp_path.iterdir()] == [log.LOG]
    assert len(list(log.read(tmp_path))) == 20


@pytest.mark.parametrize("damaged", [b'{"step": 2, "lo\x00s', b"\xff\xfe{}", b"3", b'{"stap": 2}', b'{"step": "2"}', b""])
def test_a_damaged_line_of_the_log_is_passed_over(damaged, tmp_path):
    (tmp_path / log.LOG).write_bytes(b'{"step": 1}\n' + damaged + b'\n{"step": 3}\n')
    log.cut(tmp_path, 3)
    assert (tmp_path / log.LOG).read_text() == '{"step": 1}\n{"step": 3}\n'


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
