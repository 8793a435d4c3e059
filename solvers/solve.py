"""The entry: a request is checked, integrated by one method and one kind of gradient, and a failure is explained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from solvers.dense import Times, at_times, check_times
from solvers.error_norm import Norm, get_norm
from solvers.errors import ConfigError, SolveError, unknown
from solvers.gradients import Gradient, get_gradient
from solvers.march import march, told
from solvers.method import Method
from solvers.request import check_bounds, check_callable, check_problem, check_solver
from solvers.run import Run, Save, finite
from solvers.segment import Segment
from solvers.solution import Solution, Status
from solvers.transforms import batched, check_steps, in_forward_mode

SAVE = ("ends", "segments", "steps")


def solve(
    segments: Sequence[Segment],
    x0: Float[Tensor, " *state"],
    *,
    method: str | Method = "euler",
    steps: int = 1,
    rtol: float | None = None,
    atol: float | None = None,
    gradient: str | Gradient = "backprop",
    save: Save = "ends",
    times: Times | None = None,
    throw: bool = True,
    norm: str | Norm = "rms",
    first_step: float | None = None,
    max_step: float | None = None,
    max_steps: int = 10_000,
    progress: Callable[[int], None] | None = None,
) -> Solution:
    """x1 = x0 + integral of the segments' fields: integrates dx/dt = field_k(t, x) over segment k for each k in turn.

    No step crosses a segment's end and no field is evaluated outside its own segment, so a method keeps its order over
    switches. `method` is a name of `METHODS` or a method object. Fixed-step methods take `steps` per segment; adaptive ones take
    `rtol` and `atol` (1e-6 and 1e-8 if not given), with the norm of error/(atol + rtol*abs(x)) kept below 1 in every step (`norm`
    is a name of `NORMS`, as "token" or "max" where few entries move, or a function of a tensor), and at most `max_steps` attempts
    per segment; where given, the first is of size `first_step`, and none above `max_step`.

    `gradient` is a name of `GRADIENTS` or such an object, as `Checkpoint(every=4)`: how the solve is differentiated. `save` says
    which states the solution holds, or `times` at which it does, by the method's own interpolation inside its steps: their number
    costs no evaluation. `progress(k)` is called when segment k is done.

    Errors: ConfigError for a request that makes no sense (unknown name, steps given to an adaptive method, tolerances to a
    fixed-step one or below the dtype's resolution, segments that do not meet, a gradient that the method does not have). A
    computation that fails raises SolveError, which carries the solution up to there; with `throw=False` the solution is returned
    and its `status` says what happened.

    The state is checked once, at the end; only if that finds a non-finite entry is the solve repeated, without gradient
    and checking each step, to say where it broke. So a good solve on a GPU waits for the device once.
    """
    check_problem(segments, x0)
    chosen, relative, absolute = check_solver(method, steps, rtol, atol, x0.dtype, max_steps)
    if save not in SAVE:
        raise unknown("save", save, SAVE)
    check_callable("progress", progress)
    bounds = check_bounds(chosen, first_step, max_step)
    kind = get_gradient(gradient)
    kind.check(chosen, segments)
    wanted = [] if times is None else check_times(times, segments, chosen, kind)
    if wanted and save != "ends":
        raise ConfigError(f"save = {save!r} and times both say which states to keep: give one of them")
    run = Run(int(steps), relative, absolute, norm=get_norm(norm), max_steps=int(max_steps), save=save, **bounds)
    run.wanted = [t for t in wanted if t not in (segments[0].start, segments[-1].end)]
    check_steps(chosen.adaptive)
    if torch.is_grad_enabled() and not in_forward_mode():
        solution = kind.integrate(chosen, segments, x0, run, progress)
    else:
        solution = march(kind.scheme(chosen), segments, x0, run, told(progress))
    if solution.status is Status.SUCCESS and (wrong := _wrong(solution, run)) is not None:
        with torch.no_grad():
            replay = march(kind.scheme(chosen), segments, x0, run.again(watch=True))
        # a field that is not the same twice may not break at all the second time
        broke = replay.status is not Status.SUCCESS
        end = len(segments) - 1, segments[-1].end
        solution = replay if broke else dataclasses.replace(solution, status=wrong, segment=end[0], time=end[1])
    if throw and solution.status is not Status.SUCCESS:
        raise SolveError(solution.message, solution)
    return at_times(solution, wanted) if wanted and solution.status is Status.SUCCESS else solution


def _wrong(solution: Solution, run: Run) -> Status | None:
    """What is wrong with a solve that got to its end, if anything."""
    if run.apart is not None and float(run.apart) > 1:
        return Status.PAIR_APART
    return None if batched() or finite(solution.x1) else Status.NON_FINITE
