"""Derivatives besides those of a state and parameters, first and backward: learned times, forward
mode, second ones, torch.func.
"""

import dataclasses
import math
from fractions import Fraction

import pytest
import torch
from torch.autograd import forward_ad

from solvers import GRADIENTS, METHODS, ConfigError, Event, Segment, odeint, odeint_dense, solve

KINDS = sorted(GRADIENTS)
DETACHED = [kind for kind in KINDS if GRADIENTS[kind].detached]
REQUESTS = [
    {"method": "euler", "steps": 7},
    {"method": "rk4", "steps": 7},
    {"method": "tsit5", "rtol": 1e-8, "atol": 1e-8},
]
X0 = torch.tensor([0.7, -0.3], dtype=torch.float64)
kinds = pytest.mark.parametrize("kind", KINDS)
requests = pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request["method"])


def tensor(value):
    return torch.tensor(value, dtype=torch.float64)


def end(x, times, rate, request, kind="backprop"):
    t0, t1, t2 = times
    segments = [
        Segment(t0, t1, lambda t, x: torch.sin(rate * x) * torch.cos(t)),
        Segment(t1, t2, lambda t, x: rate * x * (1 - x) + t),
    ]
    return solve(segments, x, gradient=kind, **request).x1


@pytest.mark.cases(2)
@requests
def test_learned_times_leave_the_bits_and_have_the_gradient_of_differences(request_):
    times = [tensor(v).requires_grad_() for v in (0.2, 1.0, 1.7)]
    value = end(X0, times, 1.3, request_)
    assert torch.equal(value.detach(), end(X0, (0.2, 1.0, 1.7), 1.3, request_))
    found = torch.autograd.grad(value.sum(), times)
    h = 1e-5
    for i, gradient in enumerate(found):
        shifted = [
            [float(t.detach()) + (h * sign if i == j else 0) for j, t in enumerate(times)]
            for sign in (1, -1)
        ]
        up, down = (end(X0, s, 1.3, request_).sum() for s in shifted)
        # an adaptive method's steps are other ones at the shifted times
        assert float(gradient) == pytest.approx(
            float(up - down) / (2 * h), abs=1e-7 if "steps" in request_ else 2e-3
        )


@pytest.mark.cases(1)
@kinds
@requests
def test_every_kind_learns_times(kind, request_):
    times = [tensor(v).requires_grad_() for v in (0.2, 1.0, 1.7)]
    x, rate = X0.clone().requires_grad_(), tensor(1.3).requires_grad_()
    fine = {
        **request_,
        **({"steps": 300 if request_["method"] == "euler" else 100} if "steps" in request_ else {}),
    }
    plain = (
        {**fine, "method": METHODS[fine["method"]].reversible(0.99)}
        if kind == "reversible"
        else fine
    )
    backprop = torch.autograd.grad(end(x, times, rate, plain).sum(), (*times, x, rate))
    found = torch.autograd.grad(end(x, times, rate, fine, kind).sum(), (*times, x, rate))
    tolerance = (
        {"euler": 2e-2, "rk4": 1e-6, "tsit5": 1e-5}[request_["method"]]
        if kind == "adjoint"
        else 1e-9
    )
    for mine, right in zip(found, backprop, strict=True):
        assert torch.allclose(mine, right, rtol=tolerance, atol=tolerance)


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["backprop", "adjoint"])
def test_the_gradient_in_the_ends_is_the_costate_times_the_field_there(kind):
    def field(t, x):
        return torch.sin(x) * torch.cos(t)

    t0, t1 = tensor(0.2).requires_grad_(), tensor(1.0).requires_grad_()
    x = X0.clone().requires_grad_()
    x1 = solve(
        [Segment(t0, t1, field)], x, method="tsit5", rtol=1e-11, atol=1e-11, gradient=kind
    ).x1
    p0, d0, d1 = torch.autograd.grad(x1.square().sum(), (x, t0, t1))
    assert float(d1) == pytest.approx(float((2 * x1 * field(t1, x1)).sum().detach()), rel=1e-8)
    assert float(d0) == pytest.approx(-float((p0 * field(t0, x)).sum().detach()), rel=1e-8)


def test_a_learned_time_in_single_precision_and_for_single_precision():
    for time, state in (
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
        (torch.float32, torch.float32),
    ):
        t1 = torch.tensor(1.0, dtype=time, requires_grad=True)
        x1 = solve(
            [Segment(0, t1, lambda t, x: -x)], torch.ones((), dtype=state), method="rk4", steps=20
        ).x1
        assert x1.dtype == state
        (found,) = torch.autograd.grad(x1, t1)
        assert found.dtype == time
        assert float(found) == pytest.approx(-math.exp(-1), rel=1e-5)


