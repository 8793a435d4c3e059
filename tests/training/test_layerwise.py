"""Layerwise maximisation against closed forms: least squares, the gradient step, and Riccati."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from ctrans import GPT, GPTConfig
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.sublayer import Sublayer
from ctrans.study.description import PlannedRun
from ctrans.study.population import batches
from ctrans.training.layerwise import (
    RHO_TIMES_RATE,
    LayerwiseMaximisation,
    augmented_hamiltonian,
)
from ctrans.training.parallel import get_parallel
from ctrans.training.settings import TrainConfig
from solvers import ConfigError

CONFIG = GPTConfig(vocab_size=16, context=8, depth=2, width=16, heads=2, placement="pre")
WIDTH = 3


class Linear(nn.Module):
    """r = W x."""

    def __init__(self, draws):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=draws).double() / 4)

    def forward(self, x):
        return x @ self.weight.mT


def linear_depth(dt=0.5, blocks=2):
    draws = torch.Generator().manual_seed(0)
    return Depth([Sublayer(Linear(draws), "ffn") for _ in range(blocks)], dt, per_block=1)


def optimiser_of(depth, *, rho, inner=5):
    made = LayerwiseMaximisation(
        [{"params": list(depth.parameters())}], RHO_TIMES_RATE / rho, (0.9, 0.99), inner=inner
    )
    made.attach(depth)
    return made


def weights_of(depth):
    return [weight.detach().clone() for weight in depth.parameters()]


def whitened(tokens=7):
    """Tokens with X'X = n I."""
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, WIDTH, generator=draws).double()
    return torch.linalg.qr(x)[0] * tokens**0.5


