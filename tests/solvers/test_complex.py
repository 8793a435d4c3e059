"""Complex states: closed forms of x' = i w x and of x' = A x, the same equation for real and
imaginary parts, torchdiffeq and scipy.
"""

import math

import pytest
import torch
import torchdiffeq
from scipy.integrate import solve_ivp

from solvers import (
    ERROR_NORMS,
    GRADIENTS,
    METHODS,
    Adjoint,
    Event,
    RungeKutta,
    Segment,
    StepControl,
    odeint,
    solve,
    solve_each,
)
from solvers.torchdiffeq_methods import NAMES

OWN = [name for name, method in METHODS.items() if isinstance(method, RungeKutta)]
THEIRS = [f"torchdiffeq:{name}" for name in NAMES if name != "scipy_solver"]
KINDS = [*GRADIENTS, Adjoint(restore=False)]
GENERATOR = torch.Generator().manual_seed(5)
A = torch.randn(3, 3, dtype=torch.complex128, generator=GENERATOR)
Z0 = torch.tensor([0.8 - 0.3j, 0.1 + 1.1j, -0.6 + 0.2j], dtype=torch.complex128)
WEIGHTS = torch.tensor([1.0 - 0.5j, 0.3 + 2.0j, -1.0 + 0.1j], dtype=torch.complex128)


def request_for(method, tolerance=1e-9, steps=60):
    chosen = METHODS[method]
    return {
        "method": method,
        **({"rtol": tolerance, "atol": tolerance} if chosen.adaptive else {"steps": steps}),
    }


def loss(x):
    """Re <c, x>, whose gradient in x is c."""
    return (WEIGHTS.conj() * x).real.sum()


def turning(w):
    """x' = i w x in two segments up to t = 1.2."""
    return [Segment(0, 0.5, lambda t, x: 1j * w * x), Segment(0.5, 1.2, lambda t, x: x * w * 1j)]


def accuracy(method, tolerance=1e-9, steps=60):
    order = METHODS[method].order
    return 1e3 * tolerance if METHODS[method].adaptive else 20 * steps**-order


@pytest.mark.cases(22)
@pytest.mark.parametrize("method", [*OWN, *THEIRS])
def test_a_rotation_is_its_closed_form(method):
    w = 2.0
    tolerance = 1e-9 if METHODS[method].order > 4 else 1e-5
    x1 = solve(turning(w), Z0, **request_for(method, tolerance)).x1
    assert x1.dtype == torch.complex128
    assert float((x1 - Z0 * complex(math.cos(1.2 * w), math.sin(1.2 * w))).abs().max()) < accuracy(
        method, tolerance
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    "method", ["rk4", "tsit5", "dop853", "esdirk4", "torchdiffeq:dopri5", "torchdiffeq:rk4"]
)
def test_gradients_are_the_closed_forms_in_state_frequency_and_time(kind, method):
    implicit, foreign = (
        getattr(METHODS[method], "implicit", False),
        method.startswith("torchdiffeq:"),
    )
    if (kind != "backprop" and kind != "checkpoint" and implicit) or (
        kind == "reversible" and foreign
    ):
        pytest.skip("refused, and tested to be")
    # L = Re <c, z0 exp(i w T)>: dL/dz0 = c exp(-i w T), dL/dw = Re <c, i T x1>, dL/dT = Re <c, i w
    # x1>
    w, end = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (1.7, 1.2))
    z0 = Z0.clone().requires_grad_()
    segments = [
        Segment(0, 0.5, lambda t, x: 1j * w * x),
        Segment(0.5, end, lambda t, x: x * w * 1j),
    ]
    x1 = solve(segments, z0, gradient=kind, **request_for(method, 1e-6 if implicit else 1e-9)).x1
    found = torch.autograd.grad(loss(x1), (z0, w, end))
    turned = torch.exp(1j * w.detach() * 1.2)
    right = (WEIGHTS * turned.conj(), loss(1.2j * Z0 * turned), loss(1j * 1.7 * Z0 * turned))
    for mine, other in zip(found, right, strict=True):
        assert mine.dtype == other.dtype
        assert torch.allclose(mine, other, atol=1e-4 if implicit else 1e-6)


