"""The edge of stability against the optimisers of torch themselves, on quadratic losses."""

import math

import pytest
import torch

from ctrans.training.monitor.edge_of_stability import over_edge, stability_of, trained_by
from ctrans.training.monitor.probes import Held, probe
from ctrans.training.monitor.sites import sites_of
from tests.training.monitor.test_probes import batch, dense, small

RATE = 0.1


def grown(make, curvatures, steps=400):
    """log10 by which the weights of sum c w^2/2 grew in training."""
    weights = [torch.nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in curvatures]
    optimiser = make(weights)
    for _ in range(steps):
        for weight, curvature in zip(weights, curvatures, strict=True):
            weight.grad = curvature * weight.detach()
        optimiser.step()
    return math.log10(max(float(weight.detach().abs()) for weight in weights) + 1e-300)


GRADIENT_DESCENTS = {
    "plain": {},
    "heavy ball": {"momentum": 0.9},
    "dampened": {"momentum": 0.9, "dampening": 0.9},
    "Nesterov": {"momentum": 0.9, "nesterov": True},
    "weak Nesterov": {"momentum": 0.3, "nesterov": True},
    "dampening without momentum": {"dampening": 0.5},
}


@pytest.mark.parametrize("options", GRADIENT_DESCENTS.values(), ids=GRADIENT_DESCENTS)
def test_gradient_descent_is_stable_below_its_edge_and_not_above(options):
    def make(weights):
        return torch.optim.SGD(weights, lr=RATE, **options)

    (weight,) = weights = [torch.nn.Parameter(torch.ones(1))]
    edge = stability_of(weights, make([weight])).edge
    assert grown(make, [0.97 * edge]) < -1
    assert grown(make, [1.03 * edge]) > 3


def test_unlike_rates_scale_the_curvature():
    def make(weights):
        first, second = weights
        groups = [{"params": [first], "lr": RATE}, {"params": [second], "lr": RATE / 100}]
        return torch.optim.SGD(groups, momentum=0.9)

    weights = [torch.nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2)]
    found = stability_of(weights, make(weights))
    # the second weight alone limits the training, with a hundredth of the rate
    curvature = found.edge / float(found.scales[1]) ** 2
    assert grown(make, [1.0, 0.97 * curvature]) < -1
    assert grown(make, [1.0, 1.03 * curvature]) > 3


@pytest.mark.cases(1)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adams_ratio_is_that_of_its_linearised_step(amsgrad):
    model, (tokens, targets) = small(placement="pre"), batch()
    weights = list(model.parameters())
    groups = [{"params": weights[:3], "lr": 1e-2}, {"params": weights[3:], "lr": 1e-3}]
    optimiser = torch.optim.Adam(groups, betas=(0.8, 0.9), amsgrad=amsgrad)
    for _ in range(8):
        optimiser.zero_grad()
        model(tokens, targets)[1].backward()
        optimiser.step()
    hessian = dense(model, tokens, targets)
    found = over_edge(model, weights, tokens, targets, optimiser)
    factors = []
    for weight in weights:
        state = optimiser.state[weight]
        group = groups[0] if any(weight is each for each in weights[:3]) else groups[1]
        t = int(state["step"])
        squares = state["max_exp_avg_sq" if amsgrad else "exp_avg_sq"]
        root = (squares / (1 - 0.9**t)).sqrt() + 1e-8
        factors.append((group["lr"] / (root * (1 - 0.8**t))).flatten())
    scale = torch.cat(factors).sqrt()
    # m <- b m + (1 - b) c H w, w <- w - D m has the radius 1 at c = 2 (1 + b)/((1 - b) lambda)
    largest = float(torch.linalg.eigvalsh(scale[:, None] * hessian * scale)[-1])
    ratio = largest * 0.2 / (2 * 1.8)
    assert found["preconditioned_over_edge"] == pytest.approx(ratio, rel=0.03)


def test_frozen_weights_and_those_of_no_group_do_not_count():
    model, (tokens, targets) = small(placement="pre"), batch()
    whole = dense(model, tokens, targets)
    weights = list(model.parameters())
    table = model.token_embedding.weight
    count = table.numel()
    assert weights[0] is table
    rest = float(torch.linalg.eigvalsh(whole[count:, count:])[-1])
    trained = trained_by(weights, torch.optim.SGD(weights[1:], lr=RATE))
    assert len(trained) == len(weights) - 1
    table.requires_grad_(False)
    assert len(trained_by(weights, None)) == len(weights) - 1
    found = probe(
        sites_of(model), Held(tokens, targets), torch.optim.SGD(model.parameters(), lr=RATE)
    )
    assert found["sharpness"] == pytest.approx(rest, rel=0.03)
    assert not table.requires_grad


class Wrapped(torch.optim.Optimizer):
    """An optimiser around another, as those of Accelerate and DeepSpeed."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state


def test_the_edge_of_a_wrapped_optimiser_is_that_of_the_one_inside():
    weights = [torch.nn.Parameter(torch.ones(1))]
    inner = torch.optim.SGD(weights, lr=RATE, momentum=0.9, nesterov=True)
    assert stability_of(weights, Wrapped(inner)).edge == stability_of(weights, inner).edge


OTHERS = {
    "NAdam": lambda weights: torch.optim.NAdam(weights, lr=RATE),
    "RAdam": lambda weights: torch.optim.RAdam(weights, lr=RATE),
    "RMSprop": lambda weights: torch.optim.RMSprop(weights, lr=RATE),
    "Adagrad": lambda weights: torch.optim.Adagrad(weights, lr=RATE),
    "Adafactor": lambda weights: torch.optim.Adafactor(weights, lr=RATE),
    "ascent": lambda weights: torch.optim.SGD(weights, lr=RATE, maximize=True),
    "unlike momenta": lambda weights: torch.optim.SGD(
        [
            {"params": weights[:1], "momentum": 0.9},
            {"params": weights[1:], "momentum": 0.5},
        ],
        lr=RATE,
    ),
    "Adam before its first step": lambda weights: torch.optim.Adam(weights, lr=RATE),
    "a rate of 0": lambda weights: torch.optim.SGD(weights, lr=0.0),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_of_another_optimiser_no_edge_is_said(make):
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    assert stability_of(weights, make(weights)) is None


@pytest.mark.slow
def test_a_model_without_weights_that_train_has_no_sharpness():
    model, (tokens, targets) = small(), batch()
    model.requires_grad_(False)
    found = probe(sites_of(model), Held(tokens, targets), None)
    assert "sharpness" not in found
