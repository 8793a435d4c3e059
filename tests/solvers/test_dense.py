"""States at any times: their order, their cost and their gradient, against closed forms, scipy and
solves that stop there.
"""

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.integrate._ivp.rk import DOP853, RK23, RK45

from solvers import (
    GRADIENTS,
    METHODS,
    ConfigError,
    Event,
    RungeKutta,
    Segment,
    odeint,
    odeint_dense,
    solve,
    tableau,
)
from solvers.explicit_tableaus import BOSH3, DOPRI5, RK4_38, TSIT5

OWN = sorted(name for name, method in METHODS.items() if getattr(method, "dense", False))
X0 = torch.tensor([1.0, -0.5], dtype=torch.float64)
TIMES = [0.0, 0.1, 0.35, 0.7, 0.9, 1.2, 1.61, 2.0]


def field(t, x):
    return torch.stack([x[1] * torch.cos(t), -torch.sin(x[0])])


def smooth(t, x):
    return torch.cos(2 * t) * x


def problem(f=field):
    return [Segment(0, 0.7, f), Segment(0.7, 2, lambda t, x: 0.5 * f(t, x))]


def request_for(method, tolerance=1e-6, steps=7):
    return {
        "method": method,
        **(
            {"rtol": tolerance, "atol": tolerance} if METHODS[method].adaptive else {"steps": steps}
        ),
    }


@pytest.mark.cases(10)
@pytest.mark.parametrize("method", OWN)
def test_states_inside_have_the_methods_order(method):
    chosen = METHODS[method].fixed()
    times = np.linspace(0.013, 1.987, 41).tolist()
    # the same field on both segments, in closed form
    segments = [Segment(0, 0.7, smooth), Segment(0.7, 2, smooth)]
    exact = torch.tensor([math.exp(math.sin(2 * t) / 2) for t in times], dtype=torch.float64)
    sizes = {1: (64, 128), 2: (32, 64), 3: (16, 32), 4: (12, 24), 5: (20, 40), 8: (5, 10)}[
        chosen.order
    ]
    errors = []
    for steps in sizes:
        states = solve(segments, X0[:1], method=chosen, steps=steps, times=times).states
        errors.append(float((torch.cat(states) - exact).abs().max()))
    assert math.log2(errors[0] / errors[1]) > chosen.order - 0.3


@pytest.mark.cases(1)
@pytest.mark.parametrize("method", OWN)
@pytest.mark.parametrize("backward", [False, True])
def test_they_are_the_states_of_solves_that_stop_there(method, backward):
    segments, times = problem(), TIMES
    if backward:
        segments, times = [Segment(s.t1, s.t0, s.field) for s in reversed(segments)], TIMES[::-1]
    order = METHODS[method].order
    request = request_for(method, 1e-8 if order > 3 else 1e-5, 400 if order == 1 else 60)
    solution = solve(segments, X0, times=times, **request)
    assert solution.times == tuple(times)
    for t, x in zip(times[1:], solution.states[1:], strict=True):
        reach = [s for s in segments if (s.start > t if backward else s.start < t)]
        reach[-1] = Segment(reach[-1].t0, t, reach[-1].field)
        right = solve(reach, X0, method="tsit5", rtol=1e-11, atol=1e-12).x1
        assert float((x - right).abs().max()) < (
            5e-3 if order == 1 else 5e-4 if order < 4 else 1e-6
        )
    assert torch.equal(solution.states[-1], solution.x1)
    assert torch.equal(solution.states[0], X0)


@pytest.mark.cases(9)
@pytest.mark.parametrize("method", OWN)
def test_more_times_cost_no_more_evaluations_and_leave_the_bits(method):
    plain = solve(problem(), X0, **request_for(method))
    many = solve(problem(), X0, times=np.linspace(0, 2, 1000).tolist(), **request_for(method))
    assert len(many.states) == 1000
    if METHODS[method].adaptive:
        # dop853 has three stages for them, in each step that has a time inside
        extra = len(METHODS[method].tableau.inner) * plain.stats.accepted
        assert torch.equal(plain.x1, many.x1)
        assert (
            dataclasses.replace(plain.stats, evaluations=plain.stats.evaluations + extra)
            == many.stats
        )
    assert many.stats.accepted == plain.stats.accepted


