"""torchdiffeq's call, by its own results: the cases of its test suite, side by side with it."""

import math
import sys
import warnings

import pytest
import torch
import torchdiffeq
from torch import nn

from solvers import ConfigError, SolveError, Status, odeint, odeint_event
from solvers.odeint import ITS_METHODS
from solvers.torchdiffeq_methods import NAMES

ADAPTIVE = ["dopri5", "bosh3", "adaptive_heun", "dopri8", "fehlberg2"]
FIXED = ["euler", "midpoint", "heun2", "heun3", "rk4"]


class Constant:
    """y' = a + (y - (a t + b))^5, y = a t + b."""

    a, b = 0.2, 3.0

    def field(self, t, y):
        return self.a + (y - (self.a * t + self.b)) ** 5

    def exact(self, t):
        return (self.a * t + self.b)[:, None]


class Sine:
    """y' = 2 y/t + t^4 sin 2t - t^2 + 4 t^3, in closed form."""

    def field(self, t, y):
        return 2 * y / t + t**4 * torch.sin(2 * t) - t**2 + 4 * t**3

    def exact(self, t):
        y = (
            -0.5 * t**4 * torch.cos(2 * t)
            + 0.5 * t**3 * torch.sin(2 * t)
            + 0.25 * t**2 * torch.cos(2 * t)
        )
        return (y - t**3 + 2 * t**4 + (math.pi - 0.25) * t**2)[:, None]


class Linear:
    """y' = A y with A antisymmetric and random, by the matrix exponential."""

    def __init__(self, size=6):
        u = (
            torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            * 0.3
        )
        self.a = u - u.T

    def field(self, t, y):
        return y @ self.a.T.to(y.dtype)

    def exact(self, t):
        start = torch.ones(len(self.a), dtype=torch.float64)
        return torch.stack(
            [torch.matrix_exp(self.a * (time - t[0]).double()) @ start for time in t]
        ).to(t.dtype)


PROBLEMS = {"constant": Constant(), "sine": Sine(), "linear": Linear()}


def problem(name, points=10, descending=False, dtype=torch.float64):
    t = torch.linspace(1, 8, points, dtype=torch.float64)
    exact = PROBLEMS[name].exact(t)
    t = t.flip(0) if descending else t
    exact = exact.flip(0) if descending else exact
    return PROBLEMS[name].field, exact[0].to(dtype), t.to(dtype), exact.to(dtype)


@pytest.mark.cases(3)
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("method", ["dopri5", "bosh3", "tsit5", None])
def test_adaptive_methods_reach_the_exact_solutions(method, name, descending):
    field, y0, t, exact = problem(name, descending=descending)
    y = odeint(field, y0, t, method=method, rtol=1e-8, atol=1e-9)
    assert y.shape == (10, *y0.shape)
    assert float(((y - exact).abs() / (1 + exact.abs())).max()) < 1e-4


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("method", FIXED)
@pytest.mark.parametrize(
    "options", [None, {"step_size": 0.05}, {"step_size": 0.03, "interp": "cubic"}]
)
def test_fixed_methods_have_torchdiffeqs_results_to_rounding(method, name, descending, options):
    field, y0, t, _ = problem(name, descending=descending)
    ours = odeint(field, y0, t, method=method, options=options)
    theirs = torchdiffeq.odeint(field, y0, t, method=method, options=options)
    assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize(
    "method", [*FIXED, "dopri5", "bosh3", "adaptive_heun", "explicit_adams", "scipy_solver"]
)
def test_every_shape_and_type_comes_back(method):
    for shape in ((), (1,), (2, 3)):
        for dtype in (torch.float32, torch.float64):
            t = torch.tensor([0.0, 0.5, 1.0], dtype=dtype)
            y = odeint(
                lambda t, y: -y,
                torch.ones(shape, dtype=dtype),
                t,
                method=method,
                rtol=1e-3,
                atol=1e-3,
            )
            assert (y.shape, y.dtype) == ((3, *shape), dtype)
            assert torch.equal(y[0], torch.ones(shape, dtype=dtype))


