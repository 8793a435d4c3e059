"""float16 with a GradScaler: the training's bits are as without, and gradients are told as if the loss were not scaled."""

import pytest
import torch

from ctrans import ConfigError
from ctrans.monitor import Monitor
from tests.monitor.test_bits import gpt


def train(monitored, steps=24, dtype=torch.float16, scaled=True):
    torch.manual_seed(0)
    model = gpt()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=8, enabled=scaled)
    monitor = Monitor(model, every=3, scale=scaler.get_scale) if monitored else None
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(32, (4, 9), generator=generator)
        with torch.autocast("cpu", dtype):
            loss = model(rows[:, :-1], rows[:, 1:])[1]
        scaler.scale(loss).backward()
        if monitor is not None:
            monitor.step(loss, optimiser)
        scaler.step(optimiser)
        scaler.update()
        optimiser.zero_grad()
    return model.state_dict(), monitor


def test_a_scaled_float16_training_is_as_without_and_its_gradients_are_told_unscaled():
    without, _ = train(False)
    weights, monitor = train(True)
    assert all(torch.equal(weights[name], without[name]) for name in without)
    _, plain = train(True, scaled=False, dtype=torch.bfloat16)
    for (step, figures), (_, other) in zip(monitor.past.reports, plain.past.reports, strict=True):
        for name in ("gradient", "costate"):
            ours, theirs = (torch.tensor(each[name]).nanmean() for each in (figures, other))
            assert float(ours) == pytest.approx(float(theirs), rel=0.2), (step, name)  # of two roundings
        assert figures["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=0.2)
        if "surprise" in figures:
            assert 0.02 < figures["surprise"][0] < 20
    assert monitor.alarms == []


def test_steps_are_skipped_behind_a_scaler_that_has_unscaled():
    model = gpt()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    monitor = Monitor(model, every=50, react=["skip"])
    kept = []
    for step in range(12):
        rows = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(step))
        loss = model(rows[:, :-1], rows[:, 1:])[1] * (1000.0 if step == 10 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimiser)
        monitor.step(loss, optimiser)
        scaler.step(optimiser)
        scaler.update()
        optimiser.zero_grad()
        kept.append({name: weight.clone() for name, weight in model.state_dict().items()})
    assert monitor.reactions.skipped == [11]
    assert all(torch.equal(kept[10][name], kept[9][name]) for name in kept[9])
    with pytest.raises(ConfigError, match="unscale_"):
        Monitor(model, react=["skip"], scale=scaler.get_scale)
