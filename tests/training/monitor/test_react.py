"""`ctrans train --react`: nothing unasked, each reaction does what it says, and a run that goes on
has the bits of one not stopped.
"""

import dataclasses
import itertools
import json
import math
import os

import pytest
import torch

from ctrans.measure.measures import MEASURES
from ctrans.model.checkpoint import load
from ctrans.training import log, loop
from ctrans.training.monitor import ALARMS, read_log
from ctrans.training.run_directory import RunDirectory
from tests.cli.test_commands import run, strict
from tests.cli.test_train import SIZE

WORDS = [
    *SIZE,
    "--batch",
    "2",
    "--iterations",
    "18",
    "--eval-every",
    "6",
    "--eval-windows",
    "4",
    "--monitor",
    "--every",
    "2",
]


@pytest.fixture
def often(monkeypatch):
    """An alarm where nothing is wrong: every update is too large."""
    alarm = ALARMS["updates too large"]
    always = dataclasses.replace(alarm, limits={**alarm.limits, "limit": 0.0})
    update = MEASURES["update"]
    checks = {**update.checks, "updates too large": always}
    monkeypatch.setitem(MEASURES, "update", dataclasses.replace(update, checks=checks))


def train(out, *words, code=0):
    result = run("train", *WORDS, "--out", out, *words)
    assert result.exit_code == code, result.output
    return result


def go_on_from(out, step, *words):
    """As after a kill at a later step: `last` leads to that checkpoint."""
    store = RunDirectory(out)
    (out / "last").unlink()
    os.symlink(store.step_directory(step).relative_to(out), out / "last")
    result = run("train", "--resume", "--out", out, "--monitor", "--every", "2", *words)
    assert result.exit_code == 0, result.output


def weights(out):
    return load(out / "last").state_dict()


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def rows(out):
    return [row for row in log.read(out) if "loss" in row]


def skipped(out):
    return [row["step"] for row in rows(out) if row.get("skipped")]


def reacting(*names):
    return [word for name in names for word in ("--react", name)]


@pytest.mark.slow
def test_a_run_that_reacts_and_is_killed_goes_on_to_the_same_bits(tmp_path, often, monkeypatch):
    made, steps = loop.nn.utils.get_total_norm, itertools.count(1)
    monkeypatch.setattr(
        loop.nn.utils,
        "get_total_norm",
        lambda grads: made(grads) * (math.nan if next(steps) % 18 == 14 else 1.0),
    )
    words = [*reacting("skip", "save"), "--save-every", "9", "--eval-every", "100"]
    for name in ("whole", "killed"):
        train(tmp_path / name, *words)
    whole = weights(tmp_path / "whole")
    assert skipped(tmp_path / "whole") == [14]
    for _ in range(9):
        next(steps)
    go_on_from(
        tmp_path / "killed", 9, *reacting("skip", "save")
    )  # and the next iteration has a report
    assert same(weights(tmp_path / "killed"), whole)
    assert skipped(tmp_path / "killed") == skipped(tmp_path / "whole")
    logs = [read_log(tmp_path / name) for name in ("whole", "killed")]
    assert logs[0].steps == logs[1].steps
    assert logs[0].findings == logs[1].findings


@pytest.mark.slow
def test_what_is_asked_and_never_needed_changes_no_bit(tmp_path):
    train(tmp_path / "without")
    train(tmp_path / "with", *reacting("skip", "save", "stop"))
    assert same(weights(tmp_path / "with"), weights(tmp_path / "without"))


@pytest.mark.slow
def test_the_checkpoint_before_a_danger_goes_on_to_the_same_bits(tmp_path, often):
    train(tmp_path / "plain", "--save-every", "100")
    train(tmp_path / "saved", "--save-every", "100", *reacting("save"))
    # the first alarm is told before the step of iteration 2, and later checkpoints do not remove
    # what was saved for it
    assert 1 in RunDirectory(tmp_path / "saved").steps()
    assert (
        json.loads((tmp_path / "saved/checkpoints/step-00000001/alarm.json").read_text())["check"]
        == "updates too large"
    )
    assert same(weights(tmp_path / "saved"), weights(tmp_path / "plain"))
    go_on_from(tmp_path / "saved", 1, *reacting("save"))
    assert same(weights(tmp_path / "saved"), weights(tmp_path / "plain"))
    assert [
        alarm["step"]
        for alarm in read_log(tmp_path / "saved").findings
        if alarm["severity"] != "note"
    ] == [2]


@pytest.mark.slow
def test_a_run_that_a_danger_ends_is_saved_says_why_and_goes_on(tmp_path, often):
    train(tmp_path / "plain")
    result = train(tmp_path / "stopped", *reacting("stop"), code=1)
    assert "stopped after iteration 2: updates too large" in result.stderr
    assert "--resume" in result.stderr
    found = strict((tmp_path / "stopped" / "train.json").read_text())
    assert (found["ending"], found["step"]) == ("stopped", 2)
    result = run(
        "train",
        "--resume",
        "--out",
        tmp_path / "stopped",
        "--monitor",
        "--every",
        "2",
        "--react",
        "stop",
    )
    assert result.exit_code == 0, result.output  # it remembers what it was told
    assert same(weights(tmp_path / "stopped"), weights(tmp_path / "plain"))


@pytest.mark.slow
@pytest.mark.parametrize("reactions", [(), ("skip",)])
def test_an_iteration_that_is_not_finite_is_left_out_where_that_is_asked(
    tmp_path, monkeypatch, reactions
):
    made, calls = loop.nn.utils.get_total_norm, []

    def broken(grads):
        calls.append(1)
        return made(grads) * (float("nan") if len(calls) == 5 else 1.0)

    monkeypatch.setattr(loop.nn.utils, "get_total_norm", broken)
    train(tmp_path, *reacting(*reactions), code=0 if reactions else 1)
    if reactions:
        assert skipped(tmp_path) == [5]
        assert len(rows(tmp_path)) == 18
        assert all(torch.isfinite(weight).all() for weight in weights(tmp_path).values())


@pytest.mark.parametrize(
    ("name", "words"), [("skipp", "did you mean 'skip'"), ("lower", "choose skip, save or stop")]
)
def test_a_reaction_that_is_none_is_named(tmp_path, name, words):
    result = run("train", *WORDS, "--out", tmp_path, "--react", name)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert words in result.stderr


@pytest.mark.slow
def test_the_memory_is_saved_beside_the_checkpoint_and_is_plain_json(tmp_path):
    train(tmp_path)
    memory = json.loads((tmp_path / "last" / "monitor.json").read_text())
    assert memory["step"] == 18
    assert "monitor.json" in (tmp_path / "last" / "SHA256SUMS").read_text()
