"""What a method may promise besides `advance`, by methods written outside of the package; and the rules that choose steps."""

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from solvers import (
    CONTROLLERS,
    METHODS,
    PI,
    Cautious,
    ConfigError,
    Controller,
    HasReversibleForm,
    Replayable,
    ReversibleScheme,
    RungeKutta,
    Segment,
    fixed_step,
    solve,
)
from solvers.controller import StepSize
from solvers.run import Step
from solvers.tableau import DOPRI5, RK4, TSIT5

rules = pytest.mark.parametrize("rule", sorted(CONTROLLERS))


@rules
@pytest.mark.parametrize("pair", [DOPRI5, TSIT5], ids=["dopri5", "tsit5"])
def test_every_rule_keeps_the_error_near_the_tolerance(rule, pair):
    def field(t, x):  # van der Pol's equation: smooth, with fast and slow stretches
        return torch.stack([x[1], 5 * (1 - x[0] ** 2) * x[1] - x[0]])

    start, span = [2.0, 0.0], (0.0, 12.0)
    exact = solve_ivp(
        lambda t, x: [x[1], 5 * (1 - x[0] ** 2) * x[1] - x[0]], span, start, rtol=1e-12, atol=1e-13, method="DOP853"
    )
    method = RungeKutta(pair, adaptive=True, controller=CONTROLLERS[rule])
    for tolerance in (1e-5, 1e-8):
        solution = solve([Segment(*span, field)], torch.tensor(start).double(), method=method, rtol=tolerance, atol=tolerance)
        assert np.abs(solution.x1.numpy() - exact.y[:, -1]).max() < 300 * tolerance
        assert 0 < solution.stats.rejected < solution.stats.accepted / 3


@rules
def test_every_rule_goes_to_the_step_that_a_constant_error_asks_for(rule):
    # with err = (h/h*)^q every rule settles at a step below h*; PI's factor is 1 at h = h* safety^(1/(alpha - beta))
    q, wanted = 5, 0.37
    size = StepSize(CONTROLLERS[rule], q, 1e-3)
    taken = []
    for _ in range(200):
        if size.judge(size.step, (size.step / wanted) ** q):
            taken.append(size.step)
    assert taken[-1] == pytest.approx(taken[-2], rel=1e-9)
    assert 0.7 * wanted < taken[-1] < wanted
    if rule == "pi":
        assert taken[-1] == pytest.approx(wanted * 0.9 ** (1 / (0.7 - 0.4)))
    assert isinstance(CONTROLLERS[rule], Controller)


@rules
def test_a_rule_shrinks_after_every_rejection(rule):
    for error in (1.0001, 2.0, 1e6, math.inf, math.nan):
        size = StepSize(CONTROLLERS[rule], 5, 0.5)
        assert not size.judge(0.5, error)
        assert 0.1 - 1e-15 <= size.step < 0.5


def test_the_rules_are_their_formulas():
    assert PI(safety=0.9, alpha=1, beta=0).accepted(0.1, 0.1, (0.5, 0.01), 5) == pytest.approx(0.09 * 0.5**-0.2)
    assert PI().accepted(0.1, 0.1, (0.5, 0.02), 5) == pytest.approx(0.09 * 0.5**-0.14 * 0.02**0.08)
    assert PI().accepted(0.1, 0.4, (0.5, 0.02), 5) == 0.4  # it was cut short
    assert PI().rejected(0.1, 32.0, 5) == pytest.approx(0.045)
    assert Cautious().accepted(0.1, 0.1, (0.5, 0.02), 5) == pytest.approx(max(0.1, 0.095 * 2**0.2 * 0.04**0.06))
    assert Cautious().accepted(0.1, 0.1, (1e-10, 1e-10), 5) == pytest.approx(1.0)
    assert Cautious().rejected(0.1, 32.0, 5) == pytest.approx(0.045)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PI(safety=0), "PI has safety = 0: give a number between 0 and 1"),
        (lambda: PI(grow=1), "PI has grow = 1"),
        (lambda: Cautious(shrink=math.nan), "Cautious has shrink = nan"),
        (lambda: Cautious(damping=True), "damping = True"),
        (lambda: RungeKutta(RK4, adaptive=True), "without embedded weights cannot estimate its error"),
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
        return self.walk(segment, x, run, lambda step, x, increment: run.accept(segment, step.end, x + increment))

    def fixed(self):
        return self

    def pieces(self, segment, steps):
        return METHODS["euler"].pieces(segment, steps)

    def reversible(self, coupling):
        return ReversibleScheme(self, coupling)


