"""The loop: one method takes a state through the segments. `Gradient` is the protocol of kinds that
use it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from solvers.changes import owned_state
from solvers.method import Method
from solvers.rounding import short_segment
from solvers.run import Run, Stopped, check_like, finite
from solvers.segment import Segment
from solvers.solution import Solution, Status

Progress = Callable[[int], None]
Done = Callable[[int, Tensor], None]
"""(k, x): called when segment k is done and ends in x."""


def march(
    method: Method,
    segments: Sequence[Segment],
    x0: Tensor,
    run: Run,
    progress: Progress | None = None,
    done: Done | None = None,
) -> Solution:
    """The solution over the segments, with the states that `run.save` selects. A failure sets its
    status.

    After segment k it calls `done(k, x)` and then `progress(k)`.
    """
    x = x0
    t = segments[0].start
    run.keep(t, x0)
    run.set_clock(segments, x0.dtype)
    status = Status.SUCCESS
    k = 0
    try:
        for k, segment in enumerate(segments):
            # torch cannot multiply by the steps of so long a segment
            too_long = abs(segment.end - segment.start) > torch.finfo(x.dtype).max
            if too_long or (run.watch and not finite(x)):
                raise Stopped(Status.NON_FINITE, t, x)
            if segment.enter is not None:
                entered = segment.entered(x)
                check_like("enter", entered, x)
                x = owned_state(entered, x)
            x = method.advance(segment, x, run)
            t = segment.end
            if run.save == "segments":
                run.keep(t, x)
            if done is not None:
                done(k, x)
            if progress is not None:
                progress(k)
    except Stopped as stopped:
        status = stopped.status
        # the initial state is saved already
        if run.save == "ends" and k > 0 and not status.good:
            run.keep(t, x)
        t = stopped.time
        x = stopped.x
        if status.good and run.saved[-1].time != t:
            run.keep(t, x)
    else:
        if run.save == "ends":
            run.keep(t, x)
    if status is Status.SUCCESS:
        return run.solution(x)
    solution = run.solution(x, status, segment=k, time=t)
    if status is Status.STEP_UNDERFLOW:
        solution = dataclasses.replace(solution, too_short=short_segment(segments[k]))
    return solution


def with_graphs(segment: Segment) -> Segment:
    """The segment for a solve without a graph that is then repeated with one: its evaluations have
    a graph each.

    A field may compute a tensor once, at any time, and keep it (torch.nn.utils.parametrize.cached).
    Computed without a graph, it would have no derivative in the repeated solve.
    """

    def field(t: Tensor, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # an implicit method takes derivatives by x
            return segment.acting(t, x)
        with torch.enable_grad():
            v = segment.acting(t, x.detach())
        if not isinstance(v, Tensor):
            return v  # the caller refuses it
        return v.detach()

    return segment.with_maps(acting=field)


@runtime_checkable
class Gradient(Protocol):
    """The protocol of a kind of gradient.

    A `detached` kind computes the solution without a graph, and calls the fields again, outside
    their modules' own passes, for the gradient. A compiler cannot trace it, and it cannot work with
    wrappers that free weights between the passes. A kind with a true attribute `dense` also
    differentiates states inside steps.
    """

    @property
    def detached(self) -> bool:
        return False

    def check(self, method: Method, segments: Sequence[Segment]) -> None:
        """Raises ConfigError if the kind does not work here, and names one that does."""
        return

    def scheme(self, method: Method) -> Method:
        """The method that computes the solution: by default the given one."""
        return method

    def integrate(
        self,
        method: Method,
        segments: Sequence[Segment],
        x0: Tensor,
        run: Run,
        progress: Progress | None,
    ) -> Solution:
        """The solution, differentiable if it succeeds."""
