"""Settings, the schedules that follow from them, and optimisers."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ctrans import GPT, GPTConfig
from ctrans.training.optimiser import OPTIMISERS
from ctrans.training.schedule import learning_rate, temperature
from ctrans.training.settings import TrainConfig, from_saved
from solvers import ConfigError


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch": 0}, "batch = 0"),
        ({"iterations": True}, "iterations = True"),
        ({"warmup": -1}, "warmup = -1"),
        ({"seed": 2**63}, "seed = 9223372036854775808"),
        ({"learning_rate": 0.0}, "learning_rate = 0.0"),
        ({"learning_rate": math.nan}, "learning_rate = nan"),
        ({"min_learning_rate": 1.0}, "min_learning_rate = 1.0"),
        ({"weight_decay": -0.1}, "weight_decay = -0.1"),
        ({"beta1": 1.0}, "beta1 = 1.0"),
        ({"clip": math.inf}, "clip = inf"),
        ({"kinetic": math.nan}, "kinetic = nan"),
        ({"optimiser": "adam"}, "did you mean 'adamw'"),
        ({"gradient": "backpropagation"}, "did you mean 'backprop'"),
        ({"dtype": "bf16"}, "did you mean 'bfloat16'"),
        ({"method": "rk5"}, "did you mean 'rk4'"),
        ({"method": "tsit5", "steps": 2}, "takes no steps"),
        ({"rtol": 1e-3}, "takes no rtol"),
        ({"method": "tsit5", "dtype": "bfloat16"}, "below what bfloat16 resolves"),
        ({"method": "tsit5", "dtype": "bfloat16", "rtol": 7e-3, "atol": 0.1}, "rtol = 0.007"),
        ({"temperature_start": 4.0}, "needs both, or neither"),
        ({"temperature_steps": 4}, "needs both, or neither"),
        ({"temperature_start": -1.0, "temperature_steps": 4}, "temperature = -1.0"),
        ({"schedule": "nanoGPT"}, "did you mean 'nanogpt'"),
        ({"iterations": 10**40}, "iterations = a number of 41 digits: give at most 1,000,000,000"),
        ({"warmup": 10**400}, "warmup = "),
        (
            {"temperature_start": 4.0, "temperature_steps": 4, "compile": True},
            "leave out one of them",
        ),
        ({"margin": 0.0}, "margin = 0.0"),
        ({"compile": True, "gradient": "adjoint"}, "choose backprop or checkpoint"),
        ({"compile": True, "method": "esdirk4"}, "first derivatives only: choose an explicit"),
    ],
)
def test_a_setting_that_cannot_be_is_named(settings, words):
    with pytest.raises(ConfigError, match=words):
        TrainConfig(**settings)


def test_an_unknown_saved_setting_gets_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'learning_rate'"):
        from_saved({"learning_rat": 1e-3})


def test_learning_rate_warms_up_linearly_and_ends_on_a_cosine():
    config = TrainConfig(iterations=110, warmup=10, learning_rate=1.0, min_learning_rate=0.2)
    assert [learning_rate(config, step) for step in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert learning_rate(config, 10) == 1.0
    assert learning_rate(config, 60) == pytest.approx(0.6)
    assert learning_rate(config, 35) == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2)
    assert learning_rate(config, 110) == 0.2


def nanogpt_rate(it, lr, warmup, last, low, later):
    """nanoGPT's formula, of its newer and its first versions."""
    if it < warmup:
        return lr * (it + 1) / (warmup + 1) if later else lr * it / warmup
    if it > last:
        return low
    return low + 0.5 * (1.0 + math.cos(math.pi * (it - warmup) / (last - warmup))) * (lr - low)


@pytest.mark.parametrize(("name", "later"), [("nanogpt", True), ("nanogpt-0", False)])
def test_nanogpts_schedules_are_theirs(name, later):
    config = TrainConfig(
        iterations=60, warmup=10, learning_rate=1e-3, min_learning_rate=1e-4, schedule=name
    )
    for it in range(70):
        assert learning_rate(config, it) == pytest.approx(
            nanogpt_rate(it, 1e-3, 10, 60, 1e-4, later), rel=1e-15
        )
    ours = TrainConfig(iterations=60, warmup=10, learning_rate=1e-3)
    assert learning_rate(ours, 0) == pytest.approx(1e-4)
    assert learning_rate(config, 0) == pytest.approx(9.09e-5 if later else 0.0, rel=1e-3)


def test_learning_rate_without_warmup_starts_at_its_peak():
    assert learning_rate(TrainConfig(iterations=5, warmup=0, learning_rate=0.5), 0) == 0.5


@given(st.floats(0.1, 20), st.floats(0.1, 20), st.integers(2, 50))
def test_temperature_goes_from_its_start_to_the_models_by_equal_factors(start, final, steps):
    config = TrainConfig(temperature_start=start, temperature_steps=steps)
    path = [temperature(config, step, final) for step in range(steps + 1)]
    assert path[0] == start
    assert path[-1] == final
    factors = [after / before for before, after in pairwise(path)]
    assert factors == pytest.approx([(final / start) ** (1 / steps)] * steps)


def make(name, parameters, weight_decay, **settings):
    config = TrainConfig(
        optimiser=name,
        learning_rate=0.1,
        beta1=0.9,
        beta2=0.95,
        weight_decay=weight_decay,
        **settings,
    )
    entry = OPTIMISERS[name]
    needs_model = entry.orthogonal or entry.layerwise
    model = GPT(GPTConfig(width=8, depth=1)) if needs_model else None
    return config.make_optimiser(parameters, model=model)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_only_matrices_decay(name):
    model = torch.nn.Linear(3, 3).double()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimiser = make(name, model.parameters(), 0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    torch.testing.assert_close(model.weight.detach(), (1 - 0.1 * 0.5) * before["weight"])
    assert torch.equal(model.bias, before["bias"])


@pytest.mark.parametrize("name", OPTIMISERS)
def test_gains_offsets_and_biases_decay_where_that_is_asked_for(name):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3)).double()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimiser = make(name, model.parameters(), 0.5, decay_gains=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    for parameter, was in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), (1 - 0.1 * 0.5) * was)


def test_adamw_takes_the_papers_first_two_steps():
    parameter = torch.nn.Parameter(torch.tensor([[2.0, -1.0]], dtype=torch.float64))
    optimiser = make("adamw", [parameter], 0.01)
    x = parameter.detach().clone()
    m = v = torch.zeros_like(x)
    for step, gradient in enumerate([torch.tensor([[0.3, -4.0]]), torch.tensor([[1.0, 0.5]])], 1):
        parameter.grad = gradient.double()
        optimiser.step()
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        update = m / (1 - 0.9**step) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
        x = (1 - 0.1 * 0.01) * x - 0.1 * update
    torch.testing.assert_close(parameter.detach(), x)


def test_frozen_parameters_are_left_out():
    frozen, free = (
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.nn.Parameter(torch.ones(2)),
    )
    (group,) = make("sgd", [frozen, free], 0.0).param_groups
    assert group["params"] == [free]
