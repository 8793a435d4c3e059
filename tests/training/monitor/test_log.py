"""The log: what is read is what was written, to three digits; a killed run's is readable; a long
one's is small.
"""

import copy
import dataclasses
import errno
import io
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from ctrans import ConfigError
from ctrans.cli.watch import _page, findings
from ctrans.measure.findings import Finding, Reading
from ctrans.report.files import to_json
from ctrans.report.terminal import show
from ctrans.training.monitor import ALARMS
from ctrans.training.monitor.log import DENSE, KEPT, LOG, LogWriter, read_log
from ctrans.training.monitor.log_lines import Header, Report, decoded, encoded
from ctrans.training.monitor.memory import MEMORY, memory_in
from tests.cli.test_commands import strict

ROOT = Path(__file__).parents[3]
HEADER = Header("a model", ["block 0, attention", "block 0, ffn"], ["attention", "ffn"], [2, 0], 50)


def test_numbers_are_rounded_to_bfloat16_as_torch_rounds_them():
    values = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * torch.logspace(
        -40, 38, 2000
    )
    values = torch.cat([values, torch.tensor([0.0, math.inf, -math.inf, 3.39e38, 1e-45])])
    assert decoded(encoded(values.tolist())) == values.bfloat16().tolist()
    assert math.isnan(decoded(encoded([math.nan]))[0])


OLD = {
    "step": 7,
    "alarm": {
        "rule": "hidden states outrun their law",
        "grade": "danger",
        "step": 7,
        "place": "x",
        "says": "rms",
        "value": 32.0,
        "limit": 50.0,
        "since": 3,
        "doubling": 10.0,
        "crossing": 67,
        "does": "overflows",
        "helps": "QK-norm",
        "source": "us",
    },
}


def test_a_log_of_the_version_before_is_read(tmp_path):
    LogWriter(tmp_path, HEADER).report(Report(1, {"loss": 2.5}))
    with (tmp_path / LOG).open("a") as file:
        report = {"step": 7, "run": {"loss": 2.0}, "by": {"surprise": encoded([1.0, 2.0])}}
        file.writelines(json.dumps(line) + "\n" for line in (report, OLD))
    log = read_log(tmp_path)
    (alarm,) = log.findings
    assert (alarm["check"], alarm["severity"], alarm["figure"]) == (
        "hidden states grow too large",
        "serious",
        "rms = 32",
    )
    assert (alarm["impact"], alarm["remediation"], alarm["crossing"]) == (
        "overflows",
        "QK-norm",
        67,
    )
    assert log.reports[1].figures == {"loss": 2.0, "adam_gradient_ratio": [1.0, 2.0]}
    assert alarm.keys() == {field.name for field in dataclasses.fields(Finding)}


def test_what_is_read_is_what_was_written(tmp_path):
    writer = LogWriter(tmp_path, HEADER)
    writer.report(Report(1, {"loss": 2.5, "rms": [1.0, 2.0, math.nan], "log_z": math.inf}))
    alarm = ALARMS.finding(
        "loss spike", Reading(math.inf, "the loss", "loss = inf"), limit="above 2", step=1, since=1
    )
    writer.finding(1, alarm)
    writer.probe(1, {"sharpness": 3.0})
    writer.end(1, "finished")
    log = read_log(tmp_path)
    assert log.header == HEADER
    assert log.reports[0].figures["loss"] == 2.5
    assert log.reports[0].figures["log_z"] == math.inf
    np.testing.assert_equal(log.series("rms"), [[1.0, 2.0, math.nan]])
    assert log.findings == [{**dataclasses.asdict(alarm), "value": "inf"}]
    assert log.ended == "finished"
    assert all(json.loads(line) for line in (tmp_path / LOG).read_text().splitlines())


