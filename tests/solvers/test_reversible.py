"""Where the reversible scheme works, and that it says so where it does not: against its 2 x 2
matrix, closed forms and scipy.
"""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from solvers import METHODS, Reversible, Segment, SolveError, Status, solve
from solvers.march import march
from solvers.run import Run
from tests.helpers import small_model

ONE = torch.ones(1, dtype=torch.float64)


def decay(t, x):
    return -x


def pulled(t, x):
    return -5 * (x - torch.cos(t))


# Linear and nonlinear problems that damp, some of DETEST's (Hull et al. 1972) among them: field,
# x0, end.
DAMPED = {
    "decay": (decay, [1.0], 20),
    "forced": (pulled, [1.0], 10),
    "A2": (lambda t, x: -(x**3) / 2, [1.0], 20),
    "A4": (lambda t, x: x / 4 * (1 - x / 20), [1.0], 20),
    "B1": (
        lambda t, x: torch.stack([2 * (x[0] - x[0] * x[1]), -(x[1] - x[0] * x[1])]),
        [1.0, 3.0],
        8,
    ),
    "B2": (
        lambda t, x: torch.stack([-x[0] + x[1], x[0] - 2 * x[1] + x[2], x[1] - x[2]]),
        [2.0, 0.0, 1.0],
        8,
    ),
    "C1": (lambda t, x: torch.cat([-x[:1], x[:-2] - x[1:-1], x[-2:-1]]), [1.0] + [0.0] * 4, 10),
}


def exact(field, x0, end):
    def f(t, x):
        return field(torch.tensor(t, dtype=torch.float64), torch.tensor(x)).numpy()

    return torch.tensor(
        solve_ivp(f, (0, end), x0, rtol=1e-12, atol=1e-13, method="DOP853").y[:, -1]
    )


@pytest.mark.parametrize("method", ["euler", "heun", "rk4", "tsit5"])
@pytest.mark.parametrize("coupling", [0.5, 0.9, 0.99])
def test_one_step_of_a_linear_field_is_the_matrix_and_its_eigenvalues_are_where_the_condition_says(
    method, coupling
):
    base = METHODS[method].fixed()
    scheme = base.reversible(coupling)

    def one_step(a, method, pair):
        run = Run(1, 1.0, 1.0, 1, partner=pair[1])
        y = march(method, [Segment(0, 1, lambda t, x: a * x)], pair[0], run).x1
        return [float(y), float(run.partner if run.partner is not None else y)]

    for w in (-3.0, -1.1, -0.3, -0.05, -0.005, 0.2):
        grows, shrinks = (one_step(a, base, (ONE, None))[0] for a in (w, -w))
        q = shrinks - 1
        matrix = np.array(
            [[coupling, grows - coupling], [-coupling * q, 1 - q * (grows - coupling)]]
        )
        found = np.array([one_step(w, scheme, pair) for pair in ((ONE, 0 * ONE), (0 * ONE, ONE))]).T
        assert np.allclose(found, matrix, rtol=1e-12, atol=1e-13)
        assert np.linalg.det(matrix) == pytest.approx(coupling)
        stable = 0 < q * (grows - coupling) < 2 * (1 + coupling)
        assert stable == bool(np.abs(np.linalg.eigvals(matrix)).max() < 1)


@pytest.mark.parametrize("coupling", [0.5, 0.99])
def test_on_the_whole_plane_too(coupling):
    for w in (0.3j, -0.1 + 1j, -0.01 + 0.05j, -0.6 + 0.2j, 0.05 + 1j):
        grows, q = (sum(v**k / math.factorial(k) for k in range(5)) for v in (w, -w))
        q = q - 1
        matrix = np.array(
            [[coupling, grows - coupling], [-coupling * q, 1 - q * (grows - coupling)]]
        )
        trace = np.trace(matrix)
        assert (abs(trace - coupling * trace.conjugate()) < 1 - coupling**2) == bool(
            np.abs(np.linalg.eigvals(matrix)).max() < 1
        )


