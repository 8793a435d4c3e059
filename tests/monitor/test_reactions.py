"""Reactions: none unasked; each does what it says and leaves the rest of the training alone."""

import pytest
import torch
from safetensors.torch import load_file

from ctrans import GPT, ConfigError, GPTConfig
from ctrans.monitor import Monitor

ALWAYS = {"updates too large": {"limit": 0.0}}


def trained(steps=12, spoiled=None, optimiser_of=None, schedule=None, **options):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=32, context=8, depth=3, width=16, heads=2), seed=0)
    optimiser = (optimiser_of or (lambda weights: torch.optim.AdamW(weights, lr=1e-3)))(model.parameters())
    rates = None if schedule is None else schedule(optimiser)
    monitor = Monitor(model, every=2, **options)
    states = []
    for step in range(1, steps + 1):
        tokens = torch.randint(32, (2, 9))
        loss = model(tokens[:, :-1], tokens[:, 1:])[1] * (1000.0 if step == spoiled else 1.0)
        loss.backward()
        monitor.step(loss, optimiser)
        optimiser.step()
        optimiser.zero_grad()
        if rates is not None:
            rates.step()
        states.append({name: weight.clone() for name, weight in model.state_dict().items()})
        if monitor.stopped:
            break
    monitor.close()
    return monitor, states, optimiser


def test_a_step_whose_gradient_spikes_is_left_out():
    monitor, states, _ = trained(spoiled=11, react=["skip"])
    assert monitor.reactions.skipped == [11]
    assert all(torch.equal(states[10][name], states[9][name]) for name in states[9])
    assert not all(torch.equal(states[11][name], states[10][name]) for name in states[9])


def test_a_step_whose_gradient_is_not_finite_is_left_out():
    monitor, states, _ = trained(spoiled=None, react=["skip"])
    assert monitor.reactions.skipped == []
    assert len(states) == 12


def test_the_weights_before_the_step_are_saved(tmp_path):
    monitor, states, _ = trained(react=["save"], limits=ALWAYS, out=tmp_path)
    (path,) = tmp_path.glob("before-step-*.safetensors")
    step = monitor.alarms[0].step
    assert path.name == f"before-step-{step:08d}.safetensors"
    saved = load_file(path)
    assert all(torch.equal(value, states[step - 2][name]) for name, value in saved.items())
    told = []
    trained(react=["save"], limits=ALWAYS, save=told.append)
    assert told[0].rule == "updates too large"


@pytest.mark.parametrize("schedule", [None, lambda optimiser: torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 12)])
def test_the_learning_rate_is_halved_inside_the_step_and_schedules_go_on(schedule):
    """Gradient descent's step is proportional to the rate: from the alarm on each is half of what it would be."""

    def descent(weights):
        return torch.optim.SGD(weights, lr=1e-3)

    plain, lowered = (trained(react=react, limits=ALWAYS, optimiser_of=descent, schedule=schedule) for react in ([], ["lower"]))
    step = lowered[0].alarms[0].step
    assert lowered[0].reactions.factor == 0.5
    assert plain[2].param_groups[0]["lr"] == lowered[2].param_groups[0]["lr"]  # what schedules see
    changes = [
        states[step - 1]["token_embedding.weight"] - states[step - 2]["token_embedding.weight"]
        for _, states, _ in (plain, lowered)
    ]
    assert torch.allclose(changes[1], 0.5 * changes[0], rtol=1e-3, atol=1e-8)


def test_a_danger_may_end_the_training():
    monitor, states, _ = trained(react=["stop"], limits=ALWAYS)
    assert monitor.stopped
    assert len(states) == monitor.alarms[0].step < 12


def test_nothing_is_done_unasked(tmp_path):
    monitor, states, optimiser = trained(limits=ALWAYS, out=tmp_path)
    assert monitor.alarms
    assert not monitor.stopped
    assert monitor.reactions.factor == 1.0
    assert {path.name for path in tmp_path.iterdir()} == {"monitor.jsonl"}
    assert len(states) == 12
    assert optimiser.param_groups[0]["lr"] == 1e-3


def test_what_cannot_be_asked_is_said():
    with pytest.raises(ConfigError, match="out="):
        trained(react=["save"])
    with pytest.raises(ConfigError, match="list"):
        trained(react="stop")
