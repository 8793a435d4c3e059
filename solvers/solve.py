"""The loop: an initial state goes through the segments, one after the other, by one method."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from solvers.errors import ConfigError, SolveError, unknown
from solvers.gradients import Advance, get_gradient
from solvers.methods import Method, get_method
from solvers.run import Run, Stopped, finite
from solvers.segment import Segment, check_chain
from solvers.solution import Solution, Status

RTOL, ATOL = 1e-6, 1e-8
"""Tolerances of an adaptive method that is given none."""

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
    chosen = get_method(method)
    check_chain(segments)
    tolerances = _check(chosen, str(method), x0, steps, rtol, atol, max_steps)
    if save not in SAVE:
        raise unknown("save", save, SAVE)
    advance = get_gradient(gradient)(chosen.advance)

    def integrate(watch: bool) -> Solution:
        run = Run(steps, *tolerances, max_steps=max_steps, watch=watch, keep_steps=save == "steps")
        return _integrate(advance, segments, x0, run, save, progress)

    solution = integrate(watch=False)
    if solution.status is Status.SUCCESS and not finite(solution.x1):
        with torch.no_grad():
            solution = integrate(watch=True)
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
            where, t = k, segment.start
            if run.watch and not finite(x):
                raise Stopped(Status.NON_FINITE, t, x)
            entered = x if segment.enter is None else segment.enter(x)
            x = advance(segment, entered, run)
            t = segment.end
            if save == "segments":
                saved.append((t, x))
            if progress is not None:
                progress(k)
        where = None
        if save == "ends":
            saved.append((t, x))
    except Stopped as stopped:
        status, t, x = stopped.status, stopped.time, stopped.x
    times, states = zip(*(saved + run.kept), strict=True)
    return Solution(x, times, states, status, run.stats, where, None if status is Status.SUCCESS else t)


def _check(
    method: Method, name: str, x0: Tensor, steps: int, rtol: float | None, atol: float | None, max_steps: int
) -> tuple[float, float]:
    if not isinstance(x0, Tensor) or not x0.is_floating_point() or x0.numel() == 0:
        what = f"{tuple(x0.shape)} of {x0.dtype}" if isinstance(x0, Tensor) else type(x0).__name__
        raise ConfigError(f"the initial state is {what}: give a non-empty tensor of a floating type")
    for what, count in (("steps", steps), ("max_steps", max_steps)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"{what} = {count!r}: give a whole number of at least 1")
    if not method.adaptive:
        if rtol is not None or atol is not None:
            raise ConfigError(
                f"method {name!r} has fixed steps and takes no rtol or atol: give steps, or use an adaptive method, as tsit5"
            )
        return RTOL, ATOL
    if steps != 1:
        raise ConfigError(f"method {name!r} chooses its own steps and takes no steps = {steps}: give rtol and atol, or use rk4")
    rtol, atol = RTOL if rtol is None else rtol, ATOL if atol is None else atol
    for what, value in (("rtol", rtol), ("atol", atol)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 < value < math.inf):
            raise ConfigError(f"{what} = {value!r}: give a positive finite number")
    resolution = 4 * torch.finfo(x0.dtype).eps
    if rtol < resolution:
        dtype = str(x0.dtype).removeprefix("torch.")
        raise ConfigError(f"rtol = {rtol:g} is below what {dtype} resolves ({resolution:.1g}): raise it or use float64")
    return float(rtol), float(atol)
