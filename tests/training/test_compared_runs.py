"""Where two runs part: runs of one seed are equal, and each kind of change is named at its step."""

import hashlib
import json
import shutil

import pytest
import safetensors.torch
import torch

from ctrans.model.config import GPTConfig
from ctrans.training.compared_runs import answer, is_run, parting_of
from ctrans.training.log import LOG
from ctrans.training.settings import TrainConfig
from ctrans.training.train import train
from solvers import ConfigError
from tests.cli.test_commands import run, strict

SIZE = {"width": 8, "heads": 2, "depth": 1, "context": 8, "placement": "pre"}
STEPS = {"iterations": 6, "save_every": 2, "eval_every": 6, "batch": 2, "warmup": 1}


def trained(out, **changes):
    train(
        GPTConfig(vocab_size=256, **SIZE), TrainConfig(**STEPS | changes), b"abcdefgh" * 99, out=out
    )
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    for name, changes in {
        "a": {},
        "same": {},
        "seed": {"seed": 1},
        "beta": {"beta2": 0.5},
    }.items():
        trained(place / name, **changes)
    return place


@pytest.mark.cases(1)
def test_runs_of_one_seed_are_equal(runs):
    found = parting_of(runs / "a", runs / "same")

    assert (found.step, found.checkpoint, found.tensors, found.settings) == (None, None, (), {})
    assert found.equal_until == 6
    assert answer("a", "same", found).mark == "good"


@pytest.mark.cases(1)
def test_logs_without_a_common_step_are_not_called_equal(runs, tmp_path):
    shutil.copytree(runs / "a", tmp_path / "cut", symlinks=True)
    (tmp_path / "cut" / LOG).write_text("")
    found = parting_of(tmp_path / "cut", runs / "same")

    assert found.steps == 0
    said = answer("cut", "same", found)
    assert said.mark == "note"
    assert "have no step in common" in said.text
    assert "equal at all" not in said.text


@pytest.mark.cases(1)
def test_another_seed_parts_at_once_and_is_named(runs):
    found = parting_of(runs / "a", runs / "seed")

    assert found.step in (0, 1)
    assert found.settings["seed"] == (0, 1)
    assert found.tensors[0].name == "token_embedding.weight"


@pytest.mark.cases(1)
def test_another_update_parts_at_the_step_after_the_first_that_feels_it(runs):
    """beta2 does not matter at step 1, where Adam's step is the gradient's sign."""
    found = parting_of(runs / "a", runs / "beta")

    rows = [
        [json.loads(line) for line in (runs / name / LOG).read_text().splitlines()]
        for name in ("a", "beta")
    ]
    losses = [[row["loss"] for row in each if "loss" in row] for each in rows]
    expected = next(i for i, pair in enumerate(zip(*losses, strict=True), 1) if len(set(pair)) > 1)
    assert found.figure == "loss"
    assert found.step == expected > 1
    assert found.settings == {"beta2": (0.99, 0.5)}


@pytest.mark.cases(1)
def test_a_tensor_that_differs_is_named_at_its_checkpoint(runs, tmp_path):
    shutil.copytree(runs / "a", tmp_path / "b", symlinks=True)
    place = next((tmp_path / "b" / "checkpoints").glob("*6"))
    weights = safetensors.torch.load_file(place / "optimiser.safetensors")
    name = next(name for name in weights if weights[name].dim() == 2)
    weights[name] *= 2
    safetensors.torch.save_file(weights, place / "optimiser.safetensors")

    sums = place / "SHA256SUMS"
    lines = [line.split("  ") for line in sums.read_text().splitlines()]
    digests = {name: hashlib.sha256((place / name).read_bytes()).hexdigest() for _, name in lines}
    sums.write_text("".join(f"{digests[name]}  {name}\n" for _, name in lines))

    found = parting_of(runs / "a", tmp_path / "b")

    assert found.step is None
    assert (found.equal_until, found.checkpoint) == (4, 6)
    assert [tensor.name for tensor in found.tensors] == [name]
    assert found.tensors[0].relation == "times 2"
    assert name in answer("a", "b", found).text


def test_a_model_is_no_run(runs):
    assert is_run(runs / "a")
    assert not is_run(runs / "a" / "last")
    assert not is_run(runs)


@pytest.mark.cases(1)
def test_the_command_says_where_two_runs_part(runs):
    result = run("compare", runs / "a", runs / "seed", "--batch", 1, "--json", "-")

    assert result.exit_code == 0, result.output
    found = strict(result.stdout)
    assert found["runs"]["settings"] == {"seed": [0, 1]}
    assert "part at step" in found["measured"]["answers"][0]["text"]
    assert torch.isfinite(torch.tensor(found["difference"]))


@pytest.mark.cases(1)
def test_a_log_of_another_run_is_not_compared(runs, tmp_path):
    shutil.copytree(runs / "a", tmp_path / "mixed", symlinks=True)
    shutil.copy(runs / "seed" / LOG, tmp_path / "mixed" / LOG)
    with pytest.raises(ConfigError, match="log of another run"):
        parting_of(runs / "a", tmp_path / "mixed")
