import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp

from solvers import METHODS, ConfigError, Segment, SolveError, Status, StepControl, solve
from solvers.methods import get_method
from solvers.segment import check_segments
from tests.helpers import DEVICES

FIXED = [name for name, method in METHODS.items() if not method.adaptive]
ADAPTIVE = [name for name, method in METHODS.items() if method.adaptive]


def switched(rates=(-1.0, 2.0, 0.5), dt=0.7, watch=None):
    """Linear fields that change rate at each switch: x1 = x0 exp(dt sum rates)."""

    def field(rate, k):
        def evaluate(t, x):
            if watch is not None:
                watch.append((k, float(t)))
            return rate * x

        return evaluate

    return [
        Segment(Fraction(dt) * k, Fraction(dt) * (k + 1), field(rate, k))
        for k, rate in enumerate(rates)
    ]


@pytest.mark.cases(7)
@pytest.mark.parametrize("method", ADAPTIVE)
def test_adaptive_methods_reach_the_closed_form_over_switches(method):
    x0 = torch.tensor([1.0, -2.0], dtype=torch.float64)
    solution = solve(switched(), x0, method=method, rtol=1e-7, atol=1e-9)
    assert torch.allclose(solution.x1, x0 * math.exp(0.7 * 1.5), rtol=3e-4)
    assert solution.status is Status.SUCCESS


@pytest.mark.cases(2)
@pytest.mark.parametrize("method", ["dopri5", "tsit5", "torchdiffeq:dopri5"])
def test_adaptive_error_follows_the_tolerance(method):
    x0 = torch.tensor([1.0, -2.0], dtype=torch.float64)
    exact = x0 * math.exp(0.7 * 1.5)
    for tolerance in (1e-4, 1e-6, 1e-8, 1e-10):
        x1 = solve(switched(), x0, method=method, rtol=tolerance, atol=tolerance).x1
        assert float((x1 - exact).abs().max()) < 10 * tolerance


@pytest.mark.parametrize("method", FIXED)
def test_fixed_methods_have_their_order_on_a_nonlinear_switched_system_that_scipy_solves(method):
    fields = [
        lambda t, x: torch.stack([x[1], -torch.sin(x[0])]),
        lambda t, x: torch.stack([-x[0] * x[1], torch.cos(t)]),
    ]
    segments = [Segment(0, 1, fields[0]), Segment(1, 2, fields[1])]
    exact = np.array([1.0, 0.5])
    for lower, upper, f in [
        (0, 1, lambda t, x: [x[1], -math.sin(x[0])]),
        (1, 2, lambda t, x: [-x[0] * x[1], math.cos(t)]),
    ]:
        exact = solve_ivp(f, (lower, upper), exact, rtol=1e-12, atol=1e-13, method="DOP853").y[
            :, -1
        ]
    order = METHODS[method].order
    steps = (16, 32) if order < 4 else (8, 16)
    x0 = torch.tensor([1.0, 0.5], dtype=torch.float64)
    errors = [
        float((solve(segments, x0, method=method, steps=n).x1 - torch.tensor(exact)).norm())
        for n in steps
    ]
    # multistep methods start from another method and only approach their order
    slack = 0.7 if "adams" in method else 0.3
    assert math.log2(errors[0] / errors[1]) > order - slack


@pytest.mark.cases(22)
@pytest.mark.parametrize("method", sorted(METHODS))
def test_no_field_is_evaluated_outside_its_segment(method):
    watch = []
    solve(switched(watch=watch), torch.ones(3, dtype=torch.float64), method=method)
    assert {k for k, _ in watch} == {0, 1, 2}
    for k, t in watch:
        assert float(Fraction(0.7) * k) <= t <= float(Fraction(0.7) * (k + 1))


@pytest.mark.cases(22)
@pytest.mark.parametrize("method", sorted(METHODS))
def test_integration_backward_undoes_integration_forward(method):
    steps = 1 if METHODS[method].adaptive else 200
    x0 = torch.tensor([1.0, 2.0], dtype=torch.float64)
    there = solve([Segment(0, 1, lambda t, x: torch.sin(t + x))], x0, method=method, steps=steps).x1
    back = solve(
        [Segment(1, 0, lambda t, x: torch.sin(t + x))], there, method=method, steps=steps
    ).x1
    assert torch.allclose(back, x0, atol=2e-2 if METHODS[method].order == 1 else 2e-4)


