"""Gradients by the times that `odeint` gets in `jump_t` and `step_t`, against closed forms."""

import math

import pytest
import torch

from solvers import ConfigError, odeint, odeint_adjoint, odeint_dense, odeint_event

RATE = 0.7
SWITCH = 0.98
END = 2.0


def jumping(p, k):
    """x' = 1 before p, -k x afterwards: x(2) = p exp(-k (2 - p)) from x(0) = 0."""
    return lambda t, x: torch.where(t < p, torch.ones_like(x), -k * x)


def right(p, k):
    return p * torch.exp(-k * (END - p))


def leaves(dtype=torch.float64):
    p = torch.tensor(SWITCH, dtype=dtype, requires_grad=True)
    k = torch.tensor(RATE, dtype=dtype, requires_grad=True)
    return p, k


def start(dtype=torch.float64):
    return torch.zeros(1, dtype=dtype)


TIMES = torch.tensor([0.0, 0.4, SWITCH, 1.5, END], dtype=torch.float64)


@pytest.mark.parametrize("option", ["jump_t", "step_t"])
@pytest.mark.parametrize("gradient", ["backprop", "checkpoint", "adjoint"])
def test_a_jumps_time_has_its_gradient(gradient, option):
    p, k = leaves()
    options = {option: p[None]}
    states = odeint(jumping(p, k), start(), TIMES, options=options, gradient=gradient)
    found = torch.autograd.grad(states[-1].sum(), (p, k), retain_graph=True)
    expected = torch.autograd.grad(right(p, k), (p, k))
    assert torch.allclose(torch.stack(found), torch.stack(expected), atol=1e-6)
    # states up to the jump do not depend on its time
    (early,) = torch.autograd.grad(states[1:3].sum(), p, allow_unused=True)
    assert early is None or float(early) == 0


def test_a_jumps_time_has_its_gradient_by_odeint_adjoint_in_float32():
    p, k = leaves(torch.float32)
    t = torch.tensor([0.0, END])
    x = odeint_adjoint(jumping(p, k), start(torch.float32), t, options={"jump_t": [p]})[-1]
    found = torch.autograd.grad(x.sum(), (p, k))
    expected = torch.autograd.grad(right(p, k), (p, k))
    assert torch.allclose(torch.stack(found), torch.stack(expected), atol=1e-4)


def test_a_jumps_time_has_its_second_derivative():
    p, k = leaves()
    t = torch.tensor([0.0, END], dtype=torch.float64)
    x = odeint(jumping(p, k), start(), t, options={"jump_t": p[None]})[-1].sum()
    for value in (x, right(p, k)):
        (first,) = torch.autograd.grad(value, p, create_graph=True)
        second = torch.stack(torch.autograd.grad(first, (p, k)))
        if value is x:
            found = second
    assert torch.allclose(found, second, atol=1e-5)


def test_backward_in_time_the_gradient_is_the_one_of_a_difference():
    def x_at_0(p):
        field = lambda t, x: torch.where(t > p, torch.cos(t) * x, -0.5 * x)  # noqa: E731
        t = torch.tensor([END, 0.0], dtype=torch.float64)
        return odeint(field, torch.ones(2, dtype=torch.float64), t, options={"jump_t": [p]})[-1]

    p, _ = leaves()
    (found,) = torch.autograd.grad(x_at_0(p).sum(), p)
    step = 1e-4
    with torch.no_grad():
        difference = (x_at_0(p + step) - x_at_0(p - step)).sum() / (2 * step)
    assert float(found) == pytest.approx(float(difference), rel=1e-6)


def test_the_states_are_those_without_a_gradient():
    p, k = leaves()
    with_gradient = odeint(jumping(p, k), start(), TIMES, options={"jump_t": p[None]})
    plain = odeint(jumping(p, k), start(), TIMES, options={"jump_t": [SWITCH]})
    assert torch.equal(with_gradient, plain)


def test_a_tuple_of_states_a_curve_and_an_event_have_the_gradient_too():
    p, k = leaves()
    field = jumping(p, k)
    options = {"jump_t": p[None]}
    t = torch.tensor([0.0, END], dtype=torch.float64)
    expected = torch.autograd.grad(right(p, k), p)[0]
    x, _ = odeint(lambda t, y: (field(t, y[0]), -y[1]), (start(), start()), t, options=options)
    assert torch.allclose(torch.autograd.grad(x[-1].sum(), p)[0], expected, atol=1e-6)
    at_end = odeint_dense(field, start(), 0.0, END, options=options)(t)[-1]
    assert torch.allclose(torch.autograd.grad(at_end.sum(), p)[0], expected, atol=1e-6)
    # x falls to 1/2 at p + ln(2 p)/k
    time, _ = odeint_event(
        lambda t, x: field(t, x),
        start(),
        torch.tensor(0.0, dtype=torch.float64),
        event_fn=lambda t, x: torch.where(t < p, -torch.ones_like(x), 0.5 - x),
        options=options,
    )
    assert time.item() == pytest.approx(SWITCH + math.log(2 * SWITCH) / RATE, abs=1e-6)
    (found,) = torch.autograd.grad(time, p)
    assert float(found) == pytest.approx(1 + 1 / (RATE * SWITCH), abs=1e-5)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"method": "rk4"}, "jump_t requires a gradient, which a method of fixed steps"),
        ({"method": "dopri8"}, "jump_t requires a gradient, which torchdiffeq's dopri8"),
        ({"gradient": "reversible"}, "use backprop, checkpoint or adjoint"),
    ],
)
def test_a_request_without_that_gradient_raises_an_error(request_, words):
    p, k = leaves()
    t = torch.tensor([0.0, END], dtype=torch.float64)
    with pytest.raises(ConfigError, match=words):
        odeint(jumping(p, k), start(), t, options={"jump_t": p[None]}, **request_)


@pytest.mark.parametrize(
    "times",
    [
        "0.5",
        0.5,
        [None],
        [math.nan],
        [True],
        [10**400],
        torch.tensor(0.5),
        torch.tensor([[0.5]]),
        torch.tensor([0.5j]),
        [torch.ones(2)],
    ],
)
def test_times_that_are_no_list_of_numbers_raise_an_error(times):
    t = torch.tensor([0.0, END], dtype=torch.float64)
    with pytest.raises(ConfigError, match="jump_t"):
        odeint(lambda t, x: -x, start(), t, options={"jump_t": times})


def test_two_learned_times_of_one_value_raise_an_error():
    p, k = leaves()
    q = p.detach().clone().requires_grad_()
    t = torch.tensor([0.0, END], dtype=torch.float64)
    with pytest.raises(ConfigError, match="give each time once"):
        odeint(jumping(p, k), start(), t, options={"jump_t": [p, q]})
