"""The loop: an initial state goes through the segments, one after the other, by one method."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from solvers.errors import SolveError, unknown
from solvers.gradients import Advance, get_gradient
from solvers.methods import Method
from solvers.request import check_problem, check_solver
from solvers.run import Run, Stopped, finite
from solvers.segment import Segment
from solvers.solution import Solution, Status

SAVE = ("ends", "segments", "steps")
Save = Literal["ends", "segments", "steps"]


def solve(
    segments: Sequence[Segment],
    x0: Float[Tensor, "*state"],
    *,
    method: str | Method = "euler",
    steps: int = 1,
    rtol: float | None = None,
    atol: float | None = None,
    gradient: str = "backprop",
    save: Save = "ends",
    throw: bool = True,
    max_steps: int = 10_000,
    progress: Callable[[int], None] | None = None,
) -> Solution:
    """x1 = x0 + integral of the segments' fields: integrates dx/dt = field_k(t, x) over segment k for each k in turn.

    No step crosses a segment's end and no field is evaluated outside its own segment, so a method keeps its order over
    switches. `method` is a name of `METHODS` or a method object. Fixed-step methods take `steps` per segment; adaptive ones take
    `rtol` and `atol` (1e-6 and 1e-8 if not given), with the RMS over the whole state of error/(atol + rtol*abs(x)) kept
    below 1 in every step and at most `max_steps` attempts per segment. `save` says which states the solution holds.
    `progress(k)` is called when segment k is done.

    Errors: ConfigError for a request that makes no sense (unknown name, steps given to an adaptive method, tolerances to a
    fixed-step one or below the dtype's resolution, segments that do not meet). A computation that fails raises SolveError,
    which carries the solution up to there; with `throw=False` the solution is returned and its `status` says what happened.

    The state is checked once, at the end; only if that finds a non-finite entry is the solve repeated, without gradient
    and checking each step, to say where it broke. So a good solve on a GPU waits for the device once.
    """
    check_problem(segments, x0)
    chosen, relative, absolute = check_solver(method, steps, rtol, atol, x0.dtype, max_steps)
    if save not in SAVE:
        raise unknown("save", save, SAVE)
    advance = get_gradient(gradient)(chosen.advance)

    def integrate(watch: bool) -> Solution:
        run = Run(steps, relative, absolute, max_steps=max_steps, watch=watch, keep_steps=save == "steps")
        return _integrate(advance, segments, x0, run, save, None if watch else progress)

    solution = integrate(watch=False)
    if solution.status is Status.SUCCESS and not finite(solution.x1):
        with torch.no_grad():
            replay = integrate(watch=True)
        # a field that is not the same twice may not break at all the second time
        broke = replay.status is not Status.SUCCESS
        end = len(segments) - 1, segments[-1].end
        solution = replay if broke else dataclasses.replace(solution, status=Status.NON_FINITE, segment=end[0], time=end[1])
    if throw and solution.status is not Status.SUCCESS:
        raise SolveError(solution.message, solution)
    return solution


def _integrate(
    advance: Advance, segments: Sequence[Segment], x0: Tensor, run: Run, save: Save, progress: Callable[[int], None] | None
) -> Solution:
    x, t = x0, segments[0].start
    saved = [(t, x0)]
    status, where = Status.SUCCESS, None
    try:
        for k, segment in enumerate(segments):
            where = k
            if run.watch and not finite(x):
                raise Stopped(Status.NON_FINITE, t, x)
            x = advance(segment, x if segment.enter is None else segment.enter(x), run)
            t = segment.end
            if save == "segments":
                saved.append((t, x))
            if progress is not None:
                progress(k)
        where = None
    except Stopped as stopped:
        status = stopped.status
        if save == "ends" and where:
            saved.append((t, x))
        t, x = stopped.time, stopped.x
    else:
        if save == "ends":
            saved.append((t, x))
    times, states = zip(*(saved + run.kept), strict=True)
    return Solution(x, times, states, status, run.stats, where, None if status is Status.SUCCESS else t)