def test_defaults_are_theirs_in_float32_too():
    t = torch.linspace(0, 1, 5)
    ours, theirs = (f(lambda t, y: -y * t, torch.ones(3), t) for f in (odeint, torchdiffeq.odeint))
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_a_tuple_of_tensors_is_a_state():
    def field(t, y):
        a, b = y
        return -a * t, torch.cos(t) * b.flip(0) + a.sum()

    y0 = torch.ones(2, 2, dtype=torch.float64), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    t = torch.linspace(0, 2, 7, dtype=torch.float64)
    for method in ("dopri5", "rk4"):
        ours, theirs = (
            f(field, y0, t, method=method, rtol=1e-9, atol=1e-9)
            for f in (odeint, torchdiffeq.odeint)
        )
        assert isinstance(ours, tuple)
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.shape == other.shape
            assert torch.allclose(mine, other, rtol=1e-7, atol=1e-7)
    with pytest.raises(ConfigError, match="func returned Tensor for a state of 2 tensors"):
        odeint(lambda t, y: y[0], y0, t)


@pytest.mark.cases(1)
@pytest.mark.parametrize("method", ["dopri5", "rk4", "tsit5"])
def test_a_nested_state_is_its_tuple(method):
    # a dictionary of a list, a tuple and a tensor, beside the tuple of the same tensors; an event
    # and a norm meet the same structure
    def of_tuple(t, y):
        a, b, c = y
        return -a * t, torch.cos(t) * b.flip(0) + a.sum(), 0.1 * c * b.sum()

    def of_tree(t, y):
        a, b, c = of_tuple(t, (y["first"][0], y["first"][1][0], y["second"]))
        return {"first": [a, (b,)], "second": c}

    y0 = (
        torch.ones(2, 2).double().requires_grad_(),
        torch.tensor([1.0, 2.0, 3.0]).double(),
        torch.tensor(0.5).double(),
    )
    nested = {"first": [y0[0], (y0[1],)], "second": y0[2]}
    t = torch.linspace(0, 2, 5, dtype=torch.float64)
    right, found = odeint(of_tuple, y0, t, method=method), odeint(of_tree, nested, t, method=method)
    assert list(found) == ["first", "second"]
    assert isinstance(found["first"], list)
    for mine, other in zip(
        (found["first"][0], found["first"][1][0], found["second"]), right, strict=True
    ):
        assert torch.equal(mine, other)
    ours, theirs = (torch.autograd.grad(end.sum(), y0[0])[0] for end in (found["second"], right[2]))
    assert torch.equal(ours, theirs)
    time, states = odeint(
        of_tree,
        nested,
        t[::4],
        method=method,
        event_fn=lambda t, y: y["second"] - 0.6,
        options={"step_size": 0.1} if method == "rk4" else None,
    )
    assert float(states["second"][-1].detach()) == pytest.approx(0.6, abs=1e-6)
    assert 0 < float(time.detach()) < 2


@pytest.mark.cases(1)
@pytest.mark.parametrize("gradient", ["backprop", "adjoint", "checkpoint"])
@pytest.mark.parametrize("method", ["dopri5", "rk4", "euler"])
def test_gradients_of_state_parameter_and_times_are_torchdiffeqs(method, gradient):
    if gradient == "adjoint" and method == "euler":
        pytest.skip("its adjoint is another discretisation")
    net = nn.Linear(3, 3, dtype=torch.float64)
    y0 = torch.tensor([0.3, -0.5, 0.8], dtype=torch.float64, requires_grad=True)
    t = torch.linspace(0, 1.5, 25 if method == "rk4" else 5, dtype=torch.float64).requires_grad_()
    weights = torch.linspace(1, 2, 3 * len(t), dtype=torch.float64).view(-1, 3)

    def field(t, y):
        return torch.tanh(net(y)) * torch.cos(t)

    found = []
    for call, extra in ((odeint, {"gradient": gradient}), (torchdiffeq.odeint, {})):
        y = call(field, y0, t, method=method, rtol=1e-10, atol=1e-10, **extra)
        found.append(torch.autograd.grad((weights * y.square()).sum(), (y0, t, *net.parameters())))
    for i, (mine, other) in enumerate(zip(*found, strict=True)):
        if i == 1 and method != "dopri5":
            continue  # theirs moves the grid with the times, ours reads the solution's slope
        assert torch.allclose(mine, other, rtol=1e-4, atol=1e-5)


