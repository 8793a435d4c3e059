"""Events: a root of g(t, x) along the solution ends the solve, and is differentiable.

With x' = f, a small change dg of g at fixed time and dx of the solution there moves the event's
time T and state by

    dT = -(dg + g_x dx)/(g_t + g_x f),    dX = dx + f dT.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from solvers.changes import check_kept, graph_version, owned, owned_state, read_only
from solvers.error_norm import Norm
from solvers.errors import ConfigError, SolveError, shown
from solvers.run import Accepted, Run, Stopped, as_tensor, neighbour, real_type, representable
from solvers.segment import Segment
from solvers.solution import Status
from solvers.transforms import transformed

AlongCurve = Callable[[Tensor], Tensor]
Root = tuple[float, int]
"""The time of an event, and its number."""


@dataclasses.dataclass(frozen=True)
class Event:
    """The first time at which g(t, x) = 0. `function(t, x)` returns g, a tensor with one entry.

    - `direction`: 1 detects only changes from negative to positive, -1 only the opposite, 0 any
      change of sign

    If g is zero at the start, it has no sign until it becomes nonzero. Zero to rounding counts too:
    a g that changes its sign within `start_resolution` of the start. So a solve may start from the
    state of an event, which is a rounding error off the root, and does not find it again. A jump
    between two segments is no root. The sign is checked after each accepted step, so two roots
    within one step are missed; `max_step` bounds the step.

    Inside a step the root is bracketed on the method's own interpolant until no number lies
    between, without evaluations of the field. The time found is the first one of the new sign, so a
    solve may continue from it. If g_t + g_x f = 0, the time has no derivative; requesting it raises
    SolveError.

    Raises ConfigError for something that is no function, and for an unknown direction.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    direction: int = 0

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ConfigError(
                f"an event's function is {shown(self.function)}: give a function of time and state"
            )
        is_whole = isinstance(self.direction, Integral) and not isinstance(self.direction, bool)
        if not is_whole or self.direction not in (-1, 0, 1):
            raise ConfigError(
                f"an event's direction is {shown(self.direction)}: give 1 (upward), -1 (downward)"
                " or 0 (either)"
            )

    def value(self, t: Tensor, x: Tensor) -> Tensor:
        """g(t, x) as a 0-dimensional tensor, with t in the type that fields get. Raises ConfigError
        if it is not one number.
        """
        g: Any = read_only(self.function, t.to(as_tensor(0.0, x.dtype)), x)
        if not isinstance(g, Tensor) or g.numel() != 1 or not g.dtype.is_floating_point:
            if isinstance(g, Tensor):
                what = f"shape {tuple(g.shape)} of {g.dtype}"
            else:
                what = type(g).__name__
            raise ConfigError(
                f"an event's function returned {what}: return one number as a floating tensor, as"
                " g.min()"
            )
        return g.reshape(())

    def crosses(self, before: float, after: float) -> bool:
        """Whether the sign changes in the requested direction. Zero has the new sign."""
        # not by their product, which may underflow to zero
        if before == 0 or (after != 0 and (before > 0) == (after > 0)):
            return False
        return self.direction != math.copysign(1, before)


class Events:
    """Observes a solve, and stops it at the first of several events."""

    def __init__(self, events: Sequence[Event], run: Run):
        self.events = events
        self.run = run
        self.state: Tensor | None = None
        self.values: list[float] = []

    def __call__(self, accepted: Accepted) -> None:
        step = accepted.step
        curve = accepted.inside
        assert curve is not None, (
            "a method that does not tell the states inside its steps was refused"
        )
        with torch.no_grad():
            starts_anew = self.state is not accepted.before
            if starts_anew:
                before = self._values(step.start, accepted.before)
            else:
                before = self.values
            after = self._values(step.end, accepted.after)
            roots: list[Root] = []
            for i, event in enumerate(self.events):
                if not event.crosses(before[i], after[i]):
                    continue
                if starts_anew and self._is_zero_at_start(i, accepted, before[i]):
                    before[i] = 0.0
                else:
                    g = functools.partial(self._along, i, curve)
                    roots.append((_root(g, step.start, step.end, before[i], after[i]), i))
        self.state = accepted.after
        self.values = list(after)
        for i, value in enumerate(after):
            # a value of zero that was no event keeps the previous sign
            if value == 0:
                self.values[i] = before[i]
        if roots:
            time, i = min(roots, key=lambda root: (abs(root[0] - step.start), root[1]))
            is_end = time == step.end
            state = accepted.after if is_end else curve(_time(time))
            flow = following(self.run, step.segment, time, state, projects=is_end)
            event_time, x = moved(self.events[i], time, step.segment, flow, state)
            self.run.event = (i, event_time)
            raise Stopped(Status.EVENT, time, x)

    def _values(self, t: float, x: Tensor) -> list[float]:
        return [self._value(i, t, x) for i in range(len(self.events))]

    def _is_zero_at_start(self, i: int, accepted: Accepted, value: float) -> bool:
        """Whether the value at the step's start is 0 to rounding: its sign changes at once."""
        step = accepted.step
        curve = accepted.inside
        slope = accepted.slope
        assert curve is not None, "a method without dense output was refused"
        assert slope is not None, "a method that does not show it was refused"
        resolution = start_resolution(
            self.run.norm,
            step.start,
            step.segment.span,
            self.run.counted(accepted.before),
            self.run.counted(slope),
        )
        ahead = min(resolution, abs(step.end - step.start))
        soon = step.start + math.copysign(ahead, step.end - step.start)
        value_soon = self._along(i, curve, soon)
        return value_soon != 0 and (value > 0) != (value_soon > 0)

    def _along(self, i: int, curve: AlongCurve, t: float) -> float:
        return self._value(i, t, curve(_time(t)))

    def _value(self, i: int, t: float, x: Tensor) -> float:
        g = float(self.events[i].value(_time(t), x))
        if math.isnan(g):
            raise SolveError(
                f"event {i} is not a number at t = {t:.6g}: check its function, and the state there"
            )
        return g


