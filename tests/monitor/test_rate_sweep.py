"""The sweep of learning rates: it finds a rate that is known, and leaves all as it was."""

import copy
import json
import math

import pytest
import torch
from torch import nn

from ctrans import GPT, ConfigError, GPTConfig, largest_rate
from ctrans.monitor.rate_sweep import loss_of
from ctrans.study.outcomes import Floor, rate_by_floor
from tests.cli.test_commands import run

CURVATURE = 20.0


class Quadratic(nn.Module):
    """L = a/2 |w|^2: gradient descent contracts for rates below 2/a, and fastest at 1/a."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, scale):
        return scale * CURVATURE / 2 * self.w.square().sum()


def test_gradient_descent_of_a_quadratic_gives_way_above_its_bound():
    model = Quadratic()
    rates = [1e-4, 0.9 / CURVATURE, 1.1 / CURVATURE, 6 / CURVATURE, 1e2 / CURVATURE]
    found = largest_rate(model, [torch.ones(())], torch.optim.SGD(model.parameters(), lr=1.0), rates=rates, steps=40, clip=None)
    assert 1.1 / CURVATURE <= found.rate < 1e2 / CURVATURE
    assert not found.at_least
    losses = [rung.loss for rung in found.rungs]
    assert losses[0] > 1 > losses[1]
    assert losses[-1] == math.inf
    assert found.first == pytest.approx(2 * CURVATURE)
    assert found.steps == 40 * (len(rates) + 1)


def test_all_is_as_it_was():
    model = GPT(GPTConfig(vocab_size=8, context=4, depth=2, width=8, heads=2), seed=0).eval()
    optimizer = torch.optim.AdamW([{"params": [p for p in model.parameters() if p.dim() > 1], "lr": 2e-3}], lr=1e-3)
    tokens = torch.randint(0, 8, (2, 4))
    model(tokens, tokens)[1].backward()
    optimizer.step()
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    gradients = [weight.grad for weight in model.parameters()]
    numbers = torch.get_rng_state()
    largest_rate(model, iter([(tokens, tokens)]), optimizer, steps=3)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(weight.grad is gradient for weight, gradient in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(numbers, torch.get_rng_state())
    assert not model.training
    after = optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    assert all(
        torch.equal(torch.as_tensor(after["state"][k][n]), torch.as_tensor(v))
        for k in state["state"]
        for n, v in state["state"][k].items()
    )


def test_a_failing_model_is_as_it_was():
    model = Quadratic()

    def fails(model, batch):
        if model.w.mean() < 1:
            raise KeyError("mine")
        return model(batch)

    with pytest.raises(KeyError, match="mine"):
        largest_rate(model, [torch.ones(())], torch.optim.SGD(model.parameters(), lr=1.0), loss=fails, steps=9)
    assert torch.equal(model.w, torch.ones(4))
    assert model.w.grad is None


@pytest.mark.parametrize("batch", [(torch.ones(()),), {"scale": torch.ones(())}, torch.ones(())])
def test_batches_of_other_loops(batch):
    assert loss_of(Quadratic(), batch).item() == 2 * CURVATURE


def test_wrong_calls():
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ConfigError, match="batches"):
        largest_rate(model, [], optimizer, steps=9)
    with pytest.raises(ConfigError, match="rates"):
        largest_rate(model, [torch.ones(())], optimizer, rates=[-1.0], steps=9)
    with pytest.raises(ConfigError, match="steps"):
        largest_rate(model, [torch.ones(())], optimizer, steps=0)
    with pytest.raises(ConfigError, match="returns a number"):
        largest_rate(nn.Linear(2, 2), [torch.ones(3, 2)], torch.optim.SGD(model.parameters(), lr=1.0), steps=9)


def test_the_rate_is_that_of_the_study_s_rule():
    model = Quadratic()
    found = largest_rate(
        model,
        [torch.ones(())],
        torch.optim.SGD(model.parameters(), lr=1.0),
        rates=[1e-4, 1e-3, 6 / CURVATURE],
        steps=40,
        clip=None,
    )
    assert found.rungs[1].loss < found.rungs[0].loss < found.first < found.rungs[2].loss
    floor = Floor(found.first, found.first)
    assert found.rate == rate_by_floor({rung.rate: [rung.loss] for rung in found.rungs}, floor).rate
    given = largest_rate(
        model,
        [torch.ones(())],
        torch.optim.SGD(model.parameters(), lr=1.0),
        rates=[1e-4, 1e-3, 6 / CURVATURE],
        steps=40,
        clip=None,
        floor=Floor(20.0, 40.0),
    )
    assert given.rate < found.rate


def test_no_rate_if_nothing_learns():
    model = Quadratic()
    found = largest_rate(
        model, [torch.ones(())], torch.optim.SGD(model.parameters(), lr=1.0), rates=[1e3, 1e4], steps=9, clip=None
    )
    assert found.rate is None
    assert all(rung.loss > found.first for rung in found.rungs)
    assert math.isfinite(found.first)


def test_command(tmp_path):
    small = ("--depth", 1, "--width", 8, "--heads", 2, "--batch", 2, "--iterations", 100, "--share", 0.25)
    result = run("rate", "--task", "recall", *small, "--rates", 1e-3, "--rates", 1e-2, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "rate.json").read_text())
    assert [rung["rate"] for rung in found["rungs"]] == [1e-3, 1e-2]
    assert found["steps"] in (50, 75)
    assert found["rate"] is None or 1e-3 <= found["rate"] <= 1e-2
    assert found["cost"] == found["steps"] / 100
    assert (tmp_path / "rate.png").stat().st_size > 5000
    assert run("rate", "--rates", 0).exit_code == 2
