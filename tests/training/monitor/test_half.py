"""float16 with a GradScaler: the training's bits are as without, and gradients are told as if the
loss were not scaled.
"""

import math

import pytest
import torch

from ctrans import ConfigError
from ctrans.training.monitor import Monitor
from tests.training.monitor.test_bits import gpt

STEPS = 24


def train(monitored, *, late=False):
    """The weights, the monitor, and the gradient's norm by sublayer of every step once the scaler
    has unscaled it.

    With `late` the monitor is told after that.
    """
    torch.manual_seed(0)
    model = gpt()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=8)
    monitor = Monitor(model, every=3, scale=scaler.get_scale, unscaled=late) if monitored else None
    generator, norms = torch.Generator().manual_seed(0), {}
    for step in range(1, STEPS + 1):
        rows = torch.randint(32, (4, 9), generator=generator)
        with torch.autocast("cpu", torch.float16):
            loss = model(rows[:, :-1], rows[:, 1:])[1]
        scaler.scale(loss).backward()
        if monitor is not None and not late:
            monitor.step(loss, optimiser)
        scaler.unscale_(optimiser)
        if monitor is not None and late:
            monitor.step(loss, optimiser)
        norms[step] = [
            math.hypot(*(float(p.grad.norm()) for p in part.parameters()))
            for part in model.depth.sublayers
        ]
        scaler.step(optimiser)
        scaler.update()
        optimiser.zero_grad()
    return model.state_dict(), monitor, norms


@pytest.mark.cases(1)
@pytest.mark.parametrize("late", [False, True])
def test_a_scaled_float16_training_is_as_without_and_its_gradients_are_told_unscaled(late):
    without, _, _ = train(False)
    weights, monitor, norms = train(True, late=late)
    assert all(torch.equal(weights[name], without[name]) for name in without)
    finite = 0
    for step, figures in monitor.past.reports:
        if math.isfinite(figures["gradient_norm"]):
            finite += 1
            assert figures["gradient"] == pytest.approx(norms[step], rel=1e-5)
            assert max(figures["costate"][:-1]) < 100  # and not 2^14 times as much
    assert finite >= len(monitor.past.reports) // 2
    assert math.isnan(
        monitor.past.reports[0][1]["gradient_norm"]
    )  # it overflows at the first scale, and the scaler makes no step
    assert "not finite" not in [alarm.check for alarm in monitor.alarms]


def test_steps_are_skipped_behind_a_scaler_that_has_unscaled():
    model = gpt()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    monitor = Monitor(model, every=50, react=["skip"], scale=scaler.get_scale, unscaled=True)
    kept = []
    for step in range(12):
        rows = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(step))
        loss = model(rows[:, :-1], rows[:, 1:])[1] * (math.nan if step == 10 else 1.0)
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