@pytest.mark.cases(22)
@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("device", DEVICES)
def test_state_keeps_its_dtype_device_and_shape(method, dtype, device):
    x1 = solve(switched(), torch.ones(2, 3, dtype=dtype, device=device), method=method).x1
    assert x1.dtype == dtype
    assert x1.device.type == device
    assert x1.shape == (2, 3)


@pytest.mark.slow
def test_evaluations_are_counted_as_they_happen():
    for method, stages in (("euler", 1), ("midpoint", 2), ("heun", 2), ("rk4", 4)):
        watch = []
        solution = solve(switched(watch=watch), torch.ones(2), method=method, steps=5)
        assert solution.stats.evaluations == len(watch) == 3 * 5 * stages
        assert solution.stats.accepted == 15
        assert solution.stats.rejected == 0
    for method in ADAPTIVE:
        watch = []
        solution = solve(switched(watch=watch), torch.ones(2, dtype=torch.float64), method=method)
        assert solution.stats.evaluations == len(watch)


@pytest.mark.slow
@given(
    dt=st.floats(1e-3, 10),
    parts=st.integers(1, 12),
    steps=st.integers(1, 40),
)
@settings(max_examples=60)
def test_the_last_step_ends_exactly_at_the_segments_end(dt, parts, steps):
    segments = [
        Segment(Fraction(dt) * k, Fraction(dt) * (k + 1), lambda t, x: 0 * x) for k in range(parts)
    ]
    solution = solve(segments, torch.zeros(1), method="midpoint", steps=steps, save="steps")
    assert solution.times[steps::steps] == tuple(
        float(Fraction(dt) * (k + 1)) for k in range(parts)
    )
    assert all(a < b for a, b in zip(solution.times, solution.times[1:], strict=False))


def test_a_segments_length_is_dt_to_the_last_bit():
    dt = 0.1
    assert 3 * dt - 2 * dt != dt
    lengths = [
        float(Segment(Fraction(dt) * k, Fraction(dt) * (k + 1), lambda t, x: x).length)
        for k in range(100)
    ]
    assert lengths == [dt] * 100


@pytest.mark.parametrize("method", ["rk4", "tsit5", "torchdiffeq:rk4", "torchdiffeq:dopri5"])
def test_save_gives_the_states_asked_for(method):
    x0 = torch.ones(2, dtype=torch.float64)
    ends = solve(switched(), x0, method=method)
    segments = solve(switched(), x0, method=method, save="segments")
    steps = solve(switched(), x0, method=method, save="steps")
    assert len(ends.states) == 2
    assert len(segments.states) == 4
    assert len(steps.states) == steps.stats.accepted + 1
    assert steps.times[0] == 0
    assert steps.times[-1] == segments.times[-1] == float(Fraction(0.7) * 3)
    for solution in (ends, segments, steps):
        assert torch.equal(solution.states[0], x0)
        assert torch.equal(solution.states[-1], solution.x1)
        assert len(solution.times) == len(solution.states)


def test_projection_follows_every_accepted_step():
    def circle(x):
        return x / x.norm()

    def turn(t, x):
        return torch.stack([-x[1], x[0]])

    for method in ("euler", "rk4", "tsit5", "torchdiffeq:euler", "torchdiffeq:rk4"):
        steps = 1 if METHODS[method].adaptive else 10
        solution = solve(
            [Segment(0, 1, turn, project=circle)],
            torch.tensor([1.0, 0.0], dtype=torch.float64),
            method=method,
            steps=steps,
            save="steps",
        )
        assert len(solution.states) > 2
        assert all(abs(float(x.norm()) - 1) < 1e-14 for x in solution.states)


def test_entering_a_segment_puts_the_state_where_it_asks():
    segment = Segment(0, 1, lambda t, x: 0 * x, enter=lambda x: x + 5)
    assert float(solve([segment], torch.zeros(1), steps=4).x1) == 5


def test_the_adaptive_step_is_carried_across_switches():
    x0 = torch.ones(4, dtype=torch.float64)
    alike = switched(rates=(-1.0, 1.1, -0.9, 1.0, -1.1, 0.9))
    together = solve(alike, x0, method="dopri5").stats.evaluations
    apart = 0
    for segment in alike:
        solution = solve([segment], x0, method="dopri5")
        x0, apart = solution.x1, apart + solution.stats.evaluations
    assert together < apart