def test_a_linear_sublayer_gets_the_least_squares_maximiser():
    """W - (n/(rho dt^2)) q'X (X'X)^-1, with q = dt P the gradient by r."""
    depth = linear_depth()
    x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(2)).double()
    before = weights_of(depth)
    optimiser = optimiser_of(depth, rho=2.0, inner=60)
    states = [x]
    for sublayer, dt in zip(depth.sublayers, depth.lengths, strict=True):
        states.append(sublayer.step(states[-1], dt))
    loss = (states[-1] - 1).square().sum(-1).mean()
    costates = torch.autograd.grad(loss, states[1:], retain_graph=True)
    loss.backward()
    optimiser.step()
    for k, (old, new) in enumerate(zip(before, depth.parameters(), strict=True)):
        state = states[k].detach()
        pulled = 0.5 * costates[k].mT @ state
        expected = old - 7 / (2.0 * 0.5**2) * pulled @ torch.linalg.inv(state.mT @ state)
        torch.testing.assert_close(new.detach(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("inner", [1, 20])
def test_on_white_inputs_it_is_a_gradient_step(inner):
    """X'X = n I makes the maximiser W - 1/(rho dt^2) dL/dW: along the gradient, whatever rho; and
    the line search of one iteration already stays on it.
    """
    depth = linear_depth(blocks=1)
    (before,) = weights_of(depth)
    optimiser = optimiser_of(depth, rho=3.0, inner=inner)
    (depth(whitened()) - 1).square().sum(-1).mean().backward()
    (weight,) = depth.parameters()
    gradient = weight.grad.clone()
    optimiser.step()
    change = weight.detach() - before
    cosine = -(change * gradient).sum() / (change.norm() * gradient.norm())
    assert float(cosine) == pytest.approx(1, abs=1e-9)
    if inner > 1:
        torch.testing.assert_close(change, -gradient / (3.0 * 0.5**2), rtol=1e-6, atol=1e-9)


def test_a_large_rho_leaves_the_first_order_change_alone():
    """rho times the change of the loss tends to -(n/dt^2) of the projected costate, squared."""
    changes = []
    for rho in (1e3, 1e5):
        depth = linear_depth(blocks=1)
        x = whitened()
        optimiser = optimiser_of(depth, rho=rho, inner=20)
        loss = (depth(x) - 1).square().sum(-1).mean()
        loss.backward()
        (weight,) = depth.parameters()
        first_order = -weight.grad.square().sum() / 0.5**2
        optimiser.step()
        after = (depth(x) - 1).square().sum(-1).mean()
        changes.append(float((rho * (after - loss) / first_order).detach()))
    assert abs(changes[1] - 1) < 1e-3
    assert abs(changes[1] - 1) < abs(changes[0] - 1)


class Controlled(nn.Module):
    """(A x + B u, x'Q x/2 + u'R u/2) of the state (x, c): a linear field with a quadratic cost."""

    def __init__(self, a, b, q, r):
        super().__init__()
        self.system = (a, b, q, r)
        self.control = nn.Parameter(torch.zeros(b.shape[1], dtype=torch.float64))

    def forward(self, z):
        a, b, q, r = self.system
        x = z[..., :-1]
        u = self.control
        cost = (x * (x @ q)).sum(-1, keepdim=True) / 2 + (u @ r @ u) / 2
        return torch.cat([x @ a.mT + u @ b.mT, cost], dim=-1)


def test_fixed_point_of_a_linear_quadratic_problem_is_riccatis():
    """u_k = -(R + dt B'S B)^-1 B'S (I + dt A) x_k, S_k of the discrete Riccati equation backward."""
    draws = torch.Generator().manual_seed(4)
    dt, steps = 0.2, 6
    a = torch.randn(2, 2, generator=draws).double()
    b = torch.randn(2, 1, generator=draws).double()
    q = torch.eye(2, dtype=torch.float64)
    r = torch.tensor([[0.5]], dtype=torch.float64)
    depth = Depth([Sublayer(Controlled(a, b, q, r), "ffn") for _ in range(steps)], dt, per_block=1)
    start = torch.tensor([[1.0, -1.0, 0.0]], dtype=torch.float64)
    # at rho = 1 it diverges, as the method without a penalty does
    optimiser = optimiser_of(depth, rho=5.0, inner=3)
    for _ in range(60):
        optimiser.zero_grad()
        end = depth(start)
        (end[..., -1] + end[..., :-1].square().sum(-1) / 2).sum().backward()
        optimiser.step()
    a, b, q, r = (matrix.numpy() for matrix in (a, b, q, r))
    move = np.eye(2) + dt * a
    s = np.eye(2)
    gains = []
    for _ in range(steps):
        gain = np.linalg.solve(r + dt * b.T @ s @ b, b.T @ s @ move)
        gains.insert(0, gain)
        s = dt * q + move.T @ s @ move - dt * move.T @ s @ b @ gain
    x = np.array([1.0, -1.0])
    for sublayer, gain in zip(depth.sublayers, gains, strict=True):
        u = -gain @ x
        assert sublayer.field.control.detach().numpy() == pytest.approx(u, abs=1e-5)
        x = move @ x + dt * b @ u


@pytest.mark.parametrize("placement", ["pre", "peri", "post"])
@pytest.mark.parametrize("rho", [1e-3, 1.0, 1e4])
def test_the_augmented_hamiltonian_never_falls(placement, rho):
    model = GPT(dataclasses.replace(CONFIG, placement=placement)).double()
    optimiser = optimiser_of(model.depth, rho=rho, inner=2)
    tokens = torch.randint(16, (2, 8), generator=torch.Generator().manual_seed(0))
    model(tokens, tokens)[1].backward()
    passed = dict(optimiser._passed)
    assert len(passed) == 4
    sublayers = list(model.depth.sublayers)
    with torch.no_grad():
        before = [augmented_hamiltonian(one.velocity, one, rho) for one in passed.values()]
        optimiser.step()
        after = [
            augmented_hamiltonian(sublayers[k].forward(one.x), one, rho)
            for k, one in passed.items()
        ]
    assert all(new >= old for new, old in zip(after, before, strict=True))
    assert any(new > old for new, old in zip(after, before, strict=True))


def test_only_passes_of_a_training_are_recorded():
    model = GPT(CONFIG)
    optimiser = TrainConfig(optimiser="msa").make_optimiser(model.parameters(), model=model)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with torch.no_grad():
        model(tokens)
    model.eval()
    model(tokens)
    assert not optimiser._passed
    model.train()
    model(tokens, tokens)[1].backward()
    passed = dict(optimiser._passed)
    model(tokens + 1, tokens)[1].backward()  # a monitor's
    assert optimiser._passed == passed
    optimiser.zero_grad()  # of a step that was skipped
    assert not optimiser._passed
    model(tokens, tokens)[1].backward()
    optimiser.step()
    assert 4 <= optimiser.passes <= 4 * 2 * optimiser.inner
    assert not optimiser._passed


def test_the_ends_take_adams_steps():
    model = GPT(CONFIG)
    config = TrainConfig(optimiser="msa", weight_decay=0.0)
    tokens = torch.randint(16, (2, 8), generator=torch.Generator().manual_seed(0))
    twin = GPT(CONFIG)
    mine = config.make_optimiser(model.parameters(), model=model)
    other = torch.optim.AdamW(
        twin.parameters(), lr=config.learning_rate, betas=(0.9, 0.99), weight_decay=0.0
    )
    for net, optimiser in ((model, mine), (twin, other)):
        net(tokens, tokens)[1].backward()
        optimiser.step()
    torch.testing.assert_close(model.token_embedding.weight, twin.token_embedding.weight)


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({"accumulate": 2}, "choose accumulate 1"),
        ({"method": "rk4"}, "method euler with one step"),
        ({"gradient": "checkpoint"}, "gradient backprop"),
        ({"kinetic": 0.1}, "choose kinetic 0"),
        ({"dtype": "bfloat16"}, "dtype float32 or float64"),
        ({"low_rank": 2}, "choose low_rank 0"),
        ({"compile": True}, "choose no compile"),
    ],
)
def test_settings_without_one_repeatable_pass_are_refused(settings, needed):
    with pytest.raises(ConfigError, match=f"'msa'.*{needed}"):
        TrainConfig(optimiser="msa", **settings)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"depth_weights": "linear", "knots": 2}, "share weights"),
        ({"stack_steps": 2}, "share weights|one stream|msa"),
        ({"residual": "hyper_connections"}, "one stream"),
        ({"ffn": "moe"}, "a loss of its own"),
        ({"parametrisation": "mup"}, "no parametrisation"),
        ({"residual": "ngpt", "placement": "post"}, "no weight on a sphere"),
    ],
)
def test_models_that_it_does_not_fit_are_refused(changes, why):
    model = GPT(dataclasses.replace(CONFIG, **changes))
    with pytest.raises(ConfigError, match=why):
        TrainConfig(optimiser="msa").make_optimiser(model.parameters(), model=model)


def test_it_needs_the_model_one_process_and_a_run_alone():
    config = TrainConfig(optimiser="msa")
    with pytest.raises(ConfigError, match="'msa' maximises over each sublayer of a GPT"):
        config.make_optimiser(GPT(CONFIG).parameters())
    with pytest.raises(ConfigError, match="'msa' looks at the states of one process"):
        get_parallel("ddp", config)
    plain = PlannedRun(CONFIG, TrainConfig(), {})
    assert batches(plain)
    assert not batches(dataclasses.replace(plain, training=config))