@pytest.mark.cases(4)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_gradient_in_a_complex_matrix_is_that_of_its_exponential(kind):
    a = A.clone().requires_grad_()
    z0 = Z0.clone().requires_grad_()
    right = torch.autograd.grad(loss(torch.matrix_exp(a * 0.9) @ z0), (a, z0))
    x1 = solve(
        [Segment(0, 0.9, lambda t, x: a @ x)],
        z0,
        method="tsit5",
        rtol=1e-10,
        atol=1e-10,
        gradient=kind,
    ).x1
    for mine, other in zip(torch.autograd.grad(loss(x1), (a, z0)), right, strict=True):
        assert torch.allclose(mine, other, rtol=1e-7, atol=1e-7)


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", GRADIENTS)
def test_a_real_state_by_a_complex_parameter_loses_no_part_of_its_gradient(kind):
    # x' = Re(c) x + Im(c) x^2, so that the gradient in c has both parts
    found = []
    for field in (
        lambda c, x: c.real * x + c.imag * x**2,
        lambda c, x: (c * torch.complex(x, -(x**2))).real,
    ):
        c = torch.tensor(-0.7 + 0.4j, dtype=torch.complex128, requires_grad=True)
        x0 = torch.tensor([0.5, -0.8], dtype=torch.float64)
        x1 = solve(
            [Segment(0, 1, lambda t, x, f=field, c=c: f(c, x))],
            x0,
            method="rk4",
            steps=40,
            gradient=kind,
        ).x1
        found.append(torch.autograd.grad(x1.square().sum(), c)[0])
    step, x0 = 1e-6, torch.tensor([0.5, -0.8], dtype=torch.float64)

    def value(a, b):
        return (
            solve([Segment(0, 1, lambda t, x: a * x + b * x**2)], x0, method="rk4", steps=40)
            .x1.square()
            .sum()
        )

    right = complex(
        float(value(-0.7 + step, 0.4) - value(-0.7 - step, 0.4)) / (2 * step),
        float(value(-0.7, 0.4 + step) - value(-0.7, 0.4 - step)) / (2 * step),
    )
    for mine in found:
        assert complex(mine) == pytest.approx(right, rel=1e-6)


@pytest.mark.cases(5)
@pytest.mark.parametrize("norm", ERROR_NORMS)
@pytest.mark.parametrize("method", [name for name in OWN if METHODS[name].adaptive])
def test_steps_do_not_depend_on_the_phase(method, norm):
    # errors are measured by |z|: exp(i p) x solves the same linear equation, in the same steps to
    # rounding
    request = {
        **request_for(method, 1e-4 if METHODS[method].order < 5 else 1e-7),
        "step_control": StepControl(norm=norm),
    }
    segments = [Segment(0, 1.5, lambda t, x: torch.cos(3 * t) * (A @ x))]
    plain = solve(segments, Z0, **request)
    turned = solve(segments, Z0 * complex(math.cos(0.7), math.sin(0.7)), **request)
    assert (plain.stats.accepted, plain.stats.rejected) == (
        turned.stats.accepted,
        turned.stats.rejected,
    )
    assert torch.allclose(
        plain.x1 * complex(math.cos(0.7), math.sin(0.7)), turned.x1, rtol=1e-9, atol=1e-9
    )


def conjugated(t, x):
    """A derivative that is linear over the reals only, and stiff."""
    return -40 * (x - 0.5j * x.conj()) + torch.cos(t) * x.flip(0)


@pytest.mark.cases(9)
@pytest.mark.parametrize("method", OWN)
def test_a_field_that_is_not_holomorphic_is_its_equation_for_real_and_imaginary_parts(method):
    # fixed steps of equal size, so that only the algebra can differ
    def parts(t, x):
        return torch.view_as_real(conjugated(t, torch.view_as_complex(x)))

    chosen = METHODS[method].fixed()
    z, r = Z0.clone().requires_grad_(), torch.view_as_real(Z0).clone().requires_grad_()
    steps = 3 if chosen.implicit else 30
    x1 = solve([Segment(0, 0.4, conjugated)], z, method=chosen, steps=steps).x1
    right = solve([Segment(0, 0.4, parts)], r, method=chosen, steps=steps).x1
    close = {"rtol": 1e-7, "atol": 1e-9} if chosen.implicit else {"rtol": 1e-12, "atol": 1e-13}
    assert torch.allclose(torch.view_as_real(x1), right, **close)
    (mine,) = torch.autograd.grad(loss(x1), z)
    (other,) = torch.autograd.grad((torch.view_as_real(WEIGHTS) * right).sum(), r)
    assert torch.allclose(torch.view_as_real(mine.resolve_conj()), other, **close)


