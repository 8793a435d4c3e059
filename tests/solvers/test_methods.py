"""What a method may promise besides `advance`, by methods written outside of the package; and the
rules that choose steps.
"""

import dataclasses
import math
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torchdiffeq._impl.odeint import SOLVERS

from solvers import (
    CONTROLLERS,
    METHODS,
    PI,
    PID,
    Cautious,
    ConfigError,
    Controller,
    HasReversibleForm,
    Replayable,
    ReversibleScheme,
    RungeKutta,
    Segment,
    Status,
    StepControl,
    fixed_step,
    solve,
)
from solvers.controller import StepSize
from solvers.explicit_tableaus import DOPRI5, RK4, TSIT5
from solvers.run import Step
from solvers.torchdiffeq_methods import NAMES

rules = pytest.mark.parametrize("rule", sorted(CONTROLLERS))


@pytest.mark.cases(1)
@rules
@pytest.mark.parametrize("pair", [DOPRI5, TSIT5], ids=["dopri5", "tsit5"])
def test_every_rule_keeps_the_error_near_the_tolerance(rule, pair):
    def field(t, x):  # van der Pol's equation: smooth, with fast and slow stretches
        return torch.stack([x[1], 5 * (1 - x[0] ** 2) * x[1] - x[0]])

    start, span = [2.0, 0.0], (0.0, 12.0)
    exact = solve_ivp(
        lambda t, x: [x[1], 5 * (1 - x[0] ** 2) * x[1] - x[0]],
        span,
        start,
        rtol=1e-12,
        atol=1e-13,
        method="DOP853",
    )
    method = RungeKutta(pair, adaptive=True, controller=CONTROLLERS[rule])
    for tolerance in (1e-5, 1e-8):
        solution = solve(
            [Segment(*span, field)],
            torch.tensor(start).double(),
            method=method,
            rtol=tolerance,
            atol=tolerance,
        )
        assert np.abs(solution.x1.numpy() - exact.y[:, -1]).max() < 300 * tolerance
        assert 0 < solution.stats.rejected < solution.stats.accepted / 3


@rules
def test_every_rule_goes_to_the_step_that_a_constant_error_asks_for(rule):
    # with err = (h/h*)^q every rule settles at a step below h*; PI's factor is 1 at h = h*
    # safety^(1/(alpha - beta))
    q, wanted = 5, 0.37
    size = StepSize(CONTROLLERS[rule], q, 1e-3)
    taken = []
    for _ in range(200):
        if size.judge(size.step, (size.step / wanted) ** q):
            taken.append(size.step)
    assert taken[-1] == pytest.approx(taken[-2], rel=1e-9)
    assert 0.7 * wanted < taken[-1] < wanted
    # where it settles the powers add up to the integral gain alone: h = h* safety^(1/i)
    gain = {"pi": 0.7 - 0.4, "pid": 0.25}
    if rule in gain:
        assert taken[-1] == pytest.approx(wanted * CONTROLLERS[rule].safety ** (1 / gain[rule]))
    assert isinstance(CONTROLLERS[rule], Controller)


@rules
def test_a_rule_shrinks_after_every_rejection(rule):
    for error in (1.0001, 2.0, 1e6, math.inf, math.nan):
        size = StepSize(CONTROLLERS[rule], 5, 0.5)
        assert not size.judge(0.5, error)
        assert 0.1 - 1e-15 <= size.step < 0.5


def test_the_next_attempt_is_shorter_however_near_the_end_and_however_little_the_error_is_above_1():
    # stretched to the segment's end, an attempt with a safety factor near 1 was the one that had
    # just been rejected, for ever
    draws = random.Random(0)
    for rule in (
        *CONTROLLERS.values(),
        PI(safety=0.95),
        PI(safety=1.0),
        PID(safety=1.0),
        Cautious(retry=1.0),
    ):
        for _ in range(300):
            steps, remaining = StepSize(rule, 5, draws.uniform(0.1, 2)), draws.uniform(0.1, 4)
            size, _ = steps.propose(remaining)
            for error in (1 + 10 ** draws.uniform(-16, 0) for _ in range(20)):
                assert not steps.judge(size, error + 1e-15)
                shorter, last = steps.propose(remaining)
                assert shorter < 0.995 * size
                assert last is (shorter == remaining)
                size = shorter
            assert steps.judge(size, 0.5)


