"""What a scheme passes on to the solver."""

import pytest
import torch

from ctrans import GPT, GPTConfig
from ctrans.dynamics.scheme import Scheme, trajectory
from solvers import ConfigError
from tests.helpers import small_model


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


def test_wrong_arguments_of_methods_are_named():
    depth = small_model("pre").depth
    with pytest.raises(ConfigError, match="the initial state is NoneType"):
        Scheme("rk4").solve(depth, None)
    with pytest.raises(ConfigError, match="max_steps = 'x'"):
        Scheme().request("x")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"residual": "hyper_connections"}, r"mixing of the state's \d streams"),
        ({"residual": "mhc"}, r"mixing of the state's \d streams"),
        ({"placement": "post"}, "a norm's image"),
    ],
)
def test_reversible_names_what_it_cannot_undo(settings, reason):
    architecture = GPTConfig(width=8, heads=2, depth=1, context=4, **settings)
    with pytest.raises(ConfigError, match=rf"cannot go back through the .*{reason}"):
        Scheme("heun", gradient="reversible").check(GPT(architecture).depth)