@pytest.mark.cases(16)
@pytest.mark.parametrize("method", sorted(set(METHODS) - {"torchdiffeq:scipy_solver"}))
def test_backprops_gradients_of_state_and_parameter_are_right(method):
    steps = 1 if METHODS[method].adaptive else 3
    accuracy = 1e-6 if METHODS[method].order > 2 else 1e-5

    def end(x, rate):
        segments = [
            Segment(0, 0.5, lambda t, x: torch.sin(rate * x)),
            Segment(0.5, 1, lambda t, x: rate * torch.cos(x + t)),
        ]
        tolerances = {"rtol": accuracy, "atol": accuracy} if METHODS[method].adaptive else {}
        return solve(segments, x, method=method, steps=steps, **tolerances).x1

    x0 = torch.tensor([0.3, -0.8], dtype=torch.float64, requires_grad=True)
    rate = torch.tensor([1.2, 0.7], dtype=torch.float64, requires_grad=True)
    # step sizes are constants of the differentiation, so an adaptive solve agrees with differences
    # only to its tolerance
    tolerance = 100 * accuracy if METHODS[method].adaptive else 1e-6
    assert torch.autograd.gradcheck(end, (x0, rate), atol=tolerance, rtol=tolerance)


# What goes wrong, and what is said about it.


def blow_up(t, x):
    return x * x


@pytest.mark.parametrize("method", [*FIXED, "dopri5", "tsit5", "torchdiffeq:dopri5"])
def test_a_state_that_becomes_non_finite_says_where(method):
    segments = [Segment(0, 1, lambda t, x: -x), Segment(1, 3, lambda t, x: 1e200 * x**3)]
    steps = 1 if METHODS[method].adaptive else 30
    solution = solve(
        segments,
        torch.ones(2, dtype=torch.float64),
        method=method,
        steps=steps,
        throw=False,
        save="segments",
    )
    # an adaptive method shortens its steps instead of leaving the finite numbers
    expected = (
        {Status.NON_FINITE, Status.STEP_UNDERFLOW}
        if METHODS[method].adaptive
        else {Status.NON_FINITE}
    )
    assert solution.status in expected
    assert solution.segment == 1
    assert 1 <= solution.time <= 3
    assert len(solution.states) == 2
    with pytest.raises(SolveError, match="in segment 1 at t = ") as caught:
        solve(segments, torch.ones(2, dtype=torch.float64), method=method, steps=steps)
    assert caught.value.solution.segment == 1


@pytest.mark.parametrize("method", sorted(METHODS))
def test_an_initial_state_that_is_not_finite_is_found_at_the_start(method):
    solution = solve(
        switched(), torch.tensor([1.0, math.nan], dtype=torch.float64), method=method, throw=False
    )
    assert (solution.status, solution.segment, solution.time) == (Status.NON_FINITE, 0, 0.0)


@pytest.mark.cases(1)
@pytest.mark.parametrize("method", ["dopri5", "tsit5", "torchdiffeq:dopri5"])
def test_a_singularity_ends_as_an_underflow_near_it(method):
    solution = solve(
        [Segment(0, 2, blow_up)], torch.ones(1, dtype=torch.float64), method=method, throw=False
    )
    assert solution.status is Status.STEP_UNDERFLOW
    assert solution.time == pytest.approx(1, abs=1e-3)
    assert "raise rtol and atol" in solution.message


@pytest.mark.parametrize("method", ["dopri5", "tsit5", "torchdiffeq:dopri5"])
def test_the_step_limit_is_a_status(method):
    stiff = [Segment(0, 10, lambda t, x: -1e5 * (x - torch.cos(t)))]
    solution = solve(
        stiff,
        torch.ones(1, dtype=torch.float64),
        method=method,
        throw=False,
        step_control=StepControl(max_steps=50),
    )
    assert solution.status is Status.TOO_MANY_STEPS
    assert 0 < solution.time < 10


