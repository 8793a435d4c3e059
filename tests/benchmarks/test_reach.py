"""The study of largest stable learning rates: its own loop for remedies is the loop of `ctrans
train`.
"""

import math

import pytest
import torch

from benchmarks.reach import remedies
from benchmarks.reach.__main__ import train as train_planned
from benchmarks.reach.cases import BASE, SETTINGS
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.study.description import PlannedRun
from ctrans.training.settings import TrainConfig
from ctrans.training.tasks import TASKS

SHORT = {**SETTINGS, "iterations": 6, "warmup": 2, "eval_every": 6, "eval_windows": 16}


def config(**fields):
    return GPTConfig(**TASKS["recall"].architecture, **{**BASE, **fields})


def test_plain_training_is_that_of_the_study(monkeypatch):
    monkeypatch.setattr(remedies, "SETTINGS", SHORT)
    run = PlannedRun(config(placement="pre"), TrainConfig(**SHORT, learning_rate=0.03, seed=10), {})
    expected = train_planned(("recall", "plain", run))["loss"]
    assert remedies.train(("recall", f"{remedies.PLAIN} pre dt=1", 0.03, 10))[
        "loss"
    ] == pytest.approx(expected, rel=1e-5)
    assert not math.isclose(
        remedies.train(("recall", f"{remedies.PLAIN} pre dt=1", 0.03, 11))["loss"],
        expected,
        rel_tol=1e-3,
    )


@pytest.mark.parametrize("name", [name for name in remedies.REMEDIES if name != remedies.PLAIN])
def test_each_remedy_changes_the_training(name, monkeypatch):
    monkeypatch.setattr(remedies, "SETTINGS", SHORT)
    plain, other = (
        remedies.train(("recall", f"{each} pre dt=1", 0.1, 10))["loss"]
        for each in (remedies.PLAIN, name)
    )
    assert abs(plain - other) > 1e-5


def test_the_removed_mean_is_causal_in_evaluation():
    model = GPT(config(), seed=0)
    remedies.centre(model)
    tokens = torch.randint(0, 8, (4, 8))
    model(tokens)
    model.eval()
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 8
    torch.testing.assert_close(model(tokens)[0][:, :5], model(changed)[0][:, :5])


def test_weights_are_held():
    model = GPT(config(), seed=0)
    with torch.no_grad():
        for weight in model.depth.parameters():
            weight.fill_(3.0)
    remedies.hold(model)
    for weight in model.depth.parameters():
        most = remedies.HELD if weight.dim() >= 2 else 1.0
        assert float(weight.detach().norm()) == pytest.approx(
            most * weight.shape[0] ** 0.5, rel=1e-5
        )