@pytest.mark.cases(1)
@kinds
@requests
def test_forward_mode_is_the_derivative_of_the_steps_in_state_parameter_and_time(kind, request_):
    rate, times = tensor(1.3), [tensor(v) for v in (0.2, 1.0, 1.7)]
    v, w, u = tensor([0.4, -1.0]), tensor(0.8), [tensor(0.3), tensor(-0.2), tensor(0.5)]
    jacobian = torch.autograd.functional.jacobian(
        lambda x, r, *ts: end(x, ts, r, request_), (X0, rate, *times)
    )
    expected = (
        jacobian[0] @ v + jacobian[1] * w + sum(j * s for j, s in zip(jacobian[2:], u, strict=True))
    )
    tolerance = 1e-6 if "steps" not in request_ else 1e-10
    if kind == "reversible":  # another solution, near this one
        tolerance = {"euler": 1.0, "rk4": 1e-2, "tsit5": 1e-5}[request_["method"]]
    _, found = torch.func.jvp(
        lambda x, r, *ts: end(x, ts, r, request_, kind), (X0, rate, *times), (v, w, *u)
    )
    assert torch.allclose(found, expected, rtol=tolerance, atol=tolerance)
    with forward_ad.dual_level():
        dual = [forward_ad.make_dual(t, s) for t, s in zip(times, u, strict=True)]
        value = end(
            forward_ad.make_dual(X0, v), dual, forward_ad.make_dual(rate, w), request_, kind
        )
        assert torch.allclose(forward_ad.unpack_dual(value).tangent, found, rtol=1e-12)


def test_forward_mode_of_reversible_is_that_of_its_own_scheme():
    x = X0.clone().requires_grad_()
    request = {"method": "euler", "steps": 7}
    value = end(x, (0.2, 1.0, 1.7), 1.3, request, "reversible")
    rows = torch.stack([torch.autograd.grad(value[i], x, retain_graph=True)[0] for i in range(2)])
    v = tensor([0.4, -1.0])
    _, found = torch.func.jvp(
        lambda x: end(x, (0.2, 1.0, 1.7), 1.3, request, "reversible"), (X0,), (v,)
    )
    assert torch.allclose(found, rows @ v, rtol=1e-10)


@pytest.mark.parametrize("kind", ["backprop", "checkpoint"])
def test_second_derivatives_are_those_of_the_closed_form(kind):
    x = tensor(
        [0.7]
    ).requires_grad_()  # x' = -x^2: x(1) = x/(1 + x), second derivative -2/(1 + x)^3
    value = solve(
        [Segment(0, 1, lambda t, x: -x.square())], x, method="rk4", steps=60, gradient=kind
    ).x1
    (first,) = torch.autograd.grad(value, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert float(second) == pytest.approx(-2 / 1.7**3, rel=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DETACHED)
def test_second_derivatives_that_are_not_there_raise_wherever_they_would_be_needed(kind):
    x, rate = tensor([0.7]).requires_grad_(), tensor(1.0).requires_grad_()

    def first(loss):
        value = solve(
            [Segment(0, 1, lambda t, x: -rate * x.square())],
            x,
            method="rk4",
            steps=20,
            gradient=kind,
        ).x1
        return torch.autograd.grad(loss(value), (x, rate), create_graph=True)

    for loss in (lambda v: v.sum(), lambda v: v.square().sum()):
        for of in (
            lambda gx, gr: gx.sum(),
            lambda gx, gr: gr.sum(),
            lambda gx, gr: (gx * gx).sum() + x.sum() + rate,
        ):
            for wrt in (x, rate):
                with pytest.raises(
                    ConfigError,
                    match=r"second derivatives .* use gradient='backprop' or 'checkpoint'",
                ):
                    torch.autograd.grad(of(*first(loss)), wrt)
            with pytest.raises(ConfigError, match="second derivatives"):
                of(*first(loss)).backward()
    # the first ones are right with a graph, too
    plain = torch.autograd.grad(first(lambda v: v.sum())[0].detach().sum() * x.sum(), x)[0]
    assert float(plain) == pytest.approx(1 / 1.7**2, rel=1e-3)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "backprop"])
def test_torch_func_has_backprop_and_the_others_say_so(kind):
    def value(x, kind="backprop"):
        return end(x, (0, 1, 2), 1.3, REQUESTS[1], kind).sum()

    x = X0.clone().requires_grad_()
    assert torch.allclose(
        torch.func.grad(value)(X0), torch.autograd.grad(value(x), x)[0], rtol=1e-12
    )
    for transform in (torch.func.grad, lambda f: lambda x: torch.func.vjp(f, x)):
        with pytest.raises(ConfigError, match="use gradient='backprop' in them"):
            transform(lambda x: value(x, kind))(X0)


def test_vmap_over_solves_of_fixed_steps_is_each_of_them():
    batch = torch.stack([X0, X0 / 2, X0.abs()])
    found = torch.func.vmap(lambda x: end(x, (0, 1, 2), 1.3, REQUESTS[1]))(batch)
    assert torch.allclose(
        found, torch.stack([end(x, (0, 1, 2), 1.3, REQUESTS[1]) for x in batch]), rtol=1e-13
    )
    with pytest.raises(ConfigError, match="use a method of fixed steps"):
        torch.func.vmap(lambda x: end(x, (0, 1, 2), 1.3, REQUESTS[2]))(batch)


TIMES = torch.tensor([0.2, 0.7, 1.5], dtype=torch.float64)


