"""Gradient by the adjoint ODE: the state and its costate are solved backward, without storing the
steps of the forward solve.

On a segment with field v(t, x; theta), a(t) = dL/dx(t) obeys da/dt = -(dv/dx)' a, and dL/dtheta =
integral of (dv/dtheta)' a dt. For a complex z, dL/dz is dL/d(Re z) + i dL/d(Im z), as in autograd,
and ' is the adjoint over the reals.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from solvers.capture import Captured, untraced, without_graph
from solvers.chain import Arrival, Backward, Chain
from solvers.checked import checked
from solvers.errors import ConfigError, SolveError, check_positive, shown
from solvers.kept import watched
from solvers.march import Gradient, Progress, march
from solvers.method import Method, has_capability
from solvers.run import Run
from solvers.segment import Segment, Time
from solvers.solution import Solution, Status
from solvers.transforms import check_no_transform

FINER = 0.1
"""Factor on the tolerances of an adaptive method, to estimate its error."""


@dataclasses.dataclass(frozen=True)
class AdjointError:
    """The error of a backward solve against the exact adjoint ODE, from a second backward solve
    with finer steps.

    `gradient` is the relative error of all gradients together (initial state and parameters),
    estimated from twice the steps (a tenth of the tolerances for an adaptive method). `state` is
    the largest relative distance of the state solved backward from a kept one. The forward solve's
    own error is not included.
    """

    gradient: float
    state: float


Report = Callable[[AdjointError], object]


@checked
@dataclasses.dataclass(frozen=True)
class Adjoint(Gradient):
    """The gradient of the ODE's solution, by the same method backward. Its error has the method's
    order.

    It keeps the state at each segment's start, whatever the number of steps; the backward solve
    continues from that state. With `restore=False` it keeps the last state only, and one for each
    segment that begins with a projection (`enter`), which has no inverse. Errors of the state then
    add up over the segments, or grow if the field contracts.

    An adaptive method controls the error of state and costate, but not that of the parameters'
    integral (Kidger et al. 2021). With `report`, each backward pass is repeated with finer steps,
    and `report(AdjointError)` is called; this takes three times the cost. `rtol`, `atol` and
    `method` are those of the backward solve; None takes those of the forward solve.
    """

    report: Report | None = None
    restore: bool = True
    rtol: float | None = None
    atol: float | None = None
    method: Method | None = None

    def __post_init__(self) -> None:
        for name, tolerance in (("rtol", self.rtol), ("atol", self.atol)):
            if tolerance is not None:
                check_positive(f"the adjoint's {name}", tolerance)
        if self.method is not None and not isinstance(self.method, Method):
            raise ConfigError(
                f"method = {shown(self.method)} of the adjoint: give a method, as METHODS['rk4'],"
                " or None"
            )

    def check(self, method: Method, segments: Sequence[Segment]) -> None:
        """Raises ConfigError for implicit methods, and for segments that project the state after
        each step, which is no step of an ODE.
        """
        if has_capability(method, "implicit") or has_capability(self.method, "implicit"):
            raise ConfigError(
                "gradient 'adjoint' solves an ODE made of the field's derivatives, which an"
                " implicit method would differentiate again: use gradient='backprop' or"
                " 'checkpoint'"
            )
        for k, segment in enumerate(segments):
            if segment.project is not None:
                raise ConfigError(
                    f"gradient 'adjoint' solves an ODE, and segment {k} projects the state after"
                    " each step (a norm around it): use gradient='checkpoint', or the projected"
                    " ODE, depth.segments(continuous=True)"
                )

    detached = True
    dense = True

    @untraced
    def integrate(
        self,
        method: Method,
        segments: Sequence[Segment],
        x0: Tensor,
        run: Run,
        progress: Progress | None,
    ) -> Solution:
        check_no_transform("adjoint")
        chain = Chain([x0], run)
        back_method = method
        if self.method is not None:
            back_method = self.method
        # of the segments since the last node: the states at their starts, the captured tensors, the
        # accepted steps at their ends
        start = x0.detach()
        starts = {0: start}
        captured: Captured = {}
        counts: list[int] = []
        request = run.again(save="ends")
        if run.save == "steps":
            request.steps = 1
        if self.rtol is not None:
            request.rtol = self.rtol
        if self.atol is not None:
            request.atol = self.atol

        def done(k: int, x: Tensor) -> None:
            captured[k] = capture.take()
            counts.append(run.stats.accepted)
            # a report compares all gradients together, so with one the whole way back is one node
            if self.report is None or k == len(segments) - 1:
                backward = _AdjointPass(
                    method=back_method,
                    segments={i: segments[i] for i in captured},
                    stored=list(starts),
                    counts=list(counts),
                    request=request,
                    report=self.report,
                    baton=chain.baton,
                )
                chain.add([x], list(starts.values()), dict(captured), backward)
                starts.clear()
                captured.clear()
                counts.clear()
            for following in segments[k + 1 : k + 2]:
                if self.restore or following.enter is not None:
                    starts[k + 1] = x

        forward = [watched(segment, chain.kept) for segment in segments]
        with without_graph(x0.device) as capture:
            solution = march(method, forward, start, run, progress, done)
        if solution.status is Status.SUCCESS:
            return chain.end(solution, x0, [solution.x1])
        return solution


Stops = dict[int, list[tuple[float, Tensor | None]]]
"""By a segment's number: the times of its saved states, and their gradients."""


