"""The implicit pair: against scipy's Radau, dense linear algebra, and differences of whole
solves.
"""

import math
import sys

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from solvers import METHODS, ConfigError, Segment, SolveError, Status, StepControl, solve
from solvers.esdirk import ESDIRK4
from solvers.implicit import gmres

FIXED = METHODS["esdirk4"].fixed()


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def van_der_pol(t, x):
    return torch.stack([x[1], 1000 * (1 - x[0] ** 2) * x[1] - x[0]])


def robertson(t, x):
    a, b = -0.04 * x[0] + 1e4 * x[1] * x[2], 3e7 * x[1] ** 2
    return torch.stack([a, -a - b, b])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "x0", "end", "atol"),
    [(van_der_pol, [2.0, 0.0], 300.0, 1e-8), (robertson, [1.0, 0.0, 0.0], 40.0, 1e-11)],
    ids=["van der pol", "robertson"],
)
def test_stiff_problems_are_scipys_in_fewer_steps_than_bdf(field, x0, end, atol):
    def scipys(method, rtol, atol):
        return solve_ivp(
            lambda t, x: field(torch.tensor(t), torch.tensor(x)).numpy(),
            (0, end),
            x0,
            method=method,
            rtol=rtol,
            atol=atol,
        )

    right = scipys("Radau", 1e-10, 1e-13).y[:, -1]
    solution = solve([Segment(0, end, field)], double(x0), method="esdirk4", rtol=1e-6, atol=atol)
    bdf = scipys("BDF", 1e-6, atol)
    error = np.abs(solution.x1.numpy() / right - 1).max()
    assert error < 1e-7
    assert error < np.abs(bdf.y[:, -1] / right - 1).max()
    assert solution.warnings == ()
    # 41 steps of 79, and 132 of 164
    assert solution.stats.accepted <= (50 if field is van_der_pol else 140)
    assert 1.2 * solution.stats.accepted < len(bdf.t) - 1
    if field is van_der_pol:
        explicit = solve([Segment(0, 1, field)], double(x0), method="tsit5", rtol=1e-6, atol=atol)
        assert explicit.stats.accepted > 5 * solution.stats.accepted  # over a 300th of the way


@pytest.mark.parametrize("z", [-0.5, -3.0, -50.0, -1e4, -1e6, 0.7j, 40j])
def test_one_step_multiplies_by_the_stability_function_of_the_dense_matrix(z):
    # R(z) = 1 + z b'(1 - z A)^-1 1; a complex rate is a rotation of the plane
    a = np.array([[*ESDIRK4.rows[i], *[0.0] * (5 - i)] for i in range(6)])
    r = 1 + z * np.array(ESDIRK4.b) @ np.linalg.solve(np.eye(6) - z * a, np.ones(6))
    rate = double([[z.real, -z.imag], [z.imag, z.real]])
    x1 = solve([Segment(0, 1, lambda t, x: x @ rate.T)], double([1.0, 0.0]), method=FIXED).x1
    assert complex(*x1.tolist()) == pytest.approx(r, abs=1e-9)
    assert abs(r) < 1
    if z == -1e6:
        assert abs(r) < 1e-5  # L-stable


@pytest.mark.slow
def test_its_order_is_four_on_a_problem_that_is_not_stiff():
    def field(t, x):
        return torch.stack([x[1], -torch.sin(x[0]) + 0.1 * torch.cos(t)])

    exact = solve(
        [Segment(0, 2, field)], double([1.0, -0.5]), method="dop853", rtol=1e-13, atol=1e-14
    ).x1
    errors = [
        float(
            (
                solve([Segment(0, 2, field)], double([1.0, -0.5]), method=FIXED, steps=n).x1 - exact
            ).norm()
        )
        for n in (8, 16, 32)
    ]
    assert math.log2(errors[1] / errors[2]) == pytest.approx(4, abs=0.15)


def test_gmres_solves_what_the_dense_solver_does():
    generator = torch.Generator().manual_seed(0)
    for n in (1, 2, 30, 90):
        matrix = torch.eye(n, dtype=torch.float64) + torch.randn(
            n, n, dtype=torch.float64, generator=generator
        ) / (3 * math.sqrt(n))
        b = torch.randn(n, dtype=torch.float64, generator=generator)
        x, left = gmres(lambda v, matrix=matrix: matrix @ v, b, 1e-12)
        assert left <= 1e-12
        assert torch.allclose(x, torch.linalg.solve(matrix, b), rtol=1e-9, atol=1e-10)
    assert gmres(lambda v: v, torch.zeros(3), 1e-6)[0].tolist() == [0.0] * 3
    singular = gmres(lambda v: 0 * v, torch.ones(3), 1e-6)
    assert singular[1] == pytest.approx(1)


