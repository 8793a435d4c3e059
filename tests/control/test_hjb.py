"""The grid scheme, the Hopf-Lax minimisation and the study: against closed forms, brute force and
properties of the equation.
"""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.quiver import Quiver
from scipy.optimize import brentq

from ctrans.control import admissible_set
from ctrans.control.hjb import SCHEMES, Grid, one_sided, solve_hjb, speeds
from ctrans.control.hjb.hopf_lax import hopf_lax, velocity_ball, velocity_hull
from ctrans.control.hjb.study import NearestTarget, pde_study
from ctrans.dynamics.norm import LayerNorm, RMSNorm
from ctrans.report.hjb_figure import draw
from solvers import ConfigError
from tests.helpers import DEVICES
from tests.typecheck import allow

GAMMA, BETA = (1.3, -0.4, 0.7, 1.1), (0.2, -0.3, 0.1, 0.4)
gains = st.floats(0.05, 3) | st.floats(-3, -0.05)
seeds = st.integers(0, 2**31)
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def rms_norm(gamma):
    norm = RMSNorm(len(gamma)).double().requires_grad_(False)
    norm.weight.copy_(double(*gamma))
    return norm


def layer_norm(gamma, beta):
    norm = LayerNorm(len(gamma)).double().requires_grad_(False)
    norm.weight.copy_(double(*gamma))
    norm.bias.copy_(double(*beta))
    return norm


def cube(width, points, half=1.0, **options):
    return Grid((-half,) * width, (half,) * width, (points,) * width, **options)


def norms(width):
    """A LayerNorm of width 1 is a point, which is no admissible set of its own."""
    slice_ = {"layernorm": layer_norm(GAMMA[:width], BETA[:width])} if width > 1 else {}
    return {"rmsnorm": rms_norm(GAMMA[:width])} | slice_


def hamiltonians(width):
    features = double(1.0, -0.5).unsqueeze(0)
    return {
        **{name: admissible_set(norm, "peri") for name, norm in norms(width).items()},
        **{
            f"{name}, kinetic cost": admissible_set(norm, "output", kinetic=0.5)
            for name, norm in norms(width).items()
        },
        "kinetic cost": admissible_set(None, "none", kinetic=0.7),
        "weights in a ball": admissible_set(None, "pre", features=features, radius=1.2),
        "weight decay": admissible_set(None, "pre", features=features, last_map_decay=0.7),
    }


every_hamiltonian = pytest.mark.parametrize("name", hamiltonians(2))
every_case = pytest.mark.parametrize(
    ("name", "width"), [(name, width) for width in (1, 2, 3, 4) for name in hamiltonians(width)]
)


# --- one-sided derivatives


@pytest.mark.parametrize("side", [0, 1])
@every_scheme
def test_one_sided_derivatives_converge_at_the_schemes_order(scheme, side):
    inner, sizes, errors = slice(SCHEMES[scheme].ghosts, -SCHEMES[scheme].ghosts), (40, 80, 160), []
    for count in sizes:
        x = torch.linspace(0, 1, count + 1, dtype=torch.float64)
        derivative = one_sided(SCHEMES[scheme], (2 * x).exp(), 0, 1 / count)[side]
        errors.append(float((derivative - 2 * (2 * x).exp())[inner].abs().amax()))
    assert -np.polyfit(np.log(sizes), np.log(errors), 1)[0] == pytest.approx(
        SCHEMES[scheme].order, abs=0.15
    )


@pytest.mark.slow
@given(seeds, st.sampled_from([0, 1, 2]))
@settings(max_examples=25)
def test_weno_differentiates_cubics_exactly_along_any_axis(seed, axis):
    a, x = numbers(4, seed=seed), torch.linspace(-1, 1, 12, dtype=torch.float64)
    along = [-1 if k == axis else 1 for k in range(3)]
    field = (
        (a[0] + a[1] * x + a[2] * x**2 + a[3] * x**3)
        .reshape(along)
        .expand([12 if k == axis else 2 for k in range(3)])
    )
    exact = (a[1] + 2 * a[2] * x + 3 * a[3] * x**2)[3:-3]
    for derivative in one_sided(SCHEMES["weno5"], field, axis, 2 / 11):
        inner = derivative.movedim(axis, -1)[..., 3:-3]
        torch.testing.assert_close(inner, exact.expand_as(inner), rtol=0, atol=1e-11)


