"""Events, steady states and callbacks: against closed forms, scipy's events and differences of
whole solves.
"""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.optimize import brentq

from solvers import GRADIENTS, METHODS, ConfigError, Event, Segment, SolveError, Status, solve
from solvers.event import _root

DENSE = sorted(name for name, method in METHODS.items() if getattr(method, "dense", False))
X0 = torch.tensor([1.0, -0.5], dtype=torch.float64)
SIZES = {1: 3e-2, 2: 3e-3, 3: 3e-4, 4: 1e-5, 5: 1e-6, 8: 1e-6}


def pendulum(t, x):
    return torch.stack([x[1], -torch.sin(x[0]) + 0.1 * torch.cos(t)])


def request_for(method, tolerance=1e-8, steps=300):
    adaptive = METHODS[method].adaptive
    tolerance = max(tolerance, 1e-5 if METHODS[method].order < 4 else 0)
    return {
        "method": method,
        **({"rtol": tolerance, "atol": tolerance} if adaptive else {"steps": steps}),
    }


def fall(t, x):
    return torch.stack([x[1], torch.full_like(x[1], -9.81)])


@pytest.mark.cases(4)
@pytest.mark.parametrize("direction", [-1, 0, 1])
@pytest.mark.parametrize("method", DENSE)
def test_an_event_is_scipys(method, direction):
    def g(t, x):
        return x[0] - 0.3 * math.cos(t)

    g.terminal, g.direction = True, direction
    right = solve_ivp(
        lambda t, x: [x[1], -math.sin(x[0]) + 0.1 * math.cos(t)],
        (0, 20),
        X0.numpy(),
        rtol=1e-11,
        atol=1e-12,
        events=g,
        method="DOP853",
    )
    event = Event(lambda t, x: x[0] - 0.3 * torch.cos(t), direction)
    split = [Segment(0, 1.3, pendulum), Segment(1.3, 20, pendulum)]
    solution = solve(split, X0, events=event, **request_for(method, steps=1000))
    accuracy = SIZES[METHODS[method].order]
    assert solution.status is Status.EVENT
    assert solution.event == 0
    assert solution.time == pytest.approx(right.t_events[0][0], abs=accuracy)
    assert float(solution.event_time) == solution.time
    assert np.abs(solution.x1.numpy() - right.y_events[0][0]).max() < accuracy
    assert solution.times[-1] == solution.time
    assert torch.equal(solution.states[-1], solution.x1)
    assert solution.segment == int(solution.time > 1.3)
    assert f"event 0) in segment {solution.segment} at t = " in solution.message


@pytest.mark.parametrize("backward", [False, True])
def test_a_falling_stone_lands_to_the_last_bits(backward):
    # a quadratic, which the interpolant has exactly
    sign = -1 if backward else 1
    segment = Segment(0, sign * 10, lambda t, x: torch.stack([x[1], torch.full_like(x[1], -9.81)]))
    start = torch.tensor([20.0, 0.0]).double()
    solution = solve([segment], start, method="tsit5", events=Event(lambda t, x: x[0]))
    assert solution.time == pytest.approx(sign * math.sqrt(40 / 9.81), rel=1e-13)
    assert float(solution.x1[0]) == pytest.approx(0, abs=1e-12)
    assert float(solution.x1[0]) <= 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(GRADIENTS))
@pytest.mark.parametrize("method", ["rk4", "dopri5", "tsit5", "dop853"])
def test_time_and_state_have_the_gradients_of_the_implicit_function(method, kind):
    # dT = -(dg + g_x dx)/(g_t + g_x f) by differences of whole solves; height, gravity and the
    # plane that it lands on all count
    def landing(p, **request):
        def field(t, x):
            return torch.stack([x[1], -p[1] - 0.2 * torch.sin(t) * x[1]])

        start = torch.stack([p[0], 0 * p[0]])
        plane = Event(lambda t, x: x[0] - p[2] * t)
        solution = solve(
            [Segment(0, 1, field), Segment(1, 9, field)], start, events=plane, **request
        )
        return torch.cat([solution.event_time[None], solution.x1])

    request = request_for(method, 1e-10)
    p = torch.tensor([20.0, 9.81, 0.5], dtype=torch.float64, requires_grad=True)
    values = landing(p, gradient=kind, **request)
    found = torch.stack([torch.autograd.grad(value, p, retain_graph=True)[0] for value in values])
    with torch.no_grad():
        fine = {"method": "tsit5", "rtol": 1e-12, "atol": 1e-12}
        right = torch.stack(
            [
                (landing(p + e, **fine) - landing(p - e, **fine)) / 2e-5
                for e in 1e-5 * torch.eye(3, dtype=torch.float64)
            ],
            dim=1,
        )
        assert torch.allclose(landing(p, **request), values, atol=1e-5)
    assert torch.allclose(found, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["backprop", "checkpoint"])