@dataclasses.dataclass(frozen=True)
class _AdjointPass:
    """The backward solve over the segments (by their numbers) of one autograd node: a `Pass`.

    `stored` are the segments whose starts are stored. `counts` are the accepted steps at each
    segment's end.
    """

    method: Method
    segments: dict[int, Segment]
    stored: Sequence[int]
    counts: Sequence[int]
    request: Run
    report: Report | None
    baton: list[Sequence[Any]]

    def __call__(
        self,
        state: Backward,
        stored: Sequence[Tensor],
        arrivals: Sequence[Arrival],
        after: Sequence[Tensor],
    ) -> Sequence[Tensor]:
        """dL/dx at the start of the segments from that at their end."""
        numbers = list(self.segments)
        stops: Stops = {k: [] for k in numbers}
        for time, steps, gradient in arrivals:
            stops[numbers[bisect_left(self.counts, steps)]].append((time, gradient))
        starts = dict(zip(self.stored, stored, strict=True))
        if len(self.baton[0]) == 1:  # the first pass begins at what `Chain.end` stored
            (x1,) = self.baton[0]
            step_size = None
        else:
            x1, step_size = self.baton[0]
        request = self.request.again(controlled=(2, *x1.shape))
        run = request.again(step_size=step_size)
        x, a, misses = self._back(x1, after[0], stops, starts, state, run)
        # an adaptive method continues with its step size on the way back too
        self.baton[0] = (x, run.step_size)
        if self.report is not None:
            # the error over the difference of the coarser solve from the finer one
            if self.method.adaptive:
                finer = request.again(rtol=FINER * request.rtol, atol=FINER * request.atol)
                factor = 1.0
            else:
                finer = request.again(steps=2 * request.steps)
                factor = 2**self.method.order / (2**self.method.order - 1)
            fine = Backward(state.captured, state.tensors, state.kept)
            _, a_fine, _ = self._back(x1, after[0], stops, starts, fine, finer)
            pairs = [(a, a_fine), *zip(state.gradients, fine.gradients, strict=True)]
            gradient_error = _relative_difference(pairs, factor)
            self.report(AdjointError(gradient_error, max(float(miss) for miss in misses)))
        return (a,)

    def _back(
        self,
        x: Tensor,
        a: Tensor,
        stops: Stops,
        starts: dict[int, Tensor],
        state: Backward,
        run: Run,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """x and a = dL/dx at the start from those at the end, and the relative miss of each stored
        state.
        """
        misses = []
        for k, segment in reversed(self.segments.items()):
            t: Time = segment.ends[1]
            for stop, gradient in reversed(stops[k]):
                if stop != float(t):
                    x, a = self._segment(k, t, stop, x, a, state, run)
                    t = stop
                if gradient is not None:
                    a = a + gradient
            x, a = self._segment(k, t, segment.ends[0], x, a, state, run)
            if k in starts:
                solved = x
                x = starts[k]
                entered = x
                if segment.enter is not None:
                    entered, a = state.pull(k, segment.entered, x, a)
                misses.append(torch.linalg.vector_norm(solved - entered) / _length(entered))
        return x, a, misses

    def _segment(
        self, k: int, t1: Time, t0: Time, x: Tensor, a: Tensor, state: Backward, run: Run
    ) -> tuple[Tensor, Tensor]:
        """(x, a) at t0 from (x, a) at t1. Adds the parameters' integral to their gradients."""
        field = self.segments[k].acting
        tensors = state.captured[k]
        count = x.numel()
        dtype = x.dtype
        sums = [_entries(torch.zeros_like(tensor), dtype) for tensor in tensors]
        used: set[int] = set()

        def augmented(t: Tensor, s: Tensor) -> Tensor:
            state_part = s[:count].view_as(x)
            costate_part = s[count : 2 * count].view_as(x)
            v, pulled, parts = state.vjp(k, lambda x: field(t, x), state_part, costate_part)
            rates = [v, -pulled]
            for i, (tensor, part) in enumerate(zip(tensors, parts, strict=True)):
                if part is None:
                    rates.append(torch.zeros_like(tensor))
                else:
                    used.add(i)
                    rates.append(-part)
            return torch.cat([_entries(rate, dtype) for rate in rates])

        # the equation is linear in a: scaled to the state's size, the same tolerances suit both
        scale = x.new_ones(())
        if self.method.adaptive:
            scale = _length(a) / _length(x)
        flat = torch.cat([x.reshape(-1), (a / scale).reshape(-1), *sums])
        run.saved = []
        solution = march(self.method, [Segment(t1, t0, augmented)], flat, run)
        if solution.status is not Status.SUCCESS:
            raise SolveError(f"the adjoint of segment {k}: {solution.message}", solution)
        sizes = [count, count, *(len(entries) for entries in sums)]
        end, costate, *integrals = torch.split(solution.x1, sizes)
        for i, (tensor, integral) in enumerate(zip(tensors, integrals, strict=True)):
            if i in used:
                state.add(tensor, _from_entries(scale * integral, tensor))
        return end.view_as(x), scale * costate.view_as(x)


def _relative_difference(
    pairs: Sequence[tuple[Tensor | None, Tensor | None]], factor: float
) -> float:
    """factor |g - f|/|f| of all pairs (g, f) together, or 0 if |f| is zero."""
    size = math.hypot(*(float(torch.linalg.vector_norm(f)) for _, f in pairs if f is not None))
    if size == 0:
        return 0.0
    differences = [g - f for g, f in pairs if g is not None and f is not None]
    gap = math.hypot(*(float(torch.linalg.vector_norm(d)) for d in differences))
    return factor * gap / size


def _entries(z: Tensor, dtype: torch.dtype) -> Tensor:
    """The entries of a tensor in a real or complex type. A real type gets the real and imaginary
    parts of a complex z.
    """
    if z.is_complex() and not dtype.is_complex:
        z = torch.view_as_real(z.resolve_conj())
    return z.reshape(-1).to(dtype)


def _from_entries(entries: Tensor, z: Tensor) -> Tensor:
    """A tensor like z from its `_entries`."""
    if z.is_complex() and not entries.is_complex():
        entries = torch.view_as_complex(entries.view(-1, 2))
    if entries.is_complex() and not z.is_complex():
        entries = entries.real
    return entries.to(z.dtype).view(z.shape)


def _length(x: Tensor) -> Tensor:
    """|x|, or 1 if that is zero."""
    length = torch.linalg.vector_norm(x)
    return torch.where(length == 0, torch.ones_like(length), length)
