"""What is said of an explicit method whose steps stability bounds: of stiff problems, and of none
that is not.
"""

import numpy as np
import pytest
import torch

from benchmarks.controllers import DETEST, detest
from solvers import METHODS, RungeKutta, Segment, Status, StepControl, solve
from solvers.explicit_tableaus import DOPRI5, EULER, HEUN, RK4
from solvers.stiffness import BOUNDED, EASY, Stiffness

PAIRS = [
    name for name, method in METHODS.items() if method.adaptive and isinstance(method, RungeKutta)
]
EXPLICIT = [name for name in PAIRS if not METHODS[name].implicit]


def van_der_pol(mu):
    return lambda t, x: torch.stack([x[1], mu * (1 - x[0] ** 2) * x[1] - x[0]])


@pytest.mark.cases(1)
@pytest.mark.parametrize("gradient", ["backprop", "checkpoint", "adjoint"])
@pytest.mark.parametrize("method", EXPLICIT)
def test_stiffness_is_warned_of(method, gradient):
    # the slow part of van der Pol's cycle: rho = mu (x^2 - 1), so that h = z/rho, where accuracy
    # would let it be 1e4 times longer
    start = torch.tensor([2.0, 0.0], dtype=torch.float64)
    segment = Segment(0, 0.3, van_der_pol(1000.0))
    solution = solve([segment], start, method=method, rtol=1e-3, atol=1e-6, gradient=gradient)
    assert solution.stats.stiff_at is not None
    assert 0 < solution.stats.stiff_at < 0.3
    assert "stability and not accuracy bounds the steps" in solution.warnings[0]
    steps = 0.3 * 1000 * 3 / METHODS[method].tableau.stability_interval
    assert solution.stats.accepted == pytest.approx(steps, rel=0.5)


@pytest.mark.cases(10)
@pytest.mark.parametrize("method", ["dopri5", "tsit5", "dop853"])
@pytest.mark.parametrize("name", sorted(DETEST))
def test_problems_that_are_not_stiff_bring_no_warning(method, name):
    segments, x0 = detest(name)
    for tolerance in (1e-3, 1e-6, 1e-9):
        assert solve(segments, x0, method=method, rtol=tolerance, atol=tolerance).warnings == ()


def test_the_same_problem_is_stiff_for_loose_tolerances_only():
    # C2 has rates up to 9: 20*9/2.5 = 72 steps are needed for stability, and more for an accuracy
    # of 1e-7
    segments, x0 = detest("C2")
    loose, tight = (solve(segments, x0, method="bosh3", rtol=tol, atol=tol) for tol in (1e-3, 1e-8))
    assert loose.stats.stiff_at is not None
    assert tight.stats.stiff_at is None


@pytest.mark.parametrize(
    ("tableau", "known"), [(EULER, 2.0), (HEUN, 2.0), (RK4, 2.785), (DOPRI5, 3.307)]
)
def test_stability_intervals_are_the_published_ones(tableau, known):
    assert tableau.stability_interval == pytest.approx(known, abs=2e-3)


@pytest.mark.parametrize("method", EXPLICIT)
def test_at_the_intervals_end_one_step_neither_damps_nor_grows(method):
    z = METHODS[method].tableau.stability_interval
    for part, stable in ((0.99, True), (1.01, False)):
        segment = Segment(0, part * z, lambda t, x: -x)
        x1 = solve([segment], torch.ones(1, dtype=torch.float64), method=METHODS[method].fixed()).x1
        assert (abs(float(x1)) < 1) is stable


def test_fifteen_long_steps_without_six_others_in_a_row_are_stiff():
    counts = Stiffness()
    assert not any(counts.found(product, 1.0) for product in [2.0] * (BOUNDED - 1))
    assert not any(counts.found(0.1, 1.0) for _ in range(EASY - 1))
    assert counts.found(2.0, 1.0)
    again = Stiffness()
    pattern = ([2.0] * (BOUNDED - 1) + [0.1] * EASY) * 5
    assert not any(again.found(product, 1.0) for product in [*pattern, np.nan])


RATES = torch.tensor([-0.5, -1.0, -2.0], dtype=torch.float64)


def limited(method, rate, tolerance, gradient="backprop", most=120):
    """A solve of x' = rate A x that the step limit ends, and its last step times |J|. A has the
    eigenvalues -0.5, -1 and -2.
    """
    turn = torch.linalg.qr(torch.arange(9.0, dtype=torch.float64).reshape(3, 3) + torch.eye(3))[0]
    jacobian = rate * (turn * RATES) @ turn.T
    times = [0.0]
    solution = solve(
        [Segment(0, 1000, lambda t, x: jacobian @ x)],
        torch.tensor([1.0, -0.3, 0.7], dtype=torch.float64),
        method=method,
        rtol=tolerance,
        atol=tolerance,
        gradient=gradient,
        step_control=StepControl(max_steps=most),
        on_step=lambda t, x: times.append(t),
        throw=False,
    )
    assert solution.status is Status.TOO_MANY_STEPS
    return solution, (times[-1] - times[-2]) * float(torch.linalg.eigvalsh(jacobian).abs().max())


@pytest.mark.cases(2)
@pytest.mark.parametrize("gradient", ["backprop", "checkpoint", "reversible", "adjoint"])
@pytest.mark.parametrize(
    ("method", "tolerance"), [("heun_euler", 1e-10), ("heun_euler", 1e-8), ("bosh3", 1e-11)]
)
def test_a_tight_tolerance_of_a_smooth_field_is_not_called_stiffness(method, tolerance, gradient):
    solution, product = limited(method, 1.0, tolerance, gradient)
    interval = METHODS[method].tableau.stability_interval
    assert product < 0.05 * interval
    assert solution.stats.stiff_at is None
    assert f"tight for a method of order {METHODS[method].order}" in solution.message
    assert "is not stiff" in solution.message
    assert "higher order, as tsit5" in solution.message
    # what it says of the steps is the eigenvalue's
    assert solution.tight.room == pytest.approx(interval / product, rel=1.0)


@pytest.mark.parametrize("method", EXPLICIT)
def test_a_step_limit_by_stability_is_called_stiffness(method):
    solution, product = limited(method, 1e3, 1e-3, most=300)
    assert product > 0.5 * METHODS[method].tableau.stability_interval
    assert solution.tight is None
    assert "the field is stiff there" in solution.message


def test_a_field_that_jumps_is_not_called_smooth():
    # after each jump of x' = round(sin(2^9 t)) the error estimate refuses steps
    solution = solve(
        [Segment(0, 100, lambda t, x: torch.sin(512 * t).round() + 0 * x)],
        torch.ones(1, dtype=torch.float64),
        method="tsit5",
        rtol=1e-8,
        atol=1e-8,
        step_control=StepControl(max_steps=400),
        throw=False,
    )
    assert solution.status is Status.TOO_MANY_STEPS
    assert solution.tight is None
    assert "stiff or not smooth" in solution.message