def test_dop853s_interpolant_is_scipys():
    # one step, by the same stages; scipy evaluates the three more when it makes its dense output
    x0 = X0.numpy()
    theirs = DOP853(
        lambda t, x: field(torch.tensor(t), torch.tensor(x)).numpy(),
        0,
        x0,
        2,
        first_step=0.3,
        rtol=1e-2,
        atol=1e-2,
    )
    theirs.step()
    dense, times = theirs.dense_output(), [0.01, 0.1, 0.17, 0.23, 0.29]
    ours = solve([Segment(0, 0.3, field)], X0, method=METHODS["dop853"].fixed(), times=times).states
    assert theirs.t == 0.3
    for t, x in zip(times, ours, strict=True):
        assert np.abs(x.numpy() - dense(t)).max() < 1e-14


def test_a_step_without_a_time_inside_has_no_stage_for_it():
    plain = solve(problem(), X0, method="dop853", rtol=1e-6, atol=1e-8)
    ends = solve(problem(), X0, method="dop853", rtol=1e-6, atol=1e-8, times=[0.0, 0.7, 2.0])
    one = solve(problem(), X0, method="dop853", rtol=1e-6, atol=1e-8, times=[0.31])
    assert ends.stats == plain.stats
    assert one.stats.evaluations == plain.stats.evaluations + 3


def test_the_interpolants_are_those_that_scipy_has():
    for own, theirs in ((DOPRI5, RK45.P), (BOSH3, RK23.P)):
        ours = np.array([[*row, *[0.0] * (theirs.shape[1] - len(row))] for row in own.dense])
        assert np.allclose(ours, theirs, rtol=1e-14, atol=1e-15)


def test_a_dense_solve_agrees_with_scipys():
    times = np.linspace(0.05, 1.95, 30)

    def f(t, x):
        return [x[1] * math.cos(t), -math.sin(x[0])]

    right = solve_ivp(
        f, (0, 2), X0.numpy(), rtol=1e-11, atol=1e-12, t_eval=times, method="DOP853"
    ).y.T
    for method in ("tsit5", "dopri5", "dop853"):
        states = solve(
            [Segment(0, 2, field)],
            X0,
            method=method,
            rtol=1e-7,
            atol=1e-9,
            times=torch.tensor(times),
        ).states
        assert np.abs(torch.stack(states).numpy() - right).max() < 1e-6


@pytest.mark.parametrize("theta", [0.0, 0.3, 1.0])
def test_the_weights_lead_from_nothing_to_the_steps_own(theta):
    for data in (DOPRI5, TSIT5, RK4_38):
        weights = data.dense_weights(theta)
        assert sum(weights) == pytest.approx(theta, abs=1e-13)
        if theta == 1:
            assert weights == pytest.approx(data.b, abs=1e-14)


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", ["backprop", "adjoint"])
@pytest.mark.parametrize("method", ["rk4", "dopri5", "tsit5", "dop853"])
def test_states_inside_have_their_gradient(method, kind):
    rate = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    x = X0.clone().requires_grad_()
    segments = [
        Segment(0, 1, lambda t, x: rate * torch.sin(x)),
        Segment(1, 2, lambda t, x: -rate * x),
    ]
    times = [0.0, 0.3, 0.5, 1.0, 1.4, 2.0]
    weights = torch.linspace(1, 2, 12, dtype=torch.float64).view(6, 2)
    request = request_for(method, 1e-9, 60)
    states = torch.stack(solve(segments, x, times=times, gradient=kind, **request).states)
    found = torch.autograd.grad((weights * states.square()).sum(), (x, rate))
    split = [Segment(a, b, segments[a >= 1].field) for a, b in pairwise(times)]
    stops = torch.stack(solve(split, x, save="segments", **request).states)
    right = torch.autograd.grad((weights * stops.square()).sum(), (x, rate))
    for mine, other in zip(found, right, strict=True):
        assert torch.allclose(mine, other, rtol=1e-5)


def test_states_inside_are_projected_as_the_steps_are():
    def turn(t, x):
        return torch.stack([-x[1], x[0]])

    segment = Segment(0, 1, turn, project=lambda x: x / x.norm())
    states = solve(
        [segment], torch.tensor([1.0, 0.0]).double(), method="rk4", steps=3, times=[0.1, 0.5, 0.77]
    ).states
    for t, x in zip((0.1, 0.5, 0.77), states, strict=True):
        assert float(x.norm()) == pytest.approx(1, abs=1e-14)
        assert torch.allclose(x, torch.tensor([math.cos(t), math.sin(t)]).double(), atol=1e-3)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"times": [0.5, 0.2]}, "not strictly in the order"),
        ({"times": [0.5, 0.5]}, "not strictly in the order"),
        ({"times": [0.5, 3.0]}, "leave the segments, from 0 to 2"),
        ({"times": [-0.1]}, "leave the segments"),
        ({"times": []}, "give a list of finite numbers"),
        ({"times": [math.nan]}, "give a list of finite numbers"),
        ({"times": torch.ones(1, 1)}, "give a list of finite numbers"),
        ({"times": [0.5], "save": "steps"}, "both choose the states to keep"),
        (
            {"times": [0.5], "method": "torchdiffeq:rk4"},
            "need a method whose tableau has dense output",
        ),
        ({"times": [0.5], "gradient": "checkpoint"}, "gradient='backprop' or 'adjoint'"),
        ({"times": [0.5], "gradient": "reversible"}, "gradient='backprop' or 'adjoint'"),
    ],
)
def test_times_that_make_no_sense_are_named(request_, words):
    with pytest.raises(ConfigError, match=words):
        solve(problem(), X0, **{"method": "rk4", **request_})


