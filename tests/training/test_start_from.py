"""A trained model as the start of another training, at its own depth and at others."""

import json

import pytest
import torch

from ctrans.model.checkpoint import load, save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.training.start_from import start_from
from solvers import ConfigError
from tests.cli.test_commands import run
from tests.helpers import learned, small_config, tokens


def saved(tmp_path, **changes):
    model = learned(GPT(small_config("pre", **changes)), 0.05)
    save(model, tmp_path / "model")
    return model, tmp_path / "model"


def test_at_its_own_depth_it_is_the_same_model_to_the_bit(tmp_path):
    model, path = saved(tmp_path)
    for given in ({}, {"depth": 3}, {"width": 16, "placement": "pre"}):
        again = start_from(path, given)
        assert torch.equal(again(tokens())[0], model(tokens())[0])
        assert all(p.requires_grad for p in again.parameters())


def test_other_depths_take_the_same_depth_time(tmp_path):
    _, path = saved(tmp_path)
    for blocks in (1, 6):
        other = start_from(path, {"depth": blocks})
        assert (other.config.depth, other.depth.blocks) == (blocks, blocks)
        assert other.depth.times[-1] == pytest.approx(0.6)


@pytest.mark.slow
def test_halved_or_doubled_blocks_that_are_smooth_in_depth_converge_to_the_same_ode_at_first_order(
    tmp_path,
):
    """Free weights, each block's those of a linear function of depth: the limit is approached like
    1/D from either side.
    """
    smooth = learned(
        GPT(small_config("pre", depth=24, dt=0.05, depth_weights="linear", knots=2)).double(), 0.02
    )
    free = GPT(
        GPTConfig(**{**vars(smooth.config), "depth_weights": "free", "knots": None})
    ).double()
    names = dict(free.named_parameters())
    with torch.no_grad():
        for name, parameter in names.items():
            head, _, tail = name.rpartition(".")
            parameter.copy_(getattr(smooth.get_submodule(head), tail))
    save(free, tmp_path / "model")
    half, same, double = (
        start_from(tmp_path / "model", {"depth": n})(tokens())[0].detach() for n in (12, 24, 48)
    )
    assert torch.equal(same, free(tokens())[0])
    assert float((half - same).norm() / (same - double).norm()) == pytest.approx(2, rel=0.15)


def test_other_settings_are_refused(tmp_path):
    _, path = saved(tmp_path)
    with pytest.raises(
        ConfigError, match="width = 32 contradicts the model to start from, which has 16"
    ):
        start_from(path, {"width": 32})
    _, stack = saved(tmp_path, stack_steps=2)
    assert start_from(stack, {"stack_steps": 4}).config.stack_steps == 4
    with pytest.raises(ConfigError, match="only its stack_steps may change"):
        start_from(stack, {"depth": 4})


@pytest.mark.slow
def test_the_command_trains_on_at_another_depth(tmp_path):
    size = [
        "--depth",
        "2",
        "--width",
        "16",
        "--heads",
        "2",
        "--context",
        "8",
        "--batch",
        "2",
        "--eval-windows",
        "2",
    ]
    assert run("train", *size, "--iterations", "2", "--out", tmp_path / "a").exit_code == 0
    on = [
        "train",
        "--from",
        tmp_path / "a",
        "--batch",
        "2",
        "--eval-windows",
        "2",
        "--iterations",
        "1",
    ]
    result = run(*on, "--depth", "4", "--out", tmp_path / "b")
    assert result.exit_code == 0, result.output
    assert load(tmp_path / "b").config.depth == 4
    assert load(tmp_path / "b").config.dt == pytest.approx(load(tmp_path / "a").config.dt / 2)
    refused = run(*on, "--resume", "--out", tmp_path / "b")
    assert (refused.exit_code, "choose one" in refused.stderr) == (2, True)


LITTLE = ["--batch", "2", "--eval-windows", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["--from", "--resume", "--task"])
def test_the_result_shows_the_options_of_the_model_that_is_trained(kind, tmp_path):
    size = ["--depth", "1", "--width", "16", "--heads", "2", "--context", "8", "--dt", "0.5"]
    out = tmp_path / "a"
    if kind == "--task":
        last = run("train", "--task", "digits", "--iterations", "1", *LITTLE, "--out", out)
    else:
        args = [*size, *LITTLE, "--iterations", "2"]
        assert run("train", *args, "--placement", "pre", "--out", out).exit_code == 0
    if kind == "--from":
        origin, out = out, tmp_path / "b"
        last = run("train", "--from", origin, *LITTLE, "--iterations", "1", "--out", out)
    elif kind == "--resume":
        last = run("train", "--resume", "--iterations", "3", "--out", out)
    assert last.exit_code == 0, last.output
    result = json.loads((out / "train.json").read_text())
    trained = {**result["model"], **result["training"]}
    options = result["options"]
    assert {"depth", "width", "placement", "learning_rate"} <= options.keys()
    shown = {name: value for name, value in options.items() if name in trained}
    assert shown == {name: trained[name] for name in shown}
    if kind != "--task":
        assert "1 block, width 16, 2 heads, step dt = 0.5, seed 0" in last.output
