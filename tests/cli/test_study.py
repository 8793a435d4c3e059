"""`ctrans study` as users type it, on stores whose runs are made up, so that nothing is trained but
what must be.
"""

import csv
import math
import subprocess
import sys

import pytest

from ctrans.study.carry_out import prospect
from ctrans.study.database import open_store
from ctrans.study.presets.table import PRESETS
from ctrans.study.study_file import read_study
from ctrans.study.training import RunResult
from ctrans.training.depth_tasks import recall
from tests.cli.test_commands import run, strict

TOML = """
learning_rates = [1e-3, 1e-2]
[base]
depth = 1
width = 16
heads = 2
context = 8
iterations = 2
eval_windows = 1
[vary]
placement = ["pre", "peri"]
"""


def kept(directory, study, loss, trained=None, only=lambda each: True):
    """A store with every run of the study, ended at the loss that `loss(run)` says."""
    with open_store(directory) as store:
        plan = prospect(study, store)
        done = []
        for key, each in plan.runs.items():
            if not only(each):
                continue
            curve = [
                {"step": 0, "validation_loss": 5.0},
                {"step": 20, "loss": 4.0},
                {"step": 40, "validation_loss": loss(each)},
            ]
            done.append((key, each, RunResult("finished", "", curve, 1.0, {}, trained or {})))
        store.add(done, "")
        store.tell("name", study.name)


def test_a_name_that_is_none_is_refused_with_what_may_be_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(TOML)
    for name, meant in (("kan-table1", "kan-table-1"), ("mine", "mine.toml")):
        result = run("study", name)
        assert result.exit_code == 2
        assert meant in result.output


def test_a_preset_whose_text_is_not_there_says_how_to_make_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("study", "text", "--dry-run")
    assert result.exit_code == 2
    assert "make text" in result.output


