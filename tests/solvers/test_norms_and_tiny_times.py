"""Norms that return no number, and times so short that steps vanish."""

import re
from fractions import Fraction

import pytest
import torch

from solvers import (
    ConfigError,
    Segment,
    SolveError,
    StepControl,
    odeint,
    odeint_adjoint,
    odeint_event,
    solve,
    solve_each,
)

X0 = torch.ones(3, 2, dtype=torch.float64)
TIMES = torch.tensor([0.0, 1.0], dtype=torch.float64)


def decay(t, x):
    return -x


NORMS = {
    "a vector": lambda e: e.abs().amax(-1, keepdim=True).expand_as(e),
    "all errors": lambda e: e,
    "None": lambda e: None,
    "complex": lambda e: e.abs().amax() * 1j,
    "bool": lambda e: (e.abs() < 1).all(),
    "text": lambda e: "0.5",
    "a tuple": lambda e: (1.0, 2.0),
}
SOLVES = {
    "solve": lambda norm: solve(
        [Segment(0, 1, decay)], X0, method="tsit5", step_control=StepControl(norm=norm)
    ),
    "implicit": lambda norm: solve(
        [Segment(0, 1, decay)], X0, method="esdirk4", step_control=StepControl(norm=norm)
    ),
    "steady": lambda norm: solve(
        [Segment(0, 1, decay)],
        X0,
        method="rk4",
        steady=1e-3,
        step_control=StepControl(norm=norm),
    ),
    "tree": lambda norm: solve(
        [Segment(0, 1, lambda t, x: {"a": -x["a"]})],
        {"a": X0},
        method="tsit5",
        step_control=StepControl(norm=lambda e: norm(e["a"])),
    ),
    "rows": lambda norm: solve_each(
        [Segment(0, 1, decay)], X0, step_control=StepControl(norm=norm)
    ),
    "odeint": lambda norm: odeint(decay, X0, TIMES, options={"norm": norm}),
    "odeint_adjoint": lambda norm: odeint_adjoint(decay, X0, TIMES, options={"norm": norm}),
    "odeint_event": lambda norm: odeint_event(
        decay, X0, TIMES[0], event_fn=lambda t, x: x - 0.5, options={"norm": norm}
    ),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("call", SOLVES)
def test_a_norm_that_returns_no_number_is_named(call, norm):
    with pytest.raises(ConfigError, match=r"norm returned .*: return one floating-point number"):
        SOLVES[call](NORMS[norm])


@pytest.mark.parametrize("call", SOLVES)
def test_a_norm_of_one_number_serves_with_or_without_an_axis(call):
    SOLVES[call](lambda e: e.abs().amax())
    SOLVES[call](lambda e: e.abs().amax().reshape(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("span", [5e-324, 1e-310, 1e-46, 1e-200])
@pytest.mark.parametrize("method", ["esdirk4", "tsit5", "dop853", "rk4", "euler"])
def test_a_solve_over_a_subnormal_time_is_the_identity_with_its_gradient(method, span, dtype):
    # exp(-span) is 1 in every type
    x0 = torch.ones(2, dtype=dtype, requires_grad=True)
    x1 = solve([Segment(0, span, decay)], x0, method=method).x1
    assert torch.equal(x1, x0)
    (gradient,) = torch.autograd.grad(x1.sum(), x0)
    assert torch.equal(gradient, torch.ones_like(x0))


@pytest.mark.parametrize("method", ["esdirk4", "tsit5"])
@pytest.mark.parametrize("span", [5e-324, 1e-322])
def test_a_field_that_is_infinite_there_fails_in_a_line(method, span):
    with pytest.raises(SolveError, match="segment 0"):
        solve(
            [Segment(0, span, lambda t, x: x / 5e-324)],
            torch.ones(2, dtype=torch.float64),
            method=method,
        )


@pytest.mark.parametrize("gradient", ["backprop", "checkpoint", "adjoint"])
@pytest.mark.parametrize("steps", [4, 16, 256, 1024])
def test_steps_that_rounding_loses_are_told(steps, gradient):
    """Euler's exact result (1 - 1/n)^n is near 0.367 for all."""
    x0 = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    segments = [Segment(0, 1, lambda t, x: -x)]
    solution = solve(segments, x0, method="euler", steps=steps, gradient=gradient)
    exact = (1 - 1 / steps) ** steps
    is_off = abs(float(solution.x1[0].detach()) - exact) > 0.1 * exact
    assert bool(solution.warnings) == is_off == (steps > 16)
    if is_off:
        (sentence,) = solution.warnings
        assert re.match(r"rounding to bfloat16 loses \d+% of what the \d+ steps add", sentence)
    wide = solve(segments, x0.float(), method="euler", steps=steps, gradient=gradient)
    assert wide.warnings == ()


def test_a_slow_field_loses_no_more_than_its_types_resolution_and_events_see_the_loss():
    x0 = torch.ones(3, dtype=torch.bfloat16)
    slow = solve([Segment(0, 1, lambda t, x: -1e-3 * x)], x0, method="rk4", steps=64)
    assert torch.equal(slow.x1, x0)
    assert slow.warnings == ()
    fast = solve(
        [Segment(0, 1, lambda t, x: -x)], x0, method="rk4", steps=999, on_step=lambda t, x: None
    )
    assert "loses 100%" in fast.warnings[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["euler", "rk4", "tsit5"])
def test_steps_that_the_times_type_does_not_resolve_are_told(method, dtype):
    start = 1e8 if dtype is torch.float32 else 1e17

    def field(t, x):
        return -x * (t - start) / 100

    def solved(end):
        request = {"method": method, "steps": 50} if method != "tsit5" else {"method": method}
        return solve([Segment(start, end, field)], torch.ones(1, dtype=dtype), **request)

    words = f"the times of {str(dtype)[6:]} are"
    assert any(words in sentence for sentence in solved(start + 16).warnings)
    near = [Segment(1000, 1001, lambda t, x: -x)]
    assert solve(near, torch.ones(1, dtype=dtype), method="tsit5", rtol=1e-4).warnings == ()


def test_odeint_warns_of_times_that_are_not_resolved():
    t = torch.tensor([1e8, 1e8 + 2], dtype=torch.float64)
    with pytest.warns(UserWarning, match="the times of float32 are 8 apart, and the steps"):
        odeint(lambda t, x: -x * (t - 1e8), torch.ones(1), t, rtol=1e-5, atol=1e-6)


def velocity_of_time(t, x):
    return torch.ones_like(x) * t


@pytest.mark.parametrize("solves", [solve, solve_each], ids=["solve", "rows"])
@pytest.mark.parametrize("method", ["bosh3", "tsit5", "dop853"])
def test_no_step_to_an_infinite_state_is_accepted(solves, method):
    # t^2/2 passes float64's largest number at t = 1.9e154; the velocity stays finite
    solution = solves([Segment(0, 3e154, velocity_of_time)], X0, method=method, throw=False)
    statuses = {solution.status} if solves is solve else set(solution.status)
    assert {status.name for status in statuses} == {"NON_FINITE"}
    assert torch.isfinite(solution.x1).all()


@pytest.mark.parametrize("solves", [solve, solve_each], ids=["solve", "rows"])
@pytest.mark.parametrize(
    ("start", "end", "advice"),
    [
        (0, 1e-200, "the segment is 1e-200 long, and steps below 1e-150 do not count"),
        (1, 1 + 3 * 2**-52, "near t = 1 times are 2.2e-16 apart: let t start at 0"),
        (1e16, 1e16 + 6, "near t = 1e\\+16 times are 2 apart: let t start at 0"),
    ],
)
def test_a_segment_without_room_for_steps_is_named(solves, start, end, advice):
    speed = 1e3 / (end - start)
    with pytest.raises(SolveError, match=advice):
        solves([Segment(start, end, lambda t, x: -speed * x)], X0, method="tsit5")


@pytest.mark.parametrize("solves", [solve, solve_each], ids=["solve", "rows"])
@pytest.mark.parametrize("end", [5e-324, 1e-320, -5e-324])
def test_a_slow_field_over_the_shortest_segments_is_right(solves, end):
    solution = solves([Segment(0, end, decay)], X0, method="tsit5")
    assert torch.equal(solution.x1, X0)  # exp(-1e-320) is 1


@pytest.mark.parametrize(
    ("start", "end"), [(-1e308, 1e308), (1, Fraction(1) + Fraction(1, 10**20))]
)
def test_a_segment_whose_length_float64_has_not_is_refused(start, end):
    with pytest.raises(ConfigError, match="time in another unit"):
        Segment(start, end, decay)