def test_second_derivatives_of_the_time_are_those_of_the_formula(kind):
    # T = sqrt(2 h/g): dT/dh = T/2h, d2T/dh2 = -T/4h^2, d2T/dhdg = -T/4hg
    h, g = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (20.0, 9.81))
    segment = Segment(0, 10, lambda t, x: torch.stack([x[1], -g + 0 * x[1]]))
    start = torch.stack([h, torch.zeros_like(h)])
    time = solve(
        [segment], start, method="rk4", steps=7, gradient=kind, events=Event(lambda t, x: x[0])
    ).event_time
    (first,) = torch.autograd.grad(time, h, create_graph=True)
    second = torch.autograd.grad(first, (h, g))
    landing = math.sqrt(40 / 9.81)
    assert float(time.detach()) == pytest.approx(landing, rel=1e-12)
    assert float(first.detach()) == pytest.approx(landing / 40, rel=1e-12)
    assert [float(s) for s in second] == pytest.approx(
        [-landing / 1600, -landing / (80 * 9.81)], rel=1e-11
    )


def test_a_solve_goes_on_from_an_event_with_its_gradient():
    # a ball that keeps 0.8 of its speed: the n-th landing is at T (1 + 2 r (1 - r^(n-1))/(1 - r)),
    # dT_n/dh = T_n/2h
    height = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    t, x = 0.0, torch.stack([height, torch.zeros_like(height)])
    for _ in range(4):
        ground = Event(lambda t, x: x[0], direction=-1)
        solution = solve(
            [Segment(t, 20, fall)], x, method="dopri5", rtol=1e-10, atol=1e-10, events=ground
        )
        t, x = solution.event_time, torch.stack([solution.x1[0], -0.8 * solution.x1[1]])
    right = math.sqrt(10 / 9.81) * (1 + 1.6 * (1 - 0.8**3) / 0.2)
    assert float(t.detach()) == pytest.approx(right, rel=1e-10)
    assert float(torch.autograd.grad(t, height)[0]) == pytest.approx(right / 10, rel=1e-9)


def test_the_first_of_several_events_is_taken_and_named():
    def line(level):
        return Event(lambda t, x: x[0] - level)

    segment = Segment(0, 10, fall)
    start = torch.tensor([20.0, 0.0]).double()
    for levels, first in (([1.0, 12.0, 5.0], 1), ([50.0, 2.0], 1), ([3.0], 0)):
        solution = solve(
            [segment], start, method="rk4", steps=2, events=[line(level) for level in levels]
        )
        assert solution.event == first
        assert float(solution.x1[0]) == pytest.approx(levels[first], abs=1e-12)


def test_no_event_is_the_plain_solve_and_a_start_at_zero_is_none():
    never = Event(lambda t, x: x[0] + 100)
    plain = solve([Segment(0, 3, pendulum)], X0, method="tsit5")
    solution = solve([Segment(0, 3, pendulum)], X0, method="tsit5", events=never)
    assert solution.status is Status.SUCCESS
    assert solution.event is None
    assert solution.event_time is None
    assert torch.equal(solution.x1, plain.x1)
    assert solution.stats == plain.stats
    thrown = torch.tensor([0.0, 9.81]).double()
    assert solve(
        [Segment(0, 9, fall)], thrown, method="tsit5", events=Event(lambda t, x: x[0])
    ).time == pytest.approx(2)


