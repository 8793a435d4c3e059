"""Times: fields are evaluated on their own side of a switch, and segments may be as short, as long
or as far away as numbers allow.
"""

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
import torchdiffeq

from solvers import METHODS, Segment, Status, odeint, solve, solve_each
from solvers.odeint import ITS_METHODS
from solvers.torchdiffeq_methods import NAMES
from solvers.tree import leaves, mapped

X0 = torch.tensor([1.0, 0.4], dtype=torch.float64)
OWN = ["euler", "midpoint", "heun", "rk4", "dopri5", "tsit5"]
SHARED = {  # one function for both segments, however it asks
    "<": lambda t, x: -x if t < 0.7 else 2 * torch.cos(x),
    "<=": lambda t, x: -x if t <= 0.7 else 2 * torch.cos(x),
    "float": lambda t, x: -x if float(t) < 0.7 else 2 * torch.cos(x),
    "where": lambda t, x: torch.where(t < 0.7, -x, 2 * torch.cos(x)),
}
APART = [Segment(0, 0.7, lambda t, x: -x), Segment(0.7, 1, lambda t, x: 2 * torch.cos(x))]


def shared(name):
    return [Segment(0, 0.7, SHARED[name]), Segment(0.7, 1, SHARED[name])]


def request_for(method, dtype=torch.float64):
    tolerance = 1e-9 if dtype is torch.float64 else 1e-5
    return {
        "method": method,
        **({"rtol": tolerance, "atol": tolerance} if METHODS[method].adaptive else {"steps": 20}),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("method", [*OWN[1:], "torchdiffeq:rk4", "torchdiffeq:dopri5"])
def test_a_field_shared_by_two_segments_is_that_of_each(method, name, dtype):
    x0, request = X0.to(dtype), request_for(method, dtype)
    own, one = solve(APART, x0, **request), solve(shared(name), x0, **request)
    assert torch.equal(own.x1, one.x1)
    assert own.stats == one.stats


@pytest.mark.cases(2)
@pytest.mark.parametrize("gradient", ["checkpoint", "adjoint", "reversible"])
@pytest.mark.parametrize("method", ["euler", "rk4", "tsit5"])
def test_gradients_see_the_same_sides(method, gradient):
    found = []
    for segments in (APART, shared("<")):
        x = X0.clone().requires_grad_()
        end = solve(segments, x, gradient=gradient, **request_for(method)).x1
        found.append(torch.autograd.grad(end.square().sum(), x)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("method", OWN)
def test_checkpoint_evaluates_where_backprop_does(method):
    seen = []
    for gradient in ("backprop", "checkpoint"):
        times = []

        def field(t, x, times=times):
            times.append(float(t))
            return torch.sin(t + x)

        x = X0.clone().requires_grad_()
        x1 = solve(
            [Segment(0, 1, field), Segment(1, 2, field)],
            x,
            gradient=gradient,
            **request_for(method),
        ).x1
        seen.append((set(times), x1.detach()))
    assert seen[0][0] == seen[1][0]
    assert torch.equal(seen[0][1], seen[1][1])


def test_euler_is_the_plain_loop_bit_for_bit_and_evaluates_where_it_does():
    def field(t, x):
        return torch.cos(3 * t) * x

    x, times = X0, torch.linspace(0, 1, 11, dtype=torch.float64).tolist()
    for t0, t1 in pairwise(times):
        x = x + (t1 - t0) * field(torch.tensor(t0, dtype=torch.float64), x)
    segments = [Segment(t0, t1, field) for t0, t1 in pairwise(times)]
    assert torch.allclose(solve(segments, X0).x1, x, rtol=1e-15, atol=0)
    seen = []

    def watched(t, x):
        seen.append(float(t))
        return x

    solve([Segment(t0, t1, watched) for t0, t1 in pairwise(times)], X0)
    assert seen == times[:-1]


@pytest.mark.parametrize("method", OWN)
def test_no_evaluation_is_at_a_switch_or_beyond(method):
    for start, end in ((0.0, 0.7), (0.7, 0.0)):
        for dtype in (torch.float32, torch.float64):
            seen = []

            def field(t, x, seen=seen):
                seen.append(t)
                return torch.cos(t) * x

            solve([Segment(start, end, field)], X0.to(dtype), **request_for(method, dtype))
            low, high = torch.tensor(0.0, dtype=dtype), torch.tensor(0.7, dtype=dtype)
            assert all(t < high for t in seen)
            assert all(t > low for t in seen) or method == "euler"
            assert any(t == torch.nextafter(high, low) for t in seen) or method in (
                "euler",
                "midpoint",
            )


@pytest.mark.parametrize("method", ["euler", "rk4", "dopri5", "tsit5"])
def test_a_segment_of_a_few_ulp_is_one_step(method):
    for t0, t1 in ((0.3, 0.1 + 0.2), (1.0, 1 + 4e-16), (1 + 4e-16, 1.0), (0.0, 5e-324)):
        solution = solve([Segment(t0, t1, lambda t, x: -x + 0 * t)], X0, method=method)
        assert solution.stats.accepted == 1
        assert torch.allclose(
            solution.x1,
            X0 * math.exp(-min(t1 - t0, 1.0)) if t1 - t0 < 1 else solution.x1,
            rtol=1e-14,
        )


def test_a_long_segment_from_zero_is_reached():
    solution = solve(
        [Segment(0, 1e10, lambda t, x: -1e-9 * x)], X0, method="tsit5", rtol=1e-9, atol=1e-12
    )
    assert torch.allclose(solution.x1, X0 * math.exp(-10), rtol=1e-6)
    assert solution.stats.accepted < 200


BROKEN = {
    "from 0.5 on": (lambda t, x: -x if t < 0.5 else x * math.nan, 0.5),
    "infinite from 0.5 on": (lambda t, x: -x if t < 0.5 else x / 0, 0.5),
    "a logarithm": (lambda t, x: torch.log(0.5 - t) + 0 * x, 0.5),
    "from the start": (lambda t, x: x * math.nan, 0.0),
    "a root that turns negative": (lambda t, x: -torch.sqrt(x), 2 * math.sqrt(0.4)),
}


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("method", ["dopri5", "tsit5"])
def test_a_field_that_is_not_finite_is_named_so_and_where(method, name):
    field, where = BROKEN[name]
    solution = solve([Segment(0, 2, field)], X0, method=method, throw=False)
    assert solution.status is Status.NON_FINITE
    assert solution.time == pytest.approx(where, abs=1e-4)
    assert torch.isfinite(solution.x1).all()


def test_float32_far_from_zero_takes_few_more_steps_than_near_it():
    # the field is told t = 1e5 to 0.008: a pair whose error estimate weighs neighbouring stages
    # heavily, as tsit5, sees that
    def taken(start):
        segment = Segment(start, start + 10, lambda t, x: torch.cos(t - start) + 0 * x)
        return solve(
            [segment], torch.ones(3), method="dopri5", rtol=1e-4, atol=1e-4
        ).stats.evaluations

    assert taken(1e5) <= 2 * taken(0.0)


@pytest.mark.parametrize("start", [0.0, 1024.0, 1e6])
@pytest.mark.parametrize("method", ["heun_euler", "tsit5"])
def test_float32_steps_shorter_than_the_spacing_of_its_times_take_no_more_time(method, start):
    """The second entry counts the time itself. At 1e6, float32 times are 0.06 apart."""

    def field(t, x):
        return torch.stack([-30 * x[..., 0], torch.ones_like(x[..., 1])], -1)

    x0 = torch.tensor([1.0, 0.0])
    segments = [Segment(start, start + 0.5, field)]
    request = {"method": method, "rtol": 1e-3, "atol": 1e-4}
    right = torch.tensor([math.exp(-15), 0.5])
    checkpointed = solve(segments, x0, gradient="checkpoint", **request).x1
    for x1 in (
        solve(segments, x0, **request).x1,
        solve_each(segments, x0[None], **request).x1[0],
        checkpointed,
    ):
        assert torch.allclose(x1, right, rtol=0, atol=1e-3)


THEIRS = [name for name in NAMES if name not in ITS_METHODS and name != "scipy_solver"]


@pytest.mark.parametrize("structure", ["tensor", "tuple", "dict"])
@pytest.mark.parametrize("options", [None, {"step_size": 0.05, "max_order": 4}])
@pytest.mark.parametrize("method", THEIRS)
def test_torchdiffeqs_own_methods_have_the_derivative_by_the_times(method, options, structure):
    """Against the closed form of y' = -(1 + t) y, and torchdiffeq's own values."""
    if options is not None and not method.endswith("_adams"):
        options = None
    t = torch.linspace(0, 1, 11, dtype=torch.float64).requires_grad_()
    y0 = torch.ones(2, dtype=torch.float64)
    start = {"tensor": y0, "tuple": (y0, y0[:1]), "dict": {"y": y0}}[structure]

    def field(t, y):
        return mapped(lambda part: -(1 + t) * part, y)

    y = leaves(odeint(field, start, t, method=method, options=options))[0]
    theirs = torchdiffeq.odeint(
        lambda t, y: -(1 + t) * y, y0, t.detach(), method=method, options=options
    )
    if structure == "tensor":
        assert torch.equal(y, theirs)
    weights = torch.arange(1.0, 12.0, dtype=torch.float64)
    (found,) = torch.autograd.grad((weights * y.sum(1)).sum(), t)
    exact = (y0 * torch.exp(t[0] + t[0] ** 2 / 2 - t - t**2 / 2)[:, None]).sum(1)
    (right,) = torch.autograd.grad((weights * exact).sum(), t)
    assert torch.allclose(found, right, rtol=1e-2)  # as accurate as the states


REPLACED = {
    "t1": ((0.0, 1.0), {"t1": 3.0}),
    "both ends": ((0.0, 1.0), {"t0": 1.0, "t1": 2.0}),
    "t0": ((0.0, 1.0), {"t0": -1.0}),
    "turned": ((0.0, 1.0), {"t0": 1.0, "t1": 0.0}),
    "shorter": ((0.0, 1.0), {"t1": 0.5}),
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("method", ["euler", "rk4", "dopri5", "tsit5", "dop853"])
@pytest.mark.parametrize("case", REPLACED)
def test_a_segment_with_replaced_times_is_the_one_made_anew(case, method):
    times, changes = REPLACED[case]
    replaced = dataclasses.replace(Segment(*times, lambda t, x: torch.cos(t) + 0 * x), **changes)
    x0 = torch.zeros(1, dtype=torch.float64)
    request = request_for(method)
    x1 = float(solve([replaced], x0, **request).x1)
    anew = Segment(replaced.start, replaced.end, replaced.field)
    assert x1 == float(solve([anew], x0, **request).x1)
    exact = math.sin(replaced.end) - math.sin(replaced.start)
    assert x1 == pytest.approx(exact, abs=0.2 if method == "euler" else 1e-6)