def test_weno_does_not_look_across_a_kink():
    x = torch.linspace(-1, 1, 41, dtype=torch.float64)
    below, above = one_sided(SCHEMES["weno5"], x.abs(), 0, 0.05)
    assert (below[:21] + 1).abs().amax() < 1e-4
    assert (above[20:] - 1).abs().amax() < 1e-4


# --- the scheme


@every_scheme
@every_case
def test_linear_data_move_exactly_under_every_hamiltonian(name, width, scheme):
    """Phi = <a, x> - (T - t) H(a), up to the edges: linear extrapolation continues it."""
    hamiltonian, a, grid = (
        hamiltonians(width)[name],
        double(0.7, -0.4, 0.3, 0.2)[:width],
        cube(width, 7 if width < 4 else 5),
    )
    value = solve_hjb(hamiltonian, lambda x: x @ a, grid, [0.1], horizon=0.2, scheme=scheme).values[
        0
    ]
    torch.testing.assert_close(
        value, grid.nodes @ a - 0.1 * hamiltonian.support(a.unsqueeze(0)), rtol=0, atol=1e-12
    )


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [name for name, scheme in SCHEMES.items() if scheme.order == 1])
@given(
    width=st.integers(1, 3),
    gamma=st.tuples(gains, gains, gains),
    seed=seeds,
    share=st.floats(0.1, 0.99),
)
@settings(max_examples=25)
def test_a_larger_terminal_cost_never_lowers_the_value_of_the_monotone_scheme(
    scheme, width, gamma, seed, share
):
    """One step, off the edges, where the extrapolation has its say. WENO-5 is not monotone, only
    nearly so.
    """
    hull, grid = velocity_hull(rms_norm(gamma[:width])), cube(width, 9)
    lower = numbers(*grid.points, seed=seed)
    upper = lower + numbers(*grid.points, seed=seed + 1).clamp(min=0)
    horizon = share / sum(
        speed / h for speed, h in zip(speeds(hull, lower, grid), grid.spacing, strict=True)
    )
    low, high = (
        solve_hjb(hull, lambda x, G=G: G, grid, [0], horizon=horizon, scheme=scheme, cfl=1)
        for G in (lower, upper)
    )
    assert low.steps == high.steps == 1
    assert (
        (high.values - low.values)[0][(slice(1, -1),) * width] >= -1e-7
    ).all()  # `speeds` of the two agree to 1e-8


@pytest.mark.slow
@given(seeds, st.floats(-5, 5))
@settings(max_examples=20)
def test_a_constant_added_to_the_terminal_cost_is_added_to_the_value(seed, constant):
    data, hull, grid = numbers(9, 9, seed=seed), velocity_hull(norms(2)["layernorm"]), cube(2, 9)
    value, shifted = (
        solve_hjb(hull, lambda x, c=c: data + c, grid, [0], horizon=0.1).values
        for c in (0, constant)
    )
    torch.testing.assert_close(shifted, value + constant, rtol=0, atol=1e-10)


@pytest.mark.cases(1)
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_a_running_cost_gives_the_parabola_of_its_closed_form(width):
    """H = |p|^2/(2 lam), G = |x|^2/2: Phi = |x|^2/(2 (1 + (T - t)/lam))."""
    grid = cube(width, {1: 41, 2: 31, 3: 17, 4: 13}[width])
    solution = solve_hjb(
        admissible_set(None, "pre", kinetic=0.5),
        lambda x: x.square().sum(-1) / 2,
        grid,
        [0],
        horizon=0.5,
    )
    inside = (grid.nodes.abs() <= 0.5).all(-1)
    error = (solution.values[0] - grid.nodes.square().sum(-1) / 4)[inside].abs().mean()
    assert error < (1e-3 if width < 4 else 2e-3)


@pytest.mark.slow
@every_scheme
def test_a_compiled_solve_has_the_same_values(scheme):
    allow(False)  # jaxtyping's checks cannot be compiled
    hull, grid = velocity_hull(rms_norm((1.0, 0.5))), cube(2, 21)
    request = {"horizon": 0.3, "scheme": scheme}
    values = [
        solve_hjb(hull, lambda x: x.abs().sum(-1), grid, [0], compiled=c, **request).values
        for c in (False, True)
    ]
    torch.testing.assert_close(*values, rtol=0, atol=1e-12)


