"""`ctrans watch` and `ctrans train --monitor` as users type them; pictures and tables of a log."""

import contextlib
import io
import json
import math
import signal
from unittest import mock

import pytest
import torch
from rich.console import Console

from ctrans.cli import watch
from ctrans.cli.train_monitor import MonitoredRun
from ctrans.measure.findings import Reading
from ctrans.model.checkpoint import load
from ctrans.report.contents import page_of
from ctrans.report.files import to_json
from ctrans.report.html import render
from ctrans.report.sections import MOST_FINDINGS, Findings
from ctrans.report.sparkline import BARS, sparkline
from ctrans.report.terminal import show
from ctrans.training import loop
from ctrans.training.loop import Ending, Outcome
from ctrans.training.monitor import ALARMS
from ctrans.training.monitor.log import LOG, LogWriter, read_log
from ctrans.training.monitor.log_lines import Header, Report
from ctrans.training.monitor.memory import MEMORY, options_in
from ctrans.training.signals import Wish
from ctrans.training.training_state import Progress
from tests.cli.test_commands import run, strict
from tests.cli.test_train import TINY

PLACES = ["block 0, attention", "block 0, ffn"]


def write(directory, end="finished"):
    writer = LogWriter(
        directory, Header("GPT", PLACES, ["attention", "ffn"], [2, 0], 10, total=100)
    )
    for i in range(6):
        figures = {
            "loss": 5.0 - i,
            "highest_loss": 5.0,
            "gradient_norm": 1.0,
            "learning_rate": 1e-3,
            "seconds": 0.5,
        }
        by_depth = {"rms": [1.0, 2.0, math.nan], "gradient": [1.0, 0.5], "logit": [1.0 * 2**i, 3.0]}
        writer.report(Report(10 * (i + 1), {**figures, **by_depth}))
    reading = Reading(32.0, "block 0, attention, head 0", "largest |attention score| = 32")
    writer.finding(
        60,
        ALARMS.finding(
            "attention logits grow", reading, step=60, since=60, doubling=10.0, crossing=67
        ),
    )
    if end:
        writer.end(60, end)


def test_a_sparkline_goes_from_the_least_to_the_largest():
    assert sparkline([0.0, 1.0, 2.0], 3) == BARS[0] + BARS[4] + BARS[-1]
    assert sparkline([1.0, 10.0, 100.0], 3) == BARS[0] + BARS[4] + BARS[-1]  # logarithmic
    assert sparkline([1.0, math.inf], 2) == BARS[0] + "x"
    assert sparkline([math.nan], 4) == "x"
    assert len(sparkline(list(range(1000)), 32)) == 32
    assert sparkline([], 3) == ""


@pytest.mark.slow
def test_watch_shows_a_run_and_writes_picture_and_json(tmp_path):
    write(tmp_path)
    result = run("watch", tmp_path)
    assert result.exit_code == 0, result.output
    for word in (
        "step 60 of 100 (60%)",
        "2 steps/s",
        "attention logits grow (note)",
        "doubles every 10 steps",
        "QK-norm",
        "root mean square",
    ):
        assert word in " ".join(result.stdout.split()), word
    assert (tmp_path / "watch.png").read_bytes().startswith(b"\x89PNG")
    found = strict((tmp_path / "watch.json").read_text())
    assert (found["command"], found["ended"], found["steps"][-1]) == ("watch", "finished", 60)


@pytest.mark.slow
def test_watch_of_a_run_that_goes_on_says_so_and_how_long(tmp_path):
    write(tmp_path, end="")
    result = run("watch", tmp_path, "--once")
    assert "still running, or killed" in " ".join(result.stdout.split())
    assert "to go" in result.stdout


def test_a_terminal_of_80_characters_shows_every_number_whole(tmp_path):
    writer = LogWriter(
        tmp_path, Header("GPT", PLACES * 12, ["attention", "ffn"] * 12, [4, 0] * 12, 10)
    )
    for i in range(40):
        row = [1.234e-10 * 10**k for k in range(24)]
        writer.report(
            Report(
                10 * (i + 1),
                {"loss": 1.0, **dict.fromkeys(("bound_share", "gradient", "logit"), row)},
            )
        )
    console = Console(file=io.StringIO(), width=80)
    show(watch._page(read_log(tmp_path)), console)
    table = [line for line in console.file.getvalue().splitlines() if "used of the bound" in line]
    assert len(table) == 1
    assert "…" not in table[0]


