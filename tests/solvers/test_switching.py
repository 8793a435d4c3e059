"""What a user of torchdiffeq has in use, by one changed import: the cases that its own tests go
through, each beside its result.
"""

import inspect

import pytest
import torch
import torchdiffeq
from torch import nn

import solvers
from solvers import ConfigError, SolveError, odeint, odeint_adjoint, odeint_dense, odeint_event
from tests.helpers import DEVICES

OURS = ["dopri5", "bosh3", "adaptive_heun", "euler", "midpoint", "heun2", "heun3", "rk4"]
THEIRS = ["dopri8", "fehlberg2", "explicit_adams", "implicit_adams", "fixed_adams"]
ADAPTIVE = ["dopri5", "bosh3", "adaptive_heun", "dopri8", "fehlberg2"]
T = torch.linspace(0, 1, 5).double()
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Spiral(nn.Module):
    """y' = tanh(A y) cos t."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.a = nn.Parameter(torch.tensor([[-0.3, 1.2], [-0.9, 0.1]], dtype=dtype))

    def forward(self, t, y):
        return torch.tanh(y @ self.a.T) * torch.cos(t)


def start(dtype=torch.float64):
    return torch.tensor([0.8, -0.4], dtype=dtype, requires_grad=True)


def tolerance(method):
    return 1e-5 if method in ("adaptive_heun", "fehlberg2", "bosh3") else 1e-8


def gradients(call, t=T, **request):
    func, y0 = Spiral(), start()
    moments = t.clone().requires_grad_()
    y = call(func, y0, moments, **request)
    return [
        y.detach(),
        *torch.autograd.grad(
            (y.square() * torch.arange(1, 3).double()).sum(), (y0, func.a, moments)
        ),
    ]


@pytest.mark.cases(1)
@pytest.mark.parametrize("method", [*OURS, *THEIRS])
def test_odeint_adjoint_has_the_solution_and_gradients(method):
    request = {"method": method, "rtol": tolerance(method), "atol": tolerance(method)}
    t = T if method in ADAPTIVE else torch.linspace(0, 1, 41).double()
    mine, other = (
        gradients(call, t, **request) for call in (odeint_adjoint, torchdiffeq.odeint_adjoint)
    )
    close = (
        {"rtol": 1e-2, "atol": 5e-2}
        if method in ("euler", "midpoint")
        else {"rtol": 1e-3, "atol": 1e-3}
    )
    for i, (a, b) in enumerate(zip(mine, other, strict=True)):
        assert torch.allclose(a, b, **close), i


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "request_",
    [
        {"adjoint_rtol": 1e-9, "adjoint_atol": 1e-9},
        {"adjoint_method": "rk4", "method": "rk4"},
        {"adjoint_method": "dopri5", "method": "bosh3", "rtol": 1e-6, "atol": 1e-6},
        {"adjoint_method": "dopri8"},
        {"adjoint_options": {"norm": "seminorm"}},
        {
            "options": {"first_step": 0.01},
            "adjoint_options": {"first_step": 0.01, "norm": "seminorm"},
        },
        {"adjoint_params": "all"},
        {"event_fn": None},
    ],
    ids=str,
)
def test_the_adjoints_own_arguments_are_taken(request_):
    func = Spiral()
    t = torch.linspace(0, 1, 41).double() if request_.get("method") == "rk4" else T
    found = []
    for call in (odeint_adjoint, torchdiffeq.odeint_adjoint):
        given = dict(request_)
        if given.get("adjoint_params"):
            given["adjoint_params"] = tuple(func.parameters())
        y0 = start()
        y = call(func, y0, t, **given)
        found.append([y.detach(), *torch.autograd.grad(y[-1].square().sum(), (y0, func.a))])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, **CLOSE)


def test_a_tighter_way_back_is_nearer_and_another_method_is_used():
    exact = gradients(odeint, rtol=1e-12, atol=1e-12)[2]
    loose, tight = (
        gradients(odeint_adjoint, rtol=1e-12, atol=1e-12, adjoint_rtol=r, adjoint_atol=r)[2]
        for r in (1e-3, 1e-10)
    )
    assert float((tight - exact).abs().max()) < 1e-3 * float((loose - exact).abs().max())
    euler = gradients(odeint_adjoint, method="rk4", adjoint_method="euler")[2]
    assert float((euler - exact).abs().max()) > 1e-2


def test_functions_need_no_adjoint_params_and_empty_ones_are_taken():
    rate = torch.tensor(0.7).double().requires_grad_()
    for request in ({}, {"adjoint_params": ()}, {"adjoint_params": (rate,)}):
        y = odeint_adjoint(lambda t, y: -rate * y, torch.ones(1).double(), T, **request)
        (found,) = torch.autograd.grad(y[-1].sum(), rate)
        assert float(found) == pytest.approx(-float(torch.exp(-rate.detach())), rel=1e-6)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"adjoint_options": {"norm": torch.max}}, "adjoint_options has norm"),
        ({"adjoint_options": {"step_size": 0.1}}, "adjoint_options has step_size = 0.1"),
        ({"adjoint_method": "dopri6"}, "unknown adjoint_method 'dopri6': did you mean"),
        ({"adjoint_params": (1,)}, "adjoint_params holds something else"),
        ({"adjoint_rtol": -1.0}, "the adjoint's rtol = -1.0"),
        ({"method": "dopri6"}, "unknown method 'dopri6'"),
    ],
)
def test_what_the_adjoint_has_not_is_named(request_, words):
    with pytest.raises(ConfigError, match=words):
        odeint_adjoint(Spiral(), start(), T, **request_)


def test_an_event_is_gone_to_again_by_the_steps_that_were_begun():
    """The adjoint solves to the event a second time: not by all of the million steps that the event
    might have taken.
    """
    field, called = Spiral(), list[float]()

    def counted(t, y):
        called.append(float(t))
        return field(t, y)

    options = {"step_size": 0.01}
    time, _ = odeint_event(
        counted,
        start(),
        torch.tensor(0.1).double(),
        event_fn=lambda t, y: y[0] - 0.6,
        odeint_interface=odeint_adjoint,
        method="rk4",
        options=options,
        adjoint_params=tuple(field.parameters()),
    )
    steps = (float(time) - 0.1) / options["step_size"]
    assert (
        2 * 4 * steps < len(called) < 2 * 4 * (steps + 2) + 100
    )  # twice 4 stages a step, and what looks for the root


@pytest.mark.cases(2)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("interface", ["odeint", "odeint_adjoint"])
@pytest.mark.parametrize("method", ["dopri5", "bosh3", "rk4"])
def test_odeint_event_is_theirs(method, interface, reverse):
    ours = {"odeint": odeint, "odeint_adjoint": odeint_adjoint}[interface]
    found = []
    for event, solver in (
        (odeint_event, ours),
        (torchdiffeq.odeint_event, getattr(torchdiffeq, interface)),
    ):
        func, y0, t0 = Spiral(), start(), torch.tensor(0.1).double().requires_grad_()
        options = {"step_size": 0.01} if method == "rk4" else None
        time, states = event(
            func,
            y0,
            t0,
            event_fn=lambda t, y: y[0] - 0.6,
            reverse_time=reverse,
            odeint_interface=solver,
            method=method,
            options=options,
            rtol=1e-7,
            atol=1e-7,
        )
        both = torch.autograd.grad(time + states[-1][1], (y0, func.a))
        found.append([time.detach(), states.detach(), *both])
    for a, b in zip(*found, strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("perturb", [False, True])
@pytest.mark.parametrize("method", ["euler", "midpoint", "heun2", "heun3", "rk4"])
def test_perturb_is_taken_and_evaluates_beside_the_times(method, perturb):
    def switched(t, y):
        return -y if t < 0.5 else 2 * y

    # with their `perturb` a step starts and ends inside; ours does always
    request = {"method": method, "options": {"step_size": 0.125, "perturb": perturb}}
    ours = odeint(switched, torch.ones(1).double(), T, **request)
    theirs = torchdiffeq.odeint(
        switched,
        torch.ones(1).double(),
        T,
        method=method,
        options={**request["options"], "perturb": True},
    )
    # an Euler step that begins at the switch evaluates there, on the side after it, in both
    assert torch.allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "kind",
    [
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["dopri5", "rk4", "dopri8"])
def test_types_and_devices_are_kept(method, kind, device):
    y0 = torch.ones(2, dtype=kind, device=device)
    t = torch.linspace(0, 1, 3, device=device)
    if kind.itemsize == 2 and method == "dopri8":
        pytest.skip("torchdiffeq's, which has no half precision")
    y = odeint(lambda t, y: -y, y0, t, method=method, rtol=1e-2, atol=1e-2)
    assert (y.dtype, y.device) == (kind, y0.device)
    assert float((y[-1] - torch.e**-1).abs().max()) < 0.05


@pytest.mark.parametrize("times", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("method", ["dopri5", "rk4", "bosh3", "euler"])
def test_a_time_of_another_type_promotes_nothing(method, kind, times):
    told = []

    def func(t, y):
        told.append(t.dtype)
        return -y * t

    t = torch.linspace(0, 1, 5, dtype=times)
    ours = odeint(func, torch.ones(2, dtype=kind), t, method=method, rtol=1e-5, atol=1e-5)
    theirs = torchdiffeq.odeint(
        lambda t, y: -y * t.to(y), torch.ones(2, dtype=kind), t, method=method, rtol=1e-5, atol=1e-5
    )
    assert ours.dtype == kind == theirs.dtype
    assert set(told) == {kind}
    assert torch.allclose(ours, theirs, atol=2e-3)


@pytest.mark.parametrize("method", [*OURS, *THEIRS])
def test_one_time_is_the_initial_state(method):
    assert torch.equal(odeint(Spiral(), start(), T[:1], method=method), start()[None])


@pytest.mark.parametrize("solver", ["RK45", "RK23", "DOP853", "Radau", "BDF", "LSODA"])
def test_scipys_solvers_are_run(solver):
    with torch.no_grad():
        y = odeint(
            Spiral(),
            start(),
            T,
            method="scipy_solver",
            options={"solver": solver},
            rtol=1e-6,
            atol=1e-6,
        )
        right = odeint(Spiral(), start(), T, rtol=1e-9, atol=1e-9)
    assert torch.allclose(y, right, atol=1e-4)


@pytest.mark.filterwarnings("ignore:odeint")
@pytest.mark.parametrize("options", [{"max_step": 0.05}, {"min_step": 0.5}], ids=str)
@pytest.mark.parametrize("method", ["dopri5", "bosh3", "adaptive_heun"])
def test_min_and_max_steps_bound_the_evaluations(method, options):
    calls = []

    def func(t, y):
        calls.append(float(t))
        return -y

    odeint(
        func,
        torch.ones(1).double(),
        T[[0, -1]],
        method=method,
        options=options,
        rtol=1e-4,
        atol=1e-4,
    )
    assert (len(calls) >= 20) if "max_step" in options else (len(calls) <= 20)


def test_a_tuple_of_tolerances_and_a_norm_by_part():
    y0 = torch.ones(2).double(), torch.ones(3).double()
    shapes = []

    def norm(parts):
        shapes.append([part.shape for part in parts])
        return max(part.abs().max() for part in parts)

    odeint(lambda t, y: (-y[0], y[1]), y0, T, options={"norm": norm})
    assert set(map(str, shapes)) == {str([torch.Size([2]), torch.Size([3])])}


def lines(t, y):
    return torch.stack([torch.cos(9 * t) * y[0], -y[1], y[2] * y[1]])


@pytest.mark.cases(1)
@pytest.mark.parametrize("method", ["dopri5", "bosh3", "dopri8"])
def test_tolerances_by_entry_are_theirs(method):
    y0, t = torch.tensor([1.0, 2.0, 0.5]).double(), T[[0, -1]]
    rtol, atol = torch.tensor([1e-9, 1e-3, 1e-3]).double(), torch.tensor([1e-9, 1e-2, 1e-2])
    counts = {}
    for name, given in {
        "by entry": (rtol, atol),
        "loose": (1e-3, 1e-2),
        "tight": (1e-9, 1e-9),
    }.items():
        for call in (odeint, torchdiffeq.odeint):
            calls = []
            y = call(
                lambda t, y, calls=calls: calls.append(1) or lines(t, y),
                y0,
                t,
                method=method,
                rtol=given[0],
                atol=given[1],
            )
            counts[name, call] = len(calls), y[-1]
    # the first entry is as right as where all are asked for so closely
    for call in (odeint, torchdiffeq.odeint):
        assert counts["loose", call][0] < counts["by entry", call][0]
        assert float((counts["by entry", call][1] - counts["tight", odeint][1])[0].abs()) < 1e-6
    # for several tensors one each, as numbers, as a tensor of them and by their entries
    parts = tuple(y0.split([1, 2]))
    found = [
        odeint(
            lambda t, y: tuple(lines(t, torch.cat(y)).split([1, 2])),
            parts,
            t,
            rtol=given,
            atol=1e-9,
            method=method,
        )
        for given in (
            (1e-8, 1e-3),
            torch.tensor([1e-8, 1e-3]).double(),
            (torch.tensor([1e-8]), torch.tensor([1e-3, 1e-3]).double()),
        )
    ]
    plain = odeint(
        lines, y0, t, rtol=torch.tensor([1e-8, 1e-3, 1e-3]).double(), atol=1e-9, method=method
    )
    assert all(torch.allclose(torch.cat(one, -1), plain, rtol=1e-4) for one in found)


def test_a_broken_solve_is_named_where_theirs_asserts():
    with pytest.raises(SolveError, match="t = "):
        odeint(lambda t, y: y**3, torch.ones(1).double(), T[[0, -1]])
    with pytest.raises(AssertionError):
        torchdiffeq.odeint(lambda t, y: y**3, torch.ones(1).double(), T[[0, -1]])


def test_every_call_of_theirs_is_here():
    theirs = {
        name
        for name in vars(torchdiffeq)
        if not name.startswith("_") and callable(getattr(torchdiffeq, name))
    }
    assert theirs == {"odeint", "odeint_adjoint", "odeint_event", "odeint_dense"}
    for name in theirs:
        ours, other = (
            inspect.signature(getattr(solvers, name)),
            inspect.signature(getattr(torchdiffeq, name)),
        )
        assert set(other.parameters) <= set(ours.parameters)
        for key, parameter in other.parameters.items():
            assert (ours.parameters[key].kind, ours.parameters[key].default) == (
                parameter.kind,
                parameter.default,
            ) or key in (
                *(
                    "rtol",
                    "atol",
                    "adjoint_rtol",
                    "adjoint_atol",
                    "method",
                    "odeint_interface",
                    "event_fn",
                ),
            ), (
                name,
                key,
            )


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [None, {"jump_t": [0.5], "max_step": 0.2}])
@pytest.mark.parametrize("method", [None, "dopri5", "bosh3", "tsit5", "adaptive_heun"])
def test_odeint_dense_is_the_solution_between(method, options):
    y0, calls = start(), []

    def func(t, y):
        calls.append(1)
        return Spiral()(t, y)

    ends = torch.tensor([0.0, 1.5], dtype=torch.float64)
    given = (
        None if options is None else {**options, "jump_t": torch.tensor(options["jump_t"]).double()}
    )
    y = odeint_dense(func, y0, *ends, rtol=1e-8, atol=1e-8, method=method, options=given)
    before = len(calls)
    times = torch.linspace(0, 1.5, 7).double()
    found = y(times)
    assert len(calls) == before
    assert torch.allclose(found, odeint(Spiral(), y0, times, rtol=1e-10, atol=1e-10), atol=1e-6)
    if options is None:
        theirs = torchdiffeq.odeint_dense(Spiral(), y0, *ends, rtol=1e-8, atol=1e-8)
        assert torch.allclose(y(times[2]), theirs(times[2]), atol=1e-6)
    backward = odeint_dense(
        Spiral(), found[-1].detach(), *ends.flip(0), rtol=1e-9, atol=1e-9, method=method
    )
    assert torch.allclose(backward(times), found, atol=1e-6)


def test_a_tuple_has_a_dense_solution_too_and_what_has_none_is_named():
    y = odeint_dense(
        lambda t, y: (-y[0], y[1]), (torch.ones(2).double(), torch.ones(()).double()), T[0], T[-1]
    )
    first, second = y(T)
    assert first.shape == (len(T), 2)
    assert torch.allclose(second, torch.exp(T - T[0]), rtol=1e-6)
    for method in ("rk4", "dopri8", "none-such"):
        with pytest.raises(
            ConfigError,
            match=(
                f"method '{method}' has no states inside steps of its own choice: use one of bosh3,"
                " dopri5"
            ),
        ):
            odeint_dense(lambda t, y: -y, torch.ones(2), T[0], T[-1], method=method)
    with pytest.raises(ConfigError, match="is outside the solve"):
        odeint_dense(lambda t, y: -y, torch.ones(2), T[0], T[-1])(T[-1] + 1)
    for place, name in enumerate(("t0", "t1")):
        ends = [T[0].clone(), T[-1].clone()]
        ends[place].requires_grad_()
        with pytest.raises(
            ConfigError,
            match=(
                f"{name} requires a gradient, which y\\(t\\) does not have: give"
                f" {name}.detach\\(\\)"
            ),
        ):
            odeint_dense(lambda t, y: -y, torch.ones(2), *ends)