def test_weno_is_far_more_accurate_than_upwind_on_smooth_data():
    def smooth(x):
        return x[..., 0] + 0.3 * torch.sin(2 * x[..., 1])

    hull, grid = velocity_hull(rms_norm((1.0, 0.5))), cube(2, 41)
    errors = {}
    for scheme in SCHEMES:
        solution = solve_hjb(hull, smooth, grid, [0], horizon=0.2, scheme=scheme)
        mask = solution.untouched(0)
        errors[scheme] = (
            (solution.values[0][mask] - hopf_lax(smooth, grid.nodes[mask], 0.2, hull)).abs().mean()
        )
    assert errors["weno5"] < errors["upwind"] / 100


@pytest.mark.cases(1)
@every_hamiltonian
@given(seed=seeds, scale=st.floats(0.01, 100))
@settings(max_examples=10)
def test_speeds_bound_the_hamiltonians_derivative_at_all_slopes_of_the_data(name, seed, scale):
    hamiltonian, grid, phi = hamiltonians(2)[name], cube(2, 9), scale * numbers(9, 9, seed=seed)
    bounds = double(*speeds(hamiltonian, phi, grid))
    box = torch.stack([phi.diff(dim=axis).abs().amax() / grid.spacing[axis] for axis in range(2)])
    p = (box * numbers(500, 2, seed=seed + 1).clamp(-1, 1)).requires_grad_()
    (derivative,) = torch.autograd.grad(hamiltonian.support(p.unsqueeze(-2)).sum(), p)
    assert (derivative.abs() <= bounds * (1 + 1e-12)).all()


@given(gains, gains, st.floats(-2, 2), st.floats(-2, 2), seeds)
@settings(max_examples=15)
def test_speeds_of_a_norms_image_are_its_largest_velocities(first, second, offset, other, seed):
    phi, grid = numbers(6, 6, seed=seed), cube(2, 6)
    slice_ = speeds(velocity_hull(layer_norm((first, second), (offset, other))), phi, grid)
    assert slice_ == pytest.approx((abs(first) + abs(offset), abs(second) + abs(other)), rel=1e-6)
    ellipsoid = speeds(velocity_hull(rms_norm((first, second))), phi, grid)
    assert ellipsoid == pytest.approx(
        (math.sqrt(2) * abs(first), math.sqrt(2) * abs(second)), rel=1e-6
    )


def test_untouched_nodes_are_those_whose_reach_stays_on_the_grid():
    solution = solve_hjb(
        velocity_ball(1.0, 2), lambda x: x[..., 0], Grid((-1, -2), (1, 2), (21, 41)), [0], horizon=1
    )
    first, second = solution.grid.nodes.abs().unbind(-1)
    assert solution.untouched(1.0).all()
    assert torch.equal(solution.untouched(0.67), (first < 0.67) & (second < 1.67))
    assert torch.equal(solution.untouched(0.03), (first < 0.03) & (second < 1.03))


def test_values_come_at_the_times_asked_for_in_their_order():
    hull, a, grid = velocity_ball(2.0, 1), double(1.0), cube(1, 11)
    times = (0.25, 1.0, 0.0, 0.25)
    solution = solve_hjb(hull, lambda x: x @ a, grid, times, horizon=1.0)
    assert solution.times == times
    for time, value in zip(times, solution.values, strict=True):
        torch.testing.assert_close(value, grid.axes[0] - 2 * (1 - time), rtol=0, atol=1e-12)


def test_progress_falls_from_the_horizon_to_the_earliest_time_once_a_step():
    seen = []
    solution = solve_hjb(
        velocity_ball(1.0, 1),
        lambda x: x[..., 0],
        cube(1, 11),
        [0.7, 0.5],
        horizon=1.0,
        progress=seen.append,
    )
    assert len(seen) == solution.steps
    assert seen == sorted(seen, reverse=True)
    assert seen[0] < 1
    assert 0.7 in seen
    assert seen[-1] == 0.5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_scheme
