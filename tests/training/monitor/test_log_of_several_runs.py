"""A log of several runs, or of another model than its header's, is never read as one run."""

import pytest

from ctrans.cli.watch import findings
from ctrans.report.sections import Words
from ctrans.report.training import chapters
from ctrans.training.monitor.log import LOG, LogWriter, read_log
from ctrans.training.monitor.log_lines import Header, Report
from solvers import ConfigError


def lines_of_run(directory, blocks, steps, loss=1.0):
    """The lines of a log of a model with so many blocks."""
    directory.mkdir()
    places = [f"block {k}, {kind}" for k in range(blocks) for kind in ("attention", "ffn")]
    header = Header(f"GPT of {blocks}", places, ["attention", "ffn"] * blocks, [2, 0] * blocks, 2)
    writer = LogWriter(directory, header)
    for step in steps:
        writer.report(Report(step, {"loss": loss, "gradient": [1.0] * len(places)}))
    return (directory / LOG).read_text().splitlines(keepends=True)


@pytest.fixture
def logs(tmp_path):
    first = lines_of_run(tmp_path / "a", 2, (2, 4, 6), loss=1.0)
    second = lines_of_run(tmp_path / "b", 3, (2, 4, 8), loss=2.0)
    return first, second


def read(tmp_path, lines):
    (tmp_path / LOG).write_text("".join(lines))
    return read_log(tmp_path)


def test_of_two_logs_in_one_file_the_last_is_read_and_said(logs, tmp_path):
    first, second = logs
    log = read(tmp_path, first + second)
    assert (log.header.model, log.steps) == ("GPT of 3", [2, 4, 8])
    assert set(log.series("loss")) == {2.0}
    (remark,) = log.remarks
    assert remark == (
        "The log holds several runs: a second header follows. Only the last run is shown."
    )
    progress = chapters({"": {**findings(log), "log": vars(log.header)}})[0]
    assert Words(remark) in progress.parts


def test_steps_that_go_back_begin_another_run(logs, tmp_path):
    first, _ = logs
    log = read(tmp_path, first + first[1:3])
    assert (log.header.model, log.steps) == ("GPT of 2", [2, 4])
    assert "the steps go back from 6 to 2" in log.remarks[0]


def test_reports_of_another_model_than_the_headers_are_refused(logs, tmp_path):
    first, second = logs
    words = "header of a model with 4 sublayers and reports of one with 6"
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, first[:1] + second[1:])


def test_some_reports_of_another_model_are_left_out_and_said(logs, tmp_path):
    first, second = logs
    log = read(tmp_path, first + second[3:])
    assert log.steps == [2, 4, 6]
    assert log.remarks == [
        "Reports of a model with another number of sublayers, as 6 instead of 4, are not shown:"
        " 1 of 4."
    ]


def test_a_log_of_one_run_has_no_remarks(logs, tmp_path):
    log = read(tmp_path, logs[0])
    assert (log.steps, log.remarks) == ([2, 4, 6], [])
