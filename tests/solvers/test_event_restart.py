"""Solves that start from the state of an event: they do not find the same event again."""

import math

import pytest
import torch

from solvers import Event, Segment, Status, odeint, odeint_event, solve

G = 9.81
SPEED = 5.0


def fall(t, s):
    return torch.stack([s[1], torch.full_like(s[1], -G)])


def height(t, s):
    return s[0]


def landings(restitution, count):
    """Times of a ball that is thrown up from the ground: its n-th flight lasts 2 v e^n/g."""
    flights = [2 * SPEED * restitution**n / G for n in range(count)]
    return [math.fsum(flights[: n + 1]) for n in range(count)]


def by_odeint_event(method, options=None):
    def flight(t, s):
        time, states = odeint_event(fall, s, t, event_fn=height, method=method, options=options)
        return time, states[-1]

    return flight


def by_solve(direction):
    def flight(t, s):
        segment = Segment(t.item(), t.item() + 10, fall)
        event = Event(height, direction)
        found = solve([segment], s, method="tsit5", rtol=1e-6, atol=1e-6, events=event)
        return found.event_time, found.x1

    return flight


FLIGHTS = {
    "odeint_event, dopri5": by_odeint_event("dopri5"),
    "odeint_event, rk4": by_odeint_event("rk4", {"step_size": 0.01}),
    "solve, any direction": by_solve(0),
    "solve, downward": by_solve(-1),
}


@pytest.mark.parametrize("restitution", [0.8, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("flight", FLIGHTS)
def test_a_bouncing_ball_lands_at_the_closed_forms_times_by_restarts(flight, dtype, restitution):
    count = 6 if restitution == 0.8 else 2
    t = torch.tensor(0.0, dtype=torch.float64)
    s = torch.tensor([0.0, SPEED], dtype=dtype)
    times = []
    for _ in range(count):
        t, s = FLIGHTS[flight](t, s)
        times.append(t.item())
        s = torch.stack([s[0], -restitution * s[1]])
    accuracy = 1e-9 if dtype is torch.float64 else 2e-5
    assert times == pytest.approx(landings(restitution, count), abs=accuracy)


def test_the_time_of_a_later_landing_has_its_derivative_by_the_first_speed():
    v = torch.tensor(SPEED, dtype=torch.float64, requires_grad=True)
    t = torch.tensor(0.0, dtype=torch.float64)
    s = torch.stack([torch.zeros_like(v), v])
    for _ in range(4):
        t, states = odeint_event(fall, s, t, event_fn=height)
        s = torch.stack([states[-1][0], -0.8 * states[-1][1]])
    (derivative,) = torch.autograd.grad(t, v)
    assert float(derivative) == pytest.approx(landings(0.8, 4)[3] / SPEED, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_thermostat_switches_at_the_closed_forms_times(dtype):
    # T' = -T + 30 heats from 18 to 22, T' = -T cools from 22 to 18: ln 12/8, then ln 22/18
    levels = {True: 22.0, False: 18.0}
    heating = True
    t = 0.0
    x = torch.tensor([18.0], dtype=dtype)
    right = 0.0
    for _ in range(6):
        supply = 30.0 if heating else 0.0
        segment = Segment(t, t + 10, lambda t, x, supply=supply: supply - x)
        # both levels are watched, and the last event was at the other one
        events = [Event(lambda t, x, level=level: x[0] - level) for level in levels.values()]
        found = solve([segment], x, method="tsit5", rtol=1e-6, atol=1e-6, events=events)
        t = float(found.event_time)
        x = found.x1
        right += math.log(12 / 8) if heating else math.log(22 / 18)
        assert t == pytest.approx(right, abs=1e-5)
        heating = not heating


@pytest.mark.parametrize("size", [1e-3, 1e-9, 1e-15, 1e-100])
def test_a_root_close_to_the_start_is_found_if_the_state_resolves_it(size):
    # x' = 1 from -size: the root is at t = size, however small
    x0 = torch.tensor([-size], dtype=torch.float64)
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    found = solve(
        [Segment(0, 1, lambda t, x: torch.ones_like(x))],
        x0,
        method="tsit5",
        events=Event(lambda t, x: x[0]),
    )
    assert found.status is Status.EVENT
    assert float(found.event_time) == pytest.approx(size, rel=1e-6)
    time, _ = odeint(lambda t, x: torch.ones_like(x), x0, ends, event_fn=lambda t, x: x)
    assert float(time) == pytest.approx(size, rel=1e-6)


def test_a_start_at_zero_to_rounding_finds_the_next_true_crossing():
    # x = sin t from a rounding error below 0: it is above 0 until pi
    field = lambda t, x: torch.stack([x[1], -x[0]])  # noqa: E731
    x0 = torch.tensor([-1e-17, 1.0], dtype=torch.float64)
    request = {"method": "tsit5", "rtol": 1e-9, "atol": 1e-9}
    found = solve([Segment(0, 10, field)], x0, events=Event(height), **request)
    assert float(found.event_time) == pytest.approx(math.pi, abs=1e-7)
    upward = solve([Segment(0, 10, field)], x0, events=Event(height, 1), **request)
    assert float(upward.event_time) == pytest.approx(2 * math.pi, abs=1e-7)