def test_the_rules_are_their_formulas():
    assert PI(safety=0.9, alpha=1, beta=0).accepted(0.1, 0.1, (0.5, 0.01, 1.0), 5) == pytest.approx(
        0.09 * 0.5**-0.2
    )
    assert PI().accepted(0.1, 0.1, (0.5, 0.02, 1.0), 5) == pytest.approx(
        0.09 * 0.5**-0.14 * 0.02**0.08
    )
    assert PI().accepted(0.1, 0.4, (0.5, 0.02, 1.0), 5) == 0.4  # it was cut short
    assert PI().rejected(0.1, 32.0, 5) == pytest.approx(0.045)
    assert Cautious().accepted(0.1, 0.1, (0.5, 0.02, 1.0), 5) == pytest.approx(
        max(0.1, 0.095 * 2**0.2 * 0.04**0.06)
    )
    assert Cautious().accepted(0.1, 0.1, (1e-10, 1e-10, 1.0), 5) == pytest.approx(1.0)
    assert Cautious().rejected(0.1, 32.0, 5) == pytest.approx(0.045)


def test_pid_is_the_control_of_a_known_sequence_of_errors_in_log_form():
    # Soederlind's control law: log h+ = log h + i E + p (E - E1) + d (E - 2 E1 + E2), E =
    # -log(err)/q, in the order of the steps
    rule, q = PID(safety=1, p=0.3, i=0.2, d=0.05), 4
    errors = [1.0, 1.0, 0.5, 0.08, 0.9, 0.3]  # before the start they count as 1
    size, right = StepSize(rule, q, 0.1), math.log(0.1)
    logs = [-math.log(error) / q for error in errors]
    for k in range(2, len(errors)):
        e2, e1, e = logs[k - 2 : k + 1]
        right += 0.2 * e + 0.3 * (e - e1) + 0.05 * (e - 2 * e1 + e2)
        assert size.judge(size.step, errors[k])
        assert math.log(size.step) == pytest.approx(right, rel=1e-12)
        assert not size.judge(size.step, math.nan)  # what is rejected is no part of the sequence
        size.step = math.exp(right)
    same = (0.4, 0.02, 0.7)
    assert PID(safety=0.9, p=0.4, i=0.3, d=0).accepted(0.1, 0.1, same, 5) == pytest.approx(
        PI().accepted(0.1, 0.1, same, 5)
    )
    # Kennedy and Carpenter (2003)
    assert PID().accepted(0.1, 0.1, same, 5) == pytest.approx(
        0.095 * 0.4 ** (-0.49 / 5) * 0.02 ** (0.34 / 5) * 0.7 ** (-0.1 / 5)
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PID(i=0), "PID has i = 0: give a number between 0 and 2"),
        (lambda: PID(d=-0.1), "PID has d = -0.1"),
        (lambda: PI(safety=0), "PI has safety = 0: give a number between 0 and 1"),
        (lambda: PI(grow=1), "PI has grow = 1"),
        (lambda: Cautious(shrink=math.nan), "shrink = nan: give a finite number"),
        (lambda: Cautious(damping=True), "damping = True"),
        (
            lambda: RungeKutta(RK4, adaptive=True),
            "without embedded weights cannot estimate its error",
        ),
        (lambda: RungeKutta(DOPRI5, adaptive=True, controller=PI), "give a rule such as PI"),
    ],
)
def test_rules_and_methods_that_could_not_work_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


# Methods from outside.


@dataclasses.dataclass(frozen=True)
class Plain:
    """Only what `solve` asks of a method: Euler by hand."""

    order: int = 1
    adaptive: bool = False

    def advance(self, segment, x, run):
        for start, end in pairwise(segment.times(run.steps)):
            x = run.accept(segment, end, x + (end - start) * run.velocity(segment, start, x))
        return x