@pytest.mark.parametrize(
    ("request_", "words", "mended"),
    [
        ({"method": "rk5"}, "unknown method 'rk5': did you mean 'rk4'", {"method": "rk4"}),
        ({"method": "dopri5", "steps": 4}, "takes no steps = 4: give rtol and atol", {"steps": 1}),
        (
            {"method": "rk4", "rtol": 1e-3},
            "takes no rtol or atol: give steps",
            {"rtol": None, "steps": 4},
        ),
        ({"method": "rk4", "atol": 1e-3}, "takes no rtol or atol", {"method": "tsit5"}),
        (
            {"method": "tsit5", "rtol": 0.0},
            "rtol = 0.0: give a positive finite number",
            {"rtol": 1e-3},
        ),
        ({"method": "tsit5", "rtol": -1.0}, "rtol = -1.0", {"rtol": 1.0}),
        ({"method": "tsit5", "atol": math.nan}, "atol = nan", {"atol": 1e-9}),
        ({"method": "tsit5", "rtol": math.inf}, "rtol = inf", {"rtol": 1e-6}),
        (
            {"method": "tsit5", "rtol": 1e-9},
            "rtol = 1e-09 is below what float32 resolves",
            {"rtol": 1e-6},
        ),
        (
            {"method": "tsit5", "atol": 1e-50},
            "atol = 1e-50 vanishes in float32, whose least number is 1.2e-38",
            {"atol": 1e-37},
        ),
        ({"steps": 0}, "steps = 0: give a whole number of at least 1", {"steps": 1}),
        ({"steps": -3}, "steps = -3", {"steps": 3}),
        ({"steps": True}, "steps = True", {"steps": 1}),
        (
            {"gradient": "backpropp"},
            "unknown gradient 'backpropp': did you mean 'backprop'",
            {"gradient": "backprop"},
        ),
        ({"save": "step"}, "unknown save 'step': did you mean 'steps'", {"save": "steps"}),
    ],
)
def test_a_request_that_makes_no_sense_is_named_and_what_it_advises_works(request_, words, mended):
    with pytest.raises(ConfigError, match=re.escape(words)):
        solve(switched(), torch.ones(2), **request_)
    assert solve(switched(), torch.ones(2), **{**request_, **mended}).status is Status.SUCCESS


@pytest.mark.parametrize("wrong", [0, -3, True])
def test_a_number_of_attempts_below_one_is_named(wrong):
    with pytest.raises(ConfigError, match=f"max_steps = {wrong}: give a whole number "):
        StepControl(max_steps=wrong)
    assert (
        solve(
            switched(), torch.ones(2), method="tsit5", step_control=StepControl(max_steps=100)
        ).status
        is Status.SUCCESS
    )


def test_segments_that_do_not_meet_are_named():
    with pytest.raises(ConfigError, match="segment 0 ends at t = 1 but segment 1 starts at t = 2"):
        solve([Segment(0, 1, blow_up), Segment(2, 3, blow_up)], torch.ones(1))
    with pytest.raises(ConfigError, match="no segments"):
        solve([], torch.ones(1))


@pytest.mark.parametrize(("t0", "t1"), [(0, math.inf), (math.nan, 1), (1, 1)])
def test_a_segment_without_a_finite_length_is_refused(t0, t1):
    with pytest.raises(ConfigError):
        Segment(t0, t1, blow_up)


def test_a_field_of_the_wrong_shape_is_named():
    with pytest.raises(ConfigError, match=r"returned shape \(3,\) for a state of shape \(2,\)"):
        solve([Segment(0, 1, lambda t, x: torch.ones(3))], torch.ones(2))


def test_what_is_no_segment_method_or_velocity_is_named():
    with pytest.raises(ConfigError, match="not all of type Segment"):
        check_segments([1])
    with pytest.raises(ConfigError, match="unknown method 3"):
        get_method(3)
    with pytest.raises(ConfigError, match="the field returned float"):
        solve([Segment(0, 1, lambda t, x: 1.0)], torch.ones(1))
    with pytest.raises(ConfigError, match="not a finite number"):
        Segment(0, 10**400, blow_up)


def test_a_solve_that_breaks_keeps_the_start_of_the_segment_that_broke():
    segments = [Segment(0, 1, lambda t, x: -x), Segment(1, 2, lambda t, x: x / 0)]
    solution = solve(segments, torch.ones(1), method="rk4", throw=False)
    assert solution.times == (0.0, 1.0)
    assert float(solution.states[1]) == pytest.approx(0.375)


def test_a_field_that_breaks_only_the_first_time_is_not_called_a_success():
    calls = []

    def field(t, x):
        calls.append(t)
        return x / 0 if len(calls) == 1 else x

    assert solve([Segment(0, 1, field)], torch.ones(1), throw=False).status is Status.NON_FINITE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_can_be_solved_adaptively(dtype):
    x1 = solve(
        [Segment(0, 1, lambda t, x: torch.cos(t) + 0 * x)],
        torch.zeros(3, dtype=dtype),
        method="tsit5",
        rtol=0.05,
    ).x1
    assert x1.dtype == dtype
    assert float(x1[0]) == pytest.approx(math.sin(1), rel=0.05)