def test_no_matrix_is_made():
    # heat on 100 points: rates up to -4e4, and the slow mode exp(-pi^2 t) is what is left
    n, t = 100, 0.05
    shape = torch.sin(math.pi * torch.arange(1, n + 1, dtype=torch.float64) / (n + 1))

    def heat(_, x):
        padded = torch.nn.functional.pad(x, (1, 1))
        return (padded[2:] - 2 * x + padded[:-2]) * (n + 1) ** 2

    rate = -4 * (n + 1) ** 2 * math.sin(math.pi / (2 * (n + 1))) ** 2
    solution = solve([Segment(0, t, heat)], shape.clone(), method="esdirk4", rtol=1e-6, atol=1e-8)
    assert float((solution.x1 - math.exp(rate * t) * shape).abs().max()) < 1e-6
    assert solution.stats.accepted < 30


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["backprop", "checkpoint"])
def test_gradients_are_differences_of_whole_solves(gradient):
    # stiff: what decays at 300 and 2,000, and a slow entry that all depend on
    def solved(p, x, steps, gradient="backprop"):
        def field(t, x):
            fast = p[0] * (x[1:] + 0.3 * torch.sin(x[1:]) - torch.cos(p[1] * t) * x[:1])
            return torch.cat(
                [
                    -p[1] * x[:1] * x[1:2] ** 2,
                    -fast * torch.tensor([300.0, 2000.0], dtype=torch.float64),
                ]
            )

        return solve(
            [Segment(0, 0.4, field), Segment(0.4, 1, field)],
            x,
            method=FIXED,
            steps=steps,
            gradient=gradient,
        ).x1

    p, x = double([1.1, 0.7]).requires_grad_(), double([0.8, 0.3, -0.4]).requires_grad_()
    weights = double([1.0, -2.0, 0.5])
    found = torch.cat(torch.autograd.grad((weights * solved(p, x, 4, gradient)).sum(), (p, x)))
    whole = torch.cat([p, x]).detach()
    moved = 1e-5 * torch.eye(5, dtype=torch.float64)
    with torch.no_grad():
        ends = [
            [(weights * solved(z[:2], z[2:], 4)).sum() for z in (whole + e, whole - e)]
            for e in moved
        ]
    right = torch.stack([(a - b) / 2e-5 for a, b in ends])
    assert torch.allclose(found, right, rtol=1e-5, atol=1e-6)


def test_memory_of_a_gradient_does_not_depend_on_the_iterations():
    # one evaluation for the parameters and one for the linear system, whatever Newton's method took
    rate = double(3.0).requires_grad_()
    calls = []

    def field(t, x):
        calls.append(torch.is_grad_enabled() and x.requires_grad)
        return -rate * x**3

    solution = solve([Segment(0, 1, field)], double([2.0]), method=FIXED, steps=1)
    assert solution.stats.evaluations == len(calls)
    kept = len(calls)
    solution.x1.backward()
    assert len(calls) == kept  # nothing is evaluated on the way back
    assert rate.grad is not None


@pytest.mark.slow
def test_newtons_failure_has_a_status_of_its_own():
    # y = x + c f(y) has no solution where f jumps across it
    def jump(t, x):
        return torch.where(x >= 0, -50.0, 70.0) + 0 * x

    solution = solve([Segment(0, 1, jump)], double([0.9]), method=FIXED, steps=3, throw=False)
    assert solution.status is Status.NOT_SOLVED
    assert solution.segment == 0
    assert (
        "Newton's method did not find a stage of an implicit step in segment 0" in solution.message
    )
    with pytest.raises(SolveError, match="Newton's method"):
        # twenty attempts, each shorter, do not get below the tolerance
        solve(
            [Segment(0, 1, lambda t, x: 1e20 * jump(t, x))],
            double([0.0]),
            method="esdirk4",
            step_control=StepControl(first_step=1.0),
        )
    broken = solve(
        [Segment(0, 1, lambda t, x: x / 0)], double([1.0]), method="esdirk4", throw=False
    )
    assert broken.status is Status.NON_FINITE


def test_what_an_implicit_method_has_not_is_named():
    x = double([1.0]).requires_grad_()
    segments = [Segment(0, 1, lambda t, x: -(x**3))]
    for kind in ("adjoint", "reversible"):
        with pytest.raises(ConfigError, match=f"gradient '{kind}'.*use"):
            solve(segments, x, method="esdirk4", gradient=kind)
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(ConfigError, match="keep the state in float32"):
            solve(segments, torch.ones(1, dtype=dtype), method=FIXED, rtol=0.1, atol=0.1)
    end = solve(segments, x, method="esdirk4").x1
    with pytest.raises(
        ConfigError, match="second derivatives are not defined for implicit methods"
    ):
        torch.autograd.grad(end, x, create_graph=True)
    with pytest.raises(ConfigError, match="differentiated backward only"):
        torch.func.jvp(lambda x: solve(segments, x, method=FIXED).x1, (x.detach(),), (x.detach(),))
    with pytest.raises(ConfigError, match="under vmap"):
        torch.func.vmap(lambda x: solve(segments, x, method=FIXED).x1)(
            torch.ones(3, 1, dtype=torch.float64)
        )


def test_a_gradient_that_gmres_does_not_find_is_an_error(monkeypatch):
    x = double([1.0, 2.0]).requires_grad_()
    end = solve([Segment(0, 1, lambda t, x: -x * x.sum())], x, method=FIXED).x1
    monkeypatch.setattr(
        sys.modules["solvers.implicit"], "gmres", lambda matrix, b, accuracy: (b, 0.1)
    )
    with pytest.raises(SolveError, match="only by GMRES"):
        torch.autograd.grad(end.sum(), x)


def test_a_field_of_numpy_is_told_that_it_has_no_derivative():
    segments = [Segment(0, 1, lambda t, x: torch.from_numpy(-x.numpy()))]
    with pytest.raises(ConfigError, match=r"computes with numpy.*use an explicit method under"):
        solve(segments, double([1.0]), method="esdirk4")
    with pytest.raises(ConfigError, match="computes with numpy"):
        solve(segments, double([1.0]).requires_grad_(), method="tsit5")
    with torch.no_grad():
        x1 = solve(segments, double([1.0]).requires_grad_(), method="tsit5").x1
    assert float(x1) == pytest.approx(math.exp(-1), rel=1e-5)
