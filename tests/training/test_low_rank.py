"""Training updates of low rank of a trained model: from the command line, interrupted, resumed,
read by the other commands.
"""

import json
import os
import re
import shutil
import signal

import pytest
import torch

from ctrans.dynamics.weights.low_rank import factors
from ctrans.model.checkpoint import load
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.study.run_key import BEFORE
from ctrans.training.settings import TrainConfig
from ctrans.training.train import plan, resume, train
from solvers import ConfigError
from tests.cli.test_commands import run
from tests.helpers import tokens
from tests.training.helpers import MODEL, SETTINGS, TEXT

SIZE = ["--depth", "2", "--width", "16", "--heads", "2", "--context", "8"]
QUICK = ["--batch", "2", "--eval-windows", "2"]


def settings(**changes):
    return TrainConfig(**{**SETTINGS, "low_rank": 2, **changes})


def fresh(**changes):
    return GPT(GPTConfig(**{**MODEL, **changes}), seed=5)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "changes",
    [{}, {"gradient": "adjoint", "method": "dopri5"}, {"dtype": "bfloat16"}],
)
def test_a_run_that_was_stopped_goes_on_to_the_bits_of_one_that_was_not(tmp_path, changes):
    whole = train(fresh(), settings(**changes), TEXT, out=tmp_path / "whole")
    assert whole.progress.step == 12
    again = train(fresh(), settings(**changes), TEXT, out=tmp_path / "again", observe=_stop_at(6))
    assert again.progress.step == 6
    resumed = resume(tmp_path / "again", TEXT)
    assert resumed.progress == whole.progress
    first, second = factors(whole.model), factors(resumed.model)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(value.any() for name, value in first.items() if name.endswith(".b"))
    assert torch.equal(
        load(tmp_path / "whole" / "last")(tokens())[0],
        load(tmp_path / "again" / "last")(tokens())[0],
    )


def _stop_at(step):
    def observe(row):
        if row["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return observe


@pytest.mark.slow
def test_the_command_updates_a_model_at_another_depth_and_the_others_read_it(tmp_path):
    assert run("train", *SIZE, *QUICK, "--iterations", "2", "--out", tmp_path / "a").exit_code == 0
    on = [
        "train",
        "--from",
        tmp_path / "a",
        *QUICK,
        "--iterations",
        "3",
        "--learning-rate",
        "0.1",
        "--warmup",
        "0",
    ]
    result = run(
        *on, "--depth", "4", "--low-rank", "2", "--monitor", "--every", "1", "--out", tmp_path / "b"
    )
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "b" / "train.json").read_text())
    assert found["trained_parameters"] == sum(
        value.numel() for value in factors(load(tmp_path / "b", merge=False)).values()
    )
    assert found["trained_parameters"] < found["parameters"] / 2
    row = rf"trained parameters\b[^\n]*\b{found['trained_parameters']:,}\b"
    assert re.search(row, result.output)
    base = load(tmp_path / "b" / "checkpoints" / "base")
    assert torch.equal(base(tokens())[0], load(tmp_path / "a").at_depth(4)(tokens())[0])
    assert not torch.equal(base(tokens())[0], load(tmp_path / "b")(tokens())[0])
    for command in (
        ["generate", "--tokens", "3"],
        ["simulate", "--tokens", "4"],
        ["hjb-check", "--tokens", "4"],
        ["diagnose"],
        [
            "train",
            *QUICK,
            "--iterations",
            "1",
            "--depth",
            "3",
            "--low-rank",
            "1",
            "--out",
            tmp_path / "c",
        ],
    ):
        name, *options = command
        which = "--from" if name == "train" else "--checkpoint"
        given = (
            run(name, which, tmp_path / "b", *options)
            if name != "diagnose"
            else run(name, tmp_path / "b")
        )
        assert given.exit_code == 0, (name, given.output, given.stderr)
    more = run("train", "--resume", "--low-rank", "2", "--iterations", "4", "--out", tmp_path / "b")
    assert more.exit_code == 0, more.stderr
    other = run("train", "--resume", "--low-rank", "3", "--out", tmp_path / "b")
    assert (other.exit_code, "--low-rank 3 contradicts the run to resume" in other.stderr) == (
        2,
        True,
    )