X0 = torch.tensor([0.3, -0.8, 0.5], dtype=torch.float64)


def gradient_of(method, kind, steps=9):
    x, rate = X0.clone().requires_grad_(), torch.tensor([1.2, 0.7, -0.4], dtype=torch.float64, requires_grad=True)
    segments = [Segment(0, 1, lambda t, x: torch.sin(rate * x)), Segment(1, 2, lambda t, x: rate * torch.cos(x))]
    end = solve(segments, x, method=method, steps=steps, gradient=kind).x1
    return end.detach(), torch.stack(torch.autograd.grad(end.square().sum(), (x, rate)))


def test_a_method_that_promises_nothing_more_has_the_gradients_that_need_nothing_more():
    end, expected = gradient_of(Plain(), "backprop")
    assert torch.allclose(end, gradient_of("euler", "backprop")[0], rtol=1e-13)
    assert torch.allclose(gradient_of(Plain(), "checkpoint")[1], expected, rtol=1e-12)
    assert torch.allclose(gradient_of(Plain(), "adjoint", 300)[1], gradient_of(Plain(), "backprop", 300)[1], rtol=3e-2)
    with pytest.raises(ConfigError, match=r"'reversible' is made of .*use rk4 or tsit5"):
        gradient_of(Plain(), "reversible")


def test_a_method_without_a_tableau_is_replayed_and_reversed_by_what_it_promises():
    assert isinstance(ByHand(), Replayable)
    assert isinstance(ByHand(), HasReversibleForm)
    ends = [gradient_of(ByHand(), "backprop", n)[0] for n in (20, 40, 500)]
    assert math.log2((ends[0] - ends[2]).norm() / (ends[1] - ends[2]).norm()) == pytest.approx(2, abs=0.1)
    assert torch.allclose(gradient_of(ByHand(), "checkpoint")[1], gradient_of(ByHand(), "backprop")[1], rtol=1e-12)
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


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].adaptive and isinstance(METHODS[name], RungeKutta)])
def test_steps_begin_with_the_first_and_stay_below_the_longest(method):
    solution = solve(
        [Segment(0, 3, lambda t, x: -x)], X0, method=method, rtol=1e-3, atol=1e-3, first_step=0.01, max_step=0.25, save="steps"
    )
    steps = [b - a for a, b in pairwise(solution.times)]
    assert steps[0] == pytest.approx(0.01)
    assert max(steps) <= 0.25 * (1 + 1e-12)
    assert sum(step > 0.2 for step in steps) > 5 or method == "heun_euler"
    backward = solve([Segment(0, -3, lambda t, x: -x)], X0, method=method, rtol=1e-3, atol=1e-3, max_step=0.25, save="steps")
    assert max(a - b for a, b in pairwise(backward.times)) <= 0.25 * (1 + 1e-12)


@pytest.mark.parametrize("name", ["first_step", "max_step"])
def test_bounds_of_steps_that_make_no_sense_are_refused(name):
    segments = [Segment(0, 1, lambda t, x: -x)]
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=f"{name} = "):
            solve(segments, X0, method="tsit5", **{name: wrong})
    for method in ("rk4", "torchdiffeq:dopri5"):
        with pytest.raises(ConfigError, match=f"{name} is for the package's own adaptive methods"):
            solve(segments, X0, method=method, **{name: 0.1})