def test_a_jump_between_segments_is_no_root():
    segments = [
        Segment(0, 1, lambda t, x: 0 * x),
        Segment(1, 2, lambda t, x: 0 * x, enter=lambda x: -x),
    ]
    assert (
        solve(segments, X0, method="rk4", events=Event(lambda t, x: x[0])).status is Status.SUCCESS
    )


def test_saved_states_end_with_the_event_and_have_none_beyond():
    for save in ("ends", "segments", "steps"):
        solution = solve(
            [Segment(0, 1, fall), Segment(1, 9, fall)],
            torch.tensor([20.0, 0.0]).double(),
            method="rk4",
            steps=4,
            save=save,
            events=Event(lambda t, x: x[0]),
        )
        assert list(solution.times) == sorted(set(solution.times))
        assert solution.times[-1] == solution.time
        assert len(solution.times) == {"ends": 2, "segments": 3, "steps": 6}[save]


def test_float32_states_have_events_too():
    solution = solve(
        [Segment(0, 9, fall)],
        torch.tensor([20.0, 0.0]),
        method="tsit5",
        rtol=1e-5,
        atol=1e-5,
        events=Event(lambda t, x: x[0]),
    )
    assert solution.x1.dtype == torch.float32
    assert solution.time == pytest.approx(math.sqrt(40 / 9.81), rel=1e-5)


@pytest.mark.parametrize(
    "g",
    [
        lambda t: t - math.pi / 3,
        lambda t: (t - 0.1) ** 9,
        lambda t: math.tanh(1e4 * (t - 0.77)),
        lambda t: t**3 - 1e-30,
    ],
)
def test_roots_are_bracketed_to_the_last_bit_in_few_evaluations(g):
    count = 0

    def counted(t):
        nonlocal count
        count += 1
        return g(t)

    low, high = -0.5, 1.7
    found = _root(counted, low, high, g(low), g(high))
    assert found == pytest.approx(
        brentq(g, low, high, xtol=1e-300, rtol=1e-15, maxiter=2000), abs=1e-9
    )
    assert g(math.nextafter(found, low)) <= 0 <= g(found)
    assert count < 400
    assert _root(lambda t: g(-t), -low, -high, g(low), g(high)) == pytest.approx(-found, abs=1e-9)


# Steady states and callbacks.


@pytest.mark.cases(3)
@pytest.mark.parametrize("method", ["euler", "rk4", "heun_euler", "tsit5"])
def test_a_solve_stops_where_the_rate_is_small(method):
    seen = []
    solution = solve(
        [Segment(0, 1000, lambda t, x: 1 - x)],
        X0,
        steady=1e-3,
        on_step=lambda t, x: seen.append((t, x)),
        **request_for(method, 1e-6, 10_000),
    )
    assert solution.status is Status.STEADY
    # rms of (1 - x0) exp(-t), with Euler's steps (1 - x0) 0.9^(10 t), reaches 1e-3
    expected = math.log(1e3 * 1.5 / math.sqrt(2)) / (
        -10 * math.log(0.9) if method == "euler" else 1
    )
    assert seen[-2][0] == pytest.approx(expected, rel=0.5)
    assert seen[-2][0] > expected * 0.98
    assert float((solution.x1 - 1).abs().max()) < 2e-3
    assert seen[-1][0] == solution.time < 1000
    assert len(seen) == solution.stats.accepted
    assert solution.message.startswith("a steady state was reached in segment 0 at t = ")


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", sorted(GRADIENTS))
def test_a_steady_state_has_its_gradient(kind):
    # x* = w, dx*/dw = 1 at rest
    w = torch.tensor([2.0, -1.0], dtype=torch.float64, requires_grad=True)
    request = {"steady": 1e-6, "method": "tsit5", "rtol": 1e-8, "atol": 1e-8, "gradient": kind}
    if kind == "reversible":
        with pytest.raises(SolveError, match="drifted apart"):  # it cannot damp so far, and says so
            solve([Segment(0, 1000, lambda t, x: w - x)], X0, **request)
        return
    solution = solve([Segment(0, 1000, lambda t, x: w - x)], X0, **request)
    assert solution.status is Status.STEADY
    assert torch.allclose(
        torch.autograd.grad(solution.x1.sum(), w)[0], torch.ones(2).double(), atol=1e-5
    )


