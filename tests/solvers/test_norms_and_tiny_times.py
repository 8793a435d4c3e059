"""Norms that return no number, and times so short that steps vanish."""

import re

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