def test_the_gradient_in_a_time_is_the_slope_there():
    t = torch.tensor([0.2, 0.5, 1.0], dtype=torch.float64, requires_grad=True)
    y0 = torch.tensor([1.0], dtype=torch.float64)
    y = odeint(lambda t, y: -y * t, y0, t, rtol=1e-10, atol=1e-11)
    (found,) = torch.autograd.grad(y[1:].sum(), t)
    values = y.detach()[:, 0]
    # y(t) = exp((t0^2 - t^2)/2)
    right = torch.stack([0.2 * values[1:].sum(), -0.5 * values[1], -1.0 * values[2]])
    assert torch.allclose(found, right, rtol=1e-8)


@pytest.mark.parametrize(("method", "options"), [("dopri5", {}), ("rk4", {"step_size": 0.01})])
def test_second_derivatives_in_the_times_are_the_solutions(method, options):
    t = torch.tensor([0.2, 0.5, 1.0], dtype=torch.float64, requires_grad=True)
    y0 = torch.tensor([1.3], dtype=torch.float64)

    def last(t):
        field = lambda t, y: -y * t  # noqa: E731
        return odeint(field, y0, t, method=method, rtol=1e-11, atol=1e-12, options=options)[2, 0]

    def closed_form(t):
        return 1.3 * torch.exp((t[0] ** 2 - t[2] ** 2) / 2)

    found = torch.autograd.functional.hessian(last, t)
    assert torch.allclose(found, torch.autograd.functional.hessian(closed_form, t), rtol=1e-6)


def test_more_times_cost_nothing_and_a_switch_is_stopped_at():
    calls = []

    def field(t, y):
        calls.append(float(t))
        return -y if t < 0.5 else y

    counts = []
    for points in (2, 1000):
        calls.clear()
        t = torch.linspace(0, 1, points, dtype=torch.float64)
        options = {"jump_t": torch.tensor([0.5, 7.0])}
        y = odeint(
            field, torch.ones(1, dtype=torch.float64), t, rtol=1e-9, atol=1e-9, options=options
        )
        counts.append(len(calls))
        assert float(y[-1]) == pytest.approx(1, abs=1e-8)
    assert counts[0] == counts[1]
    assert 0.5 not in calls


