"""Every option by every method, and by every gradient: heeded, which changes what comes out, or
refused by name; none is ignored.
"""

import math

import pytest
import torch

from solvers import (
    ERROR_NORMS,
    GRADIENTS,
    METHODS,
    ConfigError,
    Event,
    RungeKutta,
    Segment,
    Status,
    StepControl,
    solve,
)
from solvers.method import BOUNDED, options_of

X0 = torch.tensor([1.0, 1e-3], dtype=torch.float64)
FIXED_ESDIRK = METHODS["esdirk4"].fixed()
ALL = {**METHODS, "esdirk4, fixed": FIXED_ESDIRK}
# a value that must be seen in what comes out
VALUES = {
    "steps": 7,
    "rtol": 1e-3,
    "atol": 1e3,
    "norm": "max",
    "max_steps": 1,
    "first_step": 1e-4,
    "min_step": 0.4,
    "max_step": 0.01,
}


CONTROL = ("norm", "first_step", "min_step", "max_step", "max_steps")
"""Options that are fields of `StepControl`."""


def field(t, x):
    return torch.cos(20 * t) * x + torch.stack([x[0] * 0, x[0] ** 2])


def controlled(**options):
    """The arguments of `solve` for these options."""
    control = {name: options.pop(name) for name in CONTROL if name in options}
    return {**options, **({"step_control": StepControl(**control)} if control else {})}


def outcome(method, **request):
    """All that can be seen of a solve: its result, its cost, and how it ended."""
    seen = []
    if "norm" in request:
        norm = ERROR_NORMS[request["norm"]]
        request["norm"] = lambda e: seen.append(1) or norm(e)
    solution = solve(
        [Segment(0, 1, field)], X0, method=method, throw=False, **controlled(**request)
    )
    return solution.x1.tolist(), solution.stats, solution.status, bool(seen)


@pytest.mark.cases(25)
@pytest.mark.parametrize("option", VALUES)
@pytest.mark.parametrize("name", ALL)
def test_an_option_is_heeded_or_refused(name, option):
    method, value = ALL[name], VALUES[option]
    if option in options_of(method):
        # loose, so that steps of every method are long enough to be bounded
        plain = {"rtol": 1e-2, "atol": 1e-2} if option.endswith("_step") else {}
        assert outcome(method, **plain, **{option: value}) != outcome(method, **plain)
        return
    with pytest.raises(
        ConfigError, match=option if option not in ("rtol", "atol") else "rtol or atol"
    ):
        solve([Segment(0, 1, field)], X0, method=method, **controlled(**{option: value}))


@pytest.mark.cases(19)
@pytest.mark.parametrize("name", ALL)
def test_saved_steps_are_all_steps_or_refused(name):
    method = ALL[name]
    request = {"steps": 5} if "steps" in options_of(method) else {}
    if "save='steps'" not in options_of(method):
        with pytest.raises(
            ConfigError, match="takes no save='steps': use an adaptive method of the package"
        ):
            solve([Segment(0, 1, field)], X0, method=method, save="steps", **request)
        return
    solution = solve([Segment(0, 1, field)], X0, method=method, save="steps", **request)
    assert len(solution.states) == solution.stats.accepted + 1


def test_the_tables_are_what_is_said():
    for name, method in METHODS.items():
        heeded = options_of(method)
        assert ("steps" in heeded) is not method.adaptive
        assert ("rtol" in heeded) is method.adaptive
        assert (heeded == BOUNDED) is (method.adaptive and isinstance(method, RungeKutta)), name


def test_a_norm_of_fixed_steps_is_refused_unless_a_steady_state_is_looked_for():
    def still(t, x):
        return -3 * (x - 1)

    with pytest.raises(
        ConfigError, match="method 'rk4' has fixed steps and takes no norm: give steps"
    ):
        solve([Segment(0, 1, still)], X0, method="rk4", step_control=StepControl(norm="max"))
    ends = [
        solve(
            [Segment(0, 4, still)],
            X0.repeat(50),
            method="rk4",
            steps=400,
            steady=1e-3,
            step_control=StepControl(norm=norm),
        ).time
        for norm in (None, "max")
    ]
    # |dx/dt| = 3 (1 - x) of every second entry, so that the largest is sqrt(2) times the RMS
    assert ends[1] - ends[0] == pytest.approx(math.log(2) / 6, abs=0.02)


class Plain:
    """A method that promises nothing more than what `solve` asks."""

    order, adaptive = 1, False

    def advance(self, segment, x, run):
        return run.accept(segment, segment.end, x)


def test_a_method_of_ones_own_heeds_what_its_kind_does_or_what_it_says():
    class Said(Plain):
        options = frozenset({"steps", "rtol", "norm"})

    with pytest.raises(ConfigError, match="takes no norm"):
        solve([Segment(0, 1, field)], X0, method=Plain(), step_control=StepControl(norm="max"))
    assert (
        solve(
            [Segment(0, 1, field)],
            X0,
            method=Said(),
            step_control=StepControl(norm="max"),
            rtol=1e-3,
        ).status
        is Status.SUCCESS
    )
    with pytest.raises(ConfigError, match="takes no max_steps"):
        solve([Segment(0, 1, field)], X0, method=Said(), step_control=StepControl(max_steps=3))


def decay(t, x):
    return -x