@pytest.mark.slow
def test_a_file_is_carried_out_kept_and_shown_again(tmp_path):
    (tmp_path / "mine.toml").write_text(TOML)
    out = tmp_path / "out"
    result = run("study", tmp_path / "mine.toml", "--workers", 1, "--out", out, "--export", "csv")
    assert result.exit_code == 0, result.output
    assert "4 of 4 runs are done" in " ".join(result.output.split())
    first = strict((out / "study.json").read_text())
    assert len(first["outcomes"]) == 2
    rows = csv.DictReader((out / "runs.csv").read_text().splitlines())
    assert [row["ending"] for row in rows] == ["finished"] * 4
    assert (out / "study.png").read_bytes().startswith(b"\x89PNG")
    again = run("study", tmp_path / "mine.toml", "--report", "--out", out, "--json", "-")
    assert strict(again.stdout)["outcomes"] == first["outcomes"]
    # an earlier export is written anew: beside a newer result it would be a wrong one
    written = (out / "runs.csv").read_bytes()
    (out / "runs.csv").write_bytes(written[: len(written) // 2])
    (out / "outcomes.csv").write_text("of the user\n")
    later = run("study", tmp_path / "mine.toml", "--report", "--out", out)
    assert later.exit_code == 2
    assert "outcomes.csv" in later.output
    (out / "outcomes.csv").unlink()
    assert run("study", tmp_path / "mine.toml", "--report", "--out", out).exit_code == 0
    assert (out / "runs.csv").read_bytes() == written


PLUGIN = """
from dataclasses import replace

from ctrans.dynamics.placement import PLACEMENTS
from ctrans.measure.measures import MEASURES, Measure


def number_of_weights(model, tokens, targets):
    return {"count": sum(weight.numel() for weight in model.parameters())}


PLACEMENTS["mine"] = replace(PLACEMENTS["pre"], name="mine")
MEASURES["my weights"] = Measure(
    formula="the number of weights", compute=number_of_weights, studied=True
)
"""


@pytest.mark.slow
def test_the_processes_of_a_study_import_the_plugins_first(tmp_path):
    """In a process of its own, as tables keep what a plugin adds."""
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "mine.toml").write_text(
        'measure = ["my weights"]\n' + TOML.replace('"pre", "peri"', '"pre", "mine"')
    )
    out = tmp_path / "out"
    options = ["--workers", "1", "--out", str(out), "--export", "csv"]
    command = [sys.executable, "-m", "ctrans", "--plugin", "plugin.py", "study", "mine.toml"]
    done = subprocess.run(
        [*command, *options], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((out / "runs.csv").read_text().splitlines()))
    assert [row["ending"] for row in rows] == ["finished"] * 4
    assert {row["case"] for row in rows} == {'{"placement": "pre"}', '{"placement": "mine"}'}
    assert all("my weights" in strict(row["trained"])["after"] for row in rows)
    study = strict((out / "study.json").read_text())
    assert (study["done"], study["failed"]) == (4, 0)
    assert study["environment"]["plugins"] == ["plugin.py"]


EDITS_ITSELF = """
import multiprocessing
from pathlib import Path

VERSION = 1
if multiprocessing.parent_process() is None:
    Path(__file__).write_text(Path(__file__).read_text().replace("VERSION = 1", "VERSION = 2"))
"""


@pytest.mark.slow
def test_no_run_is_stored_with_another_plugin_than_the_study_began_with(tmp_path):
    (tmp_path / "plugin.py").write_text(EDITS_ITSELF)
    (tmp_path / "mine.toml").write_text(TOML)
    command = [sys.executable, "-m", "ctrans", "--plugin", "plugin.py", "study", "mine.toml"]
    done = subprocess.run(
        [*command, "--workers", "1", "--out", "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "VERSION = 2" in (tmp_path / "plugin.py").read_text()
    assert done.returncode == 2, done.stderr
    assert "plugin 'plugin.py' is not as it was when the study began" in done.stderr
    with open_store(tmp_path / "out") as store:
        assert not store.runs()


@pytest.mark.parametrize("failing", [1, 4])
def test_runs_that_failed_are_no_runs_that_are_done(failing, tmp_path):
    (tmp_path / "mine.toml").write_text(TOML)
    study, results = (
        read_study(tmp_path / "mine.toml"),
        ["failed"] * failing + ["finished"] * (4 - failing),
    )
    with open_store(tmp_path / "out") as store:
        runs = prospect(study, store).runs.items()
        curve = [{"step": 0, "validation_loss": 5.0}, {"step": 2, "validation_loss": 3.0}]
        store.add(
            [
                (key, each, RunResult(end, "no memory", curve, 1.0, {}))
                for (key, each), end in zip(runs, results, strict=True)
            ],
            "",
        )
        store.tell("name", study.name)
    result = run("study", tmp_path / "mine.toml", "--report", "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert f"{4 - failing} of 4 runs are done, {failing} failed" in result.stdout.replace("\n", " ")
    assert f"{failing} of 4 runs failed" in result.stderr
    assert "no memory" in result.stderr
    found = strict((tmp_path / "out" / "study.json").read_text())
    assert (found["done"], found["failed"]) == (4 - failing, failing)


def test_a_preset_says_claim_effects_and_verdict(tmp_path):
    study = PRESETS["xiong-warmup"].study("xiong-warmup", "small")

    def needs(run):
        if run.model.placement == "post" and run.training.warmup == 0:
            return 4.0
        return 0.5 + 0.01 * (run.training.seed - study.seeds[0])

    kept(tmp_path, study, needs)
    result = run("study", "xiong-warmup", "--report", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    verdict = strict((tmp_path / "study.json").read_text())["verdict"]
    assert verdict["verdict"] == "reproduced"
    assert verdict["effects"][0]["mean"] == pytest.approx(4.0 - 0.52)
    assert "Xiong et al., ICML 2020" in result.output.replace("\n", " ")
    assert (tmp_path / "study.png").stat().st_size > 10_000


def test_a_result_shows_the_rule_of_the_largest_stable_rate_and_the_floor_of_its_own_data(tmp_path):
    (tmp_path / "mine.toml").write_text(
        TOML.replace("context = 8\n", "").replace("[base]", 'task = "recall"\n[base]')
    )
    study = read_study(tmp_path / "mine.toml")
    loss = {("pre", 1e-3): 0.08, ("pre", 1e-2): 0.5, ("peri", 1e-3): 0.08, ("peri", 1e-2): 5.0}
    kept(
        tmp_path / "out",
        study,
        lambda each: loss[each.model.placement, each.training.learning_rate],
    )
    result = run("study", tmp_path / "mine.toml", "--report", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    found = strict((tmp_path / "out" / "study.json").read_text())
    floor, guess = recall().depthless_loss(), math.log(8)
    assert found["stable_rule"] == {
        "rule": "depthless floor",
        "missing": {},
        "depthless_loss": floor,
        "guess_loss": pytest.approx(guess),
    }
    pre, peri = (found["outcomes"][f'{{"placement": "{name}"}}'] for name in ("pre", "peri"))
    assert (pre["largest stable learning rate"], pre["at least"]) == (1e-2, 1)
    assert peri["largest stable learning rate"] == pytest.approx(
        1e-3 * 10 ** (((0.08 + floor) / 2 - 0.08) / (guess - 0.08))
    )
    said = " ".join(result.output.split())
    assert "0.01 (at least)" in said
    assert "Rule of the largest stable learning rate: depthless floor" in said
    assert "2.08" in said


def test_a_report_after_a_kill_has_outcomes_and_no_verdict_of_half_a_study(tmp_path):
    """A command that was killed has put no outcomes in the store; seeds that are not whole compare
    nothing.
    """
    study = PRESETS["xiong-warmup"].study("xiong-warmup", "small")
    kept(
        tmp_path,
        study,
        lambda each: 3.0 + (each.model.placement == "post"),
        only=lambda each: each.training.seed == study.seeds[0],
    )
    result = run("study", "xiong-warmup", "--report", "--out", tmp_path, "--export", "csv")
    assert result.exit_code == 0, result.output
    found = strict((tmp_path / "study.json").read_text())
    assert {figures["best loss"] for figures in found["outcomes"].values()} == {3.0, 4.0}
    assert {effect["seeds"] for effect in found["verdict"]["effects"]} == {1}
    assert (tmp_path / "outcomes.csv").read_text().count("best loss") == 4


WRONG = {
    ("nope",): "unknown study 'nope'",
    ("kim-growth", "--scale", "tiny"): "small or paper",
    ("kim-growth", "--dry-run", "--report"): "exclude each other",
    ("kim-growth", "--workers", "0"): "workers = 0",
    ("kim-growth", "--export", "xls"): "csv",
    ("kim-growth", "--file", "a", "--bin", "b"): "exclude each other",
    ("vision", "--file", "a"): "leave out --file and --bin",
    ("kim-growth", "--report", "--out", "/proc/none"): "give the --out of a study",
}


@pytest.mark.parametrize("args", WRONG, ids=" ".join)
def test_a_wrong_request_gets_one_line(args):
    result = run("study", *args)
    assert result.exit_code == 2
    assert WRONG[args] in result.stderr
    assert result.stderr.count("\n") == 1