def test_segments_without_states_at_given_times_are_named():
    with pytest.raises(ConfigError, match="turn back"):
        solve([Segment(0, 1, field), Segment(1, 0.5, field)], X0, method="rk4", times=[0.2])
    learned = torch.tensor(2.0, requires_grad=True)
    with pytest.raises(ConfigError, match="learned"):
        solve([Segment(0, learned, field)], X0, method="rk4", times=[0.2])
    bare = RungeKutta(tableau(2, [[], [1]], ["1/2", "1/2"]))
    with pytest.raises(ConfigError, match="dense output"):
        solve(problem(), X0, method=bare, times=[0.2])


def test_a_mistyped_interpolant_cannot_become_one():
    for dense, words in (
        ([[1, "-1/2"]], "1 polynomials for 2 stages"),
        ([[1, "-1/3"], [0, "1/2"]], "at the step's end"),
        ([[0, "1/2"], [1, "-1/2"]], None),
        ([["1/2"], ["1/3", "1/6"]], "not of order 1"),
    ):
        if (
            words is None
        ):  # first order is all that is asked of two stages: the other way round is no worse
            tableau(2, [[], [1]], ["1/2", "1/2"], dense=dense)
        else:
            with pytest.raises(ConfigError, match=words):
                tableau(2, [[], [1]], ["1/2", "1/2"], dense=dense)


def test_inner_stages_are_checked_as_the_others():
    # Heun's method with a stage in the middle, and the quadratic through the slopes at both ends
    # and there
    heun = {
        "order": 2,
        "a": [[], [1]],
        "b": ["1/2", "1/2"],
        "dense": [[1, "-1/2"], [0, "1/2"], [0, 0]],
    }
    assert tableau(**heun, inner=[["1/4", "1/4"]]).inner_c == (0.5,)
    for change, words in (
        ({"inner": [["1/4"]]}, "give rows of 2, 3"),
        ({"inner": [["1/4", "1/4"]], "dense": []}, "inner stages go with dense output"),
        ({"inner": [["3/4", "3/4"]]}, "lies outside"),
        ({}, "3 polynomials for 2 stages"),
    ):
        with pytest.raises(ConfigError, match=words):
            tableau(**{**heun, **change})


@pytest.mark.cases(9)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("method", OWN)
def test_a_curve_has_the_states_at_any_times_asked_for_afterwards(method, backward):
    switched = [
        Segment(0, 0.7, lambda t, x: -x * t),
        Segment(0.7, 2, lambda t, x: torch.cos(t) * x),
    ]
    segments = [Segment(s.t1, s.t0, s.field) for s in switched[::-1]] if backward else switched
    x0, times = torch.tensor([1.0, 0.4], dtype=torch.float64), [0.0, 0.1, 0.69, 0.7, 0.71, 1.9, 2.0]
    request = {"method": method, **({} if METHODS[method].adaptive else {"steps": 9})}
    right = solve(segments, x0, times=times[::-1] if backward else times, **request)
    found = solve(segments, x0, save="curve", **request)
    assert torch.equal(found.x1, solve(segments, x0, **request).x1)
    asked = torch.tensor(times[::-1] if backward else times, dtype=torch.float64).reshape(7, 1)
    curve = found.curve(asked)
    assert curve.shape == (7, 1, 2)
    assert torch.allclose(curve[:, 0], torch.stack(right.states), rtol=1e-13, atol=1e-15)
    assert torch.equal(found.curve(float(asked[3])), curve[3, 0])