def test_a_line_that_was_not_finished_is_left_out(tmp_path):
    writer = LogWriter(tmp_path, HEADER)
    for step in range(1, 5):
        writer.report(Report(step, {"loss": float(step), "rms": [1.0]}))
    whole = (tmp_path / LOG).read_bytes()
    last = whole.rstrip(b"\n").rindex(b"\n") + 1
    for cut in range(last, len(whole)):
        (tmp_path / LOG).write_bytes(whole[:cut])
        assert read_log(tmp_path).steps == [1, 2, 3]


def test_a_run_that_goes_on_keeps_what_led_to_where_it_goes_on_from(tmp_path):
    writer = LogWriter(tmp_path, HEADER)
    for step in (50, 100, 150):
        writer.report(Report(step, {"loss": 1.0}))
    writer.end(150, "killed")
    LogWriter(tmp_path, HEADER, start=100).report(Report(101, {"loss": 1.0}))
    assert read_log(tmp_path).steps == [50, 100, 101]
    assert read_log(tmp_path).ended == ""
    LogWriter(tmp_path, HEADER)
    assert read_log(tmp_path).steps == []


OTHER = dataclasses.replace(HEADER, places=HEADER.places[:1], kinds=HEADER.kinds[:1])


@pytest.mark.parametrize(
    ("header", "start", "goes_on", "steps", "words"),
    [
        (HEADER, 100, None, [50, 100, 101], ""),
        (HEADER, 0, True, [1], ""),
        (HEADER, 500, None, [50, 100, 150, 501], "ends at step 150, and the training goes on from"),
        (HEADER, 0, None, [1], "is the log of another training"),
        (OTHER, 100, None, [101], "is the log of another training"),
    ],
)
def test_a_log_is_continued_by_its_training_and_kept_from_another(
    header, start, goes_on, steps, words, tmp_path, caplog
):
    writer = LogWriter(tmp_path, HEADER)
    for step in (50, 100, 150):
        writer.report(Report(step, {"loss": 1.0}))
    before = (tmp_path / LOG).read_bytes()
    new = LogWriter(tmp_path, header, start, goes_on=goes_on)
    new.report(Report(start + 1, {"loss": 1.0}))
    assert read_log(tmp_path).steps == steps
    kept = [path.read_bytes() for path in tmp_path.glob("monitor-1.jsonl")]
    assert kept == [before] * ("another training" in words and "ends" not in words)
    assert len(caplog.messages) == bool(words)
    assert words in caplog.text


def reported(directory, *steps, start=0, run=""):
    """The steps of the log after a training of that run began there and reported these steps."""
    writer = LogWriter(directory, HEADER, start, run=run)
    for step in steps:
        writer.report(Report(step, {"loss": 1.0}))
    return read_log(directory).steps


FOREIGN = ['{"epoch": 1}\n', '{"step": 1, "by": {}}\n', "precious\n", '{"epoch": 1}', "precious"]


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("run", ["", "this"])
def test_a_log_without_the_header_of_a_monitor_is_kept(foreign, run, tmp_path, caplog):
    (tmp_path / LOG).write_text(foreign)
    assert reported(tmp_path, 101, start=100, run=run) == [101]
    assert (tmp_path / "monitor-1.jsonl").read_text() == foreign
    assert "no log of a monitor: it is kept as" in caplog.text


