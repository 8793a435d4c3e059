"""Reactions: none unasked; each does what it says and leaves the rest of the training alone."""

import math

import pytest
import torch
from safetensors.torch import load_file

from ctrans import GPT, ConfigError, GPTConfig
from ctrans.training.monitor import Monitor
from ctrans.training.monitor.log import read_log

ALWAYS = {"updates too large": {"limit": 0.0}}


def trained(steps=12, spoiled=None, by=1000.0, **options):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=32, context=8, depth=3, width=16, heads=2), seed=0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = Monitor(model, every=2, **options)
    states = []
    for step in range(1, steps + 1):
        tokens = torch.randint(32, (2, 9))
        loss = model(tokens[:, :-1], tokens[:, 1:])[1] * (by if step == spoiled else 1.0)
        loss.backward()
        monitor.step(loss, optimiser)
        optimiser.step()
        optimiser.zero_grad()
        states.append({name: weight.clone() for name, weight in model.state_dict().items()})
        if monitor.stopped:
            break
    monitor.close()
    return monitor, states, optimiser


def test_a_step_whose_gradient_spikes_is_made():
    monitor, states, _ = trained(
        spoiled=12, react=["skip"], limits={"gradient spike": {"least": 5}}
    )
    assert [alarm.step for alarm in monitor.alarms if alarm.check == "gradient spike"] == [12]
    assert monitor.reactions.skipped == []
    assert not torch.equal(
        states[11]["token_embedding.weight"], states[10]["token_embedding.weight"]
    )


@pytest.mark.parametrize("by", [math.nan, math.inf])
def test_a_step_whose_gradient_is_not_finite_is_left_out_after_its_report(by, tmp_path):
    monitor, states, _ = trained(spoiled=8, by=by, react=["skip"], out=tmp_path)
    assert monitor.reactions.skipped == [8]
    assert all(torch.equal(states[7][name], states[6][name]) for name in states[6])
    assert not torch.equal(states[8]["token_embedding.weight"], states[7]["token_embedding.weight"])
    assert all(torch.isfinite(value).all() for value in states[-1].values())
    log = read_log(tmp_path)
    assert not math.isfinite(dict(zip(log.steps, log.series("gradient_norm"), strict=True))[8])


@pytest.mark.slow
def test_what_is_not_finite_is_told_again_after_a_step_that_was_left_out():
    """The loss of the step that was left out is remembered, and is no news at later reports."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=32, context=8, depth=3, width=16, heads=2), seed=0)
    monitor, told = Monitor(model, every=5, react=["skip"]), []
    for step in range(1, 46):
        if step == 40:
            model.depth.sublayers[3].field.output_projection.weight.data[0, 0] = math.inf
        tokens = torch.randint(32, (2, 9))
        loss = model(tokens[:, :-1], tokens[:, 1:])[1] * (math.nan if step == 3 else 1.0)
        loss.backward()
        told += [
            (alarm.step, alarm.place) for alarm in monitor.step(loss) if alarm.check == "not finite"
        ]
        model.zero_grad()
    assert [step for step, _ in told] == [5, 40]
    assert told[1][1].startswith("block 1, ffn")


@pytest.mark.slow
def test_the_weights_before_the_step_are_saved(tmp_path):
    monitor, states, _ = trained(react=["save"], limits=ALWAYS, out=tmp_path)
    (path,) = tmp_path.glob("before-step-*.safetensors")
    step = monitor.alarms[0].step
    assert path.name == f"before-step-{step:08d}.safetensors"
    saved = load_file(path)
    assert all(torch.equal(value, states[step - 2][name]) for name, value in saved.items())
    told = []
    trained(react=["save"], limits=ALWAYS, save=told.append)
    assert told[0].check == "updates too large"


def test_a_danger_may_end_the_training():
    monitor, states, _ = trained(react=["stop"], limits=ALWAYS)
    assert monitor.stopped
    assert len(states) == monitor.alarms[0].step < 12


def test_nothing_is_done_unasked(tmp_path):
    monitor, states, optimiser = trained(limits=ALWAYS, out=tmp_path)
    assert monitor.alarms
    assert not monitor.stopped
    assert {path.name for path in tmp_path.iterdir()} == {"monitor.jsonl"}
    assert len(states) == 12
    assert optimiser.param_groups[0]["lr"] == 1e-3


def test_what_cannot_be_asked_is_said():
    with pytest.raises(ConfigError, match="out="):
        trained(react=["save"])
    with pytest.raises(ConfigError, match="list"):
        trained(react="stop")
    with pytest.raises(
        ConfigError, match=r"'lower' was removed, .* placebo: choose skip, save or stop$"
    ):
        trained(react=["lower"])
