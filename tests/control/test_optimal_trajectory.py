"""Sweeps of the maximum principle against Riccati's equation, closed forms and Hopf-Lax."""

import pytest
import torch

from ctrans.control.least_loss import least_loss
from ctrans.control.optimal_trajectory import optimal_trajectory
from ctrans.control.sweeps import sweep
from ctrans.interop.losses import ModelWithLoss
from solvers import ConfigError
from tests.helpers import small_model, tokens

TARGETS = tokens(seed=5)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_linear_quadratic_sweeps_reach_riccatis_controls():
    """x_{k+1} = x + h (A x + B u), J = sum h/2 (x'Qx + u'Ru) + x'Sx/2: the sweeps' controls are
    those of the discrete Riccati recursion, and J never rises.
    """
    steps, h = 12, 0.1
    A, B = numbers(3, 3, seed=1), numbers(3, 2, seed=2)
    Q, R, S = torch.eye(3).double(), 0.5 * torch.eye(2).double(), 2 * torch.eye(3).double()
    x0 = numbers(4, 3, seed=3)
    F, G = torch.eye(3).double() + h * A, h * B

    def cost(u):
        x = x0
        total = torch.zeros(4, dtype=torch.float64)
        for k in range(steps):
            total = total + h / 2 * ((x @ Q * x).sum(-1) + (u[k] @ R * u[k]).sum(-1))
            x = x @ F.mT + u[k] @ G.mT
        return total + (x @ S * x).sum(-1) / 2

    def best(u, slope):
        # slope = h R u + G'P: the maximiser of -<P, B u> - u'Ru/2 is -R^-1 B'P
        return u - slope / h @ torch.linalg.inv(R)

    swept = sweep(cost, best, torch.zeros(steps, 4, 2).double(), sweeps=500, close=1e-14, least=1.0)
    value = S
    gains = []
    for _ in range(steps):
        gain = torch.linalg.solve(h * R + G.mT @ value @ G, G.mT @ value @ F)
        gains.insert(0, gain)
        value = h * Q + F.mT @ value @ F - F.mT @ value @ G @ gain
    x = x0
    for k in range(steps):
        control = -x @ gains[k].mT
        assert torch.allclose(swept.z[k], control, atol=1e-6)
        x = x @ F.mT + control @ G.mT
    assert torch.allclose(swept.values, (x0 @ value * x0).sum(-1) / 2, rtol=1e-10)
    assert all(b <= a + 1e-12 for a, b in zip(swept.history, swept.history[1:], strict=False))
    assert swept.history[-1] < swept.history[0]


@pytest.mark.parametrize("placement", ["peri", "output"])
def test_the_optimal_trajectory_has_the_loss_of_hopf_and_lax(placement):
    model = small_model(placement, depth=1)
    best = optimal_trajectory(model, tokens(), TARGETS)
    value = least_loss(model, tokens(), TARGETS)
    assert value.proven[0] <= best.loss
    assert best.loss == pytest.approx(value.found[0], rel=5e-3)
    assert best.model_loss == pytest.approx(value.found[-1])
    assert best.cost == best.model_cost == 0
    assert all(b <= a + 1e-12 for a, b in zip(best.history, best.history[1:], strict=False))
    # every velocity is in the hull of its norm's image
    for sublayer, v in zip(model.depth.sublayers, best.velocities, strict=True):
        for seed in range(5):
            P = numbers(2, 8, 16, seed=seed)
            assert ((P * v).sum(-1) >= -sublayer.output_norm.support(-P) - 1e-9).all()


def test_a_linear_loss_with_a_kinetic_cost_has_constant_velocities():
    """v = -P/lam and J = <p, X_0> - T |p|^2/(2 lam), without a norm that bounds velocities."""
    model = small_model("pre")
    p = numbers(2, 8, 16, seed=3)
    linear = ModelWithLoss(model, None)
    linear.terminal_loss = lambda x, _: (p * x).sum()
    lam = 0.7
    best = optimal_trajectory(linear, tokens(), None, kinetic=lam)
    duration = model.depth.times[-1]
    expected = (p * model.embed(tokens())).sum() - duration * p.square().sum() / (2 * lam)
    assert best.loss + best.cost == pytest.approx(float(expected), rel=1e-6)
    for v in best.velocities:
        assert torch.allclose(v, -p / lam, atol=1e-3)


def test_without_a_bound_or_a_cost_no_velocity_is_optimal():
    with pytest.raises(ConfigError, match="larger one is always better"):
        optimal_trajectory(small_model("pre"), tokens(), TARGETS)
    with pytest.raises(ConfigError, match="norm around the state"):
        optimal_trajectory(small_model("post"), tokens(), TARGETS, kinetic=0.1)