def test_a_log_that_cannot_be_copied_whole_leaves_no_part_of_it(tmp_path, monkeypatch):
    """On a file system without hard links, where a file has no more room than this."""

    def no_links(*of):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    foreign = 1000 * '{"epoch": 1}\n'
    (tmp_path / LOG).write_text(foreign)
    monkeypatch.setattr(os, "link", no_links)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        for _ in range(2):
            LogWriter(tmp_path, HEADER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == [LOG]
    assert (tmp_path / LOG).read_text() == foreign
    LogWriter(tmp_path, HEADER)
    assert (tmp_path / "monitor-1.jsonl").read_text() == foreign


@pytest.mark.parametrize(
    ("before", "now", "steps"),
    [
        ("this", "that", [101]),
        ("this", "this", [50, 101]),
        ("", "this", [50, 101]),
        ("this", "", [50, 101]),
    ],
)
def test_the_log_of_another_run_of_the_same_design_is_kept(before, now, steps, tmp_path):
    reported(tmp_path, 50, run=before)
    assert reported(tmp_path, 101, start=100, run=now) == steps
    assert (tmp_path / "monitor-1.jsonl").exists() == (steps == [101])


def test_a_run_that_goes_on_from_step_0_has_its_own_log(tmp_path, caplog):
    reported(tmp_path, 1, 2, run="this")
    assert reported(tmp_path, 1, run="this") == [1]
    assert not list(tmp_path.glob("monitor-1.jsonl"))
    assert not caplog.messages


def test_older_reports_are_thinned_and_leave_their_peaks(tmp_path):
    writer = LogWriter(tmp_path, dataclasses.replace(HEADER, every=1))
    count = 3 * KEPT
    for step in range(1, count + 1):
        writer.report(
            Report(
                step,
                {"loss": 1.0, "highest_loss": 9.0 if step == 11 else 1.0, "rms": [1.0, 2.0, 3.0]},
            )
        )
    log = read_log(tmp_path)
    assert len(log.reports) < KEPT
    assert log.steps[-DENSE:] == list(range(count - DENSE + 1, count + 1))
    gaps = np.diff(log.steps)
    assert (np.diff(gaps) <= 0).mean() > 0.9  # ever sparser towards the start
    assert max(log.series("highest_loss")) == 9.0


def test_a_directory_without_a_log_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no monitor\.jsonl in"):
        read_log(tmp_path)


def changed(value):
    """The value with one of its parts at a time as something else, or gone."""
    yield from (-1, 1e400, "x", [])
    if isinstance(value, (dict, list)):
        for place in range(len(value)) if isinstance(value, list) else value:
            less = copy.copy(value)
            del less[place]
            yield less
            for part in changed(value[place]):
                other = copy.copy(value)
                other[place] = part
                yield other


@pytest.mark.slow
def test_a_log_of_anybodys_is_read_and_shown_or_refused(tmp_path):
    writer = LogWriter(tmp_path, HEADER)
    writer.report(
        Report(
            1,
            {"loss": 1.0, "seconds": 0.1, "rms": [1.0, 2.0, 3.0], "logit": [1.0, 2.0]},
            {"block 0": "why"},
        )
    )
    writer.finding(
        1,
        ALARMS.finding(
            "loss spike", Reading(1.0, "x", "loss = 1"), step=1, since=1, doubling=3.0, crossing=9
        ),
    )
    with (tmp_path / LOG).open("a") as file:
        file.write(json.dumps(OLD) + "\n")
    writer.probe(1, {"theta": 0.5, "unknown": {"attention": "none"}})
    writer.end(1, "finished")
    lines = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    console, count = Console(file=io.StringIO(), width=120), 0
    for i, line in enumerate(lines):
        for other in changed(line):
            given = [*lines[:i], other, *lines[i + 1 :]]
            (tmp_path / LOG).write_text("".join(json.dumps(each) + "\n" for each in given))
            count += 1
            try:
                log = read_log(tmp_path)
            except ConfigError:
                assert i == 0  # without a header it is no log
                continue
            show(_page(log), console)
            assert strict(to_json(findings(log)))
    assert count > 150


def test_what_is_no_file_is_no_log_and_a_terminal_is_not_commanded(tmp_path):
    os.mkfifo(tmp_path / LOG)
    with pytest.raises(ConfigError, match="no log"):
        read_log(tmp_path)
    (tmp_path / LOG).unlink()
    writer = LogWriter(tmp_path, dataclasses.replace(HEADER, model="a \x1b[2J model"))
    writer.report(Report(1, {"loss": 1.0}, {"block 0": "\x1b]0;"}))
    (tmp_path / LOG).write_text((tmp_path / LOG).read_text() + "[" * 100_000 + "\n")
    log = read_log(str(tmp_path))
    assert "\x1b" not in log.header.model + str(log.reports[0].missing)


@pytest.mark.parametrize("deep", [90, 400, 900, 5000])
def test_a_line_that_is_nested_without_end_is_left_out(tmp_path, deep):
    nest = "[" * deep + "]" * deep
    lines = (
        '{"header": {"model": "x", "places": NEST, "kinds": [], "heads": [], "every": 1}}',
        '{"step": 1, "alarm": {"rule": NEST}}',
        '{"step": 1, "finding": {"check": NEST}}',
        '{"step": 1, "probe": {"theta": NEST, "unknown": {"a": NEST}}}',
        '{"step": 1, "run": {}, "by": {}, "unknown": {"a": NEST}}',
    )
    LogWriter(tmp_path, HEADER).report(Report(1, {"loss": 1.0}))
    with (tmp_path / LOG).open("a") as file:
        file.writelines(line.replace("NEST", nest) + "\n" for line in lines)
    log = read_log(tmp_path)
    assert log.header == HEADER
    show(_page(log), Console(file=io.StringIO()))
    assert strict(to_json(findings(log)))


def test_a_log_that_cannot_be_read_to_its_end_is_not_replaced_by_its_beginning(
    tmp_path, monkeypatch
):
    writer = LogWriter(tmp_path, HEADER)
    for step in (50, 100, 150):
        writer.report(Report(step, {"loss": 1.0}))
    whole, made = (tmp_path / LOG).read_bytes(), Path.open

    def broken(path, mode="r", **options):
        if mode == "r":
            raise OSError(errno.EIO, "Input/output error")
        return made(path, mode, **options)

    monkeypatch.setattr(Path, "open", broken)
    with pytest.raises(ConfigError, match=r"cannot read .*Input/output error"):
        read_log(tmp_path)
    writer = LogWriter(tmp_path, HEADER, start=100)
    writer.report(Report(101, {"loss": 1.0}))
    monkeypatch.undo()
    assert (tmp_path / LOG).read_bytes() == whole
    writer.report(Report(150, {"loss": 1.0}))
    assert read_log(tmp_path).steps == [50, 100, 101, 150]


TRAINING = """
import sys, torch
from ctrans import GPT, GPTConfig
from ctrans.training.monitor import Monitor
model = GPT(GPTConfig(vocab_size=32, context=8, depth=1, width=16, heads=2))
optimiser = torch.optim.AdamW(model.parameters())
monitor = Monitor(model, every=1, out=sys.argv[1])
while True:
    tokens = torch.randint(32, (2, 9))
    loss = model(tokens[:, :-1], tokens[:, 1:])[1]
    loss.backward()
    monitor.step(loss, optimiser)
    optimiser.step()
    optimiser.zero_grad()
    print("step", flush=True)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_a_log_that_can_be_read(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(tmp_path)],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    for _ in range(20):
        run.stdout.readline()
    run.send_signal(signal.SIGKILL)
    run.wait()
    log = read_log(tmp_path)
    assert log.steps[:19] == list(range(1, 20))
    assert log.ended == ""
    assert time.time() > os.path.getmtime(tmp_path / LOG) - 60


def test_the_memory_of_a_step_is_that_of_its_directory_and_step(tmp_path):
    assert memory_in(tmp_path, 5) is None, "no file"
    (tmp_path / MEMORY).write_text('{"step": 5}')
    assert memory_in(tmp_path, 5) == {"step": 5}
    assert memory_in(tmp_path, 6) is None, "of another step"
    (tmp_path / MEMORY).write_text('{"step": 0}')
    assert memory_in(tmp_path, 0) is None, "a training that begins has no memory"


def written(directory, *lines):
    """A log of those lines after a header."""
    header = {"header": dataclasses.asdict(HEADER)}
    (directory / LOG).write_text("".join(json.dumps(line) + "\n" for line in (header, *lines)))


def test_a_log_of_more_than_a_writer_keeps_is_read_as_one_would_keep_it(tmp_path):
    written(tmp_path, *({"step": step, "run": {"loss": 1.0}, "by": {}} for step in range(5 * KEPT)))
    steps = read_log(tmp_path).steps
    assert len(steps) < KEPT
    assert steps[-DENSE:] == list(range(5 * KEPT - DENSE, 5 * KEPT))


def test_one_wide_report_does_not_widen_all_others(tmp_path, monkeypatch):
    wide = {"step": 0, "run": {}, "by": {"rms": encoded([1.0] * 200_000)}}
    written(
        tmp_path,
        wide,
        *({"step": step, "run": {}, "by": {"rms": encoded([1.0])}} for step in range(1, KEPT - 1)),
    )
    entries, built = [], np.array
    monkeypatch.setattr(
        np,
        "array",
        lambda *given, **more: entries.append((made := built(*given, **more)).size) or made,
    )
    assert findings(read_log(tmp_path))["history"]["steps"] == [0, KEPT - 2]
    assert max(entries) <= 400_000


def test_texts_without_end_are_shown_to_a_length(tmp_path):
    many = {str(place): "no" for place in range(5000)}
    written(
        tmp_path, {"step": 1, "run": {}, "by": {}, "unknown": many}, {"step": 1, "end": 10**6 * "x"}
    )
    log = read_log(tmp_path)
    assert len(log.ended) < 3000
    assert len(log.reports[0].missing) < 2000


@pytest.mark.parametrize(
    "line",
    [
        {"by": {}},
        {"by": {}, "run": []},
        {"by": 3, "run": {"highest_loss": 2.0}},
        {"by": {}, "run": {"highest_loss": [1]}},
    ],
)
def test_a_damaged_report_in_the_log_ends_no_training(tmp_path, line):
    whole = {"step": 1, "run": {"highest_loss": 9.0}, "by": {}}
    written(tmp_path, *([whole, {"step": 1, **line}] * KEPT))
    writer = LogWriter(tmp_path, HEADER, start=1)
    writer.report(Report(2, {"loss": 1.0}))
    assert read_log(tmp_path).steps[-1] == 2


def test_figures_that_base64_does_not_have_are_no_other_figures(tmp_path):
    text = encoded([1.0, 2.0, 3.0])
    written(
        tmp_path,
        {"step": 1, "run": {}, "by": {"rms": "*" + text}},
        {"step": 2, "run": {}, "by": {"rms": text}},
    )
    assert read_log(tmp_path).steps == [2]


@pytest.mark.parametrize("step", [None, "3", 1.5, True, [3]])
def test_a_report_without_a_step_is_left_out(step, tmp_path):
    writer = LogWriter(tmp_path, HEADER)
    writer.report(Report(2, {"loss": 1.0}))
    line = {"run": {"loss": 2.0}, "by": {}}
    if step is not None:
        line["step"] = step
    with (tmp_path / LOG).open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert read_log(tmp_path).steps == [2]


@pytest.mark.parametrize("kind", ["finding", "probe"])
def test_of_very_many_lines_of_a_kind_the_first_and_the_newest_are_read(
    kind, tmp_path, monkeypatch
):
    monkeypatch.setattr("ctrans.training.monitor.log.MOST_OF_A_KIND", 4)
    writer = LogWriter(tmp_path, HEADER)
    writer.report(Report(1, {"loss": 1.0}))
    for step in range(1, 31):
        if kind == "finding":
            loss = Reading(3.0, "the loss", "loss = 3")
            alarm = ALARMS.finding("loss spike", loss, limit="above 2", step=step, since=1)
            writer.finding(step, alarm)
        else:
            writer.probe(step, {"sharpness": 3.0})
    log = read_log(tmp_path)
    kept = [entry["step"] for entry in [*log.findings, *log.probes]]
    assert kept == [1, 2, 29, 30]
    assert log.unread == 0
    (remark,) = log.remarks
    assert remark.startswith(f"The log holds 30 lines of the kind '{kind}': the first and")