def test_options_do_what_they_say():
    t = torch.tensor([0.0, 4.0], dtype=torch.float64)
    y0 = torch.ones(2, dtype=torch.float64)
    times = []

    def field(t, y):
        times.append(float(t))
        return -y

    odeint(field, y0, t, options={"first_step": 0.01})
    assert sorted(set(times))[2] < 0.01
    times.clear()
    odeint(
        field,
        y0,
        t,
        rtol=1e-3,
        atol=1e-3,
        options={"max_step": 0.1, "safety": 0.8, "ifactor": 5.0, "dfactor": 0.3},
    )
    assert len(times) > 40 * 6
    with pytest.raises(SolveError) as caught:
        odeint(field, y0, t, options={"max_num_steps": 3})
    assert caught.value.solution.status is Status.TOO_MANY_STEPS
    seen = []
    odeint(field, y0, t, options={"norm": lambda e: seen.append(e.shape) or e.abs().max()})
    assert set(seen) == {(2,)}
    with pytest.warns(UserWarning, match="unexpected options \\['stepsize'\\]"):
        odeint(field, y0, t, method="rk4", options={"stepsize": 0.1})
    grid = {"grid_constructor": lambda f, y, t: torch.linspace(0, 4, 41, dtype=torch.float64)}
    ours, theirs = (
        f(field, y0, t, method="rk4", options=grid) for f in (odeint, torchdiffeq.odeint)
    )
    assert torch.allclose(ours, theirs, rtol=1e-13)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        odeint(field, y0, t, options={"dtype": torch.float64})
        odeint(field, y0, t, method="euler", options={"perturb": True, "norm": None})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda t, y: odeint(lambda t, y: y, y, t, event_fn=3),
            "event_fn = 3 with 2 times: give a function",
        ),
        (
            lambda t, y: odeint(lambda t, y: y, y, torch.arange(3.0), event_fn=lambda t, y: y),
            "with 3 times",
        ),
        (
            lambda t, y: odeint(
                lambda t, y: y,
                y,
                t,
                event_fn=lambda t, y: y - 2,
                method="rk4",
                options={"grid_constructor": lambda f, y, t: t},
            ),
            "give step_size instead",
        ),
        (lambda t, y: odeint(lambda t, y: y, y, t, method="dopri6"), "did you mean 'dopri"),
        (
            lambda t, y: odeint(lambda t, y: y, y, t.flip(0).repeat(2)),
            "strictly increasing or strictly decreasing",
        ),
        (lambda t, y: odeint(lambda t, y: y, y, t[None]), "floating tensor of one axis"),
        (lambda t, y: odeint(lambda t, y: y, y, t.long()), "floating tensor of one axis"),
        (lambda t, y: odeint(lambda t, y: y, y, [0, 1]), "t is list"),
        (lambda t, y: odeint(lambda t, y: y, [y, 3], t), "y0 is list"),
        (lambda t, y: odeint(lambda t, y: y, {}, t), "y0 is dict"),
        (
            lambda t, y: odeint(lambda t, y: (y["a"],), {"a": y}, t),
            "func returned tuple for a state of 1 tensors",
        ),
        (lambda t, y: odeint(lambda t, y: {"a": y["a"][0]}, {"a": y}, t), "func returned dict"),
        (lambda t, y: odeint(lambda t, y: y, (y, y.double()), t), "several types"),
        (lambda t, y: odeint(lambda t, y: y, y.long(), t), "floating or complex type"),
        (
            lambda t, y: odeint(lambda t, y: y, y, t, rtol=torch.ones(3)),
            "does not fit a state of shape",
        ),
        (lambda t, y: odeint(lambda t, y: y, y, t, options={"min_step": -0.1}), "min_step = -0.1"),
        (
            lambda t, y: odeint(lambda t, y: y, y, t, method="rk4", options={"step_size": 0}),
            "step_size = 0.0",
        ),
        (
            lambda t, y: odeint(
                lambda t, y: y,
                y,
                t,
                method="rk4",
                options={"step_size": 1, "grid_constructor": max},
            ),
            "give only one",
        ),
    ],
)
def test_what_cannot_be_done_is_named(call, words):
    with pytest.raises(ConfigError, match=words):
        call(torch.tensor([0.0, 1.0]), torch.ones(2))