def test_dtype_and_device_are_kept_and_flat_data_stay_flat(scheme, dtype, device):
    ball, grid = (
        velocity_ball(1.0, 2, dtype=dtype, device=device),
        cube(2, 9, dtype=dtype, device=device),
    )
    solution = solve_hjb(ball, lambda x: 0 * x[..., 0] + 3, grid, [0], horizon=1, scheme=scheme)
    assert (solution.values.dtype, solution.values.device.type) == (dtype, device)
    assert (solution.values == 3).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheme": "weno"}, "did you mean 'weno5'"),
        ({"cfl": 1.5}, r"cfl = 1.5: give a number in \(0, 1\]"),
        ({"cfl": 0.0}, "cfl = 0.0"),
        ({"horizon": 0.0}, "finite T > 0"),
        ({"horizon": math.inf}, "finite T > 0"),
        ({"times": [1.5]}, r"each in \[0, T\]"),
        ({"times": [math.nan]}, r"each in \[0, T\]"),
        ({"times": []}, "at least one"),
        ({"terminal": lambda x: x}, "reduce the last axis only"),
        ({"terminal": lambda x: x[..., 0].log()}, "not finite"),
        ({"hamiltonian": admissible_set(None, "none")}, r"degenerate.*velocity_ball\(R\)"),
        (
            {
                "hamiltonian": admissible_set(
                    rms_norm((1.0, 2.0)), "post", state=double(2**0.5, 0.0).unsqueeze(0)
                )
            },
            "degenerate",
        ),
    ],
)
def test_bad_requests_are_refused_with_the_fix(change, message):
    request = {
        "hamiltonian": velocity_ball(1.0, 2),
        "terminal": lambda x: x[..., 0],
        "times": [0],
        "horizon": 1.0,
        **change,
    }
    grid = cube(2, 9)
    with pytest.raises(ConfigError, match=message):
        solve_hjb(
            request.pop("hamiltonian"),
            request.pop("terminal"),
            grid,
            request.pop("times"),
            **request,
        )