@dataclasses.dataclass(frozen=True)
class ByHand(Plain):
    """Heun's method written out: one step, but no tableau."""

    order: int = 2

    def increment(self, step, x, run):
        v = run.velocity(step.segment, step.start, x)
        return step.h / 2 * (v + run.velocity(step.segment, step.end, x + step.h * v))

    def walk(self, segment, x, run, finish):
        for start, end in pairwise(segment.times(run.steps)):
            step = Step(segment, start, end, end - start)
            x = finish(step, x, self.increment(step, x, run))
            run.trace.append(step)
        return x

    def advance(self, segment, x, run):
        return self.walk(
            segment, x, run, lambda step, x, increment: run.accept(segment, step.end, x + increment)
        )

    def fixed(self):
        return self

    def pieces(self, segment, steps):
        return METHODS["euler"].pieces(segment, steps)

    def reversible(self, coupling):
        return ReversibleScheme(self, coupling)


X0 = torch.tensor([0.3, -0.8, 0.5], dtype=torch.float64)


def gradient_of(method, kind, steps=9):
    x, rate = (
        X0.clone().requires_grad_(),
        torch.tensor([1.2, 0.7, -0.4], dtype=torch.float64, requires_grad=True),
    )
    segments = [
        Segment(0, 1, lambda t, x: torch.sin(rate * x)),
        Segment(1, 2, lambda t, x: rate * torch.cos(x)),
    ]
    end = solve(segments, x, method=method, steps=steps, gradient=kind).x1
    return end.detach(), torch.stack(torch.autograd.grad(end.square().sum(), (x, rate)))


def test_a_method_that_promises_nothing_more_has_the_gradients_that_need_nothing_more():
    end, expected = gradient_of(Plain(), "backprop")
    assert torch.allclose(end, gradient_of("euler", "backprop")[0], rtol=1e-13)
    assert torch.allclose(gradient_of(Plain(), "checkpoint")[1], expected, rtol=1e-12)
    assert torch.allclose(
        gradient_of(Plain(), "adjoint", 300)[1], gradient_of(Plain(), "backprop", 300)[1], rtol=3e-2
    )
    with pytest.raises(ConfigError, match=r"'reversible' is made of .*use rk4 or tsit5"):
        gradient_of(Plain(), "reversible")


def test_a_method_without_a_tableau_is_replayed_and_reversed_by_what_it_promises():
    assert isinstance(ByHand(), Replayable)
    assert isinstance(ByHand(), HasReversibleForm)
    ends = [gradient_of(ByHand(), "backprop", n)[0] for n in (20, 40, 500)]
    assert math.log2((ends[0] - ends[2]).norm() / (ends[1] - ends[2]).norm()) == pytest.approx(
        2, abs=0.1
    )
    assert torch.allclose(
        gradient_of(ByHand(), "checkpoint")[1], gradient_of(ByHand(), "backprop")[1], rtol=1e-12
    )
    scheme = gradient_of(ByHand().reversible(0.99), "backprop")
    for found, expected in zip(gradient_of(ByHand(), "reversible"), scheme, strict=True):
        assert torch.allclose(found, expected, rtol=1e-10)


def test_fixed_steps_are_asked_for_by_name_or_method():
    assert fixed_step("rk4") is METHODS["rk4"]
    assert fixed_step("torchdiffeq:rk4") is METHODS["torchdiffeq:rk4"]
    assert fixed_step("tsit5") == RungeKutta(TSIT5)
    assert fixed_step(Plain()) == Plain()
    with pytest.raises(ConfigError, match=r"'torchdiffeq:dopri5' only runs with adaptive steps"):
        fixed_step("torchdiffeq:dopri5")


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    "method",
    [name for name in METHODS if METHODS[name].adaptive and isinstance(METHODS[name], RungeKutta)],
)
def test_steps_begin_with_the_first_and_stay_below_the_longest(method):
    solution = solve(
        [Segment(0, 3, lambda t, x: -x)],
        X0,
        method=method,
        rtol=1e-3,
        atol=1e-3,
        step_control=StepControl(first_step=0.01, max_step=0.25),
        save="steps",
    )
    steps = [b - a for a, b in pairwise(solution.times)]
    assert steps[0] == pytest.approx(0.01)
    assert max(steps) <= 0.25 * (1 + 1e-12)
    assert sum(step > 0.2 for step in steps) > 5 or method == "heun_euler"
    backward = solve(
        [Segment(0, -3, lambda t, x: -x)],
        X0,
        method=method,
        rtol=1e-3,
        atol=1e-3,
        step_control=StepControl(max_step=0.25),
        save="steps",
    )
    assert max(a - b for a, b in pairwise(backward.times)) <= 0.25 * (1 + 1e-12)