@pytest.mark.parametrize("kind", sorted(GRADIENTS))
def test_a_callback_meets_each_accepted_step_once_and_changes_nothing(kind):
    seen = []
    x0 = X0.clone().requires_grad_()
    segments = [Segment(0, 1, pendulum), Segment(1, 3, pendulum)]
    request = {"method": "rk4", "steps": 20} if kind == "reversible" else {"method": "dopri5"}
    plain = solve(segments, x0, save="steps", **request)
    watched = solve(
        segments, x0, gradient=kind, **request, save="steps", on_step=lambda t, x: seen.append(t)
    )
    assert seen == list(plain.times[1:])
    assert watched.x1.requires_grad
    if kind in ("backprop", "checkpoint"):
        assert torch.equal(plain.x1, watched.x1)


@pytest.mark.parametrize(
    "looking",
    [{"on_step": lambda t, x: None}, {"steady": 1e-9}, {"events": Event(lambda t, x: x[0] + 5)}],
)
@pytest.mark.parametrize("kind", sorted(GRADIENTS))
def test_looking_on_changes_no_result_whether_a_gradient_is_wanted_or_not(kind, looking):
    segments, request = [Segment(0, 2, pendulum)], {"method": "rk4", "steps": 9, "gradient": kind}
    right = solve(segments, X0.clone().requires_grad_(), **request).x1.detach()
    for wanted in (False, True):
        with torch.set_grad_enabled(wanted):
            assert torch.equal(solve(segments, X0, **request).x1, right)
            assert torch.equal(solve(segments, X0, **request, **looking).x1, right)
    assert (kind == "reversible") is not torch.equal(
        solve(segments, X0, method="rk4", steps=9).x1, right
    )


@pytest.mark.slow
def test_a_pair_that_comes_apart_is_said_to_those_who_look_on_too():
    decay = [Segment(0, 20, lambda t, x: -x)]
    for looking in (
        {},
        {"on_step": lambda t, x: None},
        {"events": Event(lambda t, x: x[0] - 1e-8)},
    ):
        for wanted in (False, True):
            with torch.set_grad_enabled(wanted):
                start = torch.ones(2, dtype=torch.float64)
                solution = solve(
                    decay,
                    start,
                    method="rk4",
                    steps=100,
                    gradient="reversible",
                    throw=False,
                    **looking,
                )
                assert solution.status is Status.PAIR_APART


def test_a_callback_with_given_times():
    seen = []
    solution = solve(
        [Segment(0, 3, pendulum)],
        X0,
        method="rk4",
        steps=5,
        times=[0.5, 2.0],
        on_step=lambda t, x: seen.append(t),
    )
    assert len(seen) == 5
    assert solution.times == (0.5, 2.0)


ROOT = Event(lambda t, x: x[0])


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"events": lambda t, x: x[0]}, r"give an Event\(function of t and x\)"),
        ({"events": [ROOT, 3]}, r"give an Event\(function"),
        (
            {"events": ROOT, "method": "torchdiffeq:rk4"},
            "events need a method whose tableau has dense output",
        ),
        (
            {"on_step": print, "method": "torchdiffeq:rk4"},
            "on_step and steady need a method of the package",
        ),
        ({"steady": 0.0}, "steady = 0.0"),
        ({"steady": math.nan}, "steady = nan"),
        ({"steady": True}, "steady = True"),
        ({"on_step": 3}, "on_step = 3: give a function"),
        ({"events": ROOT, "times": [0.5]}, "may end the solve before the given times"),
        ({"steady": 1.0, "times": [0.5]}, "may end the solve before the given times"),
        (
            {"events": Event(lambda t, x: x)},
            r"returned shape \(2,\) of torch.float64: return one number",
        ),
        ({"events": Event(lambda t, x: 1.0)}, "returned float: return one number"),
        ({"events": Event(lambda t, x: x[0] > 0)}, "of torch.bool: return one number"),
    ],
)
def test_requests_that_make_no_sense_are_named(request_, words):
    with pytest.raises(ConfigError, match=words):
        solve([Segment(0, 2, pendulum)], X0, **{"method": "rk4", **request_})