@pytest.mark.parametrize(
    "x0", [torch.ones(2, dtype=torch.int64), torch.ones(0), torch.ones(2).to(torch.float8_e5m2)]
)
def test_a_state_that_is_no_floating_tensor_is_refused(x0):
    with pytest.raises(ConfigError, match="non-empty tensor of a floating or complex type"):
        solve(switched(), x0)


def faults(method, steps, rtol):
    """What is wrong with a request, as its message must begin to say it."""
    if method not in METHODS:
        return ["unknown method 'nonsense'"]
    adaptive = METHODS[method].adaptive
    wrong = {
        f"steps = {steps}: give a whole number": steps < 1,
        f"method '{method}' has fixed steps": not adaptive and rtol is not None,
        f"method '{method}' chooses its own steps": adaptive and steps > 1,
        f"rtol = {rtol!r}: give a positive finite number": (
            adaptive and rtol is not None and not 0 < rtol < math.inf
        ),
        f"rtol = {rtol:g} is below what float64 resolves" if rtol is not None else "": (
            adaptive and rtol is not None and 0 < rtol < 4 * np.finfo(float).eps
        ),
    }
    return [words for words, is_so in wrong.items() if is_so]


@pytest.mark.slow
@given(
    method=st.sampled_from([*sorted(METHODS), "nonsense"]),
    steps=st.integers(-1, 5),
    rtol=st.none() | st.floats() | st.floats(1e-9, 1),
    scale=st.floats(-50, 50),
    power=st.integers(0, 4),
)
@settings(max_examples=150)
def test_a_request_is_refused_for_what_is_wrong_with_it_and_else_carried_out(
    method, steps, rtol, scale, power
):
    x0 = torch.tensor([0.5, 1.5], dtype=torch.float64)
    fields = [lambda t, x: scale * x**power, lambda t, x: torch.sin(t * x)]

    def solved(**request):
        if (
            getattr(METHODS.get(request["method"]), "adaptive", False)
            and request["method"] != "torchdiffeq:scipy_solver"
        ):
            request["step_control"] = StepControl(max_steps=200)
        return solve([Segment(k, k + 1, field) for k, field in enumerate(fields)], x0, **request)

    expected = faults(method, steps, rtol)
    if expected:
        with pytest.raises(ConfigError) as caught:
            solved(method=method, steps=steps, rtol=rtol)
        assert any(str(caught.value).startswith(words) for words in expected)
        # mended, it is carried out, on a problem that every method can do
        fields[0] = lambda t, x: torch.sin(x)
        method = method if method in METHODS else "rk4"
        adaptive = METHODS[method].adaptive
        assert (
            solved(
                method=method,
                steps=1 if adaptive else max(1, steps),
                rtol=1e-3 if adaptive else None,
            ).status
            is Status.SUCCESS
        )
        return
    solution = solved(method=method, steps=steps, rtol=rtol, throw=False)
    if solution.status is Status.SUCCESS:
        assert torch.isfinite(solution.x1).all()
    else:
        # the first field can blow up; where it cannot, and 200 steps can meet the tolerance,
        # nothing may fail
        tight = METHODS[method].adaptive and (METHODS[method].order < 4 or (rtol or 1e-6) < 1e-6)
        assert power > 1 or abs(scale) > 1 or tight


@pytest.mark.parametrize("method", ["euler", "rk4", "dopri5"])
def test_of_several_solutions_from_a_point_without_lipschitz_one_is_returned(method):
    """x' = sqrt|x| has x = 0 and x = t^2/4 from 0; from just beside it there is one."""
    segment = Segment(0.0, 2.0, lambda t, x: x.abs().sqrt())
    options = {"rtol": 1e-8, "atol": 1e-30} if method == "dopri5" else {"steps": 500}
    still, moved = (
        solve([segment], torch.tensor([x], dtype=torch.float64), method=method, **options)
        for x in (0.0, 1e-12)
    )
    assert (still.status, float(still.x1)) == (Status.SUCCESS, 0.0)
    assert float(moved.x1) == pytest.approx(1.0, rel=5e-2)