def flow(times):
    """y' = (1 + t) y/4 from y(t0) = X0, in closed form."""
    exponent = (times[:, None] + times[:, None] ** 2 / 2) / 4
    return X0 * torch.exp(exponent - exponent[0])


@kinds
@pytest.mark.parametrize("method", ["dopri5", "rk4"])
def test_forward_mode_by_the_times_of_odeint_is_that_of_the_closed_form(method, kind):
    along = torch.tensor([0.3, 1.0, -2.0], dtype=torch.float64)
    options = {"step_size": 0.02} if method == "rk4" else None

    def states(times):
        return odeint(
            lambda t, y: (1 + t) * y / 4, X0, times, method=method, options=options, gradient=kind
        )

    _, right = torch.func.jvp(flow, (TIMES,), (along,))
    _, tangent = torch.func.jvp(states, (TIMES,), (along,))
    assert torch.allclose(tangent, right, atol=1e-5)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(states(forward_ad.make_dual(TIMES, along))).tangent
        assert torch.equal(dual, tangent)


def test_times_with_a_derivative_that_is_not_there_are_refused():
    segments = [Segment(0, 2, lambda t, x: -x)]
    with pytest.raises(ConfigError, match="times require a gradient"):
        solve(segments, X0, method="tsit5", times=TIMES.clone().requires_grad_())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(TIMES, torch.ones_like(TIMES))
        with pytest.raises(ConfigError, match="times require a gradient"):
            solve(segments, X0, method="tsit5", times=dual)
        with pytest.raises(ConfigError, match="t0 requires a gradient"):
            odeint_dense(lambda t, y: -y, X0, dual[0], 2.0)


def batched_gradients():
    x = X0.clone().requires_grad_()
    x1 = solve([Segment(0, 1, lambda t, x: -x)], x, steps=4, gradient="adjoint").x1
    torch.autograd.grad(x1, x, torch.eye(2, dtype=torch.float64), is_grads_batched=True)


def event_time(height):
    events = Event(lambda t, x: x[0] - 0.1)
    return solve([Segment(0, 9, lambda t, x: -x)], height[None], steps=9, events=events).event_time


def with_torch_func(t, x):
    return torch.func.grad(lambda z: -(z**2).sum())(x)


def into_a_buffer(t, x):
    return torch.neg(x, out=torch.empty_like(x))


ONE = torch.tensor(1.0, dtype=torch.float64)
TRANSFORMS = {
    "not differentiated inside torch.func.grad": lambda: torch.func.grad(event_time)(ONE),
    "segment time t1 is batched by vmap": lambda: torch.func.vmap(
        lambda end: solve([Segment(0, end, lambda t, x: -x)], X0).x1
    )(TIMES),
    "t is batched by vmap": lambda: torch.func.vmap(
        lambda t: odeint(lambda t, y: -y, X0, t, method="rk4")
    )(TIMES[None]),
    "is_grads_batched": batched_gradients,
    "the field differentiates by torch.func": lambda: solve(
        [Segment(0, 1, with_torch_func)], X0.clone().requires_grad_(), gradient="checkpoint"
    ),
    "writes its value into a given tensor": lambda: solve(
        [Segment(0, 1, into_a_buffer)], X0, method="esdirk4"
    ),
}


@pytest.mark.parametrize("words", TRANSFORMS)
def test_what_torch_cannot_transform_is_named(words):
    with pytest.raises(ConfigError, match=words):
        TRANSFORMS[words]()


REUSED = {
    "its field": lambda field, s: Segment(s, 3.0, Segment(s, 2.0, field).field),
    "its end replaced": lambda field, s: dataclasses.replace(Segment(s, 2.0, field), t1=3.0),
    "its map replaced": lambda field, s: dataclasses.replace(
        Segment(s, 3.0, field), project=lambda x: x
    ),
    "its start replaced": lambda field, s: dataclasses.replace(Segment(s, 3.0, field), t0=s * 1),
}


@pytest.mark.parametrize("method", ["dopri5", "dop853"])
@pytest.mark.parametrize("how", REUSED)
def test_a_learned_time_of_a_segment_used_again_counts_once(how, method):
    """x(3) = x0 exp(int_s^3 cos .8t dt), so dx/ds = -cos(.8 s) x(3)."""
    s = tensor(0.9).requires_grad_()
    segment = REUSED[how](lambda t, x: x * torch.cos(0.8 * t), s)
    x1 = solve([segment], tensor([0.7]), method=method, rtol=1e-9, atol=1e-11).x1
    (gradient,) = torch.autograd.grad(x1.sum(), s)
    exact = 0.7 * math.exp((math.sin(2.4) - math.sin(0.72)) / 0.8)
    assert float(x1.detach()) == pytest.approx(exact, rel=1e-6)
    assert float(gradient) == pytest.approx(-math.cos(0.72) * exact, rel=1e-6)


def test_the_field_of_a_segment_with_a_learned_time_is_the_given_one():
    def field(t, x):
        return -x

    s = tensor(0.9).requires_grad_()
    segment = Segment(s, 2.0, field)
    assert segment.field is field
    assert segment.t0 is s
    assert segment.ends[0] == Fraction(0.9)