def test_a_terminal_follows_a_run_until_it_ends(tmp_path, monkeypatch):
    write(tmp_path, end="")
    waits = []

    def waited(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            with (tmp_path / LOG).open("a") as file:
                file.write('{"step": 60, "end": "finished"}\n')

    monkeypatch.setattr(watch.time, "sleep", waited)
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    asked = {
        "command": "watch",
        "options": {},
        "typed": frozenset[str](),
        "json_path": None,
        "out": None,
    }
    request = watch.WatchRequest(**asked, directory=tmp_path, once=False, refresh=0.5)
    assert watch._followed(request, console, read_log(tmp_path)).ended == "finished"
    assert waits == [0.5, 0.5]
    assert "still running, or killed" in console.file.getvalue()
    assert "finished" in console.file.getvalue()


def test_watch_of_what_is_no_log_is_one_line(tmp_path):
    for args in ([tmp_path / "missing"], [tmp_path]):
        result = run("watch", *args)
        assert result.exit_code == 2
        assert result.stderr.startswith("ctrans: ")
    write(tmp_path)
    assert run("watch", tmp_path, "--refresh", "0").exit_code == 2


def test_watch_of_a_directory_without_a_log_says_so_and_what_writes_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("watch", ".")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "there is no monitor.jsonl in '.'" in result.stderr
    assert "ctrans train --monitor" in result.stderr
    (tmp_path / "monitor.jsonl").write_text("hello\n")
    assert "'monitor.jsonl' is no log of a monitor" in run("watch", ".").stderr


def test_a_log_without_reports_has_no_picture(tmp_path):
    LogWriter(tmp_path, Header("GPT", PLACES, ["attention", "ffn"], [2, 0], 10))
    result = run("watch", tmp_path)
    assert result.exit_code == 0, result.output
    assert "no report yet" in result.stdout


def test_train_with_a_monitor_has_the_weights_of_one_without(tmp_path):
    for name, more in (
        ("without", []),
        ("with", ["--monitor", "--every", "2", "--probe-every", "4"]),
    ):
        result = run("train", *TINY, "--out", tmp_path / name, *more)
        assert result.exit_code == 0, result.output
    weights = [load(tmp_path / name / "last").state_dict() for name in ("without", "with")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    log = read_log(tmp_path / "with")
    assert log.steps == [1, 2, 4, 6, 8, 10, 12]
    assert log.ended == "finished"
    rows = [json.loads(line) for line in (tmp_path / "with" / "log.jsonl").read_text().splitlines()]
    assert log.reports[-1].figures["gradient_norm"] == pytest.approx(
        rows[-1]["gradient_norm"], rel=1e-5
    )


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_log(tmp_path):
    run("train", *TINY, "--out", tmp_path, "--monitor", "--every", "3")
    result = run(
        "train", "--resume", "--iterations", "18", "--out", tmp_path, "--monitor", "--every", "3"
    )
    assert result.exit_code == 0, result.output
    assert read_log(tmp_path).steps == [1, 3, 6, 9, 12, 15, 18]  # as if it had not stopped


@contextlib.contextmanager
def interrupted_at_once():
    wish = Wish()
    wish.number = signal.SIGTERM.value
    yield wish


@pytest.mark.slow
def test_an_interrupted_run_is_not_finished_and_keeps_its_monitor_and_its_options(
    tmp_path, monkeypatch
):
    options = ["--monitor", "--every", "2", "--probe-every", "4", "--react", "skip"]
    with monkeypatch.context() as patch:
        patch.setattr(loop, "stopping", interrupted_at_once)
        assert run("train", *TINY, "--out", tmp_path, *options).exit_code == 128 + signal.SIGTERM
    assert read_log(tmp_path).ended == "interrupted: stopped after iteration 1 and saved"
    result = run("train", "--resume", "--out", tmp_path, "--iterations", "6")
    assert result.exit_code == 0, result.output
    assert "The monitor goes on with a report every 2 iterations" in result.stdout
    log = read_log(tmp_path)
    assert (log.ended, log.steps) == ("finished", [1, 2, 4, 6])
    assert [probe["step"] for probe in log.probes] == [1, 4]
    saved = json.loads((tmp_path / "last" / MEMORY).read_text())["options"]
    assert saved == {"every": 2, "probe_every": 4, "react": ["skip"]}
    # typed options come first
    run("train", "--resume", "--out", tmp_path, "--iterations", "9", "--every", "3")
    assert read_log(tmp_path).steps == [1, 2, 4, 6, 9]
    result = run("train", "--resume", "--out", tmp_path, "--iterations", "12", "--no-monitor")
    assert result.exit_code == 0, result.output
    assert read_log(tmp_path).steps == [1, 2, 4, 6, 9]
    assert not (tmp_path / "last" / MEMORY).exists()


def test_options_of_a_monitor_are_read_where_one_saved(tmp_path):
    assert options_in(tmp_path) is None
    for content, options in (({"step": 1}, {}), ({"options": {"every": 2}}, {"every": 2})):
        (tmp_path / MEMORY).write_text(json.dumps(content))
        assert options_in(tmp_path) == options


@pytest.mark.parametrize(
    ("ending", "message", "words"),
    [
        (Ending.FINISHED, "12 iterations done", "finished"),
        (Ending.INTERRUPTED, "stopped after iteration 4", "interrupted: stopped after iteration 4"),
        (Ending.STOPPED, "stopped after iteration 4: why", "stopped after iteration 4: why"),
        (Ending.DIVERGED, "loss nan", "diverged: loss nan"),
    ],
)
def test_the_log_says_how_the_run_ended(ending, message, words):
    watcher = MonitoredRun.__new__(MonitoredRun)
    watcher.monitor = mock.Mock()
    watcher.end(Outcome(ending, Progress(), message))
    watcher.monitor.close.assert_called_once_with(words)


def test_probes_and_reactions_without_a_monitor_are_refused(tmp_path):
    for words in (
        ["--probe-every", "4"],
        ["--react", "skip"],
        ["--resume", "--no-monitor", "--react", "skip"],
    ):
        result = run("train", *TINY, "--out", tmp_path, *words)
        assert result.exit_code == 2
        assert "--monitor" in result.stderr


def test_a_log_of_very_many_findings_makes_a_page_of_some_that_says_of_how_many(tmp_path):
    write(tmp_path)
    made = watch.findings(read_log(tmp_path))
    few = {"command": "watch", **json.loads(to_json(made))}
    many = {
        **few,
        "findings": [{**few["findings"][0], "step": step} for step in range(3 * MOST_FINDINGS)],
    }
    page = render(page_of({"watch": many}))
    assert page.count('<article class="finding">') == MOST_FINDINGS + 12
    assert (
        f"the last 1,000 of {3 * MOST_FINDINGS - 12:,} earlier findings; the JSON has all" in page
    )
    assert render(page_of({"watch": few})).count('<article class="finding">') == 1
    assert (
        Findings(many["findings"], "mine").heading
        == "mine: the first 1,000 of 3,000; the JSON has all"
    )


@pytest.mark.parametrize(
    "damage", [('"severity": "', '"severity": "x'), ('"finding": ', "finding")]
)
def test_a_damaged_line_may_have_been_a_finding_and_is_said(tmp_path, damage):
    write(tmp_path)
    text = (tmp_path / LOG).read_text()
    (tmp_path / LOG).write_text(text.replace(*damage))
    log = read_log(tmp_path)
    assert (log.findings, log.unread) == ([], 1)
    result = json.loads(to_json({"command": "watch", **watch.findings(log)}))
    (answer,) = page_of({"watch": result}).answers
    assert answer.text.endswith(
        "finished; no findings in the lines of its log that can be read; damaged lines, which may"
        " hold more: 1."
    )
    assert answer.mark == "note"
    (tmp_path / LOG).write_text(text + '{"step": 70, "fin')  # a writer is at work
    assert read_log(tmp_path).unread == 0


def test_a_step_after_the_last_one_is_no_share_of_the_run(tmp_path):
    write(tmp_path)
    result = json.loads(to_json({"command": "watch", **watch.findings(read_log(tmp_path))}))
    result["log"]["total"] = 3
    (answer,) = page_of({"watch": result}).answers
    assert answer.text.startswith("step 60, after the last of 3, ")