def test_overwriting_a_run_takes_its_base_with_it(tmp_path):
    train(fresh(), settings(iterations=1), TEXT, out=tmp_path)
    assert (tmp_path / "checkpoints" / "base").is_dir()
    other = GPT(GPTConfig(**MODEL), seed=6)
    train(other, settings(iterations=1), TEXT, out=tmp_path, overwrite=True)
    assert not (tmp_path / "checkpoints").exists()
    assert torch.equal(
        load(tmp_path / "last")(tokens())[0], load(tmp_path / "last", merge=False)(tokens())[0]
    )
    train(fresh(), settings(iterations=1, low_rank=0), TEXT, out=tmp_path, overwrite=True)
    assert not (tmp_path / "checkpoints-2").exists()
    assert not (tmp_path / "checkpoints" / "base").exists()


def test_a_directory_called_base_that_no_run_made_is_left_alone(tmp_path):
    """Neither is it removed by a run that needs none, nor written into by one that does."""
    theirs = tmp_path / "checkpoints" / "base"
    for names in (["notes.txt"], ["model.safetensors"], ["config.json", "model.safetensors"]):
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        theirs.mkdir(parents=True)
        for name in names:
            (theirs / name).write_text("theirs")
        train(GPTConfig(**MODEL), settings(iterations=1, low_rank=0), TEXT, out=tmp_path)
        assert [(theirs / name).read_text() for name in names] == ["theirs"] * len(names)
        for path in (
            *tmp_path.glob("checkpoints/step-*"),
            tmp_path / "last",
            tmp_path / "best",
            tmp_path / "log.jsonl",
        ):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if "model.safetensors" in names:
            with pytest.raises(ConfigError):
                train(fresh(), settings(iterations=1), TEXT, out=tmp_path)
            assert [(theirs / name).read_text() for name in names] == ["theirs"] * len(names)
            (tmp_path / "log.jsonl").unlink()


def test_what_makes_no_sense_is_refused_before_anything_is_written(tmp_path):
    def planned(model, **changes):
        return plan(
            model,
            settings(**changes),
            TEXT,
            out=tmp_path / "run",
            parallel=changes.pop("parallel", "none"),
        )

    with pytest.raises(ConfigError, match="low_rank = 2 updates a trained model"):
        planned(GPTConfig(**MODEL))
    with pytest.raises(ConfigError, match="keeps weights on spheres"):
        planned(fresh(placement="post", residual="ngpt", norm="rmsnorm"))
    with pytest.raises(ConfigError, match="already functions"):
        planned(fresh(depth_weights="linear", knots=2))
    with pytest.raises(ConfigError, match="give 1 to 16"):
        planned(fresh(), low_rank=99)
    with pytest.raises(ConfigError, match="low_rank = -1"):
        settings(low_rank=-1)
    with pytest.raises(ConfigError, match="fsdp shards weights"):
        plan(fresh(), settings(), TEXT, out=tmp_path / "run", parallel="fsdp")
    assert not list((tmp_path / "run").glob("*"))


def test_kept_runs_are_those_without_updates():
    assert BEFORE["training"]["low_rank"] == TrainConfig().low_rank == 0


def test_a_base_that_has_updates_itself_is_named(tmp_path, monkeypatch):
    """From the directory that holds it, it would be its own base, without an end."""
    train(fresh(), settings(iterations=1), TEXT, out=tmp_path)
    place = tmp_path / "checkpoints"
    shutil.copy((tmp_path / "last").resolve() / "adapter.safetensors", place / "base")
    monkeypatch.chdir(place)
    for directory in ("base", tmp_path / "last"):
        with pytest.raises(ConfigError, match=r"has adapter\.safetensors itself"):
            load(directory)
