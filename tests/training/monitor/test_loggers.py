"""What others' loggers get: TensorBoard's files read back, and what a trainer hands to W&B."""

import math
import sys
import types

import pytest
import torch

from ctrans import GPT, GPTConfig
from ctrans.training.monitor import Monitor
from tests.training.monitor.test_callbacks import trained


def test_tensorboard_files_have_the_reports_and_a_run_that_goes_on_replaces_what_came_later(
    tmp_path,
):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = GPT(GPTConfig(vocab_size=32, context=8, depth=1, width=16, heads=2))

    def watched(start, steps):
        monitor = Monitor(model, every=2, out=tmp_path, tensorboard=True, start=start)
        for _ in range(steps):
            rows = torch.randint(32, (2, 9))
            loss = model(rows[:, :-1], rows[:, 1:])[1]
            loss.backward()
            monitor.step(loss)
        monitor.close()
        return monitor

    watched(0, 6)
    monitor = watched(4, 4)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    tags = found.Tags()["scalars"]
    assert {
        "monitor/loss",
        "monitor/rms/least",
        "monitor/rms/median",
        "monitor/rms/largest",
        "monitor/logit/largest",
    } <= {*tags}
    assert [event.step for event in found.Scalars("monitor/loss")] == [1, 2, 4, 5, 6, 8]
    last = monitor.past.reports[-1][1]
    assert found.Scalars("monitor/loss")[-1].value == pytest.approx(last["loss"], rel=1e-6)
    largest = max(value for value in last["rms"] if math.isfinite(value))
    assert found.Scalars("monitor/rms/largest")[-1].value == pytest.approx(largest, rel=1e-6)


@pytest.mark.slow
def test_a_trainers_wandb_run_gets_the_reports(tmp_path, monkeypatch):
    """The library's own W&B callback, over a module that has the few names which it asks for and
    keeps what it is given.
    """
    pytest.importorskip("accelerate")
    integrations = pytest.importorskip("transformers.integrations.integration_utils")
    from ctrans.training.monitor import TrainerCallback

    kept = []
    fake = types.ModuleType("wandb")
    fake.run = types.SimpleNamespace(
        summary={}, url="", id="a", name="a", project="a", finish=lambda: None
    )
    fake.config = types.SimpleNamespace(update=lambda *_, **__: None)
    fake.init = lambda **_: fake.run
    fake.log = lambda row, **_: kept.append(row)
    fake.define_metric = lambda *_, **__: None
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(integrations, "is_wandb_available", lambda: True)
    monkeypatch.setenv("WANDB_LOG_MODEL", "false")
    monkeypatch.setenv("WANDB_WATCH", "false")
    logger = integrations.WandbCallback()
    monkeypatch.setattr(logger, "setup", lambda *_, **__: setattr(logger, "_initialized", True))
    logger.logs_to = lambda trainer: None
    trained(tmp_path, [logger, TrainerCallback(every=4)])
    reports = [row for row in kept if any("monitor/" in name for name in row)]
    assert len(reports) == 4
    assert any(name.endswith("monitor/rms/largest") for name in reports[-1])
    assert any("loss" in row or "train/loss" in row for row in kept)