@pytest.mark.parametrize(
    ("low", "high", "points", "message"),
    [
        ((0.0,) * 5, (1.0,) * 5, (9,) * 5, "dimension 5.*closed form"),
        ((), (), (), "dimension 0"),
        ((0.0,), (1.0, 1.0), (9, 9), "one entry for each dimension"),
        ((1.0, 0.0), (0.0, 1.0), (9, 9), "lower one first"),
        ((0.0,), (math.inf,), (9,), "finite"),
        ((0.0,), (1.0,), (2,), "at least 3"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(low, high, points, message):
    with pytest.raises(ConfigError, match=message):
        Grid(low, high, points)


# --- Hopf-Lax


@given(width=st.integers(1, 6), remaining=st.floats(0.01, 5), seed=seeds)
@settings(max_examples=20)
def test_linear_terminal_costs_have_the_hamiltonian_as_their_rate_in_any_width(
    width, remaining, seed
):
    a, x = numbers(width, seed=seed), numbers(5, width, seed=seed + 1)
    norm = layer_norm(
        numbers(width, seed=seed + 2).tolist(), numbers(width, seed=seed + 3).tolist()
    )
    value = hopf_lax(lambda z: z @ a, x, remaining, velocity_hull(norm))
    exact = x @ a - remaining * (norm.support(-a.unsqueeze(0)))
    torch.testing.assert_close(value, exact, rtol=1e-13, atol=1e-12)


@pytest.mark.slow
@given(width=st.integers(1, 4), radius=st.floats(0, 3), remaining=st.floats(0.01, 2), seed=seeds)
@settings(max_examples=20)
def test_the_distance_to_a_target_shrinks_at_the_radius_of_the_ball(width, radius, remaining, seed):
    target, x = numbers(width, seed=seed), numbers(20, width, seed=seed + 1)

    def distance(z):
        return torch.linalg.vector_norm(z - target, dim=-1)

    value = hopf_lax(distance, x, remaining, velocity_ball(radius, width))
    torch.testing.assert_close(
        value, (distance(x) - radius * remaining).clamp(min=0), rtol=0, atol=1e-12
    )


@pytest.mark.slow
@given(width=st.integers(1, 3), remaining=st.floats(0.01, 2), seed=seeds)
@settings(max_examples=20)
def test_the_nearer_of_two_cones_is_found(width, remaining, seed):
    """The minimum of a minimum is the minimum of the minima."""
    targets, x = numbers(2, width, seed=seed), 2 * numbers(30, width, seed=seed + 1)
    value = hopf_lax(
        NearestTarget(tuple(map(tuple, targets.tolist()))), x, remaining, velocity_ball(1.0, width)
    )
    exact = (
        torch.stack([torch.linalg.vector_norm(x - target, dim=-1) for target in targets]).amin(0)
        - remaining
    )
    torch.testing.assert_close(value, exact.clamp(min=0), rtol=0, atol=1e-12)


@given(
    width=st.integers(1, 3),
    gamma=st.tuples(gains, gains, gains),
    remaining=st.floats(0.05, 1),
    seed=seeds,
)
@settings(max_examples=20)
def test_the_least_square_over_an_ellipsoid_solves_its_secular_equation(
    width, gamma, remaining, seed
):
    gamma, x = double(*gamma[:width]), 2 * numbers(width, seed=seed)
    radius = math.sqrt(width) * remaining

    def overshoot(multiplier):
        return float(torch.linalg.vector_norm(gamma * x / (gamma**2 + multiplier))) - radius

    multiplier = brentq(overshoot, 0, 1e8, xtol=1e-14, rtol=1e-14) if overshoot(0) > 0 else 0.0
    exact = (multiplier * x / (gamma**2 + multiplier)).square().sum() / 2
    value = hopf_lax(
        lambda z: z.square().sum(-1) / 2, x, remaining, velocity_hull(rms_norm(gamma.tolist()))
    )
    torch.testing.assert_close(value, exact, rtol=1e-11, atol=1e-13)


def test_a_cost_with_many_minima_is_minimised_globally():
    """Against a dense search: never above it, and below it by no more than the search's resolution
    allows.
    """

    def rugged(z):
        return torch.sin(3 * z[..., 0]) + torch.cos(2 * z[..., 1] + z[..., 0])

    hull, x, remaining = velocity_hull(rms_norm((1.0, 0.4))), 2 * numbers(60, 2), 1.2
    radii, angles = (
        torch.linspace(0, 1, 201, dtype=torch.float64),
        torch.linspace(0, 2 * math.pi, 801, dtype=torch.float64),
    )
    disc = (radii[:, None, None] * torch.stack([angles.cos(), angles.sin()], -1)).reshape(-1, 2)
    dense = torch.stack([rugged(point + remaining * disc @ hull.map.T).amin() for point in x])
    value = hopf_lax(rugged, x, remaining, hull)
    assert (value <= dense + 1e-14).all()
    assert (value >= dense - 1e-3).all()


@pytest.mark.slow
@given(seed=seeds)
@settings(max_examples=10)
def test_a_broad_basin_does_not_crowd_out_a_narrow_deeper_one(seed):
    """A score of samples of the broad one lie below every sample of the narrow one."""
    broad, narrow = double(-0.5, 0.0), double(0.5, 0.2) + 0.1 * numbers(2, seed=seed).clamp(-1, 1)

    def basins(z):
        distance = [torch.linalg.vector_norm(z - centre, dim=-1) for centre in (broad, narrow)]
        return torch.minimum(0.1 * distance[0], 0.7 * distance[1] - 0.01)

    value = hopf_lax(basins, torch.zeros(1, 2, dtype=torch.float64), 1.0, velocity_ball(1.0, 2))
    assert abs(float(value) + 0.01) < 1e-12


def test_every_state_of_a_square_finds_a_target_within_reach():
    """The two basins lie far apart: a descent whose steps are too long leaves the basin of its
    start.
    """
    nodes, reach = cube(2, 81, half=2.0).nodes[::4, ::4], math.sqrt(32) * 15 / 24
    value = hopf_lax(NearestTarget(), nodes, reach, velocity_ball(1.0, 2), starts=4)
    assert float(value.amax() - value.amin()) <= 1e-9


def test_zero_gains_flatten_the_reachable_set_and_negative_ones_mirror_it():
    x = numbers(20, 2)
    flat = hopf_lax(lambda z: z.square().sum(-1), x, 0.5, velocity_hull(rms_norm((1.0, 0.0))))
    exact = (x[:, 0].abs() - 0.5 * math.sqrt(2)).clamp(min=0).square() + x[:, 1].square()
    torch.testing.assert_close(flat, exact, rtol=0, atol=1e-12)
    mirrored, plain = (
        hopf_lax(NearestTarget(), x, 0.5, velocity_hull(rms_norm(gamma)))
        for gamma in ((-1.0, 0.5), (1.0, 0.5))
    )
    torch.testing.assert_close(mirrored, plain, rtol=0, atol=1e-12)


def test_at_the_horizon_the_value_is_the_terminal_cost():
    x = numbers(3, 4, 2)
    assert torch.equal(hopf_lax(NearestTarget(), x, 0.0, velocity_ball(1.0, 2)), NearestTarget()(x))


def test_a_constant_cost_without_gradient_is_its_own_value():
    assert (
        hopf_lax(lambda z: torch.ones_like(z[..., 0]), numbers(4, 2), 1.0, velocity_ball(1.0, 2))
        == 1
    ).all()


@pytest.mark.parametrize("device", DEVICES)
def test_single_precision_states_get_single_precision_values(device):
    x = numbers(50, 2)
    exact = hopf_lax(NearestTarget(), x, 0.5, velocity_hull(rms_norm((1.0, 0.5))))
    single = hopf_lax(
        NearestTarget(), x.float().to(device), 0.5, velocity_hull(rms_norm((1.0, 0.5)))
    )
    assert (single.dtype, single.device.type) == (torch.float32, device)
    torch.testing.assert_close(single.cpu().double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_the_hull_of_a_norms_image_has_the_support_of_its_admissible_set(width):
    P = numbers(10, 4, width)
    for norm in norms(width).values():
        torch.testing.assert_close(
            velocity_hull(norm).support(P),
            admissible_set(norm, "peri").support(P),
            rtol=1e-13,
            atol=1e-13,
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"remaining": -1.0}, "times t up to T"),
        ({"remaining": math.inf}, "finite"),
        ({"velocities": velocity_ball(1.0, 3)}, "states of width 2 with velocities of width 3"),
        ({"starts": 0}, "starts = 0"),
        ({"terminal": lambda x: x.sum()}, "reduce the last axis only"),
        ({"terminal": lambda x: x[..., 0] / 0}, "not finite"),
        (
            {"terminal": lambda x: (4 - x.square().sum(-1)).sqrt(), "remaining": 9.0},
            "finite wherever a token can get",
        ),
    ],
)
def test_bad_reachable_sets_are_refused_with_the_fix(change, message):
    request = {
        "terminal": lambda x: x[..., 0],
        "remaining": 1.0,
        "velocities": velocity_ball(1.0, 2),
        **change,
    }
    with pytest.raises(ConfigError, match=message):
        hopf_lax(x=numbers(4, 2).clamp(-1, 1), **request)


@pytest.mark.parametrize("radius", [-1.0, math.inf, math.nan])
def test_a_ball_of_velocities_needs_a_finite_radius(radius):
    with pytest.raises(ConfigError, match="in the limit, the whole space, the value is inf G"):
        velocity_ball(radius, 2)


# --- the study


@pytest.fixture(scope="module")
def study():
    return pde_study(velocity_hull(rms_norm((1.0, 0.5))), points=25, radii=(1.0, 16.0))


@pytest.mark.slow
def test_the_studys_two_solutions_agree_to_the_grids_spacing(study):
    assert (study.front.values[0] == study.exact[0]).all()
    assert (study.mean_error < 0.5 * max(study.front.grid.spacing)).all()
    assert (study.largest_error < max(study.front.grid.spacing)).all()


@pytest.mark.slow
def test_the_studys_balls_go_flat_and_its_bounded_velocities_do_not(study):
    slow, fast = study.values.flatten(1)
    assert slow.amax() - slow.amin() > 2
    assert fast.abs().amax() < 1e-12
    assert study.exact[-1].amax() - study.exact[-1].amin() > 1
    assert (study.spread.diff() < 1e-12).all()


@pytest.mark.slow
def test_the_studys_summary_is_plain_json(study):
    summary = json.loads(json.dumps(study.summary()))
    assert summary["times"] == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert len(summary["reaches"]) == len(summary["spread"])
    assert summary["radius_spread"][1] < 1e-12
    slow, fast = summary["radius_speed"]
    assert slow == pytest.approx(1)
    assert 4 < fast < 16


@pytest.mark.slow
def test_the_studys_picture_has_a_panel_for_each_time_but_the_last_and_each_radius(study, tmp_path):
    figure = draw(study)
    titles = [axis.get_title() for axis in figure.axes]
    assert sum(title.startswith("t = ") for title in titles) == len(study.front.times) - 1
    assert sum(title.startswith("R = ") for title in titles) == len(study.radii)
    for axis, optimal in zip(figure.axes[:3], study.bounded, strict=True):
        (arrows,) = (each for each in axis.collections if isinstance(each, Quiver))
        assert int(optimal.feedback.isfinite().all(-1).sum()) == arrows.N
    figure.savefig(tmp_path / "study.png", dpi=40)


@pytest.mark.parametrize(
    ("velocities", "radii", "message"), [(3, (1.0,), "width 3"), (2, (), "at least one")]
)
def test_the_study_is_refused_off_the_plane_and_without_radii(velocities, radii, message):
    with pytest.raises(ConfigError, match=message):
        pde_study(velocity_ball(1.0, velocities), radii=radii)
