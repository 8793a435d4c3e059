"""Measured orders, by the function that `ctrans convergence` prints."""

import math
from itertools import pairwise

import pytest
import torch

from ctrans.dynamics.norm import NORMS
from ctrans.model.orders import (
    Convergence,
    averaged_segments,
    depth_convergence,
    fixed_step,
    own_methods,
    substep_convergence,
)
from solvers import METHODS, ConfigError, Segment, solve
from tests.helpers import NAMES, small_model

every = pytest.mark.parametrize("placement", NAMES)


@every
@pytest.mark.parametrize(
    "method", [*own_methods(), pytest.param("esdirk4", marks=pytest.mark.slow)]
)
def test_every_own_method_has_its_order_on_every_placement(method, placement):
    result = substep_convergence(method, placement)
    assert result.order == pytest.approx(result.formal, abs=0.15), result.errors


@pytest.mark.slow
@pytest.mark.parametrize("method", ["euler", "rk4"])
@pytest.mark.parametrize("norm", sorted(set(NORMS) - {"layernorm"}))
@pytest.mark.parametrize("placement", ["peri", "post"])
def test_orders_hold_for_the_other_norms(method, placement, norm):
    """But where there is no ODE, and of order 4 not across the kinks of clipping."""
    if placement == "post" and not NORMS[norm](4).has_tangent:
        with pytest.raises(ConfigError, match="no step of an ODE"):
            substep_convergence(method, placement, norm)
        return
    if norm.startswith("clip") and method == "rk4":
        return
    result = substep_convergence(method, placement, norm)
    assert result.order == pytest.approx(result.formal, abs=0.15), result.errors


@pytest.mark.slow
@every
def test_more_plain_blocks_converge_at_order_one_and_symmetric_ones_at_order_two(placement):
    for symmetric in (False, True):
        result = depth_convergence(placement, symmetric=symmetric)
        assert result.order == pytest.approx(result.formal, abs=0.15), result.errors


@pytest.mark.slow
def test_without_weights_smooth_in_depth_more_blocks_have_no_limit():
    x0 = torch.randn(1, 4, 16, dtype=torch.float64)
    ends = []
    for blocks in (16, 32, 64, 128):
        depth = small_model("peri", depth=blocks, dt=4 / blocks, scale=0.3).depth
        ends.append(depth(x0))
    gaps = [float((a - b).detach().norm()) for a, b in pairwise(ends)]
    assert gaps[-1] > 0.3 * gaps[0]


@pytest.mark.slow
def test_a_step_across_an_undeclared_switch_loses_the_order():
    segments = small_model("peri", dt=1.0).depth.segments()
    x0 = torch.randn(1, 4, 16, dtype=torch.float64)
    exact = solve(segments, x0, method="tsit5", rtol=1e-12, atol=1e-13).x1

    def undeclared(t, x):
        return segments[min(int(t), len(segments) - 1)].field(t, x)

    whole = [Segment(0, len(segments), undeclared)]
    orders = {}
    for name, solution in [
        ("declared", lambda n: solve(segments, x0, method="rk4", steps=n).x1),
        # an odd number of steps over an even number of segments: switches fall inside steps
        ("undeclared", lambda n: solve(whole, x0, method="rk4", steps=6 * n + 1).x1),
    ]:
        errors = [float((solution(n) - exact).detach().norm()) for n in (16, 64)]
        orders[name] = math.log(errors[0] / errors[1], 4)
    assert orders["declared"] == pytest.approx(4, abs=0.3)
    assert orders["undeclared"] < 1.5


@pytest.mark.slow
def test_an_adaptive_solver_is_wrong_or_wasteful_over_undeclared_switches():
    segments = small_model("peri", dt=1.0).depth.segments()
    x0 = torch.randn(1, 4, 16, dtype=torch.float64)
    exact = solve(segments, x0, method="tsit5", rtol=1e-12, atol=1e-13).x1
    whole = [
        Segment(0, len(segments), lambda t, x: segments[min(int(t), len(segments) - 1)].field(t, x))
    ]
    tolerances = {"rtol": 1e-5, "atol": 1e-5}
    declared = solve(segments, x0, method="torchdiffeq:dopri5", **tolerances)
    undeclared = solve(whole, x0, method="torchdiffeq:dopri5", **tolerances)
    errors = [
        float((s.x1 - exact).detach().norm() / exact.detach().norm())
        for s in (declared, undeclared)
    ]
    assert errors[1] > 8 * errors[0]
    assert undeclared.stats.evaluations > 3 * declared.stats.evaluations


def test_the_fit_recovers_a_known_order_through_the_next_orders_term():
    sizes = (16, 24, 32, 48, 64)
    errors = tuple(3 * n**-5.0 * (1 + 8 / n) for n in sizes)
    assert Convergence("substeps", "x", "peri", sizes, errors, 5).order == pytest.approx(
        5, abs=0.05
    )
    assert math.isnan(Convergence("substeps", "x", "peri", sizes, (0.0,) * 5, 5).order)


def test_the_averaged_ode_is_the_mean_of_both_fields_with_the_weights_between_blocks():
    depth = small_model("pre", depth=2, dt=0.5).depth
    x = torch.randn(1, 4, 16, dtype=torch.float64)
    segments = averaged_segments(depth)
    middle = depth.refine(3, "linear")
    # block 2 of 6 sits at s = 5/12, a third of the way between the midpoints 1/4 and 3/4
    v = segments[1].field(torch.tensor(5 / 12 * depth.times[-1], dtype=torch.float64), x)
    expected = (middle.sublayers[4].velocity(x) + middle.sublayers[5].velocity(x)) / 2
    assert torch.allclose(v, expected, atol=1e-13)


def test_methods_that_cannot_take_fixed_steps_are_named():
    with pytest.raises(ConfigError, match="only runs with adaptive steps"):
        fixed_step("torchdiffeq:dopri5")
    assert not fixed_step("tsit5").adaptive
    assert METHODS["tsit5"].adaptive
