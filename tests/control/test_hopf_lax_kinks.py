"""Hopf-Lax values of terminal costs with kinks: against quadratic programming, and a fine grid."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from ctrans.control.hjb.ball_minimum import KINK_RANK
from ctrans.control.hjb.hopf_lax import BallImage, hopf_lax, hopf_lax_ends, velocity_ball
from ctrans.control.hjb.synthesis import synthesis

REMAINING = 0.7


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


SETS = {
    "ball": velocity_ball(1.0, 2),
    "ellipse": BallImage(double(0.3, -0.2), double([1.0, 0.2], [0.0, 0.5])),
    "thin": BallImage(double(0.0, 0.0), double([1.0, 0.0], [0.0, 0.05])),
}
PIECES = {
    "a sum of lengths": (double([1, 1], [1, -1], [-1, 1], [-1, -1]), double(-0.7, -0.3, 0.3, 0.7)),
    "two planes": (double([1.0, -1.0], [-1.0, 0.3]), double(0.0, 0.0)),
    "a valley": (double([3.1, -3.0], [-2.9, 3.0]), double(0.0, 0.0)),
}
"""Slopes and offsets of G(z) = max_i <a_i, z> + b_i."""


def largest(pieces):
    slopes, offsets = pieces
    return lambda z: (z @ slopes.T + offsets).amax(-1)


def least(pieces, x, velocities):
    """min s with <a_i, x + T (c + M w)> + b_i <= s for all i, and |w| <= 1, by SLSQP."""
    slopes, offsets = pieces
    at_centre = (slopes @ (x + REMAINING * velocities.centre) + offsets).numpy()
    along = (REMAINING * slopes @ velocities.map).numpy()
    rank = along.shape[1]
    constraints = [
        {
            "type": "ineq",
            "fun": lambda y: y[-1] - at_centre - along @ y[:-1],
            "jac": lambda y: np.hstack([-along, np.ones((len(along), 1))]),
        },
        {
            "type": "ineq",
            "fun": lambda y: 1 - y[:-1] @ y[:-1],
            "jac": lambda y: np.append(-2 * y[:-1], 0.0),
        },
    ]
    values = []
    for seed in range(2):
        w = 0.3 * numbers(rank, seed=seed).numpy() / math.sqrt(rank)
        found = minimize(
            lambda y: y[-1],
            np.append(w, (at_centre + along @ w).max()),
            jac=lambda y: np.append(np.zeros(rank), 1.0),
            constraints=constraints,
            method="SLSQP",
            options={"maxiter": 500, "ftol": 1e-15},
        )
        w = found.x[:-1] / max(1.0, float(np.linalg.norm(found.x[:-1])))
        values.append((at_centre + along @ w).max())
    return min(values)


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("velocities", SETS)
def test_a_convex_cost_with_kinks_has_the_minimum_of_quadratic_programming(velocities, name):
    x = 2 * numbers(6, 2)
    ends = hopf_lax_ends(largest(PIECES[name]), x, REMAINING, SETS[velocities])
    right = double(*(least(PIECES[name], point, SETS[velocities]) for point in x))
    torch.testing.assert_close(ends.values, right, rtol=0, atol=1e-10)
    torch.testing.assert_close(largest(PIECES[name])(ends.ends), ends.values, rtol=0, atol=1e-12)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("width", "count"),
    [(4, 5), (8, 9), (8, 32), pytest.param(32, 33, marks=pytest.mark.slow)],
)
def test_wider_states_with_pieces_of_many_slopes_reach_it_too(width, count):
    scales = torch.linspace(0.1, 3, width, dtype=torch.float64)
    pieces = (numbers(count, width, seed=1) * scales, 0.3 * numbers(count, seed=2))
    ball = velocity_ball(1.0, width)
    x = 0.3 * numbers(2, width, seed=3)
    right = double(*(least(pieces, point, ball) for point in x))
    value = hopf_lax(largest(pieces), x, REMAINING, ball)
    torch.testing.assert_close(value, right, rtol=0, atol=1e-9)


def on_a_fine_grid(cost, x, velocities):
    """The least value on polar grids of the set, each around the best point of the one before."""
    radii = (0.0, 1.0)
    angles = (0.0, 2 * math.pi)
    lowest = math.inf
    for _ in range(9):
        r = torch.linspace(*radii, 121, dtype=torch.float64).clamp(0, 1)
        angle = torch.linspace(*angles, 181, dtype=torch.float64)
        circle = torch.stack([angle.cos(), angle.sin()], -1)
        w = (r[:, None, None] * circle).reshape(-1, 2)
        values = cost(x + REMAINING * (velocities.centre + w @ velocities.map.T))
        best = int(values.argmin())
        lowest = min(lowest, float(values[best]))
        near_r = float(r[best // 181])
        near_angle = float(angle[best % 181])
        width_r = (radii[1] - radii[0]) / 20
        width_angle = (angles[1] - angles[0]) / 20
        radii = (near_r - width_r, near_r + width_r)
        angles = (near_angle - width_angle, near_angle + width_angle)
    return lowest


@pytest.mark.cases(1)
@pytest.mark.parametrize("velocities", SETS)
def test_a_curved_kink_is_followed(velocities):
    def cost(z):
        return 3 * (z[..., 0] - z[..., 1] ** 2).abs() + 0.1 * z[..., 1]

    x = 1.5 * numbers(5, 2, seed=4)
    grid = double(*(on_a_fine_grid(cost, point, SETS[velocities]) for point in x))
    value = hopf_lax(cost, x, REMAINING, SETS[velocities], starts=16)
    assert (value <= grid + 1e-9).all()


@pytest.mark.cases(1)
@pytest.mark.parametrize("velocities", SETS)
def test_optimal_paths_end_at_the_minimum_at_a_kink(velocities):
    pieces = PIECES["a valley"]
    x = 2 * numbers(2, 2, seed=5)
    found = synthesis(largest(pieces), x, x, REMAINING, SETS[velocities])
    right = double(*(least(pieces, point, SETS[velocities]) for point in x))
    torch.testing.assert_close(largest(pieces)(found.ends), right, rtol=0, atol=1e-7)
    assert (found.speeds <= 1.6).all()


def test_a_set_too_wide_to_follow_kinks_in_has_a_value_at_least():
    width = KINK_RANK + 1
    x = numbers(1, width)
    value = hopf_lax(lambda z: z.abs().sum(-1), x, 1e-3, velocity_ball(1.0, width))
    assert float(x.abs().sum()) - 1e-3 * math.sqrt(width) - 1e-12 <= float(value)
    assert float(value) < float(x.abs().sum())
