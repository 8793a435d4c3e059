"""Calls that make no sense, or sense of a kind: each is refused by name or defined, none changes
the result in silence.
"""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from solvers import (
    ConfigError,
    Segment,
    SolveError,
    Status,
    StepControl,
    odeint_dense,
    odeint_event,
    solve,
)

X0 = torch.ones(2)


def decay(t, x):
    return -x


def ask(x0=X0, segments=None, **request):
    if "max_steps" in request:
        request["step_control"] = StepControl(max_steps=request.pop("max_steps"))
    return solve([Segment(0, 1, decay)] if segments is None else segments, x0, **request)


class Half(torch.nn.Module):
    def forward(self, t, x):
        return x.double() / 2


FIELDS = {
    "complex64": lambda t, x: x * 1j,
    "int64": lambda t, x: x.long(),
    "bool": lambda t, x: x > 0,
    "float64": Half(),
    "tuple": lambda t, x: (x, x),
    "NoneType": lambda t, x: None,
    "float": lambda t, x: 1.0,
    "ndarray": lambda t, x: x.numpy(),
    "shape (3,)": lambda t, x: torch.ones(3),
    "shape ()": lambda t, x: x.sum(),
    "shape (1, 2)": lambda t, x: x[None],
    "a tensor on meta": lambda t, x: x.to("meta"),
}


@pytest.mark.parametrize(
    "method", ["euler", "rk4", "tsit5", "torchdiffeq:rk4", "torchdiffeq:dopri5"]
)
@pytest.mark.parametrize("what", FIELDS)
def test_a_field_that_returns_something_else_than_a_velocity_is_named(what, method):
    with pytest.raises(ConfigError) as caught:
        ask(segments=[Segment(0, 1, FIELDS[what])], method=method)
    assert f"the field returned {what}" in str(caught.value)


@pytest.mark.parametrize("given", [torch.complex64, torch.complex128], ids=str)
def test_a_real_velocity_of_a_complex_state_is_named(given):
    # its imaginary part would stand still
    with pytest.raises(ConfigError, match=r"returned float.* return it as .to\(x.dtype\)"):
        ask(x0=X0.to(given), segments=[Segment(0, 1, lambda t, x: x.abs())], method="rk4")


@pytest.mark.parametrize("gradient", ["backprop", "checkpoint", "adjoint"])
@pytest.mark.parametrize("place", ["project", "enter"])
def test_so_is_a_projection(place, gradient):
    if place == "project" and gradient == "adjoint":
        pytest.skip("it has none")
    for what, wrong in {"shape (1,)": lambda x: x[:1], "float64": lambda x: x.double()}.items():
        with pytest.raises(ConfigError, match=f"the {place} returned") as caught:
            ask(
                x0=X0.clone().requires_grad_(),
                segments=[Segment(0, 1, decay, **{place: wrong})],
                method="rk4",
                gradient=gradient,
            )
        assert what in str(caught.value)