def test_events_that_make_no_sense_are_named():
    with pytest.raises(ConfigError, match="an event's function is 3"):
        Event(3)
    for wrong in (2, True, "up"):
        with pytest.raises(ConfigError, match="direction is"):
            Event(lambda t, x: x[0], wrong)
    with pytest.raises(SolveError, match="event 1 is not a number at t = 0"):
        solve(
            [Segment(0, 2, pendulum)],
            X0,
            method="rk4",
            events=[ROOT, Event(lambda t, x: x[0] * math.nan)],
        )
    with pytest.raises(ConfigError, match="under vmap"):
        torch.func.vmap(
            lambda x: solve([Segment(0, 2, pendulum)], x, method="rk4", events=ROOT).x1
        )(X0[None])
    with pytest.raises(ConfigError, match="not differentiated in forward mode"):
        torch.func.jvp(
            lambda x: solve([Segment(0, 2, pendulum)], x, method="rk4", events=ROOT).x1,
            (X0,),
            (X0,),
        )


def test_a_root_that_only_touches_has_no_derivative():
    # t^3 changes its sign at t = 0 with a slope of zero
    x0 = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    segment = Segment(-1, 1, lambda t, x: -x)
    with pytest.raises(SolveError, match="has no derivative"):
        solve([segment], x0, method="rk4", steps=2, events=Event(lambda t, x: t**3 + 0 * x[0]))


@pytest.mark.parametrize("method", ["bosh3", "dopri5", "tsit5", "dop853"])
def test_the_derivatives_of_an_events_time_are_those_of_the_flow(method):
    """x' = a x (1 - x) reaches q at T = (logit q - logit x0)/a. The interpolant's slope was 75 to
    250 tolerances off.
    """
    a0, q0, x0 = 1.3, 0.83, 0.07
    tolerance = 1e-9
    a, q, x = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (a0, q0, x0))
    segment = Segment(0, 50, lambda t, y: a * y * (1 - y))
    crossing = Event(lambda t, y: y[0] - q)
    solution = solve(
        [segment], x[None], method=method, rtol=tolerance, atol=tolerance, events=crossing
    )
    by_a, by_q, by_x = torch.autograd.grad(solution.event_time, (a, q, x), create_graph=True)
    (by_q_twice,) = torch.autograd.grad(by_q, q)
    time = (math.log(q0 / (1 - q0)) - math.log(x0 / (1 - x0))) / a0
    assert float(by_q) == pytest.approx(1 / (a0 * q0 * (1 - q0)), rel=1e-12)
    assert float(by_q_twice) == pytest.approx(
        -(1 - 2 * q0) / (a0 * q0**2 * (1 - q0) ** 2), rel=1e-12
    )
    # what is left is the solve's own error of the state's derivatives
    loose = 300 if method == "bosh3" else 50
    assert float(by_a) == pytest.approx(-time / a0, rel=loose * tolerance)
    assert float(by_x) == pytest.approx(-1 / (a0 * x0 * (1 - x0)), rel=loose * tolerance)


@pytest.mark.parametrize("method", ["tsit5", "rk4"])
def test_values_whose_product_underflows_keep_their_signs(method):
    """x = exp(-400 t) is positive at all numbers before 1.8; t - 0.3, scaled, has its root there."""
    options = {"steps": 2000} if method == "rk4" else {"rtol": 1e-6, "atol": 1e-200}
    decay = solve(
        [Segment(0, 1, lambda t, x: -400 * x)],
        torch.ones(1, dtype=torch.float64),
        method=method,
        events=Event(lambda t, x: x[0]),
        **options,
    )
    assert decay.status is Status.SUCCESS
    for scale in (1e-200, 5e-324):
        clock = solve(
            [Segment(0, 1, lambda t, x: torch.ones_like(x))],
            torch.zeros(1, dtype=torch.float64),
            method=method,
            events=Event(lambda t, x, scale=scale: scale * torch.sign(x[0] - 0.3)),
            **({"steps": 7} if method == "rk4" else {}),
        )
        assert float(clock.event_time) == pytest.approx(0.3, abs=1e-12)
