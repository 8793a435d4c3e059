"""`ctrans train` as users type it: what it writes, the exit codes, signals, kills, and one line for
each mistake.
"""

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ctrans.cli.request import request_of
from ctrans.cli.train import command as train
from ctrans.cli.train_options import TrainRequest
from ctrans.model.checkpoint import load
from ctrans.model.sums import damage
from ctrans.training import log
from ctrans.training.execution import Execution
from ctrans.training.loop import Ending, carry_out
from ctrans.training.run_directory import RunDirectory
from ctrans.training.settings import TrainConfig
from ctrans.training.tasks import TASKS
from solvers import SolveError
from tests.cli.test_commands import run, strict
from tests.training.helpers import same

SIZE = ["--depth", "1", "--width", "16", "--heads", "2", "--context", "8"]
KEPT = {"checkpoints", "last", "best", "log.jsonl", ".lock"}
TINY = [
    *SIZE,
    "--batch",
    "2",
    "--iterations",
    "12",
    "--eval-every",
    "4",
    "--eval-windows",
    "4",
    "--save-every",
    "3",
]


def command(*args, **environment):
    """The command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "ctrans", "train", *map(str, args)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_train_writes_checkpoints_log_json_and_picture(tmp_path):
    result = run("train", *TINY, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert {path.name for path in tmp_path.iterdir()} == {*KEPT, "train.json", "loss.png"}
    kept = strict((tmp_path / "train.json").read_text())
    assert (kept["command"], kept["ending"], kept["step"]) == ("train", "finished", 12)
    assert kept["training"]["batch"] == 2
    assert kept["model"]["placement"] == "peri"
    assert kept["best_validation_loss"] <= kept["validation_loss"]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert result.stdout.count(", validation loss") == 4
    assert [
        strict(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()
    ] == list(range(13))


@pytest.mark.slow
def test_other_commands_read_what_it_writes(tmp_path):
    run("train", *TINY, "--placement", "post", "--out", tmp_path)
    for place in (tmp_path, tmp_path / "last", tmp_path / "best"):
        shown = run("simulate", "--checkpoint", place, "--batch", "1", "--json", "-")
        assert "post" in strict(shown.stdout)["placements"]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["recall", "digits"])
def test_a_run_of_a_task_is_examined_on_held_out_rows_of_it(task, tmp_path):
    small = ("--depth", 1, "--width", 16, "--heads", 2, "--iterations", 2, "--batch", 4)
    for seed in (1, 2):
        out = tmp_path / str(seed)
        assert run("train", "--task", task, *small, "--seed", seed, "--out", out).exit_code == 0
    result = run("diagnose", tmp_path / "1", "--out", tmp_path / "found", "--batch", 8)
    assert result.exit_code == 0, result.output
    assert f"held-out rows of the task {task}" in result.output
    rows, targets = TASKS[task].data().validation_windows(1024)
    with torch.no_grad():
        logits, _ = load(tmp_path / "1").eval()(rows[:8])
    own = F.cross_entropy(logits.flatten(0, 1), targets[:8].flatten(), ignore_index=-1)
    assert f"the loss is {float(own):.3g} nats" in " ".join(result.output.split())
    both = run("compare", tmp_path / "1", tmp_path / "2")
    assert both.exit_code == 0, both.output
    named = run("diagnose", tmp_path / "1", "--text", "not of this task")
    assert named.exit_code == 2
    cut = run("diagnose", tmp_path / "1", "--context", 4)
    assert (cut.exit_code, "leave it out" in cut.output) == (2, True)


@pytest.mark.slow
def test_every_setting_has_an_option_and_is_passed_on(tmp_path):
    help_text = run("train", "--help-all").output
    assert all(
        f"--{field.name.replace('_', '-')}" in help_text
        for field in dataclasses.fields(TrainConfig)
    )
    args = [
        "--optimiser",
        "sgd",
        "--min-learning-rate",
        "0",
        "--clip",
        "2",
        "--kinetic",
        "0.1",
        "--no-bias",
        "--alpha",
        "2",
    ]
    result = run("train", *TINY, *args, "--placement", "deepnorm", "--out", tmp_path, "--json", "-")
    kept = strict(result.stdout)
    assert (
        kept["training"]["optimiser"],
        kept["training"]["min_learning_rate"],
        kept["training"]["clip"],
    ) == ("sgd", 0.0, 2.0)
    assert (kept["model"]["bias"], kept["model"]["alpha"]) == (False, 2.0)


@pytest.mark.slow
def test_nanogpts_files_are_trained_on(tmp_path):
    for name in ("train.bin", "val.bin"):
        (np.arange(400) % 300).astype("<u2").tofile(tmp_path / name)
    wanted = ["--bin", tmp_path, "--vocab-size", "300", "--out", tmp_path / "run", "--json", "-"]
    assert strict(run("train", *TINY, *wanted).stdout)["model"]["vocab_size"] == 300


@pytest.mark.slow
def test_the_model_is_evaluated_at_other_depths(tmp_path):
    result = run(
        "train", *TINY, "--eval-depth", "1", "--eval-depth", "3", "--out", tmp_path, "--json", "-"
    )
    kept = strict(result.stdout)
    assert kept["other_depths"]["1"] == pytest.approx(kept["validation_loss"], rel=1e-6)
    assert kept["other_depths"]["3"] != kept["other_depths"]["1"]
    assert strict((tmp_path / "train.json").read_text()) == kept


@pytest.mark.slow
def test_other_depths_are_evaluated_in_the_precision_of_the_run(tmp_path):
    args = [
        "--dtype",
        "bfloat16",
        "--eval-depth",
        "1",
        "--learning-rate",
        "0.1",
        "--out",
        tmp_path,
        "--json",
        "-",
    ]
    kept = strict(run("train", *TINY, *args).stdout)
    assert kept["other_depths"]["1"] == pytest.approx(kept["validation_loss"], rel=1e-9)


@pytest.mark.slow
def test_the_run_is_written_before_it_is_evaluated_at_other_depths(tmp_path, monkeypatch):
    def fail(*args):
        raise SolveError("too deep")

    monkeypatch.setattr("ctrans.cli.other_depths.evaluate", fail)
    result = run("train", *TINY, "--eval-depth", "3", "--out", tmp_path)
    assert (result.exit_code, result.stderr) == (1, "ctrans: too deep\n")
    assert "best validation loss" in result.stdout
    kept = strict((tmp_path / "train.json").read_text())
    assert (kept["ending"], kept["other_depths"]) == ("finished", {})
    assert (tmp_path / "loss.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "code"), [(Ending.INTERRUPTED, 143), (Ending.DIVERGED, 1)])
def test_a_run_that_did_not_finish_is_not_evaluated_at_other_depths(
    ending, code, tmp_path, monkeypatch
):
    def stop(begun, progress):
        return dataclasses.replace(
            carry_out(begun, progress), ending=ending, signal=signal.SIGTERM.value
        )

    monkeypatch.setattr("ctrans.cli.train.carry_out", stop)
    result = run("train", *TINY, "--eval-depth", "3", "--out", tmp_path, "--json", "-")
    assert result.exit_code == code, result.output
    assert strict(result.stdout)["other_depths"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("weights", [[], ["--depth-weights", "linear", "--knots", "1"]])
def test_a_depth_that_no_machine_holds_is_refused_before_a_run_begins_or_goes_on(weights, tmp_path):
    wanted = [
        *TINY,
        *weights,
        "--eval-depth",
        "3",
        "--eval-depth",
        "100000000000",
        "--out",
        tmp_path,
    ]
    refused = run("train", *wanted)
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert refused.stderr == "ctrans: eval_depth = 100,000,000,000: give at most 10,000\n"
    assert not list(tmp_path.iterdir())
    run("train", *TINY, *weights, "--out", tmp_path)
    before = (tmp_path / "log.jsonl").read_text()
    again = run(
        "train", "--resume", "--iterations", "15", "--eval-depth", "100000000000", "--out", tmp_path
    )
    assert (again.exit_code, again.stderr) == (2, refused.stderr)
    assert (tmp_path / "log.jsonl").read_text() == before


@pytest.mark.slow
def test_an_evaluation_at_other_depths_shows_how_far_it_is(tmp_path, monkeypatch):
    shown = []

    @contextlib.contextmanager
    def bar(what, total):
        yield lambda word: shown.append((word, total))

    monkeypatch.setattr("ctrans.cli.other_depths.progress_bar", bar)
    run("train", *TINY, "--eval-depth", "1", "--eval-depth", "3", "--out", tmp_path)
    assert (
        shown == [("1 blocks", 4)] * 2 + [("3 blocks", 4)] * 2
    )  # 4 windows, 2 at a time, at 2 depths


@pytest.mark.slow
def test_a_resumed_run_keeps_its_threads_and_depths(tmp_path, caplog):
    threads_before = torch.get_num_threads()
    try:
        run("train", *TINY, "--threads", "2", "--eval-depth", "3", "--out", tmp_path)
        torch.set_num_threads(1)
        result = run("train", "--resume", "--iterations", "15", "--out", tmp_path)
        assert (result.exit_code, result.stderr) == (0, "")
        assert torch.get_num_threads() == 2
        kept = strict((tmp_path / "train.json").read_text())
        assert list(kept["other_depths"]) == ["3"]
        assert not caplog.messages
        run("train", "--resume", "--iterations", "18", "--threads", "1", "--out", tmp_path)
        assert "had 2 CPU threads, and goes on with 1" in caplog.text
    finally:
        torch.set_num_threads(threads_before)


def test_what_was_typed_is_not_as_before():
    request = train_request({"device": "cuda", "threads": None}, typed=["device"])
    before = Execution(3, 1, "cpu", tensorboard=True, eval_depth=(2,))
    resumed = request.as_before(before)
    assert (resumed.device, resumed.threads) == ("cuda", 3)
    assert (resumed.use_tensorboard, resumed.eval_depth) == (True, (2,))
    assert request.as_before(dataclasses.replace(before, processes=2)).threads is None


def train_request(values, typed):
    """The request of `ctrans train` with these options, of which some were typed."""
    context = train.make_context("train", [])
    request = request_of(TrainRequest, context)
    return dataclasses.replace(request, **values, typed=frozenset(typed))


@pytest.mark.slow
def test_a_run_is_not_overwritten_but_resumed_or_removed(tmp_path):
    run("train", *TINY, "--out", tmp_path)
    refused = run("train", *TINY, "--out", tmp_path)
    assert (
        refused.exit_code,
        "continue it with --resume, remove it with --overwrite" in refused.stderr,
    ) == (2, True)
    further = run("train", "--resume", "--iterations", "15", "--out", tmp_path)
    assert (further.exit_code, "step 15/15" in further.stdout) == (0, True)
    again = run("train", *TINY, "--overwrite", "--out", tmp_path)
    assert (again.exit_code, "step  0/12" in again.stdout) == (0, True)
    assert not (tmp_path / "checkpoints").exists()
    assert next(row["step"] for row in log.read(tmp_path) if "validation_loss" in row) == 0
    assert not list(tmp_path.glob(".*.jsonl"))
    assert damage(tmp_path / "last") is damage(tmp_path / "best") is None
    assert run("train", "--resume", "--iterations", "13", "--out", tmp_path).exit_code == 0
    assert run("train", *TINY, "--overwrite", "--out", tmp_path).exit_code == 0
    assert not (tmp_path / "checkpoints-2").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--batch", "1"], "--batch 1 contradicts the run to resume, which has 2"),
        (["--width", "32"], "--width 32 contradicts the run to resume, which has 16"),
        (["--init", "he"], "--init he contradicts the run to resume, which has xavier"),
        (["--seed", "1"], "--seed 1 contradicts"),
        (["--file", __file__], "the data differ from those of the run"),
        (["--file", "/does/not/exist"], "cannot read '/does/not/exist'"),
        (["--iterations", "5"], "iterations = 5, and the run has made 12"),
    ],
)
def test_options_that_contradict_the_run_to_resume_are_named(args, words, tmp_path):
    run("train", *TINY, "--out", tmp_path)
    before = (tmp_path / "log.jsonl").read_text()
    result = run("train", "--resume", "--out", tmp_path, *args)
    assert (result.exit_code, words in result.stderr) == (2, True), result.stderr
    assert result.stderr.count("\n") == 1
    assert (tmp_path / "log.jsonl").read_text() == before


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_with_one_that_is_not(tmp_path):
    run("train", *TINY, "--out", tmp_path)
    path = tmp_path / "last" / "optimiser.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    result = run("train", "--resume", "--out", tmp_path)
    assert result.exit_code == 2
    assert "optimiser.safetensors' is damaged" in result.stderr
    fix = result.stderr.partition("ln -sfn ")[2].split()
    os.unlink(tmp_path / "last")
    os.symlink(fix[0], tmp_path / "last")
    assert run("train", "--resume", "--out", tmp_path).exit_code == 0


@pytest.mark.slow
def test_divergence_exits_1_and_keeps_the_last_good_checkpoint(tmp_path):
    wild = [
        "--learning-rate",
        "100",
        "--warmup",
        "0",
        "--clip",
        "1e9",
        "--margin",
        "0.1",
        "--patience",
        "1",
    ]
    result = run("train", *TINY, *wild, "--out", tmp_path)
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("ctrans: diverged: ")
    assert strict((tmp_path / "train.json").read_text())["ending"] == "diverged"
    assert damage(tmp_path / "last") is None
    assert "--resume and a lower --learning-rate, as 50," in result.stderr
    again = run("train", "--resume", "--learning-rate", "0.001", "--clip", "1", "--out", tmp_path)
    assert again.exit_code == 0, again.output
    rows = [strict(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["settings"] for row in rows if "settings" in row] == [
        {"learning_rate": 0.001, "clip": 1.0}
    ]
    assert not any("diverged" in row for row in rows)
    assert (
        strict((tmp_path / "last" / "train.json").read_text())["config"]["learning_rate"] == 0.001
    )


@pytest.mark.slow
def test_sigterm_saves_and_exits_with_143_and_resume_goes_on(tmp_path):
    process = command(*TINY, "--iterations", "100000", "--out", tmp_path)
    wait_for_rows(process, tmp_path, 20)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert "stopped after iteration" in errors
    saved = strict((tmp_path / "last" / "train.json").read_text())["progress"]["step"]
    rows = (tmp_path / "log.jsonl").read_text().splitlines()
    assert strict(rows[-1])["step"] == saved
    result = run("train", "--resume", "--iterations", saved + 2, "--out", tmp_path)
    assert (result.exit_code, f"step {saved + 2}/{saved + 2}" in result.stdout) == (0, True)


def wait_for_rows(process, directory, count):
    """Until the log has so many rows, or the process has ended."""
    path = directory / "log.jsonl"
    while process.poll() is None and (not path.exists() or path.read_text().count("\n") < count):
        time.sleep(0.001)


def killed_again_and_again(directory, kills, iterations, seed):
    """The weights of an uninterrupted run and of one that signal 9 ends after random numbers of
    further iterations.
    """
    args = [*TINY, "--iterations", iterations, "--threads", "1"]
    whole = run("train", *args, "--out", directory / "whole")
    assert whole.exit_code == 0, whole.output
    parts = directory / "parts"
    generator = random.Random(seed)
    for _ in range(kills):
        rows = (parts / "log.jsonl").read_text().count("\n") if parts.exists() else 0
        process = command(
            *args, *(["--resume"] if RunDirectory(parts).exists else []), "--out", parts
        )
        wait_for_rows(process, parts, rows + generator.randint(1, 2 * iterations // kills))
        time.sleep(generator.uniform(0, 0.01))
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
        if (parts / "last").exists():
            assert damage(parts / "last") is None
            load(parts / "last")
    last = run("train", *args, "--resume", "--out", parts)
    assert last.exit_code == 0, last.output
    return [load(path / "last").state_dict() for path in (directory / "whole", parts)]


@pytest.mark.slow
def test_a_run_killed_twice_ends_with_the_same_bits(tmp_path):
    assert same(*killed_again_and_again(tmp_path, kills=2, iterations=30, seed=0))


@pytest.mark.slow
def test_a_run_killed_twenty_times_ends_with_the_same_bits(tmp_path):
    assert same(*killed_again_and_again(tmp_path, kills=20, iterations=400, seed=1))


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_leaves_the_checkpoint_before(tmp_path):
    code = """