def test_single_precision_times_events_rows_and_stops():
    solution = solve(
        turning(2.0),
        Z0.to(torch.complex64),
        method="tsit5",
        times=[0.2, 0.5, 1.1],
        on_step=lambda t, x: None,
    )
    for t, state in zip(solution.times, solution.states, strict=True):
        assert state.dtype == torch.complex64
        assert float((state - Z0 * complex(math.cos(2 * t), math.sin(2 * t))).abs().max()) < 1e-5
    # Re x = 0 first where the phase of the last entry, (-0.6 + 0.2i) exp(2it), is 3 pi/2
    z0 = Z0[2:].clone().requires_grad_()
    ended = solve(
        [Segment(0, 9, turning(2.0)[0].field)],
        z0,
        method="tsit5",
        rtol=1e-9,
        atol=1e-9,
        events=Event(lambda t, x: x[0].real),
    )
    phase = math.atan2(0.2, -0.6)
    assert float(ended.event_time.detach()) == pytest.approx((1.5 * math.pi - phase) / 2, abs=1e-8)
    # the time's change by the phase is -1/2, and the phase's by z is i z/|z|^2
    (found,) = torch.autograd.grad(ended.event_time, z0)
    assert torch.allclose(found, -0.5j * Z0[2:] / Z0[2:].abs() ** 2, atol=1e-7)
    rows = solve_each([Segment(0, 1.2, lambda t, x: x * 2j)], Z0[:, None], rtol=1e-9, atol=1e-9)
    assert torch.allclose(rows.x1[:, 0], Z0 * complex(math.cos(2.4), math.sin(2.4)), atol=1e-7)
    broken = solve([Segment(0, 1, lambda t, x: x / 0)], Z0, method="rk4", throw=False)
    assert broken.status.name == "NON_FINITE"


@pytest.mark.cases(4)
@pytest.mark.parametrize("method", [None, "rk4", "euler", "bosh3", "dopri8", "explicit_adams"])
def test_odeint_is_torchdiffeqs(method):
    t = torch.linspace(0, 1, 11, dtype=torch.float64)
    found = []
    for call in (odeint, torchdiffeq.odeint):
        a, z0 = A.clone().requires_grad_(), Z0.clone().requires_grad_()
        y = call(lambda t, y, a=a: a @ y * torch.cos(t), z0, t, method=method, rtol=1e-9, atol=1e-9)
        found.append((y.detach(), *torch.autograd.grad(loss(y[-1]), (a, z0))))
    assert found[0][0].dtype == torch.complex128
    for mine, other in zip(*found, strict=True):
        # of bosh3 they interpolate otherwise between steps
        assert torch.allclose(mine, other, rtol=1e-6, atol=1e-4 if method == "bosh3" else 1e-6)


def test_a_pair_of_complex_tensors_and_scipys_solution():
    def field(t, y):
        return 1j * y["a"] * y["b"].abs().sum(), -0.5 * y["b"] + 1j * y["a"].conj()

    start = {"a": Z0[:2], "b": Z0[1:]}
    t = torch.tensor([0.0, 0.7], dtype=torch.float64)
    found = odeint(
        lambda t, y: dict(zip("ab", field(t, y), strict=True)), start, t, rtol=1e-10, atol=1e-10
    )

    def flat(t, y):
        y = torch.tensor(y)
        return torch.cat(field(t, {"a": y[:2], "b": y[2:]})).numpy()

    right = solve_ivp(
        flat, (0, 0.7), torch.cat([Z0[:2], Z0[1:]]).numpy(), method="DOP853", rtol=1e-11, atol=1e-12
    ).y[:, -1]
    assert torch.allclose(
        torch.cat([found["a"][-1], found["b"][-1]]), torch.tensor(right), atol=1e-8
    )
