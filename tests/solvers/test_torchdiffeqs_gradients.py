"""Gradients of the methods that torchdiffeq itself runs."""

import math

import pytest
import torch

from solvers import ConfigError, odeint, odeint_adjoint


class Linear(torch.nn.Module):
    """dy/dt = -a y, for a state in a dictionary or a tensor."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(0.8, dtype=torch.float64))

    def forward(self, t, y):
        if isinstance(y, dict):
            return {"y": -self.a * y["y"]}
        return -self.a * y


TO_TWO = torch.linspace(0, 2, 3, dtype=torch.float64)
ONE = torch.ones(1, dtype=torch.float64)


@pytest.mark.parametrize("state", [ONE, {"y": ONE}], ids=["tensor", "dictionary"])
@pytest.mark.parametrize("method", ["scipy_solver", "dopri8"])
def test_torchdiffeqs_adjoint_takes_a_module_with_any_state(method, state):
    """y(2) = exp(-2 a)."""
    func = Linear()
    states = odeint_adjoint(func, state, TO_TWO, method=method)
    end = (states["y"] if isinstance(states, dict) else states)[-1]
    (gradient,) = torch.autograd.grad(end.sum(), func.a)
    assert float(gradient) == pytest.approx(-2 * math.exp(-1.6), rel=1e-4)


@pytest.mark.parametrize("method", ["scipy_solver", "fixed_adams", "dopri8"])
def test_torchdiffeqs_adjoint_says_what_a_plain_function_needs(method):
    a = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ConfigError, match="adjoint_params="):
        odeint_adjoint(lambda t, y: -a * y, ONE, TO_TWO, method=method)
    with pytest.raises(ConfigError, match="adjoint_params="):
        odeint(lambda t, y: -a * y, ONE, TO_TWO, method="dopri8", gradient="adjoint")


def test_a_gradient_through_scipy_says_to_call_the_adjoint():
    func = Linear()
    states = odeint(func, ONE, TO_TWO, method="scipy_solver")
    assert float(states.detach()[-1]) == pytest.approx(math.exp(-1.6), rel=1e-5)
    with pytest.raises(ConfigError, match="call odeint_adjoint"):
        torch.autograd.grad(states[-1].sum(), func.a)
    with torch.no_grad():
        assert not odeint(func, ONE, TO_TWO, method="scipy_solver").requires_grad