import resource, signal, sys
from ctrans.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
main(["train", "--resume", *sys.argv[2:]])
"""
    run("train", *TINY, "--out", tmp_path)
    args = ["--iterations", "15", "--out", tmp_path]
    done = subprocess.run(
        [sys.executable, "-c", code, "20000", *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "File too large; the checkpoint of step 12 is intact" in done.stderr
    assert damage(tmp_path / "last") is None
    assert run("train", "--resume", *args).exit_code == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--placement", "perri"], "did you mean 'peri'"),
        (["--gradient", "backpropp"], "did you mean 'backprop'"),
        (["--optimiser", "adam"], "did you mean 'adamw'"),
        (["--dtype", "bf16"], "did you mean 'bfloat16'"),
        (["--depth-weights", "linar"], "did you mean 'linear'"),
        (["--parallel", "dpp"], "did you mean 'ddp'"),
        (["--lr", "1"], "No such option '--lr'"),
        (["--batch", "0"], "batch = 0"),
        (["--iterations", "0"], "iterations = 0"),
        (["--learning-rate", "nan"], "learning_rate = nan"),
        (["--context", "90000"], "lower context, or give more text"),
        (["--batch", "1000000"], "1000000 sequences of 8 tokens"),
        (["--file", "/does/not/exist"], "cannot read '/does/not/exist'"),
        (["--bin", "/does/not/exist"], "cannot read '/does/not/exist/train.bin'"),
        (["--bin", ".", "--file", "x"], "--file and --bin exclude each other"),
        (["--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
        (["--vocab-size", "100"], "give --vocab-size 227"),
        (["--threads", "0"], "threads = 0"),
        (["--eval-depth", "0"], "eval_depth = 0"),
        (["--temperature-start", "3"], "needs both, or neither"),
        (["--device", "cuda:99"], "device 'cuda:99' is not available"),
        (["--out", "/proc/nothing"], "cannot write to directory '/proc/nothing'"),
        (["--json", "/proc/nothing/x.json"], "there is no directory '/proc/nothing'"),
        (["--parallel", "ddp"], "torchrun --nproc-per-node 2"),
        (["--parallel", "fsdp", "--gradient", "adjoint"], "fsdp frees weights"),
        (["--method", "rk4", "--placement", "post", "--gradient", "reversible"], "reversible"),
    ],
)
def test_a_mistake_is_one_line_with_exit_code_2_and_no_checkpoint(
    args, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    result = run("train", *TINY, *args)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("ctrans: ")
    assert words in result.stderr
    assert result.stdout == ""
    assert not list(tmp_path.rglob("step-*"))


@pytest.mark.slow
def test_a_damaged_json_is_no_traceback(tmp_path):
    run("train", *TINY, "--out", tmp_path)
    path = tmp_path / "last" / "train.json"
    path.write_text(json.dumps({"progress": 3}))
    result = run("train", "--resume", "--out", tmp_path)
    assert (result.exit_code, "train.json' is damaged" in result.stderr) == (2, True)


@pytest.mark.slow
def test_resuming_a_mistyped_directory_starts_nothing_unless_torchrun_restarts_it(
    tmp_path, monkeypatch
):
    missing = tmp_path / "tpyo"
    result = run("train", *TINY, "--resume", "--out", missing)
    assert (result.exit_code, f"there is no run in '{missing}' to resume" in result.stderr) == (
        2,
        True,
    )
    assert not missing.exists()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert run("train", *TINY, "--resume", "--out", missing).exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("args", [[], ["--resume"]])
def test_a_lost_last_loses_no_checkpoint(args, tmp_path):
    run("train", *TINY, "--out", tmp_path)
    (tmp_path / "last").unlink()
    kept = RunDirectory(tmp_path).steps()
    result = run("train", *TINY, *args, "--out", tmp_path)
    assert result.exit_code == 2
    assert RunDirectory(tmp_path).steps() == kept
    assert (tmp_path / "log.jsonl").read_text().count("\n") == 13


@pytest.mark.parametrize("name", ["best", "log.jsonl", "last"])
def test_a_new_run_replaces_no_file_of_a_user(name, tmp_path):
    (tmp_path / name).write_text("mine\n")
    result = run("train", *TINY, "--out", tmp_path)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert (tmp_path / name).read_text() == "mine\n"
    assert not list(tmp_path.rglob("step-*"))


@pytest.mark.slow
def test_a_run_goes_on_when_its_data_file_has_moved(tmp_path):
    (tmp_path / "old.txt").write_bytes(bytes(range(32, 127)) * 20)
    run("train", *TINY, "--file", tmp_path / "old.txt", "--out", tmp_path / "run")
    (tmp_path / "old.txt").rename(tmp_path / "new.txt")
    args = ["train", "--resume", "--iterations", "14", "--out", tmp_path / "run"]
    assert "cannot read" in run(*args).stderr
    assert run(*args, "--file", tmp_path / "new.txt").exit_code == 0
    assert strict((tmp_path / "run" / "last" / "train.json").read_text())["source"]["file"] == str(
        tmp_path / "new.txt"
    )


@pytest.mark.slow
def test_a_run_in_a_directory_where_another_trains_is_refused(tmp_path):
    run("train", *TINY, "--out", tmp_path)
    with RunDirectory(tmp_path).locked():
        for args in (["--resume"], ["--overwrite"]):
            result = run("train", *TINY, *args, "--out", tmp_path)
            assert (result.exit_code, "another process is training in" in result.stderr) == (
                2,
                True,
            )
    assert RunDirectory(tmp_path).steps()[-1] == 12


@pytest.mark.slow
def test_following_the_advice_on_a_damaged_best_leaves_a_best(tmp_path):
    run("train", *TINY, "--out", tmp_path)
    path = tmp_path / "best" / "model.safetensors"
    assert (tmp_path / "best").resolve() == (tmp_path / "last").resolve()
    path.write_bytes(path.read_bytes()[:-1])
    fix = run("train", "--resume", "--out", tmp_path).stderr.partition("ln -sfn ")[2]
    subprocess.run("ln -sfn " + fix, shell=True, check=True)
    result = run(
        "train",
        "--resume",
        "--iterations",
        "13",
        "--eval-every",
        "100",
        "--save-every",
        "1",
        "--out",
        tmp_path,
    )
    assert result.exit_code == 0, result.output
    for name in ("last", "best"):
        assert damage(tmp_path / name) is None


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_its_lines_any_more(tmp_path):
    process = command(*TINY, "--out", tmp_path)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), errors) == (0, "")
    assert strict((tmp_path / "last" / "train.json").read_text())["progress"]["step"] == 12
