"""The entry: a request is checked, integrated by one method and one kind of gradient, and a failure is explained."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from solvers.dense import Curve, Times, at_times, check_times
from solvers.error_norm import Norm, get_norm
from solvers.errors import ConfigError, SolveError, unknown
from solvers.event import Event
from solvers.gradients import GRADIENTS, Gradient, get_gradient
from solvers.march import Progress, march
from solvers.method import Method
from solvers.nested import flat_events, flat_on_step, flat_segments, in_structure
from solvers.request import check_bounds, check_callable, check_segments, check_solver, check_state, check_unused_options
from solvers.run import Run, Save, finite
from solvers.segment import Segment
from solvers.solution import Solution, Status
from solvers.stop import OnStep, again_to_there, check_stops, differentiated, observers
from solvers.tolerance import Tolerance, spread
from solvers.transforms import batched, check_steps, in_forward_mode
from solvers.tree import Tree

SAVE = get_args(Save)
MAX_STEPS = 10_000
"""Attempts of an adaptive method in a segment, where nothing else is asked for."""


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
    times: Times | None = None,
    events: Event | Sequence[Event] = (),
    steady: float | None = None,
    on_step: OnStep | None = None,
    throw: bool = True,
    check: bool = True,
    norm: str | Norm | None = None,
    first_step: float | None = None,
    min_step: float | None = None,
    max_step: float | None = None,
    max_steps: int | None = None,
    progress: Progress | None = None,
) -> Solution:
    """x1 = x0 + integral of the segments' fields: integrates dx/dt = field_k(t, x) over segment k for each k in turn.

    No step crosses a segment's end and no field is evaluated outside its own segment, so a method keeps its order over switches.

    - `segments`: in order, each beginning where the one before ends
    - `x0`: a tensor of a floating or complex type, or several of one type in tuples, named tuples, lists and dictionaries, also nested:
      fields, projections, events, `on_step`, a `norm` of one's own and the solution then have the same structure
    - `method`: a name of `METHODS`, or a method object
    - `steps`: of a fixed-step method, in each segment
    - `rtol`, `atol`: of an adaptive one, 1e-6 and 1e-8 if not given; numbers, or tensors that broadcast with the state for tolerances by
      entry. The norm of error/(atol + rtol*abs(x)) is kept below 1 in every step
    - `norm`: that norm, a name of `ERROR_NORMS` ("rms" if None; "token" or "max" where few entries move; of several tensors the largest
      that one of them has), or a function of a tensor
    - `first_step`, `min_step`, `max_step`: sizes of an adaptive method's steps: of the first; below which none is tried, so that one that
      short is taken whatever its error and counted as `stats.forced`; above which none is
    - `max_steps`: attempts of an adaptive method in a segment at most, 10,000 if None
    - `gradient`: how the solve is differentiated, a name of `GRADIENTS` or such an object, as `Checkpoint(every=4)`
    - `save`: which states the solution holds; with "curve" any can be asked for afterwards, `solution.curve(t)`
    - `times`: at which it holds them instead, by the method's own interpolation inside its steps: their number costs no evaluation
      (dop853 takes three for every step with a time inside)
    - `events`: the first of them ends the solve (`Event(g)`, a root of g(t, x))
    - `steady`: so does the first step at whose start the norm of dx/dt is at most this. The solution's status, segment, time, event and
      event_time tell which did
    - `on_step(t, x)`: called after every accepted step. For it, `events` and `steady`, gradients other than backprop go the way twice, the
      second time to where the first one ended
    - `throw`: whether a computation that fails raises SolveError, which carries the solution up to there; else the solution is returned,
      and its `status` says what happened
    - `check`: whether the state is looked at, see below
    - `progress(k)`: called when segment k is done

    Raises ConfigError for a request that makes no sense (unknown name, an option that the method does not heed, as tolerances of fixed
    steps, tolerances below the dtype's resolution, segments that do not meet, a gradient that the method does not have).

    The state is checked once, at the end; only if that finds a non-finite entry is the solve repeated, without gradient
    and checking each step, to say where it broke. So a good solve on a GPU waits for the device once; with `check=False` not at all, and
    entries that are not finite are for the caller to see. Then fixed steps of an explicit method with backprop are one graph for
    `torch.compile(fullgraph=True)`, which cannot look at a number; all else has breaks in it.
    """
    check_segments(segments)
    tree = None if isinstance(x0, Tensor) else Tree(x0)
    x = x0 if tree is None else tree.flat("x0", x0)
    check_state(x)
    (least_rtol, rtol), (least_atol, atol) = spread("rtol", rtol, x, tree), spread("atol", atol, x, tree)
    chosen, *least = check_solver(method, steps, least_rtol, least_atol, x.dtype, max_steps)
    relative, absolute = (whole if isinstance(whole, Tensor) else one for whole, one in zip((rtol, atol), least, strict=True))
    if save not in SAVE:
        raise unknown("save", save, SAVE)
    check_callable("progress", progress)
    bounds = check_bounds(chosen, method, first_step, min_step, max_step)
    kind = get_gradient(gradient)
    kind.check(chosen, segments)
    wanted = [] if times is None else check_times(times, segments, chosen, kind)
    if wanted and save != "ends":
        raise ConfigError(f"save = {save!r} and times both say which states to keep: give one of them")
    # a steady state is found by the norm of dx/dt, whatever the method
    check_unused_options(chosen, {"norm": norm if steady is None else None, "save='steps'": save == "steps" or None}, method)
    measure = get_norm("rms" if norm is None else norm)
    if tree is not None:
        measure = tree.norm(measure, named=not callable(norm))
    most = MAX_STEPS if max_steps is None else int(max_steps)
    curve = Curve(segments, chosen, kind) if save == "curve" else None
    run = Run(
        int(steps), relative, absolute, norm=measure, max_steps=most, save="ends" if curve else save, check=bool(check), **bounds
    )
    watched = check_stops(chosen, events, steady, on_step, bool(wanted))
    run.wanted = [t for t in wanted if t not in (segments[0].start, segments[-1].end)]
    check_steps(chosen.adaptive)
    if tree is not None:
        segments, watched, on_step = flat_segments(tree, segments), flat_events(tree, watched), flat_on_step(tree, on_step)
    run.observers = observers(watched, steady, on_step, run)
    if curve is not None:  # before an event ends the solve
        run.observers = [curve.note, *run.observers]
    solution = _integrated(chosen, kind, segments, x, run, progress)
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


def _integrated(
    method: Method, kind: Gradient, segments: Sequence[Segment], x0: Tensor, run: Run, progress: Progress | None
) -> Solution:
    """The solution of a request that was checked; where it is wrong at the end, a second go says where it broke."""
    plain = not torch.is_grad_enabled() or in_forward_mode()
    # those who look on are shown the method's own steps, and these are the solution's where the kind has no other scheme
    if run.observers and kind != GRADIENTS["backprop"] and not (plain and kind.scheme(method) is method):
        solution = again_to_there(method, kind, segments, x0, run, progress)
    else:
        solution = differentiated(method, kind, segments, x0, run, progress)
    if not solution.status.good or (wrong := _wrong(solution, run)) is None:
        return solution
    if solution.status is not Status.SUCCESS:
        return dataclasses.replace(solution, status=wrong)
    with torch.no_grad():
        replay = march(kind.scheme(method), segments, x0, run.again(watch=True))
    if replay.status is not Status.SUCCESS:
        return replay
    # a field that is not the same twice may not break at all the second time
    return dataclasses.replace(solution, status=wrong, segment=len(segments) - 1, time=segments[-1].end)


def _wrong(solution: Solution, run: Run) -> Status | None:
    """What is wrong with a solve that ended where it should, if anything."""
    if run.apart is not None and float(run.apart) > 1:
        return Status.PAIR_APART
    return None if not run.check or batched() or finite(solution.x1) else Status.NON_FINITE
