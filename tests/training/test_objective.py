"""The objective against the plain model, and its kinetic cost against a sum written out."""

import pytest
import torch
import torch.nn.functional as F

from ctrans.model.gpt import GPT
from ctrans.training.objective import Objective
from ctrans.training.settings import TrainConfig
from solvers import GRADIENTS
from tests.helpers import NAMES, learned, small_config, tokens


def case(placement, weights=torch.float64, **settings):
    config = small_config(placement, depth=2)
    model = learned(GPT(config).to(weights))
    ids = tokens(batch=2, length=7)
    return model, Objective(model, TrainConfig(**settings)), ids[:, :-1], ids[:, 1:]


def euler_cost(model, x, steps):
    """X_T and the mean over tokens of int |v|^2/2 dt by Euler's method, one segment after the
    other.
    """
    cost = torch.zeros(x.shape[:-1], dtype=x.dtype)
    for sublayer in model.depth.sublayers:
        if steps > 1 and sublayer.state_norm is not None:
            x = sublayer.state_norm.retract(x)
        for _ in range(steps):
            v = sublayer(x) if steps == 1 else sublayer.velocity(x)
            cost = cost + model.depth.dt / steps * v.square().sum(-1) / 2
            x = x + model.depth.dt / steps * v
            if steps == 1 and sublayer.state_norm is not None:
                x = sublayer.state_norm(x)
    return x, cost.mean()


@pytest.mark.parametrize("placement", NAMES)
@pytest.mark.parametrize("training", [True, False])
def test_by_default_the_loss_has_the_bits_of_the_models(placement, training):
    model, objective, ids, targets = case(placement, torch.float32)
    losses = objective.train(training)(ids, targets)
    expected = model(ids, targets)[1]
    assert torch.equal(losses.total, expected)
    assert torch.equal(losses.cross_entropy, expected.detach())


@pytest.mark.parametrize("placement", NAMES)
@pytest.mark.parametrize("steps", [1, 3])
def test_the_kinetic_cost_is_the_integral_of_half_the_squared_speed(placement, steps):
    model, objective, ids, targets = case(placement, kinetic=0.7, steps=steps)
    x, cost = euler_cost(model, model.embed(ids), steps)
    cross_entropy = F.cross_entropy(model.head(x).flatten(0, 1), targets.flatten())
    losses = objective(ids, targets)
    torch.testing.assert_close(losses.cross_entropy, cross_entropy.detach())
    torch.testing.assert_close(losses.total, cross_entropy + 0.7 * cost)
    wanted = torch.autograd.grad(cross_entropy + 0.7 * cost, list(model.parameters()))
    for have, want in zip(
        torch.autograd.grad(losses.total, list(model.parameters())), wanted, strict=True
    ):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("kinetic", [0.0, 0.5])
def test_every_kind_of_gradient_comes_near_backprop(gradient, kinetic):
    model, _, ids, targets = case("peri")
    gradients = []
    for kind in ("backprop", gradient):
        config = TrainConfig(method="rk4", steps=2, gradient=kind, kinetic=kinetic)
        total = Objective(model, config)(ids, targets).total
        gradients.append(
            torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()))])
        )
    assert (gradients[1] - gradients[0]).norm() < 1e-4 * gradients[0].norm()


def test_an_adaptive_method_pays_the_exact_integral():
    model, objective, ids, targets = case(
        "peri", kinetic=1.0, method="tsit5", rtol=1e-9, atol=1e-10, dtype="float64"
    )
    fine = Objective(model, TrainConfig(kinetic=1.0, method="rk4", steps=32))
    torch.testing.assert_close(
        objective(ids, targets).total, fine(ids, targets).total, rtol=1e-8, atol=0
    )


def test_the_hidden_states_ends_are_measured_and_the_largest_entry_is_over_all_of_depth():
    model, objective, ids, targets = case("pre")
    losses = objective.eval()(ids, targets)
    states = model.trajectory(ids).states
    torch.testing.assert_close(
        losses.last_square / losses.first_square, (states[-1].norm() / states[0].norm()) ** 2
    )
    assert losses.largest == max(state.abs().max() for state in states)


def test_the_kinetic_coordinate_is_not_counted_as_a_hidden_state():
    model, objective, ids, targets = case("pre", kinetic=100.0)
    assert objective.eval()(ids, targets).largest == max(
        state.abs().max() for state in model.trajectory(ids).states
    )


def test_bfloat16_autocast_stays_near_float32():
    _, objective, ids, targets = case("peri", torch.float32, kinetic=0.1)
    exact = objective(ids, targets).total
    with torch.autocast("cpu", torch.bfloat16):
        rough = objective(ids, targets).total
    torch.testing.assert_close(rough, exact, rtol=0.02, atol=0)
    assert not torch.equal(rough, exact)