@pytest.mark.cases(1)
@pytest.mark.parametrize("coupling", [0.5, 0.99])
@pytest.mark.parametrize("name", sorted(DAMPED))
def test_an_adaptive_solve_is_right_or_says_that_it_is_not(name, coupling):
    field, x0, end = DAMPED[name]
    right = exact(field, x0, end)
    for tolerance in (1e-3, 1e-6):
        request = {"method": "tsit5", "rtol": tolerance, "atol": tolerance, "throw": False}
        x = torch.tensor(x0, dtype=torch.float64)
        solution = solve([Segment(0, end, field)], x, gradient=Reversible(coupling), **request)
        if solution.status is Status.SUCCESS:
            plain = solve(
                [Segment(0, end, field)], x, method="tsit5", rtol=tolerance, atol=tolerance
            ).x1
            allowed = max(
                40 * tolerance * max(1, float(right.abs().max())),
                10 * float((plain - right).abs().max()),
            )
            assert float((solution.x1 - right).abs().max()) < allowed
        else:
            assert solution.status is Status.PAIR_APART


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", sorted(DAMPED))
@pytest.mark.parametrize(("method", "steps"), [("euler", 200), ("rk4", 100)])
def test_fixed_steps_never_end_far_from_the_solution_with_success(method, steps, name):
    field, x0, end = DAMPED[name]
    right = exact(field, x0, end)
    for coupling in (0.5, 0.99):
        x = torch.tensor(x0, dtype=torch.float64)
        solution = solve(
            [Segment(0, end, field)],
            x,
            method=method,
            steps=steps,
            gradient=Reversible(coupling),
            throw=False,
        )
        if solution.status is Status.SUCCESS:
            plain = solve([Segment(0, end, field)], x, method=method, steps=steps).x1
            allowed = max(0.5 * float(right.norm()), 20 * float((plain - right).norm()))
            assert float((solution.x1 - right).norm()) < allowed
        else:
            assert solution.status is Status.PAIR_APART


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "request_", [{"method": "rk4", "steps": 100}, {"method": "euler", "steps": 200}]
)
def test_the_issues_divergence_is_named_with_its_place_and_checkpoint_offered(request_):
    x = ONE.clone().requires_grad_()
    solution = solve([Segment(0, 20, decay)], x, gradient="reversible", throw=False, **request_)
    assert solution.status is Status.PAIR_APART
    assert solution.segment == 0
    assert 0 < solution.time < 20
    with pytest.raises(
        SolveError, match=r"drifted apart in segment 0 at t = .*gradient='checkpoint'"
    ):
        solve([Segment(0, 20, decay)], x, gradient="reversible", **request_)
    with torch.no_grad(), pytest.raises(SolveError, match="drifted apart"):
        solve([Segment(0, 20, decay)], x, gradient="reversible", **request_)
    # what the message offers works
    (found,) = torch.autograd.grad(
        solve([Segment(0, 20, decay)], x, gradient="checkpoint", **request_).x1, x
    )
    assert float(found) == pytest.approx(math.exp(-20), abs=3e-9)
    end = solve([Segment(0, 20, decay)], x, gradient=Reversible(0.7), **request_).x1
    assert float(end.detach()) == pytest.approx(math.exp(-20), abs=3e-8)
    if (
        request_["method"] == "euler"
    ):  # the way there is stable, but 0.7^200 is 1e-31: the way back is not
        with pytest.raises(SolveError, match="misses the initial state"):
            torch.autograd.grad(end, x)


@pytest.mark.slow
def test_coarse_steps_of_a_model_are_a_model_and_a_mode_that_grows_is_none_there_either():
    model = small_model("pre", dt=1.0, depth=12)
    x0 = torch.randn(
        1, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    end = solve(model.depth.segments(), x0, gradient="reversible").x1
    scheme = solve(model.depth.segments(), x0, method=METHODS["euler"].reversible(0.99)).x1
    found, right = (torch.autograd.grad(x.square().sum(), x0)[0] for x in (end, scheme))
    assert torch.allclose(found, right, rtol=1e-9)
    segments = [Segment(k, k + 1, lambda t, x: -x / 5) for k in range(100)]
    solution = solve(segments, ONE, method="rk4", gradient="reversible", throw=False)
    assert solution.status is Status.PAIR_APART


@pytest.mark.slow
def test_a_way_back_that_loses_the_state_raises_instead_of_giving_a_gradient():
    rate = torch.tensor(1.0, requires_grad=True)
    x = torch.linspace(-1, 1, 5).requires_grad_()
    segments = [Segment(0, 5, lambda t, x: -5 * rate * (x - torch.cos(t)))]
    end = solve(segments, x, method="rk4", steps=400, gradient=Reversible(0.9)).x1
    with pytest.raises(SolveError, match=r"misses the initial state by .*gradient='checkpoint'"):
        torch.autograd.grad(end.sum(), (x, rate))


def test_a_state_that_starts_at_zero_has_its_gradient():
    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    end = solve(
        [Segment(0, 1, lambda t, x: torch.cos(t) + x)],
        x,
        method="rk4",
        steps=50,
        gradient="reversible",
    ).x1
    (found,) = torch.autograd.grad(end.sum(), x)
    assert torch.allclose(found, torch.full_like(found, math.e), rtol=1e-6)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["a rotation", "a network"])
@pytest.mark.parametrize("steps", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_in_float32_the_gradient_is_right_to_a_hundredth_or_is_refused(steps, name):
    weights = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 2
    turn = torch.tensor(
        [[0.0, 1, 0, 0], [-1, 0, 0, 0], [0, 0, 0, 2], [0, 0, -2, 0]], dtype=torch.float64
    )
    fields = {
        "a rotation": lambda t, x: x @ turn.to(x.dtype),
        "a network": lambda t, x: torch.tanh(x @ weights.to(x.dtype)),
    }
    found = []
    for dtype in (torch.float64, torch.float32):
        x = torch.linspace(0.5, 1, 4, dtype=dtype).requires_grad_()
        end = solve(
            [Segment(0, 10, fields[name])], x, method="rk4", steps=steps, gradient="reversible"
        ).x1
        try:
            found.append(torch.autograd.grad(end.square().sum(), x)[0].double())
        except SolveError as error:
            if dtype is torch.float64 or "misses the initial state" not in str(error):
                raise
            return
    assert float((found[1] - found[0]).norm()) < 0.01 * float(found[0].norm())
