"""A training with the adjoint's gradients begins only where they are near the ODE's."""

import pytest
import torch

from ctrans.training.adjoint_error import LARGEST_ERROR, check_adjoint
from ctrans.training.data import Data
from ctrans.training.objective import Objective
from ctrans.training.settings import TrainConfig
from solvers import ConfigError
from tests.cli.test_commands import run
from tests.helpers import small_model, tokens


def text(model):
    ids = (tokens(4, 16) % model.config.vocab_size).flatten().numpy()
    return Data(ids, ids, context=8, name="four sequences")


def gradients(model, **settings):
    model.zero_grad()
    data = text(model)
    Objective(model, TrainConfig(**settings))(
        *data.batch(0, 0, batch=4, seed=0, rank=0, world=1)
    ).total.backward()
    flat = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    model.zero_grad()
    return flat


@pytest.mark.parametrize(
    ("settings", "is_near"),
    [
        ({"method": "euler"}, False),
        ({"method": "heun"}, False),
        ({"method": "rk4", "steps": 4}, True),
        ({"method": "euler", "steps": 64}, True),
    ],
)
def test_what_is_refused_is_far_from_the_gradient_of_many_fine_steps(settings, is_near):
    model = small_model("peri", scale=0.5, depth=2, dt=1.0).requires_grad_()
    exact = gradients(model, method="rk4", steps=16)
    own = gradients(model, gradient="adjoint", **settings)
    error = float((own - exact).norm() / exact.norm())
    objective = Objective(model, TrainConfig(gradient="adjoint", **settings))
    if is_near:
        assert error < LARGEST_ERROR
        check_adjoint(objective, text(model), torch.device("cpu"))
    else:
        assert error > LARGEST_ERROR
        with pytest.raises(ConfigError, match=r"adjoint.*its error is \d"):
            check_adjoint(objective, text(model), torch.device("cpu"))
    assert all(weight.grad is None for weight in model.parameters())


def test_a_training_by_single_euler_steps_is_refused_and_leaves_nothing(tmp_path):
    small = ["--depth", "1", "--width", "8", "--heads", "2", "--context", "8"]
    found = run("train", "--gradient", "adjoint", *small, "--out", tmp_path / "run")
    assert found.exit_code == 2
    assert "choose --gradient backprop" in found.stderr
    assert found.stderr.count("\n") == 1
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
