"""Tolerances by entry: equal ones are one number to the last bit, each bounds its own entry, and
what makes no sense is refused.
"""

import math
from typing import NamedTuple

import pytest
import torch

from solvers import GRADIENTS, METHODS, ConfigError, Segment, StepControl, solve, solve_each

X0 = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
ADAPTIVE = [
    name
    for name, method in METHODS.items()
    if method.adaptive and name != "torchdiffeq:scipy_solver"
]
RATES = torch.tensor([1.0, 12.0, 0.3], dtype=torch.float64)


def swings(t, x):
    return torch.cos(RATES * t) * x


def segments():
    return [Segment(0, 1, swings), Segment(1, 2, lambda t, x: -x)]


@pytest.mark.cases(7)
@pytest.mark.parametrize("method", ADAPTIVE)
def test_equal_ones_are_one_number(method):
    one = solve(segments(), X0, method=method, rtol=1e-5, atol=1e-7)
    each = solve(
        segments(),
        X0,
        method=method,
        rtol=torch.full((3,), 1e-5).double(),
        atol=torch.tensor([1e-7]).double(),
    )
    assert torch.allclose(one.x1, each.x1, rtol=1e-14)
    assert one.stats == each.stats


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "method", ["bosh3", "dopri5", "tsit5", "esdirk4"]
)  # whose steps are many and small enough to be counted
def test_an_entrys_tolerance_is_kept_at_the_cost_of_its_own(method):
    exact = X0 * torch.exp(torch.sin(RATES) / RATES)
    work, errors = {}, {}
    for name, which in {
        "loose": [],
        "the fast one": [1],
        "the slow one": [2],
        "tight": [0, 1, 2],
    }.items():
        tolerance = torch.full((3,), 1e-3).double()
        tolerance[which] = 1e-8
        found = solve(
            [Segment(0, 1, swings)],
            X0,
            method=method,
            rtol=tolerance,
            atol=tolerance,
            step_control=StepControl(norm="max"),
        )
        work[name], errors[name] = found.stats.evaluations, (found.x1 - exact).abs()
    assert (
        work["loose"]
        < work["the slow one"]
        < work["the fast one"]
        == pytest.approx(work["tight"], rel=0.1)
    )
    assert float(errors["the fast one"][1]) < 1e-6
    assert float(errors["loose"][1]) > 1e-5


@pytest.mark.parametrize("kind", sorted(GRADIENTS))
def test_every_gradient_has_them(kind):
    rate, tolerance = (
        torch.tensor(1.3, dtype=torch.float64, requires_grad=True),
        torch.tensor([1e-9, 1e-8, 1e-9]).double(),
    )
    x = X0.clone().requires_grad_()
    x1 = solve(
        [Segment(0, 1, lambda t, x: -rate * x)],
        x,
        method="tsit5",
        rtol=tolerance,
        atol=tolerance,
        gradient=kind,
    ).x1
    found = torch.autograd.grad(x1.sum(), (x, rate))
    assert torch.allclose(found[0], torch.full_like(x, math.exp(-1.3)), rtol=1e-6)
    assert float(found[1]) == pytest.approx(-float(X0.sum()) * math.exp(-1.3), rel=1e-6)


class Pair(NamedTuple):
    position: torch.Tensor
    spins: dict


def test_a_state_of_several_tensors_has_one_each_in_its_structure():
    def field(t, y):
        return Pair(torch.cos(12 * t) * y.position, {"a": -y.spins["a"]})

    def asked(rtol, norm="max"):
        return solve(
            [Segment(0, 1, field)],
            state,
            method="tsit5",
            rtol=rtol,
            atol=1e-9,
            step_control=StepControl(norm=norm),
        )

    state = Pair(torch.ones(2, dtype=torch.float64), {"a": torch.ones(3, dtype=torch.float64)})
    one, same = asked(1e-6), asked(Pair(1e-6, {"a": torch.full((3,), 1e-6)}))
    assert one.stats.evaluations == same.stats.evaluations
    assert (
        asked((1e-3, {"a": 1e-9})).stats.evaluations < asked((1e-9, {"a": 1e-3})).stats.evaluations
    )
    for wrong in (
        (1e-3,),
        (1e-3, 1e-3),
        {"a": 1e-3},
        (1e-3, {"b": 1e-3}),
        (torch.ones(3), {"a": 1e-3}),
        torch.ones(5),
    ):
        with pytest.raises(ConfigError, match="does not fit a state of 2 tensors"):
            asked(wrong)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.ones(2), r"does not fit a state of shape \(3,\)"),
        (torch.ones(2, 3), "does not fit"),
        ([[1e-3], None], "does not fit"),
        (torch.tensor([1e-3, 0.0, 1e-3]), "is from 0 to 0.001: give positive finite numbers"),
        (torch.tensor([1e-3, math.nan, 1e-3]), "is from nan to nan"),
        (torch.tensor([1e-3, math.inf, 1e-3]), "to inf"),
        (torch.tensor([1e-3 + 0j, 1, 1]), "is from nan"),
        (torch.full((3,), 1e-3, requires_grad=True), r"give rtol.detach\(\)"),
        (torch.tensor([1e-3, 1e-20, 1e-3]).double(), "below what float64 resolves"),
    ],
)
def test_what_is_no_tolerance_is_named(given, words):
    with pytest.raises(ConfigError, match=words):
        solve(segments(), X0, method="tsit5", rtol=given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_an_absolute_tolerance_that_the_type_rounds_to_zero_is_named(dtype):
    x = torch.tensor([1.0, 0.0], dtype=dtype)
    for atol in (1e-50, torch.tensor([1e-3, 1e-50], dtype=torch.float64)):
        with pytest.raises(ConfigError, match="atol = 1e-50 vanishes in float32"):
            solve([Segment(0, 1, lambda t, x: -x)], x, method="tsit5", rtol=0.1, atol=atol)
    # an entry that stays 0 has no error, however small what is allowed
    x1 = solve([Segment(0, 1, lambda t, x: -x)], x, method="tsit5", rtol=0.1, atol=1e-37).x1
    assert x1[1] == 0
    assert abs(x1[0].to(torch.complex64) - math.exp(-1)) < 0.05


def test_who_has_no_tolerances_by_entry_says_so():
    tolerance, x = torch.full((3,), 1e-5).double(), X0.clone().requires_grad_()
    with pytest.raises(ConfigError, match="has fixed steps and takes no rtol"):
        solve(segments(), X0, method="rk4", rtol=tolerance)
    x1 = solve(segments(), x, method="torchdiffeq:dopri5", rtol=tolerance, gradient="adjoint").x1
    with pytest.raises(
        ConfigError, match="torchdiffeq:dopri5 with gradient 'adjoint' has no tolerances by entry"
    ):
        torch.autograd.grad(x1.sum(), x)
    with pytest.raises(ConfigError, match="rtol = "):
        solve_each([Segment(0, 1, lambda t, x: -x)], X0[None], rtol=tolerance)
