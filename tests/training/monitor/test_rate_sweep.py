"""The sweep of learning rates: it finds a rate that is known, and leaves all as it was."""

import copy
import json
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from ctrans import GPT, ConfigError, GPTConfig, largest_rate
from ctrans.study.outcomes import Floor, rate_by_floor
from ctrans.study.rate_sweep import loss_of
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
    found = largest_rate(
        model,
        [torch.ones(())],
        torch.optim.SGD(model.parameters(), lr=1.0),
        rates=rates,
        steps=40,
        clip=None,
    )
    assert 1.1 / CURVATURE <= found.rate < 1e2 / CURVATURE
    assert not found.at_least
    losses = [rung.loss for rung in found.rungs]
    assert losses[0] > 1 > losses[1]
    assert losses[-1] == math.inf
    assert found.first == pytest.approx(2 * CURVATURE)
    assert found.steps == 40 * (len(rates) + 1)


def test_all_is_as_it_was():
    model = GPT(GPTConfig(vocab_size=8, context=4, depth=2, width=8, heads=2), seed=0).eval()
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.dim() > 1], "lr": 2e-3}], lr=1e-3
    )
    tokens = torch.randint(0, 8, (2, 4))
    model(tokens, tokens)[1].backward()
    optimizer.step()
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    gradients = [weight.grad for weight in model.parameters()]
    numbers = torch.get_rng_state()
    largest_rate(model, iter([(tokens, tokens)]), optimizer, steps=3)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(
        weight.grad is gradient
        for weight, gradient in zip(model.parameters(), gradients, strict=True)
    )
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
        largest_rate(
            model,
            [torch.ones(())],
            torch.optim.SGD(model.parameters(), lr=1.0),
            loss=fails,
            steps=9,
        )
    assert torch.equal(model.w, torch.ones(4))
    assert model.w.grad is None


@pytest.mark.parametrize("batch", [(torch.ones(()),), {"scale": torch.ones(())}, torch.ones(())])
def test_batches_of_other_loops(batch):
    assert loss_of(Quadratic(), batch).item() == 2 * CURVATURE


class Running(Quadratic):
    """Replaces one buffer, has one that cannot be written, and draws random numbers of others."""

    def __init__(self):
        super().__init__()
        self.other = nn.Parameter(torch.ones(2))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("mask", torch.ones(1).expand(4))

    def forward(self, scale):
        self.mean = 0.9 * self.mean + self.w.detach().mean()
        return (
            super().forward(scale * self.mask.mean())
            * (1 + 0.01 * random.random() + 0.01 * np.random.rand())
            + self.other.sum()
        )


class Loader:
    """Draws a random number whenever it is gone through, and never ends."""

    def __iter__(self):
        while True:
            yield {"scale": torch.ones(()), "seed": torch.rand(())}


def test_what_steps_replace_is_the_same_object_as_before():
    model = Running()
    optimizer = torch.optim.SGD([model.w], lr=torch.tensor(0.5), momentum=0.9)
    model(torch.ones(())).backward()
    optimizer.step()
    group, moments = optimizer.param_groups[0], optimizer.state[model.w]["momentum_buffer"]
    held, gradient = {**group}, model.other.grad
    objects = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: value.detach().clone() for name, value in objects.items()}
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    batch = {"scale": torch.ones(()), "rest": torch.ones(())}

    def loss(model, batch):
        return model(batch.pop("scale").mul_(2))

    for batches in ([batch], Loader()):
        largest_rate(model, batches, optimizer, loss=loss, rates=[1e-3, 1e3], steps=3)
    assert all(
        getattr(model, name) is value and torch.equal(value, values[name])
        for name, value in objects.items()
    )
    assert model.other.grad is gradient
    assert torch.equal(gradient, torch.ones(2))
    assert optimizer.param_groups[0] is group
    assert all(group[name] is value for name, value in held.items())
    assert optimizer.state[model.w]["momentum_buffer"] is moments
    assert batch == {"scale": torch.ones(()), "rest": torch.ones(())}
    assert torch.equal(drawn[0], torch.get_rng_state())
    assert drawn[1] == random.getstate()
    assert np.array_equal(drawn[2], np.random.get_state()[1])


def test_state_of_another_dtype_stays_of_it():
    model = nn.Linear(2, 1).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.weight]["mine"] = torch.full((1, 2), 0.1234567)
    batch = torch.ones(3, 2, dtype=torch.bfloat16)
    largest_rate(
        model,
        [batch],
        optimizer,
        loss=lambda model, batch: model(batch).square().mean(),
        rates=[1e-3],
        steps=2,
    )
    assert torch.equal(optimizer.state[model.weight]["mine"], torch.full((1, 2), 0.1234567))


class Around(torch.optim.SGD):
    """An optimiser around another one, which has the state."""

    def __init__(self, weights):
        super().__init__(weights, lr=0.1)
        self.inner = torch.optim.Adam(self.param_groups)
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups


def test_an_optimiser_around_another_is_restored_by_its_own_way():
    model = Quadratic()
    optimizer = Around(model.parameters())
    assert largest_rate(model, [torch.ones(())], optimizer, rates=[1e-3, 1e-1], steps=3).rungs
    assert not optimizer.inner.state
    assert optimizer.param_groups is optimizer.inner.param_groups
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_it_learns_where_gradients_are_off_and_where_they_are_sparse():
    model = Quadratic()
    with torch.no_grad():
        assert largest_rate(
            model,
            [torch.ones(())],
            torch.optim.SGD(model.parameters(), lr=1.0),
            rates=[1e-2],
            steps=3,
        ).rungs
    words = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(words.parameters(), lr=1.0)

    def loss(model, batch):
        return model(batch).square().mean()

    assert largest_rate(
        words, [torch.arange(4)], optimizer, loss=loss, rates=[1e-2], steps=3, clip=None
    ).rungs
    with pytest.raises(ConfigError, match="sparse"):
        largest_rate(words, [torch.arange(4)], optimizer, loss=loss, steps=9)


def test_rates_of_groups_before_a_warm_up_and_of_a_group_without_rate():
    model = Running()
    groups = [{"params": [model.w], "lr": 0.0}, {"params": [model.other], "lr": 0.0}]
    optimizer = torch.optim.SGD(groups)
    seen = []
    for group, rate in zip(optimizer.param_groups, (1.0, 0.25), strict=True):
        group["initial_lr"] = rate
    optimizer.register_step_post_hook(
        lambda *_: seen.append([group["lr"] for group in optimizer.param_groups])
    )
    largest_rate(model, [torch.ones(())], optimizer, rates=[1e-2], steps=3)
    assert all(second == first / 4 for first, second in seen)
    optimizer.param_groups[1]["lr"] = 0.1
    with pytest.raises(ConfigError, match="first group"):
        largest_rate(model, [torch.ones(())], optimizer, steps=9)


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: 1.0,
        lambda model, batch: None,
        lambda model, batch: model.w,
        lambda model, batch: model.w[0].detach(),
    ],
)
def test_losses_that_are_none(loss):
    model = Quadratic()
    with pytest.raises(ConfigError, match="loss returned"):
        largest_rate(
            model, [torch.ones(())], torch.optim.SGD(model.parameters(), lr=1.0), loss=loss, steps=9
        )


def test_wrong_calls():
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ConfigError, match="batches"):
        largest_rate(model, [], optimizer, steps=9)
    with pytest.raises(ConfigError, match="rates"):
        largest_rate(model, [torch.ones(())], optimizer, rates=[-1.0], steps=9)
    with pytest.raises(ConfigError, match=r"rates = 1e\+300"):
        largest_rate(model, [torch.ones(())], optimizer, rates=[1e300], steps=9)
    for clip in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="clip"):
            largest_rate(model, [torch.ones(())], optimizer, clip=clip, steps=9)
    with pytest.raises(ConfigError, match=r"\[batch\]"):
        largest_rate(model, {"scale": torch.ones(())}, optimizer, steps=9)
    with pytest.raises(ConfigError, match="closure"):
        largest_rate(model, [torch.ones(())], torch.optim.LBFGS(model.parameters()), steps=9)
    with pytest.raises(ConfigError, match="no weight"):
        largest_rate(
            model, [torch.ones(())], torch.optim.SGD(Quadratic().parameters(), lr=1.0), steps=9
        )
    for made in (nn.LazyLinear(2), nn.Linear(2, 2, device="meta")):
        with pytest.raises(ConfigError, match="no values"):
            largest_rate(made, [torch.ones(())], optimizer, steps=9)
    with pytest.raises(ConfigError, match="steps"):
        largest_rate(model, [torch.ones(())], optimizer, steps=0)
    with pytest.raises(ConfigError, match="returns a number"):
        largest_rate(
            nn.Linear(2, 2),
            [torch.ones(3, 2)],
            torch.optim.SGD(model.parameters(), lr=1.0),
            steps=9,
        )


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
        model,
        [torch.ones(())],
        torch.optim.SGD(model.parameters(), lr=1.0),
        rates=[1e3, 1e4],
        steps=9,
        clip=None,
    )
    assert found.rate is None
    assert all(rung.loss > found.first for rung in found.rungs)
    assert math.isfinite(found.first)


def test_command(tmp_path):
    small = (
        "--depth",
        1,
        "--width",
        8,
        "--heads",
        2,
        "--batch",
        2,
        "--iterations",
        100,
        "--share",
        0.25,
    )
    result = run(
        "rate", "--task", "recall", *small, "--rates", 1e-3, "--rates", 1e-2, "--out", tmp_path
    )
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "rate.json").read_text())
    assert [rung["rate"] for rung in found["rungs"]] == [1e-3, 1e-2]
    assert found["steps"] in (50, 75)
    assert found["rate"] is None or 1e-3 <= found["rate"] <= 1e-2
    assert found["cost"] == found["steps"] / 100
    assert (tmp_path / "rate.png").stat().st_size > 5000
    assert run("rate", "--rates", 0).exit_code == 2
