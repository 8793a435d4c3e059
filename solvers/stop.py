"""Observers of a solve, which may end before its segments do: at an event, or at a steady state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from solvers.changes import read_only
from solvers.errors import ConfigError, check_positive, shown
from solvers.event import Event, Events, following, moved
from solvers.march import Gradient, Progress, march, with_graphs
from solvers.method import Method, has_capability
from solvers.request import check_callable
from solvers.run import Accepted, Observer, Run, Stopped
from solvers.segment import Segment
from solvers.solution import Solution, Status
from solvers.transforms import batched, in_forward_mode

OnStep = Callable[[float, Tensor], object]
"""(t, x): called with the time and state after each accepted step."""


def check_stops(
    method: Method,
    events: Event | Sequence[Event],
    steady: float | None,
    on_step: OnStep | None,
    *,
    has_times: bool,
) -> Sequence[Event]:
    """The events as a sequence. Raises ConfigError for an invalid request, and if the method or a
    transform does not support it. `has_times` says that the solve also has times to save.
    """
    if isinstance(events, Event):
        events = (events,)
    if not isinstance(events, Sequence) or not all(isinstance(event, Event) for event in events):
        raise ConfigError(
            f"events = {shown(events)}: give an Event(function of t and x), or a list of them"
        )
    if steady is not None:
        check_positive(
            "steady", steady, "a positive finite number, the norm of dx/dt at which to stop"
        )
    check_callable("on_step", on_step)
    if not (events or steady is not None or on_step is not None):
        return ()
    shows_steps = has_capability(method, "shows_steps")
    if events and not (shows_steps and has_capability(method, "dense")):
        raise ConfigError(
            "events need a method whose tableau has dense output, as tsit5, dopri5 or rk4: use one"
            " of these"
        )
    if not shows_steps:
        raise ConfigError(
            "on_step and steady need a method of the package, as tsit5, dopri5 or rk4: use one of"
            " these"
        )
    if has_times and (events or steady is not None):
        raise ConfigError(
            "an event or a steady state may end the solve before the given times: use save='steps',"
            " or solve again to the end found"
        )
    if batched():
        raise ConfigError(
            "events, steady and on_step read numbers, which is impossible under vmap: use them"
            " outside vmap"
        )
    if events and in_forward_mode():
        raise ConfigError(
            "the time of an event is not differentiated in forward mode: use backward mode, or no"
            " derivative"
        )
    return events


def observers(
    events: Sequence[Event], steady: float | None, on_step: OnStep | None, run: Run
) -> list[Observer]:
    """The observers of a solve. Events come first, so that no other observer sees a step beyond
    one.
    """
    in_order: list[Observer] = []
    if events:
        in_order.append(Events(events, run))
    if on_step is not None:
        in_order.append(lambda accepted: read_only(on_step, accepted.step.end, accepted.after))
    if steady is not None:

        def stop_if_steady(accepted: Accepted) -> None:
            assert accepted.slope is not None, "a method that does not show it was refused"
            speed = run.measure(run.counted(accepted.slope.detach()))
            if speed <= steady:
                raise Stopped(Status.STEADY, accepted.step.end, accepted.after)

        in_order.append(stop_if_steady)
    return in_order


def integrator_of(method: Method, kind: Gradient) -> tuple[Callable[..., Solution], Method]:
    """The function that integrates, and the method that it gets: `march` without gradient or in
    forward mode, else the kind's own.
    """
    if torch.is_grad_enabled() and not in_forward_mode():
        return kind.integrate, method
    return march, kind.scheme(method)


def solve_to_stop(
    method: Method,
    kind: Gradient,
    segments: Sequence[Segment],
    x0: Tensor,
    run: Run,
    progress: Progress | None,
) -> Solution:
    """The solution by a kind of gradient with its own integration: first without a graph to where
    the solve ends, then again to there.

    Near the event's time the state is that of one midpoint step from it. So its derivatives by the
    time are exact up to the second.
    """
    pending_times = run.pending_times
    integrate, integrator = integrator_of(method, kind)
    ahead = segments
    if not has_capability(method, "compiled"):
        ahead = [with_graphs(segment) for segment in segments]
    with torch.no_grad():
        stopped = march(method, ahead, x0, run)
    if not stopped.status.good:
        return stopped
    k = len(segments) - 1
    if stopped.segment is not None:
        k = stopped.segment
    last = segments[k]
    time = last.end
    if stopped.time is not None:
        time = stopped.time
    reached = list(segments[: k + 1])
    if time != last.end:
        reached[k] = last.part(last.ends[0], time, first=True)
    # within one segment take the number of steps that were begun: `odeint_event` asks for a million
    steps = run.steps
    if k == 0:
        begun = math.ceil((time - last.start) / last.step(run.steps))
        steps = max(1, min(run.steps, begun))
    request = run.again(steps=steps, pending_times=pending_times)
    solution = integrate(integrator, reached, x0, request, progress)
    run.apart = request.apart
    if solution.status is not Status.SUCCESS or stopped.status is Status.SUCCESS:
        return solution
    ended = dataclasses.replace(solution, status=stopped.status, segment=k, time=time)
    if run.event is None:
        return ended
    i, _ = run.event
    (events,) = [observer for observer in run.observers if isinstance(observer, Events)]
    x = solution.x1
    flow = following(request, last, time, x, projects=True)
    event_time, x1 = moved(events.events[i], time, last, flow, x)
    states = (*solution.states[:-1], x1)
    return dataclasses.replace(ended, x1=x1, states=states, event=i, event_time=event_time)