@pytest.mark.parametrize(
    "method", ["dopri5", "bosh3"]
)  # its adaptive_heun goes on from the slope at the predictor
def test_steps_that_min_step_forces_are_theirs_and_warned_of(method):
    # first, shortest and longest steps of one size leave only one way to go
    t, y0 = (
        torch.linspace(0, 2, 5, dtype=torch.float64),
        torch.tensor([1.0, -0.5], dtype=torch.float64),
    )
    options = {"first_step": 0.25, "min_step": 0.25, "max_step": 0.25}
    request = {"method": method, "rtol": 1e-9, "atol": 1e-9, "options": options}
    with pytest.warns(UserWarning, match="8 of 8 steps have an error above the tolerance"):
        ours = odeint(lambda t, y: torch.cos(t) - y**3, y0, t, **request)
    theirs = torchdiffeq.odeint(lambda t, y: torch.cos(t) - y**3, y0, t, **request)
    # between steps its interpolant is another; these times are steps' ends
    assert torch.allclose(ours, theirs, rtol=1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        odeint(
            lambda t, y: -y,
            y0,
            t,
            method=method,
            rtol=1e-3,
            options={"min_step": 0.0, "max_step": math.inf},
        )


@pytest.mark.parametrize("name", ["callback_step", "callback_accept_step", "callback_reject_step"])
def test_callbacks_that_would_go_unheard_are_said(name):
    class Field(nn.Module):
        def forward(self, t, y):
            return -y

    field = Field()
    setattr(field, name, lambda *of: None)
    with pytest.warns(UserWarning, match=f"func has {name}, and callbacks are not called here"):
        odeint(field, torch.ones(2), torch.tensor([0.0, 1.0]))


@pytest.mark.cases(1)
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("method", ["dopri5", "bosh3", "adaptive_heun", "tsit5", "dopri8"])
def test_a_looser_tolerance_costs_fewer_evaluations_and_a_tighter_one_is_nearer(method, descending):
    field, y0, t, exact = problem("sine", descending=descending)
    errors, counts = [], []
    for tolerance in (1e-3, 1e-5, 1e-7):
        calls = []

        def counted(t, y, calls=calls):
            calls.append(t)
            return field(t, y)

        y = odeint(counted, y0, t, method=method, rtol=tolerance, atol=tolerance)
        errors.append(float(((y - exact).abs() / (1 + exact.abs())).max()))
        counts.append(len(calls))
    assert counts == sorted(counts)
    assert errors[2] < errors[0] < 0.1
    assert errors[2] < 1e-3


@pytest.mark.cases(2)
@pytest.mark.parametrize("gradient", ["backprop", "adjoint"])
@pytest.mark.parametrize("method", ["dopri5", "bosh3", "rk4", "midpoint"])
def test_gradients_of_a_tuple_with_entries_that_nothing_depends_on(method, gradient):
    # the cases of a state whose part is constant, of a parameter that is not used, and of a y0
    # without a gradient
    used, idle = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.7, 2.0))
    a, b = (
        torch.ones(2, dtype=torch.float64, requires_grad=True),
        torch.zeros(3, dtype=torch.float64),
    )
    t = torch.linspace(0, 1, 9, dtype=torch.float64)
    for call, extra in ((torchdiffeq.odeint, {}), (odeint, {"gradient": gradient})):
        ends = call(
            lambda t, y: (-used * y[0], torch.zeros_like(y[1])),
            (a, b),
            t,
            method=method,
            rtol=1e-9,
            atol=1e-9,
            **extra,
        )
        found = torch.autograd.grad(ends[0][-1].sum(), (used, a, idle), allow_unused=True)
        assert found[2] is None
    # the closed form of 2 exp(-u), as torchdiffeq's bosh3 is off by 4e-6 at these tolerances; h =
    # 1/8 in the fixed steps
    end = math.exp(-0.7)
    close = {"midpoint": (1 / 8) ** 2, "rk4": (1 / 8) ** 4}.get(method, 1e-7)
    assert float(found[0]) == pytest.approx(-2 * end, rel=close)
    assert found[1].tolist() == pytest.approx([end, end], rel=close)


@pytest.mark.cases(5)
@pytest.mark.parametrize("method", sorted(set(NAMES) - set(ITS_METHODS)))
def test_methods_that_only_they_have_are_run_by_them(method):
    t, y0 = (
        torch.linspace(0, 2, 7, dtype=torch.float64),
        torch.tensor([1.0, 0.0], dtype=torch.float64),
    )
    calls = []

    def turning(t, y):
        calls.append(float(t))
        return torch.stack([-y[1], y[0]])

    options = {"step_size": 0.05} if method.endswith("_adams") else {}
    found, ours = odeint(turning, y0, t, method=method, options=options), calls.copy()
    calls.clear()
    assert torch.equal(found, torchdiffeq.odeint(turning, y0, t, method=method, options=options))
    assert ours == calls
    with pytest.raises(ConfigError, match="backprop, adjoint only"):
        odeint(turning, y0, t, method=method, gradient="reversible")


def swinging(t, y):
    angle, speed = y
    return speed, -torch.sin(angle) - 0.1 * speed + 0.1 * torch.cos(t)


