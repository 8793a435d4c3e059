"""Theory, section 4, last lines: the value function of bounded velocities is Hopf-Lax; that of the
whole space is flat.

Against what ctrans/theory does not look at: orders on the grid, closed forms, dense searches,
polynomials' roots.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrans.control import admissible_set
from ctrans.control.hjb import SCHEMES, Grid, solve_hjb
from ctrans.control.hjb.hopf_lax import hopf_lax, velocity_ball, velocity_hull
from ctrans.control.hjb.study import NearestTarget
from ctrans.dynamics.norm import LayerNorm, RMSNorm

GAMMA = (1.0, 0.5)
NORMS = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}
gains, offsets = st.floats(0.1, 3), st.floats(-1, 1)
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)
every_norm = pytest.mark.parametrize("name", NORMS)


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(name, gamma=GAMMA, beta=(0.0, 0.0)):
    norm = NORMS[name](2).double().requires_grad_(False)
    norm.weight.copy_(double(*gamma))
    norm.beta.copy_(double(*beta))  # RMSNorm has none: it gives a fresh zero
    return norm


def square(points, half=1.5):
    return Grid((-half,) * 2, (half,) * 2, (points,) * 2)


def smooth(x):
    """A slope that never vanishes, so that no kink forms in the times below."""
    return x[..., 0] + 0.5 * x[..., 1] + 0.2 * torch.sin(2 * x[..., 0]) * torch.cos(1.5 * x[..., 1])


def grid_errors(norm, terminal, scheme, points, horizon):
    """The grid's L1 error against Hopf-Lax at t = 0, for each resolution, where the edges cannot
    matter.
    """
    errors = []
    for count in points:
        grid, hull = square(count), velocity_hull(norm)
        solution = solve_hjb(
            admissible_set(norm, "peri"), terminal, grid, [0], horizon=horizon, scheme=scheme
        )
        mask = solution.untouched(0)
        exact = hopf_lax(terminal, grid.nodes[mask], horizon, hull, starts=4)
        errors.append(float((solution.values[0][mask] - exact).abs().mean()))
    return errors


def order(points, errors):
    return -np.polyfit(np.log(np.array(points) - 1), np.log(errors), 1)[0]


# --- the grid and Hopf-Lax solve the same equation


@pytest.mark.cases(1)
@every_norm
def test_on_smooth_data_weno_converges_to_hopf_lax_at_order_two_and_a_half_or_more(name):
    points = (21, 41, 81)
    assert (
        order(points, grid_errors(make(name, beta=(0.3, -0.2)), smooth, "weno5", points, 0.25))
        >= 2.5
    )


@pytest.mark.cases(1)
@every_norm
def test_on_smooth_data_upwind_converges_to_hopf_lax_at_order_one(name):
    points = (21, 41, 81)
    assert order(
        points, grid_errors(make(name, beta=(0.3, -0.2)), smooth, "upwind", points, 0.25)
    ) == pytest.approx(1, abs=0.15)


@pytest.mark.slow
@every_scheme
def test_on_data_with_kinks_the_order_is_about_one(scheme):
    """Two cones, whose tips widen and whose front meets in a ridge; averaged over where the tips
    fall between the nodes.
    """
    points, errors = (21, 41, 81), []
    for seed in range(3):
        shift = 0.1 * torch.rand(
            2, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        targets = (double(-0.6, 0.2, 0.5, -0.3).reshape(2, 2) + shift).tolist()
        errors.append(
            grid_errors(
                make("rmsnorm"), NearestTarget(tuple(map(tuple, targets))), scheme, points, 0.3
            )
        )
    assert order(points, np.mean(errors, 0)) >= 0.9


@pytest.mark.cases(1)
@pytest.mark.parametrize("width", [1, 3])
def test_on_a_line_and_in_space_the_grid_finds_the_distance_to_a_target(width):
    """gamma = 1: Phi = max(|x| - sqrt(d) (T - t), 0)."""
    grid = Grid((-1,) * width, (1,) * width, ({1: 201, 3: 31}[width],) * width)
    norm = RMSNorm(width).double().requires_grad_(False)
    solution = solve_hjb(
        admissible_set(norm, "output"),
        lambda x: torch.linalg.vector_norm(x, dim=-1),
        grid,
        [0],
        horizon=0.2,
    )
    exact = (torch.linalg.vector_norm(grid.nodes, dim=-1) - math.sqrt(width) * 0.2).clamp(min=0)
    assert (solution.values[0] - exact).abs().mean() < 0.15 * grid.spacing[0]


# --- the reachable set


@pytest.mark.slow
@every_scheme
def test_what_lies_outside_the_reachable_set_does_not_change_the_value(scheme):
    """Finite speed: a change of G beyond an edge comes in by sqrt(d) gamma (T - t) and no further,
    but that far it does come.
    """
    norm, horizon, grid, edge = make("rmsnorm"), 0.3, square(81), 0.9
    hull, reach = velocity_hull(norm), math.sqrt(2) * GAMMA[0] * horizon

    def changed(x):
        return smooth(x) - 20 * (x[..., 0] - edge).clamp(min=0) ** 2

    out = grid.nodes[..., 0] < edge - reach - 1e-9
    before, after = (hopf_lax(G, grid.nodes, horizon, hull, starts=4) for G in (smooth, changed))
    torch.testing.assert_close(after[out], before[out], rtol=0, atol=1e-14)
    assert (before - after).amax() > 1
    before, after = (
        solve_hjb(hull, G, grid, [0], horizon=horizon, scheme=scheme).values[0]
        for G in (smooth, changed)
    )
    assert (after - before)[out].abs().amax() < 1e-6  # the scheme's own reach is longer, but faint
    assert (before - after).amax() > 1


@given(gamma=st.tuples(gains, gains), beta=st.tuples(offsets, offsets), seed=st.integers(0, 2**31))
@settings(max_examples=20)
def test_in_the_plane_a_layernorm_reaches_a_segment(gamma, beta, seed):
    """x + s (beta + w Gamma (1, -1)), |w| <= 1: against a dense search along it."""
    remaining, x = 0.7, numbers(10, 2, seed=seed)
    w = torch.linspace(-1, 1, 4001, dtype=torch.float64)
    points = x.unsqueeze(1) + remaining * (
        double(*beta) + w.unsqueeze(-1) * double(gamma[0], -gamma[1])
    )
    dense = smooth(points).amin(1)
    value = hopf_lax(smooth, x, remaining, velocity_hull(make("layernorm", gamma, beta)))
    assert (value <= dense + 1e-13).all()
    assert (value >= dense - 1e-5).all()


def test_the_grid_finds_that_a_layernorm_reaches_its_slice_of_the_ellipsoid_only():
    """G = x_1: Phi = x_1 - (T - t) gamma_1, where Kan's ellipsoid gives x_1 - (T - t) sqrt(2)
    gamma_1.
    """
    grid = square(21)
    value = solve_hjb(
        admissible_set(make("layernorm"), "peri"), lambda z: z[..., 0], grid, [0.5], horizon=1
    ).values[0]
    torch.testing.assert_close(value, grid.nodes[..., 0] - 0.5 * GAMMA[0], rtol=0, atol=1e-12)


def test_tokens_reach_the_inside_of_the_ellipsoid_by_switching_between_points_of_its_surface():
    """Half the time with velocity v, half with -v: a token of width 1, whose image is the two
    points +-gamma, can stay.
    """
    norm = RMSNorm(1, eps=0.0).double().requires_grad_(False)
    x, dt = double(0.3), 1e-3
    start = x.clone()
    for k in range(1000):
        x = x + dt * norm(double((-1.0) ** k))
    assert abs(x - start) < 1e-12
    assert hopf_lax(lambda z: (z[..., 0] - 0.3).abs(), start, 1.0, velocity_hull(norm)) < 1e-12


# --- the whole space


def test_the_flat_value_is_the_infimum_of_the_terminal_cost():
    """Two wells of different depths: from everywhere the value falls to the deeper one's."""

    def wells(x):
        return (x[..., 0].square() - 1).square() + 0.2 * x[..., 0] + x[..., 1].square()

    roots = np.roots([4, 0, -4, 0.2])
    infimum = min((root**2 - 1) ** 2 + 0.2 * root for root in roots.real)
    value = hopf_lax(wells, square(13).nodes, 0.01, velocity_ball(500.0, 2))
    torch.testing.assert_close(value, torch.full_like(value, infimum), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_the_grid_sees_the_relaxation_too():
    grid, terminal = square(41), NearestTarget(((0.0, 0.0),))
    spreads = []
    for radius in (1.0, 4.0, 16.0):
        value = solve_hjb(velocity_ball(radius, 2), terminal, grid, [0.8], horizon=1).values[0]
        spreads.append(float(value.amax() - value.amin()))
    assert spreads[0] == pytest.approx(1.5 * math.sqrt(2) - 0.2, abs=0.05)
    assert spreads[1] == pytest.approx(1.5 * math.sqrt(2) - 0.8, abs=0.05)
    assert spreads[2] < 0.05