OF_PAIRS = [
    name for name, method in METHODS.items() if method.adaptive and isinstance(method, RungeKutta)
]


@pytest.mark.cases(3)
@pytest.mark.parametrize("gradient", ["backprop", "checkpoint"])
@pytest.mark.parametrize("method", OF_PAIRS)
def test_no_step_is_tried_below_the_shortest_and_forced_ones_are_told(method, gradient):
    tolerance = {5: 1e-7, 8: 1e-9}.get(METHODS[method].order, 1e-5)

    def solved(**request):
        segment = Segment(0, 1, lambda t, x: torch.cos(40 * t) - x)
        return solve(
            [segment],
            X0,
            method=method,
            rtol=tolerance,
            atol=tolerance,
            gradient=gradient,
            save="steps",
            step_control=StepControl(**request),
        )

    free, bound = solved(), solved(min_step=0.06, first_step=0.06)
    assert free.stats.forced == 0
    assert free.warnings == ()
    steps = [b - a for a, b in pairwise(bound.times)]
    assert min(steps[:-2]) == pytest.approx(0.06)
    assert 0 < bound.stats.forced <= bound.stats.accepted == len(steps)
    assert bound.stats.accepted < free.stats.accepted
    assert bound.warnings[0].startswith(
        f"{bound.stats.forced} of {len(steps)} steps have an error above the tolerance"
    )
    # equal steps are those of the pair with fixed ones
    fixed = solve(
        [Segment(0, 0.6, lambda t, x: torch.cos(40 * t) - x)],
        X0,
        method=METHODS[method].fixed(),
        steps=10,
    ).x1
    ten = solve(
        [Segment(0, 0.6, lambda t, x: torch.cos(40 * t) - x)],
        X0,
        method=method,
        rtol=1e-9,
        atol=1e-9,
        step_control=StepControl(first_step=0.06, min_step=0.06, max_step=0.06),
    )
    assert ten.stats.accepted == 10
    assert torch.allclose(ten.x1, fixed, rtol=1e-13)


def test_a_field_that_is_not_finite_is_forced_by_nobody():
    segments = [Segment(0, 1, lambda t, x: x / 0 if t > 0.5 else x)]
    solution = solve(
        segments, X0, method="tsit5", step_control=StepControl(min_step=0.05), throw=False
    )
    assert solution.status is Status.NON_FINITE
    assert 0.4 < solution.time < 0.5
    assert solution.stats.rejected < 20


def test_bounds_that_contradict_each_other_are_named():
    with pytest.raises(ConfigError, match=r"min_step = 0.2 is above max_step = 0.1"):
        solve(
            [Segment(0, 1, lambda t, x: -x)],
            X0,
            method="tsit5",
            step_control=StepControl(min_step=0.2, max_step=0.1),
        )
    with pytest.raises(ConfigError, match=r"min_step = 0.2 is above first_step = 0.1"):
        solve(
            [Segment(0, 1, lambda t, x: -x)],
            X0,
            method="tsit5",
            step_control=StepControl(min_step=0.2, first_step=0.1),
        )


@pytest.mark.parametrize("name", ["first_step", "min_step", "max_step"])
def test_bounds_of_steps_that_make_no_sense_are_refused(name):
    segments = [Segment(0, 1, lambda t, x: -x)]
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=f"{name} = "):
            solve(segments, X0, method="tsit5", step_control=StepControl(**{name: wrong}))
    for method in ("rk4", "torchdiffeq:dopri5"):
        with pytest.raises(ConfigError, match=f"takes no {name}: "):
            solve(segments, X0, method=method, step_control=StepControl(**{name: 0.1}))


def test_the_names_of_torchdiffeqs_methods_are_its_own():
    assert tuple(SOLVERS) == NAMES
