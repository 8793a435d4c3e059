"""The entry: a request is checked, integrated by one method and one kind of gradient, and a failure
is explained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from solvers.dense import Curve, Times, at_times, check_times
from solvers.deprecated import with_old_keywords
from solvers.errors import ConfigError, SolveError, unknown
from solvers.event import Event
from solvers.gradients import GRADIENTS, Gradient, get_gradient
from solvers.march import Progress, march
from solvers.method import Method
from solvers.nested import flat_events, flat_on_step, flat_segments, in_structure
from solvers.request import check_callable, check_segments, check_state, method_of
from solvers.run import Run, Save, finite
from solvers.segment import Segment
from solvers.solution import Solution, Status
from solvers.step_control import StepControl, Tolerance, check_unused_options
from solvers.stop import OnStep, again_to_there, check_stops, observers, way_of
from solvers.transforms import batched, check_steps
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
    **old: Any,
) -> Solution:
    """x1 = x0 + integral of the segments' fields: integrates dx/dt = field_k(t, x) over segment k
    for each k in turn.

    No step crosses a segment's end, and no field is evaluated outside its own segment. So a method
    keeps its order over switches.

    - `segments`: in order, each beginning where the one before ends
    - `x0`: a tensor of a floating or complex type. Or several of one type in tuples, named tuples,
      lists and dictionaries, also nested: then fields, projections, events, `on_step`, your own
      norm and the solution have the same structure
    - `method`: a name of `METHODS`, or a method object
    - `steps`: the steps of a fixed-step method in each segment
    - `step_control`: how an adaptive method chooses its steps. `rtol` and `atol` are its
      tolerances, as shorthands
    - `gradient`: how the solve is differentiated, a name of `GRADIENTS` or such an object, as
      `Checkpoint(every=4)`
    - `save`: which states the solution holds. With "curve" you can ask for any of them afterwards,
      `solution.curve(t)`
    - `times`: the times at which it holds them instead, by the method's own interpolation inside
      its steps. Their number costs no evaluation (dop853 takes three for every step with a time
      inside)
    - `events`: the first of them ends the solve (`Event(g)`, a root of g(t, x))
    - `steady`: the first step at whose start the norm of dx/dt is at most this ends the solve, too.
      The solution's status, segment, time, event and event_time say which did
    - `on_step(t, x)`: called after every accepted step. With `on_step`, `events` or `steady`,
      gradients other than backprop integrate twice, the second time to where the first one ended
    - `throw`: whether a computation that fails raises SolveError, which carries the solution up to
      there. Otherwise the solution is returned, and its `status` says what happened
    - `check`: whether the state is checked for non-finite entries, see below
    - `progress(k)`: called when segment k is done

    Raises ConfigError for a request that makes no sense: an unknown name, an option that the method
    does not use (as tolerances of fixed steps), tolerances below the dtype's resolution, segments
    that do not meet, a gradient that the method does not have.

    The state is checked once, at the end. Only if it has a non-finite entry is the solve repeated,
    without gradient and with a check of each step, to say where it broke. So a good solve on a GPU
    waits for the device once; with `check=False` it does not wait, and entries that are not finite
    are for you to see. Then fixed steps of an explicit method with backprop are one graph for
    `torch.compile(fullgraph=True)`, which cannot look at a number; all else has breaks in it.
    """
    check_segments(segments)
    tree = None if isinstance(x0, Tensor) else Tree(x0)
    x = x0 if tree is None else tree.flat("x0", x0)
    check_state(x)
    control = with_old_keywords("solve", step_control or StepControl(), old).with_tolerances(rtol, atol)
    chosen = method_of(method, steps)
    # a steady state is found by the norm of dx/dt, whatever the method
    limits = control.limits(chosen, method, x, tree, norm_is_used=steady is not None)
    if save not in SAVE:
        raise unknown("save", save, SAVE)
    check_callable("progress", progress)
    kind = get_gradient(gradient)
    kind.check(chosen, segments)
    wanted = [] if times is None else check_times(times, segments, chosen, kind)
    if wanted and save != "ends":
        raise ConfigError(f"save = {save!r} and times both say which states to keep: give one of them")
    check_unused_options(chosen, {"save='steps'": save == "steps" or None}, method)
    curve = Curve(segments, chosen, kind) if save == "curve" else None
    run = Run(int(steps), save="ends" if curve else save, check=bool(check), **limits)
    watched = check_stops(chosen, events, steady, on_step, bool(wanted))
    run.wanted = [t for t in wanted if t not in (segments[0].start, segments[-1].end)]
    check_steps(chosen.adaptive)
    if tree is not None:
        segments, watched, on_step = flat_segments(tree, segments), flat_events(tree, watched), flat_on_step(tree, on_step)
    run.observers = observers(watched, steady, on_step, run)
    if curve is not None:  # before an event ends the solve
        run.observers = [curve.note, *run.observers]
    integrate, integrator = way_of(chosen, kind)
    # observers see the method's own steps, and the solution has these where the kind has no other
    # scheme
    if run.observers and kind != GRADIENTS["backprop"] and not (integrate is march and integrator is chosen):
        solution = again_to_there(chosen, kind, segments, x, run, progress)
    else:
        solution = integrate(integrator, segments, x, run, progress)
    if solution.status.good and (wrong := _wrong(solution, run)) is not None:
        solution = _explained(solution, wrong, kind.scheme(chosen), segments, x, run)
    if wanted and solution.status is Status.SUCCESS:
        solution = at_times(solution, wanted)
    if curve is not None and solution.status.good:
        curve.ended(solution.times[-1])
        solution = dataclasses.replace(solution, curve=curve)
    if tree is not None:
        solution = in_structure(tree, solution)
    if throw and not solution.status.good:
        raise SolveError(solution.message, solution)
    return solution


def _wrong(solution: Solution, run: Run) -> Status | None:
    """What is wrong with a solve that ended where it should, if anything."""
    if run.apart is not None and float(run.apart) > 1:
        return Status.PAIR_APART
    return None if not run.check or batched() or finite(solution.x1) else Status.NON_FINITE


def _explained(solution: Solution, wrong: Status, method: Method, segments: Sequence[Segment], x0: Tensor, run: Run) -> Solution:
    """The solution with where it broke, which a second solve finds that checks each step."""
    if solution.status is not Status.SUCCESS:
        return dataclasses.replace(solution, status=wrong)
    with torch.no_grad():
        replay = march(method, segments, x0, run.again(watch=True))
    if replay.status is not Status.SUCCESS:
        return replay
    # a field that is not the same twice may not break at all the second time
    return dataclasses.replace(solution, status=wrong, segment=len(segments) - 1, time=segments[-1].end)
