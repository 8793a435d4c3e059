"""Which number stands for the error of a state: against numpy, and against what each promises."""

import numpy as np
import pytest
import torch

from solvers import ERROR_NORMS, ConfigError, Segment, StepControl, get_norm, solve

ADAPTIVE = ["dopri5", "tsit5", "torchdiffeq:dopri5"]
NAIVE = {
    "rms": lambda e: np.sqrt(np.mean(e**2)),
    "token": lambda e: max(np.sqrt(np.mean(row**2)) for row in e.reshape(-1, e.shape[-1])),
    "max": lambda e: np.abs(e).max(),
}


@pytest.mark.parametrize("shape", [(3,), (4, 5), (2, 3, 4)])
@pytest.mark.parametrize("name", sorted(ERROR_NORMS))
def test_norms_are_their_formulas(name, shape):
    e = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert float(get_norm(name)(e)) == pytest.approx(NAIVE[name](e.numpy()))
    assert float(get_norm(name)(torch.tensor(-2.0))) == 2


def one_of_many(t, x):
    """The first token moves."""
    return torch.cat([-3 * x[:1] * torch.cos(5 * t), torch.zeros_like(x[1:])])


@pytest.mark.cases(1)
@pytest.mark.parametrize("method", ADAPTIVE)
def test_one_token_that_moves_among_many_is_lost_by_rms_and_kept_by_the_others(method):
    x0 = torch.ones(2500, 4, dtype=torch.float64)
    exact = float(np.exp(-3 * np.sin(15.0) / 5))
    errors = {}
    for norm in ERROR_NORMS:
        x1 = solve(
            [Segment(0, 3, one_of_many)],
            x0,
            method=method,
            rtol=1e-4,
            atol=1e-4,
            step_control=StepControl(norm=norm),
        ).x1
        errors[norm] = float((x1[0] - exact).abs().max())
    for norm in ("token", "max"):
        assert errors[norm] < 10e-4 < errors["rms"]
        assert errors[norm] < errors["rms"] / 2


@pytest.mark.cases(1)
@pytest.mark.parametrize("norm", sorted(ERROR_NORMS))
def test_the_adjoint_measures_state_and_costate_by_the_same_norm(norm):
    found = []
    for gradient in ("backprop", "adjoint"):
        x = torch.ones(6, 4, dtype=torch.float64, requires_grad=True)
        solution = solve(
            [Segment(0, 3, one_of_many)],
            x,
            method="tsit5",
            rtol=1e-7,
            atol=1e-7,
            step_control=StepControl(norm=norm),
            gradient=gradient,
        )
        found.append(torch.autograd.grad(solution.x1.square().sum(), x)[0])
    assert torch.allclose(*found, rtol=1e-4, atol=1e-6)


def test_a_norm_may_be_any_function():
    seen = []

    def norm(e):
        seen.append(e.shape)
        return e.abs().mean()

    solve(
        [Segment(0, 1, lambda t, x: -x)],
        torch.ones(3, 2),
        method="tsit5",
        step_control=StepControl(norm=norm),
    )
    assert set(seen) == {(3, 2)}
    for wrong in ("tokens", 3, None):
        with pytest.raises(ConfigError):
            get_norm(wrong)
