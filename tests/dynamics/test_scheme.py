"""What a scheme passes on to the solver."""

import pytest
import torch

from ctrans.dynamics.scheme import Scheme, trajectory
from solvers import ConfigError
from tests.helpers import as_called, small_model


@pytest.mark.slow
def test_the_largest_tokens_error_is_kept_below_the_tolerance_where_an_average_over_all_hides_it():
    depth = small_model("pre", dt=1.0, scale=1.0).depth
    x0 = torch.zeros(1, 12, 16, dtype=torch.float64)
    x0[0, 0] = torch.randn(16, dtype=torch.float64)
    exact = trajectory(depth, x0, method="tsit5", rtol=1e-12, atol=1e-13).x1
    found = {
        norm: trajectory(depth, x0, method="tsit5", rtol=1e-5, atol=1e-5, norm=norm)
        for norm in ("rms", "token", "max")
    }
    errors = {
        norm: float(torch.linalg.vector_norm(each.x1 - exact, dim=-1).detach().max())
        for norm, each in found.items()
    }
    steps = {norm: each.stats.accepted for norm, each in found.items()}
    assert steps["rms"] <= steps["token"] <= steps["max"]
    assert errors["token"] < errors["rms"]


def test_an_unknown_norm_is_refused_when_the_scheme_is_made():
    with pytest.raises(ConfigError, match="token"):
        Scheme("tsit5", norm="tokens")


def test_a_norm_of_the_error_is_refused_for_a_method_that_estimates_none():
    with pytest.raises(ConfigError, match="fixed steps and takes no norm"):
        Scheme("rk4", norm="max")
    with pytest.raises(
        ConfigError, match="takes no norm"
    ):  # how far its two states are apart is measured by their lengths
        Scheme("rk4", norm="max", gradient="reversible")
    assert Scheme("tsit5", norm="max", gradient="reversible").norm == "max"


def test_arguments_of_methods_are_checked():
    depth, x0 = small_model("pre").depth, torch.zeros(2, 16, dtype=torch.float64)
    for solve in (as_called(Scheme.solve), as_called(Scheme.last_state)):
        with pytest.raises(ConfigError, match="depth = 'x'"):
            solve(Scheme(), "x", x0)
        with pytest.raises(ConfigError, match="x0 = None"):
            solve(Scheme(), depth, None)
    with pytest.raises(ConfigError, match="dtype = 'float64'"):
        as_called(Scheme.check)(Scheme(), depth, "float64")
    with pytest.raises(ConfigError, match="continuous = 'no'"):
        as_called(Scheme.segments)(Scheme(), depth, continuous="no")
    with pytest.raises(ConfigError, match="max_steps = 'x'"):
        as_called(Scheme.request)(Scheme(), "x")
