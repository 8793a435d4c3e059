"""`solve`: checks the request, integrates it by one method and one kind of gradient, and explains a
failure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from solvers.dense import Curve, Times, check_times
from solvers.errors import ConfigError, SolveError, shown, unknown
from solvers.event import Event
from solvers.gradients import GRADIENTS, get_gradient
from solvers.increments import increments_of
from solvers.march import Gradient, Progress, march
from solvers.method import Method, has_capability
from solvers.nested import flat_events, flat_segments, in_structure
from solvers.request import check_callable, check_state, method_of
from solvers.rounding import rounding_warnings
from solvers.run import Run, Save, finite
from solvers.runge_kutta import RungeKutta
from solvers.segment import Segment, check_segments
from solvers.solution import Solution, Status
from solvers.step_control import StepControl, Tolerance, check_unused_options
from solvers.stop import OnStep, check_stops, integrator_of, observers, solve_to_stop
from solvers.transforms import batched, transformed
from solvers.tree import Tree

SAVE = get_args(Save)


def solve(
    segments: Sequence[Segment],
    x0: Any,
    *,
    method: str | Method = "euler",
    steps: int = 1,
    rtol: Tolerance | None = None,
    atol: Tolerance | None = None,
    gradient: str | Gradient = "backprop",
    save: Save = "ends",
    throw: bool = True,
    step_control: StepControl | None = None,
    times: Times | None = None,
    events: Event | Sequence[Event] = (),
    steady: float | None = None,
    on_step: OnStep | None = None,
    check: bool = True,
    progress: Progress | None = None,
    compiled: bool = False,
) -> Solution:
    """x1 = x0 + integral of the segments' fields: integrates dx/dt = field_k(t, x) over segment k,
    for each k in turn.

    No step crosses a segment's end, and no field is evaluated outside its own segment. So a method
    keeps its order across switches.

    - `segments`: in order; each starts where the previous one ends
    - `x0`: a tensor of a floating or complex type. Or several tensors of one type in tuples, named
      tuples, lists and dictionaries, which may be nested. Fields, projections, events, `on_step`,
      your own norm and the solution then have the same structure
    - `method`: a name in `METHODS`, or a method object
    - `steps`: the number of steps in each segment, for a fixed-step method
    - `step_control`: how an adaptive method chooses its steps. `rtol` and `atol` are shorthands for
      its tolerances
    - `gradient`: how the solve is differentiated: a name in `GRADIENTS`, or an object such as
      `Checkpoint(every=4)`
    - `save`: which states the solution holds. With "curve", `solution.curve(t)` gives the state at
      any time, also after the weights have changed (dop853 needs three more evaluations in each
      step)
    - `times`: the solution holds the states at these times instead. The method interpolates them
      inside its steps, so they cost no evaluation (dop853 needs three for each step that contains a
      time)
    - `events`: the first event ends the solve (`Event(g)`, a root of g(t, x))
    - `steady`: the solve also ends at the first step at whose start the norm of dx/dt is at most
      this number
    - `on_step(t, x)`: called after each accepted step. With `on_step`, `events` or `steady`,
      gradients other than backprop integrate twice: the second solve goes to the end of the first
    - `throw`: if true, a failed computation raises SolveError, which carries the partial solution.
      If false, `solve` returns that solution; its `status` says what happened
    - `check`: whether to check the state for non-finite entries, see below
    - `progress(k)`: called when segment k is done
    - `compiled`: each step of an adaptive explicit method runs by `torch.compile`, which takes
      seconds for each kind of field and each shape, and needs a C++ compiler. Results differ by
      rounding. It works with `backprop`, and with `checkpoint`, whose repeated steps are not
      compiled; for first derivatives only

    The solution's status, segment, time, event and event_time show how an event or a steady state
    ended it.

    Raises ConfigError for an invalid request: an unknown name, an option that the method does not
    use (such as tolerances for fixed steps), tolerances below the dtype's resolution, segments that
    do not meet, or a gradient that the method does not support.

    A field that is Lipschitz in x has one solution. Where it is not, there may be several, and
    `solve` returns one of them with SUCCESS. For x' = sqrt|x| from 0 that is x = 0, though t^2/4 is
    a solution too. No evaluation at the state shows that. For the other one, start off the point.

    The state is checked once, at the end. If it has a non-finite entry, `solve` repeats the solve
    without gradient and checks each step, to find where it broke. So a successful solve on a GPU
    waits for the device once. With `check=False` it does not wait, and you must look for non-finite
    entries yourself. `torch.compile(fullgraph=True)` then compiles fixed steps of an explicit
    method with backprop to one graph. All other solves have graph breaks.
    """
    check_segments(segments)
    tree: Tree | None = None
    x = x0
    if not isinstance(x0, Tensor):
        tree = Tree(x0)
        x = tree.flat("x0", x0)
    check_state(x)
    # the solution keeps it, and an optimiser or a loop may change x0 afterwards
    x = x.clone()
    if step_control is None:
        step_control = StepControl()
    control = step_control.with_tolerances(rtol, atol)
    chosen = method_of(method, steps)
    kind = get_gradient(gradient)
    if compiled:
        if not isinstance(chosen, RungeKutta):
            raise ConfigError(f"method {shown(method)} is not compiled: use one as tsit5")
        chosen = dataclasses.replace(chosen, compiled=True)
    if kind.detached and has_capability(chosen, "compiled"):
        raise ConfigError(
            f"gradient {shown(gradient)} calls fields outside of compiled steps: use backprop, or"
            " compiled=False"
        )
    # a steady state uses the norm with every method
    limits = control.limits(chosen, method, x, tree, norm_is_used=steady is not None)
    if not isinstance(save, str) or save not in SAVE:
        raise unknown("save", save, SAVE)
    check_callable("progress", progress)
    kind.check(chosen, segments)
    requested_times: list[float] = []
    if times is not None:
        requested_times = check_times(times, segments, chosen, kind)
    if requested_times and save != "ends":
        raise ConfigError(
            f"save = {save!r} and times both choose the states to keep: give only one"
        )
    if save == "steps":
        check_unused_options(chosen, {"save='steps'": True}, method)
    curve: Curve | None = None
    if save == "curve":
        curve = Curve(segments, chosen, kind)
        save = "ends"
    run = Run(int(steps), save=save, check=bool(check), **limits)
    if run.check and not chosen.adaptive and not transformed():
        run.increments = increments_of(segments, run.steps, x.dtype)
    events = check_stops(chosen, events, steady, on_step, has_times=bool(requested_times))
    ends = (segments[0].start, segments[-1].end)
    run.pending_times = [t for t in requested_times if t not in ends]
    if chosen.adaptive and batched():
        raise ConfigError(
            "adaptive steps need the error of each sample, which vmap does not give: use a method"
            " of fixed steps, as rk4, or give the batch as one state"
        )
    if tree is not None:
        segments = flat_segments(tree, segments)
        events = flat_events(tree, events)
        if on_step is not None:
            on_step = tree.on_parts(on_step)
    run.observers = observers(events, steady, on_step, run)
    if curve is not None:
        run.copies = True
        # before an event ends the solve
        run.observers = [curve.note, *run.observers]
    integrate, integrator = integrator_of(chosen, kind)
    # observers see the method's own steps; a kind of gradient with its own scheme takes others
    takes_own_steps = kind == GRADIENTS["backprop"] or (integrate is march and integrator is chosen)
    if run.observers and not takes_own_steps:
        solution = solve_to_stop(chosen, kind, segments, x, run, progress)
    else:
        solution = integrate(integrator, segments, x, run, progress)
    if solution.status.good:
        solution = _with_checked_result(solution, kind.scheme(chosen), segments, x, run)
    if requested_times and solution.status is Status.SUCCESS:
        state_at = dict(zip(solution.times, solution.states, strict=True))
        states = tuple(state_at[t] for t in requested_times)
        solution = dataclasses.replace(solution, times=tuple(requested_times), states=states)
    if curve is not None and solution.status.good:
        curve.ended(solution.times[-1])
        # the curve starts from the first state, which the caller may change
        states = (solution.states[0].clone(), *solution.states[1:])
        solution = dataclasses.replace(solution, curve=curve, states=states)
    unresolved = rounding_warnings(segments, solution.x1, run)
    if unresolved:
        solution = dataclasses.replace(solution, unresolved=tuple(unresolved))
    if tree is not None:
        solution = in_structure(tree, solution)
    if throw and not solution.status.good:
        raise SolveError(solution.message, solution)
    return solution


def _with_checked_result(
    solution: Solution, method: Method, segments: Sequence[Segment], x0: Tensor, run: Run
) -> Solution:
    """The solution that ended in time; if its result is invalid, with the place where it broke. A
    second solve, which checks each step, finds it.
    """
    if run.apart is not None and float(run.apart) > 1:
        wrong = Status.PAIR_APART
    elif not run.check or batched() or finite(solution.x1):
        return solution
    else:
        wrong = Status.NON_FINITE
    if solution.status is not Status.SUCCESS:
        return dataclasses.replace(solution, status=wrong)
    with torch.no_grad():
        replay = march(method, segments, x0, run.again(watch=True))
    if replay.status is not Status.SUCCESS:
        return replay
    # a field that changes between calls may not break in the second solve
    return dataclasses.replace(
        solution, status=wrong, segment=len(segments) - 1, time=segments[-1].end
    )