WITHIN = (0.3, 0.9)
ASKED = {
    "nothing": ({}, lambda s, x: s.status is Status.SUCCESS),
    "times": ({"times": WITHIN}, lambda s, x: s.times == WITHIN and len(s.states) == 2),
    "a curve": (
        {"save": "curve"},
        lambda s, x: torch.allclose(s.curve(0.3), x * math.exp(-0.3), rtol=0.05),
    ),
    "segments": ({"save": "segments"}, lambda s, x: s.times == (0.0, 0.5, 1.0)),
    "steps": ({"save": "steps"}, lambda s, x: len(s.states) == s.stats.accepted + 1 > 3),
    "an event": (
        {"events": Event(lambda t, x: t - 0.4)},
        lambda s, x: s.status is Status.EVENT and abs(s.time - 0.4) < 1e-9,
    ),
    "a steady state": ({"steady": 0.9}, lambda s, x: s.status is Status.STEADY and 0 < s.time <= 1),
    "tolerances by entry": (
        {"rtol": torch.tensor([1e-4, 1e-6])},
        lambda s, x: s.status is Status.SUCCESS,
    ),
    "a norm": ({"norm": lambda e: e.abs().max()}, lambda s, x: s.status is Status.SUCCESS),
    "bounded steps": ({"max_step": 0.05}, lambda s, x: s.stats.accepted >= 20),
}


def is_theirs(name):
    return name.startswith("torchdiffeq:")


def is_told_no_error(name):
    """Of fixed steps, of which an implicit method's still end Newton's method by tolerances and a
    norm.
    """
    return not ALL[name].adaptive and name not in IMPLICIT


SCIPY, IMPLICIT = "torchdiffeq:scipy_solver", ("esdirk4", "esdirk4, fixed")
# what is refused, in which words; all else must be carried out
REFUSED = {
    "gradient 'adjoint' solves an ODE made of": (
        lambda name, kind, asked: kind == "adjoint" and name in IMPLICIT
    ),
    "gradient 'reversible' is made of an explicit Runge-Kutta method": lambda name, kind, asked: (
        kind == "reversible" and (is_theirs(name) or name in IMPLICIT)
    ),
    "scipy_solver leaves torch and has the gradient 'adjoint' only": lambda name, kind, asked: (
        name == SCIPY and kind != "adjoint"
    ),
    "states at any times need a method whose tableau has dense output": lambda name, kind, asked: (
        asked == "times" and (is_theirs(name) or kind in ("checkpoint", "reversible"))
    ),
    "save='curve' needs a method whose tableau has dense output": lambda name, kind, asked: (
        asked == "a curve" and (is_theirs(name) or kind != "backprop")
    ),
    "events need a method whose tableau has dense output": (
        lambda name, kind, asked: asked == "an event" and is_theirs(name)
    ),
    "on_step and steady need a method of the package": (
        lambda name, kind, asked: asked == "a steady state" and is_theirs(name)
    ),
    "takes no save='steps'": lambda name, kind, asked: asked == "steps" and name == SCIPY,
    "takes no rtol or atol": (
        lambda name, kind, asked: asked == "tolerances by entry" and is_told_no_error(name)
    ),
    "with gradient 'adjoint' has no tolerances by entry": lambda name, kind, asked: (
        asked == "tolerances by entry"
        and is_theirs(name)
        and ALL[name].adaptive
        and kind == "adjoint"
    ),
    "takes no norm": (
        lambda name, kind, asked: asked == "a norm" and (is_told_no_error(name) or name == SCIPY)
    ),
    "takes no max_step": (
        lambda name, kind, asked: (
            asked == "bounded steps" and (not ALL[name].adaptive or is_theirs(name))
        )
    ),
}


@pytest.mark.cases(25)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("kind", sorted(GRADIENTS))
@pytest.mark.parametrize("name", ALL)
def test_whatever_is_asked_of_whatever_method_and_gradient_is_given_or_refused(name, kind, asked):
    request, kept = ASKED[asked]
    method, x = ALL[name], torch.tensor([1.0, 0.5], dtype=torch.float64, requires_grad=True)
    size = (
        {"steps": 20}
        if "steps" in options_of(method)
        else dict.fromkeys(("rtol", "atol"), 1e-5 if method.order > 3 else 1e-3)
    )
    segments = [Segment(0, 0.5, decay), Segment(0.5, 1, decay)]

    def given():
        solution = solve(
            segments, x, method=method, gradient=kind, **controlled(**{**size, **request})
        )
        return solution, *torch.autograd.grad(solution.x1.sum(), x)

    if reasons := [words for words, holds in REFUSED.items() if holds(name, kind, asked)]:
        with pytest.raises(ConfigError, match="|".join(reasons)):
            given()
        return
    solution, gradient = given()
    assert kept(solution, x.detach())
    right = math.exp(-1 if solution.time is None else -solution.time)
    assert torch.allclose(solution.x1, x * right, rtol=0.05)
    # an event at a given time, and a steady state, move with nothing
    assert torch.allclose(gradient, torch.full_like(x, right), rtol=0.05)


def test_a_tolerance_is_given_once_and_a_keyword_that_never_was_is_none():
    with pytest.raises(ConfigError, match="rtol is given twice"):
        solve(
            [Segment(0, 1, field)],
            X0,
            method="tsit5",
            rtol=1e-3,
            step_control=StepControl(rtol=1e-3),
        )
    with pytest.raises(TypeError, match="unexpected keyword argument 'tolerance'"):
        solve([Segment(0, 1, field)], X0, tolerance=1e-3)


def test_step_control_with_tolerances_is_the_shorthands():
    short = solve([Segment(0, 1, field)], X0, method="tsit5", rtol=1e-4, atol=1e-5)
    whole = solve([Segment(0, 1, field)], X0, method="tsit5", step_control=StepControl(1e-4, 1e-5))
    assert torch.equal(short.x1, whole.x1)
    assert short.stats == whole.stats