@pytest.mark.cases(1)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("method", ["dopri5", "rk4"])
def test_an_event_is_theirs_with_its_gradients(method, reverse):
    # the first of two signs that change, of a tuple. Theirs misses the share of what event_fn
    # itself depends on, so that is nothing here
    def of(solver, rate, angle):
        def field(t, y):
            return tuple(rate * v for v in swinging(t, y))

        def event(t, y):
            return torch.stack([y[0] - 0.2, 3 - y[1]]).reshape(-1)

        options = {"step_size": 0.01} if method == "rk4" else None
        fixed = {"method": method, "options": options, "atol": 1e-9, "rtol": 1e-9}
        y0, t0 = (angle, torch.zeros_like(angle)), torch.tensor(0.3, dtype=torch.float64)
        if solver is torchdiffeq:
            time, states = torchdiffeq.odeint_event(
                field, y0, t0, event_fn=event, reverse_time=reverse, **fixed
            )
        else:
            time, states = odeint(
                field, y0, torch.stack([t0, t0 + (-1 if reverse else 1)]), event_fn=event, **fixed
            )
        return torch.stack([time, *(state[-1].squeeze() for state in states)]), states

    found = []
    for solver in (None, torchdiffeq):
        rate, angle = (
            torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (1.1, [0.9])
        )
        values, states = of(solver, rate, angle)
        assert [part.shape for part in states] == [(2, 1), (2, 1)]
        found.append(
            (
                values,
                [
                    torch.cat(
                        [
                            g.reshape(-1)
                            for g in torch.autograd.grad(v, (rate, angle), retain_graph=True)
                        ]
                    )
                    for v in values
                ],
            )
        )
    (ours, mine), (theirs, right) = found
    assert torch.allclose(ours, theirs, atol=1e-6 if method == "dopri5" else 1e-4)
    assert torch.allclose(torch.stack(mine), torch.stack(right), rtol=1e-4, atol=1e-4)


def test_an_event_that_never_comes_ends_where_the_state_goes_round(monkeypatch):
    monkeypatch.setattr(sys.modules["solvers.odeint_problem"], "EVENT_STEPS", 100)
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    with pytest.raises(SolveError, match="max"):
        odeint_event(
            lambda t, y: turn @ y, torch.ones(2), torch.tensor(0.0), event_fn=lambda t, y: y[0] + 9
        )


@pytest.mark.parametrize("method", ["dopri5", "rk4"])
def test_an_entry_of_an_event_that_begins_at_zero_does_not_hide_the_others(method):
    options = {} if method == "dopri5" else {"step_size": 0.1}
    start, t0 = torch.zeros(2, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)

    def until(event):
        return odeint_event(
            lambda t, y: torch.ones_like(y),
            start,
            t0,
            event_fn=event,
            method=method,
            options=options,
        )[0]

    assert float(until(lambda t, y: torch.stack([y[0], 2.5 - y[1]]))) == pytest.approx(2.5)
    assert float(until(lambda t, y: y[:1] * (1.5 - y[:1]))) == pytest.approx(
        1.5
    )  # a ball that leaves the ground, and comes back


@pytest.mark.parametrize("value", ["x", None, torch.ones(1, dtype=torch.int64), torch.ones(0)])
def test_an_event_function_that_returns_no_floating_tensor_is_named(value):
    with pytest.raises(ConfigError, match="event_fn returned"):
        odeint_event(lambda t, y: -y, torch.ones(2), torch.tensor(0.0), event_fn=lambda t, y: value)


def test_an_event_that_never_comes_is_said():
    with pytest.raises(SolveError, match="no event between t = 0 and"):
        odeint(
            lambda t, y: 0 * y,
            torch.ones(1),
            torch.tensor([0.0, 1.0]),
            event_fn=lambda t, y: y[0] + 1,
        )


def test_the_names_are_those_of_torchdiffeq():
    """They are written down, so that torchdiffeq is imported where a method of it runs."""
    from torchdiffeq._impl.odeint import SOLVERS

    assert set(NAMES) == set(SOLVERS)