def test_a_curve_is_differentiated_in_time_state_and_field_ends_at_an_event_and_has_the_states_structure():
    rate = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    x0, t = (
        torch.ones(2, dtype=torch.float64, requires_grad=True),
        torch.tensor(0.5, dtype=torch.float64, requires_grad=True),
    )
    segments = [Segment(0, 1, lambda t, x: -rate * x)]
    x = solve(segments, x0, method="tsit5", rtol=1e-9, atol=1e-9, save="curve").curve(t)
    by_t, by_x, by_rate = torch.autograd.grad(x.sum(), (t, x0, rate))
    decayed = math.exp(-0.65)
    assert float(by_t) == pytest.approx(
        -2 * 1.3 * decayed, rel=1e-4
    )  # of an interpolant of order 4
    assert torch.allclose(by_x, torch.full_like(x0, decayed), rtol=1e-6)
    assert float(by_rate) == pytest.approx(-2 * 0.5 * decayed, rel=1e-6)
    ended = solve(
        segments, x0.detach(), method="tsit5", save="curve", events=Event(lambda t, x: x[0] - 0.6)
    )
    assert ended.time == pytest.approx(-math.log(0.6) / 1.3, rel=1e-5)
    assert torch.allclose(ended.curve(ended.time), ended.x1)
    with pytest.raises(ConfigError, match=r"is outside the solve, which goes from 0 to 0\.39"):
        ended.curve(0.5)
    pair = solve(
        [Segment(0, 1, lambda t, y: {"a": -y["a"]})],
        {"a": torch.ones(3)},
        method="rk4",
        steps=5,
        save="curve",
    )
    assert torch.allclose(
        pair.curve(torch.tensor([0.2, 1.0]))["a"],
        torch.exp(torch.tensor([[-0.2], [-1.0]])).expand(2, 3),
        rtol=1e-4,
    )


@pytest.mark.parametrize(
    "request_",
    [
        {"method": "torchdiffeq:dopri5"},
        {"method": "tsit5", "gradient": "adjoint"},
        {"method": "tsit5", "gradient": "checkpoint"},
        {"method": "rk4", "gradient": "reversible"},
    ],
)
def test_who_has_no_curve_says_so(request_):
    with pytest.raises(
        ConfigError, match="save='curve' needs a method whose tableau has dense output"
    ):
        solve([Segment(0, 1, lambda t, x: -x)], torch.ones(2), save="curve", **request_)
    assert solve([Segment(0, 1, lambda t, x: -x)], torch.ones(2)).curve is None


@pytest.mark.parametrize("time", ["x", None, [1.0, "x"], {}])
def test_a_curve_refuses_what_is_no_time(time):
    curve = solve(problem(), X0, method="tsit5", rtol=1e-6, atol=1e-6, save="curve").curve
    with pytest.raises(ConfigError, match="give a time"):
        curve(time)


@pytest.mark.parametrize("method", OWN)
def test_a_curve_is_the_solves_own_after_the_weights_and_the_initial_state_change(method):
    rate = torch.tensor(-2.0, dtype=torch.float64)
    x0 = torch.ones(1, dtype=torch.float64)
    request = {} if METHODS[method].adaptive else {"steps": 5}

    def solved():
        segments = [Segment(0, 1, lambda t, x: rate * x)]
        return solve(segments, x0, method=method, save="curve", **request)

    times = torch.tensor([0.0, 0.01, 0.5, 1.0], dtype=torch.float64)
    right = solved().curve(times)
    solution = solved()
    rate.fill_(5.0)
    x0.mul_(100)
    solution.states[0].mul_(7)
    assert torch.equal(solution.curve(times), right)


def test_a_curve_with_another_projection_than_the_solves_is_refused():
    gain = torch.tensor(1.0, dtype=torch.float64)
    segment = Segment(0, 1, lambda t, x: -x.flip(0), project=lambda x: gain * x / x.norm())
    curve = solve([segment], X0, method="rk4", steps=3, save="curve").curve
    before = curve(0.4)
    assert torch.equal(curve(0.4), before)
    gain.fill_(2.0)
    with pytest.raises(ConfigError, match="project has other values than in the solve"):
        curve(0.4)


def test_the_states_of_a_solution_are_not_the_initial_tensor():
    x0 = torch.ones(2, dtype=torch.float64, requires_grad=True)
    for gradient in sorted(GRADIENTS):
        solution = solve([Segment(0, 1, field)], x0, method="rk4", steps=3, gradient=gradient)
        with torch.no_grad():
            solution.states[0].mul_(9)
        assert torch.equal(x0, torch.ones(2, dtype=torch.float64))


def test_odeint_copies_its_initial_value():
    y0 = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    early = torch.tensor(0.01, dtype=torch.float64)
    curve = odeint_dense(lambda t, y: -2 * y, y0, 0.0, 1.0)
    before = curve(early)
    start = odeint(lambda t, y: -2 * y, y0, torch.zeros(1, dtype=torch.float64))
    with torch.no_grad():
        y0.mul_(100)
        start.mul_(9)
    assert torch.equal(curve(early), before)
    assert float(y0.detach()) == 100