def start_resolution(norm: Norm, t: float, span: float, x: Tensor, slope: Tensor) -> float:
    """The time after a start in which rounding may change a sign:

    eps64^(3/4) abs(t) + 2 ulp(t) + eps^(3/4) min(norm(x)/norm(dx/dt), abs(span)).

    eps is that of the state's type, and ulp(t) that of the type in which the field gets the time.
    The power leaves room: a state after an event may be slow compared with the one before.
    """
    clock = real_type(x.dtype)
    at = representable(t, x.dtype)
    ulp = abs(neighbour(at, math.inf, x.dtype) - at)
    real = x.detach().abs().to(clock)
    size = float(norm(real))
    speed = float(norm(slope.detach().abs().to(clock)))
    time_scale = abs(span)
    if size < speed * time_scale:
        time_scale = size / speed
    by_time: float = torch.finfo(torch.float64).eps ** 0.75 * abs(t)
    by_state: float = torch.finfo(x.dtype).eps ** 0.75 * time_scale
    return by_time + 2 * ulp + by_state


def following(run: Run, segment: Segment, time: float, x: Tensor, *, projects: bool) -> AlongCurve:
    """The states near x at that time along the field, by one step of RK4: all derivatives by time
    up to the fourth are the flow's. An interpolant's are less accurate than its values.

    With `projects` the states are on the image of the segment's projection, as x is.
    """
    low, high = run.inside(segment, x.dtype)
    start = min(max(time, low), high)

    def along(t: Tensor) -> Tensor:
        ahead = t - time
        h = ahead.to(x.dtype)
        middle = (start + 0.5 * ahead).to(as_tensor(start, x.dtype))
        end = (start + ahead).to(as_tensor(start, x.dtype))
        k1 = owned(run.velocity(segment, start, x))
        version = graph_version(k1)
        k2 = owned(run.velocity(segment, middle, x + h / 2 * k1))
        k3 = owned(run.velocity(segment, middle, x + h / 2 * k2))
        k4 = run.velocity(segment, end, x + h * k3)
        check_kept([k1], [version])
        after = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        if projects and segment.project is not None:
            return owned_state(segment.project(after), after)
        return after

    return along


def moved(
    event: Event, time: float, segment: Segment, curve: AlongCurve, x: Tensor
) -> tuple[Tensor, Tensor]:
    """The event's time and state with their derivatives, for a root on the curve, where the state
    is x.

    With learned times, the curve's parameter is the time by value, and g gets the time that depends
    on them.

    It takes two steps of Newton's method on g - g(time), which is exactly zero there, so values do
    not change. The method's error is squared each time: the first step gives the first derivative,
    both steps the second and third.
    """
    t = _time(time)
    clock = segment.clock
    if clock is None:
        clock = _as_it_is
    if not torch.is_grad_enabled():
        return t, x
    if not x.requires_grad and not event.value(clock(t), x).requires_grad:
        return t, x
    if transformed():
        raise ConfigError(
            "the time of an event is not differentiated inside torch.func.grad, vjp or jacrev: use"
            " torch.autograd.grad or backward"
        )
    t.requires_grad_()
    for _ in range(2):
        g = event.value(clock(t), curve(t))
        (slope,) = torch.autograd.grad(g, t, create_graph=True)
        if float(slope.detach()) == 0:
            raise SolveError(
                f"the event at t = {time:.6g} only touches zero, so that its time has no"
                " derivative: solve under no_grad"
            )
        t = t - (g - g.detach()) / slope
    return clock(t), curve(t)


def _as_it_is(t: Tensor) -> Tensor:
    return t


def _time(t: float) -> Tensor:
    return torch.tensor(t, dtype=torch.float64)


def _root(
    g: Callable[[float], float], before: float, after: float, low: float, high: float
) -> float:
    """The first number beyond a sign change of g, from its values low and high at both ends.

    Regula falsi that halves the value of an end that stays (Illinois), and bisects every third
    time.
    """
    sign = math.copysign(1.0, low)
    side = 0
    for k in range(400):
        middle = before + (after - before) / 2
        if middle in (before, after) or high == 0:
            break
        t = middle
        if k % 3 != 2:
            secant = after - high * (after - before) / (high - low)
            if min(before, after) < secant < max(before, after):
                t = secant
        value = g(t)
        if value * sign > 0:
            before = t
            low = value
            if side == -1:
                high = high / 2 or high  # no zero, which is found only where g is zero
            side = -1
        else:
            after = t
            high = value
            if side == 1:
                low = low / 2 or low
            side = 1
    return after