STATES = {
    "int64": torch.ones(2, dtype=torch.int64),
    "bool": torch.ones(2, dtype=torch.bool),
    "complex32": torch.ones(2, dtype=torch.complex32),
    "empty": torch.ones(0),
    "meta": torch.ones(2, device="meta"),
    "sparse": torch.eye(2).to_sparse(),
    "csr": torch.eye(2).to_sparse_csr(),
    "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "list": [1.0, 2.0],
    "array": np.ones(2),
    "number": 1.0,
    "nothing": None,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", STATES)
def test_a_state_that_is_no_dense_floating_tensor_is_refused(what):
    with pytest.raises(ConfigError, match="the initial state is"):
        ask(x0=STATES[what])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", ["sparse", "csr", "int64", "empty"])
def test_a_state_up_to_an_event_is_refused_alike(what):
    with pytest.raises(ConfigError, match="give a"):
        odeint_event(lambda t, y: -y, STATES[what], torch.tensor(0.0), event_fn=lambda t, y: t - 1)


SEGMENTS = {
    "generator": lambda: (Segment(k, k + 1, decay) for k in range(2)),
    "iterator": lambda: iter([Segment(0, 1, decay)]),
    "a segment": lambda: Segment(0, 1, decay),
    "a field": lambda: decay,
    "a string": lambda: "euler",
    "none": lambda: (),
    "empty": list,
    "of numbers": lambda: [0, 1],
    "an overlap": lambda: [Segment(0, 1, decay), Segment(0.5, 2, decay)],
    "a reversal": lambda: [Segment(0, 1, decay), Segment(2, 1, decay)],
}


@pytest.mark.parametrize("what", SEGMENTS)
def test_segments_that_are_no_list_of_segments_that_meet_are_refused(what):
    with pytest.raises(ConfigError):
        ask(segments=SEGMENTS[what]())


@pytest.mark.parametrize(
    "times",
    [
        (0, math.inf),
        (-math.inf, 0),
        (0, math.nan),
        (1, 1),
        (0.1 + 0.2, 0.30000000000000004),
        ("0", "1"),
        (False, True),
        (None, 1),
        (0, 1j),
        (0, [1]),
        (0, torch.ones(1)),
        (0, torch.tensor(True)),
        (0, torch.tensor(1j)),
        (0, torch.tensor(math.nan)),
        (0, np.ones(2)),
        (0, np.bool_(True)),
        (0, 10**400),
        (Decimal("nan"), 1),
    ],
)
def test_times_that_are_no_two_finite_numbers_are_refused(times):
    with pytest.raises(ConfigError):
        Segment(*times, decay)


@pytest.mark.untyped
@pytest.mark.parametrize(
    "end",
    [
        1,
        1.0,
        Fraction(1),
        Decimal(1),
        np.float32(1),
        np.float64(1),
        np.int64(1),
        torch.tensor(1.0),
        torch.tensor(1),
    ],
)
def test_whatever_names_the_same_number_is_the_same_time(end):
    segment = Segment(0, end, decay)
    assert (segment.t1, segment.span) == (Fraction(1), 1.0)
    assert torch.equal(ask(segments=[segment], method="rk4").x1, ask(method="rk4").x1)


@pytest.mark.parametrize(
    "given",
    [
        {"field": "x"},
        {"field": None},
        {"project": 1, "field": decay},
        {"enter": "n", "field": decay},
    ],
)
def test_maps_that_are_no_functions_are_refused(given):
    with pytest.raises(ConfigError, match="give a function"):
        Segment(0, 1, **given)


@pytest.mark.parametrize(
    "request_",
    [
        *({"steps": n} for n in (0, -1, 2.0, True, "3", None, math.nan, [3], torch.tensor(3))),
        *({"method": "tsit5", "max_steps": n} for n in (0, -1, 1e4, True, "x")),
        *(
            {"method": "tsit5", "rtol": r}
            for r in (
                0,
                -1e-3,
                math.nan,
                math.inf,
                True,
                "1e-3",
                [1e-3] * 7,
                torch.tensor(-1e-3),
            )
        ),
        *(
            {"method": "tsit5", "atol": a}
            for a in (0, -1e-3, math.nan, math.inf, False, "1e-3", torch.zeros(2))
        ),
        *(
            # no type of a tolerance, and what holds it does not look at it
            pytest.param({"method": "tsit5", name: 1j}, marks=pytest.mark.untyped)
            for name in ("rtol", "atol")
        ),
        *({"method": m} for m in (None, 3, "RK4 ", "", ["rk4"], Segment)),
        *({"gradient": g} for g in (None, 3, "back", "", ["adjoint"])),
        *({"save": s} for s in (None, 3, "all", "", ["steps"])),
        *({"progress": p} for p in (1, "tqdm", [])),
    ],
    ids=str,
)
def test_numbers_and_names_that_make_no_sense_are_refused(request_):
    with pytest.raises(ConfigError):
        ask(**request_)


@pytest.mark.untyped
def test_numbers_of_numpy_are_numbers():
    assert torch.equal(ask(steps=np.int64(3)).x1, ask(steps=3).x1)
    tolerances = {"rtol": np.float32(1e-3), "atol": np.float64(1e-3)}
    assert ask(method="tsit5", **tolerances).status is Status.SUCCESS


@pytest.mark.parametrize("shape", [(), (1,), (2, 0, 3), (2, 3, 4)])
@pytest.mark.parametrize("method", ["euler", "rk4", "tsit5"])
def test_a_state_of_any_shape_keeps_it(shape, method):
    x0 = torch.ones(shape)
    if x0.numel() == 0:
        with pytest.raises(ConfigError, match="non-empty"):
            ask(x0=x0, method=method)
    else:
        assert ask(x0=x0, method=method).x1.shape == shape


def test_a_state_that_is_a_view_or_spread_out_is_left_alone():
    x0 = torch.ones(4, 2).t()[:, ::2]
    before = x0.clone()
    assert ask(x0=x0, method="rk4", steps=5).x1.shape == (2, 2)
    assert torch.equal(x0, before)


def test_half_precision_under_autocast_keeps_the_states_type():
    linear = torch.nn.Linear(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x1 = ask(segments=[Segment(0, 1, lambda t, x: linear(x))], method="rk4").x1
    assert x1.dtype == torch.float32


def test_scipy_takes_autocasts_half_precision_and_refuses_a_state_of_it():
    method = {"method": "torchdiffeq:scipy_solver", "rtol": 0.1, "atol": 0.1}
    linear = torch.nn.Linear(2, 2, bias=False).requires_grad_(False)
    segments = [Segment(0, 1, lambda t, x: linear(x))]
    x0 = torch.ones(1, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x1 = solve(segments, x0, **method).x1
    assert x1.dtype == torch.float32
    exact = x0 @ torch.linalg.matrix_exp(linear.weight).mT
    torch.testing.assert_close(x1, exact, rtol=0.1, atol=0.1)
    with pytest.raises(ConfigError, match="cannot solve in bfloat16"):
        solve([Segment(0, 1, lambda t, x: -x)], x0.bfloat16(), **method)


def test_a_field_that_fails_is_the_callers_own_error():
    def field(t, x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ask(segments=[Segment(0, 1, field)])


def test_a_message_about_the_step_limit_can_be_followed():
    stiff = [Segment(0, 10, lambda t, x: -1e4 * (x - torch.cos(t)))]
    with pytest.raises(SolveError, match=r"raise rtol and atol .* fixed steps") as caught:
        ask(segments=stiff, method="tsit5", step_control=StepControl(max_steps=50))
    assert caught.value.solution.status is Status.TOO_MANY_STEPS


def test_an_empty_state_with_an_empty_tolerance_is_refused_as_any_empty_state():
    with pytest.raises(ConfigError, match="non-empty"):
        odeint_dense(lambda t, y: -y, torch.ones(0), 0.0, 1.0, atol=torch.ones(0))
