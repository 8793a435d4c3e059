"""Turnpikes: against the discretised problem in dense algebra, Riccati's equation, and the spectrum
of the Hamiltonian matrix.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
import scipy.linalg
import torch

from ctrans.control.turnpike import (
    LinearQuadratic,
    flatness,
    flatness_by_kind,
    linear_quadratic_extremal,
)
from solvers import ConfigError


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def semidefinite(width, seed, rank=None):
    root = numbers(width, rank or width, seed=seed)
    return root @ root.mT / width


def problem(width=3, inputs=2, seed=0, **changes):
    settings = {
        "A": numbers(width, width, seed=seed) / 2,
        "B": numbers(width, inputs, seed=seed + 1),
        "state_cost": semidefinite(width, seed + 2),
        "target": numbers(width, seed=seed + 3),
        "control_cost": 0.7,
        "terminal_cost": semidefinite(width, seed + 4),
        "terminal_target": 3 * numbers(width, seed=seed + 5),
    }
    return LinearQuadratic(**{**settings, **changes})


def discretised(given, start, horizon, steps):
    """x_k, P_k and u_k of the problem with Euler steps, all at once: its KKT system."""
    h = horizon / steps
    d, m = given.B.shape
    A, B, Q, F = (
        part.numpy() for part in (given.A, given.B, given.state_cost, given.terminal_cost)
    )
    # unknowns: x_1 .. x_K, u_0 .. u_(K-1), multipliers p_1 .. p_K of x_(k+1) = x_k + h (A x + B u)
    K = steps
    size = K * (2 * d + m)
    M, right = np.zeros((size, size)), np.zeros(size)

    def x(k):
        return slice((k - 1) * d, k * d)

    def u(k):
        return slice(K * d + k * m, K * d + (k + 1) * m)

    def p(k):
        return slice(K * (d + m) + (k - 1) * d, K * (d + m) + k * d)

    step = np.eye(d) + h * A
    for k in range(1, K + 1):
        M[p(k), x(k)] = np.eye(d)
        M[p(k), u(k - 1)] = -h * B
        if k > 1:
            M[p(k), x(k - 1)] = -step
        else:
            right[p(1)] = step @ start.numpy()
        M[u(k - 1), u(k - 1)] = h * given.control_cost * np.eye(m)
        M[u(k - 1), p(k)] = h * B.T
        M[x(k), p(k)] = -np.eye(d)
        if k < K:
            M[x(k), x(k)] = h * Q
            M[x(k), p(k + 1)] = step.T
            right[x(k)] = h * Q @ given.target.numpy()
        else:
            M[x(k), x(k)] = F
            right[x(k)] = F @ given.terminal_target.numpy()
    found = np.linalg.solve(M, right)
    return [
        torch.from_numpy(found[part].reshape(K, -1))
        for part in (slice(0, K * d), slice(K * (d + m), None), slice(K * d, K * (d + m)))
    ]


@pytest.mark.parametrize("seed", [0, 10])
def test_the_extremal_is_the_limit_of_the_discretised_optimum_with_order_one(seed):
    given, start, horizon = problem(2, 1, seed), numbers(2, seed=20), 2.0
    errors = []
    for steps in (20, 40, 80):
        x, p, u = discretised(given, start, horizon, steps)
        times = [horizon * k / steps for k in range(steps + 1)]
        exact = linear_quadratic_extremal(given, start, horizon, times)
        torch.testing.assert_close(exact.x[0], start)
        pairs = ((x, exact.x[1:]), (p, exact.p[1:]), (u, exact.u[:-1]))
        errors.append(max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))
    assert errors[-1] < 0.1
    assert [math.log2(a / b) for a, b in pairwise(errors)] == pytest.approx([1, 1], abs=0.2)


@pytest.mark.parametrize("seed", range(4))
def test_pi_solves_riccatis_equation(seed):
    given = problem(4, 2, 30 + seed)
    exact = scipy.linalg.solve_continuous_are(
        given.A.numpy(),
        given.B.numpy(),
        given.state_cost.numpy(),
        given.control_cost * np.eye(2),
    )
    torch.testing.assert_close(given.riccati, torch.from_numpy(exact), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("seed", range(4))
def test_the_rate_is_the_eigenvalue_closest_to_the_imaginary_axis(seed):
    given = problem(4, 2, 40 + seed)
    eigenvalues = scipy.linalg.eigvals(given.hamiltonian_matrix.numpy())
    assert given.rate == pytest.approx(np.abs(eigenvalues.real).min())
    loop = np.sort_complex(scipy.linalg.eigvals(given.closed_loop.numpy()))
    np.testing.assert_allclose(loop, np.sort_complex(eigenvalues[eigenvalues.real < 0]), rtol=1e-8)


def test_the_steady_state_is_the_cheapest_one():
    given = problem(3, 3, 50)
    x, p = given.steady
    cost, inputs, zero = given.state_cost, given.B, torch.zeros(3, 3).double()
    eye = given.control_cost * torch.eye(3).double()
    # min (x - a)'Q(x - a)/2 + lam/2 |u|^2 subject to A x + B u = 0
    kkt = torch.cat(
        [
            torch.cat([cost, zero, given.A.mT], -1),
            torch.cat([zero, eye, inputs.mT], -1),
            torch.cat([given.A, inputs, zero], -1),
        ]
    )
    right = torch.cat([cost @ given.target, torch.zeros(6).double()])
    exact = torch.linalg.solve(kkt, right)
    torch.testing.assert_close(x, exact[:3])
    torch.testing.assert_close(p, exact[6:])


def test_in_the_middle_of_a_long_horizon_all_is_near_the_steady_state():
    given, start = problem(3, 3, 60), numbers(3, seed=61)
    x, p = given.steady
    horizon = 40 / given.rate
    found = linear_quadratic_extremal(given, start, horizon, [horizon / 2])
    torch.testing.assert_close(found.x[0], x, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found.p[0], p, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found.u[0], -given.B.mT @ p / given.control_cost)


def test_a_long_horizon_does_not_overflow():
    given = problem(3, 3, 70)
    found = linear_quadratic_extremal(given, numbers(3), 1e4, [0.0, 1e4])
    assert found.x.isfinite().all()
    torch.testing.assert_close(
        found.p[1], given.terminal_cost @ (found.x[1] - given.terminal_target)
    )


def test_without_a_cost_of_the_state_and_without_a_field_no_steady_state_attracts():
    zero = torch.zeros(2, 2).double()
    with pytest.raises(ConfigError, match="no steady state attracts"):
        assert problem(2, 2, A=zero, state_cost=zero).riccati is not None


@pytest.mark.parametrize("horizon", [0.0, -1.0, math.inf, math.nan])
def test_a_horizon_is_positive_and_finite(horizon):
    with pytest.raises(ConfigError, match="positive finite T"):
        linear_quadratic_extremal(problem(), numbers(3), horizon, [0.0])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([9, 9, 1, 1, 2, 1, 9, 9], 2),
        ([9, 9, 2, 2, 2, 2, 0, 9], 1),
        ([1, 0, 0, 1], 1),
        ([1, 0, 1, 1], math.inf),
        ([5, 1, 2, 3, 7], 3),
        ([1, 2], 2),
    ],
)
def test_flatness_is_of_the_middle_half(values, expected):
    assert flatness(values) == expected


@pytest.mark.parametrize("values", [[], [1.0], [1, None, 1, 1], [1, math.inf, 1, 1]])
def test_flatness_is_unknown_without_values_in_the_middle(values):
    assert math.isnan(flatness(values))


def test_attention_and_ffn_are_flat_apart_from_each_other():
    kinds = ["attention", "ffn"] * 4
    assert flatness_by_kind(kinds, [9, 1, 3, 1, 3, 1, 0, 5]) == {"attention": 1, "ffn": 1}
    assert flatness_by_kind(kinds, [9, 1, 3, 2, 6, 1, 0, 5]) == {"attention": 2, "ffn": 2}
